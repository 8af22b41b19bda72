// The network: its parameters, and its operations as a picture.

const TENSOR_ROWS = 500, NODES = 60;

/** Operations one after the other whose names begin alike become one, by the longest beginnings that leave few enough. */
function foldGraph(graph) {
  const all = graph.filter((n) => isObject(n) && typeof n.name === "string").map((n) => ({ name: n.name, title: shown(n.operation), inputs: Array.isArray(n.inputs) ? n.inputs.map(String) : [], shape: Array.isArray(n.shape) ? n.shape.map(String).join("\u00a0×\u00a0") : "" }));
  const begin = (name, depth) => name.split(".").slice(0, depth).join(".");
  const deepest = fold(Math.max, [all.map((n) => n.name.split(".").length)], 1);
  let groups = [];
  for (let depth = deepest; depth >= 0; depth--) {
    const most = depth ? 1 : Math.ceil(all.length / NODES);
    groups = [];
    for (const n of all) {
      const last = groups.at(-1), alike = depth < deepest && last && (depth ? begin(last[0].name, depth) === begin(n.name, depth) : last.length < most);
      if (alike) last.push(n); else groups.push([n]);
    }
    if (groups.length <= NODES) {
      const of = new Map();
      return groups.map((group) => {
        const [first] = group, end = group.at(-1), from = new Set(group.flatMap((n) => n.inputs).map((input) => of.get(input)).filter(Boolean));
        const node = group.length === 1 ? { ...first, from } : { name: depth ? begin(first.name, depth) : `${first.name} … ${end.name}`, title: `${group.length} operations`, shape: end.shape, from, folded: true };
        for (const n of group) of.set(n.name, node);
        return node;
      });
    }
  }
  return [];
}

/** The operations from top to bottom, each below those whose results it takes. */
function graphPicture(graph) {
  const nodes = foldGraph(graph), rows = [], W = 190, H = 44, GAP_X = 24, GAP_Y = 30;
  for (const n of nodes) {
    n.row = fold(Math.max, [[...n.from].map((f) => f.row)], -1) + 1;
    (rows[n.row] ||= []).push(n);
  }
  if (!nodes.length) return el("div");
  const widest = Math.max(...rows.map((row) => row.length)), width = widest * (W + GAP_X) + 80, height = rows.length * (H + GAP_Y);
  rows.forEach((row, y) => row.forEach((n, i) => {
    n.x = width / 2 + (i - (row.length - 1) / 2) * (W + GAP_X);
    n.y = y * (H + GAP_Y) + 4;
  }));
  const parts = [];
  for (const n of nodes) for (const f of n.from) {
    const y0 = f.y + H, y1 = n.y, far = n.row - f.row > 1, side = far ? W / 2 + 16 + Math.min(20, 3 * (n.row - f.row)) : 0;
    const d = far ? `M${f.x + W / 2} ${f.y + H / 2}C${f.x + side + 20} ${f.y + H} ${n.x + side + 20} ${n.y} ${n.x + W / 2} ${n.y + H / 2}` : `M${f.x} ${y0}C${f.x} ${y0 + 14} ${n.x} ${y1 - 14} ${n.x} ${y1}`;
    parts.push(el("svg:path", { class: "edge", d, "marker-end": "url(#arrow)" }));
  }
  const cut = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;
  // The end of a layer's name says which one it is. An operation without a layer is called by its number.
  const called = ({ folded, title, name }) => {
    if (folded || title === name) return cut(name, 29);
    if (name.startsWith(title.toLowerCase() + "_")) return title;
    const most = 26 - title.length;
    return `${title}  ${name.length > most ? "…" + name.slice(1 - most) : name}`;
  };
  for (const n of nodes) parts.push(el("svg:g", {}, el("svg:title", {}, `${n.name}\n${n.title}\n${n.shape}`), el("svg:rect", { class: "node", x: n.x - W / 2, y: n.y, width: W, height: H, rx: 5 }),
    el("svg:text", { class: "name", x: n.x, y: n.y + 17, "text-anchor": "middle" }, called(n)),
    el("svg:text", { x: n.x, y: n.y + 34, "text-anchor": "middle" }, cut((n.folded ? n.title + ", " : "") + n.shape, 31))));
  const arrow = el("svg:defs", {}, el("svg:marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" }, el("svg:path", { d: "M0 0L8 4L0 8z", class: "arrow" })));
  return el("div", { class: "scroll graph" }, el("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "operations of the network" }, arrow, ...parts));
}

const model = part(() => [runs.map((r) => [r.label, r.about.model])], () => runs.flatMap((run) => {
  const m = run.about.model;
  if (!isObject(m)) return [];
  const tensors = (Array.isArray(m.tensors) ? m.tensors : []).filter(isObject), size = (t) => Array.isArray(t.shape) ? t.shape.reduce((a, b) => a * (isNumber(b) ? b : 0), 1) : undefined;
  const fixed = tensors.filter((t) => t.trained === false).reduce((sum, t) => sum + (size(t) || 0), 0);
  const parts = [ofRun("Model", run), el("p", {}, el("b", {}, shown(m.title)), `, ${count(m.parameters)} parameters` + (fixed ? `; ${count(fixed)} values are not trained` : ""))];
  if (tensors.length) parts.push(folding(`tensors ${run.label}`, `${short(tensors.length)} tensors`, tensors.length <= 12 && !several(),
    table(["tensor", "shape", "type", "values", "trained"], tensors.slice(0, TENSOR_ROWS).map((t) => [shown(t.name), Array.isArray(t.shape) ? t.shape.map(String).join("\u00a0×\u00a0") : "–", shown(t.dtype), count(size(t)), t.trained === false ? "no" : "yes"])),
    tensors.length > TENSOR_ROWS ? note(`The first ${TENSOR_ROWS} are shown.`) : []));
  if (Array.isArray(m.graph) && m.graph.length) parts.push(folding(`graph ${run.label}`, `Graph of ${short(m.graph.length)} operations` + (m.graph.length > NODES ? "; neighbours whose names begin alike are one" : ""), !several(), graphPicture(m.graph)));
  return parts;
}));
