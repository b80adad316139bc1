"""Decoding engines: triptych or CTranslate2.

CTranslate2 replaces triptych's search. A model is converted once (`converting.ctranslate2`) and kept in a
cache folder between runs. Scores are defined as in triptych: CTranslate2 returns log-probabilities of all
hypotheses of a beam, and triptych's length penalty is then applied to them.

Source: github.com/OpenNMT/CTranslate2, version 4.8.
"""

import hashlib
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import numpy
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.converting.conversion_cache import converted
from triptych.converting.ctranslate2 import write_ct2_translator, write_generator
from triptych.converting.ctranslate2_search import (
    TAKEN_BY_AUTO,
    CTranslate2Searcher,
    SearchLimits,
    compute_type,
    load_folder,
    require_beam_alone,
    require_full_stop,
)
from triptych.converting.plain import max_positions
from triptych.converting.target_formats import require_recipe
from triptych.core.models import (
    Block,
    LanguageModel,
    find_config,
    find_device,
    has_fast_bf16,
    require_lengths,
)
from triptych.errors import EngineNote, TriptychError, UsageError
from triptych.literals import EngineName, Precision, SpecialTokens, Stop
from triptych.progress import Progress, untold
from triptych.running.changing import is_patched
from triptych.running.decoding import (
    Decoder,
    Ends,
    Finish,
    GenerationOptions,
    Hypotheses,
    Hypothesis,
    Likelihood,
    NewToken,
    SamplingOptions,
    SearchOptions,
    TextGenerator,
    Translator,
    batches_of_like_length,
    best_first,
    check_prompts,
    check_vocabulary,
    collected,
    length_penalty,
    limit_of_prompt,
    measure_likelihood,
    never_ends,
)
from triptych.running.opening import Reader
from triptych.running.options import Options, require_ctranslate2


def _find_place(device: str) -> tuple[Literal["cpu", "cuda"], int]:
    """Return CTranslate2's device and its index."""
    import ctranslate2

    found = find_device(device)
    count = ctranslate2.get_cuda_device_count()
    if found.type == "cuda" and (found.index or 0) < count:
        return "cuda", found.index or 0
    if found.type == "cuda" and device != "auto":
        raise UsageError(
            f"device {device!r} is given, but CTranslate2 sees {count} GPUs here"
        )
    return "cpu", 0


def _load_converted(
    name: str,
    model: nn.Module,
    texts: Sequence[str],
    write: Callable[[Path], object],
    precision: Precision,
    device: str,
    threads: tuple[int, int],
) -> tuple[Any, Path]:
    """Build CTranslate2's class `name` for a model, converting the model unless it is in the cache folder.

    The name in the cache folder ends in a hash of `texts` (configuration and tokenizers) and a hash of all
    weights and `texts`. Returns the folder as well; see `load_folder` for `threads`.
    """
    require_ctranslate2()
    import ctranslate2

    place = _find_place(device)
    compute_type(precision, place[0])  # refused before a conversion
    joined = "\n".join(texts).encode("utf-8", "surrogatepass")
    configuration = hashlib.sha256(joined).hexdigest()[:16]
    own_name = (
        f"ctranslate2-{ctranslate2.__version__}-{configuration}-{hash_of(model, texts)}"
    )
    with converted(own_name, write) as folder:
        return load_folder(name, folder, precision, place, threads), folder


