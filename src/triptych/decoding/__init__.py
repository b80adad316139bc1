"""Greedy and beam search over a cache, and text in, text out."""

from triptych.decoding.evaluation import Score, measure_bleu, score_translations
from triptych.decoding.search import Hypothesis, SearchOptions, length_penalty, search
from triptych.decoding.translator import Candidate, SentenceAttention, Translation, Translator

__all__ = [
    "Candidate",
    "Hypothesis",
    "Score",
    "SearchOptions",
    "SentenceAttention",
    "Translation",
    "Translator",
    "length_penalty",
    "measure_bleu",
    "score_translations",
    "search",
]
