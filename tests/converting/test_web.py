"""Models as one page for the web: its engine gives what Python gives."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_checkpoints import gpt2_that_runs
from small_models import small_run  # noqa: F401 - fixture
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.core.models.architecture import HeadConfig
from triptych.errors import TriptychError, UsageError
from triptych.model import Model, load
from triptych.running.text.scripts import UNSPACED
from triptych.seeing.attending import HeldOutText
from triptych.seeing.attending.alignment import all_words_of
from triptych.seeing.attending.what_ifs import PYTHON_OF
from triptych.serving.exploring import WHAT_IFS, Explorer, Shown, change_model
from triptych.training import read_recipe, task_of
from triptych.training.corpora.generated import generate_pairs
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizer
from web_engine import REPORTS, ask, found_node, parts_of

needs_node = pytest.mark.skipif(found_node() is None, reason="no Node.js is on the PATH")
SENTENCE = "Der alte Hund schläft um halb vier."


@pytest.fixture(scope="module")
def page(demo: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("web") / "demo.html"
    demo.convert(path, "web", "float32")
    return path


def test_a_page_is_one_small_file_that_asks_for_nothing(demo: Model, tmp_path: Path) -> None:
    for quantization, most, differs in (("float16", 2.5e6, 0.05), ("int8", 1.5e6, 2)):
        path = tmp_path / f"{quantization}.html"
        found = demo.convert(path, "web", quantization)  # type: ignore[arg-type]
        assert (found.format, path.stat().st_size < most) == ("web", True)
        text = path.read_text(encoding="utf-8")
        # The page states what its rounding does.
        largest = found.checks[0].largest_difference
        assert largest is not None
        assert 0 < largest < differs
        assert f"here in {quantization}. The logits are within {largest:.2g}" in text
    assert not re.search(r"""(src|href)=["']?(https?:|//)|@import|\bimport\b[^;]*\bfrom\b""", text)
    assert 'type="module"' not in text
    assert {*re.findall(r"https?://[^\s\"'`<)]+", text)} == {"http://www.w3.org/2000/svg"}
    with pytest.raises(UsageError, match=r"int8\.html exists"):
        demo.convert(path, "web")


def test_the_script_has_nothing_that_is_newer_than_the_browsers_of_2023() -> None:
    """Firefox 115 and Safari 16.4: checked by names, since no Safari runs here."""
    newer = r"\.(groupBy|withResolvers|isWellFormed|toWellFormed|union|intersection|difference)\("
    newer += r"|/v\b|\busing\b|WebAssembly|navigator\.gpu"
    for script in REPORTS.glob("*.js"):
        if script.name != "charts.js":  # of reports, whose Vega is a module
            code = re.sub(r"//.*", "", script.read_text(encoding="utf-8"))
            assert re.findall(newer, code) == [], script.name


