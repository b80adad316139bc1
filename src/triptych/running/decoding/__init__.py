"""Translations and continuations: search and sampling over a cache, text in, text out.

A `Translator` or `TextGenerator` is a front end: it encodes texts to token ids and decodes ids to text. Its
`Decoder` (`decoder.py`) maps ids to `Hypothesis` records: `SentenceDecoder` by beam search,
`PromptDecoder` by continuing. Both run requests in a `Loop` (`token_loop.py`) with an `Engine` (`engine.py`),
a model prepared for decoding: its maps are fused (`fused.py`) and converted to a precision
(`linear_maps.py`), and a step computes all rows of a batch. `search.py` implements beam search, `glossary.py`
forces terms into the beam, `generation.py` and `sampling.py` draw tokens. `plain_engine.py` is the slow
reference. Start with `decoder.py` and `search.py`.
"""

from typing import TYPE_CHECKING

from triptych.listed_names import finder

if TYPE_CHECKING:
    from triptych.running.batching import (
        batches_of_like_length as batches_of_like_length,
    )
    from triptych.running.decoding.decoder import Decoder as Decoder
    from triptych.running.decoding.decoder import Ends as Ends
    from triptych.running.decoding.decoder import Group as Group
    from triptych.running.decoding.decoder import Hypotheses as Hypotheses
    from triptych.running.decoding.decoder import never_ends as never_ends
    from triptych.running.decoding.engine import Engine as Engine
    from triptych.running.decoding.evaluation import Evaluation as Evaluation
    from triptych.running.decoding.evaluation import composed as composed
    from triptych.running.decoding.evaluation import (
        evaluate_translations as evaluate_translations,
    )
    from triptych.running.decoding.evaluation import measure_bleu as measure_bleu
    from triptych.running.decoding.evaluation import (
        nearest_translation as nearest_translation,
    )
    from triptych.running.decoding.evaluation import (
        score_translations as score_translations,
    )
    from triptych.running.decoding.filling import Filling as Filling
    from triptych.running.decoding.filling import fill_masks as fill_masks
    from triptych.running.decoding.fused import FusedAttention as FusedAttention
    from triptych.running.decoding.fused import beyond_fusing as beyond_fusing
    from triptych.running.decoding.fused import numbers_of as numbers_of
    from triptych.running.decoding.generation import NewToken as NewToken
    from triptych.running.decoding.generation import check_prompts as check_prompts
    from triptych.running.decoding.generation import collected as collected
    from triptych.running.decoding.generation import generate_tokens as generate_tokens
    from triptych.running.decoding.generation import limit_of_prompt as limit_of_prompt
    from triptych.running.decoding.hypotheses import Finish as Finish
    from triptych.running.decoding.hypotheses import Hypothesis as Hypothesis
    from triptych.running.decoding.hypotheses import Top as Top
    from triptych.running.decoding.hypotheses import best_first as best_first
    from triptych.running.decoding.hypotheses import length_penalty as length_penalty
    from triptych.running.decoding.hypotheses import limit_of as limit_of
    from triptych.running.decoding.likelihood import Likelihood as Likelihood
    from triptych.running.decoding.likelihood import (
        measure_likelihood as measure_likelihood,
    )
    from triptych.running.decoding.likelihood import (
        score_continuations as score_continuations,
    )
    from triptych.running.decoding.linear_maps import PRECISIONS as PRECISIONS
    from triptych.running.decoding.text_generator import Continuation as Continuation
    from triptych.running.decoding.text_generator import StreamedText as StreamedText
    from triptych.running.decoding.text_generator import TextGenerator as TextGenerator
    from triptych.running.decoding.text_generator import (
        continue_changed as continue_changed,
    )
    from triptych.running.decoding.token_loop import Asked as Asked
    from triptych.running.decoding.token_loop import Loop as Loop
    from triptych.running.decoding.translator import Candidate as Candidate
    from triptych.running.decoding.translator import Translation as Translation
    from triptych.running.decoding.translator import Translator as Translator
    from triptych.running.decoding.workers import Helper as Helper
    from triptych.running.decoding.workers import Sentences as Sentences
    from triptych.running.decoding_options import GenerationOptions as GenerationOptions
    from triptych.running.decoding_options import SamplingOptions as SamplingOptions
    from triptych.running.decoding_options import SearchOptions as SearchOptions
    from triptych.running.input_limits import LONGEST_SHOWN as LONGEST_SHOWN
    from triptych.running.input_limits import check_length as check_length
    from triptych.running.input_limits import check_vocabulary as check_vocabulary
    from triptych.running.token_rules import TokenRules as TokenRules

__getattr__ = finder(__name__, __file__)
