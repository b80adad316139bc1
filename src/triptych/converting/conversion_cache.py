"""The cache folder of converted models and of their translators."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from triptych.files import find_cache_folder, remove_folder, write_folder

_MOST_KEPT = 4  # converted models of one configuration


@contextmanager
def converted(name: str, write: Callable[[Path], object]) -> Iterator[Path]:
    """Yield the folder of a converted model inside a context, converting the model if needed.

    The folder stays in the cache folder. If the cache folder cannot be written, a temporary folder is used.
    """
    kept = in_cache(name, write)
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="triptych-") as temporary:
        place = Path(temporary, "model")
        write_folder(place, write)
        yield place


def in_cache(
    name: str, write: Callable[[Path], object], most: int = _MOST_KEPT
) -> Path | None:
    """Return a folder in the cache folder, written if it is missing; None if it cannot be written there.

    The `most` newest folders with the same name before the last hyphen stay.
    """
    folder = find_cache_folder()
    if folder is None:
        return None
    place = folder / name
    if not place.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_folder(place, write)
        except FileExistsError:  # another process was faster, or a file is in the way
            pass
        except OSError:  # no permission, or a full disk
            return None
        with contextlib.suppress(OSError):  # another process removes them, too
            _remove_older(place, most)
    return place if place.is_dir() else None


def _remove_older(place: Path, most: int) -> None:
    """Remove the oldest folders with the same name before the last hyphen."""
    alike = place.parent.glob(f"{place.name.rpartition('-')[0]}-*")
    newest = sorted(alike, key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in newest[most:]:
        remove_folder(folder)
