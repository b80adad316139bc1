"""Steps of one row of attention, from query and keys to the effect on the next token."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from triptych.core.algebra.forms import at_least_float32
from triptych.core.algebra.function import channels
from triptych.core.attention import (
    for_heads,
    steps_on,
)
from triptych.core.models import AnyModel, Block, attention_sites
from triptych.errors import UsageError
from triptych.printable import shortened, table_html
from triptych.running.opening import LayerCall, Reader, TextIds
from triptych.seeing.reports.html import write_report
from triptych.seeing.reports.records import (
    Report,
    Table,
)

_token = partial(shortened, most=20)
_MOST_TOKENS_CHANGED = 8


@final
class LabelledTensor(Tensor):
    """A tensor with a token label per row. Results of operations are plain tensors.

    Attributes:
        tokens: token of each row.
    """

    tokens: tuple[str, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, value: Tensor, tokens: tuple[str, ...]) -> "LabelledTensor":
        """Label the rows of a tensor."""
        found = value.detach().as_subclass(cls)
        found.tokens = tokens
        return found

    def top(self, k: int) -> list[tuple[str, float]]:
        """Return the tokens of the k largest rows: by value, or by norm if rows are vectors."""
        sizes = (
            self.flatten(1).norm(dim=1)
            if self.ndim > 1
            else self.detach().as_subclass(Tensor)
        )
        found = at_least_float32(sizes).topk(min(k, len(self.tokens)))
        return [
            (self.tokens[i], size)
            for size, i in zip(
                found.values.tolist(), found.indices.tolist(), strict=True
            )
        ]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        what = "largest" if self.ndim == 1 else "longest"
        shown = ", ".join(f"{_token(token)} {size:.3g}" for token, size in self.top(4))
        return f"LabelledTensor {list(self.shape)} of {len(self.tokens)} tokens; {what}: {shown}"

    def _repr_html_(self) -> str:
        return table_html(
            f"{list(self.shape)}",
            [(_token(token), f"{size:.4g}") for token, size in self.top(12)],
        )


@final
@dataclass(frozen=True, eq=False)
class DirectEffect:
    """Direct effect of one head's output at one token on the logits of this token.

    The outputs of all other attention and feed-forward layers are fixed; the stream, its norms, the final
    norm and the output table are recomputed without the head's output.

    Attributes:
        logits: change of the logits, with the head minus without, `[vocab]`.
        probabilities: change of the probabilities, `[vocab]`.
        after: probabilities with the head, `[vocab]`.
        pieces: function from ids to readable tokens.
    """

    logits: Float[Tensor, " vocab"]
    probabilities: Float[Tensor, " vocab"]
    after: Float[Tensor, " vocab"]
    pieces: Any

    def top(self, k: int, *, lowered: bool = False) -> list[tuple[str, float, float]]:
        """Return tokens made more (or less) probable by the head, with changes of logit and probability."""
        found = self.probabilities.topk(
            min(k, len(self.logits)), largest=not lowered
        ).indices.tolist()
        return [
            (token, float(self.logits[i]), float(self.probabilities[i]))
            for i, token in zip(found, self.pieces(found), strict=True)
        ]

    def __repr__(self) -> str:
        raised = ", ".join(
            f"{_token(token)} {change:+.3f}" for token, change, _ in self.top(4)
        )
        lowered = ", ".join(
            f"{_token(token)} {change:+.3f}"
            for token, change, _ in self.top(4, lowered=True)
        )
        return f"DirectEffect on {len(self.logits):,} logits\n  raises {raised}\n  lowers {lowered}"


@final
class HeadSteps:
    """One row of a head's attention with all intermediate values; values of keys are labelled by tokens.

    Values are steps of `softmax(scale · q kᵀ + bias) V W_O` in the dtype of the model. Steps absent from the
    layer are None.

    Attributes:
        place: name of the head: `3.2`, `cross.3.2`.
        query: number of the query token; `token` is its text.
        keys: key tokens.
        q: query after norms and rotation, `[d_k]`.
        k: keys after norms and rotation, `[keys, d_k]`.
        v: values, `[keys, d_v]`.
        content: dot products before the rotation of queries and keys, `[keys]`; None without rotation.
        products: `q kᵀ`, `[keys]`; for other scores, the raw score of the query and each key.
        scaled: products times the scale, `[keys]`.
        biased: scaled products plus the position bias, `[keys]`; None without a position bias.
        scores: scores after the soft cap, the input of the softmax, `[keys]`.
        visible: mask of visible keys, `[keys]`.
        weights: softmax over visible keys and the sink, `[keys]`.
        sink: weight of the sink; None without a sink.
        gate: factor of the mixed values, `[1]`, or per channel, `[d_v]`; None without a gate.
        shares: contribution of each key, its weight times its value (times the gate), `[keys, d_v]`.
        z: sum of `shares`, the input of W_O, `[d_v]`.
        projected: `z W_O`, `[d_model]`.
        output: the head's addition to the residual stream, `[d_model]`: `projected`, or its share of the
            result if a norm or a multiplier follows the layer.
        layer_projected: `z W_O` of all heads, plus the output bias, `[d_model]`.
    """

    def __init__(
        self,
        reader: Reader,
        text: TextIds,
        call: LayerCall,
        number: int,
        head: int,
        query: int,
        tokens: tuple[tuple[str, ...], tuple[str, ...]],
        place: str,
        outputs: "LayerOutputs",
    ) -> None:
        """Compute the steps of the `number`-th call of its kind; use `Attention.steps`."""
        self.model = reader.name
        self.place = f"{place}.{head}"
        queries, self.keys = tokens
        if not -len(queries) <= query < len(queries):
            raise UsageError(
                f"there is no token {query}: the text has 0 to {len(queries) - 1}"
            )
        self.query = query = query % len(queries)
        self.token = queries[query]
        self._reader = reader
        self._text = text
        self._outputs = outputs
        self._kind = call.kind
        self._number = number
        with torch.no_grad():
            self._compute(call, head)

    def _compute(self, call: LayerCall, head: int) -> None:
        steps = call.steps(self.query)
        weights = call.layer.weights()
        semantics = self._semantics = weights.semantics
        self.q = steps.q[0, head, 0]
        self.k, self.v = (
            self._labelled(steps.k[0, head]),
            self._labelled(steps.v[0, head]),
        )
        of_row = (0, head, 0)
        # Content exists only if positions change queries or keys.
        self.content = None
        turned = any(
            step.by_position
            for step in (*steps_on("q", semantics), *steps_on("k", semantics))
        )
        if turned and semantics.scores is None:
            q, k, _ = channels(weights, call.x, call.memory)
            self.content = self._labelled(
                for_heads(k, weights.num_heads)[0, head] @ q[0, head, self.query]
            )
        self.products = self._labelled(steps.products[of_row])
        self.scaled = self._labelled(steps.scaled[of_row])
        self.biased = (
            None if semantics.bias is None else self._labelled(steps.biased[of_row])
        )
        self.scores = self._labelled(steps.scores[of_row])
        visible: Bool[Tensor, "batch heads queries keys"] = steps.visible.expand_as(
            steps.scores
        )
        self.visible = self._labelled(visible[of_row])
        self.weights = self._labelled(steps.weights[of_row])
        self.sink = None if semantics.sinks is None else 1 - float(self.weights.sum())
        self.gate = None if steps.gate is None else steps.gate[of_row]
        shares = self.weights[:, None] * self.v
        self.shares = self._labelled(
            shares if self.gate is None else shares * self.gate
        )
        self.z = steps.z[of_row]
        self.projected = self.z @ weights.W_O[head].to(self.z)
        self.layer_projected = steps.output[0, 0]
        self.output = call.site.residual.part_added(
            self.projected, self.layer_projected
        )

    def _labelled(self, value: Tensor) -> LabelledTensor:
        return LabelledTensor.of(value, self.keys)

    @cached_property
    def effect(self) -> DirectEffect | None:
        """Direct effect on the logits of this token; None if the stack does not lead to logits.

        It is the effect through the final norm and the output table, not through later layers.
        """
        model = self._reader.model
        if self._kind == "encoder" and self._text.source is not None:
            return None  # the memory reaches the logits through cross-attention alone
        *_, stack = model.stacks.values()
        if stack.head is None or stack.head.config.outputs not in (
            None,
            stack.vocab_size,
        ):
            return None
        with torch.no_grad():
            with_head, without = self._direct_logits()
        after = with_head.softmax(dim=-1)
        change = after - without.softmax(dim=-1)
        return DirectEffect(
            with_head - without, change, after, self._reader.tokenizer.pieces
        )

    def _direct_logits(self) -> tuple[Tensor, Tensor]:
        """Return the logits of this token with and without the head, with all other layers' outputs fixed."""
        outputs = self._outputs
        place = outputs.calls(self._kind)[self._number]
        less = outputs.made[place].output.clone()
        less[:, self.query] -= self.projected
        without = outputs.replayed({place: outputs.made[place]._replace(output=less)})
        return self._logits(outputs.hidden), self._logits(without)

    def _logits(self, hidden: Tensor) -> Tensor:
        return at_least_float32(self._reader.logits(hidden[0, self.query]))

    def table(self, most: int | None = None) -> Table:
        """Return a row for each visible key, with a column for each step.

        With more than `most` visible keys, keys of the largest weights are shown.
        """
        columns: list[tuple[str, Tensor]] = []
        if self.content is not None:
            columns.append(("q·k", self.content))
        if self._semantics.scores is None:
            columns.append(
                ("q·k" if self.content is None else "with positions", self.products)
            )
            columns.append((f"× {self._semantics.scale:.4g}", self.scaled))
        else:
            columns.append(("score", self.products))
        if self.biased is not None:
            columns.append(("with bias", self.biased))
        if self._semantics.soft_cap is not None:
            columns.append((f"capped at {self._semantics.soft_cap:g}", self.scores))
        columns += [("weight", self.weights), ("share of output", self.share_of_output)]
        seen = self.visible.nonzero()[:, 0].tolist()
        # The largest weights, in the order of keys.
        kept = seen
        if most is not None and len(seen) > most:
            kept = sorted(sorted(seen, key=lambda i: -float(self.weights[i]))[:most])
        rows = tuple(
            (
                str(i),
                _token(self.keys[i]),
                *(f"{float(values[i]):z.3f}" for _, values in columns),
            )
            for i in kept
        )
        hidden = len(self.keys) - len(seen)
        masked = f", {hidden} are masked" if hidden else ""
        caption = f"{len(seen)} of {len(self.keys)} keys are seen{masked}"
        caption += (
            f"; the {len(kept)} with the largest weights are shown."
            if len(kept) < len(seen)
            else "."
        )
        names = ("", "key", *(name for name, _ in columns))
        return Table(
            f'Head {self.place} at token {self.query}, "{_token(self.token)}"',
            names,
            rows,
            caption,
            (0, *range(2, len(names))),
        )

    @property
    def share_of_output(self) -> Float[Tensor, " keys"]:
        """Share of each key in the head's mixed values, along their direction; shares sum to 1."""
        z = at_least_float32(self.z)
        return at_least_float32(self.shares) @ z / z.square().sum().clamp(min=1e-30)

    def facts(self) -> list[tuple[str, str]]:
        """Return names and values of the steps without a key axis."""
        found = [
            (
                "query",
                f'token {self.query}, "{_token(self.token)}": q has length {_length(self.q)}',
            )
        ]
        if self.sink is not None:
            found.append(("weight on the sink", f"{self.sink:.3f}"))
        if self.gate is not None:
            of = "gate" if len(self.gate) == 1 else f"mean of {len(self.gate)} gates"
            found.append((of, f"{float(self.gate.mean()):.3f}"))
        found.append(("mixed values z", f"length {_length(self.z)}"))
        whole = at_least_float32(self.layer_projected)
        share = float(at_least_float32(self.projected) @ whole) / max(
            float(whole.square().sum()), 1e-30
        )
        found.append(
            ("z W_O", f"length {_length(self.projected)}, {share:.0%} of the layer's")
        )
        found.append(("added to the residual stream", f"length {_length(self.output)}"))
        return found

    def tables(self, most: int | None = None) -> list[Table]:
        """Return tables of the row of keys, the facts, and the direct effect on the next token."""
        found = [
            self.table(most),
            Table("What the head makes of it", ("step", ""), tuple(self.facts())),
        ]
        if self.effect is None:
            return found
        # Most raised tokens first, then most lowered.
        half = _MOST_TOKENS_CHANGED // 2
        tokens = (*self.effect.top(half), *self.effect.top(half, lowered=True))
        rows = [
            (_token(token), f"{logit:+.4f}", f"{probability:+.5f}")
            for token, logit, probability in tokens
        ]
        found.append(
            Table(
                "Direct effect on the next token",
                ("token", "logit", "probability"),
                tuple(rows),
                "Through the final norm and the output table, all other layers' outputs held as they were.",
                (1, 2),
            )
        )
        return found

    def record(self) -> dict[str, Any]:
        """Return all values as a JSON object."""
        names = (
            "q",
            "k",
            "v",
            "content",
            "products",
            "scaled",
            "biased",
            "scores",
            "visible",
            "weights",
        )
        values = {
            name: getattr(self, name)
            for name in (*names, "gate", "shares", "z", "projected", "output")
        }
        effect = self.effect
        return {
            "model": self.model,
            "head": self.place,
            "query": self.query,
            "token": self.token,
            "keys": list(self.keys),
            "scale": self._semantics.scale,
            "soft_cap": self._semantics.soft_cap,
            "sink": self.sink,
            **{
                name: None if value is None else value.tolist()
                for name, value in values.items()
            },
            "direct_effect": None
            if effect is None
            else {
                way: [
                    dict(zip(("token", "logit", "probability"), one, strict=True))
                    for one in changed
                ]
                for way, changed in (
                    ("raises", effect.top(8)),
                    ("lowers", effect.top(8, lowered=True)),
                )
            },
        }

    def page(self, path: str | Path) -> None:
        """Write the steps as one offline HTML page."""
        facts = (("model", self.model), ("keys", f"{len(self.keys):,}"))
        report = Report(
            f"One row of head {self.place}", facts=facts, tables=(*self.tables(),)
        )
        write_report(report, Path(path))

    def __repr__(self) -> str:
        d_k = len(self.q)
        d_v = len(self.z)
        keys = len(self.keys)
        largest = ", ".join(
            f"{_token(token)} {weight:.3f}" for token, weight in self.weights.top(4)
        )
        parts = [
            name
            for name in ("content", "biased", "sink", "gate")
            if getattr(self, name) is not None
        ]
        return "\n".join(
            (
                f'Steps of head {self.place} of {self.model} at token {self.query}, "{_token(self.token)}"',
                f"  q [{d_k}]  k [{keys}, {d_k}]  v [{keys}, {d_v}]",
                f"  products, scaled, scores, weights [{keys}]",
                f"  {int(self.visible.sum())} of {keys} keys are seen; largest weights: {largest}",
                f"  shares [{keys}, {d_v}]  z [{d_v}]  projected, output [{len(self.output)}]",
                *([f"  also: {', '.join(parts)}"] if parts else []),
                "  effect: the direct effect on the next token; page(path), tables()",
            )
        )

    def _repr_html_(self) -> str:
        table = self.table(24)
        own = table_html(table.title, table.rows, table.columns)
        return own + table_html("What the head makes of it", self.facts())