def test_what_the_engine_does_not_compute_is_refused_by_name(
    demo: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    encoder, folder = _language_model({}, "characters", tmp_path, "encoder")
    with pytest.raises(UsageError, match="an encoder alone"):
        load(encoder, tokenizer=folder).convert(path, "web")
    with pytest.raises(UsageError, match=r"was changed \(ablate\(cross\.0\.0\)\): save it"):
        demo.ablate("cross.0.0").convert(path, "web")
    config = LanguageModelConfig(num_layers=1, d_model=24, num_heads=4, context=64)
    made = config.architecture("decoder", encoder.vocab_size)
    capped = replace(made, head=HeadConfig(soft_cap=30.0))
    layers = [site.layer(24, 4, config.positions.in_attention()) for site in config.sites()]
    with pytest.raises(UsageError, match=r"does not compute soft_cap = 30\.0 \(the output layer\)"):
        load(LanguageModel(capped, layers, 64), tokenizer=folder).convert(path, "web")
    monkeypatch.setattr("triptych.converting.web.MOST_BYTES", 1 << 20)
    said = "a page has at most 1 MiB of weights: triptych explore MODEL shows it"
    with pytest.raises(UsageError, match=said):
        demo.convert(path, "web")
    assert not path.exists()


# Against Python.


def _sentences(count: int) -> list[str]:
    return [source for source, _ in generate_pairs(count, "test", 7)]


def _same_texts(demo: Model, page: Path, count: int) -> None:
    texts = _sentences(count)
    for beam in (1, 4):
        own = demo.translate(texts, beam_size=beam, num_best=beam, split=False)
        found = ask(page, *(("search", {"text": text, "beam": beam}) for text in texts))
        expected = [[one.text for one in line.candidates] for line in own]
        assert [[one["text"] for one in some] for some in found] == expected
        scores = [one["score"] for some in found for one in some]
        own_scores = [one.score for line in own for one in line.candidates]
        assert scores == pytest.approx(own_scores, abs=1e-4)


@needs_node
def test_a_page_translates_as_python_does_greedily_and_with_a_beam(demo: Model, page: Path) -> None:
    _same_texts(demo, page, 4)


@needs_node
def test_characters_that_show_nothing_are_not_read_as_in_python(demo: Model, page: Path) -> None:
    text = "Der al\u00adte\u200b Hund\u200d \u202aschläft\u202c um \ufeffhalb\x07 vier."
    expected = demo.translate("Der alte Hund schläft um halb vier.", beam_size=4, split=False).text
    found = ask(page, ("search", {"text": text, "beam": 4}), ("search", {"text": "\u00ad", "beam": 1}))
    assert found[0][0]["text"] == demo.translate(text, beam_size=4, split=False).text == expected
    assert found[1] == {"error": "text: give a text"}


@needs_node
@pytest.mark.slow
def test_two_hundred_sentences_are_translated_as_python_does(demo: Model, page: Path) -> None:
    _same_texts(demo, page, 200)


def _logits(model: Model, ids: list[int], source: list[int] | None) -> torch.Tensor:
    run = model.run(ids) if source is None else model.run(source[:-1], target=ids[:-1])
    return run.logits.float()


def _largest(found: Any, expected: torch.Tensor) -> float:
    assert not isinstance(found, dict), found
    return float((torch.tensor(found) - expected).abs().max())


# Every switch of the page, at layers of each kind.
SWITCHES = [
    "ablate(cross.0.1)",
    "ablate(cross.1)",
    "ablate(encoder.0.0 encoder.0.2 encoder.0.3)",
    "even(decoder.1.2)",
    "unscaled(cross.1.0)",
    "one_head(cross.0)",
    "tie(encoder.0, W_Q, W_K)",
    "tie(decoder.0, W_K, W_V)",
    "tie(cross.1, W_K, W_V)",
    "truncate(cross.0.3, 4)",
    "truncate_ov(encoder.1.1, 6)",
    "exchange(encoder.0.0, encoder.0.1)",
    "exchange(encoder.0.0, encoder.1.3)",
    "without_positions()",
    "fold()",
]


@needs_node
def test_every_switch_is_that_of_python(demo: Model, page: Path) -> None:
    source = demo.reader.encode([SENTENCE], ["The old dog sleeps at half past three."])[0]
    ids, read = [*source.ids], [*(source.source or ())]
    both = ["tie(encoder.1, W_Q, W_K)", "tie(encoder.1, W_V, W_K)", "ablate(cross.0.0)"]
    states = [[], *([one] for one in SWITCHES), both]
    found = ask(page, *(("logits", {"ids": ids, "source": read, "changes": calls}) for calls in states))
    unchanged = torch.tensor(found[0])
    for calls, logits in zip(states, found, strict=True):
        changed = demo
        for call in calls:
            changed = change_model(changed, call)
        assert _largest(logits, _logits(changed, ids, read)) < 1e-3, calls
        # Heads of a layer are summed in any order, and a product is computed first or last.
        is_same = calls in ([], ["fold()"], ["exchange(encoder.0.0, encoder.0.1)"])
        assert (_largest(logits, unchanged) < 1e-3) == is_same, calls


@needs_node
@pytest.mark.parametrize(
    "calls", [SWITCHES[::5], pytest.param(SWITCHES, marks=pytest.mark.slow)], ids=["a few", "all"]
)
def test_every_switch_has_the_figures_of_python(demo: Model, page: Path, calls: list[str]) -> None:
    """Divergences, losses and probabilities are those of the page with a server."""
    target = demo.translate(SENTENCE).text
    explorer = Explorer(demo)
    fields = {"text": SENTENCE, "target": target, "layer": "cross.1", "head": 2, "query": 3}
    rows = ask(page, *(("row", {**fields, "changes": [call]}) for call in calls))
    for call, row in zip(calls, rows, strict=True):
        own = explorer.row(Shown(SENTENCE, target, (call,)), "cross.1", 2, 3)
        for name in ("kl", "mean_kl", "loss"):
            assert row["next"][name] == pytest.approx(own["next"][name], abs=1e-3), (call, name)
        assert row["weights"] == pytest.approx(own["weights"], abs=1e-3), call
        probabilities = {token: after for token, _, after in row["next"]["tokens"]}
        for token, _, after in own["next"]["tokens"]:
            assert probabilities.get(token, after) == pytest.approx(after, abs=1e-3), call


def _same_matrices(found: dict[str, Any], own: dict[str, Any]) -> None:
    """Pictures, spectra, figures and directions of a head are those of Python."""
    for name, rows in own["pictures"].items():
        drawn = [[int(digit, 16) for digit in line] for line in rows]
        differences = torch.tensor(drawn) - torch.tensor(
            [[int(digit, 16) for digit in line] for line in found["pictures"][name]]
        )
        assert differences.abs().max() <= 1  # a size may lie between two digits
        assert (differences != 0).float().mean() < 0.02
    for form, values in own["spectra"].items():
        assert found["spectra"][form] == pytest.approx(values, rel=1e-3, abs=1e-4)
        assert found["chance"][form] == pytest.approx(own["chance"][form], rel=1e-5)
    left_out = {name for name, value in own["figures"].items() if value is None} | {"ov_copying"}
    assert {name for name, value in found["figures"].items() if value is not None} == own[
        "figures"
    ].keys() - left_out
    for name in own["figures"].keys() - left_out:
        assert found["figures"][name] == pytest.approx(own["figures"][name], rel=2e-3), name
    for form in ("qk", "ov"):
        # The first direction; those of nearly equal singular values may be turned into each other.
        ends = [
            {
                (tuple(one["reads"]), tuple(one["writes"]))
                for one in of["directions"]
                if one["form"] == form and not one["number"]
            }
            for of in (found, own)
        ]
        assert ends[0] == ends[1]


@needs_node
@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["cross.0.1", "encoder.1.0", "decoder.0.2"])
def test_a_head_has_the_pictures_spectra_and_directions_of_python(
    demo: Model, page: Path, place: str
) -> None:
    layer, head = place.rsplit(".", 1)
    (found,) = ask(page, ("head", {"changes": [], "layer": layer, "head": int(head)}))
    _same_matrices(found, Explorer(demo).head((), layer, int(head)))


