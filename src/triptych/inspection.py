"""What the attention of a checkpoint looks like, head by head: `inspect_checkpoint(open_checkpoint(path))`.

One layer is held at a time. Nothing is run: all that is said follows from the weights.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from triptych.algebra.function import Disentangled, DistanceTable, Scoring
from triptych.algebra.measures import COMPARED, HeadMeasures, Planes, comparable, measure_heads
from triptych.algebra.rewrites import (
    RewriteRefusedError,
    Rewritten,
    drop_key_bias,
    fold,
    fold_value_bias,
)
from triptych.algebra.similarity import MapSimilarity, alike, cosine_of_forms, sketches
from triptych.algebra.weights import SIDES, AttentionWeights, Chain, Side
from triptych.checkpoints.layer import AttentionLayer, AttentionSource, Site
from triptych.errors import UsageError

# Shares of the energy that the nearest form of lower rank may lose.
LOSSES = (0.01, 0.05, 0.10)
# Cosine of two forms, of either sign, from which on they are called near-copies.
NEAR = 0.9
# A rewrite of `InspectedLayer.foldable`.
FOLD = "fold stacked maps"
# What is below this share of the largest singular value may be rounding of maps multiplied in float32.
_NO_RANK = 1e-6
# Pairs of each form that may be worked out: each takes two layers to be read again.
_MOST_PAIRS = 200


@final
@dataclass(frozen=True)
class Measure:
    """A figure of each head.

    Attributes:
        name: its column.
        title: for people.
        meaning: what it is and how to read it, in a sentence or two.
        group: what it is about.
        of_basis: whether it depends on the basis that training chose within the head, and so says nothing
            of what the head does.
    """

    name: str
    title: str
    meaning: str
    group: str
    of_basis: bool = False


LOOKS, _MOVES, _LIKENESS, _SIZES = (
    "Where it looks",
    "What it moves",
    "Likeness of its maps",
    "Sizes of its maps",
)


# Besides the first direction, so many.
_MORE_OF_TOP = (2, 4, 8, 16, 32)


def _of_form(form: str, title: str, group: str) -> Iterator[Measure]:
    for name, what, meaning in (
        (
            "effective_rank",
            "effective rank",
            "exp of the entropy of σ/Σσ: how many directions share the work, 1 to the head's width.",
        ),
        ("stable_rank", "stable rank", "Σσ²/σ₁²: 1 if one direction does it all."),
        ("participation", "participation ratio", "(Σσ²)²/Σσ⁴: between stable and effective rank."),
        ("rank", "numerical rank", "Singular values above a millionth of the largest."),
        *(
            (
                f"rank_{100 - round(100 * loss)}",
                f"rank that keeps {1 - loss:.0%}",
                f"The lowest rank whose nearest form loses at most {loss:.0%} of Σσ².",
            )
            for loss in LOSSES
        ),
        ("top", "share of the first direction", "σ₁²/Σσ², 0 to 1."),
        *(
            (
                f"top_{count}",
                f"share of the first {count} directions",
                f"The same of the first {count}: of Σσ², 0 to 1.",
            )
            for count in _MORE_OF_TOP
        ),
        ("spectral_norm", "spectral norm", "σ₁: the most it can stretch an input."),
        ("frobenius_norm", "Frobenius norm", "√Σσ²: its size over all inputs."),
        (
            "condition",
            "condition",
            "σ₁ over the smallest singular value; infinite where the numerical rank is not full.",
        ),
    ):
        if form == "qk":
            meaning += " Of rotary heads: of the planes, σ² being their energies."
        yield Measure(f"{form}_{name}", f"{what} of {title}", meaning, group)


def _of_pair(pair: str) -> Iterator[Measure]:
    both = " and ".join(f"W_{side.upper()}" for side in pair)
    for name, title, meaning in (
        (
            "overlap",
            f"overlap of {both}",
            "Mean squared cosine of the principal angles of what they read, 0 to 1, whatever the basis.",
        ),
        (
            "times_chance",
            f"overlap of {both} over chance",
            "The same over what random subspaces of these sizes have on average: 1 is chance.",
        ),
        (
            "p_value",
            f"p-value of the overlap of {both}",
            "How probable as much overlap is for random subspaces (gamma approximation: up to twice too "
            "large).",
        ),
    ):
        yield Measure(f"{pair}_{name}", title, meaning, _LIKENESS)
    for name, title, meaning in (
        (
            "cosine",
            f"cosine of {both}",
            "Of the entries. Training chose the basis within the head, which its function does not see: "
            "compare this with nothing but itself.",
        ),
        (
            "procrustes",
            f"cosine of {both} after rotation",
            "Of the entries after the best rotation of one of them, 0 to 1; lengths still count.",
        ),
        (
            "cka",
            f"CKA of {both}",
            "Linear, uncentred, of rows as examples (Kornblith et al. 2019), 0 to 1; likewise.",
        ),
    ):
        yield Measure(f"{pair}_{name}", title, meaning, _LIKENESS, of_basis=True)


MEASURES: tuple[Measure, ...] = (
    *_of_form("qk", "W_QK", LOOKS),
    Measure(
        "qk_symmetric_share",
        "symmetric share of W_QK",
        "‖½(W + Wᵀ)‖²/‖W‖²: 1 symmetric, 0 antisymmetric, ½ for random factors.",
        LOOKS,
    ),
    Measure("qk_symmetry", "symmetry score of W_QK", "tr(W²)/‖W‖²: 1, −1 and 0 for the same.", LOOKS),
    *_of_form("ov", "W_OV", _MOVES),
    Measure(
        "ov_copying",
        "copying score of W_OV",
        "Σ Re λ / Σ |λ| of its eigenvalues: near 1 the head writes what it reads, near −1 it takes it away.",
        _MOVES,
    ),
    *_of_pair("qk"),
    *_of_pair("qv"),
    *_of_pair("kv"),
    Measure(
        "qkv_apart",
        "distance of W_Q, W_K and W_V from one",
        "Share of the three's energy that is lost if their mean stands for each: 0 if they are one matrix, "
        "⅔ if their entries are unrelated.",
        _LIKENESS,
        of_basis=True,
    ),
    Measure(
        "qkv_apart_rotated",
        "distance of W_Q, W_K and W_V from one after rotation",
        "At least this share is lost, however each of them is rotated within the head first.",
        _LIKENESS,
        of_basis=True,
    ),
    *(
        Measure(
            f"{side}_norm", f"norm of W_{side.upper()}", "Frobenius norm of the map.", _SIZES, of_basis=True
        )
        for side in SIDES
    ),
)


@final
@dataclass(frozen=True)
class InspectedLayer:
    """The heads of one layer that were looked at.

    Attributes:
        stack: "encoder", "decoder", …; with `layer`, `kind` and `module` as in `Site`.
        layer: its number in the stack.
        kind: "self", "causal" or "cross".
        module: its name in the checkpoint.
        heads: numbers of those looked at.
        num_heads: query heads there are.
        num_key_heads: different key maps.
        maps: how many different ones there are to "q", "k" and "v"; heads share them consecutively.
        subspaces: how many different ones these read: fewer where heads only weigh or widen what a map that
            they share reads.
        d_model: width of the input.
        d_k: of queries and keys.
        d_v: of values.
        positions: how it tells positions apart.
        turns: whether queries and keys turn with the position.
        planes: rotary planes that turn, and those too slow to; None without a rotation, or if it was ignored.
        caveats: what else stands between the maps and what the heads do.
        figures: by measure, one number a head, None where there is nothing to say; a condition may be
            infinite.
        spectra: singular values of "qk" and "ov", a list a head.
        angles: principal angles in degrees of "qk", "qv", "kv", a list a head.
        cut: parameters that the nearest forms of lower rank would take away, by form ("qk", "ov"), if each
            head loses at most the first, second, … of `LOSSES`. Left out are the "qk" of heads that turn
            with the position, and heads that share keys and values.
        foldable: parameters that exact rewrites would take away, by rewrite; refused ones with the reason.
        parameters: of the layer.
        broken: tensors with entries that are not finite, and how many.
        num_bytes: read for it.
    """

    stack: str
    layer: int
    kind: str
    module: str
    heads: tuple[int, ...]
    num_heads: int
    num_key_heads: int
    maps: dict[str, int]
    subspaces: dict[str, int]
    d_model: int
    d_k: int
    d_v: int
    positions: str
    turns: bool
    planes: tuple[int, int] | None
    caveats: tuple[str, ...]
    figures: dict[str, list[float | None]]
    spectra: dict[str, list[list[float]]]
    angles: dict[str, list[list[float]]]
    cut: dict[str, list[int]]
    foldable: dict[str, int | str]
    parameters: int
    broken: dict[str, int]
    num_bytes: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.stack} {self.layer}" + (" cross" if self.kind == "cross" else "")

    @property
    def qk_of(self) -> str:
        """What figures of W_QK are of: the form, rotary planes, or the form as if nothing turned."""
        if not self.turns:
            return "form"
        return "form, rotary ignored" if self.planes is None else "planes"


@final
@dataclass(frozen=True)
class NearCopy:
    """Two heads that look, or move, nearly the same, with a map of their own that makes the form.

    Attributes:
        form: "qk" or "ov".
        one: a head, as "encoder 0, head 3".
        other: another.
        cosine: of their forms; negative where one does the opposite.
    """

    form: str
    one: str
    other: str
    cosine: float


@final
@dataclass(frozen=True)
class Inspection:
    """A checkpoint looked at.

    Attributes:
        name: of the checkpoint.
        family: how it is written.
        known_by: what that is known by.
        layers: all that were looked at.
        ignores_rotary: whether figures of rotary heads are those of W_Q W_Kᵀ as if nothing turned.
        num_tensors: there are; those of `left_over` are no attention.
        seconds: that it took.
        copies: heads that are nearly the same, the nearest first.
        more_copies: whether there may be more of them than were worked out.
        unread: tensors of attention that is known and not read, and why.
        absent: stacks that the configuration has and the tensors have not.
    """

    name: str
    family: str
    known_by: str
    layers: tuple[InspectedLayer, ...]
    ignores_rotary: bool
    num_tensors: int
    left_over: tuple[str, ...]
    seconds: float
    copies: tuple[NearCopy, ...]
    more_copies: bool
    unread: dict[str, str]
    absent: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """A flat record of every head: its place, then every measure."""
        return [
            {
                "stack": layer.stack,
                "layer": layer.layer,
                "kind": layer.kind,
                "head": head,
                "module": layer.module,
                "positions": layer.positions,
                "qk_of": layer.qk_of,
                **{measure.name: layer.figures[measure.name][place] for measure in MEASURES},
            }
            for layer in self.layers
            for place, head in enumerate(layer.heads)
        ]


# What is told while it goes on: bytes read, of how many, and the layer that comes next.
Progress = Callable[[int, int, str], None]


@torch.no_grad()
def inspect_checkpoint(
    checkpoint: AttentionSource,
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    ignore_rotary: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Measure the heads of a checkpoint.

    Args:
        checkpoint: opened.
        layers: numbers of layers, in every stack; all if None. Likewise `heads`.
        heads: numbers of heads.
        ignore_rotary: measure W_Q W_Kᵀ of rotary heads as if nothing turned.
        progress: is told of every layer before it is read.

    Raises:
        UsageError: no layer or head is left.
        DataError: the checkpoint's tensors are not what its configuration says.
    """
    started = time.monotonic()
    for what, chosen in (("layers", layers), ("heads", heads)):
        if chosen is not None and not chosen:
            raise UsageError(f"{checkpoint.name}: no {what} are chosen")
    sites = [site for site in checkpoint.sites if layers is None or site.layer in layers]
    last = max(site.layer for site in checkpoint.sites)
    if layers is not None and not {site.layer for site in checkpoint.sites} >= set(layers):
        unknown = next(layer for layer in layers if layer not in {site.layer for site in checkpoint.sites})
        raise UsageError(f"{checkpoint.name}: there is no layer {unknown}; they go from 0 to {last}")
    total, done = sum(checkpoint.bytes_of(site) for site in sites), 0
    found, sketched = [], _Sketches(checkpoint, ignore_rotary)
    for site in sites:
        if progress is not None:
            progress(done, total, site.name)
        layer = checkpoint.read(site)
        maps = layer.weights.multiplied_out()
        found.append(_inspected(checkpoint, layer, maps, heads, ignore_rotary))
        sketched.add(layer, maps, found[-1])
        done += found[-1].num_bytes
        del layer, maps
    most = max(layer.num_heads for layer in found) - 1
    if heads is not None and max(heads, default=-1) > most:
        raise UsageError(f"{checkpoint.name}: there is no head {max(heads)}; they go from 0 to {most}")
    if progress is not None:
        progress(done, total, "heads that are nearly the same")
    copies, more_copies = sketched.near_copies()
    if progress is not None:
        progress(total, total, "")
    return Inspection(
        name=checkpoint.name,
        family=checkpoint.written_as,
        known_by=checkpoint.known_by,
        layers=tuple(found),
        ignores_rotary=ignore_rotary,
        num_tensors=checkpoint.num_tensors,
        left_over=checkpoint.left_over,
        copies=tuple(copies),
        more_copies=more_copies,
        unread=dict(checkpoint.unread),
        absent=checkpoint.absent,
        seconds=time.monotonic() - started,
    )


