// What is known of the chosen head, from its weights.
function drawHead() {
  mark();
  if (chosen === null) return;
  const [m, l, h] = chosen.split(" ").map(Number);
  const layer = report.models[m].layers[l];
  const row = (name) => {
    const about = measures.get(name);
    const title = make("td", { title: about.meaning, ...(about.of_basis ? { class: "basis" } : {}) }, about.title);
    return make("tr", {}, title, make("td", {}, shown(layer.figures[name][h])));
  };
  const tables = report.groups.map(([group, names]) =>
    make("table", {}, make("caption", {}, group), make("tbody", {}, ...names.map(row))));
  const spectra = Object.entries(layer.spectra).map(([name, of]) => ({ of: name, name: `W_${name.toUpperCase()}`, values: of[h].map((v) => v / 1000) }));
  const angles = Object.entries(layer.angles).map(([name, of]) => ({ of: name, name: name.split("").map((s) => `W_${s.toUpperCase()}`).join(", "), values: of[h].map((v) => v / 10) }));
  const ending = layer.qk_of === "form" ? "." : ", before the rotation.";
  byId("detail").replaceChildren(
    make("h3", {}, `${report.models.length > 1 ? `${report.models[m].name}: ` : ""}${layer.name}, head ${layer.heads[h]}`),
    make("p", { class: "note" }, layer.about),
    make("div", { class: "pictures" }, ...Object.entries(layer.pictures).map(([side, of]) => picture(side, of[h]))),
    make("p", { class: "note" }, `Root mean squares of blocks of entries, more colour for larger, each by its own largest. Rows are channels of the input; columns are channels of the head, or for W_QK of the other input${ending}`),
    make("div", { class: "groups" },
      plot("singular values over the largest", spectra, 1),
      ...(angles.length ? [plot("principal angles, degrees", angles, 90)] : [])),
    make("div", { class: "groups" }, ...tables));
  byId("detail").hidden = false;
}

begin();
