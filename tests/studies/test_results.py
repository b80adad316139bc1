"""The studies of `docs/`, judged again from their raw runs."""

from math import exp, log10

import pytest
from benchmarks.study_results import RESULTS, by_size, difference, report


@pytest.mark.slow
def test_the_reports_in_the_documentation_are_what_their_raw_runs_give() -> None:
    for folder in RESULTS.iterdir():
        assert (folder / "README.md").read_text(encoding="utf-8") == report(folder.name), folder.name


def test_the_slope_of_a_cost_is_fitted_seed_by_seed() -> None:
    names = ["sharing-rotary", "sharing-learned"]
    found = by_size(names, "loss")
    decades = log10(115_328 / 111_232)  # their baselines' parameters
    for variant in ("key_value", "symmetric", "shared"):
        small, large = (found[f"{variant}, {name}"].differences for name in names)
        slopes = found[f"{variant}, slope"].differences
        assert slopes == pytest.approx({seed: (large[seed] - small[seed]) / decades for seed in small})
        loss = difference(f"{names[0]}/{variant}", f"{names[0]}/factored").differences
        assert small == pytest.approx({seed: 100 * (exp(nats) - 1) for seed, nats in loss.items()})
    assert {comparison.num_tests for comparison in found.values()} == {len(found)} == {9}


def test_seeds_of_several_studies_are_pooled() -> None:
    place = "one-matrix+one-matrix-again"
    pooled = difference(f"{place}/bilinear", f"{place}/factored").differences
    one = difference("one-matrix/bilinear", "one-matrix/factored").differences
    assert pooled.items() > one.items()
    assert pooled.keys() == {*range(1, 6), *range(11, 21)}
