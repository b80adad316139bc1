import gzip
import io
from pathlib import Path

import pytest
import zstandard

from triptych.errors import DataError, UsageError
from triptych.running.text import iterate_lines, read_lines

CONTENT = "Guten Morgen.\nZweite Zeile – mit Strich.\n".encode()
LINES = ["Guten Morgen.", "Zweite Zeile – mit Strich."]


def compress(ending: str, content: bytes) -> bytes:
    # With a checksum, as the zstd command writes one.
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    # Without a time: names of cases must not change from second to second.
    return gzip.compress(content, mtime=0) if ending == ".gz" else zstd.compress(content)


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_reads_as_the_plain_one(tmp_path: Path, ending: str) -> None:
    plain = write(tmp_path, "a.de", CONTENT)
    compressed = write(tmp_path, f"a.de{ending}", compress(ending, CONTENT))
    assert read_lines(plain) == read_lines(compressed) == LINES


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_of_several_compressed_parts_is_read_to_its_end(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path, f"a{ending}", compress(ending, CONTENT) + compress(ending, b"Ende"))
    assert read_lines(path) == [*LINES, "Ende"]


def test_a_zstandard_file_that_begins_with_a_skippable_frame_is_read(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    assert read_lines(write(tmp_path, "a.zst", skippable + zstandard.compress(CONTENT))) == LINES


def test_a_zstandard_file_larger_than_one_read_is_read_to_its_end(tmp_path: Path) -> None:
    lines = [str(number**5) for number in range(40_000)]
    path = write(tmp_path, "a.zst", zstandard.compress("\n".join(lines).encode()))
    assert path.stat().st_size > 1 << 17
    assert read_lines(path) == lines


@pytest.mark.parametrize(("ending", "kind"), [(".gz", "gzip"), (".zst", "Zstandard")])
def test_a_truncated_compressed_file_is_refused_by_name(tmp_path: Path, ending: str, kind: str) -> None:
    content = "\n".join(str(number**3) for number in range(5000)).encode()
    path = write(tmp_path, f"a.de{ending}", compress(ending, content)[:-20])
    with pytest.raises(DataError, match=rf"a\.de\{ending} is a damaged or truncated {kind} file"):
        read_lines(path)


@pytest.mark.parametrize(("ending", "kind"), [(".gz", "gzip"), (".zst", "Zstandard")])
def test_a_corrupt_compressed_file_is_refused_by_name(tmp_path: Path, ending: str, kind: str) -> None:
    content = compress(ending, "\n".join(str(number**3) for number in range(5000)).encode())
    middle = len(content) // 2
    path = write(tmp_path, f"a{ending}", content[:middle] + b"\xff" * 50 + content[middle + 50 :])
    with pytest.raises(DataError, match=f"damaged or truncated {kind} file"):
        read_lines(path)


TWICE = compress(".gz", compress(".gz", CONTENT))
PLAIN, UTF_16 = "give it a name that ends in", r"a\.txt is UTF-16 .*iconv -f UTF-16 -t UTF-8"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", compress(".gz", CONTENT), rf"a\.txt is a gzip file, not text; {PLAIN} \.gz"),
        ("a.txt", compress(".zst", CONTENT), rf"a\.txt is a Zstandard file, not text; {PLAIN} \.zst"),
        *(("a.gz", content, r"a\.gz is named \.gz but holds no such data") for content in (CONTENT, b"")),
        *(("a.zst", content, r"a\.zst is named \.zst but holds no such data") for content in (CONTENT, b"")),
        ("a.zst", compress(".gz", CONTENT), r"a\.zst is named \.zst but is a gzip file"),
        ("a.gz", TWICE, r"the content of .*a\.gz is a gzip file, not text"),
        ("a.txt", b"PAR1\x15\x04\x15", r"a\.txt is a Parquet file, not text"),
        ("a.txt", "\ufeffeins".encode("utf-16-le"), UTF_16),
        ("a.txt", "\ufeffeins".encode("utf-16-be"), UTF_16),
        ("a.txt", "eins\nzwölf\n".encode("latin-1"), r"a\.txt, line 2: byte 3 \(0xf6\) is not UTF-8"),
        ("a.txt", b"a\nb\nc\0d\n", r"a\.txt, line 3: holds a NUL byte"),
    ],
)
def test_what_is_no_text_or_not_what_its_name_says_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        read_lines(write(tmp_path, name, content))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.txt", r"nowhere\.txt does not exist"),
        (".", "is a folder; give a file in it"),
        ("a" * 300, "cannot be opened: File name too long"),
    ],
)
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_lines(tmp_path / name)


def test_a_sentence_about_the_gene_par1_is_text(tmp_path: Path) -> None:
    assert read_lines(write(tmp_path, "a.txt", b"PAR1 is a receptor.")) == ["PAR1 is a receptor."]


def test_byte_order_marks_are_dropped_also_where_files_were_joined(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "\ufeffeins\n\ufeffzwei".encode())
    assert read_lines(path) == ["eins", "zwei"]


def test_carriage_returns_before_line_feeds_are_dropped() -> None:
    assert list(iterate_lines(io.BytesIO(b"a \r\nb\n\r\nc\r"), "stdin")) == ["a ", "b", "", "c"]


def test_only_line_feeds_end_a_line() -> None:
    line = "a\u2028b\u2029c\x0bd\x85e\x0cf\x1cg\rh"
    assert list(iterate_lines(io.BytesIO(line.encode() + b"\nz"), "stdin")) == [line, "z"]


def test_a_line_without_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.running.text.lines._LONGEST_LINE_BYTES", 8)
    lines = iterate_lines(io.BytesIO(b"12345678\n123456789 and so on"), "stdin")
    assert next(lines) == "12345678"
    with pytest.raises(DataError, match="stdin, line 2: has more than 8 bytes; break it into lines"):
        next(lines)


def test_lines_of_a_stream_come_as_they_arrive() -> None:
    lines = iterate_lines(io.BytesIO(b"gut\n\xff\n"), "stdin")
    assert next(lines) == "gut"
    with pytest.raises(DataError, match=r"stdin, line 2: byte 1 \(0xff\) is not UTF-8"):
        next(lines)
