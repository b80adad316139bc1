"""Answers for the page at `/`: a model's computation of attention, and the effects of changes.

Every answer is a record of `Model.attend`, `steps`, `run` or `inspect`, and every what-if is a change of
`Model`. The page is `seeing/reports/explore.html`.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.heads import Head, Layer, RotaryForm
from triptych.core.models import attention_sites
from triptych.errors import TriptychError, UsageError
from triptych.model import Model
from triptych.running.run import Run
from triptych.seeing.attending import (
    FOLD,
    PYTHON_OF,
    Attention,
    HeadNote,
    HeldOutText,
    OutputTable,
    OverText,
    readable,
    viewer_data,
)
from triptych.seeing.inspection import random_spectra

# Numbers of cached changed models, with their engines, and of cached results for texts.
_MOST_MODELS = 4
_MOST_TEXTS = 16
# Number of cached losses of parts of the held-out text.
_MOST_PARTS = 4096
_MOST_KEYS = 32
_MOST_NEXT = 8
_NUM_ALTERNATIVES = 4
_DIRECTIONS = 6
_NEAREST = 6
# Maximum number of entries of an embedding table in float32 at a time.
_ENTRIES_AT_A_TIME = 1 << 18
_CALL = re.compile(r"(\w+)\(([^()]*)\)")
# Rewrites without options that keep the function.
_EXACT = ("fold_value_bias", "drop_key_bias", "fold_norm", "gauge_fix")


def _head(model: Model, place: str) -> Head:
    found = model[place]
    if not isinstance(found, Head):
        raise UsageError(f"{place} is a layer: give a head, as {place}.0")
    return found


def _layer(model: Model, place: str) -> Layer:
    found = model[place]
    if not isinstance(found, Layer):
        raise UsageError(f"{place} is a head: give a layer")
    return found


def _unscaled(model: Model, place: str) -> Model:
    semantics = _head(model, place).layer.outline.semantics
    if semantics.scores is not None:
        raise UsageError(
            f"head {place}: its scores are no scaled products, so there is no scale to leave out"
        )
    return model.edit(place, "q", lambda q: q / semantics.scale)


def _summed_scores(scores: Tensor) -> Tensor:
    """Sum scores over heads, the scores of one joint head: `[batch, heads, queries, keys]`."""
    joined: Tensor = scores.sum(dim=1, keepdim=True) / scores.shape[1] ** 0.5
    return joined.expand_as(scores)


def _rank(place: str, rank: str, most: int) -> int:
    if not rank.isdecimal() or not 0 < int(rank) <= most:
        raise UsageError(
            f"truncate({place}, {rank}): the rank is a number from 1 to {most}"
        )
    return int(rank)


def _truncated(model: Model, place: str, rank: str) -> Model:
    head = _head(model, place)
    most = _rank(place, rank, head.d_k)
    U = head.qk.svd().U[:, :most]
    return model.replace(place, W_Q=U @ (U.mT @ head.W_Q.to(U)))


def _truncated_values(model: Model, place: str, rank: str) -> Model:
    head = _head(model, place)
    most = _rank(place, rank, head.d_v)
    U = head.ov.svd().U[:, :most]
    return model.replace(place, W_V=U @ (U.mT @ head.W_V.to(U)))


def _exchanged(model: Model, one: str, other: str) -> Model:
    maps = [_maps_of(_head(model, place)) for place in (other, one)]
    return model.replace(one, **maps[0]).replace(other, **maps[1])


def _maps_of(head: Head) -> dict[str, Tensor]:
    return {"W_Q": head.W_Q, "W_K": head.W_K, "W_V": head.W_V, "W_O": head.W_O}


def _rewritten(model: Model, name: str) -> Model:
    if name not in _EXACT:
        raise UsageError(f"rewrite({name}) is not one of {', '.join(_EXACT)}")
    return model.rewrite(name, compare=False)


# Changes offered by the page, as functions of the model; `PYTHON_OF` has the same calls in Python.
WHAT_IFS: dict[str, Callable[..., Model]] = {
    "ablate": lambda model, heads: model.ablate(heads),
    "even": lambda model, heads: model.edit(heads, "scores", torch.zeros_like),
    "unscaled": _unscaled,
    "truncate": _truncated,
    "truncate_ov": _truncated_values,
    "tie": lambda model, layer, name, to: model.tie(layer, name, to),
    "one_head": lambda model, layer: model.edit(
        layer, "scores", _summed_scores, together=True
    ),
    "exchange": _exchanged,
    "without_positions": lambda model: model.without_positions(),
    "fold": lambda model: model.rewrite(FOLD, compare=False),
    "rewrite": _rewritten,
}


def change_model(model: Model, call: str) -> Model:
    """Return the model after a what-if, such as `tie(3, W_K, W_Q)` or `ablate(3.2 3.4)`."""
    # `bind` checks the number of arguments; the change itself checks their values.
    found = _CALL.fullmatch(call)
    if found is None or found[1] not in WHAT_IFS:
        raise UsageError(
            f"what if {call}: write one of {', '.join(WHAT_IFS)}, with a head or a layer"
        )
    apply = WHAT_IFS[found[1]]
    given = _split_arguments(found[2])
    try:
        inspect.signature(apply).bind(model, *given)
    except TypeError:
        raise UsageError(f"what if {call}: {found[1]} takes other arguments") from None
    return apply(model, *given)


def _split_arguments(given: str) -> list[str]:
    return [one.strip() for one in given.split(",")] if given.strip() else []


def _in_python(call: str) -> str:
    name, _, given = call.removesuffix(")").partition("(")
    return f"model = model{PYTHON_OF[name].format(*_split_arguments(given))}"


class Shown(NamedTuple):
    """Text on the page.

    Attributes:
        text: input of the model.
        target: translation, or continuation of a language model; may be "".
        changes: list of what-ifs in order.
    """

    text: str
    target: str = ""
    changes: tuple[str, ...] = ()


@final
class Explorer:
    """Answers for the page about one model, with a cache of changed models and of results for texts.

    Attributes:
        model: unchanged model.
        over: behaviour of the heads on a text, for the gallery; None to measure it on the displayed text.
        held_out: text for the effect of changes on the loss; None to omit it.
    """

    def __init__(
        self,
        model: Model,
        over: OverText | None = None,
        held_out: HeldOutText | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """Make an explorer of a model for texts of at most `most_tokens` tokens."""
        # Only the last results of each kind are kept.
        self.model = model
        self.over = over
        self.held_out = held_out
        self._most_tokens = most_tokens
        self._changed = lru_cache(_MOST_MODELS)(self._change)
        self._attention = lru_cache(_MOST_TEXTS)(self._attend)
        self._run = lru_cache(_MOST_TEXTS)(self._run_text)
        self._inspection = lru_cache(_MOST_TEXTS)(self._inspect)
        self._divergences = lru_cache(_MOST_TEXTS)(self._diverge)
        self._losses = lru_cache(_MOST_TEXTS)(self._read_losses)
        self._held_out_losses = lru_cache(_MOST_PARTS)(self._read_held_out)

    def forget(self) -> None:
        """Clear the cache."""
        kept_answers = (
            *(self._changed, self._attention, self._run, self._inspection),
            *(self._divergences, self._losses, self._held_out_losses),
        )
        for kept in kept_answers:
            kept.cache_clear()

    def _change(self, changes: tuple[str, ...]) -> Model:
        return (
            change_model(self._changed(changes[:-1]), changes[-1])
            if changes
            else self.model
        )

    @property
    def reads_pairs(self) -> bool:
        """True if the model is a translator, with a target for its decoder."""
        return self.model.reader.translates

    def _read(self, asked: Shown) -> tuple[str, str | None]:
        """Return text and target as arguments of `Model.attend`; a continuation is part of the text."""
        if self.reads_pairs:
            return asked.text, asked.target or None
        return asked.text + asked.target, None

    def _attend(self, asked: Shown) -> Attention:
        return self._changed(asked.changes).attend(
            *self._read(asked), max_tokens=self._most_tokens
        )

    def _run_text(self, asked: Shown) -> Run:
        text, target = self._read(asked)
        with torch.no_grad():
            model = self._changed(asked.changes)
            return model.run(text, target=target, max_tokens=self._most_tokens)

    def _inspect(self, changes: tuple[str, ...], layer: str) -> Any:
        """Return the measures of all heads of a layer; one head would need the same time."""
        model = self._changed(changes)
        stack, _, number = layer.rpartition(".")
        is_cross = model[layer].kind == "cross"
        return next(
            one
            for one in model.inspect(layers=[int(number)], ignore_rotary=True).layers
            if (one.kind == "cross") == is_cross
            and (not stack or stack in ("cross", one.stack))
        )

    def about(self) -> dict[str, Any]:
        """Describe the model for the controls of the page: layers, abilities, and the held-out text."""
        # Heads of a layer have equal sizes: the first head describes all.
        places = []
        for layer in self.model.layers:
            head = layer[0]
            sizes = {"d_model": layer.d_model, "d_k": head.d_k, "d_v": head.d_v}
            about = {
                "heads": layer.num_heads,
                "kv_heads": layer.num_kv_heads,
                "between": layer.between,
            }
            places.append({"name": layer.name, "kind": layer.kind, **sizes, **about})
        can = list(self.model.can)
        held_out = None
        if self.held_out is not None:
            held_out = {
                "name": self.held_out.name,
                "tokens": self.held_out.num_tokens,
                "parts": self.held_out.num_parts,
                "units": self.held_out.units,
            }
        return {
            "can": can,
            "pairs": self.reads_pairs,
            "layers": places,
            "exact": list(_EXACT),
            "held_out": held_out,
        }

    def compare(self, changes: tuple[str, ...], parts: int) -> dict[str, Any]:
        """Measure the effect of changes on the held-out loss, once all `parts` are computed.

        All parts can need more time than a request has. Parts are cached, so that a caller can request one
        more part at a time.
        """
        text = self.held_out
        if text is None:
            raise UsageError(
                "there is no held-out text: triptych explore MODEL --held-out FILE gives one"
            )
        # The changed and the unchanged model are read part by part.
        parts = min(max(1, parts), text.num_parts)
        losses = [
            [self._held_out_losses(which, part) for part in range(parts)]
            for which in ((), changes)
        ]
        if parts < text.num_parts:
            return {"parts": parts, "loss": None, "interval": None}
        before, after = (torch.stack(own).sum(dim=0) for own in losses)
        found = text.compared(before, after)
        return {
            "parts": parts,
            "loss": [found.before, found.after],
            "interval": found.interval,
        }

    def _read_held_out(self, changes: tuple[str, ...], part: int) -> Tensor:
        assert self.held_out is not None, "`compare` asks for it"
        return self.held_out.losses(self._changed(changes).reader, part)

    def write(self, text: str, changes: tuple[str, ...], count: int) -> dict[str, Any]:
        """Translate or continue a text; returns alternatives with scores."""
        # The list is empty if the model can neither translate nor generate.
        model = self._changed(changes)
        found: Sequence[Any] = ()
        if "translate" in self.model.can:
            # The page shows one pass of the model over the whole text.
            found = model.translate(
                text,
                num_best=_NUM_ALTERNATIVES,
                beam_size=_NUM_ALTERNATIVES,
                split=False,
            ).candidates
        elif "generate" in self.model.can:
            found = model.generate(
                text,
                max_new_tokens=count,
                num_samples=_NUM_ALTERNATIVES,
                beam_size=_NUM_ALTERNATIVES,
                generation_config="ignore",
            )
        return {
            "candidates": [
                {"text": one.text, "score": one.score, "tokens": [*one.pieces]}
                for one in found
            ],
            "python": "\n".join(map(_in_python, changes)),
        }

    def view(self, asked: Shown, *, measured: bool = False) -> dict[str, Any]:
        """Return all attention weights of the text for `seeing/reports/viewer.js`.

        `measured` adds notes on the behaviour of heads, measured on `self.over` if given, else on this text.
        """
        attention = self._attention(asked)
        data = viewer_data(
            attention.viewed(notes=self._notes(asked) if measured else {})
        )
        if not asked.target or self.reads_pairs:
            return data
        first = len(self.model.reader.encode([asked.text])[0].ids)
        for kind in data["texts"][0]["kinds"]:
            kind["generated_query"] = kind["generated_key"] = min(
                first, len(kind["queries"]) - 1
            )
        return data

    def _notes(self, asked: Shown) -> dict[tuple[str, int, int], HeadNote]:
        if self.over is not None:
            return self.over.notes()
        text, target = self._read(asked)
        found = self.model.attend_over([text], None if target is None else [target])
        # Omit intervals: over one short text they are meaningless.
        return {place: HeadNote(note.label) for place, note in found.notes().items()}

    def row(self, asked: Shown, layer: str, head: int, query: int) -> dict[str, Any]:
        """Return one row of a head's attention step by step, and the effect of the changes on the next token.

        Of more than 32 keys, the keys with the largest weights are returned.
        """
        steps = self._attention(asked).steps(layer, head, query)
        record = steps.record()
        kept = [*range(len(steps.keys))]
        if len(kept) > _MOST_KEYS:
            order = steps.weights.argsort(descending=True, stable=True)
            kept = sorted(order[:_MOST_KEYS].tolist())
        rows = (
            "k",
            "v",
            "content",
            "products",
            "scaled",
            "biased",
            "scores",
            "visible",
            "weights",
            "shares",
        )
        for name in rows:
            record[name] = (
                None if record[name] is None else [record[name][key] for key in kept]
            )
        record["keys"], record["token"] = (
            [*map(readable, steps.keys)],
            readable(steps.token),
        )
        for changed in (record["direct_effect"] or {}).values():
            for one in changed:
                one["token"] = readable(one["token"])
        share = steps.share_of_output.tolist()
        layers = {one.name: one for one in self._changed(asked.changes).layers}
        # A layer with several uses has one name, but a number for each use.
        semantics = layers.get(layer, next(iter(layers.values()))).outline.semantics
        return {
            **record,
            "model": "",
            "kept": kept,
            "share_of_output": [share[key] for key in kept],
            "layer_projected": steps.layer_projected.tolist(),
            "positions": semantics.positions,
            "compares": "products" if semantics.scores is None else "scores",
            "next": self._next(asked, layer, query),
        }

    def _next(self, asked: Shown, layer: str, query: int) -> dict[str, Any] | None:
        """Return the next token's probabilities and the loss, without and with the changes."""
        # Tokens are the union of the most probable tokens of the two runs.
        if not self.reads_pairs and "generate" not in self.model.can:
            return None
        before = self._run(asked._replace(changes=()))
        after = self._run(asked) if asked.changes else before
        at = query if not layer.startswith("encoder") else len(before.ids) - 1
        logs = [run.logits[at].double().log_softmax(dim=-1) for run in (before, after)]
        kl = self._divergences(asked)
        best = torch.stack(logs).topk(min(_MOST_NEXT, len(logs[0])), dim=-1)
        ids = [*dict.fromkeys(best.indices.T.flatten().tolist())][: _MOST_NEXT + 4]
        pieces = self.model.reader.tokenizer.pieces(ids)
        return {
            "at": at,
            "token": readable(before.tokens[at]),
            "kl": float(kl[at]),
            "mean_kl": float(kl.mean()),
            "loss": [self._loss(asked.text, run) for run in (before, after)],
            "loss_tokens": len(self._losses(asked.text, before)),
            "tokens": [
                [readable(piece), *(float(log[number].exp()) for log in logs)]
                for piece, number in zip(pieces, ids, strict=True)
            ],
        }

    def _diverge(self, asked: Shown) -> Tensor:
        """Return the KL divergence of the changed model's next token from the unchanged model's, by token."""
        before = self._run(asked._replace(changes=())).logits
        if not asked.changes:
            return before.new_zeros(before.shape[:-1], dtype=torch.float64)
        log_p, log_q = (
            logits.double().log_softmax(dim=-1)
            for logits in (before, self._run(asked).logits)
        )
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp(min=0)

    def _loss(self, text: str, run: Run) -> float | None:
        """Return the loss of a translation, or of the text without its continuation, in nats per token."""
        losses = self._losses(text, run)
        return float(losses.mean()) if len(losses) else None

    def _read_losses(self, text: str, run: Run) -> Tensor:
        """Return the losses of the tokens averaged in `_loss`."""
        losses = run.losses
        if not self.reads_pairs:
            losses = losses[: max(1, len(self.model.reader.encode([text])[0].ids) - 1)]
        return losses

    def head(self, changes: tuple[str, ...], layer: str, head: int) -> dict[str, Any]:
        """Return pictures, spectra with chance levels, and singular directions of a head's maps and forms."""
        # Chance levels are mean spectra of random forms of the same shape.
        model = self._changed(changes)
        place = _layer(model, layer)
        one = place[head]
        own = self._inspection(changes, layer)
        widths = {"qk": own.d_k, "ov": own.d_v}
        figures = (
            "qk_effective_rank",
            "ov_effective_rank",
            "qk_symmetric_share",
            "ov_copying",
            "qk_times_chance",
            "qk_excess",
        )
        return {
            "about": [
                f"d_model {own.d_model}, d_k {own.d_k}, d_v {own.d_v}",
                *place.between,
            ],
            "pictures": {name: rows[head] for name, rows in own.pictures.items()},
            "spectra": {name: values[head] for name, values in own.spectra.items()},
            "chance": {
                form: random_spectra(own.d_model, width).values.mean(dim=0).tolist()
                for form, width in widths.items()
            },
            "figures": {name: own.figures[name][head] for name in figures},
            "directions": [*_directions(model, layer, one)],
        }


