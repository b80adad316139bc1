"""Translators kept next to their converted models, so that a command translates without torch.

The cache folder has a folder for each source that CTranslate2 has translated: the tokenizers, the search
settings, the name of the converted model, and the sizes and times of the files of the source. A source with
another file, size or time is opened and converted anew (`engines.py`), and its folder is replaced.
"""

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, final

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
from triptych.errors import DataError, EngineNote, TriptychError
from triptych.extras import is_installed
from triptych.files import find_cache_folder, remove_folder, write_text
from triptych.literals import Precision
from triptych.running.decoding import SearchOptions, Translator
from triptych.running.opening import DecodingConfig
from triptych.running.text import TokenizerPair
from triptych.untrusted import Stamp, read_json, validated
from triptych.user_code import paths

_RECORD = "translator.json"
_MOST_FILES = 1000  # a folder with more files is opened each time
_MOST_KEPT = 16
# Device files of GPUs: torch may take such a GPU, and finds it only after its import.
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


@final
class _Record(BaseModel):
    """A translator whose converted model is in the cache folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path  # folder of the source
    files: dict[str, Stamp]  # stamps by paths below the root
    converted: str  # name of the converted model in the cache folder
    decoding: DecodingConfig
    limits: SearchLimits


def _may_have_gpu() -> bool:
    return sys.platform == "win32" or any(map(os.path.exists, _GPUS))


def kept_translator(
    source: str,
    opening: Mapping[str, Any],
    search: Mapping[str, Any],
    workers: int,
    search_again: Callable[[SearchOptions], Translator],
) -> Translator | None:
    """Return the translator of a source from the cache folder; None if it has to be opened.

    `opening` are arguments of `load`, and `search` arguments of `DecodingConfig.search_options`.
    `search_again` opens the source and makes a translator of triptych, for outputs that CTranslate2 cuts off.
    """
    cache = find_cache_folder()
    if cache is None or not _may_be_kept(opening) or search["num_best"] > 1:
        return None
    folder = cache / _name(source, search.get("max_extra_tokens"))
    try:
        record = _read(folder)
        if record.files != _stamps(record.root):
            return None
        tokenizers = TokenizerPair.load(folder)
        given = {**search, "stop": search.get("stop") or "full"}
        options = record.decoding.search_options(**given)
        require_full_stop(options)
        require_beam_alone(options)
        precision: Precision = opening["precision"]
        model = load_folder(
            "Translator",
            cache / record.converted,
            precision,
            ("cpu", 0),
            (workers, 1),
        )
    except (TriptychError, OSError):  # raised again, or mended, when it is opened
        return None

    def again(options: SearchOptions) -> Translator:
        if record.files != _stamps(record.root):
            raise DataError(
                f"{source} was written anew while it was open: open the model again"
            )
        return search_again(options)

    if opening["engine"] == "auto":
        warnings.warn(f"engine auto: {TAKEN_BY_AUTO}", EngineNote, stacklevel=2)
    searcher = CTranslate2Searcher(
        model, tokenizers, options, record.limits, again, cache / record.converted
    )
    return Translator(None, tokenizers, options, precision=precision, decoder=searcher)


def keep_translator(
    source: str,
    root: Path,
    translator: Translator,
    decoding: DecodingConfig,
    max_extra_tokens: int | None,
) -> None:
    """Keep a translator of CTranslate2 for `kept_translator`; `root` is the folder of its source."""
    decoder = translator.decoder
    cache = find_cache_folder()
    files = _stamps(root)
    if (
        cache is None
        or files is None
        or paths()
        or not isinstance(decoder, CTranslate2Searcher)
        or decoder.folder.parent != cache
    ):
        return
    record = _Record(
        root=root.resolve(),
        files=files,
        converted=decoder.folder.name,
        decoding=decoding,
        limits=decoder.limits,
    )
    name = _name(source, max_extra_tokens)
    with suppress(DataError):
        if _read(cache / name) == record:
            return

    def write(folder: Path) -> None:
        translator.tokenizers.save(folder)
        write_text(folder / _RECORD, record.model_dump_json())

    with suppress(OSError):  # another process removes it, too
        remove_folder(cache / name)
    in_cache(name, write, _MOST_KEPT)


def _read(folder: Path) -> _Record:
    return validated(_Record, read_json(folder / _RECORD), folder / _RECORD)


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


def _stamps(root: Path) -> dict[str, Stamp] | None:
    """Return stamps of all files in a folder, by paths; None for too many files, or an unreadable file."""
    found = [*islice(_files_below(root), _MOST_FILES + 1)]
    if len(found) > _MOST_FILES:
        return None
    try:
        return {str(path.relative_to(root)): Stamp.of(path.stat()) for path in found}
    except OSError:  # a link to a missing file
        return None


def _files_below(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in sorted(names))
