"""Parallel corpora: their specification in a recipe, and their sentence pairs."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar, final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from triptych.errors import DataError, UsageError
from triptych.running.text import (
    NumberedTexts,
    read_hub,
    read_jsonl,
    read_lines,
    read_parquet,
    read_tsv,
    record_ending,
)
from triptych.training.corpora.generated import generate_pairs
from triptych.training.corpora.tasks import Task

DEFAULT_MAX_LINE_CHARS = 10_000
_MOST_HELD_OUT = 2000

_FILE_ENDINGS = (
    ".tsv",
    ".tsv.gz",
    ".tsv.zst",
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".parquet",
)
# Kinds of source allowed with each option.
_OPTION_PLACES = {
    "source_field": ("file", "hub"),
    "target_field": ("file", "hub"),
    "split": ("hub",),
    "config_name": ("hub",),
    "generated_part": ("generated",),
    "generated_seed": ("generated",),
    "generated_task": ("generated",),
}


CorpusT = TypeVar("CorpusT", bound="AnyCorpusSpec")


class AnyCorpusSpec(BaseModel):
    """Source of a parallel corpus, of exactly one of four kinds.

    Attributes:
        source: text file with one source sentence per line; goes with `target`. Also .gz and .zst.
        target: text file whose line N translates line N of `source`.
        file: one .tsv, .jsonl (both also .gz and .zst) or .parquet file with both sides.
        hub: a dataset of the Hugging Face Hub by name, or a local dataset folder.
        split: which split of `hub`.
        config_name: which configuration of `hub`, if it has several.
        source_field: where the source is in each record of `file` or `hub`: a column or field name (default
            "source"), a dotted path into nested records, or for .tsv a 1-based column number (default "1").
        target_field: where the target is (default "target", for .tsv "2").
        generated: number of pairs to generate.
        generated_part: which of the three disjoint parts of the generated pairs.
        generated_seed: seed of the generated pairs.
        generated_task: the kind of pairs: German numbers, dates and sums with their English translations, or
            one of six small tasks on words, each of which tests one ability of attention.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Path | None = None
    target: Path | None = None
    file: Path | None = None
    hub: str | None = Field(default=None, min_length=1)
    split: str = Field(default="train", min_length=1)
    config_name: str | None = Field(default=None, min_length=1)
    source_field: str | None = Field(default=None, min_length=1)
    target_field: str | None = Field(default=None, min_length=1)
    generated: int | None = Field(default=None, ge=1)
    generated_part: Literal["train", "valid", "test"] | None = None
    generated_seed: int = Field(default=0, ge=0)
    generated_task: Literal["german-english"] | Task = "german-english"

    @model_validator(mode="after")
    def _check_that_the_options_agree(self: CorpusT) -> CorpusT:
        self._check_sides()
        place = self._place()
        for option, places in _OPTION_PLACES.items():
            # An option at its default counts as not given.
            given = getattr(self, option) != type(self).model_fields[option].default
            if given and place not in places:
                raise ValueError(
                    f"{option} goes with {' or '.join(places)}, but this corpus is given by {place}"
                )
        if self.generated is not None and self.generated_part is None:
            raise ValueError(
                'generated is given without generated_part; set it to "train", "valid" or "test"'
            )
        self._check_endings()
        return self

    def _place(self) -> str:
        """Return the given kind of source; raise an error unless exactly one kind is given."""
        if (self.source is None) != (self.target is None):
            given, missing = (
                ("source", "target") if self.target is None else ("target", "source")
            )
            raise ValueError(
                f"{given} is given without {missing}; a corpus of two files needs both"
            )
        ways = {
            "source and target": self.source,
            "file": self.file,
            "hub": self.hub,
            "generated": self.generated,
        }
        used = [way for way, value in ways.items() if value is not None]
        if not used:
            raise ValueError(f"no corpus is given; set one of: {'; '.join(ways)}")
        if len(used) > 1:
            raise ValueError(
                f"{' and '.join(used)} contradict each other; keep one of them"
            )
        return used[0]

    def _check_sides(self) -> None:
        """Raise an error if `source` or `target` is a file of records: such a file belongs in `file`."""
        for name, side in (("source", self.source), ("target", self.target)):
            if side is not None and record_ending(side) is not None:
                number = "column number" if record_ending(side) == ".tsv" else "name"
                raise ValueError(
                    f'{name} = "{side}": a {record_ending(side)} file holds both sides of a corpus; write '
                    f'file = "{side}" instead, and source_field and target_field for each {number}'
                )

    def _check_endings(self) -> None:
        if self.file is None:
            return
        if not self.file.name.lower().endswith(_FILE_ENDINGS):
            raise ValueError(
                f"file {self.file} must end in one of {', '.join(_FILE_ENDINGS)}"
            )
        if record_ending(self.file) == ".tsv":
            for option, column in (
                ("source_field", self.source_field),
                ("target_field", self.target_field),
            ):
                if column is not None and not (
                    column.isascii() and column.isdigit() and int(column) >= 1
                ):
                    raise ValueError(
                        f'{option} of a .tsv file is a column number from "1" up, not "{column}"'
                    )


