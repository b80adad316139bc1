// The page at `/`: what the model writes, where its heads look, one row step by step, and what changes change.
const recorded = JSON.parse(byId("answers").textContent);
// A model in the file itself answers without a server. It is read after the page is drawn; a hidden page is not drawn.
const here = byId("model-here");
const drawn = new Promise((done) => {
  requestAnimationFrame(() => setTimeout(done));
  setTimeout(done, 100);
});
const opened = here && drawn.then(() => new Answers(JSON.parse(here.textContent), byId("weights").textContent));
const TEXTS = { translate: "A man in a blue shirt is standing on a ladder.", generate: "The king said that the queen was tired, and the king" };

// What a question to the server gives; in a file, what was recorded when it was made.
async function ask(name, fields) {
  if (here) {
    await new Promise((done) => setTimeout(done)); // what was said before is drawn first
    return (await opened)[name](fields);
  }
  if (recorded) {
    const found = recorded[`${name} ${JSON.stringify(fields)}`];
    if (found) return found;
    const refused = fields.changes?.map((call) => recorded[`why ${call}`]).find(Boolean);
    throw new Error(refused ?? "This file has no answer to that: triptych explore MODEL computes it.");
  }
  const key = byId("key").value;
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(`/v1/explore/${name}`, { method: "POST", headers, body: JSON.stringify(fields) });
  const found = await answer.json();
  if (answer.status === 401 || answer.status === 403) byId("key-form").hidden = false;
  if (!answer.ok) throw new Error(found.error?.message ?? String(found.error));
  return found;
}

const counted = (number, name) => `${number.toLocaleString("en")} ${name}${number === 1 ? "" : "s"}`;
const signed = (value) => `${value < 0 ? "−" : "+"}${digits(Math.abs(value))}`;
const fromTo = (before, after) => `${digits(before)} → ${digits(after)} (${signed(after - before)})`;

// A change in words: "tie(encoder.0, W_Q, W_K)" is "W_Q = W_K in encoder.0"
const WORDS = {
  ablate: (places) => `${/^([a-z]+\.)?\d+$/.test(places) ? "layer" : places.includes(" ") ? "heads" : "head"} ${places.split(/\s+/).join(", ")} off`,
  even: (head) => `head ${head} looking evenly`,
  unscaled: (head) => `no scale in head ${head}`,
  truncate: (head, rank) => `rank ${rank} of W_QK in head ${head}`,
  truncate_ov: (head, rank) => `rank ${rank} of W_OV in head ${head}`,
  tie: (layers, map, to) => `${map} = ${to} in ${layers === "*" ? "every layer" : layers.includes(" ") ? `layers ${layers.replaceAll(" ", ", ")}` : `layer ${layers}`}`,
  one_head: (layer) => `one head in layer ${layer}`,
  exchange: (one, other) => `heads ${one} and ${other} exchanged`,
  without_positions: () => "positions off",
  fold: () => "W_Q W_Kᵀ as one matrix",
  rewrite: (name) => name.replaceAll("_", " "),
};
function inWords(call) {
  const [, name, given] = call.match(/^(\w+)\((.*)\)$/) ?? [];
  return Object.hasOwn(WORDS, name) ? WORDS[name](...given.split(",").map((one) => one.trim())) : call;
}
// Several changes in words; a tie of several layers is named once.
function allInWords(calls) {
  const layersOf = new Map();
  for (const call of calls) {
    const [, layer, maps] = call.match(/^tie\(([^,]+),(.*)\)$/) ?? [];
    const key = maps ?? call;
    layersOf.set(key, [...(layersOf.get(key) ?? []), layer]);
  }
  return [...layersOf].map(([key, layers]) => inWords(layers[0] === undefined ? key : `tie(${layers.join(" ")},${key})`)).join("; ");
}

class Explorer {
  constructor() {
    this.row = new Row();
    this.turn = 0;
    this.changes = [];
    this.group = null; // of layers, whose switches are shown; at first the one that the address changes
    this.text = this.target = "";
    this.viewer = null;
    this.wide = matchMedia("(min-width: 1200px)");
    this.arrange();
    this.listen();
    this.start();
  }

