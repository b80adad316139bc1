"""Checkpoints rewritten as wholes: what the result computes, what is certified, and what is tried again."""

import hashlib
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edited import edited_tensors, set_fields
from rewriting.certificates import failing, failures, seal, with_bounds
from small_checkpoints import gpt2, llama, save_changed, with_words
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.stored_layers import AttentionSource, Site
from triptych.core.storage.copying import CERTIFICATE
from triptych.core.storage.shards import tensor_hash
from triptych.errors import DataError, TriptychError, UsageError
from triptych.rewriting.certificate import Certificate, card, read_certificate
from triptych.rewriting.functions import (
    EXACT,
    DropKeyBias,
    FoldNorm,
    FoldValueBias,
    GaugeFix,
    LayerToRewrite,
    MergeKVHeads,
    PruneHeads,
    RepeatKVHeads,
    Rewrite,
    SortHeads,
    Truncate,
    require_order,
)
from triptych.rewriting.planning import Rewriting, plan_rewrite
from triptych.rewriting.recipe import RewriteRecipe, read_rewrite_recipe
from triptych.rewriting.verification import verify
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.running.opening import open_reader
from triptych.seeing.attending.over import attend_over

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")


def recipe(*steps: Rewrite, skip_refused: bool = False, calibration: Path | None = None) -> RewriteRecipe:
    return RewriteRecipe(step=steps, skip_refused=skip_refused, calibration=calibration)  # type: ignore[arg-type]


EXACT_RECIPE = recipe(*EXACT, skip_refused=True)
SIZES: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2},
    "vocab_size": 60,
}


def small_gpt2(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(1)
    sizes = {"n_embd": 24, "n_head": 4, "n_layer": 2, "vocab_size": 60, "n_positions": 40}
    config = transformers.GPT2Config(**sizes | settings)
    return save_changed(transformers.GPT2LMHeadModel(config), folder)


def small_llama(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(2)
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    return save_changed(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | settings)), folder)


def small_cohere(folder: Path) -> Path:
    """With norms of queries and keys that are each head's own."""
    torch.manual_seed(4)
    sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 40}
    config = transformers.CohereConfig(**sizes, use_qk_norm=True, layer_norm_eps=1e-5)
    return save_changed(transformers.CohereForCausalLM(config), folder)


def small_t5(folder: Path) -> Path:
    torch.manual_seed(3)
    config = transformers.T5Config(
        d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4, vocab_size=60, decoder_start_token_id=0
    )
    return save_changed(transformers.T5ForConditionalGeneration(config), folder)


def text_for(source: Path) -> Path:
    """Words for a model, and a text of some of them."""
    with_words(source, 60)
    text = source.parent / "text.txt"
    text.write_text("w3 w5 w7 w2 w9 w11 " * 40, encoding="utf-8")
    return text


MODELS: dict[str, Callable[[Path], Path]] = {"gpt2": small_gpt2, "llama": small_llama, "t5": small_t5}


def logits(folder: Path) -> torch.Tensor:
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, config.architectures[0])
    model = cls.from_pretrained(folder, dtype=torch.float64).eval()
    ids = torch.arange(2, 34).view(2, 16)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    with torch.no_grad():
        return model(**inputs).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_all_exact_rewrites_at_once_leave_the_logits_where_they_were(name: str, tmp_path: Path) -> None:
    source = MODELS[name](tmp_path / "source")
    found = rewrite_checkpoint(str(source), tmp_path / "out", EXACT_RECIPE)
    apart = (logits(source) - logits(tmp_path / "out")).abs().max()
    assert 0 < apart < 2e-4  # float32 files
    assert found.tier == "rounding-exact"
    assert found.end_to_end is not None
    assert found.end_to_end.worst_logit < 2e-4
    assert all(layer.measured is not None and layer.measured.relative < 1e-5 for layer in found.layers)
    assert failing(tmp_path / "out", source) == []


