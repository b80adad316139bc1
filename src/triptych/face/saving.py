"""A model written in the format that it came from, with its changes in the weights."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych.checkpoints.checkpoint import Checkpoint, OwnModel
from triptych.checkpoints.layer import AttentionSource
from triptych.checkpoints.models import changed_tensors
from triptych.errors import UsageError
from triptych.face.changes import Change, Steering, changed_copy
from triptych.face.opened import Opened
from triptych.files import write_folder
from triptych.models import write_model
from triptych.models.sites import attention_sites, with_attention
from triptych.rewriting.checkpoint import copy_run
from triptych.rewriting.formats import FolderFormat
from triptych.storage.copying import CERTIFICATE, CONFIG, FolderCopy, require_place


def save_unchanged(opened: Opened, target: Path) -> None:
    """Copy a model's files; a rewritten one with its certificate."""
    if opened.module is not None:
        if opened.module.architecture is not None and _recipe_of(opened) is None:
            raise UsageError(
                f"{opened.name} was read from a checkpoint, and has no format of its own to be saved in"
            )
        write_folder(_free(target), lambda folder: write_model(opened.module, folder))  # type: ignore[arg-type]
        return
    source = opened.files
    require_place(source.folder, target)
    if source.is_own or (source.folder / CERTIFICATE).is_file():
        write_folder(target, lambda folder: _copy(source.folder, folder))
        return
    with FolderCopy(source.path, target) as copy:
        copy.write_shards(lambda name: None)
        copy.write_beside({})
        copy.finish()


def save_changed(opened: Opened, changed: AttentionSource, changes: Sequence[Change], target: Path) -> None:
    """Write a changed model."""
    if opened.module is not None:
        raise UsageError(
            f"{opened.name} is a module in memory, and its changes have no files to be written into"
        )
    source = opened.attention
    touched = [
        (number, site)
        for number, site in enumerate(source.sites)
        if any(number in change.layers for change in changes)
    ]
    steering = [change for change in changes if isinstance(change, Steering)]
    require_place(opened.files.folder, target)
    if isinstance(source, OwnModel):
        new = with_attention(
            source.model, {site.module: changed.read(site).weights.without_norms() for _, site in touched}
        )
        new = changed_copy(new, (), attention_sites)
        for change in steering:
            change.into_weights(new)

        def fill(folder: Path) -> None:
            copy_run(opened.files.folder, folder)
            write_model(new, folder)

        write_folder(target, fill)
        return
    assert isinstance(source, Checkpoint)
    tensors: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    form = FolderFormat(source)
    for _, site in touched:
        read = source.read(site)
        written = form.written(read, changed.read(site).weights)
        tensors |= written.tensors
        settings |= written.settings
    if steering:
        steered = changed_copy(opened.model.model, (), attention_sites)
        for change in steering:
            change.into_weights(steered)
        tensors |= dict(changed_tensors(steered, source))
    with torch.no_grad(), FolderCopy(opened.files.path, target) as copy:
        copy.write_shards(tensors.get)
        copy.write_beside(settings)
        copy.finish()


def _recipe_of(opened: Opened) -> object:
    module = opened.module
    return getattr(module, "recipe", None) or getattr(module, "config", None)


def _free(target: Path) -> Path:
    if target.exists():
        raise UsageError(f"{target} exists: choose another name for the output, nothing is overwritten")
    return target


def _copy(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file():
            shutil.copyfile(path, target / path.name)


__all__ = ["CONFIG", "save_changed", "save_unchanged"]
