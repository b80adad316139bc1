"""The task of a text for the language model of a checkpoint.

The run folder is a checkpoint of the same family in float32: `transformers` reads `config.json`,
`model.safetensors` and the tokenizer's files. The other files of a run lie next to them.
"""

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

import torch

from triptych.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.core.checkpoints.source import Source, find_source, is_own_config
from triptych.core.checkpoints.stored_models import (
    changed_tensors,
    load_language_model,
    tie_shared,
    why_not_written,
)
from triptych.core.models import (
    AnyModel,
    EncoderDecoder,
    LanguageModel,
    find_device,
    write_weights,
)
from triptych.core.storage import (
    CERTIFICATE,
    CONFIG,
    SAFETENSORS,
    names_beside,
)
from triptych.errors import ConfigurationWarning, DataError, UsageError
from triptych.files import write_text
from triptych.printable import printable
from triptych.running.text import load_tokenizer
from triptych.training.choices import fit_continued_training, say_choices
from triptych.training.folder import Prepared, holds_run, settings
from triptych.training.language import TextOfRun, TextTask, prepared_text
from triptych.training.progress import Display
from triptych.training.recipe import ContinuedRecipe
from triptych.training.state import RUN_FILES, save_or_explain
from triptych.training.task import StepShape
from triptych.untrusted import LONGEST_JSON, read_json, read_limited

_TOKENIZER_JSON = "tokenizer.json"
# Files of the original run left out of a copy.
_NOT_TAKEN = {*RUN_FILES["."], CERTIFICATE} - {_TOKENIZER_JSON}
_DTYPE = ("dtype", "torch_dtype")

ModelT = TypeVar("ModelT", LanguageModel, EncoderDecoder)


@final
@dataclass(frozen=True)
class CopiedCheckpoint:
    """A checkpoint of another library to be copied into the folder of a run, in float32."""

    checkpoint: Checkpoint
    config: str  # `config.json` of the run's folder
    files: Path  # folder of its other files

    @classmethod
    def open(cls, source: Source, path: Path, *, is_new: bool) -> "CopiedCheckpoint":
        """Open the checkpoint of a new run, or the copy in the folder of a started run."""
        files = source.settings_folder
        checkpoint = _open_quietly(path if path.is_file() else files)
        if not is_new:
            config = read_limited(files / CONFIG, LONGEST_JSON).decode()
            return cls(checkpoint, config, files)
        if why := why_not_written(checkpoint):
            raise DataError(f"{source.name} cannot be trained further: {why}")
        record = read_json(files / CONFIG)
        wide = {key: "float32" for key in _DTYPE if key in record}
        config = json.dumps({**record, **wide}, indent=2) + "\n"
        return cls(checkpoint, config, files)

    def begin(self, model: AnyModel, folder: Path) -> None:
        """Copy the checkpoint into the folder of a new run."""
        del model
        _copy_beside(self.files, folder)
        write_text(folder / CONFIG, self.config)
        tensors = self.checkpoint.tensors
        stored = {name: tensors.read(name) for name in tensors.infos}
        wide = {
            name: t.float() if t.is_floating_point() else t
            for name, t in stored.items()
        }
        write_weights(wide, folder / SAFETENSORS)

    def trainable(self, model: ModelT) -> ModelT:
        """Return the checkpoint's model with its shared tables tied."""
        for parameter in model.parameters():  # some are mapped from a file
            parameter.data = parameter.data.contiguous()
        tie_shared(model, self.checkpoint)
        return model


