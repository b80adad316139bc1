"""The task of translation: texts, tokenizers, model and objective of a run."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch

from triptych.core.checkpoints.source import find_source, is_own_config
from triptych.core.models import (
    AnyModel,
    EncoderDecoder,
    find_config,
    find_device,
    has_config,
    read_own_model,
    to_device,
    write_config,
    write_model,
)
from triptych.core.storage import SAFETENSORS
from triptych.errors import DataError, UsageError
from triptych.files import file_hash
from triptych.printable import printable
from triptych.running.decoding import SearchOptions, Translator, score_translations
from triptych.running.opening import Reader, check_tokenizers, open_translator
from triptych.running.options import Languages
from triptych.running.text import ByteLevelTokenizer, TokenizerPair, require_kept_file
from triptych.training.choices import fit_tokenizer, fit_training, say_choices
from triptych.training.continuing import CopiedCheckpoint, publish_tensors
from triptych.training.corpora.bpe_dropout import BpeDropout
from triptych.training.corpora.cleaning import Filters, filtered, overlap
from triptych.training.corpora.corpora import (
    AnyCorpusSpec,
    ParallelCorpus,
    joined,
    read_parallel,
)
from triptych.training.corpora.encoded import EncodedCorpus, encode_corpus
from triptych.training.corpora.pair_batches import TokenBatches
from triptych.training.corpora.tokenizer_training import (
    read_sentencepiece,
    train_tokenizers,
    trained_once,
)
from triptych.training.folder import Prepared, hash_parts, settings, word_vectors
from triptych.training.loop import TrainingResult
from triptych.training.objectives import (
    LEAST_BLEU,
    Quality,
    Scorer,
    TranslationObjective,
)
from triptych.training.progress import Display, SilentDisplay
from triptych.training.recipe import (
    Recipe,
    merge,
    require_translation,
    resolve,
)
from triptych.training.state import publish_weights
from triptych.training.task import CardWords, StepShape, Task

# Tokens of a sentence with its end token, in predictions; the tokens of a batch do not depend on it.
_SENTENCE = 32


@final
class TranslationTask(Task[Recipe]):
    """Translation of sentences, with an encoder-decoder."""

    command = "translate"
    batch_key = "batch_tokens"
    # Keys to change first. The defaults of all other keys are good, or follow from these keys.
    first_keys = (
        *("data.valid_share", "tokenizer.kind", "tokenizer.vocab_size"),
        *("model.d_model", "model.d_ff", "model.num_heads"),
        *(
            "model.encoder.num_layers",
            "model.decoder.num_layers",
            "model.norm",
            "model.dropout",
        ),
        *(
            "training.max_steps",
            "training.batch_tokens",
            "training.learning_rate",
            "training.warmup_steps",
        ),
        *(
            "training.schedule",
            "training.clip_norm",
            "training.label_smoothing",
            "training.precision",
        ),
        *("validation.every_steps", "decoding.beam_size"),
    )

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.tokens_of_batch = recipe.training.batch_tokens

    def prepare(
        self, base: Path, display: Display, folder: Path | None = None
    ) -> Prepared:
        recipe = self.recipe
        # A run folder has the tokenizers; with a teacher, they are the teacher's.
        cache = base / recipe.data.cache if recipe.data.cache else None
        teacher = (
            None
            if recipe.training.teacher is None
            else _Teacher.read(base / recipe.training.teacher)
        )
        start = (
            None
            if recipe.training.checkpoint is None
            else _Start.read(recipe, base, folder)
        )
        if folder is not None:
            if start is None:
                tokenizers = TokenizerPair.load(folder)
                check_tokenizers(tokenizers, folder, joint=recipe.tokenizer.joint)
            else:
                tokenizers = start.tokenizers
            texts = _encode_texts(
                recipe, cache, tokenizers, *read_corpora(recipe, base, display), display
            )
        else:
            train_text, valid_text = read_corpora(recipe, base, display)
            device = find_device(recipe.training.device).type
            num_chars = sum(map(len, train_text.source)) + sum(
                map(len, train_text.target)
            )
            given = recipe
            if teacher is not None:
                tokenizers = teacher.tokenizers
                recipe = with_tokenizers_of(tokenizers, recipe)
            elif start is not None:
                tokenizers = start.tokenizers
                given = recipe = start.recipe
                display.say(
                    f"going on with {start.name}: {tokenizers.target.vocab_size:,} tokens"
                )
            elif recipe.tokenizer.kind == "sentencepiece":
                tokenizers = read_sentencepiece(recipe.tokenizer, base)
                recipe = _with_size_of(tokenizers, recipe)
            else:
                recipe = fit_tokenizer(recipe, num_chars, device)
                tokenizers = _train_tokenizers(recipe, train_text, cache, display)
            texts = _encode_texts(
                recipe, cache, tokenizers, train_text, valid_text, display
            )
            num_tokens = texts.train.tokens_of_pass

            def steps_per_epoch(recipe: Recipe) -> int:
                batches = len(_training_batches(recipe, texts, tokenizers).plan(0))
                return -(-batches // recipe.training.accumulate_batches)

            width = None
            if start is not None:
                width = start.model.architecture.decoder.d_model
            recipe = fit_training(recipe, num_tokens, device, steps_per_epoch, width)
            say_choices(
                given, recipe, f"{num_tokens:,} target tokens on {device}", display
            )

        def objective() -> TranslationObjective:
            if start is not None and start.copied is not None:
                model = start.model
            else:
                sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
                pad_id = tokenizers.target.pad_id
                model = EncoderDecoder.of(recipe.model, *sizes, pad_id)
                if start is not None:
                    model.load_state_dict(start.model.state_dict())
            where = find_device(recipe.training.device)
            return TranslationObjective(
                to_device(model, where),
                _training_batches(recipe, texts, tokenizers),
                _batches(recipe, texts.valid, tokenizers, shuffle=False),
                recipe.training,
                recipe.validation,
                _scorer(recipe, tokenizers, texts.translated)
                if recipe.validation.bleu
                else None,
                _bytes_per_token(texts),
                None if teacher is None else teacher.model.to(where),
            )

        def begin(model: AnyModel, folder: Path) -> None:
            if start is not None and start.copied is not None:
                start.copied.begin(model, folder)
                return
            tokenizers.save(folder)
            if start is None:
                write_config(model, folder)
            else:
                write_model(start.model, folder)

        embeddings = recipe.model.embeddings
        shared = recipe.model.tie_embeddings == "all"
        vectors = {
            f"{half}.embeddings.table.weight": word_vectors(
                base, path, tokenizer, recipe.model.d_model
            )
            for half, path, tokenizer in (
                (
                    "decoder" if shared else "encoder",
                    embeddings.vectors,
                    tokenizers.source,
                ),
                ("decoder", embeddings.target_vectors, tokenizers.target),
            )
            if path and start is None
        }
        return Prepared(
            recipe,
            objective,
            begin,
            lambda: _fingerprints(
                recipe,
                texts,
                tokenizers,
                teacher,
                recipe.model.model_dump_json() if start is None else start.config,
            ),
            publish=publish_weights
            if start is None or start.copied is None
            else publish_tensors,
            vectors=vectors,
            from_checkpoint=start is not None,
        )

    def fitted_to(self, length: int, device: str) -> Recipe:
        if self.recipe.training.checkpoint is not None:
            raise UsageError(
                "plan makes the model of a recipe, and training.checkpoint names one that exists: write its "
                "sizes under [model] in its place"
            )
        if self.recipe.training.teacher is not None:
            raise UsageError(
                "plan counts no teacher: leave out training.teacher, and add its memory and time"
            )
        recipe = fit_tokenizer(self.recipe, length, device)
        if recipe.tokenizer.kind == "sentencepiece":
            tokenizers = read_sentencepiece(recipe.tokenizer, Path.cwd())
            recipe = _with_size_of(tokenizers, self.recipe)
        return fit_training(
            recipe, length, device, lambda one: length // one.training.batch_tokens
        )

    def make_model(self, source_size: int, target_size: int) -> EncoderDecoder:
        return EncoderDecoder.of(self.recipe.model, source_size, target_size, 0)

    def step_shape(self) -> StepShape:
        recipe = self.recipe
        length = min(
            _SENTENCE, recipe.training.batch_tokens, recipe.data.max_sentence_tokens + 1
        )
        size = recipe.tokenizer.vocab_size
        return StepShape(
            length=length,
            num_rows=max(recipe.training.batch_tokens // length, 1),
            targets_of_row=length,
            model=EncoderDecoder.of(recipe.model, size, size),
            passes=2 if recipe.training.rdrop else 1,
            gathers_to_validate=recipe.validation.bleu,
        )

    def validation_text(self, base: Path) -> tuple[list[str], list[str] | None]:
        pairs = validation_pairs(self.recipe, base)
        return pairs.source, pairs.target

    def validation_samples(self, base: Path) -> Iterator[tuple[str, str | None]]:
        pairs = validation_pairs(self.recipe, base)
        yield from zip(pairs.source, pairs.target, strict=True)

    def card(self, outcome: TrainingResult, best: str) -> CardWords:
        by = outcome.counters.best_by
        is_noise = self.recipe.validation.metric != "loss" and by == "loss"
        metric = {"bleu": "BLEU", "chrf": "chrF"}.get(self.recipe.validation.metric)
        noise = f" ({metric} decides once the 95 % interval of BLEU lies above {LEAST_BLEU:g})"
        why = noise if is_noise else ""
        # A validation before BLEU decides was judged by its loss.
        load = 'load("path/to/this/folder").translate(["A sentence."])[0].text'
        return CardWords(
            tag="translation",
            about="An encoder-decoder Transformer trained",
            tokens="target tokens",
            judged=f", chosen by {by}{why}: {best}",
            use=f"python\nfrom triptych import load\n\n{load}",
            model=self._describe_model(),
        )

    def _describe_model(self) -> str:
        model = self.recipe.model
        if self.recipe.is_copied:
            checkpoint = printable(str(self.recipe.training.checkpoint))
            return f"begun as\n`{checkpoint}`, in its format"
        return (
            f"d_model {model.d_model}, d_ff {model.d_ff},\n{model.num_heads} heads, "
            f"{model.encoder.num_layers}+{model.decoder.num_layers} layers, {model.norm}-norm"
        )


def validation_pairs(recipe: Recipe, base: Path) -> ParallelCorpus:
    """Read the validation pairs of a run; paths of the recipe are relative to `base`."""
    data = recipe.data
    if data.valid is None:
        return read_corpora(recipe, base, SilentDisplay())[1]
    return read_parallel(data.valid, max_line_chars=data.max_line_chars, base=base)


def with_tokenizers_of(
    teacher: TokenizerPair, recipe: Recipe, training: Mapping[str, Any] = {}
) -> Recipe:
    """Return a student's recipe with its teacher's tokenizers, and with these keys of `[training]`."""
    kept = {"joint": teacher.joint, "vocab_size": teacher.target.vocab_size}
    tree = merge(
        recipe.model_dump(mode="json", exclude_unset=True),
        {"tokenizer": kept, "training": dict(training)},
    )
    origin = "the recipe with the teacher's tokenizers"
    return require_translation(resolve(tree, (), origin), origin)


def _with_size_of(tokenizers: TokenizerPair, recipe: Recipe) -> Recipe:
    """Return a recipe with the number of tokens of a SentencePiece model."""
    size = tokenizers.target.vocab_size
    given = recipe.tokenizer
    if "vocab_size" in given.model_fields_set and given.vocab_size != size:
        raise UsageError(
            f"tokenizer.vocab_size is {given.vocab_size:,}, and {given.target_model or given.model} has "
            f"{size:,} tokens: leave vocab_size out"
        )
    return recipe.filled({"tokenizer": {"vocab_size": size}})


@dataclass(frozen=True)
class _Start:
    """Translator to continue from, and the recipe with its model, tokenizers and search settings.

    A run continues in triptych's format if a recipe can describe the model. Otherwise it is a copy of the
    checkpoint, in the format of its library.
    """

    name: str
    model: EncoderDecoder
    tokenizers: TokenizerPair
    recipe: Recipe
    copied: CopiedCheckpoint | None  # None in triptych's format

    @classmethod
    def read(cls, recipe: Recipe, base: Path, folder: Path | None) -> "_Start":
        """Open the translator of a new recipe, or of a started run's folder."""
        given = recipe.training.checkpoint
        assert given is not None
        if folder is not None and is_own_config(settings(folder)):
            model = read_own_model(folder)
            assert isinstance(model, EncoderDecoder), "its recipe is of a translator"
            return cls(given, model, TokenizerPair.load(folder), recipe, None)
        path = base / given if folder is None else folder
        where = path if path.exists() else given
        languages = recipe.training.languages
        named = None if languages is None else Languages(*languages)
        source = find_source(where)
        reader = open_translator(source, "cpu", named)
        model = reader.encoder_decoder.float()
        if folder is not None or not has_config(model):
            copied = CopiedCheckpoint.open(source, path, is_new=folder is None)
            return cls._copied(recipe, reader, copied.trainable(model), copied)
        config = find_config(model)
        own = {
            "data": {"max_sentence_tokens": config.max_source_tokens},
            "model": config.model_dump(mode="json"),
            "tokenizer": {
                "joint": reader.tokenizers.joint,
                "vocab_size": reader.tokenizers.target.vocab_size,
            },
        }
        whole = _with_settings_of(reader, recipe, own)
        return cls(reader.name, model, reader.tokenizers, whole, None)

    @classmethod
    def _copied(
        cls,
        recipe: Recipe,
        reader: Reader,
        model: EncoderDecoder,
        copied: CopiedCheckpoint,
    ) -> "_Start":
        if recipe.training.rdrop:
            raise UsageError(
                f"training.rdrop needs dropout, and {reader.name} is trained without it: leave rdrop out"
            )
        # Rows of positions for the sentence and one token at its end or its beginning.
        limits = [stack.max_tokens for stack in model.stacks.values()]
        longest = [limit - 1 for limit in limits if limit is not None]
        own = {"data": {"max_sentence_tokens": min(longest)}} if longest else {}
        whole = _with_settings_of(reader, recipe, own)
        return cls(reader.name, model, reader.tokenizers, whole, copied)

    @property
    def config(self) -> str:
        """The configuration of the model, for its fingerprint."""
        if self.copied is not None:
            return self.copied.config
        return self.recipe.model.model_dump_json()


