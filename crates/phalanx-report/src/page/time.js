// Where the time of a run went, by its summary.

const time = part(() => [runs.map((r) => [r.label, r.summary])], () => {
  const times = runs.map((run) => {
    const s = run.summary, number = (v) => isNumber(v) ? Math.max(0, v) : 0;
    if (!isNumber(s.train_s) || !isNumber(s.total_s)) return null;
    const exposed = s.train_s * number(s.exposed_comm_percent) / 100, wait = number(s.data_wait_s), saving = number(s.saving_s), test = number(s.test_s);
    return { run, attempt: earlier(run) ? ` of attempt ${run.about.attempt}` : "", total: s.total_s, parts: [["computing", s.train_s - exposed - wait - saving, 0], ["exposed communication", exposed, 1], ["waiting for data", wait, 3], ["saving", saving, 4], ["test", test, 2], ["other (start, files)", s.total_s - s.train_s - test, 6]] };
  }).filter(Boolean);
  if (!times.length) return [];
  const longest = Math.max(...times.map((t) => t.total));
  return [el("h2", {}, "Time"), ...times.flatMap((t) => {
    const parts = t.parts.filter(([, s]) => s > 0);
    return [el("div", {}, several() ? t.run.label + " " : "", el("small", {}, `${t.total.toFixed(1)} s${t.attempt}`)),
      el("div", { class: "time", style: `width:${100 * t.total / longest}%` }, parts.map(([name, s, c]) => el("i", { title: `${name}: ${s.toFixed(2)} s`, style: `flex:${s} 0 0;background:var(--c${c})` }))),
      el("div", { class: "bar" }, parts.map(([name, s, c]) => el("small", {}, key(`var(--c${c})`), ` ${name} ${s.toFixed(2)} s (${(100 * s / t.total).toFixed(1)} %)`)))];
  })];
});
