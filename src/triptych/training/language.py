"""The tasks of texts, next tokens or masked tokens: text, tokenizer, model and objective of a run."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

from triptych.core.models import (
    AnyModel,
    LanguageModel,
    find_device,
    to_device,
    write_config,
)
from triptych.errors import DataError, UsageError
from triptych.printable import printable
from triptych.running.decoding import (
    Engine,
    GenerationOptions,
    SamplingOptions,
    generate_tokens,
)
from triptych.running.opening import TOKENIZER
from triptych.running.text import (
    LanguageCorpusSpec,
    Masking,
    PretrainedTokenizer,
    TextPart,
    Tokenizer,
    find_files,
    fingerprint,
    read_documents,
    read_tokenizer,
    require_documents,
    require_kept_file,
    unknown_token,
    whole_documents,
    why_no_bits,
)
from triptych.training.choices import fit_language_training, fit_tokenizer, say_choices
from triptych.training.corpora.packing import PackedBatches
from triptych.training.corpora.token_shards import (
    TokenShards,
    tokenize_corpus,
    write_shards,
)
from triptych.training.corpora.tokenizer_training import (
    TokenizerSpec,
    train_tokenizer,
    trained_once,
)
from triptych.training.folder import Prepared, hash_parts, word_vectors
from triptych.training.loop import TrainingResult
from triptych.training.objectives import LanguageObjective
from triptych.training.progress import Display
from triptych.training.recipe import (
    ContinuedRecipe,
    LanguageRecipe,
    TextRecipe,
)
from triptych.training.task import CardWords, StepShape, Task

# A longer text does not improve a tokenizer.
_CHARACTERS_FOR_TOKENIZER = 100_000_000
# Limit of characters of a validation text that a page or a measure reads.
_MOST_CHARACTERS = 1 << 20

TextRecipeT = TypeVar("TextRecipeT", bound=TextRecipe)


class Prediction(NamedTuple):
    """The predicted tokens of a text."""

    command: str  # command for the finished model
    tag: str  # tag of the Hub
    masks: bool  # True for masked tokens and an encoder, False for the next token and a decoder


_PREDICTIONS = {
    "language-model": Prediction("generate", "text-generation", masks=False),
    "masked-language-model": Prediction("fill", "fill-mask", masks=True),
}


class TextTask(Task[TextRecipeT]):
    """Prediction of the tokens of a text, with a model of one stack."""

    batch_key = "batch_size"
    # Keys to change first. The defaults of all other keys are good, or follow from these keys.
    first_keys = (
        *(
            "data.valid_share",
            "data.train.documents",
            "tokenizer.kind",
            "tokenizer.vocab_size",
        ),
        *(
            "model.num_layers",
            "model.d_model",
            "model.num_heads",
            "model.context",
            "model.dropout",
        ),
        *(
            "training.max_steps",
            "training.batch_size",
            "training.learning_rate",
            "training.warmup_steps",
        ),
        *("training.precision", "validation.every_steps", "validation.sample_tokens"),
    )

    def __init__(self, recipe: TextRecipeT) -> None:
        super().__init__(recipe)
        self.prediction = _PREDICTIONS[recipe.task]
        self.command = self.prediction.command
        self.tokens_of_batch = recipe.training.batch_size * recipe.model.context

    def validation_text(self, base: Path) -> tuple[list[str], list[str] | None]:
        return [
            *whole_documents(_first_parts(TextOfRun(self.recipe, base).validation()))
        ], None

    def validation_samples(self, base: Path) -> Iterator[tuple[str, str | None]]:
        for part in TextOfRun(self.recipe, base).validation():
            yield part.text, None

    def card(self, outcome: TrainingResult, best: str) -> CardWords:
        predicted = "the next token"
        if self.prediction.masks:
            predicted = f"masked tokens ({self.recipe.masking.share:.0%} of the text)"
        return CardWords(
            tag=self.prediction.tag,
            about=f"A Transformer {self.recipe.kind} that predicts {predicted}, trained",
            tokens="tokens",
            judged=f": {best} nats per token",
            use=f"sh\ntriptych {self.command} path/to/this/folder",
            model=self._describe_model(),
        )

    @abstractmethod
    def _describe_model(self) -> str:
        """Describe the recipe's model in the card's sentence."""


@final
class LanguageTask(TextTask[LanguageRecipe]):
    """Prediction of tokens by a model with fresh weights and a tokenizer of its text."""

    def prepare(
        self, base: Path, display: Display, folder: Path | None = None
    ) -> Prepared:
        recipe = self.recipe
        # The vocabulary is chosen by characters, the model and schedule by tokens.
        text = TextOfRun(recipe, base)
        if folder is not None:
            tokenizer: Tokenizer = read_tokenizer(folder / TOKENIZER)
            shards = text.shards(tokenizer, display)
        else:
            device = find_device(recipe.training.device).type
            given = recipe
            recipe = fit_tokenizer(recipe, text.num_chars, device)
            display.say(f"text: {text.num_chars:,} characters")
            tokenizer = text.tokenizer(recipe.tokenizer, display)
            shards = text.shards(tokenizer, display)
            num_tokens = shards[0].num_tokens
            recipe = fit_language_training(recipe, num_tokens, device)
            say_choices(given, recipe, f"{num_tokens:,} tokens on {device}", display)

        def begin(model: AnyModel, folder: Path) -> None:
            tokenizer.save(folder / TOKENIZER)
            write_config(model, folder)

        config = recipe.model
        path = recipe.model.embeddings.vectors
        table = "embeddings.table.weight"
        return prepared_text(
            *(recipe, self.prediction.masks, text, tokenizer, shards),
            lambda: LanguageModel.of(config, recipe.kind, tokenizer.vocab_size),
            begin,
            config.model_dump_json(),
            vectors={table: word_vectors(base, path, tokenizer, config.d_model)}
            if path
            else {},
        )

    def fitted_to(self, length: int, device: str) -> LanguageRecipe:
        return fit_language_training(
            fit_tokenizer(self.recipe, length, device), length, device
        )

    def make_model(self, source_size: int, target_size: int) -> LanguageModel:
        return LanguageModel.of(self.recipe.model, self.recipe.kind, target_size)

    def step_shape(self) -> StepShape:
        recipe = self.recipe
        config = recipe.model
        share = recipe.masking.share if self.prediction.masks else 1.0
        # Equal layers are counted once.
        times = 1 if config.attention_in_layer else config.num_layers
        one = config.model_copy(update={"num_layers": config.num_layers // times})
        return StepShape(
            length=config.context,
            num_rows=recipe.training.batch_size,
            targets_of_row=max(round(share * config.context), 1),
            model=LanguageModel.of(one, recipe.kind, recipe.tokenizer.vocab_size),
            times=times,
        )

    def _describe_model(self) -> str:
        model = self.recipe.model
        return (
            f"{model.num_layers} layers, d_model\n{model.d_model}, {model.num_heads} heads, context "
            f"{model.context}, {model.norm}-norm ({model.norm_kind}),\n{model.positions.scheme} positions"
        )


def prepared_text(
    recipe: LanguageRecipe | ContinuedRecipe,
    masks: bool,
    text: "TextOfRun",
    tokenizer: Tokenizer,
    shards: tuple[TokenShards, TokenShards],
    model: Callable[[], LanguageModel],
    begin: Callable[[AnyModel, Path], None],
    config: str,
    **more: Any,
) -> Prepared:
    """Return the inputs of a run of a text.

    `model` makes the model, and `begin` writes the first files of the run folder. `config` describes the
    model for its fingerprint.
    """
    # The caller decides where `objective` allocates the model's parameters (`runs.py`).
    train, valid = shards

    def objective() -> LanguageObjective:
        own = to_device(model(), find_device(recipe.training.device))
        masking = Masking(tokenizer, recipe.masking) if masks else None
        learned = _language_batches(recipe, masking, train, shuffle=True)
        judged = _language_batches(recipe, masking, valid, shuffle=False)
        sample = _sampler(recipe, tokenizer)
        too_many = why_no_bits(valid.share_of(unknown_token(tokenizer)))
        bytes_per_token = None if too_many else valid.bytes_per_token
        return LanguageObjective(own, learned, judged, bytes_per_token, sample)

    def fingerprints() -> dict[str, str]:
        both = [part.encode() for part in text.fingerprints()]
        judged = [
            recipe.masking.model_dump_json().encode(),
            recipe.validation.to_fingerprint(),
        ]
        return hash_parts(
            {
                "the training text (data.train)": [both[0]],
                "the validation text (data.valid)": [
                    both[1],
                    str(recipe.data.within_documents).encode(),
                ],
                "the tokenizer": [tokenizer.to_json().encode()],
                "the model": [config.encode()],
                "how it is validated (validation, masking)": judged,
            }
        )

    return Prepared(recipe, objective, begin, fingerprints, **more)


class TextOfRun:
    """Training and validation text of a recipe, in parts."""

    def __init__(self, recipe: TextRecipe, base: Path) -> None:
        self._data = recipe.data
        self._base = base
        for spec in filter(None, (recipe.data.train, recipe.data.valid)):
            for file in find_files(spec, base=base):
                require_kept_file(file)
        self.num_chars = sum(len(part.text) for part in self._read(recipe.data.train))
        if recipe.data.valid is None:
            self.num_chars = self._cut = int(
                self.num_chars * (1 - recipe.data.valid_share)
            )

    def tokenizer(self, spec: TokenizerSpec, display: Display) -> PretrainedTokenizer:
        """Train a tokenizer on the beginning of the training text, or read it from the cache."""

        def train() -> list[str]:
            display.say(f"training a {spec.kind} tokenizer")
            return [train_tokenizer(spec, self._for_tokenizer()).to_json()]

        cache = self._base / self._data.cache
        (found,) = trained_once(
            spec,
            self._for_tokenizer,
            train,
            purpose="language model",
            cache_folder=cache,
        )
        return PretrainedTokenizer.from_json(found, "the tokenizer")

    def _for_tokenizer(self) -> Iterator[str]:
        left = _CHARACTERS_FOR_TOKENIZER
        for part in self._train():
            yield part.text[:left]
            left -= len(part.text)
            if left <= 0:
                return

    def fingerprints(self) -> tuple[str, str]:
        """Return fingerprints of the training and the validation text."""
        data = self._data
        train = fingerprint(data.train, base=self._base)
        if data.valid is None:
            return train, f"{train} from {self._cut}"
        return train, fingerprint(data.valid, base=self._base)

    def shards(
        self, tokenizer: Tokenizer, display: Display
    ) -> tuple[TokenShards, TokenShards]:
        """Tokenize the training and the validation text into shards on the disk."""
        # Without `data.valid`, the validation text is the end of the training text.
        display.say(f"tokenizing with {tokenizer.vocab_size:,} tokens")
        data = self._data
        cache = self._base / self._data.cache
        if data.valid is not None:
            train, valid = (
                tokenize_corpus(spec, tokenizer, cache_folder=cache, base=self._base)
                for spec in (data.train, data.valid)
            )
        else:
            identity = f"{self.fingerprints()[1]} {tokenizer.to_json()}"
            name = hashlib.sha256(identity.encode()).hexdigest()[:32]
            train = write_shards(
                self._train(), tokenizer, cache / f"shards-{name}-train"
            )
            valid = write_shards(self._end(), tokenizer, cache / f"shards-{name}-valid")
        for part, shards in (("training", train), ("validation", valid)):
            if shards.num_tokens < 2:
                raise DataError(
                    f"the {part} text has {shards.num_tokens} tokens: give one with two or more"
                )
            plural = "s" * (shards.num_documents != 1)
            display.say(
                f"{part} text: {shards.num_documents:,} document{plural}, {shards.num_tokens:,} tokens, "
                f"{shards.bytes_per_token:.2f} bytes a token"
            )
            if share := shards.share_of(unknown_token(tokenizer)):
                display.say(
                    f"{part} text: {share:.2%} of the tokens are unknown (<unk>)"
                )
            if part == "validation" and (
                reason := why_no_bits(share, "tokens of the validation text")
            ):
                display.say(
                    f"{reason}: give the tokenizer a larger vocab_size, or another kind"
                )
        return train, valid

    def _train(self) -> Iterator[TextPart]:
        parts = self._read(self._data.train)
        return parts if self._data.valid is not None else _before(parts, self._cut)

    def validation(self) -> Iterator[TextPart]:
        """Yield the validation text in parts."""
        return self._end() if self._data.valid is None else self._read(self._data.valid)

    def _end(self) -> Iterator[TextPart]:
        return _after(self._read(self._data.train), self._cut)

    def _read(self, spec: LanguageCorpusSpec) -> Iterator[TextPart]:
        return require_documents(read_documents(spec, base=self._base), spec.describe())


def _first_parts(parts: Iterator[TextPart]) -> Iterator[TextPart]:
    """Yield parts of at most `_MOST_CHARACTERS` characters in all."""
    left = _MOST_CHARACTERS
    for part in parts:
        if left <= 0:
            return
        text = part.text[:left]
        left -= len(part.text)
        yield TextPart(text, ends_document=part.ends_document or left <= 0)


def _before(parts: Iterator[TextPart], num_chars: int) -> Iterator[TextPart]:
    """Yield the first `num_chars` characters; the last part is cut."""
    for part in parts:
        if len(part.text) >= num_chars:
            if num_chars:
                yield TextPart(part.text[:num_chars])
            return
        num_chars -= len(part.text)
        yield part


def _after(parts: Iterator[TextPart], num_chars: int) -> Iterator[TextPart]:
    """Yield the text after the first `num_chars` characters."""
    for part in parts:
        if len(part.text) <= num_chars:
            num_chars -= len(part.text)
            continue
        yield from chain([part._replace(text=part.text[num_chars:])], parts)


def _language_batches(
    recipe: TextRecipe, masking: Masking | None, shards: TokenShards, *, shuffle: bool
) -> PackedBatches:
    context = recipe.model.context
    return PackedBatches(
        shards,
        context=context,
        # Validation batches have about 8,192 tokens. Larger batches are not faster.
        batch_size=recipe.training.batch_size if shuffle else max(8192 // context, 1),
        seed=recipe.order_seed,
        within_documents=recipe.data.within_documents,
        shuffle=shuffle,
        masking=masking,
    )


def _sampler(
    recipe: TextRecipe, tokenizer: Tokenizer
) -> Callable[[LanguageModel], str] | None:
    validation = recipe.validation
    if not validation.sample_tokens:
        return None
    options = GenerationOptions(
        max_new_tokens=validation.sample_tokens,
        sampling=SamplingOptions(temperature=0.8, top_k=200),
        seed=recipe.seed,
        stop_ids=() if tokenizer.eos_id is None else (tokenizer.eos_id,),
    )
    prompt = tokenizer.encode(validation.sample_prompt)[0]
    if not prompt:  # the beginning of a document: after its BOS token, or after another document's EOS
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if first is None:
            raise UsageError(
                "the tokenizer has no token that begins a text: set validation.sample_prompt"
            )
        prompt = [first]

    def sample(model: LanguageModel) -> str:
        ((found,),) = generate_tokens(Engine(model), [prompt], options)
        text = tokenizer.decode([[*prompt, *found.ids]])[0]
        # Control characters of an untrained model must not reach the terminal.
        return printable(text, lines=True)

    return sample
