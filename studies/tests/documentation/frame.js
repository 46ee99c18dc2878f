// Runs docs/javascripts/iframe-worker.js in a page that has as much of a browser as it needs, and prints what a worker answers.
const [fs, vm] = ["fs", "vm"].map(require);
const source = fs.readFileSync(process.argv[2], "utf8");

class Message extends Event {
  constructor(name, { data, source }) {
    super(name);
    Object.assign(this, { data, source });
  }
}

// A frame runs the scripts of its document in a global scope of its own, where it receives what is posted to its window.
class Frame extends EventTarget {
  constructor(page) {
    super();
    this.page = page;
  }

  load() {
    const listeners = [];
    const window = { addEventListener: (_, listener) => listeners.push(listener) };
    window.postMessage = data => listeners.forEach(listener => listener({ data }));
    window.parent = { postMessage: data => this.page.dispatchEvent(new Message("message", { data, source: window })) };
    this.contentWindow = vm.createContext(window);
    const [, first, address] = this.srcdoc.match(/^<script>(.*?)<\/script><script src="(.*?)"><\/script>$/);
    vm.runInContext(first, window);
    if (address !== "file:///site/search.js") throw new Error(address);
    vm.runInContext("addEventListener('message', event => postMessage('answer to ' + event.data))", window);
    this.dispatchEvent(new Event("load"));
  }
}

function answers(protocol) {
  const page = new EventTarget(), frames = [], found = [];
  page.document = { createElement: () => frames[frames.push(new Frame(page)) - 1], body: { append() {} } };
  page.location = { protocol, toString: () => `${protocol}///site/index.html` };
  Object.assign(page, { window: page, EventTarget, MessageEvent: Message, URL });
  vm.runInContext(source, vm.createContext(page));
  if (page.Worker === undefined) return found;
  const worker = new page.Worker("search.js");
  worker.addEventListener("message", event => found.push(event.data));
  worker.postMessage("early");
  frames[0].load();
  worker.postMessage("late");
  return found;
}

console.log(JSON.stringify({ "file:": answers("file:"), "https:": answers("https:") }));
