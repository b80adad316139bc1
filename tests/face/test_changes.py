"""Changes of a model, against `transformers` with the same change written by hand."""

from pathlib import Path

import pytest

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"
needs_checkpoints = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no trained checkpoints here")
