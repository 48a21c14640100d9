// A snapshot a second over one connection; whoever comes back after a pause is told so.
(() => {
  const live = document.getElementById("live");
  let last = null;
  const say = (text, look) => { live.textContent = text; live.className = look; };
  function draw() {
    if (!last) return;
    for (const section of sections.all) section(last);
    document.body.dataset.drawn = String(1 + Number(document.body.dataset.drawn || 0));
  }
  const source = new EventSource("/events");
  source.onmessage = (event) => { last = JSON.parse(event.data); say("live", "on"); if (!document.hidden) draw(); };
  source.onerror = () => say("no connection to the gateway", "off");
  document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
  addEventListener("resize", draw);
})();
