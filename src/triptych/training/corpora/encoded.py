"""Corpora as token ids: compact arrays, cached on disk between runs."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from jaxtyping import Bool, Float64, Int64
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from triptych.files import write_atomically
from triptych.running.text import (
    Tokenizer,
    TokenizerPair,
    TokenSequences,
    offsets_of,
)
from triptych.training.corpora.corpora import ParallelCorpus

_FORMAT = b"triptych token cache 1"
_SIDES = "source", "target"
# Number of texts tokenized at a time: lists of Python integers need up to nine times an array's memory.
_TEXTS_AT_ONCE = 10_000


@final
@dataclass(frozen=True, eq=False)
class EncodedCorpus:
    """Parallel corpus as token ids, without `<bos>` and `<eos>`."""

    source: TokenSequences  # ids of the source sentences
    target: TokenSequences  # ids of the target sentences
    # 1-based line of every pair in its file, `[num_pairs]`.
    line_numbers: Int64[np.ndarray, "num_pairs"]
    name: str  # name of the corpus in messages
    # Weight of every pair, `[num_pairs]`; None if all weights are 1.
    weights: Float64[np.ndarray, "num_pairs"] | None = None

    def __len__(self) -> int:
        return len(self.line_numbers)

    @property
    def tokens_of_pass(self) -> int:
        """Number of target tokens of one pass over the text, with an end token for each sentence."""
        lengths = self.target.lengths + 1
        if self.weights is None:
            return int(lengths.sum())
        return round(float(lengths @ self.weights))

    def within(self, max_tokens: int) -> tuple["EncodedCorpus", int]:
        """Drop pairs with a sentence longer than `max_tokens` without `<bos>` and `<eos>`.

        Returns the remaining pairs, and the number of dropped pairs.
        """
        rest = self.where(self.fits(max_tokens))
        return rest, len(self) - len(rest)

    def fits(self, max_tokens: int) -> Bool[np.ndarray, "num_pairs"]:
        """Return True for each pair without a sentence longer than `max_tokens`."""
        return np.asarray(
            np.maximum(self.source.lengths, self.target.lengths) <= max_tokens
        )

    def where(self, keep: Bool[np.ndarray, "num_pairs"]) -> "EncodedCorpus":
        """Return the pairs with a true entry in `keep`."""
        return EncodedCorpus(
            self.source.where(keep),
            self.target.where(keep),
            self.line_numbers[keep],
            self.name,
            None if self.weights is None else self.weights[keep],
        )


def encode_corpus(
    corpus: ParallelCorpus, tokenizers: TokenizerPair, *, cache_folder: Path | None
) -> EncodedCorpus:
    """Tokenize a corpus, or read its tokens from the cache."""
    # The name of a cache file is a hash of texts and tokenizers.
    if cache_folder is None:
        arrays = _encode_sides(corpus, tokenizers)
    else:
        path = cache_folder / f"tokens-{_key_of(corpus, tokenizers)}.safetensors"
        found = _read_cache(path)
        arrays = _encode_sides(corpus, tokenizers) if found is None else found
        if found is None:
            cache_folder.mkdir(parents=True, exist_ok=True)
            metadata = {"sha256": _digest_of_arrays(arrays)}
            write_atomically(
                path, lambda temporary: save_file(arrays, temporary, metadata=metadata)
            )
    source, target = (
        TokenSequences(arrays[f"{s}.ids"], arrays[f"{s}.offsets"]) for s in _SIDES
    )
    numbers = np.array(corpus.line_numbers, dtype=np.int64)
    weights = None if corpus.weights is None else np.array(corpus.weights)
    return EncodedCorpus(source, target, numbers, corpus.name, weights)


def _encode_sides(
    corpus: ParallelCorpus, tokenizers: TokenizerPair
) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for side in _SIDES:
        before = _forced(tokenizers) if side == "target" else ()
        found = _pack_texts(getattr(corpus, side), getattr(tokenizers, side), before)
        arrays |= {f"{side}.ids": found.ids, f"{side}.offsets": found.offsets}
    return arrays


def _forced(tokenizers: TokenizerPair) -> tuple[int, ...]:
    """Return the tokens with which every output begins, such as its language."""
    return tokenizers.target.rules.start[1:]


def _pack_texts(
    texts: Sequence[str], tokenizer: Tokenizer, before: Sequence[int]
) -> TokenSequences:
    starts = range(0, len(texts), _TEXTS_AT_ONCE)
    parts = [
        TokenSequences.pack(
            [[*before, *ids] for ids in tokenizer.encode(texts[i : i + _TEXTS_AT_ONCE])]
        )
        for i in starts
    ]
    lengths = np.concatenate([part.lengths for part in parts])
    return TokenSequences(
        np.concatenate([part.ids for part in parts]), offsets_of(lengths)
    )


def _key_of(corpus: ParallelCorpus, tokenizers: TokenizerPair) -> str:
    digest = hashlib.sha256(_FORMAT)
    # Special tokens around a sentence are not in the file of a checkpoint's tokenizer.
    pair = tokenizers.source, tokenizers.target
    around = *(one.encode([""])[0] for one in pair), _forced(tokenizers)
    if any(around):
        add_texts(digest, [json.dumps(around)])
    sides = (
        (tokenizers.source.to_json(),),
        (tokenizers.target.to_json(),),
        corpus.source,
        corpus.target,
    )
    for texts in sides:
        add_texts(digest, texts)
    return digest.hexdigest()


def add_texts(digest: "hashlib._Hash", texts: Iterable[str]) -> None:
    """Add texts to a digest; different lists of texts give different input."""
    for text in texts:
        content = text.encode("utf-8")
        # Lengths keep ["ab", "c"] apart from ["a", "bc"].
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)


def _read_cache(path: Path) -> dict[str, np.ndarray] | None:
    """Read the arrays of a cache file; None if the file is missing or damaged."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
            expected = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError):
        return None
    # Only the digest detects a flipped bit: it would be another token.
    return arrays if _digest_of_arrays(arrays) == expected else None


def _digest_of_arrays(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