  get model() { return this.models.find(({ name }) => name === byId("model").value); }
  get heldOutName() { return `held-out ${this.isTranslator ? "sentences" : "text"}`; }
  get thisText() { return this.isTranslator ? "this translation" : "this text"; } // whose tokens are predicted
  get writes() { return ["translate", "generate"].some((name) => this.model.can.includes(name)); }
  get isTranslator() { return this.model.pairs; } // a text has a target, which it writes or is given
  get asked() { return { model: this.model.name, text: this.text, target: this.target, changes: this.changes }; }
  get changed() { return `${this.model.name} ${this.changes.join(" ")}`; }
  get state() { return `${this.changed} ${this.text}`; }
  // The layer and the head that are looked at; of the mean of heads none
  get place() {
    const { kind, layer, at } = this.viewer;
    const name = this.model.layers[0].name.includes(".") ? `${kind.kind}.${layer.number}` : String(layer.number);
    return { layer: name, head: at.head === MEAN ? null : layer.heads[at.head].number };
  }
  // A layer that runs several times has a number for each time, and one name.
  layer(named) { return this.model.layers.find(({ name }) => name === named) ?? this.model.layers[0]; }
  get query() {
    const { viewer } = this;
    const last = viewer.pieces.queries.length - 1;
    if (viewer.pinned && viewer.side === "query" && viewer.focus !== null) return Math.min(viewer.tokenOf("query", viewer.focus), last);
    return viewer.kind.kind === "cross" ? Math.min(1, last) : last;
  }

  async start() {
    await this.tell(async () => {
      this.models = (await ask("models", {})).models;
      byId("key-form").hidden = true;
      byId("model").replaceChildren(...this.models.map(({ name }) => make("option", { value: name }, name)));
      byId("model-choice").hidden = this.models.length < 2;
      await this.open();
    }, "open");
  }
  // What the address says
  async open() {
    this.fromHash();
    const read = () => (this.target ? this.look(++this.turn) : this.write());
    try {
      await read();
    } catch (error) {
      if (!this.changes.length) throw error;
      this.changes = []; // the model may refuse them: it is then shown as it is
      await read();
      throw error;
    }
  }

  // An error is said, and the time of an answer.
  async tell(work, kind = "look") {
    const began = performance.now();
    byId("problem").hidden = true;
    byId("problem").textContent = "";
    byId("busy").textContent = "computing …";
    try {
      await work();
      const { duration } = performance.measure(kind, { start: began });
      byId("busy").textContent = `answered in ${Math.round(duration)} ms`;
      return true;
    } catch (error) {
      byId("busy").textContent = "";
      byId("problem").hidden = false;
      byId("problem").textContent = error.message;
      return false;
    }
  }

  fromHash() {
    const rest = new URLSearchParams(fragment.replace(/^[^&]*&?/, ""));
    const named = this.models.find(({ name }) => name === rest.get("model"));
    byId("model").value = (named ?? this.models[0]).name;
    this.text = rest.get("text") || (recorded?.text || this.models[0].example || TEXTS[this.isTranslator ? "translate" : "generate"]);
    this.target = rest.get("target") ?? "";
    this.changes = [...new Set(rest.getAll("if"))];
    byId("text").value = this.text;
    this.showModel();
  }
  remember() {
    const rest = new URLSearchParams();
    if (this.models.length > 1) rest.set("model", this.model.name);
    rest.set("text", this.text);
    if (this.target) rest.set("target", this.target);
    for (const change of this.changes) rest.append("if", change);
    writeAddress(`#${fragment.match(/^#([^&]*)/)?.[1] ?? ""}&${rest}`);
    if (this.viewer) this.viewer.part("anchor").href = fragment;
  }

  showModel() {
    const { layers } = this.model;
    this.group = null;
    const [first] = layers;
    byId("about").textContent = `${layers.length} attention layers × ${first.heads} heads, d_model ${first.d_model}, d_k ${first.d_k}${first.between.length ? `; ${first.between.join(", ")}` : ""}`;
    document.querySelector("h1").textContent = document.title = this.model.name;
    byId("text-name").textContent = this.isTranslator ? "Text to translate" : this.model.can.includes("generate") ? "Text to continue" : "Text to read";
    byId("own-target").hidden = !this.isTranslator;
    byId("target").value = "";
    byId("write").textContent = this.model.can.includes("translate") ? "Translate" : this.model.can.includes("generate") ? "Continue" : "Read";
    byId("beam-choice").hidden = !here;
    const { examples = [] } = this.model;
    byId("examples-choice").hidden = !examples.length;
    byId("examples").replaceChildren(make("option", { value: "" }, "a held-out sentence …"), ...examples.map((text) => make("option", { value: text }, text)));
    byId("count-choice").hidden = !this.model.can.includes("generate");
  }

  written(changes) {
    const within = (name) => clamp(Math.round(Number(byId(name).value)) || 1, Number(byId(name).min), Number(byId(name).max));
    return ask("write", { model: this.model.name, text: this.text, changes, count: within("count"), ...(here ? { beam: within("beam") } : {}) });
  }

