"""The text that all contenders are given, prepared once, as plain files."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from triptych.running.text import TokenizerPair
from triptych.training.corpora.corpora import CorpusSpec, read_parallel
from triptych.training.corpora.encoded import EncodedCorpus, encode_corpus
from triptych.training.corpora.pair_batches import Batch, TokenBatches
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers

VOCAB_SIZE = 8000
BATCH_TOKENS = 4096
# Pairs made up where Multi30k is not at hand; their sentences are shorter, and so are the batches.
_GENERATED_PAIRS = 30_000
_GENERATED_VALID_PAIRS = 1_000


@dataclass(frozen=True)
class TrainingText:
    """Batches of a parallel corpus, and where they lie.

    Attributes:
        path: safetensors file with `train.I.src`, `train.I.tgt_in`, `train.I.tgt_out` and likewise `valid`.
        text: what the corpus is.
        num_train: batches to learn from, epoch after epoch, each epoch in an order of its own.
        num_valid: batches to be judged by.
        vocab_size: of the one vocabulary of both sides.
        pad_id: fills up rows; likewise `bos_id`, `eos_id`.
        tokens_per_batch: target tokens, padding not counted, on average.
        padding: share of padding in the target side of the batches to learn from.
    """

    path: str
    text: str
    num_train: int
    num_valid: int
    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    tokens_per_batch: float
    padding: float


def prepare_training(shared: Path, folder: Path, num_train: int) -> TrainingText:
    """Tokenize, batch and write: Multi30k en→de where it is, else the generated corpus."""
    (train, valid), name = _corpora(shared)
    train_text, valid_text = read_parallel(train), read_parallel(valid)
    spec = TokenizerSpec(kind="bpe", vocab_size=VOCAB_SIZE, joint=True)
    tokenizers = train_tokenizers(spec, train_text.source, train_text.target)
    encoded = [encode_corpus(text, tokenizers, cache_folder=None) for text in (train_text, valid_text)]
    learned = list(zip(range(num_train), _endless(encoded[0], tokenizers), strict=False))
    judged = _batches(encoded[1], tokenizers, shuffle=False)
    arrays: dict[str, np.ndarray] = {}
    for number, batch in learned:
        arrays |= _arrays(f"train.{number}", batch)
    valid_batches = [judged.collate(indices) for indices in judged.plan(0)]
    for number, batch in enumerate(valid_batches):
        arrays |= _arrays(f"valid.{number}", batch)
    tokens = sum(batch.num_target_tokens for _, batch in learned)
    folder.mkdir(parents=True, exist_ok=True)
    text = TrainingText(
        path=str(folder / "training.safetensors"),
        text=name,
        num_train=num_train,
        num_valid=len(valid_batches),
        vocab_size=tokenizers.target.vocab_size,
        pad_id=tokenizers.target.pad_id,
        bos_id=tokenizers.target.bos_id,
        eos_id=tokenizers.target.eos_id,
        tokens_per_batch=tokens / num_train,
        padding=1 - tokens / sum(batch.tgt_out.numel() for _, batch in learned),
    )
    save_file(arrays, text.path, metadata={"about": json.dumps(asdict(text))})
    return text


def _corpora(shared: Path) -> tuple[tuple[CorpusSpec, CorpusSpec], str]:
    folder = shared / "data" / "multi30k"
    if (folder / "train.en").exists():
        parts = [CorpusSpec(source=folder / f"{p}.en", target=folder / f"{p}.de") for p in ("train", "val")]
        return (parts[0], parts[1]), "Multi30k, English to German"
    made = CorpusSpec(generated=_GENERATED_PAIRS, generated_part="train")
    judged = CorpusSpec(generated=_GENERATED_VALID_PAIRS, generated_part="valid")
    return (made, judged), "generated numbers and dates, German to English (Multi30k is not here)"


def _endless(corpus: EncodedCorpus, tokenizers: TokenizerPair) -> Iterator[Batch]:
    batches = _batches(corpus, tokenizers, shuffle=True)
    for epoch in count():
        for indices in batches.plan(epoch):
            yield batches.collate(indices)


def _batches(corpus: EncodedCorpus, tokenizers: TokenizerPair, *, shuffle: bool) -> TokenBatches:
    special = tokenizers.target
    return TokenBatches(
        corpus,
        max_tokens=BATCH_TOKENS,
        seed=1,
        pad_id=special.pad_id,
        bos_id=special.bos_id,
        eos_id=special.eos_id,
        shuffle=shuffle,
    )


def _arrays(name: str, batch: Batch) -> dict[str, np.ndarray]:
    sides = {"src": batch.src, "tgt_in": batch.tgt_in, "tgt_out": batch.tgt_out}
    return {f"{name}.{side}": tensor.numpy().astype(np.int32) for side, tensor in sides.items()}
