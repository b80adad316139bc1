"""Tables of a family file: attention layers (`[[attention]]`), the parts around them (`[model]`), export.

A field of type `Expression` is a value or a condition over the configuration, in the language of
`storage.settings`; an empty condition is true. A tuple of entries with a field `when` lists alternatives: the
first entry with a true condition applies, unless the field says that all such entries do.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field

# Marks fields with a value or a condition of the configuration, in the language of `storage.settings`.
EXPRESSION = "expression"
Expression = Annotated[str, EXPRESSION]


class Spec(BaseModel):
    """A table of a family file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def expressions(self) -> Iterator[str]:
        """Yield every value and condition of this table and of its subtables."""
        for name, field in type(self).model_fields.items():
            held = getattr(self, name)
            for part in held if isinstance(held, tuple) else (held,):
                if isinstance(part, Spec):
                    yield from part.expressions()
                elif EXPRESSION in field.metadata and isinstance(part, str):
                    yield part


@final
class Choice(Spec):  # a value under a condition
    when: Expression = ""
    value: Expression


@final
class Ignored(Spec):
    """A field of the model's class in `transformers` without effect there, and here."""

    field: Expression
    as_with: str = "null"  # value that describes the model's behaviour; "null" for that of an unset field


@final
class NormSpec(Spec):
    """A norm of the attention's input, or of the input of other maps."""

    # module of the norm whose output is read. A post-norm is the last norm before the attention
    # ("{previous}" is the layer before).
    at: str = ""
    kind: Literal["layer", "rms"] = "layer"
    # "pre"; "post" after the residual sum; "sandwich" before the sub-layer and again before the sum
    place: Literal["pre", "post", "sandwich"] = "pre"
    offset: float = 0.0  # added to the stored gain
    when: Expression = ""
    eps: Expression = ""  # `ModelSpec.eps` if empty
    weight: bool = (
        True  # true if it has weights; a norm with weights and an empty `at` is absent
    )
    # cross-attention: module of the norm of the memory, read by keys and values; "{last}" is the last layer
    # of the encoder, counted by `memory_layers`
    memory: str = ""
    memory_layers: Expression = ""


FusedLayout = Literal["q k v", "by group", "q v k in four parts"]


@final
class OtherNormSpec(Spec):
    """A norm read by maps outside the attention, and these maps."""

    when: Expression = ""
    # the norm, perhaps also read by the attention; all layers share a norm without {layer} in its name
    norm: tuple[NormSpec, ...] = Field(min_length=1)
    within: str = ""  # module around all readers of the norm
    # readers in that module, as patterns. The tensors of a map are NAME.weight and NAME.bias; a tensor of
    # several maps is NAME, its bias NAME_bias.
    read_by: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()  # maps stored `[in, out]`, as patterns
    # tensors of non-readers in that module, as patterns; any further tensor prevents folding
    rest: tuple[str, ...] = ()
    # instead of `within` and `read_by`, the output map, above the model's own names; not folded unless
    # `tie_word_embeddings` is false
    output_map: str = ""
    also_read_by: tuple[
        Choice, ...
    ] = ()  # further readers outside these maps, in words


@final
class HeadNormSpec(Spec):
    """Norms of queries and keys (QK-norm). Source: Henry et al. 2020, arXiv 2010.04245."""

    # modules of the norms of queries and keys, within the attention; a name with "{head}" is a norm for each
    # head, "" is a norm without weights
    q: str
    k: str
    kind: Literal["layer", "rms"] = "rms"
    over: Literal["head", "all heads"] = (
        "head"  # normalised channels: one head, or all heads concatenated
    )
    eps: Expression = "rms_norm_eps | 1e-6"  # added to the variance, or the mean square, below the root
    offset: float = (
        0.0  # added to the stored gain: 1 where the file stores the gain less 1
    )
    # true if the norms follow the rotation; they are then absent without rotary positions, and all channels
    # of a head must be rotated
    turned: bool = False
    when: Expression = ""


@final
class TemperatureSpec(Spec):
    """Scale the query at position m by `1 + strength · ln(1 + ⌊(m + first) / every⌋)`."""

    when: Expression = ""
    unturned: bool = False  # true if only layers without rotary positions do
    strength: Expression  # growth of the scale; without a value, queries are unchanged
    every: Expression  # number of positions with the same scale, above 0
    first: int = 0  # number of the position m = 0


