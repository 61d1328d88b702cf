/* A table of any length: the rows in sight are drawn, the others are room above and below. */

const ROW = 30; // px, as in the style sheet
const LETTERS = 12.75; // px
const NAMES = 20; // em that a column of names has at least
const SPARE = 10; // rows drawn beyond either edge
const PRINTED = 500;

const spare = (column) => !column.grows && !column.keep && column.title;

const classes = (column) => ["right", "grows"].filter((one) => column[one]).concat(spare(column) ? "spare" : []).join(" ") || null;

const narrow = matchMedia("(max-width: 40rem)"); // as in the style sheet, where a name has two lines

class LongTable {
  /**
   * columns: {id, title, width (em), text(i), value(i) to sort by, cell(i, room) where it is no
   * text, right, grows: has what room is left, keep: on a narrow screen too}; names: what is searched; keys: what holds search and order in the address; chosen(i)
   * tells the row that is marked.
   */
  constructor(host, { title, columns, names, keys, chosen = () => false }) {
    Object.assign(this, { columns, names, keys, chosen });
    this.order = Uint32Array.from(names, (_, i) => i);
    this.found = make("output", { class: "found", "aria-live": "polite" });
    this.input = make("input", {
      type: "search", placeholder: "part of a name, or a glob: *.weight", spellcheck: "false",
      autocomplete: "off", "aria-label": `Search ${title}`,
    });
    this.input.addEventListener("input", () => state.set({ [keys.search]: this.input.value }));
    this.heads = columns.map((column) => this.head(column));
    this.body = make("tbody");
    const table = make(
      "table",
      { class: "long", "aria-rowcount": names.length + 1 },
      make("caption", { class: "unseen" }, title),
      make("thead", {}, make("tr", { "aria-rowindex": 1 }, ...this.heads)),
      this.body,
    );
    table.style.minWidth = `${columns.reduce((sum, column) => sum + (column.width || NAMES), 0)}em`;
    this.frame = make("div", { class: "frame", tabindex: "0", role: "region", "aria-label": title }, table);
    this.frame.addEventListener("scroll", () => this.draw(), { passive: true });
    this.cut = make("p", { class: "printed" });
    const more = make("p", { class: "narrow" }, `A wider window has ${columns.filter(spare).map(({ title: one }) => one).join(", ")}.`);
    host.append(make("div", { class: "tools" }, this.input, this.found), this.frame, more, this.cut);
    whenResized(this.frame, () => this.draw());
    addEventListener("beforeprint", () => this.draw(PRINTED));
    addEventListener("afterprint", () => this.draw());
    state.follow([keys.search, keys.sort], (search, sort) => this.arrange(search, sort));
  }

  head(column) {
    const button = make("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      const first = column.right ? `-${column.id}` : column.id;
      const second = column.right ? column.id : `-${column.id}`;
      const next = { [first]: second, [second]: "" };
      const now = state.get(this.keys.sort);
      state.set({ [this.keys.sort]: now in next ? next[now] : first });
    });
    const cell = make("th", { scope: "col", class: classes(column) }, button);
    if (column.width) cell.style.width = `${column.width}em`;
    return cell;
  }

  /** Search and sort, and begin at the top again. */
  arrange(search, sort) {
    if (this.input.value !== search) this.input.value = search;
    this.lower = this.lower || this.names.map((name) => name.toLowerCase());
    const fits = matcher(search);
    this.order = Uint32Array.from(this.names.keys()).filter((i) => !search || fits(this.lower[i]));
    const column = this.columns.find(({ id }) => id === sort.replace(/^-/, ""));
    if (column) this.sort(column, sort.startsWith("-") ? -1 : 1);
    this.heads.forEach((head, i) => {
      const here = this.columns[i] === column;
      head.setAttribute("aria-sort", here ? (sort.startsWith("-") ? "descending" : "ascending") : "none");
    });
    const all = this.names.length;
    this.found.textContent = search ? `${count(this.order.length)} of ${count(all)}` : count(all);
    this.frame.scrollTop = 0;
    this.draw();
  }

  /** By the values of a column; rows without one come last whichever way, equal ones as in the file. */
  sort({ value }, direction) {
    const values = this.names.map((_, i) => value(i));
    const none = (one) => one === null || one === undefined || Number.isNaN(one);
    const words = new Intl.Collator("en", { numeric: true });
    const compare = (a, b) => (typeof a === "string" ? words.compare(a, b) : a < b ? -1 : Number(a > b));
    this.order.sort((i, j) => {
      const [a, b] = [values[i], values[j]];
      if (none(a) || none(b)) return none(a) - none(b) || i - j;
      return direction * compare(a, b) || i - j;
    });
  }

  draw(most = 0) {
    const all = this.order.length;
    const first = most ? 0 : Math.max(0, Math.floor(this.frame.scrollTop / ROW) - SPARE);
    const last = Math.min(all, most || first + Math.ceil(this.frame.clientHeight / ROW) + 2 * SPARE);
    const names = this.heads[this.columns.findIndex(({ grows }) => grows)];
    this.room = most ? Infinity : (names.clientWidth - 1.3 * LETTERS) * (narrow.matches ? 1.9 : 1);
    const rows = Array.from(this.order.subarray(first, last), (i, n) => this.row(i, first + n));
    const rest = most ? 0 : all - last;
    this.cut.textContent = all > last ? `The first ${count(last)} of ${count(all)}.` : "";
    this.body.replaceChildren(this.gap(first), ...rows, this.gap(rest));
  }

  gap(rows) {
    const cell = make("td");
    cell.style.height = `${rows * ROW}px`;
    return make("tr", { class: "room", "aria-hidden": "true" }, cell);
  }

  row(i, position) {
    const row = make("tr", { "aria-rowindex": position + 2, class: this.chosen(i) ? "chosen" : null });
    for (const column of this.columns) {
      const content = column.cell ? column.cell(i, this.room) : column.text(i);
      row.append(make("td", { class: classes(column) }, content ?? ""));
    }
    return row;
  }
}
