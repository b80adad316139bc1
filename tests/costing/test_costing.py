"""What is counted, against the real modules."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from triptych.core.algebra.cost import cached_numbers, pass_cost
from triptych.core.attention import PARAMETERISATIONS, LayerCache, MultiHeadAttention
from triptych.seeing.costing import cost_pages as pages
from triptych.seeing.costing.counting import CostReport, CostRow, CostSpec, LeftOut, cost, evaluate_formula

BATCH, LENGTH, CONTEXT, MEMORY = 2, 6, 9, 5
WORK: dict[str, int] = {"batch": BATCH, "length": LENGTH, "context": CONTEXT}

# Widths that differ from d_model / num_heads and from each other; one head; a latent so small that
# training absorbs it; biases everywhere.
SPECS = {
    "even": CostSpec(d_model=32, num_heads=4, **WORK),
    "d_k is not d_v": CostSpec(d_model=24, num_heads=4, d_k=5, d_v=7, num_kv_heads=2, d_shared=9, **WORK),
    "d_k is d_v": CostSpec(d_model=20, num_heads=4, d_k=6, d_v=6, num_kv_heads=4, biases=True, **WORK),
    "one head": CostSpec(d_model=10, num_heads=1, **WORK),
    "small latent": CostSpec(d_model=32, num_heads=4, d_latent=3, biases=True, **WORK),
}
ROWS = {(spec, row.name): row for spec in SPECS.values() for row in cost(spec).rows}
CASES = [
    pytest.param(spec, name, id=f"{name}, {what}")
    for what, spec in SPECS.items()
    for of, name in ROWS
    if of == spec
]


def layer_of(spec: CostSpec, name: str) -> MultiHeadAttention:
    return MultiHeadAttention(spec.d_model, spec.num_heads, spec.choice(name))


def inputs(spec: CostSpec, length: int) -> torch.Tensor:
    return torch.randn(BATCH, length, spec.d_model, requires_grad=True)


def counted(call: Callable[[], object]) -> int:
    """FLOPs that torch's own counter sees, of one sequence."""
    with FlopCounterMode(display=False) as counter:
        call()
    flops: int = counter.get_total_flops()
    assert flops % BATCH == 0
    return flops // BATCH


def row_of(spec: CostSpec, name: str) -> CostRow:
    return ROWS[spec, name]


def test_every_parameterisation_is_checked() -> None:
    assert {case.values[1] for case in CASES} == set(PARAMETERISATIONS)
    assert row_of(SPECS["small latent"], "latent").prefill_route == "absorbed"
    assert row_of(SPECS["even"], "latent").prefill_route == "expanded"
    assert row_of(SPECS["even"], "latent").decode_route == "absorbed"


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_formulas_give_the_numbers_of_the_module_and_of_its_cache(spec: CostSpec, name: str) -> None:
    layer, cache, row = layer_of(spec, name), LayerCache(), row_of(spec, name)
    layer(inputs(spec, LENGTH), cache=cache)
    layer(inputs(spec, 1), cache=cache)
    kept = sum(entry.shape[1] * entry.shape[3] for entry in cache.entries)
    biases = sum(p.numel() for name, p in layer.named_parameters() if name.endswith("bias"))
    assert all(entry.shape[2] == LENGTH + 1 for entry in cache.entries)
    assert row.cached_numbers == row.formulas.num_cached == kept
    assert row.parameters == sum(p.numel() for p in layer.parameters())
    assert row.formulas.num_parameters == row.parameters - biases
    cls = PARAMETERISATIONS[name]
    assert evaluate_formula(cls.parameters_formula, row.sizes) == row.formulas.num_parameters
    assert evaluate_formula(cls.cache_formula, row.sizes) == cached_numbers(layer.weights())


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_flops_of_self_attention_are_those_that_torch_counts(spec: CostSpec, name: str) -> None:
    layer, x = layer_of(spec, name), inputs(spec, LENGTH)
    # Asked for the weights, attention is written out by the layer's own route; "reference" expands.
    own, expanded = pass_cost(layer.weights(), LENGTH), pass_cost(layer.weights(), LENGTH, route="expanded")
    assert counted(lambda: layer(x, need_weights=True)) == own.flops
    assert counted(lambda: layer(x, path="reference")) == expanded.flops
    row = row_of(spec, name)
    assert own.flops == row.prefill_flops * LENGTH
    assert own.route == row.prefill_route


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_flops_of_training_are_those_that_torch_counts(spec: CostSpec, name: str) -> None:
    layer, x = layer_of(spec, name), inputs(spec, LENGTH)
    found = counted(lambda: layer(x, need_weights=True).output.sum().backward())
    assert found == row_of(spec, name).training_flops * LENGTH
    assert x.grad is not None


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_flops_of_a_decode_step_are_those_that_torch_counts(spec: CostSpec, name: str) -> None:
    layer, cache = layer_of(spec, name), LayerCache()
    layer(inputs(spec, CONTEXT - 1), cache=cache)
    expanded = pass_cost(layer.weights(), 1, cached=CONTEXT - 1, route="expanded")
    again = copy.copy(cache)
    assert counted(lambda: layer(inputs(spec, 1), cache=again, path="reference")) == expanded.flops
    assert (
        counted(lambda: layer(inputs(spec, 1), cache=cache, need_weights=True))
        == row_of(spec, name).decode_flops
    )
    assert cache.length == CONTEXT


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_flops_of_cross_attention_are_those_that_torch_counts(spec: CostSpec, name: str) -> None:
    layer, cache = layer_of(spec, name), LayerCache()
    x, memory = inputs(spec, LENGTH), inputs(spec, MEMORY)
    fresh = counted(lambda: layer(x, memory=memory, cache=cache, need_weights=True))
    cached = counted(lambda: layer(x, memory=memory, cache=cache, need_weights=True))
    assert fresh == pass_cost(layer.weights(), LENGTH, memory_len=MEMORY).flops
    assert cached == pass_cost(layer.weights(), LENGTH, memory_len=MEMORY, cached=MEMORY).flops


