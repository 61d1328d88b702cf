/* Bytes by module: squarified, as Bruls, Huizing and van Wijk laid it out. */

const MOST_CELLS = 250;
const MOST_PARTS = 60;
const DEPTH = 2; // levels drawn inside a cell
const HUES = 8;

/** Boxes {x, y, w, h} of these amounts, which are sorted from large to small, filling `box`. */
function squarify(amounts, box) {
  const boxes = [];
  let { x, y, w, h } = box;
  let left = amounts.reduce((sum, amount) => sum + amount, 0);
  for (let start = 0; start < amounts.length;) {
    const scale = (w * h) / left;
    const side = Math.min(w, h);
    let [end, sum, worst] = [start, 0, Infinity];
    while (end < amounts.length) {
      const next = sum + amounts[end];
      const thick = (next * scale) / side;
      const [long, short] = [amounts[start], amounts[end]].map((one) => (one * scale) / thick);
      const ratio = Math.max(long / thick, thick / short);
      if (end > start && ratio > worst) break;
      [sum, worst, end] = [next, ratio, end + 1];
    }
    const thick = (sum * scale) / side || 0;
    let along = 0;
    for (const amount of amounts.slice(start, end)) {
      const length = (amount / sum) * side;
      boxes.push(w < h ? { x: x + along, y, w: length, h: thick } : { x, y: y + along, w: thick, h: length });
      along += length;
    }
    if (w < h) [y, h] = [y + thick, Math.max(0, h - thick)];
    else [x, w] = [x + thick, Math.max(0, w - thick)];
    [left, start] = [left - sum, end];
  }
  return boxes;
}

class Treemap {
  constructor(host, { names, tensors, leaves, bytes }) {
    Object.assign(this, { names, tensors, leaves, bytes });
    this.hanging = hang(tensors.module, names.parent.length);
    this.sums = names.totals(tensors.module, bytes);
    this.counts = names.totals(tensors.module, bytes.map(() => 1));
    this.crumbs = make("nav", { class: "crumbs", "aria-label": "Module" });
    this.figure = shape("svg", { class: "map", role: "group", "aria-label": "Bytes by module" });
    this.key = make("p", { class: "faint" });
    host.append(this.crumbs, this.figure, this.key);
    this.node = 0;
    whenResized(host, () => this.draw());
    state.follow(["at"], (at) => { this.node = this.inside(names.find(at)); this.draw(); });
  }

  /** A module whose only child is a module shows nothing: go on to where it parts. */
  inside(node) {
    let here = node;
    while (this.names.children[here].length === 1 && !this.hanging[here].length) [here] = this.names.children[here];
    return here;
  }

  /** What a module holds, largest first; what is too small to see comes together. */
  cells(node) {
    const modules = this.names.children[node].map((child) => ({
      label: this.names.label[child], full: this.names.full[child], bytes: this.sums[child],
      about: plural(this.counts[child], "tensor"), changes: { at: this.names.full[child] }, node: child,
    }));
    const tensors = this.hanging[node].map((leaf) => ({
      label: this.leaves.own[leaf], full: this.leaves.full[leaf], bytes: this.bytes[leaf],
      about: this.tensors.about(leaf), changes: { tensor: this.leaves.full[leaf] },
    }));
    const all = [...modules, ...tensors].filter((cell) => cell.bytes > 0).sort((a, b) => b.bytes - a.bytes);
    if (all.length <= MOST_CELLS) return all;
    const rest = all.splice(MOST_CELLS - 1);
    const bytes = rest.reduce((sum, cell) => sum + cell.bytes, 0);
    const label = `${count(rest.length)} more`;
    all.push({ label, full: label, bytes, about: "each smaller than those shown", changes: null });
    return all;
  }

  draw() {
    const width = this.figure.clientWidth || 800;
    const height = Math.round(Math.min(440, Math.max(260, width * 0.5)));
    breadcrumb(this.crumbs, this.names, this.node, "at", "all");
    this.figure.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.figure.setAttribute("height", height);
    this.key.textContent = `Area: bytes, ${size(this.sums[this.node])} in all`;
    const cells = this.cells(this.node);
    const boxes = squarify(cells.map((cell) => cell.bytes), { x: 0, y: 0, w: width, h: height });
    this.figure.replaceChildren(...cells.map((cell, i) => this.cell(cell, boxes[i], i % HUES)));
    rove(this.figure);
    if (!cells.length) this.figure.append(shape("text", { x: 12, y: 24 }, "no bytes here"));
  }

  cell(cell, { x, y, w, h }, hue) {
    const share = percent(cell.bytes, this.sums[0]);
    const within = this.node ? [`${percent(cell.bytes, this.sums[this.node])} of ${shorten(this.names.label[this.node], 40)}`] : [];
    const lines = [shorten(cell.full, 120), cell.about, `${size(cell.bytes)}, ${share} of all`, ...within];
    const link = shape(cell.changes ? "a" : "g", { class: `cell hue${hue}`, "aria-label": lines.join(", ") });
    if (cell.changes) leadTo(link, cell.changes);
    link.append(shape("rect", { x: x + 0.5, y: y + 0.5, width: Math.max(0.5, w - 1.5), height: Math.max(0.5, h - 1.5), rx: 2 }));
    if (cell.node !== undefined && w > 24 && h > 40) link.append(...this.parts(cell.node, { x: x + 4, y: y + 21, w: w - 9, h: h - 26 }, 1));
    if (h > 18) link.append(shape("text", { x: x + 6, y: y + 15 }, fitted(cell.label, w - 10, 12)));
    if (cell.node === undefined && h > 34 && fitted(size(cell.bytes), w - 10, 12) === size(cell.bytes)) {
      link.append(shape("text", { x: x + 6, y: y + 30 }, size(cell.bytes)));
    }
    explain(link, () => lines);
    return link;
  }

  /** The levels below, as areas that lead nowhere by themselves. */
  parts(node, box, depth) {
    const cells = this.cells(this.inside(node)).slice(0, MOST_PARTS);
    return squarify(cells.map((cell) => cell.bytes), box).flatMap(({ x, y, w, h }, i) => {
      if (w < 3 || h < 3) return [];
      const { label, node: inner } = cells[i];
      const drawn = [shape("rect", { class: "part", x, y, width: w - 1, height: h - 1, rx: 1 })];
      const named = h > 18 && fitted(label, w - 8, 11);
      if (named) drawn.push(shape("text", { class: "small", x: x + 4, y: y + 13 }, named));
      if (inner === undefined || depth === DEPTH || w < 24 || h < 40) return drawn;
      const below = named ? 18 : 4;
      return [...drawn, ...this.parts(inner, { x: x + 4, y: y + below, w: w - 9, h: h - below - 5 }, depth + 1)];
    });
  }
}
