"""Texts past the length that rotary positions were made for, against `transformers`: whole, padded, decoded.

Every kind of scaling of every family that takes one is tried in the slow run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attending.models import letters
from checkpoints.oracle import apart, in_float64, saved
from checkpoints.runs import DECODERS, made, some_ids, theirs, type_of
from checkpoints.tiny_models import TINY
from triptych.attending import attend_tokens
from triptych.checkpoints.models import load_language_model
from triptych.decoding.engine import Engine
from triptych.decoding.generation import GenerationOptions, generate_tokens
from triptych.decoding.likelihood import score_continuations
from triptych.errors import DataError
from triptych.models import LanguageModel
from triptych.opening import OpenedModel, Reader, TextIds

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

ORIGINAL, LONGEST = 8, 16
FIRST = {"original_max_position_embeddings": ORIGINAL}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **FIRST},
    "yarn": {"factor": 4.0, **FIRST},
    "longrope": FIRST,
    "proportional": {"factor": 2.0},
    "proportional, half": {"factor": 2.0, "partial_rotary_factor": 0.5},
}
ENCODERS = {
    "modernbert": "ModernBertForMaskedLM",
    "nomic_bert": "NomicBertForMaskedLM",
    "eurobert": "EuroBertForMaskedLM",
    "jina_embeddings_v3": "JinaEmbeddingsV3ForMaskedLM",
    "gte": "GteForMaskedLM",
}
# What is needed besides for a class to take a scaling, of the model and of its record.
MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"head_dim": 6},
    "stablelm": {"partial_rotary_factor": 0.67},
    "phi3": FIRST,
    "llama4, text": {"attn_temperature_tuning": False},  # which counts padding there
}
MORE_OF_RECORD: dict[str, dict[str, Any]] = {
    "phimoe": {"short_mscale": 1.3, "long_mscale": 1.7, **FIRST},
    "ministral3": {"llama_4_scaling_beta": 0.4, **FIRST},
}
# `transformers` (5.23) does not run these.
FAIL_THERE = {
    **dict.fromkeys(("phi", "stablelm", "persimmon"), ("proportional", "proportional, half")),
    "phi3": ("linear", "dynamic", "llama3", "yarn", "proportional", "proportional, half"),
    **dict.fromkeys(("mistral3", "gemma4, text", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("longrope",)),
}
# Refused here by name: its channels turn backwards.
REFUSED_HERE = {"nanochat": ("dynamic",)}


def takes(name: str) -> bool:
    """Whether a tiny model is the first of its type, and has rotary positions that can be scaled."""
    config = TINY[name].configured().get_text_config()
    first = next(other for other in TINY if type_of(other) == type_of(name))
    return bool(getattr(config, "rope_parameters", None)) and name in (
        first,
        f"{type_of(name)}, text",
        "llama4, text",
    )


IN_EVERY_RUN = [
    ("llama", "longrope"),
    ("llama", "dynamic"),
    ("llama", "proportional, half"),
    ("phi3", "longrope"),
    ("phimoe", "longrope"),
    ("gpt_neox", "dynamic"),
    ("llama4, text", "longrope"),  # its norms come after the rotation
    ("gemma3, text", "dynamic"),
    ("deepseek_v3", "dynamic"),
]
FAMILIES = [name for name in (*DECODERS, *ENCODERS) if takes(name)]
ALL = [
    pytest.param(name, kind, marks=() if (name, kind) in IN_EVERY_RUN else pytest.mark.slow)
    for name in FAMILIES
    for kind in KINDS
    if kind not in (*FAIL_THERE.get(name, ()), *REFUSED_HERE.get(name, ()))
]
GROWING = [case for case in ALL if case.values[1] in ("dynamic", "longrope") and case.values[0] in DECODERS]


def scaled(name: str, kind: str, folder: Path, **more: Any) -> Any:
    """A tiny model of `transformers` whose rotary positions are scaled, saved in a folder."""
    tiny = TINY[name]
    settings = {**tiny.settings, **MORE.get(name, {}), **more}
    config = tiny.config(**settings).get_text_config()
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's layers have two widths of heads

    def record(own: dict[str, Any]) -> dict[str, Any]:
        # Gemma 4's share belongs to its rope type: with another one its heads turn whole.
        proportional = own.get("rope_type") == "proportional" and not kind.startswith("proportional")
        share = 1.0 if proportional else own.get("partial_rotary_factor", 1.0)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = int(width * share) // 2
        lists = {
            "short_factor": [1 + i / 8 for i in range(pairs)],
            "long_factor": [2 + i for i in range(pairs)],
        }
        return {
            "rope_type": kind.split(",")[0],
            "rope_theta": 100.0,
            **({"partial_rotary_factor": share} if share != 1.0 else {}),
            **(lists if kind == "longrope" else {}),
            **MORE_OF_RECORD.get(name, {}),
            **KINDS[kind],
        }

    nested = config.nested_rope_parameter_keys(config.rope_parameters)
    own = config.rope_parameters
    records = {key: record(own[key]) for key in nested} if nested else record(own)
    changes = {**MORE.get(name, {}), **more, "rope_parameters": records, "max_position_embeddings": LONGEST}
    if name == "mistral3":
        changes = {"text_config": {**tiny.settings["text_config"], **changes}}
    if name not in ENCODERS:
        return made(name, folder, changes)

    def configure() -> Any:
        made_of = tiny.config(**{**tiny.settings, **changes})
        made_of._attn_implementation = "eager"
        return made_of

    return saved(getattr(transformers, ENCODERS[name]), configure, folder)


def loaded(folder: Path) -> LanguageModel:
    return load_language_model(folder).model


@pytest.mark.parametrize(
    ("theta", "scaling", "reason"),
    [
        (None, {"rope_type": "linear", "factor": 2.0, "rope_theta": 70.0}, None),
        (500.0, {"rope_type": "linear", "factor": 2.0}, None),
        (None, {"rope_type": "linear", "factor": 2.0}, "rope_theta is in rope_parameters alone"),
        (30.0, {"rope_type": "linear", "factor": 2.0}, "rope_theta is in rope_parameters alone"),
        (None, [1, 2], r"rope_scaling is \[1, 2\]: a record is needed"),
    ],
)
@torch.no_grad()
def test_of_two_records_of_rotary_positions_one_is_read_whole_as_transformers_does(
    theta: float | None, scaling: Any, reason: str | None, tmp_path: Path
) -> None:
    scaled("llama", "default", tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    record["rope_parameters"]["rope_theta"] = 500.0
    record |= {"rope_scaling": scaling} | ({} if theta is None else {"rope_theta": theta})
    (tmp_path / "config.json").write_text(json.dumps(record))
    if reason:
        with pytest.raises(DataError, match=reason):
            loaded(tmp_path)
        return
    other, ids = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval(), some_ids()
    assert apart(loaded(tmp_path)(ids).logits, theirs(other, ids).logits) < 1e-6


@pytest.mark.parametrize("name", ["apertus", "cwm", "ministral3"])
@pytest.mark.parametrize("theta", [500.0, None])
@torch.no_grad()
def test_an_older_record_takes_the_place_of_what_the_class_has(
    name: str, theta: float | None, tmp_path: Path
) -> None:
    model = scaled(name, "llama3", tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    older = {key: value for key, value in record.pop("rope_parameters").items() if key != "rope_theta"}
    record |= {"rope_scaling": older} | ({} if theta is None else {"rope_theta": theta})
    (tmp_path / "config.json").write_text(json.dumps(record))
    other, ids = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval(), some_ids()
    assert other.config.rope_parameters["rope_type"] == "llama3"
    assert apart(loaded(tmp_path)(ids).logits, theirs(other, ids).logits) < 1e-6


@torch.no_grad()
def test_of_records_by_kind_of_layer_yarn_reads_no_truncate_as_in_transformers(tmp_path: Path) -> None:
    model, ids = scaled("gemma3n", "yarn", tmp_path), some_ids()
    record = json.loads((tmp_path / "config.json").read_text())
    record["rope_parameters"]["full_attention"] |= {"truncate": False, "beta_slow": 2}
    (tmp_path / "config.json").write_text(json.dumps(record))
    other = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert apart(loaded(tmp_path)(ids).logits, theirs(other, ids).logits) < 1e-6


@pytest.mark.parametrize(("name", "kind"), ALL)
@torch.no_grad()
def test_texts_of_every_length_are_read_as_transformers_reads_them(
    name: str, kind: str, tmp_path: Path
) -> None:
    other = scaled(name, kind, tmp_path)
    model = loaded(tmp_path)
    for length in (ORIGINAL, ORIGINAL + 1, LONGEST, LONGEST + 1, 24):
        ids = some_ids(2, length)
        assert apart(model(ids).logits, theirs(other, ids).logits) < 1e-9
    seen = torch.arange(24) < torch.tensor([[24], [7]])  # one text is short, the batch is not
    found = model(ids, mask=seen[:, None, None, :]).logits
    expected = theirs(other, ids, attention_mask=seen.long()).logits
    assert apart(found[seen], expected[seen]) < 1e-9


def generated(other: Any, texts: list[list[int]], count: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What `transformers` continues texts by, and the logits of every step."""
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    other.generation_config.eos_token_id = None
    with in_float64(), torch.no_grad():
        found = other.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return found.sequences[:, longest:], found.logits


