"""Sequence-level distillation: a teacher translates the training sources of a recipe for a student.

A teacher's translations vary less than people's, so that a small model learns them more easily. Interpolation
keeps the translation closest to the reference. Source: Kim & Rush 2016, arXiv 1606.07947.
"""

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tomli_w

from triptych.errors import DataError, UsageError
from triptych.files import file_hash, hold_folder, write_json, write_text
from triptych.processes import World
from triptych.progress import Progress
from triptych.running.decoding import (
    Translation,
    Translator,
    measure_bleu,
    nearest_translation,
)
from triptych.training.corpora.corpora import ParallelCorpus
from triptych.training.folder import hash_parts
from triptych.training.progress import Display
from triptych.training.recipe import (
    Recipe,
    resolve,
)
from triptych.training.translation import read_corpora, with_tokenizers_of
from triptych.untrusted import read_json

# Sentences of a block; an interruption loses the blocks in progress.
_BLOCK = 512
_RECORD, _BLOCKS, _TRAIN, _VALID, _RECIPE = (
    *("distillation.json", "blocks", "train.jsonl", "valid.jsonl", "student.toml"),
)
_TEACHER = "teacher"  # folder of a teacher for `teacher_weight`


@dataclass(frozen=True)
class Distilled:
    """Result of a distillation.

    Attributes:
        recipe: file of the student's recipe.
        sentences: number of training sources translated by the teacher.
        pairs: number of pairs of the student's text.
        bleu: BLEU of the teacher's best translations against the references of the training text.
        num_at_limit: number of sentences left out, since all their translations were cut off at the limit of
            their length.
    """

    recipe: Path
    sentences: int
    pairs: int
    bleu: float
    num_at_limit: int = 0


def distil_text(
    teacher: Translator,
    known_by: Mapping[str, Any],
    recipe: Recipe,
    folder: Path,
    world: World,
    display: Display,
    progress: Progress,
    *,
    interpolate: bool,
    originals: float,
    teacher_weight: float,
    save_teacher: Callable[[Path], object],
) -> Distilled:
    """Translate the training text into a folder, or resume it there; `known_by` identifies the teacher."""
    if interpolate and teacher.options.num_best == 1:
        raise UsageError(
            "interpolate chooses among several translations: give num_best (--n-best 8)"
        )
    if not 0 <= originals <= 1:
        raise UsageError(f"originals is {originals}: it is a share, from 0 to 1")
    if not 0 <= teacher_weight <= 1:
        raise UsageError(
            f"teacher_weight is {teacher_weight}: it is a share, from 0 to 1"
        )
    if any(corpus.weight != 1 for corpus in recipe.data.corpora):
        raise UsageError(
            "a teacher translates every corpus once: leave out data.train.weight"
        )
    if teacher_weight and len(teacher.models) > 1:
        raise UsageError(
            "a student learns the probabilities of one teacher: leave out ensemble or teacher_weight"
        )
    if teacher_weight:
        learned = {"teacher": str(folder / _TEACHER), "teacher_weight": teacher_weight}
        recipe = with_tokenizers_of(teacher.tokenizers, recipe, learned)
    train, valid = world.on_all(lambda: read_corpora(recipe, Path.cwd(), display))
    sides = train.source, train.target, valid.source, valid.target
    given = {
        "teacher": dict(known_by),
        "search": json.loads(json.dumps(asdict(teacher.options))),
        "text": hash_parts({"sha256": [json.dumps(side).encode() for side in sides]}),
        "recipe": hash_parts({"sha256": [recipe.to_toml().encode()]}),
        "kept": {"interpolate": interpolate, "originals": originals},
    }
    world.require_same({name: json.dumps(value) for name, value in given.items()})
    world.on_first(lambda: _begin(folder, given))
    # Blocks of sentences of similar length need little padding.
    order = sorted(range(len(train)), key=lambda i: len(train.source[i]))
    blocks = [order[start : start + _BLOCK] for start in range(0, len(order), _BLOCK)]

    def finish() -> Distilled:
        # A repeated call after the end only checks that the written files are unchanged.
        record = read_json(folder / _RECORD)
        for name, digest in record.get("written", {}).get("sha256", {}).items():
            if not (folder / name).is_file() or file_hash(folder / name) != digest:
                raise DataError(
                    f"{folder / name} is not what was written: give another folder (--out), or train on it: "
                    f"triptych train {folder / _RECIPE}"
                )
        if "written" not in record:
            found = [list[str]()] * len(train)
            for number, block in enumerate(blocks):
                lines = (
                    _block_path(folder, number).read_text(encoding="utf-8").splitlines()
                )
                for i, line in zip(block, lines, strict=True):
                    found[i] = json.loads(line)
            if teacher_weight:
                (folder / _TEACHER).mkdir(exist_ok=True)
                save_teacher(folder / _TEACHER)
            record |= {
                "written": _write_student(
                    folder, recipe, train, valid, found, interpolate, originals
                )
            }
            write_json(folder / _RECORD, record)
        shutil.rmtree(folder / _BLOCKS, ignore_errors=True)
        written = record["written"]
        return Distilled(
            folder / _RECIPE,
            len(train),
            written["pairs"],
            written["teacher_bleu"],
            written["at_limit"],
        )

    def work() -> Distilled:
        if not world.on_first(lambda: "written" in read_json(folder / _RECORD)):
            world.on_all(
                lambda: _translate(
                    teacher, train.source, blocks, folder, world, progress
                )
            )
        return world.on_first(finish, patiently=True)

    if not world.is_first:
        return work()
    with hold_folder(folder, wait=False):
        return work()


