"""`triptych attend`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from triptych.attending import AttentionBatch
from triptych.attending.looks import strongest_looks, written_tokens
from triptych.attending.over import OverText
from triptych.attending.over_page import head_notes, notes_origin
from triptych.attending.page import AttentionPage, ViewedKind, join_pages
from triptych.attending.picture import head_svg, is_picture
from triptych.attending.saving import (
    Saved,
    is_attention_csv,
    is_attention_npz,
    json_pieces,
    write_csv,
    write_npz,
)
from triptych.attending.viewing import Told, write_attention_page
from triptych.attending.writing import TokenWriter
from triptych.cli.groups import grouped
from triptych.cli.options import MODEL, DeviceOption, MaxTokensOption, WithoutOption, open_model
from triptych.cli.outputs import ForceOption, Output, require_free
from triptych.cli.over import MoreFigures, OverOptions, is_over_csv, show_over
from triptych.cli.progress import progress_bar
from triptych.cli.selection import numbers
from triptych.cli.terminal import Terminal, read_text, write_output
from triptych.decoding.hypotheses import MOST_TOKENS
from triptych.errors import UsageError
from triptych.face import Model
from triptych.files import write_text
from triptych.reports import is_page, render_table
from triptych.text import read_lines

# Rows of the table of `--steps` in the terminal.
_MOST_KEYS = 40

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]
Text = Annotated[str | None, typer.Argument(help="The text to read; - reads all of standard input.")]
FileOption = Annotated[
    Path | None, typer.Option("--file", help="Texts, one per line, read in padded batches.")
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", help="What the decoder of a translator reads. Default: its translation."),
]
MaxNewTokensOption = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        min=0,
        max=MOST_TOKENS,
        help="Continue the text greedily by so many tokens first.",
    ),
]
KindOption = Annotated[
    list[str] | None,
    typer.Option("--kind", help="encoder, decoder or cross. May be repeated. Default: all there are."),
]
LayersOption = Annotated[str | None, typer.Option("--layers", help="Layers: 0,3 or 0-5. Default: all.")]
HeadsOption = Annotated[str | None, typer.Option("--heads", help="Heads: 0,3 or 0-5. Default: all.")]
TopOption = Annotated[
    int | None,
    typer.Option("--top", min=1, help="Keep the K largest weights of each token, and the sum of the others."),
]
WritesOption = Annotated[
    int | None,
    typer.Option(
        "--writes",
        min=1,
        help="Show what each head writes for each token (W_OV): the K nearest tokens of the output table.",
    ),
]
NpzOption = Annotated[Path | None, typer.Option("--npz", help="Write NumPy arrays to this file.")]
CsvOption = Annotated[
    Path | None, typer.Option("--csv", help="Write a row for every weight above 0 to this file.")
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Write a page with every chosen head, which works offline.")
]
SvgOption = Annotated[
    Path | None,
    typer.Option("--svg", help="Draw one head, chosen with --kind, --layers and --heads, to this file."),
]
StepsOption = Annotated[
    str | None,
    typer.Option(
        "--steps", metavar="HEAD:TOKEN", help="The computation of one row step by step: 3.2:5, cross.3.2:5."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per text, with all weights.")]


class _Texts(NamedTuple):
    """Texts to read, as the options have them."""

    text: Text = None
    file: FileOption = None
    target: TargetOption = None
    max_new_tokens: MaxNewTokensOption = 0
    max_tokens: MaxTokensOption = None

    @property
    def are_given(self) -> bool:
        return self.text is not None or self.file is not None

    def read(self) -> list[Path]:
        """The files that are read."""
        return [] if self.file is None else [self.file]

    def attend(self, model: Model) -> AttentionBatch:
        """The attention of a model on the texts."""
        texts = self._texts()
        if self.file is not None and self.target is not None:
            raise UsageError("--target goes with one text, not with --file")
        targets = None if self.target is None else [self.target]
        return model.attend(texts, targets, max_new_tokens=self.max_new_tokens, max_tokens=self.max_tokens)

    def _texts(self) -> list[str]:
        """One of the command line or standard input, or the lines of a file."""
        if (self.text is None) == (self.file is None):
            raise UsageError("give either a text (- for standard input) or --file with texts")
        if self.file is not None:
            return read_lines(self.file)
        return [read_text(str(self.text), "text")]


class _Heads(NamedTuple):
    """Heads to show, as the options have them, with how many weights and written tokens."""

    kind: KindOption = None
    layers: LayersOption = None
    heads: HeadsOption = None
    top: TopOption = None
    writes: WritesOption = None

    def of(self, attention: AttentionBatch, model: Model) -> list[Saved]:
        """What is chosen of each text."""
        layers = None if self.layers is None else numbers(self.layers, "--layers")
        heads = None if self.heads is None else numbers(self.heads, "--heads")
        writer = None if self.writes is None else TokenWriter(model.reader, self.writes)
        return [Saved(one, one.parts(self.kind, layers, heads), self.top, writer) for one in attention]


class _Files(NamedTuple):
    """Files to write."""

    npz: NpzOption = None
    csv: CsvOption = None
    html: HtmlOption = None
    svg: SvgOption = None

    def outputs(self, is_own_csv: Callable[[Path], bool]) -> tuple[Output, ...]:
        """The files, and which there may be written anew."""
        is_own = is_attention_npz, is_own_csv, is_page, is_picture
        return tuple(map(Output, self, is_own))

    def given(self) -> list[Path]:
        """Those that are wanted."""
        return [path for path in self if path is not None]

    def write(self, saved: Sequence[Saved], behaviour: OverText | None, tell: Told) -> None:
        """Write those that are wanted; the page says of heads what they do, where that was measured."""
        picture = None if self.svg is None else _one_head(saved)
        if self.npz is not None:
            write_npz(saved, self.npz)
        if self.csv is not None:
            write_csv(saved, self.csv)
        if self.html is not None:
            write_attention_page(_page(saved, behaviour, tell), self.html, tell)
        if self.svg is not None and picture is not None:
            write_text(self.svg, head_svg(*picture))


@grouped
def attend(
    source: ModelArgument,
    texts: _Texts,
    chosen: _Heads,
    files: _Files,
    over: OverOptions,
    more: MoreFigures,
    *,
    force: ForceOption = False,
    device: DeviceOption = "auto",
    without: WithoutOption = None,
    steps: StepsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where every head of a model looks on a text.

    The model runs with its own kernels; the weights are computed from the inputs of its layers. Prints the
    strongest looks of each head, unless an output is chosen.

    With --over, measures what heads do over a whole text instead; --csv and --html then have a row per head.
    With a text, --over and --html, the page of the text says of every head what it does.
    """
    corpus = over.choice(more)
    is_of_heads = corpus is not None and not texts.are_given
    read = [Path(source), *texts.read(), *([] if corpus is None else corpus.read())]
    is_own_csv = is_over_csv if is_of_heads else is_attention_csv
    require_free(files.outputs(is_own_csv), [path for path in read if path.exists()], force=force)
    if steps is not None:
        if corpus is not None or any(option is not None for option in chosen):
            raise UsageError("--steps shows a row of one head: it goes with a text, --html and --json alone")
        _show_steps(open_model(source, device, without), texts, steps, files, as_json=as_json)
        return
    if corpus is not None and is_of_heads:
        if any(option not in (None, 0) for option in (*texts, *chosen, files.npz, files.svg)):
            raise UsageError("--over without a text goes with no options of one but --csv, --html and --json")
        show_over(corpus.measure(open_model(source, device, without)), files.csv, files.html, as_json=as_json)
        return
    if corpus is not None and files.html is None:
        raise UsageError("a text and --over go together with --html: leave out the text, or write a page")
    model = open_model(source, device, without)
    saved = chosen.of(texts.attend(model), model)
    behaviour = None if corpus is None else corpus.measure(model)
    with progress_bar("{task.description}", "writing", of_bytes=False) as tell:
        files.write(saved, behaviour, tell)
    _print(saved, files.given(), as_json=as_json)


