"""`triptych attend`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import triptych
from triptych.attending import open_reader
from triptych.attending.looks import strongest_looks
from triptych.attending.page import ViewedKind, join_pages
from triptych.attending.picture import head_png, head_svg, is_picture
from triptych.attending.saving import (
    Saved,
    is_attention_csv,
    is_attention_npz,
    json_pieces,
    write_csv,
    write_npz,
)
from triptych.attending.viewing import write_attention_page
from triptych.cli.options import DeviceOption
from triptych.cli.outputs import ForceOption, Output, require_free
from triptych.cli.over import (
    ContextOption,
    DocumentsOption,
    ExplainOption,
    OverChoice,
    OverOption,
    OverTargetsOption,
    TokensOption,
    WorthOption,
    is_over_csv,
    show_over,
)
from triptych.cli.selection import numbers
from triptych.errors import UsageError
from triptych.files import write_bytes, write_text
from triptych.reports import is_page, render_table
from triptych.text import read_lines


def attend(
    model: Annotated[
        str, typer.Argument(help="A run folder, a folder in Hugging Face's format, or a name on the Hub.")
    ],
    text: Annotated[
        str | None, typer.Argument(help="The text to read; - reads all of standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Texts, one per line, read in padded batches.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", help="What the decoder of a translator reads. Default: its translation."),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", min=0, help="Continue the text greedily by so many tokens first."),
    ] = 0,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", help="encoder, decoder or cross. May be repeated. Default: all there are."),
    ] = None,
    layers: Annotated[str | None, typer.Option("--layers", help="Layers: 0,3 or 0-5. Default: all.")] = None,
    heads: Annotated[str | None, typer.Option("--heads", help="Heads: 0,3 or 0-5. Default: all.")] = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top", min=1, help="Keep the K largest weights of each token, and the sum of the others."
        ),
    ] = None,
    npz: Annotated[Path | None, typer.Option("--npz", help="Write NumPy arrays to this file.")] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write a row for every weight above 0 to this file.")
    ] = None,
    over: OverOption = None,
    over_targets: OverTargetsOption = None,
    documents: DocumentsOption = "file",
    context: ContextOption = None,
    tokens: TokensOption = None,
    worth: WorthOption = None,
    explain: ExplainOption = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with every chosen head, which works offline.")
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", help="Draw one head, chosen with --kind, --layers and --heads, to this file."),
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw one head as PNG to this file.")] = None,
    force: ForceOption = False,
    device: DeviceOption = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text, with all weights.")
    ] = False,
) -> None:
    """Show where every head of a model looks on a text.

    The model runs with its own kernels; the weights are computed from the inputs of its layers. Prints the
    strongest looks of each head, unless an output is chosen. With --over, measures what heads do over a whole
    text instead; --csv then has a row per head.
    """
    corpus = OverChoice.of(over, over_targets, documents, context, tokens, worth, explain=explain)
    is_own_csv = is_attention_csv if corpus is None else is_over_csv
    outputs = (
        *(Output(npz, is_attention_npz), Output(csv_file, is_own_csv)),
        *(Output(html, is_page), Output(svg, is_picture), Output(png, is_picture)),
    )
    read = [Path(model), *([] if file is None else [file]), *([] if corpus is None else corpus.read())]
    require_free(outputs, [path for path in read if path.exists()], force=force)
    if corpus is not None:
        of_texts = (text, file, target, kind, layers, heads, top, npz, html, svg, png, max_new_tokens or None)
        if any(option is not None for option in of_texts):
            raise UsageError("--over takes no other text, and no options of one but --csv and --json")
        show_over(corpus, model, device, csv_file, as_json=as_json)
        return
    texts = _texts(text, file)
    if file is not None and target is not None:
        raise UsageError("--target goes with one text, not with --file")
    reader = open_reader(model, device)
    targets = None if target is None else [target]
    found = triptych.attend(reader, texts, target=targets, max_new_tokens=max_new_tokens)
    chosen_layers = None if layers is None else numbers(layers, "--layers")
    chosen_heads = None if heads is None else numbers(heads, "--heads")
    saved = [Saved(one, one.parts(kind, chosen_layers, chosen_heads), top) for one in found]
    if npz is not None:
        write_npz(saved, npz)
    if csv_file is not None:
        write_csv(saved, csv_file)
    if html is not None:
        write_attention_page(join_pages([one.page() for one in saved]), html)
    if svg is not None:
        write_text(svg, head_svg(*_one_head(saved)))
    if png is not None:
        write_bytes(png, head_png(*_one_head(saved)))
    if as_json:
        for one in saved:
            for piece in json_pieces(one):
                _print(piece)
            _print("\n")
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    written = [path for path in (npz, csv_file, html, svg, png) if path is not None]
    for path in written:
        console.print(f"written: {path}")
    for one in saved if not written else ():
        console.print(render_table(strongest_looks(one.parts)))


def _one_head(saved: Sequence[Saved]) -> tuple[ViewedKind, int, int, str]:
    """The head of a picture: its kind of attention, its place there, and a title.

    Raises:
        UsageError: several heads or texts are chosen.
    """
    heads = [(part, head) for one in saved for part in one.parts for head in part.heads]
    if len(heads) != 1:
        raise UsageError(
            f"a picture shows one head, and {len(heads)} are chosen: give one of each with --kind, --layers "
            "and --heads, and one text"
        )
    ((part, head),) = heads
    (kind,) = saved[0].page().texts[0].kinds
    return kind, 0, 0, f"{saved[0].attention.model}, {part.stack.kind} layer {part.layer.number}, head {head}"


def _texts(text: str | None, file: Path | None) -> list[str]:
    """The texts: one of the command line or standard input, or the lines of a file.

    Raises:
        UsageError: none or both are given, or a text is empty or not UTF-8.
    """
    if (text is None) == (file is None):
        raise UsageError("give either a text (- for standard input) or --file with texts")
    if file is not None:
        return read_lines(file)
    try:
        # Bytes of the command line that are not UTF-8 come as surrogates.
        found = sys.stdin.buffer.read().decode() if text == "-" else str(text).encode().decode()
    except UnicodeError:
        raise UsageError("the text is not UTF-8: convert it first (iconv -t UTF-8)") from None
    return [found.removesuffix("\n").removesuffix("\r") if text == "-" else found]


def _print(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()
