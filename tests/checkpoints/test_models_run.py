"""Models of every family that is run, against those that `transformers` makes of the same files."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.oracle import apart, changed, fields_not_understood, has_experts, in_float64, pairs, saved
from checkpoints.tiny_models import TINY
from triptych.attention import PositionIds
from triptych.checkpoints.checkpoint import Checkpoint
from triptych.checkpoints.family import Family, families, family_of
from triptych.checkpoints.model_map import model_map
from triptych.checkpoints.models import load_language_model
from triptych.checkpoints.specs import ModelSpec
from triptych.decoding.engine import Engine
from triptych.errors import DataError, UsageError
from triptych.models.language_model import LanguageModel
from triptych.opening import record_calls
from triptych.storage.settings import Settings, paths_in
from triptych.storage.tensors import open_tensors

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# Learned positions and fused maps; grouped keys, gates; gains relative to 1; rotary pairs side by side, one
# norm for two readers; ALiBi, a norm of embeddings; norms after sums; sandwiches, gate and inner map in one;
# latents, experts in groups.
IN_EVERY_RUN = ("gpt2", "llama", "gemma", "gptj", "bloom", "openai-gpt", "glm4", "deepseek_v3")
# Why models of families that are run are not.
REFUSED = {
    "granitemoehybrid": "layer 1 of 3 is attention; the rest are Mamba-2 mixers, which are not",
    "gemma3": "vision_tower.encoder.layers.0.self_attn is no self-attention of its decoder",
    "xglm with cross-attention": "layers.0.encoder_attn is no self-attention of its decoder",
    "llama4": "multi_modal_projector.linear_1.weight, vision_model.class_embedding",
}
# Of two experts for one choice, little would show.
SEVERAL_EXPERTS = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
}
IN_GROUPS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "routed_scaling_factor": 1.5},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
}
# Of models that are tiny without one.
WITH_HEAD = {"gemma3, both ways": "Gemma3ForCausalLM"}
# Classes within a class, whose modules are only imported when it is made; `in_float64` must find them.
WITHIN = {"mistral3": "MistralForCausalLM", "mistral3, ministral": "Ministral3ForCausalLM"}
# BLOOM writes the root of 2/π with eight digits.
TOLERANCE = {"bloom": 1e-9, "bloom, six heads": 1e-9}


def type_of(name: str) -> str:
    """The `model_type` of a tiny model."""
    return str(getattr(transformers, TINY[name].config).model_type)


def decoder_of(family: Family | None) -> ModelSpec | None:
    """What decoders without an encoder are made of; None of other families, which have tests of their own."""
    model = None if family is None else family.model
    return model if model is not None and model.kind == "decoder" and model.encoder is None else None


def can_be_run(name: str) -> bool:
    model = decoder_of(family_of(type_of(name)))
    if model is None or name in REFUSED:
        return False
    config = Settings(getattr(transformers, TINY[name].config)(**TINY[name].settings).to_dict(), name)
    return not any(config.holds(choice.when) for choice in model.refused)


RUN = [name for name in TINY if can_be_run(name)]
MOST = [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in RUN]
FEW = [pytest.param(name, marks=() if name in IN_EVERY_RUN[:2] else pytest.mark.slow) for name in RUN]


def made(name: str, folder: Path, changes: dict[str, Any] | None = None) -> Any:
    """A tiny model with random numbers everywhere, in float64, saved in a folder."""
    tiny = TINY[name]
    model_class = getattr(transformers, WITH_HEAD.get(name, tiny.model))  # imports its module
    _ = getattr(transformers, WITHIN.get(name, tiny.model))
    more = {field: value for field, value in SEVERAL_EXPERTS.items() if field in tiny.settings}
    settings = {**tiny.settings, **more, **IN_GROUPS.get(name, {}), **(changes or {})}

    def configure() -> Any:
        config = getattr(transformers, tiny.config)(**settings)
        # Falcon's "eager" adds the bias of ALiBi twice (transformers 5.23).
        config._attn_implementation = "sdpa" if name.startswith("falcon") else "eager"
        if has_experts(config):
            config._experts_implementation = "eager"
        return config

    return saved(model_class, configure, folder)


Pair = tuple[Any, LanguageModel]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A tiny model of `transformers`, and ours of its files; made once."""
    return pairs(made, lambda folder: load_language_model(folder).model, tmp_path_factory)


def theirs(model: Any, ids: Tensor, **given: Any) -> Any:
    with in_float64(), torch.no_grad():
        return model(input_ids=ids, **given)


