"""What a model does with texts: translate, generate, score, attend, run."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from triptych.converting.engines import evaluate_text, identify, make_generator, make_translator
from triptych.errors import DataError, TriptychError, UsageError
from triptych.face.reading import ReadableModel
from triptych.literals import Documents, FileSettings, Instead, SpecialTokens, Stop, check_choices
from triptych.progress import Progress, untold
from triptych.running.changes import changed_copy, continue_changed
from triptych.running.decoding import (
    Filling,
    GenerationOptions,
    TextGenerator,
    Translator,
    evaluate_translations,
    fill_masks,
)
from triptych.running.opening import OpenedModel, Reader
from triptych.running.opening.generation_config import Asked, GenerationConfig
from triptych.running.run import Run, run_texts
from triptych.running.text import Text, as_lines, as_texts
from triptych.running.text.shortlists import Coverage
from triptych.seeing.attending import Attention, AttentionBatch, attend, attend_over
from triptych.seeing.attending.over import OverText, given_lines, given_texts, refuse_file_name
from triptych.training import Recipe, read_recipe, require_translation
from triptych.training.distilling import Distilled, distil_text
from triptych.training.processes import launched
from triptych.training.progress import Display, LineDisplay
from triptych.training.shortlist import write_shortlist


class RunnableModel(ReadableModel):
    """A readable model with a module, which is built when it first runs."""

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
            special_tokens: how special tokens that a sentence spells out (`<extra_id_0>` of T5) are read: as
                the tokens, or as text. Own and Marian's translators always read text.
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
        text = None if source is None else Path(source), None if target is None else Path(target)
        return write_shortlist(self.opened, Path(out), text, most, frequent, display or LineDisplay())

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
        (line,) = as_lines([text])
        self._opened.own_weights()
        return fill_masks(opened.language_model, opened.tokenizer, line, count, max_tokens)

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
            special_tokens: read special tokens that a text spells out (`<|endoftext|>`) as such, "tokens", or
                as plain "text".
            progress: told what is done, how many documents or sentences, and of how many.

        Returns:
            The loss in nats per token with its interval, or BLEU and chrF with theirs.

        Raises:
            UsageError: the model does not do it, or options that do not go together.
            DataError: there is nothing to score.
        """
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
        opened = self.opened
        self._opened.own_weights()
        return Reader(opened)


def _refuse_given(with_what: str, **options: Any) -> None:
    """Raise where one of these was given, which counts only with something else."""
    if found := next((name for name, value in options.items() if value is not None), None):
        raise UsageError(f"{found} goes with {with_what}: leave it out")
