"""Models of a server and their workers: threads of this process, and other processes."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from triptych.errors import UsageError
from triptych.model import Model, reopened
from triptych.seeing.attending import HeldOutText
from triptych.serving.limits import Limits
from triptych.serving.served_models import ServedModel
from triptych.serving.worker_processes import ServingProcess


@dataclass(frozen=True)
class PageTexts:
    """Texts for measurements on the page at /: `over` and `held_out` of `serve`."""

    over: Path | None = None
    held_out: HeldOutText | None = None


NO_TEXTS = PageTexts()


@final
class Fleet:
    """Served models and their processes.

    Attributes:
        models: served models by name.
        processes: other worker processes.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        limits: Limits,
        *,
        workers: int = 1,
        page: PageTexts = NO_TEXTS,
        page_only: bool = False,
    ) -> None:
        """Prepare models; `start` starts the computation. The arguments match `serve`."""
        self._given = dict(models), limits, workers, page, page_only
        arguments = (
            _pickled(models, limits) if workers > 1 else b""
        )  # before the models are built
        self.models = {
            name: ServedModel(name, model, limits) for name, model in models.items()
        }
        try:
            for model in self.models.values():
                _require_servable(model, workers, page_only=page_only)
                if page.over is not None:
                    model.explorer.over = model.model.attend_over(page.over)
                model.explorer.held_out = page.held_out
        except BaseException:
            self._close_models()
            raise
        served = [*self.models.values()]
        self.processes = [ServingProcess(served, arguments) for _ in range(workers - 1)]

    @contextmanager
    def started(self) -> Iterator[None]:
        """Start the fleet, and close it at the end of the block."""
        try:
            self.start()
            yield
        finally:
            self.close()

    def start(self) -> None:
        """Build the models before the first request, and wait for the other processes."""
        for model in self.models.values():
            model.check_batches()
        for process in self.processes:
            process.start()

    def reopened(self) -> "Fleet":
        """Open the same models again from their sources, and start them in a new fleet."""
        models, limits, workers, page, page_only = self._given
        fresh = {name: reopened(model) for name, model in models.items()}
        fleet = Fleet(fresh, limits, workers=workers, page=page, page_only=page_only)
        try:
            fleet.start()
        except BaseException:
            fleet.close()
            raise
        return fleet

    def close(self) -> None:
        """Close models and processes once all submitted items are computed."""
        self._close_models()
        for process in self.processes:
            process.close()

    def _close_models(self) -> None:
        for model in self.models.values():
            model.close()

    @property
    def num_workers(self) -> int:
        """Number of processes that compute items."""
        return min(len(model.queue.lanes) for model in self.models.values())


def _require_servable(model: ServedModel, workers: int, *, page_only: bool) -> None:
    if "translate" in model.can and model.languages is None and not page_only:
        raise UsageError(
            f"{model.name} translates, and neither its name nor its recipe (decoding.languages) says from "
            f"and to which language: write de-en={model.name} for German to English"
        )
    if workers > 1 and next(model.model.reader.model.parameters()).is_cuda:
        raise UsageError(
            f"{model.name} is on a GPU, which one process serves: leave out --workers"
        )


def _pickled(models: Mapping[str, Model], limits: Limits) -> bytes:
    """Pickle the models for other processes."""
    try:
        return pickle.dumps((dict(models), limits))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        why = f"other processes cannot have the models ({error}): leave out workers, or load them anew"
        raise UsageError(why) from None
