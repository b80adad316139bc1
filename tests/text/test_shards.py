"""Corpora of language models: documents, token shards on the disk, and rows packed with them."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from triptych.errors import DataError, UsageError
from triptych.running.text import LanguageCorpusSpec, TextPart, Tokenizer, documents, read_documents
from triptych.running.text.sentence_tokenizers import EOS_ID
from triptych.training.corpora.packing import PackedBatches
from triptych.training.corpora.token_shards import TokenShards, read_shards, tokenize_corpus, write_shards
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizer, train_tokenizers

BYTES: Tokenizer = train_tokenizers(TokenizerSpec(vocab_size=300), ["the cat and the dog"] * 3, []).source
TEXT = "One line.\nAnother line.\n\n  \nA new paragraph, äöü.\nIts end.\n"


def documents_of(spec: LanguageCorpusSpec, base: Path) -> list[str]:
    found = [""]
    for part in read_documents(spec, base=base):
        found[-1] += part.text
        if part.ends_document:
            found.append("")
    assert found.pop() == ""
    return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("file", [TEXT]),
        ("line", ["One line.", "Another line.", "A new paragraph, äöü.", "Its end."]),
        ("blank-lines", ["One line.\nAnother line.", "A new paragraph, äöü.\nIts end."]),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.en"])
def test_documents_of_text_files_are_files_lines_or_paragraphs(
    kind: Any, expected: list[str], name: str, tmp_path: Path
) -> None:
    content = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert documents_of(LanguageCorpusSpec(files=(name,), documents=kind), tmp_path) == expected


def test_records_of_jsonl_and_parquet_are_documents(tmp_path: Path) -> None:
    texts = ["a\n\nb", "", "c"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"of": {"it": text}}) for text in texts))
    spec = LanguageCorpusSpec(files=("a.jsonl",), text_field="of.it")
    assert documents_of(spec, tmp_path) == ["a\n\nb", "c"]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    assert documents_of(LanguageCorpusSpec(files=("a.parquet",)), tmp_path) == ["a\n\nb", "c"]
    with pytest.raises(
        DataError,
        match=r"a\.jsonl, line 1: no field 'text'; it has of\.it; a recipe can name others \(text_field\)",
    ):
        documents_of(LanguageCorpusSpec(files=("a.jsonl",)), tmp_path)


def test_a_local_dataset_folder_is_a_corpus(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "set" / "train.parquet")
    assert documents_of(LanguageCorpusSpec(hub="set"), tmp_path) == ["a", "b"]


def test_folders_and_patterns_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("in/b.txt", "in/a.md", "in/deep/c.txt", "in/.hidden.txt", "in/picture.png", "d.txt"):
        (tmp_path / name).write_text(name)
    found = documents_of(LanguageCorpusSpec(files=("d.txt", "in")), tmp_path)
    assert found == ["d.txt", "in/a.md", "in/b.txt", "in/deep/c.txt"]
    assert documents_of(LanguageCorpusSpec(files=("in/*.txt",)), tmp_path) == ["in/.hidden.txt", "in/b.txt"]


@pytest.mark.parametrize("entry", ["nothing.txt", "*.none", "empty"])
def test_an_entry_that_names_no_file_is_refused(entry: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"does not exist|no file"):
        documents_of(LanguageCorpusSpec(files=(entry,)), tmp_path)


@pytest.mark.parametrize("options", [{}, {"files": "a", "hub": "b"}, {"files": "a", "split": "test"}])
def test_options_of_a_corpus_that_contradict_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        LanguageCorpusSpec.model_validate(options)


@pytest.mark.parametrize("before", [0, 7, (1 << 20) - 2, (1 << 20) - 1, 1 << 20])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82", b"\0"])
def test_a_byte_that_is_no_text_is_refused_with_its_number(before: int, bad: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * before + bad + b"b" * 9)
    with pytest.raises(DataError, match=rf"^\S+a\.txt: byte {before + 1:,} (\(0x|is NUL)"):
        documents_of(LanguageCorpusSpec(files="a.txt"), tmp_path)


def test_a_character_across_two_blocks_is_whole(tmp_path: Path) -> None:
    text = "a" * ((1 << 20) - 1) + "€" + "b" * 9
    (tmp_path / "a.txt").write_text("\ufeff" + text)
    assert documents_of(LanguageCorpusSpec(files="a.txt"), tmp_path) == [text]


@given(st.lists(st.text(alphabet="ab \n", max_size=40), max_size=5))
def test_long_documents_are_cut_without_loss(texts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "LONGEST_PART", 8)
        parts = list(documents.cut_parts(piece for text in texts for piece in (text, None)))
    assert all(0 < len(part.text) <= 8 for part in parts)
    assert "".join(part.text for part in parts) == "".join(texts)
    assert sum(part.ends_document for part in parts) == sum(text != "" for text in texts)


def test_a_long_document_has_the_tokens_that_it_has_whole(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TokenizerSpec(vocab_size=300), ["Line 1, of many.\n\n\nLine 2"])
    text = "".join(f"Line {i}, of many.\n" + "\n" * (i % 3) for i in range(12_000))
    (tmp_path / "a.txt").write_text(text)
    shards = tokenize_corpus(
        LanguageCorpusSpec(files="a.txt"), tokenizer, cache_folder=tmp_path / "c", base=tmp_path
    )
    expected = [*tokenizer.encode(text)[0], tokenizer.eos_id]
    assert shards.tokens(0, shards.num_tokens).tolist() == expected


def shards_of(texts: list[str], folder: Path, tokens_per_shard: int = 7) -> TokenShards:
    return write_shards(texts, BYTES, folder, tokens_per_shard=tokens_per_shard)


def test_shards_hold_every_document_with_its_end(tmp_path: Path) -> None:
    texts = ["the cat", "a", "und der Hund", "ß"]
    shards = shards_of(texts, tmp_path / "s", 1)
    sequences = [[*ids, EOS_ID] for ids in BYTES.encode(texts)]
    everything = list(chain.from_iterable(sequences))
    assert shards.tokens(0, shards.num_tokens).tolist() == everything
    assert shards.starts_within(0, shards.num_tokens).tolist() == [
        0,
        *np.cumsum([len(some) for some in sequences])[:-1],
    ]
    assert shards.num_bytes == sum(len(text.encode()) for text in texts)
    assert shards.tokens(3, 5).tolist() == everything[3:5]
    with pytest.raises(ValueError, match="not within"):
        shards.tokens(3, len(everything) + 1)


def test_a_corpus_is_tokenized_once_and_again_when_its_text_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the cat\n")
    spec = LanguageCorpusSpec(files="a.txt")

    def made() -> TokenShards:
        return tokenize_corpus(spec, BYTES, cache_folder=tmp_path / "cache", base=tmp_path)

    first = made()
    written = (first.folder / "00000.tokens").stat().st_mtime_ns
    assert made().folder == first.folder
    assert (first.folder / "00000.tokens").stat().st_mtime_ns == written
    path.write_text("the dog\n")
    assert made().folder != first.folder


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"^a\.txt is empty: at least one document"):
        tokenize_corpus(LanguageCorpusSpec(files="a.txt"), BYTES, cache_folder=tmp_path / "c", base=tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "missing", "index"])
def test_a_damaged_shard_is_refused_and_made_again(damage: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat and the dog\n")
    spec = LanguageCorpusSpec(files="a.txt")
    shards = tokenize_corpus(spec, BYTES, cache_folder=tmp_path / "cache", base=tmp_path)
    expected = shards.tokens(0, shards.num_tokens).tolist()
    path = shards.folder / ("shards.json" if damage == "index" else "00000.tokens")
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=rf"{path.name}.*(truncated|missing|damaged).*delete"):
        read_shards(shards.folder)
    again = tokenize_corpus(spec, BYTES, cache_folder=tmp_path / "cache", base=tmp_path)
    assert again.tokens(0, again.num_tokens).tolist() == expected


class Killed(BaseException):
    pass


@given(
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=6),
    stop=st.integers(0, 5),
    size=st.integers(5, 20),
)
@settings(max_examples=6, deadline=None)
def test_shards_that_were_interrupted_are_finished_to_the_same_bytes(
    texts: list[str], stop: int, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    parts = [TextPart(text, bool(i % 3)) for i, text in enumerate(texts) if text] + [TextPart("end")]

    def until_killed() -> Iterator[TextPart]:
        yield from islice(parts, stop)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triptych.training.corpora.token_shards._CHARACTERS_AT_ONCE", 3)
        with pytest.raises(Killed):
            write_shards(until_killed(), BYTES, folder / "a", tokens_per_shard=size)
        write_shards(parts, BYTES, folder / "a", tokens_per_shard=size)
        write_shards(parts, BYTES, folder / "b", tokens_per_shard=size)
    contents = [{path.name: path.read_bytes() for path in (folder / name).iterdir()} for name in "ab"]
    assert contents[0] == contents[1]


CORPORA = st.lists(st.text(alphabet="abc d", min_size=1, max_size=9), min_size=1, max_size=8)


@given(CORPORA, st.integers(1, 9), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_packing_loses_and_repeats_no_token(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    context: int,
    batch_size: int,
    epoch: int,
    within: bool,
    shuffle: bool,
) -> None:
    shards = shards_of(texts, tmp_path_factory.mktemp("shards"))
    tokens = shards.tokens(0, shards.num_tokens).tolist()
    firsts = set(shards.starts_within(0, shards.num_tokens).tolist()) if within else {0}
    batches = PackedBatches(
        shards,
        context=context,
        batch_size=batch_size,
        seed=3,
        within_documents=within,
        shuffle=shuffle,
    )
    counted = []
    for places in batches.plan(epoch):
        batch = batches.collate(places)
        assert len(places) <= batch_size
        for place, ids, targets in zip(places, batch.ids.tolist(), batch.targets.tolist(), strict=True):
            begin = max(int(place), 0)
            for column, (token, target) in enumerate(zip(ids, targets, strict=True)):
                if target != -1:
                    assert (token, target) == tuple(tokens[begin + column : begin + column + 2])
                    counted.append(begin + column + 1)
    assert sorted(counted) == [place for place in range(len(tokens)) if place not in firsts]
    assert len(counted) == batches.num_target_tokens


@given(CORPORA, st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_within_documents_a_token_meets_its_own_document_alone(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], context: int, epoch: int
) -> None:
    shards = shards_of(texts, tmp_path_factory.mktemp("shards"))
    document = np.searchsorted(
        shards.starts_within(0, shards.num_tokens), np.arange(shards.num_tokens), side="right"
    )
    batches = PackedBatches(shards, context=context, batch_size=2, seed=0, within_documents=True)
    for places in batches.plan(epoch):
        batch = batches.collate(places)
        assert batch.mask is not None
        assert batch.positions is not None
        for row, place in enumerate(places.tolist()):
            begin, end = max(place, 0), min(place + context, shards.num_tokens - 1)
            own = document[begin:end]
            same = torch.from_numpy(own[:, None] == own[None, :])
            length = end - begin
            assert torch.equal(batch.mask[row, 0, :length, :length], same)
            assert not batch.mask[row, 0, :length, length:].any()
            inside = [int((own[:i] == own[i]).sum()) for i in range(length)]
            assert batch.positions[row, :length].tolist() == inside


def test_the_order_is_a_function_of_seed_and_epoch(tmp_path: Path) -> None:
    shards = shards_of(["the cat and the dog"] * 9, tmp_path / "s")

    def plan(seed: int, epoch: int) -> list[list[int]]:
        batches = PackedBatches(shards, context=3, batch_size=2, seed=seed)
        return [places.tolist() for places in batches.plan(epoch)]

    assert plan(1, 2) == plan(1, 2)
    assert plan(1, 2) != plan(1, 3)
    assert plan(1, 2) != plan(2, 2)


def test_a_corpus_of_one_token_cannot_be_packed(tmp_path: Path) -> None:
    shards = write_shards([TextPart("a", ends_document=False)], BYTES, tmp_path)
    assert shards.num_tokens == 2  # the space before the text is a token
    with pytest.raises(UsageError, match="fewer than two tokens"):
        PackedBatches(write_shards([], BYTES, tmp_path / "none"), context=3, batch_size=1, seed=0)


LARGE = """
import resource, sys
from pathlib import Path
from triptych.running.text import LanguageCorpusSpec, read_tokenizer
from triptych.training.corpora.packing import PackedBatches
from triptych.training.corpora.token_shards import tokenize_corpus
tokenizer = read_tokenizer(Path("tokenizer.json"))
tokenizer.encode(["warm up"] * 8)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = used + (int(sys.argv[1]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    bytearray(Path("a.txt").stat().st_size)
except MemoryError:
    pass
else:
    raise SystemExit("the limit is above the corpus")
shards = tokenize_corpus(LanguageCorpusSpec(files="a.txt"), tokenizer, cache_folder=Path("cache"))
batches = PackedBatches(shards, context=64, batch_size=64, seed=0)
plan = batches.plan(0)
print(sum(int(batches.collate(places).ids.sum()) >= 0 for places in plan[:: len(plan) // 200]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on the address space is Linux's")
def test_a_corpus_larger_than_memory_is_tokenized_and_packed(tmp_path: Path) -> None:
    BYTES.save(tmp_path / "tokenizer.json")
    line = "the cat and the dog and the cat\n" * 32_768
    with (tmp_path / "a.txt").open("w") as file:
        for _ in range(640):
            file.write(line)
    done = subprocess.run(
        [sys.executable, "-c", LARGE, "600"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 200
