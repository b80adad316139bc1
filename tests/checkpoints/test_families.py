"""Every family, against the model that `transformers` makes of it: the outputs of its attention layers."""

import contextlib
import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoints.oracle import has_experts, opened
from checkpoints.tiny_models import TINY, Tiny, most
from triptych.core.algebra.cost import writing_cost
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.weights import SIDES
from triptych.core.attention import MultiHeadAttention
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.family import families, family_of
from triptych.core.checkpoints.reading import LayerReader
from triptych.core.checkpoints.stored_layers import Site

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# Models that raise their scores to float32 for the softmax agree no better than that.
TOLERANCE = 2e-6


# Of each tiny model: its folder, the model, and where its random numbers ended. Making one takes longer than
# most of what is tried with it.
_MADE: dict[str, tuple[Path, Any, Tensor]] = {}
_PLACE = tempfile.TemporaryDirectory()


def made(name: str, folder: Path) -> Any:
    """A tiny model, saved in the folder and loaded from there, in float64."""
    key = f"{name}: {TINY[name]}"
    if key not in _MADE:
        place = Path(_PLACE.name) / str(len(_MADE))
        _MADE[key] = place, _make(TINY[name], place, falcon=name.startswith("falcon,")), torch.get_rng_state()
    place, model, state = _MADE[key]
    shutil.copytree(place, folder, dirs_exist_ok=True)
    torch.set_rng_state(state)
    return copy.deepcopy(model)


def _make(tiny: Tiny, folder: Path, *, falcon: bool) -> Any:
    torch.manual_seed(0)
    config = tiny.configured()
    model = getattr(transformers, tiny.model)(config)
    with torch.no_grad():  # what begins as 0 or 1 would hide what is done with it
        for parameter in model.parameters():
            if parameter.requires_grad:  # RoFormer's angles are no parameters of a model
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    # Falcon's "eager" adds the bias of ALiBi twice (transformers 5.23).
    how = {"attn_implementation": "sdpa" if falcon else "eager"}
    if has_experts(config):
        how["experts_implementation"] = "eager"  # the others have no float64
    return type(model).from_pretrained(folder, **how).double().eval()


def inputs(model: Any) -> dict[str, Tensor]:
    """Something for it to read."""
    ids = torch.randint(3, 40, (2, 9))
    kind = model.config.model_type
    if kind in ("vit", "dinov2", "beit", "dinov3_vit"):
        size = model.config.image_size
        return {
            "pixel_values": torch.randn(2, 3, *(size if isinstance(size, list) else (size, size))).double()
        }
    if kind == "siglip2_vision_model":
        return {
            "pixel_values": torch.randn(2, 9, 3 * 8 * 8).double(),
            "pixel_attention_mask": torch.ones(2, 9, dtype=torch.long),
            "spatial_shapes": torch.tensor([[3, 3], [3, 3]]),
        }
    if kind in ("longformer", "led"):
        ids = torch.randint(3, 40, (2, 16))  # a multiple of the largest window: nothing is padded
    if kind in ("clip", "siglip"):
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16).double()}
    if kind == "wav2vec2":
        return {"input_values": torch.randn(2, 80).double()}
    if kind == "perceiver":
        return {"inputs": torch.randn(2, 7, 16).double()}
    if kind == "whisper":
        return {"input_features": torch.randn(2, 8, 32).double(), "decoder_input_ids": ids}
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": torch.randint(3, 40, (2, 6))}
    if getattr(model.config, "add_cross_attention", False):
        return {"input_ids": ids, "encoder_hidden_states": torch.randn(2, 7, 24).double()}
    return {"input_ids": ids}


