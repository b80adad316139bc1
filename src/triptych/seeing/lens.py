"""The logit lens: logits of the stream before every block, and a logit as a sum over heads and layers.

The last norm and the output table compute logits of the stream before any block. With fixed sizes in the
norms, a logit is a linear function of the stream, and the stream is the sum of the embedding and of the
outputs of all heads and feed-forward layers. So a logit, or the difference of two logits, is a sum over the
embedding, heads, feed-forward layers and biases.

Source: nostalgebraist 2020, "interpreting GPT: the logit lens"; Elhage et al. 2021, "A Mathematical Framework
for Transformer Circuits", for direct logit attribution.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.core.models import (
    Block,
    LanguageModel,
    LanguageModelHead,
    Residual,
    blocks_of,
    norm_of_part,
)
from triptych.errors import UsageError
from triptych.literals import SpecialTokens
from triptych.printable import shortened, table_html
from triptych.running.opened_source import Opened
from triptych.running.opening import LayerCall, Reader, Recording, TextIds
from triptych.running.text import as_texts, refuse_file_name, token_id
from triptych.seeing.reports.records import Table
from triptych.seeing.reports.rows import data_frame

PartKind = Literal["embedding", "head", "feed-forward", "input", "bias", "direction"]
# Parts of a repr, and rows of tables of parts.
_SHOWN = 5
_MOST_ROWS = 25
_LONGEST_TOKEN = 24


@final
@dataclass(frozen=True)
class LogitPart:
    """One summand of a logit.

    Attributes:
        name: `embedding`, a head such as `3.2`, `3 feed-forward`, `3 bias`, or `bias at the end`.
        kind: kind of the part: "input" is the additional input of a block (Gemma 3n and 4), "direction" a
            direction added by `steer`.
        value: contribution to the logit, or to the difference of two logits.
    """

    name: str
    kind: PartKind
    value: float


@final
@dataclass(frozen=True, eq=False)
class Attribution:
    """A logit, or the difference of two, as a sum over heads, layers and biases.

    The size in every norm on the way is that of the whole stream, so that the norm is linear and the parts
    sum to the logit. A part contains only its direct effect, not its effect on later layers.

    Attributes:
        model: name of the model.
        token: the token of the logit, in readable form.
        against: the token whose logit is subtracted; None for a single logit.
        position: number of the token at whose position the logit is.
        parts: all parts, in the order of computation.
        logit: logit, or difference of logits, computed by the model without its soft cap.
        soft_cap: soft cap of the model's logits, left out here; None for no soft cap.
    """

    model: str
    token: str
    against: str | None
    position: int
    parts: tuple[LogitPart, ...]
    logit: float
    soft_cap: float | None = None

    @property
    def total(self) -> float:
        """The sum of all parts, in float64; it differs from `logit` by rounding in the model."""
        return sum(part.value for part in self.parts)

    @property
    def heads(self) -> dict[str, float]:
        """The parts of the heads, by name."""
        return {part.name: part.value for part in self.parts if part.kind == "head"}

    def __getitem__(self, name: str) -> float:
        """Return the value of a part: `attribution["3.2"]`, `attribution["3 feed-forward"]`."""
        for part in self.parts:
            if part.name == name:
                return part.value
        raise UsageError(
            f"there is no part {name!r}: parts are embedding, heads such as "
            f"{next(iter(self.heads), '0.0')}, and the names in rows()"
        )

    def top(self, count: int = 10) -> list[LogitPart]:
        """Return the parts of the largest size."""
        return sorted(self.parts, key=lambda part: -abs(part.value))[:count]

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per part, in the order of computation."""
        return [
            {"part": part.name, "kind": part.kind, "value": part.value}
            for part in self.parts
        ]

    def record(self) -> dict[str, Any]:
        """Return the attribution as a JSON object."""
        return {
            "token": self.token,
            "against": self.against,
            "position": self.position,
            "logit": self.logit,
            "total": self.total,
            "soft_cap": self.soft_cap,
            "parts": self.rows(),
        }

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with one row per part; pandas is an optional dependency."""
        return data_frame(self.rows(), "rows() gives the same")

    def table(self, count: int | None = _MOST_ROWS) -> Table:
        """Return the largest parts as a table, with the sum of smaller parts; None for all parts."""
        # The last row is the sum of all parts, whatever is shown.
        shown = [*self.parts] if count is None else self.top(count)
        rows: list[tuple[str, ...]] = [
            (part.name, part.kind, f"{part.value:+.4f}") for part in shown
        ]
        if others := len(self.parts) - len(shown):
            rest = self.total - sum(part.value for part in shown)
            rows.append((f"{others} others", "", f"{rest:+.4f}"))
        rows.append(("sum", "", f"{self.total:+.4f}"))
        return Table(
            f"{self._what} at token {self.position}",
            ("part", "kind", "value"),
            tuple(rows),
            self._caption,
            numeric=(2,),
        )

    @property
    def _what(self) -> str:
        if self.against is None:
            return f"Logit of {self.token!r}"
        return f"Logit of {self.token!r} minus logit of {self.against!r}"

    @property
    def _caption(self) -> str:
        before = (
            ""
            if self.soft_cap is None
            else f", before the soft cap of {self.soft_cap:g}"
        )
        return (
            f"The model computes {self.logit:.4f}{before}. Parts are direct effects, with the sizes in norms "
            "fixed."
        )

    def __repr__(self) -> str:
        rows = [f"  {part.value:+.4f}  {part.name}" for part in self.top(_SHOWN)]
        return "\n".join(
            (
                f"Attribution of {self.model}: {self._what} at token {self.position}, {self.total:.4f}",
                *rows,
                "  parts, heads, top(count), rows(), table(), to_pandas()",
            )
        )

    def _repr_html_(self) -> str:
        found = self.table()
        return table_html(f"{found.title}. {found.caption}", found.rows, found.columns)


@final
class Lens:
    """Predictions after each block of a model, on one text: `lens.logits(3)`, `lens.top()`.

    Attributes:
        model: name of the model.
        ids: token ids of the text, or of the target of an encoder-decoder.
        tokens: tokens in readable form. A decoder predicts the next token at each position; encoders and
            encoder-decoders predict the token itself.
        source_tokens: source tokens of an encoder-decoder; None for other models.
        num_blocks: number of blocks of the predicting stack.
    """

    def __init__(
        self,
        reader: Reader,
        names: Mapping[str, str],
        text: TextIds,
        recording: Recording,
        added: Mapping[tuple[int, str], Tensor],
    ) -> None:
        """Use `Model.lens`; `names` has the name of each attention layer by site."""
        self.model = reader.name
        self.ids = text.ids
        self.tokens = tuple(reader.tokenizer.pieces(text.ids))
        self.source_tokens = (
            None
            if text.source is None
            else tuple(reader.source_tokenizer.pieces(text.source))
        )
        # The stack of the output table is the last: the decoder of an encoder-decoder.
        self._reader = reader
        self._names = names
        self._added = added
        *_, (self._stack, _) = reader.model.stacks.items()
        self._last = reader.last_stack
        self._streams = recording.residuals[self._stack]
        self._calls = {call.site.name: call for call in recording.calls}
        self.num_blocks = len(self._last.blocks)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages: the embedding, and the end of each block."""
        return ("embedding", *(f"block {block}" for block in range(self.num_blocks)))

    @torch.no_grad()
    def logits(self, stage: int = -1) -> Float[Tensor, "length vocab"]:
        """Compute the logits of the stream at a stage, through the last norm and the output table.

        Stage 0 is the embedding, stage n the end of block n − 1; the last stage has the model's own logits.
        """
        if not -len(self._streams) <= stage < len(self._streams):
            raise UsageError(
                f"there is no stage {stage}: they are 0, the embedding, to {self.num_blocks}, the end"
            )
        stream = self._streams[stage]
        last = self._last
        if last.streams is not None:
            stream = last.streams.leave(stream)
        return self._reader.logits(last.final_norm(stream)[0])

    @torch.no_grad()
    def top(self, count: int = 3, position: int = -1) -> "Predictions":
        """Return the most probable tokens of each stage at a position."""
        if count < 1:
            raise UsageError(f"the {count} most probable tokens: at least 1 is needed")
        row = self._position(position)
        # Rows of the output table past the vocabulary are not tokens.
        size = self._reader.tokenizer.vocab_size
        found = []
        for stage, name in enumerate(self.stages):
            shares = self.logits(stage)[row, :size].double().softmax(dim=-1)
            best = shares.topk(min(count, size))
            pieces = self._reader.tokenizer.pieces(best.indices.tolist())
            found.append(
                LensRow(name, tuple(zip(pieces, best.values.tolist(), strict=True)))
            )
        title = f"of {self.model} at token {row} ({self.tokens[row]})"
        return Predictions(title, found)

    @torch.no_grad()
    def attribution(
        self,
        token: str | int,
        against: str | int | None = None,
        position: int = -1,
    ) -> Attribution:
        """Return a logit, or its difference from another token's logit, as a sum over heads and layers.

        Tokens are ids, or texts including their initial space: `" mat"`. Position −1 is the last.
        Models with several residual streams (Gemma 3n) or an activation before the output table (BERT) are
        refused: their logits are not such sums.
        """
        row = self._position(position)
        tokenizer = self._reader.tokenizer
        ids = [token_id(tokenizer, token)]
        if against is not None:
            ids.append(token_id(tokenizer, against))
        head = _linear_head(self._last, self.model)
        stream = self._stream_of(row)
        stream.normalise(self._last.final_norm, _END)
        if head.map is not None:
            stream.apply(head.map, _END)
        stream.normalise(head.norm, _END)
        # The rows of the output table that read the two logits, and their biases.
        scale = head.config.input_scale * head.config.scale
        signs = torch.tensor([1.0, -1.0][: len(ids)], dtype=torch.float64)
        signs = signs.to(head.output.weight.device)
        direction = signs @ head.output.weight[ids].double() * scale
        values = {name: float(part @ direction) for name, part in stream.parts.items()}
        if head.output.bias is not None:
            shift = float(signs @ head.output.bias[ids].double()) * head.config.scale
            values[_END] = values.get(_END, 0.0) + shift
        pieces = tokenizer.pieces(ids)
        return Attribution(
            self.model,
            pieces[0],
            None if against is None else pieces[1],
            row,
            tuple(LogitPart(*name, value) for name, value in values.items()),
            float(signs @ self._logits_before_cap(row, ids)),
            head.config.soft_cap,
        )

    def _logits_before_cap(
        self, row: int, ids: Sequence[int]
    ) -> Float[Tensor, " tokens"]:
        """Compute logits of some tokens at the end of the model."""
        head = self._last.head
        assert head is not None
        features = head.features(self._last.final_norm(self._streams[-1][0, row]))
        logits: Tensor = head.output(features) * head.config.scale
        return logits[list(ids)].double()

    def _position(self, position: int) -> int:
        if not -len(self.ids) <= position < len(self.ids):
            raise UsageError(
                f"there is no token {position}: the text has 0 to {len(self.ids) - 1}"
            )
        return position % len(self.ids)

    def _stream_of(self, row: int) -> "_Stream":
        """Return the stream of one token at the end of the last block, in parts."""
        stream = _Stream()
        stream.add(("embedding", "embedding"), self._streams[0][0, row])
        for number, block in enumerate(blocks_of(self._reader.model, self._stack)):
            self._through_block(stream, block, number, row)
        return stream

    def _through_block(
        self, stream: "_Stream", block: Block, number: int, row: int
    ) -> None:
        """Add the parts of a block to a stream, in the order of `Block.forward`."""
        own = self._calls[f"{self._stack}.{number}"]
        name = self._names[own.site.name]
        bias: _Name = (f"{name} bias", "bias")
        fed_forward: _Name = (f"{name} feed-forward", "feed-forward")
        fed = {fed_forward: self._added[number, "feed_forward"][0, row]}
        if block.added_before is not None:
            stream.add((f"direction before {name}", "direction"), block.added_before)
        stream.leave(block.self_residual, _written(own, name, bias, row), bias)
        if block.parallel:
            # A norm of the attention's frame precedes the addition of the feed-forward layer's output.
            stream.add_framed(block.feed_forward_residual, fed, bias)
        else:
            if block.has_cross:
                cross = self._calls[f"cross.{number}"]
                written = _written(cross, self._names[cross.site.name], bias, row)
                stream.leave(block.cross_residual, written, bias)
            stream.leave(block.feed_forward_residual, fed, bias)
            if (given := self._added.get((number, "input"))) is not None:
                stream.add((f"{name} input", "input"), given[0, row])
            if block.scale is not None:
                stream.multiply(block.scale)
        if block.added_after is not None:
            stream.add((f"direction after {name}", "direction"), block.added_after)

    def __repr__(self) -> str:
        return (
            f"Lens of {self.model}: {len(self.tokens)} tokens, {self.num_blocks} blocks\n"
            "  logits(stage), top(count, position), attribution(token, against)"
        )

    def _repr_html_(self) -> str:
        return self.top()._repr_html_()


