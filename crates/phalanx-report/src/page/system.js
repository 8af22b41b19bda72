// What each rank did and used, by the `system` events.

const PARTS = [["computing", 0], ["waiting for other ranks", 5], ["exposed communication", 1], ["waiting for data", 3], ["saving", 4], ["evaluation", 2], ["other", 6]];
const RANKS = 16;

/** Of each rank what it did between two records: seconds of each of PARTS. */
function breakdown(system) {
  const n = system.elapsed_s.length, at = [], from = [];
  let offset = 0;
  for (let i = 0; i < n; i++) {
    const same = i > 0 && system.attempt[i] === system.attempt[i - 1];
    if (i && !same) offset += system.elapsed_s[i - 1];
    at.push(offset + system.elapsed_s[i]);
    from.push(i ? at[i - 1] : 0);
  }
  // Sums since the attempt began; a rank's last report counts where it has none.
  const steps = system.ranks.map((rank) => {
    const before = {};
    return at.map((end, i) => {
      const fresh = i === 0 || system.attempt[i] !== system.attempt[i - 1];
      const take = (name) => {
        const now = rank.values[name]?.[i];
        if (fresh) before[name] = 0;
        if (!isNumber(now)) return 0;
        // A process that was started in place of a lost one has sums of its own.
        const isNew = !fresh && (now < before[name] || !isNumber(rank.values[name][i - 1]));
        const passed = isNew ? Math.min(now, name === "sent_bytes" ? Infinity : at[i] - from[i]) : now - (before[name] || 0);
        before[name] = now;
        return Math.max(0, passed);
      };
      const [train, data, exposed, saving, evaluation, sent] = ["train_s", "data_s", "exposed_s", "saving_s", "evaluation_s", "sent_bytes"].map(take);
      return { train, data, exposed, saving, evaluation, sent, there: isNumber(rank.values.train_s?.[i]) };
    });
  });
  const parts = system.ranks.map(() => []);
  for (let i = 0; i < n; i++) {
    // The slowest rank waits for no other.
    const own = (s) => s[i].train - s[i].exposed, slowest = Math.max(...steps.filter((s) => s[i].there).map(own));
    steps.forEach((s, r) => {
      const { train, data, exposed, saving, evaluation, there } = s[i];
      if (!there) return parts[r].push(null);
      const waiting = Math.min(exposed, Math.max(0, slowest - own(s)));
      parts[r].push([Math.max(0, train - data - exposed - saving), waiting, exposed - waiting, data, saving, evaluation, Math.max(0, at[i] - from[i] - evaluation - Math.max(train, data + exposed + saving))]);
    });
  }
    // The end of a run is a part of an interval: what a rank used in it is no measure of the run.
  const lengths = at.map((end, i) => end - from[i]), usual = [...lengths].sort((a, b) => a - b)[n >> 1];
  return { at, from, parts, isWhole: lengths.map((length) => n === 1 || length >= usual / 2), sent: steps.map((s) => s.map((step, i) => step.sent / Math.max(1e-9, at[i] - from[i]))) };
}

