// The viewer of attention: every <section class="attention"> of the page, each with data of its own.
const WINDOW = 48; // rows and columns of the matrix at once
const LISTED = 12; // weights in the list below the text, at most
const MARGIN = 92; // of the matrix, for its tokens, in pixels
const MEAN = -1; // the mean of a layer's heads, in the place of a head

const sum = (values) => values.reduce((a, b) => a + b, 0);
const clamp = (value, low, high) => Math.max(low, Math.min(value, high));
// A token in a line of its own: without the space before it, and never invisible.
const shortly = (token) => token.trim().replaceAll("\n", "↵") || token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
const shown = (weight) => (weight >= 0.0005 || weight === 0 ? weight.toFixed(3) : weight.toExponential(0));

// The part of the address after "#". Safari and Firefox refuse more than about ten changes in a second: the last one is
// then written later. A frame without an address of its own, as in a notebook, has none to write.
let fragment = location.hash;
addEventListener("hashchange", () => { fragment = location.hash; });
function writeAddress(wanted, tries = 12) {
  fragment = wanted;
  try {
    history.replaceState(null, "", wanted);
  } catch {
    if (tries) setTimeout(() => { if (fragment === wanted) writeAddress(wanted, tries - 1); }, 1000);
  }
}

// What is packed in a file is text; what was computed on the page is numbers.
async function inflate(text) {
  if (text instanceof Uint8Array) return text;
  const packed = atob(text);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Numbers whose lowest bytes stand first, then the second ones, and so on.
function planes(bytes, start, count, size) {
  const found = new Uint32Array(count);
  for (let b = 0; b < size; b++) for (let i = 0; i < count; i++) found[i] |= bytes[start + b * count + i] << (8 * b);
  return found;
}
const weightOf = (level) => (level / 4095) ** 2;

// A head's weights. Rows are [key, weight] pairs, without zeros.
class Dense {
  constructor(numQueries, numKeys, weights) {
    Object.assign(this, { numQueries, numKeys, weights, kept: numKeys });
  }
  row(query) {
    const row = this.weights.subarray(query * this.numKeys, (query + 1) * this.numKeys);
    const found = [];
    row.forEach((weight, key) => { if (weight) found.push([key, weight]); });
    return found;
  }
  leftOut() { return 0; }
}
class Sparse {
  constructor(numQueries, numKeys, rows, left) {
    Object.assign(this, { numQueries, numKeys, rows, left, kept: rows.length ? rows[0].length : 0 });
  }
  row(query) { return this.rows[query]; }
  leftOut(query) { return this.left[query]; }
}

function column(map, key) {
  const found = [];
  for (let query = 0; query < map.numQueries; query++) {
    if (map instanceof Dense) {
      const weight = map.weights[query * map.numKeys + key];
      if (weight) found.push([query, weight]);
    } else {
      const entry = map.rows[query].find(([at]) => at === key);
      if (entry) found.push([query, entry[1]]);
    }
  }
  return found;
}

// The largest weights of a head as [query, key, weight], without looks at the own and the first token where others are.
function strongest(map, kind, count, all = false) {
  const found = [];
  for (let query = 0; query < map.numQueries; query++) {
    for (const [key, weight] of map.row(query)) {
      if (!all && (key === 0 || (kind !== "cross" && key === query))) continue;
      if (found.length === count && weight <= found[count - 1][2]) continue;
      found.push([query, key, weight]);
      found.sort((a, b) => b[2] - a[2]);
      found.length = Math.min(found.length, count);
    }
  }
  return found.length || all ? found : strongest(map, kind, count, true);
}

async function unpack({ form, kept, keys: places, data }, numQueries, numKeys) {
  if (form === "whole") return new Dense(numQueries, numKeys, data);
  const bytes = await inflate(data);
  if (form === "dense") return new Dense(numQueries, numKeys, Float32Array.from(planes(bytes, 0, numQueries * numKeys, 2), weightOf));
  const count = numQueries * kept;
  const keys = planes(await inflate(places), 0, count, 4);
  const weights = planes(bytes, 0, count, 2);
  const left = Float32Array.from(planes(bytes, 2 * count, numQueries, 2), weightOf);
  const keyAt = (i, query) => (form === "rows" ? keys[i] : query - (keys[i] & 1 ? -(keys[i] + 1) / 2 : keys[i] / 2));
  const rows = Array.from({ length: numQueries }, (_, query) => {
    const row = [];
    for (let i = query; i < count; i += numQueries) if (weights[i]) row.push([keyAt(i, query), weightOf(weights[i])]);
    return row;
  });
  return new Sparse(numQueries, numKeys, rows, left);
}

function meanOf(maps) {
  const { numQueries, numKeys } = maps[0];
  if (maps.every((map) => map instanceof Dense)) {
    return new Dense(numQueries, numKeys, maps[0].weights.map((_, i) => sum(maps.map((map) => map.weights[i])) / maps.length));
  }
  const rows = Array.from({ length: numQueries }, (_, query) => {
    const row = new Map();
    for (const map of maps) for (const [key, weight] of map.row(query)) row.set(key, (row.get(key) ?? 0) + weight / maps.length);
    return [...row].sort((a, b) => a[0] - b[0]);
  });
  const left = Float32Array.from(rows, (_, query) => sum(maps.map((map) => map.leftOut(query))) / maps.length);
  return new Sparse(numQueries, numKeys, rows, left);
}

// The map of words: sums over the tokens of a looked-at word, means over the tokens of a word that looks.
// `starts` has the first token of each word.
function wordsMap(map, rowStarts, columnStarts) {
  const rows = rowStarts.length;
  const columns = columnStarts.length;
  const weights = new Float32Array(rows * columns);
  const unit = unitOf(columnStarts);
  const left = new Float32Array(rows);
  rowStarts.forEach((start, r) => {
    const stop = r + 1 < rows ? rowStarts[r + 1] : map.numQueries;
    for (let query = start; query < stop; query++) {
      for (const [key, weight] of map.row(query)) weights[r * columns + unit(key)] += weight / (stop - start);
      left[r] += map.leftOut(query) / (stop - start);
    }
  });
  const whole = new Dense(rows, columns, weights);
  return map instanceof Dense ? whole : new Sparse(rows, columns, rowStarts.map((_, r) => whole.row(r)), left);
}
// The number of the word that a token belongs to
const unitOf = (starts) => (token) => {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (starts[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return low;
};
// Bytes by their names, as in "<0xC3><0xA9>", are characters where they are whole.
const withBytes = (text) => text.replace(/(?:<0x[0-9A-F]{2}>)+/g, (run) =>
  new TextDecoder().decode(Uint8Array.from(run.match(/[0-9A-F]{2}(?=>)/g), (byte) => parseInt(byte, 16))));
// The same kind of attention with words in the place of tokens; null where no tokens can be joined
function joinedKind(kind) {
  const { queries, keys, query_words: rows, key_words: columns } = kind;
  if (!rows || (rows.length === queries.length && columns.length === keys.length)) return null;
  const join = (tokens, starts) => starts.map((start, i) => withBytes(tokens.slice(start, starts[i + 1] ?? tokens.length).join("")));
  const at = (starts, token) => (token === null || token === undefined ? null : unitOf(starts)(token));
  return {
    ...kind, queries: join(queries, rows), keys: join(keys, columns),
    generated_query: at(rows, kind.generated_query), generated_key: at(columns, kind.generated_key),
    second_query: at(rows, kind.second_query), second_key: at(columns, kind.second_key),
  };
}

class Viewer {
  constructor(root, data) {
    this.root = root;
    this.joins = root.closest("#explore") !== null; // elsewhere tokens are shown until words are asked for
    this.take(data);
    this.at = this.tellingPlace(0);
    this.side = "query";
    this.focus = null; // an index on that side
    this.pinned = false;
    this.top = this.left = 0; // of the window
    this.readColours();
    this.listen();
    this.ready = this.showText(this.fromHash() ?? this.at);
  }

  take(data) {
    this.data = data;
    let at = 0;
    for (const text of data.texts) for (const kind of text.kinds) for (const layer of kind.layers) {
      layer.first = at;
      at += layer.heads.length;
    }
    for (const { kinds } of data.texts) for (const kind of kinds) kind.joined = joinedKind(kind);
    this.unpacked = new Map();
  }
  // Other weights of the same model: another text, or what heads do. The head stays, and the token if it is there.
  async replace(data) {
    const { at, focus, pinned } = this;
    this.take(data);
    const isThere = pinned && this.side === "query" && focus !== null && focus < this.kind.queries.length;
    await this.showText({ ...at, focus: isThere ? this.tokenOf("query", focus) : null });
  }

  part(name) { return this.root.querySelector(`[data-part="${name}"]`); }
  get text() { return this.data.texts[this.at.text]; }
  get pieces() { return this.text.kinds[this.at.kind]; }
  get isJoined() { return this.joins && this.pieces.joined !== null; }
  get kind() { return this.isJoined ? this.pieces.joined : this.pieces; }
  starts(side) { return this.pieces[`${side}_words`]; }
  // Where words are shown, a place is the number of a word; in an address it is always the number of a token.
  tokenOf(side, place) { return this.isJoined ? this.starts(side)[place] : place; }
  placeOf(side, token) { return this.isJoined ? unitOf(this.starts(side))(token) : token; }
  get layer() { return this.kind.layers[this.at.layer]; }
  get isOneSided() { return this.kind.queries.length === this.kind.keys.length && this.kind.queries.every((t, i) => t === this.kind.keys[i]); }
  tokens(side) { return side === "query" ? this.kind.queries : this.kind.keys; }
  isGenerated(side, index) {
    const first = side === "query" ? this.kind.generated_query : this.kind.generated_key;
    return first !== null && index >= first;
  }
  isSecond(side, index) {
    const first = side === "query" ? this.kind.second_query : this.kind.second_key;
    return first !== null && index >= first;
  }

  // The telling head of a text, of cross-attention where there is one
  tellingPlace(text) {
    const { kinds } = this.data.texts[text];
    const kind = Math.max(0, kinds.findIndex((of) => of.kind === "cross"));
    const [layer, head] = kinds[kind].telling;
    return { text, kind, layer, head };
  }

  // The same layer and head of another text or kind of attention, where it has them
  samePlace(text, kind) {
    const { layers } = this.data.texts[text].kinds[kind];
    const layer = Math.min(this.at.layer, layers.length - 1);
    return { text, kind, layer, head: Math.min(this.at.head, layers[layer].heads.length - 1) };
  }

  // "decoder.2.5", "1.cross.0.mean" (text 1), "decoder.2.5.17" (token 17)
  address({ text, kind, layer, head }, focus = null) {
    const of = this.data.texts[text].kinds[kind];
    const { number, heads } = of.layers[layer];
    const parts = [...(text ? [text] : []), of.kind, number, head === MEAN ? "mean" : heads[head].number];
    return [...parts, ...(focus === null ? [] : [this.tokenOf("query", focus)])].join(".");
  }
  fromHash() {
    const found = fragment.match(/^#(?:(\d+)\.)?([a-z]+)\.(\d+)\.(\d+|mean)(?:\.(\d+))?(?:&|$)/);
    if (!found) return null;
    const text = Number(found[1] ?? 0);
    const kinds = this.data.texts[text]?.kinds ?? [];
    const kind = kinds.findIndex((of) => of.kind === found[2]);
    const layers = kinds[kind]?.layers ?? [];
    const layer = layers.findIndex((of) => of.number === Number(found[3]));
    if (layer < 0) return null;
    const head = layers[layer].heads.findIndex((of) => of.number === Number(found[4]));
    if (head < 0 && found[4] !== "mean") return null;
    const focus = found[5] === undefined || !(found[5] < kinds[kind].queries.length) ? null : Number(found[5]);
    return { text, kind, layer, head, focus };
  }

  readColours() {
    const style = getComputedStyle(this.root);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.colours = Object.fromEntries(["ink", "card", "hot", "made"].map((name) => [name, colour(`--${name}`)]));
    const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const [zero, one] = [parse(colour("--zero")), parse(colour("--one"))];
    this.shades = Array.from({ length: 256 }, (_, level) => zero.map((from, i) => Math.round(from + ((one[i] - from) * level) / 255)));
    this.styles = this.shades.map((rgb) => `rgb(${rgb.join(",")})`);
  }
  shade(weight) { return this.styles[Math.round(255 * Math.sqrt(Math.min(1, weight)))]; }

  async showText(wanted) {
    Object.assign(this.at, { text: wanted.text, kind: wanted.kind, layer: wanted.layer, head: wanted.head });
    const token = wanted.focus ?? null;
    // An address may name a token within a word.
    if (token !== null && this.isJoined && !this.starts("query").includes(token)) this.joins = false;
    this.focus = token === null ? null : this.placeOf("query", token);
    this.pinned = this.focus !== null;
    this.top = this.left = 0;
    this.overviews = await inflate(this.kind.overviews);
    this.fillControls();
    this.drawGlance();
    this.drawTexts();
    this.drawLegend();
    await this.show();
  }

  fillControls() {
    const texts = this.data.texts.map((text, i) => make("option", { value: i }, text.title));
    this.part("text").replaceChildren(...texts);
    this.part("text").value = this.at.text;
    this.part("text-choice").hidden = texts.length < 2;
    const names = { encoder: "source at source", decoder: "target at target", cross: "target at source" };
    const kinds = this.text.kinds.map((kind, i) => make("button",
      { type: "button", "data-kind": i, "aria-pressed": i === this.at.kind, title: names[kind.kind] }, kind.kind));
    this.part("kinds").replaceChildren(...kinds);
    this.part("kinds").hidden = kinds.length < 2;
    this.part("words").hidden = this.pieces.joined === null;
    for (const button of this.part("words").children) button.setAttribute("aria-pressed", (button.dataset.words === "words") === this.joins);
    const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
    const { queries, keys } = this.kind;
    const unit = this.isJoined ? "word" : "token";
    const sizes = this.isOneSided ? many(queries.length, unit) : `${many(queries.length, unit)} looking at ${keys.length.toLocaleString("en")}`;
    this.part("about").textContent = `${many(this.kind.layers.length, "layer")}, ${sizes}.`;
    this.part("layer").replaceChildren(...this.kind.layers.map((layer, l) => make("option", { value: l }, layer.number)));
    this.root.querySelector(".generated-note").hidden = this.kind.generated_query === null && this.kind.generated_key === null;
    this.root.querySelector(".second-note").hidden = this.kind.second_query === null;
  }

  // All heads, small
  drawGlance() {
    const most = Math.max(...this.kind.layers.map((layer) => layer.heads.length));
    const cell = most > 24 ? 24 : most > 16 ? 36 : most > 8 ? 52 : 72;
    const columns = [...(most > 1 ? [MEAN] : []), ...Array(most).keys()];
    const widest = this.kind.layers.find((layer) => layer.heads.length === most);
    const heading = columns.map((head) => make("th", { scope: "col" }, head === MEAN ? "mean" : widest.heads[head].number));
    let first = 0;
    const rows = this.kind.layers.map((layer, l) => {
      const cells = columns.map((head) => {
        if (head >= layer.heads.length) return make("td");
        const places = head === MEAN ? layer.heads.map((_, h) => first + h) : [first + head];
        const { label } = head === MEAN ? { label: "" } : layer.heads[head];
        const said = `layer ${layer.number}, ${head === MEAN ? "mean" : `head ${layer.heads[head].number}`}${label ? `: ${label}` : ""}`;
        const link = make("a", { href: `#${this.address({ ...this.at, layer: l, head })}`, title: said, "aria-label": said, tabindex: "-1", "data-at": `${l} ${head}` }, this.picture(places));
        if (label) link.append(make("span", { class: "label" }, label));
        return make("td", {}, link);
      });
      first += layer.heads.length;
      return make("tr", {}, make("th", { scope: "row" }, `layer ${layer.number}`), ...cells);
    });
    const table = make("table", {}, make("thead", {}, make("tr", {}, make("td"), ...heading)), make("tbody", {}, ...rows));
    table.style.setProperty("--cell", `${cell}px`);
    this.part("glance").replaceChildren(table);
  }

  // Pictures of the overviews: levels are 255 √weight.
  picture(places) {
    const [height, width] = this.kind.overview;
    const size = height * width;
    const canvas = make("canvas", { width, height });
    const image = new ImageData(width, height);
    for (let i = 0; i < size; i++) {
      let level = this.overviews[places[0] * size + i];
      if (places.length > 1) level = Math.round(Math.sqrt(sum(places.map((p) => this.overviews[p * size + i] ** 2)) / places.length));
      const [r, g, b] = this.shades[level];
      image.data.set([r, g, b, 255], 4 * i);
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }
  places() {
    const first = this.layer.first - this.kind.layers[0].first;
    return this.at.head === MEAN ? this.layer.heads.map((_, h) => first + h) : [first + this.at.head];
  }

  // The text: tokens in flow
  drawTexts() {
    const sides = this.isOneSided ? ["both"] : ["query", "key"];
    const isCross = this.kind.kind === "cross";
    this.flows = sides.map((side) => {
      const tokens = this.tokens(side === "key" ? "key" : "query");
      const id = (i) => `${this.root.id}-${side}-${i}`;
      const flow = make("div", { class: "flow", role: "listbox", tabindex: "0", "data-flow": side, "aria-label": { both: "tokens", query: "tokens that look", key: "tokens that are looked at" }[side] });
      const hasSpaces = tokens.some((token) => /\s/.test(token));
      tokens.forEach((token, i) => {
        const from = side === "key" ? "key" : "query";
        const classes = [hasSpaces ? "" : "spaced", this.isGenerated(from, i) ? "generated" : "", this.isSecond(from, i) ? "second" : ""].filter(Boolean).join(" ");
        const visible = token.trim() ? token : token.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t") || "∅";
        flow.append(make("span", { id: id(i), role: "option", "data-i": i, ...(classes ? { class: classes } : {}) }, visible), ...(hasSpaces ? [] : [" "]));
      });
      const name = { both: "", query: isCross ? "the target looks" : "looks", key: isCross ? "the source is looked at" : "is looked at" }[side];
      return { side, flow, spans: [...flow.children].filter((node) => node.dataset.i), name, shaded: [] };
    });
    this.listed = clamp(Math.ceil(Math.max(this.kind.queries.length, this.kind.keys.length) / 3), 4, LISTED);
    this.part("looks").style.setProperty("--rows", this.listed + 2);
    this.part("texts").replaceChildren(...this.flows.map(({ flow, name }) => make("div", {}, ...(name ? [make("p", { class: "flow-name" }, name)] : []), flow)));
    this.search(this.part("find").value, false);
  }
  flowOf(side) { return this.flows.find((flow) => flow.side === side || flow.side === "both"); }

  async load() {
    const { layer, at } = this;
    const heads = at.head === MEAN ? layer.heads.map((_, h) => h) : [at.head];
    const { queries, keys } = this.pieces;
    const maps = await Promise.all(heads.map(async (head) => {
      const place = layer.first + head;
      if (!this.unpacked.has(place)) {
        if (this.unpacked.size > 64) this.unpacked.clear();
        this.unpacked.set(place, await unpack(this.data.maps[place], queries.length, keys.length));
      }
      return this.unpacked.get(place);
    }));
    const map = maps.length > 1 ? meanOf(maps) : maps[0];
    return this.isJoined ? wordsMap(map, this.starts("query"), this.starts("key")) : map;
  }

  // One head, large
  async show() {
    const wanted = this.address(this.at);
    const map = await this.load();
    if (wanted !== this.address(this.at) || map.numQueries !== this.kind.queries.length) return; // another was chosen meanwhile
    this.map = map;
    const { at, layer } = this;
    const about = at.head === MEAN ? null : layer.heads[at.head];
    const number = at.head === MEAN ? `mean of ${layer.heads.length} heads` : `head ${about.number}`;
    this.part("name").textContent = `${this.text.kinds.length > 1 ? `${this.kind.kind}, ` : ""}layer ${layer.number}, ${number}${about?.label ? `: ${about.label}` : ""}`;
    const facts = (about?.facts ?? []).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    this.part("facts").replaceChildren(...facts);
    this.part("facts").hidden = !facts.length;
    const options = [...(layer.heads.length > 1 ? [MEAN] : []), ...layer.heads.keys()];
    this.part("head").replaceChildren(...options.map((head) => make("option", { value: head },
      head === MEAN ? "mean" : `${layer.heads[head].number}${layer.heads[head].label ? ` (${layer.heads[head].label})` : ""}`)));
    this.part("head").value = at.head;
    this.part("layer").value = at.layer;
    const left = map instanceof Sparse && map.numQueries ? sum([...map.left]) / map.numQueries : 0;
    this.part("kept").hidden = map instanceof Dense;
    this.part("kept").textContent = map instanceof Dense ? "" : `Of every row, the ${at.head === MEAN ? "largest weights of each head" : `${this.data.maps[this.layer.first + at.head].kept} largest weights`} are on this page. What is left out is ${(100 * left).toFixed(1)} % of a row on average; the small maps have all of it.`;
    for (const link of this.part("glance").querySelectorAll("[data-at]")) {
      const isCurrent = link.dataset.at === `${at.layer} ${at.head}`;
      link.tabIndex = isCurrent ? 0 : -1;
      if (isCurrent) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    this.remember();
    if (this.pinned) this.follow();
    this.drawMap();
    this.drawFocus();
    this.root.dataset.shown = wanted;
  }

  remember() {
    const rest = fragment.match(/&.*/)?.[0] ?? "";
    const address = `#${this.address(this.at, this.pinned && this.side === "query" ? this.focus : null)}${rest}`;
    this.part("anchor").href = address;
    if (this.started || fragment) writeAddress(address);
    this.started = true;
    this.root.dispatchEvent(new Event("chosen"));
  }

  choose(change) {
    Object.assign(this.at, change);
    this.at.head = Math.min(this.at.head, this.layer.heads.length - 1);
    return this.show();
  }

  // The token that is pointed at, or pinned
  point(side, index, { pin = false, follow = false } = {}) {
    this.side = side;
    this.focus = index;
    if (pin) { this.pinned = true; this.remember(); }
    if (follow) this.follow();
    this.drawFocus();
  }
  unpoint() {
    if (this.pinned || this.focus === null) return;
    this.focus = null;
    this.drawFocus();
  }
  entries() {
    if (this.focus === null || !this.map) return [];
    return this.side === "query" ? this.map.row(this.focus) : column(this.map, this.focus);
  }

  drawFocus() {
    const entries = this.entries();
    const other = this.side === "query" ? "key" : "query";
    for (const flow of this.flows) {
      for (const span of flow.shaded) { span.style.background = span.style.color = ""; span.classList.remove("focus"); span.removeAttribute("aria-selected"); }
      flow.shaded = [];
      flow.flow.removeAttribute("aria-activedescendant");
    }
    const looked = this.flowOf(other);
    for (const [index, weight] of entries) {
      if (weight < 0.001) continue;
      const span = looked.spans[index];
      span.style.background = this.shade(weight);
      if (weight > 0.3) span.style.color = this.colours.card;
      looked.shaded.push(span);
    }
    if (this.focus !== null) {
      const own = this.flowOf(this.side);
      const span = own.spans[this.focus];
      span.classList.add("focus");
      span.setAttribute("aria-selected", "true");
      own.flow.setAttribute("aria-activedescendant", span.id);
      own.shaded.push(span);
    }
    for (const button of this.part("sides").children) button.setAttribute("aria-pressed", button.dataset.side === this.side);
    this.drawList(entries, other);
    this.drawMatrix();
    this.drawLines();
  }

  drawList(entries, other) {
    const place = this.part("looks");
    if (this.focus === null) {
      if (!this.map) return;
      const { queries, keys, kind } = this.kind;
      this.map.strongest ??= strongest(this.map, kind, LISTED + 2);
      const rows = this.map.strongest.slice(0, this.listed + 2).map(([query, key, weight]) =>
        make("tr", {}, make("td", {}, String(query)), make("td", {}, `${shortly(queries[query])} → ${shortly(keys[key])}`), make("td", {}, shown(weight))));
      place.replaceChildren(make("h3", {}, "strongest looks"), make("table", {}, make("tbody", {}, ...rows)));
      return;
    }
    const token = shortly(this.tokens(this.side)[this.focus]);
    const largest = [...entries].sort((a, b) => b[1] - a[1]).slice(0, this.listed);
    const rows = largest.map(([index, weight]) => make("tr", {}, make("td", {}, String(index)), make("td", {}, shortly(this.tokens(other)[index])), make("td", {}, shown(weight))));
    const rest = sum(entries.map(([, weight]) => weight)) - sum(largest.map(([, weight]) => weight));
    const said = (name, weight) => make("tr", {}, make("td"), make("td", {}, name), make("td", {}, shown(Math.max(0, weight))));
    if (entries.length > this.listed) rows.push(said(`${(entries.length - this.listed).toLocaleString("en")} others`, rest));
    if (this.side === "query" && this.map instanceof Sparse) rows.push(said("left out", this.map.leftOut(this.focus)));
    const heading = this.side === "query" ? `“${token}” (${this.focus}) looks at` : `looking at “${token}” (${this.focus})`;
    place.replaceChildren(make("h3", {}, heading), make("table", {}, make("tbody", {}, ...rows)));
  }

  // The part of the matrix that is drawn
  get isWindowed() { return this.kind.queries.length > WINDOW || this.kind.keys.length > WINDOW; }
  move(top, left) {
    this.top = clamp(Math.round(top), 0, Math.max(0, this.kind.queries.length - WINDOW));
    this.left = clamp(Math.round(left), 0, Math.max(0, this.kind.keys.length - WINDOW));
    this.drawMap();
    this.drawMatrix();
    this.drawLines();
  }
  follow() {
    const strongest = this.entries().reduce((best, entry) => (entry[1] > best[1] ? entry : best), [this.focus, 0])[0];
    const [query, key] = this.side === "query" ? [this.focus, strongest] : [strongest, this.focus];
    const inside = (index, start) => index >= start && index < start + WINDOW;
    this.move(inside(query, this.top) ? this.top : query - WINDOW / 2, inside(key, this.left) ? this.left : key - WINDOW / 2);
  }
  window() {
    const rows = Math.min(WINDOW, this.kind.queries.length);
    const columns = Math.min(WINDOW, this.kind.keys.length);
    // Where there is room, the lists are next to the matrix.
    const beside = this.root.clientWidth > 860 ? 340 : 0;
    return { top: this.top, left: this.left, rows, columns, cell: clamp(Math.floor(Math.min(560, this.root.clientWidth - MARGIN - 70 - beside) / Math.max(rows, columns, 1)), 11, 28) };
  }

  drawMap() {
    this.part("map-figure").hidden = this.part("where").hidden = !this.isWindowed;
    if (!this.isWindowed) return;
    const { queries, keys } = this.kind;
    const view = this.window();
    this.part("where").textContent = `Rows ${view.top}–${view.top + view.rows - 1} and columns ${view.left}–${view.left + view.columns - 1} of ${queries.length.toLocaleString("en")} × ${keys.length.toLocaleString("en")} are drawn.`;
    const canvas = this.part("map");
    const scale = 320 / Math.max(queries.length, keys.length);
    canvas.width = Math.max(24, Math.round(keys.length * scale));
    canvas.height = Math.max(24, Math.round(queries.length * scale));
    canvas.setAttribute("aria-label", this.part("where").textContent);
    const pen = canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    const small = this.picture(this.places());
    const [binRows, binColumns] = this.kind.bins;
    const { pieces } = this; // a small map is always of tokens
    pen.drawImage(small, 0, 0, (small.width * binColumns * canvas.width) / pieces.keys.length, (small.height * binRows * canvas.height) / pieces.queries.length);
    pen.strokeStyle = this.colours.hot;
    pen.lineWidth = 2;
    const [x, y] = [(view.left * canvas.width) / keys.length, (view.top * canvas.height) / queries.length];
    pen.strokeRect(x, y, Math.max(4, (view.columns * canvas.width) / keys.length), Math.max(4, (view.rows * canvas.height) / queries.length));
  }

  prepare(name, width, height) {
    const pen = penOf(this.part(name), width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }
  cut(pen, token, width) {
    let text = shortly(token);
    if (pen.measureText(text).width <= width) return text;
    while (text && pen.measureText(`${text}…`).width > width) text = text.slice(0, -1);
    return `${text}…`;
  }
  ink(side, index, isStrong) { return isStrong ? this.colours.hot : this.isGenerated(side, index) || this.isSecond(side, index) ? this.colours.made : this.colours.ink; }

  drawMatrix() {
    const view = this.window();
    const { top, left, rows, columns, cell } = view;
    const { queries, keys } = this.kind;
    const margin = MARGIN;
    const pen = this.prepare("matrix", margin + columns * cell + 40, margin + rows * cell + 2);
    this.part("matrix").setAttribute("aria-label", `${this.part("name").textContent}: matrix of weights`);
    this.matrixView = { ...view, margin };
    pen.fillStyle = this.styles[0];
    pen.fillRect(margin, margin, columns * cell, rows * cell);
    if (cell < 13) pen.font = "10px system-ui, sans-serif";
    const inset = cell > 14 ? 1 : 0.5;
    for (let r = 0; r < rows; r++) {
      for (const [key, weight] of this.map.row(top + r)) {
        if (key < left || key >= left + columns) continue;
        pen.fillStyle = this.shade(weight);
        pen.fillRect(margin + (key - left) * cell, margin + r * cell, cell - inset, cell - inset);
      }
      const isFocus = this.side === "query" && this.focus === top + r;
      pen.fillStyle = this.ink("query", top + r, isFocus);
      pen.textAlign = "right";
      pen.fillText(this.cut(pen, queries[top + r], margin - 8), margin - 5, margin + (r + 0.5) * cell);
      if (isFocus) this.outline(pen, margin, margin + r * cell, columns * cell, cell);
    }
    for (let c = 0; c < columns; c++) {
      const isFocus = this.side === "key" && this.focus === left + c;
      pen.save();
      pen.translate(margin + (c + 0.5) * cell, margin - 5);
      pen.rotate(cell < 14 ? -Math.PI / 2 : -Math.PI / 3);
      pen.textAlign = "left";
      pen.fillStyle = this.ink("key", left + c, isFocus);
      pen.fillText(this.cut(pen, keys[left + c], margin - 12), 0, 0);
      pen.restore();
      if (isFocus) this.outline(pen, margin + c * cell, margin, cell, rows * cell);
    }
  }
  outline(pen, x, y, width, height) {
    pen.strokeStyle = this.colours.hot;
    pen.lineWidth = 1.5;
    pen.strokeRect(x, y, width, height);
  }

  drawLines() {
    const { top, left, rows, columns } = this.window();
    const [step, side, width] = [15, 120, 400];
    const pen = this.prepare("lines", width, Math.max(rows, columns) * step + 4);
    this.part("lines").setAttribute("aria-label", `${this.part("name").textContent}: lines from tokens to tokens`);
    this.linesView = { top, left, rows, columns, step, side, width };
    const y = (index) => (index + 0.5) * step + 2;
    pen.strokeStyle = this.styles[255];
    for (let r = 0; r < rows; r++) {
      for (const [key, weight] of this.map.row(top + r)) {
        if (weight < 0.02 || key < left || key >= left + columns) continue;
        const isStrong = this.focus === null || this.focus === (this.side === "query" ? top + r : key);
        pen.globalAlpha = (this.focus === null ? Math.min(1, weight) : Math.sqrt(Math.min(1, weight))) * (isStrong ? 1 : 0.06);
        pen.lineWidth = isStrong && this.focus !== null ? 2.5 : 1.5;
        pen.beginPath();
        pen.moveTo(side, y(r));
        pen.lineTo(width - side, y(key - left));
        pen.stroke();
      }
    }
    pen.globalAlpha = 1;
    const names = [["query", "right", side - 6, top, rows, this.kind.queries], ["key", "left", width - side + 6, left, columns, this.kind.keys]];
    for (const [of, align, x, first, count, tokens] of names) {
      pen.textAlign = align;
      for (let i = 0; i < count; i++) {
        pen.fillStyle = this.ink(of, first + i, this.side === of && this.focus === first + i);
        pen.fillText(this.cut(pen, tokens[first + i], side - 10), x, y(i));
      }
    }
  }

  drawLegend() {
    const canvas = this.part("legend");
    const pen = canvas.getContext("2d");
    for (let x = 0; x < canvas.width; x++) {
      pen.fillStyle = this.shade(x / (canvas.width - 1));
      pen.fillRect(x, 0, 1, canvas.height);
    }
  }

  // Which token of the matrix or the lines is under the pointer
  inMatrix(event) {
    const { top, left, rows, columns, cell, margin } = this.matrixView;
    const [row, col] = [Math.floor((event.offsetY - margin) / cell), Math.floor((event.offsetX - margin) / cell)];
    const [isRow, isColumn] = [row >= 0 && row < rows, col >= 0 && col < columns];
    if (isRow && (isColumn || event.offsetX < margin)) return ["query", top + row, isColumn ? left + col : null];
    return isColumn && event.offsetY < margin ? ["key", left + col, null] : null;
  }
  inLines(event) {
    const { top, left, rows, columns, step, width } = this.linesView;
    const index = Math.floor((event.offsetY - 2) / step);
    const isLeft = event.offsetX < width / 2;
    if (index < 0 || index >= (isLeft ? rows : columns)) return null;
    return isLeft ? ["query", top + index, null] : ["key", left + index, null];
  }

  search(wanted, go) {
    const needle = wanted.trim().toLowerCase();
    this.matches = [];
    for (const { side, spans } of this.flows) {
      const tokens = this.tokens(side === "key" ? "key" : "query");
      spans.forEach((span, i) => {
        const matches = needle !== "" && tokens[i].toLowerCase().includes(needle);
        span.classList.toggle("match", matches);
        if (matches) this.matches.push([side === "both" ? this.side : side, i]);
      });
    }
    if (go && this.matches.length) this.match = ((this.match ?? -1) + 1) % this.matches.length;
    else this.match = null;
    this.part("found").textContent = !needle ? "" : !this.matches.length ? "no such token" : this.match === null ? `${this.matches.length} found: press Enter` : `${this.match + 1} of ${this.matches.length}`;
    if (this.match === null) return;
    const [side, index] = this.matches[this.match];
    this.point(side, index, { pin: true, follow: true });
    this.flowOf(side).spans[index].scrollIntoView({ block: "nearest" });
  }

  listen() {
    const on = (name, type, answer) => this.part(name).addEventListener(type, answer);
    on("text", "change", (event) => this.showText(this.samePlace(Number(event.target.value), this.at.kind)));
    on("kinds", "click", (event) => {
      const kind = event.target.dataset.kind;
      if (kind !== undefined) this.showText(this.samePlace(this.at.text, Number(kind)));
    });
    on("words", "click", (event) => {
      const { words } = event.target.dataset;
      if (!words || (words === "words") === this.joins) return;
      const token = this.focus === null || this.side !== "query" ? null : this.tokenOf("query", this.focus);
      this.joins = words === "words";
      this.showText({ ...this.at, focus: this.pinned ? token : null });
    });
    on("layer", "change", (event) => this.choose({ layer: Number(event.target.value) }));
    on("head", "change", (event) => this.choose({ head: Number(event.target.value) }));
    on("sides", "click", (event) => {
      if (!event.target.dataset.side) return;
      this.side = event.target.dataset.side;
      if (this.focus !== null) this.focus = Math.min(this.focus, this.tokens(this.side).length - 1);
      this.drawFocus();
    });
    on("find", "input", (event) => this.search(event.target.value, false));
    on("find", "keydown", (event) => { if (event.key === "Enter") this.search(event.target.value, true); });
    const save = () => make("a", { href: this.part("matrix").toDataURL("image/png"), download: `${this.address(this.at)}.png` }).click();
    on("save", "click", save);
    on("copy", "click", async ({ target }) => {
      const picture = new Promise((done) => this.part("matrix").toBlob(done));
      try {
        await navigator.clipboard.write([new ClipboardItem({ "image/png": picture })]);
        target.textContent = "copied";
      } catch { // where a browser allows no copies
        save();
        target.textContent = "saved instead";
      }
    });
    this.listenToGlance();
    this.listenToTexts();
    this.listenToCanvases();
    addEventListener("resize", () => { if (this.map) this.drawMatrix(); });
    addEventListener("hashchange", () => { const wanted = this.fromHash(); if (wanted) this.showText(wanted); });
    document.addEventListener("themechange", () => { this.readColours(); this.drawGlance(); this.drawLegend(); this.show(); });
  }

  listenToGlance() {
    const glance = this.part("glance");
    const pick = (link) => { const [layer, head] = link.dataset.at.split(" ").map(Number); return this.choose({ layer, head }); };
    glance.addEventListener("click", (event) => {
      const link = event.target.closest("[data-at]");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      pick(link);
      link.focus();
    });
    moveByArrows(glance); // Enter is a click already
  }

  listenToTexts() {
    const texts = this.part("texts");
    const token = (event) => {
      const span = event.target.closest("[data-i]");
      if (!span) return null;
      const { flow } = span.parentElement.dataset;
      return [flow === "both" ? this.side : flow, Number(span.dataset.i)];
    };
    texts.addEventListener("mouseover", (event) => { const found = token(event); if (found && !this.pinned) this.point(...found); });
    texts.addEventListener("mouseleave", () => this.unpoint());
    texts.addEventListener("click", (event) => { const found = token(event); if (found) this.pin(...found, true); });
    texts.addEventListener("keydown", (event) => {
      const flow = event.target.dataset.flow;
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 };
      if (!flow || !(event.key in steps)) return;
      event.preventDefault();
      const side = flow === "both" ? this.side : flow;
      const last = this.tokens(side).length - 1;
      if (last < 0) return;
      const from = this.side === side ? this.focus : null;
      const index = from === null ? 0 : clamp(from + steps[event.key], 0, last);
      this.point(side, index, { pin: true, follow: true });
      this.flowOf(side).spans[index].scrollIntoView({ block: "nearest" });
    });
  }

  pin(side, index, follow) {
    const again = this.pinned && this.side === side && this.focus === index;
    this.pinned = !again;
    this.point(side, index, { pin: !again, follow: follow && !again });
    if (again) this.remember();
  }

  listenToCanvases() {
    for (const [name, under] of [["matrix", (event) => this.inMatrix(event)], ["lines", (event) => this.inLines(event)]]) {
      const canvas = this.part(name);
      canvas.addEventListener("mousemove", (event) => {
        const found = under(event);
        canvas.title = found ? this.said(found) : "";
        if (this.pinned) return;
        if (!found) this.unpoint();
        else if (this.side !== found[0] || this.focus !== found[1]) this.point(found[0], found[1]);
      });
      canvas.addEventListener("mouseleave", () => this.unpoint());
      canvas.addEventListener("click", (event) => { const found = under(event); if (found) this.pin(found[0], found[1], false); });
    }
    const map = this.part("map");
    const jump = (event) => {
      const box = map.getBoundingClientRect();
      this.move(((event.clientY - box.top) / box.height) * this.kind.queries.length - WINDOW / 2, ((event.clientX - box.left) / box.width) * this.kind.keys.length - WINDOW / 2);
    };
    map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); jump(event); });
    map.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });
    map.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (!(event.key in steps)) return;
      event.preventDefault();
      const [down, right] = steps[event.key];
      this.move(this.top + (down * WINDOW) / 2, this.left + (right * WINDOW) / 2);
    });
  }
  said([side, index, key]) {
    const name = `${shortly(this.tokens(side)[index])} (${index})`;
    if (key === null) return name;
    const entry = this.map.row(index).find(([at]) => at === key);
    const weight = entry ? shown(entry[1]) : this.map instanceof Dense ? shown(0) : "left out";
    return `${name} looks at ${shortly(this.kind.keys[key])} (${key}): ${weight}`;
  }
}

[...document.querySelectorAll("section.attention")].forEach((root, i) => {
  root.id ||= `attention-${i}`;
  const data = JSON.parse(root.querySelector('[data-part="data"]').textContent);
  if (data) root.viewer = new Viewer(root, data);
});
