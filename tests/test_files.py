import os
from pathlib import Path

import pytest

from triptych.files import write_atomically, write_bytes, write_text


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half of the n")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_the_old_content_until_the_new_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    seen = []

    def write(temporary: Path) -> None:
        temporary.write_text("new")
        seen.append(path.read_text())

    write_atomically(path, write)
    assert seen == ["old"]
    assert path.read_text() == "new"


def test_a_written_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "x")
    (tmp_path / "theirs").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_text_is_utf8_with_unix_line_ends_on_every_system(tmp_path: Path) -> None:
    write_text(tmp_path / "text", "Zähne\nMünze\n")
    assert (tmp_path / "text").read_bytes() == "Zähne\nMünze\n".encode()
    write_bytes(tmp_path / "text", b"\x00")
    assert (tmp_path / "text").read_bytes() == b"\x00"


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "no" / "file", "x")


def test_what_is_no_file_is_written_into_and_stays_what_it_was(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