@contextlib.contextmanager
def running(model: Any) -> Iterator[None]:
    """Without gradients. XGLM and FSMT write the least number of a dtype into another one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if model.config.model_type == "xglm" else before)
    try:
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if model.config.model_type == "fsmt":
                patch.setattr(Tensor, "float", Tensor.double)
            yield
    finally:
        torch.set_default_dtype(before)


def maps_of(site: Site, checkpoint: Checkpoint) -> tuple[str, str, str]:
    """The modules that read the queries' input and the keys' input, and the one that gives the output."""
    spec = checkpoint.place(site).spec
    if spec.latent:
        has_latent = f"{site.module}.{spec.latent.q_down}.weight" in checkpoint.tensors.infos
        return (spec.latent.q_down if has_latent else spec.q), spec.latent.kv_down, spec.o
    return spec.qkv or spec.q, spec.qkv or spec.k, spec.o


def renamed(name: str) -> Iterator[str]:
    """A module's name in the file, and as this version of `transformers` has it in memory."""
    yield name
    yield name.removeprefix("model.")
    yield name.replace("language_model.model.", "model.language_model.")
    yield name.replace("backbone.", "model.")
    yield f"model.{name}"
    yield name.replace("model.", "model.language_model.", 1)
    new = name.replace("attention.attention.query", "attention.q_proj").replace(
        "attention.attention.key", "attention.k_proj"
    )
    new = new.replace("attention.output.dense", "attention.o_proj")
    yield new
    yield new.replace("encoder.layer.", "layers.")
    new = name.replace("encoder.layers.", "layers.").replace("mixer.", "attn.")
    yield new.replace("attn.out_proj", "self_attn.o_proj").replace("attn.Wqkv", "self_attn.q_proj")
    new = name.replace("encoder.layer.", "layers.").replace("attention.", "self_attn.")
    yield new.replace("qkv_proj", "q_proj")


def module_of(model: nn.Module, name: str) -> nn.Module:
    """The module that a tensor in the file belongs to."""
    modules = dict(model.named_modules())
    for candidate in renamed(name):
        if candidate in modules:
            return modules[candidate]
    ends = [own for own in modules if own and (own.endswith(f".{name}") or name.endswith(f".{own}"))]
    assert ends, f"no module {name} among {[m for m in modules if 'att' in m][:6]}"
    return modules[max(ends, key=len)]


