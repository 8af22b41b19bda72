"use strict";
// What the live pages have in common: the stream of changes, and when the page is drawn.

// The secret is in a cookie now.
if (/[?&]key=/.test(location.search)) history.replaceState(null, "", location.pathname);

let connection = "connecting";

/** Adds the points of `changes` to `curves`. */
function grow(curves, changes) {
  for (const [name, c] of Object.entries(changes ?? {})) {
    const old = curves[name];
    if (c.all || !old) curves[name] = { x: c.x, y: c.y, total: c.total };
    else { old.x.push(...c.x); old.y.push(...c.y); old.total = c.total; }
  }
}
const seconds_ = (s) => !isNumber(s) ? "–" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.floor(s / 3600)} h ${Math.round(s % 3600 / 60)} min` : `${Math.round(s / 86400)} days`;

/** Has `draw` called at most once a second, less often where it takes long, and not while nobody looks. */
function drawing(draw) {
  let isDue = false, drawnAt = 0, took = 0;
  const later = () => {
    if (isDue || document.hidden) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      drawnAt = Date.now();
      draw();
      took = Date.now() - drawnAt;
    }, Math.max(0, drawnAt + Math.max(1000, 5 * took) - Date.now()));
  };
  document.addEventListener("visibilitychange", later);
  return later;
}

/** Hands each message to `take`, with whether it is the whole state; `later` draws; `isOver`: nothing comes any more. */
function listen(take, later, isOver = () => false) {
  const source = new EventSource("events"), clock = setInterval(later, 1000);
  const close = () => { source.close(); clearInterval(clock); };
  const took = (whole) => (event) => {
    connection = "open";
    take(JSON.parse(event.data), whole);
    if (isOver()) close();
    later();
  };
  source.addEventListener("whole", took(true));
  source.addEventListener("change", took(false));
  source.onerror = () => {
    connection = "lost";
    later();
    // Refused: the browser does not try again by itself.
    if (source.readyState === EventSource.CLOSED && !isOver()) { close(); setTimeout(() => listen(take, later, isOver), 5000); }
  };
}
