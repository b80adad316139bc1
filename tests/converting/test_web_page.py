"""The page of a translator in a browser: opened from a disk, used, changed, and asking nobody."""

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import pytest

from browser import Page, wait_for
from explorer_page import SETTLED, open_at, text_of
from firefox import firefox_page, found_firefox
from triptych.model import Model

SENTENCE = "Ich komme um halb vier an."


def opened(
    tab: Page,
    page: Path,
    *,
    place: str = "",
    width: int = 900,
    height: int = 800,
    theme: str = "light",
    **state: str,
) -> None:
    """Open the page at a head (`place`) with a text and switches."""
    open_at(tab, f"{page.as_uri()}#{place}&{urlencode(state)}", width=width, height=height, theme=theme)


def choose(tab: Page, name: str, option: str) -> None:
    """Choose an option of a list by what it says."""
    found = f"[...one.options].find(({{ text }}) => text === {json.dumps(option)})"
    chosen = f"one.value = {found}.value; one.dispatchEvent(new Event('input', {{ bubbles: true }}))"
    tab.value(f"((one) => {{ {chosen}; }})(document.getElementById('{name}'))")


@pytest.mark.parametrize(("width", "height"), [(360, 740), (900, 800), (1400, 800)])
def test_the_matrix_is_on_the_first_screen_and_nothing_is_asked_for(
    tab: Page, demo_page: Path, width: int, height: int
) -> None:
    for theme in ("light", "dark"):
        opened(tab, demo_page, width=width, height=height, theme=theme, text=SENTENCE)
        assert tab.value("document.documentElement.scrollWidth") <= width
        matrix = tab.value("document.querySelector('[data-part=matrix]').getBoundingClientRect().toJSON()")
        assert matrix["top"] + 0.8 * matrix["height"] < height
        assert text_of(tab, "[data-part=name]").startswith("cross, layer ")
        dark = tab.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(dark[:3]) < 64) == (theme == "dark")
        assert (tab.complaints, text_of(tab, "#problem")) == ([], "")
        assert {url for url in tab.requests if not url.startswith("data:")} <= {
            demo_page.as_uri(),
            "about:blank",
        }


def test_a_sentence_that_is_typed_is_translated_as_in_python(tab: Page, demo_page: Path, demo: Model) -> None:
    opened(tab, demo_page)
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
    tab: Page, demo_page: Path, demo: Model
) -> None:
    opened(tab, demo_page, width=1400, place="encoder.0.1", text=SENTENCE)
    call = "tie(encoder.0, W_Q, W_K)"
    watch = "window.verdicts = []; new MutationObserver(() => window.verdicts.push("
    watch += "document.getElementById('verdict')?.textContent)).observe(document.body, "
    tab.value(watch + "{ childList: true, subtree: true, characterData: true })")
    tab.point_at(f"[data-calls={json.dumps(json.dumps([call]))}]", click=True)
    after = demo.tie("encoder.0", "W_Q", "W_K").translate(SENTENCE, beam_size=4, split=False).text
    wait_for(tab, f"document.getElementById('after-text')?.textContent === {json.dumps(after)}")
    wait_for(tab, "document.getElementById('held-out')?.textContent.includes('interval')")
    assert "over sentences: +" in text_of(tab, "#held-out")
    verdict = text_of(tab, "#verdict")
    assert verdict.startswith("With W_Q = W_K in layer encoder.0: ")
    assert after in verdict or "the translation stays the same" in verdict
    assert verdict.endswith(": the model is worse.")
    # Until then it says that it has not ended.
    unfinished = {one for one in tab.value("window.verdicts") if one and "the model is" not in one}
    assert unfinished
    assert all(
        one.endswith("The loss on the held-out sentences is still being computed …") for one in unfinished
    )
    assert any("the translation is still being computed … " in one for one in unfinished)
    assert "loss on this translation (" in text_of(tab, "#effect")
    assert text_of(tab, "#most").startswith("The loss rises most on: ")
    assert text_of(tab, "#after code") == 'model = model.tie("encoder.0", "W_Q", "W_K")'
    script = tab.value("document.querySelector('[data-copy]').dataset.copy")
    assert 'model = triptych.load("demo")\nmodel = model.tie("encoder.0", "W_Q", "W_K")\n' in script
    wait_for(tab, SETTLED)
    link = tab.value("location.hash")
    assert parse_qs(link.partition("&")[2])["if"] == [call]
    tab.visit("about:blank")
    tab.visit(demo_page.as_uri() + link)
    wait_for(tab, SETTLED)
    assert text_of(tab, "#after-text") == after
    tab.point_at("[data-remove]", click=True)
    wait_for(tab, "document.querySelector('[data-remove]') === null && " + SETTLED)
    assert (tab.complaints, text_of(tab, "#problem")) == ([], "")


