"""`triptych evaluate`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from triptych.cli.options import (
    load_model,
    number_of_workers,
    plain,
    refuse_options,
    special_tokens_of,
    translating_engine,
)
from triptych.cli.outputs import Output, is_remembered, remember, require_free
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json, print_whole, progress_bar
from triptych.errors import DataError, UsageError
from triptych.files import write_text
from triptych.literals import Documents
from triptych.model import Model, load
from triptych.processes import do_each, launched
from triptych.running.decoding import Evaluation, Likelihood
from triptych.running.measuring import Classification
from triptych.running.text import (
    LanguageCorpusSpec,
    read_documents,
    read_lines,
    whole_documents,
)
from triptych.seeing.reports import Table


def evaluate(
    models: Sequence[str],
    *,
    source: Path | None = None,
    reference: Path | None = None,
    translating: Annotated[
        Options, "Translators", Model.evaluate, "beam_size alpha stop bleu_tokenize"
    ],
    workers: int | None = None,
    out: Path | None = None,
    text: Path | None = None,
    documents: Documents = "file",
    labels: Path | None = None,
    literal: bool = False,
    scoring: Annotated[Options, "Language models", Model.evaluate, "context stride"],
    opening: Annotated[
        Options,
        "Model",
        load,
        "device dtype engine precision languages offline strict family adapter shortlist ensemble",
    ],
    without: str | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Score a translator, a language model or a classifier.

    Translators (--source and --reference): sacreBLEU's BLEU and chrF, with their signatures and 95 %
    bootstrap intervals. Language models (--text): nats per token with a 95 % bootstrap interval, perplexity,
    and bits per byte. Models with the head of a sequence classification (--labels): accuracy with a 95 %
    bootstrap interval, and macro F1. Several models give a table, or with --json a list.

    Translators:
        source: Text to translate, one sentence per line.
        reference: Reference translations, line by line.
        workers: Number of processes that translate in parallel, one thread each. Default: the cores. CPU
            only.
        out: Write the translations to this file. An existing one is replaced only if triptych wrote it and it
            is unchanged.

    Language models:
        text: The text to predict: a file, a folder, or - for standard input. Records of .jsonl and .parquet
            files (field text) are documents.
        documents: What a document is in a plain text file: the whole file, each line, or the lines between
            blank lines. Each document is scored by itself.

    Classifiers:
        labels: Labelled lines, or - for standard input: a label by name or number, a tab and a text. A line
            with a pair of texts has another tab and the second text.

    Examples:
        triptych evaluate runs/mine --source test.de --reference test.en
        triptych evaluate gpt2 gpt2-half --text test.txt
    """
    read = list(map(Path, models))
    translators = {
        "source": source,
        "reference": reference,
        **translating,
        "workers": workers,
        "out": out,
    }
    texts = {**scoring, "documents": documents != "file"}
    if labels is not None:
        refuse_options(
            {"text": text, **texts, **translators},
            "does not go with --labels, labelled texts of a classifier",
        )
        if opening["precision"] != "fp32":
            raise UsageError(
                "--precision is for translators: --labels scores a model as it is"
            )
    elif text is not None:
        refuse_options(
            translators, "is for translators, and --text for language models: give one"
        )
        if opening["precision"] != "fp32":
            raise UsageError(
                "--precision is for translators: --text scores a model as it is"
            )
    else:
        refuse_options(texts, "goes with --text")
        if out is not None and len(models) > 1:
            raise UsageError(
                "--out takes the translations of one model: name one, or leave out --out"
            )
        translating["workers"] = number_of_workers(workers)
        opening = translating_engine(opening, {"without": without})
        read += [path for path in (source, reference) if path is not None]
    with launched(opening["device"]) as world:
        given = world.on_all(
            lambda: (
                ()
                if labels is not None
                else _read_texts(text, documents, source, reference)
            )
        )
        doing, asked = (
            ("translating", translating)
            if text is None and labels is None
            else ("scoring", scoring)
        )
        if labels is not None:
            file = Path("/dev/stdin") if labels == Path("-") else labels
            asked = {"labels": file}
        world.on_first(
            lambda: require_free([Output(out, is_remembered)], read, force=force)
        )

        def score(model: str) -> Any:
            of_model = "" if len(models) == 1 else f"{model}: "
            with progress_bar("{task.description}", doing, of_bytes=False) as tell:
                return load_model(model, without, opening).evaluate(
                    *given,
                    **asked,
                    special_tokens=special_tokens_of(literal),
                    progress=lambda what, done, total: tell(
                        f"{of_model}{what}", done, total
                    ),
                )

        found = do_each(models, score, world)
        world.on_first(lambda: _print_or_write(models, found, out, as_json=as_json))


def _print_or_write(
    models: Sequence[str], found: Sequence[Any], out: Path | None, *, as_json: bool
) -> None:
    translates = isinstance(found[0], Evaluation)
    if out is not None:
        write_text(out, "".join(f"{text}\n" for text in found[0].translations))
        remember(out)
    if as_json:
        key = "run" if translates else "model"
        records = [
            {key: name, **plain(own.figures())}
            for name, own in zip(models, found, strict=True)
        ]
        print_json(records[0] if len(records) == 1 else records)
    elif len(found) > 1:
        table = _table_of(models, found)
        console = Terminal()
        print_whole(table, console)
        if table.caption:
            console.print(table.caption, soft_wrap=True)
    elif translates:
        _print_scores(found[0])
    elif isinstance(found[0], Classification):
        _print_classification(found[0])
    else:
        _print_likelihood(found[0])


