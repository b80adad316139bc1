"""Real processes under `torchrun` that are killed, stopped, or hang."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from interrupting import wait_until
from tiny_recipe import tiny_recipe
from triptych.training.metrics import read_metrics
from triptych.training.progress import SilentDisplay
from triptych.training.runs import resume
from triptych.training.state import find_state, read_counters

STEPS = 24
pytestmark = pytest.mark.slow


def write_recipe(path: Path, dropout: float = 0.1) -> Path:
    tree = tiny_recipe(
        200,
        12,
        tokenizer={"vocab_size": 301},
        model={"dropout": dropout},
        training={
            "max_steps": STEPS,
            "accumulate_batches": 2,
            "learning_rate": 0.01,
            "warmup_steps": 5,
            "clip_norm": 1.0,
            "save_every_steps": 3,
            "log_every_steps": 1,
            "average_last": 2,
            "threads": 1,
            "parallel": "fsdp",
        },
        validation={"every_steps": 8},
    )
    path.write_text(tomli_w.dumps({**tree, "seed": 5}))
    return path


@contextmanager
def launch(
    folder: Path, *options: str, again: bool = False, dropout: float = 0.1, size: int = 2, restarts: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """A run under torchrun, in a new folder or resumed."""
    folder.parent.mkdir(exist_ok=True)
    recipe = write_recipe(folder.parent / "recipe.toml", dropout)
    what = ["--resume", str(folder)] if again else [str(recipe), "--out", str(folder)]
    started = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}",
         f"--max-restarts={restarts}",
         "-m", "triptych", "train", *what, *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield started
    finally:
        for child in ranks_of(started.pid).values():
            os.kill(child, signal.SIGKILL)
        started.kill()
        started.wait()


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids of the ranks; none once the launcher has ended."""
    found = {}
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    for child in children.read_text().split() if children.exists() else ():
        try:
            variables = dict(
                one.split("=", 1)
                for one in Path(f"/proc/{child}/environ").read_text().split("\0")
                if "=" in one
            )
        except OSError:
            continue
        if "RANK" in variables:
            found[int(variables["RANK"])] = int(child)
    return found


def step_of(folder: Path) -> int:
    """The last step that the metrics tell of."""
    path = folder / "metrics.jsonl"
    return max((record["step"] for record in read_metrics(path)), default=0) if path.exists() else 0


def finish(started: "subprocess.Popen[str]") -> None:
    said, _ = started.communicate(timeout=600)
    assert started.returncode == 0, said


def finished_run(folder: Path, *options: str) -> Path:
    with launch(folder, *options) as started:
        finish(started)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("whole") / "run")


def assert_same_run(folder: Path, expected: Path) -> None:
    ours, theirs = load_file(folder / "model.safetensors"), load_file(expected / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [
        [r["loss"] for r in read_metrics(f / "metrics.jsonl") if "loss" in r] for f in (folder, expected)
    ]
    assert losses[0] == losses[1]


# Long enough for a link to drop and come back.
LONG = [f"--set=training.{key}" for key in ("max_steps=120", "save_every_steps=7", "log_every_steps=2")]
LONG.append("--set=validation.every_steps=60")


@pytest.fixture(scope="module")
def long_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("long") / "run", *LONG)


# Twenty lives, each of which loses what it did since the last save.
LONGEST = [*LONG, "--set=training.max_steps=400"]


@pytest.fixture(scope="module")
def longest_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("longest") / "run", *LONGEST)


