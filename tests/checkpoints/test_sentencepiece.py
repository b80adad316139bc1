"""SentencePiece's files: read as they are meant, and refused where they are damaged."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.tiny_spm import BYTE_PIECES, PIECES, RULES, block, charsmap, float32, number, spm, varint
from triptych.checkpoints import read_sentencepiece
from triptych.errors import DataError
from triptych.text import SentencePieceSpec


def read(folder: Path, data: bytes) -> SentencePieceSpec:
    (folder / "source.spm").write_bytes(data)
    return read_sentencepiece(folder / "source.spm")


def refusal(folder: Path, data: bytes) -> str:
    with pytest.raises(DataError) as refused:
        read(folder, data)
    message = str(refused.value)
    assert message.startswith(f"{folder / 'source.spm'} is no SentencePiece model, or damaged: ")
    return message


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_every_field_that_matters_is_read(tmp_path: Path, kind: str) -> None:
    found = read(
        tmp_path,
        spm(
            [*PIECES, *BYTE_PIECES],
            kind,
            RULES,
            byte_fallback=True,
            whitespace_as_suffix=True,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            escape_whitespaces=False,
        ),
    )
    assert found == SentencePieceSpec.model_validate(
        {
            "kind": kind,
            "pieces": [*PIECES, *BYTE_PIECES],
            "rules": charsmap(RULES),
            "byte_fallback": True,
            "whitespace_as_suffix": True,
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "escape_whitespaces": False,
        }
    )


def test_what_a_file_does_not_say_is_as_its_format_has_it(tmp_path: Path) -> None:
    """A piece is normal, a model unigram, a flag set."""
    found = read(
        tmp_path, block(1, block(1, b"<unk>") + number(3, 2)) + block(1, block(1, b"a") + float32(2, -1.5))
    )
    assert found.kind == "unigram"
    assert found.pieces == (("<unk>", 0.0, "unknown"), ("a", -1.5, "normal"))
    assert (found.add_dummy_prefix, found.remove_extra_whitespaces, found.escape_whitespaces) == (True,) * 3
    assert (found.rules, found.byte_fallback) == (b"", False)


def test_fields_that_are_not_known_are_passed_over(tmp_path: Path) -> None:
    unknown = number(77, 5) + block(78, b"abc") + float32(79, 1.0) + varint(80 << 3 | 1) + b"\0" * 8
    assert read(tmp_path, unknown + spm(PIECES) + unknown) == read(tmp_path, spm(PIECES))


def test_parts_given_twice_are_one(tmp_path: Path) -> None:
    assert read(tmp_path, spm(PIECES) + block(3, number(3, 0))).add_dummy_prefix is False


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "there are 0 unknown pieces"),
        (b"\xff" * 30, "a number of more than ten bytes"),
        (spm(PIECES)[:-1], "ModelProto ends 1 bytes too soon"),
        (spm(PIECES) + b"\x80", "ends in the middle of a number"),
        (spm(PIECES) + block(1, b"")[:-1] + b"\xff\xff\xff\xff\x0f", "too soon"),
        (spm(PIECES) + b"\x00\x00", "a field of number 0"),
        (spm(PIECES) + b"\x0b", "wire type 3, which there is not"),
        (spm(PIECES) + block(1, number(1, 5)), "field 1 of SentencePiece has wire type 0, not 2"),
        (
            spm(PIECES) + block(1, block(1, b"x") + number(2, 5)),
            "field 2 of SentencePiece has wire type 0, not 5",
        ),
        (spm(PIECES) + block(1, block(1, b"\xff")), "field 1 of SentencePiece is not UTF-8"),
        (spm(PIECES) + block(1, block(1, b"x") + number(3, 9)), "a piece is of type 9, which there is not"),
        (spm(PIECES) + block(1, float32(2, 1.0)), "a piece is empty"),
        (spm([*PIECES, PIECES[-1]]), "there are two pieces 'b c'"),
        (spm([*PIECES, ("z", float("nan"), "normal")]), "a score is not a number"),
        (spm(PIECES, "word"), "it is of the sort 'word', and only 'bpe' and 'unigram' can be read"),
        (spm(PIECES) + block(2, number(3, 17)), "it is of the sort 'unknown'"),
        (spm(PIECES) + number(2, 1), "field 2 of ModelProto has wire type 0, not 2"),
        (spm(PIECES, byte_fallback=True), "byte_fallback is true, but there are 0 byte pieces"),
        (spm(PIECES) + block(3, block(2, b"\1\2\3")), "the normalisation rules are 3 bytes"),
        (spm(PIECES) + block(5, block(2, b"\1")), "it has rules for decoding"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in refusal(tmp_path, data)


def test_a_file_cut_off_anywhere_is_refused_or_has_fewer_pieces(tmp_path: Path) -> None:
    whole = spm(PIECES, "bpe", RULES)
    complete = read(tmp_path, whole)
    for size in range(0, len(whole), 7):
        try:
            found = read(tmp_path, whole[:size])
        except DataError:
            continue
        assert found != complete


@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=60)
def test_a_file_with_bytes_changed_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(spm(PIECES, "bpe", RULES))
    for place, byte in changes:
        data[place % len(data)] = byte
    path = tmp_path_factory.getbasetemp() / "changed.spm"
    path.write_bytes(data)
    with contextlib.suppress(DataError):
        read_sentencepiece(path)


def test_a_file_that_is_not_there_or_far_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "source.spm"
    with pytest.raises(DataError, match="is missing"):
        read_sentencepiece(path)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(DataError, match="is no SentencePiece model: it has 1,073,741,824 bytes"):
        read_sentencepiece(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        read_sentencepiece(path)
