"""What a family file says of a model besides its attention layers, in `[model]`."""

from typing import Literal, final

from pydantic import Field

from triptych.checkpoints.specs import Choice, Expression, NormSpec, Spec


@final
class EmbeddedPositionsSpec(Spec):
    """Positions that are added to the embeddings.

    Attributes:
        kind: learned rows, or sines and cosines.
        when: on what condition they are there.
        table: module of the learned rows; of sines and cosines, where files may have them.
        rows: how many positions there are.
        offset_rows: rows of the table before that of position 0.
        padding: the token that does not count, where positions count the tokens that do: its own row stands
            before that of position 0; "" where positions count all tokens.
        layout: see `attention.sinusoidal`.
    """

    kind: Literal["learned", "sinusoidal"] = "learned"
    when: Expression = ""
    table: str = ""
    rows: Expression = "max_position_embeddings"
    offset_rows: Expression = "0"
    padding: Expression = ""
    layout: Literal["halves", "interleaved", "tensor2tensor"] = "interleaved"


@final
class FeedForwardSpec(Spec):
    """The feed-forward layer of a block.

    Attributes:
        when: on what condition of the configuration it is written so.
        there: a tensor below `at` that the file has where it is written so.
        at: its module.
        inner: map to the inner width; likewise `gate`, "" without one, and `outer` back.
        fused: what the rows of `inner` are where the gate is in the same tensor, one half after the other, or
            in turns (`alternating`).
        transposed: whether maps are stored `[in, out]`.
        bare: whether a map's tensors are NAME and NAME_bias.
        size: the inner width.
        activation: its name in `transformers`.
        bias: on what condition the inner maps have biases; likewise `out_bias`, as `bias` if empty.
        beta: see `FeedForwardConfig`, likewise `offset` and `limit`.
        experts: where this is the layer of each expert. Names of maps hold {expert} where each has tensors
            of its own; where they do not, a tensor holds the maps of all.
    """

    when: Expression = ""
    there: str = ""
    at: str = "layers.{layer}.mlp"
    inner: str = "up_proj"
    gate: str = ""
    outer: str = "down_proj"
    fused: Literal["", "gate inner", "inner gate"] = ""
    alternating: bool = False
    transposed: bool = False
    bare: bool = False
    size: Expression = "intermediate_size"
    activation: Expression = "hidden_act"
    bias: Expression = "false"
    out_bias: Expression = ""
    beta: Expression = ""
    offset: float = 0.0
    limit: Expression = ""
    experts: "ExpertsSpec | None" = None


@final
class ExpertsSpec(Spec):
    """A mixture of experts; see `ExpertsConfig` for what its fields of the same names mean.

    Attributes:
        number: of experts.
        top: how many a token passes.
        router: module of the router, below that of the layer.
        normalised: on what condition weights are divided by their sum.
        times: what they are multiplied by.
        correction: tensor of the corrections; "" without.
        grouped: on what condition there are groups.
        shared: the layer that every token passes besides.
    """

    number: Expression
    top: Expression = "num_experts_per_tok"
    router: str = "gate"
    router_bias: bool = False
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalised: Expression = "false"
    min_sum: float = 0.0
    times: Expression = ""
    scale_input: bool = False
    correction: str = ""
    grouped: Expression = ""
    groups: Expression = ""
    top_groups: Expression = ""
    group_score: Literal["best", "two_best"] = "best"
    threshold: Expression = ""
    shared: FeedForwardSpec | None = None


@final
class MaskedSpec(Spec):
    """Masked tokens whose rows count as 0; see `architecture.MaskedTokens`.

    Attributes:
        when: on what condition they do.
        token: that stands for masked ones.
        padding: that is not counted.
    """

    when: Expression = ""
    token: Expression
    padding: Expression


@final
class HeadSpec(Spec):
    """From the stream to logits.

    Attributes:
        at: the output map, below the names of the attention or above them.
        when: on what condition of the configuration there is such a head.
        transform: the map before it, likewise, and whether that has a bias (`map_bias`); "" without one.
        activation: after that, by its name in `transformers`; "" for none.
        norm: after that, named likewise.
        bias_at: tensors of the bias, if it is not the map's own; those in the file are all the same. Of a
            decoder they may be missing, and have one row.
        outputs: how many logits there are, if not one for every token.
        tied: on what condition its weight is the table of the embeddings; with `tied_if_missing`, where the
            file has no output map, whatever the configuration says.
        bias: on what condition it has a bias.
        scale: of the logits.
        over_root: logits are divided by the root of the first of these whose condition holds.
        soft_cap: of the logits.
    """

    at: str = "lm_head"
    when: Expression = ""
    transform: str = ""
    map_bias: Expression = "true"
    activation: Expression = ""
    norm: tuple[NormSpec, ...] = ()
    bias_at: tuple[str, ...] = ()
    outputs: Expression = ""
    tied: Expression = "tie_word_embeddings | true"
    tied_if_missing: bool = False
    bias: Expression = "false"
    scale: Expression = ""
    over_root: tuple[Choice, ...] = ()
    soft_cap: Expression = ""


