"""Options for opening and running a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import torch

from triptych.core.checkpoints.source import Source
from triptych.errors import UsageError
from triptych.extras import is_installed
from triptych.literals import EngineName, Precision


class Languages(NamedTuple):
    """The languages of a translation by their tokens in the tokenizer: "de_DE", "deu_Latn", "de"."""

    source: str  # language of the source text
    target: str  # language of the translation


@final
@dataclass(frozen=True)
class Options:
    """Options for opening and running a model; see `load`."""

    device: str = "auto"
    dtype: torch.dtype | None = None
    languages: Languages | None = None
    engine: EngineName = "triptych"
    precision: Precision = "fp32"
    shortlist: Path | None = None
    ensemble: tuple[Source, ...] = ()


def require_ctranslate2() -> None:
    """Check that CTranslate2 is installed; it is not built for every platform."""
    if not is_installed("ctranslate2"):
        raise UsageError(
            "CTranslate2 is not installed: pip install ctranslate2, or use --engine triptych"
        )
