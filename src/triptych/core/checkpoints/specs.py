"""What a family file says: expressions, norms, attention layers (`[[attention]]`), the rest (`[model]`)."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field

# Marks fields that hold a value or a condition out of the configuration, in the words of `settings`.
EXPRESSION = "expression"
Expression = Annotated[str, EXPRESSION]


class Spec(BaseModel):
    """A table of a family file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def expressions(self) -> Iterator[str]:
        """Every value and condition in it and in its parts."""
        for name, field in type(self).model_fields.items():
            held = getattr(self, name)
            for part in held if isinstance(held, tuple) else (held,):
                if isinstance(part, Spec):
                    yield from part.expressions()
                elif EXPRESSION in field.metadata and isinstance(part, str):
                    yield part


@final
class Choice(Spec):
    when: Expression = ""
    value: Expression


@final
class Ignored(Spec):
    """A field that the model's class in `transformers` has and does not run by; nor does this library."""

    field: Expression
    # what the model does all the same, as if the field said so; "null" for as without it
    as_with: str = "null"


@final
class NormSpec(Spec):
    """A norm, of what the attention reads or of what other maps do."""

    # its module; of the attention's own norm, the one whose output the attention reads. With post-norm that
    # is the last norm of what comes before it ("{previous}" is the layer before).
    at: str = ""
    kind: Literal["layer", "rms"] = "layer"
    # "pre"; "post" where it follows the residual sum; "sandwich" where there is one on both sides
    place: Literal["pre", "post", "sandwich"] = "pre"
    offset: float = 0.0  # what the stored gain is relative to
    when: Expression = ""  # on what condition it is there
    eps: Expression = ""  # an expression; that of the model (`ModelSpec.eps`) if empty.
    weight: bool = True  # whether it has weights; with them and without `at`, there is no norm
    # of cross-attention, the norm of the same kind whose output keys and values read; "{last}" is the last
    # layer of `memory_layers`, the number of layers of the stack that makes it
    memory: str = ""
    memory_layers: Expression = ""


FusedLayout = Literal["q k v", "by group", "q v k in four parts"]


@final
class OtherNormSpec(Spec):
    """A norm whose output maps outside the attention read, and which maps those are."""

    when: Expression = ""  # on what condition of the configuration it is there
    # the first whose condition holds; none if none does. A name without {layer} is one norm for all layers.
    # It may be the norm that the attention reads as well.
    norm: tuple[NormSpec, ...] = Field(min_length=1)
    within: str = ""  # the module in which everything lies that reads it
    # the maps in it that do, as patterns; a map's tensors are NAME.weight and NAME.bias, or where they hold
    # several maps NAME and NAME_bias.
    read_by: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()  # the maps that are stored `[in, out]`, as patterns
    # other tensors that do not read it, as patterns. What is neither is a reason not to fold.
    rest: tuple[str, ...] = ()
    # instead of all these, the map to logits, above the model's own names; not where its tensor is that of
    # the embedding, as `tie_word_embeddings` says
    output_map: str = ""
    also_read_by: tuple[Choice, ...] = ()  # what else reads it and is no map of these, on conditions


@final
class HeadNormSpec(Spec):
    """Norms of queries and keys (QK-norm). Source: Henry et al. 2020, arXiv 2010.04245."""

    # module within the attention; with "{head}" one for each head; "" for a norm without weights.
    # `k` the same.
    q: str
    k: str
    kind: Literal["layer", "rms"] = "rms"
    # each head by itself, or the channels of all heads side by side
    over: Literal["head", "all heads"] = "head"
    eps: Expression = "rms_norm_eps | 1e-6"  # added to the variance, or the mean square, below the root
    offset: float = 0.0  # added to the stored gain: 1 where the file holds the gain less 1
    # whether they follow the rotation, and are only there where positions turn something; all of a head must
    # be turned then
    turned: bool = False
    when: Expression = ""


@final
class TemperatureSpec(Spec):
    """The query at position m is multiplied by `1 + strength · ln(1 + ⌊(m + first) / every⌋)`."""

    when: Expression = ""  # on what condition of the configuration they do
    unturned: bool = False  # whether they do only in layers whose positions turn nothing
    # of the growth. Where the configuration gives nothing for it, queries are left alone.
    strength: Expression
    every: Expression  # how many positions share a factor, above 0
    first: int = 0  # the number of position m = 0


