import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from triptych.files import NewFolder, write_atomically, write_bytes, write_folder, write_text


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


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("x")

    write_folder(tmp_path / "out", write)
    assert (tmp_path / "out" / "below" / "file").read_text() == "x"
    assert (tmp_path / "out").stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o777 | 0o055

    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_folder(tmp_path / "other", fail)
    with pytest.raises(FileExistsError):
        write_folder(tmp_path / "out", write)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_the_killed_left_of_a_folder_goes_and_what_the_living_fill_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / ".out.partial-left").mkdir()
    (tmp_path / ".out.partial-left" / "file").touch()
    (tmp_path / ".outer.partial-other").mkdir()
    with NewFolder(tmp_path / "out") as living:
        assert not (tmp_path / ".out.partial-left").exists()
        write_folder(tmp_path / "out", lambda folder: (folder / "second").touch())
        assert living.path.is_dir()
        with pytest.raises(FileExistsError):
            living.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".outer.partial-other", "out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["second"]


def test_a_place_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / ".a.partial-x").mkdir()
    write_folder(tmp_path / "[a]*", lambda folder: (folder / "file").touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.partial-x", "[a]*"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_names_what_was_to_be_written_and_not_its_temporary_neighbour(
    error: Exception, tmp_path: Path
) -> None:
    def fail(place: Path) -> None:
        raise error

    def fail_within(place: Path) -> None:
        (place / "gone" / "file").write_text("x")

    for write in (write_atomically, write_folder):
        error.filename = None  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="No space left") as caught:
            write(tmp_path / "out", fail)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "out"))
    with pytest.raises(FileNotFoundError) as missing:
        write_folder(tmp_path / "out", fail_within)
    assert missing.value.filename == str(tmp_path / "out" / "gone" / "file")
    assert not list(tmp_path.iterdir())
