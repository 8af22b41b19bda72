"use strict";
// Shows what the stream of the job tells: the job itself above, its run as the report shows it.

const MOST_LINES = 200;
const top_ = document.getElementById("live");
let title_ = document.title, state = null, chosen = null;

/** Puts the message `data` into the state; `whole`: in place of it. */
function apply(data, whole) {
  if (whole) state = { job: null, ranks: [], notes: [], lines: {} };
  if (whole || data.folder !== undefined) Object.assign(state, { folder: null, goal: {}, measured: null, notices: [], curves: {}, report: {} });
  for (const name of ["job", "ranks", "notes", "folder", "goal", "measured"]) if (data[name] !== undefined) state[name] = data[name];
  if (data.notices) state.notices = (data.notices.all ? [] : state.notices).concat(data.notices.items).slice(-MOST_LINES);
  Object.assign(state.report, data.report);
  grow(state.curves, data.curves);
  for (const [rank, lines] of Object.entries(data.lines ?? {})) state.lines[rank] = (state.lines[rank] ?? []).concat(lines).slice(-MOST_LINES);
}

// How far the run is.
const bytes_ = (n) => !isNumber(n) ? "–" : n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : n >= 2 ** 20 ? `${Math.round(n / 2 ** 20)} MiB` : `${Math.round(n / 1024)} KiB`;
function progress() {
  const { epochs, steps_per_epoch: each, resumed_at, steps: taken } = state.goal, losses = state.curves.loss, clock = state.curves.elapsed_s;
  // The log may have every hundredth step only.
  const steps = Math.max(losses ? losses.x.at(-1) + 1 : 0, state.curves.train_loss?.x.at(-1) ?? 0, isNumber(taken) ? (resumed_at ?? 0) + taken : 0);
  const total = epochs > 0 && each > 0 ? epochs * each : undefined;
  // Over the last half minute of the log.
  let rate;
  if (clock && clock.x.length > 1) {
    const last = clock.x.length - 1;
    let first = last;
    while (first > 0 && (clock.y[last] - clock.y[first] < 30 || clock.x[last] === clock.x[first]) && clock.y[first - 1] <= clock.y[first] && clock.x[first - 1] <= clock.x[first]) first--;
    const passed = clock.y[last] - clock.y[first];
    if (passed > 0) rate = (clock.x[last] - clock.x[first]) / passed;
  }
  const epoch = each > 0 ? Math.min(Math.floor(steps / each) + 1, epochs || Infinity) : state.curves.epoch?.y.at(-1);
  return { steps, total, epochs, epoch, rate, share: total && Math.min(1, steps / total), left: total && rate ? Math.max(0, total - steps) / rate : undefined };
}

/** The words before the first flag. */
function name_(program) {
  const words = program.split(" "), flag = words.findIndex((word, i) => i && word.startsWith("-"));
  return words.slice(0, flag < 0 ? 8 : Math.min(flag, 8)).join(" ").slice(0, 100);
}

