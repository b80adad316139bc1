"""Rewritten layers written back, in every family: read again they are the same, and `transformers` agrees."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from checkpoints.oracle import has_experts, opened
from checkpoints.test_families import inputs, made, running
from checkpoints.tiny_models import TINY
from edited import edited_tensors
from heads import with_semantics
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.norm_folding import fold_norm
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.fitted_weights import resizing, sizes_of
from triptych.core.checkpoints.stored_layers import AttentionLayer, Place
from triptych.core.storage.copying import FolderCopy
from triptych.rewriting.functions import (
    LayerToRewrite,
    PruneHeads,
    drop_key_bias,
    fold_value_bias,
    gauge_fix,
    merge_kv_heads,
    permute_heads,
    prune_heads,
    repeat_kv_heads,
    truncate,
)
from triptych.rewriting.writing import WrittenLayer, write_layer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

Writer = Callable[[Checkpoint, AttentionLayer], WrittenLayer]


class InDouble(TorchFunctionMode):
    """Models raise parts to float32: here these stay in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        swap = {torch.float32: torch.float64}
        args = tuple(swap.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: swap.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A tiny model of a family, and the folder where it is saved in float64."""
    found: dict[str, tuple[Any, Path]] = {}

    def save(name: str) -> tuple[Any, Path]:
        if name not in found:
            folder = tmp_path_factory.mktemp("tiny")
            model = made(name, folder / "first")
            model.save_pretrained(folder / "model")
            found[name] = loaded(model, folder / "model"), folder / "model"
        return found[name]

    return save


def loaded(model: Any, folder: Path) -> Any:
    how = {"attn_implementation": model.config._attn_implementation}
    if has_experts(model.config):
        how["experts_implementation"] = "eager"
    return type(model).from_pretrained(folder, **how).double().eval()


def outputs(model: Any, given: dict[str, Tensor]) -> Tensor:
    with running(model), InDouble():
        found = model(**given).to_tuple()
    return next(t for t in found if isinstance(t, Tensor) and t.is_floating_point())


def assert_models_agree(one: Any, other: Any) -> None:
    given = inputs(one)
    expected, found = outputs(one, given), outputs(other, given)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8 * float(expected.abs().max()))


def seen(layer: AttentionLayer, x: Tensor) -> Tensor:
    """A normalised input as the maps of a layer see it."""
    norm = layer.weights.norm
    if norm is None:
        return x
    return x * (norm.weight + norm.offset) + (0 if norm.bias is None else norm.bias)


def output(layer: AttentionLayer, weights: AttentionWeights | None = None) -> Tensor:
    """Of a layer, for the same random input every time; of weights in its place whose norm is folded."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(2, 7, layer.weights.d_model, generator=random, dtype=torch.float64)
    memory = None
    if layer.site.kind == "cross":
        memory = torch.randn(2, 5, layer.weights.k[0].d_in, generator=random, dtype=torch.float64)
    used = layer.weights if weights is None else weights
    folded = weights is not None and weights.norm is None
    return run_layer(used, x if folded else seen(layer, x), memory)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def written(folder: Path, target: Path, write: Writer) -> Checkpoint:
    """A checkpoint with all its layers written anew."""
    checkpoint = opened(folder)
    layers = [write(checkpoint, checkpoint.read(site)) for site in checkpoint.sites]
    tensors = {name: tensor for layer in layers for name, tensor in layer.tensors.items()}
    settings = {path: value for layer in layers for path, value in layer.settings.items()}
    with FolderCopy(folder, target) as copy:
        copy.write_shards(tensors.get)
        copy.write_beside(settings)
        copy.finish()
    return opened(target)


def exact(layer: AttentionLayer) -> tuple[AttentionWeights, list[int]]:
    """Every exact rewrite that the layer allows, one after the other, and where its heads were."""
    weights = layer.weights
    order = list(reversed(range(weights.num_heads)))
    steps: list[Callable[[AttentionWeights], Any]] = [
        drop_key_bias,
        fold_value_bias,
        fold_norm,
        partial(gauge_fix, forms=("ov",)),
        partial(gauge_fix, forms=("qk",)),
    ]
    for step in steps:
        try:
            weights = step(weights).weights
        except RewriteRefusedError:
            continue
    if not has_numbers_of_heads(layer):
        weights = permute_heads(weights, order).weights
        return weights, order
    return weights, order[::-1]


def has_numbers_of_heads(layer: AttentionLayer) -> bool:
    return layer.weights.semantics.positions in ("alibi", "relative", "disentangled")


LATENT = ("deepseek", "glm4_moe_lite", "youtu", "kimi_linear", "minicpm3")


def refuses_all(checkpoint: Checkpoint) -> bool:
    spec = checkpoint.place(checkpoint.sites[0]).spec
    return bool(spec.why_kept) and not spec.unwritten


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", TINY)
def test_every_exact_rewrite_written_back_leaves_the_model_as_it_was(
    name: str, saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, folder = saved(name)
    checkpoint = opened(folder)
    if refuses_all(checkpoint):
        layer = checkpoint.read(checkpoint.sites[0])
        assert write_layer(checkpoint, layer, layer.weights.to(torch.float64)).tensors == {}
        other = replace(layer.weights, q=tuple(anew(link) for link in layer.weights.q))
        with pytest.raises(RewriteRefusedError, match=r"latent|normalised after their map"):
            write_layer(checkpoint, layer, other)
        return
    expected = {}

    def rewrite(checkpoint: Checkpoint, layer: AttentionLayer) -> WrittenLayer:
        assert layer.weights.dtype == torch.float64
        expected[layer.site] = output(layer)
        if reason := checkpoint.place(layer.site).spec.unwritten:
            with pytest.raises(RewriteRefusedError, match=reason):
                write_layer(checkpoint, layer, exact(layer)[0])
            return write_layer(checkpoint, layer, layer.weights)
        assert write_layer(checkpoint, layer, layer.weights) == Unchanged()
        assert write_layer(checkpoint, layer, layer.weights.to(torch.float64)) == Unchanged()
        after, kept = exact(layer)
        # No positions keep its products of queries and keys from being factored anew.
        if name == "kimi_linear":
            with pytest.raises(RewriteRefusedError, match="through one latent and one rotary key"):
                write_layer(checkpoint, layer, after, kept=kept)
            return write_layer(checkpoint, layer, layer.weights)
        result = write_layer(checkpoint, layer, after, kept=kept)
        assert result.settings == {}
        assert result.tensors
        return result

    again = written(folder, tmp_path / "new", rewrite)
    for site in again.sites:
        layer = again.read(site)
        assert_same(output(layer), expected[site])
        assert all(t.is_contiguous() for t in layer.weights.tensors() if t.ndim == 1)
    assert_models_agree(model, loaded(model, tmp_path / "new"))


class Unchanged:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, WrittenLayer) and not other.tensors and not other.settings

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [name for name in TINY if not name.startswith((*LATENT, "gemma3n", "gemma4"))]
)
def test_weights_that_are_written_are_read_again(
    name: str, saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    expected = {}

    def scrambled(checkpoint: Checkpoint, layer: AttentionLayer) -> WrittenLayer:
        if checkpoint.place(layer.site).spec.unwritten:
            expected[layer.site] = layer.weights
            return write_layer(checkpoint, layer, layer.weights)
        free = {"o"} if layer.weights.semantics.clip is not None else {"q", "k", "v", "o"}
        free -= {"q", "k"} if layer.weights.semantics.positions == "disentangled" else set()
        chains = {
            side: tuple(anew(link) for link in layer.weights.chain(side))  # type: ignore[arg-type]
            for side in free
        }
        after = replace(layer.weights, **chains)  # type: ignore[arg-type]
        expected[layer.site] = after
        return write_layer(checkpoint, layer, after)

    again = written(saved(name)[1], tmp_path / "new", scrambled)
    for site in again.sites:
        found, wanted = list(again.read(site).weights.tensors()), list(expected[site].tensors())
        assert len(found) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def anew(link: Link) -> Link:
    bias = None if link.bias is None else torch.randn_like(link.bias)
    return replace(link, weight=torch.randn_like(link.weight), bias=bias)


def all_with(
    step: Callable[[AttentionWeights], Any], kept: Sequence[int] | None = None, *, same_sizes: bool = False
) -> Writer:
    def write(checkpoint: Checkpoint, layer: AttentionLayer) -> WrittenLayer:
        after = step(layer.weights).weights
        return write_layer(checkpoint, layer, after, kept=kept, same_sizes=same_sizes)

    return write


@pytest.mark.parametrize("name", ["llama", "falcon, groups", "gemma3, text", "phi3", "gpt_oss", "qwen2"])
def test_key_value_heads_are_repeated_and_merged_where_the_configuration_counts_them(
    name: str, saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, folder = saved(name)
    more = written(folder, tmp_path / "more", all_with(repeat_kv_heads))
    assert {more.read(site).weights.num_key_heads for site in more.sites} == {4}
    assert_models_agree(model, loaded(model, tmp_path / "more"))
    back = written(tmp_path / "more", tmp_path / "back", all_with(partial(merge_kv_heads, num_kv_heads=2)))
    assert {back.read(site).weights.num_key_heads for site in back.sites} == {2}
    assert_models_agree(model, loaded(model, tmp_path / "back"))


def test_fewer_key_value_heads_than_a_format_can_have_are_written_several_times(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    expected = {}

    def halved(checkpoint: Checkpoint, layer: AttentionLayer) -> WrittenLayer:
        weights = layer.weights
        (k,), (v,) = weights.k, weights.v
        k, v = (replace(link, weight=link.weight[:2], bias=link.bias[:2]) for link in (k, v))  # type: ignore[index]
        after = replace(weights, k=(k,), v=(v,))
        expected[layer.site] = output(layer, after)
        result = write_layer(checkpoint, layer, after)
        assert result.settings == {}
        return result

    again = written(saved("bart")[1], tmp_path / "new", halved)
    for site in again.sites:
        assert again.read(site).weights.num_key_heads == 4
        assert_same(output(again.read(site)), expected[site])


def test_more_key_value_heads_than_a_format_can_have_are_refused(
    saved: Callable[[str], tuple[Any, Path]],
) -> None:
    checkpoint = opened(saved("falcon, one key head")[1])
    layer = checkpoint.read(checkpoint.sites[0])
    with pytest.raises(RewriteRefusedError, match="4 key-value heads now, and the file has 1"):
        write_layer(checkpoint, layer, repeat_kv_heads(layer.weights).weights)


def test_narrower_heads_of_t5_have_another_d_kv(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, folder = saved("t5")
    step = partial(truncate, qk_rank=5, ov_rank=5)
    narrow = written(folder, tmp_path / "narrow", all_with(step))
    padded = written(folder, tmp_path / "padded", all_with(step, same_sizes=True))
    assert narrow.settings.value("d_kv") == 5
    assert padded.settings.value("d_kv") == 7
    checkpoint = opened(folder)
    for site in checkpoint.sites:
        before = checkpoint.read(site)
        assert_same(output(narrow.read(site)), output(before, step(before.weights).weights))
        assert_same(output(padded.read(site)), output(narrow.read(site)))
        assert sizes_of(narrow.read(site).weights).value_width == 5
    assert_models_agree(loaded(model, tmp_path / "narrow"), loaded(model, tmp_path / "padded"))
    found = resizing(checkpoint, checkpoint.sites[0], sizes_of(narrow.read(checkpoint.sites[0]).weights))
    assert found is not None
    assert found.settings == {"d_kv": 5}
    assert found.sites == checkpoint.sites


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neo", "opt", "perceiver", "vit", "smollm3"])
def test_narrower_heads_are_padded_where_their_width_follows_from_others(
    name: str, saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    expected = {}

    def narrow(checkpoint: Checkpoint, layer: AttentionLayer) -> WrittenLayer:
        after = truncate(layer.weights, ov_rank=2).weights
        try:
            after = truncate(after, qk_rank=2).weights
        except RewriteRefusedError:
            assert after.semantics.positions == "rotary"
        expected[layer.site] = output(layer, after)
        result = write_layer(checkpoint, layer, after)
        assert result.settings == {}
        return result

    checkpoint, again = opened(saved(name)[1]), written(saved(name)[1], tmp_path / "new", narrow)
    for site in again.sites:
        layer = again.read(site)
        assert sizes_of(layer.weights) == sizes_of(checkpoint.read(site).weights)
        assert torch.linalg.matrix_rank(layer.weights.W_V @ layer.weights.W_O).max() == 2
        assert_same(output(layer), expected[site])


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "smollm3", "gpt2", "olmo2", "bert", "t5", "stablelm"])
def test_heads_are_left_out_or_become_zero_maps(
    name: str, saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, folder = saved(name)
    step = PruneHeads(heads=(1,))

    def silenced(checkpoint: Checkpoint, layer: AttentionLayer) -> WrittenLayer:
        """The model to compare with: a head that moves nothing."""
        o = layer.weights.o[0].weight.clone()
        o[1] = 0
        return write_layer(checkpoint, layer, replace(layer.weights, o=(Link(o),)))

    def pruned(checkpoint: Checkpoint, layer: AttentionLayer) -> WrittenLayer:
        # Positions and norms with numbers of each head's own are no matter where heads keep their places.
        free = with_semantics(layer.weights, positions="none")
        done = step.apply(LayerToRewrite(layer.site.name, free))
        return write_layer(checkpoint, layer, done.weights, kept=done.record.kept)

    written(folder, tmp_path / "silent", silenced)
    again = written(tmp_path / "silent", tmp_path / "pruned", pruned)
    left = 3 if name in ("llama", "gpt_oss") else 4
    assert {again.read(site).weights.num_heads for site in again.sites} == {left}
    assert_models_agree(loaded(model, tmp_path / "silent"), loaded(model, tmp_path / "pruned"))


def test_another_scale_goes_into_the_queries(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, folder = saved("gpt2")

    def rescaled(checkpoint: Checkpoint, layer: AttentionLayer) -> WrittenLayer:
        return write_layer(checkpoint, layer, layer.weights.with_scale(3.0))

    again = written(folder, tmp_path / "scaled", rescaled)
    assert again.read(again.sites[0]).weights.scale != 3.0
    assert_models_agree(model, loaded(model, tmp_path / "scaled"))


def float16_llama(folder: Path, saved: Callable[[str], tuple[Any, Path]]) -> Checkpoint:
    model, _ = saved("llama, biases")
    type(model)(model.config).half().save_pretrained(folder)
    return opened(folder)


def test_numbers_are_cast_once_to_the_dtype_they_are_stored_in(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    checkpoint = float16_llama(tmp_path, saved)
    layer = checkpoint.read(checkpoint.sites[0])
    o = layer.weights.o[0].weight.double() * (1 + 1e-5)
    wide = layer.weights.to(torch.float64)
    assert write_layer(checkpoint, layer, replace(wide, o=(Link(o),))) == Unchanged()
    result = write_layer(checkpoint, layer, replace(wide, o=(Link(3 * o),)))
    (tensor,) = result.tensors.values()
    assert tensor.dtype == torch.float16
    assert torch.equal(tensor, (3 * o).flatten(0, 1).mT.to(torch.float16))


def refused(checkpoint: Checkpoint, after: Callable[[AttentionWeights], AttentionWeights], **how: Any) -> str:
    layer = checkpoint.read(checkpoint.sites[0])
    with pytest.raises(RewriteRefusedError) as refusal:
        write_layer(checkpoint, layer, after(layer.weights), **how)
    assert layer.site.name in str(refusal.value)
    return str(refusal.value)


def with_bias(weights: AttentionWeights) -> AttentionWeights:
    return replace(weights, o_bias=torch.ones(weights.d_model, dtype=weights.dtype))


def doubled(weights: AttentionWeights) -> AttentionWeights:
    return replace(weights, v=(replace(weights.v[0], weight=2 * weights.v[0].weight),))


def doubled_queries(weights: AttentionWeights) -> AttentionWeights:
    return replace(weights, q=(replace(weights.q[0], weight=2 * weights.q[0].weight),))


def test_what_a_format_cannot_hold_is_refused_with_the_reason(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    llama, bloom, clipped, deberta = (
        opened(saved(name)[1]) for name in ("llama", "bloom", "mpt, six heads, clipped", "deberta-v2")
    )
    assert "no place for one" in refused(llama, with_bias)
    assert "does not say which" in refused(llama, lambda w: prune_heads(w, [1], bounded=True).weights)
    assert "different heads" in refused(llama, lambda w: w, kept=[0, 1, 1, 2])
    assert "alibi positions" in refused(bloom, lambda w: w, kept=[1, 0, 2, 3])
    assert "clipped" in refused(clipped, doubled)
    assert "distances meet" in refused(deberta, doubled_queries)
    half = float16_llama(tmp_path, saved)
    assert "do not fit float16" in refused(
        half, lambda w: replace(w.to(torch.float64), o=(Link(w.o[0].weight.double() * 1e9),))
    )


def test_heads_whose_distances_share_their_maps_may_change_places(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, folder = saved("deberta-v2")
    order = [3, 0, 2, 1]
    permuted = partial(permute_heads, order=order)
    written(folder, tmp_path / "new", all_with(permuted, order))
    assert_models_agree(model, loaded(model, tmp_path / "new"))
    apart = opened(saved("deberta-v2, maps of its own")[1])
    assert "disentangled positions" in refused(apart, lambda w: permuted(w).weights, kept=order)


def test_a_norm_that_another_layer_reads_is_not_made_neutral(
    saved: Callable[[str], tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(saved("llama")[1])
    monkeypatch.setattr(Place, "norm_module", "model.norm")
    assert "decoder 1 reads it too" in refused(checkpoint, lambda w: fold_norm(w).weights)


def test_layers_that_must_keep_their_sizes_do(saved: Callable[[str], tuple[Any, Path]]) -> None:
    checkpoint = opened(saved("llama")[1])
    layer = checkpoint.read(checkpoint.sites[0])
    pruned = prune_heads(layer.weights, [1], bounded=True).weights
    result = write_layer(checkpoint, layer, pruned, kept=[0, 2, 3], same_sizes=True)
    assert result.settings == {}
    assert {name: checkpoint.tensors.infos[name].shape for name in result.tensors} == {
        name: tuple(tensor.shape) for name, tensor in result.tensors.items()
    }
    assert sorted(name.split(".")[-2] for name in result.tensors) == ["o_proj", "q_proj"]
    assert "is to keep" in refused(checkpoint, lambda w: repeat_kv_heads(w).weights, same_sizes=True)


def test_quantised_maps_are_refused_by_their_method(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("llama")[1], tmp_path / "quantised")
    at = "model.layers.0.self_attn.v_proj"
    with edited_tensors(folder) as tensors:
        shape = tensors[f"{at}.weight"].shape
        tensors[f"{at}.weight"] = torch.randint(-100, 100, shape, dtype=torch.int8)
        tensors[f"{at}.SCB"] = torch.rand(len(tensors[f"{at}.weight"]))
    checkpoint = opened(folder)
    layer = checkpoint.read(checkpoint.sites[0])
    assert write_layer(checkpoint, layer, layer.weights.to(torch.float64)) == Unchanged()
    assert "8-bit numbers with scales" in refused(checkpoint, lambda w: doubled(w.to(torch.float64)))
