import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from pydantic import ValidationError

from triptych.errors import DataError, UsageError
from triptych.training.corpora.corpora import CorpusSpec, ParallelCorpus, read_parallel
from triptych.training.corpora.generated import generate_pairs

PAIRS = [("Hallo.", "Hello."), ("Guten Tag.", "Good day."), ("Tschüss!", "Bye!")]
RECORDS = [{"de": de, "en": en} for de, en in PAIRS]
FIELDS = {"source_field": "de", "target_field": "en"}


def pairs_of(corpus: ParallelCorpus) -> list[tuple[str, str]]:
    return list(zip(corpus.source, corpus.target, strict=True))


def write_sides(folder: Path, source: str, target: str) -> CorpusSpec:
    (folder / "a.de").write_text(source, encoding="utf-8")
    (folder / "a.en").write_text(target, encoding="utf-8")
    return CorpusSpec(source=Path("a.de"), target=Path("a.en"))


def write_file(folder: Path, name: str, content: str) -> Path:
    raw = content.encode()
    if name.endswith(".gz"):
        raw = gzip.compress(raw)
    elif name.endswith(".zst"):
        raw = zstandard.compress(raw)
    (folder / name).write_bytes(raw)
    return Path(name)


def write_parquet(folder: Path, columns: dict[str, list[object]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    return Path("a.parquet")


def jsonl(records: list[dict[str, object]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def test_two_files_are_read_line_by_line(tmp_path: Path) -> None:
    spec = write_sides(tmp_path, "\n".join(de for de, _ in PAIRS), "\r\n".join(f" {en}\t" for _, en in PAIRS))
    corpus = read_parallel(spec, base=tmp_path)
    assert pairs_of(corpus) == PAIRS
    assert corpus.line_numbers == [1, 2, 3]
    assert corpus.name == "a.de and a.en"
    assert len(corpus) == 3
    assert corpus.counts.describe() == "3 pairs"


def test_a_separator_inside_a_line_does_not_shift_the_sides(tmp_path: Path) -> None:
    spec = write_sides(tmp_path, "a\u2028b\x0bc\x85d\ne\n", "x\ny\n")
    assert read_parallel(spec, base=tmp_path).target == ["x", "y"]


def test_empty_and_overlong_pairs_are_dropped_and_counted(tmp_path: Path) -> None:
    spec = write_sides(tmp_path, "a\n \t\nccc\ndddd\ne\n", "1\n2\n3333\n4\n\u3000\n")
    corpus = read_parallel(spec, base=tmp_path, max_line_chars=3)
    assert pairs_of(corpus) == [("a", "1")]
    assert corpus.line_numbers == [1]
    assert corpus.counts.lines_read == 5
    assert corpus.counts.describe() == "1 pair (2 with an empty side dropped, 2 past 3 characters dropped)"


def test_a_line_as_long_as_the_limit_is_kept(tmp_path: Path) -> None:
    assert len(read_parallel(write_sides(tmp_path, "ccc", "333"), base=tmp_path, max_line_chars=3)) == 1


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("", "", r"a\.de and a\.en: 0 pairs"),
        ("\n \n", "a\nb\n", r"a\.de and a\.en: 0 pairs"),
        ("a\nb\nc\n", "a\nb\n", r"a\.de has 3 lines and .*a\.en has 2; .*first suspicious line: \d"),
        ("a", "", r"has 1 lines and .* has 0; .*first suspicious line: 1$"),
        # Where lengths say nothing, the first line without a partner is suspected.
        ("a\nb\nc\nd", "e\nf\ng", r"first suspicious line: 4$"),
    ],
)
def test_sides_without_a_pair_or_of_different_length_are_refused_with_both_counts(
    tmp_path: Path, source: str, target: str, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        read_parallel(write_sides(tmp_path, source, target), base=tmp_path)


@pytest.mark.parametrize("missing", [[40], [40, 60, 80], [40, 41, 42, 43], [119]])
def test_the_line_where_the_sides_slip_is_found_by_the_lengths(tmp_path: Path, missing: list[int]) -> None:
    rng = random.Random(3)
    source = ["x" * rng.randint(5, 120) for _ in range(120)]
    target = ["y" * int(len(line) * rng.uniform(0.9, 1.3)) for line in source]
    kept = [line for index, line in enumerate(target) if index not in missing]
    with pytest.raises(DataError, match="first suspicious line") as refusal:
        read_parallel(write_sides(tmp_path, "\n".join(source), "\n".join(kept)), base=tmp_path)
    assert abs(int(str(refusal.value).split()[-1]) - (missing[0] + 1)) <= 3


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_tsv_file_is_read_by_column_numbers(tmp_path: Path, compression: str) -> None:
    lines = "".join(f"id\t{en}\t{de}\r\n" for de, en in PAIRS)
    path = write_file(tmp_path, f"a.TSV{compression}", lines)
    corpus = read_parallel(CorpusSpec(file=path, source_field="3", target_field="2"), base=tmp_path)
    assert pairs_of(corpus) == PAIRS
    assert corpus.name == f"a.TSV{compression}"


def test_a_tsv_file_has_its_pairs_in_columns_one_and_two(tmp_path: Path) -> None:
    path = write_file(tmp_path, "a.tsv", "\n" + "".join(f"{de}\t{en}\n" for de, en in PAIRS) + "\tx\n")
    corpus = read_parallel(CorpusSpec(file=path), base=tmp_path)
    assert pairs_of(corpus) == PAIRS
    assert corpus.line_numbers == [2, 3, 4]
    assert corpus.counts.empty_dropped == 2
    write_file(tmp_path, "a.tsv", "a\tb\nc d\n")
    with pytest.raises(DataError, match=r"a\.tsv, line 2: the number of columns is 1, but column 2 is asked"):
        read_parallel(CorpusSpec(file=path), base=tmp_path)


def write_records(folder: Path, form: str, records: list[dict[str, object]], monkeypatch: Any) -> CorpusSpec:
    """The records in a file of a form, or in a dataset of two splits; where they are."""
    if form == "parquet":
        names = {name: [record[name] for record in records] for name in records[0]}
        return CorpusSpec(file=write_parquet(folder, names))
    if form == "jsonl":
        return CorpusSpec(file=write_file(folder, "a.jsonl", jsonl(records)))
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    (folder / "pairs").mkdir()
    write_file(folder, "pairs/train.jsonl", jsonl(records[:1]))
    write_file(folder, "pairs/test.jsonl", jsonl(records))
    return CorpusSpec(hub="pairs", split="test")


@pytest.mark.parametrize("form", ["jsonl", "parquet", "hub"])
def test_records_are_read_by_names_and_dotted_paths(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{**record, "in": record} for record in RECORDS]
    spec = write_records(tmp_path, form, records, monkeypatch)
    for prefix in ("", "in."):
        fields = {name: f"{prefix}{field}" for name, field in FIELDS.items()}
        corpus = read_parallel(spec.model_copy(update=fields), base=tmp_path)
        assert pairs_of(corpus) == PAIRS
        assert corpus.line_numbers == [1, 2, 3]
    assert corpus.name == ("pairs test" if form == "hub" else f"a.{form}")
    missing = "no field 'source'; it has de, en" if form == "jsonl" else "has no column 'source'; its columns"
    with pytest.raises(DataError, match=missing):
        read_parallel(spec, base=tmp_path)


def test_a_field_whose_name_has_a_dot_is_found_by_its_name(tmp_path: Path) -> None:
    path = write_file(tmp_path, "a.jsonl", '{"text.de": "a", "text.en": "b"}')
    spec = CorpusSpec(file=path, source_field="text.de", target_field="text.en")
    assert pairs_of(read_parallel(spec, base=tmp_path)) == [("a", "b")]


def test_blank_lines_and_nulls_in_jsonl_count_as_empty(tmp_path: Path) -> None:
    path = write_file(
        tmp_path, "a.jsonl", '\n{"source": null, "target": "x"}\n{"source": "a", "target": "b"}\n'
    )
    corpus = read_parallel(CorpusSpec(file=path), base=tmp_path)
    assert corpus.line_numbers == [3]
    assert corpus.counts.empty_dropped == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('["a", "b"]', "a JSON list, where one object per line is wanted"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (
            '{"de": "a", "fr": {"x": 1}}',
            r"no field 'en'; it has de, fr\.x; a recipe can name others \(source_field and target_field\)",
        ),
        ("{}", "no field 'de'; it has none"),
        ('{"de": "a", "en": 7}', "field 'en' holds a value of type int, not a string"),
        ('{"de": "a\\u0000", "en": "b"}', "field 'de' holds a NUL character"),
        ('{"de": "a", "en": "\\ud800"}', "field 'en' holds half of a surrogate pair"),
    ],
    ids=["list", "broken", "deep", "missing", "no-fields", "number", "nul", "surrogate"],
)
def test_a_bad_jsonl_line_is_refused_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    path = write_file(tmp_path, "a.jsonl", jsonl(RECORDS) + line)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 4: {reason}"):
        read_parallel(CorpusSpec(file=path, **FIELDS), base=tmp_path)


def test_nulls_in_parquet_count_as_empty(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, {"de": ["a", None], "en": ["b", "x"]})
    assert read_parallel(CorpusSpec(file=path, **FIELDS), base=tmp_path).counts.empty_dropped == 1


def test_a_parquet_column_of_numbers_is_refused_with_its_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, {"de": ["a"], "en": [7]})
    with pytest.raises(DataError, match=r"a\.parquet, row 1: field 'en' holds a value of type int"):
        read_parallel(CorpusSpec(file=path, **FIELDS), base=tmp_path)


def test_a_file_that_is_parquet_in_name_only_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = write_file(tmp_path, "a.parquet", "de,en\n")
    with pytest.raises(DataError, match=r"a\.parquet is named \.parquet but holds no such data"):
        read_parallel(CorpusSpec(file=path), base=tmp_path)


def test_a_truncated_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, {"de": ["a"], "en": ["b"]})
    content = (tmp_path / path).read_bytes()
    (tmp_path / path).write_bytes(content[:-10])
    with pytest.raises(DataError, match=r"a\.parquet is a damaged Parquet file"):
        read_parallel(CorpusSpec(file=path, **FIELDS), base=tmp_path)


