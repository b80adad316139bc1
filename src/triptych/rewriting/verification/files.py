"""Checks of the files of a rewritten checkpoint against its certificate and the original."""

from pathlib import Path

from triptych.files import file_hash, leads_to
from triptych.rewriting.certificate import MODEL_CARD, Certificate, card
from triptych.rewriting.formats import Format
from triptych.rewriting.verification.check import Claim, listed
from triptych.storage.copying import CERTIFICATE
from triptych.storage.shards import tensor_hash
from triptych.storage.tensors import SAFETENSORS, SAFETENSORS_INDEX, Tensors
from triptych.storage.untrusted import LONGEST_TEXT, read_json, read_limited, shown, stays_in_folder

_NOTHING_ELSE = "nothing else is other than it was"


def files_as_written(certificate: Certificate, folder: Path) -> Claim:
    """Check the hashes of the files beside the tensors, and the section of the model card."""
    wrong = []
    for name, wanted in certificate.files.items():
        path = folder / name
        if not stays_in_folder(name) or not leads_to(path).is_relative_to(leads_to(folder)):
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
    text = read_limited(readme, LONGEST_TEXT).decode(errors="replace") if readme.is_file() else ""
    if card(certificate).strip() not in text:
        wrong.append(f"{MODEL_CARD} does not say what the certificate does")
    return listed("other files as written", wrong, f"{len(certificate.files)} files")


def _files_of_tensors(folder: Path) -> set[str]:
    """Names of the files that the tensors of a folder are read from."""
    if (folder / SAFETENSORS).is_file() or not (folder / SAFETENSORS_INDEX).is_file():
        return {SAFETENSORS}
    named = read_json(folder / SAFETENSORS_INDEX).get("weight_map")
    return {str(name) for name in named.values()} if isinstance(named, dict) else set()


def hashes(certificate: Certificate, tensors: Tensors, which: str, claim: str) -> Claim:
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
    certificate: Certificate, original: Path, folder: Path, source: Format, written: Format
) -> Claim:
    """Check that only the measured layers and the listed settings changed."""
    named = [layer.module for layer in certificate.layers]
    sites = source.source.sites
    wrong = [f"{site.module} is not in the certificate" for site in sites if site.module not in named]
    wrong += [f"{module} is in the certificate twice" for module in set(named) if named.count(module) > 1]
    wrong += source.other_than(certificate, original, folder, written.source)
    measured = sum(layer.measured is not None for layer in certificate.layers)
    return listed(_NOTHING_ELSE, wrong, f"{measured} layers were changed")
