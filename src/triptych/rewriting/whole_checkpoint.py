"""Rewrite the attention of a checkpoint: plan, write to a new folder, and certify."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from triptych.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.core.checkpoints.family import Family, family_of
from triptych.core.checkpoints.module_layers import ModuleLayers
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_layers import AttentionSource, Site
from triptych.core.models import write_model
from triptych.core.storage import (
    CERTIFICATE,
    CONFIG,
    SAFETENSORS,
    FolderCopy,
    Settings,
    dequantised,
    open_tensors,
    require_new_folder,
    require_own,
    tensor_hash,
)
from triptych.errors import DataError
from triptych.files import NewFolder, file_hash, write_bytes
from triptych.printable import printable
from triptych.progress import Progress
from triptych.rewriting.certificate import (
    CARD_HEADING,
    MODEL_CARD,
    Certificate,
    EndToEnd,
    LayerRecord,
    Measured,
    TensorRecord,
    card,
)
from triptych.rewriting.driver import give_back_memory
from triptych.rewriting.in_memory import with_rewritten
from triptych.rewriting.inputs import INPUTS, gather_inputs, write_inputs
from triptych.rewriting.measuring import PROBES, measure_change
from triptych.rewriting.planning import Rewriting, local_folder
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.rounding import coarsest_changed
from triptych.rewriting.whole_models import (
    compare_models,
    open_original,
    why_not_compared,
)
from triptych.running.opening import TextReader, Window, read_whole_text
from triptych.untrusted import LONGEST_TEXT, read_json, read_limited


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
    files = find_source(checkpoint, family=family)
    require_new_folder(Path(files.name), target)  # fail before the download
    folder = local_folder(files)
    require_new_folder(folder, target)
    if text is not None:
        read_whole_text(text)
    local = files.at(folder)
    source = open_checkpoint(local)
    rewriting = Rewriting(source, local, recipe)
    request = _Request(
        files.name, local, target, recipe, text, compare, progress or (lambda *_: None)
    )
    if isinstance(source, ModuleLayers):
        return _Writing(
            source, rewriting, request, _RunSink(source, rewriting, request)
        ).write()
    assert isinstance(source, Checkpoint)
    return _Writing(
        source, rewriting, request, _FolderSink(source, rewriting, request)
    ).write()


@final
@dataclass(frozen=True)
class _Request:
    checkpoint: str
    files: Source
    target: Path
    recipe: RewriteRecipe
    text: Path | None
    compare: bool
    progress: Progress

    @property
    def folder(self) -> Path:
        return self.files.folder


@final
class _RunSink:
    """The new folder of a run of ours, written from a model in memory: runs are small."""

    def __init__(
        self, source: ModuleLayers, rewriting: Rewriting, request: _Request
    ) -> None:
        self._source = source
        self._rewriting = rewriting
        self._request = request
        self._made = NewFolder(request.target)
        self.records: dict[str, LayerRecord] = {}
        self.left_out: tuple[str, ...] = ()

    def fill(self, within: ExitStack) -> dict[str, TensorRecord]:
        source = self._source
        request = self._request
        changed = {}
        for number, site in enumerate(source.sites):
            request.progress(f"rewriting {site.name}", number, len(source.sites))
            read = source.read(site)
            done = self._rewriting.layer(source, read)
            self.records[site.name] = done.record
            if done.record.changed:
                changed[site.module] = done.layer.weights.to(read.weights.dtype)
        # All layers are needed before the model can be built.
        new = with_rewritten(source.model, changed)
        self.folder = within.enter_context(self._made).path
        self.left_out = copy_run(request.folder, self.folder)
        write_model(new, self.folder)
        before = open_tensors(request.folder)
        after = open_tensors(self.folder)
        return {
            name: TensorRecord(
                read=tensor_hash(before.read(name)) if name in before.infos else None,
                written=tensor_hash(after.read(name)) if name in after.infos else None,
            )
            for name in sorted({*before.infos, *after.infos})
        }

    def reopened(self) -> ModuleLayers:
        return ModuleLayers.read_folder(self.folder)

    def finish(self, extra: Mapping[str, bytes]) -> None:
        for name, content in extra.items():
            write_bytes(self.folder / name, content)
        self._made.finish()


@final
class _FolderSink:
    """A new folder in Hugging Face's layout, written shard by shard, with at most two layers in memory."""

    def __init__(
        self, source: Checkpoint, rewriting: Rewriting, request: _Request
    ) -> None:
        self._source = source
        self._rewriting = rewriting
        self._request = request
        self._copy = FolderCopy(request.folder, request.target)
        self._site_of = _owners(source)
        self._ready: dict[str, Tensor] = {}
        self._replaced: dict[str, tuple[str, ...]] = {}
        self._measuring = ThreadPoolExecutor(1, "measuring")
        self._measured: dict[str, Future[Measured]] = {}
        self.records: dict[str, LayerRecord] = {}
        self.left_out = self._copy.left_out

    def fill(self, within: ExitStack) -> dict[str, TensorRecord]:
        copy = within.enter_context(self._copy)
        self.folder = copy.folder
        written_bytes = 0

        def progress(num_bytes: int) -> None:
            nonlocal written_bytes
            written_bytes += num_bytes
            self._request.progress("writing", written_bytes, copy.num_bytes)

        with self._measuring:
            hashes = copy.write_shards(self._replacement, progress)
        copy.write_beside(self._rewriting.settings)
        (copy.folder / INPUTS).unlink(
            missing_ok=True
        )  # inputs from an earlier rewrite of the source
        if self._ready:
            raise AssertionError(
                f"{next(iter(self._ready))} was rewritten but not written"
            )
        if not self._rewriting.settings:
            for name, found in self._measured.items():
                self.records[name] = self.records[name].model_copy(
                    update={"measured": found.result()}
                )
        return {
            name: TensorRecord(read=found.read, written=found.written)
            for name, found in sorted(hashes.items())
        }

    def _replacement(self, name: str) -> Tensor | Mapping[str, Tensor] | None:
        """Return the new tensor of a name, or its replacements; a layer's first tensor triggers a rewrite."""

        def took_up_norm(site: Site) -> bool:
            self._rewrite(site)
            return site in self._rewriting.folded

        site = self._site_of.get(name)
        norms = self._rewriting.other_norms
        if site is None:
            if name in norms.owners:
                # A map may be as large as the whole attention: measurements finish first.
                wait(self._measured.values())
            return norms.replacement(name, took_up_norm)
        self._rewrite(site)
        if name in self._replaced:
            return {new: self._ready.pop(new) for new in self._replaced[name]}
        return self._ready.pop(name, None)

    def _rewrite(self, site: Site) -> None:
        if site.name in self.records:
            return
        names = self._source.read_names(site)
        held = self._source.holding(
            {name: self._source.tensors.read(name) for name in names}
        )
        read = held.read(site)
        done = self._rewriting.layer(held, read)
        written = done.written
        bounded = done.record.tier == "bounded"
        if done.record.changed and not written.settings:
            wait(
                self._measured.values()
            )  # one measurement at a time: two layers are in memory
            saved = held.holding(written.tensors).read(site)
            self._measured[site.name] = self._measuring.submit(
                measure_change, read, saved, bounded=bounded
            )
        self._ready |= written.tensors
        self._replaced |= written.replaced
        self.records[site.name] = done.record
        give_back_memory()

    def reopened(self) -> Checkpoint:
        settings = Settings(read_json(self.folder / CONFIG), CONFIG)
        tensors = dequantised(open_tensors(self.folder), settings)
        other = family_of(
            str(self._rewriting.settings.get("model_type"))
        )  # family of a changed format
        return Checkpoint(
            str(self.folder), other or self._source.family, settings, tensors
        )

    def finish(self, extra: Mapping[str, bytes]) -> None:
        self._copy.finish(extra)


