"""Options with which a model is opened and run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch

from triptych.checkpoints.source import Source
from triptych.checkpoints.translators import Languages
from triptych.decoding import Precision

EngineName = Literal["triptych", "ctranslate2", "auto"]


@final
@dataclass(frozen=True)
class Options:
    """How a model is run; see `load`."""

    device: str = "auto"
    dtype: torch.dtype | None = None
    tokenizer: Path | None = None
    languages: Languages | None = None
    engine: EngineName = "triptych"
    precision: Precision = "fp32"
    shortlist: Path | None = None
    ensemble: tuple[Source, ...] = ()
