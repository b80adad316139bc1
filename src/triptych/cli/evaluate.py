"""`triptych evaluate`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

import triptych
from triptych.cli.groups import grouped
from triptych.cli.options import (
    AlphaOption,
    BeamOption,
    DeviceOption,
    DtypeOption,
    EngineOption,
    PrecisionOption,
    StopOption,
    WorkersOption,
    number_of_workers,
    torch_dtype,
)
from triptych.cli.outputs import ForceOption, Output, require_free, unmarked
from triptych.cli.progress import progress_bar
from triptych.decoding import Likelihood
from triptych.errors import DataError, UsageError
from triptych.files import write_text
from triptych.runs import Evaluation
from triptych.text import read_lines
from triptych.text.documents import LanguageCorpusSpec, read_documents, whole_documents

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run folder, a folder in Hugging Face's format, or (with --text) a name on the Hub.",
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
        help="With --text: tokens of a window. Default: the model's positions, at most 1024.",
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
    run: Model,
    translating: OfTranslators,
    scoring: OfTexts,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Score a translator on a test text, or a language model.

    Translators (--source and --reference): sacreBLEU's BLEU and chrF, with their signatures and 95 %
    bootstrap intervals. Language models (--text): nats per token with a 95 % bootstrap interval, perplexity,
    and bits per byte.
    """
    if scoring.text is not None:
        _score_text(run, scoring.text, translating, scoring, device, as_json)
    else:
        _score_translator(run, translating, scoring, device, as_json)


def _score_text(
    run: str, text: Path, others: OfTranslators, asked: OfTexts, device: str, as_json: bool
) -> None:
    values = zip(OfTranslators._fields, others, strict=True)
    given = [name for name, value in values if name not in ("precision", "force") and value is not None]
    if given:
        raise UsageError(f"--{given[0]} is for translators, and --text for language models: give one")
    if others.precision != "fp32":
        raise UsageError("--precision is for translators: --text scores a model as it is")
    corpus = LanguageCorpusSpec(files=(str(text),), documents=asked.documents)
    with progress_bar("{task.description}", "scoring", of_bytes=False) as tell:
        likelihood = triptych.evaluate_text(
            run,
            list(whole_documents(read_documents(corpus))),
            device,
            context=asked.context,
            stride=asked.stride,
            engine=asked.engine,
            dtype=torch_dtype(asked.dtype),
            progress=lambda done, total: tell("scoring", done, total),
        )
    if as_json:
        print(json.dumps({"model": run, **likelihood.figures()}))
    else:
        _print_likelihood(likelihood)


def _score_translator(run: str, asked: OfTranslators, others: OfTexts, device: str, as_json: bool) -> None:
    source, reference, out = asked.source, asked.reference, asked.out
    if source is None or reference is None:
        raise UsageError("give --text for a language model, or --source and --reference for a translator")
    if (others.context, others.stride, others.dtype, others.documents) != (None, None, None, "file"):
        raise UsageError("--context, --stride, --documents and --dtype go with --text")
    if others.engine != "triptych":
        raise UsageError("--engine goes with --text here: score a translator with --engine triptych")
    sources, references = _read_pairs(source, reference)
    require_free([Output(out, unmarked)], (Path(run), source, reference), force=asked.force)
    with progress_bar("{task.description}", "translating", of_bytes=False) as tell:
        evaluation = triptych.evaluate(
            run,
            sources,
            references,
            device,
            beam_size=asked.beam,
            alpha=asked.alpha,
            stop=asked.stop,
            precision=asked.precision,
            workers=number_of_workers(asked.workers),
            progress=lambda done, total: tell("translating", done, total),
        )
    if out is not None:
        write_text(out, "".join(f"{text}\n" for text in evaluation.translations))
    print(json.dumps({"run": run, **evaluation.figures()})) if as_json else _print_scores(evaluation)


def _read_pairs(source: Path, reference: Path) -> tuple[list[str], list[str]]:
    """The lines of both files.

    Raises:
        DataError: their numbers differ, or there are none.
    """
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
