// The site's search runs in a worker, which browsers refuse to a page that is opened from a folder. There a hidden frame, which is
// allowed, runs the same script and exchanges the same messages.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      this.waiting = []; // messages from before the frame has loaded; null from then on
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      // In the frame the name `postMessage` is the worker's, which sends to the page. The frame's own receives.
      this.frame.srcdoc =
        `<script>const postMessage = message => parent.postMessage(message, "*")</script><script src="${new URL(script, location)}"></script>`;
      this.frame.addEventListener("load", () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach(message => this.postMessage(message));
      });
      window.addEventListener("message", event => {
        if (event.source === this.frame.contentWindow)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      document.body.append(this.frame);
    }

    postMessage(message) {
      if (this.waiting) this.waiting.push(message);
      else this.frame.contentWindow.postMessage(message, "*");
    }

    terminate() {
      this.frame.remove();
    }
  };
