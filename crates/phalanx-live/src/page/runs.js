"use strict";
// The runs below a folder: a list, and the curves of the chosen ones over each other. With ?id=N one run, as in its report.

const top_ = document.getElementById("live"), id = new URLSearchParams(location.search).get("id");

// The list.
const FIRST = 10;
const state = { folder: "", total: 0, runs: new Map() };
/** Runs that the user has chosen or not; of others the newest are drawn. */
const chosen = new Map();
/** The color of each run that is drawn, by its number. */
const colors = new Map();
let filter = "", isListed = false;

function apply(data, whole) {
  if (whole) state.runs.clear();
  for (const name of ["folder", "total"]) if (data[name] !== undefined) state[name] = data[name];
  for (const [name, change] of Object.entries(data.runs ?? {})) {
    if (!change) { state.runs.delete(name); continue; }
    if (change.all || !state.runs.has(name)) state.runs.set(name, { name, curves: {}, row: {} });
    const run = state.runs.get(name);
    if (change.row) run.row = change.row;
    if (change.about !== undefined) run.about = change.about;
    grow(run.curves, change.curves);
  }
  isListed = true;
}
const startOf = (run) => run.about?.started ?? 0;
const newest = () => [...state.runs.values()].sort((a, b) => startOf(b) - startOf(a) || (a.name < b.name ? -1 : 1));
const drawnRuns = () => newest().filter((run, i) => chosen.get(run.name) ?? i < FIRST);
const stateOf = (run) => run.row.is_read ? run.row.state : "reading";

/** Steps of the whole run, where they are known. */
function total(run) {
  const epochs = Number(run.about?.settings?.["--epochs"]), each = run.about?.steps_per_epoch;
  return epochs > 0 && each > 0 ? epochs * each : undefined;
}
const COLUMNS = [
  ["state", (run) => [stateOf(run), run.row.error].filter(Boolean).join(": ").slice(0, 200)],
  ["step", (run) => isNumber(run.row.step) ? count(run.row.step) + (total(run) > run.row.step ? ` of ${count(total(run))}` : "") : "–", 1],
  ["last loss", (run) => short(run.row.loss), 1],
  ["accuracy", (run) => percent(last(run, "accuracy")), 1],
  ["time", (run) => seconds_((stateOf(run) === "running" ? Date.now() / 1000 : run.row.written) - startOf(run)), 1],
  ["started", (run) => startOf(run) ? seconds_(Date.now() / 1000 - startOf(run)) + " ago" : "–", 1],
];
const heading = el("h1"), counts = el("span", { class: "soft", role: "status" }), message = el("div", { class: "message", hidden: "" }), left = note();
const all = el("input", { type: "checkbox", "aria-label": "draw all runs of the list", onchange: (e) => { for (const run of listed()) chosen.set(run.name, e.target.checked); draw(); } });
const search = el("label", {}, "filter by name ", el("input", { type: "search", size: "14", oninput: (e) => { filter = e.target.value; draw(); } }));
const body = el("tbody"), lines = new Map();
const listing = el("div", { class: "scroll run-table" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, all), el("th", {}, "run"), COLUMNS.map(([name, , number]) => el("th", number ? { class: "number" } : {}, name)))), body));
const listed = () => { const words = filter.toLowerCase().split(/\s+/); return newest().filter((run) => words.every((word) => run.name.toLowerCase().includes(word))); };

