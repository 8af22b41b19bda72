"use strict";
// Text of files is shown by `textContent` only; no HTML is made of strings.
const runs = JSON.parse(document.getElementById("data").textContent);
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
const short = (v) => !isNumber(v) ? "–" : Number.isInteger(v) ? v.toLocaleString("en") : Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? (+v.toPrecision(4)).toExponential() : String(+v.toPrecision(5));
const percent = (v) => isNumber(v) ? +(100 * v).toFixed(2) + " %" : "–";
const shown = (v) => v === undefined || v === null ? "–" : typeof v === "object" ? JSON.stringify(v) : String(v);
const table = (head, rows) => el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head.map((h) => el("th", {}, h)))),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el(i ? "td" : "th", {}, cell)))))));
const select = (options, change) => el("select", { onchange: (e) => change(e.target.value) }, options.map(([value, text]) => el("option", { value }, text)));

// What each run is called and how it is drawn.
runs.forEach((run, i) => {
  run.summary = isObject(run.summary) ? run.summary : {};
  run.color = `var(--c${i % 8})`;
  run.drawn = true;
  const same = runs.filter((other) => other.name === run.name);
  run.label = same.length > 1 ? `${run.name} (${same.indexOf(run) + 1})` : run.name;
});
const several = runs.length > 1;
const key = (run) => el("span", { class: "key", style: `background:${run.color}` });

// Results and settings. What is not a known result is a setting.
const last = (run, name) => run.curves[name] ? run.curves[name].y.at(-1) : undefined;
const results = [
  ["accuracy", (r) => percent(r.summary.accuracy ?? last(r, "accuracy"))],
  ["test loss", (r) => short(r.summary.test_loss ?? last(r, "test_loss"))],
  ["train loss", (r) => short(last(r, "train_loss") ?? last(r, "loss"))],
  ["images/s", (r) => short(isNumber(r.summary.images_per_s) ? Math.round(r.summary.images_per_s) : undefined)],
  ["total time", (r) => isNumber(r.summary.total_s) ? `${r.summary.total_s.toFixed(1)} s` : "–"],
  ["skipped steps", (r) => short(r.summary.skipped_steps)],
  ["weights", (r) => typeof r.summary.weights_sha256 === "string" ? r.summary.weights_sha256.slice(0, 12) : "–"],
];
const RESULTS = /^(accurac(y|ies)|class_accuracies|confusion|arguments|images_per_s|sent_bytes|skipped_steps|exposed_comm_percent|peak_rss_mib|test_.*|.*_s|.*_sha256)$/;
function settings(run) {
  const all = {};
  for (const [name, value] of Object.entries(run.summary)) if (!RESULTS.test(name)) all[name] = shown(value);
  const words = Array.isArray(run.summary.arguments) ? run.summary.arguments.map(String) : [];
  words.forEach((word, i) => {
    if (!word.startsWith("--") || word === "--") return;
    const [, flag, value] = word.match(/^(--[^=]*)=?([^]*)$/), next = words[i + 1];
    const typed = word.includes("=") ? value : next === undefined || next.startsWith("--") ? "on" : next;
    if (all[flag.slice(2).replaceAll("-", "_")] !== typed) all[flag.replaceAll("_", "-")] = typed;
  });
  return all;
}
const otherResults = (run) => Object.entries(run.summary).filter(([name, value]) => RESULTS.test(name) && typeof value !== "object" && name !== "test_s");

