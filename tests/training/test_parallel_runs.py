"""Whole runs by several processes beside those of one: all three kinds of model, and checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from small_checkpoints import gpt2_that_runs
from tiny_recipe import text_tree, tiny_recipe
from training.launching import start
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.training import resolve, runs
from triptych.training.metrics import read_metrics
from triptych.training.progress import SilentDisplay

pytestmark = pytest.mark.slow

STEPS = 200
TEXT = [f"the {c} {a} sat on the {p}" for c in ("red", "old") for a in ("cat", "dog", "owl")
        for p in ("mat", "roof", "step", "chair")]  # fmt: skip
TRAINING = {
    "max_steps": STEPS, "warmup_steps": 20, "learning_rate": 0.003, "clip_norm": 1.0, "log_every_steps": 1,
    "save_every_steps": 100, "average_last": 2, "threads": 1, "adam_epsilon": 1e-6,
}  # fmt: skip


def of_text(task: str, folder: Path) -> dict[str, Any]:
    training, validation = {**TRAINING, "batch_size": 5}, {"every_steps": 100}
    model = {"d_ff": 32, "context": 12}
    return text_tree(folder, TEXT * 4, task, model=model, training=training, validation=validation)


def translation(folder: Path) -> dict[str, Any]:
    del folder
    training, validation = {**TRAINING, "batch_tokens": 300}, {"every_steps": 100}
    tokenizer, model = {"vocab_size": 301}, {"dropout": 0.0}
    return tiny_recipe(200, 12, tokenizer=tokenizer, model=model, training=training, validation=validation)


KINDS = {
    "translation": translation,
    "language-model": lambda folder: of_text("language-model", folder),
    "masked-language-model": lambda folder: of_text("masked-language-model", folder),
}


def trained(recipe: dict[str, Any], folder: Path, size: int, parallel: str) -> Path:
    """A run by so many processes; its folder."""
    if size == 1:
        runs.train(resolve(recipe), folder, SilentDisplay())
        return folder
    path = folder.with_suffix(".toml")
    path.write_text(tomli_w.dumps(recipe))
    command = ["-m", "triptych", "train", str(path), "--out", str(folder)]
    answers = start(size, *command, "--set", f"training.parallel={parallel}")
    assert [code for code, _ in answers] == [0] * size, "\n".join(said for _, said in answers)
    return folder


def losses_of(folder: Path) -> np.ndarray:
    return np.array([line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line])


@pytest.mark.parametrize("kind", KINDS)
def test_two_and_four_ranks_have_the_losses_of_one_process_over_200_steps(kind: str, tmp_path: Path) -> None:
    """Step by step within 1e-5; float32 rounds to 6e-8."""
    recipe = KINDS[kind](tmp_path)
    alone = losses_of(trained(recipe, tmp_path / "1", 1, "none"))
    assert len(alone) == STEPS
    assert alone[-20:].mean() < 0.8 * alone[0], "it learns"
    for size, parallel in ((2, "ddp"), (4, "hybrid")):
        folder = trained(recipe, tmp_path / str(size), size, parallel)
        found = losses_of(folder)
        np.testing.assert_allclose(found, alone, rtol=1e-5)
        last = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line][-1]
        assert len(last["ranks_tokens_per_second"]) == len(last["ranks_waiting_for_others"]) == size
        assert all(0 <= share <= 1 for share in last["ranks_waiting_for_data"])
        apart = float(np.abs(found / alone - 1).max())
        print(json.dumps({"kind": kind, "ranks": size, "parallel": parallel, "largest difference": apart}))


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_go_on_with_a_checkpoint_as_one_process_does(tmp_path: Path) -> None:
    """Copies and shards: the losses of one process, and a folder of the checkpoint's family."""
    pytest.importorskip("transformers")
    gpt2_that_runs(tmp_path / "gpt2")
    recipe = of_text("language-model", tmp_path)
    recipe["model"] = {"checkpoint": str(tmp_path / "gpt2"), "context": 16}
    recipe["training"] |= {"max_steps": 6}
    del recipe["tokenizer"]
    alone = trained(recipe, tmp_path / "1", 1, "none")
    for parallel in ("fsdp", "ddp"):
        found = trained(recipe, tmp_path / parallel, 2, parallel)
        np.testing.assert_allclose(losses_of(found), losses_of(alone), rtol=1e-4)
        ours, theirs = load_file(found / "model.safetensors"), load_file(alone / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4) for name in theirs)
        assert open_checkpoint(found).written_as == "GPT-2"
