"""Runs: a recipe becomes a folder, a folder becomes a translator.

A run folder holds `config.json`, `model.safetensors`, `tokenizer.json` (and `tokenizer.target.json` if
the two sides have one each), `recipe.toml`, `metrics.jsonl`, `README.md` and `state/`. A model that was
converted has no recipe: `decoding.toml` says how it is searched.
"""

import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import tomli_w
import torch
from pydantic import ValidationError

from triptych.checkpoints import model_type, read_marian
from triptych.checkpoints.own import is_own
from triptych.decoding import Precision, SearchOptions, Stop, Translator, score_bleu
from triptych.errors import DataError, UsageError
from triptych.files import write_folder, write_text
from triptych.models import EncoderDecoder, read_model, write_model
from triptych.models.storage import write_config
from triptych.rewriting.certificate import CERTIFICATE
from triptych.storage.tensors import read_json
from triptych.text import (
    EncodedCorpus,
    ParallelCorpus,
    TokenBatches,
    TokenizerPair,
    encode_corpus,
    read_parallel,
    train_tokenizers,
)
from triptych.training import DecodingConfig, Outcome, Recipe, Trainer, read_recipe
from triptych.training.fitting import choices, fit_tokenizer, fit_training
from triptych.training.judging import LEAST_BLEU, Bleu
from triptych.training.loop import Scorer
from triptych.training.memory import keep_freed_memory, limit_kernel_cache
from triptych.training.plan import describe_plan
from triptych.training.progress import Display, LineDisplay
from triptych.training.state import RUN_FILES, Counters, own_files, read_counters

_RECIPE, _DECODING = "recipe.toml", "decoding.toml"
# What follows on this line of a model card is the hash of the text before it.
_CARD_END = "\n<!-- Written by triptych; if you change this page, it is left as you wrote it. sha256 "


@dataclass(frozen=True)
class Summary:
    """A finished or interrupted run.

    Attributes:
        outcome: how it ended.
        num_parameters: of the model.
        padding_waste: share of padding in the training batches.
    """

    outcome: Outcome
    num_parameters: int
    padding_waste: float

    def figures(self) -> dict[str, Any]:
        """For a machine to read."""
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
    _require_place(folder, force=force)
    base, display = Path.cwd(), display or LineDisplay()
    _prepare(recipe)
    device = _device(recipe.training.device).type
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
    trainer = _trainer(recipe, folder, base, tokenizers, texts)

    def fill(place: Path) -> None:
        tokenizers.save(place)
        write_config(trainer.model, place)
        # The recipe comes last: a folder that has one is a run that can be resumed.
        write_text(place / _RECIPE, recipe.to_toml())

    # No run folder is made, and nothing replaced, before all that can be checked has been.
    if folder.exists():
        for path in own_files(folder):
            path.unlink()
        fill(folder)
    else:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_folder(folder, fill)
    return _run(recipe, trainer, display)


def _require_place(folder: Path, *, force: bool) -> None:
    """A run can be made here, and nothing is lost by it.

    Raises:
        UsageError: it cannot, or the folder holds something and that is not asked for by `force`.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a folder for the run (--out)")
    if holds_run(folder):
        raise UsageError(
            f"{folder} already holds a run: go on with it (--resume {folder}) or name another folder (--out)"
        )
    if (folder / _DECODING).exists() and is_own(_settings(folder)):
        raise UsageError(f"{folder} holds a model that was converted: name another folder (--out)")
    found = sorted(path.name for path in folder.iterdir())
    if found and not force:
        shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise UsageError(
            f"{folder} holds other files ({shown}): name a folder that is new or empty (--out); --force puts "
            "the run among them, and replaces those with the name of a run's file"
        )
    for name in RUN_FILES:
        if name != "." and (folder / name).exists() and not _is_empty(folder / name):
            raise UsageError(f"{folder / name} is in the way of the run's own: name another folder (--out)")
    if taken := [path for path in own_files(folder) if path.is_dir()]:
        raise UsageError(f"{taken[0]} is a folder, and a run has a file there: name another folder (--out)")


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's: its recipe and its configuration are there."""
    return (folder / _RECIPE).exists() and is_own(_settings(folder))


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _settings(folder: Path) -> dict[str, Any]:
    """What a folder's `config.json` says; nothing if it is none."""
    try:
        return read_json(folder / "config.json")
    except DataError:
        return {}