def test_exact_rewrites_of_a_gpt2_leave_no_key_or_value_bias_and_neutral_norms(tmp_path: Path) -> None:
    source = small_gpt2(tmp_path / "source")
    rewrite_checkpoint(str(source), tmp_path / "out", EXACT_RECIPE)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    for layer in range(2):
        at = f"transformer.h.{layer}"
        assert before[f"{at}.attn.c_attn.bias"][24:].abs().min() > 0
        assert not after[f"{at}.attn.c_attn.bias"][24:].any()
        assert torch.equal(after[f"{at}.ln_1.weight"], torch.ones(24))
        assert not after[f"{at}.ln_1.bias"].any()
        assert torch.equal(after[f"{at}.ln_2.weight"], torch.ones(24))
        assert not after[f"{at}.ln_2.bias"].any()
        gain = before[f"{at}.ln_2.weight"].double()[:, None]
        folded = gain * before[f"{at}.mlp.c_fc.weight"].double()
        assert torch.equal(after[f"{at}.mlp.c_fc.weight"], folded.float())
        for name in ("mlp.c_proj.weight", "mlp.c_proj.bias"):
            assert torch.equal(after[f"{at}.{name}"], before[f"{at}.{name}"])
    for name in ("ln_f.weight", "ln_f.bias", "wte.weight"):  # the output map is the embedding
        assert torch.equal(after[f"transformer.{name}"], before[f"transformer.{name}"])


def test_what_a_layer_refuses_is_told_where_it_is_to_be_skipped(tmp_path: Path) -> None:
    source = small_llama(tmp_path / "source", attention_bias=True)
    found = rewrite_checkpoint(
        str(source), tmp_path / "out", recipe(DropKeyBias(), FoldValueBias(), skip_refused=True)
    )
    drop, fold = found.layers[0].steps
    assert "under rotary positions the key bias" in drop.refused
    assert not fold.refused
    assert "refused elsewhere" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("criterion", ["free", "uncentred"])
@pytest.mark.parametrize("rotary", ["maps", "pairs"])
@pytest.mark.parametrize("spread", [{"rank": 4}, {"budget": 0.5}, {"energy": 0.8}])
def test_rotary_heads_lose_rank_of_maps_or_whole_pairs(
    spread: dict[str, Any], rotary: Any, criterion: Any, tmp_path: Path
) -> None:
    source = small_llama(tmp_path / "source", attention_bias=True)
    text = None if criterion == "free" else text_for(source)
    step = Truncate(forms=("qk",), rotary=rotary, criterion=criterion, **spread)
    found = rewrite_checkpoint(str(source), tmp_path / "out", recipe(step, calibration=text))
    assert found.tier == "bounded"
    said = "pairs" if rotary == "pairs" else "written back into 8 channels"
    assert all(said in layer.steps[0].choice for layer in found.layers)
    assert failing(tmp_path / "out", source) == []


def test_a_bound_of_rotary_scores_that_is_too_low_is_noticed(tmp_path: Path) -> None:
    source = small_llama(tmp_path / "source")
    rewrite_checkpoint(str(source), tmp_path / "out", recipe(Truncate(forms=("qk",), rank=4)))
    certificate = read_certificate(tmp_path / "out")
    layers = tuple(with_bounds(layer, 0.9) for layer in certificate.layers)
    sealed(tmp_path / "out", layers=layers)
    failed = failures(tmp_path / "out", source)
    tier = "what was done is of its tier, and within its bounds"
    assert [check.claim for check in failed] == [tier, "the recipe, done again"]
    assert "a form moves by" in failed[0].found


def test_a_budget_is_spread_by_what_directions_are_worth(tmp_path: Path) -> None:
    source = open_checkpoint(small_gpt2(tmp_path / "source"))
    (step,) = Rewriting(source, tmp_path / "source", recipe(Truncate(budget=0.5))).driver.steps
    assert isinstance(step, Truncate)
    ranks = [rank for forms in step.ranks.values() for found in forms.values() for rank in found]
    assert len(ranks) == 2 * 2 * 4
    assert len(set(ranks)) > 1
    assert 0.4 * 6 * len(ranks) <= sum(ranks) <= 0.5 * 6 * len(ranks)


