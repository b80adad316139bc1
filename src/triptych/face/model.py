"""`load(x)` is a model: its layers have heads, it reads texts, and a change gives a new one."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal, final, overload

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.algebra.rewrites import Rewrite
from triptych.attending import Attention, AttentionBatch, attend, attend_over
from triptych.attending.over import OverText, given_texts
from triptych.attending.worth import Instead
from triptych.attention import ACTIVATIONS, Activation, LearnedPositions, SinusoidalPositions
from triptych.checkpoints.family import Family, read_family
from triptych.checkpoints.layer import AttentionSource
from triptych.checkpoints.source import Source, find_source
from triptych.checkpoints.translators import Languages
from triptych.converting.checks import Quantization
from triptych.converting.conversion import Conversion, TargetFormat, convert
from triptych.decoding import (
    Continuation,
    Filling,
    GenerationOptions,
    Precision,
    SamplingOptions,
    Stop,
    TextGenerator,
    Translator,
    evaluate_translations,
    fill_masks,
)
from triptych.errors import DataError, TriptychError, UsageError
from triptych.face.changes import (
    SIDE_OF,
    Change,
    Edit,
    Part,
    PositionsOff,
    Steering,
    ValueChange,
    WeightChange,
    ablation,
    changed_copy,
    patched,
    resampled,
    tied_map,
    with_map,
)
from triptych.face.checking import Check, check_against_transformers
from triptych.face.composition import Composition, Into, compose
from triptych.face.cost import ModelCost, cost_of
from triptych.face.engines import (
    EngineName,
    Options,
    evaluate_text,
    hash_of,
    make_generator,
    make_translator,
    require_ctranslate2,
)
from triptych.face.heads import Head, Layer, Layers, Stack
from triptych.face.opened import ChangedSource, Opened, stack_of, summary_of
from triptych.face.run import Run, recorded_graph
from triptych.face.saving import save_changed, save_unchanged
from triptych.face.sweep import Sweep, sweep_heads
from triptych.files import write_text
from triptych.inspection import Inspection, inspect
from triptych.models import EncoderDecoder, LanguageModel
from triptych.opening import OpenedModel, Places, Reader
from triptych.printable import table_html
from triptych.progress import Progress, untold
from triptych.rewriting.certificate import Certificate, read_certificate
from triptych.rewriting.checkpoint import rewrite_checkpoint
from triptych.rewriting.planning import Plan, plan_rewrite
from triptych.rewriting.recipe import RewriteRecipe, recipe_of
from triptych.storage.copying import CERTIFICATE
from triptych.text import CorpusSpec, TokenSequences, read_lines, read_parallel
from triptych.text.documents import Documents
from triptych.text.shortlists import Coverage, learn_shortlist
from triptych.training import Recipe, read_recipe, require_translation
from triptych.training.distilling import Distilled, distil_text
from triptych.training.processes import launched
from triptych.training.progress import Display, LineDisplay
from triptych.training.translation import read_corpora
from triptych.user_code import use_code

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
By = Literal["zero", "mean", "resample"]
# A rewrite as a call or a record, a recipe of several, or the file of one.
Step = str | Rewrite | RewriteRecipe | Path


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
    shortlist: str | Path | None = None,
    code: str | Path | None = None,
) -> "Model":
    """Open a model: `load("gpt2")[3, 2].W_Q`, `load("runs/demo").translate("Guten Tag.")`.

    Opening reads the configuration and the headers of the files. A weight is read when it is asked for; of a
    model on the Hub by its bytes' range. Modules are built when the model first runs.

    Args:
        source: a run folder, a folder or a tensor file in Hugging Face's format, a name on the Hub
            (`owner/name`, with `@revision` or without; a path of that name comes first), a `transformers`
            model, or a model of triptych in memory.
        device: auto, cpu, cuda or cuda:N; auto takes a GPU if there is one.
        dtype: type of the parameters when the model runs. Default: that of the files.
        tokenizer: of a model in memory: the folder of its tokenizer, or for a `transformers` model
            the tokenizer.
        languages: for a translator of several languages (mBART, NLLB): source and target as its tokenizer
            spells them, such as de_DE and en_XX.
        engine: the library that translates and generates: triptych, ctranslate2 (faster in int8 on CPUs;
            needs the extra of that name), or auto: ctranslate2 for translation on a CPU where it is installed
            and computes the same model, otherwise triptych. A line says which.
        precision: type of the maps when text is translated or generated: fp32, or bf16 and int8 (CPU only),
            which are faster and change some texts. On x86-64 CPUs no text depends on the others of its
            batch; docs/how-to/generating.md has the exceptions.
        offline: read models of the Hub only from the cache on this machine; HF_HUB_OFFLINE=1 does the same.
        family: a family file that describes the checkpoint, where its configuration does not say enough.
        shortlist: for a translator, a file that `triptych shortlist` wrote: the output layer computes only
            the tokens that it lists for a sentence, which is faster.
        code: the file whose classes a run names, such as a parameterisation of your own. It is executed, and
            must be the file that the run was trained with. Nothing that lies in a run is ever executed.

    Raises:
        UsageError: nothing of that name, or something that is no model.
    """
    if code is not None:
        use_code(code)
    if engine != "triptych" and dtype is not None:
        raise UsageError(f"--engine {engine} rounds by --precision: leave out --dtype")
    if engine == "ctranslate2":
        require_ctranslate2()
    options = Options(
        device,
        getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        tokenizer,
        None if languages is None else Languages(*languages),
        engine,
        precision,
        read_family(Path(family)) if isinstance(family, str | Path) else family,
        None if shortlist is None else Path(shortlist),
    )
    if isinstance(source, LanguageModel | EncoderDecoder):
        return Model(Opened(f"a module ({type(source).__name__})", None, options, module=source))
    found = find_source(source, tokenizer=tokenizer, offline=offline)
    return Model(Opened(found.name, found, options))


@final
class Model:
    """A model whose layers have heads. A change gives a new model, which shares memory with this one.

    `model[3, 2]` is head 2 of layer 3, `model["cross.3"][2]` one of an encoder-decoder's cross-attention.
    """

    def __init__(self, opened: Opened, changes: Sequence[Change] = ()) -> None:
        """Use `load`."""
        self._opened, self._changes = opened, tuple(changes)

    # What it is.

    @property
    def name(self) -> str:
        """The path or name that was given."""
        return self._opened.name

    @property
    def can(self) -> tuple[str, ...]:
        """What works: read, run, rewrite, translate, generate, fill, convert."""
        return self._opened.can(self._changes)

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
        """Of all tensors of the files."""
        return self._opened.num_parameters

    @cached_property
    def certificate(self) -> Certificate | None:
        """What is claimed of a rewritten model; None for others."""
        if self._opened.module is not None or self._changes:
            return None
        path = self._opened.files.file(CERTIFICATE)
        return None if path is None else read_certificate(path)

    # Reading.

    @cached_property
    def layers(self) -> Layers:
        """All attention layers, in order; their weights are read when they are asked for."""
        source = self._attention
        names = dict(zip(source.sites, self._places.names, strict=True))
        lenders = {site: source.lender(site) for site in source.sites}
        return Layers(
            [
                Layer(name, source, site, None if (lender := lenders[site]) is None else names[lender])
                for site, name in names.items()
            ]
        )

    @property
    def encoder(self) -> "Stack":
        """The layers of the encoder, as `decoder` and `cross` are the others.

        Raises:
            UsageError: there is none.
        """
        return self._stack("encoder")

    @property
    def decoder(self) -> "Stack":
        """The self-attention layers of the decoder."""
        return self._stack("decoder")

    @property
    def cross(self) -> "Stack":
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

    def composition(self, into: Into, stack: Literal["encoder", "decoder"] | None = None) -> Composition:
        """How much each head reads of what earlier heads of its stack wrote, with the chance level.

        Args:
            into: "Q", "K" or "V" of the later head.
            stack: of an encoder-decoder, which.

        Raises:
            UsageError: positions or norms would make the scores wrong, by name; or there are several stacks.
        """
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
            layers: numbers of layers, in every stack; all if None. Likewise `heads`.
            heads: numbers of heads.
            ignore_rotary: measure W_Q W_Kᵀ of rotary heads without the rotation.
            progress: told the layer, the bytes read, and the bytes of all.

        Raises:
            UsageError: no layer or head is chosen.
            DataError: tensors do not fit the configuration.
        """
        return inspect(
            self._attention, layers=layers, heads=heads, ignore_rotary=ignore_rotary, progress=progress
        )

    def check(self, text: str | None = None, target: str | None = None) -> Check:
        """Compare logits, losses and attention weights with `transformers`, which has to be installed.

        Args:
            text: what both read; random tokens if None.
            target: of an encoder-decoder, what its decoder produces; its own translation if None.

        Raises:
            UsageError: a run of triptych, or a change that weights cannot express; or no `transformers`.
            DataError: one of the two does not run it.
        """
        with self._files() as source:
            return check_against_transformers(source, text, target)

    def cost(self) -> ModelCost:
        """Parameters, FLOPs per token and cache bytes of the attention, layer by layer."""
        return cost_of(self.name, self.layers, self._opened.attention)

    # Running.

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
        stream: bool = False,
    ) -> Any:
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
            stream: give translations one by one, as soon as each batch is done.

        Returns:
            One translation for a string, whose `text` is the best one; a list for several; an iterator with
            `stream`.

        Raises:
            UsageError: the model does not translate, or options that do not go together.
        """
        translator = self.translator(
            beam_size=beam_size,
            alpha=alpha,
            num_best=num_best,
            max_extra_tokens=max_extra_tokens,
            max_source_tokens=max_source_tokens,
            stop=stop,
            glossary=glossary,
            workers=workers,
        )
        if stream:
            return translator.translate_stream([text] if isinstance(text, str) else text)
        with translator:
            return translator.translate(text)

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
    ) -> Translator:
        """What `translate` translates with, ready to be used many times; options as there."""
        return make_translator(
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
            workers: number of processes that translate in parallel, one thread each. CPU only.
            display: told what is read; lines on standard error if None.
            progress: told what is done, how many sentences, and of how many.

        Raises:
            UsageError: the model or the recipe does not translate, options that do not go together, or the
                folder has other files or was begun in another way.
        """
        if not isinstance(recipe, Recipe):
            recipe = require_translation(read_recipe(recipe), recipe)
        options = self._opened.options
        with (
            launched(options.device) as world,
            self.translator(beam_size=beam_size, alpha=alpha, num_best=num_best, workers=workers) as teacher,
        ):
            sides = teacher.tokenizers.source, teacher.tokenizers.target
            known_by = {
                "name": self.name,
                "sha256": hash_of(teacher.model, [side.to_json() for side in sides]),
                "changes": list(self.changes),
                "engine": teacher.engine,
                "precision": options.precision,
            }
            return distil_text(
                teacher,
                known_by,
                recipe,
                Path(out),
                world,
                display or LineDisplay(),
                progress,
                interpolate=interpolate,
                originals=originals,
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
        tokenizers = self.opened.tokenizers
        if (source is None) != (target is None):
            raise UsageError("source and target belong together: give both, or none for a run's own text")
        if source is not None and target is not None:
            text = read_parallel(CorpusSpec(source=Path(source), target=Path(target)))
        elif self.opened.recipe is not None:
            text, _ = read_corpora(self.opened.recipe, Path.cwd(), display or LineDisplay())
        else:
            raise UsageError(f"{self.name} is no run, whose text is known: give source and target")
        sides = [
            TokenSequences.pack(tokenizer.encode(lines))
            for tokenizer, lines in ((tokenizers.source, text.source), (tokenizers.target, text.target))
        ]
        found, coverage = learn_shortlist(sides[0], sides[1], tokenizers, most, frequent)
        write_text(Path(out), found.as_text(tokenizers))
        return coverage

    def generate(
        self,
        text: str | Sequence[str],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        num_samples: int = 1,
        beam_size: int = 1,
        alpha: float = 0.0,
        stop: Sequence[str] = (),
        max_prompt_tokens: int | None = None,
        chat: bool = False,
        stream: bool = False,
    ) -> Any:
        """Continue a text, or several.

        Args:
            text: one text, or several.
            max_new_tokens: longest continuation in tokens.
            temperature: divisor of the logits; 0 always takes the most probable token.
            top_k: draw from the k most probable tokens only.
            top_p: draw from the fewest tokens whose probabilities sum to p.
            min_p: draw from tokens at least p times as probable as the best.
            repetition_penalty: above 1, tokens already in the text are less probable.
            seed: the same seed gives the same text, whatever the other texts are (on x86-64 CPUs).
            num_samples: number of continuations of each text; with a beam, the best ones.
            beam_size: beam size; 1 is no beam search.
            alpha: exponent of the beam's length penalty.
            stop: end before this string, or any of several.
            max_prompt_tokens: longest prompt in tokens. Default: the model's positions, or 32768 where they
                set no limit.
            chat: put the text into the chat template of the model's tokenizer.
            stream: give the text of one continuation while it is generated.

        Returns:
            One continuation for a string and one sample, whose `text` is what was added; a list for several;
            an iterator of strings with `stream`.

        Raises:
            UsageError: the model continues no text, or options that do not go together.
        """
        try:
            sampling = SamplingOptions(repetition_penalty, temperature, top_k, top_p, min_p)
            options = GenerationOptions(
                max_new_tokens,
                sampling,
                seed,
                num_samples,
                beam_size,
                alpha,
                stop_texts=(stop,) if isinstance(stop, str) else tuple(stop),
                max_prompt_tokens=max_prompt_tokens,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        generator = self.generator()
        if stream:
            if not isinstance(text, str):
                raise UsageError("stream=True continues one text: give a string")
            return generator.stream(text, options, chat=chat)
        prompts = [text] if isinstance(text, str) else list(text)
        found = [
            one[0] if num_samples == 1 else one for one in self._continued(generator, prompts, options, chat)
        ]
        return found[0] if isinstance(text, str) else found

    def generator(self) -> TextGenerator:
        """What `generate` continues texts with, made once."""
        return self._generator

    @cached_property
    def _generator(self) -> TextGenerator:
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
        opened = self.opened
        return fill_masks(opened.language_model, opened.tokenizer, text, count, max_tokens)

    def evaluate(
        self,
        text: str | Path | Sequence[str],
        references: Sequence[str] | Path | None = None,
        *,
        context: int | None = None,
        stride: int | None = None,
        beam_size: int | None = None,
        alpha: float | None = None,
        stop: Stop | None = None,
        workers: int = 1,
        progress: Progress = untold,
    ) -> Any:
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
            progress: told what is done, how many documents or sentences, and of how many.

        Returns:
            The loss in nats per token with its interval, or BLEU and chrF with theirs.

        Raises:
            UsageError: the model does not do it, or options that do not go together.
            DataError: there is nothing to score.
        """
        if references is not None:
            translator = self.translator(beam_size=beam_size, alpha=alpha, stop=stop, workers=workers)
            sources = given_texts(self.reader, text)
            right = read_lines(references) if isinstance(references, Path) else references
            return evaluate_translations(translator, sources, right, partial(progress, "translating"))
        documents = given_texts(self.reader, text)
        scoring = partial(progress, "scoring")
        return evaluate_text(self.opened, documents, self._opened.options, context, stride, scoring)

    def score(self, text: str, target: str | None = None) -> list[tuple[str, float]]:
        """The tokens of a text that are predicted, and the log-probability in nats of each.

        Args:
            text: what the model reads.
            target: of an encoder-decoder, the translation that is scored; its own if None.

        Raises:
            UsageError: the model predicts no next token.
        """
        with torch.no_grad():
            run = self.run(text, target=target)
        losses = run.losses.tolist()
        return [
            (token, -loss)
            for token, loss in zip(run.tokens[len(run.tokens) - len(losses) :], losses, strict=True)
        ]

    @overload
    def attend(  # type: ignore[overload-overlap]
        self,
        text: str,
        target: str | None = ...,
        *,
        max_new_tokens: int = ...,
        max_tokens: int | None = ...,
    ) -> Attention: ...

    @overload
    def attend(
        self,
        text: Sequence[str],
        target: Sequence[str] | None = ...,
        *,
        max_new_tokens: int = ...,
        max_tokens: int | None = ...,
    ) -> AttentionBatch: ...

    def attend(
        self,
        text: str | Sequence[str],
        target: str | Sequence[str] | None = None,
        *,
        max_new_tokens: int = 0,
        max_tokens: int | None = None,
    ) -> Attention | AttentionBatch:
        """Where every head looks on a text: `model.attend(text)[3, 2]` is `[queries, keys]`.

        Args:
            text: one text, or several, which are read in padded batches.
            target: of an encoder-decoder, what its decoder reads, one for each text; its own translation if
                None.
            max_new_tokens: continue the text greedily by this many tokens first.
            max_tokens: longest text in tokens. Default: the model's positions, or 8192 where they set no
                limit.

        Raises:
            UsageError: an empty text, one past the model's positions, or something that the model does not
                do.
        """
        return attend(self.reader, text, target, max_new_tokens, max_tokens)

    def attend_over(
        self,
        text: str | Path | Sequence[str],
        targets: Sequence[str] | Path | None = None,
        *,
        documents: Documents = "file",
        worth: Instead | None = None,
        explain: bool = False,
        context: int | None = None,
        most_tokens: int | None = None,
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
            progress: told what is done, how much of it and of how much.

        Raises:
            UsageError: something does not fit the model.
        """
        return attend_over(
            self.reader,
            text,
            targets,
            documents=documents,
            worth=worth,
            explain=explain,
            context=context,
            most_tokens=most_tokens,
            progress=progress,
        )

    @overload
    def run(self, text: str, *, target: str | None = ..., grad: bool = ...) -> Run: ...  # type: ignore[overload-overlap]

    @overload
    def run(
        self, text: Sequence[str], *, target: Sequence[str] | None = ..., grad: bool = ...
    ) -> list[Run]: ...

    def run(
        self,
        text: str | Sequence[str],
        *,
        target: str | Sequence[str] | None = None,
        grad: bool = False,
    ) -> Run | list[Run]:
        """Run the model on a text: logits, loss, and every activation.

        Args:
            text: one text, or several, which run as one padded batch.
            target: of an encoder-decoder, what its decoder produces; its own translation if None.
            grad: whether gradients reach the activations and parameters (`Run.gradient`).

        Raises:
            UsageError: an empty text, or one past the model's positions.
        """
        texts = [text] if isinstance(text, str) else list(text)
        targets = None if target is None else [target] if isinstance(target, str) else list(target)
        reader = self.reader
        ids = reader.encode(texts, targets)
        reader.check(ids)
        sites = self._opened.sites_of(reader.model)
        order = {number: site.name for number, site in enumerate(sites)}
        recorded = recorded_graph(sites) if grad else nullcontext()
        with torch.set_grad_enabled(grad), recorded as graph:
            recording = reader.run(ids, residuals=True)
            found = [
                Run(reader, self._places, order, one, recording, row, graph) for row, one in enumerate(ids)
            ]
        return found[0] if isinstance(text, str) else found

    # Changing.

    def ablate(
        self, heads: str | Sequence[str], by: By = "zero", *, text: str | Sequence[str] | None = None
    ) -> "Model":
        """The model with some heads off: what they give W_O is replaced.

        Args:
            heads: `"3.2"`, `"3"` for a layer, `"*.2"`, `"cross.*"`; several, separated by commas.
            by: what takes the place: "zero", the "mean" over a text, or what the head gives on another text,
                position by position ("resample").
            text: for "mean" and "resample".

        Raises:
            UsageError: there is no such head, or a text is missing.
        """
        if by == "zero" and text is not None:
            raise UsageError('a text goes with by="mean" or by="resample"')
        if by != "zero" and text is None:
            raise UsageError(f'by="{by}" needs a text: ablate({_said(heads)!r}, by="{by}", text=…)')
        chosen, words = self._heads(heads), f"ablate({_said(heads)}{'' if by == 'zero' else f', by={by}'})"
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

    def patch(
        self,
        heads: str | Sequence[str],
        run: Run,
        what: Activation = "z",
        *,
        positions: Sequence[int] | None = None,
    ) -> "Model":
        """The model with activations of some heads taken from a run.

        Args:
            heads: as in `ablate`.
            run: of this model or another one with such heads, on a text of its own.
            what: which activation: q, k, v, scores, weights or z.
            positions: of the text, at which it is taken; all that the run has if None.

        Raises:
            UsageError: there is no such head, or the shapes do not fit.
        """
        if what not in ACTIVATIONS:
            raise UsageError(f"{what!r} is not one of {', '.join(ACTIVATIONS)}")
        names = self._places.names
        edits: dict[int, dict[Part, Edit]] = {
            number: {
                head: patched(what, getattr(run[f"{names[number]}.{head}"], what).detach(), positions)
                for head in own
            }
            for number, own in self._heads(heads).items()
        }
        return self._changed(ValueChange(f"patch({_said(heads)}, {what})", what, edits))

    def edit(
        self,
        heads: str | Sequence[str],
        what: Activation,
        with_: Callable[[Tensor], Tensor],
        *,
        together: bool = False,
    ) -> "Model":
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
        if what not in ACTIVATIONS:
            raise UsageError(f"{what!r} is not one of {', '.join(ACTIVATIONS)}")
        edits: dict[int, dict[Part, Edit]] = {
            number: dict.fromkeys([tuple(own)] if together else own, lambda value, first: with_(value))
            for number, own in self._heads(heads).items()
        }
        return self._changed(ValueChange(f"edit({_said(heads)}, {what})", what, edits))

    def steer(self, place: str, vector: Float[Tensor, " d_model"], scale: float = 1.0) -> "Model":
        """The model with a direction added to its residual stream.

        Args:
            place: `"residual.3"`: before block 3; `"residual.encoder.3"` of an encoder-decoder. The number of
                blocks stands for the end of the stack.
            vector: `[d_model]`.
            scale: what it is multiplied by.

        Raises:
            UsageError: there is no such place, or the vector has another width.
        """
        stack, block = self._places.residual(place)
        width = self.layers[0].d_model
        if vector.shape != (width,):
            raise UsageError(f"the vector has shape {list(vector.shape)}, and the stream is [{width}]")
        direction = scale * vector.detach().to(self.opened.model.parameters().__next__().device)
        return self._changed(Steering(f"steer({place}, {scale:g})", stack, block, direction))

    def replace(self, place: str | int, **maps: Tensor) -> "Model":
        """The model with other maps in a layer or a head: `model.replace("3.2", W_Q=…)`.

        Args:
            place: a layer or a head.
            maps: W_Q, W_K, W_V or W_O; shapes as `Layer` and `Head` have them.

        Raises:
            UsageError: another shape, a map that heads share, or no such place.
        """
        number, head = self._places.find(place)
        if unknown := [name for name in maps if name not in SIDE_OF]:
            raise UsageError(f"{unknown[0]} is not one of {', '.join(SIDE_OF)}")
        changed = self._changed(
            *(
                WeightChange(
                    f"replace({place}, {name})",
                    {number: partial(with_map, name=name, given=given, head=head)},
                )
                for name, given in maps.items()
            )
        )
        changed.layers[number].weights  # noqa: B018 (a shape that does not fit is an error now)
        return changed

    def tie(self, place: str | int, name: str, to: str) -> "Model":
        """The model with one map of a layer in the place of another: `model.tie("3", "W_K", "W_Q")`.

        Args:
            place: a layer, or "*" for all.
            name: the map that is replaced: W_Q, W_K or W_V.
            to: the map that takes its place.

        Raises:
            UsageError: the maps do not fit each other.
        """
        if unknown := [map_ for map_ in (name, to) if map_ not in SIDE_OF]:
            raise UsageError(f"{unknown[0]} is not one of {', '.join(SIDE_OF)}")
        numbers = range(len(self.layers)) if str(place) == "*" else [self._places.layer(place)]
        tied = partial(tied_map, name=name, to=to)
        changed = self._changed(WeightChange(f"tie({place}, {name}, {to})", dict.fromkeys(numbers, tied)))
        for number in numbers:
            changed.layers[number].weights  # noqa: B018
        return changed

    def without_positions(self) -> "Model":
        """The model without positions: nothing turns queries and keys, or is added to scores or embeddings.

        Raises:
            UsageError: nothing tells positions apart, besides the causal mask.
        """
        own = tuple(
            number for number, layer in enumerate(self.layers) if layer.outline.semantics.positions != "none"
        )
        added = any(
            isinstance(part, LearnedPositions | SinusoidalPositions) for part in self.opened.model.modules()
        )
        if not own and not added:
            raise UsageError(f"{self.name} has no positions to leave out")
        return self._changed(PositionsOff("without_positions()", own))

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
        texts = [[one] if isinstance(one, str) else list(one) for one in (clean, corrupted)]
        return sweep_heads(
            [f"{layer.name}.{head}" for layer in self.layers for head in range(layer.num_heads)],
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
        recipe = recipe_of(steps, calibration, layers=layers, skip_refused=skip_refused)
        with self._files() as source:
            return plan_rewrite(source, recipe, family=self._opened.options.family)

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
    ) -> "Model":
        """The model with its attention written in another way, and a certificate of what that changed.

            model.rewrite("fold_value_bias", "truncate(rank=6)").save("smaller")

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
            progress: told what is done, how much of it and of how much.

        Raises:
            RewriteRefusedError: a layer refuses a step, with the reason.
            UsageError: an unknown rewrite, or the folder exists.
        """
        temporary = Path(mkdtemp(prefix="triptych-")) if out is None else None
        name = str(out) if temporary is None else f"{self.name}, rewritten"
        target = Path(name) if temporary is None else temporary / "rewritten"
        try:
            with self._files() as source:
                certificate = rewrite_checkpoint(
                    source,
                    target,
                    recipe_of(steps, calibration, layers=layers, skip_refused=skip_refused),
                    family=self._opened.options.family,
                    text=None if text is None else Path(text),
                    compare=compare,
                    progress=progress,
                )
            files = find_source(target)
        except BaseException:  # an interruption too leaves nothing behind
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        rewritten = Model(Opened(name, files, self._opened.options, temporary=temporary))
        rewritten.certificate = certificate
        return rewritten

    # Keeping.

    def save(self, path: str | Path) -> Path:
        """Write the model in the format that it came from; returns the folder.

        A rewritten model is written with its certificate. Changes that weights can say are written into them.

        Args:
            path: the folder to make.

        Raises:
            UsageError: the folder exists, or weights cannot express a change, which is named.
            DataError: the format has no place for it.
        """
        target = Path(path)
        if unsayable := [change for change in self._changes if change.unsayable]:
            change = unsayable[0]
            raise UsageError(f"{change.words} cannot be saved: {change.unsayable}")
        if self._changes:
            save_changed(self._opened, self._attention, self._changes, target)
        else:
            save_unchanged(self._opened, target)
        return target

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
        if self._opened.options.shortlist is not None and to != "ctranslate2":
            raise UsageError(f"{to} has no place for a shortlist: leave it out, or convert to ctranslate2")
        if self._changes:
            raise UsageError(
                f"{self.name} was changed ({', '.join(self.changes)}): save it, and convert what was saved"
            )
        return convert(self.opened, Path(path), to, quantization)

    # What capabilities are built on.

    @cached_property
    def opened(self) -> OpenedModel:
        """The module with its tokenizers, changes made.

        Raises:
            TriptychError: the model cannot be run; the message says why.
        """
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
        """What reads texts."""
        return Reader(self.opened)

    # Inside.

    @cached_property
    def _places(self) -> Places:
        sites = self._opened.attention.sites
        return Places([(stack_of(site), site.layer) for site in sites], self.name)

    @cached_property
    def _attention(self) -> AttentionSource:
        """The attention layers, changes made."""
        source = self._opened.attention
        return ChangedSource(source, self._changes) if self._changes else source

    def _stack(self, name: str) -> "Stack":
        found = [
            layer
            for layer, site in zip(self.layers, self._opened.attention.sites, strict=True)
            if stack_of(site) == name
        ]
        if not found:
            raise UsageError(f"{self.name} has no {name}: it has {', '.join(self._places.stacks)}")
        return Stack(name, self.name, Layers(found))

    def _heads(self, heads: str | Sequence[str]) -> dict[int, tuple[int, ...]]:
        return self._places.heads(heads, [layer.num_heads for layer in self.layers])

    def _changed(self, *changes: Change) -> "Model":
        return Model(self._opened, (*self._changes, *changes))

    def _continued(
        self, generator: TextGenerator, prompts: Sequence[str], options: GenerationOptions, chat: bool
    ) -> list[list[Continuation]]:
        """Texts that change values by position run without padding, texts of equal length together."""
        if not any(isinstance(change, ValueChange) for change in self._changes):
            return generator.generate(prompts, options, chat=chat)
        ids = [generator.encode(prompt, chat=chat) for prompt in prompts]
        found: dict[int, list[Continuation]] = {}
        for length in sorted({len(own) for own in ids}):
            places = [place for place, own in enumerate(ids) if len(own) == length]
            found |= dict(
                zip(places, generator.continue_tokens([ids[i] for i in places], options), strict=True)
            )
        return [found[place] for place in range(len(prompts))]

    @contextmanager
    def _files(self) -> Iterator[Source]:
        """The files that a rewrite reads; a changed model, and a module in memory, are saved to be read."""
        if not self._changes and self._opened.module is None:
            yield self._opened.files
            return
        with TemporaryDirectory(prefix="triptych-") as place:
            source = find_source(self.save(Path(place, "model")))
            tokenizers = self._opened.options.tokenizer
            if self._opened.module is not None and isinstance(tokenizers, str | Path):
                for file in Path(tokenizers).glob("tokenizer*.json"):
                    shutil.copy(file, source.folder)
            source.name = ", ".join((self.name, *self.changes))
            yield source

    @property
    def _summary(self) -> str:
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


def _said(places: str | Sequence[str]) -> str:
    return places if isinstance(places, str) else ", ".join(places)