const recipe = [...new Set(runs.map((r) => r.summary.recipe).filter(Boolean).map(String))].join(", ");
const title = (recipe ? recipe + ": " : "") + runs.map((r) => r.label).join(", ");
document.title = title + " – Phalanx report";
page.append(el("h1", {}, title));
const finished = (r) => Object.keys(r.summary).length ? "" : " (no summary: not finished)";
if (!several) {
  const run = runs[0];
  page.append(el("div", { class: "soft" }, shown(run.summary.transport ?? "") + finished(run)));
  page.append(el("div", { class: "cards" }, results.map(([name, text]) => [name, text(run)]).filter(([, text]) => text !== "–")
    .map(([name, text]) => el("div", {}, el("small", {}, name), el("b", text.length > 9 ? { style: "font-size:.95rem" } : {}, text)))));
  const pair = ([name, value]) => el("div", {}, el("span", {}, name), el("b", {}, shown(value)));
  if (Object.keys(run.summary).length) page.append(el("details", { open: "" }, el("summary", {}, "Settings"), el("div", { class: "settings" }, Object.entries(settings(run)).map(pair))),
    el("details", {}, el("summary", {}, "All results"), el("div", { class: "settings" }, otherResults(run).map(pair))));
} else {
  page.append(table(["run", ...results.map(([name]) => name)], runs.map((r) => [el("span", {}, key(r), " ", r.label, finished(r)), ...results.map(([, text]) => text(r))])));
  const all = runs.map(settings);
  const names = [...new Set(all.flatMap(Object.keys))].filter((n) => n !== "--output-dir" && all.some((s) => s[n] !== all[0][n]));
  page.append(el("h2", {}, "Different settings"), names.length ? table(["setting", ...runs.map((r) => r.label)], names.map((n) => [n, ...all.map((s) => shown(s[n]))])) : el("p", { class: "soft" }, "none"));
}

// Curves.
const view = { smoothing: 0, axis: "step" };
const charts = [];
/** Seconds at a step, between the two records around it. */
function seconds(run, step) {
  const c = run.curves.elapsed_s, x = c.x;
  const i = Math.min(Math.max(lower(x, step), 1), x.length - 1);
  if (x.length < 2 || x[i] === x[i - 1]) return c.y[Math.min(i, x.length - 1)];
  return c.y[i - 1] + (c.y[i] - c.y[i - 1]) * (step - x[i - 1]) / (x[i] - x[i - 1]);
}
/** The first place in ascending `x` with at least `value`. */
function lower(x, value) {
  let low = 0, high = x.length;
  while (low < high) { const mid = (low + high) >> 1; if (x[mid] < value) low = mid + 1; else high = mid; }
  return low;
}
/** Exponential moving average whose first values are not drawn towards 0. */
function smooth(y, weight) {
  let mean = 0, sum = 0;
  return y.map((v) => { mean = weight * mean + (1 - weight) * v; sum = weight * sum + 1 - weight; return mean / sum; });
}
/** Round places for at most `count` marks. */
function ticks(low, high, count, log) {
  if (log) {
    const places = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.ceil((to - from) / count) || 1;
    for (let e = from; e <= to; e += every) for (const m of to - from < 3 ? [1, 2, 5] : [1]) places.push(m * 10 ** e);
    return places.filter((v) => v >= low && v <= high);
  }
  const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw) || raw;
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, i) => +((first + i) * step).toPrecision(12));
}

