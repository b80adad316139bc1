// Answers for the page, computed by `engine` from the model in this file, in the records of a server.
const MOST_KEYS = 32;
const MOST_NEXT = 8;
const MOST_SENTENCES = 3;
const MOST_WEIGHTS = 2 ** 24; // attention weights of all heads on one text
const MOST_RUNS = 4;
const OVERVIEW = 96; // rows and columns of a small map, at most
const RESAMPLES = 1000;

class Answers {
  constructor(record, weights) {
    const { Model, Tokenizer, unpack } = engine;
    this.record = record;
    this.model = new Model(record, unpack(record.tensors, weights));
    this.source = new Tokenizer(record.tokenizers.source);
    this.target = record.tokenizers.target ? new Tokenizer(record.tokenizers.target) : this.source;
    this.kept = new Map();
    this.keptLosses = new Map();
    this.keptRuns = new Map(); // with the weights of all heads, so that few fit into memory
    const heads = this.model.layers.reduce((count, layer) => count + layer.W_Q.length, 0);
    this.mostTokens = Math.floor(Math.sqrt(MOST_WEIGHTS / heads));
  }

  // The latest results, so that one change or one text is computed once
  remembered(key, compute, kept = this.kept, most = 24) {
    const found = kept.has(key) ? kept.get(key) : compute();
    kept.delete(key); // the latest is the last
    kept.set(key, found);
    if (kept.size > most) kept.delete(kept.keys().next().value);
    return found;
  }
  changed(calls) { return calls.length ? this.remembered(`model ${calls}`, () => changes.changed(this.model, calls)) : this.model; }

  // A text as the model reads it: the source with its end and the target with its end, or one text
  encoded(text, target) {
    const { search, source } = this.record;
    if (!source) {
      const ids = this.source.encode(text + target, true);
      if (!ids.length && search.begin !== null) ids.push(search.begin);
      if (!ids.length) throw new Error("text: give a text");
      if (search.positions !== null && ids.length > search.positions) throw new Error(`the text has ${ids.length} tokens, but the model has positions for ${search.positions}: shorten it`);
      this.requireShort(ids);
      return { ids, source: null };
    }
    const read = this.encodedSource(text);
    const ids = [...this.target.encode((target || this.search(text, [], 1, 1)[0].text).trim(), false), search.ends[0]];
    this.requireShort(ids);
    return { ids, source: read };
  }
  encodedSource(text) {
    const { search } = this.record;
    const read = this.source.encode(text.trim(), false);
    if (!read.length) throw new Error("text: give a text");
    if (search.max_source_tokens !== null && read.length > search.max_source_tokens) throw new Error(`the text has ${read.length} tokens, and the model reads ${search.max_source_tokens}: shorten it`);
    this.requireShort(read);
    return [...read, search.end];
  }

  requireShort({ length }) {
    if (length > this.mostTokens) throw new Error(`the text has ${length} tokens, and this page shows at most ${this.mostTokens}: shorten it`);
  }

  search(text, calls, beam, best, count = 12) {
    return this.remembered(JSON.stringify(["search", text, calls, beam, best, count]), () => {
      const { search, source } = this.record;
      const model = this.changed(calls);
      const given = source ? this.encodedSource(withoutInvisible(text)) : this.encoded(text, "").ids;
      const room = search.positions === null ? Infinity : search.positions - (source ? 1 : given.length - 1);
      const limit = Math.min(source ? given.length - 1 + search.max_extra_tokens : count, room);
      const options = source ? { alpha: search.alpha, full: search.full } : { alpha: 0, full: true };
      return model.search(given, { beam, best, limit, ...options }).map(({ ids, score }) => ({ ids, score, text: this.textOf(given, ids), tokens: ids.map((id) => this.target.shown(id)) }));
    });
  }
  textOf(given, ids) {
    if (this.record.source) return this.target.decode(ids).replace(/[\r\n]/g, " ");
    return this.source.decode([...given, ...ids]).slice(this.source.decode(given).length);
  }