def test_a_missing_split_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_records(tmp_path, "hub", [*RECORDS], monkeypatch)
    with pytest.raises(UsageError, match=r"split 'dev', cannot be loaded: .*dev"):
        read_parallel(spec.model_copy(update={"split": "dev"}), base=tmp_path)


@pytest.mark.parametrize(
    ("library", "spec", "said"),
    [
        ("pyarrow", CorpusSpec(file=Path("a.parquet")), r"needs pyarrow: pip install 'triptych\[parquet\]'"),
        ("datasets", CorpusSpec(hub="someone/pairs"), r"needs datasets: pip install 'triptych\[hf\]'"),
    ],
)
def test_without_its_library_a_corpus_is_refused_with_what_to_install(
    library: str, spec: CorpusSpec, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=said):
        read_parallel(spec, base=tmp_path)


def test_a_generated_corpus_is_what_the_generator_gives() -> None:
    corpus = read_parallel(CorpusSpec(generated=20, generated_part="valid", generated_seed=5))
    assert pairs_of(corpus) == generate_pairs(20, "valid", 5)
    assert corpus.name == "generated valid"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "no corpus is given; set one of: source and target; file; hub; generated"),
        ({"source": "a"}, "source is given without target"),
        ({"target": "a"}, "target is given without source"),
        ({"file": "a.tsv", "hub": "b"}, "file and hub contradict each other"),
        ({"source": "a", "target": "b", "generated": 5}, "source and target and generated contradict"),
        ({"file": "a.tsv", "split": "test"}, "split goes with hub, but this corpus is given by file"),
        ({"file": "a.tsv", "config_name": "c"}, "config_name goes with hub"),
        ({"source": "a", "target": "b", "source_field": "de"}, "source_field goes with file or hub"),
        (
            {"generated": 5, "generated_part": "test", "target_field": "en"},
            "target_field goes with file or hub",
        ),
        ({"hub": "a", "generated_seed": 3}, "generated_seed goes with generated"),
        ({"hub": "a", "generated_part": "test"}, "generated_part goes with generated"),
        ({"generated": 5}, "generated is given without generated_part"),
        ({"generated": 0, "generated_part": "test"}, "greater than or equal to 1"),
        ({"file": "a.csv"}, r"file a\.csv must end in one of \.tsv"),
        ({"file": "a.parquet.gz"}, r"file a\.parquet\.gz must end in one of"),
        (
            {"file": "a.tsv", "source_field": "de"},
            r'source_field of a \.tsv file is a column number .*not "de"',
        ),
        ({"file": "a.tsv.gz", "target_field": "0"}, "target_field of a .tsv file is a column number"),
        (
            {"source": "a.jsonl", "target": "b"},
            r'source = "a\.jsonl": a \.jsonl file holds both sides .* write file = "a\.jsonl" instead, '
            "and source_field and target_field for each name",
        ),
        (
            {"source": "train.tsv"},
            r'write file = "train\.tsv" instead, and source_field and target_field for each column number',
        ),
        ({"target": "x/a.parquet"}, r'target = "x/a\.parquet": .* write file = "x/a\.parquet" instead'),
        ({"source": "a", "targets": "b"}, "targets"),
    ],
)
def test_a_contradictory_spec_is_refused_with_its_reason(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        CorpusSpec.model_validate(options)


def test_a_stored_spec_is_read_back() -> None:
    spec = CorpusSpec(file=Path("a.tsv"), source_field="2", target_field="1")
    stored = spec.model_dump(mode="json", exclude_none=True)
    assert CorpusSpec.model_validate(stored) == spec


def test_a_frequent_source_is_not_held_out_for_the_share_of_a_few(tmp_path: Path) -> None:
    rare = [f"Satz {number}." for number in range(10)]
    sources = "\n".join(["Hallo."] * 90 + rare)
    train, valid = read_parallel(write_sides(tmp_path, sources, sources), base=tmp_path).split(0.05)
    assert len(valid) == 5
    assert set(valid.source) < set(rare)
    assert len(train) == 95
    sources = "\n".join(["Hallo."] * 60 + ["Tag."] * 40)
    assert len(read_parallel(write_sides(tmp_path, sources, sources), base=tmp_path).split(0.01)[1]) in (
        40,
        60,
    )