@final
class PatchesSpec(Spec):
    """Tokens that are the patches of a picture, row by row, after some others."""

    image: Expression = "image_size"  # height and width of the picture in pixels, or one number for both
    patch: Expression = "patch_size"  # height and width of a patch in pixels, as `image`
    # how many tokens come before the patches, in parts that are added
    before: Annotated[tuple[str, ...], EXPRESSION] = ("1",)


@final
class PositionSpec(Spec):
    """How positions are encoded, on a condition.

    Source: rotary: Su et al. 2021, arXiv 2104.09864; ALiBi: Press et al. 2021, arXiv 2108.12409; tables of
    distances: Raffel et al. 2019, arXiv 1910.10683; disentangled: He et al. 2020, arXiv 2006.03654.
    """

    # "sinusoidal" and "learned" are added to the embeddings (`[model]` says how); the attention layer knows
    # the others: "rotary" turns queries and keys, "alibi" and "distance table" add a number to each score,
    # "disentangled" products with embeddings of distances. "convolution" is over the input.
    kind: Literal[
        "none", "sinusoidal", "learned", "rotary", "alibi", "distance table", "disentangled", "convolution"
    ]
    when: Expression = ""  # on what condition; the first position of a list whose condition holds counts
    # which channels of a head turn together: i and i + n/2 of n ("halves"), or 2i and 2i + 1
    pairing: Literal["halves", "interleaved"] = "halves"
    backwards: bool = False  # whether they turn by minus their angle, the other way round
    width: Expression = ""  # number of channels turned; all of a head if empty. `start` is the first of them.
    start: Expression = "0"
    # of the width that is turned, rounded down (an odd number is refused); all of it if not given, whatever
    # the configuration says: few models read its `partial_rotary_factor`
    share: Expression = "1.0"
    # b of the frequencies b^(−2i/n), in radians a position
    base: Expression = "rope_parameters.rope_theta | rope_theta | 10000.0"
    # paths of the record that scales them, such as `rope_scaling`; the first that is there
    scaling: Annotated[tuple[str, ...], EXPRESSION] = ("rope_scaling", "rope_parameters")
    # the length that a model was first trained on, where it is outside the record that scales them; it
    # counts for more than the record's
    original: Expression = "original_max_position_embeddings"
    # what turned channels are multiplied by under a scaling, instead of what its kind makes it
    factor: Expression = ""
    # the same of texts longer than that length, which then turn at the frequencies of shorter ones, whatever
    # the scaling
    long_factor: Expression = ""
    # whether "dynamic" with an alpha is one base for texts of every length, `base · alpha^(n / (n − 2))`
    alpha: bool = False
    read_again: bool = False  # whether a text that grows past that length is read again from its first token
    slopes: Literal["authors", "mpt"] = "authors"  # how ALiBi's are found: as its authors do, or as MPT does
    before_scale: bool = False  # whether ALiBi's biases are added before the scores are scaled, and not after
    # tensors with the angles of rotary positions, frequencies `[pairs]` or sines and cosines `[positions, 2 ·
    # pairs]`. Those that are there must be what the configuration gives.
    stored: tuple[str, ...] = ()
    # the tensor of a distance table; of the first layer, for all, with "{layer}" of each its own
    table: str = ""
    more_tables: tuple[Choice, ...] = ()  # those that are added to it
    table_norm: str = ""  # the norm that a table of embeddings passes, if the configuration says so
    both_ways: bool = True  # whether distances have a sign
    # number of groups of distances that share a row; of a table all its rows if empty
    buckets: Expression = ""
    # distance in tokens from which on all share the last bucket
    max_distance: Expression = "relative_attention_max_distance | 128"
    # what positions are, if they are not places in a text. Rotary pairs turn by rows and columns, and a
    # distance table has an entry for each pair of them.
    patches: PatchesSpec | None = None
    # disentangled: within the attention, the map of the distances that queries meet; `query_map` is that of
    # those that keys meet
    key_map: str = ""
    query_map: str = ""
    # on what condition the maps of keys and queries serve instead; never if empty
    shared_maps: Expression = ""


