"""Greedy and beam search over a cache, and text in, text out."""

from triptych.decoding.engine import Engine
from triptych.decoding.evaluation import Score, measure_bleu, score_bleu, score_translations
from triptych.decoding.fused import PRECISIONS, Precision
from triptych.decoding.hypotheses import Hypothesis, SearchOptions, Stop, length_penalty
from triptych.decoding.search import search
from triptych.decoding.translator import Candidate, SentenceAttention, Translation, Translator

__all__ = [
    "PRECISIONS",
    "Candidate",
    "Engine",
    "Hypothesis",
    "Precision",
    "Score",
    "SearchOptions",
    "SentenceAttention",
    "Stop",
    "Translation",
    "Translator",
    "length_penalty",
    "measure_bleu",
    "score_bleu",
    "score_translations",
    "search",
]
