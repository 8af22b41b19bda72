// Weights and gradients over steps, by the `watch` events.

const TENSORS = innerWidth < 640 ? 4 : 12;

/** The numbers of a tensor over steps. */
const tensorSeries = (tensor, steps) => [["least", "min"], ["mean", "mean"], ["standard deviation", "deviation"], ["greatest", "max"]].map(([label, name]) => {
  const there = steps.map((_, i) => i).filter((i) => isNumber(tensor[name][i]));
  return { label, x: there.map((i) => steps[i]), y: there.map((i) => tensor[name][i]) };
});

/** One tensor: min to max, mean ± standard deviation, and its histogram, over steps. */
function tensorCard(tensor, steps, color) {
  const there = steps.map((_, i) => i).filter((i) => isNumber(tensor.min[i]) && isNumber(tensor.max[i]));
  const bands = el("svg:svg", { role: "img", "aria-label": `${tensor.name}: mean and range` }), heat = el("svg:svg", { role: "img", "aria-label": `${tensor.name}: histogram` });
  const card = { root: el("div", { class: "chart tensor" }, el("header", {}, el("h3", {}, tensor.name), el("small", {}, tensor.kind), downloads(`${tensor.name} ${tensor.kind}`, [bands, heat], () => ({ axis: "step", legend: false, series: tensorSeries(tensor, steps) }))), bands, heat) };
  card.draw = () => {
    if (!card.root.isConnected) return;
    const left = 58, right = 12, top = 6, width = bands.clientWidth || 400, height = bands.clientHeight || 120;
    let y0 = fold(Math.min, [there.map((i) => tensor.min[i])], Infinity), y1 = fold(Math.max, [there.map((i) => tensor.max[i])], -Infinity);
    if (!isFinite(y0)) { y0 = 0; y1 = 1; }
    if (!(y1 > y0)) { const pad = Math.abs(y0) / 2 || 1; y0 -= pad; y1 += pad; }
    const edges = steps.map((s, i) => i ? (steps[i - 1] + s) / 2 : s - (steps.length > 1 ? (steps[1] - s) / 2 : 0.5));
    edges.push(steps.at(-1) + (steps.length > 1 ? (steps.at(-1) - steps.at(-2)) / 2 : 0.5));
    const px = (x) => left + (x - edges[0]) / (edges.at(-1) - edges[0]) * (width - left - right);
    for (const [svg, bottom] of [[bands, 6], [heat, 34]]) {
      const py = (y) => top + (y1 - y) / (y1 - y0) * (height - top - bottom), parts = [];
      for (const t of ticks(y0, y1, 4)) parts.push(el("svg:line", { class: "grid", x1: left, x2: width - right, y1: py(t), y2: py(t) }), el("svg:text", { x: left - 6, y: py(t) + 4, "text-anchor": "end" }, short(t)));
      if (svg === heat) {
        for (const t of ticks(steps[0], Math.max(steps.at(-1), steps[0] + 1), Math.max(2, width / 90))) parts.push(el("svg:text", { x: px(t), y: height - 20, "text-anchor": "middle" }, short(t)));
        parts.push(el("svg:text", { class: "axis", x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, "step"));
        const paths = Array(10).fill("");
        for (const i of there) {
          const x = px(edges[i]), w = px(edges[i + 1]) - x + 0.3, digits = tensor.levels[i], low = tensor.min[i], high = tensor.max[i], n = digits.length;
          for (let k = 0; k < n; k++) {
            const a = py(low + (high - low) * (k + 1) / n), b = Math.max(py(low + (high - low) * k / n), a + 1);
            if (digits[k] !== "0") paths[+digits[k]] += `M${x.toFixed(1)} ${a.toFixed(1)}h${w.toFixed(1)}v${(b - a + 0.2).toFixed(1)}h${(-w).toFixed(1)}z`;
          }
        }
        paths.forEach((d, level) => d && parts.push(el("svg:path", { d, style: `fill:${color};stroke:none;opacity:${(level / 9).toFixed(2)}` })));
      } else {
        const band = (low, high, opacity) => {
          const line = (list) => list.map(([i, y]) => `${px(steps[i]).toFixed(1)} ${py(Math.min(Math.max(y, y0), y1)).toFixed(1)}`);
          const some = there.filter((i) => isNumber(low(i)) && isNumber(high(i)));
          const d = "M" + [...line(some.map((i) => [i, low(i)])), ...line(some.map((i) => [i, high(i)])).reverse()].join("L") + "z";
          return some.length ? el("svg:path", { d, style: `fill:${color};stroke:${some.length > 1 ? "none" : color};opacity:${opacity}` }) : [];
        };
        const deviation = (sign) => (i) => isNumber(tensor.deviation[i]) ? tensor.mean[i] + sign * tensor.deviation[i] : undefined;
        const mean = there.filter((i) => isNumber(tensor.mean[i])).map((i) => `${px(steps[i]).toFixed(1)} ${py(tensor.mean[i]).toFixed(1)}`);
        parts.push(band((i) => tensor.min[i], (i) => tensor.max[i], 0.18), band(deviation(-1), deviation(1), 0.35), mean.length ? el("svg:path", { d: "M" + mean.join("L"), style: `stroke:${color}` }) : []);
      }
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.replaceChildren(...parts.flat());
      svg.onpointerleave = () => { tip.hidden = true; };
      svg.onpointermove = (e) => {
        const box = svg.getBoundingClientRect(), i = Math.min(Math.max(lower(edges, edges[0] + (e.clientX - box.left - left) / (width - left - right) * (edges.at(-1) - edges[0])) - 1, 0), steps.length - 1);
        showTip(e, [el("div", {}, `step ${short(steps[i])}`), el("div", {}, `mean ${short(tensor.mean[i])}, standard deviation ${short(tensor.deviation[i])}`), el("div", {}, `from ${short(tensor.min[i])} to ${short(tensor.max[i])}`)]);
      };
    }
  };
  return card;
}

const watch = partOfRuns((first) => {
  const picked = { filter: "", kind: "", page: 0 }, list = el("div", { class: "charts" }), norms = grid(), heading = el("div"), cut = note(), count = el("span", { class: "soft" });
  let run = first, before, cards = [];
  const turn = (by) => () => { picked.page += by; show(); };
  const back = el("button", { onclick: turn(-1) }, "◀ previous"), next = el("button", { onclick: turn(1) }, "next ▶");
  const set = (what) => (value) => { picked[what] = value; picked.page = 0; show(); };
  function show() {
    const words = picked.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const all = run.watch.tensors.filter((t) => (!picked.kind || t.kind === picked.kind) && words.every((word) => t.name.toLowerCase().includes(word)));
    const pages = Math.max(1, Math.ceil(all.length / TENSORS));
    picked.page = Math.min(Math.max(picked.page, 0), pages - 1);
    back.disabled = picked.page === 0;
    next.disabled = picked.page === pages - 1;
    count.textContent = `page ${picked.page + 1} of ${pages}, ${short(all.length)} tensors`;
    cards.forEach(removeChart);
    cards = all.slice(picked.page * TENSORS, (picked.page + 1) * TENSORS).map((t) => tensorCard(t, run.watch.steps, `var(--c${t.kind === "weights" ? 0 : 1})`));
    list.replaceChildren(...cards.map((card) => card.root));
    cards.forEach(addChart);
  }
  const root = el("section", { hidden: "" }, heading, norms.root,
    el("div", { class: "bar noprint" }, el("label", {}, "filter by name ", el("input", { type: "search", size: "14", oninput: (e) => set("filter")(e.target.value) })),
      el("label", {}, "show", select([["", "both"], ["weights", "weights"], ["gradients", "gradients"]], set("kind"))), back, next, count),
    list, note("Above: least to greatest value (light), mean ± one standard deviation (dark), mean (line). Below: histogram, darker for more values."), cut);
  return { root, update(now) {
    run = now;
    const text = JSON.stringify(run.watch);
    if (text === before) return;
    before = text;
    root.hidden = !run.watch;
    if (!run.watch) return;
    const { watch } = run;
    heading.replaceChildren(ofRun("Weights and gradients", run));
    norms.update(Object.entries(watch.norms).map(([kind, c]) => [`norm of all ${kind}`, () => ({
      smoothing: view.smoothing, series: [{ color: run.color, label: `norm of all ${kind}`, x: c.x, y: c.y, place: (i) => `at step ${short(c.x[i])}` }] })]));
    const notes = [];
    if (watch.steps_total > watch.steps.length) notes.push(`${short(watch.steps.length)} of ${short(watch.steps_total)} steps, evenly spread, are shown.`);
    if (new Set(watch.tensors.map((t) => t.name)).size < watch.tensors_total) notes.push(`Tensors are left out: the run has ${short(watch.tensors_total)}.`);
    if (!watch.tensors.some((t) => t.kind === "gradients")) notes.push("The run has logged no gradients.");
    cut.textContent = notes.join(" ");
    show();
  } };
});
