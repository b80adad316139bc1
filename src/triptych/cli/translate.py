"""`triptych translate`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from triptych.cli.failures import say
from triptych.cli.options import (
    check_attention,
    load_model,
    number_of_workers,
    special_tokens_of,
    translating_engine,
)
from triptych.cli.outputs import Output, is_remembered, remember, require_free
from triptych.cli.signatures import Options
from triptych.cli.terminal import json_text, standard_input, text_or_file, write_output
from triptych.converting.kept_translators import KeptTranslator
from triptych.errors import DataError, UsageError
from triptych.files import write_atomically
from triptych.model import Model, load
from triptych.running.text import iterate_file, iterate_lines
from triptych.threads import Ahead

if TYPE_CHECKING:
    from triptych.running.decoding import SearchOptions, Translation, Translator

# Lines translated together: few at first, so that there is soon something to read.
_FIRST_LINES = 16
_LINES_AT_A_TIME = 512
# Sentences whose attention a page shows.
_MOST_VIEWED = 20
# Converts a translation and its line number to output lines.
Renderer = Callable[["Translation", int], list[str]]


def translate(
    model: str,
    text: str | None = None,
    *,
    out: Path | None = None,
    searching: Annotated[
        Options,
        "Search",
        Model.translate,
        "beam_size alpha num_best stop max_extra_tokens max_source_tokens split no_repeat_ngram_size "
        "repetition_penalty temperature top_k top_p min_p seed",
    ],
    glossary: Path | None = None,
    workers: int | None = None,
    literal: bool = False,
    opening: Annotated[
        Options,
        "Model",
        load,
        "device engine precision languages offline strict family adapter shortlist ensemble",
    ],
    without: str | None = None,
    attention: Sequence[str] = (),
    attention_html: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Translate text line by line, in the order of the input.

    The sentences of a line are translated one by one, and the white space between them is kept. An empty
    line gives an empty line, and with --n-best one empty translation. A sentence longer than the limit is
    translated in pieces, and standard error says so, as it does of a translation that is cut off at the limit
    of its length.

    Search:
        glossary: A file of forced terms: a term, a tab and its translation on each line. If a sentence has
            the term as whole words, its translation has this translation.
        workers: Number of processes that translate in parallel, one thread each. Default: the cores. CPU
            only.

    Options:
        text: A text, or the name of a file. Default: standard input.
        out: The output file. An existing one is replaced only if triptych wrote it and it is unchanged.
            Default: standard output.
        as_json: Print one JSON object per line, with scores and tokens.
        attention: With --json: add the attention weights of some heads: cross.3.2 is head 2 of layer 3,
            cross.3 a layer, encoder.* a pattern. May be repeated.
        attention_html: Write a page with the attention of the first 20 sentences.

    Examples:
        triptych translate runs/mine "Guten Tag."
        triptych translate runs/mine test.de --beam 4 --out translated.en
    """
    html = attention_html
    check_attention(attention, html, opening["engine"], as_json=as_json)
    given = "-" if text is None else text_or_file(text, "text")
    read = [
        Path(model),
        *(path for path in (given, glossary) if isinstance(path, Path)),
    ]
    outputs = [Output(out, is_remembered)]
    if html is not None:
        from triptych.seeing.reports import is_page

        outputs.append(Output(html, is_page))
    require_free(outputs, read, force=force)
    own = {
        "as_json": as_json,
        "attention": attention,
        "attention_html": html,
        "without": without,
    }
    opening = translating_engine(opening, own)
    terms = None if glossary is None else _read_glossary(glossary)
    num_workers = number_of_workers(workers)

    @cache
    def opened() -> Model:
        return load_model(model, without, opening)

    def search_again(options: "SearchOptions") -> "Translator":
        return opened().reader.translator(options)

    changing = {"glossary": glossary, "without": without}
    kept = KeptTranslator(model, opening | changing, searching)
    translator = kept.find(num_workers, search_again)
    if translator is None:
        translator = opened().translator(
            **searching, glossary=terms, workers=num_workers
        )
        kept.keep(opened()._opened, translator)
    translator = translator.with_special_tokens(special_tokens_of(literal))
    if not as_json and searching["num_best"] == 1:
        translator = translator.without_scores()
    # A file is there, and a pipe is still written.
    if isinstance(given, Path) and given.is_file():
        translator = translator.reading_ahead()
    if attention:
        opened().reader.require_heads(attention)
    render = (
        _json_renderer(opened, attention)
        if as_json
        else _text_renderer(searching["num_best"])
    )
    lines = iterate_file(given) if isinstance(given, Path) else _lines_of(given)
    viewed: list[str] = []

    def rendered() -> Iterator[str]:
        """The text of each line's translation, its line ends included."""
        for number, translation in enumerate(
            translator.translate_stream(_as_they_come(lines)), start=1
        ):
            for sentence in translation.sentences:
                if sentence.num_pieces > 1:
                    say(
                        f"line {number}: longer than the limit of {translator.max_source_tokens} "
                        f"tokens, translated in {sentence.num_pieces} pieces"
                    )
                if sentence.finish == "length":
                    say(
                        f"line {number}: the translation was cut off at the limit of its length; raise "
                        "--max-extra-tokens"
                    )
                if html and sentence.num_pieces == 1 and len(viewed) < _MOST_VIEWED:
                    viewed.append(sentence.source)
            yield "".join(f"{line}\n" for line in render(translation, number))

    with translator:
        if out is None:
            for text in rendered():
                write_output(text)
        else:
            write_atomically(out, lambda temporary: _write_file(temporary, rendered()))
            remember(out)
        if html is not None:
            _write_page(opened(), viewed, html)


