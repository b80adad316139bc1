"""Types of the keyword arguments of verbs, for signatures with exact return types in an editor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from triptych.literals import FileSettings, SpecialTokens, Stop


class SearchKeywords(TypedDict, total=False):
    """Keyword arguments of `Model.translate`."""

    beam_size: int | None
    alpha: float | None
    num_best: int
    max_extra_tokens: int | None
    max_source_tokens: int | None
    split: bool | None
    stop: Stop | None
    no_repeat_ngram_size: int | None
    repetition_penalty: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int
    glossary: Mapping[str, str] | None
    workers: int
    special_tokens: SpecialTokens


class GenerationKeywords(TypedDict, total=False):
    """Keyword arguments of `Model.generate` besides the number of samples."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    generation_config: FileSettings
    seed: int
    beam_size: int
    alpha: float
    stop: str | Sequence[str]
    max_prompt_tokens: int | None
    chat: bool
    special_tokens: SpecialTokens