@final
class PatchesSpec(Spec):
    """Tokens of an image: some special tokens, then its patches row by row."""

    image: Expression = "image_size"  # height and width of the image in pixels, or one value for a square
    patch: Expression = (
        "patch_size"  # height and width of a patch in pixels, or one value for a square
    )
    before: Annotated[tuple[str, ...], EXPRESSION] = (
        "1",
    )  # numbers of tokens before the patches; summed


@final
class PositionSpec(Spec):
    """A position encoding.

    Source: rotary: Su et al. 2021, arXiv 2104.09864; ALiBi: Press et al. 2021, arXiv 2108.12409; tables of
    distances: Raffel et al. 2019, arXiv 1910.10683; disentangled: He et al. 2020, arXiv 2006.03654.
    """

    # "sinusoidal" and "learned" are added to the embeddings, see `[model]`. "rotary" rotates queries and
    # keys; "alibi" and "distance table" add a bias to each score; "disentangled" adds products with
    # embeddings of distances to scores. "convolution" runs over the input.
    kind: Literal[
        "none",
        "sinusoidal",
        "learned",
        "rotary",
        "alibi",
        "distance table",
        "disentangled",
        "convolution",
    ]
    when: Expression = ""
    # Rotary positions.
    # pairs of channels: i and i + n/2 of n ("halves"), or 2i and 2i + 1
    pairing: Literal["halves", "interleaved"] = "halves"
    backwards: bool = False  # true if the rotation is by minus the angle
    width: Expression = ""  # number of rotary channels; all channels of a head if empty
    start: Expression = "0"  # first rotary channel
    # rotated share of `width`, rounded down; an odd number of channels is refused. The default ignores
    # `partial_rotary_factor`, which few models read.
    share: Expression = "1.0"
    # b of the frequencies b^(−2i/n), in radians a position
    base: Expression = "rope_parameters.rope_theta | rope_theta | 10000.0"
    # paths of the record of RoPE scaling; the first path in the configuration counts
    scaling: Annotated[tuple[str, ...], EXPRESSION] = (
        "rope_scaling",
        "rope_parameters",
    )
    # original context length, if it is outside the record of RoPE scaling; overrides the record
    original: Expression = "original_max_position_embeddings"
    # factor of rotated channels under RoPE scaling; the scaling's default factor if empty
    factor: Expression = ""
    # factor of rotated channels beyond the original context length; frequencies are then the same for all
    # lengths, whatever the kind of scaling
    long_factor: Expression = ""
    # true if "dynamic" scaling with an alpha is one base for all lengths, `base · alpha^(n / (n − 2))`
    alpha: bool = False
    # true if texts are read again from their first token once they grow beyond the original context length
    read_again: bool = False
    # ALiBi.
    slopes: Literal["authors", "mpt"] = (
        "authors"  # formula of the slopes: the paper's, or MPT's
    )
    before_scale: bool = False  # true if biases are added before scores are scaled
    # tensors of rotary angles: frequencies `[pairs]`, or sines and cosines `[positions, 2 · pairs]`. Tensors
    # in the file must match the configuration.
    stored: tuple[str, ...] = ()
    # Distance tables and disentangled positions.
    # tensor of the table; all layers share a table without "{layer}" in its name
    table: str = ""
    more_tables: tuple[
        Choice, ...
    ] = ()  # tables added to it; all with a true condition
    table_norm: str = (
        ""  # norm of a table of embeddings, if the configuration enables it
    )
    both_ways: bool = True  # true if distances have a sign
    buckets: Expression = (
        ""  # number of buckets of distances; all rows of the table if empty
    )
    # distance in tokens from which on all distances share the last bucket
    max_distance: Expression = "relative_attention_max_distance | 128"
    # grid of image patches, if tokens are patches: rotary pairs rotate by row and column, and a distance
    # table has an entry for each pair of row and column distances
    patches: PatchesSpec | None = None
    # Disentangled positions.
    key_map: str = ""  # within the attention, map from distances to keys of positions
    query_map: str = (
        ""  # within the attention, map from distances to queries of positions
    )
    # condition on which the maps of keys and queries serve instead; never if empty
    shared_maps: Expression = ""


