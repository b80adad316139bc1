"""`triptych shortlist`."""

from pathlib import Path
from typing import Annotated

from triptych.cli.failures import say
from triptych.cli.options import load_model
from triptych.cli.outputs import Output, is_remembered, remember, require_free
from triptych.cli.signatures import Options
from triptych.cli.terminal import print_json, training_display
from triptych.model import Model, load


def shortlist(
    model: str,
    *,
    out: Path,
    source: Path | None = None,
    target: Path | None = None,
    learning: Annotated[Options, "Options", Model.shortlist, "most frequent"],
    opening: Annotated[Options, "Model", load, "languages offline strict adapter"],
    force: bool = False,
    as_json: bool = False,
) -> None:
    """List the target tokens that each source token may become.

    With the list (`--shortlist FILE` of translate, evaluate and distil) the output layer computes only the
    tokens that a sentence may use. `convert --to ctranslate2 --shortlist FILE` writes it for CTranslate2.

    Options:
        out: The output file. An existing one is replaced only if triptych wrote it and it is unchanged.
        source: Text to learn from, one sentence per line. Default: the text that the run was trained on.
        target: Its translations, line by line.

    Examples:
        triptych shortlist runs/mine --out shortlist.txt
        triptych shortlist runs/mine --source train.de --target train.en --out shortlist.txt
    """
    read = [Path(model), *(path for path in (source, target) if path is not None)]
    require_free([Output(out, is_remembered)], read, force=force)
    opened = load_model(model, opening={"device": "cpu", **opening})
    found = opened.shortlist(
        out, source, target, **learning, display=training_display()
    )
    remember(out)
    if as_json:
        print_json({"shortlist": str(out), "size": found.size, "share": found.share})
        return
    say(
        f"written: {out}. A held-out sentence may use {found.size:,.0f} tokens of "
        f"{opened.reader.tokenizers.target.vocab_size:,} on average; {found.share:.2%} of the tokens of its "
        "translation are among them"
    )