// The parts above the run's.
const WORDS = { running: "running", late: "late: other ranks wait for it", stopped: "stopped by a signal or a debugger", done: "finished", failed: "failed", ended: "ended by the launcher", elsewhere: "on another host" };
const jobPart = part(() => [state.job, connection, Math.floor(Date.now() / 1000), progress(), state.folder, state.report.about?.processor], () => {
  const job = state.job ?? {}, p = progress(), isOver = isNumber(job.ended), isLost = !isOver && connection === "lost";
  const passed = (isOver ? job.ended : Date.now() / 1000) - job.started;
  const state_ = isLost ? "lost" : job.state;
  title_ = `${isOver ? job.state : isLost ? "no connection" : p.share !== undefined ? Math.floor(100 * p.share) + " %" : "running"}: ${name_(job.program)}`;
  const cards = [
    ["time", seconds_(passed)],
    p.epoch && ["epoch", isNumber(p.epochs) ? `${short(p.epoch)} of ${short(p.epochs)}` : short(p.epoch)],
    p.steps && ["steps", p.total ? `${short(p.steps)} of ${short(p.total)}` : short(p.steps)],
    p.rate && ["steps/s", short(+p.rate.toPrecision(3))],
    !isOver && isNumber(p.left) && p.steps < p.total && ["left, about", seconds_(p.left)],
    ["ranks", state.ranks.length ? short(state.ranks.length) : "connecting"],
  ].filter(Boolean);
  return [
    el("div", { class: "top" }, el("h1", {}, name_(job.program ?? "")), el("span", { class: `state ${state_}`, role: "status" }, isLost ? "no connection" : job.state ?? "")),
    el("div", { class: "soft where" }, `on ${job.host}`, state.report.about?.processor ? ` (${state.report.about.processor})` : "", state.folder ? `, in ${state.folder}` : "", el("br"), el("code", {}, String(job.program ?? "").split(" ").flatMap((word) => [el("span", {}, word), " "]))),
    p.share !== undefined ? el("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.floor(100 * p.share), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "progress" }, el("i", { style: `width:${100 * p.share}%` })) : [],
    isLost ? el("div", { class: "message" }, "The connection to the job is lost: the job has been killed, or the network is down. The page tries to connect again and keeps what it has.") : [],
    job.message ? el("div", { class: "message" }, job.message) : [],
    job.trouble ? el("div", { class: "message" }, `The run's folder cannot be read: ${job.trouble}`) : [],
    el("div", { class: "cards" }, cards.map(([name, text]) => el("div", {}, el("small", {}, name), el("b", text.length > 9 ? { style: "font-size:.95rem" } : {}, text)))),
    isOver && job.state === "finished" ? note("The job has finished. This page keeps what it has until you close it; the run's folder has report.html.") : [],
  ];
});

const ranksPart = part(() => [state.ranks, state.measured], () => {
  if (!state.ranks.length) return [];
  const measured = new Map((state.measured ?? []).map((r) => [r.rank, r]));
  const others = state.ranks.filter((r) => r.state === "elsewhere").length;
  const columns = [
    ["rank", (r) => String(r.rank)],
    ["state", (r) => el("span", { class: `state ${r.state}` }, r.end && r.state === "failed" ? r.end : WORDS[r.state] ?? r.state)],
    ["host", (r) => r.host],
    ["process", (r, m) => shown(r.pid ?? m.pid), 1],
    ["CPU", (r, m) => isNumber(m.cpu_percent) ? `${Math.round(m.cpu_percent)} %` : "–", 1],
    ["memory", (r, m) => bytes_(m.memory_bytes), 1],
    ["steps", (r, m) => short(m.steps), 1],
    // Over shared memory nothing is.
    ["sent", (r, m) => bytes_(m.sent_bytes || undefined), 1],
  ].filter(([name]) => measured.size || !["CPU", "memory", "steps", "sent"].includes(name));
  const cell = (tag, text, number) => el(tag, number ? { class: "number" } : {}, text);
  return [el("h2", {}, "Processes"), el("div", { class: "scroll" }, el("table", { class: "rank-table" },
    el("thead", {}, el("tr", {}, columns.map(([name, , number]) => cell("th", name, number)))),
    el("tbody", {}, state.ranks.map((r) => el("tr", {}, columns.map(([, text, number], i) => cell(i ? "td" : "th", text(r, measured.get(r.rank) ?? {}), number))))))),
    others ? note(`The launcher of ${state.job?.host} shows the states and the output of its own ranks; those of the other ${others} are known to the launchers on their hosts.`) : []];
});

const notesPart = part(() => [state.notes, state.notices], () => {
  const all = [...state.notes, ...state.notices];
  return all.length ? [el("h2", {}, "Notices"), el("ul", { class: "notes" }, all.map((text) => el("li", {}, text)))] : [];
});

// The output of one rank at a time. It follows the last line unless the reader has scrolled up, also where it gets another size.
const log = el("pre", { class: "log", tabindex: 0, "aria-label": "output" });
const pick = el("div", { class: "bar" });
const logRoot = el("section", {}, el("h2", {}, "Output"), pick, log);
let drawn = "", choices = "", follows = true;
const toEnd = () => { if (follows) log.scrollTop = log.scrollHeight; };
log.addEventListener("scroll", () => { follows = log.scrollHeight - log.scrollTop - log.clientHeight < 30; });
new ResizeObserver(toEnd).observe(log);
function drawLog() {
  const ranks = Object.keys(state.lines).map(Number).sort((a, b) => a - b);
  logRoot.hidden = !ranks.length;
  if (!ranks.includes(chosen)) chosen = ranks[0] ?? null;
  const now = JSON.stringify([ranks, chosen]);
  if (now !== choices) {
    choices = now;
    const choose = (rank) => { chosen = +rank; drawLog(); };
    pick.replaceChildren(...(ranks.length > 12
      ? [el("label", {}, "rank", select(ranks.map((r) => [r, String(r)]), choose))]
      : ranks.map((r) => el("button", { "aria-pressed": r === chosen, onclick: () => choose(r) }, `rank ${r}`))), el("small", { class: "soft" }, "the last 200 lines; standard error is grey"));
  }
  const lines = state.lines[chosen] ?? [], text = JSON.stringify([chosen, lines]);
  if (text === drawn) return;
  drawn = text;
  log.replaceChildren(...lines.flatMap((line) => [line.err ? el("span", { class: "err" }, line.text) : line.text, "\n"]));
  toEnd();
}
const liveParts = [jobPart, ranksPart, notesPart];
top_.append(...liveParts.map((p) => p.root), logRoot);

/** The run, as a report of it. */
function run() {
  if (state.report.name === undefined) return [];
  const finish = state.report.finish ?? (isNumber(state.job?.ended) ? null : { status: "running" });
  return [{ ...state.report, finish, curves: state.curves }];
}
let isPlaced = false;
/** Curves come first; who runs, and the output, below them; what the report has above its curves is said already. */
function place() {
  isPlaced = true;
  curves.root.after(ranksPart.root, notesPart.root, logRoot);
  page.append(overview.root);
}
function draw() {
  if (!state) return;
  for (const p of liveParts) p.update();
  drawLog();
  const runs = run();
  if (runs.length) {
    render(runs);
    if (!isPlaced) place();
  }
  // The report has set its own.
  document.title = title_;
}
listen(apply, drawing(draw), () => isNumber(state?.job?.ended));
