/* The tensors: a table of them all, and a closer look at one. */

const TERMS = { minimum: "min", maximum: "max", mean: "mean", std: "std", norm: "norm", nan: "NaN", infinite: "Inf" };

class Tensors {
  /** Words that repeat come as numbers into lists of them. */
  constructor({ tensors, values, words }) {
    Object.assign(this, tensors, { values, words });
    for (const [column, list] of Object.entries(words)) this[column] = this[column].map((i) => list[i]);
    this.tie = new Map(tensors.tie);
    this.path = new Map(tensors.path);
    /** What each adds to the whole: what has several names counts once. */
    this.own = this.bytes.map((bytes, i) => (this.tie.has(i) ? 0 : bytes));
  }

  about(i) {
    return `${this.dtype[i]} ${this.shape[i]} on ${this.device[i]}`;
  }

  /** Columns that would say the same of all tensors are left out. */
  columns(leaves) {
    const words = (id) => {
      const longest = this.words[id].reduce((most, word) => Math.max(most, word.length), id.length);
      return { id, title: id, width: Math.min(14, 1.5 + 0.6 * longest), text: (i) => this[id][i], value: (i) => this[id][i] };
    };
    return [
      nameColumn(leaves.full, (i, attributes, text) => leadTo(make("a", attributes, text), { tensor: leaves.full[i] })),
      words("dtype"),
      { ...words("shape"), value: (i) => this.elements[i] },
      ...(this.words.device.length > 1 ? [words("device")] : []),
      { id: "size", title: "size", width: 6.5, right: true, keep: true, text: (i) => size(this.bytes[i]), value: (i) => this.bytes[i] },
      ...(this.values ? this.figures() : []),
      ...(this.words.marks.some(Boolean) ? [{ ...words("marks"), value: (i) => this.marks[i] || null }] : []),
    ];
  }

  figures() {
    const { values } = this;
    const figure = (id, title, width = 6.8) => ({
      id, title, width, right: true, text: (i) => number(values[id][i]), value: (i) => numeric(values[id][i]),
    });
    const zeros = {
      ...figure("zeros", "zeros"),
      text: (i) => (values.zeros[i] === null ? "" : percent(values.zeros[i], this.elements[i])),
      value: (i) => (values.zeros[i] === null ? null : values.zeros[i] / (this.elements[i] || 1)),
    };
    const spread = {
      id: "spread", title: "histogram", width: 7, right: true,
      cell: (i) => (values.bars[i] ? histogram(values.bars[i], 80, 20) : ""),
      value: (i) => (values.bars[i] ? numeric(values.maximum[i]) - numeric(values.minimum[i]) : null),
    };
    return [
      spread, figure("minimum", TERMS.minimum), figure("maximum", TERMS.maximum), figure("mean", TERMS.mean),
      figure("std", TERMS.std), ...[zeros, figure("nan", TERMS.nan, 5), figure("infinite", TERMS.infinite, 5)].filter(({ id }) => values[id].some(Boolean)),
    ];
  }

  /** Everything about one tensor. */
  facts(i, leaves) {
    const facts = [
      ["type", this.about(i)], ["elements", count(this.elements[i])], ["bytes", `${count(this.bytes[i])} (${size(this.bytes[i])})`],
    ];
    if (this.marks[i]) facts.push(["marks", this.marks[i]]);
    if (this.remarks[i]) facts.push(["remarks", this.remarks[i]]);
    if (this.path.has(i)) facts.push(["path in the file", this.path.get(i)]);
    if (this.tie.has(i)) facts.push(["same tensor as", leaves.full[this.tie.get(i)]]);
    const { values } = this;
    if (values && values.zeros[i] !== null) {
      for (const [id, term] of Object.entries(TERMS)) {
        if (values[id][i] !== null) facts.push([term, number(values[id][i])]);
      }
      facts.push(["zeros", percent(values.zeros[i], this.elements[i])]);
    }
    return facts;
  }

  close(host, i, leaves) {
    host.hidden = i < 0;
    if (i < 0) return;
    const list = make("dl", {}, ...this.facts(i, leaves).map(([term, text]) => make("div", {}, make("dt", {}, term), make("dd", {}, text))));
    const away = leadTo(make("a", { class: "away" }, "close"), { tensor: "" });
    host.replaceChildren(make("h3", {}, leaves.full[i]), away, list);
    const bars = this.values && this.values.bars[i];
    if (!bars) return;
    const tallest = `elements in a bin, at most ${count(this.values.fullest[i])}`;
    const edges = [number(this.values.low[i]), "value of an element", number(this.values.high[i])];
    const below = make("figcaption", {}, ...edges.map((text) => make("span", {}, text)));
    host.append(make("figure", {}, make("figcaption", {}, tallest), histogram(bars, 480, 90), below));
  }
}
