"""Translations and continuations: search and sampling over a cache, and text in, text out."""

from triptych.decoding.engine import Engine
from triptych.decoding.evaluation import Score, measure_bleu, score_bleu, score_translations
from triptych.decoding.fused import PRECISIONS, Precision
from triptych.decoding.generation import (
    Generated,
    GenerationOptions,
    NewToken,
    generate_stream,
    generate_tokens,
    generated_attention,
)
from triptych.decoding.hypotheses import Hypothesis, SearchOptions, Stop, length_penalty
from triptych.decoding.sampling import SamplingOptions
from triptych.decoding.search import search
from triptych.decoding.text_engine import TextEngine
from triptych.decoding.translator import Candidate, SentenceAttention, Translation, Translator

__all__ = [
    "PRECISIONS",
    "Candidate",
    "Engine",
    "Generated",
    "GenerationOptions",
    "Hypothesis",
    "NewToken",
    "Precision",
    "SamplingOptions",
    "Score",
    "SearchOptions",
    "SentenceAttention",
    "Stop",
    "TextEngine",
    "Translation",
    "Translator",
    "generate_stream",
    "generate_tokens",
    "generated_attention",
    "length_penalty",
    "measure_bleu",
    "score_bleu",
    "score_translations",
    "search",
]
