"""Runs of language models as folders that `transformers` reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from small_checkpoints import gpt2_that_runs
from triptych.converting.conversion import can_convert, convert
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.core.models.storage import write_model
from triptych.errors import UsageError
from triptych.running.opening import open_language_model, open_reader
from triptych.training import resolve, runs
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizer
from triptych.training.progress import LineDisplay

pytestmark = pytest.mark.filterwarnings("ignore")

_SIZES: dict[str, Any] = {"num_layers": 2, "d_model": 24, "num_heads": 4, "context": 32}
_LEARNED = {"scheme": "learned", "max_tokens": 40}
_LLAMA: dict[str, Any] = {"norm_kind": "rms", "gated": True, "activation": "swish", "bias": False}
_BIASES = {"q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True}
GPT2: dict[str, dict[str, Any]] = {
    "factored": {"positions": _LEARNED},
    "factored, with biases": {"positions": _LEARNED, "attention": _BIASES, "activation": "gelu_tanh"},
    "no biases, own output": {"positions": _LEARNED, "bias": False, "tie_embeddings": False},
    "grouped": {"positions": _LEARNED, "attention": {"projections": "grouped", "num_kv_heads": 2}},
    "shared, sines": {"positions": {"scheme": "sinusoidal"}, "attention": {"projections": "shared"}},
    "latent": {"positions": _LEARNED, "attention": {"projections": "latent", "d_latent": 9}},
    "narrow, no positions": {"positions": {"scheme": "none"}, "d_k": 4, "d_v": 3, "activation": "relu"},
    "four matrices": {"positions": _LEARNED, "attention": {"projections": "four_matrix"}},
}
LLAMA: dict[str, dict[str, Any]] = {
    "rotary": {"positions": {"scheme": "rotary"}},
    "biases": {"attention": _BIASES, "bias": True, "tie_embeddings": False},
    "grouped": {"attention": {"projections": "grouped", "num_kv_heads": 2}, "activation": "gelu"},
    "wide keys": {"d_k": 8, "d_v": 5},
    "key_value": {"attention": {"projections": "key_value"}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rotary with LayerNorm": ({}, "GPT-2's .*: rotary positions; Llama.* LayerNorm, not RMSNorm"),
    "no gate": ({"norm_kind": "rms"}, "RMSNorm, not LayerNorm; .*: its feed-forward layers have no gate"),
    "ALiBi": ({**_LLAMA, "positions": {"scheme": "alibi"}}, "attention of block 0 has alibi positions"),
    "QK-norm": ({**_LLAMA, "attention": {"qk_norm": True}}, "block 0 has QK-norm"),
    "post-norm": ({"norm": "post", "positions": _LEARNED}, "there is no norm after the last block"),
    "wide": ({"positions": _LEARNED, "d_k": 9}, "4 heads of 9 channels are more than d_model 24"),
}
IN_EVERY_RUN = ("factored", "latent", "rotary")
ALL = [
    pytest.param(kind, name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow)
    for kind, cases in (("gpt2", GPT2), ("llama", LLAMA))
    for name in cases
]


def run_of(folder: Path, settings: dict[str, Any], kind: Any = "decoder") -> LanguageModel:
    """A folder with a model as a run leaves it, its numbers random everywhere."""
    tokenizer = train_tokenizer(TokenizerSpec(vocab_size=300), ["the cat sat on the mat, twice"] * 3)
    torch.manual_seed(0)
    config = LanguageModelConfig.model_validate({**_SIZES, **settings})
    model = LanguageModel.of(config, kind, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder.mkdir()
    write_model(model, folder)
    tokenizer.save(folder / "tokenizer.json")
    return model.eval()


@pytest.mark.parametrize(("kind", "name"), ALL)
@torch.no_grad()
def test_transformers_gives_the_logits_of_a_model_that_folds(kind: str, name: str, tmp_path: Path) -> None:
    settings = GPT2[name] if kind == "gpt2" else {**_LLAMA, **LLAMA[name]}
    model = run_of(tmp_path / "run", settings)
    done = convert(open_reader(tmp_path / "run", "cpu"), tmp_path / "out", "hf")
    assert done.architecture == kind
    assert [check.tried for check in done.checks] == [True, True, True]
    ids = torch.randint(model.vocab_size, (2, 20), generator=torch.Generator().manual_seed(2))
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert float((other(ids).logits - model(ids).logits).abs().max()) < 1e-4
    assert float((load_language_model(tmp_path / "out")(ids).logits - model(ids).logits).abs().max()) < 1e-4
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("the cat, twice")["input_ids"]) == "the cat, twice"


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_folds_into_neither_format_is_refused_by_its_part(name: str, tmp_path: Path) -> None:
    settings, said = REFUSED[name]
    run_of(tmp_path / "run", settings)
    with pytest.raises(UsageError, match=said) as raised:
        convert(open_reader(tmp_path / "run", "cpu"), tmp_path / "out", "hf")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_encoders_and_other_formats_are_refused(tmp_path: Path) -> None:
    run_of(tmp_path / "run", {}, "encoder")
    with pytest.raises(UsageError, match="it is an encoder"):
        convert(open_reader(tmp_path / "run", "cpu"), tmp_path / "out", "hf")
    with pytest.raises(UsageError, match="converted --to hf, ctranslate2 or gguf alone"):
        convert(open_reader(tmp_path / "run", "cpu"), tmp_path / "out", "onnx")
    assert not can_convert(open_reader(tmp_path / "run", "cpu"))


def test_a_run_that_went_on_with_a_checkpoint_is_written_in_its_format(tmp_path: Path) -> None:
    gpt2_that_runs(tmp_path / "gpt2")
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 40)
    recipe = resolve(
        {
            "task": "language-model",
            "data": {"train": {"files": [str(tmp_path / "text.txt")]}, "cache": str(tmp_path / "cache")},
            "model": {"checkpoint": str(tmp_path / "gpt2"), "context": 16},
            "training": {"max_steps": 2, "batch_size": 2, "warmup_steps": 1, "threads": 1},
        }
    )
    runs.train(recipe, tmp_path / "run", LineDisplay())
    with pytest.raises(UsageError, match="Hugging Face's format already"):
        convert(open_reader(tmp_path / "gpt2", "cpu"), tmp_path / "out", "hf")
    assert can_convert(open_reader(tmp_path / "run", "cpu"))
    done = convert(open_reader(tmp_path / "run", "cpu"), tmp_path / "out", "hf")
    assert [check.tried for check in done.checks] == [True, True, True]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (tmp_path / "gpt2").iterdir()}
    ids = torch.arange(12)[None]
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = load_language_model(tmp_path / "run")(ids).logits
        assert float((other(ids).logits - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("quantization", ["float32", "int8"])
def test_language_models_are_written_for_ctranslate2_with_their_tokenizer(
    quantization: Any, tmp_path: Path
) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="needs CTranslate2")
    run_of(tmp_path / "run", GPT2["grouped"])
    gpt2_that_runs(tmp_path / "gpt2")
    for name in ("run", "gpt2"):
        opened = open_reader(tmp_path / name, "cpu")
        found = convert(opened, tmp_path / f"{name}-out", "ctranslate2", quantization)
        (check,) = found.checks
        assert check.tried
        generator = ctranslate2.Generator(str(tmp_path / f"{name}-out"))
        assert generator.compute_type.startswith("int8" if quantization == "int8" else "float32")
        opened = open_language_model(tmp_path / name, "cpu")
        ids = opened.tokenizer.encode(["the cat"])[0]
        (scored,) = generator.score_batch([[str(token) for token in ids]])
        logits = opened.model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        expected = [float(logits[place, token]) for place, token in enumerate(ids[1:])]
        assert scored.log_probs == pytest.approx(expected, abs=0.5 if quantization == "int8" else 1e-4)
        assert (tmp_path / f"{name}-out" / "tokenizer.json").exists()
