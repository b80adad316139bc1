"""Translations and continuations: search and sampling over a cache, text in, text out.

A `Translator` or `TextGenerator` is a front end: it encodes texts to token ids and decodes ids to text. Its
`Decoder` (`decoder.py`) maps ids to `Hypothesis` records: `SentenceDecoder` by beam search,
`PromptDecoder` by continuing. Both run requests in a `Loop` (`token_loop.py`) with an `Engine` (`engine.py`),
a model prepared for decoding: its maps are fused (`fused.py`) and converted to a precision
(`linear_maps.py`), and a step computes all rows of a batch. `search.py` implements beam search, `glossary.py`
forces terms into the beam, `generation.py` and `sampling.py` draw tokens. `plain_engine.py` is the slow
reference. Start with `decoder.py` and `search.py`.
"""

from triptych.running.decoding.decoder import Decoder as Decoder
from triptych.running.decoding.engine import Engine as Engine
from triptych.running.decoding.evaluation import Evaluation as Evaluation
from triptych.running.decoding.evaluation import evaluate_translations as evaluate_translations
from triptych.running.decoding.evaluation import measure_bleu as measure_bleu
from triptych.running.decoding.evaluation import score_bleu as score_bleu
from triptych.running.decoding.evaluation import score_translations as score_translations
from triptych.running.decoding.filling import Filling as Filling
from triptych.running.decoding.filling import fill_masks as fill_masks
from triptych.running.decoding.generation import generate_tokens as generate_tokens
from triptych.running.decoding.likelihood import Likelihood as Likelihood
from triptych.running.decoding.likelihood import measure_likelihood as measure_likelihood
from triptych.running.decoding.likelihood import score_continuations as score_continuations
from triptych.running.decoding.linear_maps import PRECISIONS as PRECISIONS
from triptych.running.decoding.search import Hypothesis as Hypothesis
from triptych.running.decoding.search import Top as Top
from triptych.running.decoding.search import length_penalty as length_penalty
from triptych.running.decoding.text_generator import Continuation as Continuation
from triptych.running.decoding.text_generator import TextGenerator as TextGenerator
from triptych.running.decoding.token_loop import Asked as Asked
from triptych.running.decoding.token_loop import Loop as Loop
from triptych.running.decoding.translator import Candidate as Candidate
from triptych.running.decoding.translator import Translation as Translation
from triptych.running.decoding.translator import Translator as Translator
from triptych.running.decoding_options import GenerationOptions as GenerationOptions
from triptych.running.decoding_options import SamplingOptions as SamplingOptions
from triptych.running.decoding_options import SearchOptions as SearchOptions
from triptych.running.token_rules import TokenRules as TokenRules
