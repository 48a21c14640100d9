// Draws a snapshot per second from one event stream, and shows whether the stream is connected.
(() => {
  const live = document.getElementById("live");
  let last = null;
  const status = (text, look) => { live.textContent = text; live.className = look; };
  function draw() {
    if (!last) return;
    for (const section of sections.all) section(last);
    document.body.dataset.drawn = String(1 + Number(document.body.dataset.drawn || 0));
  }
  async function showUser() {
    const answer = await fetch("/session").catch(() => null);
    if (answer && answer.status === 401) location.assign("/login");
    const user = answer && answer.ok ? await answer.json() : {};
    document.getElementById("user").hidden = !user.csrf;
    document.getElementById("user-name").textContent = `${user.name} (${user.role})`;
  }
  showUser();
  const source = new EventSource("/events");
  source.onmessage = (event) => { last = JSON.parse(event.data); status("live", "on"); if (!document.hidden) draw(); };
  source.onerror = () => { status("no connection to the gateway", "off"); showUser(); };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
  addEventListener("resize", draw);
})();
