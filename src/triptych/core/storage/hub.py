"""Checkpoints on the Hugging Face Hub. Only the requested bytes of the weights are downloaded.

The Hub is not trusted. Commits and hashes are checked for their form before use in file names. Answers longer
than requested and slow transfers are aborted. Whole files must match the Hub's hash; a file of weights up to
32 MiB is downloaded whole for that. Ranges of a larger file cannot be checked; a warning reports that.
"""

import hashlib
import os
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, final

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    filter_repo_objects,
    http_stream_backoff,
    tqdm,
    validate_repo_id,
)

from triptych.core.storage.tensors import (
    SAFETENSORS,
    SAFETENSORS_INDEX,
    Safetensors,
    Tensors,
    from_index,
    of_one,
)
from triptych.errors import DataError, SourceNote, near_path
from triptych.files import write_atomically, write_bytes
from triptych.launch import speaks
from triptych.untrusted import (
    LONGEST_JSON,
    LONGEST_TOKENIZER,
    Bytes,
    LocalBytes,
    MappedBytes,
    parsed_json,
    read_json,
    shown,
    stays_in_folder,
)

T = TypeVar("T")
# `owner/name`, or `name` alone for some early repositories; optionally `@revision`. Names of tensor files are
# excluded.
_ID = re.compile(
    r"(?P<repo>(?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?<!\.safetensors)(?<!\.bin)(?<!\.pt)(?<!\.pth)(?<!\.json)"
    r"(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
# Largest file of weights to download whole for a range of it, so that its hash can be compared.
_TAKEN_WHOLE = 1 << 25
# Bytes to fetch at once from the start of a larger file: most headers are shorter.
_FIRST = 1 << 18
# Bytes to fetch at once in the download of a whole file.
_PIECE = 1 << 26
_WHOLE_ANSWER = 200
_PARTIAL = 206
# A request is aborted after a period with fewer bytes than this rate.
_PATIENCE_SECONDS = 60.0
_LEAST_BYTES_PER_SECOND = 10_000
_ATTEMPTS = 3
# Forms of commits, and of hashes of a file: git's hash, or sha256 of a large file.
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NO_HUB = "is HF_ENDPOINT the address of a Hub?"
# Files of a complete copy of a checkpoint, and folders with the same weights for other programs.
_WHOLE = (
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
    "*.spm",
    "*.toml",
    "*.jinja",
    "*.md",
    "LICENSE*",
)
_GGUF = ".gguf"
_OTHER_FORMATS = ("onnx", "openvino", "coreml", "original", "mlx")


def is_hub_id(text: str) -> bool:
    """Return True if a string has the form of a name on the Hub."""
    return _parts(text) is not None


def open_hub(
    hub_id: str, endpoint: str | None = None, *, offline: bool = False
) -> "Repository":
    """Open one commit of a repository on the Hub.

    `hub_id`: name on the Hub (owner/name), optionally with @revision. `endpoint`: address of the Hub; None
    for the default. `offline`: use only cached files.
    """
    parts = _parts(hub_id)
    if parts is None:
        raise DataError(
            f"{hub_id} is neither a path nor a name on the Hub (owner/name)"
        )
    return Repository(*parts, endpoint, offline or constants.HF_HUB_OFFLINE)


def gguf_on_hub(text: str) -> tuple[str, str] | None:
    """Split a name such as `owner/name/FILE.gguf` or `owner/name@revision/FILE.gguf` at the file.

    Returns None for other strings.
    """
    repository, _, file = text.rpartition("/")
    if "/" not in repository or not file.endswith(_GGUF) or not is_hub_id(repository):
        return None
    return (repository, file) if stays_in_folder(file) else None


def fetch_files(
    hub_id: str,
    files: Sequence[str],
    endpoint: str | None = None,
    *,
    if_there: Sequence[str] = (),
    offline: bool = False,
) -> Path:
    """Download files of a model in GGUF, or of an adapter; return their folder in the cache.

    `files`: required files; the first replaces `config.json` in the repository. `if_there`: optional files.
    """
    parts = _parts(hub_id)
    assert parts is not None, hub_id
    repository = Repository(
        *parts, endpoint, offline or constants.HF_HUB_OFFLINE, first=files[0]
    )
    for file in files:
        if repository.download(file) is None:
            raise DataError(f"{hub_id} has no {shown(file)}: its page lists its files")
    known = if_there if repository.offline else repository.files()
    for file in if_there:
        if file in known:
            repository.download(file)
    return repository.folder


def _parts(hub_id: str) -> tuple[str, str | None] | None:
    """Split a name on the Hub into repository and revision; return None for other strings."""
    match = _ID.fullmatch(hub_id)
    if match is None:
        return None
    try:
        validate_repo_id(match["repo"])
    except HFValidationError:
        return None
    return match["repo"], match["revision"]


@final
class NoConfigurationError(DataError):
    """A missing `config.json`, or the missing main file of another format."""


@final
class Repository:
    """One commit of a repository."""

    def __init__(
        self,
        name: str,
        revision: str | None,
        endpoint: str | None,
        offline: bool,
        first: str | None = None,
    ) -> None:
        """Find the commit, and read the configuration unless another file is given as the `first`."""
        self.name = name
        self.endpoint = endpoint
        self._first = first
        self.offline = offline
        self._cache = Path(
            constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model")
        )
        self.revision = (
            self._stored_commit(revision) if offline else self._commit(revision)
        )
        self.folder = self._cache / "snapshots" / self.revision
        config = None if first else self.download("config.json")
        if config is None and first is None:
            raise self._no_file()
        self.record = {} if config is None else read_json(config)

    def tensors(self, *, mapped: bool = False) -> Tensors:
        """Open the tensors: cached files from the disk, further files by ranges of bytes.

        `mapped`: map cached files into memory instead of copying from them.
        """

        def opened(file: str) -> Safetensors:
            found = self.open(file, mapped=mapped)
            if isinstance(found, HubBytes):
                warnings.warn(
                    f"{self.name}: parts of its weights are read from the Hub, and only a whole file can be "
                    "compared with the Hub's hash",
                    SourceNote,
                    stacklevel=2,
                )
            return Safetensors(found)

        # A repository without an index has its weights in a single file.
        index = self.download(SAFETENSORS_INDEX)
        if index is None:
            return of_one(opened(SAFETENSORS))
        return from_index(
            read_json(index), f"{self.name}/{SAFETENSORS_INDEX}", self.name, opened
        )

    def fetch(self) -> Path:
        """Download configuration, tokenizer and safetensors; return the folder.

        Weights in other formats (such as pickled ones) and code are not downloaded.
        """
        if self.download(SAFETENSORS_INDEX) is None:
            self.open(SAFETENSORS)  # fails before large files are fetched
        if self.offline:
            return self.folder
        others = [f"{folder}/*" for folder in _OTHER_FORMATS]
        for file in filter_repo_objects(
            self.files(), allow_patterns=[*_WHOLE], ignore_patterns=others
        ):
            if self.download(file) is None:
                raise DataError(
                    f"{self.name}: the Hub lists {shown(file)}, and does not have it: try again"
                )
        return self.folder

    def download(self, file: str) -> Path | None:
        """Return the path of a file, downloaded unless it is cached, or None if the repository lacks it."""
        path = self.folder / file
        if path.is_file():
            return path
        if self.offline or (found := self._find_file(file, self.revision)) is None:
            return None
        self._save(found[0], file)
        return path

    def _save(self, there: "HubBytes", file: str) -> None:
        """Download a whole file into the cache and check it against the Hub's hash."""
        path = self.folder / file
        with _explained(self.name):
            blob = self._cache / "blobs" / there.digest
            blob.parent.mkdir(parents=True, exist_ok=True)
            if not blob.is_file():
                self._require_room(there, file)
                write_atomically(blob, there.save)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.symlink_to(os.path.relpath(blob, path.parent))
            except FileExistsError:  # another process was quicker
                pass
            except OSError:  # a system without links
                shutil.copyfile(blob, path)

    def open(self, file: str, *, mapped: bool = False) -> Bytes:
        """Open a file of weights; files larger than 32 MiB are not downloaded, but read by ranges."""
        path = self.folder / file
        if not path.is_file():
            if self.offline:
                raise DataError(
                    f"{self.name}: {file} is not in {self._cache}, and no connection is asked for"
                )
            if (found := self._find_file(file, self.revision)) is None:
                raise DataError(
                    f"{self.name} has no {file}: only safetensors are read from the Hub"
                )
            if found[0].size > _TAKEN_WHOLE:
                return found[0]
            self._save(found[0], file)
        return MappedBytes(path) if mapped else LocalBytes(path)

    def files(self) -> list[str]:
        url = f"{self.endpoint or constants.ENDPOINT}/api/models/{self.name}/revision/{self.revision}"
        where = f"{self.name}, its list of files"
        with _explained(self.name):
            content = _in_time(
                where, lambda transfer: transfer.get(url, where, LONGEST_JSON)
            )
        # Names are checked before any path is made of them: the list is not trusted.
        listed = parsed_json(content, where).get("siblings")
        names: list[str] = []
        for one in listed if isinstance(listed, list) else []:
            name = one.get("rfilename") if isinstance(one, dict) else one
            if not isinstance(name, str) or not stays_in_folder(name):
                raise DataError(f"{where}: {shown(name)} is not the name of a file")
            names.append(name)
        return names

    def _commit(self, revision: str | None) -> str:
        """Return the commit of a revision, and store it for offline use."""
        found = self._find_file(self._first or "config.json", revision)
        if found is None:
            raise self._no_file()
        (_, commit), wanted = found, revision or constants.DEFAULT_REVISION
        kept = self._cache / "refs" / wanted
        if wanted != commit and stays_in_folder(wanted):
            with suppress(OSError):
                if not kept.is_file() or kept.read_text() != commit:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    write_bytes(kept, commit.encode())
        return commit

    def _no_file(self) -> NoConfigurationError:
        if self._first is not None:
            return NoConfigurationError(
                f"{self.name}: there is no {shown(self._first)} in it: its page lists its files"
            )
        return NoConfigurationError(
            f"{self.name}: there is no config.json, which has the number of heads; a model in GGUF is named "
            f"by its file, {self.name}/FILE.gguf"
        )

    def _stored_commit(self, revision: str | None) -> str:
        wanted = revision or constants.DEFAULT_REVISION
        kept = self._cache / "refs" / wanted
        commit = (
            kept.read_text().strip()
            if stays_in_folder(wanted) and kept.is_file()
            else wanted
        )
        if (
            _COMMIT.fullmatch(commit) is None
            or not (self._cache / "snapshots" / commit).is_dir()
        ):
            raise DataError(
                f"{self.name}: no such path{near_path(self.name)}, and it is not in "
                f"{constants.HF_HUB_CACHE}: load it once with a connection (offline=False, no HF_HUB_OFFLINE)"
            )
        return commit

    def _find_file(
        self, file: str, revision: str | None
    ) -> tuple["HubBytes", str] | None:
        """Return a file and its commit from the Hub's metadata, or None if the repository lacks the file."""
        where = f"{self.name}/{file}"
        with _explained(self.name):
            url = hf_hub_url(self.name, file, revision=revision, endpoint=self.endpoint)
            try:
                found = _in_time(
                    where, lambda _: get_hf_file_metadata(url, endpoint=self.endpoint)
                )
            except EntryNotFoundError:
                return None
        # Commit and hash become names of folders and files in the cache.
        if _COMMIT.fullmatch(found.commit_hash or "") is None:
            raise DataError(
                f"{where}: {shown(found.commit_hash)} is not the form of a commit: {_NO_HUB}"
            )
        if _HASH.fullmatch(found.etag or "") is None:
            raise DataError(
                f"{where}: {shown(found.etag)} is not the form of a hash: {_NO_HUB}"
            )
        if found.size is None or found.size < 0:
            raise DataError(f"{where}: the Hub does not tell its size")
        return HubBytes(where, found.size, url, str(found.etag)), str(found.commit_hash)

    def _require_room(self, there: "HubBytes", file: str) -> None:
        free = shutil.disk_usage(self._cache).free
        if there.size > free:
            raise DataError(
                f"{there.name} has {there.size / 1e9:.2f} GB, and the disk of {self._cache} has "
                f"{free / 1e9:.2f} GB free: make room, or set HF_HUB_CACHE to a folder elsewhere"
            )
        if there.size > LONGEST_TOKENIZER and not file.endswith(
            (".safetensors", _GGUF)
        ):
            raise DataError(
                f"{there.name}: {there.size:,} bytes are past {LONGEST_TOKENIZER:,}"
            )


@final
class HubBytes(Bytes):
    """A file on the Hub read in ranges."""

    def __init__(self, name: str, size: int, url: str, digest: str) -> None:
        # A digest has 64 digits (sha256), or 40 (git's hash of a small file).
        self.name = name
        self.size = size
        self.digest = digest
        self.fetched = 0
        self._url = url
        self._first = bytearray()

    def read(self, start: int, length: int) -> bytearray:
        if start + length > self.size:
            raise DataError(
                f"{self.name} has {self.size:,} bytes, and {start + length:,} were asked for"
            )
        if start + length <= min(_FIRST, self.size):
            if not self._first:
                self._first = self._fetch(0, min(_FIRST, self.size))
            return self._first[start : start + length]
        return self._fetch(start, length)

    def save(self, path: Path) -> None:
        """Download the whole file to a path and check its hash."""
        found = self._new_digest()
        silent = not (sys.stderr.isatty() and speaks())
        bar = tqdm(  # type: ignore[no-untyped-call]
            desc=self.name,
            total=self.size,
            unit="B",
            unit_scale=True,
            delay=1,
            leave=False,
            disable=silent,
        )
        with path.open("wb") as file, bar:
            for start in range(0, self.size, _PIECE):
                piece = self._fetch(start, min(_PIECE, self.size - start), bar.update)
                found.update(piece)
                file.write(piece)
        self._require_hash(found)

    def _new_digest(self) -> "hashlib._Hash":
        if len(self.digest) == hashlib.sha256().digest_size * 2:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    def _require_hash(self, found: "hashlib._Hash") -> None:
        if found.hexdigest() != self.digest:
            raise DataError(
                f"{self.name}: what came has the hash {found.hexdigest()}, and the Hub gives {self.digest}: "
                "try again"
            )

    def _fetch(
        self,
        start: int,
        length: int,
        on_received: Callable[[int], object] = lambda count: None,
    ) -> bytearray:
        with _explained(self.name):
            found = _in_time(
                self.name,
                lambda transfer: transfer.get_range(
                    self._url, self.name, start, length, self.size
                ),
                on_received,
            )
        self.fetched += len(found)
        return found


@final
class _Transfer:
    """A request in a separate thread, with the number of bytes received so far."""

    def __init__(self, on_received: Callable[[int], object]) -> None:
        self.received = 0
        self.stopped = False
        self._on_received = on_received

    def get(self, url: str, name: str, most: int) -> bytearray:
        """Return the whole answer, of at most `most` bytes."""
        found = bytearray()
        with self._answer(url, {}) as answer:
            if answer.status_code != _WHOLE_ANSWER:
                raise DataError(f"{name}: the answer has status {answer.status_code}")
            self._receive(answer, found, name, most)
        return found

    def get_range(
        self, url: str, name: str, start: int, length: int, size: int
    ) -> bytearray:
        """Return a range of a file; request missing bytes again after a broken connection."""
        found = bytearray()
        for left in reversed(range(_ATTEMPTS)):
            first = start + len(found)
            last = start + length - 1
            wanted = f"{name}: asked for bytes {first:,} to {last:,} of {size:,}"
            try:
                with self._answer(url, {"Range": f"bytes={first}-{last}"}) as answer:
                    given = answer.headers.get("Content-Range")
                    partial = answer.status_code == _PARTIAL
                    # A server without support for ranges would send the whole file.
                    if not partial and (
                        answer.status_code != _WHOLE_ANSWER or last - first + 1 < size
                    ):
                        raise DataError(
                            f"{wanted}, the answer has status {answer.status_code}"
                        )
                    if partial and given not in (
                        f"bytes {first}-{last}/{size}",
                        f"bytes {first}-{last}/*",
                    ):
                        raise DataError(
                            f"{wanted}, the answer is of {shown(given)}: try again"
                        )
                    self._receive(answer, found, wanted, length)
            except DataError:
                raise
            except Exception:  # network errors lack a common class, see `_explained`
                if self.stopped or not left:
                    raise
                time.sleep(1)
                continue
            if len(found) == length:
                return found
        raise DataError(f"{wanted}, and fewer came: try again")

    def _answer(self, url: str, headers: dict[str, str]) -> Any:
        headers = build_hf_headers() | {"Accept-Encoding": "identity"} | headers
        return http_stream_backoff(
            "GET",
            url,
            headers=headers,
            timeout=_PATIENCE_SECONDS,
            retry_on_exceptions=(),
        )

    def _receive(self, answer: Any, found: bytearray, name: str, most: int) -> None:
        # Read raw bytes: a small compressed answer could expand to any size.
        for part in answer.iter_raw():
            if self.stopped:
                raise InterruptedError("stopped")
            if len(found) + len(part) > most:
                raise DataError(f"{name}, and more came: try again")
            found += part
            self.received += len(part)
            self._on_received(len(part))


def _in_time(
    name: str,
    work: Callable[[_Transfer], T],
    on_received: Callable[[int], object] = lambda count: None,
) -> T:
    """Return the result of a request; raise DataError if it is too slow."""
    # A socket's timeout does not end an answer arriving byte by byte. A hanging thread is abandoned.
    transfer = _Transfer(on_received)
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work(transfer))
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        while True:
            before = transfer.received
            try:
                return future.result(_PATIENCE_SECONDS)
            except TimeoutError:
                if future.done():
                    return future.result()
            came = transfer.received - before
            if came < _PATIENCE_SECONDS * _LEAST_BYTES_PER_SECOND:
                raise DataError(
                    f"{name}: only {came:,} bytes came in {_PATIENCE_SECONDS:.0f} seconds: the network or "
                    "the Hub is too slow; try again later"
                )
    finally:
        transfer.stopped = True


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Convert errors of the Hub to DataError with one line; missing files are left to the caller."""
    try:
        yield
    except (DataError, EntryNotFoundError):
        raise
    except GatedRepoError:
        raise DataError(
            f"{name}: request access on its page, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise DataError(
            f"{name}: no such path{near_path(name)}, and no such repository on the Hub (or no access to it)"
        ) from None
    except RevisionNotFoundError:
        raise DataError(f"{name}: the repository has no such revision") from None
    # Network errors are classes of httpx or of the Hub's library, without a common base class.
    except Exception as error:  # noqa: BLE001
        reason = shown((str(error) or type(error).__name__).splitlines()[0])
        raise DataError(
            f"{name}: no such path{near_path(name)}, and the Hub could not be reached: {reason}"
        ) from None
