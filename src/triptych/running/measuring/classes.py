"""Labelled texts, and the accuracy of a model on their classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import nn

from triptych.core.algebra.forms import at_least_float32
from triptych.core.algebra.resampling import ratio_intervals
from triptych.errors import DataError, UsageError
from triptych.literals import SpecialTokens
from triptych.running.measuring.text_arguments import given_lines
from triptych.running.measuring.window_losses import require_classes
from triptych.running.measuring.windows import DocumentWindow, Windows
from triptych.running.opening.labels import label_number, no_label
from triptych.running.opening.reader import Reader
from triptych.running.text.given import Text, TextPair, as_texts, refuse_file_name
from triptych.running.text.lines import iterate_file


class LabelledTexts(NamedTuple):
    """Texts with the numbers of their classes."""

    texts: list[Text]
    labels: list[int]


def labelled_texts(reader: Reader, text: Any, labels: Any) -> LabelledTexts:
    """Return texts with their labels: two lists or files, or without a text a file of labelled lines.

    A labelled line has a label, a tab and a text; a line with a pair has a second tab and text.
    """
    require_classes(reader)
    # Labels without a text are a file of labelled lines.
    if text is None:
        if not isinstance(labels, str | Path):
            raise UsageError(
                "labels without a text are the file of labelled lines: give its path, or the texts"
            )
        return _read_labelled(reader, Path(labels))
    given = text if isinstance(text, Path) else refuse_file_name(text, or_path=True)
    texts = (
        [
            _text_of(line.split("\t"), str(given), number)
            for number, line in _lines(given)
        ]
        if isinstance(given, Path)
        else as_texts(given).texts
    )
    numbers = [labels] if isinstance(labels, int) else labels
    if not isinstance(numbers, list | tuple):
        numbers = given_lines(numbers)
    if len(texts) != len(numbers):
        raise UsageError(
            f"there are {len(texts):,} texts and {len(numbers):,} labels: give one for each"
        )
    found = [
        _label_number(reader, label, f"label {number}")
        for number, label in enumerate(numbers, start=1)
    ]
    return LabelledTexts(texts, found)


def _read_labelled(reader: Reader, path: Path) -> LabelledTexts:
    found = LabelledTexts([], [])
    for number, line in _lines(path):
        label, *parts = line.split("\t")
        found.texts.append(_text_of(parts, str(path), number))
        where = f"{path}, line {number}"
        found.labels.append(_label_number(reader, label.strip(), where))
    if not found.texts:
        raise DataError(f"{path} is empty: there is nothing to evaluate")
    return found


def _lines(path: Path) -> list[tuple[int, str]]:
    return list(enumerate(iterate_file(path), start=1))


def _text_of(parts: Sequence[str], path: str, number: int) -> Text:
    """Return the text, or the pair of texts, of a line's parts between tabs."""
    if len(parts) not in (1, 2) or not all(part.strip() for part in parts):
        raise UsageError(
            f"{path}, line {number}: expected a label, a tab and a text, or two texts with a tab between"
        )
    return parts[0] if len(parts) == 1 else TextPair(*parts)


def _label_number(reader: Reader, given: object, where: str) -> int:
    labels = reader.labels or ()
    number = label_number(labels, given)
    if number is None:
        raise UsageError(f"{where}: {reader.name} {no_label(labels, given)}")
    return number


def labelled_windows(
    reader: Reader, given: LabelledTexts, special_tokens: SpecialTokens = "tokens"
) -> Windows:
    """Return a window for each labelled text; each text is a document."""
    texts = reader.encode(given.texts, special_tokens=special_tokens)
    windows = tuple(
        DocumentWindow(number, text, label)
        for number, (text, label) in enumerate(zip(texts, given.labels, strict=True))
    )
    context = max(len(text.ids) for text in texts)
    return Windows(windows, context, len(windows))


@final
@dataclass(frozen=True)
class Classification:
    """The classes that a model gives to labelled texts.

    Attributes:
        labels: names of the classes.
        right: number of the right class of each text.
        predicted: number of the class with the largest logit of each text.
        nats_per_text: mean negative log-probability of the right class.
        interval: 95 % bootstrap interval of the accuracy, over texts.
    """

    labels: tuple[str, ...]
    right: tuple[int, ...]
    predicted: tuple[int, ...]
    nats_per_text: float
    interval: tuple[float, float]

    @property
    def texts(self) -> int:
        """The number of texts."""
        return len(self.right)

    @property
    def accuracy(self) -> float:
        """The share of texts with the right class."""
        pairs = zip(self.right, self.predicted, strict=True)
        return sum(one == other for one, other in pairs) / self.texts

    @property
    def majority(self) -> float:
        """The share of the most frequent class: the accuracy of always giving this class."""
        return max(map(self.right.count, {*self.right})) / self.texts

    @cached_property
    def f1(self) -> tuple[float, ...]:
        """The F1 score of each class; NaN for a class without texts and predictions."""
        found = []
        # F1 is 2 TP / (2 TP + FP + FN): the denominator counts right and predicted texts of the class.
        for label in range(len(self.labels)):
            total = self.right.count(label) + self.predicted.count(label)
            both = sum(
                one == other == label
                for one, other in zip(self.right, self.predicted, strict=True)
            )
            found.append(2 * both / total if total else float("nan"))
        return tuple(found)

    @property
    def macro_f1(self) -> float:
        """The mean F1 score of the classes with texts or predictions."""
        known = [score for score in self.f1 if score == score]
        return sum(known) / len(known)

    def figures(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        # NaN, unknown to JSON, becomes null.
        classes = [
            {
                "label": label,
                "texts": self.right.count(number),
                "predicted": self.predicted.count(number),
                "f1": None if score != score else score,
            }
            for number, (label, score) in enumerate(
                zip(self.labels, self.f1, strict=True)
            )
        ]
        return {
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "interval_over": "texts",
            "macro_f1": self.macro_f1,
            "majority": self.majority,
            "nats_per_text": self.nats_per_text,
            "texts": self.texts,
            "classes": classes,
        }


def measure_classification(
    reader: Reader,
    given: LabelledTexts,
    special_tokens: SpecialTokens = "tokens",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Classification:
    """Measure the accuracy of a model on labelled texts."""
    texts = reader.encode(given.texts, special_tokens=special_tokens)
    # Batches come by length: the results are put in the order of the texts.
    logits = torch.empty(len(texts), len(reader.labels or ()), dtype=torch.float64)
    done = 0
    for batch in reader.batches(texts):
        found = reader.class_logits([texts[i] for i in batch])
        logits[batch] = at_least_float32(torch.stack(found)).double().cpu()
        done += len(batch)
        progress(done, len(texts))
    right = torch.tensor(given.labels)
    predicted = logits.argmax(dim=1)
    is_right = (predicted == right).double()
    low, high = map(float, ratio_intervals(is_right, torch.ones_like(is_right)))
    return Classification(
        reader.labels or (),
        tuple(given.labels),
        tuple(predicted.tolist()),
        float(nn.functional.cross_entropy(logits, right)),
        (low, high),
    )