def _block_path(folder: Path, number: int) -> Path:
    """Return the file of a block, with a line for each sentence: the list of its translations."""
    return folder / _BLOCKS / f"{number:06}.jsonl"


def _begin(folder: Path, given: Mapping[str, Any]) -> None:
    """Make the folder, or check that an existing folder is of the same work."""
    # The record identifies the work: teacher, search, text, recipe and choice of translations.
    path = folder / _RECORD
    if path.is_file():
        begun = read_json(path)
        if other := [name for name, value in given.items() if begun.get(name) != value]:
            raise UsageError(
                f"{folder} was begun with another {' and '.join(other)} (see {path}): give another folder "
                "(--out)"
            )
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(
            f"{folder} is there, and is no student's: give a folder that is new or empty (--out)"
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, given)
    (folder / _BLOCKS).mkdir(exist_ok=True)


def _translate(
    teacher: Translator,
    sources: Sequence[str],
    blocks: Sequence[Sequence[int]],
    folder: Path,
    world: World,
    progress: Progress,
) -> None:
    """Translate the missing blocks, each block in one process."""
    turns = world.turns(len(blocks))
    taken = deque[int]()

    def texts() -> Iterator[list[str]]:
        for number in turns.taken():
            if not _block_path(folder, number).exists():
                taken.append(number)
                yield [sources[i] for i in blocks[number]]

    def tell() -> None:
        done = sum(1 for _ in (folder / _BLOCKS).glob("[0-9]*.jsonl"))
        progress("translating", min(done * _BLOCK, len(sources)), len(sources))

    with turns.given_up_on_error():
        tell()
        stream = teacher.translate_stream(texts())
        for first in stream:
            number = taken.popleft()
            found = [first, *islice(stream, len(blocks[number]) - 1)]
            write_text(
                _block_path(folder, number),
                "".join(
                    f"{json.dumps(_whole_texts(line), ensure_ascii=True)}\n"
                    for line in found
                ),
            )
            tell()


def _whole_texts(line: Translation) -> list[str]:
    """Return the translations of a line that end before the limit of their length."""
    # Different tokens may decode to the same text.
    return list(
        dict.fromkeys(one.text for one in line.candidates if one.finish == "stop")
    )


def _write_student(
    folder: Path,
    recipe: Recipe,
    train: ParallelCorpus,
    valid: ParallelCorpus,
    translations: Sequence[Sequence[str]],
    interpolate: bool,
    originals: float,
) -> dict[str, Any]:
    """Write the student's text and recipe; returns the entries of the record about them."""
    kept = translations
    if interpolate:
        both = zip(translations, train.target, strict=True)
        kept = [
            [nearest_translation(of, reference)] if of else [] for of, reference in both
        ]
    pairs: list[dict[str, str]] = []
    for i, source in enumerate(train.source):
        pairs += (
            {"source": source, "target": text, "by": "teacher"}
            for text in kept[i]
            if text
        )
        # The kept originals are spread evenly over the text.
        if int((i + 1) * originals) > int(i * originals):
            pairs.append({"source": source, "target": train.target[i], "by": "text"})
    data: dict[str, Any] = {"train": {"file": str(folder / _TRAIN)}}
    files = {_TRAIN: pairs}
    if recipe.data.valid is None:  # the held-out pairs keep their references
        data["valid"] = {"file": str(folder / _VALID)}
        files[_VALID] = [
            {"source": s, "target": t}
            for s, t in zip(valid.source, valid.target, strict=True)
        ]
    for name, records in files.items():
        lines = (f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
        write_text(folder / name, "".join(lines))
    tree = recipe.model_dump(mode="json", exclude_unset=True)
    tree["data"] |= data
    resolve(tree)
    command = f"triptych train {folder / _RECIPE} --out {folder / 'student'}"
    write_text(
        folder / _RECIPE,
        f"# Made by `triptych distil`; train it: {command}\n{tomli_w.dumps(tree)}",
    )
    best = [of[0] if of else "" for of in translations]
    return {
        "pairs": len(pairs),
        "at_limit": sum(not of for of in translations),
        "teacher_bleu": round(measure_bleu(best, train.target), 2),
        "sha256": {name: file_hash(folder / name) for name in files},
    }
