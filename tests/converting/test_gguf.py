"""GGUF files: written and read again, and the same text, logits and token ids in llama.cpp."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers

import triptych
from checkpoints.runs import some
from checkpoints.test_without_a_class import SIZES, internlm2, internlm3, openelm
from checkpoints.tiny_models import TINY
from hub_server import in_place_of_the_hub
from llama_cpp import LlamaCpp, encoded, translated
from rewriting.certificates import failing
from triptych.core.checkpoints.gguf.architectures import architectures
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.core.models.storage import write_model
from triptych.errors import ConfigurationWarning, DataError, UsageError
from triptych.rewriting.functions.merging import MergeKVHeads
from triptych.running.text import PretrainedTokenizer, load_tokenizer
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizer

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore:.*no field of Falcon")

_NO_MIXED_LAYERS = {"mlp_only_layers": [], "decoder_sparse_step": 1}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Families with the changes to the tiny model without which llama.cpp has no place for it.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama 3": {},
    "llama, biases": {},
    "mistral": {"sliding_window": None},
    "mixtral": {},
    "mixtral, another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": _NO_MIXED_LAYERS,
    "qwen3_moe": {**_NO_MIXED_LAYERS, "norm_topk_prob": True, "use_sliding_window": False},
    "olmoe": {"num_key_value_heads": 4, "clip_qkv": None},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 10},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "falcon, one key head": {},
    "falcon, groups": {},
    "bloom": {},
    "mpt": {},
    "starcoder2": {},
    "stablelm": {"qk_layernorm": False},
    "phi": {"qk_layernorm": False},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _PLAIN_ROPE)},
    "cohere": {"use_qk_norm": False},
    "cohere2": {},
    "granite": {},
    "nemotron": {"head_dim": 12, "num_attention_heads": 2, "num_key_value_heads": 1},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4},
    "arcee": {"attention_bias": False, "mlp_bias": False},
    "seed_oss": {"mlp_bias": False, "attention_out_bias": False},
    "glm4": {},
    "ernie4_5": {"use_bias": False},
    "hunyuan_v1_dense": {"rope_parameters": _PLAIN_ROPE},
    "jais2": {},
    "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 4, "moe_k": 2},
}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_STRETCHED: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_STRETCHED |= {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.7}
_IN_GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
FAMILIES |= {
    "deepseek_v2": {},
    "deepseek_v2, stretched": {"rope_parameters": _STRETCHED},
    "deepseek_v3": _IN_GROUPS,
    "deepseek_v3, stretched": {"rope_parameters": _STRETCHED},
    "dots1": {**_ROUTED, "sliding_window": None, "num_key_value_heads": 4},
    "glm4_moe": {**_ROUTED, "first_k_dense_replace": 1},
}
_ROUNDED = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
_NTK = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
_LLAMA_4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
_LLAMA_4 |= {"no_rope_layers": None, "layer_types": None}
_STEEPER = {"mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.4}
FAMILIES |= {
    "gpt_oss": {"rope_parameters": {**_ROUNDED, "truncate": True}},
    "gpt_oss, another base": {"rope_parameters": _PLAIN_ROPE},
    "ministral3": {"rope_parameters": {**_STRETCHED, **_STEEPER}, "sliding_window": None},
    "llama4, text": _LLAMA_4,
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_dense, another base": {"rope_parameters": _NTK},
    "hunyuan_v1_moe": {"rope_parameters": _NTK},
    "exaone_moe": {},
    "minimax_m2": {},
    "apertus": {},
    "apertus, another base": {"rope_parameters": _PLAIN_ROPE},
    "afmoe": {"global_attn_every_n_layers": 4, "layer_types": None, "num_hidden_layers": 4},
    "glm": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "solar_open": {},
    "glm4_moe_lite": {},
    "youtu": {},
}
IN_EVERY_RUN = ("gpt_oss", "llama 3", "mixtral", "gemma2", "falcon, groups", "gpt2", "deepseek_v3")
# llama.cpp looks GELU up in a table of half precision.
_TOLERANCE = 4e-3
_IDS = (5, 17, 80, 100, 33, 250, 41, 9)
_TEXT = "the cat sat on the mat and the dog ate it all day long, as it is said"
_SAMPLES = (
    "Hello, it's 12.50 (or 10%)!",
    "  two  spaces\tand a tab \n\n and lines\r\n",
    "Zwei Männer. Привет, мир. 你好，世界。 안녕 🙂 नमस्ते مرحبا",
    "<eos> in a text",
    " ",
    "",
)
_ROWS = 300


@pytest.fixture(scope="module")
def tokenizer() -> PretrainedTokenizer:
    return train_tokenizer(TokenizerSpec(vocab_size=_ROWS), [_TEXT] * 5)


def folder_of(folder: Path, tokenizer: PretrainedTokenizer, name: str, **changes: Any) -> Path:
    """A tiny model with its tokenizer; its weights are large enough for probabilities that differ."""
    tiny = TINY[name.removesuffix(", another base")]
    torch.manual_seed(0)
    changes["vocab_size"] = _ROWS
    if (text := tiny.settings.get("text_config")) is not None:
        changes = {"text_config": {**text, **changes}}
    model = getattr(transformers, tiny.model)(tiny.configured(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.12)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_files(folder)
    return folder


def written(tmp_path: Path, tokenizer: PretrainedTokenizer, name: str = "llama", **changes: Any) -> Path:
    """The file of a tiny model, next to its folder."""
    folder = folder_of(tmp_path / "folder", tokenizer, name, **changes)
    triptych.load(folder, device="cpu").convert(tmp_path / "tiny.gguf", "gguf")
    return tmp_path / "tiny.gguf"


def both(file: Path) -> tuple[triptych.Model, triptych.Model]:
    """The model of the folder next to a file, and that of the file."""
    return triptych.load(file.parent / "folder", device="cpu"), triptych.load(file, device="cpu")


def save_tokenizer(inner: tokenizers.Tokenizer, folder: Path, **special: str) -> None:
    inner.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": token for name, token in special.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@torch.no_grad()
def log_probabilities(model: triptych.Model, ids: Any = _IDS) -> torch.Tensor:
    logits = model._opened.to_run.language_model(torch.tensor([ids])).logits[0, -1]
    return logits.log_softmax(-1)


@torch.no_grad()
def next_tokens(model: triptych.Model, ids: Any, count: int) -> list[int]:
    found = list(ids)
    for _ in range(count):
        found.append(int(log_probabilities(model, found).argmax()))
    return found[len(ids) :]


def assert_same_in_llama_cpp(model: triptych.Model, file: Path, tolerance: float) -> None:
    """Compare log probabilities after several beginnings, and the most probable continuation."""
    theirs = LlamaCpp(file)
    compared = 0
    for length in range(2, len(_IDS) + 1):
        own = log_probabilities(model, _IDS[:length])
        for token, value in theirs.log_probabilities(_IDS[:length], _ROWS).items():
            assert value == pytest.approx(float(own[token]), abs=tolerance)
            compared += 1
    assert compared >= _ROWS
    found = theirs.next_tokens(_IDS, 8)
    assert found
    assert found == next_tokens(model, _IDS, len(found))


@pytest.mark.parametrize("name", some(FAMILIES, IN_EVERY_RUN))
def test_a_family_is_read_as_it_was_written_and_runs_in_llama_cpp(
    name: str, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "folder", tokenizer, name, **FAMILIES[name])
    model = triptych.load(folder, device="cpu")
    file = tmp_path / "tiny.gguf"
    done = model.convert(file, "gguf")
    assert all(check.tried for check in done.checks)
    again = triptych.load(file, device="cpu")
    before = model._opened.attention.tensors
    after = again._opened.attention.tensors
    assert before.infos.keys() == after.infos.keys()
    for tensor, info in before.infos.items():
        assert info.shape == after.infos[tensor].shape
        # Gains less 1 lose their last bit when 1 is added; all else is the same to the bit.
        gain = info.shape == before.infos[tensor].shape[:1] and name.startswith(("gemma", "nemotron"))
        difference = (before.read(tensor).float() - after.read(tensor).float()).abs().max()
        assert difference <= (2e-7 if gain else 0)
    torch.testing.assert_close(log_probabilities(again), log_probabilities(model), rtol=0, atol=1e-5)
    assert_same_in_llama_cpp(model, file, _TOLERANCE)


# Models that a file has as models of another type, by the type's name, with the same changes.
AS_OTHERS: dict[str, dict[str, Any]] = {
    "idefics3": {},
    "mistral3": {"sliding_window": None},
    "mistral3, ministral": {**FAMILIES["ministral3"], "model_type": "ministral3"},
    "granitemoehybrid, all attention": {},
}


@pytest.mark.parametrize("name", some(AS_OTHERS, ("mistral3, ministral",)))
def test_the_text_part_of_a_model_is_written_as_another_type_has_it(
    name: str, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    file = written(tmp_path, tokenizer, name, **AS_OTHERS[name])
    model, again = both(file)
    torch.testing.assert_close(log_probabilities(again), log_probabilities(model), rtol=0, atol=1e-5)
    assert_same_in_llama_cpp(model, file, _TOLERANCE)


@pytest.mark.parametrize("make", [internlm2, internlm3, openelm])
def test_a_family_without_a_class_in_transformers_is_read_as_it_was_written_and_runs_in_llama_cpp(
    make: Any, tokenizer: PretrainedTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "vocab_size", _ROWS)
    folder = tmp_path / "folder"
    torch.manual_seed(0)
    make(folder)
    tensors = {name: 4 * tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    record = json.loads((folder / "config.json").read_text())
    if record["model_type"] == "openelm":
        # Its output table is that of its tokens in llama.cpp.
        del tensors["lm_head.weight"]
        record["share_input_output_layers"] = True
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(record))
    tokenizer.save_files(folder)
    model = triptych.load(folder, device="cpu")
    file = tmp_path / "tiny.gguf"
    model.convert(file, "gguf")
    before, after = (one._opened.attention.tensors for one in both(file))
    assert before.infos.keys() == after.infos.keys()
    assert all(torch.equal(before.read(one), after.read(one)) for one in before.infos)
    assert_same_in_llama_cpp(model, file, _TOLERANCE)


# Encoders with the changes to the tiny model without which llama.cpp has no place for it.
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {},
    "electra": {"embedding_size": 24},
    "nomic_bert": {"head_dim": 6},
    "jina_embeddings_v3": {},
    "eurobert": {},
    "modernbert": {},
    "gemma3, both ways": {"query_pre_attn_scalar": 10},
}


def word_pieces(folder: Path, *, lowercase: bool = True) -> None:
    """A tokenizer as of BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyzäéö"
    words = ["the", "cat", "sat", "##s", "##ing", "Hello", "hello", ",", ".", "!", "世", "界", "1", "##2"]
    vocab = [*special, *letters, *(f"##{letter}" for letter in letters), *words]
    places = {token: place for place, token in enumerate(vocab)}
    inner = tokenizers.Tokenizer(models.WordPiece(places, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(special)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    save_tokenizer(inner, folder, **dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True)))