def _with_settings_of(reader: Reader, recipe: Recipe, own: dict[str, Any]) -> Recipe:
    """Return a recipe with settings of a translator. The search of the recipe takes precedence."""
    tree = recipe.model_dump(mode="json", exclude_unset=True)
    decoding = reader.decoding.model_dump(mode="json", exclude_none=True)
    whole = merge(
        merge(tree, own), {"decoding": merge(decoding, tree.get("decoding", {}))}
    )
    # A shorter limit of the recipe takes precedence.
    longest = own.get("data", {}).get("max_sentence_tokens")
    if longest is not None:
        whole["data"]["max_sentence_tokens"] = min(
            recipe.data.max_sentence_tokens, longest
        )
    origin = f"the recipe with {reader.name}"
    return require_translation(resolve(whole, (), origin), origin)


@dataclass(frozen=True)
class _Teacher:
    """Teacher of a student: model, tokenizers, and a hash of its weights."""

    model: EncoderDecoder
    tokenizers: TokenizerPair
    sha256: str

    @classmethod
    def read(cls, folder: Path) -> "_Teacher":
        if not is_own_config(settings(folder)):
            raise UsageError(
                f"training.teacher: {folder} has no translator in triptych's format: give the folder that "
                "`triptych distil --teacher-weight` wrote, or a run"
            )
        with torch.random.fork_rng(
            devices=[]
        ):  # making a model draws random values first
            model = read_own_model(folder)
        if not isinstance(model, EncoderDecoder):
            raise UsageError(
                f"training.teacher: {folder} is a language model: give a translator"
            )
        tokenizers = TokenizerPair.load(folder)
        sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
        if (model.src_vocab_size, model.tgt_vocab_size) != sizes:
            raise UsageError(
                f"training.teacher: the tables of {folder} have other sizes than its tokenizers: take both "
                "from one model"
            )
        return cls(model, tokenizers, file_hash(folder / SAFETENSORS))