@final
class LatentSpec(Spec):
    """Keys and values from a narrow latent, optionally queries too (DeepSeek-AI 2024, arXiv 2405.04434)."""

    # modules within the attention; without a `q_rank`, the only map of queries is `AttentionSpec.q`
    q_down: str = "q_a_proj"
    q_norm: str = "q_a_layernorm"
    q_up: str = "q_b_proj"
    kv_down: str = "kv_a_proj_with_mqa"
    kv_norm: str = "kv_a_layernorm"
    kv_up: str = "kv_b_proj"
    rank: Expression = "kv_lora_rank"  # width of the latent of keys and values
    q_rank: Expression = "q_lora_rank"  # width of the latent of queries
    plain: Expression = "qk_nope_head_dim"  # number of unrotated channels of a head
    # number of rotated channels of a head, after the unrotated channels; keys share them across heads
    turned: Expression = "qk_rope_head_dim"
    value: Expression = "v_head_dim"  # width of a head's values
    eps: Expression = "1e-6"  # eps of the RMSNorms of the latents


@final
class AttentionSpec(Spec):
    """One kind of attention layer of a family.

    Names of modules may contain {layer} and {inner}. A map's tensors are NAME.weight and NAME.bias; in a name
    with "*", "weight" and "bias" replace the "*".
    """

    # Layers.
    stack: str = "decoder"  # name of the stack: "encoder", "decoder", "vision"
    kind: Literal["self", "causal", "cross"] = "causal"  # source of queries and keys
    both_ways: Expression = (
        ""  # condition on which a causal layer sees later tokens, too; never if empty
    )
    when: Expression = ""  # condition on which such layers exist
    settings: str = ""  # path of the stack's record in the configuration
    # default values of fields missing from the configuration, by `model_type`; shared by all entries with the
    # same `settings`
    defaults: dict[str, dict[str, Any]] = Field(default_factory=dict)
    needs: Expression = ""  # required field without a default
    layers: Expression = "num_hidden_layers"  # number of layers
    first: int = 0  # number of the first layer in names; conditions always count from 0
    inner: Expression = "1"  # number of consecutive attention layers within a layer
    # token mixer of each layer in words: 'attention' or another; all layers have attention if empty
    mixers: tuple[Choice, ...] = ()
    more_layers: Expression = (
        ""  # number of further layers after the last, if the file has them
    )
    # number of KV-sharing layers, at the end of the stack: they use the keys and values of an earlier layer,
    # made of that layer's input
    borrowing: Expression = ""
    # value that a KV-sharing layer and its source have in common; the source is the last such layer
    lender: Expression = ""
    uses: Expression = "1"  # number of consecutive applications of each layer
    rounds: Expression = "1"  # number of passes through all layers
    at: str  # module of a layer's attention
    outside: tuple[
        str, ...
    ] = ()  # words excluded from the prefix of `at`: other stacks use the same names
    # width of input and output; not checked if the configuration lacks it
    size: Expression = "hidden_size | d_model | n_embd | n_embed | dim"
    # Maps.
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    # true if the map of queries also makes gates of each channel of values: the rows of a head are those of
    # its queries, then as many rows of its gates
    gated_queries: bool = False
    gate: str = ""  # map of such gates, if it is a separate map
    key_value: Expression = (
        "false"  # condition on which the map of keys is that of values, before norms
    )
    qkv: str = ""  # fused map of queries, keys and values
    # rows of the fused map: all queries, all keys, all values; or by group of heads: the group's queries, its
    # key, its value; or four blocks, every block a fourth of queries, values, keys
    layout: FusedLayout = "q k v"
    latent: LatentSpec | None = None  # latent of keys and values, instead of maps
    # maps of "q k v o" with a bias; "k=FIELD" if the field is true. Not checked if empty.
    biases: tuple[Choice, ...] = ()
    q_bias: str = ""  # tensor of the query bias, next to `qkv`
    v_bias: str = ""  # tensor of the value bias, next to `qkv`
    transposed: bool = False  # true if maps are stored `[in, out]`
    # Heads.
    heads: Expression = "num_attention_heads"  # number of query heads
    # true if the number of heads cannot change, since other parts have as many entries or channels
    fixed_heads: bool = False
    # number of key-value heads
    groups: tuple[Choice, ...] = (
        Choice(value="num_key_value_heads | num_attention_heads"),
    )
    # width of queries and keys
    width: Annotated[str | tuple[Choice, ...], EXPRESSION] = (
        "head_dim | hidden_size / num_attention_heads"
    )
    value_width: Expression = ""  # width of values; `width` if empty
    # Scores, norms and masks.
    # scores are multiplied by 1/√ of this value; the width of queries if empty, "1" for no scaling
    scale: Annotated[str | tuple[Choice, ...], EXPRESSION] = ()
    scale_times: tuple[Choice, ...] = ()  # further factor of the scores
    # name of the family's code for behaviour beyond these fields (`core/checkpoints/hooks.py`)
    hook: str = ""
    norm: tuple[NormSpec, ...] = ()  # norm of the input
    head_norm: HeadNormSpec | None = None  # norms of queries and keys
    value_norm: Expression = (
        ""  # eps of an RMSNorm without weights of each head's values; "" without a norm
    )
    positions: tuple[PositionSpec, ...] = (PositionSpec(kind="rotary"),)
    also_read_by: tuple[
        Choice, ...
    ] = ()  # further readers of the norm's output, in words
    # norms read by maps outside the attention; all with a true condition
    other_norms: tuple[OtherNormSpec, ...] = ()
    # number of keys that a query sees, its own included; all keys if empty or without a value
    window: tuple[Choice, ...] = ()
    # length in tokens of chunks; a query sees keys of its chunk alone. All keys if empty or without a value
    chunk: tuple[Choice, ...] = ()
    temperature: TemperatureSpec | None = None  # growth of queries with their position
    window_around: bool = (
        False  # true if half of the window is before the query, half of it after
    )
    soft_cap: Expression = ""  # c, where scores s become c · tanh(s / c); no cap if empty or without a value
    # c, where queries, keys and values are clipped to ±c; no clipping if empty or without a value
    clip: Expression = ""
    sinks: str = ""  # tensor `[heads]` of extra scores in the softmax, without values
    # Writing.
    unwritten: str = ""  # reason why such layers cannot be rewritten; "" if they can
    known: tuple[
        str, ...
    ] = ()  # further tensors within the attention's module, as patterns
    ignored: tuple[
        Ignored, ...
    ] = ()  # fields of the class in `transformers` without effect

    @property
    def why_kept(self) -> str:
        """The reason why rewritten maps of such layers cannot be written back; "" if they can."""
        if self.unwritten:
            return self.unwritten
        if self.value_norm:
            return "the values of each head are normalised after their map, which no rewrite allows for"
        return "other layers use the keys and values of these" if self.borrowing else ""


