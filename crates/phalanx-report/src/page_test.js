// Run by the unit tests where there is node: the page's functions without a browser. Prints what is wrong.

const element = () => {
  const children = [], attributes = {};
  const text = () => children.map((c) => typeof c === "string" ? c : c.textContent).join("");
  return { children, attributes, style: {}, classList: { add() {} }, append: (...more) => children.push(...more.filter((c) => c !== "")), replaceChildren: (...more) => children.splice(0, children.length, ...more),
    setAttribute: (key, value) => { attributes[key] = value; }, addEventListener() {}, get textContent() { return text(); }, set textContent(t) { children.splice(0, children.length, t); } };
};
globalThis.document = { createElement: element, createElementNS: element, getElementById: () => ({ ...element(), textContent: "[]" }), head: element() };
globalThis.IntersectionObserver = class { observe() {} unobserve() {} };
Object.assign(globalThis, { innerWidth: 1280, innerHeight: 900, scrollY: 0, addEventListener() {}, scrollTo() {} });

const script = require("fs").readFileSync(0, "utf8");
const names = ["tensorSeries", "short", "percent", "value", "className", "csv", "convert", "settings", "tagsOf", "noteOf", "commandOf", "resultNames", "perEpoch", "ticks", "breakdown", "byLr", "bestOf", "lossByPart", "ofRanks", "earlier", "status", "resultsOf", "chart"];
const page_ = new Function(script + `\nreturn { ${names}, shownRuns: (data) => { runs = data.map((run) => ({ curves: {}, events: [], about: {}, summary: {}, label: "run", ...run })); return runs; } };`)();
function same(what, is, expected) {
  if (JSON.stringify(is) !== JSON.stringify(expected)) console.log(`${what}: ${JSON.stringify(is)}, expected ${JSON.stringify(expected)}`);
}

const clock0 = () => ({ x: [1], y: [1] });
const numbers = [[0, "0"], [2.0350001, "2.035"], [0.070383, "0.07038"], [0.43606457114219666, "0.4361"], [1109.571462455403, "1,110"], [999999, "999,999"], [1e6, "1e6"], [1e20, "1e20"], [-12345678, "-1.235e7"], [9.95e-4, "9.95e-4"], [NaN, "–"], [null, "–"]];
for (const [v, text] of numbers) same(`short(${v})`, page_.short(v), text);
same("percent", [0.917, 0.4812, 1].map(page_.percent), ["91.70 %", "48.12 %", "100.00 %"]);
for (const [v, text, title] of [["a".repeat(64), "aaaaaaaaaaaa…", "a".repeat(64)], ["SGD lr 100000000000000000000", "SGD lr 1e20", "SGD lr 100000000000000000000"], [1109.571462455403, "1,110", "1109.571462455403"], ["0.05", "0.05", undefined], ["--seed 1234567890", "--seed 1234567890", undefined], ["127.0.0.1", "127.0.0.1", undefined]]) {
  const made = page_.value(v);
  same(`value(${v})`, [made.textContent, made.attributes.title], [text, title]);
}
same("classes", [0, 1, 2, 3].map((c) => page_.className({ summary: { classes: ["\n", " ", "a b"] } }, c)), ["\\n", "␣", "a b", "3"]);
page_.shownRuns([{ about: { settings: { "--find-lr": "true" } }, curves: { lr: { x: [1, 2, 3], y: [1e-3, 1e-2, 0.1] }, loss: { x: [1, 3], y: [5, 4] }, suggested_lr: { x: [3], y: [0.01] } } }, { curves: { lr: clock0(), loss: clock0() } }]);
const rates = page_.byLr();
same("by learning rate", [rates.series.map(({ x, y }) => [x.map((v) => +v.toFixed(9)), y]), rates.marks.map((mark) => [mark.x, mark.text])], [[[[-3, -1], [5, 4]]], [[-2, "run: suggested learning rate 0.01"]]]);
same("csv", page_.csv("step", [{ label: 'a "b"', x: [0, 2], y: [0.1, 1e-9] }, { label: "c", x: [1, 2], y: [5, 6] }]), 'step,"a ""b""","c"\n0,0.1,\n1,,5\n2,1e-9,6\n');
same("tensor", page_.csv("step", page_.tensorSeries({ min: [-1, null], mean: [0, 0.5], deviation: [1, 2], max: [3, 4] }, [0, 5])), 'step,"least","mean","standard deviation","greatest"\n0,-1,0,1,3\n5,,0.5,2,4\n');

