"""The training loop: batches in, updates out, and a state to resume from at any step."""

import json
import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, final

import torch

from triptych.errors import TriptychError
from triptych.files import remove_leftovers, write_text
from triptych.models.storage import OwnModel, load_tensors, read_weights
from triptych.training.ahead import ahead
from triptych.training.compiling import compile_blocks
from triptych.training.interruption import StopRequest
from triptych.training.judging import Score
from triptych.training.metrics import MetricsLog
from triptych.training.objectives import Objective, TrainingBatch
from triptych.training.optimizers import Optimizer
from triptych.training.peak import count_operations, measure_peak
from triptych.training.precision import NarrowTwin
from triptych.training.progress import Display, Moment
from triptych.training.schedule import learning_rate
from triptych.training.sections import OptimisationConfig
from triptych.training.state import (
    RUN_FILES,
    Counters,
    Publish,
    average_checkpoints,
    checkpoint_path,
    own_files,
    publish_weights,
    read_counters,
    read_state,
    write_state,
)


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        signal_number: of the signal that interrupted it; None if it came to its end.
        counters: where it stands.
        chosen: which weights `model.safetensors` holds: "best" (of the validations) or "average".
        scores: validation figures of both.
    """

    signal_number: int | None
    counters: Counters
    chosen: str = ""
    scores: dict[str, float] | None = None


@final
class Trainer:
    """One run: a model, its text, its folder.

    In float32, in one process and with the same number of threads, a run is a function of recipe
    and seed to the last bit, however often it was interrupted and resumed.
    """

    def __init__(
        self,
        config: OptimisationConfig,
        validate_every: int,
        objective: Objective[Any, Any],
        folder: Path,
        counters: Counters,
        publish: Publish = publish_weights,
    ) -> None:
        """Prepare a run.

        Args:
            config: the optimisation.
            validate_every: updates between validations.
            objective: what is learned; holds model and text.
            folder: the run folder; must exist when the run begins.
            counters: of a new run, with fingerprints and folder filled in.
            publish: writes `model.safetensors`.
        """
        self.config = config
        self.validate_every = validate_every
        self.objective = objective
        self.model: OwnModel = objective.model
        self.steps_per_epoch = -(-len(objective.train.plan(0)) // config.accumulate_batches)
        self.folder, self._publish = folder, publish
        self.state_folder = folder / "state"
        self.counters = counters
        self.device = next(self.model.parameters()).device
        self.optimizer = Optimizer(config, self.model)
        self.metrics = MetricsLog(folder)
        self._twin = NarrowTwin(self.model) if config.precision == "bf16" else None
        if config.compile:
            compile_blocks(list(objective.blocks(self._computing)), self.device)
        self._saved_step = -1
        self._last_figures: dict[str, float] | None = None
        # Of a target token, and of this machine a second; known once a plan has been made.
        self.operations_per_token: float | None = None
        self.peak: float | None = None

    def resume(self) -> None:
        """Take up the saved state.

        Raises:
            DataError: no state, a damaged one, or one of other text or another model.
        """
        expected, begun = self.counters.fingerprints, read_counters(self.state_folder).fingerprints
        if changed := [name for name in expected if begun.get(name) != expected[name]]:
            raise TriptychError(
                f"{self.folder}: changed since the run began: {', '.join(changed)}; "
                "put back what was there or start a new run"
            )
        self.counters = read_state(self.state_folder, self.model, self.optimizer)
        validated = self.counters.step in self.counters.checkpoints
        self.metrics.forget_after(self.counters.step, validated=validated)
        self._saved_step = self.counters.step

    @property
    def steps_left(self) -> int:
        """Updates to the end of the recipe; early stopping may end it before."""
        return max(self._last_step() - self.counters.step, 0)

    def measure_seconds(self, batch: TrainingBatch) -> float:
        """Seconds of forward and backward pass of a batch, the second time; the first counts its operations.

        Weights, gradients and random numbers are left as they were.
        """
        random = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        self._set_mode(training=True)

        def work() -> None:
            loss = self.objective.training_loss(self._computing, batch, self.config.max_steps).smoothed
            loss.backward()  # type: ignore[no-untyped-call]
            if self._twin is not None:
                self._twin.hand_over_gradients()
            loss.item()  # waits for a GPU

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
        """Train to the end of the recipe, or to a signal.

        Raises:
            TriptychError: the loss is no longer finite, or the disk is full.
        """
        self.state_folder.mkdir(exist_ok=True)
        for within, names in RUN_FILES.items():
            remove_leftovers(self.folder / within, names)
        self._set_mode(training=True)
        with StopRequest() as stop, display, closing(self._updates()) as updates:
            self._save()  # so that there is always something to resume from
            clock = time.monotonic() - self.counters.seconds
            for batches in updates:
                started = time.monotonic()
                loss, tokens = self._update(batches)
                now = time.monotonic()
                self.counters.seconds = now - clock
                self._record(display, loss, tokens, tokens / (now - started))
                if self.counters.step % self.validate_every == 0:
                    self._validate(display)
                elif self.counters.step % self.config.save_every_steps == 0:
                    self._save()
                self.counters.seconds = time.monotonic() - clock
                if stop.signal_number is not None:
                    self._save()
                    self.metrics.close()
                    return TrainingResult(stop.signal_number, self.counters)
            if self.counters.step not in self.counters.checkpoints:
                self._validate(display)
            if stop.signal_number is not None:
                self.metrics.close()
                return TrainingResult(stop.signal_number, self.counters)
            outcome = self._finish(display)
            self.metrics.close()
            return outcome

    def _updates(self) -> Generator[Sequence[TrainingBatch], None, None]:
        """The batches of each update from where the counters stand to the end of the run."""
        counters, config = self.counters, self.config
        with closing(ahead(self._batches_from(counters.epoch, counters.batch))) as made:
            for epoch, used, batches in made:
                if counters.step >= config.max_steps or self._stops_early():
                    return
                # Of what is used, not of what is made: a resumed run goes on from here.
                counters.epoch, counters.batch = epoch, used
                yield batches
        if config.max_epochs is not None and counters.epoch < config.max_epochs:
            counters.epoch, counters.batch = config.max_epochs, 0

    def _batches_from(self, epoch: int, used: int) -> Iterator[tuple[int, int, Sequence[TrainingBatch]]]:
        """Each update's batches, with its epoch and the batches of the plan used up when it is made."""
        limit = self.config.max_epochs
        for later in count(epoch) if limit is None else range(epoch, limit):
            plan = self.objective.train.plan(later)
            for start in range(used, len(plan), self.config.accumulate_batches):
                chosen = plan[start : start + self.config.accumulate_batches]
                batches = [self.objective.train.collate(indices) for indices in chosen]
                if self.device.type == "cuda":
                    batches = [batch.pinned() for batch in batches]
                yield later, start + len(chosen), batches
            used = 0

    @property
    def _computing(self) -> OwnModel:
        return self.model if self._twin is None else self._twin.model

    def _set_mode(self, *, training: bool) -> None:
        self.model.train(training)
        if self._twin is not None:
            self._twin.model.train(training)
            self._twin.follow()

    def _update(self, batches: Sequence[TrainingBatch]) -> tuple[float, int]:
        """One step of the optimizer; returns the loss summed over tokens, and the tokens."""
        step = self.counters.step + 1
        rate = learning_rate(step, self.config, self.objective.d_model)
        tokens = sum(batch.num_target_tokens for batch in batches)
        self.optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = self.objective.training_loss(self._computing, batch, step).smoothed
            (loss / tokens).backward()  # type: ignore[no-untyped-call]
            if self._twin is not None:
                self._twin.hand_over_gradients()
            total += loss.item()
        limit = self.config.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
        if not math.isfinite(total) or not math.isfinite(norm):
            raise TriptychError(self._diverged(step, rate, total, norm, batches))
        self.optimizer.step(rate)
        if self._twin is not None:
            self._twin.follow()
        self.counters.step = step
        self.counters.tokens += tokens
        return total, tokens

    def _record(self, display: Display, loss: float, tokens: int, rate: float) -> None:
        counters = self.counters
        counters.window_loss += loss
        counters.window_tokens += tokens
        mean = counters.window_loss / counters.window_tokens
        lr = self.optimizer.rate
        share = self._peak_share(rate)
        display.update(Moment(counters.step, self._last_step(), counters.epoch + 1, mean, lr, rate, share))
        if counters.step % self.config.log_every_steps == 0:
            self.metrics.add(
                {
                    "step": counters.step,
                    "epoch": counters.epoch + 1,
                    "loss": mean,
                    "learning_rate": lr,
                    "tokens": counters.tokens,
                    "seconds": round(counters.seconds, 3),
                    "tokens_per_second": round(rate, 1),
                    **({} if share is None else {"peak_share": round(share, 4)}),
                }
            )
            counters.window_loss, counters.window_tokens = 0.0, 0

    def _measure_peak(self) -> None:
        """Keep the best rate of products so far: next to other work a single one says too little."""
        dtype = torch.bfloat16 if self._twin is not None else torch.float32
        self.peak = max(self.peak or 0.0, measure_peak(self.device, dtype))

    def _peak_share(self, tokens_per_second: float) -> float | None:
        """The operations of training as a share of what the machine does in matrix products alone."""
        if self.operations_per_token is None or self.peak is None:
            return None
        return tokens_per_second * self.operations_per_token / self.peak

    def _last_step(self) -> int:
        if self.config.max_epochs is None:
            return self.config.max_steps
        return min(self.config.max_steps, self.config.max_epochs * self.steps_per_epoch)

    def _stops_early(self) -> bool:
        return 0 < self.config.early_stopping <= self.counters.validations_since_best

    def _validate(self, display: Display) -> None:
        counters = self.counters
        figures = self._last_figures = self._measure()
        if self.peak is not None:
            self._measure_peak()
        sample = self._sample()
        self.metrics.add({"step": counters.step, **figures, **({"valid_sample": sample} if sample else {})})
        judged, best = self.objective.judge(figures), self._best()
        better = best is None or judged.better_than(best)
        if better:
            (counters.best_by, counters.best_score), counters.best_step = judged, counters.step
            counters.validations_since_best = 0
            publish_weights(self.model, self.state_folder / "best.safetensors")
            self._publish(self.model, self.folder / "model.safetensors")
        else:
            counters.validations_since_best += 1
        mark = f"  (best by {judged.by})" if better else ""
        display.say(f"validation at step {counters.step:,}: {self.objective.describe(figures)}{mark}")
        if sample:
            display.say(sample)
        self._keep_checkpoint()
        self._saved_step = -1  # what was saved at this step knows nothing of its validation
        self._save()

    def _measure(self) -> dict[str, float]:
        self._set_mode(training=False)
        try:
            with torch.no_grad():
                loss = tokens = 0.0
                for batch in self.objective.validation_batches():
                    loss += self.objective.loss(self._computing, batch).likelihood.item()
                    tokens += batch.num_target_tokens
                figures = self.objective.figures(loss / tokens)
        finally:
            self._set_mode(training=True)
        return figures

    def _sample(self) -> str | None:
        self._set_mode(training=False)
        try:
            return self.objective.sample()
        finally:
            self._set_mode(training=True)

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
        publish_weights(self.model, checkpoint_path(self.state_folder, counters.step))

    def _save(self) -> None:
        if self._saved_step == self.counters.step:
            return
        write_state(self.state_folder, self.counters, self.model, self.optimizer)
        self._saved_step = self.counters.step
        # Only now that no saved state names them can older checkpoints go.
        kept = {checkpoint_path(self.state_folder, step) for step in self.counters.checkpoints}
        for path in own_files(self.folder):
            if path.name.startswith("checkpoint-") and path not in kept:
                path.unlink()

    def _finish(self, display: Display) -> TrainingResult:
        """Leave the better of the best checkpoint and the average of the last ones in the model."""
        counters = self.counters
        paths = [checkpoint_path(self.state_folder, step) for step in counters.checkpoints]
        average = average_checkpoints(paths)
        load_tensors(self.model, average, "the average of the last checkpoints")
        # One checkpoint is its own average, and has just been measured, unless the run was resumed here.
        alone = self._last_figures if len(paths) == 1 else None
        figures = self._measure() if alone is None else alone
        judged, best = self.objective.judge(figures), self._best()
        chosen = "best" if best is not None and best.better_than(judged) else "average"
        self.metrics.add({"step": counters.step, **{f"average_{k}": v for k, v in figures.items()}})
        display.say(f"average of the last {len(paths)} checkpoints: {self.objective.describe(figures)}")
        if chosen == "best":
            read_weights(self.model, self.state_folder / "best.safetensors")
        self._publish(self.model, self.folder / "model.safetensors")
        self.model.eval()
        return TrainingResult(None, counters, chosen, figures)

    def _diverged(
        self, step: int, rate: float, loss: float, norm: float, batches: Sequence[TrainingBatch]
    ) -> str:
        lines = sorted(line for batch in batches for line in self.objective.lines(batch))
        path = self.state_folder / "diverged.json"
        where = {"epoch": self.counters.epoch + 1, "batch": self.counters.batch, "lines": lines}
        write_text(path, json.dumps({"step": step, "learning_rate": rate, **where}) + "\n")
        shown = ", ".join(map(str, lines[:20])) + (", …" if len(lines) > 20 else "")
        on = f"a batch of lines {shown} of the training text (all in {path})"
        if not lines:
            on = f"batch {self.counters.batch:,} of pass {self.counters.epoch + 1} over the training text"
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        return (
            f"step {step}: {what} at learning rate {rate:.3g}, on {on}; the state of step "
            f"{self._saved_step} is kept. Lower training.learning_rate, lengthen training.warmup_steps or "
            "set training.clip_norm"
        )
