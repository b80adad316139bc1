"""Storage formats of rewritten attention: checkpoints of other libraries and our runs, in one interface."""

from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import torch

from triptych.core.algebra.cost import writing_cost
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.fitted_weights import path_of_record, resizing, sizes_of
from triptych.core.checkpoints.module_layers import ModuleLayers
from triptych.core.checkpoints.norm_readers import NormSite, norm_sites
from triptych.core.checkpoints.stored_layers import (
    AttentionLayer,
    AttentionSource,
    MapSizes,
    Site,
)
from triptych.core.models import (
    AnyModel,
    describe_model,
    model_tensors,
    read_own_model,
    require_held,
    write_config,
)
from triptych.core.storage import (
    CERTIFICATE,
    CONFIG,
    PICKLED_INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    names_beside,
    open_tensors,
    set_entry,
)
from triptych.errors import TriptychError
from triptych.files import file_hash
from triptych.rewriting.certificate import MODEL_CARD, Certificate
from triptych.rewriting.in_memory import with_rewritten
from triptych.rewriting.inputs import INPUTS
from triptych.rewriting.writing import WrittenLayer, write_layer
from triptych.untrusted import read_json, shown, stays_in_folder

_OURS_SHRINKS = (
    "our own format has widths of every layer's own, and would shrink: triptych convert MODEL --from hf "
    "--out RUN, then rewrite RUN"
)


