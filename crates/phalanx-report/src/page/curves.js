// The numbers of metrics.jsonl over steps or time, all runs over each other.

/** Seconds at a step, between the two records around it. */
function seconds(run, step) {
  const c = run.curves.elapsed_s, x = c.x;
  const i = Math.min(Math.max(lower(x, step), 1), x.length - 1);
  if (x.length < 2 || x[i] === x[i - 1]) return c.y[Math.min(i, x.length - 1)];
  return c.y[i - 1] + (c.y[i] - c.y[i - 1]) * (step - x[i - 1]) / (x[i] - x[i - 1]);
}
const overTime = (run) => view.axis === "seconds" && run.curves.elapsed_s;
/** Whether all runs have the curves `names` at the ends of epochs only. */
function perEpoch(names) {
  const all = runs.flatMap((run) => names.map((name) => [run.curves[name], run.about.steps_per_epoch]).filter(([c]) => c));
  return all.length > 0 && all.every(([c, steps]) => steps > 0 && c.x.every((step) => step > 0 && step % steps === 0));
}

/** The mean of the losses since the evaluation before, at each one, of a run that is also evaluated within epochs. */
function lossByPart({ curves: { loss, train_loss, test_loss }, about }) {
  if (!loss || !test_loss || test_loss.x.every((step) => train_loss?.x.includes(step))) return undefined;
  const made = { x: [], y: [] };
  let from = 0;
  for (const step of test_loss.x) {
    // Evaluations after an epoch have the number of the step that comes next.
    const to = lower(loss.x, step % about.steps_per_epoch === 0 ? step : step + 1), part = loss.y.slice(from, to);
    if (part.length) { made.x.push(step); made.y.push(part.reduce((a, b) => a + b, 0) / part.length); }
    from = to;
  }
  return made;
}
const curveOf = (run, name) => name === "train_loss" && lossByPart(run) || run.curves[name];

/** What a chart of the curves `names` draws. */
function ofCurves(names) {
  return () => {
    const axis = view.axis === "seconds" ? "seconds" : perEpoch(names) ? "epoch" : "step";
    const scale = (run) => axis === "epoch" ? run.about.steps_per_epoch : 1;
    return {
      axis, smoothing: view.smoothing, percent: names.every((name) => /accuracy$|^mfu$/.test(name)),
      marks: runs.filter(isDrawn).flatMap((run) => [...marksOf(run), ...bestMark(run, names)].map((mark) => ({ ...mark, x: mark.x / scale(run) }))),
      series: runs.filter(isDrawn).flatMap((run) => names.filter((name) => curveOf(run, name)).map((name) => {
        const c = curveOf(run, name), x = overTime(run) ? c.x.map((step) => seconds(run, step)) : c.x.map((step) => step / scale(run));
        const label = [several() && run.label, names.length > 1 && name].filter(Boolean).join(" ") || name;
        return { x, y: c.y, label, color: run.color, dash: names.indexOf(name) ? "5 3" : undefined, place: (i) => axis === "epoch" ? `at epoch ${x[i]}` : `at step ${count(c.x[i])}` };
      })),
    };
  };
}

/** The place of the best value, on the chart of its curve. */
function bestMark(run, names) {
  const best = bestOf(run);
  return best && names.includes(best.curve) ? [{ kind: "best", x: overTime(run) ? seconds(run, best.step) : best.step, text: `${several() ? run.label + ": " : ""}best ${best.name}: ${best.text}` }] : [];
}

/** How many ranks there were, of runs in which that has changed. */
const ofRanks = () => ({
  axis: view.axis === "seconds" ? "seconds" : "step", whole: true, marks: [],
  series: runs.filter((run) => isDrawn(run) && run.rank_changes?.length).map((run) => {
    const changes = run.rank_changes, end = fold(Math.max, [...Object.values(run.curves).map((c) => c.x), changes.map(([step]) => step)], 0);
    const steps = [0, ...changes.flatMap(([step]) => [step, step]), end], y = [...changes.flatMap(([, before, after]) => [before, after])];
    const x = overTime(run) ? steps.map((step) => seconds(run, step)) : steps;
    return { x, y: [y[0], ...y, y.at(-1)], label: several() ? run.label : "ranks", color: run.color, place: (i) => `at step ${count(steps[i])}` };
  }),
});

