"""`triptych evaluate`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from triptych.cli.groups import grouped
from triptych.cli.options import (
    MODEL,
    AlphaOption,
    BeamOption,
    DeviceOption,
    DtypeOption,
    EngineOption,
    PrecisionOption,
    StopOption,
    WithoutOption,
    WorkersOption,
    number_of_workers,
    open_model,
    open_run,
    torch_dtype,
)
from triptych.cli.outputs import ForceOption, Output, require_free, unmarked
from triptych.cli.progress import progress_bar
from triptych.cli.tables import print_whole
from triptych.cli.terminal import Terminal
from triptych.decoding import Evaluation, Likelihood
from triptych.errors import DataError, UsageError
from triptych.files import write_text
from triptych.reports import Table
from triptych.text import read_lines
from triptych.text.documents import LanguageCorpusSpec, read_documents, whole_documents
from triptych.training.parallel import World, do_each, launched

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help=f"{MODEL} One or more.",
    ),
]
SourceOption = Annotated[
    Path | None, typer.Option("--source", help="Translators: text to translate, one sentence per line.")
]
ReferenceOption = Annotated[
    Path | None, typer.Option("--reference", help="Translators: reference translations, line by line.")
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text",
        help="Language models: the text to predict, a file or a folder. Records of .jsonl and .parquet "
        "files (field text) are documents.",
    ),
]
DocumentsOption = Annotated[
    Literal["file", "line", "blank-lines"],
    typer.Option(
        "--documents",
        help="With --text: what a document is in a plain text file: the whole file, each line, or the lines "
        "between blank lines. Each document is scored by itself.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        help="With --text: tokens of a window. Default: a run's context, or the model's positions; at most "
        "1024.",
    ),
]
StrideOption = Annotated[
    int | None,
    typer.Option(
        "--stride",
        min=1,
        help="With --text: tokens between the starts of windows. Default: the context, side by side.",
    ),
]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Write the translations to this file.")]


class OfTranslators(NamedTuple):
    """What is asked of a translator."""

    source: SourceOption = None
    reference: ReferenceOption = None
    beam: BeamOption = None
    alpha: AlphaOption = None
    stop: StopOption = None
    workers: WorkersOption = None
    out: OutOption = None
    precision: PrecisionOption = "fp32"
    force: ForceOption = False


class OfTexts(NamedTuple):
    """What is asked of a language model."""

    text: TextOption = None
    context: ContextOption = None
    stride: StrideOption = None
    dtype: DtypeOption = None
    documents: DocumentsOption = "file"
    engine: EngineOption = "triptych"


@grouped
def evaluate(
    models: Models,
    translating: OfTranslators,
    scoring: OfTexts,
    device: DeviceOption = "auto",
    without: WithoutOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Score a translator on a test text, or a language model.

    Translators (--source and --reference): sacreBLEU's BLEU and chrF, with their signatures and 95 %
    bootstrap intervals. Language models (--text): nats per token with a 95 % bootstrap interval, perplexity,
    and bits per byte. Several models are a table, or a list of JSON.
    """
    with launched(device) as world:
        if scoring.text is not None:
            _score_text(models, scoring.text, translating, scoring, (device, without), as_json, world)
        else:
            _score_translators(models, translating, scoring, (device, without), as_json, world)


def _score_text(
    models: Sequence[str],
    text: Path,
    others: OfTranslators,
    asked: OfTexts,
    how: tuple[str, str | None],
    as_json: bool,
    world: World,
) -> None:
    values = zip(OfTranslators._fields, others, strict=True)
    given = [name for name, value in values if name not in ("precision", "force") and value is not None]
    if given:
        raise UsageError(f"--{given[0]} is for translators, and --text for language models: give one")
    if others.precision != "fp32":
        raise UsageError("--precision is for translators: --text scores a model as it is")
    corpus = LanguageCorpusSpec(files=(str(text),), documents=asked.documents)
    documents = world.on_all(lambda: list(whole_documents(read_documents(corpus))))

    def score(model: str) -> Likelihood:
        with progress_bar("{task.description}", "scoring", of_bytes=False) as tell:
            opened = open_model(model, *how, engine=asked.engine, dtype=torch_dtype(asked.dtype))
            found: Likelihood = opened.evaluate(
                documents,
                context=asked.context,
                stride=asked.stride,
                progress=lambda _, done, total: tell(_doing("scoring", model, models), done, total),
            )
            return found

    found = do_each(models, score, world)

    def show() -> None:
        if as_json:
            _print_records("model", models, [one.figures() for one in found])
        elif len(found) == 1:
            _print_likelihood(found[0])
        else:
            _print_table(_likelihoods(models, found))

    world.on_first(show)


