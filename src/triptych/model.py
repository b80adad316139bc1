"""`load` and `Model`: a model with its attention layers and heads, for reading, running and changing.

A `Model` holds a source as opened so far, with its changes (`Opened`). Each verb imports the package for its
work when it is called and calls one function of it, so this module can be read and imported without the other
packages: `running` runs and changes a model, `seeing` measures heads, `rewriting` and `converting` write
models to files, and `training` distils models.

Overloads are for results whose type depends on an argument: one text gives one result, several a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, final, overload

from triptych.errors import UsageError
from triptych.literals import (
    Activation,
    BleuTokenizer,
    By,
    Documents,
    Dtype,
    EngineName,
    FileSettings,
    Instead,
    Into,
    Precision,
    Quantization,
    SpecialTokens,
    Stop,
    TargetFormat,
    check_choices,
)
from triptych.progress import Progress, untold

if TYPE_CHECKING:
    from typing import Unpack

    import torch
    from jaxtyping import Float
    from torch import Tensor

    from triptych.converting.conversion import Conversion
    from triptych.core.checkpoints.family import Family
    from triptych.core.heads import Head, Layer, Layers, Stack
    from triptych.core.places import Heads
    from triptych.keywords import GenerationKeywords, SearchKeywords
    from triptych.rewriting.certificate import Certificate
    from triptych.rewriting.functions import Rewrite
    from triptych.rewriting.opened_models import Check, Plan
    from triptych.rewriting.recipe import RewriteRecipe
    from triptych.running.decoding import (
        Continuation,
        Evaluation,
        Filling,
        Likelihood,
        StreamedText,
        TextGenerator,
        Translation,
        Translator,
    )
    from triptych.running.measuring import Classification
    from triptych.running.opened_source import Opened
    from triptych.running.opening import Reader
    from triptych.running.run import Run
    from triptych.running.text import Coverage, GivenText, Text, Tokenizer
    from triptych.seeing.adapter_effects import AdapterEffects
    from triptych.seeing.attending import Attention, AttentionBatch, OverText
    from triptych.seeing.composition import Composition
    from triptych.seeing.inspection import Inspection
    from triptych.seeing.lens import Lens
    from triptych.seeing.model_cost import ModelCost
    from triptych.seeing.sweep import Sweep
    from triptych.training import Recipe
    from triptych.training.distilling import Distilled
    from triptych.training.progress import Display

    # A rewrite as a call or a record, a recipe of several rewrites, or its file.
    Step: TypeAlias = str | Rewrite | RewriteRecipe | Path


@check_choices
def load(
    source: object,
    *,
    device: str = "auto",
    dtype: torch.dtype | Dtype | None = None,
    tokenizer: Any = None,
    languages: tuple[str, str] | None = None,
    engine: EngineName | None = None,
    precision: Precision = "fp32",
    offline: bool = False,
    family: Family | str | Path | None = None,
    strict: bool = False,
    shortlist: str | Path | None = None,
    ensemble: Sequence[str | Path] = (),
    code: str | Path | None = None,
    adapter: Sequence[str | Path] | str | PathLike[str] = (),
) -> Model:
    """Open a model: `load("gpt2")[3, 2].W_Q`, `load("runs/demo").translate("Guten Tag.")`.

    Opening reads the configuration and the headers of the files. A weight is read when it is first used;
    from the Hub, only its bytes. Modules are built when the model first runs.

    Args:
        source: a run folder, a folder or a tensor file in Hugging Face's format, a GGUF file, the
            folder of an adapter, a name on the Hub (`owner/name`, with `@revision` or without, and with
            `/FILE.gguf` for a GGUF file; a path of that name comes first), a `transformers` model, or a
            model of triptych in memory.
        device: auto, cpu, cuda or cuda:N; auto takes a GPU if available.
        dtype: type of the parameters when the model runs. Default: that of the files.
        tokenizer: the folder of a tokenizer, or a tokenizer of `transformers`, used instead of the
            tokenizer in the files. A model in memory needs a tokenizer to read texts.
        languages: for a translator of several languages (mBART, NLLB): source and target as its tokenizer
            spells them, such as de_DE and en_XX.
        engine: library for translation and generation: triptych, ctranslate2 (faster translation on CPUs),
            or auto: ctranslate2 for translation on a CPU if it computes the same model with the same
            options, otherwise triptych. A line reports the choice. Default: triptych; the commands
            translate, evaluate and distil take auto for translators.
        precision: type of the maps when text is translated or generated: fp32; int8 (CPU only) and bf16 (on
            GPUs and CPUs with AVX-512) are faster and change some texts. On x86-64 CPUs no text depends on
            other texts of its batch; docs/how-to/generating.md has the exceptions.
        offline: read models of the Hub only from the cache on this machine; HF_HUB_OFFLINE=1 does the same.
        family: a family file for the checkpoint, where its configuration lacks information.
        strict: refuse a configuration with keys ignored by `transformers`. By default, a warning names these
            keys, and they are ignored here as well.
        shortlist: for a translator, a file written by `triptych shortlist`: the output layer is faster, with
            only the tokens listed for a sentence.
        ensemble: for a translator, other translators with the same tokenizers: each token is chosen by the
            mean of the probabilities of all. Only translation uses them.
        code: file with the classes named in a run, such as your own parameterisation. It is executed, and
            must equal the file used in training. Files in a run are never executed.
        adapter: an adapter of PEFT (LoRA), as a folder or a name on the Hub, merged into the model on
            reading; or several, merged in their order. An adapter as `source` is opened with its base.

    Raises:
        UsageError: an unknown local name, or a source without a model.
        DataError: an unknown name on the Hub, or a failed download.
    """
    from triptych.running.opened_source import open_source

    if isinstance(source, Model):
        raise UsageError(
            f"{source.name} is opened already: use it, or load what it was opened from"
        )
    return Model(
        open_source(
            source,
            device=device,
            dtype=dtype,
            tokenizer=tokenizer,
            languages=languages,
            engine=engine,
            precision=precision,
            offline=offline,
            family=family,
            strict=strict,
            shortlist=shortlist,
            ensemble=ensemble,
            code=code,
            adapter=adapter,
        )
    )


@final
class Model:
    """A model with its attention layers and heads. A change returns a new model with shared memory.

    `model[3, 2]` is head 2 of layer 3, and `model["cross.3"][2]` is head 2 of cross-attention layer 3 in an
    encoder-decoder.
    """

    _opened: Opened

    def __init__(self, opened: Opened) -> None:
        """Use `load`."""
        self._opened = opened

    @property
    def name(self) -> str:
        """The given path or name."""
        return self._opened.name

    @property
    def can(self) -> tuple[str, ...]:
        """The supported verbs: read, run, rewrite, translate, generate, fill, convert."""
        from triptych.converting.capabilities import capabilities

        return capabilities(self._opened)

    @property
    def why_not_run(self) -> str:
        """The reason why the model cannot be run, only read; "" if it runs."""
        return self._opened.why_not_run

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes, in order: `ablate(3.2)`."""
        return tuple(change.words for change in self._opened.changes)

    @property
    def num_parameters(self) -> int:
        """The number of parameters in all tensors of the files."""
        return self._opened.num_parameters

    @property
    def num_layers(self) -> int:
        """The number of attention layers, in all stacks."""
        return len(self.layers)

    @property
    def d_model(self) -> int:
        """The width of the residual stream before the first layer."""
        return self.layers[0].d_model

    @property
    def config(self) -> Mapping[str, object]:
        """The fields of `config.json`; empty for a module of this library."""
        from triptych.guesses import ConfigFields

        return ConfigFields(self._opened.source.record)

    @property
    def device(self) -> torch.device:
        """The device of the parameters when the model runs."""
        return self._opened.to_run.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters when the model runs."""
        return self._opened.to_run.dtype

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode`, `decode`, `pieces`. A translator has the tokenizer of the source here.

        Raises:
            TriptychError: the tokenizer is missing, or the model cannot be run; the message has the reason.
        """
        return self._opened.to_run.source_tokenizer

    def encode(self, text: GivenText) -> list[int]:
        """The token ids that `run` reads for a text, with special tokens; a translator's source."""
        from triptych.running.run import encode_given

        return encode_given(self._opened, text)

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The text of token ids, by `tokenizer`, without special tokens."""
        from triptych.running.run import decode_given

        return decode_given(self._opened, ids)

    @cached_property
    def certificate(self) -> Certificate | None:
        """The claims about a rewritten model; None for any other model."""
        from triptych.rewriting.opened_models import certificate_of

        return certificate_of(self._opened)

    @cached_property
    def layers(self) -> Layers:
        """All attention layers, in order; their weights are read when they are first used."""
        return self._opened.layers

    @property
    def encoder(self) -> Stack:
        """The layers of the encoder; `decoder` and `cross` are the other stacks.

        Raises:
            UsageError: the model does not have an encoder.
        """
        return self._opened.stack("encoder")

    @property
    def decoder(self) -> Stack:
        """The self-attention layers of the decoder."""
        return self._opened.stack("decoder")

    @property
    def cross(self) -> Stack:
        """The layers that attend to the encoder's output."""
        return self._opened.stack("cross")

    @overload
    def __getitem__(self, place: int) -> Layer: ...

    @overload
    def __getitem__(self, place: str) -> Any: ...

    @overload
    def __getitem__(self, place: tuple[int | str, int]) -> Head: ...

    def __getitem__(self, place: int | str | tuple[int | str, int]) -> Layer | Head:
        """A layer by its name (`3`, `"decoder.3"`), a head by both (`model[3, 2]`, `model["3.2"]`).

        Raises:
            UsageError: an unknown or an ambiguous name; the message lists the names.
        """
        return self._opened.find(place)

    def __iter__(self) -> Iterator[Layer]:
        """The layers, in order."""
        return iter(self.layers)

    @check_choices
    def composition(
        self, into: Into, stack: Literal["encoder", "decoder"] | None = None
    ) -> Composition:
        """The composition scores of heads with earlier heads of their stack, with the chance level.

        Args:
            into: "Q", "K" or "V" of the later head.
            stack: name of the stack in an encoder-decoder.

        Raises:
            UsageError: positions or norms, which the message names, make the scores wrong; or several stacks.
        """
        from triptych.seeing.composition import compose_stack

        return compose_stack(self._opened, into, stack)

    def inspect(
        self,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        ignore_rotary: bool = False,
        progress: Progress = untold,
    ) -> Inspection:
        """Measure every head from its weights: spectra, ranks, similarities and chance, symmetry, copying.

        Args:
            layers: numbers of layers, in every stack; all if None.
            heads: numbers of heads; all if None.
            ignore_rotary: measure W_Q W_Kᵀ of rotary heads without the rotation.
            progress: called with the layer, the bytes read, and the total of bytes.

        Raises:
            UsageError: no layer or head is chosen.
            DataError: tensors do not fit the configuration.
        """
        from triptych.seeing.inspection import inspect

        return inspect(
            self._opened.attention,
            layers=layers,
            heads=heads,
            ignore_rotary=ignore_rotary,
            progress=progress,
        )

    def adapter_effects(self) -> AdapterEffects | None:
        """Changes of W_QK and W_OV of every head by adapters; None for a model without adapters."""
        from triptych.seeing.adapter_effects import adapter_effects

        return adapter_effects(self._opened)

    def cost(self) -> ModelCost:
        """Parameters, FLOPs per token and cache bytes of each attention layer."""
        from triptych.seeing.model_cost import cost_of

        return cost_of(self._opened)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Explain a name of another library."""
            from triptych.guesses import about_attribute

            raise AttributeError(about_attribute("model", name))

        def __call__(self, *given: object, **options: object) -> NoReturn:
            from triptych.guesses import about_call

            raise TypeError(about_call("model"))

    def __repr__(self) -> str:
        from triptych.running.opened_source import describe

        return describe(self._opened)

    def _repr_html_(self) -> str:
        from triptych.running.opened_source import describe_as_html

        return describe_as_html(self._opened)

    @overload
    def translate(  # type: ignore[overload-overlap]
        self,
        text: str,
        *,
        stream: Literal[False] = ...,
        **search: Unpack[SearchKeywords],
    ) -> Translation: ...

    @overload
    def translate(
        self,
        text: Sequence[str],
        *,
        stream: Literal[False] = ...,
        **search: Unpack[SearchKeywords],
    ) -> list[Translation]: ...

    @overload
    def translate(
        self,
        text: str | Sequence[str],
        *,
        stream: Literal[True],
        **search: Unpack[SearchKeywords],
    ) -> Iterator[Translation]: ...

    @check_choices
    def translate(
        self,
        text: str | Sequence[str],
        *,
        beam_size: int | None = None,
        alpha: float | None = None,
        num_best: int = 1,
        max_extra_tokens: int | None = None,
        max_source_tokens: int | None = None,
        split: bool | None = None,
        stop: Stop | None = None,
        no_repeat_ngram_size: int | None = None,
        repetition_penalty: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        glossary: Mapping[str, str] | None = None,
        workers: int = 1,
        special_tokens: SpecialTokens = "tokens",
        stream: bool = False,
    ) -> Translation | list[Translation] | Iterator[Translation]:
        """Translate a sentence, or several in their order.

        Args:
            text: one sentence, or several.
            beam_size: beam size; 1 is greedy. Default: the recipe's or the checkpoint's.
            alpha: exponent of the length penalty. Default: the recipe's or the checkpoint's.
            num_best: number of translations of each sentence.
            max_extra_tokens: longest output: the length of the input plus this many tokens.
            max_source_tokens: translate longer sentences in pieces. Default: the model's limit, or 1024.
            split: translate the sentences of a text one by one, and join them with the white space that was
                between them. Default: the recipe's, or True.
            stop: end of beam search: certain, when no hypothesis can overtake the finished hypotheses; full
                (faster), when the beam is full of finished hypotheses.
            no_repeat_ngram_size: a translation has each sequence of so many tokens once; 0 for no rule.
                Default: the checkpoint's.
            repetition_penalty: above 1, tokens already in the translation are less probable. Default: 1.
            temperature: draw translations, with logits divided by this number, and without a beam. Default:
                0, the most probable translation.
            top_k: draw from the k most probable tokens only.
            top_p: draw from the fewest tokens whose probabilities sum to p.
            min_p: draw from tokens at least p times as probable as the best.
            seed: the same seed draws the same translation, whatever the other sentences are.
            glossary: terms of the source language and their translations, which a translation has wherever
                a sentence has the term as whole words. Such a sentence is searched until `stop` is certain.
            workers: number of processes that translate in parallel, one thread each. CPU only.
            special_tokens: reading of special tokens spelled out in a sentence (`<extra_id_0>` of T5): as the
                tokens, or as text. Triptych's and Marian's translators always read text.
            stream: yield translations as soon as their batch has finished.

        Returns:
            One translation for a string (`text` is the best hypothesis; `finish` is "length" if it was cut
            off at the limit); a list for several; an iterator with `stream`.

        Raises:
            UsageError: the model does not translate, or incompatible options.
        """
        from triptych.converting.engine_verbs import translate_with

        translator = self.translator(
            beam_size=beam_size,
            alpha=alpha,
            num_best=num_best,
            max_extra_tokens=max_extra_tokens,
            max_source_tokens=max_source_tokens,
            split=split,
            stop=stop,
            no_repeat_ngram_size=no_repeat_ngram_size,
            repetition_penalty=repetition_penalty,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            glossary=glossary,
            workers=workers,
            special_tokens=special_tokens,
        )
        return translate_with(translator, text, stream=stream)

    def translator(self, **search: Unpack[SearchKeywords]) -> Translator:
        """The translator of `translate`, for repeated use; the same options."""
        from triptych.converting.engine_verbs import translator_of

        return translator_of(self._opened, **search)

    def distil(
        self,
        recipe: Recipe | str | Path,
        out: str | Path,
        *,
        beam_size: int | None = None,
        alpha: float | None = None,
        num_best: int = 1,
        interpolate: bool = False,
        originals: float = 0.0,
        teacher_weight: float = 0.0,
        workers: int = 1,
        display: Display | None = None,
        progress: Progress = untold,
    ) -> Distilled:
        """Translate a recipe's training text, and write a recipe for a student trained on the translations.

        The same call continues after an interruption. Processes of `torchrun` share the work.

            student = triptych.load("teacher").distil("multi30k-student", "out")
            triptych.train(student.recipe, "out/student")

        Args:
            recipe: the student's recipe, its file, or the name of a built-in recipe.
            out: the folder to make: `train.jsonl`, `student.toml`, and `distillation.json` with their
                origin.
            beam_size: beam size of the teacher. Default: the recipe's or the checkpoint's.
            alpha: exponent of the length penalty. Default: the recipe's or the checkpoint's.
            num_best: number of translations of each sentence that the student learns from.
            interpolate: keep the hypothesis of the n best with the highest chrF against the reference.
            originals: share of the original pairs that the student learns from as well, from 0 to 1.
            teacher_weight: share of the loss for the distance from the teacher's probabilities, from 0 to 1.
                Above 0 the student has the teacher's tokenizers, and the folder has a copy of the teacher.
            workers: number of processes that translate in parallel, one thread each. CPU only.
            display: display of the files read; lines on standard error if None.
            progress: called with the activity, the number of sentences, and their total.

        Raises:
            UsageError: the model or the recipe does not translate, options that do not go together, or the
                folder has other files or was begun in another way.
        """
        from triptych.converting.teachers import distil

        return distil(
            self._opened,
            recipe,
            Path(out),
            display,
            progress,
            beam_size=beam_size,
            alpha=alpha,
            num_best=num_best,
            interpolate=interpolate,
            originals=originals,
            teacher_weight=teacher_weight,
            workers=workers,
        )

    def shortlist(
        self,
        out: str | Path,
        source: str | Path | None = None,
        target: str | Path | None = None,
        *,
        most: int = 100,
        frequent: int = 100,
        display: Display | None = None,
    ) -> Coverage:
        """Learn from pairs which target tokens each source token may become, and write the file.

            model.shortlist("shortlist.txt", "train.de", "train.en")
            triptych.load("runs/mine", shortlist="shortlist.txt").translate("Guten Tag.")

        Args:
            out: the file, also a vocabulary map of CTranslate2.
            source: a text file with a sentence a line. Default: the text that the run was trained on.
            target: its translations, line by line.
            most: number of the most probable target tokens of each source token.
            frequent: number of the most frequent target tokens, allowed in every sentence.
            display: display of the files read; lines on standard error if None.

        Returns:
            The number of tokens allowed in a sentence, and their share of its translation's tokens, measured
            on every twentieth pair, held out.

        Raises:
            UsageError: the model does not translate, or one text is given without the other.
        """
        from triptych.training.shortlist import write_shortlist

        return write_shortlist(
            self._opened.to_run,
            out,
            source,
            target,
            most=most,
            frequent=frequent,
            display=display,
        )

    @overload
    def generate(
        self,
        text: Text | Tensor,
        *,
        num_samples: Literal[1] = ...,
        stream: Literal[False] = ...,
        **options: Unpack[GenerationKeywords],
    ) -> Continuation: ...

    @overload
    def generate(
        self,
        text: Text | Tensor,
        *,
        stream: Literal[True],
        **options: Unpack[GenerationKeywords],
    ) -> StreamedText: ...

    @overload
    def generate(
        self,
        text: Text | Sequence[Text] | Tensor,
        *,
        num_samples: int = ...,
        stream: bool = ...,
        **options: Unpack[GenerationKeywords],
    ) -> Any: ...

    @check_choices
    def generate(
        self,
        text: Text | Sequence[Text] | Tensor,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        generation_config: FileSettings = "follow",
        seed: int = 0,
        num_samples: int = 1,
        beam_size: int = 1,
        alpha: float = 0.0,
        stop: Sequence[str] = (),
        max_prompt_tokens: int | None = None,
        chat: bool = False,
        special_tokens: SpecialTokens = "tokens",
        stream: bool = False,
    ) -> Any:
        """Continue a text, or several.

        Defaults are the values in the checkpoint's `generation_config.json`.

        Args:
            text: one text, or several: strings, or token ids. An empty string begins with the token for
                the beginning of a text.
            max_new_tokens: longest continuation in tokens. Default: the file's max_new_tokens or max_length,
                otherwise 128.
            temperature: divisor of the logits; 0 always takes the most probable token. Default: the file's
                where it has do_sample, otherwise 0.
            top_k: draw from the k most probable tokens only. Default: the file's.
            top_p: draw from the fewest tokens whose probabilities sum to p. Default: the file's.
            min_p: draw from tokens at least p times as probable as the best. Default: the file's.
            repetition_penalty: above 1, tokens already in the text are less probable. Default: the file's.
            generation_config: "follow" the settings of the checkpoint's generation_config.json, or "ignore"
                all but its ends of texts. Followed are do_sample, temperature, top_k, top_p, min_p,
                typical_p, repetition_penalty, no_repeat_ngram_size, bad_words_ids, suppress_tokens,
                begin_suppress_tokens, min_new_tokens, min_length, max_new_tokens, max_length and
                eos_token_id; other fields with an effect on a text are refused by name.
            seed: the same seed gives the same text, whatever the other texts are (on x86-64 CPUs). Without a
                temperature the text does not depend on the seed.
            num_samples: number of continuations of each text; a beam returns the best hypotheses.
            beam_size: beam size; 1 for greedy search or sampling.
            alpha: exponent of the beam's length penalty.
            stop: end before this string, or any of several.
            max_prompt_tokens: longest prompt in tokens. Default: the model's positions, or 32768 where they
                set no limit.
            chat: put the text into the chat template of the model's tokenizer.
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".
            stream: give the text of one continuation while it is generated.

        Returns:
            One continuation for a string and one sample, whose `text` is what was added; a list for several;
            an iterator of strings with `stream`, with `finish` after its end.

        Raises:
            UsageError: the model does not continue texts, or incompatible options.
        """
        from triptych.converting.engine_verbs import Asked, generate

        return generate(
            self._opened,
            self.generator(),
            text,
            Asked(
                max_new_tokens,
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                beam_size,
            ),
            generation_config,
            stream=stream,
            seed=seed,
            num_samples=num_samples,
            alpha=alpha,
            stop=stop,
            max_prompt_tokens=max_prompt_tokens,
            chat=chat,
            special_tokens=special_tokens,
        )

    def generator(self) -> TextGenerator:
        """The generator of `generate`, made once."""
        return self._generator

    @cached_property
    def _generator(self) -> TextGenerator:
        from triptych.converting.engine_verbs import make_generator

        return make_generator(self._opened.to_run, self._opened.options)

    def fill(
        self, text: str, count: int = 5, *, max_tokens: int | None = None
    ) -> list[list[Filling]]:
        """The most probable tokens for every `[MASK]` of a text.

        Args:
            text: a text with at least one mask.
            count: number of tokens shown for each mask.
            max_tokens: longest text in tokens. Default: the model's positions, or 8192 where they set no
                limit.

        Raises:
            UsageError: the model does not fill masks, or the text lacks a mask.
        """
        from triptych.running.decoding import fill_masks

        reader = self.reader
        return fill_masks(
            reader.language_model, reader.tokenizer, text, count, max_tokens
        )

    @overload
    def evaluate(
        self,
        text: str | Path | Sequence[str],
        references: None = ...,
        *,
        context: int | None = ...,
        stride: int | None = ...,
        special_tokens: SpecialTokens = ...,
        progress: Progress = ...,
    ) -> Likelihood: ...

    @overload
    def evaluate(
        self,
        text: str | Path | Sequence[str],
        references: str | Path | Sequence[str],
        *,
        beam_size: int | None = ...,
        alpha: float | None = ...,
        stop: Stop | None = ...,
        bleu_tokenize: BleuTokenizer | None = ...,
        workers: int = ...,
        special_tokens: SpecialTokens = ...,
        progress: Progress = ...,
    ) -> Evaluation: ...

    @overload
    def evaluate(
        self,
        text: GivenText | Path | Sequence[GivenText] | None = ...,
        *,
        labels: str | int | Path | Sequence[str | int],
        special_tokens: SpecialTokens = ...,
        progress: Progress = ...,
    ) -> Classification: ...

    @check_choices
    def evaluate(
        self,
        text: GivenText | Path | Sequence[GivenText] | None = None,
        references: str | Path | Sequence[str] | None = None,
        *,
        labels: str | int | Path | Sequence[str | int] | None = None,
        context: int | None = None,
        stride: int | None = None,
        beam_size: int | None = None,
        alpha: float | None = None,
        stop: Stop | None = None,
        bleu_tokenize: BleuTokenizer | None = None,
        workers: int = 1,
        special_tokens: SpecialTokens = "tokens",
        progress: Progress = untold,
    ) -> Likelihood | Evaluation | Classification:
        """The quality of the model's predictions of a text, of its translations, or of the classes of texts.

        Args:
            text: a text, its file, or several documents, scored separately. For a translation, the
                sentences, or their file with a sentence on each line. Texts or pairs of texts if `labels`
                are given.
            references: the right translations, or their file.
            labels: right labels of the texts, by name or number, for a model with the head of a sequence
                classification; or, without a text, the file of labelled lines: label, tab, text. A line with
                a pair has another tab and the second text.
            context: tokens of a window. Default: a run's context, or the model's positions; at most 1024.
            stride: tokens between the starts of windows. Default: the context, so that windows do
                not overlap.
            beam_size: beam size; 1 is greedy. Default: the recipe's or the checkpoint's.
            alpha: exponent of the length penalty. Default: the recipe's or the checkpoint's.
            stop: when beam search ends, as in `translate`: certain or full.
            bleu_tokenize: tokenizer of BLEU in sacreBLEU. Default: the one that fits the references: 13a; zh
                for Chinese; ja-mecab for Japanese if it is installed, else char; char for Thai.
            workers: number of processes that translate in parallel.
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".
            progress: called with the activity, the number of characters or sentences, and their total.

        Returns:
            The loss in nats per token with its interval, or BLEU and chrF with theirs; the accuracy for
            labelled texts.

        Raises:
            UsageError: the model does not predict, translate or classify, an unknown label, or incompatible
                options.
            DataError: the text is empty.
        """
        from triptych.converting.engine_verbs import evaluate

        return evaluate(
            self._opened,
            text,
            references,
            context=context,
            stride=stride,
            beam_size=beam_size,
            alpha=alpha,
            stop=stop,
            bleu_tokenize=bleu_tokenize,
            workers=workers,
            labels=labels,
            special_tokens=special_tokens,
            progress=progress,
        )

    @check_choices
    def score(
        self,
        text: Text | Tensor,
        target: Text | None = None,
        *,
        max_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
    ) -> list[tuple[str, float]]:
        """The predicted tokens of a text, and their log-probabilities in nats.

        Args:
            text: the model's input: a string, or token ids.
            target: the scored translation of an encoder-decoder; the model's translation if None.
            max_tokens: longest text in tokens, as in `run`.
            special_tokens: as in `run`.

        Raises:
            UsageError: the model predicts no next token.
        """
        from triptych.running.run import score_text

        return score_text(
            self._opened,
            text,
            target,
            max_tokens=max_tokens,
            special_tokens=special_tokens,
        )

    @overload
    def attend(  # type: ignore[overload-overlap]
        self,
        text: GivenText | Tensor,
        target: Text | None = ...,
        *,
        max_new_tokens: int = ...,
        max_tokens: int | None = ...,
        special_tokens: SpecialTokens = ...,
    ) -> Attention: ...

    @overload
    def attend(
        self,
        text: Sequence[GivenText],
        target: Sequence[Text] | None = ...,
        *,
        max_new_tokens: int = ...,
        max_tokens: int | None = ...,
        special_tokens: SpecialTokens = ...,
    ) -> AttentionBatch: ...

    @check_choices
    def attend(
        self,
        text: GivenText | Sequence[GivenText] | Tensor,
        target: Text | Sequence[Text] | None = None,
        *,
        max_new_tokens: int = 0,
        max_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
    ) -> Attention | AttentionBatch:
        """The attention weights of every head on a text: `model.attend(text)[3, 2]` is `[queries, keys]`.

        Args:
            text: one text, or several, read in padded batches: strings, token ids, or pairs of strings
                read as one text, as tuples `(first, second)`.
            target: inputs of an encoder-decoder's decoder, for each text; the model's translation if
                None.
            max_new_tokens: continue the text greedily by this many tokens first.
            max_tokens: longest text in tokens. Default: the model's positions, or 8192 where they set no
                limit.
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".

        Raises:
            UsageError: a text past the model's positions, an empty text where no token begins a text, or
                an option unsupported by the model.
        """
        from triptych.seeing.attending import attend

        return attend(
            self.reader, text, target, max_new_tokens, max_tokens, special_tokens
        )

    @check_choices
    def attend_over(
        self,
        text: GivenText | Path | Sequence[GivenText],
        targets: str | int | Path | Sequence[str | int] | None = None,
        *,
        documents: Documents = "file",
        worth: Instead | None = None,
        explain: bool = False,
        context: int | None = None,
        most_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
        progress: Progress = untold,
    ) -> OverText:
        """The behaviour of every head over a whole text: previous token, induction, effect on the loss.

        Args:
            text: a text, its file, or several documents.
            targets: translations of a translator, line by line. Default: the model's translations. A
                classifier's texts have right labels here, by name or number, with `worth`.
            documents: the documents in a plain text file: the whole file, each line, or the lines
                between blank lines. Intervals are over documents.
            worth: measure the loss without each head: its output becomes zero, its mean over the text, or
                what it would be if it looked evenly. For a model with the head of a sequence classification,
                the loss is that of the right classes, and the text a file of labelled lines as in `evaluate`.
            explain: measure how well W_QK, truncated to several ranks, explains the attention of heads, and
                whether heads write the tokens they attend to.
            context: tokens of a window. Default: a run's context, or the model's positions; at most 256.
            most_tokens: tokens to read. Default: 65,536, and 8,192 with `worth` or `explain`.
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".
            progress: called with the activity, the amount done, and the total.

        Raises:
            UsageError: something does not fit the model.
        """
        from triptych.seeing.attending import attend_over

        return attend_over(
            self.reader,
            text,
            targets,
            documents=documents,
            worth=worth,
            explain=explain,
            context=context,
            most_tokens=most_tokens,
            special_tokens=special_tokens,
            progress=progress,
        )

    @overload
    def run(  # type: ignore[overload-overlap]
        self,
        text: GivenText | Tensor,
        *,
        target: Text | None = ...,
        grad: bool = ...,
        max_tokens: int | None = ...,
        special_tokens: SpecialTokens = ...,
    ) -> Run: ...

    @overload
    def run(
        self,
        text: Sequence[GivenText],
        *,
        target: Sequence[Text] | None = ...,
        grad: bool = ...,
        max_tokens: int | None = ...,
        special_tokens: SpecialTokens = ...,
    ) -> list[Run]: ...

    @check_choices
    def run(
        self,
        text: GivenText | Sequence[GivenText] | Tensor,
        *,
        target: Text | Sequence[Text] | None = None,
        grad: bool = False,
        max_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
    ) -> Run | list[Run]:
        """Run the model on a text: logits, loss, and every activation.

        Args:
            text: one text, or several, run as one padded batch: strings, token ids, or pairs of strings
                read as one text, as tuples `(first, second)`.
            target: of an encoder-decoder, what its decoder produces; its own translation if None.
            grad: True for gradients of the activations and parameters (`Run.gradient`).
            max_tokens: longest text in tokens. Default: the model's positions, or 8192 where they set no
                limit.
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".

        Raises:
            UsageError: a text past the model's positions, or an empty text where no token begins a text.
        """
        from triptych.running.run import run_given

        return run_given(
            self._opened,
            text,
            target,
            grad=grad,
            max_tokens=max_tokens,
            special_tokens=special_tokens,
        )

    @check_choices
    def lens(
        self,
        text: Text | Tensor,
        target: Text | None = None,
        *,
        max_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
    ) -> Lens:
        """Predictions after each block, and a logit as a sum over heads and layers (`Lens.attribution`).

        Args:
            text: the model's input: a string, or token ids.
            target: the decoder's output of an encoder-decoder; its own translation if None.
            max_tokens: longest text in tokens, see `run`.
            special_tokens: see `run`.

        Raises:
            UsageError: the model does not predict tokens.
        """
        from triptych.seeing.lens import read_lens

        return read_lens(self._opened, text, target, max_tokens, special_tokens)

    @property
    def reader(self) -> Reader:
        """The module with its tokenizers, changes made and weights in memory.

        Raises:
            TriptychError: the model cannot be run; the message has the reason.
        """
        return self._opened.reader

    @check_choices
    def ablate(
        self,
        heads: Heads,
        by: By = "zero",
        *,
        text: GivenText | Sequence[GivenText] | None = None,
    ) -> Model:
        """The model with some heads off: their input to W_O is replaced.

        Of layers that share their weights only those named lose heads, and the model can be saved if all do.

        Args:
            heads: `"3.2"`, `"3"` for a layer, `"*.2"`, `"cross.*"`; several, by commas or in a list.
            by: the replacement: "zero", the "mean" over a text, or the head's values on another text,
                position by position ("resample").
            text: for "mean" and "resample".

        Raises:
            UsageError: an unknown head, or a text is missing.
        """
        from triptych.running.changing import ablate

        return Model(ablate(self._opened, heads, by, text))

    @check_choices
    def patch(
        self,
        heads: Heads,
        run: Run,
        what: Activation = "z",
        *,
        positions: Sequence[int] | None = None,
    ) -> Model:
        """The model with activations of some heads replaced by a run's, at the same positions.

        It then reads texts of as many tokens as the run's; generated continuations start there.

        Args:
            heads: as in `ablate`.
            run: a run on one text, of this model or another model with the same heads.
            what: which activation: q, k, v, scores, weights or z.
            positions: replaced positions in the run's text, negative from its end; all if None.

        Raises:
            UsageError: an unknown head or position; when the model runs, the lengths do not fit.
        """
        from triptych.running.changing import patch

        return Model(patch(self._opened, heads, run, what, positions))

    @check_choices
    def edit(
        self,
        heads: Heads,
        what: Activation,
        with_: Callable[[Tensor], Tensor],
        *,
        together: bool = False,
    ) -> Model:
        """The model with a formula of your own between two steps of its heads.

        Args:
            heads: as in `ablate`.
            what: which value: q, k, v, scores, weights or z.
            with_: function of the value of one head, `[batch, …]` as in `Run`; returns a replacement of
                the same shape.
            together: True to call `with_` once for the named heads of a layer, `[batch, heads, …]`.

        Raises:
            UsageError: an unknown head or value.
        """
        from triptych.running.changing import edit

        return Model(edit(self._opened, heads, what, with_, together=together))

    def steer(
        self, place: str, vector: Float[Tensor, " d_model"], scale: float = 1.0
    ) -> Model:
        """The model with a direction added to its residual stream.

        Args:
            place: `"residual.3"`: before block 3; `"residual.encoder.3"` of an encoder-decoder. The number of
                blocks is the end of the stack.
            vector: `[d_model]`.
            scale: factor of the vector.

        Raises:
            UsageError: an unknown block, or the vector has another width.
        """
        from triptych.running.changing import steer

        return Model(steer(self._opened, place, vector, scale))

    def replace(self, place: str | int, **maps: Tensor) -> Model:
        """The model with other maps in a layer or a head: `model.replace("3.2", W_Q=…)`.

        Where layers share their weights, all of them have the new map; `changes` lists these layers.

        Args:
            place: a layer or a head.
            maps: W_Q, W_K, W_V or W_O; shapes as `Layer` and `Head` have them.

        Raises:
            UsageError: another shape, a map shared by heads, or an unknown place.
        """
        from triptych.running.changing import replace_maps

        return Model(replace_maps(self._opened, place, maps))

    def tie(self, place: str | int, name: str, to: str) -> Model:
        """The model with one map of a layer replaced by another map: `model.tie("3", "W_K", "W_Q")`.

        Where layers share their weights, the maps of all of them are tied; `changes` lists these layers.

        Args:
            place: a layer, or "*" for all.
            name: the replaced map: W_Q, W_K or W_V.
            to: the replacing map.

        Raises:
            UsageError: the maps do not fit each other.
        """
        from triptych.running.changing import tie

        return Model(tie(self._opened, place, name, to))

    def without_positions(self) -> Model:
        """The model without rotations of queries and keys, position biases, and position embeddings.

        Raises:
            UsageError: the model does not encode positions, apart from the causal mask.
        """
        from triptych.running.changing import turn_positions_off

        return Model(turn_positions_off(self._opened))

    @check_choices
    def sweep(
        self,
        clean: GivenText | Sequence[GivenText],
        corrupted: GivenText | Sequence[GivenText],
        metric: Callable[[Run], float | Tensor] | tuple[str | int, str | int],
        what: Activation = "z",
        *,
        progress: Progress = untold,
    ) -> Sweep:
        """Patch each head separately from a run on clean text into a run on corrupted text.

        Args:
            clean: a text, or several.
            corrupted: corrupted versions of the clean texts, with equal numbers of tokens.
            metric: function from a run to a number; or two labels of a classifier, or two next tokens of a
                language model (an encoder's at its only mask), for the difference of their logits.
            what: the patched activation.
            progress: called for each layer with its first head, the number of finished heads, and all
                heads.

        Returns:
            The metric after the patch of each head, with bootstrap intervals over texts.

        Raises:
            UsageError: there are not as many texts, or not as many tokens in a pair.
        """
        from triptych.seeing.sweep import sweep_heads

        return sweep_heads(self._opened, clean, corrupted, metric, what, progress)

    def plan(
        self,
        *steps: Step,
        layers: Sequence[int] | None = None,
        calibration: str | Path | None = None,
        skip_refused: bool = False,
    ) -> Plan:
        """The plan of a rewrite, without its execution; arguments and errors as in `rewrite`."""
        from triptych.rewriting.opened_models import plan_opened

        return plan_opened(
            self._opened, steps, calibration, layers=layers, skip_refused=skip_refused
        )

    def rewrite(
        self,
        *steps: Step,
        layers: Sequence[int] | None = None,
        out: str | Path | None = None,
        calibration: str | Path | None = None,
        skip_refused: bool = False,
        text: str | Path | None = None,
        compare: bool = True,
        progress: Progress | None = None,
    ) -> Model:
        """The model with its attention in another parameterisation, and a certificate of the changes.

            model.rewrite("fold_value_bias", "truncate(rank=6)").save("smaller")

        The certificate compares with this model: for a comparison with the original of a model
        rewritten before, give all steps at once.

        Args:
            steps: rewrites, as calls or as records, in order; "exact" for all exact rewrites; or a recipe, or
                its file.
            layers: numbers of the layers for steps without given layers; all if None.
            out: the folder to write; if None, a temporary folder, copied by `save`.
            calibration: text for calibration, needed by some rewrites; for a translator, lines of source,
                tab, target.
            skip_refused: if a layer refuses a step, leave the layer unchanged instead of stopping.
            text: compare both models on this text after the rewrite.
            compare: compare both models after the rewrite, on random tokens if no text is given.
            progress: called with the activity, the amount done, and the total.

        Raises:
            RewriteRefusedError: a layer refuses a step, with the reason.
            UsageError: an unknown rewrite, or the folder exists.
        """
        from triptych.rewriting.opened_models import rewrite_opened

        opened, certificate = rewrite_opened(
            self._opened,
            steps,
            out,
            calibration,
            layers=layers,
            skip_refused=skip_refused,
            text=text,
            compare=compare,
            progress=progress,
        )
        rewritten = Model(opened)
        rewritten.certificate = certificate
        return rewritten

    def check(self, text: str | None = None, target: str | None = None) -> Check:
        """Compare logits, losses and attention weights with `transformers`, an optional dependency.

        Args:
            text: input of both models; random tokens if None.
            target: of an encoder-decoder, what its decoder produces; its own translation if None.

        Raises:
            UsageError: a run of triptych, a change not expressible by weights, or `transformers` is missing.
            DataError: this library or `transformers` does not run the model.
        """
        from triptych.rewriting.opened_models import check_opened

        return check_opened(self._opened, text, target)

    def save(self, path: str | Path) -> Path:
        """Write the model in its source's format; returns the folder.

        A rewritten model is written with its certificate. Changes expressible by weights are written into
        them. A tokenizer given to `load` replaces the tokenizer of the files.

        Args:
            path: the folder to make.

        Raises:
            UsageError: the folder exists, or the named change is not expressible by weights.
            RewriteRefusedError: the format cannot represent the model.
        """
        from triptych.rewriting.opened_models import save

        return save(self._opened, Path(path))

    @check_choices
    def convert(
        self,
        path: str | Path,
        to: TargetFormat,
        quantization: Quantization | None = None,
    ) -> Conversion:
        """Write the model in another format: "hf", "ctranslate2", "onnx", "gguf", "web" or "triptych".

        Args:
            path: the folder to make, or for gguf and web the file.
            to: the format; "web" is one page with the model, for a browser without a server.
            quantization: type of the matrices, for ctranslate2, gguf and web. Default: float32, and float16
                for web.

        Raises:
            UsageError: the model does not fit the format, or it was changed.
        """
        from triptych.converting.conversion import convert_opened

        return convert_opened(self._opened, Path(path), to, quantization)


def renamed(model: Model, name: str, *, is_mapped: bool = True) -> Model:
    """Return the same model under another name, shown in its records and messages instead of a path.

    Weights are mapped from their files for inspection, or (`is_mapped` is False) read, so that no change of
    a file can end the process.
    """
    return Model(model._opened.named(name, is_mapped=is_mapped))


def reopened(model: Model) -> Model:
    """Open the model again from the same path or name, with the same options and changes."""
    return Model(model._opened.reopened())


def require_same_files(model: Model) -> None:
    """Check that a model's files are unchanged since it was opened; `DataError` if a file was changed."""
    model._opened.require_same()