def _likelihoods(models: Sequence[str], found: Sequence[Likelihood]) -> Table:
    rows = tuple(
        (
            model,
            f"{one.nats_per_token:.4f}",
            "{:.4f} to {:.4f}".format(*one.interval),
            f"{one.perplexity:.2f}",
            "" if one.bits_per_byte is None else f"{one.bits_per_byte:.4f}",
            f"{one.tokens:,}",
        )
        for model, one in zip(models, found, strict=True)
    )
    columns = (
        "model",
        "nats per token",
        "95 % interval",
        "perplexity",
        "bits per byte",
        "tokens",
    )
    reasons = (
        (model, one.why_no_bits) for model, one in zip(models, found, strict=True)
    )
    caption = "\n".join(f"{model}: {reason}" for model, reason in reasons if reason)
    return Table("Likelihoods", columns, rows, caption=caption, numeric=(1, 2, 3, 4, 5))


def _table_of(models: Sequence[str], found: Sequence[Any]) -> Table:
    match found[0]:
        case Evaluation():
            return _scores(models, found)
        case Classification():
            return _accuracies(models, found)
    return _likelihoods(models, found)


def _accuracies(models: Sequence[str], found: Sequence[Classification]) -> Table:
    rows = tuple(
        (
            model,
            f"{one.accuracy:.4f}",
            "{:.4f} to {:.4f}".format(*one.interval),
            f"{one.macro_f1:.4f}",
            f"{one.nats_per_text:.4f}",
            f"{one.texts:,}",
        )
        for model, one in zip(models, found, strict=True)
    )
    columns = (
        "model",
        "accuracy",
        "95 % interval",
        "macro F1",
        "nats per text",
        "texts",
    )
    return Table("Accuracies", columns, rows, numeric=(1, 2, 3, 4, 5))


def _scores(runs: Sequence[str], found: Sequence[Evaluation]) -> Table:
    rows = tuple(
        (
            run,
            *(
                f"{score.value:.2f} [{score.low:.2f}, {score.high:.2f}]"
                for score in one.scores
            ),
        )
        for run, one in zip(runs, found, strict=True)
    )
    names = (score.name for score in found[0].scores)
    signatures = "\n".join(
        f"{score.name}: {score.signature}" for score in found[0].scores
    )
    return Table("Scores", ("run", *names), rows, caption=signatures, numeric=(1, 2))


def _read_texts(
    text: Path | None, documents: Documents, source: Path | None, reference: Path | None
) -> tuple[list[str], ...]:
    """The documents of a text, or the lines of both files."""
    if text is not None:
        file = "/dev/stdin" if text == Path("-") else str(text)
        spec = LanguageCorpusSpec(files=(file,), documents=documents)
        return ([*whole_documents(read_documents(spec))],)
    if source is None or reference is None:
        raise UsageError(
            "give --text for a language model, --source and --reference for a translator, or --labels for a "
            "classifier"
        )
    sources = read_lines(source)
    references = read_lines(reference)
    if len(sources) != len(references):
        raise DataError(
            f"{source} has {len(sources):,} lines, {reference} {len(references):,}: both need the same number"
        )
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
        f"workers {found.workers}, {found.engine}",
        file=sys.stderr,
    )
    if found.num_at_limit:
        cut = f"{found.num_at_limit:,} translations were cut off at the limit of their length"
        print(cut, file=sys.stderr)


def _print_classification(found: Classification) -> None:
    # The share of the most frequent class is a baseline for the accuracy.
    low, high = found.interval
    print(
        f"accuracy {found.accuracy:.4f} ({low:.4f} to {high:.4f}), macro F1 {found.macro_f1:.4f}, "
        f"{found.nats_per_text:.4f} nats per text"
    )
    plural = "s" * (found.texts != 1)
    print(
        f"{found.texts:,} text{plural}, {len(found.labels)} classes; interval over texts; the most frequent "
        f"class alone would be right for {found.majority:.2%}",
        file=sys.stderr,
    )


def _print_likelihood(found: Likelihood) -> None:
    low, high = found.interval
    bits = (
        found.why_no_bits
        if found.bits_per_byte is None
        else f"{found.bits_per_byte:.4f} bits per byte"
    )
    print(
        f"{found.nats_per_token:.4f} nats per token ({low:.4f} to {high:.4f}), perplexity "
        f"{found.perplexity:.2f}, {bits}"
    )
    plural = "s" * (found.documents != 1)
    print(
        f"{found.tokens:,} tokens, {found.num_bytes:,} bytes, {found.documents:,} document{plural}; windows "
        f"of {found.context:,} tokens, stride {found.stride:,}; interval over {found.units}"
        + (
            f"; {found.unknown:.2%} of the characters are unknown to the tokenizer"
            if found.unknown
            else ""
        ),
        file=sys.stderr,
    )
