"""SentencePiece's files: read whole, and refused where they are damaged."""

from pathlib import Path

import pytest

from checkpoints.tiny_spm import PIECES, block, float32, spm
from triptych.checkpoints.marian_tokenizers import read_sentencepiece
from triptych.errors import DataError


def read(folder: Path, data: bytes) -> bytes:
    (folder / "source.spm").write_bytes(data)
    return read_sentencepiece(folder / "source.spm")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "unk is not defined"),
        (b"\xff" * 30, "ParseFromArray"),
        (spm(PIECES)[:-1], "ParseFromArray"),
        (spm(PIECES) + b"\x80", "ParseFromArray"),
        (spm(PIECES) + block(1, block(1, b"\xff")), "'utf-8' codec can't decode byte 0xff"),
        (spm(PIECES) + block(1, float32(2, 1.0)), "piece must not be empty"),
        (spm([*PIECES, PIECES[-1]]), "b c is already defined"),
        (spm([*PIECES, ("z", float("nan"), "normal")], "unigram"), "score is NaN or Inf"),
        (spm(PIECES, byte_fallback=True), "there are not 256 byte pieces"),
        (spm(PIECES) + block(3, block(2, b"\1\2\3")), "normalization rule is broken"),
        (spm(PIECES) + block(5, block(2, b"\1")), "normalization rule is broken"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(DataError) as refused:
        read(tmp_path, data)
    found = str(refused.value)
    assert found.startswith(f"{tmp_path / 'source.spm'} is not a SentencePiece model, or it is damaged: ")
    assert message in found
    assert "\n" not in found


def test_a_file_that_is_not_there_or_far_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "source.spm"
    with pytest.raises(DataError, match="is missing"):
        read_sentencepiece(path)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(DataError, match="it has more than 268,435,456 bytes, the most for such a file"):
        read_sentencepiece(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        read_sentencepiece(path)
