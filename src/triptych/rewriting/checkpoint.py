"""Rewrite the attention of a checkpoint: plan, write to a new folder, and certify."""

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from triptych.checkpoints.checkpoint import Checkpoint, OwnModel, open_checkpoint
from triptych.checkpoints.family import Family, family_of
from triptych.checkpoints.layer import AttentionSource, Site
from triptych.checkpoints.source import Source, find_source
from triptych.errors import DataError
from triptych.files import file_hash, write_bytes, write_folder
from triptych.models.storage import write_model
from triptych.opening import TextModel, Window, read_whole_text
from triptych.printable import printable
from triptych.progress import Progress
from triptych.rewriting.certificate import (
    MODEL_CARD,
    Certificate,
    EndToEnd,
    LayerRecord,
    Measured,
    TensorRecord,
    card,
)
from triptych.rewriting.comparing import compare_models, open_original, why_not_by_itself
from triptych.rewriting.inputs import INPUTS, gather_inputs, write_inputs
from triptych.rewriting.layers import RewrittenLayer, give_back_memory, shape_of
from triptych.rewriting.measuring import PROBES, measure_change
from triptych.rewriting.models import with_rewritten
from triptych.rewriting.planning import (
    Prepared,
    WayThrough,
    local_folder,
    prepare,
)
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.rounding import coarsest_changed
from triptych.storage.copying import CERTIFICATE, CONFIG, FolderCopy, require_own, require_place
from triptych.storage.quantised import dequantised
from triptych.storage.settings import Settings
from triptych.storage.shards import tensor_hash
from triptych.storage.tensors import SAFETENSORS, Tensors, open_tensors
from triptych.storage.untrusted import LONGEST_TEXT, read_json, read_limited


def rewrite_checkpoint(
    checkpoint: Source | str,
    target: Path,
    recipe: RewriteRecipe,
    *,
    family: Family | None = None,
    text: Path | None = None,
    compare: bool = True,
    progress: Progress | None = None,
) -> Certificate:
    """Rewrite a checkpoint's attention into a new folder, with a certificate."""
    files = find_source(checkpoint)
    require_place(Path(files.name), target)  # before anything is fetched for it
    folder = local_folder(files)
    require_place(folder, target)
    if text is not None:
        read_whole_text(text)
    source = open_checkpoint(folder, family)
    prepared = prepare(source, folder, recipe)
    request = _Request(files.name, folder, target, recipe, text, compare, progress or _tell_nobody)
    if isinstance(source, OwnModel):
        return _RunRewriting(source, prepared, request).write()
    assert isinstance(source, Checkpoint)
    return _FolderRewriting(source, prepared, request).write()


@final
@dataclass(frozen=True)
class _Request:
    checkpoint: str
    folder: Path
    target: Path
    recipe: RewriteRecipe
    text: Path | None
    compare: bool
    progress: Progress


def _tell_nobody(what: str, done: int | float, of: int | float) -> None:
    del what, done, of


class _Rewriting(ABC):
    """A rewrite that is being written."""

    def __init__(self, source: AttentionSource, prepared: Prepared, request: _Request) -> None:
        self.source, self.prepared, self.request = source, prepared, request
        self.way = WayThrough(source, prepared)
        self.layers: dict[str, LayerRecord] = {}
        self.not_on_text = ""

    @abstractmethod
    def write(self) -> Certificate:
        """Write the rewritten checkpoint."""

    def certificate(
        self, written: Path, tensors: Mapping[str, TensorRecord], left_out: Sequence[str]
    ) -> Certificate:
        """Make the certificate of the folder's current content."""
        request = self.request
        bounded = any(layer.tier == "bounded" for layer in self.layers.values())
        stored = None if bounded else coarsest_changed(tensors, open_tensors(written))
        compared_as, why_not = self._compared(written, stored)
        costs = self.way.costs()
        return Certificate(
            tool=f"triptych {version('triptych')}",
            source=printable(request.checkpoint),
            family=self.source.written_as,
            dtype=str(self.way.dtypes[self.source.sites[0].name]).removeprefix("torch."),
            settings=self.way.settings,
            recipe=tuple(step.options() for step in request.recipe.step),
            calibration=_hash_of(request.recipe.calibration),
            layers=tuple(self.layers[site.name] for site in self.source.sites),
            norms=self.way.norms(),
            before=costs.before,
            after=costs.after,
            unpadded=costs.unpadded,
            tensors=dict(tensors),
            files=_files(written),
            left_out=tuple(left_out),
            probes=PROBES,
            end_to_end=compared_as,
            not_compared=why_not,
            not_on_text=self.not_on_text,
        ).sealed()

    def _compared(self, written: Path, stored: torch.dtype | None) -> tuple[EndToEnd | None, str]:
        """Compare both models on the text or on random tokens; or say why not."""
        request = self.request
        if not request.compare:
            return None, "it was not asked for"
        if request.text is None and (reason := why_not_by_itself(request.folder)):
            return None, reason
        request.progress("comparing both models", 0, 1)
        opened = open_original(request.folder, request.text)
        if isinstance(opened, str):
            return None, opened
        if request.text is not None:
            self._try_on_text(opened.model, opened.windows, written)
        return compare_models(opened, self.source, written, request.text, stored), ""

    def _try_on_text(self, model: TextModel, windows: Sequence[Window], written: Path) -> None:
        """Measure changed layers on the original's inputs for the text, and store these inputs."""
        try:
            inputs = gather_inputs(model, self.source, windows)
        except DataError as error:
            self.not_on_text = str(error)
            return
        write_inputs(written / INPUTS, inputs)
        after = self._reopened(written)
        places = {site.module: site for site in after.sites}
        for number, site in enumerate(self.source.sites):
            record = self.layers[site.name]
            if record.measured is None or site.name not in inputs:
                continue
            self.request.progress(f"trying {site.name} on the text", number, len(self.source.sites))
            found = measure_change(self.source.read(site), after.read(places[site.module]), inputs[site.name])
            self.layers[site.name] = record.model_copy(update={"measured_on_text": found})

    @abstractmethod
    def _reopened(self, written: Path) -> AttentionSource:
        """Open the written checkpoint."""


