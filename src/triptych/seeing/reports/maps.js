// Maps of layers × heads: a choice of measures, a scale for each kind, and one head that is chosen.
// The page's own script has `drawHead`, which shows the chosen head, and calls `begin`.
const report = JSON.parse(document.getElementById("report").textContent);
for (const layer of report.models.flatMap((model) => model.layers)) {
  for (const values of Object.values(layer.figures)) {
    values.forEach((value, h) => { if (value === "Infinity") values[h] = Infinity; });
  }
}
const measures = new Map(report.measures.map((measure) => [measure.name, measure]));
const shown = (value) => {
  if (value === null || value === undefined) return "–";
  if (value === Infinity) return "∞";
  if (Number.isInteger(value) && Math.abs(value) < 100000) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 100000)) return value.toExponential(1);
  return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3);
};

// Where the eye should see zero in the middle, both ways have a colour of their own.
const isSigned = (name) => /cosine|symmetry$|copying|^worth$/.test(name);
let measure = report.first ?? report.measures[0].name;
let chosen = report.models[0]?.layers[0]?.heads.length ? "0 0 0" : null;
let ranges = new Map();

// A measure may name heads instead of measuring them: its values are places in its list of names.
const namesOf = () => measures.get(measure).names;
const colourOf = (number) => `var(--s${1 + (number % 8)})`;
const short = (name) => name.slice(0, 2);

// Figures of one kind have one scale; W_QK of rotary pairs is of another kind than W_QK itself.
const kindOf = (layer) => (measures.get(measure).by_qk ? layer.qk_of : "");
const painter = (range) => {
  const [low, high, below, none] = ["--zero", "--one", "--below", "--none"].map(colour);
  const width = range.high - range.low || 1;
  const reach = Math.max(Math.abs(range.low), Math.abs(range.high)) || 1;
  return (value) => {
    if (value === null) return none;
    if (namesOf()) return colourOf(value);
    if (value === Infinity) return high;
    if (!isSigned(measure)) return mix(low, high, (value - range.low) / width);
    return mix(low, value < 0 ? below : high, Math.min(1, Math.abs(value) / reach));
  };
};

function scale(kind, range) {
  const { low, high, known, finite } = range;
  const bar = make("canvas", { class: "bar", width: "192", height: "12" });
  const pen = bar.getContext("2d");
  const paint = painter(range);
  for (let x = 0; x < bar.width; x++) {
    pen.fillStyle = paint(low + ((high - low) * x) / (bar.width - 1));
    pen.fillRect(x, 0, 1, bar.height);
  }
  const part = (name, text) => make("span", { class: name }, text);
  return make("div", { class: "scale" },
    ...(ranges.size > 1 ? [part("kind", `${kind}:`)] : []),
    part("low", shown(finite.length ? low : null)), bar,
    part("high", shown(finite.length ? high : null) + (finite.length < known.length ? ", and ∞" : "")),
    part("middle", known.length ? `median ${shown(known[known.length >> 1])}` : "nothing to show"));
}

// The names that heads have, each with its colour, its letters, and how many heads have it.
function key(names, known) {
  const counted = names.map((name, number) => [name, number, known.filter((value) => value === number).length]);
  const parts = counted.filter(([, , count]) => count).map(([name, number, count]) => {
    const mark = make("span", { class: "named", "aria-hidden": "true" }, short(name));
    mark.style.background = colourOf(number);
    return make("span", {}, mark, ` ${name}: ${count}`);
  });
  return make("div", { class: "scale" }, ...(parts.length ? parts : ["No head has a name."]));
}

function drawMaps() {
  const layers = report.models.flatMap((model) => model.layers);
  ranges = new Map();
  for (const kind of new Set(layers.map(kindOf))) {
    const all = layers.filter((layer) => kindOf(layer) === kind).flatMap((layer) => layer.figures[measure]);
    const known = all.filter((value) => value !== null).sort((a, b) => a - b);
    const finite = known.filter(Number.isFinite);
    const [low, high] = finite.length ? [finite[0], finite[finite.length - 1]] : [0, 1];
    ranges.set(kind, { low, high, known, finite });
  }
  const about = measures.get(measure);
  byId("meaning").textContent = about.meaning + (about.of_basis ? " Depends on the basis." : "");
  const maps = report.models.map((model, m) => {
    const most = Math.max(...model.layers.map((layer) => layer.num_heads));
    const cell = most > 48 ? 12 : most > 24 ? 18 : 26;
    const heading = make("tr", {}, make("td"), ...Array.from({ length: most }, (_, head) =>
      make("th", { scope: "col" }, most > 24 && head % 8 ? "" : String(head))));
    const rows = model.layers.map((layer, l) => {
      const paint = painter(ranges.get(kindOf(layer)));
      const cells = Array.from({ length: most }, () => make("td"));
      layer.heads.forEach((head, h) => {
        const value = layer.figures[measure][h];
        const names = namesOf();
        const told = !names ? shown(value) : value === null ? "no name" : names[value];
        const label = `${layer.name}, head ${head}: ${told}`;
        const square = make("div", { title: label }, ...(names && value !== null && cell > 20 ? [short(told)] : []));
        square.style.background = paint(value);
        cells[head] = make("td", { role: "gridcell", tabindex: "-1", "aria-label": label, "data-at": `${m} ${l} ${h}` }, square);
      });
      return make("tr", {}, make("th", { scope: "row" }, layer.name), ...cells);
    });
    const grid = make("table", { class: namesOf() ? "grid names" : "grid", role: "grid", "aria-label": `${about.title}, layer by head` },
      make("thead", {}, heading), make("tbody", {}, ...rows));
    grid.style.setProperty("--cell", `${cell}px`);
    return make("div", { class: "map" }, ...(report.models.length > 1 ? [make("h3", {}, model.name)] : []), grid);
  });
  byId("maps").replaceChildren(...maps);
  const scales = [...ranges].map(([kind, range]) => (namesOf() ? key(namesOf(), range.known) : scale(kind, range)));
  byId("scales").replaceChildren(...scales);
  mark();
}

function mark() {
  const cells = [...document.querySelectorAll("[data-at]")];
  for (const cell of cells) {
    cell.setAttribute("aria-selected", String(cell.dataset.at === chosen));
    cell.tabIndex = -1;
  }
  const current = cells.find((cell) => cell.dataset.at === chosen) ?? cells[0];
  if (current) current.tabIndex = 0;
}

const choose = (cell) => { chosen = cell.dataset.at; drawHead(); };
byId("maps").addEventListener("click", (event) => {
  const cell = event.target.closest("[data-at]");
  if (cell) { choose(cell); cell.focus(); }
});
byId("maps").addEventListener("keydown", (event) => {
  const cell = event.target.closest("[data-at]");
  if (!cell || (event.key !== "Enter" && event.key !== " ")) return;
  event.preventDefault();
  choose(cell);
});
moveByArrows(byId("maps"));

function begin() {
  for (const [group, names] of report.groups) {
    const options = names.map((name) => make("option", { value: name }, measures.get(name).title));
    byId("measure").append(make("optgroup", { label: group }, ...options));
  }
  byId("measure").value = measure;
  byId("measure").addEventListener("change", (event) => { measure = event.target.value; drawMaps(); });
  document.addEventListener("themechange", () => { drawMaps(); drawHead(); });
  drawMaps();
  drawHead();
}
