// Curves over an axis: zoom and crosshair of all charts, smoothing, logarithmic scale, downloads.

/** Steps of an epoch, if all runs have the same. */
function stepsPerEpoch() {
  const all = new Set(runs.map((run) => run.about.steps_per_epoch)), [steps] = all;
  return all.size === 1 && steps > 0 ? steps : undefined;
}
/** Learning rates, as powers of ten. */
const LR_AXIS = "learning rate";
/** `x` of the axis `from` on the axis `to`; `undefined` where it has no such place. */
function convert(x, from, to) {
  if (from === to) return x;
  if ([from, to].includes(LR_AXIS)) return undefined;
  const steps = stepsPerEpoch(), clock = runs.length === 1 && !(runs[0].about.attempt > 1) && runs[0].curves.elapsed_s;
  const between = (x, xs, ys) => {
    const i = Math.min(Math.max(lower(xs, x), 1), xs.length - 1);
    return xs.length < 2 ? undefined : ys[i - 1] + (xs[i] > xs[i - 1] ? (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1]) : 0);
  };
  const step = from === "step" ? x : from === "epoch" ? x * steps : clock ? between(x, clock.y, clock.x) : NaN;
  const there = to === "step" ? step : to === "epoch" ? step / steps : clock ? between(step, clock.x, clock.y) : NaN;
  return isNumber(there) ? there : undefined;
}

/** Has the browser save `text` as a file. */
function save(name, type, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
/** The values of `series` as a table: a row for each place on the axis, a column for each line. */
function csv(axis, series) {
  const rows = new Map(), quoted = (text) => `"${String(text).replaceAll('"', '""')}"`;
  series.forEach((s, column) => s.x.forEach((x, i) => {
    if (!rows.has(x)) rows.set(x, Array(series.length).fill(""));
    rows.get(x)[column] = s.y[i];
  }));
  const sorted = [...rows].sort((a, b) => a[0] - b[0]).map(([x, values]) => [x, ...values].join(","));
  return [[axis, ...series.map((s) => quoted(s.label))].join(","), ...sorted, ""].join("\n");
}
/** A picture that needs no style sheet: the chart, whose parts lie below each other, with its name and a legend. */
function picture(parts, name, series) {
  const root = el("svg:svg");
  let width = 0, height = 0;
  for (const svg of parts) {
    const copy = svg.cloneNode(true), from = svg.querySelectorAll("*"), [, , w, h] = svg.getAttribute("viewBox").split(" ").map(Number);
    copy.querySelectorAll("*").forEach((made, i) => {
      const style = getComputedStyle(from[i]);
      made.setAttribute("style", ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family"].map((n) => `${n}:${style.getPropertyValue(n)}`).join(";"));
    });
    for (const [key, value] of Object.entries({ y: height, width: w, height: h })) copy.setAttribute(key, value);
    root.append(copy);
    [width, height] = [Math.max(width, w), height + h];
  }
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name), font = "font:12px sans-serif";
  const legend = series.length > 1 ? series.slice(0, 40) : [], top = 24 + 16 * legend.length;
  root.prepend(el("svg:rect", { x: 0, y: -top, width, height: height + top, fill: color("--back") }), el("svg:text", { x: 8, y: 16 - top, style: `font:bold 13px sans-serif;fill:${color("--text")}` }, name),
    ...legend.flatMap((s, i) => [el("svg:rect", { x: 8, y: 26 - top + 16 * i, width: 10, height: 10, fill: s.color.startsWith("var(") ? color(s.color.slice(4, -1)) : s.color }),
      el("svg:text", { x: 24, y: 35 - top + 16 * i, style: `${font};fill:${color("--text")}` }, s.label)]));
  for (const [key, value] of Object.entries({ viewBox: `0 ${-top} ${width} ${height + top}`, width, height: height + top })) root.setAttribute(key, value);
  return new XMLSerializer().serializeToString(root);
}
/** Buttons that download the chart `name`: the picture of its `parts`, and the values of what it draws. */
function downloads(name, parts, get) {
  const file = (ending) => `${runs.map((run) => run.label).join("-")} ${name}`.replace(/[^\w.-]+/g, "-").replace(/-$/, "").slice(0, 100) + ending;
  const button = (ending, what, onclick) => el("button", { class: "quiet", title: `download the ${what}`, onclick }, ending);
  return el("span", { class: "files" }, button("svg", "picture", () => save(file(".svg"), "image/svg+xml", picture(parts, name, get().legend === false ? [] : get().series))), button("csv", "values", () => save(file(".csv"), "text/csv", csv(get().axis, get().series))));
}

const charts = new Set();
/** Draws the charts near the screen, or all; others are drawn when they come near. */
const redraw = (all = false) => charts.forEach((chart) => {
  chart.isStale = !(all || chart.isNear);
  if (!chart.isStale) chart.draw();
});
const nearby = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const chart = [...charts].find((chart) => chart.root === target);
    if (!chart) continue;
    chart.isNear = isIntersecting;
    if (isIntersecting && chart.isStale) { chart.isStale = false; chart.draw(); }
  }
}, { rootMargin: "800px" });
/** Has `chart` drawn from now on. */
function addChart(chart) {
  chart.isStale = true;
  charts.add(chart);
  nearby.observe(chart.root);
  return chart;
}
function removeChart(chart) {
  charts.delete(chart);
  nearby.unobserve(chart.root);
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

/** Shows `rows` beside the pointer; hides them if there are none. */
function showTip(e, rows) {
  tip.replaceChildren(...rows);
  tip.hidden = rows.length === 0;
  tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 6)) + "px";
  tip.style.top = Math.min(e.clientY + 16, innerHeight - tip.offsetHeight - 6) + "px";
}

