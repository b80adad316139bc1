"""Two models compared: one function in two writings is found, and a near miss is never taken for it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.tiny_models import TINY, transformers
from edited import edited_tensors, set_fields
from rewriting.pairs_of_models import moved_entry, tensors_of, write
from rewriting.test_plans import own_run
from small_checkpoints import with_words
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.errors import TriptychError
from triptych.model import load
from triptych.rewriting.differences import matching, turning
from triptych.rewriting.differences.bases import Factors, check_basis, solve_basis
from triptych.rewriting.differences.comparing_models import compare
from triptych.rewriting.differences.difference_records import Difference
from triptych.rewriting.differences.rounded import Rounded
from triptych.rewriting.functions import (
    EXACT,
    DropKeyBias,
    FoldNorm,
    FoldOtherNorms,
    FoldValueBias,
    GaugeFix,
    PermuteHeads,
    RepeatKVHeads,
    Rewrite,
    SortHeads,
)
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

SAME = ("same bytes", "same numbers", "same function")
Tensors = dict[str, Tensor]


def difference(a: Path, b: Path) -> Difference:
    return compare(load(a)._opened, load(b)._opened)


def made(name: str, folder: Path) -> Path:
    """A tiny model whose norms and biases are not those of a fresh one."""
    torch.manual_seed(0)
    model = getattr(transformers, TINY[name].model)(TINY[name].configured()).eval()
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    with edited_tensors(folder) as tensors:
        for own, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.ndim == 1 and "inv_freq" not in own:
                tensors[own] = tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
    return folder


def changed(folder: Path, out: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy with tensors changed."""
    return write(folder, out, change(tensors_of(folder)))


def configured(folder: Path, out: Path, **settings: Any) -> Path:
    shutil.copytree(folder, out)
    set_fields(out / "config.json", **settings)
    return out


def rewritten(folder: Path, out: Path, *steps: Rewrite) -> Path:
    rewrite_checkpoint(str(folder), out, RewriteRecipe(step=steps, skip_refused=True))  # type: ignore[arg-type]
    return out


def moved(name: str, ulps: float) -> Callable[[Tensors], Tensors]:
    """Move the largest entry of a tensor by so many units in the last place."""

    def change(tensors: Tensors) -> Tensors:
        place = int(tensors[name].abs().argmax())
        return {**tensors, name: moved_entry(tensors[name], place, ulps)}

    return change