def test_a_rank_killed_at_twenty_random_moments_changes_nothing(
    longest_undisturbed: Path, tmp_path: Path
) -> None:
    """While processes start, join and resume; between steps, and before, in and after saves."""
    drawn, folder, killed = random.Random(23), tmp_path / "run", 0
    with launch(folder, *LONGEST, restarts=20) as started:
        while killed < 20:
            wait_until(lambda: len(ranks_of(started.pid)) == 2)
            alive, begun = ranks_of(started.pid), step_of(folder)
            if killed % 2:
                time.sleep(drawn.uniform(0, 3))
            else:
                wait_until(lambda begun=begun: step_of(folder) != begun)  # type: ignore[misc]
                time.sleep(drawn.uniform(0, 0.5))
            os.kill(alive[drawn.randrange(2)], signal.SIGKILL)
            killed += 1
            wait_until(lambda alive=alive: not {*ranks_of(started.pid).values()} & {*alive.values()})  # type: ignore[misc]
        finish(started)
    assert_same_run(folder, longest_undisturbed)
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert "resuming" in (folder / "logs" / "rank-1.log").read_text()


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def two_machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with one link between them: 10.77.23.1 and 10.77.23.2."""
    names = f"tri{os.getpid()}a", f"tri{os.getpid()}b"
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    try:
        for name in names:
            run_ip("netns", "add", name)
        run_ip("link", "add", "ends", "netns", names[0], "type", "veth", "peer", "ends", "netns", names[1])
        for number, name in enumerate(names, start=1):
            run_ip("-n", name, "address", "add", f"10.77.23.{number}/24", "dev", "ends")
            run_ip("-n", name, "link", "set", "ends", "up")
            run_ip("-n", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr!r}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_a_link_between_two_machines_that_drops_and_comes_back_changes_nothing(
    long_undisturbed: Path, two_machines: tuple[str, str], tmp_path: Path
) -> None:
    folder, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.toml")
    launchers = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
             "--nproc-per-node=1", f"--node-rank={number - 1}", "--rdzv-backend=c10d", "--rdzv-id=23",
             "--rdzv-endpoint=10.77.23.1:29517", f"--rdzv-conf=is_host={2 - number}",
             f"--local-addr=10.77.23.{number}",
             "-m", "triptych", "train", str(recipe), "--out", str(folder), *LONG],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "ends"},
        )
        for number, name in enumerate(two_machines, start=1)
    ]  # fmt: skip
    try:
        for begun in (20, 60):
            wait_until(lambda begun=begun: step_of(folder) >= begun)  # type: ignore[misc]
            run_ip("-n", two_machines[0], "link", "set", "ends", "down")
            time.sleep(1.0)
            stood = step_of(folder)
            time.sleep(2.0)
            assert step_of(folder) == stood, "without the link no step is made"
            run_ip("-n", two_machines[0], "link", "set", "ends", "up")
        said = [launcher.communicate(timeout=600)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            for process in ranks_of(launcher.pid).values():
                os.kill(process, signal.SIGKILL)
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(said)
    assert_same_run(folder, long_undisturbed)


def test_a_run_stopped_by_sigterm_is_resumed_in_any_layout(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with launch(folder) as started:
        wait_until(lambda: step_of(folder) >= 5)
        started.send_signal(signal.SIGTERM)
        said, _ = started.communicate(timeout=600)
    assert "stopped after step" in said, said
    assert 5 <= read_counters(folder / "state").step < STEPS
    with launch(folder, again=True) as started:
        finish(started)
    assert_same_run(folder, undisturbed)


def test_another_number_of_ranks_or_kind_goes_on_within_a_tolerance(tmp_path: Path) -> None:
    """Without dropout, which is drawn for each rank: losses within 1e-4 of one another."""
    losses = {}
    for name in ("whole", "alone", "copies"):
        folder = tmp_path / name
        with launch(folder, dropout=0.0) as started:
            if name != "whole":
                wait_until(lambda folder=folder: step_of(folder) >= 5)  # type: ignore[misc]
                started.send_signal(signal.SIGTERM)
            started.communicate(timeout=600)
        if name == "alone":
            assert resume(folder, (), SilentDisplay()).outcome.signal_number is None
        if name == "copies":
            with launch(folder, "--set", "training.parallel=ddp", again=True, size=3) as started:
                finish(started)
        losses[name] = [one["loss"] for one in read_metrics(folder / "metrics.jsonl") if "loss" in one]
    assert len(losses["whole"]) == STEPS
    assert losses["alone"] == pytest.approx(losses["whole"], rel=1e-4)
    assert losses["copies"] == pytest.approx(losses["whole"], rel=1e-4)


def test_a_rank_that_hangs_ends_the_run_with_a_line_that_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with launch(folder, "--set", "training.timeout_minutes=0.2") as started:
        wait_until(lambda: step_of(folder) >= 4)
        hanging = ranks_of(started.pid)[1]
        os.kill(hanging, signal.SIGSTOP)
        begun = time.monotonic()
        try:
            wait_until(lambda: 0 not in ranks_of(started.pid), 120)
            assert time.monotonic() - begun < 90
        finally:
            os.kill(hanging, signal.SIGKILL)
        said, _ = started.communicate(timeout=600)
    assert "waited 0.2 minutes for another process" in said, said
    assert started.returncode != 0
    assert find_state(folder / "state") is not None