function chart(name, keys, parent) {
  const self = { name, zoom: null, log: false };
  const values = () => runs.filter((r) => r.drawn).flatMap((run) => keys.filter((k) => run.curves[k]).map((k) => {
    const c = run.curves[k], x = view.axis === "step" || !run.curves.elapsed_s ? c.x : c.x.map((s) => seconds(run, s));
    const label = [several && run.label, keys.length > 1 && k].filter(Boolean).join(" ") || k;
    return { run, x, y: c.y, steps: c.x, label, dash: keys.indexOf(k) ? "5 3" : undefined, smoothed: view.smoothing ? smooth(c.y, view.smoothing) : c.y };
  }));
  const svg = el("svg:svg", { role: "img", "aria-label": name });
  const reset = el("button", { hidden: "", onclick: () => { self.zoom = null; self.draw(); } }, "reset zoom");
  const log = el("button", { "aria-pressed": "false", title: "logarithmic scale", onclick: () => { self.log = !self.log; self.draw(); } }, "log");
  parent.append(el("div", { class: "chart" }, el("header", {}, el("h3", {}, name), reset, log), svg));
  const first = values().flatMap((s) => s.y);
  const positive = first.length > 0 && first.every((v) => v > 0);
  self.log = positive && first.reduce((a, b) => Math.max(a, b)) > 1e4 * first.reduce((a, b) => Math.min(a, b));
  log.hidden = !first.some((v) => v > 0);

  self.draw = () => {
    const width = svg.clientWidth || 400, height = svg.clientHeight || 240, left = 58, right = 20, top = 8, bottom = 22;
    const series = values();
    const fold = (f, lists, start) => lists.reduce((a, list) => list.reduce((b, v) => f(b, v), a), start);
    let [x0, x1] = self.zoom || [fold(Math.min, series.map((s) => s.x), Infinity), fold(Math.max, series.map((s) => s.x), -Infinity)];
    if (!(x1 > x0)) { x0 = isFinite(x0) ? x0 - 1 : 0; x1 = x0 + 2; }
    const seen = series.map((s) => {
      const from = Math.max(0, lower(s.x, x0) - 1), to = Math.min(s.x.length, lower(s.x, x1) + 1);
      const inside = (v, i) => s.x[i] >= x0 && s.x[i] <= x1 && (!self.log || v > 0);
      return { from, to, y: [s.y, s.smoothed].flatMap((list) => list.filter(inside)) };
    });
    let y0 = fold(Math.min, seen.map((s) => s.y), Infinity), y1 = fold(Math.max, seen.map((s) => s.y), -Infinity);
    if (!isFinite(y0)) { y0 = self.log ? 0.1 : 0; y1 = 1; }
    // Smoothing rounds: a constant stays one.
    if (y1 - y0 <= 1e-9 * Math.abs(y1)) { const pad = Math.abs(y0) / 2 || 1; y0 -= pad; y1 += pad; }
    const up = self.log ? Math.log10 : (v) => v;
    const margin = (up(y1) - up(y0)) * 0.04;
    const px = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
    const py = (y) => top + (up(y1) + margin - up(y)) / (up(y1) - up(y0) + 2 * margin) * (height - top - bottom);
    const path = (s, list, from, to) => {
      let d = "", pen = "M";
      for (let i = from; i < to; i++) {
        if (self.log && !(list[i] > 0)) { pen = "M"; continue; }
        d += pen + px(s.x[i]).toFixed(1) + " " + py(list[i]).toFixed(1);
        pen = "L";
      }
      return d;
    };
    const parts = [];
    for (const t of ticks(y0, y1, 5, self.log)) parts.push(el("svg:line", { class: "grid", x1: left, x2: width - right, y1: py(t), y2: py(t) }), el("svg:text", { x: left - 6, y: py(t) + 4, "text-anchor": "end" }, short(t)));
    for (const t of ticks(x0, x1, Math.max(2, width / 90))) parts.push(el("svg:text", { x: px(t), y: height - 6, "text-anchor": "middle" }, short(t) + (view.axis === "time" ? " s" : "")));
    const clip = `clip${charts.indexOf(self)}`;
    parts.push(el("svg:clipPath", { id: clip }, el("svg:rect", { x: left - 4, y: 0, width: width - left - right + 8, height: height - bottom + 4 })));
    const lines = el("svg:g", { "clip-path": `url(#${clip})` });
    for (const run of runs) if (run.drawn) for (const event of run.events) {
      const at = px(view.axis === "step" || !run.curves.elapsed_s ? event.step : seconds(run, event.step));
      lines.append(el("svg:line", { class: "event", x1: at, x2: at, y1: top, y2: height - bottom }));
    }
    series.forEach((s, i) => {
      const { from, to } = seen[i], style = `stroke:${s.run.color}`;
      if (view.smoothing) lines.append(el("svg:path", { class: "faint", style, d: path(s, s.y, from, to) }));
      lines.append(el("svg:path", { style, d: path(s, s.smoothed, from, to), "stroke-dasharray": s.dash }));
      if (to - from <= 30) for (let k = from; k < to; k++) if (!self.log || s.smoothed[k] > 0) lines.append(el("svg:circle", { cx: px(s.x[k]), cy: py(s.smoothed[k]), r: 2.5, style: `fill:${s.run.color}` }));
    });
    const hover = el("svg:g");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(...parts, lines, hover);
    reset.hidden = !self.zoom;
    log.setAttribute("aria-pressed", self.log);

    let start = null;
    const at = (e) => x0 + (Math.min(Math.max(e.clientX - svg.getBoundingClientRect().left, left), width - right) - left) / (width - left - right) * (x1 - x0);
    svg.onpointerdown = (e) => { start = at(e); svg.setPointerCapture(e.pointerId); };
    svg.onpointerup = (e) => {
      const range = [start, at(e)].sort((a, b) => a - b), moved = start !== null && px(range[1]) - px(range[0]) > 6;
      start = null;
      if (moved) { self.zoom = range; tip.hidden = true; self.draw(); }
    };
    svg.ondblclick = () => { self.zoom = null; self.draw(); };
    svg.onpointerleave = svg.onpointercancel = () => { hover.replaceChildren(); tip.hidden = true; start = null; };
    svg.onpointermove = (e) => {
      const x = at(e), rows = [], marks = [];
      for (const s of series) {
        let i = lower(s.x, x);
        if (i > 0 && (i === s.x.length || x - s.x[i - 1] < s.x[i] - x)) i--;
        if (i >= s.x.length || s.x[i] < x0 || s.x[i] > x1) continue;
        const smoothed = view.smoothing ? ` (smoothed ${short(s.smoothed[i])})` : "";
        rows.push(el("div", {}, key(s.run), ` ${s.label}: ${s.y[i]}${smoothed} at step ${s.steps[i]}`));
        if (!self.log || s.smoothed[i] > 0) marks.push(el("svg:circle", { cx: px(s.x[i]), cy: py(s.smoothed[i]), r: 4, style: `fill:${s.run.color}` }));
      }
      if (start !== null) marks.push(el("svg:rect", { class: "zoom", x: Math.min(px(start), px(x)), width: Math.abs(px(start) - px(x)), y: top, height: height - top - bottom }));
      hover.replaceChildren(el("svg:line", { class: "grid", x1: px(x), x2: px(x), y1: top, y2: height - bottom }), ...marks);
      tip.replaceChildren(...rows);
      tip.hidden = rows.length === 0;
      tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 6)) + "px";
      tip.style.top = Math.min(e.clientY + 16, innerHeight - tip.offsetHeight - 6) + "px";
    };
  };
  charts.push(self);
}
const redraw = () => charts.forEach((c) => c.draw());