def one_entry(*parts: str) -> Callable[[Tensors], Tensors]:
    """Move the entry of one channel of some tensors by a unit, in one row of matrices."""

    def change(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in (name for name in tensors if any(part in name for part in parts)):
            own = found[name] = tensors[name].clone()
            entry = own[3] if own.ndim == 1 else own[2, 3]
            entry.copy_(torch.nextafter(entry, torch.tensor(float("inf"))))
        return found

    return change


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with factors, in bfloat16, whose rounding hides small changes of them."""
    folder = made("granite", tmp_path_factory.mktemp("granite"))
    with edited_tensors(folder) as tensors:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}
    return folder


def test_a_copy_has_the_same_bytes(llama: Path) -> None:
    found = difference(llama, llama)
    assert (found.verdict, found.reasons, found.first) == ("same bytes", (), "")


def test_a_wider_dtype_has_the_same_numbers(llama: Path, tmp_path: Path) -> None:
    wider = {name: tensor.double() for name, tensor in tensors_of(llama).items()}
    found = difference(llama, write(llama, tmp_path / "b", wider))
    assert found.verdict == "same numbers"
    assert {part.verdict for part in found.parts} == {"same numbers"}


def test_a_coarser_dtype_is_near(llama: Path, tmp_path: Path) -> None:
    coarser = {name: tensor.bfloat16() for name, tensor in tensors_of(llama).items()}
    assert difference(llama, write(llama, tmp_path / "b", coarser)).verdict == "near"


def test_tied_and_untied_tables_are_the_same_numbers(llama: Path, tmp_path: Path) -> None:
    tensors = tensors_of(llama)
    tied = write(llama, tmp_path / "a", {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    without_head = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    other = write(llama, tmp_path / "b", without_head, tie_word_embeddings=True)
    assert difference(tied, other).verdict == "same numbers"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_module_of_this_library_has_the_numbers_of_its_checkpoint(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name)
    stored = load(folder)._opened
    module = load(load_language_model(folder))._opened
    for pair in ((stored, module), (module, stored)):
        found = compare(*pair)
        assert found.verdict == "same numbers", found.reasons


EXACT_STEPS: dict[str, tuple[Rewrite, ...]] = {
    "norms": (FoldNorm(), FoldOtherNorms()),
    "biases": (DropKeyBias(), FoldValueBias()),
    "bases": (GaugeFix(),),
    "heads": (SortHeads(),),
    "copies": (RepeatKVHeads(),),
    "all": (*EXACT, SortHeads()),
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param(name, steps, marks=() if steps == "all" else pytest.mark.slow)
        for name in ("llama", "gpt2")
        for steps in EXACT_STEPS
    ],
)
def test_an_exact_rewrite_is_the_same_function(
    name: str, steps: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before = request.getfixturevalue(name)
    after = rewritten(before, tmp_path / "b", *EXACT_STEPS[steps])
    for pair in ((before, after), (after, before)):
        found = difference(*pair)
        assert found.verdict in SAME, found.reasons
        assert found.verdict == "same bytes" or found.chain


def test_the_chain_can_be_replayed(gpt2: Path, tmp_path: Path) -> None:
    order = (2, 3, 0, 1)
    after = rewritten(gpt2, tmp_path / "b", PermuteHeads(order=order, layers=(1,)))
    (step,) = difference(gpt2, after).chain
    assert step.layers == ("1",)
    assert step.recipe == {"rewrite": "permute_heads", "order": list(order), "layers": [1]}
    recipe = RewriteRecipe.model_validate({"step": [step.recipe]})
    rewrite_checkpoint(str(gpt2), tmp_path / "again", recipe)
    assert difference(tmp_path / "again", after).verdict == "same bytes"


def test_hidden_units_in_another_order_and_scale_are_the_same_function(llama: Path, tmp_path: Path) -> None:
    def reordered(tensors: Tensors) -> Tensors:
        at = "model.layers.1.mlp"
        order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
        factors = torch.linspace(0.7, 1.9, 32)
        return {
            **tensors,
            f"{at}.gate_proj.weight": tensors[f"{at}.gate_proj.weight"][order],
            f"{at}.up_proj.weight": (tensors[f"{at}.up_proj.weight"] * factors[:, None])[order],
            f"{at}.down_proj.weight": (tensors[f"{at}.down_proj.weight"] / factors)[:, order],
        }

    found = difference(llama, changed(llama, tmp_path / "b", reordered))
    assert found.verdict == "same function", found.reasons
    assert [step.layers for step in found.chain] == [("1",), ("1",)]


NEAR_MISSES: dict[str, tuple[str, str, Callable[[Tensors], Tensors]]] = {
    "an entry of W_Q by one unit": ("llama", "", moved("model.layers.1.self_attn.q_proj.weight", 1)),
    "an entry of W_O by one unit": ("gpt2", "", moved("transformer.h.0.attn.c_proj.weight", 1)),
    "an entry of a feed-forward map by one unit": ("gpt2", "", moved("transformer.h.1.mlp.c_fc.weight", 1)),
    "a gain by one unit": ("llama", "", moved("model.layers.1.input_layernorm.weight", 1)),
    "a last gain by one unit": ("llama", "", moved("model.norm.weight", 1)),
    "a shift before attention by one unit": ("gpt2", "", moved("transformer.h.0.ln_1.bias", 1)),
    "a shift before a feed-forward map by one unit": ("gpt2", "", moved("transformer.h.0.ln_2.bias", 1)),
    "a last shift by one unit": ("gpt2", "", moved("transformer.ln_f.bias", 1)),
    # A basis or a factor near 1 would take up a part of these.
    "an entry of W_Q by three units": ("gpt2", "", moved("transformer.h.0.attn.c_attn.weight", 3)),
    "an entry of W_V by three units": ("llama", "", moved("model.layers.1.self_attn.v_proj.weight", 3)),
    "an entry of W_O by four units": ("llama", "", moved("model.layers.1.self_attn.o_proj.weight", 4)),
    "an entry of an inner map by four units": ("llama", "", moved("model.layers.1.mlp.up_proj.weight", 4)),
    "an entry of an outer map by three units": ("llama", "", moved("model.layers.1.mlp.down_proj.weight", 3)),
    "a gain and an entry of its maps": (
        *("llama", ""),
        one_entry("1.input_layernorm.", "1.self_attn.q_", "1.self_attn.k_", "1.self_attn.v_"),
    ),
    "a gain and an entry of an inner map": (
        *("llama", ""),
        one_entry("1.post_attention_layernorm.", "1.mlp.up_", "1.mlp.gate_"),
    ),
    "a last gain and an entry of the table": ("llama", "", one_entry("model.norm.", "lm_head.")),
    "an embedding by one unit": ("llama", "", moved("model.embed_tokens.weight", 1)),
    "W_V after all exact rewrites": ("gpt2", "all", moved("transformer.h.1.attn.c_attn.weight", 64)),
    "W_K after all exact rewrites": ("llama", "all", moved("model.layers.0.self_attn.k_proj.weight", 64)),
    "a map after folding": ("llama", "norms", moved("model.layers.0.mlp.up_proj.weight", 16)),
    "an output bias after folding": ("gpt2", "biases", moved("transformer.h.0.attn.c_proj.bias", 64)),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_a_near_miss_is_near(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    name, steps, change = NEAR_MISSES[case]
    before = request.getfixturevalue(name)
    after = rewritten(before, tmp_path / "w", *EXACT_STEPS[steps]) if steps else before
    found = difference(before, changed(after, tmp_path / "b", change))
    assert (found.verdict, found.chain) == ("near", ())
    assert found.reasons
    assert found.first


def with_other_queries(tensors: Tensors) -> Tensors:
    """The queries of one head in another basis, without the keys."""
    name = "model.layers.1.self_attn.q_proj.weight"
    own = tensors[name].clone()
    width = len(own) // 4
    head = own[:width].clone()
    half = width // 2
    own[:half], own[half:width] = 0.6 * head[:half] - 0.8 * head[half:], 0.8 * head[:half] + 0.6 * head[half:]
    return {**tensors, name: own}


def with_two_query_heads_swapped(tensors: Tensors) -> Tensors:
    name = "model.layers.1.self_attn.q_proj.weight"
    heads = tensors[name].unflatten(0, (4, -1))
    return {**tensors, name: heads[[1, 0, 2, 3]].flatten(0, 1)}


@pytest.mark.parametrize("change", [with_other_queries, with_two_query_heads_swapped])
def test_half_a_rewrite_is_near(change: Callable[[Tensors], Tensors], llama: Path, tmp_path: Path) -> None:
    found = difference(llama, changed(llama, tmp_path / "b", change))
    assert found.verdict == "near"
    assert found.first == "1 attention"
    off = [head for head in found.parts[3].heads if head.verdict == "near"]
    assert {head.head for head in off} <= {0, 1}
    assert off


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"rms_norm_eps": 1.01e-6}, "eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10001.0}}, "frequencies"),
        ({"hidden_act": "gelu"}, "activation"),
    ],
)
def test_the_same_weights_with_another_configuration_are_near(
    settings: dict[str, Any], field: str, llama: Path, tmp_path: Path
) -> None:
    found = difference(llama, configured(llama, tmp_path / "b", **settings))
    assert found.verdict == "near"
    assert any(field in setting.name for setting in found.settings), found.settings


@pytest.mark.parametrize("factor", [1 + 2.0**-22, 1.003])
@pytest.mark.parametrize(
    "field", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
)
def test_a_factor_that_no_map_has_taken_up_is_near(
    field: str, factor: float, granite: Path, tmp_path: Path
) -> None:
    given = json.loads((granite / "config.json").read_text())[field]
    found = difference(granite, configured(granite, tmp_path / "b", **{field: factor * given}))
    assert found.verdict == "near"
    assert any("taken it up" in reason for reason in found.reasons), found.reasons


def test_an_entry_of_one_of_two_maps_in_a_row_is_near(tmp_path: Path) -> None:
    torch.manual_seed(1)
    assert own_run(tmp_path / "a", "stacked", "pre", "sinusoidal")
    change = moved("encoder.0.self_attention.projections.q_first.weight", 1)
    assert difference(tmp_path / "a", changed(tmp_path / "a", tmp_path / "b", change)).verdict == "near"


def test_a_head_that_is_off_is_named_and_the_model_is_near(gpt2: Path, tmp_path: Path) -> None:
    without_a_head = shutil.copytree(gpt2, tmp_path / "b")
    with edited_tensors(without_a_head) as tensors:
        tensors["transformer.h.0.attn.c_proj.weight"][6:12] = 0.0
    found = difference(gpt2, without_a_head)
    assert found.verdict == "near"
    heads = {head.head: head for head in found.parts[1].heads}
    assert (heads[1].other, heads[1].verdict) == (None, "near")
    assert {heads[head].verdict for head in (0, 2, 3)} == {"same function"}


@pytest.mark.parametrize("name", ["BertForPreTraining", "GPT2DoubleHeadsModel"])
def test_the_second_head_of_a_model_is_compared(name: str, tmp_path: Path) -> None:
    kind = "bert" if "Bert" in name else "gpt2"
    torch.manual_seed(0)
    model = getattr(transformers, name)(TINY[kind].configured())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "a")
    rewritten(tmp_path / "a", tmp_path / "b", FoldValueBias())
    found = difference(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, found.reasons) == ("same function", ())
    (weight,) = (
        own
        for own in tensors_of(tmp_path / "a")
        if own.endswith(("seq_relationship.weight", "multiple_choice_head.summary.weight"))
    )
    found = difference(tmp_path / "b", changed(tmp_path / "b", tmp_path / "c", moved(weight, 4)))
    assert found.verdict == "near"
    assert any("second.maps" in reason for reason in found.reasons), found.reasons


def test_models_of_other_depths_or_unrelated_weights_are_different(llama: Path, tmp_path: Path) -> None:
    deeper = TINY["llama"].configured(num_hidden_layers=3)
    transformers.LlamaForCausalLM(deeper).save_pretrained(tmp_path / "deeper")
    assert difference(llama, tmp_path / "deeper").verdict == "different"
    torch.manual_seed(9)
    transformers.LlamaForCausalLM(TINY["llama"].configured()).save_pretrained(tmp_path / "other")
    found = difference(llama, tmp_path / "other")
    assert found.verdict == "different"
    assert found.reasons


@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16])
def test_another_basis_found_from_some_rows_is_that_of_all_rows(
    rounded: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(6)
    table = torch.randn(200, 8, generator=generator).to(rounded)
    basis, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator).double())
    angle = torch.tensor(0.02).double()
    small = torch.eye(8).double()
    small[:2, :2] = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    trained = table.double() + 0.05 * torch.randn(200, 8, generator=generator).double()
    others = (table.double() @ basis, table.double() @ small, table.double(), trained)
    found = {}
    for sampled in (turning._SAMPLED, 10**6):  # some rows first, and all rows at once
        monkeypatch.setattr(turning, "_SAMPLED", sampled)
        found[sampled] = [turning.find_turn(table, other.to(rounded)) for other in others]
    some, every = found.values()
    assert [turn is not None for turn in every] == [True, True, False, False]
    for one, other in zip(some, every, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one.matrix, other.matrix)


def test_a_basis_between_factors_of_other_widths_is_found() -> None:
    generator = torch.Generator().manual_seed(4)
    left, right = (torch.randn(3, 20, 2, generator=generator).double() for _ in range(2))
    wider = torch.randn(3, 2, 7, generator=generator).double()
    a = Factors(*(Rounded.stored(own.float()) for own in (left @ wider, right @ torch.linalg.pinv(wider).mT)))
    b = Factors(*(Rounded.stored(own.float()) for own in (left, right)))
    assert bool(check_basis(a, b, solve_basis(a, b)).explained.all())
    moved = left.float().clone()
    moved[1, 3, 0] += 1e-3
    other = Factors(Rounded.stored(moved), b.right)
    assert check_basis(a, other, solve_basis(a, other)).explained.tolist() == [True, False, True]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_models_with_layers_of_one_kind_in_common_are_related(name: str, tmp_path: Path) -> None:
    source = made(name, tmp_path / "a")
    own = tensors_of(source)
    generator = torch.Generator().manual_seed(3)
    maps = {key for key, tensor in own.items() if tensor.ndim == 2 and ("layers." in key or "block." in key)}
    attention = {key for key in maps if "attn" in key.lower() or "attention" in key.lower()}
    for kind, changed in (("attention", attention), ("feed-forward", maps - attention), ("both", maps)):
        other = {
            key: torch.randn(tensor.shape, generator=generator) if key in changed else tensor
            for key, tensor in own.items()
        }
        found = difference(source, write(source, tmp_path / kind, other))
        far = {part.kind for part in found.parts if part.verdict == "different"}
        assert far == ({"attention", "feed-forward"} if kind == "both" else {kind})
        assert found.verdict == ("different" if kind == "both" else "near")


def turned(tensors: Tensors) -> Tensors:
    """A Llama with its norms folded and its residual stream in another orthogonal basis (QuaRot)."""
    basis, _ = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(2)).double())
    found = {}
    for name, tensor in tensors.items():
        wide = tensor.double()
        if name.endswith("norm.weight"):
            wide = torch.ones_like(wide)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            wide = basis.mT @ wide
        else:
            own, _, last = name.rpartition(".layers.")[2].partition(".")
            norm = "input" if "self_attn" in last else "post_attention"
            gain = tensors.get(f"model.layers.{own}.{norm}_layernorm.weight", torch.ones(24)).double()
            if name == "lm_head.weight":
                gain = tensors["model.norm.weight"].double()
            wide = (wide * gain) @ basis
        found[name] = wide.to(tensor.dtype)
    return found


def test_a_residual_stream_in_another_basis_is_the_same_function(llama: Path, tmp_path: Path) -> None:
    folder = changed(llama, tmp_path / "b", turned)
    found = difference(llama, folder)
    assert found.verdict == "same function", found.reasons
    assert any("residual stream" in step.words for step in found.chain)
    change = moved("model.layers.1.self_attn.v_proj.weight", 256)
    assert difference(llama, changed(folder, tmp_path / "c", change)).verdict == "near"


def flat(tensors: Tensors) -> Tensors:
    """Embeddings that leave one direction of the stream all but undetermined."""
    name = "model.embed_tokens.weight"
    table = tensors[name].double()
    direction = torch.nn.functional.normalize(
        torch.randn(24, generator=torch.Generator().manual_seed(4)).double(), dim=0
    )
    return {**tensors, name: (table - 0.9999 * torch.outer(table @ direction, direction)).float()}


def test_a_basis_that_the_embeddings_leave_undetermined_proves_nothing(llama: Path, tmp_path: Path) -> None:
    before = changed(llama, tmp_path / "a", flat)
    after = changed(before, tmp_path / "b", turned)
    missed = changed(after, tmp_path / "c", moved("model.layers.1.self_attn.v_proj.weight", 256))
    assert difference(before, missed).verdict == "near"


TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("count", [1, 2])
def test_rows_of_padding_are_named_and_tokens_are_no_padding(count: int, llama: Path, tmp_path: Path) -> None:
    row = torch.linspace(-1, 1, 24)[None]
    found = {}
    for number, rows in enumerate((torch.zeros(count, 24), row.expand(count, -1), torch.cat([row, -row]))):
        tables = {name: torch.cat([tensors_of(llama)[name], rows]) for name in TABLES}
        grown = {**tensors_of(llama), **tables}
        found[number] = difference(
            llama, write(llama, tmp_path / f"{number}", grown, vocab_size=40 + len(rows))
        )
    assert found[0].verdict == "same numbers"
    assert any(f"{count} rows of padding, whose logits are not compared" in note for note in found[0].notes)
    assert (found[1].verdict in SAME) == (count > 1)
    assert found[2].verdict not in SAME


def test_a_head_whose_values_are_biases_adds_a_constant(gpt2: Path, tmp_path: Path) -> None:
    before = shutil.copytree(gpt2, tmp_path / "a")
    with edited_tensors(before) as tensors:  # the values of one head are its biases alone
        tensors["transformer.h.0.attn.c_attn.weight"][:, 48:54] = 0.0
    after = shutil.copytree(before, tmp_path / "b")
    with edited_tensors(after) as tensors:
        tensors["transformer.h.0.attn.c_proj.weight"][:6] *= 1.5
    found = difference(before, after)
    assert found.verdict == "near"
    assert any("bias" in reason for reason in found.reasons)


def test_models_are_compared_on_a_text_where_they_are_near(llama: Path, tmp_path: Path) -> None:
    change = moved("model.layers.1.self_attn.v_proj.weight", 1 << 22)
    folder = changed(llama, tmp_path / "b", change)
    with_words(tmp_path / "a", 40)
    shutil.copytree(llama, tmp_path / "a", dirs_exist_ok=True)
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{number * 7 % 40}" for number in range(300)))
    found = compare(load(tmp_path / "a")._opened, load(folder)._opened, text=text)
    assert found.text is not None
    assert found.text.tokens == 299
    assert 0 < found.text.kl[1] <= found.text.kl[0] <= found.text.kl[2]
    assert found.text.worst_logit > 0
    assert found.text.first_layer == "1"
    assert found.text.first_head in {"1.0", "1.1", "1.2", "1.3"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY))
def test_exact_rewrites_of_every_family_are_found_and_near_misses_are_not(name: str, tmp_path: Path) -> None:
    before = made(name, tmp_path / "a")
    steps = {**EXACT_STEPS, "permuted": (PermuteHeads(order=(2, 3, 0, 1)),)}
    for number, recipe in enumerate(steps.values()):
        out = tmp_path / f"b{number}"
        try:
            rewritten(before, out, *recipe)
        except TriptychError:
            continue
        found = difference(before, out)
        if not is_known_gap(found):
            assert found.verdict in SAME, (recipe, found.reasons)
        tensors = load_file(next(out.glob("*.safetensors")))
        names = [own for own, tensor in tensors.items() if tensor.ndim > 1 and bool(tensor.any())]
        place = names[number * 7 % len(names)]
        missed = changed(out, tmp_path / f"c{number}", moved(place, 256))
        assert difference(before, missed).verdict not in SAME, (recipe, place)


def is_known_gap(found: Difference) -> bool:
    """Return True for what is not found: sizes of models that are only read, and folded norms of towers."""
    settings = {setting.name for setting in found.settings}
    towers = all("changes no token's prediction" in reason for reason in found.reasons)
    return found.verdict == "near" and (settings == {"num_key_value_heads"} or towers)


@pytest.mark.parametrize("digits", [0, 1, 6])
@pytest.mark.parametrize("rows", [3, 256])
def test_rows_are_matched_in_order_of_distance(
    digits: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "_ROWS_AT_A_TIME", rows)
    generator = torch.Generator().manual_seed(digits)
    for _ in range(20):
        sizes = torch.randint(1, 20, (2,), generator=generator).tolist()
        a, b = (torch.randn(size, 3, generator=generator).double().round(decimals=digits) for size in sizes)
        distances = torch.cdist(a, b)
        # Rounded rows have equal distances: equal indices come first, then the order of rows.
        is_other = torch.arange(len(a))[:, None] != torch.arange(len(b))
        order = (
            (distances / distances.amax().clamp(min=1e-300) + 1e-9 * is_other).flatten().argsort(stable=True)
        )
        pairs = [divmod(pair, len(b)) for pair in order.tolist()]
        partners = [-1] * len(a)
        for own, other in pairs:
            if partners[own] == -1 and other not in partners:
                partners[own] = other
        assert matching._one_by_one(a, b).partners == partners
