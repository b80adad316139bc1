"""Effects of adapters on every head: the changes of W_QK and W_OV."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

from jaxtyping import Float, Int
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm, ThinSVD
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.heads import Layer
from triptych.errors import UsageError
from triptych.literals import FormName, check_choices
from triptych.printable import shortened, table_html
from triptych.running.opened_source import Opened
from triptych.seeing.direction_tokens import DirectionDecoder, DirectionTokens
from triptych.seeing.reports.records import Table

# Smaller shares of the largest singular value of the base's form are rounding in float64.
_NO_CHANGE = 1e-12
_SHOWN = 10
_TOKENS = 5
_TOKENS_OF_A_CELL = 3
_FORMS: tuple[FormName, ...] = ("qk", "ov")
_token = partial(shortened, most=14)


@final
@dataclass(frozen=True, eq=False)
class FormChange:
    """The change of one form, W_QK or W_OV, in all heads of a layer.

    Attributes:
        change: form with the adapters, minus that of the base.
        base_norm: Frobenius norm of the base's form.
        rank: rank of the change.
    """

    change: BilinearForm
    base_norm: Float[Tensor, " heads"]
    rank: Int[Tensor, " heads"]

    @property
    def norm(self) -> Float[Tensor, " heads"]:
        """Frobenius norm of the change."""
        return self.change.norm()


@final
@dataclass(frozen=True, eq=False)
class AdapterEffects:
    """Effects of adapters on W_QK and W_OV of every head.

    Forms are products of the maps: rotations by position, norms of heads and biases are left out.

    Attributes:
        adapters: folders or names of the adapters.
        heads: names of the heads, such as `3.2`.
    """

    adapters: tuple[str, ...]
    heads: tuple[str, ...]
    _qk: tuple[FormChange, ...]
    _ov: tuple[FormChange, ...]
    _opened: Opened

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per head: rank, norm and relative norm of the change of each form."""
        found: list[dict[str, Any]] = [{"head": head} for head in self.heads]
        for form, changes in (("qk", self._qk), ("ov", self._ov)):
            for row, values in zip(found, _values(changes), strict=True):
                row |= {f"{form}_{name}": value for name, value in values.items()}
        return found

    def record(self) -> dict[str, Any]:
        """Return adapters and rows as one record."""
        return {"adapters": [*self.adapters], "heads": self.rows()}

    def top(self, count: int = 10) -> list[dict[str, Any]]:
        """Return the rows of the most changed heads, sorted by the larger ratio of their two forms."""
        return sorted(
            self.rows(), key=lambda row: -max(row["qk_ratio"], row["ov_ratio"])
        )[:count]

    @check_choices
    def directions(self, head: str, form: FormName = "ov") -> ThinSVD:
        """Decompose the change of a head's form: input directions (U), strengths (S), output directions (Vh).

        For "qk", U are directions of queries and Vh of keys. The number of directions is the rank.

        Args:
            head: name of the head, such as `3.2`.
            form: "qk" or "ov".

        Raises:
            UsageError: an unknown head, or an unknown form.
        """
        layer, number = self._place(head)
        change = (self._qk if form == "qk" else self._ov)[layer]
        found = BilinearForm(change.change.left[number], change.change.right[number])
        rank = int(change.rank[number])
        svd = found.svd()
        return ThinSVD(svd.U[:, :rank], svd.S[:rank], svd.Vh[:rank])

    @check_choices
    def tokens(
        self, head: str, form: FormName = "ov", *, most: int = 1, count: int = _TOKENS
    ) -> tuple[DirectionTokens, ...]:
        """Decode the strongest directions of the change of a head's form to tokens.

        Input directions are compared with the embedding of every token, alone at the beginning of a text,
        after the norm before the layer. Output directions pass the last norm and the output table. The model
        is opened to run, with the adapters.

        Args:
            head: name of the head, such as `3.2`.
            form: "qk" or "ov".
            most: largest number of directions; the rank of the change also limits it.
            count: number of tokens in each list.

        Raises:
            UsageError: an unknown head, an unknown form, or `most` or `count` below 1.
            DataError: the model cannot be run.
        """
        if most < 1 or count < 1:
            raise UsageError(
                f"{most} directions of {count} tokens: at least 1 of each is needed"
            )
        layer, _ = self._place(head)
        found = self.directions(head, form)
        inputs = found.U[:, :most]
        outputs = found.Vh[:most]
        decoder = self._decoder
        reads = decoder.read(layer, inputs, memory=form == "ov")
        writes = (
            decoder.written(layer, outputs)
            if form == "ov"
            else decoder.read(layer, outputs.mT, memory=True)
        )
        # Negating both directions gives the same change: decode either sign.
        sides = [decoder.names(products, count) for products in (reads, writes)]
        for products in (reads, writes):
            opposite = None if products is None else -products
            sides.append(decoder.names(opposite, count))
        return tuple(
            DirectionTokens(
                float(strength), *(side[place] if side else () for side in sides)
            )
            for place, strength in enumerate(found.S[:most])
        )

    @cached_property
    def _decoder(self) -> DirectionDecoder:
        return DirectionDecoder(self._opened)

    def _place(self, head: str) -> tuple[int, int]:
        """Return the number of a head's layer, and of the head in it."""
        if head not in self.heads:
            raise UsageError(
                f"there is no head {head}: heads are {self.heads[0]} to {self.heads[-1]}"
            )
        number = self.heads.index(head)
        for layer, change in enumerate(self._qk):
            if number < len(change.rank):
                return layer, number
            number -= len(change.rank)
        raise AssertionError("every head is in a layer")

    def decoded(self, count: int = _SHOWN) -> list[dict[str, Any]]:
        """Return the strongest direction of both forms as records, for the most changed heads.

        Returns an empty list for a model with heads only.
        """
        if self._opened.why_not_run:
            return []
        found = []
        for row in self.top(count):
            head = row["head"]
            for form in _FORMS:
                for one in self.tokens(head, form):
                    found.append({"head": head, "form": form, **one.record()})
        return found

    def token_table(self, count: int = _SHOWN) -> Table | None:
        """Return the strongest directions of the most changed heads, as tokens; None without any."""
        found = self.decoded(count)
        if not found:
            return None
        # A line of a terminal has room for fewer tokens than `tokens` returns.
        rows = []
        for one in found:
            reads = "  ".join(map(_token, one["reads"][:_TOKENS_OF_A_CELL]))
            writes = "  ".join(map(_token, one["writes"][:_TOKENS_OF_A_CELL]))
            form = f"ΔW_{one['form'].upper()}"
            rows.append((one["head"], form, f"{one['strength']:.3g}", reads, writes))
        return Table(
            "The strongest direction of each change, as tokens",
            ("head", "form", "strength", "reads (queries)", "writes (keys)"),
            tuple(rows),
            caption="Of ΔW_OV: tokens that are read, and tokens that are written. Of ΔW_QK: tokens of "
            "queries, and of keys. The signs of both sides may be changed together.",
            numeric=(2,),
        )

    def table(self, count: int = _SHOWN) -> Table:
        """Return the most changed heads as a table."""
        shown = self.top(count)
        all_heads = len(self.heads)
        of = (
            ""
            if len(shown) == all_heads
            else f": the {len(shown)} heads of {all_heads} that it changes most"
        )
        return Table(
            f"What the adapter does{of}",
            (
                "head",
                "rank of ΔW_QK",
                "‖ΔW_QK‖ / ‖W_QK‖",
                "rank of ΔW_OV",
                "‖ΔW_OV‖ / ‖W_OV‖",
            ),
            tuple(
                (
                    row["head"],
                    str(row["qk_rank"]),
                    f"{row['qk_ratio']:.3g}",
                    str(row["ov_rank"]),
                    f"{row['ov_ratio']:.3g}",
                )
                for row in shown
            ),
            numeric=(1, 2, 3, 4),
        )

    def __repr__(self) -> str:
        most = "; ".join(
            f"{row['head']} (W_QK {row['qk_ratio']:.3g}, W_OV {row['ov_ratio']:.3g})"
            for row in self.top(3)
        )
        return (
            f"AdapterEffects of {', '.join(self.adapters)}: {len(self.heads)} heads\n"
            f"  most changed: {most}"
        )

    def _repr_html_(self) -> str:
        found = self.table()
        return table_html(found.title, found.rows, found.columns)