const known = new Set(runs.flatMap((r) => Object.keys(r.curves)));
const take = (names) => names.filter((n) => known.delete(n));
if (known.size) {
  const hasTime = runs.every((r) => r.curves.elapsed_s);
  const smoothing = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: (e) => { view.smoothing = +e.target.value; amount.textContent = e.target.value; redraw(); } });
  const amount = el("span", {}, "0");
  const axis = select([["step", "step"], ["time", "time"]], (value) => { view.axis = value; charts.forEach((c) => { c.zoom = null; }); redraw(); });
  const legend = several ? runs.map((r) => el("label", {}, el("input", { type: "checkbox", checked: "", onchange: (e) => { r.drawn = e.target.checked; redraw(); } }), key(r), r.label)) : [];
  const grid = el("div", { class: "charts" });
  const section = el("section", {}, el("h2", {}, "Curves"), el("div", { class: "bar top" }, legend, el("label", { class: "noprint" }, "smoothing", smoothing, amount), hasTime ? el("label", { class: "noprint" }, "over", axis) : [],
    el("small", { class: "noprint" }, "drag to zoom")), grid);
  page.append(section);
  const groups = [["loss per step", ["loss"]], ["loss per epoch: train (line), test (dashed)", ["train_loss", "test_loss"]], ["accuracy per epoch", ["accuracy"]], ["learning rate", ["lr"]], ["exposed communication, ms", ["exposed_comm_ms"]]];
  for (const [name, names] of groups) { const there = take(names); if (there.length) chart(there.length < names.length ? there[0] : name, there, grid); }
  const rest = el("div", { class: "charts" });
  const clocks = take(["elapsed_s", "train_s", "data_wait_total_ms", "saving_total_ms", "epoch"]).filter((n) => n !== "epoch");
  for (const name of [...known].sort()) chart(name, [name], grid);
  for (const name of clocks) chart(name, [name], rest);
  if (clocks.length) section.append(el("details", { class: "noprint", ontoggle: redraw }, el("summary", {}, "Time used, by step"), rest));
  const long = runs.flatMap((r) => Object.values(r.curves)).find((c) => c.total > c.x.length);
  if (long) page.append(el("p", { class: "soft" }, `Curves of more than 2,000 points show the least and greatest value of each of up to 1,000 equal parts; the log has up to ${short(Math.max(...runs.flatMap((r) => Object.values(r.curves).map((c) => c.total))))}.`));
  const events = runs.flatMap((r) => r.events.map((e) => [...(several ? [r.label] : []), String(e.step), e.text]));
  if (events.length) page.append(el("h2", {}, "Events"), table([...(several ? ["run"] : []), "step", "event"], events));
}