def resume(folder: Path, overrides: Sequence[str] = (), display: Display | None = None) -> Summary:
    """Go on with a run from its last saved state, or from its beginning if it has none.

    Args:
        folder: the run folder.
        overrides: only where training ends may change: `training.max_steps`, `training.max_epochs`,
            `training.patience`.
        display: shows how it goes; lines on standard error if None.

    Raises:
        TriptychError: no run there, changed text, a damaged state; and all that `train` raises.
    """
    if not (folder / _RECIPE).exists():
        raise UsageError(f"{folder} holds no run to resume: it has no {_RECIPE}")
    if (folder / CERTIFICATE).exists():
        raise UsageError(f"{folder} was rewritten: training goes on in the run that it was made from")
    allowed = {"training.max_steps", "training.max_epochs", "training.patience"}
    for override in overrides:
        if override.partition("=")[0].strip() not in allowed:
            raise UsageError(
                f"--set {override}: a resumed run keeps its recipe; "
                f"only {', '.join(sorted(allowed))} may change"
            )
    recipe = read_recipe(folder / _RECIPE, overrides)
    display = display or LineDisplay()
    if not is_own(_settings(folder)):
        raise UsageError(f"{folder} holds no run to resume: it has no config.json of ours")
    has_state = (folder / "state" / "last.safetensors").exists()
    base = Path(read_counters(folder / "state").started_in) if has_state else Path.cwd()
    _prepare(recipe)
    tokenizers = TokenizerPair.load(folder)
    _check_tokenizers(tokenizers, recipe, folder)
    train_text, valid_text = _read_texts(recipe, base, display)
    texts = _encode(recipe, base, tokenizers, train_text, valid_text, display)
    trainer = _trainer(recipe, folder, base, tokenizers, texts)
    if has_state:
        trainer.resume()
        display.say(f"resuming {folder} after step {trainer.counters.step:,}")
    if overrides:
        write_text(folder / _RECIPE, recipe.to_toml())
    return _run(recipe, trainer, display)


@final
class Run:
    """A finished run, opened; or a converted model or a checkpoint of others, which have no recipe."""

    def __init__(
        self,
        folder: Path,
        model: EncoderDecoder,
        tokenizers: TokenizerPair,
        recipe: Recipe | None,
        decoding: DecodingConfig,
    ) -> None:
        self.folder = folder
        self.model = model
        self.tokenizers = tokenizers
        self.recipe = recipe
        self.decoding = decoding

    @classmethod
    def open(cls, folder: Path, device: str = "auto") -> "Run":
        """Read a run folder, that of a converted model, or a Marian model in Hugging Face's format.

        Args:
            folder: where it is.
            device: where the model goes; "auto" takes a GPU if there is one.

        Raises:
            UsageError: there is no such folder, or no such device.
            DataError: files missing or damaged.
        """
        if not folder.is_dir():
            raise UsageError(f"there is no run folder {folder}")
        recipe = None
        if (folder / _RECIPE).exists():
            recipe = read_recipe(folder / _RECIPE)
            decoding = recipe.decoding
        elif (folder / _DECODING).exists():
            decoding = _read_decoding(folder / _DECODING)
        else:
            return cls._open_checkpoint(folder, device)
        model = read_model(folder).to(_device(device))
        tokenizers = TokenizerPair.load(folder)
        if recipe is not None:
            _check_tokenizers(tokenizers, recipe, folder)
        sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
        if sizes != (model.src_vocab_size, model.tgt_vocab_size):
            raise DataError(
                f"{folder}: the tokenizers have {sizes[0]} and {sizes[1]} tokens, the model "
                f"{model.src_vocab_size} and {model.tgt_vocab_size}: the files come from different runs"
            )
        return cls(folder, model, tokenizers, recipe, decoding)

    @classmethod
    def _open_checkpoint(cls, folder: Path, device: str) -> "Run":
        found = model_type(folder)
        if found is None:
            raise DataError(f"{folder} is not a run folder: it has no {_RECIPE}")
        if found != "marian":
            raise DataError(
                f"{folder} holds a model of type {found!r}; of others' models, 'marian' can be read"
            )
        checkpoint = read_marian(folder)
        beams = {} if checkpoint.num_beams is None else {"beam_size": checkpoint.num_beams}
        decoding = DecodingConfig.model_validate({**beams, "alpha": checkpoint.length_penalty})
        return cls(folder, checkpoint.model.to(_device(device)), checkpoint.tokenizers, None, decoding)

    def save(self, folder: Path) -> None:
        """Write model, tokenizers and the way to search, without a recipe; `open` reads them again."""
        write_model(self.model, folder)
        self.tokenizers.save(folder)
        write_text(folder / _DECODING, tomli_w.dumps(self.decoding.model_dump()))

    def search_options(
        self,
        beam_size: int | None = None,
        alpha: float | None = None,
        num_best: int = 1,
        max_extra_tokens: int | None = None,
        stop: Stop | None = None,
    ) -> SearchOptions:
        """The recipe's or the checkpoint's way to search, with what is given changed.

        Raises:
            UsageError: values that do not go together.
        """
        decoding = self.decoding
        try:
            return SearchOptions(
                beam_size=decoding.beam_size if beam_size is None else beam_size,
                alpha=decoding.alpha if alpha is None else alpha,
                max_extra_tokens=max_extra_tokens or decoding.max_extra_tokens,
                num_best=num_best,
                stop=stop or decoding.stop,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None

    def translator(
        self, options: SearchOptions | None = None, *, precision: Precision = "fp32", workers: int = 1
    ) -> Translator:
        """A translator with the run's own way to search unless another is given."""
        options = options or self.search_options()
        return Translator(self.model, self.tokenizers, options, precision=precision, workers=workers)


def load(folder: str | Path, device: str = "auto") -> Translator:
    """The translator of a run folder: `load("runs/demo").translate(["Guten Tag."])`.

    The folder may also be a Marian model in Hugging Face's format.
    """
    return Run.open(Path(folder), device).translator()


def _read_decoding(path: Path) -> DecodingConfig:
    """How a converted model is searched.

    Raises:
        DataError: not TOML, or not such settings.
    """
    try:
        return DecodingConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path}: {where}: {first['msg']}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _check_tokenizers(tokenizers: TokenizerPair, recipe: Recipe, folder: Path) -> None:
    if tokenizers.joint != recipe.tokenizer.joint:
        state = "left over" if recipe.tokenizer.joint else "missing"
        raise DataError(
            f"{folder}/tokenizer.target.json is {state}: the recipe says tokenizer.joint = "
            f"{str(recipe.tokenizer.joint).lower()}"
        )


