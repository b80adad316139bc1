"""The standing attack, in a short form; `make attack` is the long one."""

import sys
from pathlib import Path

import pytest

from serve.attack import attack
from triptych.face import Model


@pytest.mark.skipif(sys.platform != "linux", reason="processes and memory are looked at in /proc")
def test_honest_clients_get_their_answers_during_an_attack(small_run: Path, language_model: Model) -> None:
    models = {"en-de": small_run, "gpt": Path(language_model.name)}
    seen = attack(models, seconds=8.0, seed=20170612, slowest_health=5.0)  # the cores are busy
    assert seen.faults == []
    assert seen.honest > 20
    assert sum(seen.tried.values()) > 20
