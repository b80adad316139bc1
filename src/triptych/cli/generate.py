"""`triptych generate`."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from triptych.cli.failures import say
from triptych.cli.options import (
    check_attention,
    load_model,
    refuse_options,
    special_tokens_of,
    token_ids,
)
from triptych.cli.signatures import Options
from triptych.cli.terminal import print_json, read_text, text_or_file, write_output
from triptych.errors import UsageError
from triptych.model import Model, load
from triptych.running.decoding import Continuation
from triptych.running.opening import TextIds
from triptych.running.text import Text, iterate_file
from triptych.seeing.attending import attend_tokens, head_records

# Number of prompts of a file per batch; a batch is printed at its end.
_PROMPTS_AT_A_TIME = 256


def generate(
    model: str,
    prompt: str | None = None,
    *,
    file: Path | None = None,
    ids: str | None = None,
    literal: bool = False,
    generating: Annotated[
        Options,
        "Generating",
        Model.generate,
        "max_new_tokens temperature top_k top_p min_p repetition_penalty generation_config seed num_samples "
        "beam_size alpha stop max_prompt_tokens chat",
    ],
    opening: Annotated[
        Options,
        "Model",
        load,
        "device dtype engine precision offline strict family adapter",
    ],
    without: str | None = None,
    attention: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Continue a text with a language model.

    Prints the continuation without the prompt; for a single prompt, while it is generated.

    Options:
        prompt: The text to continue; - reads all of standard input. If a file has that name, its lines are
            the prompts, as with --file.
        file: Prompts, one per line, continued in batches.
        attention: With --json: add the attention weights of the generated tokens, of some heads: 3.2 is head
            2 of layer 3, 3 a layer, *.2 a pattern. May be repeated.
        as_json: Print one JSON object per prompt, with tokens and log-probabilities.

    Examples:
        triptych generate gpt2 "ROMEO:" --temperature 0.8 --max-new-tokens 40
        triptych generate gpt2 --file prompts.txt --num-samples 3 --temperature 1 --json
    """
    check_attention(attention, None, opening["engine"], as_json=as_json)
    if (
        prompt is not None
        and file is None
        and isinstance(named := text_or_file(prompt, "prompt"), Path)
    ):
        prompt = None
        file = named
    given_ids = token_ids(ids)
    refuse_options(
        {"literal": literal and ids is not None}, "goes with a text, not with --ids"
    )
    prompts = _prompts(prompt, file, given_ids)
    generating["special_tokens"] = special_tokens_of(literal)
    opened = load_model(model, without, opening)
    if as_json:
        if attention:
            opened.reader.require_heads(attention)
        for given, found in _in_batches(opened, prompts, generating):
            print_json(_json_record(opened, given, found, attention, generating))
    elif file is None and generating["num_samples"] == generating["beam_size"] == 1:
        parts = opened.generate(next(prompts), **generating, stream=True)
        for text in parts:
            write_output(text)
        write_output("\n")
        _say_end(opened, parts.finish)
    else:
        for number, (_, found) in enumerate(
            _in_batches(opened, prompts, generating), start=1
        ):
            for sample, one in enumerate(found, start=1):
                write_output(f"== prompt {number}, text {sample} ==\n{one.text}\n")
                _say_end(opened, one.finish, f"prompt {number}: ")


def _say_end(model: Model, finish: str | None, which: str = "") -> None:
    """Report the end of a text at the model's last position, before the requested number of tokens."""
    if finish == "positions":
        say(
            f"{which}ended at the {model.generator().model.context:,} positions of the model, before "
            "--max-new-tokens"
        )


def _prompts(
    prompt: str | None, file: Path | None, ids: list[int] | None
) -> Iterator[Text]:
    """Yield the prompt of the command line or standard input, or the lines of a file."""
    if [prompt, file, ids].count(None) != 2:
        raise UsageError(
            "give either a prompt (- for standard input), --file with prompts, or --ids"
        )
    if file is not None:
        return iterate_file(file)
    return iter([read_text(str(prompt), "prompt") if ids is None else ids])


def _in_batches(
    model: Model, prompts: Iterator[Text], generating: Options
) -> Iterator[tuple[Text, list[Continuation]]]:
    """Yield each prompt with its continuations in order."""
    while batch := list(islice(prompts, _PROMPTS_AT_A_TIME)):
        found = model.generate(batch, **generating)
        lists = [[one] for one in found] if generating["num_samples"] == 1 else found
        yield from zip(batch, lists, strict=True)


def _json_record(
    model: Model,
    prompt: Text,
    found: Sequence[Continuation],
    wanted: Sequence[str],
    generating: Options,
) -> dict[str, Any]:
    attention = (
        _attention_records(model, prompt, found, wanted, generating)
        if wanted
        else [{}] * len(found)
    )
    return {
        "prompt": prompt,
        "text": found[0].text,
        "finish": found[0].finish,
        "continuations": [
            {
                "text": one.text,
                "finish": one.finish,
                "score": one.score,
                "tokens": list(one.pieces),
                "ids": list(one.ids),
                "log_probs": list(one.log_probs),
                **own,
            }
            for one, own in zip(found, attention, strict=True)
        ],
    }


def _attention_records(
    model: Model,
    prompt: Text,
    found: Sequence[Continuation],
    wanted: Sequence[str],
    generating: Options,
) -> Iterator[dict[str, Any]]:
    """The weights with which the text was read before each token, for each continuation."""
    generator = model.generator()
    ids = generator.encode(
        prompt, chat=generating["chat"], special_tokens=generating["special_tokens"]
    )
    for one in found:
        if not one.ids:
            yield {"attention": []}
            continue
        read = [*ids, *one.ids[:-1]]
        most = generator.model.context
        if most is not None and len(read) > most:
            raise UsageError(
                f"--attention: the text has {len(read):,} tokens, and the model reads {most:,} at once: "
                "lower --max-new-tokens"
            )
        (attention,) = attend_tokens(model.reader, [TextIds(tuple(read))], len(read))
        yield {
            "attention": [
                *head_records(attention.parts(wanted), len(ids) - 1, one.pieces)
            ]
        }