def _lines_of(text: str) -> Iterator[str]:
    if text == "-":
        return iterate_lines(standard_input(), "standard input")
    return iterate_lines(BytesIO(text.encode()), "the text")


def _read_glossary(path: Path) -> dict[str, str]:
    terms = dict[str, str]()
    for number, line in enumerate(iterate_file(path), start=1):
        source, *targets = line.split("\t")
        if len(targets) != 1 or not source.strip() or not targets[0].strip():
            raise DataError(f"{path}:{number}: write a term, a tab and its translation")
        terms[source] = targets[0]
    return terms


def _write_page(model: Model, sources: list[str], path: Path) -> None:
    if not sources:
        raise UsageError(
            "--attention-html: no sentence can be shown: each is empty, or is translated in pieces"
        )
    model.attend(sources).page(path)


def _text_renderer(num_best: int) -> Renderer:
    def render(translation: "Translation", number: int) -> list[str]:
        if num_best == 1:
            return [translation.text]
        return [
            f"{number} ||| {c.text} ||| {c.score:.4f}" for c in translation.candidates
        ]

    return render


def _json_renderer(model: Callable[[], Model], wanted: Sequence[str]) -> Renderer:
    def render(translation: "Translation", number: int) -> list[str]:
        record: dict[str, Any] = {
            "line": number,
            "source": translation.source,
            "text": translation.text,
            "pieces": translation.num_pieces,
            "finish": translation.finish,
            "candidates": [
                {
                    "text": candidate.text,
                    "score": candidate.score,
                    "log_prob": candidate.log_prob,
                    "finish": candidate.finish,
                    "tokens": list(candidate.pieces),
                }
                for candidate in translation.candidates
            ],
        }
        if translation.parts:
            record["sentences"] = [
                {"source": part.source, "text": part.text} | attention_of(part)
                for part in translation.parts
            ]
        return [json_text(record | attention_of(translation))]

    def attention_of(sentence: "Translation") -> dict[str, Any]:
        if not wanted or sentence.num_pieces != 1:
            return {}
        from triptych.seeing.attending import head_records

        seen = model().attend(sentence.source)
        return {"attention": [*head_records(seen.parts(wanted))]}

    return render


def _as_they_come(lines: Iterable[str]) -> Iterator[list[str]]:
    """Group lines into batches without waiting: all lines available by now, up to a limit.

    Someone typing gets each line translated at once, and a file is translated in large batches. An error in
    the input comes after the lines before it.
    """
    arriving = Ahead(lines, depth=4 * _LINES_AT_A_TIME)
    most = _FIRST_LINES
    line: str | None = ""
    while line is not None:
        batch: list[str] = []
        failure: Exception | None = None
        try:
            while (line := next(arriving, None)) is not None:
                batch.append(line)
                if len(batch) == most or not arriving.has_more:
                    break
        except Exception as error:  # noqa: BLE001 (raised when the lines before it are done)
            failure = error
        if batch:
            yield batch
            most = min(2 * most, _LINES_AT_A_TIME)
        if failure is not None:
            raise failure


def _write_file(path: Path, texts: Iterable[str]) -> None:
    with path.open("wb") as file:
        for text in texts:
            file.write(text.encode())