def kept_heads(rewriting: Rewriting, source: AttentionSource, site: Site) -> tuple[int, ...] | None:
    weights = source.read(site).weights.to(torch.float64)
    return rewriting.driver.rewritten(LayerToRewrite(site.name, weights)).kept


@pytest.mark.parametrize("make", [small_gpt2, small_cohere])
def test_every_step_sees_what_the_layers_do_on_the_text_after_the_steps_before_it(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path / "source")
    text, source = text_for(folder), open_checkpoint(folder)
    steps = (PruneHeads(number=1, on_text=True), Truncate(forms=("ov",), rank=3, criterion="uncentred"))
    rewriting = Rewriting(source, folder, recipe(*steps, calibration=text))
    for site in source.sites:
        first, second = (moments[site.name] for moments in rewriting.driver.moments)
        kept = kept_heads(rewriting, source, site)
        assert first.mixed.shape == (4, 6, 6)
        assert kept is not None
        assert len(kept) == 3
        torch.testing.assert_close(second.mixed, first.mixed[list(kept)])


def test_heads_go_in_the_order_of_the_loss_without_them(tmp_path: Path) -> None:
    folder = small_gpt2(tmp_path / "source")
    text, source = text_for(folder), open_checkpoint(folder)
    rewriting = Rewriting(source, folder, recipe(PruneHeads(number=1, by_loss=True), calibration=text))
    worth = attend_over(open_reader(folder, "cpu"), [text.read_text()], worth="zero").worth
    assert worth is not None
    for site in source.sites:
        order = worth.of(site.stack, site.layer)
        kept = tuple(head for head in range(4) if order[head] != min(order))
        assert kept_heads(rewriting, source, site) == kept
    twice = recipe(PruneHeads(number=1), PruneHeads(number=1, by_loss=True), calibration=text)
    with pytest.raises(UsageError, match="put the step that looks at the loss first"):
        Rewriting(source, folder, twice)


def test_the_mean_of_a_value_bias_that_went_before_is_not_seen_by_a_later_step(tmp_path: Path) -> None:
    folder = small_gpt2(tmp_path / "source")
    text, source = text_for(folder), open_checkpoint(folder)
    cut = Truncate(forms=("ov",), rank=3, criterion="uncentred")
    alone = Rewriting(source, folder, recipe(cut, calibration=text)).driver
    after = Rewriting(source, folder, recipe(FoldValueBias(), cut, calibration=text)).driver
    for site in source.sites:
        with_bias, without = alone.moments[0][site.name], after.moments[1][site.name]
        assert (with_bias.mixed - without.mixed).abs().max() > 1e-3
        # The centred moments do not see a constant.
        torch.testing.assert_close(with_bias.mixed_centred, without.mixed_centred)


def test_t5_gets_narrower_heads_in_its_own_format(tmp_path: Path) -> None:
    source = small_t5(tmp_path / "source")
    found = rewrite_checkpoint(str(source), tmp_path / "out", recipe(Truncate(rank=4)))
    assert found.settings == {"d_kv": 4}
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["d_kv"] == 4
    assert logits(tmp_path / "out").shape == logits(source).shape
    sizes = [folder / "model.safetensors" for folder in (source, tmp_path / "out")]
    assert sizes[1].stat().st_size < sizes[0].stat().st_size