@final
class LayerOutputs:
    """The outputs of all attention and feed-forward layers on a text, computed on first use and kept.

    Attributes:
        hidden: residual stream after the final norm, `[1, length, d_model]`.
        made: results of the layers, in execution order.
    """

    def __init__(self, reader: Reader, text: TextIds) -> None:
        self._reader = reader
        self._text = text

    def calls(self, kind: str) -> list[int]:
        """Return the indices in `made` of the attention layers of a stack."""
        model = self._reader.model
        own = {id(site.layer) for site in attention_sites(model) if site.stack == kind}
        return [
            place for place, layer in enumerate(self._recorded[1]) if id(layer) in own
        ]

    @property
    def hidden(self) -> Tensor:
        return self._recorded[0]

    @property
    def made(self) -> list[Any]:
        return self._recorded[2]

    @cached_property
    def _recorded(self) -> tuple[Tensor, list[nn.Module], list[Any]]:
        layers = list[nn.Module]()
        made = list[Any]()

        def keep(module: nn.Module, given: Any, result: Any) -> None:
            layers.append(module)
            made.append(result)

        with ExitStack() as stack, torch.no_grad():
            for layer in _sublayers(self._reader.model):
                stack.callback(layer.register_forward_hook(keep).remove)
            return self._reader.run([self._text]).hidden, layers, made

    def replayed(self, changed: Mapping[int, Any]) -> Tensor:
        """Return `hidden` with some of the results replaced; the layers themselves are not run again."""
        held = (changed.get(place, result) for place, result in enumerate(self.made))
        with ExitStack() as stack, torch.no_grad():
            for layer in _sublayers(self._reader.model):
                vars(layer)["forward"] = lambda *given, **more: next(held)
                stack.callback(vars(layer).pop, "forward")
            return self._reader.run([self._text]).hidden


def _sublayers(model: AnyModel) -> list[nn.Module]:
    """Return all attention and feed-forward layers, without duplicates."""
    found: list[nn.Module] = []
    for block in model.modules():
        if isinstance(block, Block):
            cross = [block.cross_attention] if block.has_cross else []
            found += [block.self_attention, *cross, block.feed_forward]
    return list(dict.fromkeys(found))


def _length(vector: Tensor) -> str:
    return f"{float(at_least_float32(vector).norm()):.3f}"
