"""`triptych lens`."""

from typing import Annotated

from triptych.cli.options import (
    load_model,
    refuse_options,
    special_tokens_of,
    token_ids,
)
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json, print_table, read_text
from triptych.errors import UsageError
from triptych.model import Model, load


def lens(
    model: str,
    text: str | None = None,
    *,
    ids: str | None = None,
    literal: bool = False,
    token: str | None = None,
    against: str | None = None,
    position: int = -1,
    top: int | None = None,
    show_all: bool = False,
    reading: Annotated[Options, "Options", Model.lens, "target max_tokens"],
    opening: Annotated[
        Options, "Model", load, "device dtype languages offline strict family adapter"
    ],
    without: str | None = None,
    as_json: bool = False,
) -> None:
    """Show what each layer would predict, and what adds to a logit.

    Prints the most probable tokens after each block, by the last norm and the output table. Given --token,
    prints its logit as a sum over the embedding, every head, every feed-forward layer and the biases; given
    --against as well, the difference of two logits.

    Options:
        text: The text to read; - reads all of standard input.
        token: The token of the logit, including its initial space: " three".
        against: The token whose logit is subtracted.
        position: The token at whose position the model predicts. Default: -1 (the last).
        top: Number of tokens after each block (default 3), or of parts of the logit (default 25).
        show_all: Show all parts of the logit, in the order of computation.
        as_json: Print one JSON object, with all parts.

    Examples:
        triptych lens demo "Der Zug kommt um halb vier an."
        triptych lens demo "Der Zug kommt um halb vier an." --position 9 --token " three" --against " four"
    """
    # Options without an effect are refused before the model is opened.
    given: str | list[int] | None = token_ids(ids)
    if text is not None and given is None:
        given = read_text(text, "text")
    elif text is not None or given is None:
        raise UsageError("give either a text (- for standard input), or --ids")
    refuse_options(
        {"literal": literal and ids is not None}, "goes with a text, not with --ids"
    )
    if token is None:
        refuse_options(
            {"against": against, "show_all": show_all}, "goes with --token, a logit"
        )
    if show_all:
        refuse_options({"top": top}, "does not go with --all, all parts")
    found = load_model(model, without, opening).lens(
        given, **reading, special_tokens=special_tokens_of(literal)
    )
    if token is not None:
        sum_of_parts = found.attribution(token, against, position)
        if as_json:
            print_json({"model": found.model, **sum_of_parts.record()})
            return
        count = None if show_all else (25 if top is None else top)
        print_table(sum_of_parts.table(count), Terminal(soft_wrap=True))
        return
    predicted = found.top(3 if top is None else top, position)
    if as_json:
        record = {"tokens": found.tokens, "stages": predicted.rows()}
        print_json({"model": found.model, **record})
        return
    print_table(predicted.table(), Terminal(soft_wrap=True))