@needs_node
def test_words_are_those_of_python(demo: Model, page: Path) -> None:
    text = "Am 3. Mai um halb vier kostet es 1234,50 Euro."
    target = demo.translate(text).text
    (found,) = ask(page, ("view", {"text": text, "target": target, "changes": []}))
    attention = demo.attend(text, target)
    for kind in found["texts"][0]["kinds"]:
        own = attention.words(f"{kind['kind']}.0")
        # Queries of the decoder are shown as the tokens that they produce.
        shown = attention.words("cross.0" if kind["kind"] == "decoder" else f"{kind['kind']}.0").target
        assert kind["query_words"] == [word.start for word in shown]
        assert kind["key_words"] == [word.start for word in own.source]
        assert len(kind["key_words"]) < len(kind["keys"])
    served = Explorer(demo).view(Shown(text, target))["texts"][0]["kinds"]
    for kind, own in zip(found["texts"][0]["kinds"], served, strict=True):
        for name in ("queries", "keys", "query_words", "key_words"):
            assert kind[name] == [*own[name]], (kind["kind"], name)


def test_scripts_without_spaces_are_those_of_python() -> None:
    code = (REPORTS / "answers.js").read_text(encoding="utf-8")
    (written,) = re.findall(r"^const UNSPACED = /\^\[(.+)\]/u;$", code, re.MULTILINE)
    assert re.sub(r"\\u\{?([0-9a-f]+)\}?", lambda found: chr(int(found[1], 16)), written) == UNSPACED


