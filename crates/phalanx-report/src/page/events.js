// What happened: a list, and marks on the curves.

/** The place of an event on the axis of its run's curves; `undefined` where it has none. */
function placeOf(run, event) {
  const clock = run.curves.elapsed_s;
  if (overTime(run)) return event.step === null ? event.elapsed_s : seconds(run, event.step);
  if (event.step !== null) return event.step;
  if (!clock || !isNumber(event.elapsed_s)) return undefined;
  return clock.x[Math.min(lower(clock.y, event.elapsed_s), clock.x.length - 1)];
}
const marksOf = (run) => view.marks ? run.events.filter((e) => e.kind !== "finish")
  .map((e) => ({ x: placeOf(run, e), kind: e.kind, text: (several() ? run.label + ": " : "") + e.text })).filter((mark) => isNumber(mark.x)) : [];

const LISTED = 200;
const events = part(() => [runs.map((r) => [r.label, r.events, r.events_total])], () => {
  const rows = runs.flatMap((r) => r.events.map((e) => [...(several() ? [r.label] : []), isNumber(e.step) ? short(e.step) : "–", isNumber(e.elapsed_s) ? e.elapsed_s.toFixed(1) : "–", e.kind, e.text]));
  if (!rows.length) return [];
  const head = [...(several() ? ["run"] : []), "step", "seconds", "kind", "event"];
  const cut = runs.filter((r) => r.events_total > r.events.length).map((r) => `${several() ? r.label + ": " : ""}The first ${short(r.events.length)} of ${short(r.events_total)} events are shown.`);
  return [el("h2", {}, "Events"), table(head, rows.slice(0, LISTED)), ...cut.map((text) => note(text)),
    rows.length > LISTED ? folding("events", `${short(rows.length - LISTED)} more`, false, table(head, rows.slice(LISTED))) : []];
});