def _score_translators(
    runs: Sequence[str],
    asked: OfTranslators,
    others: OfTexts,
    how: tuple[str, str | None],
    as_json: bool,
    world: World,
) -> None:
    source, reference, out = asked.source, asked.reference, asked.out
    if source is None or reference is None:
        raise UsageError("give --text for a language model, or --source and --reference for a translator")
    if (others.context, others.stride, others.dtype, others.documents) != (None, None, None, "file"):
        raise UsageError("--context, --stride, --documents and --dtype go with --text")
    if others.engine != "triptych":
        raise UsageError("--engine goes with --text here: score a translator with --engine triptych")
    if out is not None and len(runs) > 1:
        raise UsageError("--out takes the translations of one model: name one, or leave out --out")
    sources, references = world.on_all(lambda: _read_pairs(source, reference))
    read = *map(Path, runs), source, reference
    world.on_first(lambda: require_free([Output(out, unmarked)], read, force=asked.force))

    def score(run: str) -> Evaluation:
        with progress_bar("{task.description}", "translating", of_bytes=False) as tell:
            found: Evaluation = open_run(run, *how, precision=asked.precision).evaluate(
                sources,
                references,
                beam_size=asked.beam,
                alpha=asked.alpha,
                stop=asked.stop,
                workers=number_of_workers(asked.workers),
                progress=lambda _, done, total: tell(_doing("translating", run, runs), done, total),
            )
            return found

    found = do_each(runs, score, world)

    def show() -> None:
        if out is not None:
            write_text(out, "".join(f"{text}\n" for text in found[0].translations))
        if as_json:
            _print_records("run", runs, [one.figures() for one in found])
        elif len(found) == 1:
            _print_scores(found[0])
        else:
            _print_table(_scores(runs, found))

    world.on_first(show)


def _doing(what: str, name: str, names: Sequence[str]) -> str:
    """What a progress bar says of one of several models."""
    return what if len(names) == 1 else f"{what} {name}"


def _print_records(key: str, names: Sequence[str], figures: Sequence[dict[str, Any]]) -> None:
    """Print the figures of a model as JSON, or those of several as a list."""
    records = [{key: name, **own} for name, own in zip(names, figures, strict=True)]
    print(json.dumps(records[0] if len(records) == 1 else records))


def _likelihoods(models: Sequence[str], found: Sequence[Likelihood]) -> Table:
    rows = tuple(
        (
            model,
            f"{one.nats_per_token:.4f}",
            "{:.4f} to {:.4f}".format(*one.interval),
            f"{one.perplexity:.2f}",
            f"{one.bits_per_byte:.4f}",
            f"{one.tokens:,}",
        )
        for model, one in zip(models, found, strict=True)
    )
    columns = ("model", "nats per token", "95 % interval", "perplexity", "bits per byte", "tokens")
    return Table("Likelihoods", columns, rows, numeric=(1, 2, 3, 4, 5))


def _scores(runs: Sequence[str], found: Sequence[Evaluation]) -> Table:
    rows = tuple(
        (run, *(f"{score.value:.2f} [{score.low:.2f}, {score.high:.2f}]" for score in one.scores))
        for run, one in zip(runs, found, strict=True)
    )
    names = (score.name for score in found[0].scores)
    signatures = "\n".join(f"{score.name}: {score.signature}" for score in found[0].scores)
    return Table("Scores", ("run", *names), rows, caption=signatures, numeric=(1, 2))


def _print_table(table: Table) -> None:
    console = Terminal()
    print_whole(table, console)
    if table.caption:
        console.print(table.caption, soft_wrap=True)


def _read_pairs(source: Path, reference: Path) -> tuple[list[str], list[str]]:
    """The lines of both files."""
    sources, references = read_lines(source), read_lines(reference)
    if len(sources) != len(references):
        raise DataError(f"{source} has {len(sources):,} lines but {reference} has {len(references):,}")
    if not sources:
        raise DataError(f"{source} is empty: there is nothing to evaluate")
    return sources, references


def _print_scores(found: Evaluation) -> None:
    for score in found.scores:
        print(score.line())
    count = len(found.translations)
    print(
        f"{count:,} sentences in {found.seconds:.1f} s ({count / found.seconds:.1f} a second), "
        f"beam {found.options.beam_size}, α {found.options.alpha}, {found.precision}, "
        f"workers {found.workers}",
        file=sys.stderr,
    )


def _print_likelihood(found: Likelihood) -> None:
    low, high = found.interval
    print(
        f"{found.nats_per_token:.4f} nats per token ({low:.4f} to {high:.4f}), perplexity "
        f"{found.perplexity:.2f}, {found.bits_per_byte:.4f} bits per byte"
    )
    print(
        f"{found.tokens:,} tokens, {found.num_bytes:,} bytes, {found.documents:,} documents; windows of "
        f"{found.context:,} tokens, stride {found.stride:,}; interval over {found.units}",
        file=sys.stderr,
    )