@final
class EmbeddedPositionsSpec(Spec):
    kind: Literal["learned", "sinusoidal"] = (
        "learned"  # learned rows, or sines and cosines
    )
    when: Expression = ""
    table: str = (
        ""  # module of the learned rows, or of stored sines and cosines, if any
    )
    rows: Expression = "max_position_embeddings"  # number of positions, or rows of the table if `padding`
    offset_rows: Expression = "0"  # number of rows before the row of position 0
    # padding token, where positions count the tokens without it: its row precedes that of position 0; ""
    # where positions count all tokens
    padding: Expression = ""
    layout: Literal["halves", "interleaved", "tensor2tensor"] = (
        "interleaved"  # see `attention.sinusoidal`.
    )


@final
class FeedForwardSpec(Spec):
    when: Expression = ""
    there: str = ""  # tensor below `at` whose presence selects this entry
    at: str = "layers.{layer}.mlp"
    inner: str = "up_proj"  # map to the inner width
    gate: str = ""  # map of the gate; "" without a gate
    outer: str = "down_proj"  # map back to the model's width
    # order of gate and inner map in a fused tensor `inner`: one half after the other, or `alternating` rows
    fused: Literal["", "gate inner", "inner gate"] = ""
    alternating: bool = False
    transposed: bool = False  # true if maps are stored `[in, out]`
    bare: bool = False  # true if a map's tensors are NAME and NAME_bias
    size: Expression = (
        "intermediate_size"  # inner width; the input width of `outer` if empty
    )
    activation: Expression = "hidden_act"  # its name in `transformers`
    bias: Expression = "false"  # condition on which the inner maps have biases
    out_bias: Expression = (
        ""  # condition on which the outer map has a bias; `bias` if empty
    )
    # `beta`, `offset`, `limit` and `sparsity`: see `FeedForwardConfig`
    beta: Expression = ""
    offset: float = 0.0
    limit: Expression = ""
    sparsity: Expression = ""
    # mixture of experts with this layer as each expert. Names of maps contain {expert} if every expert has
    # separate tensors; otherwise, a tensor stacks the maps of all experts.
    experts: "ExpertsSpec | None" = None


