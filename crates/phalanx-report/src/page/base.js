"use strict";
// Text of files is shown by `textContent` only; no HTML is made of strings.
const NS = "http://www.w3.org/2000/svg";
const page = document.getElementById("page"), tip = document.getElementById("tip");
const isObject = (v) => v !== null && typeof v === "object" && !Array.isArray(v);
const isNumber = (v) => typeof v === "number" && isFinite(v);

/** An element: attributes, then children, which are text or elements. */
function el(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:") ? document.createElementNS(NS, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.flat());
  return made;
}
/** A count in full, thousands apart. */
const count = (v) => isNumber(v) ? v.toLocaleString("en") : "–";
/** A number in four significant digits. Whole ones below a million are given in full. */
function short(v) {
  if (!isNumber(v)) return "–";
  const size = Math.abs(v), rounded = +v.toPrecision(4);
  if (size >= 1e6 || (size && size < 1e-3)) return rounded.toExponential().replace("e+", "e");
  return (Number.isInteger(v) ? v : rounded).toLocaleString("en", { maximumFractionDigits: 10 });
}
const percent = (v) => isNumber(v) ? (100 * v).toFixed(2) + " %" : "–";
const shown = (v) => v === undefined || v === null ? "–" : typeof v === "object" ? JSON.stringify(v) : String(v);
/** `text` that may be wrapped after `_` and `/`. */
const words = (text) => String(text).split(/(?<=[_/])/).flatMap((word, i) => i ? [el("wbr"), word] : [word]);
/** A number or text for people; what is shortened has the full value as its title. */
function value(v) {
  const full = shown(v);
  const cut = typeof v === "number" ? short(v) : /^[0-9a-f]{40,}$/.test(full) ? full.slice(0, 12) + "…"
    : full.replace(/(?<![\w.])\d{16,}(\.\d+)?(?![\w.])/g, (digits) => short(+digits)).replace(/(?<![\w.])\d*\.\d{5,}(?![\w.])/g, (digits) => short(+digits));
  return cut === full ? el("span", {}, words(full)) : el("span", { title: full }, cut);
}
const table = (head, rows) => el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head.map((h) => el("th", {}, h)))),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el(i ? "td" : "th", {}, cell)))))));
const select = (options, change, chosen) => el("select", { onchange: (e) => change(e.target.value) }, options.map(([value, text]) => el("option", { value, selected: value === chosen && "" }, text)));
const key = (color) => el("span", { class: "key", style: `background:${color}` });
const note = (...text) => el("p", { class: "soft" }, ...text);
const pairs = (entries) => el("div", { class: "settings" }, entries.map(([name, v]) => el("div", {}, el("span", {}, words(name)), el("b", {}, value(v)))));

/** The least or greatest of lists of any length. */
const fold = (f, lists, start) => lists.reduce((a, list) => list.reduce((b, v) => f(b, v), a), start);
/** The first place in ascending `x` with at least `value`. */
function lower(x, value) {
  let low = 0, high = x.length;
  while (low < high) { const mid = (low + high) >> 1; if (x[mid] < value) low = mid + 1; else high = mid; }
  return low;
}

// The runs that are shown: `render` gives them a `label`, unlike those of the others, and a `color`.
let runs = [];
const several = () => runs.length > 1;
/** A heading of one of several runs. */
const ofRun = (title, run) => el("h2", {}, title + (several() ? ": " + run.label : ""));

/** A class by its name, where the data set has names. White space is made visible. */
const className = (run, c) => Array.isArray(run.summary.classes) && typeof run.summary.classes[c] === "string"
  ? run.summary.classes[c].replace(/\n/g, "\\n").replace(/\r/g, "\\r").replace(/\t/g, "\\t").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) : String(c);

/** What the user has chosen. It stays when the data changes. `zoom`: a range of `axis`, of all charts that have it. */
const view = { smoothing: 0, axis: "step", marks: true, hidden: new Set(), open: new Map(), zoom: null };
const isDrawn = (run) => !view.hidden.has(run.label);
/** A part that can be folded; it stays as it is, found by `name`, when the data changes. */
function folding(name, title, open, ...children) {
  const isOpen = view.open.get(name) ?? open;
  return el("details", { open: isOpen && "", ontoggle: (e) => { view.open.set(name, e.target.open); redraw(); } }, el("summary", {}, title), ...children);
}

/** A part of the page: `make` gives its elements, again whenever what `data` gives has changed. */
function part(data, make) {
  const root = el("section");
  let before;
  return { root, update() {
    const now = JSON.stringify(data());
    if (now === before) return;
    before = now;
    root.replaceChildren(...make().flat());
  } };
}
/** A part of each run; `make` gives one run's, with `root` and `update(run)`. It keeps what the user has chosen. */
function partOfRuns(make) {
  const root = el("div"), made = new Map();
  return { root, update() {
    const parts = runs.map((run) => {
      if (!made.has(run.label)) made.set(run.label, make(run));
      made.get(run.label).update(run);
      return made.get(run.label).root;
    });
    if (parts.length !== root.children.length || parts.some((p, i) => p !== root.children[i])) root.replaceChildren(...parts);
  } };
}
