"""Validation text of a run, read again from the files in its recipe."""

from collections.abc import Iterator
from pathlib import Path

from triptych.running.text.documents import TextPart, whole_documents
from triptych.training.corpora.corpora import ParallelCorpus, read_parallel
from triptych.training.language import TextOfRun
from triptych.training.recipe import AnyRecipe, Recipe, TextRecipe

# Limit of characters that a page or a measure reads.
_MOST_CHARACTERS = 1 << 20


def validation_pairs(recipe: Recipe, base: Path) -> ParallelCorpus:
    """Read the validation pairs of a run; paths of the recipe are relative to `base`."""
    data = recipe.data
    pairs = read_parallel(data.valid or data.train, max_line_chars=data.max_line_chars, base=base)
    return pairs if data.valid is not None else pairs.split(data.valid_share)[1]


def validation_parts(recipe: TextRecipe, base: Path) -> Iterator[TextPart]:
    """Yield the validation text of a run in parts; paths of the recipe are relative to `base`."""
    return TextOfRun(recipe, base).validation()


def validation_text(recipe: AnyRecipe, base: Path) -> tuple[list[str], list[str] | None]:
    """Return the beginning of the validation text: documents, or all sentences with their translations."""
    if isinstance(recipe, Recipe):
        pairs = validation_pairs(recipe, base)
        return pairs.source, pairs.target
    return [*whole_documents(_first_parts(validation_parts(recipe, base)))], None


def _first_parts(parts: Iterator[TextPart]) -> Iterator[TextPart]:
    left = _MOST_CHARACTERS
    for part in parts:
        if left <= 0:
            return
        text = part.text[:left]
        left -= len(part.text)
        yield TextPart(text, ends_document=part.ends_document or left <= 0)
