// Images, tables and texts that the program has logged.

const logged = part(() => [runs.map((r) => [r.label, r.logged, r.logged_total])], () => runs.flatMap((run) => {
  const of = (kind) => {
    const names = new Map();
    for (const entry of run.logged) if (entry.kind === kind) names.set(entry.name, [...(names.get(entry.name) || []), entry]);
    return [...names];
  };
  const at = (entry) => isNumber(entry.step) ? `step ${short(entry.step)}` : "no step";
  const some = (entries) => entries[0].of > entries.length ? [note(`${short(entries.length)} of ${short(entries[0].of)}, evenly spread over the run, are shown.`)] : [];
  const images = of("image").flatMap(([name, entries]) => [el("h3", {}, name), el("div", { class: "images" }, entries.map((entry) => el("figure", {},
    entry.src ? el("img", { src: entry.src, alt: `${name}, ${at(entry)}` }) : el("p", { class: "soft" }, entry.why), el("figcaption", {}, at(entry))))), ...some(entries)]);
  const tables = of("table").flatMap(([name, entries]) => [el("h3", {}, name), ...entries.map((entry, i) => {
    if (!entry.rows) return note(`${at(entry)}: ${entry.why}`);
    const rows = entry.rows.filter(isObject), head = [...new Set(rows.flatMap(Object.keys))].slice(0, 30);
    return folding(`table ${run.label} ${name} ${entry.step}`, `${at(entry)}: ${short(entry.total)} rows` + (entry.total > entry.rows.length ? `, the first ${short(entry.rows.length)} are shown` : ""), i === entries.length - 1 && rows.length <= 50,
      el("div", { class: "tall" }, table(head, rows.map((row) => head.map((h) => isNumber(row[h]) ? short(row[h]) : shown(row[h]))))));
  }), ...some(entries)]);
  const texts = of("text").flatMap(([name, entries]) => [el("h3", {}, name), ...entries.map((entry) => el("div", { class: "text" }, el("small", {}, at(entry) + (entry.is_cut ? ", cut" : "")), el("pre", {}, entry.text))), ...some(entries)]);
  const told = [...new Map(run.logged.map((entry) => [JSON.stringify([entry.kind, entry.name]), entry.of])).values()].reduce((a, b) => a + b, 0);
  const more = run.logged_total > told ? [note(`${short(run.logged_total - told)} images, tables and texts of other names are not shown.`)] : [];
  return [["Images", images], ["Tables", tables], ["Texts", texts]].flatMap(([title, parts]) => parts.length ? [ofRun(title, run), ...parts] : []).concat(more);
}));