def some_ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(3, 40, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MOST)
@torch.no_grad()
def test_logits_and_attention_weights_are_those_of_transformers(
    name: str, pair_of: Callable[[str], Pair]
) -> None:
    other, model = pair_of(name)
    ids = some_ids()
    gives_weights = other.config._attn_implementation == "eager"
    expected = theirs(other, ids, output_attentions=gives_weights)
    with record_calls(model) as calls:
        found = model(ids)
    assert found.logits.dtype == torch.float64
    assert apart(found.logits, expected.logits) < TOLERANCE.get(name, 1e-10)
    if gives_weights:
        assert len(calls) == len(expected.attentions)
        for call, layer in zip(calls, expected.attentions, strict=True):
            assert apart(call.queries_and_keys().weights(), layer) < TOLERANCE.get(name, 1e-10)


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_float32_models_agree_to_five_digits(name: str, tmp_path: Path) -> None:
    other = made(name, tmp_path).float()
    model = load_language_model(tmp_path, dtype=torch.float32).model
    ids = some_ids()
    found, expected = model(ids).logits, other(input_ids=ids).logits
    assert found.dtype == torch.float32
    assert apart(found, expected) < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_padding_on_the_right_changes_nothing(name: str, pair_of: Callable[[str], Pair]) -> None:
    other, model = pair_of(name)
    ids, there = some_ids(), torch.ones(2, 11, dtype=torch.bool)
    there[1, 7:] = False
    expected = theirs(other, ids, attention_mask=there.long()).logits
    found = model(ids, mask=there[:, None, None]).logits
    assert apart(found[there], expected[there]) < TOLERANCE.get(name, 1e-10)
    assert apart(found[1:, :7], model(ids[1:, :7]).logits) < 1e-10


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_padding_on_the_left_moves_positions(name: str, pair_of: Callable[[str], Pair]) -> None:
    other, model = pair_of(name)
    ids, there = some_ids(), torch.ones(2, 11, dtype=torch.bool)
    there[1, :4] = False
    positions = (there.cumsum(1) - 1).clamp(min=0)
    given = {"position_ids": positions} if "position_ids" in signature(other.forward).parameters else {}
    expected = theirs(other, ids, attention_mask=there.long(), **given).logits
    found = model(ids, mask=there[:, None, None], positions=PositionIds(positions, 11)).logits
    same = there.clone()
    same[1] &= name != "llama4, text"  # whose queries grow with their place in a row, padding counted
    assert apart(found[same], expected[same]) < TOLERANCE.get(name, 1e-10)
    assert apart(found[1:, 4:], model(ids[1:, 4:]).logits) < 1e-10


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_token_by_token_is_the_whole_prompt_at_once(name: str, pair_of: Callable[[str], Pair]) -> None:
    _, model = pair_of(name)
    if not model.causal:
        pytest.skip("it sees both sides")
    ids, cache = some_ids(), model.new_cache()
    steps = [model(ids[:, :4], cache=cache).logits]
    steps += [model(ids[:, place : place + 1], cache=cache).logits for place in range(4, ids.shape[1])]
    assert cache.length == ids.shape[1]
    assert apart(torch.cat(steps, dim=1), model(ids).logits) < 1e-10


@torch.no_grad()
def test_the_engine_continues_texts_of_unlike_lengths_where_layers_borrow_keys(
    pair_of: Callable[[str], Pair],
) -> None:
    _, model = pair_of("gemma4, text")
    engine, texts = Engine(model), [[3, 5, 7, 9, 11, 13], [4, 6, 8]]
    cache, logits = engine.read(texts)
    for _ in range(6):  # past the window
        expected = torch.cat([model(torch.tensor([text])).logits[:, -1] for text in texts])
        assert apart(logits, expected) < 1e-10
        tokens = logits.argmax(dim=-1)
        texts = [[*text, token] for text, token in zip(texts, tokens.tolist(), strict=True)]
        logits = engine.step(tokens, cache)


@pytest.mark.parametrize("name", RUN)
def test_every_field_of_its_class_in_transformers_is_understood(name: str) -> None:
    assert fields_not_understood(getattr(transformers, TINY[name].config)(**TINY[name].settings)) == []


def test_every_family_that_is_run_has_a_tiny_model() -> None:
    run = {type_of(name) for name in RUN}
    for family in families():
        if decoder_of(family) is not None and not family.remote:
            assert run & {*family.model_types}, family.name


@pytest.mark.parametrize("name", FEW)
def test_a_field_that_is_left_out_is_what_the_class_makes_it(name: str, tmp_path: Path) -> None:
    tiny = TINY[name]
    made_by = getattr(transformers, tiny.config)
    family = family_of(type_of(name))
    assert family is not None
    assert family.model is not None
    made(name, tmp_path)
    tensors, whole = open_tensors(tmp_path), json.loads((tmp_path / "config.json").read_text())

    def architecture(record: dict[str, Any]) -> Any:
        try:
            return model_map(
                Checkpoint("tiny", family, Settings(record, "config.json"), tensors)
            ).architecture
        except DataError:
            return None

    fields = {path for expression in family.model.expressions() for path in paths_in(expression)}
    assert architecture(whole) is not None
    for field in fields & whole.keys():
        less = {key: value for key, value in whole.items() if key != field}
        found = architecture(less)
        if found is not None:
            assert found == architecture(made_by.from_dict(dict(less)).to_dict()), field


