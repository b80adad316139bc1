import io

import pytest
from rich.console import Console

from triptych.training.progress import BarDisplay, LineDisplay, Moment, display_for


def _moment(step: int) -> Moment:
    return Moment(step, 10, epoch=2, loss=1.2345, learning_rate=3e-4, tokens_per_second=4321.0)


def test_without_a_terminal_progress_is_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with LineDisplay(every_seconds=0.0) as display:
        display.update(_moment(5))
        display.say("a word")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 5/10  epoch 2  loss 1.234  lr 3.00e-04  4,321 tok/s  left ")
    assert lines[1] == "a word"


def test_lines_come_no_more_often_than_asked_but_the_last_step_always_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LineDisplay(every_seconds=3600.0) as display:
        for step in range(1, 11):
            display.update(_moment(step))
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["10/10"]


def test_on_a_terminal_there_is_a_bar_with_loss_rate_speed_and_time_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    display = display_for(console)
    assert isinstance(display, BarDisplay)
    with display:
        display.say("a word")
        display.update(_moment(5))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("a word", "5/10", "loss 1.234", "lr 3.00e-04", "4,321 tok/s", "left"):
        assert part in shown