  run({ text, target, changes: calls }) {
    return this.remembered(JSON.stringify([text, target, calls]), () => {
      const read = this.encoded(text, target);
      return { ...read, ...this.changed(calls).run(read.ids, read.source) };
    }, this.keptRuns, MOST_RUNS);
  }

  // The questions of the page

  models() {
    const { name, source } = this.record;
    const layers = this.model.layers.map(({ name: of, kind, d_model, W_Q, W_K, W_V, shared, scale }) => ({
      name: of, kind, heads: W_Q.length, kv_heads: new Set(W_K).size, d_model, d_k: W_Q[0].columns, d_v: W_V[0].columns, scale, shared, between: [],
    }));
    const { held_out } = this.record;
    const tokens = held_out && held_out.windows.reduce((sum, one) => sum + this.predicted(one), 0);
    const about = held_out && { name: held_out.name, tokens, parts: held_out.windows.length, units: held_out.units };
    return { models: [{ name, languages: null, can: ["read", "run", source ? "translate" : "generate"], pairs: source, layers, exact: [], held_out: about, example: this.record.example, examples: this.examples() }] };
  }
  // The held-out sentences of a translator
  examples() {
    const { held_out, source } = this.record;
    return source && held_out ? held_out.windows.map(({ source: ids }) => this.source.decode(ids)) : [];
  }

  write({ text, changes: calls, count, beam = 4 }) {
    const candidates = this.search(text, calls, beam, beam, count).map(({ ids, ...shown }) => shown);
    return { candidates, python: calls.map((call) => this.python(call)).join("\n") };
  }
  python(call) {
    const [, name, given] = call.match(/^(\w+)\((.*)\)$/);
    const parts = given.split(",").map((one) => one.trim());
    return `model = model${this.record.python[name]}`.replace(/\{(\d)\}/g, (_, i) => parts[i]);
  }

  view(asked) {
    const found = this.run(asked);
    const { source } = this.record;
    const first = source || !asked.target ? null : Math.min(this.source.encode(asked.text, true).length, found.ids.length - 1);
    const maps = [];
    const kinds = (source ? ["encoder", "decoder", "cross"] : ["decoder"]).map((kind) => {
      const own = found.made.filter(({ name }) => name && (source ? name.startsWith(`${kind}.`) : true));
      const { queries, keys } = this.tokens(found, kind);
      const weights = own.flatMap(({ steps }) => steps.map((step) => step.weights));
      const small = weights.map(smaller);
      const counts = own.map(({ steps }) => steps.length);
      const at = mostTelling(small, kind !== "cross");
      let layer = 0;
      let head = at;
      while (head >= counts[layer]) head -= counts[layer++];
      maps.push(...weights.map(({ data }) => ({ form: "whole", data })));
      return {
        kind, queries, keys, ...this.words(found, kind), generated_query: first, generated_key: first, telling: [layer, head],
        layers: own.map(({ name, steps }) => ({ number: Number(name.split(".").pop()), heads: steps.map((_, number) => ({ number, label: "", facts: [] })) })),
        overview: [small[0].rows, small[0].columns], bins: [bin(queries.length), bin(keys.length)],
        overviews: Uint8Array.from(small.flatMap((map) => [...map.data]), (weight) => Math.round(255 * Math.sqrt(Math.min(1, weight)))),
      };
    });
    return { texts: [{ title: asked.text, kinds }], maps };
  }
  tokens({ ids, source }, kind) {
    const written = ids.map((id) => this.target.shown(id));
    if (!source) return { queries: written, keys: written };
    const read = source.map((id) => this.source.shown(id));
    if (kind === "encoder") return { queries: read, keys: read };
    const start = this.target.shown(this.record.search.start);
    return { queries: written, keys: kind === "cross" ? read : [start, ...written.slice(0, -1)] };
  }

  // The first token of each word of queries and keys
  words({ ids, source }, kind) {
    const written = wordStarts(this.target, ids);
    if (!source) return { query_words: written, key_words: written };
    const read = wordStarts(this.source, source);
    if (kind === "encoder") return { query_words: read, key_words: read };
    const before = wordStarts(this.target, [this.record.search.start, ...ids.slice(0, -1)]);
    return { query_words: written, key_words: kind === "cross" ? read : before };
  }

