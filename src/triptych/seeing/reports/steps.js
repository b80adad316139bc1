// One row of attention step by step: vectors as strips, a table of keys, and the formula whose part lights up.
const digits = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e4 || Math.abs(value) < 0.0005 ? value.toExponential(1) : value.toFixed(3));
const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 2 : 1)} %`;
const length = (values) => Math.sqrt(sum(values.map((value) => value * value)));

// A vector as cells, which the mouse or the arrow keys point at.
class Strip {
  constructor(values, name, term, say, { columns = 64, cell = 8, high = cell } = {}) {
    Object.assign(this, { values, name, term, say, cell, high, columns: Math.min(columns, values.length), at: null });
    this.canvas = make("canvas", {
      class: "strip", tabindex: "0", role: "img", "data-term": term,
      "aria-label": `${name}: ${values.length} numbers, length ${digits(length(values))}; arrow keys go through them`,
    });
    this.canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
      this.point(Math.floor(offsetY / this.high) * this.columns + Math.floor(offsetX / this.cell));
    });
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("focus", () => this.point(this.at ?? 0));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
      if (!step) return;
      event.preventDefault();
      this.point(clamp((this.at ?? 0) + step, 0, this.values.length - 1));
    });
    this.draw();
  }
  point(at) {
    this.at = at !== null && at >= 0 && at < this.values.length ? at : null;
    this.draw();
    if (this.at !== null) this.say(this.term, `${this.name}[${this.at}] = ${digits(this.values[this.at])}`, this);
  }
  draw() {
    const { canvas, cell, high, columns, values } = this;
    const gap = cell < 4 ? 0 : 1;
    const pen = penOf(canvas, columns * cell, Math.ceil(values.length / columns) * high);
    const [zero, one, below, hot] = ["--zero", "--one", "--below", "--hot"].map(colour);
    const most = Math.max(...values.map(Math.abs)) || 1;
    values.forEach((value, i) => {
      pen.fillStyle = mix(zero, value < 0 ? below : one, Math.abs(value) / most);
      pen.fillRect((i % columns) * cell, Math.floor(i / columns) * high, cell - gap, high - 1);
    });
    if (this.at === null) return;
    pen.strokeStyle = hot;
    pen.lineWidth = 2;
    pen.strokeRect((this.at % columns) * cell, Math.floor(this.at / columns) * high, cell - gap, high - 1);
  }
}

class Row {
  constructor() {
    const card = byId("row");
    const light = (event) => {
      const at = event.target.closest?.("[data-term]");
      if (at && at.tagName !== "CANVAS") this.say(at.dataset.term, at.dataset.said ?? "");
      else if (!at && event.type === "mouseover") this.light(null);
    };
    for (const kind of ["mouseover", "focusin"]) card.addEventListener(kind, light);
    card.addEventListener("mouseleave", () => this.light(null));
    moveByArrows(byId("keys"));
    document.addEventListener("themechange", () => { if (this.record) this.show(this.record, this.about); });
  }

  // Light up a part of the formula and say what it is.
  light(term) {
    for (const node of byId("row").querySelectorAll(".lit")) node.classList.remove("lit");
    // A share of z is a weight times a value.
    const terms = term === "share" ? ["share", "weights", "v"] : term ? [term] : [];
    for (const one of terms) for (const node of byId("row").querySelectorAll(`[data-term="${one}"]`)) node.classList.add("lit");
  }
  say(term, said) {
    this.light(term);
    byId("said").replaceChildren(make("b", {}, said || this.terms[term].name), ` — ${this.terms[term].about}`);
  }

  show(record, about) {
    Object.assign(this, { record, about });
    const { q, k, v, z, projected, output, kept, keys, query } = record;
    const [d_k, d_v, d, n] = [q.length, z.length, output.length, keys.length];
    const isCross = about.kind === "cross";
    const isAsProjected = output.every((value, i) => value === projected[i]);
    const turned = record.positions === "rotary" ? ", turned by its position" : "";
    const bias = (name) => ` (${name} [${d} × ${name.endsWith("V") ? d_v : d_k}], with its bias if it has one)`;
    this.terms = {
      q: { name: "q", about: `the query of “${shortly(record.token)}” (${query}): its stream times W_Q${bias("W_Q")}${turned}. Shape [${d_k}]` },
      k: { name: "k", about: `the key of each token looked at: its stream times W_K${bias("W_K")}${turned}. Shape [${n} × ${d_k}]` },
      content: { name: "q·k before positions", about: `the products before positions turn q and k. Shape [${n}]` },
      products: { name: record.compares === "products" ? "q·k" : "score", about: record.compares === "products" ? `the dot product of q [${d_k}] with each key: Σ over ${d_k} channels. Shape [${n}]` : `what the layer makes of q and each key. Shape [${n}]` },
      scaled: { name: "× scale", about: `times ${digits(record.scale)}${Math.abs(record.scale - d_k ** -0.5) < 1e-6 ? ` = 1/√${d_k}` : ""}, so that the softmax does not saturate. Shape [${n}]` },
      biased: { name: "+ positions", about: `with what positions add (${record.positions}). Shape [${n}]` },
      scores: { name: "score", about: `what the softmax takes${record.soft_cap ? `, after the soft cap ${digits(record.soft_cap)}` : ""}. Shape [${n}]` },
      visible: { name: "mask", about: `which keys this query may look at; the others get −∞. Shape [${n}]` },
      weights: { name: "softmax", about: `exp(score) over the sum of all that are seen${record.sink === null ? ": they add up to 1" : `, and of the sink, which takes ${percent(record.sink)}`}. Shape [${n}]` },
      sink: { name: "sink", about: `a score of the head's own that takes part in the softmax and moves nothing: it takes ${percent(record.sink ?? 0)}` },
      gate: { name: "gate", about: `what the mixed values are multiplied by: ${digits(record.gate ?? 1)}` },
      v: { name: "v", about: `the value of each token looked at: its stream times W_V${bias("W_V")}. Shape [${n} × ${d_v}]` },
      share: { name: "share of z", about: `how much of z each value gives, along its direction: weight times v; they add up to 1. Shape [${n}]` },
      z: { name: "z", about: `the sum of weight times value over all keys${record.gate === null ? "" : `, times the gate ${digits(record.gate)}`}. Shape [${d_v}]` },
      projected: { name: "z W_O", about: `z times W_O [${d_v} × ${d}]${isAsProjected ? `: what the head adds to the stream of “${shortly(record.token)}”` : ""}. Shape [${d}]` },
      output: { name: "output", about: `what the head adds to the stream of “${shortly(record.token)}”: its part of z W_O of all heads after the norm or multiplier that follows the layer. Shape [${d}]` },
      effect: { name: "direct effect", about: "what the output does to the next token's logits through the last norm and the output table, all other layers held as they were" },
    };
    byId("row-name").textContent = `One row, step by step: head ${record.head} at “${shortly(record.token)}” (${query})`;
    const text = { "encoder": "the text to translate", "decoder": "the translation" }[about.name.includes(".") ? about.name.split(".")[0] : ""] ?? "this text";
    byId("whose").textContent = {
      cross: `Whose? Cross-attention: x is the decoder's stream, so Q is the translation's (“${shortly(record.token)}” is being written). y is the encoder's output, so K and V are the source's.`,
      causal: `Whose? Self-attention: x and y are one stream, so Q, K and V are all of ${text}. A token sees itself and what comes before it.`,
      self: `Whose? Self-attention of an encoder: x and y are one stream, so Q, K and V are all of ${text}, and every token sees all others.`,
    }[about.kind];
    const say = (term, said) => this.say(term, said);
    const strip = (values, name, term, more) => new Strip(values, name, term, say, more).canvas;
    const part = (term, ...children) => make("span", { "data-term": term, tabindex: "0", "data-said": "" }, ...children);
    const sub = (name, index) => [name, make("sub", {}, index)];
    const q_k = record.compares === "products" ? [part("q", "q"), " · ", part("k", ...sub("k", "j"))] : ["score(", part("q", "q"), ", ", part("k", ...sub("k", "j")), ")"];
    const scale = record.compares === "products" ? [part("scaled", digits(record.scale)), " · "] : [];
    byId("formula").replaceChildren(
      part("projected", "out"), " = ", part("z", "Σ", make("sub", {}, "j")), " ", part("weights", ...sub("softmax", "j")), "( ",
      ...scale, part("products", ...q_k),
      ...(record.biased ? [" + ", part("biased", ...sub(record.positions, "j"))] : []),
      ...(record.soft_cap ? [", ", part("scores", "capped")] : []),
      " + ", part("visible", ...sub("mask", "j")), ...(record.sink === null ? [] : [" | ", part("sink", "sink")]), " ) ",
      ...(record.gate === null ? [] : [part("gate", "gate"), " · "]), part("v", ...sub("v", "j")), " ", part("projected", "W", make("sub", {}, "O")),
      make("span", { class: "note" }, `q = x W_Q, k = y W_K, v = y W_V${isCross ? "; x: translation, y: source" : ""}`));
    const narrow = { columns: 32 };
    byId("vectors").replaceChildren(make("div", { class: "vector" }, make("span", {}, `q [${d_k}]`), strip(q, "q", "q", narrow)));

    const columns = [
      ...(record.content ? [["content", "q·k before positions", record.content]] : []),
      ["products", record.content ? "q·k" : this.terms.products.name, record.products],
      ...(record.compares === "products" ? [["scaled", `× ${digits(record.scale)}`, record.scaled]] : []),
      ...(record.biased ? [["biased", "+ positions", record.biased]] : []),
      ...(record.soft_cap || record.scores.some((score, i) => Math.abs(score - (record.biased ?? record.scaled)[i]) > 1e-5) ? [["scores", "score", record.scores]] : []),
      ["visible", "mask", record.visible],
      ["weights", "softmax", record.weights],
      ["share", "share of z", record.share_of_output],
    ];
    const head = make("tr", {}, ...["", "key", "k", ...columns.map(([, name]) => name), "v"].map((name) => make("th", { scope: "col" }, name)));
    const mostWeight = Math.max(...record.weights, 1e-9);
    const rows = kept.map((key, i) => {
      const isSeen = record.visible[i];
      const cells = columns.map(([term, name, values], c) => {
        const text = term === "visible" ? (isSeen ? "seen" : "−∞") : !isSeen && ["weights", "share"].includes(term) ? "0" : digits(values[i]);
        const said = `${name} of “${shortly(keys[key])}” (${key}) = ${text}`;
        const cell = make("td", { class: "number", "data-term": term, "data-said": said, "data-at": `${i} ${c}`, tabindex: i || c ? "-1" : "0" }, text);
        if (term === "weights" && isSeen) cell.style.setProperty("--share", values[i] / mostWeight);
        return cell;
      });
      return make("tr", isSeen ? {} : { class: "masked" },
        make("td", { class: "number" }, String(key)), make("th", { scope: "row" }, shortly(keys[key])),
        make("td", {}, strip(k[i], `k of “${shortly(keys[key])}”`, "k", { columns: d_k, cell: clamp(Math.floor(160 / d_k), 2, 6), high: 12 })), ...cells,
        make("td", {}, strip(v[i], `v of “${shortly(keys[key])}”`, "v", { columns: d_v, cell: clamp(Math.floor(160 / d_v), 2, 6), high: 12 })));
    });
    const masked = record.visible.filter((seen) => !seen).length;
    const caption = kept.length < keys.length ? `The ${kept.length} keys with the largest weights, of ${keys.length}.` : `${keys.length} keys${masked ? `, ${masked} of them masked` : ""}.`;
    byId("keys").replaceChildren(make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...rows));

    const whole = record.layer_projected;
    const share = sum(projected.map((value, i) => value * whole[i])) / Math.max(1e-30, sum(whole.map((value) => value * value)));
    const wide = { columns: clamp(8 * Math.floor((byId("row").clientWidth - 40) / 64), 8, 64) };
    const results = [
      make("div", { class: "vector" }, make("span", {}, `z [${d_v}]`), strip(z, "z", "z", narrow)),
      make("div", { class: "vector" }, make("span", {}, `z W_O [${d}], ${percent(share)} of the layer's`), strip(projected, "z W_O", "projected", wide)),
    ];
    if (!isAsProjected) results.push(make("div", { class: "vector" }, make("span", {}, `added to the stream [${d}]`), strip(output, "output", "output", wide)));
    if (record.direct_effect) results.push(this.effects(record));
    byId("results").replaceChildren(...results);
  }

  effects({ direct_effect: found, next }) {
    const list = (title, changed) => make("table", {}, make("caption", {}, title), make("tbody", {}, ...changed.map(({ token, logit, probability }) => {
      const said = `${shortly(token)}: logit ${logit >= 0 ? "+" : ""}${digits(logit)}, probability ${probability >= 0 ? "+" : ""}${percent(probability)}`;
      return make("tr", { "data-term": "effect", "data-said": said, tabindex: "0" }, make("th", { scope: "row" }, shortly(token)), make("td", {}, `${logit >= 0 ? "+" : ""}${digits(logit)}`), make("td", {}, `${probability >= 0 ? "+" : ""}${percent(probability)}`));
    })));
    const isNothing = ![...found.raises, ...found.lowers].some(({ logit }) => logit);
    const parts = isNothing ? [make("p", {}, "The head adds nothing.")] : [list("raises (logit, probability)", found.raises.slice(0, 5)), list("lowers", found.lowers.slice(0, 5))];
    if (next) parts.push(make("table", {}, make("caption", {}, "next token of the model"), make("tbody", {}, ...next.tokens.slice(0, 5).map(([token, , after]) => make("tr", {}, make("th", { scope: "row" }, shortly(token)), make("td", {}, percent(after)))))));
    return make("div", {}, make("p", { class: "note" }, "What this head alone does to the next token (direct effect), and what the model says in all:"), make("div", { class: "effects" }, ...parts));
  }
}
