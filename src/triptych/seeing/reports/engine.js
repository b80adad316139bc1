// A Transformer in plain JavaScript: text to tokens, tokens to logits, logits to text. It knows nothing of a page.
// A matrix is { rows, columns, data }; its data lies row by row. A map of a layer is a list with a matrix per head.
const engine = (() => {
  "use strict";

  // Matrices

  const matrix = (rows, columns, data = new Float32Array(rows * columns)) => ({ rows, columns, data });
  const row = (of, i) => of.data.subarray(i * of.columns, (i + 1) * of.columns);
  const part = (of, first, last) => matrix(last - first, of.columns, of.data.subarray(first * of.columns, last * of.columns));
  const dot = (a, b) => {
    let sum = 0;
    for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
    return sum;
  };

  // x W + b: the sum of the rows of W, times the entries of x. Four rows at a time are twice as fast as one.
  function times(x, W, b = null) {
    if (x.columns !== W.rows) throw new Error(`a product of [${x.rows}, ${x.columns}] and [${W.rows}, ${W.columns}]`);
    const out = matrix(x.rows, W.columns);
    const { columns, data } = W;
    for (let i = 0; i < x.rows; i++) {
      const [from, to] = [row(x, i), row(out, i)];
      if (b) to.set(b);
      let k = 0;
      for (; k + 3 < from.length; k += 4) {
        const at = k * columns;
        const x0 = from[k];
        const x1 = from[k + 1];
        const x2 = from[k + 2];
        const x3 = from[k + 3];
        for (let j = at; j < at + columns; j++) {
          to[j - at] += x0 * data[j] + x1 * data[j + columns] + x2 * data[j + 2 * columns] + x3 * data[j + 3 * columns];
        }
      }
      for (; k < from.length; k++) for (let j = 0; j < columns; j++) to[j] += from[k] * data[k * columns + j];
    }
    return out;
  }

  // x Wᵀ: the dot products of rows
  function timesTransposed(x, W) {
    const out = matrix(x.rows, W.rows);
    const { columns, data } = W;
    for (let i = 0; i < x.rows; i++) {
      const from = row(x, i);
      for (let j = 0; j < W.rows; j++) {
        const at = j * columns;
        let sum = 0;
        for (let k = 0; k < columns; k++) sum += from[k] * data[at + k];
        out.data[i * W.rows + j] = sum;
      }
    }
    return out;
  }

  function transposed(x) {
    const out = matrix(x.columns, x.rows);
    for (let i = 0; i < x.rows; i++) for (let j = 0; j < x.columns; j++) out.data[j * x.rows + i] = x.data[i * x.columns + j];
    return out;
  }

  const each = (x, change) => matrix(x.rows, x.columns, x.data.map(change));
  const plus = (x, y) => each(x, (value, i) => value + y.data[i]);

  // Two matrices, one below the other
  function below(upper, lower) {
    if (!upper) return lower;
    const out = matrix(upper.rows + lower.rows, upper.columns);
    out.data.set(upper.data);
    out.data.set(lower.data, upper.data.length);
    return out;
  }

  // Functions of a row or a number

  function softmax(scores, count = scores.length) {
    let most = -Infinity;
    for (let i = 0; i < count; i++) most = Math.max(most, scores[i]);
    const out = new Float32Array(scores.length);
    let sum = 0;
    for (let i = 0; i < count; i++) sum += out[i] = Math.exp(scores[i] - most);
    for (let i = 0; i < count; i++) out[i] /= sum;
    return out;
  }

  function logSoftmax(logits) {
    let most = -Infinity;
    for (const logit of logits) most = Math.max(most, logit);
    let sum = 0;
    for (const logit of logits) sum += Math.exp(logit - most);
    const log = most + Math.log(sum);
    const out = new Float64Array(logits.length);
    for (let i = 0; i < logits.length; i++) out[i] = logits[i] - log;
    return out;
  }

  // LayerNorm (x − mean) / √(var + eps) ∘ w + b, or RMSNorm x / √(mean(x²) + eps) ∘ w
  function normalised(x, norm) {
    if (!norm) return x;
    const out = matrix(x.rows, x.columns);
    for (let i = 0; i < x.rows; i++) {
      const [from, to] = [row(x, i), row(out, i)];
      const n = from.length;
      const mean = norm.centred ? from.reduce((sum, value) => sum + value, 0) / n : 0;
      let squares = 0;
      for (const value of from) squares += (value - mean) ** 2;
      const size = Math.sqrt(squares / n + norm.eps);
      for (let j = 0; j < n; j++) {
        to[j] = ((from[j] - mean) / size) * (norm.weight ? norm.weight[j] : 1) + (norm.bias ? norm.bias[j] : 0);
      }
    }
    return out;
  }

  // Source of erf: Abramowitz and Stegun 1964, 7.1.26; its error is below 1.5e-7.
  function erf(x) {
    const t = 1 / (1 + 0.3275911 * Math.abs(x));
    const tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
    return Math.sign(x) * (1 - tail * Math.exp(-x * x));
  }
  const sigmoid = (x) => 1 / (1 + Math.exp(-x));
  const ACTIVATIONS = {
    relu: (x) => Math.max(0, x),
    gelu: (x) => (x / 2) * (1 + erf(x / Math.SQRT2)),
    gelu_tanh: (x) => (x / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
    swish: (x) => x * sigmoid(x),
    relu_squared: (x) => Math.max(0, x) ** 2,
  };

  // Positions

  // PE(m, 2i) = sin(m / 10000^(2i/d)), PE(m, 2i+1) = cos(the same); "halves": all sines before all cosines
  function sinusoidal(position, d, layout) {
    const out = new Float32Array(d);
    for (let i = 0; 2 * i < d; i++) {
      const angle = position / 10000 ** ((2 * i) / d);
      const [sine, cosine] = layout === "halves" ? [i, Math.ceil(d / 2) + i] : [2 * i, 2 * i + 1];
      out[sine] = Math.sin(angle);
      if (cosine < d) out[cosine] = Math.cos(angle);
    }
    return out;
  }

  // Rotary: the pair (a, b) of channels at position m turns by the angle m θ.
  function rotated(x, { frequencies, pairing }, first) {
    const out = matrix(x.rows, x.columns, x.data.slice());
    for (let i = 0; i < x.rows; i++) {
      const to = row(out, i);
      frequencies.forEach((theta, f) => {
        const angle = (first + i) * theta;
        const [one, two] = pairing === "halves" ? [f, f + frequencies.length] : [2 * f, 2 * f + 1];
        const [a, b] = [to[one], to[two]];
        to[one] = a * Math.cos(angle) - b * Math.sin(angle);
        to[two] = a * Math.sin(angle) + b * Math.cos(angle);
      });
    }
    return out;
  }

  // Attention

  // q = x W_Q + b_Q of a head, its norm, and its rotation; in the same way k of the keys' stream, and v without both
  function channels(layer, side, head, x, first, turns = true) {
    let out = times(x, layer[`W_${side}`][head], layer[`b_${side}`]?.[head]);
    const norm = layer[`${side.toLowerCase()}_norm`];
    if (norm) out = normalised(out, { ...norm, weight: norm.weight?.[head], bias: norm.bias?.[head] });
    return turns && layer.rotary && side !== "V" ? rotated(out, layer.rotary, first) : out;
  }

  // Keys and values of all heads for new tokens, below those of earlier tokens
  function held(layer, y, first = 0, before = null) {
    const of = (side) => layer.W_Q.map((_, head) => below(before?.[side]?.[head], channels(layer, side, head, y, first)));
    return { K: of("K"), V: of("V") };
  }

  function scoresOf(layer, head, q, k, first) {
    const products = layer.additive ? additive(q, k, layer.additive[head]) : timesTransposed(q, k);
    const scaled = layer.additive ? products : each(products, (value) => value * layer.scale);
    const slope = layer.slopes?.[head];
    if (slope === undefined) return { products, scaled, biased: null, scores: scaled };
    // ALiBi: − slope · distance
    const biased = each(scaled, (value, at) => value - slope * Math.abs(first + Math.floor(at / k.rows) - (at % k.rows)));
    return { products, scaled, biased, scores: biased };
  }

  // v · tanh(q + k)
  function additive(q, k, v) {
    const out = matrix(q.rows, k.rows);
    for (let i = 0; i < q.rows; i++) {
      for (let j = 0; j < k.rows; j++) {
        let sum = 0;
        for (let c = 0; c < v.length; c++) sum += v[c] * Math.tanh(row(q, i)[c] + row(k, j)[c]);
        out.data[i * k.rows + j] = sum;
      }
    }
    return out;
  }

  // Σ_heads softmax(scale · q kᵀ + bias) v W_O + b_O. The result has the steps of every head for those who look.
  function attend(layer, x, { K, V }, first = 0) {
    const out = matrix(x.rows, layer.d_model);
    if (layer.b_O) for (let i = 0; i < x.rows; i++) row(out, i).set(layer.b_O);
    const steps = layer.W_Q.map((_, head) => {
      const q = each(channels(layer, "Q", head, x, first), (value) => value * layer.factors[head]);
      return { q, k: K[head], v: V[head], ...scoresOf(layer, head, q, K[head], first) };
    });
    for (const edit of layer.edits) edit(steps);
    steps.forEach((step, head) => {
      const { scores, v } = step;
      step.visible = (i) => (layer.kind === "causal" ? first + i + 1 : scores.columns);
      step.weights = matrix(scores.rows, scores.columns);
      for (let i = 0; i < scores.rows; i++) row(step.weights, i).set(softmax(row(scores, i), step.visible(i)));
      step.z = times(step.weights, v);
      if (layer.gate) {
        const gate = each(times(x, layer.gate.weight[head], layer.gate.bias?.[head]), sigmoid);
        step.gate = gate;
        step.z = each(step.z, (value, at) => value * gate.data[gate.columns === 1 ? Math.floor(at / v.columns) : at]);
      }
      const moved = times(step.z, layer.W_O[head]);
      for (let i = 0; i < out.data.length; i++) out.data[i] += moved.data[i];
    });
    return { out, steps };
  }

  // f(x W_1 + b_1) W_2 + b_2; gated, (f(x W_g + b_g) ∘ (x W_1 + b_1)) W_2 + b_2
  function feedForward({ activation, W_1, b_1, W_2, b_2, W_g, b_g }, x) {
    const f = ACTIVATIONS[activation];
    let inner = times(x, W_1, b_1);
    if (W_g) {
      const gate = times(x, W_g, b_g);
      inner = each(inner, (value, i) => f(gate.data[i]) * value);
    } else inner = each(inner, f);
    return times(inner, W_2, b_2);
  }

  // The frame around a sub-layer f: x + f(norm(x)), or norm(x + f(x))
  const enter = ({ place, norm }, x) => (place === "pre" ? normalised(x, norm) : x);
  const leave = ({ place, norm }, x, change) => (place === "pre" ? plus(x, change) : normalised(plus(x, change), norm));

  function embed(stack, ids, first) {
    const { table, scale, positions } = stack;
    const out = matrix(ids.length, table.columns);
    ids.forEach((id, i) => {
      const to = row(out, i);
      row(table, id).forEach((value, j) => { to[j] = value * scale; });
      if (!positions) return;
      const at = positions.table ? row(positions.table, first + i) : sinusoidal(first + i, table.columns, positions.layout);
      at.forEach((value, j) => { to[j] += value; });
    });
    return normalised(out, stack.embeddingNorm);
  }

  // The stream through all blocks, and the keys and values that the next tokens need. `made` notes every sub-layer:
  // its frame, what it adds, and the steps of its heads.
  function runStack(stack, ids, { memory = null, cache = null, made = null } = {}) {
    const first = cache ? cache.length : 0;
    let x = embed(stack, ids, first);
    made?.push({ frame: null, change: x });
    const add = (frame, change, more) => {
      made?.push({ frame, change, ...more });
      x = leave(frame, x, change);
    };
    const kept = stack.blocks.map((block, b) => {
      const read = enter(block.self.frame, x);
      const own = held(block.self, read, first, cache?.blocks[b].own);
      const { out, steps } = attend(block.self, read, own, first);
      add(block.self.frame, out, { name: block.self.name, steps, read });
      let source = null;
      if (block.cross) {
        source = cache?.blocks[b].source ?? held(block.cross, memory);
        const found = attend(block.cross, enter(block.cross.frame, x), source, first);
        add(block.cross.frame, found.out, { name: block.cross.name, steps: found.steps });
      }
      add(block.ff.frame, feedForward(block.ff, enter(block.ff.frame, x)), {});
      return { own, source };
    });
    return { hidden: normalised(x, stack.finalNorm), cache: { length: first + ids.length, blocks: kept } };
  }

  class Model {
    // `record` describes the model; `tensor(name)` gives a list of matrices for a map of heads, a matrix, or a vector.
    constructor(record, tensor) {
      this.record = record;
      this.layers = [];
      this.stacks = {};
      for (const [name, about] of Object.entries(record.stacks)) this.stacks[name] = this.makeStack(about, tensor);
      const [last] = Object.values(this.stacks).slice(-1);
      Object.assign(this, { encoder: record.source ? this.stacks.encoder : null, decoder: last });
    }

    makeStack(about, tensor) {
      const norm = (of) => of && { ...of, weight: of.weight && tensor(of.weight), bias: of.bias && tensor(of.bias) };
      const layer = (of) => {
        if (!of) return null;
        const maps = Object.fromEntries(Object.entries(of.tensors).map(([name, at]) => [name, tensor(at)]));
        const norms = Object.fromEntries(["q_norm", "k_norm", "v_norm"].map((name) => [name, norm(of[name])]));
        const gate = of.gate && { weight: tensor(of.gate.weight), bias: of.gate.bias && tensor(of.gate.bias) };
        const frame = { place: of.place, norm: norm(of.norm) };
        const made = { ...of, ...maps, ...norms, gate, frame, d_model: about.d_model, edits: [], factors: maps.W_Q.map(() => 1) };
        if (of.additive) made.additive = tensor(of.additive);
        this.layers.push(made);
        return made;
      };
      const blocks = about.blocks.map(({ self, cross, ff }) => ({
        self: layer(self), cross: layer(cross),
        ff: { ...ff, frame: { place: ff.place, norm: norm(ff.norm) }, ...Object.fromEntries(Object.entries(ff.tensors).map(([name, at]) => [name, tensor(at)])) },
      }));
      const positions = about.positions && { ...about.positions, table: about.positions.table && tensor(about.positions.table) };
      return {
        d_model: about.d_model, table: tensor(about.table), scale: about.scale, positions, embeddingNorm: norm(about.embedding_norm),
        blocks, finalNorm: norm(about.final_norm), output: about.output && tensor(about.output), outputBias: about.output_bias && tensor(about.output_bias),
      };
    }

    layer(name) {
      const found = this.layers.find((one) => one.name === name);
      if (!found) throw new Error(`there is no layer ${name}: there are ${this.layers.map((one) => one.name).join(", ")}`);
      return found;
    }
    // "cross.0.2": layer cross.0 and head 2
    place(name = "") {
      const [, layer, head] = name.match(/^(.*)\.(\d+)$/) ?? [null, name];
      const found = this.layer(layer);
      if (!(head < found.W_Q.length)) throw new Error(`there is no head ${name}: layer ${layer} has heads 0 to ${found.W_Q.length - 1}`);
      return [found, Number(head)];
    }

    // The same model with layers of its own; the matrices are shared.
    copied() {
      const model = Object.assign(Object.create(Model.prototype), this, { layers: [], stacks: {} });
      const copy = (layer) => {
        if (!layer) return null;
        const own = { ...layer, edits: [...layer.edits], factors: [...layer.factors] };
        for (const name of ["W_Q", "W_K", "W_V", "W_O"]) own[name] = [...layer[name]];
        model.layers.push(own);
        return own;
      };
      for (const [name, stack] of Object.entries(this.stacks)) {
        const blocks = stack.blocks.map((block) => ({ ...block, self: copy(block.self), cross: copy(block.cross) }));
        model.stacks[name] = { ...stack, blocks };
      }
      const [last] = Object.values(model.stacks).slice(-1);
      return Object.assign(model, { encoder: this.encoder && model.stacks.encoder, decoder: last });
    }

    logits(hidden) {
      const { output, table, outputBias } = this.decoder;
      const out = timesTransposed(hidden, output ?? table);
      if (outputBias) for (let i = 0; i < out.rows; i++) outputBias.forEach((value, j) => { out.data[i * out.columns + j] += value; });
      return out;
    }

    // One pass over a text: logits of the next token at each position. `ids` of a translator are its target.
    run(ids, source = null) {
      const made = [];
      const memory = source && runStack(this.encoder, source, { made }).hidden;
      const read = source ? [this.record.search.start, ...ids.slice(0, -1)] : ids;
      const { hidden } = runStack(this.decoder, read, { memory, made });
      return { hidden, logits: this.logits(hidden), made };
    }

    // The nats of every token that is predicted
    losses(ids, source = null) {
      const { logits } = this.run(ids, source);
      const next = source ? ids : ids.slice(1);
      return next.map((id, i) => -logSoftmax(row(logits, i))[id]);
    }

    // Beam search; with a beam of 1 greedy. A translator reads `given` and writes, a language model goes on after it.
    search(given, { beam, alpha, limit, best, full }) {
      const { search } = this.record;
      const memory = this.encoder && runStack(this.encoder, given).hidden;
      // The log-probabilities of the token after these, which follow those of the cache
      const read = (ids, cache) => {
        const found = runStack(this.decoder, ids, { memory, cache });
        const logits = row(this.logits(part(found.hidden, ids.length - 1, ids.length)), 0);
        for (const id of search.never) logits[id] = -Infinity;
        return { cache: found.cache, next: logSoftmax(logits).subarray(0, search.choices) };
      };
      const penalty = (length) => ((5 + length) / 6) ** alpha;
      const ended = [];
      const close = ({ ids, total, logProbs }, finish) => ended.push({ ids, logProbs, finish, score: total / penalty(logProbs.length) });
      const count = beam > 1 ? beam * (1 + search.ends.length) : 1;
      let open = [{ ids: [], total: 0, logProbs: [], ...read(this.encoder ? [search.start] : given, null) }];
      for (let length = 1; open.length; length++) {
        const atLimit = length > limit; // a translation ends with its end token in any case
        const candidates = [];
        open.forEach((one, at) => {
          const tokens = atLimit ? search.ends : largest(one.next, count);
          for (const id of tokens) candidates.push({ at, id, log: one.next[id], total: one.total + one.next[id] });
        });
        candidates.sort((a, b) => b.total - a.total);
        const going = [];
        candidates.slice(0, count).forEach(({ at, id, log, total }, rank) => {
          if (going.length === beam || total === -Infinity) return;
          const { ids, logProbs, cache } = open[at];
          const grown = { ids: [...ids, id], total, logProbs: [...logProbs, log], cache };
          if (!search.ends.includes(id)) going.push(grown);
          else if (rank < beam) close({ ...grown, ids }, atLimit ? "length" : "token");
        });
        if (!this.encoder && length === limit && ended.length < beam) {
          going.forEach((one) => close(one, "length"));
          going.length = 0;
        }
        ended.sort((a, b) => b.score - a.score);
        const isCertain = this.encoder && ended.length >= best && going.length && ended[best - 1].score >= going[0].total / penalty(limit + 1);
        if (ended.length >= (full || beam === 1 ? beam : Infinity) || isCertain) break;
        open = going.map((one) => ({ ...one, ...read(one.ids.slice(-1), one.cache) }));
      }
      return ended.slice(0, best);
    }

    // The logits of a token with all sub-layers' results as they were, without what one head gave to one of them
    logitsWithout(made, name, at, less) {
      const own = made.slice(made.findLastIndex((one) => one.frame === null));
      let x = null;
      for (const { frame, change, name: of } of own) {
        const added = part(change, at, at + 1);
        const left = of === name ? each(added, (value, i) => value - less[i]) : added;
        x = frame ? leave(frame, x, left) : left;
      }
      return row(this.logits(normalised(x, this.decoder.finalNorm)), 0);
    }
  }

  // The indices of the largest values, the largest first
  function largest(values, count) {
    const found = [];
    values.forEach((value, i) => {
      if (found.length === count && value <= values[found[count - 1]]) return;
      let at = found.length;
      while (at && values[found[at - 1]] < value) at--;
      found.splice(at, 0, i);
      found.length = Math.min(found.length, count);
    });
    return found;
  }

  // Tokens

  const PRINTABLE = [[0x21, 0x7f], [0xa1, 0xad], [0xae, 0x100]];
  const isPrintable = (byte) => PRINTABLE.some(([first, end]) => byte >= first && byte < end);
  const others = [...Array(256).keys()].filter((byte) => !isPrintable(byte));
  const CHAR_OF = [...Array(256).keys()].map((byte) => String.fromCharCode(isPrintable(byte) ? byte : 256 + others.indexOf(byte)));
  const BYTE_OF = new Map(CHAR_OF.map((char, byte) => [char, byte]));
  // GPT-2's words: English endings, letters, digits or marks with the space before them, white space
  const WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

  class Tokenizer {
    // `kind` is "bpe", "unigram" or "characters"; tokens by id, merges in order, scores of a unigram's tokens
    constructor(record) {
      Object.assign(this, record);
      this.idOf = new Map(record.tokens.map((token, id) => [token, id]));
      this.rank = new Map((record.merges ?? []).map(([left, right], i) => [`${left} ${right}`, i]));
      this.isSpecial = new Set(record.special.map(({ id }) => id));
      this.longest = record.tokens.reduce((most, token) => Math.max(most, token.length), 1);
    }

    // Special tokens that the text spells are tokens, if `parses` is set.
    encode(text, parses) {
      if (!parses || !this.special.length) return this.pieces(text);
      const found = [];
      let rest = text;
      for (;;) {
        const next = this.special.map((one) => ({ ...one, at: rest.indexOf(one.content) })).filter(({ at }) => at >= 0)
          .sort((a, b) => a.at - b.at || b.content.length - a.content.length)[0];
        if (!next) return [...found, ...this.pieces(rest)];
        const before = rest.slice(0, next.at);
        found.push(...this.pieces(next.lstrip ? before.trimEnd() : before), next.id);
        rest = rest.slice(next.at + next.content.length);
      }
    }
    pieces(text) {
      if (!text && this.kind !== "bpe") return [];
      const plain = this.nfc ? text.normalize("NFC") : text;
      if (this.kind === "characters") return [...plain].map((char) => this.idOf.get(char) ?? this.unknown);
      const whole = this.prepends && plain ? ` ${plain}` : plain;
      const words = this.words ? whole.match(WORDS) ?? [] : whole ? [whole] : [];
      return words.flatMap((word) => {
        const chars = [...new TextEncoder().encode(word)].map((byte) => CHAR_OF[byte]);
        return this.kind === "unigram" ? this.likeliest(chars.join("")) : this.merged(chars);
      });
    }
    // Byte pairs: the pair of the lowest rank is merged, again and again.
    merged(parts) {
      for (;;) {
        let [best, at] = [Infinity, -1];
        for (let i = 0; i + 1 < parts.length; i++) {
          const rank = this.rank.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
          if (rank < best) [best, at] = [rank, i];
        }
        if (at < 0) return parts.map((piece) => this.idOf.get(piece));
        parts.splice(at, 2, parts[at] + parts[at + 1]);
      }
    }
    // Unigrams: the cut whose scores add up to the most
    likeliest(word) {
      const best = [{ score: 0, ids: [] }];
      for (let start = 0; start < word.length; start++) {
        for (let end = start + 1; best[start] && end <= Math.min(word.length, start + this.longest); end++) {
          const id = this.idOf.get(word.slice(start, end));
          if (id === undefined || this.isSpecial.has(id)) continue;
          const score = best[start].score + this.scores[id];
          if (!best[end] || score > best[end].score) best[end] = { score, ids: [...best[start].ids, id] };
        }
      }
      return best[word.length].ids;
    }

    bytes(id) { return [...this.tokens[id]].map((char) => BYTE_OF.get(char)); }
    decode(ids) {
      const own = ids.filter((id) => !this.isSpecial.has(id));
      if (this.kind === "characters") return own.map((id) => this.tokens[id]).join("");
      const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(own.flatMap((id) => this.bytes(id))));
      return this.prepends && text.startsWith(" ") ? text.slice(1) : text;
    }
    // A token as it is shown: bytes of an incomplete character by their names
    shown(id) {
      if (this.isSpecial.has(id) || this.kind === "characters") return this.tokens[id];
      const bytes = this.bytes(id);
      const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
      if (!text.includes("\ufffd")) return text;
      return bytes.map((byte) => (byte < 128 ? String.fromCharCode(byte) : `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`)).join("");
    }
  }

  // Weights: base64 of the numbers of all tensors, one after the other

  function halves() {
    const table = new Float32Array(65536);
    for (let bits = 0; bits < 65536; bits++) {
      const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
      table[bits] = sign * (exponent === 0 ? fraction * 2 ** -24 : exponent === 31 ? (fraction ? NaN : Infinity) : 2 ** (exponent - 15) * (1 + fraction / 1024));
    }
    return table;
  }

  // `tensors`: name → { shape, dtype, at }. An int8 row is a factor of float32 and whole numbers from −127 to 127.
  function unpack(tensors, base64) {
    const packed = atob(base64.trim());
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
    const half = halves();
    const numbers = ({ shape, dtype, at }) => {
      const count = shape.reduce((product, size) => product * size, 1);
      if (dtype === "float32") return new Float32Array(bytes.buffer, at, count);
      if (dtype === "float16") return Float32Array.from(new Uint16Array(bytes.buffer, at, count), (bits) => half[bits]);
      const width = shape[shape.length - 1];
      const factors = new Float32Array(bytes.buffer, at, count / width);
      return Float32Array.from(new Int8Array(bytes.buffer, at + 4 * factors.length, count), (value, i) => value * factors[Math.floor(i / width)]);
    };
    const known = new Map();
    return (name) => {
      if (known.has(name)) return known.get(name);
      const { shape, heads } = tensors[name];
      const data = numbers(tensors[name]);
      let found = data;
      const [rows, columns] = shape.slice(-2);
      const one = (i) => (shape.length === 3 ? matrix(rows, columns, data.subarray(i * rows * columns, (i + 1) * rows * columns)) : row(matrix(rows, columns, data), i));
      if (heads) {
        const copies = Array.from({ length: shape[0] }, (_, i) => one(i));
        // Heads of a group read the same map.
        found = Array.from({ length: heads }, (_, head) => copies[Math.floor((head * copies.length) / heads)]);
      }
      else if (shape.length === 2) found = matrix(rows, columns, data);
      known.set(name, found);
      return found;
    };
  }

  return { Model, Tokenizer, unpack, matrix, row, dot, each, times, transposed, normalised, channels, softmax, logSoftmax, largest };
})();
