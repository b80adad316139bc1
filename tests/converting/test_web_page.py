"""The page of a translator in a browser: opened from a disk, used, changed, and asking nobody."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import pytest

from browser import Page
from triptych.model import Model, load

SETTLED = "Number(document.body.dataset.settled) === document.getElementById('explore')?.explorer?.turn"
SENTENCE = "Ich komme um halb vier an."


@pytest.fixture(scope="module")
def demo() -> Model:
    return load("demo", device="cpu")


@pytest.fixture(scope="module")
def page(demo: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("web") / "demo.html"
    demo.convert(path, "web")
    return path


def wait_for(tab: Page, condition: str) -> None:
    for _ in range(1200):
        if tab.value(condition):
            return
        time.sleep(0.05)
    raise AssertionError(f"never true: {condition}; {text_of(tab, '#problem')}")


def text_of(tab: Page, selector: str) -> str:
    return str(tab.value(f"document.querySelector({json.dumps(selector)}).textContent"))


def opened(
    tab: Page, page: Path, *, width: int = 900, height: int = 800, theme: str = "light", **state: str
) -> None:
    tab.complaints.clear()
    tab.requests.clear()
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    tab.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
    )
    place = state.pop("place", "")
    tab.visit("about:blank")
    tab.visit(f"{page.as_uri()}#{place}&{urlencode(state)}")
    wait_for(tab, SETTLED)


@pytest.mark.parametrize(("width", "height"), [(360, 740), (900, 800), (1400, 800)])
def test_the_matrix_is_on_the_first_screen_and_nothing_is_asked_for(
    tab: Page, page: Path, width: int, height: int
) -> None:
    for theme in ("light", "dark"):
        opened(tab, page, width=width, height=height, theme=theme, text=SENTENCE)
        assert tab.value("document.documentElement.scrollWidth") <= width
        matrix = tab.value("document.querySelector('[data-part=matrix]').getBoundingClientRect().toJSON()")
        assert matrix["top"] + 0.8 * matrix["height"] < height
        assert text_of(tab, "[data-part=name]").startswith("cross, layer ")
        dark = tab.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(dark[:3]) < 64) == (theme == "dark")
        assert (tab.complaints, text_of(tab, "#problem")) == ([], "")
        assert {url for url in tab.requests if not url.startswith("data:")} <= {page.as_uri(), "about:blank"}


def test_a_sentence_that_is_typed_is_translated_as_in_python(tab: Page, page: Path, demo: Model) -> None:
    opened(tab, page)
    tab.value("document.getElementById('text').select()")
    tab.write(SENTENCE)
    tab.point_at("#write", click=True)
    own = demo.translate(SENTENCE, beam_size=4, num_best=4, split=False)
    wait_for(tab, f"document.getElementById('output').textContent.trim() === {json.dumps(own.text)}")
    found = tab.value("[...document.querySelectorAll('[data-candidate]')].map((one) => one.textContent)")
    assert found == [one.text for one in own.candidates]
    tab.value("document.getElementById('beam').value = 1")
    tab.point_at("#write", click=True)
    wait_for(tab, "document.querySelectorAll('[data-candidate]').length === 1")
    assert text_of(tab, "[data-candidate]") == demo.translate(SENTENCE, beam_size=1).text
    wait_for(tab, SETTLED)
    # A word of it tells what it came from.
    tab.point_at("#output [data-query='1']")
    assert " came from: " in text_of(tab, "#from")


def test_a_switch_shows_the_other_output_and_the_loss_with_an_interval(
    tab: Page, page: Path, demo: Model
) -> None:
    opened(tab, page, width=1400, place="encoder.0.1", text=SENTENCE)
    call = "tie(encoder.0, W_Q, W_K)"
    tab.point_at(f"[data-calls={json.dumps(json.dumps([call]))}]", click=True)
    after = demo.tie("encoder.0", "W_Q", "W_K").translate(SENTENCE, beam_size=4, split=False).text
    wait_for(tab, f"document.getElementById('after-text')?.textContent === {json.dumps(after)}")
    wait_for(tab, "document.getElementById('held-out')?.textContent.includes('interval')")
    assert "over sentences: +" in text_of(tab, "#held-out")
    assert text_of(tab, "#after code") == 'model = model.tie("encoder.0", "W_Q", "W_K")'
    script = tab.value("document.querySelector('[data-copy]').dataset.copy")
    assert 'model = triptych.load("demo")\nmodel = model.tie("encoder.0", "W_Q", "W_K")\n' in script
    wait_for(tab, SETTLED)
    link = tab.value("location.hash")
    assert parse_qs(link.partition("&")[2])["if"] == [call]
    tab.visit("about:blank")
    tab.visit(page.as_uri() + link)
    wait_for(tab, SETTLED)
    assert text_of(tab, "#after-text") == after
    tab.point_at("[data-remove]", click=True)
    wait_for(tab, "document.querySelector('[data-remove]') === null && " + SETTLED)
    assert (tab.complaints, text_of(tab, "#problem")) == ([], "")


def test_ranks_exchanges_and_the_fold_are_pressed_and_the_rest_is_refused_in_words(
    tab: Page, page: Path
) -> None:
    opened(tab, page, place="cross.0.1", text=SENTENCE)
    before = text_of(tab, "#keys")
    tab.value("document.getElementById('rank-ov').focus()")
    tab.press("ArrowLeft")
    wait_for(tab, "document.body.dataset.row.endsWith('truncate_ov(cross.0.1, 31)')")
    wait_for(tab, SETTLED)
    tab.value("const one = document.getElementById('exchange'); one.value = 'cross.0.2'; "
              "one.dispatchEvent(new Event('input', { bubbles: true }))")  # fmt: skip
    wait_for(tab, "document.body.dataset.row.endsWith('exchange(cross.0.1, cross.0.2)')")
    wait_for(tab, SETTLED)
    tab.point_at('[data-remove="*"]', click=True)
    wait_for(tab, "document.querySelector('[data-remove]') === null && " + SETTLED)
    assert text_of(tab, "#keys") == before
    tab.point_at("[data-calls='[\"fold()\"]']", click=True)
    wait_for(tab, "document.getElementById('held-out')?.textContent.includes('interval') && " + SETTLED)
    assert "KL, mean over the text0 (below 1e-9) nats" in text_of(tab, "#effect")
    assert tab.value("document.querySelectorAll('#after mark').length") == 0
    tab.point_at("[data-calls*='W_Q, W_K']", click=True)
    wait_for(tab, "!document.getElementById('problem').hidden")
    assert "in cross-attention queries read the decoder's stream" in text_of(tab, "#problem")


def test_controls_have_names_and_a_row_is_gone_through_by_keys(tab: Page, page: Path) -> None:
    opened(tab, page, place="cross.0.1.2", text=SENTENCE)
    controls = "[...document.querySelectorAll('button, input, select, textarea, canvas[tabindex]')]"
    named = "one.textContent.trim() || one.ariaLabel || one.labels?.length || !one.offsetParent"
    assert tab.value(f"{controls}.filter((one) => !({named})).map((node) => node.outerHTML)") == []
    lit = "[...document.querySelectorAll('#formula .lit')].map((part) => part.dataset.term)"
    tab.value("document.querySelector('#keys [data-at=\"0 0\"]').focus()")
    assert tab.value(lit) == ["products"]
    tab.press("ArrowRight")
    assert tab.value(lit) == ["scaled"]


@pytest.mark.slow
def test_times_of_the_page(tab: Page, page: Path, record_property: Callable[[str, object], None]) -> None:
    tab.visit("about:blank")
    first = tab.open(page)
    wait_for(tab, SETTLED)
    times = {"seconds to the first drawing": first, "ms to the first answer": text_of(tab, "#busy")}
    for call in ("ablate(cross.0.1)", "without_positions()"):
        tab.value(f"document.getElementById('explore').explorer.toggle([{json.dumps(call)}])")
        wait_for(tab, f"document.body.dataset.row.endsWith({json.dumps(call)})")
        times[call] = text_of(tab, "#busy")
        wait_for(tab, SETTLED)
    record_property("times", times)
    print(times)
    assert first > 0
