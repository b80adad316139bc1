"""One run of a study, in a separate process (`cli/job.py`).

The process trains, resumes training, or rewrites a trained run. It measures the model and writes the result
last, so that an existing result is complete.
"""

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from pydantic import BaseModel, ConfigDict

from triptych import user_code
from triptych.core.models import EncoderDecoder, read_own_model
from triptych.errors import DataError
from triptych.files import write_json
from triptych.rewriting.opened_models import rewrite_checkpoint
from triptych.rewriting.recipe import read_rewrite_recipe
from triptych.running.decoding import (
    composed,
    evaluate_translations,
    measure_likelihood,
)
from triptych.running.opening import open_reader, open_translator
from triptych.running.text import (
    LanguageCorpusSpec,
    read_documents,
    whole_documents,
)
from triptych.seeing.inspection import inspect
from triptych.training.corpora.corpora import CorpusSpec, read_parallel
from triptych.training.metrics import read_metrics
from triptych.training.recipe import read_recipe
from triptych.training.runs import resume, train, validate
from triptych.training.studies.compute_budget import cache_bytes


@final
class TrainedRun(BaseModel):
    """Trained run, the source of a rewritten run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path  # run folder
    result: Path  # file of the result


@final
class StudyJob(BaseModel):
    """Job of a process: one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Path  # file of the recipe with every choice made; a rewrite recipe if `rewrite_of` is given
    rewrite_of: TrainedRun | None = None  # run to rewrite; None to train
    folder: Path  # run folder; its name is the name of the run
    result: Path  # file of the result, written at the end
    variant: str = ""  # name of the variant
    steps: int = 1  # number of updates
    threads: int = 1  # number of CPU threads
    test: CorpusSpec | None = None  # pairs to translate; None to skip
    test_sentences: int | None = None  # number of pairs, from the start; all if None
    test_text: LanguageCorpusSpec | None = (
        None  # text for a language model's test loss; None to skip
    )
    heads: bool = True  # measure the heads of the trained model
    code: tuple[Path, ...] = ()  # files of custom classes in recipes

    @property
    def name(self) -> str:
        """Name of the run and of its files: variant and seed."""
        return self.folder.name


@final
@dataclass(frozen=True)
class Result:
    """Result of a run; of a rewritten run, `seconds`, `steps` and `tokens` are of the trained run."""

    figures: dict[str, float]  # values by metric
    heads: dict[str, float]  # means over heads of measures of `inspect`, by measure
    seconds: float  # training time
    steps: int  # number of updates
    tokens: int  # target tokens of training


def read_result(path: Path) -> Result | None:
    """Read a result; None if the run has not finished."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Result(**record)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({error}): remove it, and the run is measured again"
        ) from None


def do_job(job: StudyJob) -> int:
    """Train or rewrite, and measure; returns an exit code."""
    for path in job.code:
        user_code.use_code(path)
    return (
        _train_and_measure(job)
        if job.rewrite_of is None
        else _rewrite(job, job.rewrite_of)
    )


def _train_and_measure(job: StudyJob) -> int:
    if (job.folder / "recipe.toml").exists():
        summary = resume(job.folder)
    else:
        summary = train(read_recipe(job.recipe), job.folder)
    # The exit code of a process ended by a signal; the run resumes later.
    if summary.outcome.signal_number is not None:
        return 128 + summary.outcome.signal_number
    figures = {
        **_validation_figures(job.folder),
        "tokens_per_second": summary.figures()["tokens_per_second"],
        "memory": _peak_memory(),
        **_measure_model(job),
    }
    heads = _heads(job.folder) if job.heads else {}
    counters = summary.outcome.counters
    return _write_result(
        job, Result(figures, heads, counters.seconds, counters.step, counters.tokens)
    )


def _rewrite(job: StudyJob, of: TrainedRun) -> int:
    trained = read_result(of.result)
    if trained is None:
        raise DataError(
            f"{of.result} is missing: {of.folder} is not trained to its end"
        )
    if not job.folder.exists():
        rewrite_checkpoint(
            str(of.folder), job.folder, read_rewrite_recipe(job.recipe), compare=False
        )
    of_training = {
        name: trained.figures[name] for name in ("tokens_per_second", "memory")
    }
    figures = {
        **_as_metrics(validate(job.folder)),
        **of_training,
        **_measure_model(job),
    }
    return _write_result(
        job,
        replace(
            trained, figures=figures, heads=_heads(job.folder) if job.heads else {}
        ),
    )


def _write_result(job: StudyJob, result: Result) -> int:
    write_json(job.result, asdict(result))
    return 0


def _measure_model(job: StudyJob) -> dict[str, Any]:
    """Count parameters and cache bytes of a model, and measure it on the test text."""
    model = read_own_model(job.folder)
    figures: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters())
    }
    if isinstance(model, EncoderDecoder) or model.causal:
        figures["cache_bytes"] = cache_bytes(model)
    if job.test is not None:
        figures |= _translations(job.folder, job.test, job.test_sentences)
    if job.test_text is not None:
        opened = open_reader(job.folder)
        documents = [*whole_documents(read_documents(job.test_text))]
        found = measure_likelihood(opened.language_model, opened.tokenizer, documents)
        figures["test_loss"] = found.nats_per_token
    return figures


def _validation_figures(folder: Path) -> dict[str, float]:
    """Return the figures with the lower loss, of the best validation or the averaged checkpoints."""
    records = read_metrics(folder / "metrics.jsonl")
    (last,) = [r for r in records if "average_valid_loss" in r][-1:]
    validations = [r for r in records if "valid_loss" in r]
    found = {
        name.removeprefix("average_"): v
        for name, v in last.items()
        if name.startswith("average_")
    }
    best = min(validations, key=lambda r: r["valid_loss"], default=found)
    chosen = best if best["valid_loss"] < found["valid_loss"] else found
    return _as_metrics(chosen)


def _as_metrics(figures: Mapping[str, Any]) -> dict[str, float]:
    """Convert figures of a validation to metrics of a study."""
    names = {"loss": "valid_loss", "bits_per_byte": "valid_bits_per_byte"}
    return {name: figures[key] for name, key in names.items() if key in figures}


def _translations(
    folder: Path, test: CorpusSpec, count: int | None
) -> dict[str, float]:
    pairs = read_parallel(test)
    sources = pairs.source[:count]
    references = pairs.target[:count]
    found = evaluate_translations(
        open_translator(folder).translator(), sources, references
    )
    both = zip(composed(found.translations), composed(references), strict=True)
    exact = sum(a == b for a, b in both) / len(references)
    scores = {score.name: score.value for score in found.scores}
    return {"bleu": scores["BLEU"], "chrf": scores["chrF2"], "exact_match": exact}


# Measures of the heads in a study's table.
HEAD_MEASURES = (
    "qk_effective_rank",
    "ov_effective_rank",
    "qk_symmetric_share",
    "qk_times_chance",
    "kv_times_chance",
    "qv_times_chance",
)


def _heads(folder: Path) -> dict[str, float]:
    """Return means over all heads; measures undefined for a head are left out."""
    rows = inspect(folder).rows()
    figures = {name: [row[name] for row in rows] for name in HEAD_MEASURES}
    return {
        name: sum(values) / len(values)
        for name, values in figures.items()
        if values and all(isinstance(value, int | float) for value in values)
    }


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
