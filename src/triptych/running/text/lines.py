"""Lines of UTF-8 text from plain, gzip and Zstandard files; errors name file and line.

A line ends at a line feed only; a carriage return before it is dropped. Unicode's other line separators occur
within sentences, and splitting at them would misalign the source and target lines of a corpus. Byte order
marks are dropped, also inside a file, where joined files leave them.
"""

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, final, runtime_checkable

import zstandard

from triptych.errors import DataError, UsageError, near_path

GZIP = "gzip"
ZSTANDARD = "Zstandard"
PARQUET = "Parquet"
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, invalid in UTF-8

_ENDINGS = {GZIP: ".gz", ZSTANDARD: ".zst", PARQUET: ".parquet"}
_COMPRESSIONS = {".gz": GZIP, ".zst": ZSTANDARD}
_DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)
_BYTE_ORDER_MARK = "\ufeff"
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_CHUNK_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 26  # 64 MiB


@runtime_checkable
class ByteLines(Protocol):
    """A binary stream with lines."""

    def readline(self, size: int = ..., /) -> bytes:
        """Read bytes up to a line feed, at most `size`; empty at the end of the stream."""
        ...


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, without leading and trailing white space; empty lines are kept."""
    return [line.strip() for line in iterate_file(path)]


def iterate_file(path: Path) -> Iterator[str]:
    """Yield the lines of a plain, .gz or .zst file without their line endings."""
    with open_content(path) as stream:
        yield from iterate_lines(stream, str(path))


def iterate_blocks(path: Path) -> Iterator[str]:
    """Yield the unchanged text of a plain, .gz or .zst file in blocks of about a mebibyte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    with open_content(path) as stream:
        while True:
            raw = stream.read(_BLOCK_BYTES)
            num_kept = len(
                decoder.getstate()[0]
            )  # bytes of an incomplete character in the last block
            if num_bytes == 0:
                _require_no_utf16(raw, str(path))
                num_bytes = len(raw)
                raw = raw.removeprefix(_UTF8_MARK)
                start = num_bytes - len(raw)
            else:
                start = num_bytes - num_kept
                num_bytes += len(raw)
            if b"\0" in raw:
                number = start + num_kept + raw.index(b"\0") + 1
                raise DataError(
                    f"{path}: byte {number:,} is NUL, which no text has; give a text file"
                )
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                number = start + error.start + 1
                byte = error.object[error.start]
                raise DataError(
                    f"{path}: byte {number:,} (0x{byte:02x}) is not UTF-8; "
                    "convert the file to UTF-8, for instance with iconv"
                ) from error
            if text:
                yield text
            if not raw:
                return


@contextmanager
def open_content(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a plain, .gz or .zst file to read its text as bytes."""
    compression = _COMPRESSIONS.get(path.suffix.lower())
    with open_file(path) as file:
        # Check the first bytes of the file, and of the decompressed content: it must not be compressed again.
        check_content(file.peek(8), compression, str(path))
        if compression is None:
            yield file
            return
        stream = (
            gzip.GzipFile(fileobj=file)
            if compression == GZIP
            else io.BufferedReader(_ZstdStream(file))
        )
        try:
            check_content(stream.peek(8), None, f"the content of {path}")
            yield stream
        except _DECOMPRESSION_ERRORS as error:
            raise DataError(
                f"{path} is a damaged or truncated {compression} file ({error}); fetch or compress it again"
            ) from error


def iterate_lines(stream: ByteLines, name: str) -> Iterator[str]:
    """Yield the lines of a binary stream as they arrive, without their line endings."""
    # Reading one byte more than the limit detects too long lines.
    for number, raw in enumerate(
        iter(lambda: stream.readline(_LONGEST_LINE_BYTES + 1), b""), start=1
    ):
        if number == 1:
            _require_no_utf16(raw, name)
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        where = f"{name}, line {number}"
        if b"\0" in raw:
            raise DataError(
                f"{where}: holds a NUL byte, which no text does; remove it, or give a text file"
            )
        if len(raw) > _LONGEST_LINE_BYTES:
            raise DataError(
                f"{where}: has more than {_LONGEST_LINE_BYTES:,} bytes; break it into lines"
            )
        try:
            yield raw.decode("utf-8").replace(_BYTE_ORDER_MARK, "")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; "
                "convert the file to UTF-8, for instance with iconv"
            ) from error


def open_file(path: Path) -> io.BufferedReader:
    """Open a file for reading bytes."""
    try:
        return path.open("rb")
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a folder; give a file in it") from error
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist{near_path(path)}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from error


def require_kept_file(path: Path) -> None:
    """Refuse a pipe or a device for a text read more than once, such as a recipe's."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(
            f"{path} is not a file, and its text is read more than once: write it to a file"
        )


def check_content(head: bytes, expected: str | None, where: str) -> None:
    """Refuse content if its first bytes are not of the expected kind."""
    found = _compression_of(head)
    if found == expected or (expected == PARQUET and head.startswith(b"PAR1")):
        return
    if expected is None:
        raise DataError(
            f"{where} is a {found} file, not text; give it a name that ends in {_ENDINGS[found or '']}"
        )
    actual = "holds no such data" if found is None else f"is a {found} file"
    raise DataError(
        f"{where} is named {_ENDINGS[expected]} but {actual}; give it the ending of what it is"
    )


def _compression_of(head: bytes) -> str | None:
    if head.startswith(b"\x1f\x8b"):
        return GZIP
    # Parallel compressors begin with a skippable frame, 0x184D2A5? in little-endian order.
    if head.startswith(b"\x28\xb5\x2f\xfd") or head[1:4] == b"\x2a\x4d\x18":
        return ZSTANDARD
    # PAR1 alone is also the name of a gene; the next byte opens the first Thrift header of a Parquet file.
    if head.startswith(b"PAR1\x15"):
        return PARQUET
    return None


def _require_no_utf16(raw: bytes, name: str) -> None:
    if raw.startswith(_UTF16_MARKS):
        raise DataError(
            f"{name} is UTF-16 (it begins with its byte order mark); "
            "convert it to UTF-8: iconv -f UTF-16 -t UTF-8"
        )


@final
class _ZstdStream(io.RawIOBase):
    """The content of a Zstandard file, with any number of frames.

    Unlike the library's reader, it refuses a truncated frame.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._frame_begun = False
        self._content = b""

    def readable(self) -> bool:
        """Return True: the stream is readable."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the front of `buffer`; 0 means the end."""
        while not self._content:
            if not self._decompress_more():
                return 0
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _decompress_more(self) -> bool:
        compressed = b""
        if self._frame.eof:
            compressed = self._frame.unused_data
            self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._frame_begun = False
        compressed = compressed or self._file.read(_CHUNK_BYTES)
        if not compressed and self._frame_begun:
            raise EOFError("it ends inside a frame")
        if not compressed:
            return False
        self._frame_begun = True
        self._content = self._frame.decompress(compressed)
        return True