@final
class ModelSpec(Spec):
    """What of a model its attention layers do not say: embeddings, frames, feed-forward layers, head.

    Names of modules may hold {layer}, as those of the attention, below the same prefix.

    Attributes:
        kind: "decoder" without an encoder, or "encoder" without a decoder.
        encoder: the other stack of a model that has both; all the rest is then of the decoder.
        stack: of the attention layers that make up its blocks.
        refused: why it cannot be run, on conditions of the configuration.
        eps: of norms that do not say another.
        embedding: module of the table; `untied_embedding`, if given, where the file has it and `head.tied`
            does not hold.
        copies: modules that hold the table once more, if the file has them; one of them is enough.
        apart: on what condition the stacks have tables of their own though `head.tied` holds.
        num_tokens: rows of the table, if they are not `vocab_size`.
        embedding_scale: what its rows are multiplied by; `root_scale`: by the root of the first of
            these whose condition holds.
        embedding_width: of the table, where a map leads from it to the width of the model;
            `embedding_map`: that map, which is there if the file has it; with `map_first`, positions are
            added behind it.
        types: module of the table of segments, `num_types`: its rows.
        positions: what is added for positions, the first whose condition holds.
        masked: what becomes of masked tokens, if not what becomes of all.
        embedding_norm: of the sum; with `norm_first`, of the sum before positions are added.
        parallel: whether attention and feed-forward layer read the same stream: a condition, the first that
            is chosen.
        from_norm: on what condition sums are taken with the normalised stream.
        residual_scale: what every sub-layer's output is multiplied by.
        attention_norm: that the attention reads, or after its sum ("post"); if not given, the pre-norm that
            the attention entry says.
        attention_out_norm: of what the attention adds, before the sum.
        cross_norm: of the attention to the encoder's output.
        feed_forward_norm: likewise of the feed-forward layer; where blocks are parallel and it has none,
            it reads the attention's.
        feed_forward_out_norm: likewise.
        feed_forward: the first whose condition holds.
        final_norm: after the last block.
        head: to logits, of a decoder.
        heads: to logits, of an encoder: the first of which the file has the transform, or the output map.
            With none of them the model ends with the stream.
        rest: tensors that change nothing, as patterns.
        harmless: fields of the configuration that change nothing of this family's models.
    """

    kind: Literal["decoder", "encoder"] = "decoder"
    stack: str = "decoder"
    encoder: "ModelSpec | None" = None
    refused: tuple[Choice, ...] = ()
    eps: Expression = "rms_norm_eps | 1e-6"
    embedding: str = "embed_tokens"
    untied_embedding: str = ""
    copies: tuple[str, ...] = ()
    apart: Expression = "false"
    num_tokens: tuple[Choice, ...] = ()
    embedding_width: Expression = ""
    embedding_map: str = ""
    map_first: bool = False
    types: str = ""
    num_types: Expression = "type_vocab_size"
    embedding_scale: Expression = ""
    root_scale: tuple[Choice, ...] = ()
    positions: tuple[EmbeddedPositionsSpec, ...] = ()
    masked: MaskedSpec | None = None
    embedding_norm: tuple[NormSpec, ...] = ()
    norm_first: bool = False
    parallel: tuple[Choice, ...] = ()
    from_norm: Expression = "false"
    residual_scale: Expression = ""
    attention_norm: tuple[NormSpec, ...] = ()
    attention_out_norm: tuple[NormSpec, ...] = ()
    cross_norm: tuple[NormSpec, ...] = ()
    feed_forward_norm: tuple[NormSpec, ...] = ()
    feed_forward_out_norm: tuple[NormSpec, ...] = ()
    feed_forward: tuple[FeedForwardSpec, ...] = Field(min_length=1)
    final_norm: tuple[NormSpec, ...] = ()
    head: HeadSpec = HeadSpec()
    heads: tuple[HeadSpec, ...] = ()
    rest: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