  use(text) {
    if (!this.models) return;
    this.text = byId("text").value = text;
    this.tell(() => this.write(), "sentence");
  }
  // Translate or continue the text, then look at it.
  async write() {
    const turn = ++this.turn;
    const found = await this.written([]);
    if (turn !== this.turn) return;
    this.candidates = found.candidates;
    this.target = found.candidates[0]?.text ?? byId("target").value;
    try {
      await this.look(turn);
    } catch (error) {
      if (this.isTranslator || !this.target) throw error;
      this.target = ""; // read again, the continuation may be too long
      await this.look(turn);
    }
  }

  // Read the text with the changes.
  async look(turn) {
    const data = await ask("view", this.asked);
    if (turn !== this.turn) return;
    await this.draw(data);
    this.showOutput();
    await this.showRow(turn);
    this.later(turn);
  }

  // Text and switches are left of the matrix and their effect where there is room, and elsewhere below.
  arrange() {
    const root = document.querySelector("section.attention");
    const beside = root.querySelector(".beside");
    this.chooser = this.chooser ?? root.querySelector(".controls");
    if (this.wide.matches) {
      root.prepend(this.chooser);
      document.querySelector("#explore .asked").append(byId("what-if"));
      beside.prepend(byId("effect"));
    } else {
      beside.before(this.chooser, byId("what-if"));
      byId("about").before(byId("effect"));
    }
  }

  async draw(data) {
    const root = document.querySelector("section.attention");
    this.isDrawing = true;
    if (this.viewer) await this.viewer.replace(data);
    else {
      this.viewer = root.viewer = new Viewer(root, data);
      this.viewer.part("all").before(byId("row-name"), byId("row")); // below the matrix that it is a row of
      await this.viewer.ready;
      root.addEventListener("chosen", () => this.choose());
    }
    this.isDrawing = false;
  }

  // What takes longer: the text after a change, what heads do, the forms.
  async later(turn, isChanged = false) {
    try {
      if (isChanged) {
        const data = await ask("view", this.asked);
        if (turn !== this.turn) return;
        await this.draw(data);
      }
      await this.showAfter(turn);
      await this.compare(turn);
      if (byId("forms").open) await this.showForms(turn);
      if (here || (recorded && this.changes.length)) return;
      const data = await ask("gallery", this.asked);
      if (turn !== this.turn) return;
      await this.draw(data);
    } catch { /* the page goes without */ } finally {
      if (turn === this.turn) {
        document.body.dataset.settled = turn;
        if (this.changes.length) this.sayVerdict();
      }
    }
  }

  // Another head or token
  choose() {
    const chosen = JSON.stringify([this.place, this.query]);
    if (this.isDrawing || chosen === this.chosen) return;
    this.tell(async () => {
      await this.showRow(this.turn);
      if (byId("forms").open) await this.showForms(this.turn);
    });
  }

  async showRow(turn) {
    this.chosen = JSON.stringify([this.place, this.query]);
    const { chosen } = this;
    this.drawSwitches();
    const { layer, head } = this.place;
    const about = this.layer(layer);
    const record = await ask("row", { ...this.asked, layer, head: head ?? 0, query: this.query });
    if (turn !== this.turn || chosen !== this.chosen) return;
    this.remember();
    this.row.show(record, about);
    if (head === null) byId("row-name").textContent += " (the matrix shows the mean of the heads)";
    this.showEffect(record.next);
    document.body.dataset.row = `${record.head} ${record.query} ${this.changes.join(" ")}`;
  }

  // The output: its words, what each came from, and the other candidates
  showOutput() {
    const { viewer } = this;
    const own = this.candidates?.find(({ text }) => text === this.target);
    const first = this.isTranslator ? 0 : viewer.pieces.generated_query;
    byId("output").replaceChildren();
    byId("from").textContent = "";
    if (this.target && first !== null) {
      // The last kind of attention has the output as its queries.
      const { queries, query_words: starts, joined } = viewer.data.texts[0].kinds.at(-1);
      const end = own ? first + own.tokens.length : queries.length;
      const begins = [...Array(end - first).keys()].map((i) => first + i).filter((at) => at === first || !joined || starts.includes(at));
      byId("output").append(...begins.map((at, i) => make("span", { "data-query": at, tabindex: i ? "-1" : "0", "data-at": `0 ${i}` }, queries.slice(at, begins[i + 1] ?? end).join(""))));
      byId("from").textContent = "Point at a word, or go through them with the arrow keys, to see what it came from.";
    }
    const others = (this.candidates ?? []).map(({ text, score }, i) => make("li", {},
      make("button", { type: "button", "data-candidate": i, "aria-pressed": String(text === own?.text) }, text || "∅"), ` score ${digits(score)}`));
    byId("alternatives").replaceChildren(...others);
  }
  // A word of the output: where the chosen head looks when its first token is written
  showFrom(query, word) {
    const { viewer } = this;
    const isOfOutput = !this.isTranslator || viewer.kind.kind !== "encoder";
    if (!isOfOutput || !viewer.map) return;
    // A language model writes a token at the one before it.
    const at = viewer.placeOf("query", this.isTranslator ? query : query - 1);
    if (!viewer.pinned) viewer.point("query", at);
    const { keys } = viewer.kind;
    const largest = [...viewer.map.row(at)].sort((a, b) => b[1] - a[1]).slice(0, 5).map(([key, weight]) => `${shortly(keys[key])} ${shown(weight)}`);
    byId("from").replaceChildren(make("b", {}, `“${shortly(word)}”`), ` came from: ${largest.join(" · ")} (${viewer.part("name").textContent}, as it was written)`);
  }

