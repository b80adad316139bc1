"""Translations and continuations: search and sampling over a cache, text in, text out.

A `Translator` or `TextGenerator` turns texts into token ids and batches (`batches.py`), and ids back into
text. What both begin is decoded by a `Loop` (`loop.py`) and ends as `Hypothesis` records. An `Engine`
(`engine.py`) is a model made ready: maps fused (`fused.py`) and of a precision (`maps.py`), one step for all
rows of a batch. `search.py` has the beam, `glossary.py` forces terms into it,
`generation.py` and `sampling.py` the loop that draws. `plain_engine.py` is the slow reference. Start with
`translator.py` and `search.py`.
"""

from triptych.decoding.engine import Engine as Engine
from triptych.decoding.evaluation import Evaluation as Evaluation
from triptych.decoding.evaluation import evaluate_translations as evaluate_translations
from triptych.decoding.evaluation import measure_bleu as measure_bleu
from triptych.decoding.evaluation import score_bleu as score_bleu
from triptych.decoding.evaluation import score_translations as score_translations
from triptych.decoding.filling import Filling as Filling
from triptych.decoding.filling import fill_masks as fill_masks
from triptych.decoding.generation import GenerationOptions as GenerationOptions
from triptych.decoding.generation import generate_tokens as generate_tokens
from triptych.decoding.likelihood import Likelihood as Likelihood
from triptych.decoding.likelihood import measure_likelihood as measure_likelihood
from triptych.decoding.likelihood import score_continuations as score_continuations
from triptych.decoding.loop import Asked as Asked
from triptych.decoding.loop import Loop as Loop
from triptych.decoding.maps import PRECISIONS as PRECISIONS
from triptych.decoding.maps import Precision as Precision
from triptych.decoding.rules import TokenRules as TokenRules
from triptych.decoding.sampling import SamplingOptions as SamplingOptions
from triptych.decoding.search import Hypothesis as Hypothesis
from triptych.decoding.search import SearchOptions as SearchOptions
from triptych.decoding.search import Stop as Stop
from triptych.decoding.search import Top as Top
from triptych.decoding.search import length_penalty as length_penalty
from triptych.decoding.text_generator import Continuation as Continuation
from triptych.decoding.text_generator import TextGenerator as TextGenerator
from triptych.decoding.translator import Candidate as Candidate
from triptych.decoding.translator import Translation as Translation
from triptych.decoding.translator import Translator as Translator
