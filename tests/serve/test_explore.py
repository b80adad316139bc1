"""The page at `/` of a server: its answers are the face's records, and a person can use it."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import pytest
import torch
from torch.nn import functional as F

from browser import Page, wait_for
from explorer_page import SETTLED, open_at, text_of
from served import Served
from small_checkpoints import bert_that_runs
from triptych.model import Model, load
from triptych.seeing.attending.held_out import HeldOutText
from triptych.seeing.reports import short_name
from triptych.serving import exploring
from triptych.serving.exploring import Explorer, Shown, rounded

TEXT = "The cat sat on the mat"
CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"


def row(served: Served, *changes: str, head: int = 0, query: int = -1, **more: Any) -> dict[str, Any]:
    fields = {"model": "gpt", "text": TEXT, "changes": changes, "layer": "1", "head": head, "query": query}
    found = served.ask("/v1/explore/row", fields | more)
    assert found.status == 200, found
    return dict(found.body)


def test_a_row_is_the_faces_steps_of_the_changed_model(served: Served, language_model: Model) -> None:
    for changes, model in (((), language_model), (("ablate(0.1)",), language_model.ablate("0.1"))):
        own = model.attend(TEXT).steps(1, 0, 2)
        record, found = rounded(own.record()), row(served, *changes, query=2)
        names = ("q", "k", "v", "products", "scaled", "scores", "weights", "shares", "z", "projected")
        names += ("output", "keys")
        record["keys"] = [key.replace("▁", " ") for key in record["keys"]]
        assert {name: found[name] for name in names} == {name: record[name] for name in names}
        assert found["direct_effect"] == record["direct_effect"]
        assert found["kept"] == [*range(len(own.keys))]
    long = row(served, text=TEXT * 2)
    weights = language_model.attend(TEXT * 2)[1, 0][-1]
    assert found["model"] == ""  # where it lies is no business of a client
    assert len(long["kept"]) == 32 < len(weights)
    assert set(long["kept"]) == set(weights.topk(32).indices.tolist())


def _rank_two(model: Model) -> Model:
    head = model["1.0"]
    form = head.qk.truncate(2)
    W_Q = form.dense() @ torch.linalg.pinv(head.W_K.mT)
    return model.replace("1.0", W_Q=W_Q)


def _rank_two_of_values(model: Model) -> Model:
    head = model["1.0"]
    W_OV = head.ov.truncate(2).dense()
    return model.replace("1.0", W_V=W_OV @ torch.linalg.pinv(head.W_O))


def _exchanged(model: Model) -> Model:
    def maps(place: str) -> dict[str, torch.Tensor]:
        return {name: getattr(model[place], name) for name in ("W_Q", "W_K", "W_V", "W_O")}

    return model.replace("0.1", **maps("1.0")).replace("1.0", **maps("0.1"))


def _one_softmax(model: Model) -> Model:
    seen: list[torch.Tensor] = []
    kept = model.edit("1.*", "scores", lambda scores: seen.append(scores) or scores)
    return kept.edit("1.*", "scores", lambda scores: sum(seen) / len(seen) ** 0.5)


# Each what-if, and the same change another way.
WHAT_IFS: dict[str, Callable[[Model], Model]] = {
    "ablate(1.0 1.1)": lambda model: model.edit("1.0, 1.1", "z", torch.zeros_like),
    "even(1.0)": lambda model: model.edit("1.0", "q", torch.zeros_like),
    "unscaled(1.0)": lambda model: model.edit(
        "1.0", "scores", lambda scores: scores * model["1.0"].d_k ** 0.5
    ),
    "tie(1, W_Q, W_K)": lambda model: model.tie("1", "W_Q", "W_K"),  # which has an oracle of its own
    "truncate(1.0, 2)": _rank_two,
    "truncate_ov(1.0, 2)": _rank_two_of_values,
    "exchange(0.1, 1.0)": _exchanged,
    "one_head(1)": _one_softmax,
    "rewrite(fold_value_bias)": lambda model: model,
    "rewrite(gauge_fix)": lambda model: model,
}


@pytest.mark.parametrize("call", WHAT_IFS)
def test_a_what_if_tells_how_the_next_token_and_the_loss_change(
    served: Served, language_model: Model, call: str
) -> None:
    before, after = language_model.run(TEXT), WHAT_IFS[call](language_model).run(TEXT)
    one, other = (run.logits.double().log_softmax(dim=-1) for run in (before, after))
    kl = F.kl_div(other, one, log_target=True, reduction="none").sum(dim=-1)
    found = row(served, call, query=3)["next"]
    assert found["loss"] == pytest.approx([float(before.loss), float(after.loss)], abs=2e-5)
    assert found["kl"] == pytest.approx(float(kl[3]), rel=1e-3, abs=1e-8)
    assert found["mean_kl"] == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-8)
    assert (found["mean_kl"] < 1e-8) == call.startswith("rewrite")
    assert found["tokens"][0][1] == pytest.approx(float(one[3].exp().max()), rel=1e-4)


def test_the_python_of_what_ifs_is_what_they_do(served: Served, language_model: Model) -> None:
    calls = ["tie(0, W_K, W_V)", "one_head(0)", "ablate(0.1)", "even(1.1)", "unscaled(1.0)"]
    calls += ["truncate(0.0, 3)", "truncate_ov(1.0, 2)", "exchange(0.1, 1.1)", "without_positions()"]
    fields = {"model": "gpt", "text": TEXT, "changes": calls, "count": 4}
    found = served.ask("/v1/explore/write", fields).body
    names: dict[str, Any] = {"model": language_model, "torch": torch}
    exec(found["python"], names)
    changed: Any = names["model"]
    assert len(changed.changes) == len(calls) + 7  # an exchange replaces eight maps
    own = changed.generate(TEXT, max_new_tokens=4, num_samples=4, beam_size=4)
    assert [one["text"] for one in found["candidates"]] == [one.text for one in own]
    assert [one["score"] for one in found["candidates"]] == pytest.approx(
        [one.score for one in own], rel=1e-5
    )
    assert row(served, *calls)["next"]["loss"][1] == pytest.approx(float(changed.run(TEXT).loss), rel=1e-5)


def test_a_translation_is_looked_at_as_it_was_written(served: Served, translator: Model) -> None:
    written = served.ask(
        "/v1/explore/write", {"model": "small-en-de", "text": "twelve", "changes": [], "count": 1}
    )
    own = translator.translate("twelve", num_best=4, beam_size=4)
    assert [one["text"] for one in written.body["candidates"]] == [one.text for one in own.candidates]
    fields = {"model": "small-en-de", "text": "twelve", "target": own.text}
    fields |= {"layer": "cross.0", "head": 1, "query": 0}
    found = served.ask("/v1/explore/row", fields).body
    record = translator.attend("twelve", own.text).steps("cross.0", 1, 0).record()
    assert found["weights"] == rounded(record["weights"])
    assert found["next"]["loss"][0] == pytest.approx(
        float(translator.run("twelve", target=own.text).loss), rel=1e-5
    )


def test_the_forms_of_a_head_are_those_of_its_matrices(served: Served, language_model: Model) -> None:
    found = served.ask("/v1/explore/head", {"model": "gpt", "changes": [], "layer": "1", "head": 1}).body
    head = language_model["1.1"]
    # The norms around the layer are LayerNorms: figures are of what passes them.
    block = language_model.reader.language_model.blocks[1]
    direction = F.normalize(1 / block.self_residual.norm.weight.detach(), dim=0)
    reads = torch.eye(len(direction)) - torch.outer(direction, direction)
    writes = torch.eye(len(direction)) - 1 / len(direction)
    for name, matrix in (("qk", reads @ head.qk.dense() @ reads), ("ov", reads @ head.ov.dense() @ writes)):
        expected = torch.linalg.svdvals(matrix)[: len(found["spectra"][name])]
        assert found["spectra"][name] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6)
        assert len(found["chance"][name]) == head.d_k
    assert {*found["pictures"]} == {"q", "k", "v", "qk", "ov"}
    first = found["directions"][0]
    U = torch.linalg.svd(head.folded.qk.dense()).U[:, 0]
    table = language_model.reader.language_model.embeddings.table.weight.detach()
    cosines = F.normalize(table, dim=1) @ U
    ends = [
        language_model.reader.tokenizer.pieces(side.topk(6).indices.tolist()) for side in (cosines, -cosines)
    ]
    assert first["reads"] in [[piece.replace("▁", " ") for piece in pieces] for pieces in ends]


def test_directions_are_compared_with_a_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(5)
    table = torch.randn(50, 16, generator=draw).bfloat16()
    directions = torch.randn(3, 16, generator=draw)
    monkeypatch.setattr(exploring, "_ENTRIES_AT_A_TIME", 7 * 16)
    found = exploring.token_cosines(table, directions)
    torch.testing.assert_close(found, directions @ F.normalize(table.float(), dim=1).mT)


def test_the_forms_of_an_encoder_have_directions_among_its_tokens(tmp_path: Path) -> None:
    found = Explorer(load(bert_that_runs(tmp_path))).head((), "0", 1)["directions"]
    assert {one["form"] for one in found} == {"qk", "ov"}
    assert all(one["reads"] and one["writes"] for one in found)


REFUSED = [
    ({"text": ""}, "text: give a text"),
    ({"changes": ["ablate(9.9)"]}, "no layer 9"),
    ({"changes": ["__import__(os)"]}, "write one of ablate"),
    ({"changes": ["tie(1)"]}, "tie takes other arguments"),
    ({"changes": ["truncate(1.0, 99)"]}, "the rank is a number from 1 to"),
    ({"changes": ["rewrite(to_latent)"]}, "is not one of fold_value_bias"),
    ({"changes": "ablate(1.0)"}, "changes: give a list"),
    ({"changes": ["ablate(1.0)"] * 65}, "at most 64"),
    ({"head": 10**9}, "head: give a number from 0"),
    ({"layer": "7"}, "layer"),
    ({"text": "a" * 50_001}, "50,001 characters"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED)
def test_what_the_page_cannot_show_is_said_in_one_line(served: Served, fields: Any, says: str) -> None:
    asked = {"model": "gpt", "text": TEXT, "changes": [], "layer": "1", "head": 0, "query": 0} | fields
    found = served.ask("/v1/explore/row", asked)
    message = found.body["error"]["message"]
    assert (found.status in (400, 413), says in message, "\n" in message) == (True, True, False), found


def test_the_gallery_says_what_heads_do_over_the_text_that_was_given(language_model: Model) -> None:
    over = language_model.attend_over([TEXT * 2, TEXT[::-1]])
    data = Explorer(language_model, over).view(Shown(TEXT), measured=True)
    found = {
        ("decoder", layer["number"], head["number"]): (head["label"], head["facts"])
        for layer in data["texts"][0]["kinds"][0]["layers"]
        for head in layer["heads"]
    }
    assert found == {place: (note.label, note.facts) for place, note in over.notes().items()}


HELD_OUT = ["The dog sat on the mat. " * 2, "A cat ran away", "and the dog sat down. " * 2]


@pytest.fixture
def held_out(served: Served, language_model: Model) -> Iterator[HeldOutText]:
    """The text on which the small GPT-2 that is served is measured."""
    explorer = served.state.models["gpt"].explorer
    text = explorer.held_out = HeldOutText(language_model.reader, HELD_OUT * 16)
    yield text
    explorer.held_out = None


def test_a_what_if_is_measured_on_a_held_out_text_part_by_part(
    served: Served, held_out: HeldOutText, language_model: Model
) -> None:
    about = served.ask("/v1/explore/models", {}).body["models"]
    assert [one["held_out"] for one in about] == [
        {"name": "", "tokens": held_out.num_tokens, "parts": held_out.num_parts, "units": "documents"},
        None,
    ]
    fields = {"model": "gpt", "changes": ["tie(*, W_Q, W_K)", "ablate(1.0)"]}
    assert held_out.num_parts > 2
    for parts in range(1, held_out.num_parts):
        found = served.ask("/v1/explore/held_out", {**fields, "parts": parts}).body
        assert found == {"parts": parts, "loss": None, "interval": None}
    found = served.ask("/v1/explore/held_out", {**fields, "parts": held_out.num_parts}).body
    changed = language_model.tie("*", "W_Q", "W_K").ablate("1.0")
    evaluated = [one.evaluate(HELD_OUT * 16) for one in (language_model, changed)]
    assert found["loss"] == pytest.approx([one.nats_per_token for one in evaluated], rel=1e-5)
    assert found["interval"] == pytest.approx(held_out.compare(changed.reader).interval, rel=1e-4)
    missing = served.ask(
        "/v1/explore/held_out", {**fields, "model": "small-en-de", "changes": [], "parts": 1}
    )
    assert (missing.status, "--held-out FILE" in missing.body["error"]["message"]) == (400, True)


# The page in a browser.


def opened(tab: Page, served: Served, state: str = "", *, width: int = 900, theme: str = "light") -> None:
    open_at(tab, f"{served.address}/{state}", width=width, theme=theme)


@pytest.mark.parametrize("width", [400, 900, 1400])
def test_the_page_fits_and_asks_its_server_alone(tab: Page, served: Served, width: int) -> None:
    opened(tab, served, "#&text=The+cat+sat", width=width, theme="dark")
    tab.point_at("#forms summary", click=True)
    wait_for(tab, "document.querySelectorAll('#head-forms table').length === 2")
    assert tab.value("document.documentElement.scrollWidth") <= width
    tab.value("document.querySelector('#results canvas[data-term=projected]').focus()")
    for _ in range(2):
        tab.press("ArrowRight")
    at = tab.value("getComputedStyle(document.querySelector('#results canvas[data-term=projected]')).width")
    assert float(at.removesuffix("px")) % 8 == 0, "cells are drawn as they are pointed at"
    assert text_of(tab, "#said").startswith("z W_O[2] = ")
    found = tab.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert max(found[:3]) < 64
    assert tab.complaints == []
    assert {url for url in tab.requests if not url.startswith(("data:", "about:", served.address))} == set()


def test_a_switch_changes_the_row_the_text_and_the_link_and_goes_back(tab: Page, served: Served) -> None:
    opened(tab, served, "#decoder.1.0.2&model=gpt&text=The+cat+sat")
    assert text_of(tab, "#row-name").startswith("One row, step by step: head 1.0 at ")
    before = text_of(tab, "#keys")
    of_unchanged = "document.getElementById('of-unchanged').checkVisibility()"
    assert not tab.value(of_unchanged)
    tab.point_at("[data-calls='[\"even(1.0)\"]']", click=True)
    wait_for(tab, "document.getElementById('after-text') !== null")
    assert tab.value(of_unchanged)
    wait_for(tab, SETTLED)
    cells = "[...document.querySelectorAll('#keys td[data-term=weights]')].map((td) => td.textContent)"
    assert tab.value(cells)[:3] == ["0.333"] * 3
    assert 'model.edit("1.0", "scores", torch.zeros_like)' in text_of(tab, "#effect")
    assert tab.value("document.querySelector('[data-part=looks] tr td:last-child').textContent") == "0.333"
    assert text_of(tab, "#verdict").startswith("With head 1.0 looking evenly: ")
    link = tab.value("location.hash")
    assert "if=even" in link
    opened(tab, served, link)  # the link alone leads there again
    assert (
        tab.value("document.querySelector('[data-calls=\\'[\"even(1.0)\"]\\']').getAttribute('aria-pressed')")
        == "true"
    )
    tab.point_at("[data-remove]", click=True)
    wait_for(tab, "document.querySelector('[data-remove]') === null")
    wait_for(tab, SETTLED)
    assert text_of(tab, "#keys") == before


def test_the_page_says_what_a_few_tokens_show_and_what_a_held_out_text_does(
    tab: Page, served: Served, language_model: Model
) -> None:
    state = "#decoder.1.0.2&model=gpt&text=The+cat+sat&if=tie(*,+W_Q,+W_K)"
    opened(tab, served, state)
    assert "shows nothing of how good a design is" in text_of(tab, "#few")
    assert "triptych explore MODEL --held-out FILE" in text_of(tab, "#few")
    assert tab.value("document.getElementById('held-out')") is None
    explorer = served.state.models["gpt"].explorer
    text = explorer.held_out = HeldOutText(language_model.reader, HELD_OUT * 16)
    try:
        opened(tab, served, state)
        found = text.compare(language_model.tie("*", "W_Q", "W_K").reader)
        assert f"{found.before:.3f} → {found.after:.3f} (" in text_of(tab, "#held-out")
        assert "95 % interval of the difference over documents" in text_of(tab, "#held-out")
        assert f"({text.num_tokens:,} tokens)" in text_of(tab, "#effect")
        said = text_of(tab, "#held-out")
        tab.point_at('.glance a[data-at]:not([aria-current]):not([data-at$="-1"])', click=True)
        wait_for(tab, "document.getElementById('held-out') !== null")
        assert text_of(tab, "#held-out") == said  # of the same changes, it is not computed again
        assert tab.complaints == []
    finally:
        explorer.held_out = None


def test_what_the_model_refuses_is_said_and_the_switch_goes_back(tab: Page, served: Served) -> None:
    opened(tab, served, "#cross.0.0&model=small-en-de&text=twelve")
    never = "[...document.querySelectorAll('#switches [aria-disabled=true]')]"
    assert tab.value(f"{never}.map((one) => [one.textContent, one.tabIndex])") == [
        ["W_Q = W_K", 0],
        ["all three", 0],
    ]
    assert tab.value(f"{never}[0].title").startswith("Not in cross-attention: ")
    tab.point_at('#switches [data-calls*="W_Q, W_K"]', click=True)  # it says why, and stays as it is
    wait_for(tab, f"!document.getElementById('problem').hidden && {SETTLED}")
    assert "in cross-attention queries read the decoder's stream" in text_of(tab, "#problem")
    place = "document.getElementById('problem').getBoundingClientRect()"
    top, bottom, height = tab.value(f"(({{ top, bottom }}) => [top, bottom, innerHeight])({place})")
    assert 0 <= top < bottom <= height
    assert tab.value("document.querySelectorAll('#switches [aria-pressed=true]').length") == 0
    assert "K and V are the source's" in text_of(tab, "#whose")
    # What else was asked for is computed all the same.
    toggle = "document.getElementById('explore').explorer.toggle"
    tab.value(
        f"(() => {{ {toggle}(['even(cross.0.0)']).then(() => {toggle}(['tie(cross.0, W_Q, W_K)'])); }})()"
    )
    wait_for(tab, f"!document.getElementById('problem').hidden && {SETTLED}")
    assert tab.value("document.querySelectorAll('#switches [aria-pressed=true]').length") == 1
    assert "cross.0.0" in text_of(tab, "#after code")


def test_layers_of_a_switch_are_chosen_in_one_place(tab: Page, served: Served) -> None:
    state = "#encoder.0.0&model=small-en-de&text=twelve&if=tie(cross.0,+W_K,+W_V)&if=tie(cross.1,+W_K,+W_V)"
    opened(tab, served, state)
    where = "document.getElementById('where')"
    assert tab.value(f"[...{where}.options].map((one) => one.text)") == [
        "layer encoder.0",
        "every layer of the encoder",
        "every self-attention layer of the decoder",
        "every cross-attention layer",
        "every self-attention layer",
        "every layer",
    ]
    # The group that the address changes is the chosen one.
    assert tab.value(f"{where}.selectedOptions[0].text") == "every cross-attention layer"
    pressed = "[...document.querySelectorAll('#switches [aria-pressed=true]')].map((one) => one.textContent)"
    assert tab.value(pressed) == ["W_K = W_V"]
    buttons = "[...document.querySelectorAll('#switches button')]"
    ties = f"{buttons}.filter((one) => one.textContent === 'W_Q = W_K')"
    assert tab.value(f"{ties}.map((one) => one.ariaDisabled)") == ["true"]
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    names = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == "combobox"]
    assert "in which layers the switches act" in names
    # The groups of another model are its own.
    choice = "const one = document.getElementById('model'); one.value = 'gpt'"
    tab.value(f"{choice}; one.dispatchEvent(new Event('change'))")
    wait_for(tab, f"{where}.options.length === 2 && {SETTLED}")
    assert tab.value(f"{where}.selectedIndex") == 0
    opened(tab, served, "#decoder.0.0&model=gpt&text=The+cat")
    assert tab.value(f"[...{where}.options].map((one) => one.text)") == ["layer 0", "every layer"]
    tab.value(f"{where}.focus()")
    tab.press("ArrowDown")
    wait_for(tab, f"{ties}[0].dataset.calls === '[\"tie(*, W_Q, W_K)\"]'")


def test_what_becomes_of_the_next_token_is_said_of_the_token_that_is_chosen(
    tab: Page, served: Served
) -> None:
    state = "model=gpt&text=The+cat+sat&if=even(1.0)"
    opened(tab, served, f"#decoder.1.0&{state}")
    assert "Click a word of the text to see" in text_of(tab, "#effect")
    assert "KL: " not in text_of(tab, "#effect")
    opened(tab, served, f"#decoder.1.0.2&{state}")
    assert text_of(tab, ".bars caption").startswith("Next token after “")
    assert "KL: " in text_of(tab, ".bars caption")


def test_numbers_are_reached_by_keys_and_light_up_their_part_of_the_formula(
    tab: Page, served: Served
) -> None:
    opened(tab, served, "#decoder.1.0.2&model=gpt&text=The+cat+sat")
    lit = "[...document.querySelectorAll('#formula .lit')].map((part) => part.dataset.term)"
    tab.value("document.querySelector('#keys [data-at=\"0 0\"]').focus()")
    assert tab.value(lit) == ["products"]
    tab.press("ArrowRight")
    assert tab.value(lit) == ["scaled"]
    assert text_of(tab, "#said").startswith("× ")
    tab.value("document.querySelector('#vectors canvas').focus()")
    tab.press("ArrowRight")
    assert text_of(tab, "#said").startswith("q[1] = ")
    tab.point_at("#results canvas", at=(2, 2))
    assert tab.value(lit) == ["z"]
    controls = "[...document.querySelectorAll('button, input, select, textarea, canvas[tabindex]')]"
    named = "one.textContent.trim() || one.ariaLabel || one.labels?.length || !one.offsetParent"
    unnamed = f"{controls}.filter((one) => !({named}))"
    assert tab.value(f"{unnamed}.map((node) => node.outerHTML)") == []


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no trained checkpoints here")
def test_a_word_of_the_output_says_what_it_came_from_and_alternatives_can_be_read(tab: Page) -> None:
    translator, text = load(CHECKPOINTS / "marian-multi30k", device="cpu"), "A man in a blue shirt."
    own = translator.translate(text, num_best=4, beam_size=4).candidates
    with Served({"multi30k": translator}) as served:
        opened(tab, served, f"#cross.1.0&{urlencode({'text': text})}")
        assert text_of(tab, "#output").strip() == own[0].text
        tab.point_at("#output [data-query='1']")
        largest = text_of(tab, "#from").split("came from: ")[1].split(" · ")[0]
        row = translator.attend(text, own[0].text)["cross.1", 0][1]
        assert float(largest.split(" ")[-1]) == pytest.approx(float(row.max()), abs=1e-3)
        tab.point_at("#other-outputs summary", click=True)
        tab.point_at("[data-candidate='1']", click=True)
        wait_for(tab, f"document.getElementById('output').textContent.trim() === {json.dumps(own[1].text)}")
        wait_for(tab, SETTLED)
        assert parse_qs(tab.value("location.hash"))["target"] == [own[1].text]
        tab.value("document.getElementById('target').focus()")
        tab.write("Ein Hund.")
        tab.press("Tab")
        wait_for(tab, "document.getElementById('output').textContent.includes('Hund') && " + SETTLED)
        loss = float(translator.run(text, target="Ein Hund.").loss)
        assert f"Loss on this translation: {loss:.3f} nats" in text_of(tab, "#effect")


def test_a_rank_of_a_form_is_chosen_by_keys(tab: Page, served: Served) -> None:
    opened(tab, served, "#decoder.1.0.2&model=gpt&text=The+cat+sat")
    tab.value("document.getElementById('rank').focus()")
    most = int(tab.value("document.getElementById('rank').max"))
    for rank in (most - 1, most - 2):
        tab.press("ArrowLeft")
        wait_for(tab, f"document.body.dataset.row === '1.0 2 truncate(1.0, {rank})'")
    assert tab.value("document.activeElement.id") == "rank"
    assert text_of(tab, "#switches output") == f" {most - 2} of {most}"


def test_a_page_whose_server_needs_a_key_asks_for_it(tab: Page, language_model: Model) -> None:
    with Served({"gpt": language_model}, keys=["one"]) as locked:
        tab.visit("about:blank")
        tab.visit(f"{locked.address}/#&text=The+cat")
        wait_for(tab, "document.getElementById('key-form')?.hidden === false")
        assert "a key is needed" in text_of(tab, "#problem")
        tab.value("document.getElementById('key').focus()")
        tab.write("one")
        tab.press("Tab")
        wait_for(tab, SETTLED)
        assert (text_of(tab, "#problem"), tab.value("document.getElementById('key-form').hidden")) == (
            "",
            True,
        )


def test_a_title_is_a_name(tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--a-name" / "snapshots" / "12fd25f77366"
    cached.mkdir(parents=True)
    assert short_name(str(cached)) == "owner/a-name"
    assert short_name(str(cached.parent)) == "snapshots"
    assert short_name("owner/name") == "owner/name"


@pytest.mark.slow
@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no trained checkpoints here")
def test_a_click_on_gpt2_is_answered(tab: Page, record_property: Callable[[str, object], None]) -> None:
    with Served({"gpt2": load(CHECKPOINTS / "gpt2", device="cpu")}) as served:
        opened(tab, served, "#decoder.3.2&text=First+Citizen:+Before+we+proceed+any+further,+hear+me+speak.")
        times = []
        for head in (0, 1, 3, 4, 5):
            tab.point_at(f'.glance [data-at="3 {head}"]', click=True)
            wait_for(tab, f"document.body.dataset.row.startsWith('3.{head} ')")
            times.append(int(text_of(tab, "#busy").removeprefix("answered in ").removesuffix(" ms")))
        for call in ("ablate(3.5)", "even(3.5)", "unscaled(3.5)"):
            tab.point_at(f"[data-calls='[\"{call}\"]']", click=True)
            wait_for(tab, f"document.body.dataset.row.endsWith('{call}')")
            times.append(int(text_of(tab, "#busy").removeprefix("answered in ").removesuffix(" ms")))
            wait_for(tab, SETTLED)
        record_property("milliseconds", times)
        print(f"five clicks on heads of gpt2 and three on switches were answered in {times} ms")
        assert all(map(math.isfinite, times))