  // One row of a head, step by step
  row({ layer, head, query, ...asked }) {
    const { row, times } = engine;
    const found = this.run(asked);
    const model = this.changed(asked.changes);
    const { out, steps } = this.stepsOf(found, layer);
    const own = model.layer(layer);
    const step = steps[head];
    const kind = this.record.source ? layer.split(".")[0] : "decoder";
    const { queries, keys } = this.tokens(found, kind);
    const largestFirst = engine.largest(row(step.weights, query), MOST_KEYS);
    const kept = largestFirst.sort((a, b) => a - b);
    const pick = (of) => of && kept.map((key) => row(of, query)[key]);
    const z = row(step.z, query);
    const gate = step.gate ? row(step.gate, query) : null;
    const weights = row(step.weights, query);
    const shares = keys.map((_, key) => row(step.v, key).map((value, c) => value * weights[key] * (gate ? gate[gate.length > 1 ? c : 0] : 1)));
    const along = Math.max(1e-30, engine.dot(z, z));
    const projected = [...row(times(engine.matrix(1, z.length, z), own.W_O[head]), 0)];
    return {
      model: "", head: `${layer}.${head}`, query, token: queries[query], keys, kept, scale: own.scale, soft_cap: null, sink: null,
      q: [...row(step.q, query)], k: kept.map((key) => [...row(step.k, key)]), v: kept.map((key) => [...row(step.v, key)]),
      content: pick(this.content(own, found, layer, head)), products: pick(step.products), scaled: pick(step.scaled), biased: pick(step.biased), scores: pick(step.scores),
      visible: kept.map((key) => key < step.visible(query)), weights: kept.map((key) => weights[key]),
      gate: gate && [...gate], shares: kept.map((key) => [...shares[key]]), share_of_output: kept.map((key) => engine.dot(shares[key], z) / along),
      z: [...z], projected, output: projected, layer_projected: [...row(out, query)],
      positions: own.rotary ? "rotary" : own.slopes ? "alibi" : "none", compares: own.additive ? "scores" : "products",
      direct_effect: this.directEffect(model, found, layer, query, projected), next: this.next(asked, layer, query),
    };
  }
  // A head as matrices
  head({ changes: calls, layer, head }) {
    const model = this.changed(calls);
    const { source, chance } = this.record;
    return forms.head(model, model.layer(layer), head, { source: source ? this.source : null, target: this.target, chance });
  }
  stepsOf(found, layer) {
    const { change, steps } = found.made.find(({ name }) => name === layer);
    return { out: change, steps };
  }
  // Products before the rotation of queries and keys
  content(layer, found, name, head) {
    if (!layer.rotary) return null;
    const { read } = found.made.find((one) => one.name === name);
    const q = engine.channels(layer, "Q", head, read, 0, false);
    return engine.times(q, engine.transposed(engine.channels(layer, "K", head, read, 0, false)));
  }

  // What the output of a head does to the next token's logits, with all other results held as they were
  directEffect(model, found, layer, query, projected) {
    if (this.record.source && layer.startsWith("encoder")) return null;
    const logits = engine.row(found.logits, query);
    const without = model.logitsWithout(found.made, layer, query, projected);
    const [before, after] = [engine.softmax(without), engine.softmax(logits)];
    const change = after.map((value, i) => value - before[i]);
    const tell = (ids) => ids.map((id) => ({ token: this.target.shown(id), logit: logits[id] - without[id], probability: change[id] }));
    return { raises: tell(engine.largest(change, 8)), lowers: tell(engine.largest(change.map((value) => -value), 8)) };
  }

