"""`triptych generate`."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from triptych.attending import read_attention
from triptych.attending.saving import head_records
from triptych.cli.groups import grouped
from triptych.cli.options import (
    MODEL,
    DeviceOption,
    DtypeOption,
    EngineOption,
    PrecisionOption,
    WithoutOption,
    open_model,
    torch_dtype,
)
from triptych.cli.selection import HeadSelection, parse_index
from triptych.cli.terminal import read_text, write_output
from triptych.decoding import Continuation, GenerationOptions, SamplingOptions, TextGenerator
from triptych.errors import UsageError
from triptych.face import Model
from triptych.opening import TextIds
from triptych.text import iterate_file

# Prompts of a file that are read and continued before the first are printed.
_PROMPTS_AT_A_TIME = 256


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]
Prompt = Annotated[str | None, typer.Argument(help="The text to continue; - reads all of standard input.")]
FileOption = Annotated[
    Path | None, typer.Option("--file", help="Prompts, one per line, continued in batches.")
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", min=1, help="Longest continuation in tokens.")
]
MaxPromptTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-prompt-tokens",
        min=1,
        help="Longest prompt in tokens. Default: the model's positions, or 32768 where they set no limit.",
    ),
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0, help="0 takes the most probable token every time.")
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", min=1, help="Draw from the K most probable tokens only.")
]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", help="Draw from the fewest tokens whose probabilities sum to P.")
]
MinPOption = Annotated[
    float | None, typer.Option("--min-p", help="Draw from tokens at least P times as probable as the best.")
]
RepetitionPenaltyOption = Annotated[
    float,
    typer.Option("--repetition-penalty", help="Above 1, tokens already in the text are less probable."),
]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed", help="The same seed gives the same text, whatever the other prompts are (on x86-64 CPUs)."
    ),
]
NumSamplesOption = Annotated[
    int, typer.Option("--num-samples", min=1, help="Continuations per prompt; with --beam the best ones.")
]
BeamOption = Annotated[int, typer.Option("--beam", min=1, help="Beam size; 1 is no beam search.")]
AlphaOption = Annotated[
    float, typer.Option("--alpha", min=0, help="With --beam: exponent of the length penalty.")
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", help="End before this string. May be repeated.")
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="Put the prompt into the chat template of the model's tokenizer.")
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object per prompt, with tokens and log-probabilities."),
]
AttentionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--attention",
        help="With --json: add the attention weights of the generated tokens, as LAYER:HEAD (numbers "
        "from 0, or 'all'). May be repeated.",
    ),
]


class Continuing(NamedTuple):
    """How texts are continued."""

    max_new_tokens: MaxNewTokensOption = 128
    temperature: TemperatureOption = 0.0
    top_k: TopKOption = None
    top_p: TopPOption = None
    min_p: MinPOption = None
    repetition_penalty: RepetitionPenaltyOption = 1.0
    seed: SeedOption = 0
    num_samples: NumSamplesOption = 1
    beam: BeamOption = 1
    alpha: AlphaOption = 0.0
    stop: StopOption = None
    max_prompt_tokens: MaxPromptTokensOption = None

    def options(self) -> GenerationOptions:
        """The library's options."""
        try:
            sampling = SamplingOptions(
                self.repetition_penalty, self.temperature, self.top_k, self.top_p, self.min_p
            )
            return GenerationOptions(
                self.max_new_tokens,
                sampling,
                self.seed,
                self.num_samples,
                self.beam,
                self.alpha,
                stop_texts=tuple(self.stop or ()),
                max_prompt_tokens=self.max_prompt_tokens,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None


class RunBy(NamedTuple):
    """What the model is run by, where, and in which numbers."""

    precision: PrecisionOption = "fp32"
    engine: EngineOption = "triptych"
    device: DeviceOption = "auto"
    dtype: DtypeOption = None
    without: WithoutOption = None


@grouped
def generate(
    source: ModelArgument,
    continuing: Continuing,
    by: RunBy,
    prompt: Prompt = None,
    file: FileOption = None,
    chat: ChatOption = False,
    as_json: JsonOption = False,
    attention: AttentionOption = None,
) -> None:
    """Continue a text with a language model.

    Prints the continuation without the prompt, of a single prompt as it comes.
    """
    if attention and not as_json:
        raise UsageError("--attention goes with --json")
    options = continuing.options()
    if attention and by.engine != "triptych":
        raise UsageError(f"--attention goes with --engine triptych: {by.engine} gives no attention weights")
    prompts = _prompts(prompt, file)
    model = open_model(
        source,
        by.device,
        by.without,
        precision=by.precision,
        engine=by.engine,
        dtype=torch_dtype(by.dtype),
    )
    generator = model.generator()
    wanted = [_selection(text, generator) for text in attention or []]
    if as_json:
        for given, found in _continued(generator, prompts, options, chat):
            record = _record(model, generator, given, found, wanted, chat)
            write_output(json.dumps(record, ensure_ascii=False) + "\n")
    elif file is None and options.num_samples == options.beam_size == 1:
        _stream(generator, next(prompts), options, chat)
    else:
        for number, (_, found) in enumerate(_continued(generator, prompts, options, chat), start=1):
            for sample, one in enumerate(found, start=1):
                write_output(f"== prompt {number}, text {sample} ==\n{one.text}\n")


def _prompts(prompt: str | None, file: Path | None) -> Iterator[str]:
    """The prompts: one of the command line or standard input, or the lines of a file."""
    if (prompt is None) == (file is None):
        raise UsageError("give either a prompt (- for standard input) or --file with prompts")
    if file is not None:
        return iterate_file(file)
    text = read_text(str(prompt), "prompt")
    if not text:
        raise UsageError("the prompt is empty: give it some text")
    return iter([text])


def _continued(
    generator: TextGenerator, prompts: Iterator[str], options: GenerationOptions, chat: bool
) -> Iterator[tuple[str, list[Continuation]]]:
    """Each prompt with its continuations, in their order."""
    while batch := list(islice(prompts, _PROMPTS_AT_A_TIME)):
        yield from zip(batch, generator.generate(batch, options, chat=chat), strict=True)


def _stream(generator: TextGenerator, prompt: str, options: GenerationOptions, chat: bool) -> None:
    for text in generator.stream(prompt, options, chat=chat):
        write_output(text)
    write_output("\n")


def _selection(text: str, generator: TextGenerator) -> HeadSelection:
    layer, colon, head = text.partition(":")
    if not colon:
        raise UsageError(f"--attention {text}: write LAYER:HEAD, each a number from 0 or 'all'")
    counts = generator.heads_by_layer
    chosen = parse_index(layer, len(counts), "layer", text)
    most = min(counts) if chosen is None else counts[chosen]
    return HeadSelection("decoder", chosen, parse_index(head, most, "head", text))


def _record(
    model: Model,
    generator: TextGenerator,
    prompt: str,
    found: Sequence[Continuation],
    wanted: Sequence[HeadSelection],
    chat: bool,
) -> dict[str, Any]:
    attention = _attention(model, generator, prompt, found, wanted, chat) if wanted else [{}] * len(found)
    return {
        "prompt": prompt,
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


def _attention(
    model: Model,
    generator: TextGenerator,
    prompt: str,
    found: Sequence[Continuation],
    wanted: Sequence[HeadSelection],
    chat: bool,
) -> Iterator[dict[str, Any]]:
    """For each continuation the weights with which the text was read before each of its tokens."""
    ids = generator.encode(prompt, chat=chat)
    for one in found:
        if not one.ids:
            yield {"attention": []}
            continue
        read, most = [*ids, *one.ids[:-1]], generator.model.context
        if most is not None and len(read) > most:
            raise UsageError(
                f"--attention: the text has {len(read):,} tokens, and the model reads {most:,} at once: "
                "lower --max-new-tokens"
            )
        (attention,) = read_attention(model.reader, [TextIds(tuple(read))], len(read))
        parts = [part for selection in wanted for part in selection.of(attention)]
        yield {"attention": [*head_records(parts, len(ids) - 1, one.pieces)]}
