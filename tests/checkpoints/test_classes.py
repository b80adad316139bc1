"""Every class that `transformers` has for a family's models, saved as it saves them."""

import copy
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.test_families import TOLERANCE, furthest_of_layers
from checkpoints.tiny_models import TINY
from edited import set_fields
from small_checkpoints import save_changed
from triptych.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.errors import DataError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# Half a model, as `model.encoder.save_pretrained(folder)` saves it: without the name of the half.
HALVES = ("Encoder", "Decoder", "Stack")
OTHER = {"encoder": "decoder", "decoder": "encoder"}
# What is refused, and why.
REFUSED = {
    "Llama4VisionModel": "its positions have two directions",
    "Qwen3VLVisionModel": "its positions are rows and columns",
}
# Its preprocessor, and not the model, makes the width of what is read.
LEFT_OUT = ("PerceiverForImageClassificationLearned",)


def classes_of(name: str) -> list[tuple[type[Any], Any]]:
    """The classes of a tiny model's family, each with its configuration."""
    tiny = TINY[name]
    own = tiny.config
    config = own(**tiny.settings)
    parts = [part for part in vars(config).values() if isinstance(part, transformers.PreTrainedConfig)]
    configs = {own: config, **{type(part): part for part in parts}}
    module = importlib.import_module(own.__module__.replace("configuration_", "modeling_"))
    classes = [thing for thing in vars(module).values() if inspect.isclass(thing)]
    found = [thing for thing in classes if thing.__module__ == module.__name__]
    models = [thing for thing in found if issubclass(thing, transformers.PreTrainedModel)]
    models = [m for m in models if "PreTrained" not in m.__name__ and "Pretrained" not in m.__name__]
    return [(m, configs[m.config_class or own]) for m in models if (m.config_class or own) in configs]


@pytest.mark.parametrize("stack", ["text", "vision"])
def test_half_of_a_clip_is_read_as_it_is_saved(stack: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = transformers.CLIPConfig(**TINY["clip"].settings)
    config = getattr(whole, f"{stack}_config")
    model = getattr(transformers, f"CLIP{stack.capitalize()}Model")
    model(config).save_pretrained(tmp_path)
    found = model.from_pretrained(tmp_path, attn_implementation="eager").double().eval()
    checkpoint = open_checkpoint(tmp_path)
    given = {"input_ids": torch.randint(3, 40, (2, 9))}
    if stack == "vision":
        given = {"pixel_values": torch.randn(2, 3, 16, 16).double()}
    assert isinstance(checkpoint, Checkpoint)
    assert [site.stack for site in checkpoint.sites] == [stack, stack]
    apart = furthest_of_layers(found, checkpoint, given)
    assert len(apart) == 2
    assert max(apart.values()) < TOLERANCE


def save_half(name: str, half: str, folder: Path) -> Any:
    """The encoder or the decoder of a tiny model, saved alone and loaded from there, in float64."""
    torch.manual_seed(0)
    config = TINY[name].configured()
    whole = getattr(transformers, TINY[name].model)(config)
    saved = getattr(getattr(whole, whole.base_model_prefix, whole), half)
    save_changed(saved, folder, 0.1)
    kept = type(saved).from_pretrained(folder, attn_implementation="eager").double().eval()
    held = kept.state_dict()
    assert all(torch.equal(held[key], value.double()) for key, value in saved.state_dict().items())
    return kept


@pytest.mark.parametrize(
    ("name", "half"),
    [
        *((name, half) for name in ("bart", "whisper", "marian", "t5, far", "led") for half in OTHER),
        ("opt", "decoder"),
        ("dinov2", "encoder"),
    ],
)
def test_half_of_a_model_saved_alone_is_read_as_that_half(name: str, half: str, tmp_path: Path) -> None:
    model = save_half(name, half, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    given: dict[str, Any] = {"input_ids": torch.randint(3, 40, (2, 12))}
    if name == "whisper" and half == "encoder":
        given = {"input_features": torch.randn(2, 8, 32).double()}
    elif name == "dinov2":
        given = {"hidden_states": torch.randn(2, 5, 24).double()}
    both = half == "decoder" and name != "opt"
    if both:
        given["encoder_hidden_states"] = torch.randn(2, 7, 24).double()
    assert isinstance(checkpoint, Checkpoint)
    assert {(site.stack, site.kind) for site in checkpoint.sites} == {
        (half, "self" if half == "encoder" else "causal"),
        *([("decoder", "cross")] if both else []),
    }
    assert checkpoint.absent == (() if name in ("opt", "dinov2") else (OTHER[half],))
    apart = furthest_of_layers(model, checkpoint, given)
    assert apart.keys() == {*checkpoint.sites}
    assert max(apart.values()) < TOLERANCE


def test_half_of_a_model_that_says_it_is_the_other_half_is_refused(tmp_path: Path) -> None:
    save_half("bart", "encoder", tmp_path)
    set_fields(tmp_path / "config.json", architectures=["BartDecoder"])
    with pytest.raises(DataError, match="are of the encoder of BART, and architectures says BartDecoder"):
        open_checkpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", {TINY[name].config: name for name in TINY}.values())
def test_what_every_class_of_a_family_saves_is_read(name: str, tmp_path: Path) -> None:
    refused, tried = {}, 0
    for model, config in classes_of(name):
        if model.__name__ in LEFT_OUT:
            continue
        folder = tmp_path / model.__name__
        try:
            model(copy.deepcopy(config)).save_pretrained(folder)
        except (ValueError, AttributeError):  # it wants other sizes than this configuration has
            continue
        tried += 1
        try:
            checkpoint = open_checkpoint(folder)
            for site in checkpoint.sites:
                checkpoint.read(site)
        except DataError as error:
            if REFUSED.get(model.__name__, "?") not in str(error):
                refused[model.__name__] = str(error)
    assert not refused
    assert tried