def test_ranks_exchanges_and_the_fold_are_pressed_and_the_rest_is_refused_in_words(
    tab: Page, demo_page: Path
) -> None:
    opened(tab, demo_page, place="cross.0.1", text=SENTENCE)
    before = text_of(tab, "#keys")
    tab.value("document.getElementById('rank-ov').focus()")
    tab.press("ArrowLeft")
    wait_for(tab, "document.body.dataset.row.endsWith('truncate_ov(cross.0.1, 31)')")
    wait_for(tab, SETTLED)
    choose(tab, "exchange", "cross.0.2")
    wait_for(tab, "document.body.dataset.row.endsWith('exchange(cross.0.1, cross.0.2)')")
    wait_for(tab, SETTLED)
    tab.point_at('[data-remove="*"]', click=True)
    wait_for(tab, "document.querySelector('[data-remove]') === null && " + SETTLED)
    assert text_of(tab, "#keys") == before
    tab.point_at("[data-calls='[\"fold()\"]']", click=True)
    wait_for(tab, "document.getElementById('held-out')?.textContent.includes('interval') && " + SETTLED)
    assert "KL of the next token, mean over this translation0 (below 1e-9) nats" in text_of(tab, "#effect")
    assert tab.value("document.querySelectorAll('#after mark').length") == 0
    said = "the translation stays the same. On the held-out sentences the loss stays the same."
    assert text_of(tab, "#verdict") == f"With W_Q W_Kᵀ as one matrix: {said}"
    tab.point_at("[data-calls*='W_Q, W_K']", click=True)
    wait_for(tab, "!document.getElementById('problem').hidden")
    assert "in cross-attention queries read the decoder's stream" in text_of(tab, "#problem")


