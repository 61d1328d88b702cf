/* Names come as a tree of their parts; a label begins with what joins it to its parent. */

class Names {
  constructor({ label, parent }) {
    this.parent = parent;
    this.full = label.map(() => "");
    for (let i = 1; i < label.length; i += 1) this.full[i] = this.full[parent[i]] + label[i];
    this.label = label.map((text, i) => (parent[i] ? text.slice(1) : text));
    this.children = label.map(() => []);
    for (let i = 1; i < label.length; i += 1) this.children[parent[i]].push(i);
  }

  /** The node of this full name; the root where there is none. */
  find(name) {
    return Math.max(0, name ? this.full.indexOf(name) : 0);
  }

  /** The nodes from below the root down to this one. */
  line(node) {
    const nodes = [];
    for (let here = node; here; here = this.parent[here]) nodes.unshift(here);
    return nodes;
  }

  /** The sum over each node of what its leaves have; children come after their parents. */
  totals(modules, amounts) {
    const sums = this.parent.map(() => 0);
    modules.forEach((module, leaf) => { sums[module] += amounts[leaf]; });
    for (let i = sums.length - 1; i > 0; i -= 1) sums[this.parent[i]] += sums[i];
    return sums;
  }
}

/** Leaves by the node that they hang on. */
function hang(modules, nodes) {
  const leaves = Array.from({ length: nodes }, () => []);
  modules.forEach((module, leaf) => leaves[module].push(leaf));
  return leaves;
}

/** Full names and own labels of the leaves. */
function leafNames(names, { label, module }) {
  return {
    full: label.map((text, i) => names.full[module[i]] + text),
    own: label.map((text, i) => (module[i] ? text.slice(1) : text)),
  };
}

/** A column of names, which has what room the others leave. */
function nameColumn(full, cell) {
  return { id: "name", title: "name", grows: true, cell: (i, room) => cell(i, { title: full[i] }, fitted(full[i], room, LETTERS)), value: (i) => full[i] };
}

/** The way to a node as links; `key` is what holds it in the address. */
function breadcrumb(host, names, node, key, whole) {
  const steps = [0, ...names.line(node)];
  host.replaceChildren(...steps.flatMap((step, depth) => {
    const text = shorten(step ? names.label[step] : whole, 40);
    const part = step === node
      ? make("span", { "aria-current": "location" }, text)
      : leadTo(make("a", {}, text), { [key]: names.full[step] });
    return depth ? [make("span", { "aria-hidden": "true" }, " › "), part] : [part];
  }));
}

/** What a search means: a glob where it holds * or ?, from some part of a name to its end; else any piece of it. */
function matcher(query) {
  const wanted = query.toLowerCase();
  if (!/[*?]/.test(wanted)) return (name) => name.includes(wanted);
  const escaped = wanted.replace(/[.+^${}()|[\]\\]/g, "\\$&");
  const pattern = new RegExp(`(^|[/.])${escaped.replace(/\*+/g, ".*").replace(/\?/g, ".")}$`, "s");
  return (name) => pattern.test(name);
}