def _values(changes: tuple[FormChange, ...]) -> Iterator[dict[str, Any]]:
    for layer in changes:
        norms = layer.norm.tolist()
        for norm, base, rank in zip(
            norms, layer.base_norm.tolist(), layer.rank.tolist(), strict=True
        ):
            ratio = norm / base if base else float("inf") if rank else 0.0
            yield {
                "rank": rank,
                "norm": norm if rank else 0.0,
                "ratio": ratio if rank else 0.0,
            }


def adapter_effects(opened: Opened) -> AdapterEffects | None:
    """Compare every head with that of the base, in float64; None for a model without adapters."""
    pair = opened.source.without_and_with_adapters()
    if pair is None:
        return None
    checkpoint = opened.unchanged.attention
    assert isinstance(checkpoint, Checkpoint)
    # Compute in float64: rounding the maps to the dtype of the files would hide the rank of a small change.
    base = checkpoint.with_tensors(pair.base)
    adapted = checkpoint.with_tensors(pair.adapted)
    heads = list[str]()
    qk = list[FormChange]()
    ov = list[FormChange]()
    for layer, place in zip(opened.unchanged.layers, checkpoint.layers, strict=True):
        before = Layer(layer.name, base, place.site)
        after = Layer(layer.name, adapted, place.site)
        heads += [f"{layer.name}.{head}" for head in range(before.num_heads)]
        qk.append(
            _change(
                BilinearForm(before.W_Q, before.W_K), BilinearForm(after.W_Q, after.W_K)
            )
        )
        ov.append(
            _change(
                BilinearForm(before.W_V, before.W_O.mT),
                BilinearForm(after.W_V, after.W_O.mT),
            )
        )
    return AdapterEffects(
        pair.names, tuple(heads), tuple(qk), tuple(ov), opened.unchanged
    )


def _change(before: BilinearForm, after: BilinearForm) -> FormChange:
    change = after - before
    largest = before.spectral_norm()[..., None] * _NO_CHANGE
    return FormChange(
        change, before.norm(), change.singular_values().gt(largest).sum(dim=-1)
    )
