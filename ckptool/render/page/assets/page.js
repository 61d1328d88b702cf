/* The page put together: nothing but text comes from the data. */

function showTensors(data) {
  const names = new Names(data.names);
  const leaves = leafNames(names, data.tensors);
  const tensors = new Tensors(data);
  byId("map").hidden = !leaves.full.length;
  if (leaves.full.length) new Treemap(byId("map-here"), { names, tensors: Object.assign(tensors, { module: data.tensors.module }), leaves, bytes: tensors.own });
  const closer = make("aside", { class: "closer", hidden: "", "aria-live": "polite" });
  byId("tensors-here").append(closer);
  let chosen = -1;
  const table = new LongTable(byId("tensors-here"), {
    title: "tensors", names: leaves.full, columns: tensors.columns(leaves),
    keys: { search: "q", sort: "sort" }, chosen: (i) => i === chosen,
  });
  state.follow(["tensor"], (name) => {
    chosen = name ? leaves.full.indexOf(name) : -1;
    tensors.close(closer, chosen, leaves);
    table.draw();
    if (chosen >= 0) closer.scrollIntoView({ block: "nearest" });
  });
}

function showChanges(diff) {
  const names = new Names(diff.names);
  if (diff.chart.label.length) new DiffChart(byId("changes-here"), { names, chart: diff.chart });
  const { full } = leafNames(names, diff.changes);
  if (!full.length) return;
  const table = make("div", {});
  byId("changes-here").append(table);
  new LongTable(table, {
    title: "changes", names: full, columns: changeColumns(diff.changes, full), keys: { search: "find", sort: "order" },
  });
}

document.body.append(hint);
document.documentElement.classList.add("scripted");
const data = JSON.parse(byId("data").textContent);
if (data.diff) showChanges(data.diff);
showTensors(data);