class _Sketches:
    """Short stand-ins for the forms of all heads, from which those that may be near-copies are found."""

    def __init__(self, checkpoint: AttentionSource, ignore_rotary: bool) -> None:
        self._checkpoint, self._ignore_rotary = checkpoint, ignore_rotary
        # By form and the sizes of its input: sketches, and of each the layer, its name, and the head.
        self._found: dict[tuple[str, int, int], list[tuple[Tensor, Site, str, int]]] = {}
        self._kept: dict[Site, dict[str, tuple[Tensor, Tensor]]] = {}

    def add(self, layer: AttentionLayer, maps: AttentionWeights, inspected: InspectedLayer) -> None:
        """Remember the heads of a layer that were looked at."""
        if not inspected.heads:
            return
        for form, (left, right) in self._factors(layer, maps).items():
            size = form, left.shape[1], right.shape[1]
            rows = sketches(left, right)
            self._found.setdefault(size, []).extend(
                (rows[head], layer.site, inspected.name, head)
                for head in _first_of_each(form, maps, inspected.heads)
                if bool(rows[head].isfinite().all())
            )

    def near_copies(self) -> tuple[list[NearCopy], bool]:
        """Pairs with a cosine of at least `NEAR`, of either sign, worked out, the nearest first.

        The second is whether there may be more: so many are worked out and no more.
        """
        found, more = [], False
        for (form, *_), heads in self._found.items():
            pairs = alike(torch.stack([row for row, *_ in heads]), NEAR, _MOST_PAIRS + 1) if heads else []
            more |= len(pairs) > _MOST_PAIRS
            # Layer by layer: each pair of layers is read once.
            for i, j in sorted(pairs[:_MOST_PAIRS], key=lambda pair: (heads[pair[0]][2], heads[pair[1]][2])):
                (_, one_site, one_name, one), (_, other_site, other_name, other) = heads[i], heads[j]
                left, right = self._read(one_site)[form]
                other_left, other_right = self._read(other_site)[form]
                cosine = cosine_of_forms(left[one], right[one], other_left[other], other_right[other])
                if abs(cosine) >= NEAR:
                    names = f"{one_name}, head {one}", f"{other_name}, head {other}"
                    found.append(NearCopy(form, *names, cosine))
        return sorted(found, key=lambda pair: -abs(pair.cosine)), more

    def _factors(self, layer: AttentionLayer, maps: AttentionWeights) -> dict[str, tuple[Tensor, Tensor]]:
        found = {"ov": (maps.W_V, maps.W_O.mT)}
        if layer.scoring.rotation is None or self._ignore_rotary:
            found["qk"] = maps.W_Q, maps.W_K
        return found

    def _read(self, site: Site) -> dict[str, tuple[Tensor, Tensor]]:
        """The factors of a layer; those of the last two are kept."""
        if site not in self._kept:
            layer = self._checkpoint.read(site)
            self._kept[site] = self._factors(layer, layer.weights.multiplied_out())
            while len(self._kept) > 2:
                self._kept.pop(next(iter(self._kept)))
        else:
            self._kept[site] = self._kept.pop(site)
        return self._kept[site]


