"""Links of the documentation into the demo's page: each state shows what is said of it."""

import re
from html import unescape
from pathlib import Path
from typing import NamedTuple

import pytest

from browser import Page
from explorer_page import open_at, text_of

DOCS = Path(__file__).parents[2] / "docs"
_LINK = re.compile(r"\]\((?:\.\./)*demo\.html(?:#([^)\s]*))?\)([^\[]*(?:\[[^\]]*\](?!\()[^\[]*)*)")
# What is said of a state: an output, a difference of the loss with its interval, a weight on a token.
_OUTPUT = re.compile("“([^”]+)”")
_LOSS = re.compile(r"([+−]?\d+\.\d+) \[([+−]?\d+\.\d+), ([+−]?\d+\.\d+)\]")
_WEIGHT = re.compile(r"(\d\.\d+) on \*([^*]+)\*")


class State(NamedTuple):
    """A linked state, and what is said of it before the next link or the end of the paragraph."""

    page: str
    address: str
    said: str


def linked_states() -> list[State]:
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            if page.name != "2026-11.md":
                links = _LINK.findall(paragraph.replace("\n", " "))
                found += [State(page.stem, address, said) for address, said in links if address]
    return found


def test_each_answer_links_into_a_state() -> None:
    table = (DOCS / "explanation" / "questions.md").read_text(encoding="utf-8")
    answers = re.findall(r"^\| \[[^\]]+\]\((questions/[\w-]+\.md)#([^)]+)\)", table, re.MULTILINE)
    assert len(answers) > 20
    for page, anchor in answers:
        text = (DOCS / "explanation" / page).read_text(encoding="utf-8")
        sections = {
            re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): section
            for title, section in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
        }
        assert "demo.html#" in sections[anchor], (page, anchor)
        assert "127.0.0.1" not in text, f"{page}: nobody may be serving"


def _number(text: str) -> float:
    return float(text.replace("−", "-"))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("state", linked_states(), ids=lambda state: f"{state.page}-{state.address}")
def test_a_linked_state_shows_what_is_said_of_it(tab: Page, demo_page: Path, state: State) -> None:
    open_at(tab, f"{demo_page.as_uri()}#{state.address}")
    assert (tab.complaints, text_of(tab, "#problem")) == ([], "")
    outputs, losses, weights = (one.findall(state.said) for one in (_OUTPUT, _LOSS, _WEIGHT))
    assert outputs or losses or weights, f"nothing is said of it: {state.said}"
    for output in outputs:
        place = "#after-text" if "if=" in state.address else "#output"
        assert text_of(tab, place).strip() == output
    for loss in losses:
        shown = re.search(r"\(([^)]+)\); .*: (\S+) to (\S+)$", text_of(tab, "#held-out"))
        assert shown is not None
        assert [*map(_number, shown.groups())] == pytest.approx([*map(_number, loss)], abs=6e-4)
    for weight, token in weights:
        cells = "[...document.querySelectorAll('#keys tbody tr')].map((row) => "
        cells += (
            "[row.querySelector('th').textContent, row.querySelector('[data-term=weights]').textContent])"
        )
        found = [_number(text) for name, text in tab.value(cells) if name == unescape(token)]
        assert min(abs(one - _number(weight)) for one in found) <= 6e-3
