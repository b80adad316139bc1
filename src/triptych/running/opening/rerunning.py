"""Further runs of a batch that begin at one block: earlier blocks compute what they computed before."""

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.models import AnyModel, AttentionSite, LanguageModel
from triptych.running.opening.layer_calls import Recording


def begins_anywhere(model: AnyModel) -> bool:
    """Return True if every block reads only the preceding stream, so that a run can begin at any block."""
    return not isinstance(model, LanguageModel) or all(
        block.keys is None and block.input is None
        for block in model.architecture.blocks
    )


def run_from(
    model: AnyModel, run: Recording, site: AttentionSite, times: int
) -> Float[Tensor, "repeated length d_model"]:
    """Run the blocks from a site on a batch repeated `times` times; return the stream after the final norm.

    Copy number c of row r is row `c * rows + r`. `run` is the recording of the batch, with residual streams.
    A change in the encoder changes the whole decoder.
    """

    def repeated(x: Tensor) -> Tensor:
        return x.repeat(times, *[1] * (x.ndim - 1))

    if isinstance(model, LanguageModel):
        x = run.residuals[model.architecture.kind][site.block]
        mask = (
            None if model.causal else _tokens([len(text.ids) for text in run.texts], x)
        )
        return model.from_stream(
            repeated(x), site.block, mask=None if mask is None else repeated(mask)
        )
    read = run.residuals["encoder"]
    written = run.residuals["decoder"]
    mask = repeated(_tokens([len(text.source or ()) for text in run.texts], read[0]))
    if site.stack == "encoder":
        memory = model.encoder.from_stream(
            repeated(read[site.block]), site.block, mask=mask
        )
        first = 0
    else:
        memory = repeated(model.encoder.final_norm(read[-1]))
        first = site.block
    return model.decoder.from_stream(
        repeated(written[first]), first, memory=memory, memory_mask=mask
    )


def _tokens(lengths: list[int], like: Tensor) -> Tensor:
    """Return a mask of keys, `[rows, 1, 1, length]`: True = token, False = padding."""
    places = torch.arange(like.shape[1], device=like.device)
    return (places < torch.tensor(lengths, device=like.device)[:, None])[:, None, None]