def _first_of_each(form: str, maps: AttentionWeights, heads: Collection[int]) -> Iterator[int]:
    """Heads, of those that share both maps of a form the first."""
    sides: tuple[Side, Side] = ("q", "k") if form == "qk" else ("v", "o")
    seen = set[tuple[int, ...]]()
    for head in heads:
        copies = tuple(head * maps.chain(side)[0].copies // maps.num_heads for side in sides)
        if copies not in seen:
            seen.add(copies)
            yield head


def _inspected(
    checkpoint: AttentionSource,
    layer: AttentionLayer,
    maps: AttentionWeights,
    heads: Collection[int] | None,
    ignore_rotary: bool,
) -> InspectedLayer:
    """Of a layer as it is written, and of its maps multiplied out."""
    weights, site = layer.weights, layer.site
    planes = None
    if layer.scoring.rotation is not None and not ignore_rotary:
        longest = checkpoint.longest_text(site)
        planes = Planes.of(layer.scoring.rotation, min(longest, layer.scoring.window or longest))
    measured = measure_heads(maps, planes, comparable(weights))
    chosen = [head for head in range(weights.num_heads) if heads is None or head in heads]
    return InspectedLayer(
        stack=site.stack,
        layer=site.layer,
        kind=site.kind,
        module=site.module,
        heads=tuple(chosen),
        num_heads=weights.num_heads,
        num_key_heads=weights.num_key_heads,
        maps={side: maps.chain(side)[0].copies for side in ("q", "k", "v")},
        subspaces={side: _subspaces(weights.chain(side)) for side in ("q", "k", "v")},
        d_model=weights.d_model,
        d_k=maps.q[0].d_out,
        d_v=maps.v[0].d_out,
        positions="disentangled"
        if isinstance(layer.scoring.bias, Disentangled)
        else weights.traits.positions,
        turns=layer.scoring.rotation is not None,
        caveats=tuple(_caveats(layer)),
        planes=None if planes is None else (planes.slow.count(False), planes.slow.count(True)),
        figures={
            name: _numbers(values, chosen, weights.num_heads) for name, values in _figures(measured).items()
        },
        spectra={
            form: _lists(spectrum.values, chosen)
            for form, spectrum in (("qk", measured.qk), ("ov", measured.ov))
        },
        angles={
            pair: _lists(found.angles.rad2deg(), chosen)
            for pair, found in measured.similarity.items()
            if found is not None
        },
        cut=_cut(layer, measured, chosen),
        foldable=_foldable(layer),
        parameters=weights.num_parameters,
        broken=dict(checkpoint.broken(layer)) if _is_broken(layer, measured) else {},
        num_bytes=checkpoint.bytes_of(site),
    )


def _subspaces(chain: Chain) -> int:
    """How many different ones the maps of a chain read: only a link that narrows chooses among channels."""
    return max((link.copies for link in chain if link.d_out < link.d_in), default=1)


def _is_broken(layer: AttentionLayer, measured: HeadMeasures) -> bool:
    """Whether anything that was read is not finite: a map, a bias, a gain."""
    small = (tensor for tensor in layer.weights.tensors() if tensor.ndim < 3)
    beside = _tensors_of(layer.scoring)
    return not (bool(measured.finite.all()) and all(bool(t.isfinite().all()) for t in (*small, *beside)))


def _tensors_of(scoring: Scoring) -> Iterator[Tensor]:
    """What was read of a layer besides its maps."""
    for norm in (scoring.q_norm, scoring.k_norm):
        if norm is not None:
            yield from (part for part in (norm.gain, norm.shift) if part is not None)
    if scoring.sinks is not None:
        yield scoring.sinks
    match scoring.bias:
        case DistanceTable(table=table):
            yield table
        case Disentangled(keys=keys, queries=queries):
            yield from (part for part in (keys, queries) if part is not None)


def _caveats(layer: AttentionLayer) -> Iterator[str]:
    """What W_QK and W_OV do not say of a layer."""
    scoring = layer.scoring
    if layer.uses > 1:
        yield f"the model uses these same weights {layer.uses} times, one after the other"
    if scoring.q_norm is not None or scoring.k_norm is not None:
        yield "queries and keys are normalised before they meet, so sizes of W_QK say nothing of the scores"
    if scoring.between:
        yield "a norm stands within a map, which is measured as if it were not there"
    if isinstance(scoring.bias, Disentangled):
        yield "distances meet queries and keys, too, and W_QK is the share of the content alone"
    if scoring.soft_cap is not None:
        yield f"scores are soft-capped at ±{scoring.soft_cap:g}"
    if scoring.sinks is not None:
        yield "a sink takes part in the softmax besides the keys"


def _figures(measured: HeadMeasures) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for form, spectrum in (("qk", measured.qk), ("ov", measured.ov)):
        found |= {
            f"{form}_effective_rank": spectrum.effective_rank,
            f"{form}_stable_rank": spectrum.stable_rank,
            f"{form}_participation": spectrum.participation_ratio,
            f"{form}_rank": (rank := spectrum.rank(_NO_RANK)),
            **{f"{form}_rank_{100 - round(100 * loss)}": spectrum.rank_within(loss) for loss in LOSSES},
            f"{form}_top": spectrum.kept[:, 0],
            **{
                f"{form}_top_{count}": spectrum.kept[:, min(count, spectrum.kept.shape[1]) - 1]
                for count in _MORE_OF_TOP
            },
            f"{form}_spectral_norm": spectrum.spectral_norm,
            f"{form}_frobenius_norm": spectrum.frobenius_norm,
            f"{form}_condition": spectrum.condition.where(rank == spectrum.values.shape[-1], math.inf),
        }
    for pair, similarity in measured.similarity.items():
        found |= _of_similarity(pair, similarity)
    symmetry = measured.symmetry
    found |= {
        "qk_symmetric_share": None if symmetry is None else (1 + symmetry) / 2,
        "qk_symmetry": symmetry,
        "ov_copying": measured.copying,
        **{f"{side}_norm": norm for side, norm in measured.norms.items()},
        "qkv_apart": _apart(measured, "cosine"),
        "qkv_apart_rotated": _apart(measured, "procrustes"),
    }
    return {name: None if v is None else v.where(measured.finite, math.nan) for name, v in found.items()}


def _apart(measured: HeadMeasures, closeness: Literal["cosine", "procrustes"]) -> Tensor | None:
    """1 − 3 ‖mean‖² / Σ ‖W‖² of W_Q, W_K and W_V, from the inner products of pairs.

    With the largest inner product that rotations of a pair reach, a lower bound: no rotation of three
    serves every pair better.
    """
    norms = measured.norms
    energies = norms["q"].square() + norms["k"].square() + norms["v"].square()
    inner = torch.zeros_like(energies)
    for pair, (one, other) in COMPARED.items():
        found = measured.similarity[pair]
        if found is None:
            return None
        close = getattr(found, closeness).where(found.cosine.isfinite(), math.nan)  # of equal shapes only
        inner += close * norms[one] * norms[other]
    return (energies - inner) * (2 / 3) / energies


def _of_similarity(pair: str, found: MapSimilarity | None) -> dict[str, Tensor | None]:
    return {
        f"{pair}_overlap": None if found is None else found.overlap,
        f"{pair}_times_chance": None if found is None else found.times_chance,
        f"{pair}_p_value": None if found is None else found.p_value,
        f"{pair}_cosine": None if found is None else found.cosine,
        f"{pair}_procrustes": None if found is None else found.procrustes,
        f"{pair}_cka": None if found is None else found.cka,
    }


def _numbers(values: Tensor | None, chosen: Sequence[int], num_heads: int) -> list[float | None]:
    numbers = [math.nan] * num_heads if values is None else values.double().tolist()
    return [None if math.isnan(numbers[head]) else numbers[head] for head in chosen]


def _lists(values: Tensor, chosen: Sequence[int]) -> list[list[float]]:
    rows = values.tolist()
    return [[value for value in rows[head] if math.isfinite(value)] for head in chosen]


def _cut(layer: AttentionLayer, measured: HeadMeasures, chosen: Sequence[int]) -> dict[str, list[int]]:
    """Parameters that the factors of the nearest forms of lower rank have less than those of the heads."""
    weights, scoring = layer.weights, layer.scoring
    # Neither a rotation nor a norm lets other factors of W_Q W_Kᵀ stand for W_Q and W_K.
    fixed = scoring.rotation is None and scoring.q_norm is None and scoring.k_norm is None
    chains = [weights.chain(side) for side in SIDES]
    if any(len(chain) != 1 for chain in chains) or isinstance(layer.scoring.bias, Disentangled):
        return {}  # what one head would lose, another still needs
    if len({id(chain[0]) for chain in chains}) < len(chains):
        return {}
    height = {side: weights.chain(side)[0].d_in for side in ("q", "k", "v")}
    width_out = weights.o[0].d_out
    if weights.num_key_heads != weights.num_heads:
        return {}
    found = {}
    for form, spectrum, numbers_a_direction in (
        ("qk", measured.qk, height["q"] + height["k"]),
        ("ov", measured.ov, height["v"] + width_out),
    ):
        if form == "ov" or fixed:
            full = spectrum.values.shape[-1]
            ranks = [spectrum.rank_within(loss) for loss in LOSSES]
            found[form] = [
                sum(
                    (full - int(rank[head])) * numbers_a_direction for head in chosen if measured.finite[head]
                )
                for rank in ranks
            ]
    return found


def _foldable(layer: AttentionLayer) -> dict[str, int | str]:
    """Parameters that each exact rewrite would take away, or why it is refused."""
    found: dict[str, int | str] = {}
    rewrites: list[tuple[str, Callable[[AttentionWeights], Rewritten]]] = [
        ("drop the key bias", drop_key_bias),
        ("fold the value bias", fold_value_bias),
    ]
    if any(len(layer.weights.chain(side)) > 1 for side in SIDES) and not layer.scoring.between:
        rewrites.append((FOLD, fold))
    for name, rewrite in rewrites:
        try:
            left = rewrite(layer.weights).weights.num_parameters
        except RewriteRefusedError as refusal:
            found[name] = str(refusal)
        else:
            found[name] = layer.weights.num_parameters - left
    return found
