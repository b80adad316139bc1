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
from safetensors.torch import load_file, save_file
from torch import Tensor

import triptych
from checkpoints.oracle import apart, changed, fields_not_understood, in_float64
from checkpoints.runs import (
    DECODERS,
    FEW,
    NOT_SAVED,
    PAIRS,
    REFUSED,
    RUNS,
    TOLERANCE,
    attention_weights,
    decoder_of,
    loaded,
    made,
    outputs,
    read_by,
    some,
    some_ids,
    theirs,
    type_of,
)
from checkpoints.runs import pair_of as pair_of
from checkpoints.tiny_models import TINY
from edited import drop_fields, set_fields
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.attention import DecoderCache, PositionIds
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.family import families, family_of
from triptych.core.checkpoints.model_map import model_map
from triptych.core.checkpoints.stored_models import load_encoder_decoder, load_language_model
from triptych.core.models import LanguageModel, find_config, write_model
from triptych.core.models.storage import read_own_model
from triptych.core.storage.settings import Settings, paths_in
from triptych.core.storage.tensors import open_tensors
from triptych.errors import ConfigurationWarning, DataError, UsageError
from triptych.running.decoding.engine import Engine
from triptych.running.opening import record_calls

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

PairOf = Callable[[str], tuple[Any, Any]]


@pytest.mark.parametrize("name", some(RUNS))
@torch.no_grad()
def test_a_model_of_any_family_is_written_as_data_and_read_as_the_same(
    name: str, pair_of: PairOf, tmp_path: Path
) -> None:
    _, model = pair_of(name)
    write_model(model, tmp_path)
    read = read_own_model(tmp_path)
    given = read_by(name)
    found, expected = read(*given), model(*given)
    if isinstance(model, LanguageModel):
        found, expected = found.logits, expected.logits
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", some(RUNS))
@torch.no_grad()
def test_an_exact_rewrite_of_a_model_of_any_family_computes_the_same(name: str, pair_of: PairOf) -> None:
    _, model = pair_of(name)
    given = read_by(name)
    expected = outputs(model(*given))
    done = []
    for call in ("fold_norm", "fold_value_bias", "sort_heads", "repeat_kv_heads", "gauge_fix"):
        try:
            new = triptych.rewrite(model, call).result
        except RewriteRefusedError:
            continue
        done.append(call)
        assert apart(outputs(new(*given)), expected) < 1e-9, call
    shares_keys = any(block.keys is not None for half in model.stacks.values() for block in half.blocks)
    assert done or shares_keys


@pytest.mark.parametrize("name", [pytest.param("deepseek_v3", marks=pytest.mark.slow), "gemma2"])
def test_a_folder_of_a_model_that_no_recipe_describes_is_rewritten_with_a_certificate(
    name: str, pair_of: PairOf, tmp_path: Path
) -> None:
    _, model = pair_of(name)
    with pytest.raises(ValueError, match="no recipe describes the model"):
        find_config(model)
    (tmp_path / "own").mkdir()
    write_model(model, tmp_path / "own")
    triptych.load(tmp_path / "own").rewrite("fold_norm", out=tmp_path / "new")
    claims = triptych.verify(tmp_path / "new", against=tmp_path / "own")
    assert not [claim for claim in claims if claim.held is False]
    assert [claim for claim in claims if claim.held and claim.claim == "nothing else has changed"]


@pytest.mark.parametrize("name", some(RUNS))
@torch.no_grad()
def test_outputs_and_attention_weights_are_those_of_transformers(name: str, pair_of: PairOf) -> None:
    other, model = pair_of(name)
    ids, kind = read_by(name), RUNS[name].kind
    gives_weights = other.config._attn_implementation == "eager"
    expected = theirs(other, *ids, output_attentions=gives_weights)
    with record_calls(model) as calls:
        found = outputs(model(*ids))
    assert kind != "encoder" or not model.causal
    assert found.dtype == torch.float64
    assert apart(found, outputs(expected)) < TOLERANCE.get(name, 1e-10)
    if not gives_weights:
        return
    for found, layer in attention_weights(calls, expected):
        if name in ("granite_swa", "granitemoe_swa"):  # theirs are those before the sinks
            found = found / found.sum(dim=-1, keepdim=True)
        assert apart(found, layer) < TOLERANCE.get(name, 1e-10)


