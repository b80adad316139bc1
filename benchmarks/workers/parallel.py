"""One of the processes that train together: `python parallel.py OPTIONS`, as torchrun would start it.

Writes `rank-N.json`: seconds of each step, target tokens, memory, seconds in collectives and of saving.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.workers import training
from benchmarks.workers.training import SCHEDULE, Text
from benchmarks.workers.training_triptych import CONFIG, no_text
from triptych.cli.process import keep_freed_memory, limit_kernel_cache
from triptych.core.models import EncoderDecoder
from triptych.core.models.initial import DeferredInit
from triptych.core.models.storage import model_tensors
from triptych.launch import end_now
from triptych.processes import World, launched
from triptych.training import Trainer
from triptych.training.computing import Layout, LazyParameters
from triptych.training.corpora.pair_batches import Batch
from triptych.training.objectives import TranslationObjective
from triptych.training.sections import ValidationConfig
from triptych.training.state import Counters, write_state

_WARM_UP, _PROFILED = 2, 2


def main() -> None:
    options = json.loads(sys.argv[1])
    limit_kernel_cache()  # as `triptych train` does before it begins
    keep_freed_memory()
    torch.set_num_threads(options["threads"])
    torch.manual_seed(1)
    folder = Path(options["folder"])
    with launched("cpu", 5.0) as world:
        found = measured(options, folder, world)
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(found))
    end_now(0)


def measured(options: dict[str, Any], folder: Path, world: World) -> dict[str, Any]:
    text = training.read_text(options["text"])
    parts = [part_of(batch, world, text.pad_id) for batch in text.train]
    started_with = resident_mb("VmRSS")
    trainer = make_trainer(options, folder, world, text)
    trainer.computing.set_mode(training=True)
    for part in parts[:_WARM_UP]:
        trainer._update([part])
    seconds, tokens = [], 0
    for part in parts[_WARM_UP : _WARM_UP + options["steps"]]:
        begun = time.perf_counter()
        tokens += trainer._update([part])[1]
        seconds.append(time.perf_counter() - begun)
    peak = resident_mb("VmHWM")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for part in parts[:_PROFILED]:
            trainer._update([part])
    in_collectives = sum(
        event.time_range.elapsed_us() / 1e6 for event in profiler.events() if event.name.startswith("gloo:")
    )
    return {
        "seconds": seconds,
        "tokens": tokens,
        "peak_mb": peak,
        "of_training_mb": peak - started_with,
        "collectives_seconds_a_step": in_collectives / _PROFILED,
        "saving": saving(trainer, world),
    }


def make_trainer(options: dict[str, Any], folder: Path, world: World, text: Text) -> Trainer:
    kind = options["kind"]
    sharded = kind in ("fsdp", "hybrid")
    parameters = None
    if sharded:
        with DeferredInit() as deferred:
            model = EncoderDecoder.of(CONFIG, text.vocab_size, text.vocab_size, text.pad_id)
        parameters = LazyParameters(torch.device("cpu"), deferred.values(model))
    else:
        model = EncoderDecoder.of(CONFIG, text.vocab_size, text.vocab_size, text.pad_id)
    config = SCHEDULE.model_copy(update={"precision": options["precision"], "device": "cpu"})
    objective = TranslationObjective(
        model, no_text(text), no_text(text), config, ValidationConfig(), score=None
    )
    return Trainer(config, 1000, objective, folder, Counters(), layout=Layout(world, kind, parameters))


def part_of(batch: Batch, world: World, pad_id: int) -> Batch:
    """Every N-th row of a batch, without the columns that are padding alone."""
    rows = slice(world.rank, None, world.size)

    def side(ids: torch.Tensor) -> torch.Tensor:
        own = ids[rows]
        return own[:, : int((own != pad_id).any(0).sum())].contiguous()

    src, tgt_in, tgt_out = map(side, (batch.src, batch.tgt_in, batch.tgt_out))
    return Batch(src, tgt_in, tgt_out, batch.line_numbers[rows], int((tgt_out != pad_id).sum()))


def saving(trainer: Trainer, world: World) -> dict[str, float]:
    """Seconds that training stands still for a state, and until the state is complete."""
    state = trainer.folder / "state"
    world.on_first(lambda: state.mkdir(exist_ok=True))
    tensors = {f"model.{name}": value for name, value in model_tensors(trainer.model).items()}
    tensors |= dict(trainer.optimizer.tensors())
    if world.size == 1:
        begun = time.perf_counter()
        write_state(state, trainer.counters, trainer.computing.gathered(tensors))
        taken = time.perf_counter() - begun
        return {"stands_still": taken, "until_complete": taken}
    from triptych.training.sharded_state import ShardedStates

    states, found = ShardedStates(state, world, keep=1), {}
    for _ in range(2):  # the first one sets up what the second one uses
        begun = time.perf_counter()
        states.save(trainer.counters, tensors, lambda: None)
        found["stands_still"] = time.perf_counter() - begun
        states.finish()
        found["until_complete"] = time.perf_counter() - begun
    return found


def resident_mb(name: str) -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:")) / 1024


if __name__ == "__main__":
    main()
