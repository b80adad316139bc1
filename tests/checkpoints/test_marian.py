"""Marian checkpoints: the same function, every tensor accounted for, and the rest refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
from checkpoints.tiny_marian import CONFIG, PAD, VOCAB, Reference, tensors_of, write_marian
from checkpoints.tiny_spm import PIECES, RULES, spm
from edited import edited_tensors, set_fields, set_tensors
from tolerances import assert_same
from triptych.converting import convert
from triptych.core.attention import sinusoidal
from triptych.core.models import find_config, has_config
from triptych.errors import DataError, UsageError
from triptych.running.decoding import SearchOptions, Translator
from triptych.running.opening import open_reader, open_translator
from triptych.running.opening.marian_tokenizers import write_tokenizers
from triptych.running.opening.translators import read_translator
from triptych.running.text.sentences import cut_to_fit

SHARED = Path(__file__).parents[3] / "shared" / "checkpoints" / "marian-multi30k"
SRC, TGT = [2, 7, 3, 12, 0], [PAD, 5, 9, 2, 4, 8]


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as refused:
        read_translator(folder)
    return str(refused.value)


VARIANTS: dict[str, dict[str, Any]] = {
    "as most are": {},
    "relu": {"activation_function": "relu"},
    "gelu": {"activation_function": "gelu"},
    "silu": {"activation_function": "silu"},
    "output apart": {"tie_word_embeddings": False},
    "source apart": {"share_encoder_decoder_embeddings": False},
    "all apart": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    "not scaled": {"scale_embedding": False},
    "one width for each stack": {"decoder_ffn_dim": 14},
    "an odd width": {"d_model": 9, "encoder_attention_heads": 3, "decoder_attention_heads": 1},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_logits_are_those_of_the_formulas(tmp_path: Path, changes: dict[str, Any]) -> None:
    tensors = write_marian(tmp_path, **changes)
    model = read_translator(tmp_path).model
    assert not model.training
    expected = Reference({**CONFIG, **changes}, tensors).logits(SRC, TGT)
    # The other row is padding beside the first, and longer.
    src = torch.tensor([[*SRC, PAD, PAD], [3, 4, 5, 6, 7, 8, 0]])
    with torch.no_grad():
        found = model(src, torch.tensor([TGT, TGT]))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, {"scale_embedding": False}], ids=["scaled", "not scaled"])
def test_stacks_that_nothing_ties_have_tables_of_their_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    """As transformers 5.23 writes them, which stores a table besides that no stack reads."""
    changes = {**changes, "tie_word_embeddings": False}
    apart = {**CONFIG, **changes, "share_encoder_decoder_embeddings": False}
    tensors = tensors_of(apart)
    unread = torch.randn(CONFIG["vocab_size"], CONFIG["d_model"], dtype=torch.float64)
    write_marian(tmp_path, {**tensors, "model.shared.weight": unread}, **changes)
    with torch.no_grad():
        found = read_translator(tmp_path).model(torch.tensor([SRC]), torch.tensor([TGT]))
    torch.testing.assert_close(found[0], Reference(apart, tensors).logits(SRC, TGT), rtol=0, atol=1e-10)


def test_a_model_without_a_recipe_translates_and_is_not_converted(tmp_path: Path) -> None:
    write_marian(tmp_path, scale_embedding=False)
    assert len(triptych.load(tmp_path, device="cpu").translate(["ab", "a"])) == 2
    with pytest.raises(UsageError, match="only Marian's are, with scaled embeddings"):
        convert(open_reader(tmp_path, "cpu"), tmp_path / "out", "ctranslate2")


def test_what_the_configuration_says_is_what_the_model_is(tmp_path: Path) -> None:
    write_marian(tmp_path, attention_dropout=0.1, activation_dropout=0.05)
    model = read_translator(tmp_path).model
    config = find_config(model)
    assert (config.dropout, config.activation_dropout, config.norm) == (0.2, 0.05, "post")
    assert (config.tie_embeddings, config.output_bias) == ("all", True)
    assert [site.num_heads for site in config.sites("encoder")] == [3, 3]
    assert [site.num_heads for site in config.sites("cross")] == [2, 2, 2]
    assert {site.dropout for site in config.sites("decoder")} == {0.1}
    assert (model.pad_id, config.max_source_tokens) == (PAD, 19)


def test_an_output_bias_of_zeros_is_none(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    tensors["final_logits_bias"].zero_()
    write_marian(tmp_path, tensors)
    assert not find_config(read_translator(tmp_path).encoder_decoder).output_bias
    del tensors["final_logits_bias"]
    write_marian(tmp_path, tensors)
    assert not find_config(read_translator(tmp_path).encoder_decoder).output_bias


def test_what_is_stored_twice_may_be_left_out_or_kept(tmp_path: Path) -> None:
    tensors = write_marian(tmp_path)
    first = read_translator(tmp_path).model
    table = tensors["model.shared.weight"]
    shape = CONFIG["max_position_embeddings"], CONFIG["d_model"]
    positions = {
        f"model.{stack}.embed_positions.weight": sinusoidal(*shape, "halves").float().double()
        for stack in ("encoder", "decoder")
    }
    names = ("lm_head", "model.encoder.embed_tokens", "model.decoder.embed_tokens")
    copies = {f"{name}.weight": table.clone() for name in names}
    write_marian(tmp_path, {**tensors, **copies, **positions})
    again = read_translator(tmp_path).model
    for name, parameter in first.named_parameters():
        assert_same(dict(again.named_parameters())[name], parameter, kind="exact")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_nothing_is_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = write_marian(tmp_path, dtype=dtype)
    model = read_translator(tmp_path).model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert_same(model.encoder.embeddings.table.weight.detach(), tensors["model.shared.weight"], kind="exact")


def test_the_fresh_weights_of_a_checkpoint_do_not_use_up_random_numbers(tmp_path: Path) -> None:
    write_marian(tmp_path)
    state = torch.get_rng_state()
    read_translator(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rows", [sinusoidal(20, 12), torch.full((20, 12), torch.nan).double()])
def test_a_model_with_positions_of_its_own_has_no_recipe(tmp_path: Path, rows: torch.Tensor) -> None:
    write_marian(tmp_path)
    set_tensors(tmp_path, {"model.encoder.embed_positions.weight": rows.double()})
    assert not has_config(read_translator(tmp_path).model)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.decoder.embed_tokens.weight"])
def test_one_name_of_a_table_that_is_tied_is_enough(tmp_path: Path, kept: str) -> None:
    table = write_marian(tmp_path)["model.shared.weight"]
    expected = read_translator(tmp_path).model(torch.tensor([SRC]), torch.tensor([TGT]))
    set_tensors(tmp_path, {"model.shared.weight": None, kept: table})
    found = read_translator(tmp_path).model(torch.tensor([SRC]), torch.tensor([TGT]))
    assert_same(found, expected, kind="exact")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": None}, "d_model / encoder_attention_heads is missing"),
        ({"eos_token_id": None}, "eos_token_id: Field required"),
        ({"d_model": "12"}, "d_model"),
        ({"d_model": 12.5}, "d_model"),
        ({"encoder_layers": 0}, "encoder_layers is 0: a whole number of at least 1 is needed"),
        ({"scale_embedding": "yes"}, "scale_embedding: Input should be a valid boolean, not 'yes'"),
        ({"dropout": 1.5}, "dropout"),
        ({"activation_function": "laplace"}, "activation 'laplace' is not one of"),
        ({"pad_token_id": 21}, "pad_token_id 21 is outside the vocabulary of 21"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_marian(tmp_path, tensors_of(CONFIG), **changes)
    refused = refusal(tmp_path)
    assert refused.startswith(f"{tmp_path / 'config.json'}: ")
    assert message in refused


@pytest.mark.parametrize("name", ["vocab.json", "source.spm", "target.spm"])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_marian(tmp_path)
    (tmp_path / name).unlink()
    assert refusal(tmp_path).startswith(f"{tmp_path / name} is missing")


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        ({**VOCAB, "more": 21}, "has 22 pieces and config.json a vocabulary of 21"),
        ({**VOCAB, "a": 4}, "the ids must be those from 0 to 20, each once"),
        ({**VOCAB, "a": "x"}, "'a': Input should be a valid integer"),
        ({("gone" if name == "<unk>" else name): i for name, i in VOCAB.items()}, "unk_token '<unk>'"),
        (
            {**VOCAB, "<pad>": VOCAB["a"], "a": VOCAB["<pad>"]},
            f"gives the pad_token '<pad>' the id {VOCAB['a']}, config.json pad_token_id {PAD}",
        ),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(
    tmp_path: Path, vocab: dict[str, Any], message: str
) -> None:
    write_marian(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    refused = refusal(tmp_path)
    assert refused.startswith(str(tmp_path / "vocab.json"))
    assert message in refused


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("generation_config.json", {"bad_words_ids": [[PAD], [3]]}, "bad_words_ids has [3]"),
        ("generation_config.json", {"num_beams": 0}, "num_beams"),
        ("generation_config.json", {"min_length": 5}, "min_length is not followed in searches with a Marian"),
        ("generation_config.json", {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size is not followed"),
        ("generation_config.json", {"forced_bos_token_id": 2}, "forced_bos_token_id is not followed"),
        ("generation_config.json", {"do_sample": True}, "do_sample is True, which the search here does not"),
        ("tokenizer_config.json", {"additional_special_tokens": ["<x>"]}, "further special tokens, '<x>'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<y>"}}}, "'<y>'"),
        ("tokenizer_config.json", {"sp_model_kwargs": {"alpha": 0.1}}, "sp_model_kwargs cannot be read"),
        ("tokenizer_config.json", {"eos_token": 3}, "eos_token"),
    ],
)
def test_what_is_asked_for_and_cannot_be_done_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    write_marian(tmp_path)
    set_fields(tmp_path / name, **changes)
    refused = refusal(tmp_path)
    assert refused.startswith(str(tmp_path))
    assert message in refused


def test_early_stopping_is_followed(tmp_path: Path) -> None:
    write_marian(tmp_path)
    assert read_translator(tmp_path).decoding.stop == "certain"
    set_fields(tmp_path / "generation_config.json", early_stopping=True)
    assert read_translator(tmp_path).decoding.stop == "full"


def test_a_vocabulary_for_each_side_is_read(tmp_path: Path) -> None:
    changes = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 22}
    tensors = write_marian(tmp_path, **changes)
    assert "vocabularies of 21 and 22, but separate_vocabs is not set" in refusal(tmp_path)
    target = {piece: i for piece, i in VOCAB.items() if piece != ">>de<<"}
    target |= {"zz": 21, "yy": VOCAB[">>de<<"]}
    set_fields(tmp_path / "tokenizer_config.json", separate_vocabs=True)
    (tmp_path / "target_vocab.json").write_text(json.dumps(target))
    found = read_translator(tmp_path)
    assert (found.tokenizers.source.vocab_size, found.tokenizers.target.vocab_size) == (21, 22)
    assert not found.tokenizers.joint
    assert found.tokenizers.target.decode([[2, 21]]) == ["zz"]
    expected = Reference({**CONFIG, **changes}, tensors).logits(SRC, TGT)
    with torch.no_grad():
        logits = found.model(torch.tensor([SRC]), torch.tensor([TGT]))[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_both_sides_have_one_tokenizer_if_their_files_are_the_same(tmp_path: Path) -> None:
    write_marian(tmp_path)
    pair = read_translator(tmp_path).tokenizers
    assert pair.joint
    assert (pair.source.pad_id, pair.source.bos_id, pair.source.eos_id) == (PAD, PAD, 0)
    (tmp_path / "target.spm").write_bytes(spm(PIECES[:-4], "bpe"))
    assert not read_translator(tmp_path).tokenizers.joint


def test_sentencepiece_models_are_written_as_they_were_read(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    write_marian(tmp_path)
    (tmp_path / "target.spm").write_bytes(spm(PIECES, "bpe", RULES, add_dummy_prefix=False))
    write_tokenizers(read_translator(tmp_path).tokenizers, 512, tmp_path / "again")
    for name in ("source.spm", "target.spm"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.slow
def test_the_commands_and_load_take_such_a_folder(tmp_path: Path) -> None:
    write_marian(tmp_path, dtype=torch.float32)
    run = open_translator(tmp_path, device="cpu")
    assert run.search_options().beam_size == 3
    translator = triptych.load(tmp_path, device="cpu")
    lines = ["ab ba", "", "aba fi." * 30]
    found = translator.translate(lines)
    assert [translation.source for translation in found] == lines
    assert found[1].text == ""
    assert found[2].num_pieces > 1  # longer than the 20 positions
    # The padding, which begins every output, is never put out, though its bias is large.
    with edited_tensors(tmp_path) as tensors:
        tensors["final_logits_bias"][0, PAD] = 1e4
    for candidate in triptych.load(tmp_path, device="cpu").translate(["ab ba"])[0].candidates:
        assert "<pad>" not in candidate.pieces


def test_a_folder_of_another_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=16)
    transformers.GPT2LMHeadModel(tiny).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="is a language model, which does not translate"):
        open_translator(tmp_path, "cpu")
    (tmp_path / "config.json").write_text('{"format": 1}')
    with pytest.raises(DataError, match="num_hidden_layers is missing"):
        triptych.load(tmp_path).translator()


def test_every_part_of_a_long_line_begins_with_its_code(tmp_path: Path) -> None:
    write_marian(tmp_path)
    found = read_translator(tmp_path)
    tokenizer, limit = found.tokenizers.source, found.model.max_source_tokens
    options = SearchOptions(beam_size=1, max_extra_tokens=3, split=False)
    translator = Translator(found.model, found.tokenizers, options)
    text = ("ab ba fi. " * 30).strip()
    (whole,) = translator.translate([f">>de<< {text}"])
    pieces = [
        ">>de<<" + part.strip()
        for part in cut_to_fit(text, lambda part: len(tokenizer.encode([">>de<<" + part])[0]) <= limit)
    ]
    assert whole.num_pieces == len(pieces) > 2
    assert all(tokenizer.encode([piece])[0][0] == VOCAB[">>de<<"] for piece in pieces)
    apart = translator.translate(pieces)
    assert whole.candidates[0].pieces == tuple(p for t in apart for p in t.candidates[0].pieces)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/checkpoints/marian-multi30k")
def test_a_trained_checkpoint_gives_what_transformers_gave() -> None:
    """Greedy ids of transformers 5.23.0: `generate(**batch, num_beams=1)` of `MarianMTModel`.

    The sentences are lines 1, 3, 4 and 5 of Multi30k's test_2016_flickr, tokenized by `MarianTokenizer`.
    """
    sources = [
        "A man in an orange hat starring at something.",
        "A girl in karate uniform breaking a stick with a front kick.",
        "Five people wearing winter jackets and helmets stand in the snow, "
        "with snowmobiles in the background.",
        "People are fixing the roof of a house.",
    ]
    first = [22, 73, 16, 35, 440, 316, 1993, 3549, 151, 841, 7914]
    last = [628, 129, 3631, 52, 2967, 74, 3, 1969, 7914]
    outputs = [
        [25, 71, 59, 40, 1230, 817, 7928, 113, 61, 620, 3526, 7914],
        [25, 213, 16, 4557, 1504, 512, 146, 1801, 185, 40, 79, 79, 265, 7914],
        [1726, 345, 16, 2504, 3960, 58, 4381, 433, 157, 847, 58, 157, 721, 7914],
        [569, 4666, 363, 2496, 384, 4820, 7914],
    ]
    texts = [
        "Ein Mann mit einem orangefarbenen Hut, der auf etwas starrt.",
        "Ein Mädchen in Karateanzug macht einen Stock vor einem K Kick.",
        "Fünf Personen in Winteranzügen und Helmen stehen im Schnee und im Hintergrund.",
        "Leute reparieren das Dach eines Hauses.",
    ]
    translator = triptych.load(SHARED, device="cpu").translator(beam_size=1)
    assert translator.tokenizers.source.encode([sources[0], sources[3]]) == [first, last]
    found = translator.translate(sources)
    assert [translation.text for translation in found] == texts
    target = translator.tokenizers.target
    assert [translation.candidates[0].pieces for translation in found] == [
        tuple(target.pieces(ids)) for ids in outputs
    ]
    nasty = {
        "  two  spaces\t": "two spaces",
        "ﬁne ｅ\u0301 \u1112\u1161\u11ab": "fine é",  # Hangul is unknown, and skipped
        "\u200b": "",
        "'a' – b…": "'a' – b...",
    }
    for text, expected in nasty.items():
        assert target.decode(target.encode([text])) == [expected]