@final
class LatentSpec(Spec):
    """Keys and values out of a narrow latent, perhaps queries too (DeepSeek-AI 2024, arXiv 2405.04434)."""

    # these six are modules within the attention. Queries have a single map where there is no `q_rank`.
    q_down: str = "q_a_proj"
    q_norm: str = "q_a_layernorm"
    q_up: str = "q_b_proj"
    kv_down: str = "kv_a_proj_with_mqa"
    kv_norm: str = "kv_a_layernorm"
    kv_up: str = "kv_b_proj"
    rank: Expression = "kv_lora_rank"  # width of the latent of keys and values
    q_rank: Expression = "q_lora_rank"  # width of that of queries
    plain: Expression = "qk_nope_head_dim"  # number of channels of a head that are not turned
    # number of those that are, after the plain ones; keys share one for all heads
    turned: Expression = "qk_rope_head_dim"
    value: Expression = "v_head_dim"  # width of a head's values
    eps: Expression = "1e-6"  # of the RMSNorms of the latents


@final
class AttentionSpec(Spec):
    """One kind of attention layer of a family.

    Names of modules may hold {layer} and {inner}. A map's tensors are NAME.weight and NAME.bias; a name with
    "*" has "weight" and "bias" in its place.
    """

    stack: str = "decoder"  # "encoder", "decoder", "vision": for reports
    kind: Literal["self", "causal", "cross"] = "causal"  # where queries and keys come from
    # on what condition of the configuration a causal layer sees what comes later, too; never if empty
    both_ways: Expression = ""
    when: Expression = ""  # on what condition of the configuration such layers exist
    settings: str = ""  # path of the record in the configuration that this stack has for itself
    # by `model_type`, what a configuration that leaves a field out has, as its class has it; for all entries
    # with the same `settings`
    defaults: dict[str, dict[str, Any]] = Field(default_factory=dict)
    needs: Expression = ""  # a field that has to be there, since no default can be told
    # how many there are; `inner` how many there are within each, one after the other
    layers: Expression = "num_hidden_layers"
    inner: Expression = "1"
    # in words, what each of them mixes tokens with: 'attention', or what the others have in its place; all
    # have attention if not given
    mixers: tuple[Choice, ...] = ()
    more_layers: Expression = ""  # how many more there may be after them, where the file has them
    # how many of them, the last ones, have no keys and values of their own, but use an earlier layer's,
    # made of what that one reads
    borrowing: Expression = ""
    lender: Expression = ""  # what such a layer and the earlier one, the last of its kind, have in common
    uses: Expression = "1"  # how often the model applies each of them, one time after the other
    rounds: Expression = "1"  # how often it goes through all of them, from the first to the last
    at: str  # the module of a layer's attention
    # words that are not in the prefix of `at`: other stacks have the same names
    outside: tuple[str, ...] = ()
    # width of what is read and written; not looked at where the configuration does not say
    size: Expression = "hidden_size | d_model | n_embd | n_embed | dim"
    q: str = "q_proj"  # the map of queries; `k`, `v` and `o` are the others
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    # whether the map of queries has, after the rows of each head's queries, as many of gates, one for each
    # channel of what the head moves
    gated_queries: bool = False
    gate: str = ""  # the map of such gates, where they have one; "" without
    # on what condition the map of keys makes values, too, before the norms of either
    key_value: Expression = "false"
    qkv: str = ""  # one map to all three instead
    # of its rows: all queries, then all keys, then all values; or group by group of heads, the queries of a
    # group, its key, its value; or four parts one after the other, each with a fourth of the queries, of the
    # values, of the keys
    layout: FusedLayout = "q k v"
    latent: LatentSpec | None = None  # keys and values through a latent instead
    # which of "q k v o" have one, the first choice whose condition holds; "k=FIELD" if the field is true. Not
    # looked at if there is none.
    biases: tuple[Choice, ...] = ()
    q_bias: str = ""  # tensor of the bias of queries next to `qkv`; `v_bias` of values
    v_bias: str = ""
    transposed: bool = False  # whether maps are stored `[in, out]`
    heads: Expression = "num_attention_heads"  # number of query heads; `groups` of key heads
    # whether no file has fewer heads, since something else has as many, or as many channels
    fixed_heads: bool = False
    groups: tuple[Choice, ...] = (Choice(value="num_key_value_heads | num_attention_heads"),)
    # of queries and keys; `value_width` of values, if it is another
    width: Annotated[str | tuple[Choice, ...], EXPRESSION] = "head_dim | hidden_size / num_attention_heads"
    value_width: Expression = ""
    # the scores are multiplied by 1/√ of this, the width of queries if no choice holds; "1" for nothing
    scale: Annotated[str | tuple[Choice, ...], EXPRESSION] = ()
    scale_times: tuple[Choice, ...] = ()  # what they are multiplied by besides
    # name of code of the family for what none of this can say (`core/checkpoints/hooks.py`).
    hook: str = ""
    norm: tuple[NormSpec, ...] = ()  # what is read; None without any
    head_norm: HeadNormSpec | None = None  # of queries and keys
    # what is added to the mean square in an RMSNorm of each head's values, which has no weights; "" for no
    # such norm
    value_norm: Expression = ""
    positions: tuple[PositionSpec, ...] = (PositionSpec(kind="rotary"),)  # the first that applies
    also_read_by: tuple[Choice, ...] = ()  # what else reads the norm's output, on conditions
    other_norms: tuple[OtherNormSpec, ...] = ()  # norms that maps outside the attention read
    # how many keys a query sees, its own among them; all if no choice holds, or it gives nothing
    window: tuple[Choice, ...] = ()
    chunk: tuple[Choice, ...] = ()  # tokens of the pieces of the text in which queries see keys, as `window`
    # what makes queries count for more the later they are in a text; None for nothing
    temperature: TemperatureSpec | None = None
    window_around: bool = False  # whether half of the window lies on either side of the query's own place
    soft_cap: Expression = ""  # c where scores s become c · tanh(s / c); none if it is empty or gives nothing
    clip: Expression = ""  # c where queries, keys and values are limited to −c … c, as `soft_cap`
    sinks: str = ""  # tensor `[heads]`, of scores that take part in the softmax and move nothing; "" without
    unwritten: str = ""  # why such layers cannot be rewritten; they can if empty
    known: tuple[str, ...] = ()  # tensors within the attention's module that are not maps, as patterns
    # fields of the configuration that `transformers` has and does not run by
    ignored: tuple[Ignored, ...] = ()

    @property
    def why_kept(self) -> str:
        """Why rewritten maps of such layers cannot be written back; "" if they can."""
        if self.unwritten:
            return self.unwritten
        if self.value_norm:
            return "the values of each head are normalised after their map, which no rewrite allows for"
        return "other layers use the keys and values of these" if self.borrowing else ""


