"""Models in other libraries' formats: the same numbers there, or refused with what would fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoints.tiny_marian import CONFIG, write_marian
from triptych.converting import hugging_face
from triptych.converting.conversion import Conversion, convert
from triptych.converting.plain import plain_model
from triptych.core.attention import PARAMETERISATIONS
from triptych.core.models import EncoderDecoder, ModelConfig, find_config
from triptych.errors import DataError, UsageError
from triptych.running.decoding import SearchOptions, Translator
from triptych.running.opening import Reader, open_reader, open_translator
from triptych.running.opening.run_folder import DecodingConfig
from triptych.running.opening.translators import read_translator
from triptych.running.text import TokenizerPair
from triptych.training import resolve
from triptych.training.corpora.generated import generate_pairs
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers
from triptych.training.runs import train

PARENT = Path(__file__).parents[3] / "shared"
MARIAN, MULTI30K = PARENT / "checkpoints" / "marian-multi30k", PARENT / "data" / "multi30k"
SENTENCES = ["Das Buch kostet drei Euro.", "Es ist halb vier.", "Vier  <eos> é!"]
SENTENCES += ["Heute ist der 3. Mai 1984."]
BIASES = {"q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True}

# A site each; where there are several heads, they are 6 wide at d_model 24.
FITTING: dict[str, dict[str, Any]] = {
    "factored": {"projections": "factored"},
    "factored, with biases": {"projections": "factored", **BIASES},
    "factored, narrow": {"projections": "factored", "d_k": 4, "d_v": 3, **BIASES},
    "factored, few heads": {"projections": "factored", "num_heads": 3, "d_k": 2, "d_v": 6},
    "factored, 5 heads": {"projections": "factored", "num_heads": 5, "d_k": 4, "d_v": 3, **BIASES},
    "bilinear, of one head": {"projections": "bilinear", "num_heads": 1, "q_bias": True, "v_bias": True},
    "stacked": {"projections": "stacked", "first_bias": True, **BIASES},
    "symmetric": {"projections": "symmetric", "qk_bias": True, "v_bias": True},
    "shared": {"projections": "shared", "qkv_bias": True},
    "key_value": {"projections": "key_value", "q_bias": True, "kv_bias": True, "o_bias": True},
    "four_matrix": {"projections": "four_matrix", **BIASES},
    "direct": {"projections": "direct", "o_bias": True},
    "grouped": {"projections": "grouped", "num_kv_heads": 2, **BIASES},
    "latent": {"projections": "latent", "d_latent": 9, "down_bias": True, **BIASES},
    "collaborative": {"projections": "collaborative", "d_shared": 6, **BIASES},
    "identity_query": {"projections": "identity_query", "k_bias": True, "v_bias": True, "o_bias": True},
    "identity_value": {"projections": "identity_value", "q_bias": True, "k_bias": True, "o_bias": True},
    "identity_output": {"projections": "identity_output", **BIASES},
    "identity_ov": {"projections": "identity_ov", "q_bias": True, "k_bias": True, "o_bias": True},
}
WIDE: dict[str, tuple[dict[str, Any], str]] = {
    "wide keys": ({"d_k": 8}, "W_QK of rank 8, and .* = 6 channels.*rank=6, forms=.'qk'"),
    "wide values": ({"d_v": 9}, "W_OV of rank 9, and .* = 6 channels.*rank=6, forms=.'ov'"),
    "bilinear": ({"projections": "bilinear"}, "W_QK of rank 24, and .* = 6 channels"),
    "collaborative": ({"projections": "collaborative", "d_shared": 7}, "W_QK of rank 7"),
}
LEARNED = {"positions": {"scheme": "learned", "max_tokens": 40}}
MODELS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "post-norm, tables apart": {"tie_embeddings": "none", "activation": "gelu"},
    "pre-norm": {"norm": "pre", "activation": "swish"},
    "pre-norm, learned positions": {"norm": "pre", **LEARNED, "tie_embeddings": "target"},
    "pre-norm, no positions": {"norm": "pre", "positions": {"scheme": "none"}, "tie_embeddings": "none"},
}


def shuffled(model: EncoderDecoder) -> EncoderDecoder:
    """Biases and norms that do something."""
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.3)
    return model.eval()


def make_model(
    site: dict[str, Any], src_size: int = 40, tgt_size: int = 40, **changes: Any
) -> EncoderDecoder:
    tree = {
        **{"d_model": 24, "d_ff": 32, "num_heads": 4, "dropout": 0.0, "max_source_tokens": 30},
        "encoder": {"num_layers": 1, "attention": site},
        "decoder": {"num_layers": 2, "attention": site, "cross_attention": site},
        **changes,
    }
    return shuffled(EncoderDecoder.of(ModelConfig.model_validate(tree), src_size, tgt_size, 0))


@pytest.fixture(scope="module")
def joint() -> TokenizerPair:
    return _tokenizers(joint=True)


@pytest.fixture(scope="module")
def apart() -> TokenizerPair:
    return _tokenizers(joint=False)


def _tokenizers(joint: bool) -> TokenizerPair:
    pairs = generate_pairs(150, "train", seed=1)
    sides = [german for german, _ in pairs], [english for _, english in pairs]
    pair = train_tokenizers(TokenizerSpec(vocab_size=280, joint=joint), *sides)
    if joint:
        return pair
    return TokenizerPair(pair.source, train_tokenizers(TokenizerSpec(vocab_size=270), *sides).target)


def make_run(tokenizers: TokenizerPair, site: dict[str, Any] | None = None, **changes: Any) -> Reader:
    sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
    model = make_model(site or {"projections": "factored"}, *sizes, **changes)
    decoding = DecodingConfig(beam_size=4, alpha=0.0, max_extra_tokens=6)
    return Reader("a run", Path("a run"), model, tokenizers, decoding=decoding)


def sentences() -> tuple[Tensor, Tensor]:
    src, tgt_in = torch.randint(3, 40, (3, 9)), torch.randint(3, 40, (3, 6))
    src[1, 5:], src[2, 7:] = 0, 0
    return src, tgt_in


def difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def test_every_parameterisation_is_tried() -> None:
    assert {site["projections"] for site in FITTING.values()} == set(PARAMETERISATIONS) - {"differential"}


def test_gates_of_pairs_are_refused() -> None:
    with pytest.raises(UsageError, match="gate"):
        plain_model(make_model({"projections": "differential"}), "it")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("site", FITTING.values(), ids=FITTING)
def test_heads_written_plainly_compute_the_same(site: dict[str, Any], norm: str) -> None:
    model = make_model(site, norm=norm).double()
    src, tgt_in = sentences()
    with torch.no_grad():
        expected = model(src, tgt_in)
        plain = plain_model(model, "it")
        assert difference(plain.model(src, tgt_in), expected) < 1e-9
        assert difference(model(src, tgt_in), expected) == 0
    sites = (*find_config(plain.model).sites("encoder"), *find_config(plain.model).sites("cross"))
    assert {found.projections for found in sites} == {"factored"}
    assert {found.num_heads for found in sites} == set(plain.num_heads.values())
    assert {found.options["d_k"] for found in sites} == {24 // plain.num_heads["encoder"]}


def test_stacks_of_other_numbers_of_heads_are_filled_up_with_zeros() -> None:
    sites = [{"num_heads": 2, "d_k": 4, "d_v": 5}, {"num_heads": 3}, {"num_heads": 6, "d_k": 3, "d_v": 2}]
    model = make_model(
        {},
        encoder={"num_layers": 1, "attention": sites[0]},
        decoder={"num_layers": 1, "attention": {**sites[1], "d_k": 4, "d_v": 4}, "cross_attention": sites[2]},
    ).double()
    src, tgt_in = sentences()
    plain = plain_model(model, "it")
    assert plain.num_heads == {"encoder": 2, "decoder": 6}
    assert "3 heads of zeros added: decoder.0" in plain.done
    with torch.no_grad():
        assert difference(plain.model(src, tgt_in), model(src, tgt_in)) < 1e-9


@pytest.mark.parametrize(("site", "message"), WIDE.values(), ids=WIDE)
def test_heads_that_are_too_wide_are_refused_with_their_ranks(site: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"encoder.0 has heads with {message}") as refused:
        plain_model(make_model(site), "it")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=str)
def test_wide_heads_of_low_rank_fit_exactly(dtype: torch.dtype, allowed: float) -> None:
    model = make_model({"projections": "bilinear"}).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_proj.weight"):
                parameter.copy_(0.05 * torch.randn(96, 5).double() @ torch.randn(5, 24).double())
    src, tgt_in = sentences()
    model.to(dtype)  # what is of rank 5 is so but for rounding
    plain = plain_model(model, "it")
    assert any(line.startswith("factor: encoder.0") for line in plain.done)
    with torch.no_grad():
        assert difference(plain.model(src, tgt_in), model(src, tgt_in)) < allowed


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_and_searches_the_same(
    name: str, joint: TokenizerPair, tmp_path: Path
) -> None:
    site = {"projections": "grouped", "num_kv_heads": 2, **BIASES}
    run = make_run_that_ends(joint, site, output_bias=True, **MODELS[name])
    conversion = convert(run, tmp_path / "out", "hf")
    assert all(check.tried for check in conversion.checks)
    assert "repeat_kv_heads: encoder.0, decoder.0, cross.0, decoder.1, cross.1" in conversion.folded
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.config.model_type == ("pegasus" if find_config(run.model).norm == "pre" else "marian")
    src, tgt_in = sentences()
    with torch.no_grad():
        found = theirs(input_ids=src, attention_mask=(src != 0).long(), decoder_input_ids=tgt_in).logits
        assert difference(found, run.model(src, tgt_in)) < 1e-5
    for text, expected in zip(SENTENCES[:2], run.translator().translate(SENTENCES[:2]), strict=True):
        ids = theirs.generate(**tokenizer([text], return_tensors="pt"))[0].tolist()
        assert len(ids) < 14
        assert tokenizer.decode(ids, skip_special_tokens=True) == expected.text
        assert run.tokenizers.target.pieces(ids[1:-1]) == list(expected.candidates[0].pieces)


@torch.no_grad()
def make_run_that_ends(*given: Any, **changes: Any) -> Reader:
    """A run whose outputs end before their limit, some of them not at once."""
    for seed in range(20):
        torch.manual_seed(seed)
        run = make_run(*given, **changes)
        for _ in range(100):
            found = [each.candidates[0].pieces for each in run.translator().translate(SENTENCES)]
            if max(map(len, found)) < 12:
                break
            run.model.head.output.bias[run.tokenizers.target.eos_id] += 0.3
        if any(found):
            return run
    raise AssertionError("outputs end at once, or never")


def translations(run: Reader, lines: list[str]) -> list[str]:
    return [translation.text for translation in run.translator().translate(lines)]


def test_pre_norm_is_the_same_in_float64_too(joint: TokenizerPair, tmp_path: Path) -> None:
    run = make_run(joint, norm="pre")
    run.model.double()
    conversion = convert(run, tmp_path / "out", "hf")
    (found,) = [c.largest_difference for c in conversion.checks if c.largest_difference is not None]
    assert found < 1e-9


def test_a_tokenizer_for_each_side_lies_in_a_folder_of_its_own(apart: TokenizerPair, tmp_path: Path) -> None:
    run = make_run(apart, tie_embeddings="target")
    convert(run, tmp_path / "out", "hf")
    again = open_translator(tmp_path / "out", "cpu")
    assert not again.tokenizers.joint
    assert again.model.max_source_tokens == run.model.max_source_tokens
    options = SearchOptions(beam_size=4, alpha=0.0, max_extra_tokens=6)
    found = Translator(again.model, again.tokenizers, options).translate(SENTENCES)
    assert [translation.text for translation in found] == translations(run, SENTENCES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": {"scheme": "learned"}}, "Marian.* sinusoidal positions only"),
        ({"positions": {"scheme": "none"}}, "with norm = 'pre', fits"),
        ({"positions": {"scheme": "rotary"}, "norm": "pre"}, "no positions inside attention"),
        ({"positions": {"scheme": "alibi"}, "norm": "pre"}, "no positions inside attention"),
        ({"norm": "pre", "tie_embeddings": "target"}, "one size for both"),
    ],
)
def test_a_model_that_no_architecture_has_is_refused_and_nothing_is_left(
    changes: dict[str, Any], message: str, apart: TokenizerPair, joint: TokenizerPair, tmp_path: Path
) -> None:
    run = make_run(apart if changes.get("tie_embeddings") == "target" else joint, **changes)
    with pytest.raises(UsageError, match=message):
        convert(run, tmp_path / "out", "hf")
    assert list(tmp_path.iterdir()) == []


def test_what_computes_something_else_is_not_written(
    joint: TokenizerPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain_and_wrong(model: EncoderDecoder, target: str) -> Any:
        plain = plain_model(model, target)
        with torch.no_grad():
            plain.model.decoder.embeddings.table.weight[5] += 0.01
        return plain

    monkeypatch.setattr(hugging_face, "plain_model", plain_and_wrong)
    with pytest.raises(DataError, match=r"they are off by .* nothing is written"):
        convert(make_run(joint), tmp_path / "out", "hf")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_tried_is_said(
    joint: TokenizerPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    conversion = convert(make_run(joint), tmp_path / "out", "hf")
    untried = [check for check in conversion.checks if not check.tried]
    assert len(untried) == 2
    said = "transformers is not installed: pip install 'triptych[convert]'"
    assert {check.note for check in untried} == {said}


def test_a_missing_library_is_a_usage_error(
    joint: TokenizerPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs onnx and onnxscript: pip install"):
        convert(make_run(joint), tmp_path / "out", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_left_alone(joint: TokenizerPair, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        with pytest.raises(UsageError, match="exists: choose another name"):
            convert(make_run(joint), tmp_path / name, "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link"]
    with pytest.raises(UsageError, match="does not exist: make it first"):
        convert(make_run(joint), tmp_path / "no" / "out", "hf")


VARIANTS: dict[str, dict[str, Any]] = {
    "as most are": {},
    "source apart": {"share_encoder_decoder_embeddings": False},
    "all apart": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=() if name == "as most are" else pytest.mark.slow)
        for name, changes in VARIANTS.items()
    ],
)
def test_a_marian_checkpoint_comes_back_tensor_for_tensor(tmp_path: Path, changes: dict[str, Any]) -> None:
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    tensors = write_marian(tmp_path, dtype=torch.float32, **heads, **changes)
    conversion = convert(open_reader(tmp_path, "cpu"), tmp_path / "ours", "triptych")
    assert [check.tried for check in conversion.checks] == [True]
    ours = open_translator(tmp_path / "ours", "cpu")
    lines = ["ab ba", "", "aba fi." * 30, ">>de<< fi."]
    assert translations(ours, lines) == translations(open_translator(tmp_path, "cpu"), lines)
    convert(ours, tmp_path / "theirs", "hf")
    again = load_file(tmp_path / "theirs" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    same = {name: value for name, value in {**CONFIG, **heads, **changes}.items() if name in config}
    same.pop("max_position_embeddings")  # outputs may be longer than sources
    assert {name: config[name] for name in same} == same
    assert read_translator(tmp_path / "theirs").model.max_source_tokens == 19


def test_a_marian_checkpoint_whose_output_alone_is_apart_has_two_tables_when_converted(
    tmp_path: Path,
) -> None:
    tensors = write_marian(tmp_path, dtype=torch.float32, tie_word_embeddings=False)
    convert(open_reader(tmp_path, "cpu"), tmp_path / "ours", "triptych")
    convert(open_reader(tmp_path / "ours", "cpu"), tmp_path / "theirs", "hf")
    found = load_file(tmp_path / "theirs" / "model.safetensors")
    table = tensors.pop("model.shared.weight")
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"):
        assert torch.equal(found.pop(name), table)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_folder_of_ours_is_no_checkpoint_of_theirs(tmp_path: Path) -> None:
    write_marian(tmp_path, dtype=torch.float32)
    convert(open_reader(tmp_path, "cpu"), tmp_path / "ours", "triptych")
    with pytest.raises(UsageError, match="is a run already"):
        convert(open_reader(tmp_path / "ours", "cpu"), tmp_path / "again", "triptych")
    parts = {part: {"generated": 5, "generated_part": part} for part in ("train", "valid")}
    recipe = resolve({"data": parts})
    with pytest.raises(UsageError, match="has a converted model"):
        train(recipe, tmp_path / "ours")
    (tmp_path / "ours" / "decoding.toml").write_text("beam_size = 0")
    with pytest.raises(DataError, match=r"decoding\.toml: beam_size"):
        open_translator(tmp_path / "ours", "cpu")
    (tmp_path / "ours" / "decoding.toml").write_text("beam_size = ")
    with pytest.raises(UsageError, match=r"decoding\.toml is not valid TOML"):
        open_translator(tmp_path / "ours", "cpu")


def run_readme(conversion: Conversion, **names: Any) -> dict[str, Any]:
    """Run the Python that a written README shows."""
    text = (Path(conversion.target) / "README.md").read_text()
    text = text.replace("path/to/this/folder", conversion.target)
    (block,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    namespace = {"folder": conversion.target, **names}
    exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def test_the_readme_for_transformers_runs(
    joint: TokenizerPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(joint)
    run_readme(convert(run, tmp_path / "out", "hf"))
    assert capsys.readouterr().out.startswith("[")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("changes", [*MODELS.values(), LEARNED], ids=[*MODELS, "post-norm, learned"])
def test_ctranslate2_computes_the_same(
    changes: dict[str, Any], apart: TokenizerPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ctranslate2", reason="needs CTranslate2")
    tie = changes.get("tie_embeddings", "target")
    run = make_run(apart, FITTING["four_matrix"], **{**changes, "tie_embeddings": tie})
    conversion = convert(run, tmp_path / "out", "ctranslate2")
    (check,) = conversion.checks
    assert check.largest_difference is not None
    assert check.largest_difference < 1e-4
    run_readme(conversion)
    assert capsys.readouterr().out
    (rounded,) = convert(run, tmp_path / "int8", "ctranslate2", "int8").checks
    assert rounded.largest_difference is not None
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()  # without it, sums of int8 saturate
    assert 1e-4 < rounded.largest_difference < (1 if has_vnni else 2)


ROTARY = {"scheme": "rotary", "rotary_dim": 4, "rotary_pairing": "interleaved"}
BILINEAR = {"projections": "bilinear", "q_bias": True}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"positions": ROTARY, "norm": "pre"}, marks=pytest.mark.slow, id="rotary"),
        pytest.param({"positions": {"scheme": "alibi"}, "site": BILINEAR}, id="alibi and bilinear"),
    ],
)
def test_onnx_takes_what_no_other_format_does(
    changes: dict[str, Any], joint: TokenizerPair, tmp_path: Path
) -> None:
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason=f"needs {library}")
    site = changes.get("site", {})
    run = make_run(joint, **changes, decoder={"num_layers": 1, "attention": site, "cross_attention": site})
    conversion = convert(run, tmp_path / "out", "onnx")
    (check,) = conversion.checks
    assert check.largest_difference is not None
    assert check.largest_difference < 1e-4
    translate = run_readme(conversion)["translate"]
    run = run.with_decoding(DecodingConfig(beam_size=1, max_extra_tokens=6))
    assert [translate(text) for text in SENTENCES] == translations(run, SENTENCES)


def test_onnx_refuses_scores_that_are_no_products_by_layer(joint: TokenizerPair, tmp_path: Path) -> None:
    for library in ("onnx", "onnxscript"):
        pytest.importorskip(library, reason=f"needs {library}")
    run = make_run(joint, decoder={"num_layers": 1, "attention": {"scores": "additive"}})
    with pytest.raises(UsageError, match=r"ONNX cannot hold decoder\.0: it has scores that are no product"):
        convert(run, tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not MARIAN.is_dir(), reason="needs ../shared/checkpoints/marian-multi30k")
def test_a_trained_checkpoint_goes_there_and_back_and_translates_the_same(tmp_path: Path) -> None:
    convert(open_reader(MARIAN, "cpu"), tmp_path / "ours", "triptych")
    ours = open_translator(tmp_path / "ours", "cpu")
    convert(ours, tmp_path / "theirs", "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in (MARIAN, tmp_path / "theirs"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    lines = (MULTI30K / "test_2016_flickr.en").read_text().splitlines()[:20]
    options = SearchOptions(beam_size=4, alpha=0.0)
    found = Translator(ours.model, ours.tokenizers, options).translate(lines)
    assert translations(ours, lines[:4]) == translations(open_translator(MARIAN, "cpu"), lines[:4])
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path / "theirs").eval()
    source, pad = ours.tokenizers.source, ours.model.pad_id
    rows = [torch.tensor([*ids, source.eos_id]) for ids in source.encode(lines)]
    batch = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    outputs = theirs.generate(
        input_ids=batch, attention_mask=(batch != pad).long(), num_beams=4, length_penalty=0.0
    )
    assert ours.tokenizers.target.decode(outputs.tolist()) == [translation.text for translation in found]