# Those for which torch's fused kernel on the CPU runs (one width, no copy beside the heads).
FUSED = ("factored", "stacked", "symmetric", "shared", "key_value", "direct", "grouped", "latent")


@pytest.mark.parametrize("name", FUSED)
def test_activations_are_what_autograd_keeps(name: str) -> None:
    spec = SPECS["even"]
    layer, x = layer_of(spec, name), inputs(spec, LENGTH)
    kept: dict[int, int] = {}
    softmax_sums = (BATCH, spec.num_heads, LENGTH)
    maps = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in maps and tuple(tensor.shape) != softmax_sums:
            kept[place] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x, path="fast").output
    assert output.requires_grad
    assert sum(kept.values()) == row_of(spec, name).activation_bytes


def test_bytes_follow_the_dtype_and_the_batch() -> None:
    one = cost(CostSpec(dtype="fp32")).rows[0]
    four = cost(CostSpec(dtype="bf16", batch=4)).rows[0]
    assert one.cache_bytes == 2048 * 1024 * 4
    assert one.parameter_bytes == 2 * four.parameter_bytes == 4 * 4 * 512**2
    assert four.cache_bytes == 2 * one.cache_bytes
    assert four.activation_bytes == 2 * one.activation_bytes
    assert four.weights_bytes == 4 * 8 * 512 * 512 * 2
    assert four.decode_flops == one.decode_flops
    # The maps are read once for the whole batch: the more sequences, the more work for a byte.
    step = pass_cost(CostSpec().choice("factored").skeleton(512, 8), 1, cached=2047)
    assert four.decode_bytes == 2 * (step.weight_numbers + 4 * step.moved_numbers)
    assert four.decode_intensity == 4 * four.decode_flops / four.decode_bytes