def test_layers_that_do_not_agree_on_a_size_keep_theirs(tmp_path: Path) -> None:
    source = small_t5(tmp_path / "source")
    found = rewrite_checkpoint(str(source), tmp_path / "out", recipe(Truncate(rank=4, layers=(0,))))
    assert found.settings == {}
    assert {layer.tier for layer in found.layers if layer.steps} == {"bounded"}
    shapes = [
        {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
        for folder in (source, tmp_path / "out")
    ]
    assert shapes[0] == shapes[1]
    assert failing(tmp_path / "out", source) == []


def test_what_the_format_refuses_is_recorded_of_every_step_where_it_is_to_be_skipped(tmp_path: Path) -> None:
    folder = small_gpt2(tmp_path / "source")
    with edited_tensors(folder) as tensors:
        tensors |= {name: tensor.half() for name, tensor in tensors.items()}
        tensors["transformer.h.0.ln_1.weight"].fill_(6e4)
        tensors["transformer.h.0.attn.c_attn.weight"].fill_(2.0)
    steps = recipe(FoldNorm(), FoldValueBias(), skip_refused=True)
    found = rewrite_checkpoint(str(folder), tmp_path / "out", steps, compare=False)
    first, second = found.layers
    assert [step.rewrite for step in first.steps] == ["fold_norm", "fold_value_bias"]
    does_not_fit = re.compile(r"c_attn.weight: numbers .* do not fit float16")
    assert all(does_not_fit.search(step.refused) and step.tier is None for step in first.steps)
    assert first.measured is None
    assert not any(step.refused for step in second.steps)
    changed = {name for name, record in found.tensors.items() if record.read != record.written}
    assert changed
    assert all(name.startswith("transformer.h.1.") for name in changed)
    assert failing(tmp_path / "out", folder) == []


def test_key_value_heads_are_repeated_and_merged_again(tmp_path: Path) -> None:
    source = small_llama(tmp_path / "source")
    more = rewrite_checkpoint(str(source), tmp_path / "more", recipe(RepeatKVHeads()))
    assert more.settings == {"num_key_value_heads": 4}
    assert more.tier == "bit-exact"
    torch.testing.assert_close(logits(tmp_path / "more"), logits(source), rtol=0, atol=1e-9)
    fewer = rewrite_checkpoint(
        str(tmp_path / "more"), tmp_path / "fewer", recipe(MergeKVHeads(num_kv_heads=2))
    )
    assert fewer.settings == {"num_key_value_heads": 2}
    torch.testing.assert_close(logits(tmp_path / "fewer"), logits(source), rtol=0, atol=1e-4)


def test_dead_heads_are_found_and_left_out(tmp_path: Path) -> None:
    source = small_gpt2(tmp_path / "source")
    with edited_tensors(source) as tensors:
        for layer in range(2):
            tensors[f"transformer.h.{layer}.attn.c_proj.weight"][6:12] = 0
    found = rewrite_checkpoint(str(source), tmp_path / "out", recipe(PruneHeads()))
    assert all("1 of 4 heads left out: 1" in layer.steps[0].choice for layer in found.layers)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert not after["transformer.h.0.attn.c_attn.weight"][:, 6:12].any()
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=0, atol=1e-9)


def test_planning_tells_what_would_be_written_and_writes_nothing(tmp_path: Path) -> None:
    source = small_gpt2(tmp_path / "source")
    plan = plan_rewrite(str(source), recipe(DropKeyBias(), Truncate(rank=3)))
    assert plan.bytes_after == plan.bytes_before
    assert plan.after == plan.before
    assert plan.unpadded is not None
    assert plan.unpadded.parameters < plan.before.parameters
    assert plan.unpadded.kv_bytes_per_token == plan.before.kv_bytes_per_token / 2
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    t5 = plan_rewrite(str(small_t5(tmp_path / "t5")), recipe(Truncate(rank=3)))
    table = 4 * 32 * 4  # of distances, in the module of the first layer of each stack
    assert t5.bytes_after - 2 * table == (t5.bytes_before - 2 * table) / 2
    assert t5.unpadded is None
    assert t5.after.parameters == t5.before.parameters / 2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "step", [Truncate(rank=3), PruneHeads(number=1), DropKeyBias()], ids=lambda step: step.name
)
def test_costs_are_those_of_what_was_written(name: str, step: Rewrite, tmp_path: Path) -> None:
    source = MODELS[name](tmp_path / "source")
    asked = recipe(step, skip_refused=True)
    plan = plan_rewrite(str(source), asked)
    found = rewrite_checkpoint(str(source), tmp_path / "out", asked, compare=False)
    for folder, said in ((source, found.before), (tmp_path / "out", found.after)):
        checkpoint = open_checkpoint(folder)
        layers = [checkpoint.read(site) for site in checkpoint.sites]
        assert said.parameters == sum(layer.weights.num_parameters for layer in layers)
        assert said.kv_bytes_per_token == sum(
            4 * sum(link.copies * link.d_out for link in (layer.weights.k[-1], layer.weights.v[-1]))
            for layer in layers
            if layer.site.stack == "decoder"
        )
    assert (plan.before, plan.after, plan.unpadded) == (found.before, found.after, found.unpadded)
    assert ("filled with zeros" in card(found)) == (found.unpadded is not None)