def test_controls_have_names_and_a_row_is_gone_through_by_keys(tab: Page, demo_page: Path) -> None:
    opened(tab, demo_page, place="cross.0.1.2", text=SENTENCE)
    controls = "[...document.querySelectorAll('button, input, select, textarea, canvas[tabindex]')]"
    named = "one.textContent.trim() || one.ariaLabel || one.labels?.length || !one.offsetParent"
    assert tab.value(f"{controls}.filter((one) => !({named})).map((node) => node.outerHTML)") == []
    # A screen reader has a name for all that can be pressed, chosen or filled in.
    roles = {
        "button",
        "link",
        "textbox",
        "searchbox",
        "spinbutton",
        "slider",
        "combobox",
        "checkbox",
        "listbox",
    }
    tree = [node for node in tab.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    pressed = [node for node in tree if node["role"]["value"] in roles]
    assert len(pressed) > 30
    assert [node for node in pressed if not node.get("name", {}).get("value")] == []
    lit = "[...document.querySelectorAll('#formula .lit')].map((part) => part.dataset.term)"
    tab.value("document.querySelector('#keys [data-at=\"0 0\"]').focus()")
    assert tab.value(lit) == ["products"]
    tab.press("ArrowRight")
    assert tab.value(lit) == ["scaled"]


def test_a_tie_of_a_whole_encoder_and_the_sentence_that_it_changes_most_are_one_click_away(
    tab: Page, demo_page: Path, demo: Model
) -> None:
    opened(tab, demo_page, width=1400, text=SENTENCE)
    choose(tab, "where", "every layer of the encoder")
    # The choice stays where another kind of attention is looked at, and so do the numbers of layer and head.
    at = tab.value("location.hash").partition("&")[0].partition(".")[2]
    for kind in ("encoder", "decoder"):
        kinds = "[...document.querySelectorAll('[data-kind]')]"
        tab.value(f"{kinds}.find((one) => one.textContent === '{kind}').click()")
        wait_for(tab, f"location.hash.startsWith('#{kind}.{at}') && " + SETTLED)
    places = ("encoder.0", "encoder.1")
    calls = json.dumps([f"tie({place}, W_Q, W_K)" for place in places], separators=(",", ":"))
    tab.point_at(f"[data-calls={json.dumps(calls)}]", click=True)
    wait_for(tab, "document.querySelector('#most .example') !== null && " + SETTLED)
    text = text_of(tab, "#most .example")
    tab.point_at("#most .example", click=True)
    wait_for(tab, f"document.getElementById('text').value === {json.dumps(text)} && " + SETTLED)
    changed = demo
    for place in places:
        changed = changed.tie(place, "W_Q", "W_K")
    outputs = [one.translate(text, beam_size=4, split=False).text for one in (demo, changed)]
    assert text_of(tab, "#verdict").startswith("With W_Q = W_K in layers encoder.0, encoder.1: ")
    assert text_of(tab, "#after-text") == outputs[1]
    assert outputs[0] in text_of(tab, "#after")
    # Another head keeps what is said of the output.
    tab.point_at('.glance a[data-at]:not([aria-current]):not([data-at$="-1"])', click=True)
    wait_for(tab, SETTLED)
    assert text_of(tab, "#after-text") == outputs[1]
    assert (tab.complaints, text_of(tab, "#problem")) == ([], "")


@pytest.mark.parametrize(
    "call",
    ["ablate(zzz)", "<img src=x onerror='document.title = 0'>", "__proto__()", "truncate(cross.0.1, 99)"],
)
def test_an_address_with_a_switch_that_does_not_exist_shows_the_model_without_it(
    tab: Page, demo_page: Path, demo: Model, call: str
) -> None:
    state = urlencode({"text": SENTENCE, "if": call})
    open_at(tab, f"{demo_page.as_uri()}#cross.9.9.999&{state}")
    assert text_of(tab, "#output").strip() == demo.translate(SENTENCE, beam_size=4, split=False).text
    assert text_of(tab, "#problem") != ""
    assert tab.value("document.querySelectorAll('[data-remove]').length") == 0
    assert (tab.value("document.title"), tab.complaints) == ("demo", [])


def test_a_browser_that_refuses_many_changes_of_the_address_gets_the_last_one_later(
    tab: Page, demo_page: Path
) -> None:
    """As Safari does after 100 of them in 10 seconds."""
    opened(tab, demo_page, place="cross.0.1", text=SENTENCE)
    refused = "history.replaceState = () => { throw new DOMException('too many', 'SecurityError'); }"
    tab.value(f"window.own = history.replaceState.bind(history); {refused}; null")
    tab.value("document.getElementById('explore').explorer.toggle(['ablate(cross.0.1)'])")
    wait_for(tab, "document.body.dataset.row.endsWith('ablate(cross.0.1)') && " + SETTLED)
    assert text_of(tab, "#problem") == ""
    assert "ablate" not in tab.value("location.hash")
    tab.value("history.replaceState = window.own; null")
    wait_for(tab, "location.hash.includes('ablate')")


def test_the_matrix_is_of_words_or_of_tokens(tab: Page, demo_page: Path, demo: Model) -> None:
    text = "Am 3. Mai kostet es 1234,50 Euro."
    opened(tab, demo_page, place="cross.1.2", text=text)
    viewer = "document.querySelector('section.attention').viewer"
    attention = demo.attend(text, demo.translate(text, beam_size=4, split=False).text)
    words = attention.words("cross.1.2")
    assert [key.strip() for key in tab.value(f"{viewer}.kind.keys")] == [word.text for word in words.source]
    row = tab.value(f"{viewer}.map.row(2)")
    assert dict(row) == pytest.approx(dict(enumerate(words.weights[2].tolist())), abs=5e-3)
    tab.value(f"{viewer}.point('query', 3, {{ pin: true }})")
    wait_for(tab, f"document.body.dataset.row.startsWith('cross.1.2 {words.target[3].start} ')")
    tab.point_at("[data-words=tokens]", click=True)
    wait_for(tab, f"{viewer}.kind.keys.length === {len(attention.source_tokens or ())}")
    assert tab.value(f"{viewer}.focus") == words.target[3].start
    assert tab.value("location.hash").startswith(f"#cross.1.2.{words.target[3].start}&")


def test_a_head_is_seen_as_matrices_and_its_picture_is_copied(tab: Page, demo_page: Path) -> None:
    opened(tab, demo_page, place="encoder.0.1", text=SENTENCE)
    tab.point_at("#forms summary", click=True)
    wait_for(tab, "document.querySelectorAll('#head-forms table').length === 2")
    assert tab.value("document.querySelectorAll('#head-forms canvas').length") == 5
    before = text_of(tab, "#head-forms")
    tab.value("document.getElementById('explore').explorer.toggle(['truncate(encoder.0.1, 3)'])")
    wait_for(tab, f"document.getElementById('head-forms').textContent !== {json.dumps(before)}")
    assert "effective rank of W_QK2." in text_of(tab, "#head-forms")
    tab.value("document.querySelector('[data-part=copy]').click()")
    wait_for(
        tab, "['copied', 'saved instead'].includes(document.querySelector('[data-part=copy]').textContent)"
    )
    assert (tab.complaints, text_of(tab, "#problem")) == ([], "")


def test_every_number_of_a_row_lights_up_its_part_of_the_formula(tab: Page, demo_page: Path) -> None:
    opened(tab, demo_page, place="decoder.0.1.3", text=SENTENCE)
    terms = tab.value(
        "[...document.querySelectorAll('#formula [data-term]')].map((part) => part.dataset.term)"
    )
    assert {"q", "products", "scaled", "visible", "weights", "v", "z", "projected"} <= {*terms}
    lit = "[...document.querySelectorAll('#formula .lit')].map((part) => part.dataset.term)"
    numbers = "[...document.querySelectorAll('#row td[data-term], #row canvas[data-term]')]"
    found = tab.value(f"{numbers}.map((part) => {{ part.focus(); return [part.dataset.term, {lit}]; }})")
    # A share of z is a weight times a value.
    unlit = {term for term, parts in found if not parts and term != "effect"}
    assert (len(found) > 20, unlit) == (True, set())


@pytest.mark.skipif(found_firefox() is None, reason="no Firefox is on the PATH")
def test_the_page_works_in_firefox(demo_page: Path, demo: Model, tmp_path: Path) -> None:
    state = urlencode({"text": SENTENCE, "if": "tie(encoder.0, W_Q, W_K)"})
    browser = found_firefox()
    assert browser is not None
    with firefox_page(browser, tmp_path) as tab:
        tab.visit(f"{demo_page.as_uri()}#encoder.0.1.2&{state}")
        wait_for(tab, SETTLED)
        after = demo.tie("encoder.0", "W_Q", "W_K").translate(SENTENCE, beam_size=4, split=False).text
        assert text_of(tab, "#after-text") == after
        assert text_of(tab, "#output").strip() == demo.translate(SENTENCE, beam_size=4, split=False).text
        assert "interval" in text_of(tab, "#held-out")
        assert "On the held-out sentences the loss rises by " in text_of(tab, "#verdict")
        tab.value("document.getElementById('forms').open = true")
        wait_for(tab, "document.querySelectorAll('#head-forms table').length === 2")
        assert text_of(tab, "#problem") == ""


@pytest.mark.slow
def test_times_of_the_page(
    tab: Page, demo_page: Path, record_property: Callable[[str, object], None]
) -> None:
    opened(tab, demo_page, width=1400)
    for call in ("ablate(cross.0.1)", "without_positions()", "tie(encoder.0, W_Q, W_K)"):
        tab.value(f"document.getElementById('explore').explorer.toggle([{json.dumps(call)}])")
        wait_for(tab, f"document.body.dataset.row.endsWith({json.dumps(call)}) && {SETTLED}")
    for text in ("Der Zug kommt um halb vier an.", "Wir treffen uns am dritten Mai."):
        tab.value(f"document.getElementById('text').value = {json.dumps(text)}")
        tab.point_at("#write", click=True)
        wait_for(tab, f"document.getElementById('explore').explorer.text === {json.dumps(text)} && {SETTLED}")
    entries = "[...performance.getEntriesByType('paint'), ...performance.getEntriesByType('measure')]"
    times = tab.value(f"{entries}.map(({{ name, startTime, duration }}) => [name, duration || startTime])")
    found = [(name, round(milliseconds)) for name, milliseconds in times]
    record_property("milliseconds", found)
    print(found)
    assert {"first-contentful-paint", "open", "switch", "sentence"} <= {name for name, _ in found}
