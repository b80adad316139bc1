import time
from pathlib import Path

import pytest

from triptych.training.metrics import MetricsLog, read_metrics


def test_records_come_back_in_order(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.add({"step": 1, "loss": 0.1 + 0.2})
    log.add({"step": 2, "loss": 1e-300})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.1 + 0.2},
        {"step": 2, "loss": 1e-300},
    ]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_forgetting_drops_later_steps_the_ending_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "average_valid_loss": 3.0}\n{"step": 3}\n{"st')
    log = MetricsLog(tmp_path)
    log.forget_after(2, validated=True)
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_validation_that_the_state_knows_nothing_of_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "loss": 1.0}\n{"step": 2, "valid_loss": 3.0}\n')
    MetricsLog(tmp_path).forget_after(2, validated=True)
    assert len(read_metrics(path)) == 2
    MetricsLog(tmp_path).forget_after(2, validated=False)
    assert read_metrics(path) == [{"step": 2, "loss": 1.0}]


def test_tensorboard_gets_the_same_numbers_where_it_is_installed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.add({"step": 1, "loss": 2.5})
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


def test_tensorboard_forgets_with_the_run(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    before = MetricsLog(tmp_path)
    for step in (1, 2, 3, 4):
        before.add({"step": step, "loss": 2.0})
    before.close()
    time.sleep(1.1)  # TensorBoard sorts files by the second in their names
    resumed = MetricsLog(tmp_path)
    resumed.forget_after(2, validated=True)
    resumed.add({"step": 3, "loss": 1.0})
    resumed.close()
    shown = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [(1, 2.0), (2, 2.0), (3, 1.0)]
