"""Shortlists of translators: learn one from sentence pairs, and write it."""

from pathlib import Path

from pydantic import ValidationError

from triptych.errors import UsageError
from triptych.files import write_text
from triptych.running.opening import RECIPE, Reader
from triptych.running.text import (
    Coverage,
    TokenSequences,
    learn_shortlist,
)
from triptych.training.corpora.corpora import CorpusSpec, read_parallel
from triptych.training.progress import Display, LineDisplay
from triptych.training.recipe import (
    read_recipe,
    require_translation,
)
from triptych.training.translation import read_corpora


def write_shortlist(
    opened: Reader,
    out: str | Path,
    source: str | Path | None,
    target: str | Path | None,
    *,
    most: int,
    frequent: int,
    display: Display | None,
) -> Coverage:
    """Learn a shortlist from two files of parallel lines, or from a run's training text by default."""
    tokenizers = opened.tokenizers
    if (source is None) != (target is None):
        raise UsageError(
            "source and target belong together: give both, or none for a run's own text"
        )
    if source is not None and target is not None:
        try:
            corpus = CorpusSpec(source=Path(source), target=Path(target))
        except ValidationError:
            raise UsageError(
                f"{source} and {target} must be files of lines, a sentence on each: a file of records holds "
                "both sides"
            ) from None
        pairs = read_parallel(corpus)
    elif (opened.folder / RECIPE).exists():
        recipe = require_translation(read_recipe(opened.folder / RECIPE), opened.folder)
        pairs, _ = read_corpora(recipe, Path.cwd(), display or LineDisplay())
    else:
        raise UsageError(
            f"{opened.name} is not a run whose text is known: give source and target"
        )
    src = TokenSequences.pack(tokenizers.source.encode(pairs.source))
    tgt = TokenSequences.pack(tokenizers.target.encode(pairs.target))
    found, coverage = learn_shortlist(src, tgt, tokenizers, most, frequent)
    write_text(Path(out), found.as_text(tokenizers))
    return coverage
