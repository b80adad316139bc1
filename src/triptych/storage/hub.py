"""Checkpoints on the Hugging Face Hub. Only the requested bytes of the weights are downloaded."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    http_stream_backoff,
)

from triptych.errors import DataError
from triptych.storage.tensors import SAFETENSORS, SAFETENSORS_INDEX, Safetensors, Tensors, from_index, of_one
from triptych.storage.untrusted import Bytes, read_json

# `owner/name`, or `name` alone for some of the first; `@revision` may follow. A tensor file is none.
_ID = re.compile(
    r"(?P<repo>(?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?<!\.safetensors)(?<!\.bin)(?<!\.pt)(?<!\.pth)(?<!\.json)"
    r"(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
# Fetched at once from the start of a file: most headers are shorter.
_FIRST = 1 << 18
_PARTIAL = 206
# What a copy of a checkpoint is made of, and folders with the same weights for other programs.
_WHOLE = ("*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.toml", "*.jinja", "*.md", "LICENSE*")
_OTHER_FORMATS = ("onnx", "openvino", "coreml", "original", "mlx")


def is_hub_id(text: str) -> bool:
    """Whether a string has the form of a Hub id."""
    return _ID.fullmatch(text) is not None


def open_hub(hub_id: str, endpoint: str | None = None) -> tuple[dict[str, Any], str, Tensors]:
    """Open a repository on the Hub: its configuration, where it came from, and its tensors.

    Everything is read from one commit. Private and gated repositories need the token of `hf auth login` or
    HF_TOKEN.

    Args:
        hub_id: `owner/name` or `name`, with `@revision` or without.
        endpoint: address of the Hub; that of HF_ENDPOINT if None.

    Raises:
        DataError: the repository does not exist or has no safetensors, access is denied, or the network
            fails.
    """
    repo = _repository(hub_id, endpoint)
    config = repo.download("config.json")
    assert config is not None  # asked for before
    settings = read_json(config)
    index = repo.download(SAFETENSORS_INDEX)
    if index is None:
        tensors = of_one(Safetensors(repo.open(SAFETENSORS)))
    else:
        where = f"{hub_id}/{SAFETENSORS_INDEX}"
        tensors = from_index(read_json(index), where, hub_id, lambda shard: Safetensors(repo.open(shard)))
    return settings, f"{hub_id}/config.json", tensors


def download_model(hub_id: str, endpoint: str | None = None) -> Path:
    """Download the configuration and the weights of one commit of a repository; returns the folder.

    Args:
        hub_id: `owner/name` or `name`, with `@revision` or without.
        endpoint: address of the Hub; that of HF_ENDPOINT if None.

    Raises:
        DataError: the repository or a file does not exist, access is denied, or the network fails.
    """
    repo = _repository(hub_id, endpoint)
    found = [repo.download(file) for file in ("config.json", SAFETENSORS)]
    if found[0] is None or found[1] is None:
        raise DataError(f"{hub_id}: it has no {SAFETENSORS}, which a run of ours has its weights in")
    return found[0].parent


def download_checkpoint(hub_id: str, endpoint: str | None = None) -> Path:
    """Download the configuration, tokenizer and safetensors of one commit; returns the folder.

    Weights in other formats (such as pickled ones) and code are not downloaded.

    Args:
        hub_id: `owner/name` or `name`, with `@revision` or without.
        endpoint: address of the Hub; that of HF_ENDPOINT if None.

    Raises:
        DataError: the repository does not exist or has no safetensors, access is denied, or the network
            fails.
    """
    repo = _repository(hub_id, endpoint)
    if repo.download(SAFETENSORS_INDEX) is None:
        repo.open(SAFETENSORS)  # an error, before anything large is fetched
    bars = are_progress_bars_disabled()
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        with _explained(repo.name):
            return Path(
                snapshot_download(
                    repo.name,
                    revision=repo.revision,
                    endpoint=endpoint,
                    allow_patterns=[*_WHOLE],
                    ignore_patterns=[f"{folder}/*" for folder in _OTHER_FORMATS],
                )
            )
    finally:
        if not bars:
            enable_progress_bars()


def _repository(hub_id: str, endpoint: str | None) -> "_Repository":
    match = _ID.fullmatch(hub_id)
    if match is None:
        raise DataError(f"{hub_id} is neither a path nor a name on the Hub (owner/name)")
    return _Repository(match["repo"], match["revision"], endpoint)


@final
class _Repository:
    """One commit of a repository."""

    def __init__(self, name: str, revision: str | None, endpoint: str | None) -> None:
        self.name, self.endpoint = name, endpoint
        with _explained(name):
            try:
                metadata = get_hf_file_metadata(self._url("config.json", revision), endpoint=endpoint)
            except EntryNotFoundError:
                raise DataError(f"{name}: there is no config.json, which has the number of heads") from None
        self.revision = metadata.commit_hash or revision

    def download(self, file: str) -> Path | None:
        """Download a small file or take it from the cache; None if the repository does not have it."""
        with _explained(self.name):
            try:
                return Path(hf_hub_download(self.name, file, revision=self.revision, endpoint=self.endpoint))
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                return None

    def open(self, file: str) -> "HubBytes":
        """Open a large file. Only its size is fetched."""
        url = self._url(file, self.revision)
        with _explained(self.name):
            try:
                metadata = get_hf_file_metadata(url, endpoint=self.endpoint)
            except EntryNotFoundError:
                raise DataError(
                    f"{self.name} has no {file}: only safetensors are read from the Hub"
                ) from None
        if metadata.size is None:
            raise DataError(f"{self.name}/{file}: the Hub does not tell its size")
        return HubBytes(f"{self.name}/{file}", metadata.size, url)

    def _url(self, file: str, revision: str | None) -> str:
        return hf_hub_url(self.name, file, revision=revision, endpoint=self.endpoint)


@final
class HubBytes(Bytes):
    """A file on the Hub, read by ranges.

    Attributes:
        fetched: bytes downloaded so far.
    """

    def __init__(self, name: str, size: int, url: str) -> None:
        self.name, self.size, self.fetched = name, size, 0
        self._url = url
        self._first = bytearray()

    def read(self, start: int, length: int) -> bytearray:
        if start + length > self.size:
            raise DataError(f"{self.name} has {self.size:,} bytes, and {start + length:,} were asked for")
        if start + length <= min(_FIRST, self.size):
            if not self._first:
                self._first = self._fetch(0, min(_FIRST, self.size))
            return self._first[start : start + length]
        return self._fetch(start, length)

    def _fetch(self, start: int, length: int) -> bytearray:
        headers = build_hf_headers() | {"Range": f"bytes={start}-{start + length - 1}"}
        found = bytearray()
        with _explained(self.name), http_stream_backoff("GET", self._url, headers=headers) as answer:
            # What does not know ranges would send all of it.
            if answer.status_code != _PARTIAL and length < self.size:
                raise DataError(
                    f"{self.name}: asked for {length:,} bytes from {start:,}, the answer has status "
                    f"{answer.status_code}"
                )
            for part in answer.iter_bytes():
                found += part
        self.fetched += len(found)
        if len(found) != length:
            raise DataError(f"{self.name}: asked for {length:,} bytes, {len(found):,} came: try again")
        return found


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn errors of the Hub into one line. Missing files are left to the caller."""
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise DataError(_unreachable(name, error)) from None
    except (DataError, EntryNotFoundError):
        raise
    except GatedRepoError:
        raise DataError(f"{name}: request access on its page, then run `hf auth login`") from None
    except RepositoryNotFoundError:
        raise DataError(
            f"{name}: no such path, and no such repository on the Hub (or no access to it)"
        ) from None
    except RevisionNotFoundError:
        raise DataError(f"{name}: the repository has no such revision") from None
    # Errors of the network are httpx's, those of a transfer hf_xet's; the Hub's library adds its own. No
    # class is common to them.
    except Exception as error:  # noqa: BLE001
        raise DataError(_unreachable(name, error)) from None


def _unreachable(name: str, error: Exception) -> str:
    reason = (str(error) or type(error).__name__).splitlines()[0][:200]
    return f"{name}: no such path, and the Hub could not be reached: {reason}"