def hash_of(model: nn.Module, texts: Iterable[str]) -> str:
    """Return the hexadecimal SHA-256 of a model's weights, with names, and of texts."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        )
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(f"{len(encoded)}\n".encode() + encoded)
    return digest.hexdigest()


def make_searcher(
    run: Reader,
    options: SearchOptions,
    precision: Precision,
    workers: int,
    device: str,
) -> CTranslate2Searcher:
    """Make a search with CTranslate2, after converting the model unless it is in the cache folder."""
    require_full_stop(options)
    tokenizers = run.tokenizers
    model = run.encoder_decoder
    roomy = run.with_decoding(
        run.decoding.model_copy(update={"max_extra_tokens": options.max_extra_tokens})
    )
    listed = () if run.shortlist is None else (run.shortlist.as_text(tokenizers),)
    texts = (
        str(max_positions(model, options.max_extra_tokens)),
        find_config(model).model_dump_json(),
        tokenizers.source.to_json(),
        tokenizers.target.to_json(),
        *listed,
    )
    translator, folder = _load_converted(
        "Translator",
        model,
        texts,
        lambda folder: write_ct2_translator(roomy, folder, "float32"),
        precision,
        device,
        (workers, 1),
    )
    limits = SearchLimits(
        model.max_source_tokens, model.max_target_tokens, run.shortlist is not None
    )
    return CTranslate2Searcher(
        translator, tokenizers, options, limits, run.translator, folder
    )


@final
class CTranslate2Generator(Decoder[GenerationOptions]):
    """Greedy decoding and beam search of a decoder-only model with CTranslate2."""

    library = "ctranslate2"

    max_tokens: (
        int | None
    )  # maximum length of a text (`LanguageModel.context`); texts are never read again

    def __init__(
        self,
        model: LanguageModel,
        precision: Precision = "fp32",
        device: str = "auto",
        num_tokens: int | None = None,
        batch_rows: int = 32,
    ) -> None:
        """Load a model, after converting it unless it is in the cache folder."""
        self.options = GenerationOptions()
        self.max_tokens = model.context
        self._batch_rows = batch_rows
        never = range(
            model.vocab_size if num_tokens is None else num_tokens, model.vocab_size
        )
        self._never = [[str(token)] for token in never] or None
        texts = [str(model.architecture), *(_in_full(block) for block in model.blocks)]
        threads = 1, torch.get_num_threads()
        self._generator, _ = _load_converted(
            "Generator",
            model,
            texts,
            partial(write_generator, model),
            precision,
            device,
            threads,
        )

    def decode(
        self,
        texts: Sequence[Sequence[int]],
        options: GenerationOptions | None = None,
        ends: Ends = never_ends,
    ) -> Hypotheses:
        options = options or self.options
        self._check(texts, options)
        if options.beam_size > 1:
            return [self._beam_search(ids, options) for ids in texts]
        found: Hypotheses = [[] for _ in texts]
        # If prompts differ in length, CTranslate2 counts the ends of the longer prompts as new tokens.
        for batch in batches_of_like_length(texts, None, self._batch_rows, pads=False):
            grown = self._greedy([(i, texts[i]) for i in batch], options, ends)
            for i in batch:
                found[i] = [collected(grown[i])]
        return found

    def stream(
        self, ids: Sequence[int], options: GenerationOptions, ends: Ends
    ) -> Generator[NewToken, None, Finish | None]:
        """Continue a prompt without a beam and yield each new token; return why it ended."""
        self._check([ids], options)
        limit = limit_of_prompt(len(ids), options.max_new_tokens, self.max_tokens)
        steps = self._generator.generate_tokens(
            [str(token) for token in ids],
            max_length=limit,
            end_token=list(options.stop_ids),
            suppress_sequences=self._never,
            return_log_prob=True,
        )
        # The generator of CTranslate2 stops by itself only at end tokens and at the limit.
        for length, step in enumerate(steps, start=1):
            new = _new_token(0, step, length, limit, options, ends)
            yield new
            if new.finish is not None:
                return new.finish
        return None

    def logits(
        self, ids: Int[Tensor, "rows length"]
    ) -> Float[Tensor, "rows length vocab"]:
        """Compute logits of the next token at each position of `ids`, on the CPU and in fp32."""
        found = self._generator.forward_batch(
            [[str(token) for token in row] for row in ids.tolist()]
        )
        return torch.as_tensor(numpy.asarray(found))

    def _check(
        self, prompts: Sequence[Sequence[int]], options: GenerationOptions
    ) -> None:
        # Every option of `GenerationOptions` is either followed below or refused here.
        if options.num_top:
            raise UsageError(
                "this engine tells no other tokens of a place: ask for none, or take triptych's"
            )
        if options.sampling != SamplingOptions():
            raise UsageError(
                "--engine ctranslate2 takes the most probable tokens and draws none: leave out temperature, "
                "filters and repetition penalty (settings of a file: generation_config ignore), or use "
                "--engine triptych"
            )
        if options.max_length is not None:
            raise UsageError(
                "--engine ctranslate2 does not follow max_length of generation_config.json: give "
                "--max-new-tokens"
            )
        check_prompts(prompts, self.max_tokens, options.max_prompt_tokens)

    def _greedy(
        self,
        prompts: Sequence[tuple[int, Sequence[int]]],
        options: GenerationOptions,
        ends: Ends,
    ) -> dict[int, list[NewToken]]:
        limits = [
            limit_of_prompt(len(ids), options.max_new_tokens, self.max_tokens)
            for _, ids in prompts
        ]
        grown: dict[int, list[NewToken]] = {number: [] for number, _ in prompts}

        def take(step: Any) -> bool:
            number = prompts[step.batch_id][0]
            tokens = grown[number]
            # A finished prompt may get further steps while other prompts of its batch run.
            if tokens and tokens[-1].finish is not None:
                return True
            limit = limits[step.batch_id]
            tokens.append(
                _new_token(number, step, len(tokens) + 1, limit, options, ends)
            )
            return tokens[-1].finish is not None

        self._ask([ids for _, ids in prompts], max(limits), options, callback=take)
        return grown

    def _beam_search(
        self, prompt: Sequence[int], options: GenerationOptions
    ) -> list[Hypothesis]:
        limit = limit_of_prompt(len(prompt), options.max_new_tokens, self.max_tokens)
        k = options.beam_size
        (result,) = self._ask(
            [prompt], limit, options, beam_size=k, num_hypotheses=k, length_penalty=0
        )
        found = []
        for ids in result.sequences_ids:
            # CTranslate2 returns only totals of a beam; scoring the text again gives every log-probability.
            ended = bool(ids) and ids[-1] in options.stop_ids
            texts = [[str(token) for token in (*prompt, *ids)]]
            (scored,) = self._generator.score_batch(texts, max_input_length=0)
            log_probs = tuple(scored.log_probs[-len(ids) :])
            total = sum(log_probs)
            own = tuple(ids[:-1] if ended else ids)
            score = total / length_penalty(len(log_probs), options.alpha)
            finish: Finish = (
                "length" if limit == options.max_new_tokens else "positions"
            )
            found.append(
                Hypothesis(own, total, score, log_probs, "token" if ended else finish)
            )
        return best_first(found)[: options.num_samples]

    def _ask(
        self,
        prompts: Sequence[Sequence[int]],
        limit: int,
        options: GenerationOptions,
        **more: Any,
    ) -> Any:
        return self._generator.generate_batch(
            [[str(token) for token in ids] for ids in prompts],
            max_length=limit,
            end_token=list(options.stop_ids),
            suppress_sequences=self._never,
            return_end_token=True,
            include_prompt_in_result=False,
            return_scores=True,
            **more,
        )


def _in_full(block: nn.Module) -> str:
    """Return a block's attention semantics as text with full precision, for the cache key."""
    assert isinstance(block, Block)
    semantics = block.self_attention.semantics
    frequencies = (
        None if semantics.rotary is None else semantics.rotary.frequencies.tolist()
    )
    return f"{semantics} {frequencies}"  # `str` of a tensor would round the frequencies