def rounded(found: Any, digits: int = 6) -> Any:
    """Round all floats of a record to `digits` significant digits."""
    if isinstance(found, float):
        return float(f"{found:.{digits}g}")
    if isinstance(found, dict):
        return {name: rounded(value, digits) for name, value in found.items()}
    return (
        [rounded(value, digits) for value in found]
        if isinstance(found, list | tuple)
        else found
    )


@torch.no_grad()
def token_cosines(
    table: Float[Tensor, "vocab d_model"], directions: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n vocab"]:
    """Compute the products of directions with the normalised rows of a table."""
    # The table may be the largest tensor of the model: a few rows at a time are in float32.
    directions = directions.to(table.device, torch.float32).contiguous()
    step = max(1, _ENTRIES_AT_A_TIME // table.shape[1])
    found = []
    for rows in torch.split(table, step):
        wide = rows.float()
        lengths = torch.linalg.vector_norm(wide, dim=1).clamp(min=1e-9)
        found.append(directions @ wide.mT / lengths)
    return torch.cat(found, dim=1)


def _directions(model: Model, layer: str, head: Head) -> Iterator[dict[str, Any]]:
    """Yield the largest singular directions of the two forms, with the tokens nearest to both vectors."""
    with suppress(
        TriptychError
    ):  # the head stays unchanged if its norm is missing or cannot be folded
        head = head.folded
    reader = model.reader
    stack = layer.partition(".")[0] if "." in layer else next(iter(reader.model.stacks))
    output = OutputTable.of(reader.model, stack)
    place = f"{stack}.{layer.rpartition('.')[2]}"
    frame = next(
        (site.residual for site in attention_sites(reader.model) if site.name == place),
        None,
    )
    # Stack of the queries' tokens, and stack of the keys' tokens.
    halves = ("decoder", "encoder") if stack == "cross" else (stack, stack)
    tokenizers = [
        reader.source_tokenizer if half == "encoder" else reader.tokenizer
        for half in halves
    ]
    stacks = {str(kind): own for kind, own in reader.model.stacks.items()}
    tables = [stacks[half].embeddings.table.weight for half in halves]
    if (
        tables[0].shape[1] != head.W_Q.shape[0]
        or tables[1].shape[1] != head.W_V.shape[0]
    ):
        return  # embeddings of another width than the stream

    def best(scores: Tensor, tokenizer: Any) -> list[str]:
        top = scores[: tokenizer.vocab_size].topk(min(_NEAREST, len(scores)))
        return [*map(readable, tokenizer.pieces(top.indices.tolist()))]

    def with_opposites(scores: Tensor, tokenizer: Any) -> list[list[str]]:
        signed = torch.stack([scores, -scores], dim=1).flatten(0, 1)
        return [best(own, tokenizer) for own in signed]

    def nearest(side: int, directions: Tensor) -> list[list[str]]:
        return with_opposites(token_cosines(tables[side], directions), tokenizers[side])

    for name in ("qk", "ov"):
        try:
            form = getattr(head, name)
        except UsageError:
            continue
        form = form.at(0) if isinstance(form, RotaryForm) else form
        U, S, Vh = form.svd()
        count = min(_DIRECTIONS, len(S))
        lefts = U.mT[:count]
        rights = Vh[:count]
        reads = nearest(0 if name == "qk" else 1, lefts)
        writes: list[list[str]] = [[] for _ in reads]
        if name == "qk":
            writes = nearest(1, rights)
        elif output is not None:
            written = rights.to(output.table)
            written = written if frame is None else frame.part_added(written, written)
            writes = with_opposites(output.logits(written), tokenizers[0])
        for number, (read, write) in enumerate(zip(reads, writes, strict=True)):
            yield {
                "form": name,
                "number": number // 2,
                "value": float(S[number // 2]),
                "reads": read,
                "writes": write,
            }
