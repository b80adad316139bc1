"""`load` and `Model`: a model with its attention layers and heads, for reading, running and changing.

A `Model` stores its source and its changes. Each verb imports the package for its work when it is called, so
this module can be read and imported without the other packages: `running` runs a model, `seeing` measures
heads, `rewriting` and `converting` write models to files, and `training` distils models.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final, overload

from triptych.errors import DataError, TriptychError, UsageError
from triptych.literals import (
    Activation,
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
from triptych.printable import table_html
from triptych.progress import Progress, untold

if TYPE_CHECKING:
    from typing import Unpack

    import torch
    from jaxtyping import Float
    from torch import Tensor

    from triptych.converting.conversion import Conversion
    from triptych.core.checkpoints.family import Family
    from triptych.core.checkpoints.source import Source
    from triptych.core.checkpoints.stored_layers import AttentionSource
    from triptych.core.heads import Head, Layer, Layers, Stack
    from triptych.core.places import Heads, PlaceNames
    from triptych.keywords import GenerationKeywords, SearchKeywords
    from triptych.rewriting.against_transformers import Check
    from triptych.rewriting.certificate import Certificate
    from triptych.rewriting.functions import Rewrite
    from triptych.rewriting.planning import Plan
    from triptych.rewriting.recipe import RewriteRecipe
    from triptych.running.changes import Change
    from triptych.running.decoding import (
        Continuation,
        Evaluation,
        Filling,
        Likelihood,
        TextGenerator,
        Translation,
        Translator,
    )
    from triptych.running.opened_source import Opened
    from triptych.running.opening import OpenedModel, Reader
    from triptych.running.run import Run
    from triptych.running.text import Text
    from triptych.running.text.shortlists import Coverage
    from triptych.seeing.attending import Attention, AttentionBatch
    from triptych.seeing.attending.over import OverText
    from triptych.seeing.composition import Composition
    from triptych.seeing.inspection import Inspection
    from triptych.seeing.model_cost import ModelCost
    from triptych.seeing.sweep import Sweep
    from triptych.training import Recipe
    from triptych.training.distilling import Distilled
    from triptych.training.progress import Display

    # A rewrite as a call or a record, a recipe of several, or the file of one.
    Step: TypeAlias = str | Rewrite | RewriteRecipe | Path

# Maps missing in KV-sharing layers.
_OF_KEYS = ("W_K", "W_V")


@check_choices
def load(
    source: object,
    *,
    device: str = "auto",
    dtype: torch.dtype | Dtype | None = None,
    tokenizer: Any = None,
    languages: tuple[str, str] | None = None,
    engine: EngineName = "triptych",
    precision: Precision = "fp32",
    offline: bool = False,
    family: Family | str | Path | None = None,
    strict: bool = False,
    shortlist: str | Path | None = None,
    ensemble: Sequence[str | Path] = (),
    code: str | Path | None = None,
) -> Model:
    """Open a model: `load("gpt2")[3, 2].W_Q`, `load("runs/demo").translate("Guten Tag.")`.

    Opening reads the configuration and the headers of the files. A weight is read when it is first used;
    from the Hub, only its bytes. Modules are built when the model first runs.

    Args:
        source: a run folder, a folder or a tensor file in Hugging Face's format, a name on the Hub
            (`owner/name`, with `@revision` or without; a path of that name comes first), a `transformers`
            model, or a model of triptych in memory.
        device: auto, cpu, cuda or cuda:N; auto takes a GPU if there is one.
        dtype: type of the parameters when the model runs. Default: that of the files.
        tokenizer: the folder of a tokenizer, or a tokenizer of `transformers`, which reads texts in the place
            of the files' own. A model in memory needs one to read texts.
        languages: for a translator of several languages (mBART, NLLB): source and target as its tokenizer
            spells them, such as de_DE and en_XX.
        engine: the library that translates and generates: triptych, ctranslate2 (faster in int8 on CPUs;
            needs the extra of that name), or auto: ctranslate2 for translation on a CPU where it is installed
            and computes the same model, otherwise triptych. A line says which.
        precision: type of the maps when text is translated or generated: fp32; int8 (CPU only) and bf16 (on
            GPUs and CPUs with AVX-512) are faster and change some texts. On x86-64 CPUs no text depends on
            the others of its batch; docs/how-to/generating.md has the exceptions.
        offline: read models of the Hub only from the cache on this machine; HF_HUB_OFFLINE=1 does the same.
        family: a family file that describes the checkpoint, where its configuration does not say enough.
        strict: refuse a configuration with keys that `transformers` does not follow. Without it they are
            named in a warning, and followed neither there nor here.
        shortlist: for a translator, a file that `triptych shortlist` wrote: the output layer computes only
            the tokens that it lists for a sentence, which is faster.
        ensemble: for a translator, others with the same tokenizers: each token is chosen by the mean of the
            probabilities of all. Only translation uses them.
        code: the file whose classes a run names, such as a parameterisation of your own. It is executed, and
            must be the file that the run was trained with. Nothing that lies in a run is ever executed.

    Raises:
        UsageError: nothing of that name here, or something that is not a model.
        DataError: nothing of that name on the Hub, or no way there.
    """
    import torch

    from triptych.core.checkpoints.family import read_family
    from triptych.core.checkpoints.source import find_source, tokenizer_folder
    from triptych.core.models import EncoderDecoder, LanguageModel
    from triptych.running.opened_source import Opened
    from triptych.running.opening.options import Options, require_ctranslate2
    from triptych.running.opening.translators import Languages
    from triptych.user_code import use_code

    if code is not None:
        use_code(code)
    if engine != "triptych" and dtype is not None:
        raise UsageError(f"--engine {engine} rounds by --precision: leave out --dtype")
    if engine == "ctranslate2":
        require_ctranslate2()
    options = Options(
        device,
        getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        tokenizer_folder(tokenizer) if isinstance(source, LanguageModel | EncoderDecoder) else None,
        None if languages is None else Languages(*languages),
        engine,
        precision,
        None if shortlist is None else Path(shortlist),
        tuple(find_source(one, offline=offline) for one in ensemble),
    )
    described = read_family(Path(family)) if isinstance(family, str | Path) else family
    if isinstance(source, LanguageModel | EncoderDecoder):
        of_files = {"family": family, "strict": strict, "languages": languages, "offline": offline}
        if stray := next((name for name, value in of_files.items() if value), None):
            raise UsageError(f"{stray} is for a model in files: leave it out for one in memory")
        return Model(Opened(f"a module ({type(source).__name__})", None, options, module=source))
    if isinstance(source, Model):
        raise UsageError(f"{source.name} is opened already: use it, or load what it was opened from")
    found = find_source(source, tokenizer=tokenizer, offline=offline, family=described, strict=strict)
    return Model(Opened(found.name, found, options))


@final
class Model:
    """A model with its attention layers and heads. A change returns a new model with shared memory.

    `model[3, 2]` is head 2 of layer 3, and `model["cross.3"][2]` is head 2 of cross-attention layer 3 in an
    encoder-decoder.
    """

    _opened: Opened

    _changes: tuple[Change, ...]

    def __init__(self, opened: Opened, changes: Sequence[Change] = ()) -> None:
        """Use `load`."""
        self._opened, self._changes = opened, tuple(changes)

    @property
    def name(self) -> str:
        """The path or name that was given."""
        return self._opened.name

    @property
    def can(self) -> tuple[str, ...]:
        """What works: read, run, rewrite, translate, generate, fill, convert."""
        from triptych.converting.capabilities import capabilities

        return capabilities(self._opened, self._changes)

    @property
    def why_not_run(self) -> str:
        """Why the model can be read and not run; "" if it runs."""
        return self._opened.why_not_run

    @property
    def changes(self) -> tuple[str, ...]:
        """What was changed, in order: `ablate(3.2)`."""
        return tuple(change.words for change in self._changes)

    @property
    def num_parameters(self) -> int:
        """The number of parameters in all tensors of the files."""
        return self._opened.num_parameters

    @cached_property
    def certificate(self) -> Certificate | None:
        """What is claimed of a rewritten model; None for others."""
        from triptych.core.storage.copying import CERTIFICATE
        from triptych.rewriting.certificate import read_certificate

        if self._opened.module is not None or self._changes:
            return None
        path = self._opened.files.file(CERTIFICATE)
        return None if path is None else read_certificate(path)

    @cached_property
    def layers(self) -> Layers:
        """All attention layers, in order; their weights are read when they are first used."""
        from triptych.core.heads import Layer, Layers

        source = self._attention
        names = self._places.names
        own = {
            place.site: name for place, name in zip(source.layers, names, strict=True) if not place.is_shared
        }
        found = []
        for place, name in zip(source.layers, names, strict=True):
            lender = source.lender(place.site)
            borrows = None if lender is None else own[lender]
            shares = own[place.site] if place.is_shared else None
            found.append(Layer(name, source, place.site, borrows, shares))
        return Layers(found)

    @property
    def encoder(self) -> Stack:
        """The layers of the encoder, as `decoder` and `cross` are the others.

        Raises:
            UsageError: there is none.
        """
        return self._stack("encoder")

    @property
    def decoder(self) -> Stack:
        """The self-attention layers of the decoder."""
        return self._stack("decoder")

    @property
    def cross(self) -> Stack:
        """The layers that attend to the encoder's output."""
        return self._stack("cross")

    @overload
    def __getitem__(self, place: int) -> Layer: ...

    @overload
    def __getitem__(self, place: str) -> Any: ...

    @overload
    def __getitem__(self, place: tuple[int | str, int]) -> Head: ...

    def __getitem__(self, place: int | str | tuple[int | str, int]) -> Layer | Head:
        """A layer by its name (`3`, `"decoder.3"`), a head by both (`model[3, 2]`, `model["3.2"]`).

        Raises:
            UsageError: there is no such place, or several; the message lists them.
        """
        number, head = self._places.find(place)
        return self.layers[number] if head is None else self.layers[number][head]

    def __iter__(self) -> Iterator[Layer]:
        """The layers, in order."""
        return iter(self.layers)

    @check_choices
    def composition(self, into: Into, stack: Literal["encoder", "decoder"] | None = None) -> Composition:
        """How much each head reads of what earlier heads of its stack wrote, with the chance level.

        Args:
            into: "Q", "K" or "V" of the later head.
            stack: of an encoder-decoder, which.

        Raises:
            UsageError: positions or norms, which the message names, make the scores wrong; or several stacks.
        """
        from triptych.seeing.composition import compose

        stacks = self._places.stacks
        chosen = stack or stacks[0]
        if len(stacks) > 1 and stack is None:
            raise UsageError(f"{self.name} has {', '.join(stacks)}: composition({into!r}, stack=…) is of one")
        return compose(self._stack(chosen).layers, into)

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
            progress: told the layer, the bytes read, and the bytes of all.

        Raises:
            UsageError: no layer or head is chosen.
            DataError: tensors do not fit the configuration.
        """
        from triptych.seeing.inspection import inspect

        return inspect(
            self._attention, layers=layers, heads=heads, ignore_rotary=ignore_rotary, progress=progress
        )

    def cost(self) -> ModelCost:
        """Parameters, FLOPs per token and cache bytes of the attention, layer by layer."""
        from triptych.seeing.model_cost import cost_of

        return cost_of(self.name, self.layers, self._attention)

    @cached_property
    def _places(self) -> PlaceNames:
        from triptych.core.places import PlaceNames
        from triptych.running.opened_source import stack_of

        layers = self._opened.attention.layers
        return PlaceNames([(stack_of(place.site), place.number) for place in layers], self.name)

    @cached_property
    def _attention(self) -> AttentionSource:
        """The attention layers, changes made."""
        from triptych.running.opened_source import ChangedSource

        source = self._opened.attention
        return ChangedSource(source, self._changes) if self._changes else source

    def _stack(self, name: str) -> Stack:
        from triptych.core.heads import Layers, Stack
        from triptych.running.opened_source import stack_of

        found = [
            layer
            for layer, place in zip(self.layers, self._opened.attention.layers, strict=True)
            if stack_of(place.site) == name
        ]
        if not found:
            raise UsageError(f"{self.name} has no {name}: it has {', '.join(self._places.stacks)}")
        return Stack(name, self.name, Layers(found))

    @property
    def _summary(self) -> str:
        from triptych.running.opened_source import summary_of

        return summary_of(self._opened, self.layers, self._places)

    def __repr__(self) -> str:
        source = self._opened.attention
        rows = [f"Model {self.name}: {self._summary}"]
        rows += [f"  changed: {', '.join(self.changes)}"] if self._changes else []
        rows += [f"  {note}" for note in (source.others, *source.warnings[:2]) if note]
        if source.absent:
            rows.append(f"  absent from the files: {', '.join(source.absent)}")
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        rows = [("model", self._summary), ("found at", self._opened.where)]
        rows += [("changed", ", ".join(self.changes))] if self._changes else []
        return table_html(self.name, rows)

    @overload
    def translate(  # type: ignore[overload-overlap]
        self, text: str, *, stream: Literal[False] = ..., **search: Unpack[SearchKeywords]
    ) -> Translation: ...

    @overload
    def translate(
        self, text: Sequence[str], *, stream: Literal[False] = ..., **search: Unpack[SearchKeywords]
    ) -> list[Translation]: ...

    @overload
    def translate(
        self, text: str | Sequence[str], *, stream: Literal[True], **search: Unpack[SearchKeywords]
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
        stop: Stop | None = None,
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
            stop: when beam search ends: certain, when no hypothesis can overtake the finished ones; full
                (faster), when the beam is full of finished hypotheses.
            glossary: terms of the source language and their translations, which a translation has wherever
                a sentence has the term as whole words. Such a sentence is searched until `stop` is certain.
            workers: number of processes that translate in parallel, one thread each. CPU only.
            special_tokens: how special tokens that a sentence spells out (`<extra_id_0>` of T5) are read: as
                the tokens, or as text. Own and Marian's translators always read text.
            stream: give translations one by one, as soon as each batch is done.

        Returns:
            One translation for a string, whose `text` is the best one; a list for several; an iterator with
            `stream`.

        Raises:
            UsageError: the model does not translate, or options that do not go together.
        """
        from triptych.running.text import as_lines

        translator = self.translator(
            beam_size=beam_size,
            alpha=alpha,
            num_best=num_best,
            max_extra_tokens=max_extra_tokens,
            max_source_tokens=max_source_tokens,
            stop=stop,
            glossary=glossary,
            workers=workers,
            special_tokens=special_tokens,
        )
        if stream:
            return translator.translate_stream(as_lines(text))
        with translator:
            return translator.translate(text)

    @check_choices
    def translator(
        self,
        *,
        beam_size: int | None = None,
        alpha: float | None = None,
        num_best: int = 1,
        max_extra_tokens: int | None = None,
        max_source_tokens: int | None = None,
        stop: Stop | None = None,
        glossary: Mapping[str, str] | None = None,
        workers: int = 1,
        special_tokens: SpecialTokens = "tokens",
    ) -> Translator:
        """What `translate` translates with, ready to be used many times; options as there."""
        from triptych.converting.engines import make_translator

        found = make_translator(
            self.opened,
            self._opened.options,
            workers,
            glossary,
            stop,
            beam_size=beam_size,
            alpha=alpha,
            num_best=num_best,
            max_extra_tokens=max_extra_tokens,
            max_source_tokens=max_source_tokens,
        )
        return found.with_special_tokens(special_tokens)

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
        """Translate a recipe's training text, and write a recipe that trains a student on the translations.

        The same call continues after an interruption. Processes of `torchrun` share the work.

            student = triptych.load("teacher").distil("multi30k-student", "out")
            triptych.train(student.recipe, "out/student")

        Args:
            recipe: of the student, its file, or the name of a built-in one.
            out: the folder to make: `train.jsonl`, `student.toml`, and `distillation.json`, which says where
                they come from.
            beam_size: beam size of the teacher. Default: the recipe's or the checkpoint's.
            alpha: exponent of the length penalty. Default: the recipe's or the checkpoint's.
            num_best: number of translations of each sentence that the student learns from.
            interpolate: of the n best, keep the one with the highest sentence BLEU against the reference.
            originals: share of the original pairs that the student learns from as well, from 0 to 1.
            teacher_weight: share of the loss that compares the student's probabilities with the teacher's,
                from 0 to 1. Above 0 the student has the teacher's tokenizers, and the folder has a copy of
                the teacher.
            workers: number of processes that translate in parallel, one thread each. CPU only.
            display: told what is read; lines on standard error if None.
            progress: told what is done, how many sentences, and of how many.

        Raises:
            UsageError: the model or the recipe does not translate, options that do not go together, or the
                folder has other files or was begun in another way.
        """
        from triptych.converting.engines import identify
        from triptych.training import Recipe, read_recipe, require_translation
        from triptych.training.distilling import distil_text
        from triptych.training.processes import launched
        from triptych.training.progress import LineDisplay

        if not isinstance(recipe, Recipe):
            recipe = require_translation(read_recipe(recipe), recipe)
        options = self._opened.options
        if teacher_weight:
            if self.changes:
                raise UsageError(
                    "teacher_weight needs a teacher without changes: save the changed model first"
                )
            self.opened.require_recipe()
        with (
            launched(options.device) as world,
            self.translator(beam_size=beam_size, alpha=alpha, num_best=num_best, workers=workers) as teacher,
        ):
            return distil_text(
                teacher,
                identify(teacher, self.name, self.changes, options),
                recipe,
                Path(out),
                world,
                display or LineDisplay(),
                progress,
                interpolate=interpolate,
                originals=originals,
                teacher_weight=teacher_weight,
                save_teacher=self.opened.save,
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
            out: the file, which is also a vocabulary map of CTranslate2.
            source: a text file with a sentence a line. Default: the text that the run was trained on.
            target: its translations, line by line.
            most: number of target tokens of each source token, the most probable ones.
            frequent: number of target tokens that every sentence may use, the most frequent ones.
            display: told what is read; lines on standard error if None.

        Returns:
            How many tokens a sentence may use, and the share of its translation's tokens among them: of every
            twentieth pair, which is held out.

        Raises:
            UsageError: the model does not translate, or one text is given without the other.
        """
        from triptych.training.progress import LineDisplay
        from triptych.training.shortlist import write_shortlist

        text = None if source is None else Path(source), None if target is None else Path(target)
        return write_shortlist(self.opened, Path(out), text, most, frequent, display or LineDisplay())

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
        self, text: Text | Tensor, *, stream: Literal[True], **options: Unpack[GenerationKeywords]
    ) -> Iterator[str]: ...

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

        What is not given is as the checkpoint's `generation_config.json` says.

        Args:
            text: one text, or several: strings, or token ids. An empty string begins with the token that
                begins a text.
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
                eos_token_id; others that would change a text are refused by name.
            seed: the same seed gives the same text, whatever the other texts are (on x86-64 CPUs). Without a
                temperature nothing is drawn, and every seed gives the same text.
            num_samples: number of continuations of each text; with a beam, the best ones.
            beam_size: beam size; 1 is no beam search.
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
            an iterator of strings with `stream`.

        Raises:
            UsageError: the model continues no text, or options that do not go together.
        """
        from triptych.running.changes import continue_changed
        from triptych.running.decoding import GenerationOptions
        from triptych.running.opening.generation_config import Asked, GenerationConfig
        from triptych.running.text import as_texts
        from triptych.seeing.attending.over import refuse_file_name

        asked = Asked(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, beam_size)
        generator = self.generator()
        settings = self.opened.generation if generation_config == "follow" else GenerationConfig()
        settings.require_followed(asked)
        if beam_size == 1:
            _refuse_given("beam_size above 1", alpha=alpha or None)
        try:
            sampling = settings.sampling(asked)
            options = GenerationOptions(
                sampling=sampling,
                seed=seed,
                num_samples=num_samples,
                beam_size=beam_size,
                alpha=alpha,
                stop_texts=(stop,) if isinstance(stop, str) else tuple(stop),
                max_prompt_tokens=max_prompt_tokens,
                **settings.lengths(asked),
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        if sampling.temperature == 0:
            _refuse_given("temperature above 0", top_k=top_k, top_p=top_p, min_p=min_p)
        given = as_texts(refuse_file_name(text))
        settings.say(asked, sampling)
        if stream:
            if not given.is_one:
                raise UsageError("stream=True continues one text: give a string, or its token ids")
            if beam_size > 1 or num_samples > 1:
                raise UsageError(
                    "stream=True gives one text without a beam: leave out beam_size and num_samples"
                )
            return generator.stream(given.texts[0], options, chat=chat, special_tokens=special_tokens)
        ids = generator.encode_prompts(given.texts, chat=chat, special_tokens=special_tokens)
        continued = continue_changed(ids, generator, options, self._changes)
        found = [one[0] if num_samples == 1 else one for one in continued]
        return found[0] if given.is_one else found

    def generator(self) -> TextGenerator:
        """What `generate` continues texts with, made once."""
        return self._generator

    @cached_property
    def _generator(self) -> TextGenerator:
        from triptych.converting.engines import make_generator

        return make_generator(self.opened, self._opened.options)

    def fill(self, text: str, count: int = 5, *, max_tokens: int | None = None) -> list[list[Filling]]:
        """The most probable tokens for every `[MASK]` of a text.

        Args:
            text: with at least one mask.
            count: how many tokens are shown for each mask.
            max_tokens: longest text in tokens. Default: the model's positions, or 8192 where they set no
                limit.

        Raises:
            UsageError: the model fills no masks, or there is none in the text.
        """
        from triptych.running.decoding import fill_masks
        from triptych.running.text import as_lines

        opened = self.opened
        (line,) = as_lines([text])
        self._opened.own_weights()
        return fill_masks(opened.language_model, opened.tokenizer, line, count, max_tokens)

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
        workers: int = ...,
        special_tokens: SpecialTokens = ...,
        progress: Progress = ...,
    ) -> Evaluation: ...

    @check_choices
    def evaluate(
        self,
        text: str | Path | Sequence[str],
        references: str | Path | Sequence[str] | None = None,
        *,
        context: int | None = None,
        stride: int | None = None,
        beam_size: int | None = None,
        alpha: float | None = None,
        stop: Stop | None = None,
        workers: int = 1,
        special_tokens: SpecialTokens = "tokens",
        progress: Progress = untold,
    ) -> Likelihood | Evaluation:
        """How well the model predicts a text; with references, how well it translates one.

        Args:
            text: a text, the file of one, or several documents, each scored by itself. For a translation, the
                sentences, or the file with one on each line.
            references: the right translations, or their file.
            context: tokens of a window. Default: a run's context, or the model's positions; at most 1024.
            stride: tokens between the starts of windows. Default: the context, so that windows do
                not overlap.
            beam_size: beam size; 1 is greedy. Default: the recipe's or the checkpoint's.
            alpha: exponent of the length penalty. Default: the recipe's or the checkpoint's.
            stop: when beam search ends, as in `translate`: certain or full.
            workers: number of processes that translate in parallel.
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".
            progress: told what is done, how many documents or sentences, and of how many.

        Returns:
            The loss in nats per token with its interval, or BLEU and chrF with theirs.

        Raises:
            UsageError: the model does not do it, or options that do not go together.
            DataError: there is nothing to score.
        """
        from triptych.converting.engines import evaluate_text
        from triptych.running.decoding import evaluate_translations
        from triptych.seeing.attending.over import given_lines, given_texts

        if references is not None:
            _refuse_given("a text to predict, without references", context=context, stride=stride)
            translator = self.translator(
                beam_size=beam_size,
                alpha=alpha,
                stop=stop,
                workers=workers,
                special_tokens=special_tokens,
            )
            sources = given_texts(self.reader, text)
            right = given_lines(references)
            return evaluate_translations(translator, sources, right, partial(progress, "translating"))
        searched = {"beam_size": beam_size, "alpha": alpha, "stop": stop}
        _refuse_given("references", **searched, workers=None if workers == 1 else workers)
        documents = given_texts(self.reader, text)
        scoring = partial(progress, "scoring")
        options = self._opened.options
        return evaluate_text(self.opened, documents, options, context, stride, scoring, special_tokens)

    @check_choices
    def score(
        self,
        text: Text | Tensor,
        target: Text | None = None,
        *,
        max_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
    ) -> list[tuple[str, float]]:
        """The tokens of a text that are predicted, and the log-probability in nats of each.

        Args:
            text: what the model reads: a string, or token ids.
            target: of an encoder-decoder, the translation that is scored; its own if None.
            max_tokens: longest text in tokens, as in `run`.
            special_tokens: as in `run`.

        Raises:
            UsageError: the model predicts no next token.
        """
        import torch

        from triptych.running.text import as_texts
        from triptych.seeing.attending.over import refuse_file_name

        given = as_texts(refuse_file_name(text))
        if not given.is_one:
            raise UsageError("score takes one text: a string, or its token ids")
        with torch.no_grad():
            run = self.run(
                given.texts[0], target=target, max_tokens=max_tokens, special_tokens=special_tokens
            )
        losses = run.losses.tolist()
        return [
            (token, -loss)
            for token, loss in zip(run.tokens[len(run.tokens) - len(losses) :], losses, strict=True)
        ]

    @overload
    def attend(  # type: ignore[overload-overlap]
        self,
        text: Text | Tensor,
        target: Text | None = ...,
        *,
        max_new_tokens: int = ...,
        max_tokens: int | None = ...,
        special_tokens: SpecialTokens = ...,
    ) -> Attention: ...

    @overload
    def attend(
        self,
        text: Sequence[Text],
        target: Sequence[Text] | None = ...,
        *,
        max_new_tokens: int = ...,
        max_tokens: int | None = ...,
        special_tokens: SpecialTokens = ...,
    ) -> AttentionBatch: ...

    @check_choices
    def attend(
        self,
        text: Text | Sequence[Text] | Tensor,
        target: Text | Sequence[Text] | None = None,
        *,
        max_new_tokens: int = 0,
        max_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
    ) -> Attention | AttentionBatch:
        """Where every head looks on a text: `model.attend(text)[3, 2]` is `[queries, keys]`.

        Args:
            text: one text, or several, which are read in padded batches: strings, or token ids.
            target: of an encoder-decoder, what its decoder reads, one for each text; its own translation if
                None.
            max_new_tokens: continue the text greedily by this many tokens first.
            max_tokens: longest text in tokens. Default: the model's positions, or 8192 where they set no
                limit.
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".

        Raises:
            UsageError: a text past the model's positions, an empty one where no token begins a text, or
                something that the model does not do.
        """
        from triptych.seeing.attending import attend
        from triptych.seeing.attending.over import refuse_file_name

        texts = refuse_file_name(text)
        return attend(self.reader, texts, target, max_new_tokens, max_tokens, special_tokens)

    @check_choices
    def attend_over(
        self,
        text: str | Path | Sequence[str],
        targets: str | Path | Sequence[str] | None = None,
        *,
        documents: Documents = "file",
        worth: Instead | None = None,
        explain: bool = False,
        context: int | None = None,
        most_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
        progress: Progress = untold,
    ) -> OverText:
        """What every head does over a whole text: previous token, induction, what it is worth.

        Args:
            text: a text, the file of one, or several documents.
            targets: for a translator, the translations, line by line. Default: the model's own.
            documents: what a document is in a plain text file: the whole file, each line, or the lines
                between blank lines. Intervals are over documents.
            worth: measure the loss without each head: its output becomes zero, its mean over the text, or
                what it would be if it looked evenly.
            explain: measure how well W_QK, cut to several ranks, explains where heads look, and whether they
                write the tokens that they look at.
            context: tokens of a window. Default: a run's context, or the model's positions; at most 256.
            most_tokens: tokens to read. Default: 65,536, and 8,192 with `worth` or `explain`.
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".
            progress: told what is being done, how much is done, and the total.

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
        text: Text | Tensor,
        *,
        target: Text | None = ...,
        grad: bool = ...,
        max_tokens: int | None = ...,
        special_tokens: SpecialTokens = ...,
    ) -> Run: ...

    @overload
    def run(
        self,
        text: Sequence[Text],
        *,
        target: Sequence[Text] | None = ...,
        grad: bool = ...,
        max_tokens: int | None = ...,
        special_tokens: SpecialTokens = ...,
    ) -> list[Run]: ...

    @check_choices
    def run(
        self,
        text: Text | Sequence[Text] | Tensor,
        *,
        target: Text | Sequence[Text] | None = None,
        grad: bool = False,
        max_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
    ) -> Run | list[Run]:
        """Run the model on a text: logits, loss, and every activation.

        Args:
            text: one text, or several, which run as one padded batch: strings, or token ids.
            target: of an encoder-decoder, what its decoder produces; its own translation if None.
            grad: whether gradients reach the activations and parameters (`Run.gradient`).
            max_tokens: longest text in tokens. Default: the model's positions, or 8192 where they set no
                limit.
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".

        Raises:
            UsageError: a text past the model's positions, or an empty one where no token begins a text.
        """
        from triptych.running.run import run_texts
        from triptych.running.text import as_texts
        from triptych.seeing.attending.over import refuse_file_name

        given = as_texts(refuse_file_name(text))
        targets = None if target is None else as_texts(target, "target").texts
        ids = self.reader.encode(given.texts, targets, 0, max_tokens, special_tokens)
        sites = self._opened.sites_of(self.reader.model)
        found = run_texts(self.reader, self._places, sites, ids, grad, max_tokens)
        return found[0] if given.is_one else found

    @cached_property
    def opened(self) -> OpenedModel:
        """The module with its tokenizers, changes made.

        Raises:
            TriptychError: the model cannot be run; the message says why.
        """
        from triptych.running.changes import changed_copy

        try:
            opened = self._opened.ready
        except DataError as error:
            if self._has_heads():
                raise DataError(f"{error}; triptych inspect can read its heads") from None
            raise
        if not self._changes:
            return opened
        return opened.with_model(changed_copy(opened.model, self._changes, self._opened.sites_of))

    def _has_heads(self) -> bool:
        try:
            return bool(self.layers)
        except TriptychError:
            return False

    @cached_property
    def reader(self) -> Reader:
        """What reads texts, with the weights in memory."""
        from triptych.running.opening import Reader

        opened = self.opened
        self._opened.own_weights()
        return Reader(opened)

    @check_choices
    def ablate(self, heads: Heads, by: By = "zero", *, text: str | Sequence[str] | None = None) -> Model:
        """The model with some heads off: what they give W_O is replaced.

        Of layers that share their weights only those named lose heads, and the model can be saved if all do.

        Args:
            heads: `"3.2"`, `"3"` for a layer, `"*.2"`, `"cross.*"`; several, by commas or in a list.
            by: what takes the place: "zero", the "mean" over a text, or what the head gives on another text,
                position by position ("resample").
            text: for "mean" and "resample".

        Raises:
            UsageError: there is no such head, or a text is missing.
        """
        import torch

        from triptych.core.places import in_words
        from triptych.running.changes import Edit, Part, ValueChange, ablation, resampled

        if by == "zero" and text is not None:
            raise UsageError('a text goes with by="mean" or by="resample"')
        if by != "zero" and text is None:
            raise UsageError(f'by="{by}" needs a text: ablate({in_words(heads)!r}, by="{by}", text=…)')
        chosen = self._heads(heads)
        words = f"ablate({in_words(heads)}{'' if by == 'zero' else f', by={by}'})"
        if text is None:
            return self._changed(ablation(words, chosen))
        runs = self.run([text] if isinstance(text, str) else list(text))
        values = {
            number: {head: torch.cat([run[f"{name}.{head}"].z.detach() for run in runs]) for head in own}
            for number, own in chosen.items()
            for name in [self._places.names[number]]
        }
        if by == "mean":
            return self._changed(ablation(words, values))
        edits: dict[int, dict[Part, Edit]] = {
            number: {head: resampled(z) for head, z in own.items()} for number, own in values.items()
        }
        return self._changed(ValueChange(words, "z", edits))

    @check_choices
    def patch(
        self,
        heads: Heads,
        run: Run,
        what: Activation = "z",
        *,
        positions: Sequence[int] | None = None,
    ) -> Model:
        """The model with activations of some heads taken from a run, position by position.

        It then reads texts of as many tokens as the run's; a continuation that is generated grows from there.

        Args:
            heads: as in `ablate`.
            run: of this model or another one with such heads, on one text of its own.
            what: which activation: q, k, v, scores, weights or z.
            positions: of the run's text, at which it is taken, below 0 from its end; all if None.

        Raises:
            UsageError: there is no such head or position; when the model runs, the lengths do not fit.
        """
        from triptych.core.places import in_words
        from triptych.running.changes import Edit, Part, Patch, ValueChange
        from triptych.running.run import Run

        if not isinstance(run, Run):
            raise UsageError(f"patch takes one run, of run(text): a {type(run).__name__} is none")
        names = self._places.names
        edits = dict[int, dict[Part, Edit]]()
        is_pair = len(self._places.stacks) > 1
        for number, own in self._heads(heads).items():
            stack = names[number].partition(".")[0]
            take = partial(
                Patch,
                what,
                positions=positions,
                queries_grow=is_pair and stack != "encoder",
                keys_grow=is_pair and stack == "decoder",
            )
            edits[number] = {
                head: take(values=getattr(run[f"{names[number]}.{head}"], what).detach()) for head in own
            }
        return self._changed(ValueChange(f"patch({in_words(heads)}, {what})", what, edits))

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
            with_: from the value of one head, `[batch, …]` as in `Run`, to what takes its place, of the same
                shape.
            together: whether `with_` gets the named heads of a layer at once, `[batch, heads, …]`.

        Raises:
            UsageError: there is no such head or value.
        """
        from triptych.core.places import in_words
        from triptych.running.changes import Edit, Part, ValueChange

        if not callable(with_):
            raise UsageError(f"edit takes a function of the value: a {type(with_).__name__} is none")
        edits: dict[int, dict[Part, Edit]] = {
            number: dict.fromkeys([tuple(own)] if together else own, lambda value, first: with_(value))
            for number, own in self._heads(heads).items()
        }
        return self._changed(ValueChange(f"edit({in_words(heads)}, {what})", what, edits))

    def steer(self, place: str, vector: Float[Tensor, " d_model"], scale: float = 1.0) -> Model:
        """The model with a direction added to its residual stream.

        Args:
            place: `"residual.3"`: before block 3; `"residual.encoder.3"` of an encoder-decoder. The number of
                blocks is the end of the stack.
            vector: `[d_model]`.
            scale: what it is multiplied by.

        Raises:
            UsageError: there is no such place, or the vector has another width.
        """
        import torch

        from triptych.running.changes import Steering

        stack, block = self._places.residual(place)
        width = self.layers[0].d_model
        vector = torch.as_tensor(vector)
        if vector.shape != (width,):
            raise UsageError(f"the vector has shape {list(vector.shape)}, and the stream is [{width}]")
        if any(half.streams is not None for half in self.opened.model.stacks.values()):
            raise UsageError(f"{self.name} has several residual streams, and steer changes one")
        direction = scale * vector.detach().to(self.opened.model.parameters().__next__().device)
        return self._changed(Steering(f"steer({place}, {scale:g})", stack, block, direction))

    def replace(self, place: str | int, **maps: Tensor) -> Model:
        """The model with other maps in a layer or a head: `model.replace("3.2", W_Q=…)`.

        Where layers share their weights, all of them have the new map; `changes` says which they are.

        Args:
            place: a layer or a head.
            maps: W_Q, W_K, W_V or W_O; shapes as `Layer` and `Head` have them.

        Raises:
            UsageError: another shape, a map that heads share, or no such place.
        """
        import torch

        from triptych.core.places import head_of
        from triptych.running.changes import SIDE_OF, WeightChange, with_map

        number, head = self._places.find(place)
        if head is not None:
            head = head_of(head, self.layers[number].num_heads, f"layer {self._places.names[number]}")
        if unknown := [name for name in maps if name not in SIDE_OF]:
            raise UsageError(f"{unknown[0]} is not one of {', '.join(SIDE_OF)}")
        self._require_own_maps(number, maps)
        numbers, where = self._sharing([number])
        changed = self._changed(
            *(
                WeightChange(
                    f"replace({place}, {name}){where}",
                    dict.fromkeys(
                        numbers, partial(with_map, name=name, given=torch.as_tensor(given), head=head)
                    ),
                )
                for name, given in maps.items()
            )
        )
        changed.layers[number].weights  # noqa: B018 (a shape that does not fit is an error now)
        return changed

    def tie(self, place: str | int, name: str, to: str) -> Model:
        """The model with one map of a layer in the place of another: `model.tie("3", "W_K", "W_Q")`.

        Where layers share their weights, the maps of all of them are tied; `changes` says which they are.

        Args:
            place: a layer, or "*" for all.
            name: the map that is replaced: W_Q, W_K or W_V.
            to: the map that takes its place.

        Raises:
            UsageError: the maps do not fit each other.
        """
        from triptych.running.changes import SIDE_OF, WeightChange, tied_map

        if unknown := [map_ for map_ in (name, to) if map_ not in SIDE_OF]:
            raise UsageError(f"{unknown[0]} is not one of {', '.join(SIDE_OF)}")
        named = [*range(len(self.layers))] if str(place) == "*" else [self._places.layer(place)]
        if str(place) == "*" and name in _OF_KEYS:  # what layers borrow is tied where it is
            named = [number for number in named if self.layers[number].borrows is None]
        for number in named:
            self._require_own_maps(number, [name])
        numbers, where = self._sharing(named)
        tied = partial(tied_map, name=name, to=to)
        words = f"tie({place}, {name}, {to}){where}"
        changed = self._changed(WeightChange(words, dict.fromkeys(numbers, tied)))
        for number in numbers:
            changed.layers[number].weights  # noqa: B018
        return changed

    def without_positions(self) -> Model:
        """The model without positions: nothing turns queries and keys, or is added to scores or embeddings.

        Raises:
            UsageError: the model has no positions besides the causal mask.
        """
        from triptych.core.attention import LearnedPositions, SinusoidalPositions
        from triptych.running.changes import PositionsOff, without_positions

        own = tuple(
            number for number, layer in enumerate(self.layers) if layer.outline.semantics.positions != "none"
        )
        added = any(
            isinstance(part, LearnedPositions | SinusoidalPositions) for part in self.opened.model.modules()
        )
        if not own and not added:
            raise UsageError(f"{self.name} has no positions to leave out")
        return self._changed(PositionsOff("without_positions()", dict.fromkeys(own, without_positions)))

    @check_choices
    def sweep(
        self,
        clean: str | Sequence[str],
        corrupted: str | Sequence[str],
        metric: Callable[[Run], float | Tensor],
        what: Activation = "z",
        *,
        progress: Progress = untold,
    ) -> Sweep:
        """Patch every head in turn from a run on clean text into one on corrupted text.

        Args:
            clean: a text, or several.
            corrupted: as many texts, each with as many tokens as the clean one.
            metric: of a run, a number.
            what: which activation is patched.
            progress: told the head, how many are done, and of how many.

        Returns:
            By head, the metric after the patch, with bootstrap intervals over texts.

        Raises:
            UsageError: there are not as many texts, or not as many tokens in a pair.
        """
        from triptych.seeing.sweep import sweep_heads

        texts = [[one] if isinstance(one, str) else list(one) for one in (clean, corrupted)]
        run = self._opened.sites_of(self.reader.model)
        return sweep_heads(
            [f"{layer.name}.{head}" for layer in self.layers[: len(run)] for head in range(layer.num_heads)],
            self.run,
            lambda head, run, text: self.patch(head, run, what).run(text),
            (texts[0], texts[1]),
            metric,
            what,
            progress,
        )

    def plan(
        self,
        *steps: Step,
        layers: Sequence[int] | None = None,
        calibration: str | Path | None = None,
        skip_refused: bool = False,
    ) -> Plan:
        """What a rewrite would do, without doing it; arguments and errors as in `rewrite`."""
        from triptych.rewriting.planning import plan_rewrite
        from triptych.rewriting.recipe import to_recipe

        recipe = to_recipe(steps, calibration, layers=layers, skip_refused=skip_refused)
        with self._files() as source:
            return plan_rewrite(source, recipe)

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
        """The model with its attention written in another way, and a certificate of what that changed.

            model.rewrite("fold_value_bias", "truncate(rank=6)").save("smaller")

        The certificate compares with this model: where it was rewritten before, give all steps at once for
        one that compares with the first.

        Args:
            steps: rewrites, as calls or as records, in order; "exact" for all exact ones; or a recipe, or its
                file.
            layers: numbers of the layers that steps without layers of their own rewrite; all if None.
            out: the folder to write; a temporary one, which `save` copies, if None.
            calibration: a text to run the model on first, for the rewrites that use one; for a translator,
                lines of source, tab, target.
            skip_refused: if a layer refuses a step, leave the layer as it is instead of stopping.
            text: compare both models on this text after the rewrite.
            compare: compare both models after the rewrite, on random tokens if no text is given.
            progress: told what is being done, how much is done, and the total.

        Raises:
            RewriteRefusedError: a layer refuses a step, with the reason.
            UsageError: an unknown rewrite, or the folder exists.
        """
        from triptych.rewriting.recipe import to_recipe
        from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
        from triptych.running.opened_source import Opened

        temporary = Path(mkdtemp(prefix="triptych-")) if out is None else None
        name = str(out) if temporary is None else f"{self.name}, rewritten"
        target = Path(name) if temporary is None else temporary / "rewritten"
        try:
            with self._files() as source:
                certificate = rewrite_checkpoint(
                    source,
                    target,
                    to_recipe(steps, calibration, layers=layers, skip_refused=skip_refused),
                    text=None if text is None else Path(text),
                    compare=compare,
                    progress=progress,
                )
                files = source.at(target)
            files.name = name
            if temporary is None:
                files.where = str(target / "config.json")
        except BaseException:  # an interruption too leaves nothing behind
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        # A model in memory has its tokenizer among its files now.
        options = replace(self._opened.options, tokenizer=None)
        rewritten = Model(Opened(name, files, options, temporary=temporary))
        rewritten.certificate = certificate
        return rewritten

    def check(self, text: str | None = None, target: str | None = None) -> Check:
        """Compare logits, losses and attention weights with `transformers`, which has to be installed.

        Args:
            text: what both read; random tokens if None.
            target: of an encoder-decoder, what its decoder produces; its own translation if None.

        Raises:
            UsageError: a run of triptych, or a change that weights cannot express; or no `transformers`.
            DataError: one of the two does not run it.
        """
        from triptych.rewriting.against_transformers import check_against_transformers

        with self._files() as source:
            return check_against_transformers(source, text, target)

    def save(self, path: str | Path) -> Path:
        """Write the model in the format that it came from; returns the folder.

        A rewritten model is written with its certificate. Changes that weights can say are written into them.
        A tokenizer that the model was loaded with takes the place of that of the files.

        Args:
            path: the folder to make.

        Raises:
            UsageError: the folder exists, or weights cannot express a change, which is named.
            RewriteRefusedError: the format has no place for it.
        """
        from triptych.rewriting.saving import save_changed, save_unchanged
        from triptych.running.opened_source import why_not_saved

        target = Path(path)
        for change in self._changes:
            if reason := why_not_saved(change, self._opened.attention):
                raise UsageError(f"{change.words} cannot be saved: {reason}")
        if self._changes:
            save_changed(self._opened, self._attention, self._changes, target)
        else:
            save_unchanged(self._opened, target)
        return target

    @check_choices
    def convert(
        self, path: str | Path, to: TargetFormat, quantization: Quantization = "float32"
    ) -> Conversion:
        """Write the model in another format: "hf", "ctranslate2", "onnx" or "triptych".

        Args:
            path: the folder to make.
            to: the format.
            quantization: type of the weights, for ctranslate2.

        Raises:
            UsageError: the model does not fit the format, or it was changed.
        """
        from triptych.converting.conversion import convert

        if self._opened.options.shortlist is not None and to != "ctranslate2":
            raise UsageError(f"{to} has no place for a shortlist: leave it out, or convert to ctranslate2")
        if self._changes:
            raise UsageError(
                f"{self.name} was changed ({', '.join(self.changes)}): save it, and convert what was saved"
            )
        return convert(self.opened, Path(path), to, quantization)

    def _require_own_maps(self, number: int, names: Iterable[str]) -> None:
        """Check that a layer has the maps that are to change, and does not borrow them."""
        layer = self.layers[number]
        borrowed = [name for name in names if name in _OF_KEYS]
        if borrowed and layer.borrows is not None:
            raise UsageError(
                f"layer {layer.name} has keys and values of layer {layer.borrows}: change {borrowed[0]} there"
            )

    def _sharing(self, numbers: Collection[int]) -> tuple[list[int], str]:
        """Add all layers that share weights with the given ones; also return words on the added ones."""
        from triptych.core.checkpoints.stored_layers import in_ranges

        layers = self._opened.attention.layers
        sites = {layers[number].site for number in numbers}
        found = [number for number, layer in enumerate(layers) if layer.site in sites]
        if len(found) == len(numbers):
            return found, ""
        shared = ", ".join(in_ranges(site.numbers) for site in self._opened.attention.sites if site in sites)
        return found, f" in layers {shared}, which share their weights"

    def _heads(self, heads: Heads) -> dict[int, tuple[int, ...]]:
        from triptych.core.places import in_words

        return self._places.heads(in_words(heads), [layer.num_heads for layer in self.layers])

    def _changed(self, *changes: Change) -> Model:
        return Model(self._opened, (*self._changes, *changes))

    @contextmanager
    def _files(self) -> Iterator[Source]:
        """The files that a rewrite reads; a changed model, and a module in memory, are saved to be read."""
        from triptych.core.checkpoints.source import find_source

        if not self._changes and self._opened.module is None:
            yield self._opened.files
            return
        with TemporaryDirectory(prefix="triptych-") as place:
            saved = self.save(Path(place, "model"))
            if self._opened.module is None:
                source = self._opened.files.at(saved)
            else:
                if self._opened.options.tokenizer is not None and not self._opened.why_not_run:
                    self._opened.model.save_tokenizers(saved)
                source = find_source(saved)
                source.where = f"{self.name}/config.json"
            source.name = ", ".join((self.name, *self.changes))
            yield source


def _refuse_given(with_what: str, **options: Any) -> None:
    """Raise where one of these was given, which counts only with something else."""
    if found := next((name for name, value in options.items() if value is not None), None):
        raise UsageError(f"{found} goes with {with_what}: leave it out")


def renamed(model: Model, name: str, *, is_mapped: bool = True) -> Model:
    """Return the same model under another name, which its records and messages have instead of a path.

    Weights that are looked at are mapped from their files, or else (`is_mapped` is False) read, so that no
    change of a file can end the process.
    """
    return Model(model._opened.named(name, is_mapped=is_mapped), model._changes)


def reopened(model: Model) -> Model:
    """Open the model that is now where one was found, with the same options and changes."""
    return Model(model._opened.reopened(), model._changes)


def require_same_files(model: Model) -> None:
    """Check that a model's files are those that it was opened from; `DataError` if one was changed."""
    model._opened.require_same()
