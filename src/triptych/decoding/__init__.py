"""Translations and continuations: search and sampling over a cache, and text in, text out."""

from triptych.decoding.engine import Engine
from triptych.decoding.evaluation import (
    CorpusScore,
    Evaluation,
    evaluate_translations,
    measure_bleu,
    score_bleu,
    score_translations,
)
from triptych.decoding.filling import Filling, fill_masks
from triptych.decoding.generation import (
    Generated,
    GenerationOptions,
    NewToken,
    generate_stream,
    generate_tokens,
)
from triptych.decoding.hypotheses import Hypothesis, SearchOptions, Stop, length_penalty
from triptych.decoding.likelihood import Likelihood, measure_likelihood, score_continuations
from triptych.decoding.maps import PRECISIONS, Precision
from triptych.decoding.sampling import SamplingOptions
from triptych.decoding.search import search
from triptych.decoding.text_engine import TextEngine
from triptych.decoding.text_generator import Continuation, TextGenerator
from triptych.decoding.translator import Candidate, Translation, Translator

__all__ = [
    "PRECISIONS",
    "Candidate",
    "Continuation",
    "CorpusScore",
    "Engine",
    "Evaluation",
    "Filling",
    "Generated",
    "GenerationOptions",
    "Hypothesis",
    "Likelihood",
    "NewToken",
    "Precision",
    "SamplingOptions",
    "SearchOptions",
    "Stop",
    "TextEngine",
    "TextGenerator",
    "Translation",
    "Translator",
    "evaluate_translations",
    "fill_masks",
    "generate_stream",
    "generate_tokens",
    "length_penalty",
    "measure_bleu",
    "measure_likelihood",
    "score_bleu",
    "score_continuations",
    "score_translations",
    "search",
]