@torch.no_grad()
def test_gains_that_are_stored_relative_to_one_may_all_be_zero(tmp_path: Path) -> None:
    other = made("gemma", tmp_path)
    zeros = {name: torch.zeros_like(t) for name, t in other.state_dict().items() if "norm" in name}
    assert len(zeros) == 5
    other.load_state_dict(zeros, strict=False)
    changed(tmp_path, zeros)
    found = load_language_model(tmp_path).model(some_ids()).logits
    assert float(found.abs().max()) > 0.1
    assert apart(found, theirs(other, some_ids()).logits) < 1e-10


@torch.no_grad()
def test_the_same_tensors_turn_in_halves_in_llama_and_in_pairs_in_helium(tmp_path: Path) -> None:
    other = made("llama", tmp_path, {"head_dim": 6})
    fields = {"model_type": "helium"}
    halves = load_language_model(tmp_path).model(some_ids()).logits
    changed(tmp_path, {}, fields)
    found = load_language_model(tmp_path).model(some_ids()).logits
    assert apart(found, halves) > 1e-3
    helium_class = transformers.HeliumForCausalLM  # imports its module
    with in_float64():
        helium = helium_class(transformers.HeliumConfig.from_pretrained(tmp_path)).eval()
    helium.load_state_dict(other.state_dict())
    assert apart(found, theirs(helium, some_ids()).logits) < 1e-10


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_the_stream_is_taken_after_the_last_norm_as_there(name: str, pair_of: Callable[[str], Pair]) -> None:
    other, model = pair_of(name)
    expected = theirs(other, some_ids(), output_hidden_states=True).hidden_states[-1]
    assert apart(model(some_ids()).hidden, expected) < 1e-10
    assert apart(model.hidden(some_ids()), expected) < 1e-10


