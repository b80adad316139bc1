"""Models converted for an engine, kept in a cache folder between runs."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from triptych.files import write_folder


def cache_folder() -> Path:
    """Where converted models are kept: `triptych` in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"


@contextmanager
def converted(name: str, write: Callable[[Path], None]) -> Iterator[Path]:
    """The folder of a converted model, made if it is not there; a context, within which it can be read.

    It stays in the cache folder. Where that cannot be written, it is a temporary folder.
    """
    place = cache_folder() / name
    if not place.is_dir() and _can_make(place.parent):
        with contextlib.suppress(FileExistsError):  # another process was faster
            write_folder(place, write)
    if place.is_dir():
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="triptych-") as temporary:
        place = Path(temporary, "model")
        write_folder(place, write)
        yield place


def _can_make(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def hash_of(model: nn.Module, texts: Iterable[str]) -> str:
    """sha256 of all weights of a model, with their names, and of texts; in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(f"{len(encoded)}\n".encode() + encoded)
    return digest.hexdigest()
