"""The files of a rewritten checkpoint: as they were written, and nothing else than the original's."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from triptych.checkpoints.checkpoint import Checkpoint
from triptych.checkpoints.layer import AttentionSource
from triptych.checkpoints.norm_readers import norm_sites
from triptych.checkpoints.own import OwnModel
from triptych.errors import TriptychError
from triptych.files import file_hash
from triptych.models.storage import model_tensors, write_config
from triptych.rewriting.certificate import MODEL_CARD, Certificate, LayerRecord, card
from triptych.rewriting.inputs import INPUTS
from triptych.rewriting.models import with_rewritten
from triptych.rewriting.verification.check import Check, listed
from triptych.storage.copying import CERTIFICATE, CONFIG, names_beside, set_entry
from triptych.storage.shards import tensor_hash
from triptych.storage.tensors import (
    PICKLED_INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    Tensors,
    open_tensors,
    read_json,
    shown,
    stays_in_folder,
)

_NOTHING_ELSE = "nothing else is other than it was"


def files_as_written(certificate: Certificate, folder: Path) -> Check:
    """Hashes of what lies beside the tensors, and the section of the model card."""
    wrong = []
    for name, wanted in certificate.files.items():
        path = folder / name
        if not stays_in_folder(name) or not path.resolve().is_relative_to(folder.resolve()):
            wrong.append(f"{shown(name)} leads out of the folder")
        elif not path.is_file():
            wrong.append(f"{shown(name)} is missing")
        elif file_hash(path) != wanted:
            wrong.append(f"{shown(name)} was changed")
    known = {*certificate.files, CERTIFICATE, MODEL_CARD, *_files_of_tensors(folder)}
    wrong += [
        f"{shown(name)} is not in the certificate"
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := path.relative_to(folder).as_posix()) not in known
    ]
    readme = folder / MODEL_CARD
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    if card(certificate).strip() not in text:
        wrong.append(f"{MODEL_CARD} does not say what the certificate does")
    return listed("other files as written", wrong, f"{len(certificate.files)} files")


def _files_of_tensors(folder: Path) -> set[str]:
    """Names of the files that the tensors of a folder are read from."""
    if (folder / SAFETENSORS).is_file() or not (folder / SAFETENSORS_INDEX).is_file():
        return {SAFETENSORS}
    named = read_json(folder / SAFETENSORS_INDEX).get("weight_map")
    return {str(name) for name in named.values()} if isinstance(named, dict) else set()


def hashes(certificate: Certificate, tensors: Tensors, which: str, claim: str) -> Check:
    """Hashes of all tensors, as `read` or `written`."""
    wanted = {
        name: found
        for name, record in certificate.tensors.items()
        if (found := getattr(record, which)) is not None
    }
    wrong = [f"{name} is missing" for name in wanted if name not in tensors.infos]
    wrong += [f"{name} is not in the certificate" for name in tensors.infos if name not in wanted]
    for name in wanted:
        if name in tensors.infos and tensor_hash(tensors.read(name)) != wanted[name]:
            wrong.append(f"{name} was changed")
    return listed(claim, wrong, f"{len(wanted)} tensors")


def nothing_else(
    certificate: Certificate,
    original: Path,
    folder: Path,
    source: AttentionSource,
    written: AttentionSource,
) -> Check:
    """Nothing but the layers that were measured, and the settings that are named, is other than it was."""
    named = [layer.module for layer in certificate.layers]
    wrong = [f"{site.module} is not in the certificate" for site in source.sites if site.module not in named]
    wrong += [f"{module} is in the certificate twice" for module in set(named) if named.count(module) > 1]
    if isinstance(source, Checkpoint):
        wrong += _other_tensors(certificate, source)
        wrong += _other_files(certificate, original, folder)
    elif isinstance(source, OwnModel) and isinstance(written, OwnModel):
        wrong += _other_in_run(certificate, original, folder, source, written)
    measured = sum(layer.measured is not None for layer in certificate.layers)
    return listed(_NOTHING_ELSE, wrong, f"{measured} layers were changed")


def _other_tensors(certificate: Certificate, source: Checkpoint) -> Iterator[str]:
    """Tensors that are other and belong to no measured layer or norm."""
    measured = {layer.module for layer in certificate.layers if layer.measured is not None}
    own = {name for site in source.sites if site.module in measured for name in source.rewritable_names(site)}
    norms = {norm.module for norm in certificate.norms if norm.measured is not None}
    for norm in norm_sites(source):
        if norm.module in norms:
            own.update(norm.all_tensors)
        elif any(_was_changed(certificate, name) for name in norm.own_tensors):
            yield f"{norm.module} was changed, and what reads it is not in the certificate"
    for name in certificate.tensors:
        if _was_changed(certificate, name) and name not in own:
            yield f"{shown(name)} was changed, and is in no layer that was measured"


def _was_changed(certificate: Certificate, name: str) -> bool:
    record = certificate.tensors.get(name)
    return record is not None and record.read != record.written


def _other_files(certificate: Certificate, original: Path, folder: Path) -> Iterator[str]:
    """Files that are other than the original's, or that were not taken along."""
    wanted = read_json(original / CONFIG)
    for path, value in certificate.settings.items():
        set_entry(wanted, path, value)
    if read_json(folder / CONFIG) != wanted:
        yield f"{CONFIG} is other than the original's with what was set"
    left_out, beside = names_beside(original)
    yield from _other_left_out(certificate, left_out)
    index = {SAFETENSORS_INDEX} & certificate.files.keys()
    expected = {*beside, *index, CONFIG} - {CERTIFICATE, MODEL_CARD, INPUTS}
    found = certificate.files.keys() - {INPUTS}
    yield from (f"{shown(name)} was not taken along" for name in sorted(expected - found))
    yield from (f"{shown(name)} is not in the original" for name in sorted(found - expected))
    for name in sorted((expected & found) - {CONFIG, *index}):
        if stays_in_folder(name) and _hash_of(original / name) != certificate.files[name]:
            yield f"{shown(name)} is other than the original's"
    if index and not _is_index_of(folder, original):
        yield f"{SAFETENSORS_INDEX} is other than the original's"


