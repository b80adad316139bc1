"""Training loop: updates from batches, validations, and states from which a run resumes at any step."""

import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np
import torch
from jaxtyping import Int64

from triptych.core.models import (
    AnyModel,
    has_fast_bf16,
    model_tensors,
    read_tensors,
    recompute_activations,
)
from triptych.errors import TriptychError
from triptych.files import remove_leftovers, write_text
from triptych.training.computing import (
    ONE_PROCESS,
    Computing,
    Layout,
    NotCounted,
    Whole,
    rows_of_rank,
)
from triptych.training.machine import (
    StopRequest,
    Throughput,
    ahead,
    compile_blocks,
    count_operations,
    measure_peak,
    repeatable,
)
from triptych.training.metrics import MetricsLog, MetricsRecord
from triptych.training.objectives import Batches, Objective, Score, TrainingBatch
from triptych.training.optimizers import Optimizer, learning_rate
from triptych.training.progress import Display, Moment, duration
from triptych.training.sections import OptimisationConfig
from triptych.training.state import (
    RUN_FILES,
    Counters,
    Publish,
    average_checkpoints,
    checkpoint_path,
    find_state,
    own_files,
    publish_weights,
    read_counters,
    read_state,
    write_state,
)

if TYPE_CHECKING:
    from triptych.training.sharded_state import ShardedStates

T = TypeVar("T")

# Size of the batch timed on a CPU: large enough for the usual rate, and a few seconds with any model.
_TIMED_TOKENS = 1024
_DAY = 86400.0  # seconds

# Imported only by runs of several processes: the import of FSDP needs a second.
_SPREADING = "triptych.training.distributed"
_SAVING = "triptych.training.sharded_state"


@dataclass(frozen=True)
class TrainingResult:
    """Result of a finished or interrupted run."""

    signal_number: (
        int | None
    )  # number of the signal that interrupted the run; None if it finished
    counters: Counters  # progress
    chosen: str = (
        ""  # weights in `model.safetensors`: "best" (of the validations) or "average"
    )
    scores: dict[str, float] | None = None  # validation figures of the average