def _show_steps(model: Model, texts: _Texts, wanted: str, files: _Files, *, as_json: bool) -> None:
    """Print one row of a head step by step, or write its page."""
    place, _, query = wanted.rpartition(":")
    layer, _, head = place.rpartition(".")
    if not layer or not head.isdigit() or not query.removeprefix("-").isdigit():
        raise UsageError(f'--steps {wanted}: write a head and the number of a token, as in "3.2:5"')
    attended = [*texts.attend(model)]
    if len(attended) > 1 or any(path is not None for path in files._replace(html=None)):
        raise UsageError("--steps shows a row of one text: it goes with a text, --html and --json alone")
    found = attended[0].steps(layer, int(head), query=int(query))
    if files.html is not None:
        found.page(files.html)
    if as_json:
        write_output(json.dumps(found.record(), ensure_ascii=False) + "\n")
        return
    console = Terminal(soft_wrap=True)
    for path in files.given():
        console.print(f"written: {path}")
    for table in () if files.given() else found.tables(_MOST_KEYS):
        console.print(table.title)
        console.print(render_table(table))
        console.print(table.caption)


def _page(saved: Sequence[Saved], behaviour: OverText | None, tell: Told) -> AttentionPage:
    notes = {} if behaviour is None else head_notes(behaviour)
    page = join_pages([one.page(notes, tell) for one in saved])
    return page if behaviour is None else replace(page, notes=(notes_origin(behaviour.behaviour),))


def _one_head(saved: Sequence[Saved]) -> tuple[ViewedKind, int, int, str]:
    """The head of a picture: its kind of attention, its place there, and a title."""
    heads = [(part, head) for one in saved for part in one.parts for head in part.heads]
    if len(heads) != 1:
        raise UsageError(
            f"a picture shows one head, and {len(heads)} are chosen: give one of each with --kind, --layers "
            "and --heads, and one text"
        )
    ((part, head),) = heads
    (kind,) = saved[0].page().texts[0].kinds
    return kind, 0, 0, f"{saved[0].attention.model}, {part.stack.kind} layer {part.layer.number}, head {head}"


def _print(saved: Sequence[Saved], written: Sequence[Path], *, as_json: bool) -> None:
    """Print the weights as JSON, or which files are written, or the strongest looks."""
    if as_json:
        for one in saved:
            for piece in json_pieces(one):
                write_output(piece)
            write_output("\n")
        return
    console = Terminal(soft_wrap=True)
    for path in written:
        console.print(f"written: {path}")
    for one in saved:
        if one.writer is not None:
            console.print(render_table(written_tokens(one.parts, one.writer)))
        elif not written:
            console.print(render_table(strongest_looks(one.parts)))