def test_what_cannot_be_written_is_listed_with_the_reason() -> None:
    report = cost(CostSpec(d_model=20, num_heads=3, d_k=5, d_v=7, num_kv_heads=2))
    reasons = {left.name: left.reason for left in report.left_out}
    assert "num_heads 3 does not divide d_model 20" in reasons["direct"]
    assert "d_latent" in reasons["latent"]
    assert reasons["grouped"] == "num_kv_heads 2 does not divide num_heads 3"
    assert reasons["shared"] == reasons["key_value"] == "its d_v cannot be chosen: it is 5 here, not 7"
    assert {row.name for row in report.rows} == set(PARAMETERISATIONS) - set(reasons)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 0}, "d_model is 0: it must be at least 1"),
        ({"context": -3}, "context is -3"),
        ({"num_heads": 7}, "num_heads 7 does not divide d_model 512: give both d_k and d_v"),
        ({"num_heads": 7, "d_k": 8}, "give both"),
        ({"dtype": "fp8"}, "dtype 'fp8' is not one of fp32, bf16, fp16"),
        ({"parameterisations": ("facored",)}, "did you mean 'factored'?"),
        ({"parameterisations": ("four_way",)}, "'four_way' is no layer: .* as weights"),
        ({"parameterisations": ("direct", "direct")}, "direct is given 2 times"),
        ({"parameterisations": ()}, "no parameterisation is given"),
        ({"parameterisations": ("factored",), "d_latent": 4}, "d_latent is given, but factored has no such"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_the_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostSpec(**options)


def test_if_nothing_is_left_the_reasons_are_the_error() -> None:
    with pytest.raises(ValueError, match="grouped: num_kv_heads 3 does not divide num_heads 8"):
        cost(CostSpec(num_kv_heads=3, parameterisations=("grouped",)))


def test_forms_are_written_from_the_maps_and_what_they_share() -> None:
    forms = {row.name: (row.formulas.W_QK, row.formulas.W_OV) for row in cost(CostSpec(num_kv_heads=2)).rows}
    assert forms == {
        "factored": ("W_i^Q W_i^Kᵀ", "W_i^V W_i^O"),
        "bilinear": ("W_i^Q", "W_i^V W_i^O"),
        "stacked": ("W^Q W_i^Q (W^K W_i^K)ᵀ", "W^V W_i^V W_i^O"),
        "symmetric": ("W_i^QK W_i^QKᵀ", "W_i^V W_i^O"),
        "shared": ("W_i^QKV W_i^QKVᵀ", "W_i^QKV W_i^O"),
        "key_value": ("W_i^Q W_i^KVᵀ", "W_i^KV W_i^O"),
        "four_matrix": ("W_i^Q W_i^Kᵀ", "W_i^V W_i^O1 c W_i^O2"),
        "direct": ("I_i I_iᵀ", "I_i W_i^O"),
        "grouped": ("W_i^Q W_g^Kᵀ", "W_g^V W_i^O"),
        "differential": ("W_i^Q W_g^Kᵀ", "W_g^V W_g^O"),
        "latent": ("W_i^Q (W^KV W_i^K)ᵀ", "W^KV W_i^V W_i^O"),
        "collaborative": ("W^Q diag(m_i) W^Kᵀ", "W_i^V W_i^O"),
        "identity_query": ("I_i W_i^Kᵀ", "W_i^V W_i^O"),
        "identity_value": ("W_i^Q W_i^Kᵀ", "I_i W_i^O"),
        "identity_output": ("W_i^Q W_i^Kᵀ", "W_i^V I_iᵀ"),
        "identity_ov": ("W_i^Q W_i^Kᵀ", "I_i I_iᵀ"),
    }


def test_formulas_are_readable() -> None:
    rows = {row.name: row.formulas for row in cost(CostSpec()).rows}
    assert rows["factored"].parameters == "2·h·d·d_k + 2·h·d·d_v"
    assert rows["bilinear"].parameters == "h·d² + 2·h·d·d_v"
    assert not any(re.search(r"\*", f.parameters + f.cache) for f in rows.values())


# What follows is for people.


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.5, "0.50"),
        (26.0, "26.0"),
        (12, "12"),
        (999, "999"),
        (1000, "1.00K"),
        (65_536, "65.5K"),
        (999_600, "1.00M"),
        (2.5e9, "2.50G"),
        (3e12, "3.00T"),
        (110.4, "110"),
        (110.0, "110"),
    ],
)
def test_counts_have_three_digits(number: float | int, text: str) -> None:
    assert pages.format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(512, "512 B"), (2048, "2.00 KiB"), (8 * 2**20, "8.00 MiB"), (2**40, "1.00 TiB")]
)
def test_sizes_are_powers_of_1024(number: float, text: str) -> None:
    assert pages.format_bytes(float(number)) == text


def test_notes_tell_what_was_absorbed_and_what_left_out() -> None:
    report = cost(SPECS["small latent"])
    report = CostReport(report.spec, report.rows, (LeftOut("direct", "it does not fit"),))
    assert pages.notes(report) == [
        "latent, prefill and decode: the absorbed route, attending to what is cached as it is, "
        "takes fewer FLOPs",
        "direct left out: it does not fit",
    ]


def test_the_page_holds_a_bar_and_a_row_for_each() -> None:
    report = cost(CostSpec(parameterisations=("factored", "latent")))
    page = pages.cost_page(report, command="triptych cost")
    assert [chart.title for chart in page.charts] == ["Parameters", "Cache", "FLOPs per token", "Activations"]
    assert [(bar.name, bar.value) for bar in page.charts[0].bars] == [
        ("factored", 1048576),
        ("latent", 720896),
    ]
    assert [table.title for table in page.tables] == ["Cost", "Formulas"]
    assert page.tables[0].rows[0][:4] == ("factored", "1.05M", "1,024", "8.00 MiB")
    assert page.commands == ("triptych cost",)
