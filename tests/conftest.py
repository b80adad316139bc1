"""What every test runs under: checked shapes, a fixed seed, no time limit on a drawn example."""

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

# Before the package is imported for the first time; tests are collected after this file.
install_import_hook("triptych", "beartype.beartype")

# Two busy cores would make a limit in milliseconds fail by chance.
hypothesis.settings.register_profile("triptych", deadline=None)
hypothesis.settings.load_profile("triptych")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(20170612)
