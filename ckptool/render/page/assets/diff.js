/* Two files: how much each layer changed, in the order of the file, and every change in a table. */

const MOST_BARS = 400;
const FEW_BARS = 50; // where modules are fewer and those in them too many, neighbours come together
const FLOOR = -8; // powers of ten: what changed less is drawn as little
const WORDS = { "=": "equal", M: "values changed", T: "another shape or type", A: "only in the second", D: "only in the first", R: "renamed" };
const WORST = "=RMADT";

class DiffChart {
  constructor(host, { names, chart }) {
    Object.assign(this, { names, chart });
    this.words = chart.structure ? { ...WORDS, "=": "same header" } : WORDS;
    this.leaves = leafNames(names, chart);
    this.crumbs = make("nav", { class: "crumbs", "aria-label": "Module of the changes" });
    this.figure = shape("svg", { class: "chart", role: "group", "aria-label": "Relative change by layer" });
    host.append(this.crumbs, this.figure, this.legend());
    this.node = 0;
    whenResized(host, () => this.draw());
    state.follow(["in"], (at) => { this.node = names.find(at); this.draw(); });
  }

  legend() {
    const present = [...WORST].filter((status) => this.chart.status.includes(status));
    const keys = present.map((status) => {
      const times = [...this.chart.status].filter((one) => one === status).length;
      return make("span", { class: `status${status === "=" ? "E" : status}` }, make("i"), `${this.words[status]} (${count(times)})`);
    });
    return make("p", { class: "legend" }, ...keys, this.chart.structure ? "Values were not compared." : "Each bar is |A − B| / |A| of a tensor, in the order of the file.");
  }

  /** The tensors below the node, in runs that have one part of the name in common: as fine as fits. */
  bars() {
    const depth = this.names.line(this.node).length;
    const below = this.chart.module.flatMap((module, leaf) => {
      const line = this.names.line(module);
      return this.node === 0 || line[depth - 1] === this.node ? [{ leaf, line }] : [];
    });
    if (below.length <= MOST_BARS) return below.map(({ leaf }) => ({ leaves: [leaf], label: this.leaves.full[leaf] }));
    const deepest = below.reduce((most, { line }) => Math.max(most, line.length), depth);
    let best = [];
    for (let level = depth; level <= deepest; level += 1) {
      const groups = new Map();
      for (const { leaf, line } of below) {
        const key = line.length > level ? line[level] : `leaf ${leaf}`;
        if (!groups.has(key)) groups.set(key, { leaves: [], node: line[level], label: this.names.full[line[level]] ?? this.leaves.full[leaf] });
        groups.get(key).leaves.push(leaf);
      }
      if (groups.size > MOST_BARS && best.length >= FEW_BARS) break;
      best = merged([...groups.values()]);
      if (groups.size > MOST_BARS) break;
    }
    return best;
  }

  draw() {
    const [width, height, left, top] = [this.figure.clientWidth || 800, 236, 44, 24];
    breadcrumb(this.crumbs, this.names, this.node, "in", "all");
    this.figure.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.figure.setAttribute("height", height);
    const tall = height - top - 8;
    const lines = [0, -2, -4, -6].flatMap((power) => {
      const y = top + (tall * power) / FLOOR;
      const text = power ? `1e${power}` : "≥ 1";
      return [shape("path", { class: "grid", d: `M${left} ${y}H${width}` }), shape("text", { x: left - 6, y: y + 4, class: "axis" }, text)];
    });
    const bars = this.bars();
    const step = (width - left) / Math.max(1, bars.length);
    const unit = shape("text", { x: 0, y: 11, class: "axis unit" }, "change relative to the norm of A (no unit, logarithmic)");
    this.figure.replaceChildren(unit, ...lines, ...bars.map((bar, i) => this.bar(bar, { x: left + i * step, step, tall, top })));
    rove(this.figure);
  }

  bar(bar, { x, step, tall, top }) {
    const status = [...WORST].reverse().find((one) => bar.leaves.some((leaf) => this.chart.status[leaf] === one));
    const changes = bar.leaves.map((leaf) => numeric(this.chart.change[leaf])).filter((one) => one !== null);
    const most = changes.reduce((a, b) => (a > b || Number.isNaN(a) ? a : b), 0);
    const high = { "=": 2, R: 8 }[status] ?? (status === "M" && changes.length ? scaled(most) * tall : tall);
    const differ = bar.leaves.filter((leaf) => this.chart.status[leaf] !== "=").length;
    const lines = [shorten(bar.label, 120), bar.leaves.length > 1 ? `${count(differ)} of ${plural(bar.leaves.length, "tensor")} differ` : this.words[status]];
    if (status === "M" && changes.length) lines.push(`relative change ${bar.leaves.length > 1 ? "up to " : ""}${number(most)}`);
    const link = shape("a", { class: `bar status${status === "=" ? "E" : status}`, "aria-label": lines.join(", ") });
    leadTo(link, bar.node ? { in: this.names.full[bar.node] } : { find: bar.leaves.length > 1 ? "" : bar.label });
    link.append(
      shape("rect", { class: "reach", x, y: top, width: step, height: tall }),
      shape("rect", { x, y: top + tall - high, width: Math.max(0.6, step * 0.84), height: high }),
    );
    explain(link, () => lines);
    return link;
  }
}

/** From 0 to 1 by powers of ten; what is no number is as tall as can be. */
function scaled(change) {
  const power = Math.log10(change);
  return Number.isNaN(power) ? 1 : Math.min(1, Math.max(0.02, 1 - power / FLOOR));
}

/** Neighbours together, where there are too many even so. */
function merged(groups) {
  const run = Math.ceil(groups.length / MOST_BARS);
  if (run === 1) return groups;
  return Array.from({ length: Math.ceil(groups.length / run) }, (_, i) => {
    const some = groups.slice(i * run, (i + 1) * run);
    return { label: `${some[0].label} and ${count(some.length - 1)} after it`, leaves: some.flatMap((one) => one.leaves) };
  });
}

function changeColumns(changes, full) {
  const figure = (id, title) => ({
    id, title, width: 7.5, right: true, text: (i) => number(changes[id][i]), value: (i) => numeric(changes[id][i]),
  });
  const norm = figure("rel_norm", "rel norm");
  norm.value = (i) => (changes.rel_norm[i] === "nan" ? Infinity : numeric(changes.rel_norm[i]));
  const mark = (i) => make("span", { class: `mark status${changes.status[i]}`, title: WORDS[changes.status[i]] }, changes.status[i]);
  return [
    { id: "status", title: "", width: 2.5, cell: mark, value: (i) => changes.status[i] },
    nameColumn(full, (_, attributes, text) => make("span", attributes, text)),
    { id: "what", title: "what", width: 14, text: (i) => changes.what[i], value: (i) => changes.what[i] },
    ...(changes.rel_norm ? [
      { ...norm, keep: true }, figure("max_rel", "max rel"), figure("max_abs", "max abs"), figure("mean_abs", "mean abs"), figure("cosine", "cosine"),
      { ...figure("share", "differing"), text: (i) => (changes.share[i] === null ? "" : percent(changes.share[i], 1)) },
    ] : []),
  ];
}