@final
class ContinuedTask(TextTask[ContinuedRecipe]):
    """Prediction of tokens by the model of a checkpoint, whose tokenizer reads the text."""

    from_checkpoint = True

    def prepare(
        self, base: Path, display: Display, folder: Path | None = None
    ) -> Prepared:
        recipe = self.recipe
        path = base / recipe.model.checkpoint if folder is None else folder
        source = find_source(path if path.exists() else recipe.model.checkpoint)
        read = _load_quietly(source)
        files = source.settings_folder
        tokenizer = load_tokenizer(files, vocab_size=read.vocab_size)
        if folder is None:
            _require_task(recipe, source.name, read)
        copied = CopiedCheckpoint.open(source, path, is_new=folder is None)
        if folder is None:
            family = copied.checkpoint.family.name
            display.say(
                f"going on with {source.name}: {family}, {tokenizer.vocab_size:,} tokens"
            )
        text = TextOfRun(recipe, base)
        shards = text.shards(tokenizer, display)
        if folder is None:
            recipe = _fit_recipe(
                recipe, source.name, read, shards[0].num_tokens, display
            )
        return prepared_text(
            *(recipe, self.prediction.masks, text, tokenizer, shards),
            lambda: copied.trainable(read),
            copied.begin,
            copied.config,
            publish=publish_tensors,
            from_checkpoint=True,
        )

    def fitted_to(self, length: int, device: str) -> ContinuedRecipe:
        raise UsageError(
            "plan makes the model of a recipe, and model.checkpoint names one that exists: write its "
            "sizes under [model] in its place"
        )

    def make_model(self, source_size: int, target_size: int) -> LanguageModel:
        raise UsageError(
            "a model that goes on from a checkpoint has its sizes: hold seconds, or nothing"
        )

    def step_shape(self) -> StepShape:
        raise AssertionError(
            "`fitted_to` refuses a recipe with a checkpoint before its step is counted"
        )

    def _describe_model(self) -> str:
        model = self.recipe.model
        return f"begun as\n`{printable(model.checkpoint)}`, in its format, context {model.context}"


def _fit_recipe(
    recipe: ContinuedRecipe,
    name: str,
    model: LanguageModel,
    num_tokens: int,
    display: Display,
) -> ContinuedRecipe:
    """Choose missing keys of the recipe for the text and the model."""
    given = recipe
    device = find_device(recipe.training.device).type
    longest = model.max_tokens
    recipe = fit_continued_training(
        recipe, num_tokens, device, model.architecture.d_model, longest
    )
    say_choices(given, recipe, f"{num_tokens:,} tokens", display)
    if longest is not None and recipe.model.context > longest:
        given_context = f"model.context is {recipe.model.context}"
        raise UsageError(
            f"{given_context}, and {name} has {longest} positions: give no more"
        )
    return recipe


def goes_on(folder: Path) -> bool:
    """Return True if a folder is a run from a checkpoint."""
    return holds_run(folder) and not is_own_config(settings(folder))


def copy_checkpoint(folder: Path, target: Path) -> None:
    """Copy the checkpoint from a run's folder: weights, configuration, tokenizer."""
    _copy_beside(folder, target)
    for name in (CONFIG, SAFETENSORS):
        shutil.copyfile(folder / name, target / name)


def publish_tensors(model: AnyModel, path: Path) -> None:
    """Write a model's weights into a run's folder, under the tensor names of its family."""
    checkpoint = _open_quietly(path.parent)
    tensors = {name: checkpoint.tensors.read(name) for name in checkpoint.tensors.infos}
    save_or_explain(
        {**tensors, **dict(changed_tensors(model, checkpoint))}, path, {"format": "pt"}
    )


def _load_quietly(source: Source) -> LanguageModel:
    with warnings.catch_warnings():  # `_open_quietly` opens the checkpoint again
        warnings.simplefilter("ignore", ConfigurationWarning)
        return load_language_model(source, dtype=torch.float32)


def _open_quietly(path: Path) -> Checkpoint:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigurationWarning)
        checkpoint = open_checkpoint(path, mapped=True)
    assert isinstance(checkpoint, Checkpoint), (
        "runs of ours are refused when they are read"
    )
    return checkpoint


def _require_task(recipe: ContinuedRecipe, name: str, model: LanguageModel) -> None:
    """Raise an error unless the model can learn the recipe's task."""
    kind = model.architecture.kind
    head = model.head
    if kind != recipe.kind:
        needed = f"task is {recipe.task!r}: it needs a model of another kind"
        raise UsageError(f"{needed}, and {name} is one of kind {kind!r}")
    if head is None or head.config.outputs is not None:
        raise UsageError(
            f"{name} predicts no tokens: give a checkpoint with the head that does"
        )


def _copy_beside(source: Path, folder: Path) -> None:
    """Copy a checkpoint's files other than weights, such as the tokenizer's."""
    for name in names_beside(source)[1]:
        if "/" not in name and name not in _NOT_TAKEN:
            shutil.copyfile(source / name, folder / name)
