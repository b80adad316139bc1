"""Translators kept next to their converted models, so that a command translates without torch.

The cache folder has a folder for each source that CTranslate2 has translated: the tokenizers, the search
settings, the name of the converted model, and the sizes and times of the files of the source. A source with
another file, size or time is opened and converted anew (`engines.py`), and its folder is replaced.

The command alone keeps translators: in Python, the weights of an opened model may have been changed.
"""

import errno
import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from pydantic import BaseModel, ConfigDict

from triptych.converting.conversion_cache import in_cache
from triptych.converting.ctranslate2_search import (
    TAKEN_BY_AUTO,
    CTranslate2Searcher,
    SearchLimits,
    load_folder,
    require_beam_alone,
    require_full_stop,
)
from triptych.errors import ConfigurationWarning, DataError, EngineNote, TriptychError
from triptych.extras import is_installed
from triptych.files import find_cache_folder, remove_folder, write_text
from triptych.literals import Precision
from triptych.running.decoding import SearchOptions, Translator
from triptych.running.opening import DecodingConfig
from triptych.running.text import TokenizerPair
from triptych.untrusted import Stamp, read_json, validated
from triptych.user_code import paths

if TYPE_CHECKING:
    from triptych.running.opened_source import Opened

_RECORD = "translator.json"
_MOST_FILES = 1000  # a folder with more files is opened each time
_MOST_KEPT = 16
# Device files of GPUs: torch may take such a GPU, and finds it only after its import.
_GPUS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
# Stamps of files by paths below a folder. The time of the last change of the status is part of a stamp:
# programs to unpack archives can set the other times.
_Files = dict[str, tuple[int, ...]]


@final
class _Record(BaseModel):
    """A translator whose converted model is in the cache folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path  # folder of the source
    files: _Files
    converted: str  # name of the converted model in the cache folder
    decoding: DecodingConfig
    limits: SearchLimits


def _may_have_gpu() -> bool:
    return sys.platform == "win32" or any(map(os.path.exists, _GPUS))


@final
class KeptTranslator:
    """The translator of a source in the cache folder, for the options of one command."""

    def __init__(
        self, source: str, opening: Mapping[str, Any], search: Mapping[str, Any]
    ) -> None:
        """Prepare for a command's options.

        `search` are arguments of `DecodingConfig.search_options`. `opening` are arguments of `load`, and
        further options to change the model. No translator is kept for a changed model.
        """
        self._source = source
        self._opening = opening
        self._search = search
        self._folder: Path | None = None
        # The files before the source is opened: they may change before the translator is kept.
        self._before: _Files | None = None
        cache = find_cache_folder()
        if cache is not None and _may_be_kept(opening):
            self._folder = cache / _name(source, search["max_extra_tokens"])

    def find(
        self, workers: int, search_again: Callable[[SearchOptions], Translator]
    ) -> Translator | None:
        """Return the translator; None if the source has to be opened.

        `search_again` opens the source and makes a translator of triptych, for outputs that CTranslate2 cuts
        off.
        """
        if self._folder is None or self._search["num_best"] > 1:
            return None
        self._before = _files_of(Path(self._source))
        precision: Precision = self._opening["precision"]
        try:
            place = self._folder / _RECORD
            record = validated(_Record, read_json(place), place)
            tokenizers = TokenizerPair.load(self._folder)
            # Checked last: another process may have replaced the folder for a newer source.
            if record.files != _files_of(record.root):
                return None
            given = {**self._search, "stop": self._search.get("stop") or "full"}
            options = record.decoding.search_options(**given)
            require_full_stop(options)
            require_beam_alone(options)
            converted = self._folder.with_name(record.converted)
            model = load_folder(
                "Translator",
                converted,
                precision,
                ("cpu", 0),
                (workers, 1),
            )
        except (TriptychError, OSError):  # raised again, or mended, when it is opened
            return None

        def again(options: SearchOptions) -> Translator:
            if record.files != _files_of(record.root):
                raise DataError(
                    f"{self._source} was written anew while it was open: open the model again"
                )
            return search_again(options)

        if self._opening["engine"] == "auto":
            warnings.warn(f"engine auto: {TAKEN_BY_AUTO}", EngineNote, stacklevel=2)
        searcher = CTranslate2Searcher(
            model, tokenizers, options, record.limits, again, converted
        )
        return Translator(
            None, tokenizers, options, precision=precision, decoder=searcher
        )

    def keep(self, opened: "Opened", translator: Translator) -> None:
        """Keep the translator of the opened source after `find` returned None."""
        decoder = translator.decoder
        root = opened.source.found
        if (
            self._folder is None
            or not isinstance(decoder, CTranslate2Searcher)
            or decoder.folder.parent != self._folder.parent
            or not isinstance(root, Path)
            or not root.is_dir()
        ):
            return
        root = root.resolve()
        files = _files_of(root)
        # Files of the demo, whose name differs from its path, were not read before.
        if files is None or (Path(self._source).exists() and files != self._before):
            return
        if _warns(opened):
            return
        record = _Record(
            root=root,
            files=files,
            converted=decoder.folder.name,
            decoding=opened.to_run.decoding,
            limits=decoder.limits,
        )

        def write(folder: Path) -> None:
            translator.tokenizers.save(folder)
            write_text(folder / _RECORD, record.model_dump_json())

        with suppress(OSError):  # another process removes it, too
            remove_folder(self._folder)
        in_cache(self._folder.name, write, _MOST_KEPT)


def _warns(opened: "Opened") -> bool:
    """Return True if the opening of a source warns: a kept translator would not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigurationWarning)
        return bool(opened.attention.warnings)


def _name(source: str, max_extra_tokens: int | None) -> str:
    """Return the name of a source's folder in the cache folder."""
    place = Path(source)
    key = (
        str(place.resolve() if place.exists() else place),
        max_extra_tokens,
        *map(version, ("triptych", "ctranslate2")),
    )
    return f"translator-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"


def _may_be_kept(opening: Mapping[str, Any]) -> bool:
    """Return True if CTranslate2 runs on the CPU, and the model depends on its source alone."""
    device = opening["device"]
    plain = {"device", "engine", "precision", "offline"}
    return (
        opening["engine"] in ("auto", "ctranslate2")
        and (device == "cpu" or (device == "auto" and not _may_have_gpu()))
        and not any(opening[name] for name in opening.keys() - plain)
        and not paths()
        and is_installed("ctranslate2")
    )


def _files_of(root: Path) -> _Files | None:
    """Return stamps of all files in a folder.

    None for too many files, a linked folder or an unreadable file, and for names that JSON cannot have.
    """
    found: _Files = {}
    try:
        for path in islice(_files_below(root), _MOST_FILES + 1):
            str(path).encode()
            own = path.stat()
            found[str(path.relative_to(root))] = (*Stamp.of(own), own.st_ctime_ns)
    except (OSError, UnicodeEncodeError):
        return None
    return found if len(found) <= _MOST_FILES else None


def _files_below(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        if linked := [name for name in below if Path(folder, name).is_symlink()]:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), linked[0])
        yield from (Path(folder, name) for name in names)
