"""The loss of a model on the calibration text without each of its heads, for `prune_heads` by loss."""

from collections.abc import Sequence
from pathlib import Path

from triptych.attending.over_text import cut_windows
from triptych.attending.worth import MOST_TOKENS, measure_worth
from triptych.checkpoints.layer import Site
from triptych.opening import Reader, open_model, read_pairs, read_whole_text


def measure_head_losses(folder: Path, sites: Sequence[Site], text: Path) -> dict[str, tuple[float, ...]]:
    """By which the loss of the original model rises without each head of layers, in nats per token.

    A head is left out as `prune_heads` leaves it out: its output is zero. See `measure_worth`.
    """
    reader = Reader(open_model(folder, "cpu"))
    if reader.opened.translates:
        pairs = [*read_pairs(text)]
        windows = cut_windows(reader, [one for one, _ in pairs], [other for _, other in pairs])
    else:
        windows = cut_windows(reader, [read_whole_text(text)])
    worth = measure_worth(reader, windows.within(MOST_TOKENS), "zero")
    return {
        site.name: worth.of("cross" if site.kind == "cross" else site.stack, site.layer) for site in sites
    }