def test_the_page_offers_the_changes_of_the_server() -> None:
    assert WHAT_IFS.keys() == PYTHON_OF.keys()


@needs_node
@pytest.mark.slow
def test_the_python_of_a_state_makes_the_same_model(demo: Model, page: Path) -> None:
    fields = {"text": SENTENCE, "count": 1, "beam": 2}
    written = ask(page, *(("write", {**fields, "changes": [call]}) for call in SWITCHES))
    for call, found in zip(SWITCHES, written, strict=True):
        names: dict[str, Any] = {"model": demo, "torch": torch}
        exec(found["python"], names)
        own = names["model"].translate(SENTENCE, beam_size=2, num_best=2, split=False)
        assert [one["text"] for one in found["candidates"]] == [one.text for one in own.candidates], call


@needs_node
@pytest.mark.parametrize(
    ("call", "count"),
    [
        ("tie(encoder.0, W_Q, W_K)", 10),
        *(
            pytest.param(call, 50, marks=pytest.mark.slow)
            for call in ("tie(encoder.0, W_Q, W_K)", "fold()", "ablate(cross.0.1)")
        ),
    ],
)
def test_a_switch_is_measured_on_the_runs_own_held_out_sentences(
    demo: Model, page: Path, call: str, count: int
) -> None:
    record, _ = parts_of(page)
    sources, targets = task_of(read_recipe(demo.reader.folder / "recipe.toml")).validation_text(Path())
    assert targets is not None
    assert (len(record["held_out"]["windows"]), record["held_out"]["units"]) == (50, "sentences")
    assert record["example"] in sources[:50]
    text = HeldOutText(demo.reader, sources[:count], targets[:count])
    (found,) = ask(page, ("held_out", {"changes": [call], "parts": 50}), held_out=count)
    own = text.compare(change_model(demo, call).reader)
    assert own.interval is not None
    assert found["loss"] == pytest.approx([own.before, own.after], abs=1e-4)
    # The resamples are others.
    width = own.interval[1] - own.interval[0]
    assert found["interval"] == pytest.approx(own.interval, abs=max(1e-5, 0.2 * width))


@needs_node
@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["cross.0.1", "encoder.1.0", "decoder.0.2"])
def test_a_row_of_a_head_has_the_steps_of_python(demo: Model, page: Path, place: str) -> None:
    layer, head = place.rsplit(".", 1)
    target = demo.translate(SENTENCE).text
    fields = {"text": SENTENCE, "target": target, "layer": layer, "head": int(head), "query": 2}
    (found,) = ask(page, ("row", {**fields, "changes": []}))
    steps = demo.attend(SENTENCE, target).steps(layer, int(head), 2)
    own = steps.record()
    names = ("q", "k", "v", "products", "scaled", "scores", "weights", "shares", "z", "projected", "output")
    for name in names:
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(own[name]), atol=1e-4, rtol=1e-3)
    assert [key.replace(" ", "▁") for key in found["keys"]] == own["keys"]
    assert (found["direct_effect"] is None) == (own["direct_effect"] is None)
    for way in own["direct_effect"] or ():
        first, theirs = found["direct_effect"][way][0], own["direct_effect"][way][0]
        assert first["token"].replace(" ", "▁") == theirs["token"]
        assert first["logit"] == pytest.approx(theirs["logit"], abs=1e-3)


# Language models, and what recipes can contain.