def _new_token(
    row: int, step: Any, length: int, limit: int, options: GenerationOptions, ends: Ends
) -> NewToken:
    token = step.token_id
    finish: Finish | None = None
    if token in options.stop_ids:
        finish = "token"
    elif ends(row, token):
        finish = "text"
    elif length == limit:
        finish = "length" if length == options.max_new_tokens else "positions"
    return NewToken(row, token, step.log_prob, finish)


def make_translator(
    opened: Reader,
    options: Options,
    workers: int = 1,
    glossary: Mapping[str, str] | None = None,
    stop: Stop | None = None,
    **search: Any,
) -> Translator:
    """Build the translator of an engine; `search` are further arguments of `Reader.search_options`."""
    # "auto" tries CTranslate2 on CPUs and falls back to triptych, with the reason as a note.
    if options.engine == "auto":

        def made(engine: EngineName) -> Translator:
            return make_translator(
                opened,
                replace(options, engine=engine),
                workers,
                glossary,
                stop,
                **search,
            )

        try:
            _require_fit_for_auto(options, glossary, search.get("num_best", 1))
            found = made("ctranslate2")
            note = TAKEN_BY_AUTO
        except (TriptychError, OSError) as error:  # OSError: no folder to convert to
            found = made("triptych")
            note = f"triptych translates: {error}"
        warnings.warn(f"engine auto: {note}", EngineNote, stacklevel=3)
        return found
    if options.engine == "triptych":
        _note_slow_precision(opened.encoder_decoder, options.precision)
        found = opened.translator(
            opened.search_options(stop=stop, **search),
            precision=options.precision,
            workers=workers,
        )
    else:
        require_ctranslate2()
        if opened.ensemble:
            raise UsageError("CTranslate2 runs one model: leave out the ensemble")
        require_recipe(opened)
        wanted = opened.search_options(stop=stop or "full", **search)
        require_beam_alone(wanted)
        searcher = make_searcher(
            opened, wanted, options.precision, workers, options.device
        )
        found = Translator(
            opened.encoder_decoder,
            opened.tokenizers,
            wanted,
            precision=options.precision,
            decoder=searcher,
        )
    return found if glossary is None else found.with_glossary(glossary)