/** Whether the run looked for a learning rate. */
const isLrSearch = ({ about }) => about.settings?.["--find-lr"] !== undefined;
const findsLr = (run) => isLrSearch(run) && run.curves.lr && run.curves.loss;
/** The loss over the learning rate, of the runs that looked for one; where it diverges only its beginning. */
const byLr = () => ({
  axis: LR_AXIS, smoothing: view.smoothing,
  marks: runs.filter((run) => isDrawn(run) && run.curves.suggested_lr).map((run) => ({ kind: "metric", x: Math.log10(run.curves.suggested_lr.y[0]), text: `${several() ? run.label + ": " : ""}suggested learning rate ${short(run.curves.suggested_lr.y[0])}` })),
  series: runs.filter((run) => isDrawn(run) && findsLr(run)).map((run) => {
    const { lr, loss } = run.curves, end = loss.y.findLastIndex((v) => v <= 2 * Math.abs(loss.y[0])) + 1;
    const at = loss.x.map((step) => lr.y[lr.x.indexOf(step)]).slice(0, end);
    return { x: at.map(Math.log10), y: loss.y.slice(0, at.length), label: several() ? run.label : "loss", color: run.color, place: (i) => `at a learning rate of ${short(at[i])}` };
  }),
});

const GROUPS = [["loss per step", ["loss"]], ["loss per epoch: train, test (dashed)", ["train_loss", "test_loss"]], ["accuracy per epoch", ["accuracy"]], ["learning rate", ["lr"]], ["exposed communication, ms", ["exposed_comm_ms"]]];
const curves = (() => {
  const amount = el("span", {}, "0");
  const smoothing = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: (e) => { view.smoothing = +e.target.value; amount.textContent = e.target.value; redraw(); } });
  const axis = el("label", { class: "noprint" }, "over", select([["step", "steps"], ["seconds", "time"]], (value) => {
    view.axis = value;
    view.zoom = null;
    redraw();
  }));
  const legend = part(() => [runs.map((r) => r.label)], () => several() ? runs.map((r) => el("label", {},
    el("input", { type: "checkbox", checked: isDrawn(r) && "", onchange: (e) => { view.hidden[e.target.checked ? "delete" : "add"](r.label); redraw(); } }), key(r.color), r.label)) : []);
  const main = grid(), clocks = grid();
  const used = folding("clocks", "Time used, by step", false, clocks.root);
  used.classList.add("noprint");
  const long = note(), cut = note();
  const marks = el("label", { class: "noprint" }, el("input", { type: "checkbox", checked: "", onchange: (e) => { view.marks = e.target.checked; redraw(); } }), "events");
  const root = el("section", {}, el("h2", {}, "Curves"), el("div", { class: "bar top" }, legend.root, el("label", { class: "noprint" }, "smoothing", smoothing, amount), axis, marks, el("small", { class: "noprint" }, "drag to zoom")), main.root, used, long, cut);
  return { root, update() {
    const all = runs.flatMap((r) => Object.values(r.curves)), known = new Set(runs.flatMap((r) => Object.keys(r.curves)));
    const take = (names) => names.filter((name) => known.delete(name));
    root.hidden = !all.length;
    marks.hidden = !runs.some((r) => r.events.length);
    axis.hidden = !runs.every((r) => r.curves.elapsed_s);
    legend.update();
    // Without other ranks there is no communication.
    const isAlone = runs.every((r) => r.about.ranks === 1);
    const times = take([...(isAlone ? ["exposed_comm_ms"] : []), "elapsed_s", "train_s", "data_wait_total_ms", "saving_total_ms", "epoch"]).filter((n) => n !== "epoch");
    const groups = GROUPS.map(([name, names]) => {
      const there = take(names), all = names.filter((n) => there.includes(n) || runs.some((r) => curveOf(r, n)));
      const title = runs.some(lossByPart) ? name.replace("per epoch: train", "between evaluations: train") : name;
      return [all.length < names.length ? all[0] : perEpoch(all) ? title : title.replace(" per epoch", ""), all];
    }).filter(([, all]) => all.length);
    known.delete("suggested_lr");
    groups.push(...[...known].sort().map((name) => [name, [name]]));
    // The measure that the program has named comes first.
    const leads = new Set(runs.map((r) => bestOf(r)?.curve)), isFirst = ([, names]) => names.some((name) => leads.has(name));
    const wanted = [...groups.filter(isFirst), ...groups.filter((group) => !isFirst(group))].map(([name, names]) => [name, ofCurves(names)]);
    if (runs.some(findsLr)) wanted.unshift(["loss by learning rate", byLr]);
    if (runs.some((r) => r.rank_changes?.length)) wanted.push(["ranks", ofRanks]);
    main.update(wanted);
    clocks.update(times.map((name) => [name, ofCurves([name])]));
    used.hidden = !times.length;
    long.hidden = !all.some((c) => c.total > c.x.length);
    const left = runs.reduce((sum, r) => sum + r.curves_left_out, 0);
    cut.hidden = !left;
    cut.textContent = `${short(left)} more names of numbers are not shown.`;
    long.textContent = `Long curves show the least and greatest value of each of up to 1,000 equal parts; the log has up to ${short(Math.max(...all.map((c) => c.total)))}.`;
  } };
})();