@final
class _Writing:
    """A rewrite being written, in any format."""

    def __init__(
        self,
        source: AttentionSource,
        rewriting: Rewriting,
        request: _Request,
        sink: _RunSink | _FolderSink,
    ) -> None:
        self.source = source
        self.rewriting = rewriting
        self.request = request
        self.sink = sink
        self.not_on_text = ""

    def write(self) -> Certificate:
        with ExitStack() as within:
            tensors = self.sink.fill(within)
            after = self.sink.reopened()
            # A changed configuration affects all layers.
            everything = bool(self.rewriting.settings)

            def is_read(record: LayerRecord) -> bool:
                return everything or (record.changed and record.measured is None)

            for site, place, record in self._layers(after, "measuring {}", is_read):
                written = after.read(place)
                if record.changed and record.measured is None:
                    bounded = record.tier == "bounded"
                    found = measure_change(
                        self.source.read(site), written, bounded=bounded
                    )
                    self.sink.records[site.name] = record.model_copy(
                        update={"measured": found}
                    )
            certificate = self._certificate(tensors, after)
            readme = _with_card(self.sink.folder / MODEL_CARD, card(certificate))
            self.sink.finish({CERTIFICATE: certificate.as_json(), MODEL_CARD: readme})
        return certificate

    def _layers(
        self, after: AttentionSource, doing: str, wanted: Callable[[LayerRecord], bool]
    ) -> Iterator[tuple[Site, Site, LayerRecord]]:
        """Yield the selected layers as sites of the original and of the new checkpoint."""
        places = {site.module: site for site in after.sites}
        for number, site in enumerate(self.source.sites):
            record = self.sink.records[site.name]
            if wanted(record):
                self.request.progress(
                    doing.format(site.name), number, len(self.source.sites)
                )
                yield site, places[site.module], record

    def _certificate(
        self, tensors: Mapping[str, TensorRecord], after: AttentionSource
    ) -> Certificate:
        request = self.request
        folder = self.sink.folder
        sites = self.source.sites
        bounded = any(record.tier == "bounded" for record in self.sink.records.values())
        # Only exact rewrites are limited to rounding.
        stored = None if bounded else coarsest_changed(tensors, open_tensors(folder))
        compared_as, why_not = self._compared(after, stored)
        costs = self.rewriting.costs()
        calibration = request.recipe.calibration
        return Certificate(
            tool=f"triptych {version('triptych')}",
            source=printable(request.checkpoint),
            family=self.source.written_as,
            dtype=str(self.source.read(sites[0]).weights.dtype).removeprefix("torch."),
            settings=self.rewriting.settings,
            recipe=tuple(step.options() for step in request.recipe.step),
            calibration=None if calibration is None else file_hash(calibration),
            layers=tuple(self.sink.records[site.name] for site in sites),
            norms=self.rewriting.norms(),
            before=costs.before,
            after=costs.after,
            unpadded=costs.unpadded,
            tensors=dict(tensors),
            files=_files(folder),
            left_out=self.sink.left_out,
            probes=PROBES,
            end_to_end=compared_as,
            not_compared=why_not,
            not_on_text=self.not_on_text,
        ).sealed()

    def _compared(
        self, after: AttentionSource, stored: torch.dtype | None
    ) -> tuple[EndToEnd | None, str]:
        """Compare both models on the text or on random tokens; otherwise return the reason."""
        request = self.request
        if not request.compare:
            return None, "it was not asked for"
        # Cheap reasons first: opening the original builds its modules.
        if request.text is None and (reason := why_not_compared(request.files)):
            return None, reason
        request.progress("comparing both models", 0, 1)
        opened = open_original(request.files, request.text)
        if isinstance(opened, str):
            return None, opened
        if request.text is not None:
            self._try_on_text(opened.model, opened.windows, after)
        written = request.files.at(self.sink.folder)
        return compare_models(opened, self.source, written, request.text, stored), ""

    def _try_on_text(
        self, model: TextReader, windows: Sequence[Window], after: AttentionSource
    ) -> None:
        """Measure changed layers on the original's inputs for the text, and store these inputs."""
        try:
            inputs = gather_inputs(model, self.source, windows)
        except DataError as error:
            self.not_on_text = str(error)
            return
        write_inputs(self.sink.folder / INPUTS, inputs)
        for site, place, record in self._layers(
            after, "trying {} on the text", attrgetter("changed")
        ):
            if site.name in inputs:
                found = measure_change(
                    self.source.read(site), after.read(place), inputs[site.name]
                )
                self.sink.records[site.name] = record.model_copy(
                    update={"measured_on_text": found}
                )


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
    """Copy all files of a run except its weights and the state of its training."""
    left_out = []
    for path in sorted(source.iterdir()):
        if path.is_dir():
            left_out.append(f"{path.name}/")
            continue
        require_own(source, path)
        if path.name not in (CONFIG, SAFETENSORS, CERTIFICATE, INPUTS):
            shutil.copyfile(path, target / path.name)
    return tuple(left_out)