_LEARNED = {"scheme": "learned", "max_tokens": 96}
_BIASES = {"q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True}
KINDS: dict[str, dict[str, Any]] = {
    "rotary, gated": {"norm_kind": "rms", "gated": True, "activation": "swish", "bias": False},
    "learned, biases": {"positions": _LEARNED, "attention": _BIASES, "tie_embeddings": False},
    "alibi, qk-norm, gate": {
        "positions": {"scheme": "alibi"},
        "attention": {"qk_norm": True, "output_gate": True},
        "activation": "gelu_tanh",
    },
    "post-norm, sines": {"norm": "post", "positions": {"scheme": "sinusoidal"}, "activation": "relu"},
    "additive": {"positions": _LEARNED, "attention": {"scores": "additive"}},
    "cosine, pairs of neighbours": {
        "positions": {"scheme": "rotary", "rotary_dim": 4, "rotary_pairing": "interleaved"},
        "attention": {"scores": "cosine"},
        "activation": "relu_squared",
    },
    "grouped": {"attention": {"projections": "grouped", "num_kv_heads": 2}},
    "as Llama and Qwen": {
        "norm_kind": "rms",
        "gated": True,
        "activation": "swish",
        "bias": False,
        "attention": {"projections": "grouped", "num_kv_heads": 2, "qk_norm": True},
    },
    "shared, halves": {
        "positions": {"scheme": "sinusoidal", "sinusoidal_layout": "halves"},
        "attention": {"projections": "shared"},
    },
    "latent": {"positions": _LEARNED, "attention": {"projections": "latent", "d_latent": 9}},
    "four matrices, scale outside": {
        "positions": {"scheme": "none"},
        "attention": {"projections": "four_matrix", "scale": "outside"},
    },
}
TEXT = "O Romeo, wherefore art thou? It's 12 o'clock — so späte Stunde!\n\n  Ay.  "
TRAINING = [TEXT * 3, "First Citizen: Before we proceed any further, hear me speak. " * 3]


def _language_model(
    settings: dict[str, Any], kind: Any, folder: Path | None = None, half: Any = "decoder"
) -> tuple[LanguageModel, Any]:
    """A model with large random weights, so that its tokens differ clearly, and its tokenizer's folder."""
    tokenizer = train_tokenizer(TokenizerSpec(kind=kind, vocab_size=320), TRAINING)
    sizes = {"num_layers": 2, "d_model": 24, "num_heads": 4, "context": 64}
    config = LanguageModelConfig.model_validate({**sizes, **settings})
    torch.manual_seed(1)
    model = LanguageModel.of(config, half, tokenizer.vocab_size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    if folder is None:
        return model, tokenizer
    tokenizer.save_files(folder)
    return model, folder


@needs_node
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KINDS)
def test_a_language_model_of_a_recipe_writes_as_python_does(name: str, tmp_path: Path) -> None:
    kind = ("characters", "bpe", "unigram", "bytes")[[*KINDS].index(name) % 4]
    module, folder = _language_model(KINDS[name], kind, tmp_path)
    model = load(module, tokenizer=folder)
    model.convert(tmp_path / "page.html", "web", "float32")
    ids = model.reader.encode([TEXT])[0].ids[:40]
    (logits, written, greedy, encoded) = ask(
        tmp_path / "page.html",
        ("logits", {"ids": [*ids]}),
        ("search", {"text": "O Romeo", "beam": 3, "count": 6}),
        ("search", {"text": "O Romeo", "beam": 1, "count": 6}),
        ("encode", {"text": TEXT + "<eos> x<mask>", "parses": True}),
    )
    assert _largest(logits, _logits(model, [*ids], None)) < 1e-3
    (form,) = ask(tmp_path / "page.html", ("head", {"changes": [], "layer": "1", "head": 1}))
    _same_matrices(form, Explorer(model).head((), "1", 1))
    assert encoded == [*model.reader.encode([TEXT + "<eos> x<mask>"])[0].ids]
    options = {"max_new_tokens": 6, "generation_config": "ignore"}
    own = model.generate("O Romeo", beam_size=3, num_samples=3, **options)
    assert [one["text"] for one in written] == [one.text for one in own]
    assert greedy[0]["text"] == model.generate("O Romeo", **options).text


# Every switch of the page, at a language model of two layers.
OF_LANGUAGE_MODELS = [
    ["ablate(0.1)"],
    ["ablate(1)"],
    ["ablate(0.0 0.2 0.3)"],
    ["even(1.2)"],
    ["unscaled(1.0)"],
    ["one_head(0)"],
    ["tie(0, W_Q, W_K)"],
    ["tie(*, W_Q, W_K)"],
    ["tie(*, W_K, W_V)"],
    ["tie(1, W_Q, W_K)", "tie(1, W_V, W_K)", "ablate(1.0)"],
    ["truncate(0.3, 2)"],
    ["truncate_ov(1.1, 3)"],
    ["exchange(0.0, 0.1)"],
    ["exchange(0.0, 1.3)"],
    ["without_positions()"],
    ["fold()"],
    ["truncate(0, 3)"],
    ["exchange(0.0, 1)"],
]


@needs_node
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_switch_of_a_language_model_is_that_of_python_or_refused_by_both(name: str, tmp_path: Path) -> None:
    module, folder = _language_model(KINDS[name], "characters", tmp_path)
    model = load(module, tokenizer=folder)
    model.convert(tmp_path / "page.html", "web", "float32")
    ids = [*model.reader.encode([TEXT])[0].ids[:24]]
    states = (("logits", {"ids": ids, "changes": calls}) for calls in OF_LANGUAGE_MODELS)
    for calls, found in zip(OF_LANGUAGE_MODELS, ask(tmp_path / "page.html", *states), strict=True):
        changed = model
        try:
            for call in calls:
                changed = change_model(changed, call)
        except TriptychError:
            assert "error" in found, calls
            assert not re.search("undefined|NaN", found["error"]), calls
        else:
            assert _largest(found, _logits(changed, ids, None)) < 1e-3, calls


@needs_node
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters", "bytes"])
def test_texts_of_every_script_are_cut_and_joined_as_in_python(kind: Any, tmp_path: Path) -> None:
    module, folder = _language_model({"positions": _LEARNED}, kind, tmp_path)
    model = load(module, tokenizer=folder)
    model.convert(tmp_path / "page.html", "web")
    texts = [
        "e\u0301 and é, ﬁne, ½, ｆｕｌｌ", "Привет, мир. 你好，世界。 안녕 🙂",
        "…—–„“ \u00a0 \u200b\u0085 x", "a\tb\r\n\n c",
        "हिन्दी में १२३", "they're we'll I'D '", "  x", "<eos", "",
    ]  # fmt: skip
    found = ask(tmp_path / "page.html", *(("encode", {"text": text, "parses": True}) for text in texts))
    assert found == model.tokenizer.encode(texts, parse_special=True)
    words = ask(tmp_path / "page.html", *(("words", {"text": text}) for text in texts))
    for starts, ids in zip(words, found, strict=True):
        special = [token in model.tokenizer.special_ids for token in ids]
        own = all_words_of(model.tokenizer.word_pieces(ids), special)
        assert starts == [word.start for word in own]


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_a_language_model_goes_on_after_two_hundred_texts_as_python_does(kind: Any, tmp_path: Path) -> None:
    module, folder = _language_model({"positions": _LEARNED}, kind, tmp_path)
    model = load(module, tokenizer=folder)
    page = tmp_path / "page.html"
    model.convert(page, "web", "float32")
    texts = [english[:40] for _, english in generate_pairs(200, "test", 7)]
    found = ask(page, *(("search", {"text": text, "beam": 1, "count": 8}) for text in texts))
    own = [model.generate(text, max_new_tokens=8, generation_config="ignore").text for text in texts]
    assert [one[0]["text"] for one in found] == own
    ids = [[*model.reader.encode([text])[0].ids] for text in texts]
    logits = ask(page, *(("logits", {"ids": one}) for one in ids))
    assert max(_largest(one, _logits(model, of, None)) for one, of in zip(logits, ids, strict=True)) < 1e-3


@pytest.mark.slow
def test_a_checkpoint_without_a_recipe_has_no_held_out_text(tmp_path: Path) -> None:
    found = load(gpt2_that_runs(tmp_path / "gpt2")).convert(tmp_path / "page.html", "web", "int8")
    assert found.folded[1] == "no held-out text for the loss (no recipe names a validation text)"
    assert parts_of(tmp_path / "page.html")[0]["held_out"] is None


@needs_node
@pytest.mark.slow
def test_a_small_translator_of_a_run_translates_as_python_does(
    small_run: Path,  # noqa: F811 - a fixture
    tmp_path: Path,
) -> None:
    model = load(small_run)
    model.convert(tmp_path / "page.html", "web", "float32")
    texts = ["twelve", "one two three", "seven"]
    found = ask(tmp_path / "page.html", *(("search", {"text": text, "beam": 2}) for text in texts))
    own = model.translate(texts, beam_size=2, num_best=2, split=False)
    expected = [[one.text for one in line.candidates] for line in own]
    assert [[one["text"] for one in some] for some in found] == expected