@final
@dataclass(frozen=True)
class LensRow:
    """The most probable tokens of a stage, in readable form, with their probabilities."""

    stage: str
    tokens: tuple[tuple[str, float], ...]


@final
class Predictions(Sequence[LensRow]):
    """The most probable tokens of each stage at one position, shown as a table."""

    def __init__(self, title: str, rows: Sequence[LensRow]) -> None:
        self.title = title
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, number: int) -> LensRow: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[LensRow]: ...

    def __getitem__(self, number: int | slice) -> LensRow | Sequence[LensRow]:
        return self._rows[number]

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per stage, with its tokens and their probabilities."""
        return [
            {
                "stage": row.stage,
                "tokens": [
                    {"token": token, "probability": probability}
                    for token, probability in row.tokens
                ],
            }
            for row in self
        ]

    def table(self) -> Table:
        """Return the tokens as a table with a row for each stage."""
        # All stages have the same number of tokens.
        count = max(len(row.tokens) for row in self)
        rows = tuple(
            (
                row.stage,
                *(
                    f"{shortened(token, _LONGEST_TOKEN)} {probability:.3f}"
                    for token, probability in row.tokens
                ),
            )
            for row in self
        )
        columns = ("after", *(f"token {rank}" for rank in range(1, count + 1)))
        return Table(self.title, columns, rows)

    def __repr__(self) -> str:
        shown = self.table().rows[-_SHOWN:]
        lines = ["  " + "  ".join(row) for row in shown]
        earlier = len(self) - len(shown)
        before = [f"  … {earlier} earlier stages"] if earlier else []
        return "\n".join([f"Predictions {self.title}", *before, *lines])

    def _repr_html_(self) -> str:
        found = self.table()
        return table_html(found.title, found.rows, found.columns)


_Name = tuple[str, PartKind]
_END: _Name = ("bias at the end", "bias")


@final
class _Stream:
    """The residual stream of one token as a sum of named parts, in float64."""

    def __init__(self) -> None:
        self.parts = dict[_Name, Tensor]()

    def add(self, name: _Name, part: Float[Tensor, " d_model"]) -> None:
        """Add a part, or add to the part of this name."""
        own = part.double()
        self.parts[name] = own + self.parts[name] if name in self.parts else own

    def multiply(self, factor: Float[Tensor, "1"]) -> None:
        self.parts = {name: part * factor for name, part in self.parts.items()}

    def apply(self, linear: nn.Linear, bias: _Name) -> None:
        """Apply a linear map."""
        weight = linear.weight.double()
        self.parts = {name: weight @ part for name, part in self.parts.items()}
        if linear.bias is not None:
            self.add(bias, linear.bias)

    def normalise(self, norm: nn.Module, bias: _Name) -> None:
        """Apply a norm, with the size of the whole stream."""
        if isinstance(norm, nn.Identity):
            return
        parts = torch.stack([*self.parts.values()])
        parts = norm_of_part(norm, parts, parts.sum(dim=0).expand_as(parts))
        self.parts = dict(zip(self.parts, parts, strict=True))
        self._add_bias(norm, bias, 1.0)

    def leave(
        self, frame: Residual, written: Mapping[_Name, Tensor], bias: _Name
    ) -> None:
        """Leave a sub-layer with these parts of its output: see `Residual.leave`."""
        if frame.from_norm:
            self.normalise(frame.norm, bias)
        self.add_framed(frame, written, bias)
        if not frame.pre:
            self.normalise(frame.norm, bias)

    def add_framed(
        self, frame: Residual, written: Mapping[_Name, Tensor], bias: _Name
    ) -> None:
        """Add parts of a sub-layer's output through the norm and the factor after it."""
        parts = torch.stack([part.double() for part in written.values()])
        parts = frame.part_added(parts, parts.sum(dim=0).expand_as(parts))
        for name, part in zip(written, parts, strict=True):
            self.add(name, part)
        if frame.out_norm is not None:
            self._add_bias(frame.out_norm, bias, frame.scale)

    def _add_bias(self, norm: nn.Module, name: _Name, factor: float) -> None:
        bias = getattr(norm, "bias", None)
        if isinstance(bias, Tensor):
            self.add(name, bias.double() * factor)


