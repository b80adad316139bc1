// The head as matrices: pictures, spectra and directions of its maps and its two forms, in the records of a server.
const forms = (() => {
  "use strict";
  const { matrix, row, dot, each, times, transposed, normalised } = engine;
  const PICTURE = { rows: 24, columns: 12 };
  const DIRECTIONS = 6;
  const NEAREST = 6;

  // The norms whose outputs a layer reads: as x, and in cross-attention as the memory. After a post-norm sub-layer
  // the stream is the output of a norm.
  function normsBefore(model, layer) {
    const found = {};
    let memory = null;
    for (const [name, stack] of Object.entries(model.stacks)) {
      let last = stack.embeddingNorm;
      for (const block of stack.blocks) {
        for (const part of [block.self, block.cross, block.ff]) {
          if (!part) continue;
          const { place, norm } = part.frame;
          if (part === layer) Object.assign(found, { x: place === "pre" ? norm : last, isPre: place === "pre", memory });
          last = place === "pre" ? null : norm;
        }
      }
      if (name === "encoder") memory = stack.finalNorm ?? last;
    }
    return layer.kind === "cross" ? found : { ...found, memory: found.x };
  }

  // The directions along which the output of a LayerNorm is constant: 1/γ, or the channels where γ is 0
  function constantDirections(norm, d) {
    if (!norm?.centred) return [];
    const gain = [...(norm.weight ?? new Float32Array(d).fill(1))];
    const zeros = gain.flatMap((value, i) => (value === 0 ? [i] : []));
    if (zeros.length) return zeros.map((at) => Float64Array.from(gain, (_, i) => Number(i === at)));
    const along = Float64Array.from(gain, (value) => 1 / value);
    const size = Math.sqrt(dot(along, along));
    return [along.map((value) => value / size)];
  }
  // W without what it reads along unit vectors
  function without(W, directions) {
    const out = matrix(W.rows, W.columns, W.data.slice());
    for (const unit of directions) {
      const along = new Float64Array(W.columns);
      for (let i = 0; i < W.rows; i++) row(W, i).forEach((value, j) => { along[j] += unit[i] * value; });
      for (let i = 0; i < W.rows; i++) along.forEach((value, j) => { out.data[i * W.columns + j] -= unit[i] * value; });
    }
    return out;
  }
  const scaledRows = (W, gain) => (gain ? each(W, (value, at) => value * gain[Math.floor(at / W.columns)]) : W);

  // Pictures: root mean squares of blocks, as digits of 16; f is the largest
  function blocks(length, most) {
    const count = Math.min(length, most);
    const [small, more] = [Math.floor(length / count), length % count];
    return [...Array(count).keys()].map((i) => [i * small + Math.min(i, more), (i + 1) * small + Math.min(i + 1, more)]);
  }
  function picture(W, columns) {
    const sizes = blocks(W.rows, PICTURE.rows).map(([top, bottom]) => blocks(W.columns, columns).map(([left, right]) => {
      let squares = 0;
      for (let i = top; i < bottom; i++) for (let j = left; j < right; j++) squares += W.data[i * W.columns + j] ** 2;
      return Math.sqrt(squares / ((bottom - top) * (right - left)));
    }));
    const most = Math.max(...sizes.flat()) || 1;
    return sizes.map((line) => line.map((size) => Math.round((15 * size) / most).toString(16)).join(""));
  }

  // exp of the entropy of σ/Σσ
  function effectiveRank(values) {
    const total = values.reduce((a, b) => a + b, 0);
    return total ? Math.exp(values.reduce((sum, value) => (value ? sum - (value / total) * Math.log(value / total) : sum), 0)) : 0;
  }
  // ‖½(W + Wᵀ)‖²/‖W‖² of W = q kᵀ
  function symmetricShare(q, k, values) {
    const turned = times(transposed(k), q);
    let trace = 0;
    for (let i = 0; i < turned.rows; i++) for (let j = 0; j < turned.columns; j++) trace += turned.data[i * turned.columns + j] * turned.data[j * turned.columns + i];
    return (1 + trace / (dot(values, values) || 1)) / 2;
  }
  // What two maps read: the mean squared cosine of their principal angles, over chance and as an excess
  function overlap(q, k, d) {
    const [one, other] = [q, k].map((W) => changes.orthonormal(W));
    const shared = one.reduce((sum, a) => sum + other.reduce((own, b) => own + dot(a, b) ** 2, 0), 0);
    const [few, many] = [one.length, other.length].map((rank) => Math.min(rank, d)).sort((a, b) => a - b);
    const chance = many / d;
    const found = Math.min(shared, few) / few;
    return { qk_times_chance: found / chance, qk_excess: chance < 1 ? (found - chance) / (1 - chance) : null };
  }

  // The largest singular directions of A B with the tokens nearest to both ends, each followed by its opposite
  function* directions(form, A, B, reads, writes) {
    const { U, values } = changes.singular(A, B);
    for (let number = 0; number < Math.min(DIRECTIONS, values.length); number++) {
      for (const sign of [1, -1]) {
        const left = matrix(1, A.rows, Float32Array.from({ length: A.rows }, (_, i) => sign * U.data[i * U.columns + number]));
        const right = each(times(times(left, A), B), (value) => value / (values[number] || 1));
        yield { form, number, value: values[number], reads: reads(left), writes: writes(right) };
      }
    }
  }
  // The tokens of largest scores; `answers` knows the tokenizers
  const nearest = (scores, tokenizer) => engine.largest(scores.subarray(0, tokenizer.tokens.length), NEAREST).map((id) => tokenizer.shown(id));
  function nearestTo(table, tokenizer) {
    const lengths = Float32Array.from({ length: table.rows }, (_, i) => Math.max(1e-9, Math.sqrt(dot(row(table, i), row(table, i)))));
    return (direction) => nearest(Float32Array.from(lengths, (size, i) => dot(row(table, i), row(direction, 0)) / size), tokenizer);
  }
  // What a direction of the stream adds to the logits, through the last norm
  function written({ finalNorm, output, table }, tokenizer) {
    const nothing = row(normalised(matrix(1, table.columns), finalNorm), 0);
    return (direction) => {
      const moved = row(normalised(direction, finalNorm), 0).map((value, i) => value - nothing[i]);
      const to = output ?? table;
      return nearest(Float32Array.from({ length: to.rows }, (_, i) => dot(row(to, i), moved)), tokenizer);
    };
  }

  // The record of a head; `chance` has the mean spectra of random forms by their widths.
  function head(model, layer, number, { source, target, chance }) {
    const maps = { q: layer.W_Q[number], k: layer.W_K[number], v: layer.W_V[number], o: transposed(layer.W_O[number]) };
    const d = layer.d_model;
    const { x, memory, isPre } = normsBefore(model, layer);
    const read = { q: without(maps.q, constantDirections(x, d)), k: without(maps.k, constantDirections(memory, d)), v: without(maps.v, constantDirections(memory, d)) };
    const mean = new Float64Array(d).fill(d ** -0.5);
    const o = x?.centred ? without(maps.o, [mean]) : maps.o;
    const spectra = { qk: changes.singular(read.q, transposed(read.k)).values, ov: changes.singular(read.v, transposed(o)).values };
    const isCross = layer.kind === "cross";
    const isProduct = !layer.additive && !layer.q_norm && !layer.k_norm; // of q and k, without anything between them
    const isOneMap = maps.q.data.length === maps.k.data.length && maps.q.data.every((value, i) => value === maps.k.data[i]);
    const figures = {
      qk_effective_rank: effectiveRank(spectra.qk), ov_effective_rank: effectiveRank(spectra.ov),
      ...(isCross ? {} : { qk_symmetric_share: symmetricShare(read.q, read.k, spectra.qk), ...(isOneMap ? {} : overlap(read.q, read.k, d - constantDirections(x, d).length)) }),
    };
    // Directions are of maps that read the normalised stream.
    const reading = (W, norm) => (isPre && norm ? without(scaledRows(W, norm.weight), norm.centred ? [mean] : []) : W);
    const canFold = isPre && x && memory && !layer.additive;
    const [q, k, v] = [["q", x], ["k", memory], ["v", memory]].map(([side, norm]) => (canFold ? reading(maps[side], norm) : maps[side]));
    const stack = source ? layer.name.split(".")[0] : "decoder";
    const half = (name) => nearestTo(model.stacks[name].table, name === "encoder" ? source : target);
    const own = !source ? Object.keys(model.stacks)[0] : isCross ? "decoder" : stack;
    const asks = half(own);
    const isAsked = isCross ? half("encoder") : asks;
    const writes = stack === "encoder" && source ? () => [] : written(model.decoder, target);
    return {
      about: [`d_model ${d}, d_k ${maps.q.columns}, d_v ${maps.v.columns}`, ...(layer.additive ? ["scores that are no product of queries and keys"] : [])],
      pictures: {
        q: picture(maps.q, PICTURE.columns), k: picture(maps.k, PICTURE.columns), v: picture(maps.v, PICTURE.columns),
        qk: picture(times(maps.q, transposed(maps.k)), PICTURE.rows), ov: picture(times(maps.v, transposed(maps.o)), PICTURE.rows),
      },
      spectra, figures,
      chance: { qk: chance[maps.q.columns] ?? [], ov: chance[maps.v.columns] ?? [] },
      directions: [...(isProduct ? directions("qk", q, transposed(k), asks, isAsked) : []), ...directions("ov", v, transposed(maps.o), isAsked, writes)],
    };
  }

  return { head };
})();
