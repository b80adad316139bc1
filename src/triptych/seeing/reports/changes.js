// What a switch does to a model of `engine`. A change gets a copy of the model, whose layers it may write to.
const changes = (() => {
  "use strict";
  const { matrix, row, dot, each, times, transposed } = engine;

  function identity(size) {
    const out = matrix(size, size);
    for (let i = 0; i < size; i++) out.data[i * size + i] = 1;
    return out;
  }

  // The left singular vectors of A B, the largest first, and the singular values: one-sided Jacobi on A Rᵀ, where
  // Bᵀ = Q R. Each pair of columns is turned until it is orthogonal.
  function singular(A, B) {
    const { R } = factored(transposed(B));
    const columns = [];
    for (let j = 0; j < R.rows; j++) {
      columns.push(Float64Array.from({ length: A.rows }, (_, i) => dot(row(A, i), row(R, j))));
    }
    for (let sweep = 0, turned = true; turned && sweep < 60; sweep++) {
      turned = false;
      for (let p = 0; p < columns.length; p++) {
        for (let q = p + 1; q < columns.length; q++) {
          const [a, b] = [columns[p], columns[q]];
          const [aa, bb, ab] = [dot(a, a), dot(b, b), dot(a, b)];
          if (Math.abs(ab) <= 1e-12 * Math.sqrt(aa * bb)) continue;
          turned = true;
          const zeta = (bb - aa) / (2 * ab);
          const tangent = (zeta < 0 ? -1 : 1) / (Math.abs(zeta) + Math.sqrt(1 + zeta * zeta));
          const cosine = 1 / Math.sqrt(1 + tangent * tangent);
          const sine = cosine * tangent;
          for (let i = 0; i < a.length; i++) [a[i], b[i]] = [cosine * a[i] - sine * b[i], sine * a[i] + cosine * b[i]];
        }
      }
    }
    const sized = columns.map((column) => [Math.sqrt(dot(column, column)), column]).sort((a, b) => b[0] - a[0]);
    const U = matrix(A.rows, sized.length);
    sized.forEach(([size, column], j) => column.forEach((value, i) => { U.data[i * U.columns + j] = size ? value / size : 0; }));
    return { U, values: sized.map(([size]) => size) };
  }

  // Q (as a list of columns) and R of X = Q R, by Gram and Schmidt, twice for each column
  function factored(X) {
    const Q = [];
    const R = matrix(X.columns, X.columns);
    for (let j = 0; j < X.columns; j++) {
      const column = Float64Array.from({ length: X.rows }, (_, i) => X.data[i * X.columns + j]);
      for (let again = 0; again < 2; again++) {
        Q.forEach((unit, i) => {
          const along = dot(unit, column);
          R.data[i * R.columns + j] += along;
          for (let k = 0; k < column.length; k++) column[k] -= along * unit[k];
        });
      }
      const size = Math.sqrt(dot(column, column));
      R.data[j * R.columns + j] = size;
      Q.push(column.map((value) => (size > 1e-12 ? value / size : 0)));
    }
    return { Q, R };
  }
  // Orthonormal vectors that span the columns of X
  function orthonormal(X) {
    const { Q, R } = factored(X);
    const sizes = Q.map((_, i) => R.data[i * R.columns + i]);
    return Q.filter((_, i) => sizes[i] > 1e-5 * Math.max(...sizes));
  }

  // U_r U_rᵀ W: the part of a map that the first r singular vectors of the form W B reach
  function truncated(W, B, rank) {
    const { U } = singular(W, B);
    const kept = matrix(U.rows, rank);
    for (let i = 0; i < U.rows; i++) kept.data.set(row(U, i).subarray(0, rank), i * rank);
    return times(kept, times(transposed(kept), W));
  }

  // Heads by name; the name of a layer means all of its heads.
  const eachHead = (model, places) => places.split(/\s+/).flatMap((place) => {
    const layer = model.layers.find(({ name }) => name === place);
    return layer ? layer.W_Q.map((_, head) => [layer, head]) : [model.place(place)];
  });
  const zero = (of) => matrix(of.rows, of.columns);
  const linear = (layer, what) => {
    const between = layer.rotary ? "the rotation of q and k by their positions" : layer.q_norm || layer.k_norm ? "a norm of q and k" : layer.additive ? "tanh" : "";
    if (between) throw new Error(`${what}: ${between} lies between W_Q and W_K, which have no one product`);
  };
  const whole = (text, most, call) => {
    if (!/^\d+$/.test(text) || text < 1 || text > most) throw new Error(`${call}: the rank is a number from 1 to ${most}`);
    return Number(text);
  };
  const matricesOf = (maps) => new Set(maps).size; // heads of a group have one
  const alone = (layer, name, what) => {
    if (layer.shared?.[name]) throw new Error(`${what}: heads of the layer share ${name}, which cannot be changed for one of them`);
  };
  const known = {
    ablate(model, heads) {
      for (const [layer, head] of eachHead(model, heads)) layer.W_O[head] = zero(layer.W_O[head]);
    },
    even(model, heads) {
      for (const [layer, head] of eachHead(model, heads)) layer.edits.push((steps) => { steps[head].scores = zero(steps[head].scores); });
    },
    unscaled(model, heads) {
      for (const [layer, head] of eachHead(model, heads)) {
        if (layer.additive) throw new Error(`head ${heads}: its scores are no scaled products, so there is no scale to leave out`);
        layer.factors[head] /= layer.scale;
      }
    },
    // One softmax of the queries and keys of all heads: the mean of the scores, times √heads
    one_head(model, name) {
      model.layer(name).edits.push((steps) => {
        const joined = each(steps[0].scores, (_, i) => steps.reduce((sum, { scores }) => sum + scores.data[i], 0) / Math.sqrt(steps.length));
        steps.forEach((step) => { step.scores = joined; });
      });
    },
    tie(model, name, map, to) {
      for (const layer of name === "*" ? model.layers : [model.layer(name)]) {
        if (layer.kind === "cross" && [map, to].includes("W_Q")) throw new Error(`${map} and ${to} cannot be tied: in cross-attention queries read the decoder's stream, keys and values the encoder's output`);
        if (![map, to].every((one) => ["W_Q", "W_K", "W_V"].includes(one))) throw new Error(`tie(${name}, ${map}, ${to}): give two of W_Q, W_K and W_V`);
        if (layer[map][0].columns !== layer[to][0].columns) throw new Error(`${map} cannot be tied to ${to}: their heads are ${layer[map][0].columns} and ${layer[to][0].columns} channels wide`);
        if (matricesOf(layer[map]) !== matricesOf(layer[to])) throw new Error(`${map} cannot be tied to ${to} in layer ${layer.name}: it has ${matricesOf(layer[map])} matrices, and ${to} has ${matricesOf(layer[to])}`);
        layer[map] = [...layer[to]];
        layer[map.replace("W", "b")] = layer[to.replace("W", "b")];
      }
    },
    truncate(model, place, rank) {
      const [layer, head] = model.place(place);
      linear(layer, `the rank of W_QK of ${place}`);
      alone(layer, "W_Q", `the rank of W_QK of ${place}`);
      const r = whole(rank, layer.W_Q[head].columns, `truncate(${place}, ${rank})`);
      layer.W_Q[head] = truncated(layer.W_Q[head], transposed(layer.W_K[head]), r);
    },
    truncate_ov(model, place, rank) {
      const [layer, head] = model.place(place);
      alone(layer, "W_V", `the rank of W_OV of ${place}`);
      const r = whole(rank, layer.W_V[head].columns, `truncate_ov(${place}, ${rank})`);
      layer.W_V[head] = truncated(layer.W_V[head], layer.W_O[head], r);
    },
    exchange(model, one, other) {
      const [[a, i], [b, j]] = [model.place(one), model.place(other)];
      for (const name of ["W_Q", "W_K", "W_V", "W_O"]) {
        alone(a, name, `${one} and ${other} exchanged`);
        alone(b, name, `${one} and ${other} exchanged`);
        const [left, right] = [a[name][i], b[name][j]];
        if (left.rows !== right.rows || left.columns !== right.columns) throw new Error(`${name} of ${one} and ${other} have different sizes`);
        [a[name][i], b[name][j]] = [right, left];
      }
    },
    without_positions(model) {
      const stacks = Object.values(model.stacks);
      if (!stacks.some((stack) => stack.positions) && !model.layers.some((layer) => layer.rotary || layer.slopes)) throw new Error("the model has no positions to leave out");
      for (const stack of stacks) stack.positions = null;
      for (const layer of model.layers) layer.rotary = layer.slopes = null;
    },
    // W_Q W_Kᵀ in the place of W_Q; the keys are then their stream itself. b_K adds the same to all scores of a query.
    fold(model) {
      for (const layer of model.layers) {
        linear(layer, `fold at ${layer.name}`);
        const keys = layer.W_K.map(transposed);
        layer.b_Q = layer.b_Q && layer.b_Q.map((bias, h) => row(times(matrix(1, bias.length, bias), keys[h]), 0));
        layer.W_Q = layer.W_Q.map((W_Q, h) => times(W_Q, keys[h]));
        layer.W_K = layer.W_K.map((W_K) => identity(W_K.rows));
        layer.b_K = null;
      }
    },
  };

  // The model after calls such as "ablate(cross.0.2)" or "tie(0, W_Q, W_K)", in their order
  function changed(model, calls) {
    const copy = model.copied();
    for (const call of calls) {
      const [, name, given] = call.match(/^(\w+)\((.*)\)$/) ?? [];
      if (!Object.hasOwn(known, name)) throw new Error(`what if ${call}: write one of ${Object.keys(known).join(", ")}`);
      known[name](copy, ...given.split(",").map((one) => one.trim()));
    }
    return copy;
  }

  return { changed, singular, orthonormal };
})();