@final
class _RunRewriting(_Rewriting):
    """Rewrites a run of ours; its configuration changes with the parameterisation."""

    def __init__(self, source: OwnModel, prepared: Prepared, request: _Request) -> None:
        super().__init__(source, prepared, request)
        self._run = source

    def write(self) -> Certificate:
        """Rewrite all layers in memory: such models are not large."""
        source, request = self._run, self.request
        changed, done_by_site = {}, {}
        for number, site in enumerate(source.sites):
            request.progress(f"rewriting {site.name}", number, len(source.sites))
            read = source.read(site)
            done, _, _ = self.way.layer(source, read)
            done_by_site[site.name] = (read, done)
            if done.changed:
                changed[site.module] = done.weights.to(read.weights.dtype)
        new = with_rewritten(source.model, changed)
        result: list[Certificate] = []

        def fill(folder: Path) -> None:
            left_out = copy_run(request.folder, folder)
            write_model(new, folder)
            written = self._reopened(folder)
            sites = {site.name: site for site in written.sites}
            for name, (read, done) in done_by_site.items():
                measured = (
                    measure_change(read, written.read(sites[name]), bounded=done.bounded)
                    if done.changed
                    else None
                )
                self.layers[name] = LayerRecord(
                    module=read.site.module, steps=done.records, measured=measured
                )
            tensors = _hashes(open_tensors(request.folder), open_tensors(folder))
            certificate = self.certificate(folder, tensors, left_out)
            write_bytes(folder / MODEL_CARD, _with_card(folder / MODEL_CARD, card(certificate)))
            write_bytes(folder / CERTIFICATE, certificate.as_json())
            result.append(certificate)

        write_folder(request.target, fill)
        return result[0]

    def _reopened(self, written: Path) -> OwnModel:
        return OwnModel.read_folder(written)


