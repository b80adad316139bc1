"""Every class that `transformers` has for a family's models, saved as it saves them."""

import copy
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.test_families import TOLERANCE, in_batch, overheard
from checkpoints.tiny_models import TINY
from triptych.algebra.function import attend
from triptych.checkpoints.checkpoint import open_checkpoint
from triptych.errors import DataError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# Half a model by itself, which no class for users saves: its names lack the word that tells the halves apart.
HALVES = ("Encoder", "Decoder", "Stack")
# Its preprocessor, and not the model, makes the width of what is read.
LEFT_OUT = ("PerceiverForImageClassificationLearned",)


def classes_of(name: str) -> list[tuple[type[Any], Any]]:
    """The classes of a tiny model's family, each with its configuration."""
    tiny = TINY[name]
    own = getattr(transformers, tiny.config)
    config = own(**tiny.settings)
    configs = {own: config}
    configs |= {
        type(part): part for part in vars(config).values() if isinstance(part, transformers.PreTrainedConfig)
    }
    module = importlib.import_module(own.__module__.replace("configuration_", "modeling_"))
    found = [
        thing
        for thing in vars(module).values()
        if inspect.isclass(thing) and thing.__module__ == module.__name__
    ]
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
    heard = overheard(found, checkpoint, given)
    assert [site.stack for site in checkpoint.sites] == [stack, stack]
    for site in checkpoint.sites:
        layer = checkpoint.read(site)
        x, expected = in_batch(heard[site.module, "x"]), in_batch(heard[site.module, "out"])
        apart = (attend(layer.weights.to(torch.float64), layer.scoring, x) - expected).abs().max()
        assert apart / expected.abs().max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", {TINY[name].config: name for name in TINY}.values())
def test_what_every_class_of_a_family_saves_is_read(name: str, tmp_path: Path) -> None:
    refused, tried = {}, 0
    for model, config in classes_of(name):
        if model.__name__.endswith(HALVES) or model.__name__ in LEFT_OUT:
            continue
        folder = tmp_path / model.__name__
        try:
            model(copy.deepcopy(config)).save_pretrained(folder)
        except ValueError:  # it wants other sizes than this configuration has
            continue
        tried += 1
        try:
            checkpoint = open_checkpoint(folder)
            for site in checkpoint.sites:
                checkpoint.read(site)
        except DataError as error:
            refused[model.__name__] = str(error)
    assert not refused
    assert tried