  next(asked, layer, query) {
    const [before, after] = [this.run({ ...asked, changes: [] }), this.run(asked)];
    const at = layer.startsWith("encoder") ? before.ids.length - 1 : query;
    const logs = (found, i) => engine.logSoftmax(engine.row(found.logits, i));
    const divergence = (i) => {
      const [p, q] = [logs(before, i), logs(after, i)];
      return Math.max(0, p.reduce((sum, value, id) => (value === -Infinity ? sum : sum + Math.exp(value) * (value - q[id])), 0));
    };
    const both = [logs(before, at), logs(after, at)];
    const best = both.map((own) => engine.largest(own, MOST_NEXT));
    const ids = [...new Set(best[0].flatMap((id, i) => [id, best[1][i]]))].slice(0, MOST_NEXT + 4);
    const losses = [before, after].map((found) => this.losses(asked.text, found));
    const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
    return {
      at, token: this.target.shown(before.ids[at]), kl: divergence(at), mean_kl: mean(before.ids.map((_, i) => divergence(i))),
      loss: losses.map(mean), loss_tokens: losses[0].length, tokens: ids.map((id) => [this.target.shown(id), Math.exp(both[0][id]), Math.exp(both[1][id])]),
    };
  }
  losses(text, { ids, source, logits }) {
    const next = source ? ids : ids.slice(1);
    const all = next.map((id, i) => -engine.logSoftmax(engine.row(logits, i))[id]);
    return source ? all : all.slice(0, Math.max(1, this.source.encode(text, true).length - 1));
  }

  // The loss on the held-out sentences, one at a time
  held_out({ changes: calls, parts }) {
    const { windows } = this.record.held_out;
    const [before, after] = [[], calls].map((own) => windows.slice(0, parts).map(({ ids, source }, i) => this.remembered(`${own} ${i}`, () =>
      this.changed(own).losses(ids, source).reduce((sum, nats) => sum + nats, 0), this.keptLosses, 16 * windows.length)));
    if (parts < windows.length) return { parts, loss: null, interval: null };
    const units = Math.max(...windows.map(({ unit }) => unit)) + 1;
    const [sums, counts] = [new Float64Array(units), new Float64Array(units)];
    windows.forEach((one, i) => {
      sums[one.unit] += after[i] - before[i];
      counts[one.unit] += this.predicted(one);
    });
    const total = counts.reduce((a, b) => a + b, 0);
    const loss = [before, after].map((own) => own.reduce((a, b) => a + b, 0) / total);
    return { parts, loss, interval: units > 1 ? ratioInterval(sums, counts) : null, most: this.mostChanged(before, after) };
  }
  // The sentences of a translator whose loss rises most, in nats per token
  mostChanged(before, after) {
    const { windows } = this.record.held_out;
    if (!this.record.source) return [];
    const rises = windows.map((one, i) => (after[i] - before[i]) / this.predicted(one));
    return engine.largest(rises, MOST_SENTENCES).filter((i) => rises[i] > 1e-3).map((i) => ({ text: this.source.decode(windows[i].source), nats: rises[i] }));
  }
  predicted({ ids, source }) { return source ? ids.length : ids.length - 1; }
}

// Words

