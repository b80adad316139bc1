"""Open, train, attend and rewrite go down the layers, and enter no package twice on the way."""

import pytest

from triptych.core.places import number_of
from triptych.seeing.reports import short_name
from walking import Entry, up, walked, walks

# The packages that each verb enters.
ENTERED = {
    "open": {"model", "running", "core"},
    "train": {"training", "running", "core"},
    "attend": {"model", "seeing", "running", "core"},
    "rewrite": {"model", "rewriting", "running", "core"},
}
# A lower package calls a higher one only by a function that it was given: a model is placed on a device while
# it is built, the inputs of layers are recorded while it runs, tensors are replaced while a file is copied.
GIVEN_FUNCTIONS = {
    "open": set[str](),
    "train": {"core > training"},
    "attend": {"core > running"},
    "rewrite": {"core > rewriting"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Entry, str]]:
    return dict(walks(tmp_path_factory.mktemp("walks")))


@pytest.mark.parametrize("verb", ENTERED)
def test_a_verb_enters_its_packages_and_no_others(verb: str, found: dict[str, dict[Entry, str]]) -> None:
    assert {entry.package for entry in found[verb]} == ENTERED[verb]


@pytest.mark.parametrize("verb", GIVEN_FUNCTIONS)
def test_a_verb_comes_back_to_a_package_only_by_a_function_that_it_gave(
    verb: str, found: dict[str, dict[Entry, str]]
) -> None:
    assert up(found[verb]) == GIVEN_FUNCTIONS[verb]


class Third:
    """A number of a layer that is asked of a higher package."""

    def __index__(self) -> int:
        return len(short_name("abc"))


def test_a_call_upwards_is_found() -> None:
    with walked() as entries:
        assert number_of(Third()) == 3
    assert [str(entry) for entry in entries] == ["you > core", "core > seeing"]
    assert up(entries) == {"core > seeing"}