def test_nothing_is_cached_where_nothing_is_decoded(tmp_path: Path) -> None:
    source = save_changed(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path / "source")
    found = rewrite_checkpoint(str(source), tmp_path / "out", recipe(Truncate(rank=2)), compare=False)
    assert found.unpadded is not None
    assert {found.before.kv_bytes_per_token, found.unpadded.kv_bytes_per_token} == {0}
    assert "bytes cached" not in card(found)


def small_mpt(folder: Path) -> Path:
    """It clips queries, keys and values, and far more than it leaves alone."""
    torch.manual_seed(4)
    config = transformers.MptConfig(
        d_model=24, n_heads=4, n_layers=2, vocab_size=60, max_seq_len=64, attn_config={"clip_qkv": 0.3}
    )
    return save_changed(transformers.MptForCausalLM(config), folder)


def test_layers_that_clip_compute_the_same_after_all_that_is_exact(tmp_path: Path) -> None:
    source = small_mpt(tmp_path / "source")
    found = rewrite_checkpoint(str(source), tmp_path / "out", EXACT_RECIPE)
    assert [step.rewrite for step in found.layers[0].steps if not step.refused] == [
        *("fold", "fold_norm", "drop_key_bias", "fold_value_bias", "prune_heads")
    ]
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=0, atol=2e-5)
    assert failing(tmp_path / "out", source) == []


def test_heads_take_gains_of_their_own_along(tmp_path: Path) -> None:
    torch.manual_seed(6)
    config = transformers.Olmo2Config(**SIZES, num_key_value_heads=4, pad_token_id=0)
    source = save_changed(transformers.Olmo2ForCausalLM(config), tmp_path / "source")
    found = rewrite_checkpoint(str(source), tmp_path / "out", recipe(SortHeads()))
    moved = {name for name, record in found.tensors.items() if record.read != record.written}
    assert {f"model.layers.0.self_attn.{side}_norm.weight" for side in "qk"} <= moved
    torch.testing.assert_close(
        logits(tmp_path / "out"), logits(source), rtol=0, atol=1e-5
    )  # its norms are float32
    assert failing(tmp_path / "out", source) == []


def test_steps_in_an_order_that_undoes_them_are_refused() -> None:
    with pytest.raises(UsageError, match="fold_norm must come before drop_key_bias: a norm's shift becomes"):
        require_order([DropKeyBias(), FoldNorm()])
    require_order(EXACT)
    require_order([MergeKVHeads(num_kv_heads=1), Truncate(rank=2), GaugeFix(), SortHeads()])