const about = { arguments: ["train", "gpt", "--data", "my text.txt", "--nproc_per_node=2", "--lr", "1e20", "--live", "--tag", "a=b", "--note=c", "--output-dir", "runs/a"], settings: { "--lr": "100000000000000000000", "--epochs": "3" }, steps_per_epoch: 10, git: { commit: "7ffb53f6b0a9c1d2", branch: "main", modified: true } };
const clock = { x: [0, 10, 20], y: [1, 6, 16] };
const [run] = page_.shownRuns([{ about, summary: { unit: "sequences" }, curves: { elapsed_s: clock, train_loss: { x: [10, 20], y: [2, 1] }, loss: { x: [0, 10], y: [3, 2] } } }]);
const { all, typed } = page_.settings(run);
same("typed", [...typed].map((name) => [name, all[name]]), [["--data", "my text.txt"], ["--nproc-per-node", "2"], ["--lr", "100000000000000000000"], ["--live", "on"], ["--output-dir", "runs/a"]]);
same("git", all.git, "7ffb53f6b0a9 (main), modified");
same("command", page_.commandOf(run).join(" "), "phalanx train gpt --data 'my text.txt' --nproc_per_node=2 --lr 1e20 --live --tag a=b --note=c --output-dir runs/a");
same("tags", [{ tags: { a: "b", c: null }, note: "d" }, {}, { tags: [], note: 1 }].map((about) => [page_.tagsOf({ about }), page_.noteOf({ about })]), [[{ a: "b", c: "✓" }, "d"], [{}, ""], [{}, ""]]);
same("unit", page_.resultNames().find((name) => name.endsWith("/s")), "sequences/s");
same("epochs", [page_.perEpoch(["train_loss"]), page_.perEpoch(["loss"]), page_.perEpoch(["train_loss", "loss"])], [true, false, false]);
same("axes", [page_.convert(2, "epoch", "step"), page_.convert(15, "step", "epoch"), page_.convert(15, "step", "seconds"), page_.convert(11, "seconds", "epoch")], [20, 1.5, 11, 1.5]);
page_.shownRuns([{ about: { ...about, attempt: 2 }, curves: { elapsed_s: clock } }]);
same("no clock of several attempts", page_.convert(15, "step", "seconds"), undefined);
page_.shownRuns([{ summary: { unit: "sequences" } }, { summary: { unit: "images" } }]);
same("unit of several", page_.resultNames().find((name) => name.endsWith("/s")), "samples/s");
same("no epochs", page_.convert(1, "epoch", "step"), undefined);
same("intervals", page_.breakdown({ elapsed_s: [5, 10, 11], attempt: [1, 1, 1], ranks: [] }).isWhole, [true, true, false]);
same("one interval", page_.breakdown({ elapsed_s: [0.3], attempt: [1], ranks: [] }).isWhole, [true]);

const best = (best, curves) => { const found = page_.bestOf({ about: { settings: { best }, steps_per_epoch: 10 }, curves }); return found && [found.curve, found.step, found.text]; };
same("best", [best("auc:max", { test_auc: { x: [10, 20, 30], y: [0.7, 0.8, 0.75] } }), best("test_loss:min", { test_loss: { x: [4, 10, 14], y: [3, 2, 1] } }), best("accuracy:max", { accuracy: { x: [10, 20], y: [0.5, 0.5] } }), best("a:b:min", { "test_a:b": { x: [10], y: [2] } }), best("auc:max", {}), best(undefined, { test_auc: { x: [1], y: [1] } })],
  [["test_auc", 20, "0.8 in epoch 2"], ["test_loss", 14, "1 in epoch 2"], ["accuracy", 10, "50.00 % in epoch 1"], ["test_a:b", 10, "2 in epoch 1"], undefined, undefined]);
const losses = (test, train) => page_.lossByPart({ about: { steps_per_epoch: 10 }, curves: { loss: { x: [...Array(20).keys()], y: [...Array(20).keys()] }, test_loss: { x: test, y: test }, train_loss: { x: train, y: train } } });
same("train loss by part", [losses([4, 10, 14, 20], [10, 20]), losses([10, 20], [10, 20]), losses([9], [])], [{ x: [4, 10, 14, 20], y: [2, 7, 12, 17] }, undefined, { x: [9], y: [4.5] }]);
page_.shownRuns([{ rank_changes: [[3, 2, 1], [5, 1, 2]], curves: { loss: { x: [0, 9], y: [1, 1] } } }, {}]);
same("ranks", page_.ofRanks().series.map(({ x, y }) => [x, y]), [[[0, 3, 3, 5, 5, 9], [2, 2, 1, 1, 2, 2]]]);
const sums = (train_s) => ({ elapsed_s: [5, 10, 15, 20], attempt: [1, 1, 1, 1], ranks: [{ rank: 1, values: { train_s } }] });
same("a process in place of a lost one", [[4, null, 2, 7], [4, 2, 6, 11], [4, null, 40, 44]].map((train) => page_.breakdown(sums(train)).parts[0].map((p) => p && p[0])), [[4, null, 2, 5], [4, 2, 4, 5], [4, null, 5, 4]]);
same("time of attempts", [page_.earlier({ system: { elapsed_s: [5, 9, 3, 4, 2], attempt: [1, 1, 2, 2, 3] } }), page_.earlier({ system: { elapsed_s: [5, 9], attempt: [1, 1] } }), page_.earlier({})], [13, 0, 0]);
same("a search", page_.status({ finish: { status: "finished" }, summary: {}, about: { settings: { "--find-lr": "true" } } }), ["learning-rate search finished", "good"]);
const isLog = (y) => { const made = page_.chart("c", () => ({ series: [{ x: y.map((_, i) => i), y, color: "", label: "", place: () => "" }] })); made.root.isConnected = true; made.draw(); return JSON.stringify(made.root.children.map((c) => c.children?.map((b) => b.attributes?.["aria-pressed"]))).includes("true"); };
const part = [...Array(100).keys()].map((i) => i / 99);
same("logarithmic by itself", [part.map((p) => 1 + Math.cos(3.1415 * p)), part.map((p) => 1.0000001 - p), part.map((p) => 10 ** (-7 + 8 * p)), [1, 1e-9], part.map((p) => p ? 1 + p : 1e7), [3, 2, 1]].map(isLog), [false, false, true, false, true, false]);