@final
class ExpertsSpec(Spec):
    """A mixture of experts; `ExpertsConfig` documents the fields of the same names."""

    number: Expression  # number of experts
    top: Expression = "num_experts_per_tok"  # number of experts for a token
    router: str = "gate"  # module of the router, below the layer's module
    router_bias: bool = False
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalised: Expression = "false"  # condition for weights divided by their sum
    min_sum: Expression = "0.0"
    times: Expression = ""  # factor of the weights
    scale_input: bool = False
    correction: str = ""  # tensor of the corrections; "" without corrections
    grouped: Expression = ""  # condition for groups of experts
    groups: Expression = ""
    top_groups: Expression = ""
    group_score: Literal["best", "two_best"] = "best"
    threshold: Expression = ""
    shared: FeedForwardSpec | None = None  # shared expert
    shared_gate: str = (
        ""  # tensor of the map to the shared expert's gate; "" without a gate
    )
    norms: tuple[
        str, ...
    ] = ()  # tensors of the norms within the layer, in the order of `EXPERTS_NORMS`
    eps: Expression = "rms_norm_eps | 1e-6"  # eps of these norms
    expert_scale: str = (
        ""  # tensor of factors of each expert's weights; "" without factors
    )


@final
class BlockInputSpec(Spec):
    """Inputs of the blocks besides the stream; see `architecture.BlockInputsConfig`."""

    when: Expression
    width: Expression
    rows: Expression  # rows of the table
    table: str  # module of the table
    map: str  # module of the map of embeddings
    norm: NormSpec  # norm of the map's output
    gate: str  # module of the gate of each block
    outer: str  # module of the outer map of each block
    out_norm: NormSpec  # norm of each block's addition
    activation: Expression


@final
class StreamsSpec(Spec):
    """Several residual streams; `architecture.StreamsConfig` documents the fields of the same names."""

    when: Expression
    number: Expression
    active: Expression
    scaled: Expression
    rank: Expression
    # tensors by their names in `Streams`; {stream} counts all streams but the first, from 0
    around: dict[str, str]
    block: dict[str, str]  # tensors by their names in `BlockStreams`


@final
class MaskedSpec(Spec):
    """Masked tokens with embeddings of zeros; see `architecture.MaskedTokens`."""

    when: Expression = ""
    token: Expression  # mask token
    padding: Expression  # padding token, not counted


@final
class HeadSpec(Spec):
    at: str = (
        "lm_head"  # output map, below the prefix of the layers or a leading part of it
    )
    when: Expression = ""
    # The map before the output map, its activation and norm; modules are found like `at`.
    transform: str = ""  # module of the map; "" without a map
    map_bias: Expression = "true"  # condition for its bias
    activation: Expression = ""  # its name in `transformers`; "" without an activation
    norm: tuple[NormSpec, ...] = ()
    # tensors of the bias, if not the map's own; all such tensors in the file are the same. A decoder's bias
    # has one row, and may be missing.
    bias_at: tuple[str, ...] = ()
    outputs: Expression = ""  # number of logits; the number of tokens if empty
    # condition for an output weight tied to the embedding table; `tied_if_missing` replaces it by "the output
    # map is missing in the file"
    tied: Expression = "tie_word_embeddings | true"
    tied_if_missing: bool = False
    bias: Expression = "false"  # condition for a bias of the output map
    scale: Expression = ""  # factor of the logits
    over_root: tuple[Choice, ...] = ()  # logits are divided by the root of this value
    soft_cap: Expression = ""


@final
class TaskMapSpec(Spec):
    at: str  # module of the map, found like `HeadSpec.at`
    activation: Expression = ""  # its name in `transformers`; "" without an activation
    norm: tuple[NormSpec, ...] = ()


@final
class TaskHeadSpec(Spec):
    """The head of a task; `architecture.TaskHeadConfig` documents the fields of the same names."""

    # classes in `transformers`, by what follows their "For"
    classes: tuple[str, ...] = Field(min_length=1)
    when: Expression = ""
    pooling: tuple[Choice, ...] = (Choice(value="'each'"),)
    maps: tuple[TaskMapSpec, ...] = Field(min_length=1)
    labels: tuple[str, ...] = ()  # names of the logits, if not those of `id2label`
    wraps: Expression = "false"  # true if a decoder input begins with the last token


