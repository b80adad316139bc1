"""From a recipe to a trained model: `train` starts a run, `resume` goes on with one."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triptych.checkpoints.own import is_own
from triptych.decoding import SearchOptions, Translator, score_bleu
from triptych.errors import DataError, UsageError
from triptych.files import write_folder, write_text
from triptych.models import EncoderDecoder
from triptych.models.device import find_device
from triptych.models.storage import write_config
from triptych.runs.card import write_card
from triptych.runs.folder import RECIPE, check_tokenizers, require_place, settings
from triptych.storage.copying import CERTIFICATE
from triptych.text import (
    EncodedCorpus,
    ParallelCorpus,
    TokenBatches,
    TokenizerPair,
    encode_corpus,
    read_parallel,
    train_tokenizers,
)
from triptych.threads import torch_threads
from triptych.training import Recipe, Trainer, TrainingResult, read_recipe
from triptych.training.fitting import choices, fit_tokenizer, fit_training
from triptych.training.judging import Bleu
from triptych.training.objectives import Scorer, Translation
from triptych.training.plan import describe_plan
from triptych.training.progress import Display, LineDisplay
from triptych.training.state import Counters, own_files, read_counters


@dataclass(frozen=True)
class Summary:
    """A finished or interrupted run.

    Attributes:
        outcome: how it ended.
        num_parameters: of the model.
        padding_waste: share of padding in the training batches.
    """

    outcome: TrainingResult
    num_parameters: int
    padding_waste: float

    def figures(self) -> dict[str, Any]:
        counters = self.outcome.counters
        return {
            "steps": counters.step,
            "tokens": counters.tokens,
            "seconds": round(counters.seconds, 3),
            "tokens_per_second": round(counters.tokens / max(counters.seconds, 1e-9), 1),
            "parameters": self.num_parameters,
            "padding_waste": round(self.padding_waste, 4),
            "chosen": self.outcome.chosen,
            "best_step": counters.best_step,
            "best_by": counters.best_by,
            "best_score": None if counters.best_score is None else abs(counters.best_score),
            "average_scores": self.outcome.scores,
        }


def train(recipe: Recipe, folder: Path, display: Display | None = None, *, force: bool = False) -> Summary:
    """Start a run.

    Args:
        recipe: what to do; relative paths in it are relative to the current folder.
        folder: the run folder, made here once the input is known to be good; new or empty.
        display: shows how it goes; lines on standard error if None.
        force: the folder may hold other files; those with the name of a run's are replaced.

    Raises:
        TriptychError: a folder that is taken, input that is not as it should be, a loss no longer finite, a
            full disk.
    """
    require_place(folder, force=force)
    base, display = Path.cwd(), display or LineDisplay()
    device = find_device(recipe.training.device).type
    train_text, valid_text = _read_texts(recipe, base, display)
    num_chars = sum(map(len, train_text.source)) + sum(map(len, train_text.target))
    given, recipe = recipe, fit_tokenizer(recipe, num_chars, device)
    display.say(f"training a {recipe.tokenizer.kind} tokenizer")
    tokenizers = train_tokenizers(recipe.tokenizer, train_text.source, train_text.target)
    texts = _encode(recipe, base, tokenizers, train_text, valid_text, display)
    num_tokens = int((texts.train.target.lengths + 1).sum())
    recipe = fit_training(recipe, num_tokens, device, lambda r: _steps_per_epoch(r, texts.train, tokenizers))
    if chosen := ", ".join(choices(given, recipe)):
        display.say(f"left out of the recipe, chosen for {num_tokens:,} target tokens on {device}: {chosen}")
    with _threads_and_seed(recipe):
        trainer = _trainer(recipe, folder, base, tokenizers, texts)

        def fill(place: Path) -> None:
            tokenizers.save(place)
            write_config(trainer.model, place)
            # The recipe comes last: a folder that has one is a run that can be resumed.
            write_text(place / RECIPE, recipe.to_toml())

        # No run folder is made, and nothing replaced, before all that can be checked has been.
        if folder.exists():
            for path in own_files(folder):
                path.unlink()
            fill(folder)
        else:
            folder.absolute().parent.mkdir(parents=True, exist_ok=True)
            write_folder(folder, fill)
        return _run(recipe, trainer, display)


def resume(folder: Path, overrides: Sequence[str] = (), display: Display | None = None) -> Summary:
    """Go on with a run from its last saved state, or from its beginning if it has none.

    Args:
        folder: the run folder.
        overrides: only where training ends may change: `training.max_steps`, `training.max_epochs`,
            `training.early_stopping`.
        display: shows how it goes; lines on standard error if None.

    Raises:
        TriptychError: no run there, changed text, a damaged state; and all that `train` raises.
    """
    if not (folder / RECIPE).exists():
        raise UsageError(f"{folder} has no run to resume: there is no {RECIPE}")
    if (folder / CERTIFICATE).exists():
        raise UsageError(f"{folder} was rewritten: resume the original run instead")
    allowed = {"training.max_steps", "training.max_epochs", "training.early_stopping"}
    for override in overrides:
        if override.partition("=")[0].strip() not in allowed:
            raise UsageError(
                f"--set {override}: a resumed run keeps its recipe; "
                f"only {', '.join(sorted(allowed))} may change"
            )
    recipe = read_recipe(folder / RECIPE, overrides)
    display = display or LineDisplay()
    if not is_own(settings(folder)):
        raise UsageError(f"{folder} has no run to resume: there is no config.json of ours")
    has_state = (folder / "state" / "last.safetensors").exists()
    base = Path(read_counters(folder / "state").started_in) if has_state else Path.cwd()
    tokenizers = TokenizerPair.load(folder)
    check_tokenizers(tokenizers, recipe, folder)
    train_text, valid_text = _read_texts(recipe, base, display)
    texts = _encode(recipe, base, tokenizers, train_text, valid_text, display)
    with _threads_and_seed(recipe):
        trainer = _trainer(recipe, folder, base, tokenizers, texts)
        if has_state:
            trainer.resume()
            display.say(f"resuming {folder} after step {trainer.counters.step:,}")
        if overrides:
            write_text(folder / RECIPE, recipe.to_toml())
        return _run(recipe, trainer, display)


@contextmanager
def _threads_and_seed(recipe: Recipe) -> Iterator[None]:
    """Those of the recipe inside the block; afterwards threads and random numbers are as they were."""
    device = find_device(recipe.training.device)
    drawn_on = [device] if device.type == "cuda" else []
    with torch_threads(recipe.training.threads), torch.random.fork_rng(drawn_on):
        torch.manual_seed(recipe.seed)
        yield


def _read_texts(recipe: Recipe, base: Path, display: Display) -> tuple[ParallelCorpus, ParallelCorpus]:
    texts = []
    for part, spec in (("training", recipe.data.train), ("validation", recipe.data.valid)):
        text = read_parallel(spec, max_line_chars=recipe.data.max_line_chars, base=base)
        display.say(f"{part} text: {text.counts.describe()}")
        texts.append(text)
    return texts[0], texts[1]


@dataclass(frozen=True)
class _Texts:
    """The text as it is trained on, judged by its loss, and translated."""

    train: EncodedCorpus
    valid: EncodedCorpus
    translated: ParallelCorpus


def _encode(
    recipe: Recipe,
    base: Path,
    tokenizers: TokenizerPair,
    train_text: ParallelCorpus,
    valid_text: ParallelCorpus,
    display: Display,
) -> _Texts:
    cache = base / recipe.data.cache if recipe.data.cache else None
    display.say(f"tokenizing with {tokenizers.target.vocab_size:,} tokens")
    encoded = encode_corpus(train_text, tokenizers, cache_folder=cache)
    kept, num_long = encoded.within(recipe.data.max_sentence_tokens)
    if num_long:
        display.say(f"{num_long:,} training pairs past {recipe.data.max_sentence_tokens} tokens left out")
    if not len(kept):
        raise DataError(
            f"no training pair has at most {recipe.data.max_sentence_tokens} tokens a side: "
            "raise data.max_sentence_tokens"
        )
    judged, _ = encode_corpus(valid_text, tokenizers, cache_folder=cache).within(
        recipe.data.max_sentence_tokens
    )
    if not len(judged):
        raise DataError("no validation pair is within data.max_sentence_tokens")
    return _Texts(kept, judged, valid_text)


def _steps_per_epoch(recipe: Recipe, train: EncodedCorpus, tokenizers: TokenizerPair) -> int:
    batches = len(_batches(recipe, train, tokenizers, shuffle=True).plan(0))
    return -(-batches // recipe.training.accumulate_batches)


def _trainer(recipe: Recipe, folder: Path, base: Path, tokenizers: TokenizerPair, texts: _Texts) -> Trainer:
    device = find_device(recipe.training.device)
    model = EncoderDecoder.of(
        recipe.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size, tokenizers.target.pad_id
    ).to(device)
    fingerprints = _fingerprints(recipe, texts.train, texts.translated, tokenizers, model)
    counters = Counters(fingerprints=fingerprints, started_in=str(base))
    objective = Translation(
        model,
        _batches(recipe, texts.train, tokenizers, shuffle=True),
        _batches(recipe, texts.valid, tokenizers, shuffle=False),
        recipe.training,
        recipe.validation,
        _scorer(recipe, tokenizers, texts.translated) if recipe.validation.bleu else None,
    )
    return Trainer(recipe.training, recipe.validation, objective, folder, counters)


def _run(recipe: Recipe, trainer: Trainer, display: Display) -> Summary:
    num_parameters = sum(p.numel() for p in trainer.model.parameters())
    waste = trainer.objective.padding_waste()
    display.say(
        f"model: {num_parameters:,} parameters; padding {waste:.1%} of the batches; "
        f"{torch.get_num_threads()} threads, {recipe.training.precision}, {trainer.device}"
    )
    if plan := describe_plan(trainer):
        display.say(plan)
    summary = Summary(trainer.run(display), num_parameters, waste)
    if summary.outcome.signal_number is None:
        write_card(trainer.folder, recipe, summary.outcome, num_parameters, display)
    return summary


def _batches(
    recipe: Recipe, corpus: EncodedCorpus, tokenizers: TokenizerPair, *, shuffle: bool
) -> TokenBatches:
    target = tokenizers.target
    return TokenBatches(
        corpus,
        max_tokens=recipe.training.batch_tokens,
        seed=recipe.seed,
        pad_id=target.pad_id,
        bos_id=target.bos_id,
        eos_id=target.eos_id,
        shuffle=shuffle,
    )


def _scorer(recipe: Recipe, tokenizers: TokenizerPair, valid: ParallelCorpus) -> Scorer:
    count = recipe.validation.max_sentences
    sources, references = valid.source[:count], valid.target[:count]
    options = SearchOptions(
        beam_size=recipe.validation.beam_size,
        alpha=recipe.decoding.alpha,
        max_extra_tokens=recipe.decoding.max_extra_tokens,
    )

    def score(model: EncoderDecoder) -> Bleu:
        translated = Translator(model, tokenizers, options).translate(sources)
        found = score_bleu([translation.text for translation in translated], references, num_resamples=200)
        return Bleu(found.value, found.low)

    return score


def _fingerprints(
    recipe: Recipe,
    corpus: EncodedCorpus,
    valid: ParallelCorpus,
    tokenizers: TokenizerPair,
    model: EncoderDecoder,
) -> dict[str, str]:
    """What a resumed run must find as it was, by the words that name it."""
    ids = [array for s in (corpus.source, corpus.target) for array in (s.ids.tobytes(), s.offsets.tobytes())]
    # As read, not as tokens: pairs too long for the loss are translated all the same.
    lines = [json.dumps(list(side)).encode() for side in (valid.source, valid.target)]
    both = [tokenizer.to_json().encode() for tokenizer in (tokenizers.source, tokenizers.target)]
    judged = [
        recipe.validation.model_dump_json(exclude={"every_steps"}).encode(),
        recipe.decoding.model_dump_json(include={"alpha", "max_extra_tokens"}).encode(),
        str(recipe.data.max_sentence_tokens).encode(),
    ]
    parts = {
        "the training text (data.train)": ids,
        "the validation text (data.valid)": lines,
        "the tokenizers": both,
        "the model": [model.config.model_dump_json().encode()],
        "how it is validated (validation, decoding, data.max_sentence_tokens)": judged,
    }
    return {name: hashlib.sha256(b"\0".join(part)).hexdigest() for name, part in parts.items()}