def _require_fit_for_auto(
    options: Options, glossary: Mapping[str, str] | None, num_best: int
) -> None:
    """Raise `UsageError` where "auto" leaves a translation to triptych."""
    if find_device(options.device).type != "cpu":
        raise UsageError("CTranslate2 is taken on CPUs only")
    if glossary is not None:
        raise UsageError("CTranslate2 takes no glossary")
    if num_best > 1:
        raise UsageError("lists of the best translations are triptych's")


def _note_slow_precision(model: nn.Module, precision: Precision) -> None:
    if precision == "bf16" and not has_fast_bf16(next(model.parameters()).device.type):
        warnings.warn(
            "this device has no products in bfloat16: fp32 is faster here",
            EngineNote,
            stacklevel=4,
        )


def make_generator(opened: Reader, options: Options) -> TextGenerator:
    if options.engine == "auto":
        warnings.warn("engine auto: triptych generates", EngineNote, stacklevel=3)
    if options.engine != "ctranslate2":
        _note_slow_precision(opened.language_model, options.precision)
        return opened.generator(precision=options.precision)
    # The checks come before a conversion, which may take minutes.
    require_ctranslate2()
    model = opened.language_model
    tokenizer = opened.tokenizer
    check_vocabulary(model, tokenizer)
    decoder = CTranslate2Generator(
        model, options.precision, options.device, tokenizer.vocab_size
    )
    return TextGenerator(
        model,
        tokenizer,
        precision=options.precision,
        end_ids=opened.end_ids,
        begin_id=opened.begin_id,
        decoder=decoder,
    )


def evaluate_text(
    opened: Reader,
    documents: Sequence[str],
    options: Options | None = None,
    context: int | None = None,
    stride: int | None = None,
    progress: Progress = untold,
    special_tokens: SpecialTokens = "tokens",
) -> Likelihood:
    """Score a language model on texts; see `triptych.running.decoding.measure_likelihood`."""
    options = options or Options()
    if options.engine == "ctranslate2" and options.device not in ("auto", "cpu"):
        raise UsageError(
            f"--engine {options.engine} scores texts on the CPU: leave out --device {options.device}"
        )
    model = opened.language_model
    logits = None
    if options.engine == "auto":
        warnings.warn("engine auto: triptych scores", EngineNote, stacklevel=3)
    if options.engine == "ctranslate2":
        require_ctranslate2()
        if model.causal:  # otherwise `measure_likelihood` raises, without a conversion
            logits = CTranslate2Generator(model, "fp32", "cpu").logits
    elif is_patched(model):
        logits = partial(_logits_of_whole_texts, model)
    tokenizer = opened.tokenizer
    return measure_likelihood(
        model,
        tokenizer,
        documents,
        context,
        stride,
        progress,
        logits,
        special_tokens=special_tokens,
    )


def _logits_of_whole_texts(
    model: LanguageModel, read: Int[Tensor, "rows length"]
) -> Float[Tensor, "rows length vocab"]:
    """Compute logits of a patched causal model, which reads only texts of a fixed length.

    A scored text is read without its last token. Token 0 replaces the last token; earlier tokens do not
    attend to it.
    """
    length = read.shape[1] + 1
    require_lengths(model, {"decoder": (length, length)})
    logits: Tensor = model(F.pad(read, (0, 1))).logits[:, :-1]
    return logits