@final
class CorpusSpec(AnyCorpusSpec):
    """A corpus without weight."""


@final
class TrainingCorpusSpec(AnyCorpusSpec):
    """A corpus of a training text.

    Attributes:
        weight: number of times that a pass over the text reads each pair. A weight of 0.25 reads a
            newly drawn quarter of the pairs in each pass.
    """

    weight: float = Field(default=1.0, gt=0, le=1000)


@final
@dataclass(frozen=True)
class CorpusCounts:
    """Counts of pairs read and dropped."""

    lines_read: int  # pairs found
    empty_dropped: int  # pairs with an empty source or target after stripping
    too_long_dropped: int  # pairs with a source or target longer than `max_line_chars`
    max_line_chars: int  # limit in characters

    def describe(self) -> str:
        """Format the counts in one line, such as "29,000 pairs (12 with an empty side dropped)"."""
        num_pairs = self.lines_read - self.empty_dropped - self.too_long_dropped
        drops = []
        if self.empty_dropped:
            drops.append(f"{self.empty_dropped:,} with an empty side dropped")
        if self.too_long_dropped:
            drops.append(
                f"{self.too_long_dropped:,} past {self.max_line_chars:,} characters dropped"
            )
        pairs = f"{num_pairs:,} pair" if num_pairs == 1 else f"{num_pairs:,} pairs"
        return f"{pairs} ({', '.join(drops)})" if drops else pairs


