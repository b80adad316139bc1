"""The operation: its two paths against each other, against NumPy and against torch."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.explained import explain_attention
from made import Made
from tolerances import assert_same
from triptych import thresholds
from triptych.core.attention import attention, causal_mask

BATCH, KEY_LEN = 3, 6
MASKS = ("none", "padding", "random", "with blind rows")
WIDTHS = ((8, 8), (8, 12), (8, 4))
ALIKE, GROUPED, ONE_GROUP, ONE_KEY_HEAD = (4, 4, 4), (4, 2, 2), (4, 1, 1), (4, 1, 4)
SHAPES = (
    *((ALIKE, widths) for widths in WIDTHS),
    *((GROUPED, (8, 8)), (GROUPED, (8, 12)), (ONE_GROUP, (8, 8))),
    *((ONE_KEY_HEAD, (8, 8)), (ONE_KEY_HEAD, (8, 4)), ((4, 4, 2), (8, 12))),
)
BIASES = {"every score": (BATCH, 4), "heads": (4,), "positions": (), "texts": (BATCH, 1)}
SLOW_DTYPES = (torch.float32, torch.float16)
MOST_DTYPES = (
    *(torch.float64, torch.bfloat16),
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in SLOW_DTYPES),
)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def make_inputs(
    heads: tuple[int, int, int] = (4, 4, 4),
    widths: tuple[int, int] = (8, 8),
    query_len: int = KEY_LEN,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    (num_heads, key_heads, value_heads), (d_k, d_v) = heads, widths
    shapes = (
        (BATCH, num_heads, query_len, d_k),
        (BATCH, key_heads, KEY_LEN, d_k),
        (BATCH, value_heads, KEY_LEN, d_v),
    )
    return Inputs(*(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes))


def make_mask(kind: str, query_len: int, num_heads: int = 4) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "padding":
        lengths = torch.tensor([KEY_LEN, KEY_LEN - 2, 1])
        return (torch.arange(KEY_LEN) < lengths[:, None])[:, None, None, :]
    mask = torch.rand(BATCH, num_heads, query_len, KEY_LEN) < 0.6
    mask[..., 0] = True  # no row is blind by chance
    if kind == "with blind rows":
        mask[0, 1] = False
        if query_len > 1:
            mask[:, :, -1] = False
    return mask


def whole_mask(mask: Tensor | None, causal: bool, query_len: int, num_heads: int = 4) -> Tensor:
    """The mask and the triangle as one array."""
    allowed = torch.ones(BATCH, num_heads, query_len, KEY_LEN, dtype=torch.bool)
    if mask is not None:
        allowed = allowed & mask
    return allowed & causal_mask(query_len, KEY_LEN) if causal else allowed


def make_bias(kind: str, query_len: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*BIASES[kind], query_len, KEY_LEN).to(dtype).requires_grad_()


def gradients(output: Tensor, upstream: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, upstream)


def equation_1(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, bias: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Attention one query at a time, over the keys that it may see."""
    batch, num_heads, query_len, d_k = q.shape
    bias = np.broadcast_to(bias, allowed.shape)
    keys_shared_by, values_shared_by = num_heads // k.shape[1], num_heads // v.shape[1]
    output = np.zeros((batch, num_heads, query_len, v.shape[-1]))
    weights = np.zeros((batch, num_heads, query_len, k.shape[2]))
    for b, h, i in np.ndindex(batch, num_heads, query_len):
        seen = np.flatnonzero(allowed[b, h, i])
        if len(seen) == 0:
            continue
        scores = np.array([q[b, h, i] @ k[b, h // keys_shared_by, j] for j in seen]) / np.sqrt(d_k)
        scores += bias[b, h, i, seen]
        powers = np.exp(scores - scores.max())
        weights[b, h, i, seen] = powers / powers.sum()
        output[b, h, i] = weights[b, h, i] @ v[b, h // values_shared_by]
    return output, weights


@pytest.mark.parametrize("dtype", MOST_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "widths"), SHAPES)
@pytest.mark.parametrize("query_len", [KEY_LEN, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", MASKS)
def test_both_paths_give_the_same_outputs_and_gradients(
    mask_kind: str,
    causal: bool,
    query_len: int,
    widths: tuple[int, int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    inputs = make_inputs(heads, widths, query_len, dtype)
    mask = make_mask(mask_kind, query_len)
    reference = attention(*inputs, mask=mask, causal=causal, path="reference").output
    fast = attention(*inputs, mask=mask, causal=causal, path="fast").output
    assert_same(fast, reference, kind="output")
    upstream = torch.randn_like(reference)
    of_reference = gradients(reference, upstream, inputs)
    of_fast = gradients(fast, upstream, inputs)
    for name, of_one, of_other in zip("qkv", of_fast, of_reference, strict=True):
        assert of_one.isfinite().all(), name
        assert_same(of_one, of_other, kind="gradient")


@pytest.mark.parametrize("dtype", MOST_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [ALIKE, GROUPED, ONE_KEY_HEAD])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", MASKS)
def test_a_mask_that_blinds_no_query_gives_the_bits_that_filling_gives(
    mask_kind: str,
    causal: bool,
    dropout: float,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = make_inputs(heads, dtype=dtype)
    arguments = {"mask": make_mask(mask_kind, KEY_LEN), "causal": causal, "need_weights": True}

    def attend() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        output, weights = attention(*inputs, dropout=dropout, **arguments)
        assert weights is not None
        torch.manual_seed(6)
        return output, weights, *gradients(output, torch.randn_like(output), inputs)

    ours = attend()
    monkeypatch.setattr("triptych.core.attention.steps._every_query_sees_a_key", lambda allowed: False)
    for one, filled in zip(ours, attend(), strict=True):
        assert_same(one, filled, kind="exact")


def test_a_query_that_mask_and_triangle_blind_together_gives_exact_zeros() -> None:
    inputs = make_inputs()
    padded_in_front = (torch.arange(KEY_LEN) >= torch.tensor([0, 2, 1])[:, None])[:, None, None, :]
    output = attention(*inputs, mask=padded_in_front, causal=True, path="reference").output
    blind = (output == 0).all(dim=-1)
    assert blind[:, 0].tolist() == [[i < count for i in range(KEY_LEN)] for count in (0, 2, 1)]
    assert all(gradient.isfinite().all() for gradient in gradients(output, torch.ones_like(output), inputs))


def test_on_another_device_nobody_waits_for_the_mask_to_be_looked_at() -> None:
    # "meta" has no values to look at: the operation would fail if it tried.
    q, k, v = (t.detach().to("meta") for t in make_inputs())
    mask = torch.ones(BATCH, 1, 1, KEY_LEN, dtype=torch.bool, device="meta")
    assert attention(q, k, v, mask=mask, path="reference").output.shape == q.shape


@pytest.mark.parametrize(("heads", "widths"), SHAPES)
@pytest.mark.parametrize("query_len", [KEY_LEN, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", MASKS)
def test_both_paths_compute_equation_1(
    mask_kind: str, causal: bool, query_len: int, widths: tuple[int, int], heads: tuple[int, int, int]
) -> None:
    inputs = Inputs(*(t.detach() for t in make_inputs(heads, widths, query_len)))
    mask = make_mask(mask_kind, query_len)
    allowed = whole_mask(mask, causal, query_len).numpy()
    output, weights = (torch.from_numpy(a) for a in equation_1(*(t.numpy() for t in inputs), allowed))
    asked = attention(*inputs, mask=mask, causal=causal, need_weights=True)
    assert_same(asked.output, output, kind="output")
    assert asked.weights is not None
    assert_same(asked.weights, weights, kind="output")
    assert_same(attention(*inputs, mask=mask, causal=causal, path="fast").output, output, kind="output")


@pytest.mark.parametrize("path", ["reference", "fast"])
def test_the_scale_given_multiplies_the_scores(path: str) -> None:
    q, k, v = make_inputs()
    scaled = attention(q, k, v, scale=0.5, path=path).output
    assert_same(scaled, attention(q * (0.5 * 8**0.5), k, v, path=path).output, kind="output")


def test_asking_for_the_weights_changes_nothing_under_dropout() -> None:
    inputs = make_inputs()
    torch.manual_seed(5)
    without = attention(*inputs, dropout=0.4)
    torch.manual_seed(5)
    with_weights = attention(*inputs, dropout=0.4, need_weights=True)
    assert_same(with_weights.output, without.output, kind="exact")
    assert not torch.equal(without.output, attention(*inputs).output)


def test_the_weights_given_back_are_those_before_dropout() -> None:
    inputs = make_inputs()
    dropped = attention(*inputs, dropout=0.4, need_weights=True).weights
    kept = attention(*inputs, need_weights=True).weights
    assert dropped is not None
    assert kept is not None
    assert_same(dropped, kept, kind="exact")


def test_dropout_keeps_the_mean() -> None:
    q, k, v = (t.detach() for t in make_inputs())
    many = attention(*(t.repeat(4000, 1, 1, 1) for t in (q, k, v)), dropout=0.3).output
    many = many.view(4000, *q.shape)
    error = (many.mean(dim=0) - attention(q, k, v).output).abs() / (many.std(dim=0) / 4000**0.5)
    assert error.max() < 6


def refuse(**changes: object) -> str:
    """The message of a refusal, where the shape checker of the tests does not get there first."""
    arguments = {**make_inputs()._asdict(), **changes}
    with pytest.raises(ValueError, match=r"\w") as refusal:
        inspect.unwrap(attention)(**arguments)
    return str(refusal.value)


def test_a_mask_that_is_not_boolean_is_refused() -> None:
    said = "the mask is torch.float32: it must be boolean, True = may attend"
    assert refuse(mask=torch.zeros(KEY_LEN, KEY_LEN)) == said


def test_queries_and_keys_of_different_widths_are_refused_with_both_numbers() -> None:
    assert "queries have width 8 and keys 6" in refuse(k=torch.randn(BATCH, 4, KEY_LEN, 6))


@pytest.mark.parametrize("shape", [(BATCH, 4, KEY_LEN + 1, 8), (1, 4, KEY_LEN, 8)])
def test_keys_and_values_that_do_not_pair_up_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    message = refuse(v=torch.randn(shape))
    assert f"keys [3, 4, {KEY_LEN}, 8]" in message
    assert f"values {list(shape)}" in message


def test_heads_that_cannot_be_grouped_are_refused_with_both_numbers() -> None:
    three = torch.randn(BATCH, 3, KEY_LEN, 8)
    assert "4 query heads cannot share 3 key heads" in refuse(k=three)
    assert "4 query heads cannot share 3 value heads" in refuse(v=three)


def test_queries_of_another_batch_size_are_refused_with_both_numbers() -> None:
    assert "queries have batch size 1 and keys 3" in refuse(q=torch.randn(1, 4, KEY_LEN, 8))


def test_a_bias_that_is_not_floating_point_is_refused() -> None:
    said = "the bias is torch.bool: it must be floating point, a mask is passed as mask"
    assert refuse(bias=torch.ones(KEY_LEN, KEY_LEN, dtype=torch.bool)) == said


@pytest.mark.parametrize("shape", [(KEY_LEN, KEY_LEN - 1), (2, 1, 1), (2, 1, 1, 1), (1, 1, 1, 1, 1)])
def test_a_mask_or_bias_that_does_not_broadcast_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    for name, given in (("mask", torch.ones(shape, dtype=torch.bool)), ("bias", torch.ones(shape))):
        message = refuse(**{name: given})
        assert f"the {name} {list(shape)} does not broadcast to [3, 4, {KEY_LEN}, {KEY_LEN}]" in message


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5])
def test_a_dropout_out_of_range_is_refused_with_its_value(dropout: float) -> None:
    assert f"dropout is {dropout}" in refuse(dropout=dropout)


@pytest.mark.parametrize("request_", [{"need_weights": True}, {"dropout": 0.1}])
def test_the_fast_path_refuses_what_only_the_reference_path_can_do(request_: dict[str, object]) -> None:
    assert "use path='auto' or 'reference'" in refuse(path="fast", **request_)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [ALIKE, GROUPED, ONE_KEY_HEAD])
@pytest.mark.parametrize("query_len", [KEY_LEN, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", ["none", "padding", "with blind rows"])
@pytest.mark.parametrize("bias_kind", BIASES)
def test_both_paths_add_the_bias_and_give_it_the_same_gradient(
    bias_kind: str,
    mask_kind: str,
    causal: bool,
    query_len: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    inputs = make_inputs(heads, (8, 12), query_len, dtype)
    bias = make_bias(bias_kind, query_len, dtype)
    mask = make_mask(mask_kind, query_len)
    reference = attention(*inputs, mask=mask, bias=bias, causal=causal, path="reference").output
    fast = attention(*inputs, mask=mask, bias=bias, causal=causal, path="fast").output
    if dtype == torch.float64:
        arrays = [t.detach().numpy() for t in inputs]
        allowed = whole_mask(mask, causal, query_len).numpy()
        expected, _ = equation_1(*arrays, allowed, bias.detach().numpy())
        assert_same(reference.detach(), torch.from_numpy(expected), kind="output")
    assert_same(fast, reference, kind="output")
    blind = ~whole_mask(mask, causal, query_len).any(dim=-1)
    assert (reference[blind] == 0).all()
    assert (fast[blind] == 0).all()
    upstream = torch.randn_like(reference)
    of_reference = gradients(reference, upstream, (*inputs, bias))
    of_fast = gradients(fast, upstream, (*inputs, bias))
    assert of_reference[3].abs().max() > 0
    for name, of_one, of_other in zip((*"qkv", "bias"), of_fast, of_reference, strict=True):
        assert of_one.isfinite().all(), name
        assert_same(of_one, of_other, kind="gradient")


def test_a_bias_without_gradient_goes_through_the_kernel_in_every_shape() -> None:
    inputs = make_inputs()
    for kind in BIASES:
        bias = make_bias(kind, KEY_LEN).detach()
        for mask_kind in MASKS:
            given = {"mask": make_mask(mask_kind, KEY_LEN), "bias": bias}
            assert explain_attention(*inputs, **given, path="fast").kernel == "flash"
            reference = attention(*inputs, **given, path="reference").output
            assert_same(attention(*inputs, **given, path="fast").output, reference, kind="output")


def test_a_float32_bias_serves_a_model_in_bfloat16() -> None:
    inputs = make_inputs(dtype=torch.bfloat16)
    bias = make_bias("heads", KEY_LEN, torch.float32).detach()
    for path in ("reference", "fast"):
        output = attention(*inputs, bias=bias, path=path).output
        assert_same(output, attention(*inputs, bias=bias.bfloat16(), path=path).output, kind="exact")


@pytest.mark.parametrize(("key_heads", "value_heads"), [*itertools.product([1, 2, 3, 6], repeat=2)])
def test_numbers_of_key_heads_and_value_heads_are_free(key_heads: int, value_heads: int) -> None:
    for query_len, widths in itertools.product((1, KEY_LEN), ((8, 8), (5, 8), (8, 5))):
        inputs = make_inputs((6, key_heads, value_heads), widths, query_len)
        mask = make_mask("random", query_len, num_heads=6)
        q, k, v = inputs
        k, v = (t.repeat_interleave(6 // t.shape[1], dim=1) for t in (k, v))
        expected = attention(q, k, v, mask=mask, path="reference").output
        upstream = torch.randn_like(expected)
        of_expected = gradients(expected, upstream, inputs)
        for path in ("reference", "fast", "auto"):
            output = attention(*inputs, mask=mask, path=path).output
            assert_same(output, expected, kind="output")
            for one, other in zip(gradients(output, upstream, inputs), of_expected, strict=True):
                assert_same(one, other, kind="gradient")


class Recorder(Made):
    """Knows the kernels by name."""

    @property
    def kernel(self) -> str:
        """The kernel that ran, under the name that `Explanation` gives it."""
        found = {
            "_scaled_dot_product_flash_attention_for_cpu": "flash",
            "_safe_softmax": "math",
            "_softmax": "batched products",
        }
        (kernel,) = {found[name] for name in self.names if name in found}
        return kernel


class Case(NamedTuple):
    """A call, and what it should take: sizes as query_len, key_len, heads of q, k, v, d_k, d_v."""

    sizes: tuple[int, int, int, int, int, int, int]
    records: bool
    arguments: dict[str, object]
    path: str
    heads: str
    kernel: str
    reason: str


def triangle(query_len: int, key_len: int) -> dict[str, object]:
    return {"mask": causal_mask(query_len, key_len)}


SHORT, LONG = (20, 20, 4, 4, 4, 8, 8), (150, 150, 4, 4, 4, 8, 8)
LONG_GROUPED = (150, 150, 4, 2, 2, 8, 8)
# Path, heads and kernel.
PRODUCTS = ("written out", "one to one", "batched products")
PRODUCTS_BY_ROWS = ("written out", "grouped by rows", "batched products")
FLASH = ("fused", "one to one", "flash")
FLASH_BY_ROWS = ("fused", "grouped by rows", "flash")
FLASH_BY_KERNEL = ("fused", "grouped by the kernel", "flash")
FLASH_EXPANDED = ("fused", "expanded", "flash")
LEARNED_BIAS = {"bias": torch.ones(150, requires_grad=True)}
FAST_BIAS = {"bias": torch.ones(20, requires_grad=True), "path": "fast"}


def padded(way: tuple[str, str, str]) -> tuple[str, str, str]:
    return ("fused, padded", *way[1:])


CASES = {
    "short, training": Case(SHORT, True, {}, *PRODUCTS, "up to about 128 keys"),
    "short, training, wide": Case((20, 20, 4, 4, 4, 128, 128), True, {}, *FLASH, "does not hold"),
    "short, training, many": Case((128, 128, 64, 64, 64, 8, 8), True, {}, *FLASH, "2 × 64 × 128 × 128"),
    "short, training, not quite as many": Case(
        (127, 128, 64, 64, 64, 8, 8), True, {}, *PRODUCTS, "up to about"
    ),
    "short": Case(SHORT, False, {}, *FLASH, "does not hold"),
    "short, asked for": Case(SHORT, True, {"path": "fast"}, *FLASH, "by the caller"),
    "long, training": Case(LONG, True, {"causal": True}, *FLASH, "2 × 4 × 150 × 150"),
    "long, asked for": Case(LONG, False, {"path": "reference"}, *PRODUCTS, "by the caller"),
    "weights": Case(SHORT, False, {"need_weights": True}, *PRODUCTS, "weights are wanted"),
    "dropout": Case(SHORT, False, {"dropout": 0.1}, *PRODUCTS, "dropout is 0.1"),
    "masked": Case(SHORT, False, triangle(20, 20), *FLASH, ""),
    "grouped, short, training": Case((20, 20, 4, 2, 2, 8, 8), True, {}, *PRODUCTS_BY_ROWS, "2 of keys"),
    "grouped, long": Case(LONG_GROUPED, True, {"causal": True}, *FLASH_BY_KERNEL, "2 of keys"),
    "grouped, long, masked": Case(LONG_GROUPED, False, triangle(150, 150), *FLASH_BY_KERNEL, ""),
    "grouped, decoding": Case(
        (1, 150, 4, 2, 2, 8, 8), False, {"causal": True}, *FLASH_BY_ROWS, "query_len 1"
    ),
    "one key head": Case((150, 150, 4, 1, 4, 8, 8), False, {}, *FLASH_EXPANDED, "1 of keys and 4 of values"),
    "one key head, decoding": Case(
        (1, 150, 4, 1, 4, 16, 8), False, {}, *PRODUCTS_BY_ROWS, "the 2 × 4 × 1 × 150 weights take less room"
    ),
    "two widths": Case((150, 150, 4, 4, 4, 16, 8), True, {}, *padded(FLASH), "d_k 16, d_v 8"),
    "two widths, short": Case((20, 20, 4, 4, 4, 16, 8), False, {}, *PRODUCTS, "do not pay"),
    "two widths, far apart": Case((150, 150, 4, 4, 4, 8, 256), True, {}, *PRODUCTS, "less room"),
    "two widths, grouped": Case((150, 150, 4, 2, 2, 8, 16), True, {}, *padded(FLASH_BY_KERNEL), ""),
    "two widths, grouped, decoding, asked for": Case(
        (1, 150, 4, 2, 2, 8, 16), False, {"path": "fast"}, *padded(FLASH_BY_ROWS), ""
    ),
    "two widths, expanded": Case(
        (150, 150, 4, 1, 4, 16, 8), True, triangle(150, 150), *padded(FLASH_EXPANDED), ""
    ),
    "2 on 3": Case((150, 150, 6, 2, 3, 8, 8), True, {}, *FLASH_EXPANDED, "2 of keys and 3"),
    "2 on 3 of 12": Case((150, 150, 12, 2, 3, 8, 8), True, {}, *FLASH_EXPANDED, ""),
    "bias": Case(LONG, True, {"bias": torch.ones(4, 150, 150)}, *FLASH, "does not hold"),
    "bias with a gradient": Case(LONG, True, LEARNED_BIAS, *PRODUCTS, "gives a bias its gradient"),
    "bias with a gradient, asked for": Case(
        (20, 20, 4, 2, 2, 8, 8), True, FAST_BIAS, "fused", "grouped by the kernel", "math", "by the caller"
    ),
    "bias with a gradient that is not recorded": Case(LONG, False, LEARNED_BIAS, *FLASH, ""),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_explained_is_what_runs(case: Case) -> None:
    query_len, key_len, num_heads, key_heads, value_heads, d_k, d_v = case.sizes
    q = torch.randn(2, num_heads, query_len, d_k)
    k, v = torch.randn(2, key_heads, key_len, d_k), torch.randn(2, value_heads, key_len, d_v)
    if case.records:
        q, k, v = (t.requires_grad_() for t in (q, k, v))
    with torch.set_grad_enabled(case.records):
        explained = explain_attention(q, k, v, **case.arguments)
        with Recorder() as recorder:
            output = attention(q, k, v, **case.arguments).output
        alike = {name: value for name, value in case.arguments.items() if name in ("mask", "bias", "causal")}
        if "dropout" not in case.arguments:
            assert_same(output, attention(q, k, v, **alike, path="reference").output, kind="output")
    assert recorder.kernel == explained.kernel
    assert explained[:3] == (case.path, case.heads, case.kernel)
    assert ("constant_pad_nd" in recorder.names) == (explained.path == "fused, padded")
    assert case.reason in explained.reason
    assert explained.reason.endswith(".")
    assert "\n" not in explained.reason


@pytest.mark.parametrize(
    ("batch", "key_heads", "key_len", "path"),
    [(2, 4, 512, "written out"), (2, 4, 511, "fused"), (1, 2, 4096, "fused"), (4, 1, 1024, "written out")],
)
def test_one_query_in_bfloat16_is_given_to_products_when_there_are_keys_enough(
    batch: int, key_heads: int, key_len: int, path: str
) -> None:
    q = torch.randn(batch, 4, 1, 8, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, key_heads, key_len, 8, dtype=torch.bfloat16) for _ in range(2))
    explained = explain_attention(q, k, v)
    assert explained.path == path
    assert ("faster for one query of each head in bfloat16" in explained.reason) == (path == "written out")
    assert explain_attention(q.float(), k.float(), v.float()).path == "fused"
    assert "for one query" not in explain_attention(q.requires_grad_(), k, v).reason
    with Recorder() as recorder, torch.no_grad():
        output = attention(q, k, v).output
    assert recorder.kernel == ("batched products" if path == "written out" else "flash")
    wide = attention(q.double(), k.double(), v.double(), path="reference").output
    assert (output - wide).abs().max() < 0.01 * wide.abs().max()


@pytest.mark.parametrize(("length", "path"), [(512, "written out"), (513, "fused")])
def test_training_in_bfloat16_writes_out_to_512_keys(length: int, path: str) -> None:
    q = torch.randn(1, 2, length, 16, dtype=torch.bfloat16, requires_grad=True)
    explained = explain_attention(q, q, q)
    assert explained.path == path
    assert ("up to about 512 keys in bfloat16" in explained.reason) == (path == "written out")


PIECES = {
    # batch, query_len, key_len, heads of q, k, v, d_k, d_v; and the bytes that a piece may take
    "sentences": ((7, 12, 12, 4, 4, 4, 32, 32), 20_000),
    "heads": ((2, 12, 20, 6, 6, 6, 32, 32), 10_000),
    "queries": ((2, 50, 70, 3, 3, 3, 32, 48), 5_000),
    "one query at a time": ((1, 5, 9, 2, 2, 2, 32, 32), 1),
    "heads on shared keys and values": ((2, 12, 12, 8, 2, 2, 32, 32), 20_000),
    "queries on shared keys and values": ((2, 12, 12, 8, 2, 2, 32, 32), 5_000),
    "heads shared unlike": ((2, 12, 12, 6, 2, 3, 32, 32), 5_000),
    "one key head": ((3, 12, 12, 6, 1, 6, 32, 32), 30_000),
    "more queries than keys": ((2, 30, 11, 4, 4, 4, 32, 32), 3_000),
}
PIECE_MASKS = {
    "none": None,
    "padding": lambda sizes: torch.arange(sizes[3]) < torch.arange(1, sizes[0] + 1)[:, None, None, None],
    "every score": lambda sizes: torch.rand(sizes) < 0.7,
    "of the heads": lambda sizes: torch.rand(sizes[1:]) < 0.7,
    "of the positions": lambda sizes: torch.rand(sizes[2:]) < 0.7,
    "keys": lambda sizes: torch.rand(sizes[3:]) < 0.7,
}


@pytest.mark.parametrize("sizes_and_bytes", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("mask_kind", "bias_kind"),
    [
        ("none", "none"),
        ("padding", "positions"),
        ("every score", "every score"),
        ("of the heads", "none"),
        ("of the positions", "every score"),
        ("keys", "positions"),
    ],
)
def test_pieces_give_what_the_whole_gives(
    mask_kind: str,
    bias_kind: str,
    causal: bool,
    sizes_and_bytes: tuple[tuple[int, ...], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (batch, query_len, key_len, num_heads, key_heads, value_heads, d_k, d_v), limit = sizes_and_bytes
    monkeypatch.setattr(thresholds, "BYTES_OF_A_PIECE", limit)
    monkeypatch.setattr(thresholds, "MIN_PRODUCTS_IN_PIECES", 0)
    q = torch.randn(batch, query_len, num_heads, d_k).transpose(1, 2).bfloat16()
    k = torch.randn(batch, key_heads, key_len, d_k).bfloat16()
    v = torch.randn(batch, value_heads, key_len, d_v).bfloat16()
    sizes = (batch, num_heads, query_len, key_len)
    mask_of = PIECE_MASKS[mask_kind]
    alike: dict[str, Any] = {"causal": causal}
    alike["mask"] = None if mask_of is None else mask_of(sizes)
    if bias_kind != "none":
        alike["bias"] = torch.randn(sizes if bias_kind == "every score" else sizes[2:]).bfloat16()
    explained = explain_attention(q, k, v, **alike)
    assert explained.path == "written out in pieces"
    assert explained.kernel == "batched products"
    assert "products of some megabytes of weights" in explained.reason
    with torch.no_grad(), Recorder() as recorder:
        output = attention(q, k, v, **alike).output
    assert recorder.names.count("_softmax") > 1
    assert_same(output, attention(q, k, v, **alike, path="reference").output, kind="output")


@pytest.mark.parametrize(
    ("sizes", "causal", "in_pieces"),
    [
        # batch, length, heads, width
        ((4, 128, 4, 32), False, True),
        ((4, 127, 4, 32), False, False),  # fewer products than pay
        ((4, 128, 4, 31), False, False),
        ((8, 128, 4, 31), False, False),  # narrow heads
        ((1, 512, 4, 32), True, True),
        ((1, 513, 4, 32), True, False),  # half is masked: the kernel skips it
        ((1, 513, 4, 32), False, True),
    ],
)
def test_pieces_are_for_much_work_in_bfloat16_without_gradients(
    sizes: tuple[int, int, int, int], causal: bool, in_pieces: bool
) -> None:
    batch, length, heads, width = sizes
    q, k, v = (torch.randn(batch, heads, length, width, dtype=torch.bfloat16) for _ in range(3))
    explained = explain_attention(q, k, v, causal=causal)
    assert explained.path == ("written out in pieces" if in_pieces else "fused")
    assert explain_attention(q.float(), k.float(), v.float(), causal=causal).path == "fused"
    assert explain_attention(q, k, v, causal=causal, path="fast").path == "fused"
    assert explain_attention(q, k, v, causal=causal, path="reference").path == "written out"
    q.requires_grad_()
    assert explain_attention(q, k, v, causal=causal).path != "written out in pieces"
    with torch.no_grad():
        assert explain_attention(q, k, v, causal=causal).path == explained.path


def test_keys_the_kernel_cannot_read_are_explained_as_such() -> None:
    q, k, v = (torch.randn(2, 4, 8, 150).transpose(-2, -1) for _ in range(3))
    explained = explain_attention(q, k, v)
    with Recorder() as recorder:
        attention(q, k, v)
    assert recorder.kernel == explained.kernel == "math"
    assert "torch has only a kernel that holds the 2 × 4 × 150 × 150 weights" in explained.reason


def test_an_explanation_refuses_what_the_operation_refuses() -> None:
    q, k, v = make_inputs()
    with pytest.raises(ValueError, match="use path='auto' or 'reference'"):
        explain_attention(q, k, v, need_weights=True, path="fast")
    with pytest.raises(ValueError, match="cannot share 3 key heads"):
        explain_attention(q, k[:, :3], v)


def a_step(heads: tuple[int, int, int], widths: tuple[int, int]) -> Inputs:
    """One query over a long cache, with room for more behind its tokens."""
    q = torch.randn(2, heads[0], 1, widths[0])
    k = torch.randn(2, heads[1], 600, widths[0])[:, :, :500]
    v = torch.randn(2, heads[2], 600, widths[1])[:, :, :500]
    return Inputs(q, k, v)


@pytest.mark.parametrize("heads", [(8, 8, 8), (8, 2, 2), (8, 1, 1), (8, 1, 8), (8, 8, 1), (8, 2, 4)])
@pytest.mark.parametrize("widths", [(16, 16), (32, 16), (16, 32)])
def test_a_decoding_step_copies_neither_keys_nor_values(
    widths: tuple[int, int], heads: tuple[int, int, int]
) -> None:
    inputs = a_step(heads, widths)
    with torch.no_grad(), Recorder() as recorder:
        attention(*inputs, mask=torch.ones(2, 1, 1, 500, dtype=torch.bool), causal=True)
    assert recorder.largest <= 2 * 8 * 500  # the scores


@pytest.mark.parametrize("path", ["reference", "fast"])
def test_keys_that_are_the_values_are_not_copied(path: str) -> None:
    for num_heads in (1, 2, 8):
        q, k, _ = a_step((8, num_heads, 1), (32, 32))
        with torch.no_grad(), Recorder() as recorder:
            output = attention(q, k, k, path=path).output
        assert recorder.largest <= 2 * 8 * 500
        assert_same(output, attention(q, k, k.clone(), path=path).output, kind="exact")


@pytest.mark.parametrize("make_like", [lambda k: k, lambda k: k[..., :16]], ids=["one width", "two widths"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_long_texts_take_memory_linear_in_their_length(
    heads: tuple[int, int], make_like: Callable[[Tensor], Tensor]
) -> None:
    q, k = torch.randn(1, heads[0], 1024, 32), torch.randn(1, heads[1], 1024, 32)
    with torch.no_grad(), Recorder() as recorder:
        attention(q, k, make_like(k), causal=True)
    assert recorder.largest <= 4 * 1024 * 32


def test_pieces_hold_no_more_than_they_may() -> None:
    q = torch.randn(1, 8, 2048, 32, dtype=torch.bfloat16)
    with torch.no_grad(), Recorder() as recorder:
        attention(q, q, q)
    assert recorder.names.count("_softmax") == 16
    assert recorder.largest * q.element_size() <= thresholds.BYTES_OF_A_PIECE


@pytest.mark.parametrize(("heads", "widths"), SHAPES)
@pytest.mark.parametrize("query_len", [KEY_LEN, 1])
def test_a_device_other_than_the_cpu_is_given_shapes_that_fit(
    query_len: int, widths: tuple[int, int], heads: tuple[int, int, int]
) -> None:
    # There is no such device here but "meta", which computes shapes and nothing else.
    inputs = [t.detach().to("meta") for t in make_inputs(heads, widths, query_len, torch.float16)]
    for arguments in ({}, {"mask": torch.ones(BATCH, 1, 1, KEY_LEN, dtype=torch.bool, device="meta")}):
        explained = explain_attention(*inputs, **arguments)
        assert explained.path == "fused"
        grouped = {"grouped by rows"} if query_len == 1 else {"grouped by the kernel", "expanded"}
        if heads == (4, 4, 4):
            assert explained.heads == "one to one"
        elif heads[1] != heads[2] or (query_len > 1 and (arguments or widths[0] != widths[1])):
            assert explained.heads == "expanded"
        else:
            assert explained.heads in grouped - {"expanded"}
        output = attention(*inputs, **arguments).output
        assert output.shape == (BATCH, 4, query_len, widths[1])


def test_on_another_device_the_kernel_groups_heads_only_where_it_needs_no_mask() -> None:
    q, k, _ = (t.detach().to("meta") for t in make_inputs(GROUPED, dtype=torch.bfloat16))
    assert explain_attention(q, k, k, causal=True).heads == "grouped by the kernel"
    assert explain_attention(q[:, :, 2:], k, k, causal=True).heads == "expanded"
    assert explain_attention(q, k, k, bias=torch.ones(4, 1, 1, device="meta")).heads == "expanded"
    assert explain_attention(q.float(), k.float(), k.float()).heads == "expanded"


@pytest.mark.parametrize("special", [{"soft_cap": 2.0}, {"sinks": torch.tensor([0.5, -1.0])}])
def test_capped_scores_and_sinks_are_written_out_in_pieces_where_nothing_is_learned(
    special: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(2, 2, 9, 4) for _ in range(3))
    whole = attention(q, k, v, causal=True, **special)
    named = next(iter(special)).replace("_", " ")
    found = explain_attention(q, k, v, causal=True, **special)
    assert found.path == "written out"
    assert {"soft cap": "caps the scores", "sinks": "scores that move nothing"}[named] in found.reason
    monkeypatch.setattr("triptych.thresholds.BYTES_OF_A_PIECE", 128)
    assert explain_attention(q, k, v, causal=True, **special).path == "written out in pieces"
    assert_same(attention(q, k, v, causal=True, **special).output, whole.output, kind="output")
    assert explain_attention(q.requires_grad_(), k, v, causal=True, **special).path == "written out"
    with pytest.raises(ValueError, match=f"the fast path has no {named}"):
        attention(q, k, v, path="fast", **special)


def test_caps_and_sinks_that_do_not_fit_are_refused_with_their_numbers() -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"soft_cap is 0\.0"):
        attention(q, q, q, soft_cap=0.0)
    with pytest.raises(ValueError, match=r"sinks are \[3\], and there are 2 query heads"):
        attention(q, q, q, sinks=torch.zeros(3))