def _written(
    call: LayerCall, name: str, bias: _Name, row: int
) -> dict[_Name, Float[Tensor, " d_model"]]:
    """Compute the output of each head for one query, and the bias of all heads."""
    weights = call.layer.weights()
    if any(link.norm is not None for link in weights.o):
        raise UsageError(
            f"layer {name}: its heads pass a norm before W_O, so that its output is no sum over heads"
        )
    # Of the whole layer only this query is computed.
    z = call.steps(row).z[0, :, 0].double()
    found = {
        (f"{name}.{head}", "head"): z[head] @ W_O.double()
        for head, W_O in enumerate(weights.W_O)
    }
    if weights.o_bias is not None:
        found[bias] = weights.o_bias.double()
    return found  # type: ignore[return-value]


def _linear_head(model: LanguageModel, name: str) -> LanguageModelHead:
    """Return the head of a model, checked to be linear in the stream."""
    head = model.head
    assert head is not None
    if model.streams is not None:
        raise UsageError(
            f"{name} has several residual streams, each rescaled to the size of another: a logit is no sum "
            "of what heads add; lens.logits(stage) works"
        )
    if head.activation is not None:
        raise UsageError(
            f"{name} has an activation ({head.config.activation}) before its output table: a logit is no sum "
            "of what heads add; lens.logits(stage) works"
        )
    return head