@final
class FolderFormat:
    """A folder in Hugging Face's layout, with fixed shapes except for sizes in its configuration."""

    why_no_norms = "no norm is known that maps outside the attention read"

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.tensors = source.tensors
        self._checkpoint = source

    def norm_sites(self) -> tuple[NormSite, ...]:
        """Return the norms of rewritable maps outside the attention."""
        return norm_sites(self._checkpoint)

    def rewritable_names(self, site: Site) -> Collection[str]:
        """Return the names of the tensors that a rewrite of a layer may change."""
        return self._checkpoint.rewritable_names(site)

    def fixed_sizes(
        self, rewritten: Callable[[AttentionLayer], AttentionWeights]
    ) -> set[str]:
        """Return the layers whose configuration field cannot store their new sizes."""
        source = self._checkpoint
        wanted: dict[str, MapSizes] = {}
        now: dict[str, MapSizes] = {}
        for site in source.sites:
            read = source.read(site)
            now[site.name] = sizes_of(read.weights)
            wanted[site.name] = sizes_of(rewritten(read))
            del read  # large layers: release before reading the next
        of_record: dict[str, list[str]] = {}
        for site in source.sites:
            of_record.setdefault(path_of_record(source, source.place(site)), []).append(
                site.name
            )
        stay: set[str] = set()
        for names in of_record.values():
            changed = [name for name in names if wanted[name] != now[name]]
            # All layers of a field need the same new sizes, in one change of size; otherwise all of them keep
            # their sizes.
            sites = {site.name: site for site in source.sites}
            alike = all(
                (found := resizing(source, sites[name], wanted[name])) is not None
                and all(wanted[other.name] == wanted[name] for other in found.sites)
                for name in changed
            )
            if not alike:
                stay |= set(names)
        return stay

    def written(
        self,
        read: AttentionLayer,
        weights: AttentionWeights,
        kept: Sequence[int] | None = None,
        *,
        same_sizes: bool = False,
    ) -> WrittenLayer:
        return write_layer(
            self._checkpoint, read, weights, kept=kept, same_sizes=same_sizes
        )

    def written_bytes(self, read: AttentionLayer, written: WrittenLayer) -> int:
        tensors = self._checkpoint.tensors
        stay = (
            {*tensors.below(read.site.module)}
            - written.tensors.keys()
            - written.replaced.keys()
        )
        elsewhere = {*self._checkpoint.read_names(read.site)} - {
            *tensors.below(read.site.module)
        }
        new = (
            tensor.nbytes
            for name, tensor in written.tensors.items()
            if name not in elsewhere
        )
        return sum(new) + sum(tensors.infos[name].num_bytes for name in stay)

    def note_on_padding(self) -> tuple[str, ...]:
        """Describe ways to smaller files of this format: changes of size storable in its configuration."""
        if self._checkpoint.settings.value("model_type") == "marian":
            return (_OURS_SHRINKS,)
        site = self._checkpoint.sites[0]
        here = self._checkpoint.place(site).sizes
        # Candidate sizes: half the heads, one group, half the widths.
        half = max(1, here.heads // 2)
        grouped = here.groups < here.heads
        one_group = here._replace(heads=half, groups=1 if grouped else half)
        narrower = here._replace(
            width=max(1, here.width // 2), value_width=max(1, here.value_width // 2)
        )
        ways = {
            "fewer heads (prune_heads, with merge_kv_heads)"
            if grouped
            else "fewer heads (prune_heads)": one_group,
            "fewer key-value heads (merge_kv_heads)": here._replace(groups=1),
            "narrower heads, all of one width (--rank N)": narrower,
        }
        free = [
            way
            for way, sizes in ways.items()
            if sizes != here and resizing(self._checkpoint, site, sizes) is not None
        ]
        said = (
            f"the file gets smaller by {' or '.join(free)}"
            if free
            else "no rewrite makes the file smaller"
        )
        return (
            f"{self.source.written_as}'s format: {said}; anything else is padded with zeros",
        )

    def differences(
        self,
        certificate: Certificate,
        original: Path,
        folder: Path,
        written: AttentionSource,
    ) -> Iterator[str]:
        yield from self._tensor_differences(certificate, written)
        yield from _file_differences(certificate, original, folder)

    def _tensor_differences(
        self, certificate: Certificate, written: AttentionSource
    ) -> Iterator[str]:
        """Yield the changed tensors outside all measured layers and norms."""
        measured = {
            layer.module for layer in certificate.layers if layer.measured is not None
        }
        # Tensors that measured layers may change.
        own = set[str]()
        for source in (self.source, written):
            if not isinstance(source, Checkpoint):
                continue
            for site in source.sites:
                if site.module in measured:
                    own.update(source.rewritable_names(site))
        norms = {norm.module for norm in certificate.norms if norm.measured is not None}
        for norm in self.norm_sites():
            if norm.module in norms:
                own.update(norm.all_tensors)
            elif any(_was_changed(certificate, name) for name in norm.own_tensors):
                yield f"{norm.module} was changed, and what reads it is not in the certificate"
        for name in certificate.tensors:
            if _was_changed(certificate, name) and name not in own:
                yield f"{shown(name)} was changed, and is in no layer that was measured"


@final
class RunFormat:
    """A run of ours; stores any parameterisation."""

    why_no_norms = "of runs of ours only the attention is rewritten"

    def __init__(self, source: ModuleLayers) -> None:
        self.source = source
        self.tensors = None
        self._run = source

    def norm_sites(self) -> tuple[NormSite, ...]:
        return ()

    def rewritable_names(self, site: Site) -> None:
        """Return None: a rewrite of a layer may change any tensor."""

    def fixed_sizes(
        self, rewritten: Callable[[AttentionLayer], AttentionWeights]
    ) -> set[str]:
        return set()

    def note_on_padding(self) -> tuple[str, ...]:
        return ()

    def written(
        self,
        read: AttentionLayer,
        weights: AttentionWeights,
        kept: Sequence[int] | None = None,
        *,
        same_sizes: bool = False,
    ) -> WrittenLayer:
        try:
            require_held(self._run.model, read.site.module, weights)
        except ValueError as error:
            raise RewriteRefusedError("write", str(error)) from None
        return WrittenLayer({}, {}, weights)

    def written_bytes(self, read: AttentionLayer, written: WrittenLayer) -> int:
        return writing_cost(written.shapes).parameters * read.weights.dtype.itemsize

    def differences(
        self,
        certificate: Certificate,
        original: Path,
        folder: Path,
        written: AttentionSource,
    ) -> Iterator[str]:
        """Yield differences from the original with the measured attention inserted."""
        records = {
            layer.module: layer
            for layer in certificate.layers
            if layer.measured is not None
        }
        changed = {}
        for site in written.sites:
            if (record := records.get(site.module)) is not None:
                weights = written.read(site).weights
                changed[site.module] = (
                    weights.without_norms() if record.took_up_norm else weights
                )
        # Rebuild the run from the original and its rewritten attention, and compare everything.
        try:
            expected = with_rewritten(self._run.model, changed)
        except (TriptychError, ValueError) as error:
            yield f"the attention does not fit the original: {error}"
            return
        read = read_own_model(folder)
        if not _is_same_config(expected, read, folder):
            yield f"{CONFIG} is other than that of the original with this attention"
        found = model_tensors(read)
        for name, tensor in model_tensors(expected).items():
            if name not in found or not torch.equal(found[name], tensor):
                yield f"{shown(name)} was changed, and is in no layer that was measured"
        copied = {path.name for path in original.iterdir() if path.is_file()}
        copied -= {SAFETENSORS, CERTIFICATE, INPUTS, MODEL_CARD}
        names = certificate.files.keys() - {INPUTS}
        yield from (
            f"{shown(name)} is not the same files as in the original"
            for name in sorted(copied ^ names)
        )
        for name in sorted(copied & names - {CONFIG}):
            if _hash_if_there(original / name) != certificate.files[name]:
                yield f"{shown(name)} is other than the original's"
        left_out = tuple(
            f"{path.name}/" for path in sorted(original.iterdir()) if path.is_dir()
        )
        yield from _left_out_differences(certificate, left_out)


def _is_same_config(expected: AnyModel, read: AnyModel, folder: Path) -> bool:
    """Return True if the configuration in a folder is that of a model."""
    stored = read_json(folder / CONFIG)
    if stored.get("format") == 1:  # an older version wrote the recipe of the model
        return describe_model(read) == describe_model(expected)
    with TemporaryDirectory() as place:
        write_config(expected, Path(place))
        return read_json(Path(place, CONFIG)) == stored


Format = FolderFormat | RunFormat


def storage_format(source: AttentionSource) -> Format:
    """Return the storage format of an opened checkpoint."""
    if isinstance(source, ModuleLayers):
        return RunFormat(source)
    assert isinstance(source, Checkpoint)
    return FolderFormat(source)


def _was_changed(certificate: Certificate, name: str) -> bool:
    record = certificate.tensors.get(name)
    return record is not None and record.read != record.written


def _file_differences(
    certificate: Certificate, original: Path, folder: Path
) -> Iterator[str]:
    """Yield files that differ from the original's or are missing."""
    wanted = read_json(original / CONFIG)
    for path, value in certificate.settings.items():
        set_entry(wanted, path, value)
    if read_json(folder / CONFIG) != wanted:
        yield f"{CONFIG} is other than the original's with what was set"
    left_out, copied = names_beside(original)
    yield from _left_out_differences(certificate, left_out)
    # Configuration and index differ from the original's on purpose, so they have separate checks.
    index = {SAFETENSORS_INDEX} & certificate.files.keys()
    expected = {*copied, *index, CONFIG} - {CERTIFICATE, MODEL_CARD, INPUTS}
    found = certificate.files.keys() - {INPUTS}
    yield from (
        f"{shown(name)} was not taken along" for name in sorted(expected - found)
    )
    yield from (
        f"{shown(name)} is not in the original" for name in sorted(found - expected)
    )
    for name in sorted((expected & found) - {CONFIG, *index}):
        if (
            stays_in_folder(name)
            and _hash_if_there(original / name) != certificate.files[name]
        ):
            yield f"{shown(name)} is other than the original's"
    if index and not _is_index_of(folder, original):
        yield f"{SAFETENSORS_INDEX} is other than the original's"


def _is_index_of(folder: Path, original: Path) -> bool:
    """Return True if an index equals the original's, except for file names and counts of tensors."""
    infos = open_tensors(folder).infos.values()
    counts = {
        "total_size": sum(info.num_bytes for info in infos),
        "total_parameters": sum(prod(info.shape) for info in infos),
    }
    # Only sizes and the map of files may differ.
    before = (
        SAFETENSORS_INDEX if (original / SAFETENSORS_INDEX).is_file() else PICKLED_INDEX
    )
    records = [read_json(folder / SAFETENSORS_INDEX), read_json(original / before)]
    metadata = [record.pop("metadata", None) for record in records]
    for record in records:
        record.pop("weight_map", None)
    if records[0] != records[1] or not all(
        isinstance(found, dict) for found in metadata
    ):
        return records[0] == records[1] and metadata[0] == metadata[1]
    one, other = metadata
    return one.keys() == other.keys() and all(
        one[name] in (other[name], counts.get(name, other[name])) for name in one
    )


def _left_out_differences(
    certificate: Certificate, found: tuple[str, ...]
) -> Iterator[str]:
    """Yield wrong entries of `left_out`. Extra folders are ignored."""
    for name in sorted({*certificate.left_out} ^ {*found}):
        if name in certificate.left_out or not name.endswith("/"):
            yield f"left_out {'has' if name in certificate.left_out else 'lacks'} {shown(name)}"


def _hash_if_there(path: Path) -> str:
    return file_hash(path) if path.is_file() else ""