@final
class Trainer:
    """Trainer of one run."""

    def __init__(
        self,
        config: OptimisationConfig,
        validate_every: int,
        objective: Objective[Any, Any],
        folder: Path,
        counters: Counters,
        publish: Publish = publish_weights,
        layout: Layout = ONE_PROCESS,
    ) -> None:
        """Prepare a run; `counters` has the fingerprints, and `publish` writes `model.safetensors`."""
        self.config = config
        self.validate_every = validate_every
        self.objective = objective
        self.model: AnyModel = objective.model
        (first, *_) = self.model.stacks.values()
        self.width = first.architecture.d_model
        self.steps_per_epoch = -(
            -len(objective.train.plan(0)) // config.accumulate_batches
        )
        self.folder = folder
        self._publish = publish
        self.state_folder = folder / "state"
        self.counters = counters
        self.world = layout.world
        self.computing = _computing(objective, config, layout)
        self.device = next(self.model.parameters()).device
        self.optimizer = Optimizer(config, self.model)
        self.metrics = MetricsLog(folder)
        self.throughput = Throughput(self.world)
        self._states: ShardedStates | None = (
            None  # set by `run` if there are several processes
        )
        self._saved_step = -1
        self._last_figures: dict[str, float] | None = None
        # Operations for a target token, and the machine's operations a second; set by `measure_seconds`.
        self.operations_per_token: float | None = None
        self.peak: float | None = None

    def resume(self) -> None:
        """Load the saved state, after a check that the inputs are unchanged."""
        # Metrics after the saved step are dropped: the resumed run writes them again.
        expected = self.counters.fingerprints
        begun = read_counters(self.state_folder).fingerprints
        if changed := [name for name in expected if begun.get(name) != expected[name]]:
            raise TriptychError(
                f"{self.folder}: changed since the run began: {', '.join(changed)}; "
                "put back what was there or start a new run"
            )
        self.counters = self.world.on_all(self._read_state)
        validated = self.counters.step in self.counters.checkpoints
        self.world.on_first(
            lambda: self.metrics.forget_after(self.counters.step, validated=validated)
        )
        self._saved_step = self.counters.step

    def _read_state(self) -> Counters:
        counters = read_counters(self.state_folder)
        path = find_state(self.state_folder)
        if path is None or path.is_file():
            return read_state(
                self.state_folder, self.model, self.optimizer, self.computing.place
            )
        import_module(_SAVING).read_sharded_state(
            path, self.model, self.optimizer, self.world
        )
        return counters

    def measure_seconds(self, batch: TrainingBatch) -> float:
        """Return the seconds of a forward and backward pass of a batch, measured in a second pass.

        The first pass counts operations. The states of the random-number generators stay unchanged.
        """
        random = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        self.computing.set_mode(training=True)

        def work() -> None:
            with repeatable(self.device):  # the last call waits for a GPU
                self.computing.learn(
                    batch, self.config.max_steps, batch.num_target_tokens, last=True
                ).item()

        self.operations_per_token = count_operations(work) / batch.num_target_tokens
        started = time.monotonic()
        work()
        seconds = time.monotonic() - started
        self._measure_peak()
        self.optimizer.zero_grad()
        torch.set_rng_state(random)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        return seconds

    def run(self, display: Display) -> TrainingResult:
        """Train to the end of the recipe, or to a signal."""
        self.world.on_first(lambda: _prepare_folder(self.folder))
        if self.world.size > 1:
            make = import_module(_SAVING).ShardedStates
            self._states = make(self.state_folder, self.world, self.config.keep_states)
        self.computing.set_mode(training=True)
        with (
            closing(self.metrics),
            StopRequest(display.say) as stop,
            display,
            closing(self._updates()) as updates,
        ):
            self._save()  # the run can be resumed from now on
            clock = time.monotonic() - self.counters.seconds
            for batches in updates:
                started = time.monotonic()
                waited = self.world.seconds_waited
                loss, tokens = self._update(batches)
                now = time.monotonic()
                own = sum(batch.num_target_tokens for batch in batches)
                self.throughput.add(
                    own, now - started, self.world.seconds_waited - waited
                )
                self.counters.seconds = now - clock
                self._record(display, loss, tokens, tokens / (now - started))
                if self.counters.step % self.validate_every == 0:
                    self._validate(display)
                elif self.counters.step % self.config.save_every_steps == 0:
                    self._save()
                self.counters.seconds = time.monotonic() - clock
                if signal_number := self.world.largest(stop.signal_number or 0):
                    self._save()
                    self._finish_saving()
                    return TrainingResult(signal_number, self.counters)
                if self._states is not None:
                    self._states.poll()
            if self.counters.step not in self.counters.checkpoints:
                self._validate(display)
            self._finish_saving()
            if signal_number := self.world.largest(stop.signal_number or 0):
                return TrainingResult(signal_number, self.counters)
            return self._finish(display)

    def describe_plan(self) -> str:
        """Describe the remaining steps and their estimated time on this machine; empty if it is finished."""
        steps = (
            self._last_step() - self.counters.step
        )  # early stopping may end the run before
        if steps <= 0:
            return ""
        text = self.objective.train
        passes = steps / self.steps_per_epoch
        indices = text.plan(0)[0]
        if self.device.type == "cpu":
            indices = self.objective.timed_part(indices, _TIMED_TOKENS)
        batch = text.collate(indices)
        tokens = batch.num_target_tokens * self.world.size
        seconds = passes * text.num_target_tokens * self.measure_seconds(batch) / tokens
        told = f"plan: {steps:,} steps, {passes:.1f} passes over the text, about {duration(seconds)}"
        if seconds <= _DAY:
            return told
        narrower = (
            ", training.precision = 'bf16'" if has_fast_bf16(self.device.type) else ""
        )
        return (
            f"{told} on this machine: longer than a day. Fewer training.max_steps, a smaller model"
            f"{narrower} or a GPU make it shorter (Ctrl-C stops, --resume goes on)"
        )

    def _updates(self) -> Generator[Sequence[TrainingBatch], None, None]:
        """Yield the batches of each update from the counters to the end of the run."""
        counters = self.counters
        config = self.config
        with closing(ahead(self._batches_from(counters.epoch, counters.batch))) as made:
            for epoch, used, batches in self.throughput.taken(made):
                stops_early = (
                    0 < config.early_stopping <= counters.validations_since_best
                )
                if counters.step >= config.max_steps or stops_early:
                    return
                # Count the batches used, not the batches made ahead: a resumed run starts from here.
                counters.epoch = epoch
                counters.batch = used
                yield batches
        if config.max_epochs is not None and counters.epoch < config.max_epochs:
            counters.epoch = config.max_epochs
            counters.batch = 0

    def _batches_from(
        self, epoch: int, used: int
    ) -> Iterator[tuple[int, int, Sequence[TrainingBatch]]]:
        """Yield each update's epoch, the number of batches of the plan used after it, and its batches."""
        limit = self.config.max_epochs
        for later in count(epoch) if limit is None else range(epoch, limit):
            plan = self.objective.train.plan(later)
            for start in range(used, len(plan), self.config.accumulate_batches):
                chosen = plan[start : start + self.config.accumulate_batches]
                batches = [
                    self._part(self.objective.train, indices) for indices in chosen
                ]
                if self.device.type == "cuda":
                    batches = [batch.pinned() for batch in batches]
                yield later, start + len(chosen), batches
            used = 0

    def _part(
        self, text: Batches[Any], indices: Int64[np.ndarray, "batch"]
    ) -> TrainingBatch:
        """Return this process's rows of a batch."""
        own, counted = rows_of_rank(indices, self.world.rank, self.world.size)
        batch: TrainingBatch = text.collate(own)
        return batch if counted else NotCounted(batch)

    def _update(self, batches: Sequence[TrainingBatch]) -> tuple[float, int]:
        """Make one step of the optimizer; returns the loss summed over tokens, and the number of tokens."""
        # Every process divides by the tokens of all, so that the gradients' sum is that of the whole batch.
        step = self.counters.step + 1
        rate = learning_rate(step, self.config, self.width)
        tokens = int(
            self.world.sum([float(sum(batch.num_target_tokens for batch in batches))])[
                0
            ]
        )
        self.optimizer.zero_grad()
        self.computing.begin_update(step)
        total = 0.0
        with repeatable(self.device):
            for number, batch in enumerate(batches, start=1):
                total += self.computing.learn(
                    batch, step, tokens, last=number == len(batches)
                ).item()
        total = self.world.sum([total])[0]
        norm = self.computing.clip(self.config.clip_norm or math.inf)
        if not math.isfinite(total) or not math.isfinite(norm):
            raise TriptychError(self._diverged(step, rate, total, norm, len(batches)))
        self.optimizer.step(rate)
        self.computing.follow()
        self.counters.step = step
        self.counters.tokens += tokens
        return total, tokens

    def _record(self, display: Display, loss: float, tokens: int, rate: float) -> None:
        counters = self.counters
        counters.window_loss += loss
        counters.window_tokens += tokens
        mean = counters.window_loss / counters.window_tokens
        lr = self.optimizer.rate
        share = None  # share of the machine's peak in matrix products
        if self.operations_per_token is not None and self.peak is not None:
            share = rate * self.operations_per_token / self.peak / self.world.size
        display.update(
            Moment(
                counters.step,
                self._last_step(),
                counters.epoch + 1,
                mean,
                lr,
                rate,
                share,
            )
        )
        if counters.step % self.config.log_every_steps == 0:
            self._note(
                {
                    "step": counters.step,
                    "epoch": counters.epoch + 1,
                    "loss": mean,
                    "learning_rate": lr,
                    "tokens": counters.tokens,
                    "seconds": round(counters.seconds, 3),
                    "tokens_per_second": round(rate, 1),
                    **({} if share is None else {"peak_share": float(f"{share:.3g}")}),
                    **self.throughput.figures(),
                }
            )
            counters.window_loss = 0.0
            counters.window_tokens = 0

    def _measure_peak(self) -> None:
        """Measure the rate of matrix products, and keep the maximum: other work slows a measurement."""
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float32
        self.peak = max(self.peak or 0.0, measure_peak(self.device, dtype))

    def _note(self, record: MetricsRecord) -> None:
        if self.world.is_first:
            self.metrics.add(record)

    def _last_step(self) -> int:
        if self.config.max_epochs is None:
            return self.config.max_steps
        return min(self.config.max_steps, self.config.max_epochs * self.steps_per_epoch)

    def _validate(self, display: Display) -> None:
        counters = self.counters
        figures = self._last_figures = self._measure()
        if self.peak is not None:
            self._measure_peak()
        sample = self._with_model(self.objective.sample)
        self._note(
            {
                "step": counters.step,
                **figures,
                **({"valid_sample": sample} if sample else {}),
            }
        )
        judged = self.objective.judge(figures)
        best = self._best()
        better = best is None or judged.better_than(best)
        if better:
            (counters.best_by, counters.best_score), counters.best_step = (
                judged,
                counters.step,
            )
            counters.validations_since_best = 0
            self._write_model(publish_weights, self.state_folder / "best.safetensors")
            self._write_model(self._publish, self.folder / "model.safetensors")
        else:
            counters.validations_since_best += 1
        mark = f"  (best by {judged.by})" if better else ""
        display.say(
            f"validation at step {counters.step:,}: {self.objective.describe(figures)}{mark}"
        )
        if sample:
            display.say(sample)
        self._keep_checkpoint()
        self._saved_step = (
            -1
        )  # a state saved at this step does not include the validation
        self._save()

    def _measure(self) -> dict[str, float]:
        self.computing.set_mode(training=False)
        try:
            text = self.objective.valid
            own = self.computing.judge_all(
                self._part(text, indices) for indices in text.plan(0)
            )
            loss, tokens = self.world.sum(own)
            with torch.no_grad():
                figures = self._with_model(
                    lambda model: self.objective.figures(loss / tokens, model)
                )
        finally:
            self.computing.set_mode(training=True)
        return figures

    def _with_model(self, action: Callable[[AnyModel], T]) -> T:
        """Call `action` with the whole model in the first process; returns the result in all processes."""
        if not self.objective.uses_whole_model:
            return self.world.on_first(lambda: action(self.model))
        self.computing.set_mode(training=False)
        try:
            with self.computing.whole() as model:
                return self.world.on_first(lambda: action(model), patiently=True)
        finally:
            self.computing.set_mode(training=True)

    def _best(self) -> Score | None:
        counters = self.counters
        if not counters.best_by or counters.best_score is None:
            return None
        return Score(counters.best_by, counters.best_score)

    def _keep_checkpoint(self) -> None:
        counters = self.counters
        if counters.step not in counters.checkpoints:
            counters.checkpoints.append(counters.step)
        counters.checkpoints = counters.checkpoints[-self.config.average_last :]
        self._write_model(
            publish_weights, checkpoint_path(self.state_folder, counters.step)
        )

    def _write_model(self, publish: Publish, path: Path) -> None:
        with self.computing.whole(on_host=True) as model:
            self.world.on_first(lambda: publish(model, path))

    def _save(self) -> None:
        if self._saved_step == self.counters.step:
            return
        tensors = {
            f"model.{name}": value for name, value in model_tensors(self.model).items()
        }
        tensors |= self.optimizer.tensors()
        steps = list(self.counters.checkpoints)

        def saved() -> None:
            # Remove a checkpoint only once the saved states no longer refer to it.
            named = {*steps, *self.counters.checkpoints}
            kept = {checkpoint_path(self.state_folder, step) for step in named}
            for path in own_files(self.folder):
                if path.name.startswith("checkpoint-") and path not in kept:
                    path.unlink()

        if self._states is None:
            write_state(
                self.state_folder, self.counters, self.computing.gathered(tensors)
            )
            saved()
        else:
            self._states.save(self.counters, tensors, saved)
        self._saved_step = self.counters.step

    def _finish_saving(self) -> None:
        if self._states is not None:
            self._states.finish()

    def _finish(self, display: Display) -> TrainingResult:
        """Load and publish the better of two models: the best checkpoint or the average of checkpoints."""
        counters = self.counters
        paths = [
            checkpoint_path(self.state_folder, step) for step in counters.checkpoints
        ]
        self.computing.load(
            average_checkpoints(paths), "the average of the last checkpoints"
        )
        # A single checkpoint equals its average. Its figures are known unless the run was resumed here.
        alone = self._last_figures if len(paths) == 1 else None
        figures = self._measure() if alone is None else alone
        judged = self.objective.judge(figures)
        best = self._best()
        chosen = "best" if best is not None and best.better_than(judged) else "average"
        self._note(
            {"step": counters.step, **{f"average_{k}": v for k, v in figures.items()}}
        )
        display.say(
            f"average of the last {len(paths)} checkpoints: {self.objective.describe(figures)}"
        )
        if chosen == "best":
            path = self.state_folder / "best.safetensors"
            self.computing.load(read_tensors(path), str(path))
        self._write_model(self._publish, self.folder / "model.safetensors")
        self.model.eval()
        return TrainingResult(None, counters, chosen, figures)

    def _diverged(
        self, step: int, rate: float, loss: float, norm: float, num_batches: int
    ) -> str:
        # The counters already include the batches of the failed update.
        used = self.counters.batch
        text = self.objective.train
        batches = map(
            text.collate, text.plan(self.counters.epoch)[used - num_batches : used]
        )
        lines = sorted(chain.from_iterable(map(self.objective.lines, batches)))
        path = self.state_folder / "diverged.json"
        where = {
            "epoch": self.counters.epoch + 1,
            "batch": self.counters.batch,
            "lines": lines,
        }
        if self.world.is_first:
            write_text(
                path, json.dumps({"step": step, "learning_rate": rate, **where}) + "\n"
            )
        shown = ", ".join(map(str, lines[:20])) + (", …" if len(lines) > 20 else "")
        on = f"a batch of lines {shown} of the training text (all in {path})"
        if not lines:
            on = f"batch {self.counters.batch:,} of pass {self.counters.epoch + 1} over the training text"
        what = (
            f"the loss is {loss}"
            if not math.isfinite(loss)
            else f"the gradient's norm is {norm}"
        )
        return (
            f"step {step}: {what} at learning rate {rate:.3g}, on {on}; the state of step "
            f"{self._saved_step} is kept. Lower training.learning_rate, lengthen training.warmup_steps or "
            "set training.clip_norm"
        )


def _prepare_folder(folder: Path) -> None:
    (folder / "state").mkdir(exist_ok=True)
    for within, names in RUN_FILES.items():
        remove_leftovers(folder / within, names)


def _computing(
    objective: Objective[Any, Any], config: OptimisationConfig, layout: Layout
) -> Computing:
    # The bfloat16 twin is a copy: blocks get checkpointing before the copy, and are compiled after it.
    device = (
        next(objective.model.parameters()).device
        if layout.parameters is None
        else layout.parameters.device
    )
    if config.activation_checkpointing:
        recompute_activations(objective.model.blocks)
    whole = (
        Whole(objective, config.precision, layout.world)
        if layout.kind in (None, "ddp")
        else None
    )
    if config.compile:
        compile_blocks((whole or objective).model.blocks, device)
    if whole is not None:
        return whole
    spread: Callable[..., Computing] = import_module(_SPREADING).spread
    return spread(
        objective,
        layout.kind,
        config.precision,
        layout.world,
        config.shard_size,
        layout.parameters,
    )
