"""The ways to compare queries with keys, by name."""

from triptych import user_code
from triptych.algebra.semantics import AdditiveScores, Scores, Semantics


def scores_class(name: str) -> type[Scores]:
    """The class of scores that are no products: "additive", or `FILE.py:CLASS`."""
    if user_code.is_own(name):
        return user_code.find_class(name, Scores, "scores")
    if name != AdditiveScores.name:
        raise ValueError(f"scores = {name!r} is not one of dot, cosine, additive: or name FILE.py:CLASS")
    return AdditiveScores


def scores_name(semantics: Semantics) -> str:
    """How a layer compares queries with keys, as in a recipe."""
    if semantics.scores is not None:
        return semantics.scores.name
    weight = None if semantics.q_norm is None else semantics.q_norm.weight
    return "cosine" if weight is not None and weight.ndim == 2 and weight.shape[1] == 1 else "dot"