def read_corpora(
    recipe: Recipe, base: Path, display: Display
) -> tuple[ParallelCorpus, ParallelCorpus]:
    """Read and filter the training and the validation text of a recipe."""
    data = recipe.data

    def read(spec: AnyCorpusSpec) -> ParallelCorpus:
        for file in filter(None, (spec.source, spec.target, spec.file)):
            require_kept_file(base / file)
        return read_parallel(spec, max_line_chars=data.max_line_chars, base=base)

    corpora = [read(spec) for spec in data.corpora]
    weights = [spec.weight for spec in data.corpora]
    _say_corpora(corpora, weights, display)
    train = joined(corpora, weights)
    valid = None if data.valid is None else read(data.valid)
    if valid is not None:
        display.say(f"validation text: {valid.counts.describe()}")
    train, dropped = filtered(train, _filters(recipe, valid))
    if dropped:
        display.say(f"left out of the training text: {dropped}")
    if valid is not None:
        _warn_of_overlap(train, valid, display)
        return train, valid
    # Pairs with the same source stay together, so that no validation source is trained on.
    train, valid = train.split(data.valid_share)
    display.say(
        f"no data.valid is given: {len(valid):,} pairs are held out to validate, {len(train):,} train"
    )
    return train, valid


def _say_corpora(
    corpora: Sequence[ParallelCorpus], weights: Sequence[float], display: Display
) -> None:
    if len(corpora) == 1:
        display.say(f"training text: {corpora[0].counts.describe()}")
        return
    pairs = [
        weight * len(corpus) for corpus, weight in zip(corpora, weights, strict=True)
    ]
    for corpus, weight, of_pass in zip(corpora, weights, pairs, strict=True):
        display.say(
            f"training text, {corpus.name}: {corpus.counts.describe()}, weight {weight:g}: "
            f"{of_pass / sum(pairs):.0%} of a pass"
        )


