// The title, results and settings. What is not a known result is a setting.

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
const RESULTS = /^(accurac(y|ies)|class_accuracies|classes|confusion|arguments|images_per_s|sent_bytes|skipped_steps|exposed_comm_percent|peak_rss_mib|test_.*|.*_s|.*_sha256)$/;
const ABOUT = ["program", "data", "ranks", "threads_per_rank", "transport", "host", "processor", "steps_per_epoch", "attempt", "id", "phalanx"];
const plain = (name) => name.replace(/^--/, "").replaceAll("-", "_");
/** Every setting by its name, and which of them were given at the command line. */
function settings(run) {
  const all = {}, typed = new Set(), { about, summary } = run, known = new Set(["recipe", "world_size", "version", "unit"]);
  const words = (Array.isArray(about.arguments) ? about.arguments : Array.isArray(summary.arguments) ? summary.arguments : []).map(String);
  if (isObject(about.settings)) {
    for (const [name, value] of Object.entries(about.settings)) { all[name] = shown(value); known.add(plain(name)); }
    for (const name of Array.isArray(about.typed) ? about.typed : []) typed.add(String(name));
    for (const name of ABOUT) if (about[name] !== undefined && !known.has(name)) { all[name] = shown(about[name]); known.add(name); }
  }
  else known.clear();
  for (const [name, value] of Object.entries(summary)) if (!RESULTS.test(name) && !known.has(plain(name))) all[name] = shown(value);
  if (!isObject(about.settings)) words.forEach((word, i) => {
    if (!word.startsWith("--") || word === "--") return;
    const [, flag, value] = word.match(/^(--[^=]*)=?([^]*)$/), next = words[i + 1];
    const given = word.includes("=") ? value : next === undefined || next.startsWith("--") ? "on" : next;
    if (all[plain(flag)] !== given) all[flag.replaceAll("_", "-")] = given;
  });
  return { all, typed };
}
const otherResults = (run) => Object.entries(run.summary).filter(([name, value]) => RESULTS.test(name) && typeof value !== "object" && name !== "test_s");

/** How the run ended, in words, and whether it ended as it should. */
function status({ finish, summary, about }) {
  const attempt = about.attempt > 1 ? `, attempt ${about.attempt}` : "";
  if (finish?.status === "failed") return [`failed${attempt}${finish.error ? ": " + finish.error : ""}`, "bad"];
  if (finish?.status === "stopped") return [`stopped${attempt}${finish.error ? ": " + finish.error : "; it can be resumed"}`, "soft"];
  if (finish?.status === "finished" || Object.keys(summary).length) return ["finished" + attempt, "good"];
  // The page of a job that goes on says so.
  if (finish?.status === "running") return ["running" + attempt, "good"];
  return [`not finished${attempt}: it is running, or was killed`, "bad"];
}

const overview = part(() => [runs.map((r) => [r.label, r.summary, r.about, r.finish, results.map(([, text]) => text(r))])], () => {
  const recipe = [...new Set(runs.map((r) => r.about.program ?? r.summary.recipe).filter(Boolean).map(String))].join(", ");
  const title = (recipe ? recipe + ": " : "") + runs.map((r) => r.label).join(", ");
  document.title = title + " – Phalanx report";
  const parts = [el("h1", {}, title)];
  if (!several()) {
    const run = runs[0], [text, kind] = status(run), { all, typed } = settings(run);
    const started = isNumber(run.about.started) ? ` – started ${new Date(run.about.started * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC` : "";
    parts.push(el("p", {}, el("b", { class: kind }, text), el("span", { class: "soft" }, [run.about.data, run.about.transport ?? run.summary.transport].filter(Boolean).map((v) => " – " + shown(v)).join("") + started)));
    parts.push(el("div", { class: "cards" }, results.map(([name, text]) => [name, text(run)]).filter(([, text]) => text !== "–")
      .map(([name, text]) => el("div", {}, el("small", {}, name), el("b", text.length > 9 ? { style: "font-size:.95rem" } : {}, text)))));
    const entries = Object.entries(all), given = entries.filter(([name]) => typed.has(name)), rest = entries.filter(([name]) => !typed.has(name));
    if (given.length) parts.push(folding("given", "Settings given at the command line", true, pairs(given)));
    if (rest.length) parts.push(folding("settings", given.length ? "Other settings, with their defaults" : "Settings", !given.length, pairs(rest)));
    if (Object.keys(run.summary).length) parts.push(folding("results", "All results", false, pairs(otherResults(run))));
    return parts;
  }
  parts.push(table(["run", "status", ...results.map(([name]) => name)], runs.map((r) => {
    const [text, kind] = status(r);
    return [el("span", {}, key(r.color), " ", r.label), el("span", { class: kind }, text), ...results.map(([, text]) => text(r))];
  })));
  const all = runs.map((r) => settings(r).all), names = [...new Set(all.flatMap(Object.keys))].filter((n) => n !== "--output-dir" && n !== "id");
  const rows = (some) => table(["setting", ...runs.map((r) => r.label)], some.map((n) => [n, ...all.map((s) => shown(s[n]))]));
  const differ = names.filter((n) => all.some((s) => s[n] !== all[0][n])), same = names.filter((n) => !differ.includes(n));
  parts.push(el("h2", {}, "Different settings"), differ.length ? rows(differ) : note("none"));
  if (same.length) parts.push(folding("same", `Settings that are the same (${short(same.length)})`, false, pairs(same.map((n) => [n, all[0][n]]))));
  return parts;
});