@pytest.mark.parametrize("name", some(RUNS, FEW))
@torch.no_grad()
def test_float32_models_agree_to_five_digits(name: str, tmp_path: Path) -> None:
    other = made(name, tmp_path).float()
    model, ids = loaded(name, tmp_path, torch.float32), read_by(name)
    target = {"decoder_input_ids": ids[1], "use_cache": False} if len(ids) > 1 else {}
    found, expected = outputs(model(*ids)), outputs(other(input_ids=ids[0], **target))
    assert found.dtype == torch.float32
    assert apart(found, expected) < 1e-5 * max(1.0, float(expected.abs().max()))


# Norms whose gains are stored less 1, of heads too; tables of distances that are sums, or made of maps.
_DERIVED = ("gemma3, text", "gemma3, both ways", "t5gemma", "deberta-v2", "deberta", *FEW)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", some(RUNS, _DERIVED))
@torch.no_grad()
def test_narrow_files_are_computed_with_as_wide_ones_are(
    name: str, stored: torch.dtype, tmp_path: Path
) -> None:
    other = made(name, tmp_path)
    path = tmp_path / "model.safetensors"
    held, angles = load_file(path), ("inv_freq", NOT_SAVED.get(RUNS[name].tiny, "inv_freq"))

    def narrow(key: str, tensor: Tensor) -> Tensor:
        whole = not tensor.is_floating_point() or any(part in key for part in angles)
        return tensor if whole else tensor.to(stored)

    path.unlink()
    save_file({key: narrow(key, tensor) for key, tensor in held.items()}, path, {"format": "pt"})
    for key, tensor in other.state_dict().items():
        tensor.copy_(narrow(key, tensor))
    ids = read_by(name)
    found, expected = outputs(loaded(name, tmp_path, torch.float64)(*ids)), outputs(theirs(other, *ids))
    assert apart(found, expected) < 1e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", some(RUNS, FEW))
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_is_seen_on_neither_side(name: str, side: str, pair_of: PairOf) -> None:
    other, model = pair_of(name)
    (ids, *target), kind, tolerance = read_by(name), RUNS[name].kind, TOLERANCE.get(name, 1e-10)
    own = slice(4, None) if side == "left" else slice(0, 7)
    there = torch.ones(ids.shape, dtype=torch.bool)
    there[1] = False
    there[1, own] = True
    if kind != "decoder":
        ids[~there] = other.config.pad_token_id
    if kind == "pairs":
        found = model(ids, *target)
        assert apart(found, theirs(other, ids, *target).logits) < tolerance
        if side == "right":
            assert apart(found[1:], model(ids[1:, own], target[0][1:])) < 1e-10
        return
    positions, given, moved = None, {}, {}
    if kind == "decoder" and side == "left":
        positions = (there.cumsum(1) - 1).clamp(min=0)
        given = {"positions": PositionIds(positions, 11)}
        moved = {"position_ids": positions} if "position_ids" in signature(other.forward).parameters else {}
    found = outputs(model(ids, mask=there[:, None, None], **given))
    same = there.clone()
    if side == "left" and name in ("llama4", "llama4, text"):  # whose queries grow with their place in a row
        same[1] = False
    expected = outputs(theirs(other, ids, attention_mask=there.long(), **moved))
    assert apart(found[same], expected[same]) < tolerance
    if side == "right" or kind == "decoder":
        assert apart(found[1:, own], outputs(model(ids[1:, own]))) < 1e-10


@pytest.mark.parametrize("name", some([*DECODERS, *PAIRS], FEW))
@torch.no_grad()
def test_token_by_token_is_the_whole_text_at_once(name: str, pair_of: PairOf) -> None:
    _, model = pair_of(name)
    if RUNS[name].kind == "pairs":
        src, ids = read_by(name)
        memory, mask = model.encode(src), model.memory_mask(src)
        cache, whole = DecoderCache(len(model.decoder.blocks)), model(src, ids)
    elif model.causal:
        (ids,) = read_by(name)
        cache, whole = model.new_cache(), model(ids).logits
    else:
        pytest.skip("it sees both sides")
    found = []
    for part in (ids[:, :3], *ids[:, 3:].split(1, dim=1)):
        if RUNS[name].kind == "pairs":
            found.append(model.head(model.decode(part, memory, mask, cache)))
        else:
            found.append(model(part, cache=cache).logits)
    assert cache.length == ids.shape[1]
    assert apart(torch.cat(found, dim=1), whole) < 1e-10


