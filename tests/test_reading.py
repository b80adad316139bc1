"""The source becomes no harder to read: every figure of `make reading` is within its ceiling."""

from pathlib import Path

import pytest

from reading import CEILINGS, SOURCE, Package, figures, kinds_of, misses

EXAMPLE = '''"""Models: what is loaded."""

import triptych.maps


class Model:
    def translate(self):
        from triptych.search import search  # late

        return search(self)


def packed(x, y):
    a, b = x, y
    a, b = (1, 2), x
    c, d = search()
    return [one for many in x for one in many]
'''


@pytest.fixture
def example(tmp_path: Path) -> Package:
    """A package of three modules, one of which is imported inside a function."""
    package = tmp_path / "triptych"
    package.mkdir()
    (package / "model.py").write_text(EXAMPLE)
    (package / "maps.py").write_text("# One line.\n# Its end.\nmaps = 1\n")
    (package / "search.py").write_text("def search(x): ...\n")
    return Package(tmp_path)


def test_no_figure_of_the_source_is_above_its_ceiling() -> None:
    assert not list(misses(figures(Package(SOURCE))))


def test_a_figure_above_its_ceiling_is_named() -> None:
    name = "comprehensions of two loops or more"
    (miss,) = misses({name: CEILINGS[name] + 1})
    assert miss.startswith(name)
    floor = "functions of 15 lines or more with a comment inside, %"
    assert list(misses({floor: CEILINGS[floor] - 1}))
    assert not list(misses({floor: 100}))


def test_the_reading_set_leaves_out_what_functions_import(example: Package) -> None:
    found = figures(example)
    assert found["reading set of load: modules"] == 2
    assert found["import closure of the module of Model: modules"] == 2
    assert found["reading set of load: lines"] == len(EXAMPLE.splitlines()) + 3
    assert example.imports(inside=True)["triptych.model"] == {"triptych.maps", "triptych.search"}


def test_dense_code_is_counted(example: Package) -> None:
    found = figures(example)
    assert found["packed assignments per 1,000 lines"] == pytest.approx(1000 * 2 / 13)
    assert found["comprehensions of two loops or more"] == 1
    assert found["functions that are one return or less, per 1,000 lines"] == pytest.approx(1000 / 13)
    assert list(example.modules["triptych.maps"].comments()) == ["One line. Its end."]


@pytest.mark.parametrize(
    ("clause", "kind"),
    [
        ("the layers that have no keys of their own", "relative clause"),
        ("What a plan names as smaller", "noun clause"),
        ("of the layer in its stack", "preposition fragment"),
        ("and the others as they come", "pronoun without its noun"),
        ("The channels take up the norm", "everyday verb"),
        ("The writing with one bias less", "home-made noun"),
        ("A family that is no decoder", "negated noun"),
        ("A weight as it is", "as X has it"),
        ("Texts in batches, the longest first", "trailing apposition"),
    ],
)
def test_prose_of_each_kind_is_found(clause: str, kind: str) -> None:
    assert kind in kinds_of(clause)


@pytest.mark.parametrize(
    "clause",
    [
        "Limit the batch to `max_rows` rows and `max_tokens` padded tokens",
        "Apply norm, clipping, rotary embedding and temperature to queries",
        "Right padding is masked by causality",
        "None if the model has one stack",
    ],
)
def test_prose_of_the_field_is_of_no_kind(clause: str) -> None:
    assert kinds_of(clause) == []