def _prepare(recipe: Recipe) -> None:
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    limit_kernel_cache()
    keep_freed_memory()


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
    device = _device(recipe.training.device)
    torch.manual_seed(recipe.seed)
    model = EncoderDecoder(
        recipe.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size, tokenizers.target.pad_id
    ).to(device)
    fingerprints = _fingerprints(recipe, texts.train, texts.translated, tokenizers, model)
    counters = Counters(fingerprints=fingerprints, started_in=str(base))
    return Trainer(
        recipe.training,
        recipe.validation,
        model,
        _batches(recipe, texts.train, tokenizers, shuffle=True),
        _batches(recipe, texts.valid, tokenizers, shuffle=False),
        _scorer(recipe, tokenizers, texts.translated) if recipe.validation.bleu else None,
        folder,
        counters,
    )


def _run(recipe: Recipe, trainer: Trainer, display: Display) -> Summary:
    num_parameters = sum(p.numel() for p in trainer.model.parameters())
    waste = trainer.train_batches.padding_waste(0)
    display.say(
        f"model: {num_parameters:,} parameters; padding {waste:.1%} of the batches; "
        f"{torch.get_num_threads()} threads, {recipe.training.precision}, {trainer.device}"
    )
    if plan := describe_plan(trainer):
        display.say(plan)
    summary = Summary(trainer.run(display), num_parameters, waste)
    if summary.outcome.signal_number is None:
        _write_card(trainer.folder / "README.md", _model_card(recipe, summary), display)
    return summary


def _write_card(path: Path, text: str, display: Display) -> None:
    """Write a model card, unless somebody wrote one in its place."""
    if path.exists():
        old = path.read_text(encoding="utf-8", errors="replace")
        body, _, end = old.rpartition(_CARD_END)
        if not end.startswith(_text_hash(body)):
            display.say(f"{path} was changed by hand and is kept; metrics.jsonl has the new figures")
            return
    write_text(path, f"{text}{_CARD_END}{_text_hash(text)} -->\n")


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _model_card(recipe: Recipe, summary: Summary) -> str:
    counters, model = summary.outcome.counters, recipe.model
    best = abs(counters.best_score or 0.0)
    noise = recipe.validation.metric == "bleu" and counters.best_by == "loss"
    why = f" (BLEU decides once its 95 % interval lies above {LEAST_BLEU:g})" if noise else ""
    scores = ", ".join(f"{name} {value:.4f}" for name, value in (summary.outcome.scores or {}).items())
    return f"""---
library_name: triptych
tags: [translation]
---

# {recipe.name}

An encoder-decoder Transformer trained with triptych: d_model {model.d_model}, d_ff {model.d_ff},
{model.num_heads} heads, {model.encoder.num_layers}+{model.decoder.num_layers} layers, {model.norm}-norm,
{summary.num_parameters:,} parameters.

- Training: {counters.step:,} steps, {counters.tokens:,} target tokens, {counters.seconds / 60:.1f} minutes.
- Best validation, chosen by {counters.best_by}{why}: {best:.4f} at step {counters.best_step:,}.
- Average of the last checkpoints: {scores}. `model.safetensors` holds the {summary.outcome.chosen} model.
- `recipe.toml` is the whole recipe; `metrics.jsonl` has the curves.

```python
from triptych import load

load("path/to/this/folder").translate(["A sentence."])[0].text
```
"""


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


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name!r} is asked for, but torch sees {torch.cuda.device_count()} GPUs here"
        )
    return device


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