// What a translator does not read: characters that do not show, and joiners between letters of Europe, marks and spaces
const NOT_READ = /[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]/g;
const STRAY_JOINERS = /(?<![^\t-\r -~\u00a0-\u052f\u1e00-\u200a\u2010-\u205f])[\u200b-\u200d]+(?![^\t-\r -~\u00a0-\u052f\u1e00-\u200a\u2010-\u205f])/g;
const withoutInvisible = (text) => text.replace(NOT_READ, "").replace(STRAY_JOINERS, "");
// Scripts without spaces between words: a character of them is a word.
const UNSPACED = /^[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9df\uaa60-\uaadf\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u303b\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\u{20000}-\u{3fffd}]/u;
const charactersOf = (bytes) => [...new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes))];
// The first character of a token; of an incomplete one, a possible character
function firstCharacter(bytes) {
  if (bytes[0] >= 0x80 && bytes[0] < 0xc0) return "\u0300"; // inside of a character
  const [first] = charactersOf(bytes);
  if (first !== "\ufffd") return first;
  const possible = [...Array(64).keys()].map((i) => charactersOf([...bytes.slice(0, 3), 0x80 + i, 0x80, 0x80])[0]);
  return possible.find((one) => UNSPACED.test(one)) ?? first;
}
function goesOn(before, bytes) {
  const first = firstCharacter(bytes);
  const last = charactersOf(before).pop() ?? "";
  return /^[\p{M}\u200c\u200d\u{1f3fb}-\u{1f3ff}]/u.test(first) || !(UNSPACED.test(first) || UNSPACED.test(last));
}
// The first token of each word. A word begins at a space or a line break; marks are words, and spaces belong to the word after them.
function wordStarts(tokenizer, ids) {
  const words = [];
  let isFresh = true; // the next token begins a word
  let spaces = null; // the first token of the spaces before it
  const begin = (at, bytes) => {
    words.push({ start: spaces ?? at, bytes });
    spaces = null;
  };
  ids.forEach((id, at) => {
    const piece = tokenizer.shown(id);
    const isSpecial = tokenizer.isSpecial.has(id);
    const raw = isSpecial || tokenizer.kind === "characters" ? [...new TextEncoder().encode(piece)] : tokenizer.bytes(id);
    const bytes = raw.filter((byte) => byte !== 32 && !(byte >= 9 && byte <= 13));
    const isMark = /^\p{P}+$/u.test(piece.replace(/[ \t-\r]/g, ""));
    if (isSpecial) begin(at, []);
    else if (!bytes.length) spaces ??= at;
    else if (isFresh || isMark || /^[ \t-\r]/.test(piece) || !goesOn(words[words.length - 1].bytes, bytes)) begin(at, bytes);
    else words[words.length - 1].bytes.push(...bytes);
    isFresh = isSpecial || !bytes.length || isMark;
  });
  if (spaces !== null) begin(spaces, []);
  return words.map(({ start }) => start);
}

// Ends of the 95 % bootstrap interval of Σ sums / Σ counts, by resampling the sentences
function ratioInterval(sums, counts) {
  let state = 1; // of a generator of numbers: the interval of a state is the same each time
  const random = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
  const ratios = Float64Array.from({ length: RESAMPLES }, () => {
    let [sum, count] = [0, 0];
    for (let i = 0; i < sums.length; i++) {
      const unit = Math.floor(random() * sums.length);
      sum += sums[unit];
      count += counts[unit];
    }
    return sum / count;
  }).sort();
  const quantile = (share) => {
    const at = share * (RESAMPLES - 1);
    const low = Math.floor(at);
    return ratios[low] + (at - low) * (ratios[Math.min(low + 1, RESAMPLES - 1)] - ratios[low]);
  };
  return [quantile(0.025), quantile(0.975)];
}

// Small maps: means of neighbouring rows, sums of neighbouring columns
const bin = (count) => Math.max(1, Math.ceil(count / OVERVIEW));
function smaller(weights) {
  const [high, wide] = [bin(weights.rows), bin(weights.columns)];
  const out = engine.matrix(Math.ceil(weights.rows / high), Math.ceil(weights.columns / wide));
  for (let i = 0; i < weights.rows; i++) {
    const to = Math.floor(i / high);
    const rows = Math.min(high, weights.rows - to * high);
    engine.row(weights, i).forEach((weight, j) => { out.data[to * out.columns + Math.floor(j / wide)] += weight / rows; });
  }
  return out;
}

// The map whose rows tell most about their tokens: the mutual information of query and key
function mostTelling(maps, isSelf) {
  const xlogx = (x) => (x > 0 ? x * Math.log(x) : 0);
  const nats = maps.map(({ rows, columns, data }) => {
    const [byRow, byColumn] = [new Float64Array(rows), new Float64Array(columns)];
    let found = 0;
    data.forEach((weight, at) => {
      const [i, j] = [Math.floor(at / columns), at % columns];
      if (isSelf && i === j) return;
      found += xlogx(weight);
      byRow[i] += weight;
      byColumn[j] += weight;
    });
    const total = byRow.reduce((a, b) => a + b, 0);
    const apart = (sums) => sums.reduce((sum, value) => sum + xlogx(value), 0);
    return (found - apart(byRow) + xlogx(total) - apart(byColumn)) / rows;
  });
  return nats.indexOf(Math.max(...nats));
}
