"""`triptych serve`: translations and completions over HTTP, for several at once, within limits."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import libretranslatepy
import openai
import pytest
import torch
import transformers
from benchmarks import serving

from command import Command
from served import Served
from small_checkpoints import bert_that_runs, gpt2_that_runs
from triptych.errors import UsageError
from triptych.model import Model, load
from triptych.running.decoding import GenerationOptions, SamplingOptions, score_continuations
from triptych.seeing.attending.alignment import AlignedWords, Word
from triptych.serving.limits import Limits, RequestError
from triptych.serving.markup import Markup, TextRun
from triptych.serving.served_models import Continuing, ServedModel
from triptych.serving.server import Visit
from triptych.serving.uvicorn_server import Fleet, Server, Serving
from triptych.serving.worker import Item, Lane, Queue, QueuedJob, Worker
from triptych.threads import torch_threads


@pytest.fixture(scope="module")
def served(translator: Model, language_model: Model) -> Iterator[Served]:
    with Served({"small-en-de": translator, "gpt": language_model}) as running:
        yield running


LINES = ["twelve", "three hundred and one", "", "seventy-five", "two thousand and nine hundred and six"]


@pytest.mark.parametrize("form", [False, True])
def test_a_text_is_translated_line_by_line_as_by_the_model(
    served: Served, translator: Model, form: bool
) -> None:
    expected = [one.text for one in translator.translate(LINES)]
    fields = {"q": "\n".join(LINES), "source": "en", "target": "de"}
    found = served.ask("/translate", fields, form=form)
    assert (found.status, found.body) == (200, {"translatedText": "\n".join(expected)})
    assert (
        served.ask("/translate", {**fields, "q": LINES[:2]}, form=form).body["translatedText"] == expected[:2]
    )


def test_alternatives_and_their_scores_are_those_of_the_model(served: Served, translator: Model) -> None:
    expected = translator.translate(LINES[1], num_best=3, beam_size=3)
    fields = {"q": LINES[1], "source": "auto", "target": "de", "alternatives": 2, "details": True}
    found = served.ask("/translate", fields).body
    texts = [one.text for one in expected.candidates]
    assert [found["translatedText"], *found["alternatives"]] == texts
    assert found["detectedLanguage"] == {"confidence": 100.0, "language": "en"}
    assert [one["score"] for one in found["details"][0]["candidates"]] == [
        c.score for c in expected.candidates
    ]


def test_tags_stay_and_what_is_no_text_is_not_translated() -> None:
    document = (
        '<!DOCTYPE html><p class="a">one &amp; <b>two</b><br/> three</p><code>x &lt; y</code>'
        '<script>if (a<b) {}</script><i translate="no">Nix</i>'
    )
    markup = Markup(document)
    assert [run.text for run in markup.runs] == ["one & two", "three"]
    assert markup.translated(["one &amp; <b>two</b>", "three"]) == document
    assert TextRun("<1>").html("<2>", None) == "&lt;2&gt;"


@pytest.mark.parametrize(
    ("document", "texts"),
    [
        ("a <b>b <i>c</i></b> d", ["a b c d"]),
        ("a <b>b <i>c</b> d</i>", ["a", "b", "c", "d"]),  # they do not go together
        ("<b>a <p>b</p></b> c", ["a", "b", "c"]),
        ("a <i class='icon'></i> b", ["a", "b"]),
        ("a\n <b>b </b>\nc", ["a b c"]),
    ],
)
def test_a_tag_inside_a_sentence_does_not_part_it(document: str, texts: list[str]) -> None:
    markup = Markup(document)
    assert [run.text for run in markup.runs] == texts
    same = [run.html(run.text, aligned(run.text, run.text)) for run in markup.runs]
    assert " ".join(markup.translated(same).split()) == " ".join(document.replace("b </b>", "b</b> ").split())


def aligned(source: str, target: str, links: Sequence[int] | None = None) -> AlignedWords:
    """Each word of the target with the source word of a number; without numbers, word by word."""
    words = [
        tuple(Word(text, place, place + 1) for place, text in enumerate(re.findall(r"\w+|[^\w\s]", of)))
        for of in (source, target)
    ]
    weights = torch.zeros(len(words[1]), len(words[0]))
    for place, link in enumerate(links or range(len(words[1]))):
        weights[place, link] = 1.0
    return AlignedWords(words[0], words[1], weights)


@pytest.mark.parametrize(
    ("document", "translation", "links", "expected"),
    [
        ("a <b>red</b> car", "une voiture rouge", [0, 2, 1], "une voiture <b>rouge</b>"),
        (
            "I <a href='x'>gave up</a>.",
            "ich gab es auf.",
            [0, 1, 0, 2, 3],
            "ich <a href='x'>gab</a> es <a href='x'>auf</a>.",
        ),
        ("<i>a <b>b</b></i> c", "C B A", [2, 1, 0], "C <i><b>B</b> A</i>"),
        ("<b>yes</b>, no", "nein, ja", [2, 1, 0], "nein, <b>ja</b>"),
        ("<b>of</b> it", "dessen", [1], "<b>dessen</b>"),  # a tag is kept where no word looks at its own
        ("in<b>side</b> it", "drin & so", [0, 1, 1], "<b>drin</b> &amp; so"),
    ],
)
def test_a_word_lies_in_the_tags_of_the_word_that_it_looks_at(
    document: str, translation: str, links: list[int], expected: str
) -> None:
    (run,) = Markup(document).runs
    assert run.html(translation, aligned(run.text, translation, links)) == expected


def test_without_words_places_decide_in_which_tags_a_word_lies() -> None:
    (run,) = Markup("one two <b>three</b>").runs
    assert run.html("eins zwei drei", None) == "eins zwei <b>drei</b>"


def test_a_document_keeps_its_tags_around_the_words_that_attention_finds(
    served: Served, translator: Model
) -> None:
    line = "three hundred and seventy-five"
    found = translator.translate(line, num_best=2, beam_size=2)
    fields = {"q": f"<p>{line[:5]} <i>{line[6:13]}</i>{line[13:]}</p>", "source": "en", "target": "de"}
    body = served.ask("/translate", {**fields, "format": "html", "alternatives": 1, "alignments": True}).body
    (run,) = Markup(fields["q"]).runs
    for html, one in zip([body["translatedText"], *body["alternatives"]], found.candidates, strict=True):
        words = translator.attend(line, one.text).words()
        assert html == f"<p>{run.html(one.text, words)}</p>"
        assert html.count("<i>") == html.count("</i>") > 0
    words = translator.attend(line, found.text).words()
    assert body["alignments"][0] == [
        [word.text, words.source[link].text] for word, link in zip(words.target, words.links, strict=True)
    ]
    same = {**fields, "target": "en", "format": "html"}
    assert served.ask("/translate", same).body["translatedText"] == fields["q"]


def test_a_paragraph_is_translated_and_aligned_sentence_by_sentence(
    served: Served, translator: Model
) -> None:
    sentences = ["twelve.", "three hundred and seventy-five!", "seven?"]
    found = translator.translate(sentences)
    expected = [one.text for one in found]
    fields = {"source": "en", "target": "de", "q": " \t{}  {} \r\n{} ".format(*sentences)}
    body = served.ask("/translate", {**fields, "alignments": True}).body
    assert body["translatedText"] == " \t{}  {} \r\n{} ".format(*expected)
    words = [translator.attend(one, of.text).words() for one, of in zip(sentences, found, strict=True)]
    links = [
        [word.text, of.source[link].text]
        for of in words
        for word, link in zip(of.target, of.links, strict=True)
    ]
    assert [*chain.from_iterable(body["alignments"])] == links
    markup = "<p>{} <b>{}</b> {}</p>"
    html = {**fields, "q": markup.format(*sentences), "format": "html"}
    answer = served.ask("/translate", html).body["translatedText"]
    assert re.sub("<[^>]*>", "", answer) == "{} {} {}".format(*expected)
    second = re.sub("<[^>]*>", "", "".join(re.findall("<b>.*?</b>", answer)))
    assert second.replace(" ", "") == expected[1].replace(" ", "")


CHECKPOINT = Path(__file__).parents[3] / "shared" / "checkpoints" / "marian-multi30k"


@pytest.mark.skipif(not CHECKPOINT.exists(), reason="the trained translator is not there")
def test_a_trained_translator_finds_the_words_of_a_tag() -> None:
    model = load(CHECKPOINT)
    for document, expected in (
        ("A man in a <b>blue</b> shirt.", ["<b>blauen</b>"]),
        ("A <b>dog</b> runs through the <i>snow</i>.", ["<b>Hund</b>", "<i>Schnee</i>"]),
        ("<em>Two women</em> are playing the guitar.", ["<em>Zwei Frauen</em>"]),
    ):
        (run,) = Markup(document).runs
        text = model.translate(run.text).text
        html = run.html(text, model.attend(run.text, text).words())
        assert all(part in html for part in expected), html


@pytest.mark.parametrize("form", [False, True])
def test_terms_are_forced_in_one_request_and_not_in_its_neighbours(
    served: Served, translator: Model, form: bool
) -> None:
    glossary = {"twelve": "ein Dutzend", "seventy-five": "LXXV"}
    fields = {"q": LINES, "source": "en", "target": "de"}
    held = {**fields, "glossary": json.dumps(glossary) if form else glossary}
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda asked: served.ask("/translate", asked, form=form).body, (held, fields))
    assert one["translatedText"] == [found.text for found in translator.translate(LINES, glossary=glossary)]
    assert "ein Dutzend" in one["translatedText"][0]
    assert other["translatedText"] == [found.text for found in translator.translate(LINES)]


def test_libretranslates_client_understands_the_answers(served: Served, translator: Model) -> None:
    client = libretranslatepy.LibreTranslateAPI(f"{served.address}/")
    assert client.translate("twelve", "en", "de") == translator.translate("twelve").text
    assert {one["code"]: one["targets"] for one in client.languages()} == {"en": ["de", "en"], "de": ["de"]}
    assert client.detect("twelve") == [{"confidence": 100.0, "language": "en"}]


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0)


def test_openais_client_gets_the_models_own_continuations(served: Served, language_model: Model) -> None:
    prompts = ["The cat", "Once upon a time"]
    expected = language_model.generate(prompts, max_new_tokens=6)
    with client_of(served) as client:
        assert [model.id for model in client.models.list()] == ["small-en-de", "gpt"]
        found = client.completions.create(
            model="gpt", prompt=prompts, max_tokens=6, temperature=0, logprobs=1
        )
        assert [one.text for one in found.choices] == [one.text for one in expected]
        logs = [one.logprobs.token_logprobs for one in found.choices if one.logprobs]
        assert logs == [list(one.log_probs[: len(one.ids)]) for one in expected]
        options = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2}
        drawn = client.completions.create(model="gpt", prompt=prompts[0], **options)
        own = language_model.generate(prompts[0], max_new_tokens=6, temperature=1.0, seed=3, num_samples=2)
        assert [one.text for one in drawn.choices] == [one.text for one in own]
        parts: dict[int, str] = {0: "", 1: ""}
        ends = []
        for event in client.completions.create(model="gpt", prompt=prompts[0], stream=True, **options):
            parts[event.choices[0].index] += event.choices[0].text
            ends += [event.choices[0].finish_reason] if event.choices[0].finish_reason else []
        assert list(parts.values()) == [one.text for one in own]
        assert ends == ["length", "length"]


def test_lm_evals_client_gets_the_likelihoods_of_triptychs_harness(
    served: Served, language_model: Model, tmp_path: Path
) -> None:
    models = pytest.importorskip("lm_eval.models.openai_completions")
    harness = pytest.importorskip("triptych.harness")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    folder = gpt2_that_runs(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    remote = models.LocalCompletionsAPI(
        base_url=f"{served.address}/v1/completions",
        model="gpt",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        batch_size=2,
        max_length=64,
    )
    pairs = [("The cat", " sat"), ("Once upon a", " time"), ("a", "b")]
    asked = [instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    own = harness.HarnessModel(str(folder)).loglikelihood(asked)
    for (found, is_greedy), (expected, is_best) in zip(remote.loglikelihood(asked), own, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
        assert is_greedy == is_best


def test_litellm_gets_the_models_own_continuation_whole_and_in_parts(
    served: Served, language_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it asks the internet for prices otherwise
    litellm = pytest.importorskip("litellm")
    expected = language_model.generate("The cat", max_new_tokens=6).text
    fields = {"model": "text-completion-openai/gpt", "api_base": f"{served.address}/v1", "api_key": "none"}
    asked = {**fields, "prompt": "The cat", "max_tokens": 6, "temperature": 0}
    assert litellm.text_completion(**asked).choices[0].text == expected
    parts = litellm.text_completion(**asked, stream=True)
    assert "".join(part.choices[0].text or "" for part in parts) == expected


def test_openais_client_gets_the_mean_of_an_encoders_last_layer(tmp_path: Path) -> None:
    folder = bert_that_runs(tmp_path)
    other = transformers.BertModel.from_pretrained(folder).eval()
    texts = [[2, 5, 9, 3], [2, 7, 3]]
    with torch.no_grad():
        means = [other(torch.tensor([ids])).last_hidden_state[0].mean(dim=0) for ids in texts]
    expected = [(mean / mean.norm()).tolist() for mean in means]
    with Served({"bert": load(folder)}) as served, client_of(served) as client:
        for form in ("float", openai.omit):  # without a form, the client asks for base64
            found = client.embeddings.create(model="bert", input=texts, encoding_format=form)
            for one, vector in zip(found.data, expected, strict=True):
                assert one.embedding == pytest.approx(vector, abs=1e-6)
        alone = client.embeddings.create(model="bert", input=texts[1], encoding_format="float")
        again = client.embeddings.create(model="bert", input=texts, encoding_format="float")
        assert alone.data[0].embedding == again.data[1].embedding
        assert alone.usage.prompt_tokens == 3
        assert served.ask("/v1/completions", {"model": "bert", "prompt": "a"}).status == 400


def test_a_stop_string_ends_a_completion_and_is_no_part_of_it(served: Served, language_model: Model) -> None:
    whole = language_model.generate("The cat", max_new_tokens=12).text
    stop = whole[len(whole) // 2 :][:2]
    fields = {"model": "gpt", "prompt": "The cat", "max_tokens": 12, "temperature": 0, "stop": [stop]}
    (choice,) = served.ask("/v1/completions", fields).body["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_scores_of_a_text_that_is_echoed_are_the_models(served: Served, language_model: Model) -> None:
    ids = language_model.generator().encode("The cat sat on the mat")
    expected, _ = score_continuations(language_model.generator().model, [(ids[:2], ids[2:])], 40)[0]
    fields = {"model": "gpt", "prompt": [ids], "max_tokens": 0, "echo": True, "logprobs": 2}
    found = served.ask("/v1/completions", fields).body
    logprobs = found["choices"][0]["logprobs"]
    assert found["choices"][0]["text"] == "The cat sat on the mat"
    assert sum(logprobs["token_logprobs"][2:]) == pytest.approx(expected, abs=1e-5)
    for own, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert own <= max(top.values())
    assert found["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}


def test_an_answer_does_not_depend_on_the_load(served: Served) -> None:
    texts = [f"{LINES[number % 2]} and {LINES[3]} {'again ' * (number % 7)}" for number in range(24)]
    asked = [{"q": [text], "source": "en", "target": "de", "details": True} for text in texts]
    requests = [(fields, served.ask("/translate", fields).body) for fields in asked]
    seen = serving.load(served.port, requests, 2.5, clients=12)
    assert seen.faults == []
    assert len(seen.latencies) >= 12
    kinds = {what.partition(":")[0] for what in seen.neighbours}
    assert kinds == {"abort", "disconnect", "drip", "send_much"}, seen.neighbours
    health = served.ask("/health").body
    assert [model["batch_invariant"] for model in health["models"]] == [True, True]


def test_attention_and_measures_of_heads_are_the_models(served: Served, language_model: Model) -> None:
    text = "The cat sat"
    steps = served.ask("/v1/steps", {"model": "gpt", "text": text, "layer": 1, "head": 0}).body
    own = language_model.attend(text).steps(1, 0).record()
    assert steps == {**json.loads(json.dumps(own)), "model": "gpt"}
    heads = served.ask("/v1/inspect", {"model": "gpt", "layers": [1]}).body
    own = language_model.inspect(layers=[1]).record()
    assert heads == {**json.loads(json.dumps(own)), "name": "gpt", "seconds": heads["seconds"]}
    attended = served.ask("/v1/attend", {"model": "gpt", "text": text, "heads": "*.0"})
    assert attended.status == 200
    assert served.ask("/v1/attend", {"model": "gpt", "text": text, "heads": "99.0"}).status == 400


@pytest.mark.slow  # starts a command of several processes
def test_processes_share_the_work_and_one_that_dies_is_replaced(
    translator: Model, language_model: Model, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in LINES if line] * 2
    fields = {"q": lines, "source": "en", "target": "de", "alternatives": 1}
    models = {"en-de": load(translator.name), "gpt": load(language_model.name)}
    with torch_threads(1), Served(models, num_processes=2) as served, ThreadPoolExecutor() as pool:
        (process,) = served.processes
        health = served.ask("/health").body
        assert health["workers"] == 2
        assert [model["batch_invariant"] for model in health["models"]] == [True, True]
        pid, before = process.pid, served.ask("/translate", fields).body
        assert before["translatedText"] == [one.text for one in translator.translate(lines)]
        held = {**fields, "glossary": {"a": ""}}
        assert served.ask("/translate", held).body["error"].startswith("glossary: 'a'")
        options = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
        with client_of(served) as client:
            events = client.completions.create(model="gpt", prompt=["The cat"] * 2, stream=True, **options)
            parts = {0: "", 1: ""}
            for event in events:
                parts[event.choices[0].index] += event.choices[0].text
        own = language_model.generate("The cat", max_new_tokens=6, temperature=1.0, seed=3)
        assert [*parts.values()] == [own.text] * 2
        serving.abort(served.port, Random(0), ({**fields, "q": lines[:4]}, None))
        running = served.state.models["en-de"].queue.lanes[1].running
        while served.state.num_requests or running:  # a client that goes away leaves nothing behind
            time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        lost = pool.submit(served.ask, "/translate", fields)
        while len(running) < 4:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert (lost.result().status, lost.result().body) == (200, before)  # computed once more
        assert served.ask("/translate", fields).body == before
        while served.ask("/health").body["workers"] < 2:
            time.sleep(0.05)
        assert process.pid != pid
        assert served.ask("/translate", fields).body == before
    assert f'{{"error": "process {pid} has ended (-9)"}}' in capfd.readouterr().err


REFUSED: list[tuple[str, Any, int, str]] = [
    ("/translate", {"source": "en", "target": "de"}, 400, "missing q"),
    ("/translate", {"q": "twelve", "target": "de"}, 400, "Invalid request: missing source parameter"),
    ("/translate", {"q": "twelve", "source": "en", "target": "fr"}, 400, "what is: en-de"),
    ("/translate", {"q": "twelve", "source": "auto", "target": "fr"}, 400, "auto to fr"),
    ("/translate", {"q": "twelve", "source": "en", "target": "de", "alternatives": 99}, 400, "alternatives"),
    (
        "/translate",
        {"q": "a", "source": "en", "target": "de", "alternatives": float("inf")},
        400,
        "alternatives",
    ),
    ("/translate", {"q": "a", "source": "\ud800", "target": "de"}, 400, "half of a surrogate pair"),
    ("/v1/completions", {"prompt": "a", "api_key": "\udfff"}, 400, "half of a surrogate pair"),
    ("/translate", {"q": ["a"] * 129, "source": "en", "target": "de"}, 413, "129 texts"),
    ("/translate", {"q": "a" * 50_001, "source": "en", "target": "de"}, 413, "50,001 characters"),
    ("/translate", {"q": "a" * (1 << 20), "source": "en", "target": "de"}, 413, "1,048,576 bytes"),
    ("/translate", [1], 400, "not a JSON object"),
    ("/translate", {"q": "a", "source": "en", "target": "de", "glossary": {"a": 1}}, 400, "glossary: give"),
    ("/translate", {"q": "a", "source": "en", "target": "de", "glossary": {"a": ""}}, 400, "glossary: 'a'"),
    ("/v1/completions", {"model": "small-en-de", "prompt": "a"}, 400, "cannot generate"),
    ("/v1/completions", {"model": "nothing", "prompt": "a"}, 404, "small-en-de, gpt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1 << 20}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "top_p": 7}, 400, "top_p"),
    ("/v1/completions", {"prompt": "a", "top_k": float("inf")}, 400, "top_k: give a whole number"),
    ("/v1/completions", {"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty"),
    ("/v1/completions", {"prompt": [[1, 10**9]]}, 400, "token ids"),
    (
        "/v1/completions",
        {"prompt": [[1] * 70], "max_tokens": 0, "echo": True, "logprobs": 1},
        400,
        "at most 65",
    ),
    ("/v1/completions", {"prompt": "word " * 5000}, 400, "64"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}, 400, "chat template"),
    ("/v1/steps", {"model": "gpt", "text": "a", "layer": 9, "head": 0}, 400, "layer"),
    ("/nothing", {}, 404, "nothing is at /nothing: GET /spec has the paths"),
    ("/v1/nothing", {}, 404, "nothing is at /v1/nothing"),
    ("/languages", {}, 405, "/languages takes no POST: send"),
    ("/v1/models", {}, 405, "/v1/models takes no POST: send"),
]


@pytest.mark.parametrize(("path", "fields", "status", "says"), REFUSED)
def test_what_cannot_be_answered_is_refused_in_one_line(
    served: Served, path: str, fields: Any, status: int, says: str
) -> None:
    found = served.ask(path, fields)
    error = found.body["error"]
    message = error["message"] if path.startswith("/v1/") else error
    assert (found.status, says in message) == (status, True), found
    assert "\n" not in message


def test_without_its_key_nothing_is_answered(translator: Model) -> None:
    fields = {"q": "twelve", "source": "en", "target": "de"}
    with Served({"en-de": translator}, keys=["one", "other"]) as served:
        assert served.ask("/translate", fields).status == 401
        assert served.ask("/translate", {**fields, "api_key": "wrong"}).status == 403
        assert served.ask("/translate", {**fields, "api_key": "other"}).status == 200
        assert served.ask("/v1/models").status == 401
        assert served.ask("/v1/models", Authorization="Bearer one").status == 200
        assert served.ask("/health").status == 200


def test_a_page_of_another_host_cannot_ask(served: Served) -> None:
    found = served.ask("/health", Host="evil.example")
    assert (found.status, found.body["error"][:35]) == (400, "Host: evil.example is not this mach")
    assert served.ask("/v1/models", Host="evil.example").body["error"]["type"] == "invalid_request_error"
    assert [served.ask("/health", Host=host).status for host in ("localhost:1", "[::1]:1")] == [200, 200]


def test_tokens_of_translations_are_counted(served: Served, translator: Model) -> None:
    def counted() -> list[float]:
        figures = str(served.ask("/metrics").body)
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        return [float(figures.partition(f"\n{name} ")[2].split()[0]) for name in names]

    before = counted()
    fields = {"q": LINES[:3], "source": "en", "target": "de", "alternatives": 1}
    served.ask("/translate", fields)
    read = translator.reader.tokenizers.source.encode([LINES[0], LINES[1]])
    found = translator.translate(LINES[:2], num_best=2, beam_size=2)
    new = sum(len(one.pieces) for of in found for one in of.candidates)
    assert [after - of for after, of in zip(counted(), before, strict=True)] == [sum(map(len, read)), new]


def test_figures_count_what_was_answered(served: Served) -> None:
    served.ask("/v1/completions", {"model": "gpt", "prompt": "The cat", "max_tokens": 3})
    figures = str(served.ask("/metrics").body)
    assert 'triptych:requests_total{path="/v1/completions",status="200"}' in figures
    assert 'vllm:num_requests_waiting{model_name="gpt"} 0.0' in figures
    paths = served.ask("/spec").body["paths"]
    assert paths["/translate"]["post"]["summary"].startswith("Translate a text or several")
    found = served.ask("/health", X_Request_ID="mine-1")
    assert found.headers["x-request-id"] == "mine-1"


def test_a_text_joins_what_is_being_decoded_and_one_that_nobody_waits_for_leaves(
    language_model: Model,
) -> None:
    served = ServedModel("gpt", language_model, Limits())
    long = GenerationOptions(40, SamplingOptions(temperature=1.0), seed=3)
    jobs = [Continuing(served, options) for options in (long, long, GenerationOptions(2))]
    given = [served.generator.encode(text) for text in ("Once upon a time", "The dog", "The cat")]
    alone = [job.compute([Item(job, ids)])[0] for job, ids in zip(jobs, given, strict=True)]
    over, told = list[Item](), [0, 0]

    def tell(part: object) -> None:
        """Other texts join when this one has begun; the first of them goes away."""
        told[0] += 1
        if told[0] == 3:
            served.queue.submit(items[1:])

    def tell_and_leave(part: object) -> None:
        told[1] += 1
        items[1].is_left = True

    items = [
        Item(job, ids, tell_)
        for job, ids, tell_ in zip(jobs, given, (tell, tell_and_leave, None), strict=True)
    ]
    for item in items:
        item.result.add_done_callback(lambda _, item=item: over.append(item))  # type: ignore[misc]
    served.queue.submit(items[:1])
    assert items[0].result.result(60) == alone[0]
    assert items[2].result.result(60) == alone[2]
    served.worker.close()
    assert over.index(items[2]) < over.index(items[0])
    assert told[1] == 1


class Doubling(QueuedJob):
    """A job of the worker alone: it fails for a text, and waits to be let go on."""

    def __init__(self) -> None:
        self.go_on, self.batches = threading.Event(), list[int]()

    def close(self) -> None:
        """Let it go on."""
        self.go_on.set()

    def compute(self, items: Sequence[Item]) -> list[Any]:
        self.go_on.wait(60)
        self.batches.append(len(items))
        if any(item.given == "bad" for item in items):
            raise UsageError("bad")
        return [item.given * 2 for item in items]


class Ending(Doubling):
    """A job whose items wait for others to end."""

    waits = True


class Staying(Doubling):
    """A job that is computed in this process alone."""

    travels = False


@contextmanager
def worked_queue(batch_items: int = 8, max_waiting: int = 8) -> Iterator[Queue]:
    queue = Queue(Limits(batch_items=batch_items, max_waiting=max_waiting, max_characters=12))
    worker = Worker("test", queue)
    try:
        yield queue
    finally:
        worker.close()


def started(queue: Queue, job: QueuedJob, given: str = "a") -> Item:
    """An item that is being computed."""
    item = Item(job, given)
    queue.submit([item])
    while queue.num_waiting:
        time.sleep(0.01)
    return item


def test_the_oldest_text_is_taken_first_and_with_it_those_of_its_length() -> None:
    queue, lane, job = Queue(Limits(batch_items=2)), Lane(), Doubling()
    queue.add(lane)
    queue.submit([Item(job, given) for given in ("aaa", "b", "cccc", "d", "e")])
    taken = list[list[str]]()
    while begun := queue.take(lane, waits=False):
        taken.append([item.given for item in begun])
        for item in begun:
            item.result.set_result(None)
    assert taken == [["aaa", "cccc"], ["b", "d"], ["e"]]


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_a_line_waits_until_most_others_have_ended_or_for_so_long(patience: float) -> None:
    queue, lane, job = Queue(Limits(batch_items=8), patience), Lane(), Ending()
    queue.add(lane)
    queue.submit([Item(job, "a") for _ in range(4)])
    begun = queue.take(lane, waits=False) or []
    queue.submit([Item(job, "b")])
    assert [item.given for item in queue.take(lane, waits=False) or []] == ([] if patience else ["b"])
    for item in begun[:3]:
        item.result.set_result(None)
    assert [item.given for item in queue.take(lane, waits=False) or []] == (["b"] if patience else [])


def test_lanes_share_what_waits_but_for_what_is_computed_here() -> None:
    queue, here, other, job = Queue(Limits(batch_items=8)), Lane(), Lane(is_here=False), Doubling()
    queue.add(here)
    queue.add(other)
    queue.submit([Item(job, "a") for _ in range(6)])
    assert [len(queue.take(lane, waits=False) or []) for lane in (other, here)] == [3, 3]
    queue.submit([Item(Staying(), "b")])
    assert [len(queue.take(lane, waits=False) or []) for lane in (other, here)] == [0, 1]


def test_a_text_that_fails_fails_alone_and_one_that_nobody_waits_for_is_not_computed() -> None:
    job = Doubling()
    with worked_queue() as queue:
        items = [started(queue, job, "first"), *(Item(job, given) for given in ("a", "bad", "left", "b"))]
        queue.submit(items[1:])
        items[3].is_left = True
        job.go_on.set()
        assert [items[place].result.result(60) for place in (0, 1, 4)] == ["firstfirst", "aa", "bb"]
        with pytest.raises(UsageError, match="bad"):
            items[2].result.result(60)
        assert not items[3].result.done()
    assert job.batches == [1, 3, 1, 1, 1]


def test_a_batch_holds_so_much_text_and_what_has_begun_is_not_told_twice() -> None:
    job, told = Doubling(), list[tuple[int, str]]()
    with worked_queue() as queue:
        started(queue, job)
        long = [Item(job, "x" * 12), Item(job, "y"), Item(job, "bad", told.append)]
        long[2].say(0, "begun")
        queue.submit(long)
        job.go_on.set()
        assert [long[0].result.result(60), long[1].result.result(60)] == ["x" * 24, "yy"]
        with pytest.raises(UsageError, match="bad"):
            long[2].result.result(60)
    assert job.batches == [1, 1, 2, 1, 1]  # the long text alone; "bad" is tried again, alone
    assert told == [(0, "begun")]


def test_a_queue_takes_in_so_much_and_no_more() -> None:
    job = Doubling()
    with worked_queue(batch_items=1, max_waiting=2) as queue:
        started(queue, job)
        queue.submit([Item(job, "b"), Item(job, "c")])
        with pytest.raises(RequestError, match="too many") as refused:
            queue.submit([Item(job, "d")])
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        job.go_on.set()


def test_a_server_that_is_full_too_slow_or_ending_says_when_to_try_again(translator: Model) -> None:
    job, fields = Doubling(), {"q": "twelve", "source": "en", "target": "de"}
    with (
        Served(
            {"en-de": translator}, Limits(max_requests=1, max_waiting=1, batch_items=1, seconds=0.3)
        ) as served,
        closing(job),
    ):
        server = served.state
        queue = server.models["en-de"].queue
        started(queue, job)
        slow, full = (served.ask("/translate", fields) for _ in range(2))
        assert (slow.status, slow.body) == (503, {"error": "no answer within 0.3 seconds"})
        assert (full.status, full.headers["retry-after"]) == (429, "1")
        other = Visit(0.0, "read")
        server._in_flight.add(other)
        crowded = served.ask("/translate", fields)
        server._in_flight.remove(other)
        assert (crowded.status, crowded.headers["retry-after"]) == (503, "1")
        assert crowded.body["error"].startswith("too many requests")
        server.is_stopping = True
        for path in ("/health", "/translate"):
            ending = served.ask(path, fields if path == "/translate" else None)
            assert (ending.status, ending.headers["retry-after"]) == (503, "5")
        assert served.ask("/metrics").status == 200


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["en-de={run}", "--host", "0.0.0.0"], "--keys-file"),
        (["{run}"], "write de-en="),
        (["en-de={run}", "en-de={run}"], "two models have one name"),
        (["en-de={run}", "--max-items", "0"], "--max-items is 0"),
        (["en-de={run}", "--port", "99999"], "--port 99999"),
        (["en-de={run}", "--workers", "0"], "--workers 0"),
        (["en-de={run}", "--host", "no.such.host.invalid"], "--keys-file"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    triptych: Command, small_run: Path, arguments: list[str], says: str
) -> None:
    found = triptych("serve", *(one.format(run=small_run) for one in arguments))
    assert found.code == 2
    assert says in found.err.splitlines()[-1]


def test_a_port_that_is_taken_is_said_in_one_line(triptych: Command, small_run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = triptych("serve", f"en-de={small_run}", "--port", port)
    assert found.code == 2
    assert f"cannot listen at 127.0.0.1:{port} (Address already in use)" in found.err


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_told_to_stop_it_ends_what_runs_and_then_itself(small_run: Path, workers: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "triptych", "serve", f"en-de={small_run}", "--port", str(port)]
    command += ["--workers", str(workers)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRIPTYCH_API_KEY": ""},
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("serving en-de at ")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps({"q": ["three hundred and one"] * 100, "source": "en", "target": "de"})
        connection.request("POST", "/translate", body)
        time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)  # as systemd sends it, to all processes
        answer = connection.getresponse()
        assert answer.status == 200
        assert len(json.loads(answer.read())["translatedText"]) == 100
        connection.close()
        assert process.wait(60) == 0
        with suppress(ProcessLookupError):  # nothing of it is left, soon
            for _ in range(600):
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            pytest.fail("a process of the server is left")
        *_, answered, stopped = process.stderr.read().splitlines()
        assert (json.loads(answered)["status"], stopped) == (200, "stopped")
    finally:
        process.kill()
        process.communicate()


def test_told_to_stop_twice_it_stops_at_once() -> None:
    serving = Serving(Server(Fleet({}, Limits()), Limits(), []), 30.0, lambda: None, public=False)
    serving.handle_exit(signal.SIGINT, None)
    assert not serving.should_exit
    with pytest.raises(KeyboardInterrupt):
        serving.handle_exit(signal.SIGINT, None)
