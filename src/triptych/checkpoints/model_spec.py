"""What a family file says of a model besides its attention layers, in `[model]`."""

from typing import Literal, final

from pydantic import Field

from triptych.checkpoints.specs import Choice, Expression, NormSpec, Spec


@final
class EmbeddedPositionsSpec(Spec):
    """Positions that are added to the embeddings."""

    kind: Literal["learned", "sinusoidal"] = "learned"  # learned rows, or sines and cosines
    when: Expression = ""
    table: str = ""  # module of the learned rows; of sines and cosines, where files may have them
    rows: Expression = "max_position_embeddings"  # how many positions there are
    offset_rows: Expression = "0"  # rows of the table before that of position 0
    # the token that does not count, where positions count the tokens that do: its own row stands before that
    # of position 0; "" where positions count all tokens
    padding: Expression = ""
    layout: Literal["halves", "interleaved", "tensor2tensor"] = "interleaved"  # see `attention.sinusoidal`.


@final
class FeedForwardSpec(Spec):
    """The feed-forward layer of a block."""

    when: Expression = ""  # on what condition of the configuration it is written so
    there: str = ""  # a tensor below `at` that the file has where it is written so
    at: str = "layers.{layer}.mlp"
    inner: str = "up_proj"  # map to the inner width; likewise `gate`, "" without one, and `outer` back
    gate: str = ""
    outer: str = "down_proj"
    # what the rows of `inner` are where the gate is in the same tensor, one half after the other, or in turns
    # (`alternating`)
    fused: Literal["", "gate inner", "inner gate"] = ""
    alternating: bool = False
    transposed: bool = False  # whether maps are stored `[in, out]`
    bare: bool = False  # whether a map's tensors are NAME and NAME_bias
    size: Expression = "intermediate_size"  # the inner width
    activation: Expression = "hidden_act"  # its name in `transformers`
    # on what condition the inner maps have biases; likewise `out_bias`, as `bias` if empty
    bias: Expression = "false"
    out_bias: Expression = ""
    beta: Expression = ""  # see `FeedForwardConfig`, likewise `offset` and `limit`
    offset: float = 0.0
    limit: Expression = ""
    # where this is the layer of each expert. Names of maps hold {expert} where each has tensors of its own;
    # where they do not, a tensor holds the maps of all.
    experts: "ExpertsSpec | None" = None


@final
class ExpertsSpec(Spec):
    """A mixture of experts; see `ExpertsConfig` for what its fields of the same names mean."""

    number: Expression
    top: Expression = "num_experts_per_tok"  # how many a token passes
    router: str = "gate"  # module of the router, below that of the layer
    router_bias: bool = False
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalised: Expression = "false"  # on what condition weights are divided by their sum
    min_sum: float = 0.0
    times: Expression = ""  # what they are multiplied by
    scale_input: bool = False
    correction: str = ""  # tensor of the corrections; "" without
    grouped: Expression = ""  # on what condition there are groups
    groups: Expression = ""
    top_groups: Expression = ""
    group_score: Literal["best", "two_best"] = "best"
    threshold: Expression = ""
    shared: FeedForwardSpec | None = None  # the layer that every token passes besides


@final
class MaskedSpec(Spec):
    """Masked tokens whose rows count as 0; see `architecture.MaskedTokens`."""

    when: Expression = ""  # on what condition they do
    token: Expression  # that stands for masked ones
    padding: Expression  # that is not counted


@final
class HeadSpec(Spec):
    """From the stream to logits."""

    at: str = "lm_head"  # the output map, below the names of the attention or above them
    when: Expression = ""  # on what condition of the configuration there is such a head
    # the map before it, likewise, and whether that has a bias (`map_bias`); "" without one
    transform: str = ""
    map_bias: Expression = "true"
    activation: Expression = ""  # after that, by its name in `transformers`; "" for none
    norm: tuple[NormSpec, ...] = ()  # after that, named likewise
    # tensors of the bias, if it is not the map's own; those in the file are all the same. Of a decoder they
    # may be missing, and have one row.
    bias_at: tuple[str, ...] = ()
    outputs: Expression = ""  # how many logits there are, if not one for every token
    # on what condition its weight is the table of the embeddings; with `tied_if_missing`, where the file has
    # no output map, whatever the configuration says
    tied: Expression = "tie_word_embeddings | true"
    tied_if_missing: bool = False
    bias: Expression = "false"  # on what condition it has a bias
    scale: Expression = ""
    # logits are divided by the root of the first of these whose condition holds
    over_root: tuple[Choice, ...] = ()
    soft_cap: Expression = ""