@torch.no_grad()
def hidden(model: triptych.Model, ids: Any) -> torch.Tensor:
    return model._opened.to_run.language_model.hidden(torch.tensor([ids]))[0]


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_read_as_it_was_written_and_has_the_states_of_llama_cpp(
    name: str, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "folder", tokenizer, name, **ENCODERS[name])
    word_pieces(folder)
    model = triptych.load(folder, device="cpu")
    file = tmp_path / "tiny.gguf"
    model.convert(file, "gguf")
    again = triptych.load(file, device="cpu")
    own = hidden(model, _IDS)
    torch.testing.assert_close(hidden(again, _IDS), own, rtol=0, atol=1e-5)
    theirs = torch.tensor(LlamaCpp(file, embeds=True).hidden(_IDS))
    torch.testing.assert_close(theirs, own, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_have_the_ids_of_llama_cpp(
    lowercase: bool, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "folder", tokenizer, "bert")
    word_pieces(folder, lowercase=lowercase)
    file = tmp_path / "x.gguf"
    model = triptych.load(folder, device="cpu")
    model.convert(file, "gguf")
    again = triptych.load(file, device="cpu")._opened.to_run.tokenizer
    theirs = LlamaCpp(file, embeds=True)
    for text in ("the cats, sitting!", "Hello 世界 12", " two  spaces", "xyz QRS", "Zwei Männer [MASK]"):
        for special in (True, False):
            (own,) = model._opened.to_run.tokenizer.encode([text], add_special=special, parse_special=True)
            (found,) = again.encode([text], add_special=special, parse_special=True)
            assert found == own
            assert theirs.ids(text, special=special) == own


def test_the_head_of_an_encoder_is_left_out_and_that_is_said(
    tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    settings = TINY["bert"].configured(vocab_size=_ROWS)
    transformers.BertForMaskedLM(settings).save_pretrained(tmp_path / "folder")
    tokenizer.save_files(tmp_path / "folder")
    model = triptych.load(tmp_path / "folder", device="cpu")
    done = model.convert(tmp_path / "x.gguf", "gguf")
    said = "its head is left out: llama.cpp computes the last hidden states"
    assert any(said in one for one in done.folded)
    again = triptych.load(tmp_path / "x.gguf", device="cpu")
    torch.testing.assert_close(hidden(again, _IDS), hidden(model, _IDS), rtol=0, atol=1e-6)
    assert "fill" not in again.can


def unigrams(folder: Path) -> None:
    """A tokenizer as of T5."""
    space = "▁"
    special = ["<pad>", "</s>", "<unk>"]
    words = [space, f"{space}the", "cat", f"{space}c", "at", "ing", *"abcdefghijklmnopqrstuvwxyz,.!éö"]
    scores = [-2.0 - 0.1 * place for place in range(len(words))]
    pieces = [*((token, 0.0) for token in special), *zip(words, scores, strict=True)]
    inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2))
    inner.normalizer = normalizers.Sequence([normalizers.Replace(tokenizers.Regex(" {2,}"), space)])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="always")
    inner.decoder = decoders.Metaspace(replacement=space, prepend_scheme="always")
    inner.add_special_tokens(special)
    inner.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    save_tokenizer(inner, folder, **dict(zip(("pad", "eos", "unk"), special, strict=True)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("t5", {}),
        pytest.param(
            "t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, marks=pytest.mark.slow
        ),
        pytest.param("mt5", {}, marks=pytest.mark.slow),
        ("umt5", {}),
    ],
)
def test_an_encoder_with_a_decoder_is_read_as_it_was_written_and_has_the_logits_of_llama_cpp(
    name: str, changes: dict[str, Any], tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "folder", tokenizer, name, d_kv=8, **changes)
    unigrams(folder)
    model = triptych.load(folder, device="cpu")
    file = tmp_path / "tiny.gguf"
    model.convert(file, "gguf")
    again = triptych.load(file, device="cpu")
    before, after = (one._opened.attention.tensors for one in (model, again))
    assert {*after.infos} - {*before.infos} <= {"lm_head.weight"}
    assert all(torch.equal(before.read(one), after.read(one)) for one in before.infos if one in after.infos)
    source, target = [*_IDS, 1], [0, 7, 80, 31]
    with torch.no_grad():
        theirs = getattr(transformers, TINY[name].model).from_pretrained(folder).eval()
        expected = theirs(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits
        found = again._opened.to_run.encoder_decoder(torch.tensor([source]), torch.tensor([target]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    texts = ("the cat, eating", "  two  spaces", "Zwei Männer!")
    logits, ids = translated(file, source, target, texts)
    # The cache of keys and values has half precision there.
    torch.testing.assert_close(torch.tensor(logits), expected[0, -1], rtol=0, atol=_TOLERANCE)
    for place in (folder, again._opened.files.tokenizer_folder):
        assert ids == load_tokenizer(place).encode(texts, add_special=True)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("t5", {"feed_forward_proj": "gated-gelu"}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("t5", "mt5", "umt5")),
    ],
)
def test_an_encoder_of_t5_alone_is_read_as_it_was_written_and_has_the_states_of_llama_cpp(
    name: str, changes: dict[str, Any], tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    whole = TINY[name].configured(vocab_size=_ROWS, d_kv=8, **changes)
    torch.manual_seed(0)
    of_class = TINY[name].model.replace("ForConditionalGeneration", "EncoderModel")
    theirs = getattr(transformers, of_class)(whole).eval()
    theirs.save_pretrained(tmp_path / "folder")
    unigrams(tmp_path / "folder")
    model = triptych.load(tmp_path / "folder", device="cpu")
    file = tmp_path / "tiny.gguf"
    model.convert(file, "gguf")
    again = triptych.load(file, device="cpu")
    before, after = (one._opened.attention.tensors for one in (model, again))
    assert before.infos.keys() == after.infos.keys()
    assert all(torch.equal(before.read(one), after.read(one)) for one in before.infos)
    with torch.no_grad():
        expected = theirs(torch.tensor([_IDS])).last_hidden_state[0]
    torch.testing.assert_close(hidden(again, _IDS), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(encoded(file, _IDS)), expected, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("quantization", ["float16", "int8"])
def test_a_file_of_narrow_numbers_is_read_as_llama_cpp_reads_it(
    quantization: Any, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    changes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 96}
    folder = folder_of(tmp_path / "folder", tokenizer, "llama", **changes)
    file = tmp_path / "tiny.gguf"
    triptych.load(folder, device="cpu").convert(file, "gguf", quantization)
    again = triptych.load(file, device="cpu", dtype="float32")
    types = {info.tensor_type.name for info in gguf.GGUFReader(file).tensors}
    assert types == {"F32", "F16" if quantization == "float16" else "Q8_0"}
    # llama.cpp rounds the other factor of a product, too, to 16 or 8 bits.
    assert_same_in_llama_cpp(again, file, 5e-3 if quantization == "float16" else 0.15)


_SIZES: dict[str, Any] = {"num_layers": 2, "d_model": 24, "num_heads": 4, "context": 32}
_LLAMA: dict[str, Any] = {"norm_kind": "rms", "gated": True, "activation": "swish", "bias": False}
_LLAMA |= {"positions": {"scheme": "rotary"}}


@pytest.mark.parametrize(
    "settings", [{"positions": {"scheme": "learned", "max_tokens": 40}, "activation": "gelu_tanh"}, _LLAMA]
)
def test_a_run_is_written_for_llama_cpp(
    settings: dict[str, Any], tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig.model_validate({**_SIZES, **settings})
    made = LanguageModel.of(config, "decoder", tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    run = tmp_path / "run"
    run.mkdir()
    write_model(made, run)
    tokenizer.save(run / "tokenizer.json")
    model = triptych.load(run, device="cpu")
    model.convert(tmp_path / "run.gguf", "gguf")
    assert_same_in_llama_cpp(model, tmp_path / "run.gguf", _TOLERANCE)


@pytest.mark.parametrize("name", some(("llama", "gpt_oss", "granitemoe"), ("llama",)))
@pytest.mark.parametrize(
    "step", ["fold_norm", MergeKVHeads(num_kv_heads=1, bounded=True)], ids=["fold", "merge"]
)
def test_a_rewritten_checkpoint_runs_in_llama_cpp(
    name: str, step: Any, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    changes = {**FAMILIES[name], "tie_word_embeddings": False}
    folder = folder_of(tmp_path / "folder", tokenizer, name, **changes)
    triptych.load(folder, device="cpu").rewrite(step).save(tmp_path / "new")
    model = triptych.load(tmp_path / "new", device="cpu")
    model.convert(tmp_path / "new.gguf", "gguf")
    assert_same_in_llama_cpp(model, tmp_path / "new.gguf", 1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"hidden_act": "gelu"}, "llama of llama.cpp has no place for it.*gelu instead of swish"),
        ("gemma2", {"query_pre_attn_scalar": 7}, "attention of layer 0.scale"),
        ("qwen3_moe", {}, "qwen3moe of llama.cpp has no place"),
        ("olmoe", {}, "4 heads of queries and 2 of keys"),
        ("gptj", {}, "models of the type gptj are not written in GGUF: these are: .*llama"),
        ("phimoe", {}, "the type phimoe are not written in GGUF: llama.cpp chooses experts by a softmax"),
        (
            "gpt_oss",
            {"rope_parameters": {**_ROUNDED, "truncate": False}},
            "rotary.frequencies: other numbers .*llama.cpp rounds .* ramp, which truncate = true in rope_par",
        ),
        ("electra", {"embedding_size": 12}, "bert of llama.cpp has no place for it"),
        (
            "deepseek_v2",
            {**_IN_GROUPS, "topk_method": "group_limited_greedy"},
            "no place for it: groups of experts have the score",
        ),
        (
            "t5",
            {"num_decoder_layers": 3},
            "no place for it: it opens no decoder with more layers than its enc",
        ),
        ("t5", {"feed_forward_proj": "gated-silu"}, "t5 of llama.cpp has no place for it"),
        ("deepseek_v3, halves", {}, "deepseek2 of llama.cpp has no place for it"),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused_before_anything_is_written(
    name: str, changes: dict[str, Any], said: str, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "folder", tokenizer, name, **changes)
    with pytest.raises(UsageError, match=said) as error:
        triptych.load(folder, device="cpu").convert(tmp_path / "x.gguf", "gguf")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_window_that_llama_cpp_lacks_becomes_the_context(
    tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "folder", tokenizer, "mistral", sliding_window=16)
    done = triptych.load(folder, device="cpu").convert(tmp_path / "x.gguf", "gguf")
    assert done.folded == ("context 16 of 64 tokens: llama of llama.cpp has no window",)
    again = triptych.load(tmp_path / "x.gguf", device="cpu")
    assert again._opened.files.record["max_position_embeddings"] == 16


def test_the_output_is_a_file_that_is_not_there_yet(tokenizer: PretrainedTokenizer, tmp_path: Path) -> None:
    model = triptych.load(folder_of(tmp_path / "folder", tokenizer, "llama"), device="cpu")
    with pytest.raises(UsageError, match=r"give a name that ends in \.gguf"):
        model.convert(tmp_path / "x", "gguf")
    (tmp_path / "x.gguf").write_bytes(b"mine")
    with pytest.raises(UsageError, match="nothing is overwritten"):
        model.convert(tmp_path / "x.gguf", "gguf")


def test_the_tokenizer_and_chat_template_of_a_file_are_those_of_llama_cpp(
    tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "folder", tokenizer, "llama")
    template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    file = tmp_path / "x.gguf"
    triptych.load(folder, device="cpu").convert(file, "gguf")
    again = assert_same_ids(file, _SAMPLES)
    assert isinstance(again, PretrainedTokenizer)
    assert again.chat_template == template


def assert_same_ids(file: Path, texts: Iterable[str]) -> Any:
    """The tokenizer that is read of a file, whose ids are those of llama.cpp."""
    again = triptych.load(file, device="cpu")._opened.to_run.tokenizer
    theirs = LlamaCpp(file)
    for text in texts:
        for special in (True, False):
            (own,) = again.encode([text], add_special=special, parse_special=True)
            assert own == theirs.ids(text, special=special)
    return again


def by_scores(folder: Path, scheme: str) -> None:
    """A tokenizer as of Llama 2 or Gemma: BPE over characters, with bytes for those that are unknown."""
    special = ["<unk>", "<s>", "</s>"]
    space = "▁"
    alphabet = sorted(set(_TEXT.replace(" ", space)))
    vocab = {token: place for place, token in enumerate(special)}
    words = [f"{space}t", "th", "the", f"{space}the"]
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, *words]:
        vocab.setdefault(token, len(vocab))
    merges = [("t", "h"), (space, "t"), ("th", "e"), (f"{space}t", "he"), (space, "the")]
    merges = [(one, two) for one, two in merges if {one, two, one + two} <= vocab.keys()]
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    steps = [normalizers.Prepend(space)] if scheme == "prefixed" else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", space)])
    steps_back = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(steps_back)
    inner.add_special_tokens(special)
    inner.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    save_tokenizer(inner, folder, **dict(zip(("unk", "bos", "eos"), special, strict=True)))


@pytest.mark.parametrize("scheme", ["prefixed", "not prefixed"])
def test_a_vocabulary_by_scores_gives_the_ids_of_llama_cpp(
    scheme: str, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "folder", tokenizer, "llama")
    by_scores(folder, scheme)
    triptych.load(folder, device="cpu").convert(tmp_path / "x.gguf", "gguf")
    assert_same_ids(tmp_path / "x.gguf", (*_SAMPLES, _TEXT, "then the other"))


def test_a_cut_of_texts_that_llama_cpp_lacks_is_refused_by_its_pattern(
    tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "folder", tokenizer, "llama")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(tokenizers.Regex("[aeiou]"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    inner.save(str(folder / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"no such tokenizer: it cuts texts by \[aeiou\]"):
        triptych.load(folder, device="cpu").convert(tmp_path / "x.gguf", "gguf")


def test_a_folder_with_one_file_is_that_file_and_of_several_one_is_to_be_given(
    tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    model = triptych.load(folder_of(tmp_path / "folder", tokenizer, "llama"), device="cpu")
    model.convert(place / "a.gguf", "gguf")
    found = triptych.load(place, device="cpu")
    torch.testing.assert_close(log_probabilities(found), log_probabilities(model), rtol=0, atol=1e-5)
    (place / "b.gguf").write_bytes((place / "a.gguf").read_bytes())
    with pytest.raises(UsageError, match=r"holds 2 models in GGUF \(a.gguf, b.gguf\): give the file of one"):
        triptych.load(place)


def test_a_file_is_rewritten_and_verified_as_a_folder_is(
    tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    model, of_file = both(written(tmp_path, tokenizer))
    of_file.rewrite("fold_norm").save(tmp_path / "new")
    rewritten = triptych.load(tmp_path / "new", device="cpu")
    torch.testing.assert_close(log_probabilities(rewritten), log_probabilities(model), rtol=0, atol=1e-4)
    assert failing(tmp_path / "new") == []


def test_a_file_on_the_hub_is_named_with_its_repository(
    tokenizer: PretrainedTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = triptych.load(folder_of(tmp_path / "folder", tokenizer, "llama"), device="cpu")
    there = tmp_path / "there"
    there.mkdir()
    model.convert(there / "tiny.gguf", "gguf")
    with in_place_of_the_hub(there, tmp_path / "cache", monkeypatch):
        found = triptych.load("someone/model/tiny.gguf", device="cpu")
        torch.testing.assert_close(log_probabilities(found), log_probabilities(model), rtol=0, atol=1e-5)
        with pytest.raises(DataError, match=r"there is no other\.gguf in it"):
            triptych.load("someone/model/other.gguf")
        with pytest.raises(DataError, match=r"named by its file, someone/model/FILE\.gguf"):
            triptych.load("someone/model")


def changed(file: Path, target: Path, **metadata: Any) -> Path:
    """A copy of a file with other metadata; None leaves a key out."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in metadata or key == "general.architecture":
            continue
        kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], kind)
    for key, value in metadata.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_string(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.rope.dimension_count": 6}, "rope.dimension_count is 6 of 10 channels"),
        ({"llama.attention.value_length": 8}, "attention.value_length is 8, and 10 follows"),
        ({"llama.rope.scaling.type": "strange"}, "rope.scaling.type is strange: linear and yarn are read"),
        ({"llama.attention.head_count": 3}, "config|heads|shape"),
        ({"llama.block_count": 9}, "layer 2 of 9"),
        ({"general.type": "mmproj"}, "no model of texts, but one of the type mmproj"),
    ],
)
def test_metadata_that_contradict_each_other_are_refused(
    metadata: dict[str, Any], said: str, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    odd = changed(written(tmp_path, tokenizer), tmp_path / "b.gguf", **metadata)
    with pytest.raises((DataError, UsageError), match=said) as error:
        assert triptych.load(odd).layers
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("values", [["a", "b"], [0.5], [0.5, 0.5, 0.5], None])
def test_a_list_without_a_number_of_each_layer_is_refused(
    values: Any, tokenizer: PretrainedTokenizer, tmp_path: Path
) -> None:
    file = written(tmp_path, tokenizer, "apertus")
    odd = changed(file, tmp_path / "b.gguf", **{"xielu.alpha_p": values})
    with pytest.raises(DataError, match=r"xielu\.alpha_p is no list of 2 numbers, one of each layer"):
        assert triptych.load(odd).layers


def test_a_key_that_nothing_follows_is_named(tokenizer: PretrainedTokenizer, tmp_path: Path) -> None:
    odd = changed(written(tmp_path, tokenizer), tmp_path / "b.gguf", **{"llama.odd_heads": 3})
    with pytest.warns(ConfigurationWarning, match="metadata has odd_heads of llama, .* not followed"):
        triptych.load(odd)


def test_the_page_lists_the_architectures() -> None:
    rows: dict[str, list[str]] = {}
    for one in architectures():
        rows.setdefault(one.name, []).extend(one.types)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "converting.md").read_text(encoding="utf-8")
    for name, types in rows.items():
        listed = ", ".join(f"`{kind}`" for kind in dict.fromkeys(types))
        assert f"| `{name}` | {listed} |\n" in page
