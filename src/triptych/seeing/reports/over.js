// What the chosen head does over a text: its figures with intervals, next to the figures of a head that looks evenly.
function drawHead() {
  mark();
  if (chosen === null) return;
  const [m, l, h] = chosen.split(" ").map(Number);
  const layer = report.models[m].layers[l];
  const interval = (of) => (of.low ? `[${shown(of.low[h])}, ${shown(of.high[h])}]` : "");
  const row = (name) => {
    const about = measures.get(name);
    const of = layer.intervals[name];
    const cells = [shown(layer.figures[name][h]), interval(of), of.even === null ? "" : shown(of.even)];
    return make("tr", {}, make("td", { title: about.meaning }, about.title), ...cells.map((cell) => make("td", {}, cell)));
  };
  const tables = report.groups.map(([group, names]) => {
    const known = names.filter((name) => name in layer.intervals && layer.figures[name][h] !== null);
    const heads = ["", "value", "95 % interval", "evenly"].map((name) => make("th", { scope: "col" }, name));
    return known.length
      ? make("table", {}, make("caption", {}, group), make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...known.map(row)))
      : null;
  });
  const called = layer.figures.called[h];
  byId("detail").replaceChildren(
    make("h3", {}, `${layer.name}, head ${layer.heads[h]}: ${called === null ? "no name" : measures.get("called").names[called]}`),
    ...tables.filter(Boolean));
  byId("detail").hidden = false;
}

begin();
