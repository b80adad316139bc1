"""SentencePiece's files: read whole, and refused where they are damaged."""

from pathlib import Path

import pytest

from checkpoints.tiny_spm import PIECES, spm
from triptych.errors import DataError
from triptych.running.opening.marian_tokenizers import read_sentencepiece


def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "source.spm"
    path.write_bytes(spm(PIECES)[:-1])
    with pytest.raises(DataError) as refused:
        read_sentencepiece(path)
    assert str(refused.value).startswith(f"{path} is not a SentencePiece model, or it is damaged: INTERNAL")
    assert "\n" not in str(refused.value)


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