@final
@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs, stripped of white space at the ends; sentences are not empty."""

    source: list[str]  # source sentences
    target: list[str]  # target sentences; `target[i]` translates `source[i]`
    line_numbers: list[int]  # 1-based line or row of every pair in its file
    name: str  # name of the corpus in messages
    counts: CorpusCounts  # counts of pairs read and dropped
    # Weight of each pair; None if all weights are 1.
    weights: list[float] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def where(self, keep: Sequence[bool]) -> "ParallelCorpus":
        """Return the pairs with a true entry in `keep`."""
        kept = [i for i, is_kept in enumerate(keep) if is_kept]
        return replace(
            self,
            source=[self.source[i] for i in kept],
            target=[self.target[i] for i in kept],
            line_numbers=[self.line_numbers[i] for i in kept],
            weights=None if self.weights is None else [self.weights[i] for i in kept],
        )

    def split(self, share: float) -> tuple["ParallelCorpus", "ParallelCorpus"]:
        """Split the corpus into training and validation pairs: this share, at most 2,000 pairs.

        Pairs with equal sources stay together. The choice depends on the texts, not on their order. A source
        with more pairs than the remaining number is skipped; if every source is skipped, the rarest source is
        used for validation.
        """
        # The order of hashes is random, but the same for the same texts. The first source always trains.
        times = Counter(self.source)
        if len(times) == 1:
            raise DataError(
                f"{self.name}: all sources are the same, so nothing can be held out: give text for "
                "validation (data.valid of a recipe)"
            )
        left = min(max(round(share * len(self)), 1), _MOST_HELD_OUT)
        held = set[str]()
        order = sorted(times, key=lambda text: hashlib.sha256(text.encode()).digest())[
            1:
        ]
        for source in order:
            if times[source] <= left:
                held.add(source)
                left -= times[source]
        held = held or {min(order, key=lambda text: times[text])}
        is_held = [text in held for text in self.source]
        train = self.where([not out for out in is_held])
        # Validation pairs are unweighted.
        return train, replace(self.where(is_held), weights=None)


def joined(
    corpora: Sequence[ParallelCorpus], weights: Sequence[float]
) -> ParallelCorpus:
    """Return the pairs of several corpora, with the weight of each corpus.

    Each corpus continues the line count of the corpus before.
    """
    numbers = list[int]()
    each = list[float]()
    before = 0
    for corpus, weight in zip(corpora, weights, strict=True):
        numbers += [before + number for number in corpus.line_numbers]
        each += [weight] * len(corpus)
        before += corpus.counts.lines_read
    # Weights of 1 are left out: an epoch is then a plain shuffle.
    return replace(
        corpora[0],
        source=[*chain.from_iterable(corpus.source for corpus in corpora)],
        target=[*chain.from_iterable(corpus.target for corpus in corpora)],
        line_numbers=numbers,
        name="; ".join(corpus.name for corpus in corpora),
        weights=None if {*weights} == {1.0} else each,
    )


def read_parallel(
    spec: AnyCorpusSpec,
    *,
    max_line_chars: int = DEFAULT_MAX_LINE_CHARS,
    base: Path = Path(),
) -> ParallelCorpus:
    """Read a corpus; drop and count the pairs with an empty or too long sentence."""
    # Line indices include dropped pairs.
    name, pairs = _find_pairs(spec, base)
    sources: list[str] = []
    targets: list[str] = []
    line_numbers: list[int] = []
    lines_read = empty_dropped = too_long_dropped = 0
    for number, (raw_source, raw_target) in pairs:
        lines_read += 1
        source = raw_source.strip()
        target = raw_target.strip()
        if not (source and target):
            empty_dropped += 1
        elif max(len(source), len(target)) > max_line_chars:
            too_long_dropped += 1
        else:
            sources.append(source)
            targets.append(target)
            line_numbers.append(number)
    counts = CorpusCounts(lines_read, empty_dropped, too_long_dropped, max_line_chars)
    if not sources:
        raise DataError(
            f"{name}: {counts.describe()}; give a text with at least one pair"
        )
    return ParallelCorpus(sources, targets, line_numbers, name, counts)


def _find_pairs(spec: AnyCorpusSpec, base: Path) -> tuple[str, Iterable[NumberedTexts]]:
    """Return the name of the corpus, and its pairs unchanged."""
    # `CorpusSpec` has checked that exactly one kind of source is given.
    if spec.source is not None and spec.target is not None:
        name = f"{spec.source.name} and {spec.target.name}"
        return name, _read_two_files(base / spec.source, base / spec.target)
    if spec.file is not None:
        return spec.file.name, _read_record_file(spec, base / spec.file)
    source_field = spec.source_field or "source"
    target_field = spec.target_field or "target"
    if spec.hub is not None:
        pairs = read_hub(
            spec.hub, spec.config_name, spec.split, (source_field, target_field), base
        )
        return f"{spec.hub} {spec.split}", pairs
    assert spec.generated is not None
    assert spec.generated_part is not None
    try:
        generated = generate_pairs(
            spec.generated,
            spec.generated_part,
            spec.generated_seed,
            spec.generated_task,
        )
    except ValueError as error:
        raise UsageError(
            f"generated = {spec.generated}, generated_part = {spec.generated_part!r}: {error}"
        ) from None
    return f"generated {spec.generated_part}", enumerate(generated, start=1)


def _read_record_file(spec: AnyCorpusSpec, path: Path) -> Iterator[NumberedTexts]:
    ending = record_ending(path)
    if ending == ".tsv":
        return read_tsv(
            path, int(spec.source_field or "1"), int(spec.target_field or "2")
        )
    read = read_jsonl if ending == ".jsonl" else read_parquet
    return read(path, (spec.source_field or "source", spec.target_field or "target"))


def _read_two_files(source_path: Path, target_path: Path) -> Iterator[NumberedTexts]:
    source = read_lines(source_path)
    target = read_lines(target_path)
    if len(source) != len(target):
        raise DataError(
            f"{source_path} has {len(source):,} lines and {target_path} has {len(target):,}; "
            "line N of one must translate line N of the other; "
            f"judging by the lengths, first suspicious line: {locate_slip(source, target)}"
        )
    numbers = range(1, len(source) + 1)
    return zip(numbers, zip(source, target, strict=True), strict=True)


# Threshold between the mean gap of translations and that of unrelated lines, as a share of the second gap.
_UNRELATED_SHARE = 0.6


def locate_slip(source: Sequence[str], target: Sequence[str]) -> int:
    """Estimate the first line from which source and target are misaligned.

    Lengths of translations have a nearly constant ratio (Gale & Church). The gap g_i = |log s_i/t_i - median|
    is therefore small before the slip, and as large as between unrelated lines after it. The slip minimises
    Σ_{j<i} (g_j - threshold): the sum falls while the lines agree, and rises after.

    Source: Gale & Church 1993, aclanthology.org/J93-1004.
    """
    num_lines = min(len(source), len(target))
    if num_lines == 0:
        return 1
    log_source = np.log([1 + len(line) for line in source[:num_lines]])
    log_target = np.log([1 + len(line) for line in target[:num_lines]])
    ratio = np.median(log_source) - np.median(log_target)
    gaps = np.abs(log_source - log_target - ratio)
    unrelated = np.abs(log_source - np.roll(log_target, num_lines // 2) - ratio).mean()
    drift = np.concatenate([[0.0], np.cumsum(gaps - _UNRELATED_SHARE * unrelated)])
    # The last of equal minima: if all lengths agree, the slip is the first line without a partner.
    least = np.flatnonzero(drift == drift.min())[-1]
    return int(least) + 1
