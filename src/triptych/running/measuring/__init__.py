"""Measurements of a model on texts: windows, attention, classes, loss without each head."""

from triptych.running.measuring.classes import Classification as Classification
from triptych.running.measuring.classes import LabelledTexts as LabelledTexts
from triptych.running.measuring.classes import labelled_texts as labelled_texts
from triptych.running.measuring.classes import labelled_windows as labelled_windows
from triptych.running.measuring.classes import (
    measure_classification as measure_classification,
)
from triptych.running.measuring.stack_attention import LayerAttention as LayerAttention
from triptych.running.measuring.stack_attention import Part as Part
from triptych.running.measuring.stack_attention import StackAttention as StackAttention
from triptych.running.measuring.stack_attention import read_stacks as read_stacks
from triptych.running.measuring.stack_attention import stack_ids as stack_ids
from triptych.running.measuring.text_arguments import given_lines as given_lines
from triptych.running.measuring.text_arguments import given_texts as given_texts
from triptych.running.measuring.weight_maps import HeadWeights as HeadWeights
from triptych.running.measuring.weight_maps import bin_width as bin_width
from triptych.running.measuring.window_losses import TokenBatch as TokenBatch
from triptych.running.measuring.window_losses import batches_of as batches_of
from triptych.running.measuring.window_losses import require_loss as require_loss
from triptych.running.measuring.windows import MOST_TOKENS as MOST_TOKENS
from triptych.running.measuring.windows import HeadFigures as HeadFigures
from triptych.running.measuring.windows import Place as Place
from triptych.running.measuring.windows import Told as Told
from triptych.running.measuring.windows import UnitSums as UnitSums
from triptych.running.measuring.windows import Windows as Windows
from triptych.running.measuring.windows import cut_windows as cut_windows
from triptych.running.measuring.windows import read_windows as read_windows
from triptych.running.measuring.worth import (
    MOST_TOKENS_OF_WORTH as MOST_TOKENS_OF_WORTH,
)
from triptych.running.measuring.worth import Worth as Worth
from triptych.running.measuring.worth import measure_worth as measure_worth
from triptych.running.measuring.worth import require_worth as require_worth
