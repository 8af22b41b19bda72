// The parts of the page in their order.

const views = [overview, curves, time, system, watch, logged, confusion, predictions, model, events];

/**
 * Shows `data`, a list of runs as `phalanx_report::Run` writes them. Can be called again with newer data:
 * what the user has chosen (zoom, smoothing, filters, what is folded) and the place on the page stay.
 */
function render(data) {
  const top = scrollY;
  runs = data.map((run, i) => {
    const same = data.filter((other) => other.name === run.name);
    const object = (v) => isObject(v) ? v : {};
    return { ...run, about: object(run.about), summary: object(run.summary), color: run.color ?? `var(--c${i % 8})`, label: same.length > 1 ? `${run.name} (${same.indexOf(run) + 1})` : run.name };
  });
  if (!page.children.length) page.append(...views.map((view) => view.root));
  for (const view of views) view.update();
  redraw();
  if (scrollY !== top) scrollTo({ top, behavior: "instant" });
}

addEventListener("resize", () => redraw());
addEventListener("beforeprint", () => redraw(true));
// None yet on the page of a job that goes on.
const given = JSON.parse(document.getElementById("data").textContent);
if (given.length) render(given);