def _files(folder: Path) -> dict[str, str]:
    """Return the hashes of all files except tensors, the certificate and the model card."""
    tensors = {path for path in folder.rglob("*.safetensors") if path.parent == folder}
    return {
        path.relative_to(folder).as_posix(): file_hash(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path not in tensors
        and path not in (folder / CERTIFICATE, folder / MODEL_CARD)
    }


def leave_out_certificate(folder: Path) -> None:
    """Remove certificate, inputs and card section from a copy of a rewritten model with other changes."""
    for name in (CERTIFICATE, INPUTS):
        (folder / name).unlink(missing_ok=True)
    readme = folder / MODEL_CARD
    if readme.is_file() and CARD_HEADING.encode() in readme.read_bytes():
        write_bytes(readme, _with_card(readme, ""))


def _with_card(path: Path, section: str) -> bytes:
    """Append the section to a model card, or replace the existing section."""
    text = (
        read_limited(path, LONGEST_TEXT).decode(errors="surrogateescape")
        if path.is_file()
        else ""
    )
    rest = re.sub(
        rf"^{CARD_HEADING}\n.*?(?=^## |\Z)", "", text, flags=re.DOTALL | re.MULTILINE
    )
    return (f"{rest.rstrip()}\n\n{section}".strip() + "\n").encode(
        errors="surrogateescape"
    )
