"""Correlations of heads whose behaviour follows their weights, or does not."""

import random

import pytest

from triptych.attending.correlations import correlate


def heads(count: int) -> list[dict[str, object]]:
    draw = random.Random(0)
    found: list[dict[str, object]] = []
    for number in range(count):
        size = draw.random()
        found.append(
            {
                "stack": "decoder",
                "layer": number // 8,
                "head": number % 8,
                "qk_spectral_norm": size,
                "ov_copying": draw.random(),
                "qk_condition": None,
                "entropy": 3 - size**3,
                "previous": (number // 8) / 10 + draw.random() / 1000,
            }
        )
    return found


def test_what_follows_a_measure_is_found_and_what_does_not_is_not_sure() -> None:
    found = {(one.measure, one.figure): one for one in correlate(heads(32))}
    planted = found["qk_spectral_norm", "entropy"]
    assert (planted.value, planted.low, planted.high) == pytest.approx((-1, -1, -1))
    assert planted.sure
    free = found["ov_copying", "entropy"]
    assert free.low < 0 < free.high
    assert not free.sure
    assert not any(measure == "qk_condition" for measure, _ in found)


def test_a_difference_of_layers_alone_is_none_within_them() -> None:
    rows = heads(32)
    for row in rows:
        row["qk_spectral_norm"] = float(str(row["layer"])) + float(str(row["head"])) / 100
        row["previous"] = float(str(row["layer"])) - float(str(row["head"])) / 100
    found = {(one.measure, one.figure): one for one in correlate(rows)}
    assert found["qk_spectral_norm", "previous"].value > 0.8
    assert found["qk_spectral_norm", "previous"].within == pytest.approx(-1)


def test_few_heads_have_no_correlation() -> None:
    assert correlate(heads(7)) == []