def test_a_recipe_is_read_and_its_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rewrite.toml"
    path.write_text('[[step]]\nrewrite = "fold_norm"\n\n[[step]]\nrewrite = "truncate"\nenergy = 0.9\n')
    assert [step.name for step in read_rewrite_recipe(path).step] == ["fold_norm", "truncate"]
    for text, said in (
        ('[[step]]\nrewrite = "fold_norm"\nrank = 3\n', "rank"),
        ("[[step]\n", r"recipe .*rewrite\.toml is not valid TOML"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_rewrite_recipe(path)


# Certificates.


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("certified")
    source = small_gpt2(folder / "source")
    rewrite_checkpoint(str(source), folder / "out", recipe(FoldNorm(), Truncate(rank=4)))
    return source, folder / "out"


@pytest.fixture
def copy(rewritten: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(rewritten[1], tmp_path / "copy")
    return tmp_path / "copy"


def test_one_bit_of_one_tensor_is_noticed(rewritten: tuple[Path, Path], copy: Path) -> None:
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert failing(copy) == ["tensors as written"]


def test_one_digit_of_the_certificate_is_noticed(copy: Path) -> None:
    path = copy / CERTIFICATE
    text = path.read_text(encoding="utf-8")
    at = text.index('"relative": 0.') + len('"relative": 0.')
    digit = str((int(text[at]) + 1) % 10)
    path.write_text(text[:at] + digit + text[at + 1 :], encoding="utf-8")
    with pytest.raises(DataError, match="it was changed after it was written"):
        verify(copy)


def test_a_changed_configuration_is_noticed(copy: Path) -> None:
    config = copy / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("24", "24 "), encoding="utf-8")
    assert failing(copy) == ["other files as written"]


def test_another_original_is_noticed(rewritten: tuple[Path, Path], tmp_path: Path) -> None:
    other = small_gpt2(tmp_path / "other", n_positions=41)
    assert failing(rewritten[1], other) == [f"tensors of {other}"]


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    for text, said in (
        ("[]", "a JSON record"),
        ('{"format": 7}', "format 7"),
        ('{"format": 1}', "Field required"),
    ):
        (tmp_path / CERTIFICATE).write_text(text)
        with pytest.raises(DataError, match=said):
            verify(tmp_path)


def test_the_schema_in_the_docs_describes_the_certificate() -> None:
    path = Path(__file__).parents[2] / "docs" / "reference" / "certificate.schema.json"
    assert json.loads(path.read_text(encoding="utf-8")) == Certificate.model_json_schema()


def test_a_bfloat16_checkpoint_is_measured_as_it_was_saved(tmp_path: Path) -> None:
    source = small_llama(tmp_path / "source")
    with edited_tensors(source) as tensors:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}
    found = rewrite_checkpoint(str(source), tmp_path / "out", recipe(FoldNorm()))
    assert found.dtype == "bfloat16"
    for layer in found.layers:
        assert layer.measured is not None
        assert 1e-4 < layer.measured.relative < 1e-2
        assert 0.5 < layer.measured.error_ratio < 3


def test_files_of_others_are_not_trusted(tmp_path: Path) -> None:
    source = gpt2(tmp_path / "source")
    entries = [{"dtype": "F32", "shape": [1], "data_offsets": place} for place in ([0, 4], [2, 6])]
    header = json.dumps(dict(zip("ab", entries, strict=True))).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 6)
    with pytest.raises(TriptychError):
        rewrite_checkpoint(str(source), tmp_path / "out", EXACT_RECIPE)
    assert not (tmp_path / "out").exists()