@final
class EmbeddedPositionsSpec(Spec):
    kind: Literal["learned", "sinusoidal"] = "learned"  # learned rows, or sines and cosines
    when: Expression = ""
    table: str = ""  # module of the learned rows; of sines and cosines, where files may have them
    rows: Expression = "max_position_embeddings"  # how many positions there are
    offset_rows: Expression = "0"  # rows of the table before that of position 0
    # the token that does not count, where positions count the tokens that do: its own row comes before that
    # of position 0; "" where positions count all tokens
    padding: Expression = ""
    layout: Literal["halves", "interleaved", "tensor2tensor"] = "interleaved"  # see `attention.sinusoidal`.


@final
class FeedForwardSpec(Spec):
    when: Expression = ""  # on what condition of the configuration it is written so
    there: str = ""  # a tensor below `at` that the file has where it is written so
    at: str = "layers.{layer}.mlp"
    inner: str = "up_proj"  # map to the inner width; so is `gate`, "" without one; `outer` leads back
    gate: str = ""
    outer: str = "down_proj"
    # what the rows of `inner` are where the gate is in the same tensor, one half after the other, or in turns
    # (`alternating`)
    fused: Literal["", "gate inner", "inner gate"] = ""
    alternating: bool = False
    transposed: bool = False  # whether maps are stored `[in, out]`
    bare: bool = False  # whether a map's tensors are NAME and NAME_bias
    size: Expression = "intermediate_size"  # the inner width; what `outer` reads if empty
    activation: Expression = "hidden_act"  # its name in `transformers`
    # on what condition the inner maps have biases; `out_bias`: the outer map, as `bias` if empty
    bias: Expression = "false"
    out_bias: Expression = ""
    beta: Expression = ""  # see `FeedForwardConfig`, also for `offset` and `limit`
    offset: float = 0.0
    limit: Expression = ""
    sparsity: Expression = ""
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
    min_sum: Expression = "0.0"
    times: Expression = ""  # what they are multiplied by
    scale_input: bool = False
    correction: str = ""  # tensor of the corrections; "" without
    grouped: Expression = ""  # on what condition there are groups
    groups: Expression = ""
    top_groups: Expression = ""
    group_score: Literal["best", "two_best"] = "best"
    threshold: Expression = ""
    shared: FeedForwardSpec | None = None  # the layer that every token passes besides
    shared_gate: str = ""  # tensor of the map to its gate; "" without
    norms: tuple[str, ...] = ()  # tensors of the norms within, as `EXPERTS_NORMS`; `eps` is below their roots
    eps: Expression = "rms_norm_eps | 1e-6"
    expert_scale: str = ""  # tensor of what each expert's weights are multiplied by; "" without