def _filters(recipe: Recipe, valid: ParallelCorpus | None) -> Filters:
    data = recipe.data
    languages = recipe.decoding.languages
    return Filters(
        data.max_length_ratio,
        data.drop_duplicates,
        valid.source if valid is not None and data.drop_validation else None,
        languages if data.drop_other_languages else None,
    )


def _warn_of_overlap(
    train: ParallelCorpus, valid: ParallelCorpus, display: Display
) -> None:
    sources, pairs = overlap(train, valid)
    if sources:
        display.say(
            f"warning: {sources:,} of {len(valid):,} validation sentences are in the training text as well, "
            f"{pairs:,} with the same translation: data.drop_validation = true leaves them out of training"
        )


@dataclass(frozen=True)
class _Texts:
    """Training text, validation text for the loss, and validation text to translate."""

    train: EncodedCorpus
    valid: EncodedCorpus
    translated: ParallelCorpus
    dropout: BpeDropout | None  # dropout of the training text


def _encode_texts(
    recipe: Recipe,
    cache: Path | None,
    tokenizers: TokenizerPair,
    train_text: ParallelCorpus,
    valid_text: ParallelCorpus,
    display: Display,
) -> _Texts:
    display.say(f"tokenizing with {tokenizers.target.vocab_size:,} tokens")
    # Pairs with too many tokens are left out of both losses, but not of the translated text.
    encoded = encode_corpus(train_text, tokenizers, cache_folder=cache)
    longest = recipe.data.max_sentence_tokens
    fits = encoded.fits(longest)
    kept = encoded.where(fits)
    if num_long := len(encoded) - len(kept):
        display.say(f"{num_long:,} training pairs past {longest} tokens left out")
    if not len(kept):
        raise DataError(
            f"no training pair has at most {longest} tokens a side: "
            "raise data.max_sentence_tokens"
        )
    judged, _ = encode_corpus(valid_text, tokenizers, cache_folder=cache).within(
        longest
    )
    if not len(judged):
        raise DataError(
            "no validation pair is short enough: raise data.max_sentence_tokens"
        )
    dropout = None
    if probability := recipe.training.bpe_dropout:
        text = train_text.where(fits.tolist())
        dropout = BpeDropout(kept, text, tokenizers, probability, recipe.order_seed)
    return _Texts(kept, judged, valid_text, dropout)


