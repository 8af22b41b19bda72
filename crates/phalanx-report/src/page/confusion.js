// Confusion matrices: rows are the truth.

const confusion = part(() => [runs.map((r) => [r.label, r.summary.confusion, r.summary.class_accuracies, r.summary.classes])], () => runs.flatMap((run) => {
  const m = run.summary.confusion;
  if (!Array.isArray(m) || !m.length || !m.every((row) => Array.isArray(row) && row.length === m.length && row.every(isNumber))) return [];
  const sums = m.map((row) => row.reduce((a, b) => a + b, 0)), accuracy = (c) => percent(run.summary.class_accuracies?.[c] ?? (sums[c] ? m[c][c] / sums[c] : undefined));
  if (m.length > 40) {
    const most = m.flatMap((row, t) => row.map((n, g) => [t, g, n])).filter(([t, g, n]) => t !== g && n).sort((a, b) => b[2] - a[2]).slice(0, 30);
    return [ofRun("Confusion matrix", run), table(["truth", "guess", "count", "accuracy of the class"], most.map(([t, g, n]) => [className(run, t), className(run, g), count(n), accuracy(t)]))];
  }
  const worst = Math.max(1, ...m.flatMap((row, t) => row.filter((_, g) => g !== t)));
  const cell = (n, t, g) => {
    const share = t === g ? n / Math.max(1, sums[t]) : Math.sqrt(n / worst);
    return el("td", { title: `truth ${className(run, t)}, guess ${className(run, g)}: ${n}`, style: n ? `background:color-mix(in srgb, var(${t === g ? "--good" : "--bad"}) ${Math.round(share * (t === g ? 45 : 60))}%, var(--card))` : "color:var(--soft)" }, String(n));
  };
  const isLong = m.some((_, c) => className(run, c).length > 3);
  return [ofRun("Confusion matrix", run), el("div", { class: "scroll" }, el("table", { class: isLong ? "matrix named" : "matrix" },
    el("thead", {}, el("tr", {}, el("th"), el("th", { class: "guess", colspan: m.length }, "guess"), el("th")),
      el("tr", {}, el("th", {}, "truth"), m.map((_, g) => el("th", { class: "class" }, className(run, g))), el("th", { title: "of the class" }, "right"))),
    el("tbody", {}, m.map((row, t) => el("tr", {}, el("th", {}, className(run, t)), row.map((n, g) => cell(n, t, g)), el("th", {}, accuracy(t)))))))];
}));
