"""Translation, generation and evaluation of a model, by the engine named in its options."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from triptych.converting.engines import (
    evaluate_text,
)
from triptych.converting.engines import make_generator as make_generator
from triptych.converting.engines import make_translator as make_translator
from triptych.errors import UsageError
from triptych.literals import (
    BleuTokenizer,
    FileSettings,
    SpecialTokens,
    Stop,
    check_choices,
)
from triptych.progress import Progress
from triptych.running.decoding import (
    Evaluation,
    GenerationOptions,
    Likelihood,
    TextGenerator,
    Translation,
    Translator,
    continue_changed,
    evaluate_translations,
)
from triptych.running.measuring import (
    Classification,
    given_lines,
    given_texts,
    labelled_texts,
    measure_classification,
)
from triptych.running.opened_source import Opened
from triptych.running.opening import Asked as Asked
from triptych.running.opening import GenerationConfig, listed
from triptych.running.text import (
    GivenText,
    as_lines,
    as_texts,
    refuse_file_name,
)


def translate_with(
    translator: Translator, text: str | Sequence[str], *, stream: bool
) -> Translation | list[Translation] | Iterator[Translation]:
    """Translate with a translator and stop its processes, unless translations are streamed."""
    if stream:
        return translator.translate_stream(as_lines(text))
    with translator:
        return translator.translate(text)


@check_choices
def translator_of(
    opened: Opened,
    *,
    stop: Stop | None = None,
    glossary: Mapping[str, str] | None = None,
    workers: int = 1,
    special_tokens: SpecialTokens = "tokens",
    **search: Any,
) -> Translator:
    """Make a translator; `search` are arguments of `Reader.search_options`."""
    found = make_translator(
        opened.to_run, opened.options, workers, glossary, stop, **search
    )
    return found.with_special_tokens(special_tokens)


def generate(
    opened: Opened,
    generator: TextGenerator,
    text: Any,
    asked: Asked,
    settings: FileSettings,
    *,
    stream: bool,
    seed: int,
    num_samples: int,
    alpha: float,
    stop: str | Sequence[str],
    max_prompt_tokens: int | None,
    chat: bool,
    special_tokens: SpecialTokens,
) -> Any:
    """Continue a text, or several; `asked` are the arguments that override settings of the files."""
    file = opened.to_run.generation if settings == "follow" else GenerationConfig()
    file.require_followed(asked)
    if asked.beam_size == 1:
        _refuse_given("beam_size above 1", alpha=alpha or None)
    try:
        sampling = file.sampling(asked)
        options = GenerationOptions(
            sampling=sampling,
            seed=seed,
            num_samples=num_samples,
            beam_size=asked.beam_size,
            alpha=alpha,
            stop_texts=(stop,) if isinstance(stop, str) else tuple(stop),
            max_prompt_tokens=max_prompt_tokens,
            **file.lengths(asked),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if sampling.temperature == 0:
        _refuse_given(
            "temperature above 0",
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
        )
    given = as_texts(refuse_file_name(text))
    file.say(asked, sampling)
    if stream:
        if not given.is_one:
            raise UsageError(
                "stream=True continues one text: give a string, or its token ids"
            )
        if options.beam_size > 1 or num_samples > 1:
            raise UsageError(
                "stream=True gives one text without a beam: leave out beam_size and num_samples"
            )
        return generator.stream(
            given.texts[0], options, chat=chat, special_tokens=special_tokens
        )
    ids = generator.encode_prompts(
        given.texts, chat=chat, special_tokens=special_tokens
    )
    continued = continue_changed(ids, generator, options, opened.changes)
    found = [one[0] if num_samples == 1 else one for one in continued]
    return found[0] if given.is_one else found


def evaluate(
    opened: Opened,
    text: GivenText | Path | Sequence[GivenText] | None,
    references: str | Path | Sequence[str] | None,
    labels: str | int | Path | Sequence[str | int] | None,
    *,
    context: int | None,
    stride: int | None,
    beam_size: int | None,
    alpha: float | None,
    stop: Stop | None,
    bleu_tokenize: BleuTokenizer | None,
    workers: int,
    special_tokens: SpecialTokens,
    progress: Progress,
) -> Likelihood | Evaluation | Classification:
    """Score the prediction of a text, its translation if there are references, or the classes of texts."""
    # Options without a meaning for the kind of evaluation are refused.
    searched: Mapping[str, Any] = {
        "beam_size": beam_size,
        "alpha": alpha,
        "stop": stop,
        "bleu_tokenize": bleu_tokenize,
        "workers": None if workers == 1 else workers,
    }
    if labels is not None:
        _refuse_given("a translation", references=references, **searched)
        _refuse_given("a text to predict", context=context, stride=stride)
        if opened.options.engine not in (None, "triptych", "auto"):
            raise UsageError(
                f"engine {opened.options.engine} runs no heads of classes: leave it out"
            )
        labelled = labelled_texts(opened.reader, text, labels)
        return measure_classification(
            opened.reader, labelled, special_tokens, partial(progress, "scoring")
        )
    if text is None:
        raise UsageError("give a text, or labels with their texts")
    if not opened.to_run.why_no_classes:
        raise UsageError(
            f"{opened.name} gives a text one class of {listed(opened.to_run.labels or ())}: give labels"
        )
    if references is not None:
        _refuse_given(
            "a text to predict, without references", context=context, stride=stride
        )
        translator = translator_of(
            opened,
            stop=stop,
            workers=workers,
            special_tokens=special_tokens,
            beam_size=beam_size,
            alpha=alpha,
        )
        sources = given_texts(opened.reader, text)
        right = given_lines(references)
        tell = partial(progress, "translating")
        return evaluate_translations(translator, sources, right, tell, bleu_tokenize)
    _refuse_given("references", **searched)
    documents = given_texts(opened.reader, text)
    return evaluate_text(
        opened.to_run,
        documents,
        opened.options,
        context,
        stride,
        progress,
        special_tokens,
    )


def _refuse_given(with_what: str, **options: Any) -> None:
    """Raise UsageError if an option is given without its required option."""
    if found := next(
        (name for name, value in options.items() if value is not None), None
    ):
        raise UsageError(f"{found} goes with {with_what}: leave it out")
