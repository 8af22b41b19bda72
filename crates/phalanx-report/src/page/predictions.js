// Images of the test set, and what the network made of them after each evaluation.

const PAGE = innerWidth < 640 ? 20 : 60;
const SHOWN = [["", "all"], ["wrong", "wrong only"], ["right", "right only"], ["changed", "guess has changed"]];
const ORDERS = [["", "as logged"], ["worst", "least probable truth first"], ["sure", "most confident first"], ["unsure", "least confident first"]];

const predictions = partOfRuns((first) => {
  const picked = { show: "", group: "", order: "", epoch: "", page: 0 }, name = `run${runs.indexOf(first)}`;
  const list = el("div", { class: "preds" }), count = el("span", { class: "soft" }), some = el("small"), heading = el("div"), epochs = el("span"), style = el("style");
  document.head.append(style);
  let rows = [], sheet = null, before, run = first, byEpoch = new Map(), history = new Map();
  const turn = (by) => () => { picked.page += by; draw(); };
  const back = el("button", { onclick: turn(-1) }, "◀ previous"), next = el("button", { onclick: turn(1) }, "next ▶");
  const set = (what) => (value) => { picked[what] = value; picked.page = 0; draw(); };
  const isWrong = (p) => p.guess !== p.truth;
  const picture = (p) => el("div", { class: `pic ${name}`, style: `background-position:${-(p.place % sheet.per_row) * sheet.w}px ${-Math.floor(p.place / sheet.per_row) * sheet.h}px` });
  const share = (p) => p.shares[p.guess] ?? 0;
  const orders = { "": () => 0, worst: (a, b) => (a.shares[a.truth] ?? 0) - (b.shares[b.truth] ?? 0), sure: (a, b) => share(b) - share(a), unsure: (a, b) => share(a) - share(b) };
  const filters = { "": () => true, wrong: isWrong, right: (p) => !isWrong(p), changed: (p) => history.get(p.place).some((o) => o.guess !== p.guess) };

  /** The guesses of all epochs for the image of `p`. */
  function guesses(p) {
    const all = history.get(p.place);
    if (all.length < 2) return [];
    const cut = all.length > 12 ? [...all.slice(0, 2), ...all.slice(-10)] : all;
    return [el("div", { class: "guesses" }, cut.flatMap((o, i) => [cut !== all && i === 2 ? el("span", { class: "soft" }, "…") : [],
      el("span", { class: (isWrong(o) ? "wrong" : "") + (o === p ? " now" : ""), title: `epoch ${o.epoch}: ${className(run, o.guess)}, ${percent(share(o))}` }, run.summary.classes ? (isWrong(o) ? "✗" : "✓") : String(o.guess))].flat()))];
  }
  function draw() {
    const now = byEpoch.has(picked.epoch) ? picked.epoch : [...byEpoch.keys()].at(-1);
    const all = byEpoch.get(now).filter(filters[picked.show]), { group } = picked;
    all.sort((a, b) => (group ? a[group] - b[group] : 0) || orders[picked.order](a, b) || a.place - b.place);
    const pages = Math.max(1, Math.ceil(all.length / PAGE));
    picked.page = Math.min(Math.max(picked.page, 0), pages - 1);
    back.disabled = picked.page === 0;
    next.disabled = picked.page === pages - 1;
    count.textContent = `page ${picked.page + 1} of ${pages}, ${short(all.length)} images`;
    let last = null;
    list.replaceChildren(...all.slice(picked.page * PAGE, (picked.page + 1) * PAGE).flatMap((p) => {
      const wrong = isWrong(p);
      const bars = el("div", { class: "scores" }, p.shares.map((share, c) => el("span", { class: c === p.truth ? "truth" : c === p.guess ? "guess" : "", title: `${className(run, c)}: score ${p.scores[c]}, ${percent(share)}` }, el("i", { style: `height:${100 * share}%` }))));
      const card = el("div", { class: wrong ? "pred wrong" : "pred" }, sheet ? picture(p) : [], el("div", {}, el("div", {}, el("b", {}, `guess ${className(run, p.guess)}`), wrong ? `, truth ${className(run, p.truth)} ` : " ", el("small", {}, `${percent(p.shares[p.guess])}, image ${shown(p.image ?? p.id)}`)), bars, guesses(p)));
      if (!group || last === p[group]) return [card];
      last = p[group];
      const members = all.filter((o) => o[group] === last), bad = members.filter(isWrong).length;
      return [el("h3", {}, `${group} ${className(run, last)}: ${members.length} (${bad} wrong)`), card];
    }));
  }
  const root = el("section", { hidden: "" }, heading,
    el("div", { class: "bar noprint" }, epochs, el("label", {}, "show", select(SHOWN, set("show"))),
      el("label", {}, "group by", select([["", "nothing"], ["guess", "guess"], ["truth", "truth"]], set("group"))), el("label", {}, "order", select(ORDERS, set("order"))), back, next, count, some),
    list);
  return { root, update(given) {
    run = given;
    const now = JSON.stringify([run.predictions, run.predictions_total, run.pictures?.src.length, run.summary.classes]);
    if (now === before) return;
    before = now;
    // Each image is in the picture once, where it was first.
    const places = new Map(), place = (p, i) => { const image = p.image ?? `row ${i}`; if (!places.has(image)) places.set(image, places.size); return places.get(image); };
    rows = run.predictions.map((p, i) => isObject(p) ? { ...p, place: place(p, i), epoch: isNumber(p.epoch) ? String(p.epoch) : "" } : {});
    rows = rows.filter((p) => Number.isInteger(p.guess) && Number.isInteger(p.truth) && Array.isArray(p.scores) && p.scores.length && p.scores.every(isNumber));
    root.hidden = !rows.length;
    if (!rows.length) return;
    byEpoch = new Map();
    history = new Map();
    for (const p of rows) {
      const most = Math.max(...p.scores), powers = p.scores.map((s) => Math.exp(s - most)), sum = powers.reduce((a, b) => a + b, 0);
      p.shares = powers.map((v) => v / sum);
      for (const [map, id] of [[byEpoch, p.epoch], [history, p.place]]) map.has(id) ? map.get(id).push(p) : map.set(id, [p]);
    }
    sheet = run.pictures && { ...run.pictures };
    if (sheet) {
      const w = sheet.width / sheet.per_row, h = sheet.height / Math.ceil(places.size / sheet.per_row), zoom = Math.max(1, Math.round(56 / Math.max(w, h)));
      sheet.w = w * zoom;
      sheet.h = h * zoom;
      style.textContent = `.${name}{background-image:url(${sheet.src});background-size:${sheet.width * zoom}px;width:${sheet.w}px;height:${sheet.h}px}`;
    }
    heading.replaceChildren(ofRun("Predictions", run));
    const right = [...byEpoch].map(([epoch, all]) => [epoch, `epoch ${epoch}: ${short(all.filter((p) => !isWrong(p)).length)} of ${short(all.length)} right`]).reverse();
    epochs.replaceChildren(...(byEpoch.size > 1 ? [select(right, set("epoch"), picked.epoch)] : []));
    some.textContent = run.predictions_total > run.predictions.length ? `the first ${short(run.predictions.length)} of ${short(run.predictions_total)} rows` : "";
    draw();
  } };
});
