"""`triptych attend`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from triptych.cli.options import (
    load_model,
    refuse_options,
    special_tokens_of,
    token_ids,
)
from triptych.cli.outputs import Output, begins_with, require_free
from triptych.cli.signatures import Options
from triptych.cli.terminal import (
    MOST_HEADS,
    Terminal,
    print_cut,
    print_json,
    print_table,
    print_whole,
    print_written,
    progress_bar,
    read_text,
    refuse_all,
    write_output,
)
from triptych.errors import UsageError
from triptych.files import write_text
from triptych.model import Model, load
from triptych.running.text import GivenText, read_lines
from triptych.seeing.attending import (
    Attention,
    AttentionBatch,
    HeadSteps,
    OverText,
    Saved,
    is_attention_csv,
    is_attention_npz,
    is_picture,
    json_pieces,
    looks_table,
    most_telling,
    write_attention_csv,
    write_npz,
    written_table,
)
from triptych.seeing.reports import Table, is_page, write_csv

# Rows of the table of `--steps` in the terminal.
_MOST_KEYS = 40
_OVER_CSV_START = b"stack,layer,head,called,"


def attend(
    model: str,
    text: str | None = None,
    *,
    pair: str | None = None,
    file: Path | None = None,
    ids: str | None = None,
    literal: bool = False,
    target: str | None = None,
    reading: Annotated[Options, "Options", Model.attend, "max_new_tokens max_tokens"],
    heads: str | None = None,
    show_all: bool = False,
    top: int | None = None,
    writes: int | None = None,
    steps: str | None = None,
    over: Path | None = None,
    measured: Annotated[
        Options,
        "Over a text",
        Model.attend_over,
        "documents targets worth explain context most_tokens",
    ],
    npz: Path | None = None,
    csv: Path | None = None,
    html: Path | None = None,
    svg: Path | None = None,
    force: bool = False,
    opening: Annotated[
        Options, "Model", load, "device dtype languages offline strict family adapter"
    ],
    without: str | None = None,
    as_json: bool = False,
) -> None:
    """Show where every head of a model looks on a text.

    The model runs with its own kernels; the weights are computed from the inputs of its layers. Unless an
    output is chosen, prints the strongest looks of the ten heads whose looks depend most on the token that
    looks, or of all heads with --all.

    With --over, measures what heads do over a whole text instead; --csv and --html then have a row per head.
    With a text, --over and --html, the page of the text also shows what each head does over the corpus.

    Heads:
        heads: Heads to show: 3.2 is head 2 of layer 3, 3 a layer, cross.* a pattern; several with commas.
            Default: all; the terminal shows the ten that tell most.
        show_all: Show every head in the terminal.
        top: Keep the K largest weights of each token, and the sum of the others.
        writes: Show what each head writes for each token (W_OV): the K nearest tokens of the output table.
        steps: The computation of one row step by step, as HEAD:TOKEN: 3.2:5, cross.3.2:5.

    Files:
        npz: Write NumPy arrays to this file.
        csv: Write a row for every weight above 0 to this file.
        html: Write a page with every chosen head, which works offline.
        svg: Draw one head, chosen with --heads, to this file.
        force: Replace existing files, even if triptych did not write them.

    Over a text:
        over: Measure what heads do over this text: a file or a folder; for a translator,
            a file with one sentence per line.

    Options:
        text: The text to read; - reads all of standard input.
        pair: A second text, read with the first as the model's tokenizer joins two.
        file: Texts, one per line, read in padded batches.
        target: What the decoder of a translator reads. Default: its translation.
        as_json: Print one JSON object per text, with all weights.

    Examples:
        triptych attend gpt2 "The cat sat on the mat." --html cat.html
        triptych attend runs/mine --over test.de --worth mean
    """
    outputs = npz, csv, html, svg
    is_of_heads = over is not None and text is None and file is None and ids is None
    of_csv = begins_with(_OVER_CSV_START) if is_of_heads else is_attention_csv
    wanted = map(Output, outputs, (is_attention_npz, of_csv, is_page, is_picture))
    read = [
        path
        for path in (Path(model), file, over, measured["targets"])
        if path and path.exists()
    ]
    require_free([*wanted], read, force=force)
    of_text = {
        "heads": heads,
        "show_all": show_all,
        "top": top,
        "writes": writes,
        "npz": npz,
        "svg": svg,
    }
    if over is None:
        given = {**measured, "documents": measured["documents"] != "file"}
        refuse_options(given, "goes with --over: name a text")
    if steps is not None:
        refuse_options(
            {**of_text, "over": over, "file": file, "csv": csv},
            "does not go with --steps, one row of a head",
        )
    if is_of_heads:
        why = "goes with a text: --over without one takes --csv, --html and --json"
        refuse_options(
            {**of_text, **reading, "target": target, "pair": pair, "ids": ids}, why
        )
    elif over is not None and html is None:
        raise UsageError(
            "a text and --over go together with --html: leave out the text, or write a page"
        )
    if file is not None:
        refuse_options(
            {"target": target, "pair": pair}, "goes with one text, not with --file"
        )
    given_ids = token_ids(ids)
    refuse_options(
        {"literal": literal and ids is not None, "pair": ids and pair},
        "goes with a text, not with --ids",
    )
    if not as_json and npz is None and csv is None and html is None:
        refuse_options({"top": top}, "goes with --json, --npz, --csv or --html")
    refuse_all(show_all, as_json=as_json)
    special_tokens = special_tokens_of(literal)
    opened = load_model(model, without, opening)
    behaviour = None
    if over is not None:
        with progress_bar("{task.description}", "reading", of_bytes=False) as tell:
            behaviour = opened.attend_over(
                over, **measured, special_tokens=special_tokens, progress=tell
            )
        if is_of_heads:
            if csv is not None:
                write_csv(behaviour.rows(), csv)
            _print_found(behaviour, behaviour.tables(), (csv, html), as_json=as_json)
            return
    if [text, file, ids].count(None) != 2:
        raise UsageError(
            "give either a text (- for standard input), --file with texts, or --ids"
        )
    texts: list[GivenText] = [given_ids] if given_ids is not None else []
    if file is not None:
        texts += read_lines(file)
    elif text is not None and pair is not None:
        texts.append((read_text(text, "text"), read_text(pair, "pair")))
    elif text is not None:
        texts.append(read_text(text, "text"))
    targets = None if target is None else [target]
    attended = opened.attend(texts, targets, **reading, special_tokens=special_tokens)
    if steps is not None:
        found = _steps_of_row(attended[0], steps)
        _print_found(found, found.tables(_MOST_KEYS), (csv, html), as_json=as_json)
        return
    saved = [one.saved(heads or "*", top, writes) for one in attended]
    _write_files(attended, saved, outputs, behaviour)
    _print_weights(
        saved,
        outputs,
        None if show_all or heads is not None else MOST_HEADS,
        as_json=as_json,
    )


def _print_found(
    found: OverText | HeadSteps,
    tables: Iterable[Table],
    written: Sequence[Path | None],
    *,
    as_json: bool,
) -> None:
    """Print what was found, and write its page, the second of the files."""
    if written[1] is not None:
        found.page(written[1])
    if as_json:
        print_json(found.record())
        return
    console = Terminal(soft_wrap=True)
    for table in tables:
        print_table(table, console)
    print_written(written, console)


def _steps_of_row(attended: Attention, wanted: str) -> HeadSteps:
    """One row of a head step by step."""
    place, _, query = wanted.rpartition(":")
    layer, _, head = place.rpartition(".")
    if not layer or not head.isdecimal() or not query.removeprefix("-").isdecimal():
        raise UsageError(
            f'--steps {wanted}: write a head and the number of a token, as in "3.2:5"'
        )
    return attended.steps(layer, int(head), query=int(query))


def _write_files(
    attended: AttentionBatch,
    saved: Sequence[Saved],
    outputs: Sequence[Path | None],
    behaviour: OverText | None,
) -> None:
    """Write the requested files; the page describes the behaviour of heads, if it was measured."""
    npz, csv, html, svg = outputs
    if svg is not None and len(saved) > 1:
        raise UsageError(
            f"--svg draws one head on one text, and there are {len(saved)} texts"
        )
    picture = "" if svg is None else attended[0].picture(saved[0].parts)
    if npz is not None:
        write_npz(saved, npz)
    if csv is not None:
        write_attention_csv(saved, csv)
    if html is not None:
        with progress_bar("{task.description}", "writing", of_bytes=False) as tell:
            attended.page(html, over=behaviour, saved=saved, progress=tell)
    if svg is not None:
        write_text(svg, picture)


def _print_weights(
    saved: Sequence[Saved],
    written: Sequence[Path | None],
    most_heads: int | None,
    *,
    as_json: bool,
) -> None:
    """Print the weights as JSON, or the paths of written files, or the largest weights of heads."""
    if as_json:
        for one in saved:
            for piece in json_pieces(one):
                write_output(piece)
            write_output("\n")
        return
    console = Terminal(soft_wrap=True)
    print_written(written, console)
    for one in saved:
        if one.writer is None and any(written):
            continue
        parts = one.parts
        num_heads = sum(len(part.heads) for part in parts)
        is_cut = most_heads is not None and num_heads > most_heads
        if most_heads is not None and is_cut:
            parts = most_telling(parts, most_heads)
        table = (
            looks_table(parts)
            if one.writer is None
            else written_table(parts, one.writer)
        )
        print_whole(table, console)
        if table.caption:
            console.print(table.caption)
        if is_cut:
            print_cut(num_heads, console)