def overheard(
    model: nn.Module, checkpoint: Checkpoint, given: dict[str, Tensor] | None = None
) -> dict[tuple[str, str], Tensor]:
    """What goes into and comes out of every attention layer."""
    heard: dict[tuple[str, str], Tensor] = {}

    def listen(site: Site, part: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            heard.setdefault((site.module, part), output if part == "out" else arguments[0])

        return hook

    def listen_to_all(site: Site) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            for part, tensor in zip(("x", "memory", "out"), (*arguments[:2], output[0]), strict=True):
                heard.setdefault((site.module, part), tensor)

        return hook

    for site in checkpoint.sites:
        names = maps_of(site, checkpoint)
        if any("*" in name for name in names):  # PyTorch's own, which calls no modules for its maps
            module_of(model, site.module).register_forward_hook(listen_to_all(site))
            continue
        for part, name in zip(("x", "memory", "out"), names, strict=True):
            if part == "memory" and checkpoint.lender(site) is not None:
                continue
            module_of(model, f"{site.module}.{name}").register_forward_hook(listen(site, part))
    given = inputs(model) if given is None else given
    if getattr(model.config, "model_type", "") == "fsmt":  # it masks no later tokens where it may keep keys
        given = {**given, "use_cache": False}  # type: ignore[dict-item]
    with running(model):
        model(**given)
    return heard


def in_batch(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 3 else tensor.view(2, -1, tensor.shape[-1])


def furthest_of_layers(
    model: nn.Module, checkpoint: Checkpoint, given: dict[str, Tensor] | None = None
) -> dict[Site, float]:
    """How far what we read of each layer, and a layer of ours made of it, are from the model's own output."""
    heard, found = overheard(model, checkpoint, given), dict[Site, float]()
    if getattr(model.config, "model_type", "") == "fsmt":  # which has the length first
        heard = {name: tensor.transpose(0, 1) for name, tensor in heard.items()}
    for site in checkpoint.sites:
        if (site.module, "out") not in heard:
            continue
        layer = checkpoint.read(site)
        memory = in_batch(heard[site.module, "memory"]) if site.kind == "cross" else None
        if layer.borrows is not None:
            memory = in_batch(heard[layer.borrows.module, "x"])
        x, expected = in_batch(heard[site.module, "x"]), in_batch(heard[site.module, "out"])
        x = x if len(x) == len(expected) else x.transpose(0, 1)  # Longformer has the length first
        outputs = [run_layer(layer.weights.to(torch.float64), x, memory)]
        if layer.borrows is None:  # which only a whole model has
            plain = layer.weights.without_norms().mapped(lambda tensor: tensor.double())
            with torch.no_grad():
                outputs.append(
                    MultiHeadAttention.from_weights(plain).eval()(x.double(), memory=memory).output
                )
        assert {output.shape for output in outputs} == {expected.shape}
        size = expected.abs().max()
        found[site] = max(float((output - expected).abs().max() / size) for output in outputs)
    return found


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a tiny model is, or is to be."""
    return functools.cache(lambda name: tmp_path_factory.mktemp("tiny"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TINY)
def test_the_output_of_every_attention_layer_is_the_models_own(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    model = made(name, folder_of(name))
    checkpoint = opened(folder_of(name))
    apart = furthest_of_layers(model, checkpoint)
    assert {site: far for site, far in apart.items() if not far < TOLERANCE} == {}
    unheard = {site.stack for site in checkpoint.sites if site not in apart}
    assert unheard == ({"vision"} if name == "gemma3" else set())  # no picture was shown
    assert apart


@pytest.mark.parametrize("name", most())
def test_what_is_read_of_a_layer_is_written_as_it_was_to_the_bit(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    if not any(folder_of(name).iterdir()):
        made(name, folder_of(name))
    checkpoint = opened(folder_of(name))
    for site in checkpoint.sites:
        stored = LayerReader(checkpoint.place(site), checkpoint.tensors).map
        ours = stored.read(lambda name, shape: checkpoint.tensors.read(name))
        assert {"o"} < ours.keys() == stored.parts
        written = dict(stored.write(ours))
        assert written.keys() == stored.names
        for of, tensor in written.items():
            assert tensor.dtype == checkpoint.tensors.infos[of].dtype
            assert torch.equal(tensor, checkpoint.tensors.read(of)), of


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TINY)
def test_the_map_of_one_head_is_that_of_its_layer_and_an_outline_has_its_shapes(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    if not any(folder_of(name).iterdir()):
        made(name, folder_of(name))
    checkpoint = opened(folder_of(name), mapped=True)
    for site in checkpoint.sites:
        layer, outline = checkpoint.read(site), checkpoint.outline(site)
        weights = layer.weights
        assert outline.cache_bytes == layer.cache_bytes
        assert writing_cost(outline.weights) == writing_cost(weights)
        assert outline.weights.semantics.beyond(()) == weights.semantics.beyond(())
        for side in SIDES:
            whole, shape = weights.multiplied(side), outline.weights.multiplied(side)
            assert (shape.weight.shape, shape.weight.dtype) == (whole.weight.shape, whole.weight.dtype)
            alone = checkpoint.place(site).spec.latent is None
            for head in range(weights.num_heads):
                found = checkpoint.read_map(site, side, head)
                assert (found is not None) == alone
                if found is not None:
                    copy = head * whole.copies // weights.num_heads
                    assert torch.equal(found.weight[0], whole.weight[copy])
                    assert (found.bias is None) == (whole.bias is None)
                    if found.bias is not None and whole.bias is not None:
                        assert torch.equal(found.bias[0], whole.bias[copy])


def test_layers_that_share_their_weights_come_as_the_model_uses_them(tmp_path: Path) -> None:
    config = TINY["albert in groups"].configured(num_hidden_layers=7, num_hidden_groups=3)
    model = transformers.AlbertModel(config).eval()
    model.save_pretrained(tmp_path)
    used: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(".attention"):
            module.register_forward_hook(lambda *_, name=name: used.append(name))
    model(torch.tensor([[5, 6, 7]]))
    checkpoint = opened(tmp_path)
    assert [place.site.module for place in checkpoint.layers] == used
    assert [place.number for place in checkpoint.layers] == [*range(14)]
    assert [site.numbers for site in checkpoint.sites][:2] == [(0, 2, 4), (1, 3, 5)]


def test_every_family_has_a_tiny_model() -> None:
    tried = {tiny.config.model_type for tiny in TINY.values()}
    for family in families():
        assert tried & set(family.model_types) or not family.attention or family.remote, family.name
        assert all(family_of(model_type) == family for model_type in family.model_types)
