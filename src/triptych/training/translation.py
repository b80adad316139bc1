"""The task of translation: texts, tokenizers, model and objective of a run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch

from triptych.core.checkpoints.source import is_own_config
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
from triptych.running.decoding import SearchOptions, Translator, score_translations
from triptych.running.opening import check_tokenizers, open_translator
from triptych.running.text import ByteLevelTokenizer, TokenizerPair, require_kept_file
from triptych.training.choices import fit_tokenizer, fit_training, say_choices
from triptych.training.corpora.corpora import CorpusSpec, ParallelCorpus, read_parallel
from triptych.training.corpora.encoded import EncodedCorpus, encode_corpus
from triptych.training.corpora.pair_batches import TokenBatches
from triptych.training.corpora.tokenizer_training import train_tokenizers, trained_once
from triptych.training.folder import Prepared, hash_parts, settings, word_vectors
from triptych.training.loop import TrainingResult
from triptych.training.objectives import (
    LEAST_BLEU,
    Quality,
    Scorer,
    TranslationObjective,
)
from triptych.training.progress import Display
from triptych.training.recipe import (
    Recipe,
    merge,
    require_translation,
    resolve,
)
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
            tokenizers = TokenizerPair.load(folder)
            check_tokenizers(tokenizers, folder, joint=recipe.tokenizer.joint)
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
            else:
                recipe = fit_tokenizer(recipe, num_chars, device)
                tokenizers = _train_tokenizers(recipe, train_text, cache, display)
            texts = _encode_texts(
                recipe, cache, tokenizers, train_text, valid_text, display
            )
            num_tokens = int((texts.train.target.lengths + 1).sum())

            def steps_per_epoch(recipe: Recipe) -> int:
                batches = len(
                    _batches(recipe, texts.train, tokenizers, shuffle=True).plan(0)
                )
                return -(-batches // recipe.training.accumulate_batches)

            recipe = fit_training(recipe, num_tokens, device, steps_per_epoch)
            say_choices(
                given, recipe, f"{num_tokens:,} target tokens on {device}", display
            )

        def objective() -> TranslationObjective:
            sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
            model = EncoderDecoder.of(recipe.model, *sizes, tokenizers.target.pad_id)
            if start is not None:
                model.load_state_dict(start.model.state_dict())
            where = find_device(recipe.training.device)
            return TranslationObjective(
                to_device(model, where),
                _batches(recipe, texts.train, tokenizers, shuffle=True),
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
            lambda: _fingerprints(recipe, texts, tokenizers, teacher),
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
        model = self.recipe.model
        # A validation before BLEU decides was judged by its loss.
        load = 'load("path/to/this/folder").translate(["A sentence."])[0].text'
        return CardWords(
            tag="translation",
            about="An encoder-decoder Transformer trained",
            tokens="target tokens",
            judged=f", chosen by {by}{why}: {best}",
            use=f"python\nfrom triptych import load\n\n{load}",
            model=f"d_model {model.d_model}, d_ff {model.d_ff},\n{model.num_heads} heads, "
            f"{model.encoder.num_layers}+{model.decoder.num_layers} layers, {model.norm}-norm",
        )


def validation_pairs(recipe: Recipe, base: Path) -> ParallelCorpus:
    """Read the validation pairs of a run; paths of the recipe are relative to `base`."""
    data = recipe.data
    pairs = read_parallel(
        data.valid or data.train, max_line_chars=data.max_line_chars, base=base
    )
    return pairs if data.valid is not None else pairs.split(data.valid_share)[1]


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


@dataclass(frozen=True)
class _Start:
    """Translator to continue from, and the recipe with its model, tokenizers and search settings."""

    name: str
    model: EncoderDecoder
    tokenizers: TokenizerPair
    recipe: Recipe

    @classmethod
    def read(cls, recipe: Recipe, base: Path, folder: Path | None) -> "_Start":
        """Open the translator of a new recipe, or of a started run's folder."""
        given = recipe.training.checkpoint
        assert given is not None
        if folder is not None:
            model = read_own_model(folder)
            assert isinstance(model, EncoderDecoder), "its recipe is of a translator"
            return cls(given, model, TokenizerPair.load(folder), recipe)
        path = base / given
        reader = open_translator(path if path.exists() else given, "cpu")
        if not has_config(reader.encoder_decoder):
            raise UsageError(
                f"{reader.name} cannot be trained further: of other libraries' translators only Marian's "
                "can, with scaled embeddings and feed-forward layers of one width"
            )
        model = reader.encoder_decoder.float()
        tokenizers = reader.tokenizers
        tree = recipe.model_dump(mode="json", exclude_unset=True)
        decoding = reader.decoding.model_dump(mode="json", exclude_none=True)
        config = find_config(model)
        longest = min(recipe.data.max_sentence_tokens, config.max_source_tokens)
        own = {
            "data": {"max_sentence_tokens": longest},
            "model": config.model_dump(mode="json"),
            "tokenizer": {
                "joint": tokenizers.joint,
                "vocab_size": tokenizers.target.vocab_size,
            },
            "decoding": merge(decoding, tree.get("decoding", {})),
        }
        origin = f"the recipe with {reader.name}"
        whole = require_translation(resolve(merge(tree, own), (), origin), origin)
        return cls(reader.name, model, tokenizers, whole)


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
    data = recipe.data

    def read(part: str, spec: CorpusSpec) -> ParallelCorpus:
        for file in filter(None, (spec.source, spec.target, spec.file)):
            require_kept_file(base / file)
        text = read_parallel(spec, max_line_chars=data.max_line_chars, base=base)
        display.say(f"{part} text: {text.counts.describe()}")
        return text

    train = read("training", data.train)
    if data.valid is not None:
        return train, read("validation", data.valid)
    # Pairs with the same source stay together, so that no validation source is trained on.
    train, valid = train.split(data.valid_share)
    display.say(
        f"no data.valid is given: {len(valid):,} pairs are held out to validate, {len(train):,} train"
    )
    return train, valid


