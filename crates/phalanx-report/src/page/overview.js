// The title, results and settings. What is not a known result is a setting.

const last = (run, name) => run.curves[name] ? run.curves[name].y.at(-1) : undefined;
/** Of the weights that a run ended with, which may not be evaluated; before its end of the last evaluation. */
const ofWeights = (run, name) => name in run.summary ? run.summary[name] : last(run, name);
/** What a run calls its samples; older runs do not say. */
const unitOf = (run) => typeof run.summary.unit === "string" ? run.summary.unit : "images";
const speedName = () => { const [unit, ...others] = new Set(runs.map(unitOf)); return `${others.length ? "samples" : unit}/s`; };
/** The best value of the measure that the program has named, and where it was; `undefined` where it named none. */
function bestOf({ about, curves }) {
  const [, name, order] = String(about.settings?.best ?? "").match(/^(.+):(max|min)$/) ?? [], curve = [`test_${name}`, name].find((n) => curves[n]);
  if (!name || !curve) return undefined;
  const { x, y } = curves[curve], value = fold(order === "max" ? Math.max : Math.min, [y], y[0]), step = x[y.indexOf(value)], steps = about.steps_per_epoch;
  const epoch = steps > 0 ? Math.floor(step / steps) + (step > 0 && step % steps === 0 ? 0 : 1) : undefined;
  return { name, curve, value, step, epoch, text: `${name === "accuracy" ? percent(value) : short(value)}${epoch ? ` in epoch ${short(epoch)}` : ""}` };
}
const bestName = () => `best ${[...new Set(runs.map((run) => bestOf(run)?.name).filter(Boolean))].join(", ")}`.trim();
/** Seconds of the attempts before the last one, by the `system` events. */
const earlier = ({ system }) => system ? system.elapsed_s.filter((_, i) => i + 1 < system.attempt.length && system.attempt[i] !== system.attempt[i + 1]).reduce((a, b) => a + b, 0) : 0;
/** Of each result its name, its value in a run, and how it is shown. */
const results = [
  [bestName, (r) => bestOf(r)?.text, (v) => v ?? "–"],
  ["suggested learning rate", (r) => last(r, "suggested_lr")],
  ["accuracy", (r) => ofWeights(r, "accuracy"), percent],
  ["test loss", (r) => ofWeights(r, "test_loss")],
  ["train loss", (r) => findsLr(r) ? undefined : last(r, "train_loss") ?? last(r, "loss")],
  [speedName, (r) => r.summary.images_per_s],
  ["MFU", (r) => r.summary.mfu, percent],
  ["total time", (r) => isNumber(r.summary.total_s) ? earlier(r) + r.summary.total_s : undefined, (v) => isNumber(v) ? `${short(v)} s` : "–"],
  ["skipped steps", (r) => r.summary.skipped_steps || undefined],
  ["weights", (r) => r.summary.weights_sha256, (v) => typeof v === "string" ? v.slice(0, 12) + "…" : "–"],
];
const resultNames = () => results.map(([name]) => typeof name === "function" ? name() : name);
/** The results of a run, in the order of their names. */
const resultsOf = (run) => results.map(([, of, say = short]) => { const full = of(run), text = say(full); return el("span", { title: text === "–" ? undefined : shown(full) }, text); });
const RESULTS = /^(accurac(y|ies)|class_accuracies|classes|confusion|arguments|images_per_s|sent_bytes|skipped_steps|exposed_comm_percent|peak_rss_mib|mfu|rank_flops_per_step|test_.*|.*_s|.*_sha256)$/;
const ABOUT = ["program", "data", "ranks", "threads_per_rank", "transport", "host", "user", "processor", "system", "steps_per_epoch", "attempt", "id", "phalanx"];
const plain = (name) => name.replace(/^--/, "").replaceAll("-", "_");
const argumentsOf = ({ about, summary }) => (Array.isArray(about.arguments) ? about.arguments : Array.isArray(summary.arguments) ? summary.arguments : []).map(String);
/** The words of the command that started the run, as a shell takes them. */
const commandOf = (run) => [run.about.command ?? "phalanx", ...argumentsOf(run)].map((word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", "'\\''")}'`);
/** Every setting by its name, and which of them were given at the command line. */
function settings(run) {
  const all = {}, typed = new Set(), { about, summary } = run, known = new Set(["recipe", "world_size", "version", "unit"]);
  const words = argumentsOf(run);
  if (isObject(about.settings)) {
    for (const [name, value] of Object.entries(about.settings)) { all[name] = shown(value); known.add(plain(name)); }
    for (const name of ABOUT) if (about[name] !== undefined && !known.has(name)) { all[name] = shown(about[name]); known.add(name); }
  }
  else known.clear();
  for (const [name, value] of Object.entries(summary)) if (!RESULTS.test(name) && !known.has(plain(name))) all[name] = shown(value);
  if (isObject(about.git) && about.git.commit) all.git = about.git.commit.slice(0, 12) + (about.git.branch ? ` (${about.git.branch})` : "") + (about.git.modified ? ", modified" : "");
  words.forEach((word, i) => {
    if (!word.startsWith("--") || word === "--") return;
    const [, flag, value] = word.match(/^(--[^=]*)=?([^]*)$/), next = words[i + 1], name = flag.replaceAll("_", "-");
    // They have places of their own.
    if (["--tag", "--note"].includes(name)) return;
    const given = word.includes("=") ? value : next === undefined || next.startsWith("--") ? "on" : next;
    // A run says itself what it took a flag for; flags of its launcher are not among its settings.
    if (isObject(about.settings)) { typed.add(name); all[name] ??= given; }
    else if (all[plain(flag)] !== given) all[name] = given;
  });
  return { all, typed };
}
const otherResults = (run) => Object.entries(run.summary).filter(([name, value]) => RESULTS.test(name) && typeof value !== "object" && name !== "test_s")
  .map(([name, value]) => [name === "images_per_s" ? `${unitOf(run)}_per_s` : name, value]);

/** The user's tags by name; one without a value has a mark. */
const tagsOf = ({ about }) => Object.fromEntries(Object.entries(isObject(about.tags) ? about.tags : {}).map(([name, v]) => [name, v ?? "✓"]));
const noteOf = ({ about }) => typeof about.note === "string" ? about.note : "";

/** How the run ended, in words, and whether it ended as it should. */
function status({ finish, summary, about }) {
  const attempt = about.attempt > 1 ? `, attempt ${about.attempt}` : "", done = isLrSearch({ about }) ? "learning-rate search finished" : "finished";
  if (finish?.status === "failed") return [`failed${attempt}${finish.error ? ": " + finish.error : ""}`, "bad"];
  if (finish?.status === "stopped") return [`stopped${attempt}${finish.error ? ": " + finish.error : "; it can be resumed"}`, "soft"];
  if (finish?.status === "finished" || Object.keys(summary).length) return [done + attempt, "good"];
  // The page of a job that goes on says so.
  if (finish?.status === "running") return ["running" + attempt, "good"];
  return [`not finished${attempt}: it is running, or was killed`, "bad"];
}

const overview = part(() => [runs.map((r) => [r.label, r.summary, r.about, r.finish, results.map(([, of]) => of(r))])], () => {
  const recipe = [...new Set(runs.map((r) => r.about.program ?? r.summary.recipe).filter(Boolean).map(String))].join(", ");
  const title = (recipe ? recipe + ": " : "") + runs.map((r) => r.label).join(", ");
  document.title = title + " – Phalanx report";
  const parts = [el("h1", {}, title)];
  if (!several()) {
    const run = runs[0], [text, kind] = status(run), { all } = settings(run);
    const started = isNumber(run.about.started) ? ` – started ${new Date(run.about.started * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC` : "";
    parts.push(el("p", {}, el("b", { class: kind }, text), el("span", { class: "soft" }, [run.about.data, run.about.transport ?? run.summary.transport].filter(Boolean).map((v) => " – " + shown(v)).join("") + started)));
    const tags = Object.entries(tagsOf(run));
    if (tags.length) parts.push(el("p", { class: "tags" }, tags.flatMap(([name, v]) => [el("span", {}, v === "✓" ? name : `${name}: ${v}`), " "])));
    if (noteOf(run)) parts.push(el("p", { class: "note" }, noteOf(run)));
    const cards = resultsOf(run), names = resultNames();
    parts.push(el("div", { class: "cards" }, cards.flatMap((card, i) => card.textContent === "–" || names[i] === "weights" ? []
      : el("div", {}, el("small", {}, names[i]), el("b", card.textContent.length > 9 ? { class: "long" } : {}, card)))));
    if (argumentsOf(run).length) parts.push(el("pre", { class: "command", title: "the command" }, commandOf(run).flatMap((word) => [el("span", {}, word), " "])));
    const entries = Object.entries(all), isTold = argumentsOf(run).length > 0;
    if (entries.length) parts.push(folding("settings", isTold ? "All settings, with their defaults" : "Settings", !isTold, pairs(entries)));
    if (Object.keys(run.summary).length) parts.push(folding("results", "All results", false, pairs(otherResults(run))));
    return parts;
  }
  const cells = runs.map(resultsOf), has = resultNames().map((_, i) => cells.some((row) => row[i].textContent !== "–"));
  parts.push(table(["run", "status", ...resultNames().filter((_, i) => has[i])], runs.map((r, n) => {
    const [text, kind] = status(r);
    return [el("span", {}, key(r.color), " ", r.label), el("span", { class: kind }, text), ...cells[n].filter((_, i) => has[i])];
  })));
  const tags = runs.map(tagsOf), notes = runs.map(noteOf), tagNames = [...new Set(tags.flatMap(Object.keys))];
  const rowOf = (name, texts) => [name, ...texts.map((text) => el("span", { class: "note" }, String(text)))];
  const labels = [...tagNames.map((n) => rowOf(n, tags.map((of) => of[n] ?? ""))), ...(notes.some(Boolean) ? [rowOf("note", notes)] : [])];
  if (labels.length) parts.push(el("h2", {}, "Tags and notes"), table(["tag", ...runs.map((r) => r.label)], labels));
  return [...parts, ...differences()];
});

/** The settings of several runs: which differ, and which are the same. */
function differences() {
  const all = runs.map((r) => settings(r).all), names = [...new Set(all.flatMap(Object.keys))].filter((n) => n !== "--output-dir" && n !== "id");
  const rows = (some) => table(["setting", ...runs.map((r) => r.label)], some.map((n) => [n, ...all.map((s) => value(s[n]))]));
  const differ = names.filter((n) => all.some((s) => s[n] !== all[0][n])), same = names.filter((n) => !differ.includes(n));
  return [el("h2", {}, "Different settings"), differ.length ? rows(differ) : note("none"),
    ...(same.length ? [folding("same", `Settings that are the same (${short(same.length)})`, false, pairs(same.map((n) => [n, all[0][n]])))] : [])];
}