@contextmanager
def _record_added(blocks: Sequence[Block]) -> Iterator[dict[tuple[int, str], Tensor]]:
    """Record the outputs of feed-forward layers and additional inputs, by block and name of the module."""
    # Attention layers are not among them: their calls are computed anew for every head.
    found = dict[tuple[int, str], Tensor]()

    def keep(
        module: nn.Module, given: Any, output: Tensor, *, place: tuple[int, str]
    ) -> None:
        found[place] = output

    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            for name in ("feed_forward", "input"):
                module = getattr(block, name)
                if module is not None:
                    hook = partial(keep, place=(number, name))
                    hooks.callback(module.register_forward_hook(hook).remove)
        yield found


@torch.no_grad()
def read_lens(
    opened: Opened,
    text: Any,
    target: Any = None,
    max_tokens: int | None = None,
    special_tokens: SpecialTokens = "tokens",
) -> Lens:
    """Run a model on one text and return the lens on it."""
    given = as_texts(refuse_file_name(text))
    if not given.is_one:
        raise UsageError("lens takes one text: a string, or its token ids")
    reader = opened.reader
    if reader.last_stack.head is None or reader.last_stack.task is not None:
        raise UsageError(
            f"{opened.name} predicts no tokens: it has no output table for a lens"
        )
    targets = None if target is None else as_texts(target, "target").texts
    ids = reader.encode(given.texts, targets, 0, max_tokens, special_tokens)
    reader.check(ids, max_tokens)
    # Layers of a checkpoint without a layer in the model come last.
    places = opened.places.names
    sites = opened.sites_of(reader.model)
    names = {site.name: place for site, place in zip(sites, places, strict=False)}
    *_, stack = reader.model.stacks
    with _record_added(blocks_of(reader.model, stack)) as added:
        recording = reader.run(ids, residuals=True)
    return Lens(reader, names, ids[0], recording, added)