@pytest.mark.parametrize(("name", "kind"), GROWING)
@torch.no_grad()
def test_texts_that_grow_past_the_length_are_continued_as_transformers_continues_them(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Phi-3 and Phi-MoE read a text again there; others leave the keys that are cached as they are."""
    other = scaled(name, kind, tmp_path)
    model = loaded(tmp_path)
    for length in (ORIGINAL - 2, ORIGINAL):
        texts = [some_ids(1, length)[0].tolist(), [5, 7, 9, 11]]
        tokens, expected = generated(other, texts, 14)
        engine, cache, whole = Engine(model), model.new_cache(), torch.tensor([texts[0]])
        opened, logits = engine.read(texts)
        for step, (token, there) in enumerate(zip(tokens.T, expected, strict=True)):
            assert apart(logits, there) < 1e-6, step  # which are float32
            if name not in ("phi3", "phimoe"):
                assert apart(model(whole, cache=cache).logits[:, -1], there[:1]) < 1e-6, step
            logits, whole = engine.step(token, opened), token[:1, None]


def test_a_text_is_continued_scored_and_shown_alike_beside_others(tmp_path: Path) -> None:
    scaled("llama", "longrope", tmp_path, vocab_size=257)
    model = loaded(tmp_path)
    texts = [some_ids(1, length)[0].tolist() for length in (11, 6, 4, 6)]
    engine, options = Engine(model), GenerationOptions(max_new_tokens=6)
    together = generate_tokens(engine, texts, options)
    alone = [generate_tokens(engine, [text], options)[0] for text in texts]
    assert [found[0].ids for found in together] == [found[0].ids for found in alone]
    pairs = [(text[:3], text[3:]) for text in texts]
    of_all = [score for score, _ in score_continuations(model, pairs, 24)]
    assert of_all == pytest.approx([score_continuations(model, [pair], 24)[0][0] for pair in pairs])
    reader = Reader(OpenedModel("tiny", tmp_path, model, letters(tmp_path)))
    ids = [TextIds(tuple(text)) for text in texts]
    for shown, text in zip(attend_tokens(reader, ids), ids, strict=True):
        (own,) = attend_tokens(reader, [text])
        torch.testing.assert_close(shown.weights[1], own.weights[1])


def test_a_share_that_models_of_the_family_do_not_turn_by_is_refused(tmp_path: Path) -> None:
    """`transformers` makes angles of half a head there, and fails where they meet the whole of it."""
    with pytest.raises(RuntimeError, match="must match the size"):
        theirs(scaled("llama", "linear", tmp_path, partial_rotary_factor=0.5), some_ids())
    with pytest.raises(DataError, match=r"partial_rotary_factor is 0\.5 under rope_type 'linear', but heads"):
        loaded(tmp_path)