/** Stacked bars of one rank over time. */
function strip(told, parts, label) {
  const svg = el("svg:svg", { class: "strip", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": label });
  const end = told.at.at(-1) || 1, paths = PARTS.map(() => "");
  parts.forEach((values, i) => {
    if (!values) return;
    const x = 1000 * told.from[i] / end, width = 1000 * (told.at[i] - told.from[i]) / end, all = values.reduce((a, b) => a + b, 0) || 1;
    let y = 100;
    values.forEach((v, p) => {
      if (p === PARTS.length - 1) return;
      const height = 100 * v / all;
      y -= height;
      if (height > 0) paths[p] += `M${x.toFixed(2)} ${y.toFixed(2)}h${width.toFixed(2)}v${height.toFixed(2)}h${(-width).toFixed(2)}z`;
    });
  });
  svg.append(...paths.map((d, p) => d ? el("svg:path", { d, style: `fill:var(--c${PARTS[p][1]});stroke:none` }) : []).flat());
  svg.onpointermove = (e) => {
    const box = svg.getBoundingClientRect(), i = Math.min(lower(told.at, end * (e.clientX - box.left) / box.width), told.at.length - 1);
    if (parts[i]) showTip(e, [el("div", {}, `${label}, ${short(told.from[i])} s to ${short(told.at[i])} s`), ...parts[i].flatMap((v, p) => v > 0 ? [el("div", {}, key(`var(--c${PARTS[p][1]})`), ` ${PARTS[p][0]} ${v.toFixed(2)} s`)] : [])]);
  };
  svg.onpointerleave = () => { tip.hidden = true; };
  return svg;
}

const system = partOfRuns((first) => {
  const root = el("section", { hidden: "" }), body = el("div"), used = grid();
  const picked = { first: 0 };
  let told, before, run = first;
  const legend = el("div", { class: "bar" }, PARTS.map(([name, c]) => el("small", {}, key(`var(--c${c})`), " " + name)));
  const pages = el("span");
  const draw = () => {
    const { ranks } = run.system, some = ranks.slice(picked.first, picked.first + RANKS), index = (rank) => ranks.indexOf(rank);
    const sums = ranks.map((_, r) => PARTS.map((_, p) => told.parts[r].reduce((a, values) => a + (values ? values[p] : 0), 0)));
    const longest = Math.max(1e-9, ...sums.map((s) => s.reduce((a, b) => a + b, 0)));
    const total = el("div", { class: "ranks" }, some.flatMap((rank) => {
      const sum = sums[index(rank)];
      return [el("small", {}, `rank ${rank.rank}`), el("div", { class: "time", style: `width:${100 * sum.reduce((a, b) => a + b, 0) / longest}%` }, sum.map((s, p) => s > 0 ? el("i", { title: `${PARTS[p][0]}: ${s.toFixed(2)} s`, style: `flex:${s} 0 0;background:var(--c${PARTS[p][1]})` }) : []).flat())];
    }));
    const strips = el("div", { class: "ranks" }, some.flatMap((rank) => [el("small", {}, `rank ${rank.rank}`), strip(told, told.parts[index(rank)], `rank ${rank.rank}`)]));
    const rows = some.map((rank) => {
      const r = index(rank), steps = (rank.values.steps || []).filter(isNumber), all = sums[r].reduce((a, b) => a + b, 0) || 1;
      return [`rank ${rank.rank}`, rank.host, short(steps.at(-1)), ...sums[r].map((s) => `${s.toFixed(1)} (${(100 * s / all).toFixed(1)} %)`)];
    });
    pages.replaceChildren(...(ranks.length > RANKS ? [el("label", {}, "ranks ", select(Array.from({ length: Math.ceil(ranks.length / RANKS) }, (_, i) => [String(i * RANKS), `${i * RANKS} to ${Math.min(ranks.length, (i + 1) * RANKS) - 1}`]), (value) => { picked.first = +value; draw(); redraw(); }, String(picked.first)))] : []));
    body.replaceChildren(el("h3", {}, "Total"), total, el("h3", {}, `Over time, 0 to ${short(told.at.at(-1))} s`), strips,
      folding(`ranks ${run.label}`, "Seconds by rank", false, table(["rank", "host", "steps", ...PARTS.map(([name]) => name)], rows)));
    const line = (name, scale, from = some) => () => ({ axis: "seconds", start: 0, legend: true, series: from.map((rank) => {
      const isRate = name === "sent" || name === "cpu_percent", values = name === "sent" ? told.sent[index(rank)] : rank.values[name] || [];
      const there = values.map((v, i) => [told.at[i], v]).filter(([, v], i) => isNumber(v) && (!isRate || told.isWhole[i]));
      return { label: `rank ${rank.rank}`, color: `var(--c${rank.rank % 8})`, dash: rank.rank % 16 > 7 ? "5 3" : undefined, x: there.map(([t]) => t), y: there.map(([, v]) => v * scale), place: (i) => `at ${short(there[i][0])} s` };
    }).filter((s) => s.x.length) });
    const wanted = [["processor, % of one core", line("cpu_percent", 1)], ["resident memory, MiB", line("memory_bytes", 1 / 1048576)], ["sent to other ranks, MB/s", line("sent", 1e-6)],
      ["load average of the host", line("load", 1, ranks)], ["free memory of the host, MiB", line("memory_free_bytes", 1 / 1048576, ranks)]];
    used.update(wanted.filter(([, get]) => get().series.some((s) => s.y.some((v) => v > 0))));
  };
  return { root, update(now) {
    run = now;
    const text = JSON.stringify(run.system);
    if (text === before) return;
    before = text;
    root.hidden = !run.system || !run.system.ranks.length;
    if (root.hidden) return;
    told = breakdown(run.system);
    const { system } = run, cut = [];
    if (system.records_total > system.elapsed_s.length) cut.push(`${short(system.elapsed_s.length)} of ${short(system.records_total)} records, evenly spread, are shown.`);
    if (system.ranks_total > system.ranks.length) cut.push(`The first ${system.ranks.length} of ${system.ranks_total} ranks are shown.`);
    root.replaceChildren(ofRun("Ranks", run), el("div", { class: "bar" }, legend, pages), body,
      note("A rank waited for others as long as the slowest rank's time without exposed communication exceeds its own; the rest of exposed communication is communication. ", ...cut), used.root);
    draw();
  } };
});