def test_a_file_without_its_folder_is_refused(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    with pytest.raises(UsageError, match="give its folder"):
        rewrite_checkpoint(str(source / "model.safetensors"), tmp_path / "out", EXACT_RECIPE)


def test_a_model_card_keeps_all_but_an_older_section_of_ours(tmp_path: Path) -> None:
    source = small_gpt2(tmp_path / "source")
    old = b"# Mine \xe9\n\n## Rewritten attention\n\nlong ago\n\n### so\n\n## Licence\n\nmine\n"
    (source / "README.md").write_bytes(old)
    rewrite_checkpoint(str(source), tmp_path / "out", recipe(FoldNorm()), compare=False)
    text = (tmp_path / "out" / "README.md").read_bytes()
    assert text.startswith(b"# Mine \xe9\n\n## Licence\n\nmine\n\n## Rewritten attention\n")
    assert b"long ago" not in text
    assert failing(tmp_path / "out", source) == []


def sealed(folder: Path, **changed: Any) -> None:
    """Other entries in a certificate, with a seal that fits them."""
    seal(folder, read_certificate(folder).model_copy(update=changed))


NOTHING_ELSE = "nothing else has changed"


def test_a_tensor_that_no_layer_has_is_noticed_even_if_the_certificate_knows_it(
    rewritten: tuple[Path, Path], copy: Path
) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    with edited_tensors(copy) as tensors:
        tensors[name] *= 2
    records = read_certificate(copy).tensors
    record = records[name].model_copy(update={"written": tensor_hash(tensors[name])})
    sealed(copy, tensors={**records, name: record})
    checks = {check.claim: check for check in verify(copy, rewritten[0])}
    assert checks["tensors as written"].held
    assert checks[NOTHING_ELSE].held is False
    assert checks[NOTHING_ELSE].found == f"{name} was changed, and is in no layer that was measured"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_not_the_originals_is_noticed_even_if_the_certificate_knows_it(
    name: str, rewritten: tuple[Path, Path], copy: Path
) -> None:
    set_fields(copy / name, layer_norm_epsilon=0.5)
    digits = hashlib.sha256((copy / name).read_bytes()).hexdigest()
    sealed(copy, files={**read_certificate(copy).files, name: digits})
    checks = {check.claim: check for check in verify(copy, rewritten[0])}
    assert checks["other files as written"].held
    assert checks[NOTHING_ELSE].held is False
    assert checks[NOTHING_ELSE].found.startswith(f"{name} is other than the original's")


def test_a_certificate_that_leads_out_of_its_folder_or_to_other_probes_is_noticed(copy: Path) -> None:
    found = read_certificate(copy)
    outside = found.model_copy(update={"files": {**found.files, "../secret": "0" * 64}}).sealed()
    (copy / CERTIFICATE).write_bytes(outside.as_json())
    (checked,) = failures(copy)
    assert "leads out of the folder" in checked.found
    easier = found.model_copy(update={"probes": found.probes.model_copy(update={"length": 1})}).sealed()
    (copy / CERTIFICATE).write_bytes(easier.as_json())
    with pytest.raises(DataError, match="layers are tried on"):
        verify(copy)


@pytest.mark.parametrize(
    ("tensor", "number"),
    [
        ("transformer.h.1.ln_1.weight", torch.nan),
        ("transformer.h.1.ln_2.weight", torch.inf),
        ("transformer.h.0.mlp.c_fc.weight", torch.nan),
        ("transformer.h.0.attn.c_attn.weight", -torch.inf),
        ("transformer.h.0.attn.c_proj.bias", torch.nan),
    ],
)
@pytest.mark.parametrize("step", ["--exact", "truncate"])
def test_a_tensor_that_is_not_finite_is_named_and_nothing_is_written(
    tensor: str, number: float, step: str, tmp_path: Path
) -> None:
    source = small_gpt2(tmp_path / "source")
    with edited_tensors(source) as tensors:
        tensors[tensor].view(-1)[3] = number
    done = EXACT_RECIPE if step == "--exact" else recipe(Truncate(rank=2))
    with pytest.raises(DataError, match=rf"tensor {tensor} has 1 .*not finite"):
        rewrite_checkpoint(str(source), tmp_path / "out", done)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_maps_of_eight_bits_are_left_as_they_are_with_a_reason(tmp_path: Path) -> None:
    source = small_llama(tmp_path / "source")
    with edited_tensors(source) as tensors:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            scale = tensors[name].abs().max() / 448
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            tensors[name.replace("weight", "weight_scale_inv")] = scale.view(1, 1)
    scales = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    set_fields(source / "config.json", quantization_config=scales)
    with pytest.raises(RewriteRefusedError, match="is stored as 8-bit numbers with scales"):
        rewrite_checkpoint(str(source), tmp_path / "out", recipe(Truncate(rank=2)))
    certificate = rewrite_checkpoint(str(source), tmp_path / "out", EXACT_RECIPE)
    assert all("8-bit" in step.refused for layer in certificate.layers for step in layer.steps)
    assert failing(tmp_path / "out", source) == []


def test_a_folder_that_is_no_rewrite_is_not_verified(tmp_path: Path) -> None:
    source = small_gpt2(tmp_path / "source")
    with pytest.raises(UsageError, match="it is no rewritten checkpoint"):
        verify(source)
    with pytest.raises(UsageError, match="is no certificate"):
        verify(source / "config.json")
