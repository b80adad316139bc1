"""The peak of a plan beside that of torch's allocator in real processes."""

import re
from pathlib import Path

import pytest

from planning.measured import recipe_of
from training.launching import start
from triptych.planning import Cluster
from triptych.planning.simulation import simulated_processes
from triptych.planning.steps import simulate_step

MEASURED = Path(__file__).with_name("measured.py")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["training.activation_checkpointing=true"]])
@pytest.mark.parametrize(
    ("size", "kind"), [(1, "none"), (2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp"), (4, "hybrid")]
)
def test_the_peak_of_a_plan_is_that_of_real_processes_within_a_tenth(
    size: int, kind: str, overrides: list[str]
) -> None:
    answers = start(size, str(MEASURED), kind, *overrides)
    assert [code for code, _ in answers] == [0] * size, "\n".join(said for _, said in answers)
    found = re.search(r"^peak (\d+) rank 0,", answers[0][1], re.MULTILINE)
    assert found is not None, answers[0][1]
    with simulated_processes(size):
        step = simulate_step(recipe_of(overrides), Cluster(size, 10**9), None if kind == "none" else kind)  # type: ignore[arg-type]
    assert step.peak == pytest.approx(int(found[1]), rel=0.1)