/**
 * A chart of lines. `get` gives what is drawn now:
 * `series`: of each line its `color`, `label`, ascending `x`, `y`, and `dash`; `place(i)` names a point;
 * `axis`: step, epoch, seconds or learning rate; `marks`: events with `x`, `kind` and `text`; `smoothing`; `legend`: whether it is shown;
 * `start`: the first place on the axis; `percent`: whether values are shares; `whole`: whether they are whole numbers.
 */
function chart(name, get) {
  const self = { log: undefined };
  const svg = el("svg:svg", { role: "img", "aria-label": name });
  const zoomTo = (zoom) => { view.zoom = zoom; tip.hidden = true; redraw(); };
  const reset = el("button", { hidden: "", onclick: () => zoomTo(null) }, "reset zoom");
  const log = el("button", { title: "logarithmic scale", onclick: () => { self.log = !isLog(get().series); self.draw(); } }, "log");
  const clip = `clip${chart.count = (chart.count || 0) + 1}`;
  const legend = el("div", { class: "bar legend", hidden: "" });
  self.root = el("div", { class: "chart" }, el("header", {}, el("h3", {}, name), downloads(name, [svg], get), reset, log), legend, svg);
  let start = null;
  const isLog = (series) => {
    if (self.log !== undefined) return self.log;
    const all = series.flatMap((s) => s.y).sort((a, b) => a - b);
    // The few values near the end of a line that falls to 0, as a cosine, do not count.
    return all[0] > 0 && all.at(-1) > 1e4 * all[Math.min(all.length - 1, Math.max(1, Math.floor(all.length / 20)))];
  };

  self.draw = () => {
    if (!self.root.isConnected) return;
    const width = svg.clientWidth || 400, height = svg.clientHeight || 240, left = 58, right = 20, top = 8, bottom = 36;
    const { series, marks = [], axis = "step", smoothing = 0, start: origin, percent: isShare, whole } = get(), say = isShare ? (v) => short(100 * v) + " %" : short;
    for (const s of series) s.smoothed = smoothing ? smooth(s.y, smoothing) : s.y;
    const logarithmic = isLog(series);
    log.hidden = !series.some((s) => s.y.some((v) => v > 0));
    const zoom = view.zoom && view.zoom.range.map((x) => convert(x, view.zoom.axis, axis)), isZoomed = zoom && zoom[1] > zoom[0];
    let [x0, x1] = isZoomed ? zoom : [origin ?? fold(Math.min, series.map((s) => s.x), Infinity), fold(Math.max, series.map((s) => s.x), -Infinity)];
    const single = isFinite(x0) && x0 === x1;
    if (!(x1 > x0)) { x0 = single ? x0 - 1 : 0; x1 = x0 + 2; }
    const seen = series.map((s) => {
      const from = Math.max(0, lower(s.x, x0) - 1), to = Math.min(s.x.length, lower(s.x, x1) + 1);
      const inside = (v, i) => s.x[i] >= x0 && s.x[i] <= x1 && (!logarithmic || v > 0);
      return { from, to, y: [s.y, s.smoothed].flatMap((list) => list.filter(inside)) };
    });
    let y0 = fold(Math.min, seen.map((s) => s.y), Infinity), y1 = fold(Math.max, seen.map((s) => s.y), -Infinity);
    if (!isFinite(y0)) { y0 = logarithmic ? 0.1 : 0; y1 = 1; }
    // Smoothing rounds: a constant stays one.
    const constant = y1 - y0 <= 1e-9 * Math.abs(y1) && y0;
    if (constant !== false) { const pad = isShare ? 0.05 : Math.abs(y0) / 2 || 1; y0 -= pad; y1 += pad; }
    const up = logarithmic ? Math.log10 : (v) => v;
    const margin = (up(y1) - up(y0)) * 0.04;
    const px = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
    const py = (y) => top + (up(y1) + margin - up(y)) / (up(y1) - up(y0) + 2 * margin) * (height - top - bottom);
    const path = (s, list, from, to) => {
      let d = "", pen = "M";
      for (let i = from; i < to; i++) {
        if (logarithmic && !(list[i] > 0)) { pen = "M"; continue; }
        d += pen + px(s.x[i]).toFixed(1) + " " + py(list[i]).toFixed(1);
        pen = "L";
      }
      return d;
    };
    const parts = [];
    const few = ticks(y0, y1, 5, logarithmic);
    const rows = constant !== false ? [constant] : few.length > 2 || logarithmic ? few : ticks(y0, y1, 10), same = new Set(rows.map(say)).size < rows.length;
    for (const t of rows) if (!whole || Number.isInteger(t)) parts.push(el("svg:line", { class: "grid", x1: left, x2: width - right, y1: py(t), y2: py(t) }), el("svg:text", { x: left - 6, y: py(t) + 4, "text-anchor": "end" }, same ? String(t) : say(t)));
    for (const t of single ? [x0 + 1] : ticks(x0, x1, Math.max(2, width / 90)).filter((t) => axis === "seconds" || Number.isInteger(t))) parts.push(el("svg:text", { x: px(t), y: height - bottom + 16, "text-anchor": "middle" }, axis === LR_AXIS ? `1e${t}` : short(t)));
    parts.push(el("svg:text", { class: "axis", x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, axis));
    parts.push(el("svg:clipPath", { id: clip }, el("svg:rect", { x: left - 4, y: 0, width: width - left - right + 8, height: height - bottom + 4 })));
    const lines = el("svg:g", { "clip-path": `url(#${clip})` });
    for (const kind of new Set(marks.map((mark) => mark.kind))) {
      const places = new Set(marks.filter((mark) => mark.kind === kind && mark.x >= x0 && mark.x <= x1).map((mark) => px(mark.x).toFixed(1)));
      lines.append(el("svg:path", { class: `event ${kind}`, d: [...places].map((x) => `M${x} ${top}V${height - bottom}`).join("") }));
    }
    series.forEach((s, i) => {
      const { from, to } = seen[i], style = `stroke:${s.color}`;
      if (smoothing) lines.append(el("svg:path", { class: "faint", style, d: path(s, s.y, from, to) }));
      lines.append(el("svg:path", { style, d: path(s, s.smoothed, from, to), "stroke-dasharray": s.dash }));
      if (to - from <= 30) for (let k = from; k < to; k++) if (!logarithmic || s.smoothed[k] > 0) lines.append(el("svg:circle", { cx: px(s.x[k]), cy: py(s.smoothed[k]), r: 2.5, style: `fill:${s.color}` }));
    });
    const hover = el("svg:g");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(...parts, lines, hover);
    reset.hidden = !isZoomed;
    legend.hidden = !get().legend || series.length < 2;
    if (!legend.hidden) legend.replaceChildren(...series.map((s) => el("small", {}, key(s.color), " " + s.label)));
    log.setAttribute("aria-pressed", logarithmic);

    const at = (e) => x0 + (Math.min(Math.max(e.clientX - svg.getBoundingClientRect().left, left), width - right) - left) / (width - left - right) * (x1 - x0);
    svg.onpointerdown = (e) => { start = at(e); svg.setPointerCapture(e.pointerId); };
    svg.onpointerup = (e) => {
      const range = [start, at(e)].sort((a, b) => a - b), moved = start !== null && px(range[1]) - px(range[0]) > 6;
      start = null;
      if (moved) zoomTo({ axis, range });
    };
    svg.ondblclick = () => zoomTo(null);
    svg.onpointerleave = svg.onpointercancel = () => { start = null; charts.forEach((chart) => chart.cross?.()); tip.hidden = true; };
    svg.onpointermove = (e) => {
      const x = at(e);
      for (const chart of charts) if (chart !== self && chart.isNear) chart.cross?.(x, axis);
      showTip(e, self.cross(x, axis));
    };
    /** Draws the crosshair at `x` of the axis `of`, or none; what is there, in words. */
    self.cross = (of_x, of) => {
      const x = of && convert(of_x, of, axis), rows = [], dots = [];
      if (!(x >= x0 && x <= x1)) { hover.replaceChildren(); return rows; }
      for (const s of series) {
        let i = lower(s.x, x);
        if (i > 0 && (i === s.x.length || x - s.x[i - 1] < s.x[i] - x)) i--;
        if (i >= s.x.length || s.x[i] < x0 || s.x[i] > x1) continue;
        const smoothed = smoothing ? ` (smoothed ${say(s.smoothed[i])})` : "";
        rows.push(el("div", {}, key(s.color), ` ${s.label}: ${say(s.y[i])}${smoothed} ${s.place(i)}`));
        if (!logarithmic || s.smoothed[i] > 0) dots.push(el("svg:circle", { cx: px(s.x[i]), cy: py(s.smoothed[i]), r: 4, style: `fill:${s.color}` }));
      }
      for (const mark of marks.filter((mark) => Math.abs(px(mark.x) - px(x)) < 3).slice(0, 5)) rows.push(el("div", { class: "soft" }, mark.text));
      if (start !== null) dots.push(el("svg:rect", { class: "zoom", x: Math.min(px(start), px(x)), width: Math.abs(px(start) - px(x)), y: top, height: height - top - bottom }));
      hover.replaceChildren(el("svg:line", { class: "grid", x1: px(x), x2: px(x), y1: top, y2: height - bottom }), ...dots);
      return rows;
    };
  };
  return addChart(self);
}

/** Charts by name in a grid; `wanted` has of each its name and what it draws. Charts that stay keep their zoom. */
function grid(attributes = {}) {
  const root = el("div", { class: "charts", ...attributes }), made = new Map();
  let shownNames = "";
  return { root, made, update(wanted) {
    for (const [name, get] of wanted) {
      const there = made.get(name);
      if (there) there.get = get;
      else { const entry = { get }; entry.chart = chart(name, () => entry.get()); made.set(name, entry); }
    }
    const names = JSON.stringify(wanted.map(([name]) => name));
    if (names !== shownNames) root.replaceChildren(...wanted.map(([name]) => made.get(name).chart.root));
    shownNames = names;
  } };
}
