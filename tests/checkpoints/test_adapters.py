"""Adapters of PEFT are opened with their base, and merged as PEFT merges them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.runs import some
from edited import set_fields
from hub_server import in_place_of_the_hub
from triptych import TriptychError, load, verify
from triptych.errors import ConfigurationWarning

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.nn.modules"),
]

IDS = torch.tensor([1, 5, 9, 3, 17])
TOLERANCE = 2e-6
Q = "model.layers.1.self_attn.q_proj"


def gpt2() -> Any:
    sizes = {"vocab_size": 30, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama(*, tied: bool = False) -> Any:
    sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def tied_llama() -> Any:
    return llama(tied=True)


def adapt(folder: Path, model: Any, name: str = "adapter", **settings: Any) -> Path:
    """Write an adapter with random numbers, and its base unless it is there."""
    if not (folder / "base").exists():
        model.save_pretrained(folder / "base")
        torch.manual_seed(len(name))
    model = type(model).from_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 2, **settings}))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(folder / name)
    return folder / name


def as_peft_has_it(kind: type[Any], folder: Path, *names: str) -> Any:
    model = peft.PeftModel.from_pretrained(
        kind.from_pretrained(folder / "base"), folder / (names or ("adapter",))[0]
    )
    for name in names[1:]:
        model.load_adapter(folder / name, adapter_name=name)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS[None]).logits[0]  # type: ignore[no-any-return]


def refusal(base: Path | str, **options: Any) -> str:
    with pytest.raises(TriptychError) as refused:
        _ = load(base, **options).layers
    assert "\n" not in str(refused.value)
    return str(refused.value)


def change(adapter: Path, **settings: Any) -> None:
    set_fields(adapter / "adapter_config.json", **settings)


TURNED = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
ONE_TURNED = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
Q_PROJ = {"target_modules": ["q_proj"]}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "turned maps": (gpt2, TURNED),
    "turned maps, DoRA": (gpt2, {**TURNED, "use_dora": True}),
    "biases, a norm": (gpt2, {**ONE_TURNED, "bias": "all", "modules_to_save": ["ln_f"]}),
    "a bias of B": (gpt2, {**ONE_TURNED, "lora_bias": True}),
    "a tied embedding": (gpt2, {"target_modules": ["wte"]}),
    "rsLoRA": (llama, {"target_modules": "all-linear", "use_rslora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"q_proj": 3},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 32, "^model.layers.0.mlp.down_proj": 5},
        },
    ),
    "DoRA": (llama, {"target_modules": ["q_proj", "o_proj"], "use_dora": True}),
    "a tied head": (tied_llama, {"target_modules": ["q_proj", "lm_head"]}),
    "an embedding and a head, saved": (llama, {**Q_PROJ, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "a tied head, saved": (tied_llama, {**Q_PROJ, "modules_to_save": ["lm_head"]}),
    "a tied embedding, saved": (tied_llama, {**Q_PROJ, "modules_to_save": ["embed_tokens"]}),
}


IN_EVERY_RUN = {"turned maps, DoRA", "biases, a norm", "patterns", "a tied head, saved", "a tied embedding"}


@pytest.mark.parametrize("case", some(CASES, IN_EVERY_RUN))
def test_an_adapter_runs_and_is_saved_as_in_peft(case: str, tmp_path: Path) -> None:
    make, settings = CASES[case]
    model = make()
    adapter = adapt(tmp_path, model, **settings)
    wanted = logits(as_peft_has_it(type(model), tmp_path))
    assert (wanted - logits(type(model).from_pretrained(tmp_path / "base").eval())).abs().max() > 0.01
    opened = load(tmp_path / "base", adapter=adapter)
    assert (opened.run(IDS).logits - wanted).abs().max() < TOLERANCE
    opened.save(tmp_path / "merged")
    merged = type(model).from_pretrained(tmp_path / "merged").eval()
    assert (logits(merged) - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("dora", [False, True])
def test_several_adapters_are_merged_in_their_order(dora: bool, tmp_path: Path) -> None:
    model = llama()
    first = adapt(tmp_path, model, target_modules=["q_proj", "o_proj"])
    second = adapt(tmp_path, model, "second", target_modules=["q_proj", "v_proj"], r=3, use_dora=dora)
    merged = as_peft_has_it(type(model), tmp_path, "adapter", "second")
    merged = merged.merge_and_unload(adapter_names=["default", "second"])
    opened = load(tmp_path / "base", adapter=[first, str(second)])
    assert (opened.run(IDS).logits - logits(merged)).abs().max() < TOLERANCE


def test_the_folder_of_an_adapter_opens_with_its_base(tmp_path: Path) -> None:
    model = llama()
    adapter = adapt(tmp_path, model, target_modules=["q_proj"])
    opened = load(adapter)
    with pytest.warns(ConfigurationWarning, match=r"adapter is an adapter: read with its base, .*base"):
        logits_with_base = opened.run(IDS).logits
    assert opened.name == str(adapter)
    assert torch.equal(logits_with_base, load(tmp_path / "base", adapter=adapter).run(IDS).logits)


def test_a_rewritten_model_with_an_adapter_is_verified_against_the_merged_one(tmp_path: Path) -> None:
    adapter = adapt(tmp_path, gpt2(), target_modules=["c_attn"], fan_in_fan_out=True)
    model = load(tmp_path / "base", adapter=adapter)
    model.rewrite("drop_key_bias").save(tmp_path / "rewritten")
    model.save(tmp_path / "merged")
    alone = verify(tmp_path / "rewritten")
    merged = "the merged model, which load(base, adapter=…).save(FOLDER) writes"
    assert any(merged in claim.found for claim in alone)
    claims = verify(tmp_path / "rewritten", against=tmp_path / "merged")
    assert all(claim.held is not False for claim in claims)
    assert sum(claim.held is True for claim in claims) > sum(claim.held is True for claim in alone)


def test_a_head_of_an_adapted_map_is_a_part_of_the_whole(tmp_path: Path) -> None:
    adapter = adapt(tmp_path, llama(), target_modules=["q_proj", "o_proj"], use_dora=True)
    opened = load(tmp_path / "base", adapter=adapter)
    assert torch.equal(opened[1, 1].W_Q, opened[1].W_Q[1])
    assert torch.equal(opened[1, 1].W_O, opened[1].W_O[1])


def test_maps_of_two_bytes_are_rounded_once(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    adapter = adapt(tmp_path, model, target_modules=["q_proj"])
    found = load(tmp_path / "base", adapter=adapter)._opened.source.tensors()
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{Q}.lora_{part}.weight"].float() for part in "AB")
    weight = load_file(tmp_path / "base" / "model.safetensors")[f"{Q}.weight"]
    assert torch.equal(found.read(f"{Q}.weight"), (weight.float() + 4.0 * (b @ a)).bfloat16())
    assert torch.equal(found.read_part(f"{Q}.weight", 0, [2, 3]), found.read(f"{Q}.weight")[2:4])


def test_maps_of_two_bytes_are_not_rounded_for_a_model_in_float32(tmp_path: Path) -> None:
    """The numbers are those of PEFT on the base in float32."""
    model = llama().to(torch.bfloat16)
    adapter = adapt(tmp_path, model, target_modules=["q_proj", "o_proj", "down_proj"])
    base = type(model).from_pretrained(tmp_path / "base", dtype=torch.float32)
    wanted = logits(peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().eval())
    opened = load(tmp_path / "base", adapter=adapter, dtype="float32")
    assert (opened.run(IDS).logits - wanted).abs().max() < TOLERANCE


def test_an_adapter_in_an_old_file_is_read_without_running_it(tmp_path: Path) -> None:
    adapter = adapt(tmp_path, llama(), target_modules=["q_proj"])
    wanted = load(tmp_path / "base", adapter=adapter).run(IDS).logits
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    assert torch.equal(load(tmp_path / "base", adapter=adapter).run(IDS).logits, wanted)


def test_an_embedding_with_more_tokens_makes_the_vocabulary_larger(tmp_path: Path) -> None:
    adapter = adapt(tmp_path, llama(), target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    larger = {
        name: torch.cat([tensor, tensor[:2]]) if "embed_tokens" in name or "lm_head" in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(larger, adapter / "adapter_model.safetensors")
    assert load(tmp_path / "base", adapter=adapter).run(torch.tensor([1, 31])).logits.shape[-1] == 32


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "an adapter of the method IA3, and only LORA is read: merge it with PEFT"),
        ({"peft_type": "LOHA"}, "of the method LOHA"),
        ({"peft_type": "PREFIX_TUNING"}, "of the method PREFIX_TUNING"),
        ({"peft_type": "ADALORA"}, "of the method ADALORA"),
        ({"use_qalora": True}, "use_qalora is set"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which changes the base"),
        ({"alora_invocation_tokens": [1]}, r"begins at certain tokens"),
        ({"layer_replication": [[0, 1]]}, "layers that are repeated"),
        ({"lora_alpha": "8"}, "lora_alpha is 8, and a number is needed"),
        ({"alpha_pattern": {"(a+)+$": 8}}, "alpha_pattern has"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
    ],
)
def test_another_kind_of_adapter_is_refused_by_its_name(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    adapter = adapt(tmp_path, llama(), target_modules=["q_proj"])
    change(adapter, **settings)
    assert said in refusal(tmp_path / "base", adapter=adapter)
    assert said in refusal(adapter)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    adapter = adapt(tmp_path, llama(), target_modules=["q_proj"])
    gpt2().save_pretrained(tmp_path / "gpt2")
    assert "has no tensor of that name" in refusal(tmp_path / "gpt2", adapter=adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    turned = {name: tensor.mT.contiguous() for name, tensor in tensors.items()}
    save_file(turned, adapter / "adapter_model.safetensors")
    assert "it is an adapter of another model" in refusal(tmp_path / "base", adapter=adapter)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    adapter = adapt(tmp_path, llama(), target_modules=["q_proj"])
    assert "there is no such folder" in refusal(tmp_path / "base", adapter=tmp_path / "none")
    said = refusal(tmp_path / "base", adapter=tmp_path)
    assert "no adapter_config.json; the folders of adapters in it are" in said
    change(adapter, base_model_name_or_path=str(tmp_path / "gone"))
    assert "gone, which its adapter_config.json names: " in refusal(adapter)
    change(adapter, base_model_name_or_path=None)
    assert "names no base model: give it" in refusal(adapter)
    change(adapter, base_model_name_or_path=str(adapter))
    assert "is an adapter, too" in refusal(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors: fetch it, too" in refusal(adapter)


def test_a_changed_adapter_is_noticed(tmp_path: Path) -> None:
    adapter = adapt(tmp_path, llama(), target_modules=["q_proj"])
    opened = load(tmp_path / "base", adapter=adapter)
    change(adapter, lora_alpha=1234)
    with pytest.raises(TriptychError, match=r"adapter_config\.json"):
        _ = opened.layers


IN_MEMORY = ("turned maps, DoRA", "biases, a norm", "patterns", "a tied head", "a tied head, saved")


@pytest.mark.parametrize("case", some(IN_MEMORY, {"turned maps, DoRA", "a tied head"}))
def test_a_model_of_peft_in_memory_opens_and_stays_as_it_is(case: str, tmp_path: Path) -> None:
    make, settings = CASES[case]
    adapt(tmp_path, model := make(), **settings)
    in_memory = as_peft_has_it(type(model), tmp_path)
    before = {name: tensor.clone() for name, tensor in in_memory.state_dict().items()}
    wanted = logits(in_memory)
    opened = load(in_memory)
    assert (opened.run(IDS).logits - wanted).abs().max() < TOLERANCE
    opened.save(tmp_path / "merged")
    assert (load(tmp_path / "merged").run(IDS).logits - wanted).abs().max() < TOLERANCE
    after = in_memory.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_adapters_in_memory_are_those_that_are_active(tmp_path: Path) -> None:
    model = llama()
    adapt(tmp_path, model, target_modules=["q_proj"])
    adapt(tmp_path, model, "second", target_modules=["o_proj"])
    in_memory = as_peft_has_it(type(model), tmp_path, "adapter", "second")
    in_memory.set_adapter("second")
    assert (load(in_memory).run(IDS).logits - logits(in_memory)).abs().max() < TOLERANCE
    with in_memory.disable_adapter():
        assert torch.equal(load(in_memory).run(IDS).logits, load(tmp_path / "base").run(IDS).logits)
    in_memory.merge_adapter()
    assert "its adapters are merged, and not removed" in refusal(in_memory)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_effects_of_an_adapter_are_the_changes_of_the_forms_of_each_head(
    make: Any, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    model = make().to(dtype)
    names = ["c_attn", "attn.c_proj"] if make is gpt2 else ["q_proj", "v_proj"]
    adapter = adapt(tmp_path, model, target_modules=names, fan_in_fan_out=make is gpt2, r=1)
    opened = load(tmp_path / "base", adapter=adapter)
    effects = opened.adapter_effects()
    assert effects is not None
    assert effects.heads == ("0.0", "0.1", "1.0", "1.1")
    # One direction of queries, and of keys where they are adapted, too: no rounding of bfloat16 adds a rank.
    assert {row["qk_rank"] for row in effects.rows()} == ({2} if make is gpt2 else {1})
    before = load(tmp_path / "base", dtype="float32")[1, 1]
    qk = [head.W_Q.float() @ head.W_K.float().mT for head in (before, opened[1, 1])]
    ov = [head.W_V.float() @ head.W_O.float() for head in (before, opened[1, 1])]
    for form, (old, new) in (("qk", qk), ("ov", ov)):
        row = effects.rows()[3]
        assert row[f"{form}_norm"] == pytest.approx(float((new - old).norm()), rel=tolerance)
        assert row[f"{form}_ratio"] == pytest.approx(row[f"{form}_norm"] / float(old.norm()), rel=tolerance)
        found = effects.directions("1.1", form)
        assert len(found.S) == row[f"{form}_rank"]
        rebuilt = (found.U * found.S @ found.Vh).float()
        assert (rebuilt - (new - old)).norm() < tolerance * (new - old).norm()


def test_heads_that_an_adapter_leaves_alone_have_no_rank(tmp_path: Path) -> None:
    adapter = adapt(tmp_path, llama(), target_modules=["q_proj"], layers_to_transform=[1])
    effects = load(tmp_path / "base", adapter=adapter).adapter_effects()
    assert effects is not None
    assert [row["qk_rank"] for row in effects.rows()] == [0, 0, 2, 2]
    assert {row["ov_rank"] for row in effects.rows()} == {0}
    assert {row["ov_norm"] for row in effects.rows()} == {0.0}
    assert effects.top(1)[0]["head"] in ("1.0", "1.1")
    assert "most changed: 1." in repr(effects)
    assert len(effects.directions("0.1", "qk").S) == 0
    with pytest.raises(TriptychError, match=r"there is no head 7\.0"):
        effects.directions("7.0")
    assert load(tmp_path / "base").adapter_effects() is None


def test_directions_are_decoded_to_the_tokens_that_they_read_and_write(tmp_path: Path) -> None:
    """A change of rank 1 of W_OV, and of W_QK, whose directions are known."""
    model = llama()
    adapter = adapt(tmp_path, model, target_modules=["q_proj", "o_proj"], r=1, layers_to_transform=[1])
    opened = load(tmp_path / "base", adapter=adapter)
    effects = opened.adapter_effects()
    assert effects is not None
    theirs = as_peft_has_it(type(model), tmp_path).base_model.model
    layer = theirs.model.layers[1]
    with torch.no_grad():
        table = theirs.model.embed_tokens.weight
        read = layer.input_layernorm(table).double()
        found = effects.directions("1.0", "ov")
        (direction,) = effects.tokens("1.0", "ov", count=4)
        assert direction.strength == pytest.approx(float(found.S[0]))
        along = read @ found.U[:, 0]
        assert direction.reads == tuple(map(str, along.topk(4).indices.tolist()))
        assert direction.opposite_reads == tuple(map(str, (-along).topk(4).indices.tolist()))
        # The output table sees what is written after the last norm, which keeps the order of the logits.
        raised = theirs.lm_head(theirs.model.norm(found.Vh[0].float()))
        assert direction.writes == tuple(map(str, raised.topk(4).indices.tolist()))
        assert direction.opposite_writes == tuple(map(str, (-raised).topk(4).indices.tolist()))
        queries, keys = effects.directions("1.0", "qk")[::2]
        (direction,) = effects.tokens("1.0", "qk", count=4)
        assert direction.reads == tuple(map(str, (read @ queries[:, 0]).topk(4).indices.tolist()))
        assert direction.writes == tuple(map(str, (read @ keys[0]).topk(4).indices.tolist()))
    assert effects.tokens("0.0") == ()
    assert {one["head"] for one in effects.decoded(2)} == {"1.0", "1.1"}
    assert effects.token_table() is not None
    with pytest.raises(TriptychError, match="at least 1"):
        effects.tokens("1.0", count=0)


def test_an_adapter_and_its_base_are_found_by_their_names_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    adapter = adapt(tmp_path, model, target_modules=["q_proj"])
    wanted = load(tmp_path / "base", adapter=adapter).run(IDS).logits
    cache = tmp_path / "cache"
    with in_place_of_the_hub(adapter, cache, monkeypatch):
        found = load(tmp_path / "base", adapter="someone/model")
        assert torch.equal(found.run(IDS).logits, wanted)
        assert found.name == f"{tmp_path / 'base'} with someone/model"
        effects = found.adapter_effects()
        assert effects is not None
        assert effects.adapters == ("someone/model",)
        # The adapter alone, whose base is a folder.
        with pytest.warns(ConfigurationWarning, match="someone/model is an adapter: read with its base"):
            assert torch.equal(load("someone/model").run(IDS).logits, wanted)
        with pytest.raises(TriptychError, match="someone/nothing: no such path, and no such repository"):
            load(tmp_path / "base", adapter="someone/nothing")
    # From the cache, without the Hub.
    offline = load(tmp_path / "base", adapter="someone/model", offline=True)
    assert torch.equal(offline.run(IDS).logits, wanted)
    change(adapter, base_model_name_or_path="someone/model")
    with in_place_of_the_hub(tmp_path / "base", tmp_path / "other", monkeypatch):
        with pytest.warns(ConfigurationWarning, match="read with its base, someone/model"):
            assert torch.equal(load(adapter).run(IDS).logits, wanted)
        with pytest.raises(TriptychError, match=r"there is no adapter_config\.json in it"):
            load(tmp_path / "base", adapter="someone/model")
    with pytest.warns(ConfigurationWarning, match="read with its base, someone/model"):
        assert torch.equal(load(adapter, offline=True).run(IDS).logits, wanted)


def test_an_adapter_is_merged_into_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    adapter = adapt(tmp_path, llama(), target_modules=["q_proj", "down_proj"])
    load(tmp_path / "base").convert(tmp_path / "base.gguf", "gguf")
    opened = load(tmp_path / "base.gguf", adapter=adapter)
    wanted = load(tmp_path / "base", adapter=adapter).run(IDS).logits
    assert (opened.run(IDS).logits - wanted).abs().max() < TOLERANCE
    opened.save(tmp_path / "merged")
    assert (load(tmp_path / "merged").run(IDS).logits - wanted).abs().max() < TOLERANCE
    opened.convert(tmp_path / "merged.gguf", "gguf")
    assert (load(tmp_path / "merged.gguf").run(IDS).logits - wanted).abs().max() < TOLERANCE
    effects = opened.adapter_effects()
    assert effects is not None
    assert {row["qk_rank"] for row in effects.rows()} == {2}