@final
class ModelSpec(Spec):
    """The parts of a model besides attention layers: embeddings, frames, feed-forward layers, head."""

    # "decoder" for a decoder alone or an encoder-decoder model, "encoder" for an encoder alone
    kind: Literal["decoder", "encoder"] = "decoder"
    stack: str = "decoder"  # stack of the attention layers of its blocks
    aside: tuple[
        str, ...
    ] = ()  # stacks not run with the model, such as picture encoders
    # encoder of an encoder-decoder model; all other fields then describe the decoder
    encoder: "ModelSpec | None" = None
    refused: tuple[Choice, ...] = ()  # reasons why the model cannot be run
    eps: Expression = "rms_norm_eps | 1e-6"  # default eps of norms
    # Embeddings.
    embedding: str = "embed_tokens"  # module of the embedding table
    # module of the table where the file has it and embeddings are not tied to the output
    untied_embedding: str = ""
    copies: tuple[
        str, ...
    ] = ()  # modules that may store the same table; one stored table is enough
    # condition on which encoder and decoder may have separate tables even if `head.tied` is true
    apart: Expression = "false"
    num_tokens: tuple[Choice, ...] = ()  # rows of the table, if not `vocab_size`
    embedding_width: Expression = (
        ""  # width of the table, if a map leads from it to the model's width
    )
    embedding_map: str = ""  # module of that map; used if the file has it
    map_first: bool = False  # true if positions are added after that map
    types: str = ""  # module of the table of segments
    num_types: Expression = "type_vocab_size"  # rows of the table of segments
    embedding_scale: Expression = ""  # factor of the table's rows
    root_scale: tuple[
        Choice, ...
    ] = ()  # the table's rows are multiplied by the root of this value
    positions: tuple[
        EmbeddedPositionsSpec, ...
    ] = ()  # positions added to the embeddings
    masked: MaskedSpec | None = None  # treatment of masked tokens, if special
    embedding_norm: tuple[NormSpec, ...] = ()  # norm of the sum of embeddings
    norm_first: bool = False  # true if positions are added after that norm
    # Blocks.
    # condition on which attention and feed-forward layer read the same stream
    parallel: tuple[Choice, ...] = ()
    from_norm: Expression = (
        "false"  # condition on which residual sums start from the normalised stream
    )
    residual_scale: Expression = ""  # factor of every sub-layer's output
    # norm of the attention's input, or of its residual sum ("post"); if empty, the norm of the attention
    # entry, except a post-norm
    attention_norm: tuple[NormSpec, ...] = ()
    attention_out_norm: tuple[
        NormSpec, ...
    ] = ()  # norm of the attention's output, before the sum
    cross_norm: tuple[NormSpec, ...] = ()  # norm of the input of cross-attention
    cross_out_norm: tuple[NormSpec, ...] = ()
    # norm of the feed-forward layer's input; without it, the layer of a parallel block reads the attention's
    # input
    feed_forward_norm: tuple[NormSpec, ...] = ()
    feed_forward_out_norm: tuple[
        NormSpec, ...
    ] = ()  # norm of the feed-forward layer's output
    feed_forward: tuple[FeedForwardSpec, ...] = Field(min_length=1)
    input: BlockInputSpec | None = None  # inputs of the blocks besides the stream
    streams: StreamsSpec | None = (
        None  # several residual streams; None for a single stream
    )
    block_scale: str = ""  # tensor of the factor of the stream after each block
    final_norm: tuple[NormSpec, ...] = ()  # norm after the last block
    # Logits.
    head: HeadSpec = HeadSpec()  # head of a decoder
    # heads of an encoder; the first whose transform (or output map, if it has no transform) is in the file.
    # If all are missing, the model ends with the stream.
    heads: tuple[HeadSpec, ...] = ()
    # heads of tasks; the first for the file's class whose maps are all in the file
    tasks: tuple[TaskHeadSpec, ...] = ()
    # Unread tensors and fields.
    rest: tuple[str, ...] = ()  # tensors that change no output, as patterns
    harmless: tuple[
        str, ...
    ] = ()  # fields of the configuration that change no output of these models


@final
class ExportedTensors(Spec):
    """Tensors of a new checkpoint; sizes and conditions are expressions of the writer's facts."""

    when: str = ""
    # number of layers with such tensors, with {layer} in their names; names are of single tensors if empty
    layers: str = ""
    at: str = ""  # prefix of their names
    maps: dict[
        str, tuple[str, ...]
    ]  # shapes of weights, by the name of the module after the prefix
    biases: str = "false"  # condition for biases
    transposed: bool = False  # true if weights are stored `[in, out]`
    bare: bool = False  # true if the names are of tensors, not of modules


@final
class ExportSpec(Spec):
    """The format in which a model of a recipe is written."""

    classes: dict[str, str]  # class of each `model_type`
    # fields of `config.json`, in their order, as expressions of the facts; fields without a value are omitted
    settings: dict[str, str]
    tensors: tuple[ExportedTensors, ...]  # all with a true condition