@dataclass(frozen=True)
class _Texts:
    """Training text, validation text for the loss, and validation text to translate."""

    train: EncodedCorpus
    valid: EncodedCorpus
    translated: ParallelCorpus


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
    kept, num_long = encoded.within(recipe.data.max_sentence_tokens)
    if num_long:
        display.say(
            f"{num_long:,} training pairs past {recipe.data.max_sentence_tokens} tokens left out"
        )
    if not len(kept):
        raise DataError(
            f"no training pair has at most {recipe.data.max_sentence_tokens} tokens a side: "
            "raise data.max_sentence_tokens"
        )
    judged, _ = encode_corpus(valid_text, tokenizers, cache_folder=cache).within(
        recipe.data.max_sentence_tokens
    )
    if not len(judged):
        raise DataError(
            "no validation pair is short enough: raise data.max_sentence_tokens"
        )
    return _Texts(kept, judged, valid_text)


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


def _batches(
    recipe: Recipe, corpus: EncodedCorpus, tokenizers: TokenizerPair, *, shuffle: bool
) -> TokenBatches:
    target = tokenizers.target
    return TokenBatches(
        corpus,
        max_tokens=recipe.training.batch_tokens,
        seed=recipe.order_seed,
        pad_id=target.pad_id,
        bos_id=target.bos_id,
        eos_id=target.eos_id,
        shuffle=shuffle,
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
    recipe: Recipe, texts: _Texts, tokenizers: TokenizerPair, teacher: _Teacher | None
) -> dict[str, str]:
    """Return hashes of the inputs required unchanged on resuming, by their description."""
    ids = list[bytes]()
    for side in (texts.train.source, texts.train.target):
        ids += [side.ids.tobytes(), side.offsets.tobytes()]
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
        "the model": [recipe.model.model_dump_json().encode()],
        "how it is validated (validation, decoding, data.max_sentence_tokens)": judged,
    }
    if teacher is not None:
        parts["the teacher (training.teacher)"] = [teacher.sha256.encode()]
    return hash_parts(parts)
