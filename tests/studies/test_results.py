"""The studies of `docs/`, judged again from their raw runs."""

from benchmarks.study_results import RESULTS, difference, report


def test_the_reports_in_the_documentation_are_what_their_raw_runs_give() -> None:
    for folder in RESULTS.iterdir():
        assert (folder / "README.md").read_text(encoding="utf-8") == report(folder.name), folder.name


def test_seeds_of_several_studies_are_pooled() -> None:
    place = "one-matrix+one-matrix-again"
    pooled = difference(f"{place}/bilinear", f"{place}/factored").differences
    one = difference("one-matrix/bilinear", "one-matrix/factored").differences
    assert pooled.items() > one.items()
    assert pooled.keys() == {*range(1, 6), *range(11, 21)}
