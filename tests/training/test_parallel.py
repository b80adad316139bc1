"""Several processes learn what one process does. What each of them checks is in `ranks.py`."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import triptych
from tiny_recipe import tiny_recipe
from training.launching import assert_ranks_pass, start
from triptych.errors import DataError, UsageError
from triptych.files import hold_folder
from triptych.training import resolve
from triptych.training.computing import rows_of_rank
from triptych.training.distributed import mesh_shape
from triptych.training.progress import SilentDisplay
from triptych.training.runs import resume, train
from triptych.training.state import Counters, find_state, read_counters, shards_folder, write_marker


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 5, 8])
def test_the_ranks_rows_together_are_the_batch(size: int, num_rows: int) -> None:
    batch = np.arange(10, 10 + num_rows)
    parts = [rows_of_rank(batch, rank, size) for rank in range(size)]
    assert sorted(np.concatenate([rows for rows, counted in parts if counted])) == batch.tolist()
    assert all(len(rows) for rows, _ in parts)


@pytest.mark.slow
def test_two_ranks_make_the_gradients_of_one_process_and_states_in_shards_that_every_layout_reads(
    tmp_path: Path,
) -> None:
    """Copies and shards; tied and other tables; uneven shards; parts without a row or with more tokens.

    Both checks in one start of the processes: that is most of their time.
    """
    gradients = ("gradients_of_three_kinds", "ddp", "fsdp")
    assert_ranks_pass(2, *gradients, "then", "states_in_shards", str(tmp_path))


@pytest.mark.slow
def test_four_ranks_make_the_gradients_of_one_process() -> None:
    assert_ranks_pass(4, "gradients_of_three_kinds", "ddp", "fsdp", "hybrid")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_parameterisation_learns_on_two_ranks_what_it_does_on_one(kind: str) -> None:
    assert_ranks_pass(2, "every_parameterisation", kind)


@pytest.mark.slow
def test_in_bfloat16_two_ranks_stay_near_float32() -> None:
    assert_ranks_pass(2, "narrow_blocks", "ddp", "fsdp")


@pytest.mark.slow
def test_blocks_that_compute_again_give_the_same_bits_on_two_ranks() -> None:
    assert_ranks_pass(2, "blocks_that_compute_again", "ddp", "fsdp")


@pytest.mark.slow
def test_models_that_are_made_in_shards_begin_as_those_of_one_process() -> None:
    assert_ranks_pass(2, "made_in_shards", "fsdp")
    assert_ranks_pass(4, "made_in_shards", "hybrid")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory of Linux")
def test_a_model_is_made_in_shards_with_the_memory_of_its_shards() -> None:
    assert_ranks_pass(2, "memory_of_shards")


@pytest.mark.slow
def test_muon_changes_matrices_on_two_ranks_as_on_one() -> None:
    assert_ranks_pass(2, "muon", "ddp")


@pytest.mark.parametrize(
    ("size", "num_nodes", "shard_size", "shape"),
    [(16, 2, None, (2, 8)), (4, 1, None, (2, 2)), (16, 2, 4, (4, 4)), (64, 8, 32, (2, 32))],
)
def test_hybrid_shards_over_a_machine_or_the_processes_it_is_told(
    size: int, num_nodes: int, shard_size: int | None, shape: tuple[int, int]
) -> None:
    assert mesh_shape("hybrid", size, num_nodes, shard_size) == shape


@pytest.mark.parametrize("shard_size", [3, 8, 16])
def test_hybrid_refuses_groups_that_the_processes_do_not_make(shard_size: int) -> None:
    with pytest.raises(UsageError, match=f"8 processes in groups of {shard_size} cannot do that"):
        mesh_shape("hybrid", 8, 1, shard_size)


def make_shards(folder: Path, step: int) -> Path:
    path = shards_folder(folder, step)
    path.mkdir(parents=True)
    save_file({"model.x": torch.zeros(3)}, path / "shard-00001.safetensors")
    write_marker(path, asdict(Counters(step=step)), 1)
    return path


def test_a_folder_of_shards_without_a_marker_is_no_state(tmp_path: Path) -> None:
    first, second = make_shards(tmp_path, 3), make_shards(tmp_path, 6)
    assert find_state(tmp_path) == second
    assert read_counters(tmp_path).step == 6
    (second / "complete.json").unlink()
    assert find_state(tmp_path) == first


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda path: (path / "shard-00001.safetensors").unlink(),
            r"shard-00001.*is missing: put the shard back",
        ),
        (lambda path: (path / "shard-00001.safetensors").write_bytes(b"half"), "has 4 bytes, not "),
        (lambda path: (path / "complete.json").write_text("{"), "complete.json is damaged"),
        (lambda path: (path / "complete.json").write_text('{"format": 7, "files": {}}'), "has format 7"),
    ],
    ids=["missing", "cut", "no marker", "another format"],
)
def test_a_damaged_state_in_shards_is_one_line(
    damage: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    damage(make_shards(tmp_path, 3))
    with pytest.raises(DataError, match=said) as raised:
        read_counters(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_folder_in_which_a_run_trains_is_refused_to_another(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    training = {"max_steps": 1, "threads": 1}
    recipe = resolve(tiny_recipe(30, 3, training=training, validation={"every_steps": 1}))
    train(recipe, folder, SilentDisplay())
    with hold_folder(folder), pytest.raises(UsageError, match="another process is at work in this folder"):
        resume(folder, (), SilentDisplay())


@pytest.mark.slow
def test_a_full_disk_of_one_rank_leaves_the_state_before(tmp_path: Path) -> None:
    assert_ranks_pass(2, "full_disk", str(tmp_path))


@pytest.mark.slow
def test_ranks_with_another_text_are_refused_in_all_ranks() -> None:
    assert_ranks_pass(2, "another_text")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ("training.paralel='ddp'", 2, "unknown key training.paralel"),
        ("training.parallel='none'", 2, "'none' is for one process, and 2 were started"),
        ("data.train.generated_part='none'", 2, "data.train"),
        ("training.parallel='hybrid'", 2, "2 processes in 1 machines cannot do that"),
        pytest.param(
            "training.device='cuda'",
            2,
            "torchrun started 2 processes on a machine of 0 GPUs",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs"),
        ),
    ],
)
def test_bad_input_is_one_line_of_rank_0_and_the_same_code_everywhere(
    given: str, code: int, said: str, tmp_path: Path
) -> None:
    assert_one_line(start(2, *new_run(tmp_path / "run"), "--set", given), code, said)


def new_run(folder: Path) -> list[str]:
    return [
        *("-m", "triptych", "train", "demo", "--out", str(folder), "--set", "data.cache=''"),
        *("--set", "data.train={generated=50, generated_part='train'}", "--set", "training.max_steps=1"),
        *("--set", "validation.bleu=false", "--set", "validation.metric='loss'"),
    ]


def assert_one_line(answers: list[tuple[int, str]], code: int, said: str) -> None:
    """Rank 0 says it, and all end with the code."""
    assert [found for found, _ in answers] == [code] * len(answers), answers
    errors = [line for _, text in answers for line in text.splitlines() if line.startswith("triptych: ")]
    assert len(errors) == 1, answers
    assert said in errors[0]
    assert errors[0] in answers[0][1]


@pytest.mark.slow
def test_a_run_that_cannot_be_resumed_is_one_line_of_rank_0(tmp_path: Path) -> None:
    """Without --resume, with a shard that is missing, and with a state of another format."""
    folder = tmp_path / "run"
    again = ["-m", "triptych", "train", "--resume", str(folder), "--set", "training.max_steps=2"]
    assert [code for code, _ in start(2, *new_run(folder))] == [0, 0]
    assert_one_line(start(3, *new_run(folder)), 2, "--resume")
    state = find_state(folder / "state")
    assert state is not None
    shard = state / sorted(path.name for path in state.glob("*.safetensors"))[1]
    held = shard.read_bytes()
    shard.unlink()
    assert_one_line(start(2, *again), 1, f"{shard.name} is missing: put the shard back")
    shard.write_bytes(held)
    marker = state / "complete.json"
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 7'))
    assert_one_line(start(2, *again), 1, "has format 7, this triptych reads 1")


@pytest.mark.slow
def test_a_rank_with_other_code_is_refused(tmp_path: Path) -> None:
    source = Path(triptych.__file__).parent
    shutil.copytree(source, tmp_path / "src" / "triptych")
    with (tmp_path / "src" / "triptych" / "threads.py").open("a") as file:
        file.write("# changed\n")
    answers = start(2, *new_run(tmp_path / "run"), last={"PYTHONPATH": str(tmp_path / "src")})
    assert_one_line(answers, 1, "rank 1 has another version of the code of triptych than rank 0")