@final
class _FolderRewriting(_Rewriting):
    """Rewrites a checkpoint in Hugging Face's layout, shard by shard, with at most two layers in memory."""

    def __init__(self, source: Checkpoint, prepared: Prepared, request: _Request) -> None:
        super().__init__(source, prepared, request)
        self.checkpoint = source
        self._site_of = _owners(source)
        self._ready: dict[str, Tensor] = {}
        self._replaced: dict[str, tuple[str, ...]] = {}
        self._done: dict[str, RewrittenLayer] = {}
        self._beside = ThreadPoolExecutor(1, "measuring")
        self._measured: dict[str, Future[Measured]] = {}

    def write(self) -> Certificate:
        request = self.request
        with FolderCopy(request.folder, request.target) as copy, self._beside:
            written_bytes = 0

            def progress(num_bytes: int) -> None:
                nonlocal written_bytes
                written_bytes += num_bytes
                request.progress("writing", written_bytes, copy.num_bytes)

            hashes = copy.write_shards(self._replacement, progress)
            copy.write_beside(self.way.settings)
            (copy.folder / INPUTS).unlink(missing_ok=True)  # of what the source was rewritten from
            self._measure(copy.folder)
            tensors = {
                name: TensorRecord(read=found.read, written=found.written)
                for name, found in sorted(hashes.items())
            }
            certificate = self.certificate(copy.folder, tensors, copy.left_out)
            copy.finish(
                {
                    CERTIFICATE: certificate.as_json(),
                    MODEL_CARD: _with_card(copy.folder / MODEL_CARD, card(certificate)),
                }
            )
        return certificate

    def _replacement(self, name: str) -> Tensor | Mapping[str, Tensor] | None:
        """The new tensor of a name, or those in its place. The first of a layer has the layer rewritten."""
        site = self._site_of.get(name)
        if site is None:
            if self.prepared.norms.concern(name):
                wait(self._measured.values())  # a map may be as large as all of the attention: one of them
            return self.prepared.norms.replacement(name, self.took_up_norm)
        self._rewritten(site)
        if name in self._replaced:
            return {new: self._ready.pop(new) for new in self._replaced[name]}
        return self._ready.pop(name, None)

    def took_up_norm(self, site: Site) -> bool:
        return self._rewritten(site).took_up_norm

    def _rewritten(self, site: Site) -> RewrittenLayer:
        if site.name not in self._done:
            self._rewrite(site)
        return self._done[site.name]

    def _rewrite(self, site: Site) -> None:
        names = self.checkpoint.read_names(site)
        held = self.checkpoint.holding({name: self.checkpoint.tensors.read(name) for name in names})
        read = held.read(site)
        done, written, _ = self.way.layer(held, read)
        if done.changed and not written.settings:
            wait(self._measured.values())  # one beside this thread, so that two layers are in memory
            saved = held.holding(written.tensors).read(site)
            self._measured[site.name] = self._beside.submit(measure_change, read, saved, bounded=done.bounded)
        self._ready |= written.tensors
        self._replaced |= written.replaced
        self._done[site.name] = RewrittenLayer(shape_of(done.weights), done.kept, done.records)
        give_back_memory()

    def _reopened(self, written: Path) -> Checkpoint:
        settings = Settings(read_json(written / CONFIG), CONFIG)
        tensors = dequantised(open_tensors(written), settings)
        other = family_of(str(self.way.settings.get("model_type")))  # that of another format
        return Checkpoint(str(written), other or self.checkpoint.family, settings, tensors)

    def _measure(self, folder: Path) -> None:
        if self._ready:
            raise AssertionError(f"{next(iter(self._ready))} was rewritten but not written")
        written = self._reopened(folder)
        sites = {site.module: site for site in written.sites}
        for number, site in enumerate(self.checkpoint.sites):
            done, found = self._done[site.name], self._measured.get(site.name)
            if self.way.settings:
                written.read(sites[site.module])  # what the configuration says now fits all layers
            measured = None if found is None else found.result()
            if done.changed and (measured is None or self.way.settings):
                self.request.progress(f"measuring {site.name}", number, len(self.checkpoint.sites))
                measured = measure_change(
                    self.checkpoint.read(site), written.read(sites[site.module]), bounded=done.bounded
                )
            self.layers[site.name] = LayerRecord(module=site.module, steps=done.records, measured=measured)


def _owners(source: Checkpoint) -> dict[str, Site]:
    """Map every tensor that a layer may change to the layer."""
    found: dict[str, Site] = {}
    for site in source.sites:
        for name in source.read_names(site):
            if name in found:
                raise DataError(
                    f"{source.name}: {name} belongs to {found[name].name} and to {site.name}: a change for "
                    "one would change the other"
                )
            found[name] = site
    return found


def copy_run(source: Path, target: Path) -> tuple[str, ...]:
    """Copy the files beside the weights of a run, without the state of its training."""
    left_out = []
    for path in sorted(source.iterdir()):
        if path.is_dir():
            left_out.append(f"{path.name}/")
            continue
        require_own(source, path)
        if path.name not in (CONFIG, SAFETENSORS, CERTIFICATE, INPUTS):
            shutil.copyfile(path, target / path.name)
    return tuple(left_out)


def _hashes(before: Tensors, after: Tensors) -> dict[str, TensorRecord]:
    return {
        name: TensorRecord(
            read=tensor_hash(before.read(name)) if name in before.infos else None,
            written=tensor_hash(after.read(name)) if name in after.infos else None,
        )
        for name in sorted({*before.infos, *after.infos})
    }


def _files(folder: Path) -> dict[str, str]:
    """Hashes of all files except tensors and files that are written after them."""
    tensors = {path for path in folder.rglob("*.safetensors") if path.parent == folder}
    return {
        path.relative_to(folder).as_posix(): file_hash(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in tensors and path not in (folder / CERTIFICATE, folder / MODEL_CARD)
    }


def _hash_of(path: Path | None) -> str | None:
    return None if path is None else file_hash(path)


def _with_card(path: Path, section: str) -> bytes:
    """Append the section to a model card, or replace the one that it has."""
    text = read_limited(path, LONGEST_TEXT).decode(errors="surrogateescape") if path.is_file() else ""
    heading = re.escape(section.partition("\n")[0])
    rest = re.sub(rf"^{heading}\n.*?(?=^## |\Z)", "", text, flags=re.DOTALL | re.MULTILINE)
    return f"{rest.rstrip()}\n\n{section}".lstrip().encode(errors="surrogateescape")
