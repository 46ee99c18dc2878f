// What the search of a built site finds: the pages by each query, the best first. Runs the theme's own script, as a browser does.
const [fs, path, vm] = ["fs", "path", "vm"].map(require);
const [site, ...queries] = process.argv.slice(2);

const folder = path.join(site, "assets/javascripts/workers");
const script = fs.readdirSync(folder).find(name => name.endsWith(".js"));
const index = fs.readFileSync(path.join(site, "search/search_index.js"), "utf8");

let receive, answer;
const worker = { console, addEventListener: (_, listener) => (receive = listener), postMessage: message => (answer = message) };
worker.self = worker;
vm.createContext(worker);
vm.runInContext(fs.readFileSync(path.join(folder, script), "utf8"), worker);
vm.runInContext(index, worker);

(async () => {
  await receive({ data: { type: 0, data: { ...worker.__index, options: { suggest: false } } } });
  const found = {};
  for (const query of queries) {
    await receive({ data: { type: 2, data: query } });
    found[query] = answer.data.items.map(sections => sections[0].location.split("#")[0]);
  }
  console.log(JSON.stringify(found));
})();