// Where the time went.
const times = runs.map((run) => {
  const s = run.summary, number = (v) => isNumber(v) ? Math.max(0, v) : 0;
  if (!isNumber(s.train_s) || !isNumber(s.total_s)) return null;
  const exposed = s.train_s * number(s.exposed_comm_percent) / 100, wait = number(s.data_wait_s), saving = number(s.saving_s), test = number(s.test_s);
  return { run, total: s.total_s, parts: [["computing", s.train_s - exposed - wait - saving, 0], ["exposed communication", exposed, 1], ["waiting for data", wait, 3], ["saving", saving, 4], ["test", test, 2], ["other (start, files)", s.total_s - s.train_s - test, 6]] };
}).filter(Boolean);
if (times.length) {
  page.append(el("h2", {}, "Time"));
  const longest = Math.max(...times.map((t) => t.total));
  for (const t of times) {
    const parts = t.parts.filter(([, s]) => s > 0);
    page.append(el("div", {}, several ? t.run.label + " " : "", el("small", {}, `${t.total.toFixed(1)} s`)),
      el("div", { class: "time", style: `width:${100 * t.total / longest}%` }, parts.map(([name, s, c]) => el("i", { title: `${name}: ${s.toFixed(2)} s`, style: `flex:${s} 0 0;background:var(--c${c})` }))),
      el("div", { class: "bar" }, parts.map(([name, s, c]) => el("small", {}, el("span", { class: "key", style: `background:var(--c${c})` }), ` ${name} ${s.toFixed(2)} s (${(100 * s / t.total).toFixed(1)} %)`))));
  }
}

// Confusion matrix: rows are the truth.
for (const run of runs) {
  const m = run.summary.confusion;
  if (!Array.isArray(m) || !m.length || !m.every((row) => Array.isArray(row) && row.length === m.length && row.every(isNumber))) continue;
  page.append(el("h2", {}, "Confusion matrix" + (several ? ": " + run.label : "")));
  const sums = m.map((row) => row.reduce((a, b) => a + b, 0)), accuracy = (c) => percent(run.summary.class_accuracies?.[c] ?? (sums[c] ? m[c][c] / sums[c] : undefined));
  if (m.length > 40) {
    const pairs = m.flatMap((row, t) => row.map((n, g) => [t, g, n])).filter(([t, g, n]) => t !== g && n).sort((a, b) => b[2] - a[2]).slice(0, 30);
    page.append(table(["truth", "guess", "images", "accuracy of the class"], pairs.map(([t, g, n]) => [String(t), String(g), short(n), accuracy(t)])));
    continue;
  }
  const worst = Math.max(1, ...m.flatMap((row, t) => row.filter((_, g) => g !== t)));
  const cell = (n, t, g) => {
    const share = t === g ? n / Math.max(1, sums[t]) : Math.sqrt(n / worst);
    return el("td", { title: `truth ${t}, guess ${g}: ${n}`, style: n ? `background:color-mix(in srgb, var(${t === g ? "--good" : "--bad"}) ${Math.round(share * (t === g ? 45 : 60))}%, var(--card))` : "color:var(--soft)" }, String(n));
  };
  page.append(el("div", { class: "scroll" }, el("table", { class: "matrix" },
    el("thead", {}, el("tr", {}, el("th", { title: "rows: truth; columns: guess" }, "truth"), m.map((_, g) => el("th", {}, String(g))), el("th", { title: "of the class" }, "right"))),
    el("tbody", {}, m.map((row, t) => el("tr", {}, el("th", {}, String(t)), row.map((n, g) => cell(n, t, g)), el("th", {}, accuracy(t))))))));
}

