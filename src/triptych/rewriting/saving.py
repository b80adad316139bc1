"""Saving of a model in its original format, with its changes in its weights."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.module_layers import ModuleLayers
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_models import changed_tensors
from triptych.core.models import attention_sites, with_attention, write_model
from triptych.core.storage import (
    CERTIFICATE,
    FolderCopy,
    require_new_folder,
)
from triptych.errors import UsageError
from triptych.files import write_folder
from triptych.rewriting.folder_formats import FolderFormat
from triptych.rewriting.whole_checkpoint import copy_run, leave_out_certificate
from triptych.running.changing import (
    Steering,
    changed_copy,
)
from triptych.running.opened_source import Opened
from triptych.running.text import copy_tokenizer


def save(opened: Opened, target: Path) -> Path:
    """Write a model, with its changes in its weights, in its source's format."""
    if opened.why_not_saved:
        raise UsageError(opened.why_not_saved)
    if opened.changes:
        _save_changed(opened, target)
    else:
        _save_unchanged(opened, target)
    return target


@contextmanager
def files_of(opened: Opened) -> Iterator[Source]:
    """Yield the files that a rewrite reads; a changed model, or a module in memory, is saved to be read."""
    before = opened.unchanged
    if before is opened and opened.source.module is None:
        yield opened.files
        return
    with TemporaryDirectory(prefix="triptych-") as place:
        saved = Path(place, "model")
        save(opened, saved)
        if opened.source.module is None:
            source = before.files.at(saved)
        else:
            if opened.source.tokenizer is not None and not opened.why_not_run:
                before.plain_reader.save_tokenizers(saved)
            source = find_source(saved)
            source.where = f"{opened.name}/config.json"
        # Messages and the certificate name the model with its changes, not the temporary folder.
        source.name = ", ".join(
            (opened.name, *(change.words for change in opened.changes))
        )
        yield source


def _save_unchanged(opened: Opened, target: Path) -> None:
    """Copy a model's files, including the certificate of a rewritten model."""
    module = opened.source.module
    if module is not None:
        if target.exists():
            raise UsageError(
                f"{target} exists: choose another name for the output, nothing is overwritten"
            )
        write_folder(target, partial(write_model, module))
        return
    source = opened.files
    require_new_folder(source.folder, target)

    def copy(folder: Path) -> None:
        for path in source.folder.iterdir():
            if path.is_file():
                shutil.copyfile(path, folder / path.name)

    # A certificate lists the hash of the tokenizer's files.
    is_certified = (source.folder / CERTIFICATE).is_file()
    if is_certified and source.tokenizer is not None:
        raise UsageError(
            f"{opened.name} was rewritten, and its certificate is of the files with their own tokenizer: "
            "save a model that was loaded without tokenizer="
        )
    if source.is_own or is_certified:
        write_folder(target, copy)
        return
    with FolderCopy(source.path, target) as made:
        made.write_shards(lambda name: None)
        made.write_beside({})
        _write_tokenizer(source, made.folder)
        made.finish()


def _save_changed(opened: Opened, target: Path) -> None:
    """Write a changed model."""
    if opened.source.module is not None:
        raise UsageError(
            f"{opened.name} is a module in memory, and its changes have no files to be written into"
        )
    changed = opened.attention
    changes = opened.changes
    source = opened.unchanged.attention
    # Layers sharing weights have equal changes (`why_not_saved`).
    touched = dict.fromkeys(
        place.site
        for number, place in enumerate(source.layers)
        if any(number in change.layers for change in changes)
    )
    steering = [change for change in changes if isinstance(change, Steering)]
    require_new_folder(opened.files.folder, target)
    if isinstance(source, ModuleLayers):
        new = with_attention(
            source.model,
            {
                site.module: changed.read(site).weights.without_norms()
                for site in touched
            },
        )
        new = changed_copy(new, (), attention_sites)
        for change in steering:
            change.into_weights(new)

        def fill(folder: Path) -> None:
            copy_run(opened.files.folder, folder)
            leave_out_certificate(folder)
            write_model(new, folder)

        write_folder(target, fill)
        return
    assert isinstance(source, Checkpoint)
    tensors: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    form = FolderFormat(source)
    for site in touched:
        read = source.read(site)
        written = form.written(read, changed.read(site).weights)
        tensors |= written.tensors
        settings |= written.settings
    if steering:
        steered = changed_copy(opened.plain_reader.model, (), attention_sites)
        for change in steering:
            change.into_weights(steered)
        tensors |= dict(changed_tensors(steered, source))
    with torch.no_grad(), FolderCopy(opened.files.path, target) as copy:
        copy.write_shards(tensors.get)
        copy.write_beside(settings)
        _write_tokenizer(opened.files, copy.folder)
        leave_out_certificate(copy.folder)
        copy.finish()


def _write_tokenizer(source: Source, folder: Path) -> None:
    """Replace the tokenizer of the files by the tokenizer given when the model was loaded, if any."""
    if source.tokenizer is not None:
        copy_tokenizer(source.tokenizer, folder)