def _train_tokenizers(
    recipe: Recipe, text: ParallelCorpus, cache: Path | None, display: Display
) -> TokenizerPair:
    def train() -> list[str]:
        display.say(f"training a {recipe.tokenizer.kind} tokenizer")
        pair = train_tokenizers(recipe.tokenizer, text.source, text.target)
        return [
            one.to_json()
            for one in ([pair.source] if pair.joint else [pair.source, pair.target])
        ]

    found = trained_once(
        recipe.tokenizer,
        lambda: chain(text.source, text.target),
        train,
        purpose="translator",
        cache_folder=cache,
    )
    # A joint tokenizer has one file: the first and the last entry are the same.
    pieces = [ByteLevelTokenizer.from_json(one, "the tokenizer") for one in found]
    return TokenizerPair(pieces[0], pieces[-1])


def _bytes_per_token(texts: _Texts) -> float:
    """Return bytes per token of the target sentences with a loss; each sentence has an end token."""
    judged = set(texts.valid.line_numbers.tolist())
    lines = zip(texts.translated.line_numbers, texts.translated.target, strict=True)
    num_bytes = sum(len(line.encode()) for number, line in lines if number in judged)
    return num_bytes / int((texts.valid.target.lengths + 1).sum())


def _training_batches(
    recipe: Recipe, texts: _Texts, tokenizers: TokenizerPair
) -> TokenBatches:
    # Dropout is not applied if it makes a sentence too long.
    longest = min(recipe.data.max_sentence_tokens, recipe.training.batch_tokens - 1)
    of_epoch = None
    if texts.dropout is not None:
        of_epoch = partial(texts.dropout.of_epoch, max_tokens=longest)
    return _batches(recipe, texts.train, tokenizers, shuffle=True, of_epoch=of_epoch)