// Predictions.
runs.forEach((run, number) => {
  const rows = run.predictions.map((p, place) => ({ ...p, place })).filter((p) => isNumber(p.guess) && isNumber(p.truth) && Array.isArray(p.scores) && p.scores.every(isNumber));
  if (!rows.length) return;
  for (const p of rows) {
    const most = Math.max(...p.scores), powers = p.scores.map((s) => Math.exp(s - most)), sum = powers.reduce((a, b) => a + b, 0);
    p.shares = powers.map((v) => v / sum);
  }
  const sheet = run.pictures, PAGE = innerWidth < 640 ? 20 : 60, picked = { wrong: false, group: "", order: "", page: 0 };
  if (sheet) {
    sheet.w = sheet.width / sheet.per_row;
    sheet.h = sheet.height / Math.ceil(run.predictions.length / sheet.per_row);
    if (run.predictions_total > run.predictions.length) sheet.h = sheet.height / Math.ceil(run.predictions_total / sheet.per_row);
    sheet.zoom = Math.max(1, Math.round(56 / Math.max(sheet.w, sheet.h)));
    document.head.append(el("style", {}, `.run${number}{background-image:url(${sheet.src});background-size:${sheet.width * sheet.zoom}px;width:${sheet.w * sheet.zoom}px;height:${sheet.h * sheet.zoom}px}`));
  }
  const picture = (p) => el("div", { class: `pic run${number}`, style: `background-position:${-(p.place % sheet.per_row) * sheet.w * sheet.zoom}px ${-Math.floor(p.place / sheet.per_row) * sheet.h * sheet.zoom}px` });
  const list = el("div", { class: "preds" }), count = el("span", { class: "soft" });
  const step = (by) => () => { picked.page += by; draw(); };
  const back = el("button", { onclick: step(-1) }, "◀ previous"), next = el("button", { onclick: step(1) }, "next ▶");
  const set = (name) => (value) => { picked[name] = value; picked.page = 0; draw(); };
  function draw() {
    const all = rows.filter((p) => !picked.wrong || p.guess !== p.truth), { group, order } = picked;
    all.sort((a, b) => (group ? a[group] - b[group] : 0) || (order ? (a.shares[a.truth] ?? 0) - (b.shares[b.truth] ?? 0) : 0) || a.place - b.place);
    const pages = Math.max(1, Math.ceil(all.length / PAGE));
    picked.page = Math.min(Math.max(picked.page, 0), pages - 1);
    back.disabled = picked.page === 0;
    next.disabled = picked.page === pages - 1;
    count.textContent = `page ${picked.page + 1} of ${pages}, ${short(all.length)} images`;
    let heading = null;
    list.replaceChildren(...all.slice(picked.page * PAGE, (picked.page + 1) * PAGE).flatMap((p) => {
      const wrong = p.guess !== p.truth;
      const bars = el("div", { class: "scores" }, p.shares.map((share, c) => el("span", { class: c === p.truth ? "truth" : c === p.guess ? "guess" : "", title: `class ${c}: score ${p.scores[c]}, ${percent(share)}` }, el("i", { style: `height:${100 * share}%` }))));
      const card = el("div", { class: wrong ? "pred wrong" : "pred" }, sheet ? picture(p) : [], el("div", {}, el("div", {}, el("b", {}, `guess ${p.guess}`), wrong ? `, truth ${p.truth} ` : " ", el("small", {}, `${percent(p.shares[p.guess])}, image ${shown(p.image ?? p.id)}`)), bars));
      if (!group || heading === p[group]) return [card];
      heading = p[group];
      const members = all.filter((o) => o[group] === heading), bad = members.filter((o) => o.guess !== o.truth).length;
      return [el("h3", {}, `${group} ${heading}: ${members.length} (${bad} wrong)`), card];
    }));
  }
  page.append(el("h2", {}, "Predictions" + (several ? ": " + run.label : "")),
    el("div", { class: "bar" }, el("label", {}, el("input", { type: "checkbox", onchange: (e) => set("wrong")(e.target.checked) }), "wrong only"),
      el("label", {}, "group by", select([["", "nothing"], ["guess", "guess"], ["truth", "truth"]], set("group"))), el("label", {}, "order", select([["", "as logged"], ["worst", "least probable truth first"]], set("order"))), back, next, count,
      run.predictions_total > run.predictions.length ? el("small", {}, `the first ${short(run.predictions.length)} of ${short(run.predictions_total)}`) : []),
    list);
  draw();
});

redraw();
addEventListener("resize", redraw);
addEventListener("beforeprint", redraw);
