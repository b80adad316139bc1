"""Everything that is measured over a text, in one record, and windows of texts."""

import json
import re
from pathlib import Path

import pytest

from attending.tiny_readers import TEXTS, language_reader, pair_reader
from triptych.errors import UsageError
from triptych.running.measuring.windows import cut_windows
from triptych.seeing.attending import attend
from triptych.seeing.attending.behaviour import figures_of
from triptych.seeing.attending.over import attend_over


def test_a_record_has_every_figure_of_every_head_and_is_json() -> None:
    found = attend_over(language_reader(), TEXTS, worth="mean", explain=True, context=16)
    rows = found.rows()
    assert [(row["layer"], row["head"]) for row in rows] == [(i, j) for i in range(2) for j in range(4)]
    names = {figure.name for figure in figures_of("causal")}
    assert names | {"worth", "added", "content_share", "rank_2_nats", "copies"} <= rows[0].keys()
    assert json.dumps(rows, allow_nan=False)
    assert [table.title for table in found.tables()] == [
        "What heads do",
        "What heads are worth",
        "What explains where heads look",
    ]


def test_a_page_of_tables_has_every_head_beside_looking_evenly() -> None:
    found = attend_over(language_reader(), TEXTS, context=16)
    near, far = found.report().tables[-2:]
    heads = [f"{i}.{j}" for i in (0, 1) for j in range(4)]
    assert [row[0] for row in near.rows] == ["evenly", *heads]
    figure, column = found.layers[1].figures["previous"], near.columns.index("previous token")
    said = f"{figure.value[2]:.2f} [{figure.low[2]:.2f},\u202f{figure.high[2]:.2f}]"
    assert (near.rows[7][column], near.rows[0][column]) == (said, f"{figure.even:.2f}")
    assert far.columns[2:4] == ("distance 1", "distance 2")


def test_notes_of_heads_carry_figures_with_intervals_and_labels_to_the_page_of_a_text() -> None:
    reader = language_reader()
    found = attend_over(reader, TEXTS, worth="zero", context=16)
    notes = found.notes()
    row = found.rows()[5]
    facts = dict(notes["decoder", 1, 1].facts)
    assert facts["itself"] == (
        f"{row['self']:.2f} [{row['self_low']:.2f}, {row['self_high']:.2f}], evenly {row['self_even']:.2f}"
    )
    assert facts["loss without it"].startswith(f"{row['worth']:+.4f} [")
    named = {place: note._replace(label="a name") for place, note in notes.items()}
    (kind,) = attend(reader, TEXTS[0]).viewed(notes=named).texts[0].kinds
    assert [tuple(head.note) for head in kind.layers[1].heads] == [
        ("a name", notes["decoder", 1, head].facts) for head in range(4)
    ]


def test_a_translator_has_three_kinds_of_heads() -> None:
    texts = ["Anna sees Ben", "Ben sees Anna", "Carl runs"]
    found = attend_over(pair_reader(), texts, ["Anna sieht Ben", "Ben sieht Anna", "Carl rennt"])
    stacks = [row["stack"] for row in found.rows()]
    assert {stack: stacks.count(stack) for stack in stacks} == {"encoder": 8, "decoder": 8, "cross": 8}


def test_what_the_model_itself_translates_has_a_loss_too() -> None:
    found = attend_over(pair_reader(), TEXTS[:2], worth="zero")
    assert found.worth is not None
    assert len(found.worth.heads) == 24
    assert found.worth.loss > 0


def test_the_name_of_a_file_is_not_taken_for_a_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXTS[2])
    with pytest.raises(UsageError, match=r"text.txt\" is a file, .* give Path"):
        attend_over(language_reader(), str(tmp_path / "text.txt"))
    assert attend_over(language_reader(), tmp_path / "text.txt", context=16).tokens > 10


def test_windows_cover_a_document_side_by_side() -> None:
    reader = language_reader()
    (ids,) = reader.tokenizer.encode([TEXTS[2]])
    found = cut_windows(reader, [TEXTS[2], ""], context=5)
    kept = ids[:-1] if len(ids) % 5 == 1 else ids  # a token alone has nothing to look at
    assert [token for window in found.windows for token in window.text.ids] == kept
    assert max(len(window.text.ids) for window in found.windows) == 5
    assert (found.units, len(set(found.unit_of))) == ("windows", len(found.windows))
    assert cut_windows(reader, TEXTS, context=5).units == "documents"


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("64 positions", lambda: cut_windows(language_reader(), TEXTS, context=65)),
        ("does not translate", lambda: cut_windows(language_reader(), TEXTS, TEXTS)),
        ("give one for each", lambda: cut_windows(pair_reader(), TEXTS, TEXTS[:1])),
        ("whole lines", lambda: cut_windows(pair_reader(), TEXTS, context=8)),
        ("nothing to measure", lambda: cut_windows(language_reader(), ["", ""])),
        ("no mask token", lambda: attend_over(language_reader(kind="encoder"), TEXTS, worth="zero")),
    ],
)
def test_what_does_not_fit_the_model_is_said(said: str, call: object) -> None:
    assert callable(call)
    with pytest.raises(UsageError, match=said):
        call()


def test_the_time_without_heads_is_stated_before_the_first_is_left_out() -> None:
    told = list[tuple[str, float, float]]()
    attend_over(language_reader(), TEXTS, worth="zero", context=16, progress=lambda *one: told.append(one))
    leaving = [one for one in told if one[0].startswith("leaving heads out")]
    first, *others = leaving
    assert first[1] == 0
    assert re.fullmatch(r"leaving heads out, about \d+ s in all", first[0])
    assert {one[0] for one in others} == {first[0]}
    assert others[-1][1] == others[-1][2]