def _is_index_of(folder: Path, original: Path) -> bool:
    """Whether an index says what the original's does, but for the files of tensors and counts over them."""
    infos = open_tensors(folder).infos.values()
    counts = {
        "total_size": sum(info.num_bytes for info in infos),
        "total_parameters": sum(prod(info.shape) for info in infos),
    }
    before = SAFETENSORS_INDEX if (original / SAFETENSORS_INDEX).is_file() else PICKLED_INDEX
    records = [read_json(folder / SAFETENSORS_INDEX), read_json(original / before)]
    metadata = [record.pop("metadata", None) for record in records]
    for record in records:
        record.pop("weight_map", None)
    if records[0] != records[1] or not all(isinstance(found, dict) for found in metadata):
        return records[0] == records[1] and metadata[0] == metadata[1]
    one, other = metadata
    return one.keys() == other.keys() and all(
        one[name] in (other[name], counts.get(name, other[name])) for name in one
    )


def _other_left_out(certificate: Certificate, found: tuple[str, ...]) -> Iterator[str]:
    """What is said to be left out, and is not; folders come and go beside a checkpoint."""
    for name in sorted({*certificate.left_out} ^ {*found}):
        if name in certificate.left_out or not name.endswith("/"):
            yield f"left_out {'has' if name in certificate.left_out else 'lacks'} {shown(name)}"


def _other_in_run(
    certificate: Certificate, original: Path, folder: Path, source: OwnModel, written: OwnModel
) -> Iterator[str]:
    """What of a run is other than the original's with the attention that was measured in it."""
    records = {layer.module: layer for layer in certificate.layers if layer.measured is not None}
    changed = {}
    for site in written.sites:
        if (record := records.get(site.module)) is not None:
            weights = written.read(site).weights
            changed[site.module] = weights.without_norms() if _took_up_norm(record) else weights
    try:
        expected = with_rewritten(source.model, changed)
    except (TriptychError, ValueError) as error:
        yield f"the attention does not fit the original: {error}"
        return
    with TemporaryDirectory() as place:
        write_config(expected, Path(place))
        if read_json(Path(place, CONFIG)) != read_json(folder / CONFIG):
            yield f"{CONFIG} is other than that of the original with this attention"
    found = model_tensors(written.model)
    for name, tensor in model_tensors(expected).items():
        if name not in found or not torch.equal(found[name], tensor):
            yield f"{shown(name)} was changed, and is in no layer that was measured"
    beside = {path.name for path in original.iterdir() if path.is_file()}
    beside -= {SAFETENSORS, CERTIFICATE, INPUTS, MODEL_CARD}
    names = certificate.files.keys() - {INPUTS}
    yield from (f"{shown(name)} is not the same files as in the original" for name in sorted(beside ^ names))
    for name in sorted(beside & names - {CONFIG}):
        if _hash_of(original / name) != certificate.files[name]:
            yield f"{shown(name)} is other than the original's"
    left_out = tuple(f"{path.name}/" for path in sorted(original.iterdir()) if path.is_dir())
    yield from _other_left_out(certificate, left_out)


def _took_up_norm(record: LayerRecord) -> bool:
    return any(step.rewrite == "fold_norm" and not step.refused for step in record.steps)


def _hash_of(path: Path) -> str:
    return file_hash(path) if path.is_file() else ""
