"""The measures of heads in an inspection, with their descriptions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from triptych.core.algebra.weights import SIDES

# Shares of the energy omitted by the nearest form of lower rank.
LOSSES = (0.01, 0.05, 0.10)


@final
@dataclass(frozen=True)
class Measure:
    """A figure of each head."""

    name: str  # column name
    title: str  # readable name
    meaning: str  # definition and interpretation, in a sentence or two
    group: str  # group of measures
    # the figure depends on the basis within the head; the head's function does not
    of_basis: bool = False

    @property
    def by_qk(self) -> bool:
        """Return True if figures of W_QK and of its rotary pairs are not comparable."""
        return self.name.startswith("qk_") and self.group == _LOOKS


_LOOKS = "Where it looks"
_MOVES = "What it moves"
_LIKENESS = "Likeness of its maps"
_SIZES = "Sizes of its maps"


# Numbers of leading directions, besides the first direction.
MORE_OF_TOP = (2, 4, 8, 16, 32)


def _of_form(form: str, title: str, group: str) -> Iterator[Measure]:
    for name, what, meaning in (
        (
            "effective_rank",
            "effective rank",
            "exp of the entropy of σ/Σσ: how many directions share the work, 1 to the head's width.",
        ),
        ("stable_rank", "stable rank", "Σσ²/σ₁²: 1 if one direction does it all."),
        (
            "participation",
            "participation ratio",
            "(Σσ²)²/Σσ⁴: between stable and effective rank.",
        ),
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
            for count in MORE_OF_TOP
        ),
        ("spectral_norm", "spectral norm", "σ₁: the most it can stretch an input."),
        ("frobenius_norm", "Frobenius norm", "√Σσ²: its size over all inputs."),
        (
            "condition",
            "condition",
            "σ₁ over the smallest singular value; infinite where the numerical rank is not full.",
        ),
    ):
        # Rotary heads have energies of pairs instead of singular values.
        if form == "qk":
            meaning += " Of rotary heads: of the rotary pairs, σ² being their energies."
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
            "The same over what random subspaces of these sizes have on average: 1 is chance. At most it is "
            "d over the width of the larger map: compare models by the excess.",
        ),
        (
            "p_value",
            f"p-value of the overlap of {both}",
            "How probable as much overlap, or more, is for random subspaces.",
        ),
    ):
        yield Measure(f"{pair}_{name}", title, meaning, _LIKENESS)
    for name, title, meaning in (
        (
            "cosine",
            f"cosine of {both}",
            "Cosine of the entries. Training chose the basis within the head, which its function does not "
            "see: compare this with nothing but itself.",
        ),
        (
            "procrustes",
            f"cosine of {both} after rotation",
            "Cosine of the entries after the best rotation of one of them, 0 to 1; lengths still count.",
        ),
        (
            "cka",
            f"CKA of {both}",
            "Linear, uncentred, of rows as examples (Kornblith et al. 2019), 0 to 1.",
        ),
    ):
        yield Measure(f"{pair}_{name}", title, meaning, _LIKENESS, of_basis=True)


MEASURES: tuple[Measure, ...] = (
    *_of_form("qk", "W_QK", _LOOKS),
    Measure(
        "qk_symmetric_share",
        "symmetric share of W_QK",
        "‖½(W + Wᵀ)‖²/‖W‖²: 1 symmetric, 0 antisymmetric, ½ (1 + 1/d) for random factors.",
        _LOOKS,
    ),
    Measure(
        "qk_symmetry",
        "symmetry score of W_QK",
        "tr(W²)/‖W‖²: 1, −1 and 1/d for the same.",
        _LOOKS,
    ),
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
        "Share of the energy of the three that is lost if their mean replaces each: 0 if they are one "
        "matrix, ⅔ if their entries are unrelated.",
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
            f"{pair}_excess",
            f"excess of the overlap of W_{pair[0].upper()} and W_{pair[1].upper()} over chance",
            "(overlap − chance)/(1 − chance): 0 is chance, 1 one space, whatever the sizes.",
            _LIKENESS,
        )
        for pair in ("qk", "qv", "kv")
    ),
    *(
        Measure(
            f"{side}_norm",
            f"norm of W_{side.upper()}",
            "Frobenius norm of the map.",
            _SIZES,
            of_basis=True,
        )
        for side in SIDES
    ),
)
