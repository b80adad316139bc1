"""The operation: its two paths against each other, against NumPy and against torch."""

import inspect
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tolerances import assert_same
from triptych.attention import attention, causal_mask

BATCH, KEY_LEN = 3, 6
MASKS = ("none", "padding", "random", "with blind rows")
WIDTHS = ((8, 8), (8, 12), (8, 4))
HEADS = ((4, 4), (4, 2), (4, 1))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def make_inputs(
    heads: tuple[int, int] = (4, 4),
    widths: tuple[int, int] = (8, 8),
    query_len: int = KEY_LEN,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    (num_heads, num_kv_heads), (d_k, d_v) = heads, widths
    shapes = (
        (BATCH, num_heads, query_len, d_k),
        (BATCH, num_kv_heads, KEY_LEN, d_k),
        (BATCH, num_kv_heads, KEY_LEN, d_v),
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
        mask[:, :, -1] = False
    return mask


def whole_mask(mask: Tensor | None, causal: bool, query_len: int, num_heads: int = 4) -> Tensor:
    """The mask and the triangle as one array."""
    allowed = torch.ones(BATCH, num_heads, query_len, KEY_LEN, dtype=torch.bool)
    if mask is not None:
        allowed = allowed & mask
    return allowed & causal_mask(query_len, KEY_LEN) if causal else allowed


def gradients(output: Tensor, upstream: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, upstream)


def equation_1(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Attention one query at a time, over the keys that it may see."""
    batch, num_heads, query_len, d_k = q.shape
    group_size = num_heads // k.shape[1]
    output = np.zeros((batch, num_heads, query_len, v.shape[-1]))
    weights = np.zeros((batch, num_heads, query_len, k.shape[2]))
    for b, h, i in np.ndindex(batch, num_heads, query_len):
        seen = np.flatnonzero(allowed[b, h, i])
        if len(seen) == 0:
            continue
        scores = np.array([q[b, h, i] @ k[b, h // group_size, j] for j in seen]) / np.sqrt(d_k)
        powers = np.exp(scores - scores.max())
        weights[b, h, i, seen] = powers / powers.sum()
        output[b, h, i] = weights[b, h, i] @ v[b, h // group_size]
    return output, weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("query_len", [KEY_LEN, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", MASKS)
def test_both_paths_give_the_same_outputs_and_gradients(
    mask_kind: str,
    causal: bool,
    query_len: int,
    widths: tuple[int, int],
    heads: tuple[int, int],
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", ["reference", "fast"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_that_may_see_nothing_gives_exact_zeros_and_finite_gradients(
    causal: bool, path: str, dtype: torch.dtype
) -> None:
    inputs = make_inputs(dtype=dtype)
    mask = make_mask("with blind rows", KEY_LEN)
    output = attention(*inputs, mask=mask, causal=causal, path=path).output
    blind = ~whole_mask(mask, causal, KEY_LEN).any(dim=-1)
    assert blind.any()
    assert (output[blind] == 0).all()
    assert (output[~blind] != 0).any(dim=-1).all()
    of_q, of_k, of_v = gradients(output, torch.randn_like(output), inputs)
    assert all(gradient.isfinite().all() for gradient in (of_q, of_k, of_v))
    assert (of_q[blind] == 0).all()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("query_len", [KEY_LEN, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", MASKS)
def test_both_paths_compute_equation_1(
    mask_kind: str, causal: bool, query_len: int, widths: tuple[int, int], heads: tuple[int, int]
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


@pytest.mark.parametrize("path", ["reference", "fast", "auto"])
@pytest.mark.parametrize("mask_kind", ["none", "padding", "random"])
def test_every_path_agrees_with_torch_in_float64(mask_kind: str, path: str) -> None:
    inputs = make_inputs(widths=(8, 12))
    mask = make_mask(mask_kind, KEY_LEN)
    ours = attention(*inputs, mask=mask, path=path).output
    torchs = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert_same(ours, torchs, kind="output")
    upstream = torch.randn_like(ours)
    for one, other in zip(
        gradients(ours, upstream, inputs), gradients(torchs, upstream, inputs), strict=True
    ):
        assert_same(one, other, kind="gradient")


def test_causal_attention_agrees_with_torchs_own_flag() -> None:
    inputs = make_inputs()
    ours = attention(*inputs, causal=True, path="reference").output
    assert_same(ours, F.scaled_dot_product_attention(*inputs, is_causal=True), kind="output")


@pytest.mark.parametrize("path", ["reference", "fast"])
def test_the_scale_given_multiplies_the_scores(path: str) -> None:
    q, k, v = make_inputs()
    scaled = attention(q, k, v, scale=0.5, path=path).output
    assert_same(scaled, attention(q * (0.5 * 8**0.5), k, v, path=path).output, kind="output")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", MASKS)
def test_asking_for_the_weights_changes_nothing(mask_kind: str, causal: bool) -> None:
    inputs = make_inputs()
    mask = make_mask(mask_kind, KEY_LEN)
    with_weights = attention(*inputs, mask=mask, causal=causal, need_weights=True)
    reference = attention(*inputs, mask=mask, causal=causal, path="reference")
    assert with_weights.weights is not None
    assert reference.weights is None
    assert_same(with_weights.output, reference.output, kind="exact")
    with torch.no_grad():  # where "auto" takes the fast path
        auto = attention(*inputs, mask=mask, causal=causal)
    assert_same(with_weights.output.detach(), auto.output, kind="output")


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
    many = torch.stack([attention(q, k, v, dropout=0.3).output for _ in range(4000)])
    error = (many.mean(dim=0) - attention(q, k, v).output).abs() / (many.std(dim=0) / 4000**0.5)
    assert error.max() < 6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_of_weights_sum_to_one_or_to_zero_where_nothing_is_seen(
    dtype: torch.dtype, mask_kind: str, causal: bool
) -> None:
    mask = make_mask(mask_kind, KEY_LEN)
    weights = attention(*make_inputs(dtype=dtype), mask=mask, causal=causal, need_weights=True).weights
    assert weights is not None
    allowed = whole_mask(mask, causal, KEY_LEN)
    assert (weights[~allowed] == 0).all()
    assert_same(weights.sum(dim=-1), allowed.any(dim=-1).to(dtype), kind="output")


@pytest.mark.parametrize("query_len", [KEY_LEN, 2])
def test_causal_weights_never_reach_past_the_querys_own_position(query_len: int) -> None:
    weights = attention(*make_inputs(query_len=query_len), causal=True, need_weights=True).weights
    assert weights is not None
    assert_same(weights, weights.tril(KEY_LEN - query_len), kind="exact")
    assert (weights[..., 0] > 0).all()
    assert (weights.diagonal(KEY_LEN - query_len, -2, -1) > 0).all()


def test_a_later_key_cannot_move_an_earlier_output() -> None:
    q, k, v = (t.detach() for t in make_inputs())
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[:, :, -1] += 1
    changed_v[:, :, -1] += 1
    for path in ("reference", "fast"):
        before = attention(q, k, v, causal=True, path=path).output
        after = attention(q, changed_k, changed_v, causal=True, path=path).output
        assert_same(after[:, :, :-1], before[:, :, :-1], kind="exact")
        assert not torch.equal(after[:, :, -1], before[:, :, -1])


def refuse(**changes: object) -> str:
    """The message of a refusal, where the shape checker of the tests does not get there first."""
    arguments = {**make_inputs()._asdict(), **changes}
    with pytest.raises(ValueError, match=r"\w") as refusal:
        inspect.unwrap(attention)(**arguments)
    return str(refusal.value)


def test_a_mask_that_is_not_boolean_is_refused() -> None:
    assert refuse(mask=torch.zeros(KEY_LEN, KEY_LEN)) == (
        "the mask is torch.float32: it must be boolean, True = may attend"
    )


def test_queries_and_keys_of_different_widths_are_refused_with_both_numbers() -> None:
    assert "queries have width 8 and keys 6" in refuse(k=torch.randn(BATCH, 4, KEY_LEN, 6))


@pytest.mark.parametrize("shape", [(BATCH, 4, KEY_LEN + 1, 8), (BATCH, 2, KEY_LEN, 8), (1, 4, KEY_LEN, 8)])
def test_keys_and_values_that_do_not_pair_up_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    message = refuse(v=torch.randn(shape))
    assert f"keys [3, 4, {KEY_LEN}, 8]" in message
    assert f"values {list(shape)}" in message


def test_heads_that_cannot_be_grouped_are_refused_with_both_numbers() -> None:
    three = torch.randn(BATCH, 3, KEY_LEN, 8)
    assert "4 query heads cannot share 3 key-value heads" in refuse(k=three, v=three)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 1.5])
def test_a_dropout_out_of_range_is_refused_with_its_value(dropout: float) -> None:
    assert f"dropout is {dropout}" in refuse(dropout=dropout)


@pytest.mark.parametrize("request_", [{"need_weights": True}, {"dropout": 0.1}])
def test_the_fast_path_refuses_what_only_the_reference_path_can_do(request_: dict[str, object]) -> None:
    assert "use path='auto' or 'reference'" in refuse(path="fast", **request_)