def _batches(
    recipe: Recipe,
    corpus: EncodedCorpus,
    tokenizers: TokenizerPair,
    *,
    shuffle: bool,
    of_epoch: Callable[[int], EncodedCorpus] | None = None,
) -> TokenBatches:
    target = tokenizers.target
    return TokenBatches(
        corpus,
        max_tokens=recipe.training.batch_tokens,
        seed=recipe.order_seed,
        pad_id=target.pad_id,
        bos_id=target.bos_id,
        eos_id=target.eos_id,
        src_eos_id=tokenizers.source.eos_id,
        shuffle=shuffle,
        of_epoch=of_epoch,
    )


def _scorer(recipe: Recipe, tokenizers: TokenizerPair, valid: ParallelCorpus) -> Scorer:
    # Only the first `max_sentences` are translated; None translates all.
    count = recipe.validation.max_sentences
    sources = valid.source[:count]
    references = valid.target[:count]
    options = SearchOptions(
        beam_size=recipe.validation.beam_size,
        alpha=recipe.decoding.alpha,
        max_extra_tokens=recipe.decoding.max_extra_tokens,
        split=recipe.decoding.split,
    )

    def score(model: EncoderDecoder) -> Quality:
        translated = Translator(model, tokenizers, options).translate(sources)
        texts = [translation.text for translation in translated]
        tokenize = recipe.validation.bleu_tokenize
        bleu, chrf = score_translations(
            texts, references, num_resamples=200, tokenize=tokenize
        )
        at_limit = sum(translation.finish == "length" for translation in translated)
        return Quality(bleu.value, bleu.low, chrf.value, at_limit)

    return score


def _fingerprints(
    recipe: Recipe,
    texts: _Texts,
    tokenizers: TokenizerPair,
    teacher: _Teacher | None,
    config: str,
) -> dict[str, str]:
    """Return hashes of the inputs required unchanged on resuming, by their description."""
    ids = list[bytes]()
    for side in (texts.train.source, texts.train.target):
        ids += [side.ids.tobytes(), side.offsets.tobytes()]
    if texts.train.weights is not None:
        ids.append(texts.train.weights.tobytes())
    # Hash lines, not tokens: pairs too long for the loss are translated too.
    sentences = texts.translated.source, texts.translated.target
    lines = [json.dumps(list(side)).encode() for side in sentences]
    both = [
        tokenizer.to_json().encode()
        for tokenizer in (tokenizers.source, tokenizers.target)
    ]
    judged = [
        recipe.validation.to_fingerprint(excluded={"every_steps"}),
        recipe.decoding.model_dump_json(include={"alpha", "max_extra_tokens"}).encode(),
        str(recipe.data.max_sentence_tokens).encode(),
    ]
    parts = {
        "the training text (data.train)": ids,
        "the validation text (data.valid)": lines,
        "the tokenizers": both,
        "the model": [config.encode()],
        "how it is validated (validation, decoding, data.max_sentence_tokens)": judged,
    }
    if teacher is not None:
        parts["the teacher (training.teacher)"] = [teacher.sha256.encode()]
    return hash_parts(parts)