  // What-ifs

  // Where the switches of layers act: the chosen layer, or a group of layers that is chosen once and stays
  groupsOfLayers() {
    const { layers } = this.model;
    const { layer } = this.place;
    const one = { name: `layer ${layer}`, layers: [this.layer(layer)] };
    const all = { name: "every layer", layers };
    if (recorded || layers.length < 2) return [one];
    if (!layer.includes(".")) return [one, all];
    const names = { encoder: "every layer of the encoder", decoder: "every self-attention layer of the decoder", cross: "every cross-attention layer" };
    const stacks = Object.entries(names).map(([stack, name]) => ({ name, layers: layers.filter((about) => about.name.startsWith(`${stack}.`)) }));
    return [one, ...stacks, { name: "every self-attention layer", layers: layers.filter(({ kind }) => kind !== "cross") }, all].filter((group) => group.layers.length);
  }
  tie(group, map, to) {
    const places = group.layers.length > 1 && group.layers.length === this.model.layers.length ? ["*"] : group.layers.map(({ name }) => name);
    return places.map((place) => `tie(${place}, ${map}, ${to})`);
  }
  switchesOfLayers(group) {
    const isOne = group.layers.length === 1;
    const heads = Math.max(...group.layers.map((about) => about.heads));
    const calls = (name) => group.layers.map((about) => `${name}(${about.name})`);
    // Pressed in spite of it, the model's refusal is said.
    const never = group.layers.some(({ kind }) => kind === "cross") ? "Not in cross-attention: there W_Q reads the decoder’s stream, and W_K the encoder’s output. Choose layers of self-attention." : "";
    return [
      ["W_Q = W_K", this.tie(group, "W_Q", "W_K"), "Each head asks as it is asked: a scores b as b scores a.", never],
      ["W_K = W_V", this.tie(group, "W_K", "W_V"), "Each head is found by what it gives."],
      ...(recorded ? [] : [["all three", [...this.tie(group, "W_Q", "W_K"), ...this.tie(group, "W_V", "W_K")], "One matrix in the place of W_Q, W_K and W_V.", never]]),
      ...(heads > 1 ? [["one head", calls("one_head"), `One softmax with the queries and keys of all ${heads} heads, in the place of ${heads}: the same parameters.`]] : []),
      ...(recorded ? [] : [[isOne ? "layer off" : "layers off", calls("ablate"), "No head of the layer adds anything."]]),
    ];
  }
  // The group of layers of an address, whose switch is on
  groupOfChanges(groups) {
    const isOn = ([, calls]) => calls.every((call) => this.changes.includes(call));
    return groups.findIndex((group) => group.layers.length > 1 && this.switchesOfLayers(group).some(isOn));
  }
  switchesOfHead() {
    const { layer, head } = this.place;
    if (head === null) return [];
    const about = this.layer(layer);
    const place = `${layer}.${head}`;
    const others = [...Array(about.heads).keys()].filter((other) => other !== head).map((other) => `${layer}.${other}`).join(" ");
    return [
      ["head off", [`ablate(${place})`], "What the head gives W_O is 0."],
      ...(about.heads > 1 ? [["no other head", [`ablate(${others})`], "All other heads of the layer are off."]] : []),
      ["look evenly", [`even(${place})`], "All scores are 0: the softmax is the same for every key that is seen."],
      ["no scale", [`unscaled(${place})`], "q is multiplied by √d_k, so that the scale cancels."],
    ];
  }
  switchesOfModel() {
    return [
      ["positions off", ["without_positions()"], "Nothing turns queries and keys, and nothing is added for a position."],
      ...(here ? [["fold", ["fold()"], "W_Q W_Kᵀ of every head is multiplied into one matrix: nothing changes."]] : []),
      ...this.model.exact.map((name) => [name.replaceAll("_", " "), [`rewrite(${name})`], "An exact rewrite of all layers: other weights, the same function."]),
    ];
  }
  drawSwitches() {
    const { layer, head } = this.place;
    const about = this.layer(layer);
    const button = ([name, calls, said, never]) => make("button", { type: "button", title: never || said, ...(never ? { "aria-disabled": "true" } : {}), "data-calls": JSON.stringify(calls), "aria-pressed": String(calls.every((call) => this.changes.includes(call))) }, name);
    const panel = (title, ...parts) => make("div", { role: "group", "aria-label": title }, make("h3", {}, title), ...parts);
    const groups = this.groupsOfLayers();
    this.group = Math.min(this.group ?? Math.max(0, this.groupOfChanges(groups)), groups.length - 1);
    const where = make("select", { id: "where", "aria-label": "in which layers the switches act" }, ...groups.map(({ name }, i) => make("option", { value: i }, name)));
    where.value = this.group;
    const switches = [
      ...(head === null ? [] : [panel(`Head ${layer}.${head}`, ...this.switchesOfHead().map(button), ...this.ranks(about, `${layer}.${head}`), ...this.others(about, `${layer}.${head}`))]),
      panel("Layers", make("label", { class: "where" }, "in ", where), ...this.switchesOfLayers(groups[this.group]).map(button)),
      panel("Model", ...this.switchesOfModel().map(button)),
    ];
    const active = document.activeElement?.dataset?.calls ?? document.activeElement?.id;
    byId("switches").replaceChildren(...switches);
    if (active) [...byId("switches").querySelectorAll("button, input, select")].find((node) => node.dataset.calls === active || node.id === active)?.focus();
    const chips = this.changes.map((call) => make("button", { type: "button", class: "chip", "data-remove": call, title: call, "aria-label": `undo ${inWords(call)}` }, `${inWords(call)} ✕`));
    if (chips.length) chips.push(make("button", { type: "button", "data-remove": "*" }, "undo all"));
    const isOnChange = byId("changes").contains(document.activeElement);
    byId("changes").replaceChildren(...chips);
    if (isOnChange) (chips[0] ?? byId("where")).focus();
    byId("of-unchanged").hidden = !this.changes.length;
  }
  // Sliders of the ranks of the two forms
  ranks(about, place) {
    const sliders = [["truncate", "rank", "W_QK", about.d_k], ...(recorded ? [] : [["truncate_ov", "rank-ov", "W_OV", about.d_v]])];
    return sliders.map(([name, id, form, most]) => {
      const found = this.changes.find((call) => call.startsWith(`${name}(${place}, `));
      const rank = found ? Number(found.match(/, (\d+)\)/)[1]) : most;
      const slider = make("input", { type: "range", id, min: "1", max: most, value: rank, "data-rank": `${name}(${place}, ` });
      return make("label", {}, `rank of ${form} `, slider, make("output", { for: id }, ` ${rank} of ${most}`));
    });
  }
  // The heads that this one may change places with
  others(about, place) {
    if (recorded) return [];
    const alike = this.model.layers.filter((one) => (one.kind === "cross") === (about.kind === "cross") && one.d_model === about.d_model && one.d_k === about.d_k && one.d_v === about.d_v && one.kv_heads === one.heads);
    const heads = alike.flatMap(({ name, heads: count }) => [...Array(count).keys()].map((head) => `${name}.${head}`)).filter((other) => other !== place);
    const found = this.changes.find((call) => call.startsWith(`exchange(${place}, `));
    if (!heads.length || about.kv_heads !== about.heads) return [];
    const select = make("select", { id: "exchange", "data-exchange": `exchange(${place}, ` }, make("option", { value: "" }, "no head"), ...heads.map((other) => make("option", { value: other }, other)));
    select.value = found ? found.slice(found.indexOf(", ") + 2, -1) : "";
    return [make("label", { title: "Each gets W_Q, W_K, W_V and W_O of the other. Within a layer without biases nothing changes: a layer is the sum of its heads." }, "exchanged with ", select)];
  }
  change(changes) {
    const before = this.changes;
    this.changes = changes;
    const turn = ++this.turn;
    // What is asked for is answered first, and drawn everywhere after.
    return this.tell(() => this.showRow(turn), "switch").then((done) => {
      if (turn !== this.turn) return;
      if (!done) {
        this.changes = before; // refused: the switch goes back
        this.drawSwitches();
      }
      this.later(turn, true);
    });
  }
  toggle(calls) {
    const isOn = calls.every((call) => this.changes.includes(call));
    const left = this.changes.filter((call) => !calls.includes(call));
    return this.change(isOn ? left : [...left, ...calls]);
  }

  showEffect(next) {
    const place = byId("effect");
    const { held_out } = this.model;
    const heldOut = held_out && this.changes.length ? [make("div", {}, make("dt", {}, `loss on the ${this.heldOutName} (${counted(held_out.tokens, "token")}${held_out.name ? ` of ${held_out.name}` : ""}), nats per token`), make("dd", { id: "held-out" }, this.heldOut?.of === this.changed ? this.heldOut.said : "computing …"))] : [];
    if (!next) { place.replaceChildren(make("dl", { class: "facts" }, ...heldOut)); return; }
    if (!this.changes.length) {
      place.replaceChildren(make("p", { class: "note" }, `Loss on ${this.thisText}: ${next.loss[0] === null ? "–" : `${digits(next.loss[0])} nats per token (${counted(next.loss_tokens, "token")})`}. Press a switch: what becomes of the output and of the loss is shown here.`));
      return;
    }
    const [before, after] = next.loss;
    const small = (value) => (value < 1e-9 ? "0 (below 1e-9)" : digits(value));
    const fact = ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
    const ofText = [
      [`loss on ${this.thisText} (${counted(next.loss_tokens, "token")}), nats per token`, before === null ? "–" : fromTo(before, after)],
      [`KL of the next token, mean over ${this.thisText}`, `${small(next.mean_kl)} nats`],
    ].map(fact);
    const few = `The loss on ${counted(next.loss_tokens, "token")} shows nothing of how good a design is: it can fall where the loss on a longer text rises.`;
    const told = held_out ? `The ${this.heldOutName} ${this.isTranslator ? "tell" : "tells"} what the change does to this model, and not what a model trained with it would be.` : "A held-out text of some kB tells more: triptych explore MODEL --held-out FILE.";
    place.replaceChildren(make("p", { id: "verdict" }), make("dl", { class: "both", id: "after" }), make("p", { class: "note", id: "most" }), make("dl", { class: "facts" }, ...heldOut, ...ofText),
      ...(before === null && !held_out ? [] : [make("p", { class: "note", id: "few" }, `${before === null ? "" : `${few} `}${told}`)]),
      ...this.effectAtToken(next, small));
    this.drawAfter();
    this.sayVerdict();
  }
  // What becomes of the next token at the token that was chosen; a token that nobody chose is not shown.
  effectAtToken(next, small) {
    const { viewer } = this;
    const isOfOutput = viewer.side === "query" && !(this.isTranslator && viewer.kind.kind === "encoder");
    if (!viewer.pinned || !isOfOutput) return [make("p", { class: "note" }, `Click a word of the ${this.isTranslator ? "translation (decoder or cross)" : "text"} to see what becomes of the next token there.`)];
    const most = Math.max(...next.tokens.flatMap(([, ...both]) => both));
    const bar = (value, kind) => { const node = make("span", { class: `bar ${kind}` }); node.style.width = `${(100 * value) / most}%`; return node; };
    const rows = next.tokens.slice(0, 8).map(([token, was, is]) => make("tr", {}, make("th", { scope: "row" }, shortly(token)), make("td", {}, bar(was, "was"), bar(is, "is")), make("td", { class: "number" }, `${percent(was)} → ${percent(is)}`)));
    const where = this.isTranslator ? `where “${shortly(next.token)}” (${next.at}) is written` : `after “${shortly(next.token)}” (${next.at})`;
    return [make("table", { class: "bars" }, make("caption", {}, `Next token ${where}, before (pale) and after. KL: ${small(next.kl)} nats`), make("tbody", {}, ...rows))];
  }
  // The effect in sentences: on the output, and on the loss on the held-out text
  sayVerdict() {
    const after = this.after?.of === this.state ? this.after : null;
    const change = this.heldOut?.of === this.changed ? this.heldOut.change : null;
    const { held_out, pairs } = this.model;
    const isComputing = Number(document.body.dataset.settled) !== this.turn;
    const said = [make("b", {}, `With ${allInWords(this.changes)}: `)];
    const most = [];
    if (after && this.writes) {
      const isShort = after.was.length + after.is.length < 240;
      said.push(after.is === after.was ? `the ${pairs ? "translation" : "output"} stays the same. ` : isShort ? `“${after.was.trim()}” becomes “${after.is.trim() || "∅"}”${/[.!?]$/.test(after.is.trim()) ? "" : "."} ` : "the output is another. ");
    } else if (isComputing && this.writes) {
      said.push(`the ${pairs ? "translation" : "output"} is still being computed … `);
    }
    if (change) {
      const { difference, interval } = change;
      const isSame = Math.abs(difference) < 1e-6;
      const ends = interval && !isSame ? ` (95 % interval ${interval.map(signed).join(" to ")})` : "";
      const sign = !interval || interval[0] * interval[1] <= 0 ? 0 : Math.sign(difference);
      const worth = isSame ? "" : { "-1": ": the model is better there", 0: ": no difference is shown", 1: ": the model is worse" }[sign];
      said.push(`On the ${this.heldOutName} the loss ${isSame ? "stays the same" : `${difference < 0 ? "falls" : "rises"} by ${digits(Math.abs(difference))} nats per token`}${ends}${worth}.`);
      if (change.most?.length && !isSame) {
        most.push("The loss rises most on: ", ...change.most.flatMap(({ text, nats }, i) => [...(i ? [", "] : []), make("button", { type: "button", class: "example", "data-text": text, title: "Look at this sentence" }, text), ` (${signed(nats)})`]));
      }
    } else if (isComputing && held_out) {
      said.push(`The loss on the ${this.heldOutName} is still being computed …`);
    }
    byId("verdict")?.replaceChildren(...said);
    byId("most")?.replaceChildren(...most);
  }
  // What the changes do to the loss on the held-out text, which is read in parts, so that a click does not wait for it
  async compare(turn) {
    const { held_out, name } = this.model;
    const of = this.changed;
    if (!this.changes.length || !held_out || (this.heldOut?.of === of && this.heldOut.isDone)) return;
    const tell = (said, isDone, change = null) => {
      this.heldOut = { of, said, isDone, change };
      if (byId("held-out")) byId("held-out").textContent = said;
      this.sayVerdict();
    };
    try {
      for (let parts = recorded ? held_out.parts : 1; parts <= held_out.parts; parts++) {
        const { loss, interval, most } = await ask("held_out", { model: name, changes: this.changes, parts });
        if (turn !== this.turn) return;
        if (!loss) { tell(`reading: part ${parts} of ${held_out.parts}`, false); continue; }
        const ends = interval ? `95 % interval of the difference over ${held_out.units}: ${interval.map(signed).join(" to ")}` : "one window, so no interval";
        tell(`${fromTo(...loss)}; ${ends}`, true, { difference: loss[1] - loss[0], interval, most });
      }
    } catch (error) { tell(error.message, true); }
  }
  async showAfter(turn) {
    if (!this.changes.length || !this.candidates && !this.target) return;
    const of = this.state;
    const found = await this.written(this.changes);
    if (turn !== this.turn) return;
    this.after = { of, was: this.candidates?.[0]?.text ?? this.target, is: found.candidates[0]?.text ?? "", python: found.python };
    this.drawAfter();
    this.sayVerdict();
  }
  drawAfter() {
    if (!byId("after") || this.after?.of !== this.state) return;
    const { was, is, python } = this.after;
    const known = new Set(was.split(/\s+/));
    const words = is.split(/(\s+)/).map((word) => (word.trim() && !known.has(word) ? make("mark", {}, word) : word));
    byId("after").replaceChildren(
      make("dt", {}, "output before"), make("dd", {}, was), make("dt", {}, "output after"), make("dd", { id: "after-text" }, ...(is ? words : ["∅"])),
      make("dt", {}, "in Python"), make("dd", {}, make("code", { class: "lines" }, python), " ", make("button", { type: "button", "data-copy": this.script(python) }, "copy")));
  }

  // Lines that make the same model and the same output
  script(calls) {
    const asked = JSON.stringify(this.text);
    const verb = this.isTranslator ? `translate(${asked})` : this.model.can.includes("generate") ? `generate(${asked})` : `run(${asked}).loss`;
    return `import torch\nimport triptych\n\nmodel = triptych.load(${JSON.stringify(this.model.name)})\n${calls}\nprint(model.${verb})\n`;
  }
  async copy(button) {
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "copied";
    } catch { // where a browser allows no copies, the lines are shown to be marked
      button.replaceWith(make("pre", { tabindex: "0" }, button.dataset.copy));
    }
  }

  async showForms(turn) {
    const { layer, head } = this.place;
    const found = await ask("head", { model: this.model.name, changes: this.changes, layer, head: head ?? 0 });
    if (turn !== this.turn) return;
    this.forms = found;
    this.drawForms();
  }
  drawForms() {
    const { about, pictures, spectra, chance, figures, directions } = this.forms;
    const { layer, head } = this.place;
    const curves = (form) => {
      const values = spectra[form];
      const [top, random] = [values[0] || 1, chance[form]];
      const size = length(values) / (length(random) || 1); // chance of the same norm
      const high = Math.max(top, (random[0] ?? 0) * size) || 1;
      return plot(`W_${form.toUpperCase()}: singular values over the largest`, [
        { of: form, name: "here", values: values.map((value) => value / high) },
        { of: "chance", name: "chance", values: random.slice(0, values.length).map((value) => (value * size) / high) }], 1);
    };
    const titles = { qk_effective_rank: "effective rank of W_QK", ov_effective_rank: "effective rank of W_OV", qk_symmetric_share: "symmetric share of W_QK", ov_copying: "copying score of W_OV", qk_times_chance: "overlap of W_Q and W_K, times chance", qk_excess: "the same, excess over chance" };
    const facts = Object.entries(figures).filter(([, value]) => typeof value === "number").map(([name, value]) => make("div", {}, make("dt", {}, titles[name]), make("dd", {}, digits(value))));
    const tables = [["qk", "asks", "is asked"], ["ov", "reads", "writes"]].map(([form, left, right]) => {
      const rows = directions.filter((one) => one.form === form).map(({ number, value, reads, writes }, i) => make("tr", {},
        make("td", { class: "number" }, i % 2 ? "−" : `${number} (${digits(value)})`), make("td", {}, reads.map(shortly).join(" · ")), make("td", {}, writes.map(shortly).join(" · ") || "–")));
      return make("div", { class: "table", role: "region", tabindex: "0", "aria-label": `singular directions of W_${form.toUpperCase()}` }, make("table", {}, make("caption", {}, `Singular directions of W_${form.toUpperCase()}: the nearest tokens`),
        make("thead", {}, make("tr", {}, ...["direction (σ)", left, right].map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows)));
    });
    byId("head-forms").replaceChildren(
      make("h3", {}, `Head ${layer}.${head ?? 0}`), make("p", { class: "note" }, about.join("; ")),
      make("div", { class: "pictures" }, ...Object.entries(pictures).map(([side, rows]) => picture(side, rows))),
      make("p", { class: "note" }, "Root mean squares of blocks of entries, each picture by its own largest. Rows are channels of the input."),
      make("dl", { class: "facts" }, ...facts),
      make("div", { class: "groups" }, curves("qk"), curves("ov")),
      make("p", { class: "note" }, "Chance: forms of random maps of the same sizes and norm. Directions are read through the embedding tables (asks, is asked, reads) and the output table (writes), which tells less of later layers, whose stream has moved away from the tables."),
      ...tables);
  }

  listen() {
    this.wide.addEventListener("change", () => this.arrange());
    byId("use").addEventListener("submit", (event) => {
      event.preventDefault();
      this.use(byId("text").value);
    });
    byId("text").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("use").requestSubmit(); });
    byId("target").addEventListener("change", () => {
      this.target = byId("target").value || (this.candidates?.[0]?.text ?? "");
      this.tell(() => this.look(++this.turn));
    });
    byId("key").addEventListener("change", () => this.start());
    byId("model").addEventListener("change", () => {
      this.changes = [];
      this.text = TEXTS[this.isTranslator ? "translate" : "generate"];
      byId("text").value = this.text;
      this.showModel();
      this.tell(() => this.write());
    });
    byId("alternatives").addEventListener("click", (event) => {
      const button = event.target.closest("[data-candidate]");
      if (!button) return;
      this.target = this.candidates[Number(button.dataset.candidate)].text;
      this.tell(() => this.look(++this.turn));
    });
    for (const kind of ["mouseover", "focusin"]) byId("output").addEventListener(kind, (event) => {
      const word = event.target.closest("[data-query]");
      if (word) this.showFrom(Number(word.dataset.query), word.textContent);
    });
    byId("output").addEventListener("mouseleave", () => this.viewer?.unpoint());
    moveByArrows(byId("output"));
    byId("switches").addEventListener("click", (event) => {
      const button = event.target.closest("[data-calls]");
      if (button) this.toggle(JSON.parse(button.dataset.calls));
    });
    byId("switches").addEventListener("input", (event) => {
      if (event.target.id === "where") { this.group = Number(event.target.value); this.drawSwitches(); }
      const { rank: call, exchange } = event.target.dataset;
      const begins = call ?? exchange;
      if (!begins) return;
      const left = this.changes.filter((one) => !one.startsWith(begins));
      const { value } = event.target;
      const isOff = call ? value === event.target.max : !value;
      this.change(isOff ? left : [...left, `${begins}${value})`]);
    });
    byId("effect").addEventListener("click", (event) => {
      const { copy, text } = event.target.dataset;
      if (copy) this.copy(event.target);
      if (text) this.use(text);
    });
    byId("examples").addEventListener("change", ({ target }) => { if (target.value) this.use(target.value); });
    byId("changes").addEventListener("click", (event) => {
      const wanted = event.target.closest("[data-remove]")?.dataset.remove;
      if (wanted) this.change(wanted === "*" ? [] : this.changes.filter((call) => call !== wanted));
    });
    byId("forms").addEventListener("toggle", () => { if (byId("forms").open && this.viewer) this.tell(() => this.showForms(this.turn)); });
    document.addEventListener("themechange", () => { if (this.forms) this.drawForms(); });
    addEventListener("hashchange", () => { if (this.models) this.tell(() => this.open()); });
  }
}
document.getElementById("explore").explorer = new Explorer();
