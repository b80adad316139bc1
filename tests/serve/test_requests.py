"""Translations and completions over HTTP: those of the models, as the clients of others read them."""

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import libretranslatepy
import openai
import pytest
import torch
import transformers
from benchmarks import serving

from served import Served
from small_checkpoints import bert_that_runs, gpt2_that_runs
from triptych.model import Model, load
from triptych.running.decoding import score_continuations
from triptych.serving.limits import Limits
from triptych.serving.markup import Markup
from triptych.serving.uvicorn_server import Fleet, Server, Serving

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
        assert [model.id for model in client.models.list()] == ["gpt", "small-en-de"]
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


@pytest.mark.filterwarnings("ignore")  # of libraries that litellm imports
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
    ("/v1/completions", {"model": "nothing", "prompt": "a"}, 404, "gpt, small-en-de"),
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


def test_told_to_stop_twice_it_stops_at_once() -> None:
    serving = Serving(Server(Fleet({}, Limits()), Limits(), []), 30.0, lambda: None, public=False)
    serving.handle_exit(signal.SIGINT, None)
    assert not serving.should_exit
    with pytest.raises(KeyboardInterrupt):
        serving.handle_exit(signal.SIGINT, None)