@torch.no_grad()
def test_the_activation_is_on_the_gate_and_not_on_what_it_multiplies(tmp_path: Path) -> None:
    other = made("llama", tmp_path)
    before = load_language_model(tmp_path).model(some_ids()).logits
    tensors = load_file(tmp_path / "model.safetensors")
    swapped = {
        name.replace(*pair): tensor
        for name, tensor in tensors.items()
        for pair in (("gate_proj", "up_proj"), ("up_proj", "gate_proj"))
        if pair[0] in name
    }
    assert len(swapped) == 4
    changed(tmp_path, swapped)
    found = load_language_model(tmp_path).model(some_ids()).logits
    other.load_state_dict(swapped, strict=False)
    assert apart(found, before) > 1e-3
    assert apart(found, theirs(other, some_ids()).logits) < 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_not_run_are_refused_by_name(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    with pytest.raises(DataError, match=re.escape(REFUSED[name])):
        load_language_model(tmp_path)


@pytest.mark.parametrize("afn", ["gelu", "swish", "relu"])
@torch.no_grad()
def test_openai_gpt_has_activations_by_names_of_its_own(afn: str, tmp_path: Path) -> None:
    other = made("openai-gpt", tmp_path, {"afn": afn})
    found = load_language_model(tmp_path).model(some_ids()).logits
    assert apart(found, theirs(other, some_ids()).logits) < 1e-10


@torch.no_grad()
def test_turned_channels_keep_their_factor_where_no_norm_takes_it_off(tmp_path: Path) -> None:
    other = made("llama4, stretched", tmp_path, {"use_qk_norm": False})
    found = load_language_model(tmp_path).model(some_ids()).logits
    assert apart(found, theirs(other, some_ids()).logits) < 1e-10


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("openai-gpt", {"afn": "mish"}, "activation 'mish' is not one of"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact is true and pretraining_tp"),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method is neither greedy nor group_limited_greedy",
        ),
    ],
)
def test_what_a_field_says_is_followed_or_refused_by_name(
    name: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    made(name, tmp_path)
    load_language_model(tmp_path)
    changed(tmp_path, {}, fields)
    with pytest.raises(DataError, match=said):
        load_language_model(tmp_path)


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    made("gpt2", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("tensors", "fields", "said"),
    [
        (
            {"transformer.h.0.mlp.gate.weight": torch.ones(2)},
            {},
            "tensor transformer.h.0.mlp.gate.weight",
        ),
        ({"transformer.h.1.mlp.c_fc.bias": None}, {}, "there is no tensor transformer.h.1.mlp.c_fc.bias"),
        ({"transformer.ln_f.weight": torch.ones(3)}, {}, "ln_f.weight: shape"),
        ({"lm_head.weight": torch.ones(40, 24)}, {}, "lm_head.weight is not transformer.wte.weight"),
        ({}, {"n_inner": 90}, "c_fc.weight: shape"),
        ({}, {"residual_multiplier": 0.5}, "what residual_multiplier changes"),
        ({}, {"c_fc": "a module's name"}, "what c_fc changes"),
        ({}, {"activation_function": "mish"}, "activation 'mish' is not one of"),
        ({}, {"tie_word_embeddings": False}, "there is no tensor lm_head.weight"),
    ],
)
def test_what_is_not_understood_or_missing_is_refused_by_name(
    tensors: dict[str, Any], fields: dict[str, Any], said: str, gpt2: Path
) -> None:
    changed(gpt2, tensors, fields)
    with pytest.raises(DataError, match=said) as raised:
        load_language_model(gpt2)
    assert "\n" not in str(raised.value)


def test_a_tied_map_that_is_in_the_file_as_well_must_be_the_table(gpt2: Path) -> None:
    table = load_file(gpt2 / "model.safetensors")["transformer.wte.weight"]
    changed(gpt2, {"lm_head.weight": table.clone()})
    assert load_language_model(gpt2).model.head.output.weight.shape == (40, 24)  # type: ignore[union-attr]


def test_fields_that_change_no_model_may_stand_in_a_configuration(gpt2: Path) -> None:
    fields = {"transformers.js_config": {"dtype": "q4"}, "is_llama_config": True, "pooler_type": "first"}
    changed(gpt2, {}, {**fields, "license": "mit", "n_special": 0, "max_sequence_length": 2048})
    assert load_language_model(gpt2).model.max_tokens == 64


def test_no_dtype_of_whole_numbers(gpt2: Path) -> None:
    with pytest.raises(UsageError, match="int8 cannot be run in: give float32"):
        load_language_model(gpt2, dtype=torch.int8)


def test_a_folder_tells_where_its_tokenizer_lies(gpt2: Path) -> None:
    loaded = load_language_model(gpt2)
    assert (loaded.folder, loaded.family, loaded.config["n_embd"]) == (gpt2, "GPT-2", 24)
    assert not loaded.model.training
    assert loaded.model.max_tokens == 64


def test_weights_that_are_mapped_can_be_changed_and_the_file_stays(tmp_path: Path) -> None:
    made("llama", tmp_path, {"vocab_size": 400})
    before = (tmp_path / "model.safetensors").read_bytes()
    loaded = load_language_model(tmp_path)
    with torch.no_grad():
        loaded.model.embeddings.table.weight.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_large_maps_are_not_copied_from_the_file(tmp_path: Path) -> None:
    made("llama", tmp_path, {"vocab_size": 400, "head_dim": 400, "intermediate_size": 400})
    model = load_language_model(tmp_path).model
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(tmp_path / "model.safetensors")):
            start, _, end = line.split()[0].partition("-")
            mapped.append(range(int(start, 16), int(end, 16)))
    large = {name: p.data_ptr() for name, p in model.named_parameters() if p.nbytes > 60_000}
    assert len(large) == 2 * 7 + 2
    for name, place in large.items():
        assert any(place in part for part in mapped), name


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
def test_loading_takes_the_files_size_and_little_more(tmp_path: Path) -> None:
    made("gpt2", tmp_path, {"vocab_size": 20_000, "n_embd": 240, "n_layer": 4})
    code = """
import resource, sys
from triptych.checkpoints.models import load_language_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_language_model(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert int(done.stdout) * 1024 < size + 30_000_000


@pytest.mark.parametrize(
    ("name", "settings", "added", "left_out"),
    [
        ("qwen3_moe", {}, {"max_window_layers": 1}, ()),  # as the published ones have it
        ("exaone4", {}, {}, ("layer_types",)),
        ("exaone4", {"sliding_window_pattern": 2}, {}, ("layer_types",)),
    ],
)
def test_what_a_configuration_may_have_or_leave_out_is_read_as_transformers_reads_it(
    name: str, settings: dict[str, Any], added: dict[str, Any], left_out: tuple[str, ...], tmp_path: Path
) -> None:
    other = made(name, tmp_path, settings)
    record = json.loads((tmp_path / "config.json").read_text())
    record = {field: value for field, value in {**record, **added}.items() if field not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(record))
    ids = some_ids()
    with torch.no_grad():
        found = load_language_model(tmp_path).model(ids).logits
    assert apart(found, theirs(other, ids).logits) < 1e-10