@pytest.mark.parametrize("name", RUNS)
def test_every_field_of_its_class_in_transformers_is_understood(name: str) -> None:
    assert fields_not_understood(RUNS[name].configured()) == []


@pytest.mark.parametrize(
    ("name", "tensors", "fields", "said"),
    [
        ("gpt2", {"transformer.h.0.mlp.gate.weight": torch.ones(2)}, {}, "transformer.h.0.mlp.gate.weight"),
        ("gpt2", {"transformer.h.1.mlp.c_fc.bias": None}, {}, "is no tensor transformer.h.1.mlp.c_fc.bias"),
        ("gpt2", {"transformer.ln_f.weight": torch.ones(3)}, {}, "ln_f.weight: shape"),
        ("gpt2", {}, {"n_inner": 90}, "c_fc.weight: shape"),
        ("gpt2", {}, {"activation_function": "mish"}, "activation 'mish' is not one of"),
        ("gpt2", {}, {"tie_word_embeddings": False}, "there is no tensor lm_head.weight"),
        ("openai-gpt", {}, {"afn": "mish"}, "activation 'mish' is not one of"),
        ("bloom", {}, {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact is true and pretrain"),
        ("deepseek_v2", {}, {"topk_method": "noaux_tc"}, "is neither greedy nor group_limited_greedy"),
        ("bert", {"classifier.weight": torch.ones(2, 24)}, {}, "unknown tensor classifier.weight: models of"),
        (
            "bert",
            {"cls.predictions.decoder.bias": torch.ones(40)},
            {},
            "cls.predictions.decoder.bias is not cls.predictions.bias",
        ),
        ("bert", {}, {"hidden_act": "mish"}, "activation 'mish' is not one of"),
        ("bert", {}, {"is_decoder": True}, "no self-attention of its encoder"),
        ("deberta-v2", {}, {"conv_kernel_size": 3}, "conv_kernel_size is not 0"),
        ("electra, generator", {"electra.embeddings_project.weight": None}, {}, "and no map leads to 24"),
    ],
)
def test_what_is_not_understood_or_missing_is_refused_by_name(
    name: str, tensors: dict[str, Any], fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    made(name, tmp_path)
    changed(tmp_path, tensors, fields)
    with pytest.raises(DataError, match=said) as raised:
        load_language_model(tmp_path)
    assert "\n" not in str(raised.value)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_two_tables_that_differ_are_both_run_though_they_are_said_to_be_tied(
    name: str, tmp_path: Path
) -> None:
    other = made(name, tmp_path)
    table = torch.randn(other.get_input_embeddings().weight.shape, dtype=torch.float64)
    changed(tmp_path, {"lm_head.weight": table})
    again = type(other).from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
    assert torch.equal(again.lm_head.weight, table)
    found = outputs(load_language_model(tmp_path)(some_ids()))
    assert apart(found, outputs(theirs(again, some_ids()))) < 1e-10


@torch.no_grad()
@pytest.mark.parametrize("name", ["olmo3", "gemma3, text", "gemma3n"])
def test_angles_that_are_given_for_no_kind_of_layer_are_not_followed_where_transformers_does_not(
    name: str, tmp_path: Path
) -> None:
    other = made(name, tmp_path)
    changed(tmp_path, {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 33.0}})
    with in_float64():
        again = type(other).from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
    found = outputs(load_language_model(tmp_path)(some_ids()))
    assert apart(found, outputs(theirs(again, some_ids()))) < 1e-10


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_decoder_without_a_head_runs_to_its_last_hidden_state(name: str, tmp_path: Path) -> None:
    whole = made(name, tmp_path / "whole", {"tie_word_embeddings": False})
    whole.base_model.save_pretrained(tmp_path / "bare")
    model = load_language_model(tmp_path / "bare")
    assert model.causal
    assert model.head is None
    assert apart(outputs(model(some_ids())), outputs(theirs(whole.base_model, some_ids()))) < 1e-10
    with pytest.raises(ValueError, match="the model has no output table"):
        Engine(model)
    # A class with a head says that its table is missing.
    changed(tmp_path / "bare", {}, {"architectures": [type(whole).__name__]})
    with pytest.raises(DataError, match="there is no tensor"):
        load_language_model(tmp_path / "bare")


@torch.no_grad()
@pytest.mark.parametrize("fields", [{"residual_multiplier": 0.5}, {"c_fc": "a module's name"}])
def test_keys_that_the_class_in_transformers_does_not_know_change_nothing(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    made("gpt2", tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    before = load_language_model(tmp_path).eval()(ids).logits
    changed(tmp_path, {}, fields)
    with pytest.warns(ConfigurationWarning, match=next(iter(fields))):
        found = load_language_model(tmp_path).eval()(ids).logits
    assert torch.equal(found, before)


@torch.no_grad()
def test_the_engine_continues_texts_of_unlike_lengths_where_layers_borrow_keys(pair_of: PairOf) -> None:
    _, model = pair_of("gemma4, text")
    engine, texts = Engine(model), [[3, 5, 7, 9, 11, 13], [4, 6, 8]]
    cache, logits = engine.read(texts)
    for _ in range(6):  # past the window
        expected = torch.cat([model(torch.tensor([text])).logits[:, -1] for text in texts])
        assert apart(logits, expected) < 1e-10
        tokens = logits.argmax(dim=-1)
        texts = [[*text, token] for text, token in zip(texts, tokens.tolist(), strict=True)]
        logits = engine.step(tokens, cache)


def test_every_family_that_is_run_has_a_tiny_model() -> None:
    run = {type_of(name) for name in DECODERS}
    for family in families():
        if decoder_of(family) is not None and not family.remote:
            assert run & {*family.model_types}, family.name


@pytest.mark.parametrize("name", some(DECODERS, FEW))
def test_a_field_that_is_left_out_is_what_the_class_makes_it(name: str, tmp_path: Path) -> None:
    tiny = TINY[name]
    made_by = tiny.config
    family = family_of(type_of(name))
    assert family is not None
    assert family.model is not None
    made(name, tmp_path)
    tensors, whole = open_tensors(tmp_path), json.loads((tmp_path / "config.json").read_text())

    def architecture(record: dict[str, Any]) -> Any:
        try:
            settings = Settings(record, "config.json")
            return model_map(Checkpoint("tiny", family, settings, tensors)).architecture
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
    found = load_language_model(tmp_path)(some_ids()).logits
    assert float(found.abs().max()) > 0.1
    assert apart(found, theirs(other, some_ids()).logits) < 1e-10


@torch.no_grad()
def test_the_same_tensors_turn_in_halves_in_llama_and_in_pairs_in_helium(tmp_path: Path) -> None:
    other = made("llama", tmp_path, {"head_dim": 6})
    fields = {"model_type": "helium"}
    halves = load_language_model(tmp_path)(some_ids()).logits
    changed(tmp_path, {}, fields)
    found = load_language_model(tmp_path)(some_ids()).logits
    assert apart(found, halves) > 1e-3
    helium_class = transformers.HeliumForCausalLM  # imports its module
    with in_float64():
        helium = helium_class(transformers.HeliumConfig.from_pretrained(tmp_path)).eval()
    helium.load_state_dict(other.state_dict())
    assert apart(found, theirs(helium, some_ids()).logits) < 1e-10


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("modernbert-decoder", {"sliding_window": 2}),  # and half of local_attention is 3
        ("modernbert-decoder", {"local_attention": 7}),
        ("smollm3", {"no_rope_layers": [2, 0]}),
        *(("openai-gpt", {"afn": afn}) for afn in ("gelu", "swish", "relu")),  # names of its own
        ("llama4, stretched", {"use_qk_norm": False}),  # no norm takes the factor of turned channels off
    ],
)
@torch.no_grad()
def test_fields_mean_what_transformers_takes_them_for(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    other = made(name, tmp_path, changes)
    found = load_language_model(tmp_path)(some_ids()).logits
    assert apart(found, theirs(other, some_ids()).logits) < 1e-10


@torch.no_grad()
def test_norms_may_have_the_names_of_old(tmp_path: Path) -> None:
    other, ids = made("bert", tmp_path), read_by("bert")
    norms = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if "LayerNorm" in name}
    old = {name.replace(".weight", ".gamma").replace(".bias", ".beta"): t for name, t in norms.items()}
    changed(tmp_path, {**dict.fromkeys(norms), **old})
    assert apart(outputs(loaded("bert", tmp_path)(*ids)), outputs(theirs(other, *ids))) < 1e-10


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_the_stream_is_taken_after_the_last_norm_as_there(name: str, pair_of: PairOf) -> None:
    other, model = pair_of(name)
    expected = theirs(other, some_ids(), output_hidden_states=True).hidden_states[-1]
    assert apart(model(some_ids()).hidden, expected) < 1e-10
    assert apart(model.hidden(some_ids()), expected) < 1e-10


@torch.no_grad()
def test_the_activation_is_on_the_gate_and_not_on_what_it_multiplies(tmp_path: Path) -> None:
    other = made("llama", tmp_path)
    before = load_language_model(tmp_path)(some_ids()).logits
    tensors = load_file(tmp_path / "model.safetensors")
    swapped = {
        name.replace(*pair): tensor
        for name, tensor in tensors.items()
        for pair in (("gate_proj", "up_proj"), ("up_proj", "gate_proj"))
        if pair[0] in name
    }
    assert len(swapped) == 4
    changed(tmp_path, swapped)
    found = load_language_model(tmp_path)(some_ids()).logits
    other.load_state_dict(swapped, strict=False)
    assert apart(found, before) > 1e-3
    assert apart(found, theirs(other, some_ids()).logits) < 1e-10


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_not_run_are_refused_by_name(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    with pytest.raises(DataError, match=re.escape(REFUSED[name])):
        load_language_model(tmp_path)


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    made("gpt2", tmp_path)
    return tmp_path


def test_a_tied_map_that_is_in_the_file_as_well_must_be_the_table(gpt2: Path) -> None:
    table = load_file(gpt2 / "model.safetensors")["transformer.wte.weight"]
    changed(gpt2, {"lm_head.weight": table.clone()})
    assert load_language_model(gpt2).head.output.weight.shape == (40, 24)  # type: ignore[union-attr]


def test_fields_that_change_no_model_may_stand_in_a_configuration(gpt2: Path) -> None:
    fields = {"transformers.js_config": {"dtype": "q4"}, "is_llama_config": True, "pooler_type": "first"}
    changed(gpt2, {}, {**fields, "license": "mit", "n_special": 0, "max_sequence_length": 2048})
    assert load_language_model(gpt2).max_tokens == 64


def test_no_dtype_of_whole_numbers(gpt2: Path) -> None:
    with pytest.raises(UsageError, match="int8 cannot be run in: give float32"):
        load_language_model(gpt2, dtype=torch.int8)


def test_a_model_is_read_in_evaluation_mode_with_the_limit_of_its_positions(gpt2: Path) -> None:
    model = load_language_model(gpt2)
    assert not model.training
    assert model.max_tokens == 64


def test_weights_that_are_mapped_can_be_changed_and_the_file_stays(tmp_path: Path) -> None:
    made("llama", tmp_path, {"vocab_size": 400})
    before = (tmp_path / "model.safetensors").read_bytes()
    model = load_language_model(tmp_path)
    with torch.no_grad():
        model.embeddings.table.weight.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_large_maps_are_not_copied_from_the_file(tmp_path: Path) -> None:
    made("llama", tmp_path, {"vocab_size": 400, "head_dim": 400, "intermediate_size": 400})
    model = load_language_model(tmp_path)
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
from triptych.core.checkpoints.stored_models import load_language_model
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
    set_fields(tmp_path / "config.json", **added)
    drop_fields(tmp_path / "config.json", *left_out)
    with torch.no_grad():
        found = load_language_model(tmp_path)(some_ids()).logits
    assert apart(found, theirs(other, some_ids()).logits) < 1e-10


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "electra, generator", "albert", "roformer", "nomic_bert"]
)
@torch.no_grad()
def test_segments_have_rows_of_their_own(name: str, pair_of: PairOf) -> None:
    other, model = pair_of(name)
    ids, types = read_by(name)[0], (torch.arange(11) > 5).long().expand(2, 11)
    expected = outputs(theirs(other, ids, token_type_ids=types))
    found = model(ids, types=types).logits
    assert apart(found, expected) < TOLERANCE.get(name, 1e-10)
    assert apart(found, model(ids).logits) > 1e-3


@torch.no_grad()
def test_given_positions_are_taken_instead_of_counted_ones(pair_of: PairOf) -> None:
    other, model = pair_of("roberta")
    ids, places = read_by("roberta")[0], torch.arange(3, 14)
    expected = theirs(other, ids, position_ids=places.expand(2, 11) + other.config.pad_token_id + 1).logits
    assert apart(model(ids, positions=PositionIds(places, 14)).logits, expected) < 1e-10


@pytest.mark.parametrize(
    ("name", "added", "left_out"),
    [
        ("m2m_100", {}, ("activation_function", "scale_embedding")),
        ("t5", {"dense_act_fn": "silu"}, ()),
        ("t5, gated", {"dense_act_fn": "relu"}, ()),
    ],
)
@torch.no_grad()
def test_what_a_file_leaves_out_or_says_twice_is_what_the_class_makes_of_it(
    name: str, added: dict[str, Any], left_out: tuple[str, ...], tmp_path: Path
) -> None:
    made(name, tmp_path)
    set_fields(tmp_path / "config.json", **added)
    drop_fields(tmp_path / "config.json", *left_out)
    model_class = RUNS[name].of_class
    with in_float64():
        other = model_class.from_pretrained(tmp_path, attn_implementation="eager").eval()
    src, tgt = read_by(name)
    found = load_encoder_decoder(tmp_path)(src, tgt)
    assert apart(found, theirs(other, src, tgt).logits) < 1e-10


def test_a_model_with_an_encoder_is_no_language_model_and_the_other_way_round(tmp_path: Path) -> None:
    made("bart", tmp_path / "bart")
    with pytest.raises(DataError, match="a model of BART has an encoder and a decoder"):
        load_language_model(tmp_path / "bart")
    made("gpt2", tmp_path / "gpt2")
    with pytest.raises(DataError, match="GPT-2 is not run as an encoder with a decoder"):
        load_encoder_decoder(tmp_path / "gpt2")


def test_what_no_recipe_describes_is_not_rewritten_as_if_one_did(pair_of: PairOf) -> None:
    _, model = pair_of("bart")
    with pytest.raises(ValueError, match="no recipe describes the model"):
        find_config(model)


@pytest.mark.parametrize("name", ["vit", "clip", "whisper", "wav2vec2"])
def test_models_of_pictures_and_of_speech_can_be_read_and_say_that_they_are_not_run(
    name: str, tmp_path: Path
) -> None:
    made(name, tmp_path)
    with pytest.raises(DataError, match="can be read, and not run"):
        load_language_model(tmp_path)
    with pytest.raises(DataError, match="is not run as an encoder with a decoder"):
        load_encoder_decoder(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"altup_active_idx": 7}, "compute with stream 7, and it has 4"),
        ({"activation_sparsity_pattern": [1.0] * 11}, "a share from 0 to below 1"),
        ({"activation_sparsity_pattern": None}, "activation_sparsity_pattern is left out"),
    ],
)
def test_streams_and_shares_that_are_none_are_refused(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    kinds = [*["sliding_attention", "full_attention"] * 5, "full_attention"]
    sizes = {"intermediate_size": 20, "activation_sparsity_pattern": [0.5] * 11}
    made("gemma3n", tmp_path, {"num_hidden_layers": 11, "layer_types": kinds, **sizes})
    changed(tmp_path, {}, fields)
    with pytest.raises(DataError, match=said):
        load_language_model(tmp_path)