@final
class ModelSpec(Spec):
    """What of a model its attention layers do not say: embeddings, frames, feed-forward layers, head."""

    # "decoder" without an encoder, or "encoder" without a decoder
    kind: Literal["decoder", "encoder"] = "decoder"
    stack: str = "decoder"  # of the attention layers that make up its blocks
    # the other stack of a model that has both; all the rest is then of the decoder
    encoder: "ModelSpec | None" = None
    refused: tuple[Choice, ...] = ()  # why it cannot be run, on conditions of the configuration
    eps: Expression = "rms_norm_eps | 1e-6"  # of norms that do not say another
    # module of the table; `untied_embedding`, if given, where the file has it and `head.tied` does not hold.
    embedding: str = "embed_tokens"
    untied_embedding: str = ""
    # modules that hold the table once more, if the file has them; one of them is enough
    copies: tuple[str, ...] = ()
    # on what condition the stacks have tables of their own though `head.tied` holds.
    apart: Expression = "false"
    num_tokens: tuple[Choice, ...] = ()  # rows of the table, if they are not `vocab_size`
    # of the table, where a map leads from it to the width of the model; `embedding_map`: that map, which is
    # there if the file has it; with `map_first`, positions are added behind it
    embedding_width: Expression = ""
    embedding_map: str = ""
    map_first: bool = False
    types: str = ""  # module of the table of segments, `num_types`: its rows
    num_types: Expression = "type_vocab_size"
    # what its rows are multiplied by; `root_scale`: by the root of the first of these whose condition holds
    embedding_scale: Expression = ""
    root_scale: tuple[Choice, ...] = ()
    # what is added for positions, the first whose condition holds
    positions: tuple[EmbeddedPositionsSpec, ...] = ()
    masked: MaskedSpec | None = None  # what becomes of masked tokens, if not what becomes of all
    # of the sum; with `norm_first`, of the sum before positions are added
    embedding_norm: tuple[NormSpec, ...] = ()
    norm_first: bool = False
    # whether attention and feed-forward layer read the same stream: a condition, the first that is chosen
    parallel: tuple[Choice, ...] = ()
    from_norm: Expression = "false"  # on what condition sums are taken with the normalised stream
    residual_scale: Expression = ""  # what every sub-layer's output is multiplied by
    # that the attention reads, or after its sum ("post"); if not given, the pre-norm that the attention entry
    # says
    attention_norm: tuple[NormSpec, ...] = ()
    attention_out_norm: tuple[NormSpec, ...] = ()  # of what the attention adds, before the sum
    cross_norm: tuple[NormSpec, ...] = ()  # of the attention to the encoder's output
    # likewise of the feed-forward layer; where blocks are parallel and it has none, it reads the attention's
    feed_forward_norm: tuple[NormSpec, ...] = ()
    feed_forward_out_norm: tuple[NormSpec, ...] = ()  # likewise
    feed_forward: tuple[FeedForwardSpec, ...] = Field(min_length=1)  # the first whose condition holds
    final_norm: tuple[NormSpec, ...] = ()  # after the last block
    head: HeadSpec = HeadSpec()  # to logits, of a decoder
    # to logits, of an encoder: the first of which the file has the transform, or the output map. With none of
    # them the model ends with the stream.
    heads: tuple[HeadSpec, ...] = ()
    rest: tuple[str, ...] = ()  # tensors that change nothing, as patterns
    harmless: tuple[str, ...] = ()  # fields of the configuration that change nothing of this family's models
