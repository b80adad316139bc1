import numpy as np
import pytest

from triptych.seeing.reports import AttentionPicture, Bar, BarChart, Table, TranslationSample


def test_mean_over_heads_is_the_mean() -> None:
    weights = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=np.float16)
    picture = AttentionPicture("layer 0", ("a", "b"), ("c",), weights)
    np.testing.assert_array_equal(picture.mean_over_heads(), [[0.5, 0.5]])


@pytest.mark.parametrize("shape", [(1, 2), (1, 2, 1), (0, 1, 2), (1, 1, 3)])
def test_weights_of_another_shape_than_the_tokens_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"'layer 0': weights have shape .* want \[num_heads ≥ 1, 1, 2\]"):
        AttentionPicture("layer 0", ("a", "b"), ("c",), np.zeros(shape))


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan")])
def test_weights_outside_0_to_1_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="0–1"):
        AttentionPicture("layer 0", ("a",), ("c",), np.array([[[bad]]]))


def test_a_ragged_table_is_refused_with_its_row() -> None:
    with pytest.raises(ValueError, match="'spectra': row 1 has 1 cells for 2 columns"):
        Table("spectra", ("head", "rank"), (("0", "8"), ("1",)))


def test_exactness_is_unknown_without_a_reference() -> None:
    assert TranslationSample("a", "b").is_exact is None
    assert TranslationSample("a", "b", "b").is_exact is True
    assert TranslationSample("a", "b", "B").is_exact is False


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_bar_that_cannot_be_drawn_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="'P': the bar of x is"):
        BarChart("P", (Bar("x", value, "?"),))


def test_a_part_of_a_table_keeps_what_is_numeric() -> None:
    table = Table("t", ("a", "b", "c"), (("1", "2", "3"),), "said", numeric=(0, 2))
    assert table.part((2, 1)) == Table("t", ("c", "b"), (("3", "2"),), "said", numeric=(0,))