/** The line of a run. It stays, so that a click on it is not lost. */
function lineOf(run) {
  if (lines.has(run.name)) return lines.get(run.name);
  const box = el("input", { type: "checkbox", "aria-label": `draw ${run.name}`, onchange: (e) => { chosen.set(run.name, e.target.checked); draw(); } });
  const color = key(""), link = el("a", {}, run.name), cells = COLUMNS.map(([, , number]) => el("td", number ? { class: "number" } : {}));
  const word = el("span");
  cells[0].append(word);
  const line = { box, color, link, word, cells, root: el("tr", {}, el("td", {}, el("label", {}, box, color)), el("td", {}, link), cells) };
  lines.set(run.name, line);
  return line;
}
function drawList(drawn) {
  const by = {}, rows = listed();
  for (const run of state.runs.values()) by[stateOf(run)] = (by[stateOf(run)] ?? 0) + 1;
  heading.textContent = `Runs in ${state.folder}`;
  counts.textContent = connection === "lost" ? "no connection" : Object.entries(by).map(([name, n]) => `${short(n)} ${name}`).join(", ") || (isListed ? "no runs" : "connecting");
  document.title = `${by.running ? `${by.running} running: ` : ""}${state.folder}`;
  message.hidden = connection !== "lost";
  message.textContent = "The connection is lost: phalanx live has ended, or the network is down. The page tries to connect again and keeps what it has.";
  search.hidden = state.runs.size <= FIRST;
  listing.hidden = !state.runs.size;
  left.hidden = !isListed || (state.runs.size > 0 && state.total <= state.runs.size);
  left.textContent = state.runs.size ? `The newest ${count(state.runs.size)} of ${count(state.total)} runs are shown.` : "No folder with a run.json yet. Trainings write into runs, or --output-dir; they appear here as they start.";
  const hasAccuracy = [...state.runs.values()].some((run) => run.curves.accuracy);
  listing.classList.toggle("no-accuracy", !hasAccuracy);
  all.checked = rows.length > 0 && rows.every((run) => drawn.includes(run));
  all.indeterminate = !all.checked && rows.some((run) => drawn.includes(run));
  for (const run of rows) {
    const line = lineOf(run), isDrawn_ = drawn.includes(run);
    line.box.checked = isDrawn_;
    line.color.style.background = isDrawn_ ? colors.get(run.row.id) : "none";
    line.link.setAttribute("href", `run?id=${run.row.id}`);
    line.word.className = `state ${stateOf(run)}`;
    COLUMNS.forEach(([, text], i) => {
      const cell = i ? line.cells[i] : line.word, now = text(run);
      if (cell.textContent !== now) cell.textContent = now;
    });
  }
  for (const name of lines.keys()) if (!state.runs.has(name)) lines.delete(name);
  const roots = rows.map((run) => lines.get(run.name).root);
  if (roots.length !== body.children.length || roots.some((root, i) => root !== body.children[i])) body.replaceChildren(...roots);
}
/** Runs keep their colors while they are drawn. */
function color(drawn) {
  const ids = new Set(drawn.map((run) => run.row.id));
  for (const old of colors.keys()) if (!ids.has(old)) colors.delete(old);
  const uses = Array.from({ length: 8 }, (_, i) => [...colors.values()].filter((c) => c === `var(--c${i})`).length);
  for (const run of [...drawn].reverse()) {
    if (colors.has(run.row.id)) continue;
    const i = uses.indexOf(Math.min(...uses));
    uses[i]++;
    colors.set(run.row.id, `var(--c${i})`);
  }
}
function draw() {
  const drawn = drawnRuns();
  color(drawn);
  drawList(drawn);
  if (isListed) render(drawn.map((run) => ({ name: run.name, about: run.about, summary: {}, curves: run.curves, events: [], curves_left_out: 0, color: colors.get(run.row.id) })));
}

// One run.
async function show() {
  let again = true;
  try {
    const answer = await fetch(`report.json?id=${encodeURIComponent(id)}`);
    if (!answer.ok) throw new Error(await answer.text());
    const [end, run] = await answer.json();
    again = end.status === "running";
    message.hidden = true;
    render([{ ...run, finish: run.finish ?? end }]);
  } catch (error) {
    message.hidden = false;
    message.textContent = error instanceof TypeError ? "The connection is lost: phalanx live has ended, or the network is down." : error.message;
  }
  if (again) setTimeout(show, 5000);
}

if (id === null) {
  top_.append(el("div", { class: "top" }, heading, counts), message, el("div", { class: "bar" }, search), listing, left);
  const differing = part(() => [runs.map((r) => [r.label, r.about])], () => several() ? differences() : []);
  views.splice(0, views.length, curves, differing);
  page.classList.add("drawn-runs");
  listen(apply, drawing(draw));
} else {
  top_.append(el("a", { href: "." }, "all runs"), message);
  page.classList.add("report");
  show();
}
