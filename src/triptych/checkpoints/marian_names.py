"""What the tensors of a Marian checkpoint are called, there and in our model."""

from collections.abc import Iterator
from typing import NamedTuple

from triptych.checkpoints.marian_settings import MarianSettings

# The maps and norms of a layer: their names, and ours.
_SELF_ATTENTION = {
    **{f"self_attn.{p}_proj": f"self_attention.projections.{p}_proj" for p in ("q", "k", "v")},
    "self_attn.out_proj": "self_attention.projections.o_proj",
    "self_attn_layer_norm": "self_residual.norm",
}
_CROSS_ATTENTION = {
    **{f"encoder_attn.{p}_proj": f"cross_attention.projections.{p}_proj" for p in ("q", "k", "v")},
    "encoder_attn.out_proj": "cross_attention.projections.o_proj",
    "encoder_attn_layer_norm": "cross_residual.norm",
}
_FEED_FORWARD = {
    "fc1": "feed_forward.inner",
    "fc2": "feed_forward.outer",
    "final_layer_norm": "feed_forward_residual.norm",
}
_ENCODER_LAYER = {**_SELF_ATTENTION, **_FEED_FORWARD}
_DECODER_LAYER = {**_SELF_ATTENTION, **_CROSS_ATTENTION, **_FEED_FORWARD}

SHARED = "model.shared.weight"
SOURCE, TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
OUTPUT, OUTPUT_BIAS = "lm_head.weight", "final_logits_bias"
POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


class LayerTensor(NamedTuple):
    """A tensor that the configuration calls for: its name there, its name here, its shape."""

    theirs: str
    ours: str
    shape: tuple[int, ...]


def layer_tensors(settings: MarianSettings) -> Iterator[LayerTensor]:
    """The tensors of the layers, in their order."""
    d_model, d_ff = settings.d_model, settings.encoder_ffn_dim
    stacks = (
        ("encoder", settings.encoder_layers, _ENCODER_LAYER),
        ("decoder", settings.decoder_layers, _DECODER_LAYER),
    )
    for stack, num_layers, names in stacks:
        for i in range(num_layers):
            for theirs, ours in names.items():
                weight: tuple[int, ...] = (d_model, d_model)
                if theirs.endswith("layer_norm"):
                    weight = (d_model,)
                elif theirs in ("fc1", "fc2"):
                    weight = (d_ff, d_model) if theirs == "fc1" else (d_model, d_ff)
                for kind, shape in (("weight", weight), ("bias", weight[:1])):
                    yield LayerTensor(
                        f"model.{stack}.layers.{i}.{theirs}.{kind}", f"{stack}.{i}.{ours}.{kind}", shape
                    )