@final
class BlockInputSpec(Spec):
    """Inputs of the blocks besides the stream; see `architecture.BlockInputsConfig`."""

    when: Expression  # on what condition of the configuration there are any
    width: Expression
    rows: Expression  # of the table
    table: str  # its module; so are `map`, and of each block `gate` and `outer`
    map: str
    norm: NormSpec  # of what the map makes
    gate: str
    outer: str
    out_norm: NormSpec  # of what each block adds
    activation: Expression


@final
class StreamsSpec(Spec):
    """Several streams; see `architecture.StreamsConfig` for what its fields of the same names mean."""

    when: Expression  # on what condition of the configuration there are several
    number: Expression
    active: Expression
    scaled: Expression
    rank: Expression
    # tensors by their names in `Streams` ({stream} numbers all but the first from 0) and in `BlockStreams`
    around: dict[str, str]
    block: dict[str, str]


@final
class MaskedSpec(Spec):
    """Masked tokens whose rows count as 0; see `architecture.MaskedTokens`."""

    when: Expression = ""  # on what condition they do
    token: Expression  # in the place of masked ones
    padding: Expression  # that is not counted


@final
class HeadSpec(Spec):
    at: str = "lm_head"  # the output map, below the names of the attention or above them
    when: Expression = ""  # on what condition of the configuration there is such a head
    # the map before it, found in the same way, and whether it has a bias (`map_bias`); "" without one
    transform: str = ""
    map_bias: Expression = "true"
    activation: Expression = ""  # after that, by its name in `transformers`; "" for none
    norm: tuple[NormSpec, ...] = ()  # after that, named in the same way
    # tensors of the bias, if it is not the map's own; those in the file are all the same. A decoder's may
    # be missing, and have one row.
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
    cross_norm: tuple[NormSpec, ...] = ()  # before the attention to the encoder's output
    cross_out_norm: tuple[NormSpec, ...] = ()
    # the same for the feed-forward layer; where blocks are parallel and it has none, it reads the attention's
    feed_forward_norm: tuple[NormSpec, ...] = ()
    feed_forward_out_norm: tuple[NormSpec, ...] = ()  # as `attention_out_norm`
    feed_forward: tuple[FeedForwardSpec, ...] = Field(min_length=1)  # the first whose condition holds
    input: BlockInputSpec | None = None  # what blocks read besides the stream
    streams: StreamsSpec | None = None  # None where there is one
    block_scale: str = ""  # tensor of the number that the stream after each block is multiplied by
    final_norm: tuple[NormSpec, ...] = ()  # after the last block
    head: HeadSpec = HeadSpec()  # to logits, of a decoder
    # to logits, of an encoder: the first of which the file has the transform, or the output map. With none of
    # them the model ends with the stream.
    heads: tuple[HeadSpec, ...] = ()
    rest: tuple[str, ...] = ()  # tensors that change nothing, as patterns
    harmless: tuple[str, ...] = ()  # fields of the configuration that change nothing of this family's models


@final
class ExportedTensors(Spec):
    """Tensors of a new checkpoint; sizes and conditions are of the facts that the writer gives."""

    when: str = ""
    layers: str = ""  # how many there are of each, with {layer} in its name; one if empty
    at: str = ""  # what their names begin with
    maps: dict[str, tuple[str, ...]]  # shapes of weights, by the rest of the names of their modules
    biases: str = "false"  # on what condition they have biases
    transposed: bool = False  # whether weights are stored `[in, out]`
    bare: bool = False  # whether the names are of tensors, not of modules


@final
class ExportSpec(Spec):
    """How a model of a recipe is written in the family's format."""

    classes: dict[str, str]  # the class of each `model_type`
    # the fields of `config.json` in their order, as expressions of the facts; what gives nothing is left out
    settings: dict[str, str]
    tensors: tuple[ExportedTensors, ...]
