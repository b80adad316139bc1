import io

import numpy as np
import pytest
from rich.console import Console, RenderableType

from triptych.seeing.reports import (
    AttentionPicture,
    Table,
    TranslationSample,
    render_attention,
    render_samples,
    render_table,
)


def printed(renderable: RenderableType, width: int = 80) -> str:
    file = io.StringIO()
    Console(width=width, color_system=None, file=file).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


@pytest.fixture
def crossing() -> AttentionPicture:
    weights = np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
    return AttentionPicture("[bold]layer", ("vor", "[/red]"), ("before", "red"), weights)


def test_each_head_shows_where_its_rows_look(crossing: AttentionPicture) -> None:
    assert "before │██\n" in printed(render_attention(crossing, 0))
    assert "before │  ██" in printed(render_attention(crossing, 1))


def test_without_a_head_the_mean_is_shown(crossing: AttentionPicture) -> None:
    text = printed(render_attention(crossing))
    assert "mean of 2 heads" in text
    assert "before │▒▒▒▒" in text


def test_tokens_are_text_and_not_markup(crossing: AttentionPicture) -> None:
    lines = printed(render_attention(crossing, 0)).splitlines()
    assert lines[0] == "[bold]layer (head 0)"
    # Read downwards, the last column of the heading.
    assert "".join(line[-1] for line in lines if len(line) == 11 and "█" not in line) == "[/red]"


def test_a_head_that_is_not_there_is_refused_with_those_that_are(crossing: AttentionPicture) -> None:
    with pytest.raises(ValueError, match=r"no head 2; .* has heads 0–1"):
        render_attention(crossing, 2)


def test_samples_show_every_sentence_and_its_mark() -> None:
    samples = [
        TranslationSample("eins", "one", "one"),
        TranslationSample("[red]zwei", "too", "two"),
        TranslationSample("drei", "three"),
    ]
    lines = [line for line in printed(render_samples(samples)).splitlines() if line.strip()][2:]
    assert [line.split() for line in lines] == [
        ["eins", "one", "one", "✓"],
        ["[red]zwei", "too", "two", "✗"],
        ["drei", "three"],
    ]


def test_no_samples_make_an_empty_table() -> None:
    assert "translation" in printed(render_samples([]))


def test_a_picture_without_tokens_makes_an_empty_map() -> None:
    shown = printed(render_attention(AttentionPicture("p", (), (), np.zeros((1, 0, 0)))))
    assert "p" in shown
    assert "│" not in shown


def test_a_table_sets_numbers_flush_right() -> None:
    table = Table("Cost", ("", "number of\nthings"), (("a name", "1.05M"), ("b", "786K")), numeric=(1,))
    lines = printed(render_table(table)).split("\n")
    assert [line.strip() for line in lines if line.strip()][-2:] == ["a name      1.05M", "b            786K"]
    assert any("things" in line for line in lines)


def test_a_table_without_names_of_columns_has_no_head() -> None:
    assert printed(render_table(Table("t", ("", ""), (("a", "b"),)))).split() == ["a", "b"]
