/* Browsers refuse workers on pages from a disk. There, an iframe runs the script of the search instead. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inner = frame.contentWindow;
      this.ready = new Promise((resolve) => { frame.onload = resolve; });
      addEventListener("message", (event) => {
        if (event.source === this.inner) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      const inside = this.inner.document;
      inside.open();
      inside.write(`<script>postMessage = (data) => parent.dispatchEvent(
        new MessageEvent("message", { data, source: window }))</` + `script><script src="${url}"></` + "script>");
      inside.close();
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
