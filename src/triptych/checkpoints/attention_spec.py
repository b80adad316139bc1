"""What a family file says of attention layers, in `[[attention]]`."""

from typing import Annotated, Any, Literal, final

from pydantic import Field

from triptych.checkpoints.specs import EXPRESSION, Choice, Expression, Ignored, NormSpec, Spec

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
    transposed: tuple[str, ...] = ()  # those of the maps that are stored `[in, out]`, as patterns
    # tensors beside them that do not read it, as patterns. What is neither is a reason not to fold.
    rest: tuple[str, ...] = ()
    # instead of all these, the map to logits, above the model's own names; not where its tensor is that of
    # the embedding, as `tie_word_embeddings` says
    output_map: str = ""
    also_read_by: tuple[Choice, ...] = ()  # what else reads it and is no map of these, on conditions


@final
class HeadNormSpec(Spec):
    """Norms of queries and keys (QK-norm). Source: Henry et al. 2020, arXiv 2010.04245."""

    # module within the attention; with "{head}" one for each head; "" for a norm without weights. Likewise
    # `k`.
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
    patch: Expression = "patch_size"  # height and width of a patch in pixels, likewise
    # how many tokens stand before the patches, in parts that are added
    before: Annotated[tuple[str, ...], EXPRESSION] = ("1",)


@final
class PositionSpec(Spec):
    """How positions are told apart, on a condition.

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
    width: Expression = ""  # number of channels turned; all of a head if empty. `start` is the first of them.
    start: Expression = "0"
    # of the width that is turned, rounded down (an odd number is refused); all of it if not given, whatever
    # the configuration says: few models read its `partial_rotary_factor`
    share: Expression = "1.0"
    # b of the frequencies b^(−2i/n), in radians a position
    base: Expression = "rope_parameters.rope_theta | rope_theta | 10000.0"
    # paths of the record that scales them, such as `rope_scaling`; the first that is one
    scaling: Annotated[tuple[str, ...], EXPRESSION] = ("rope_scaling", "rope_parameters")
    # the length that a model was first trained on, where it lies beside the record that scales them; it
    # counts for more than the record's
    original: Expression = "original_max_position_embeddings"
    # what turned channels are multiplied by under a scaling, instead of what its kind makes it
    factor: Expression = ""
    # the same of texts longer than that length, which then turn at the frequencies of shorter ones, whatever
    # the scaling
    long_factor: Expression = ""
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
    # disentangled: within the attention, the map of the distances that queries meet; likewise `query_map` of
    # those that keys meet
    key_map: str = ""
    query_map: str = ""
    # on what condition the maps of keys and queries serve instead; never if empty
    shared_maps: Expression = ""


@final
class LatentSpec(Spec):
    """Keys and values out of a narrow latent, perhaps queries too (DeepSeek-AI 2024, arXiv 2405.04434)."""

    # modules within the attention; likewise the others. Queries have a single map where there is no `q_rank`.
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

    Attributes:
        stack: "encoder", "decoder", "vision": for reports.
        kind: where queries and keys come from.
        both_ways: on what condition of the configuration a causal layer sees what comes later, too; never
            if empty.
        when: on what condition of the configuration such layers exist.
        settings: path of the record in the configuration that this stack has for itself.
        defaults: by `model_type`, what a configuration that leaves a field out has, as its class has it.
        needs: a field that has to be there, since no default can be told.
        layers: how many there are; `inner` how many there are within each, one after the other.
        more_layers: how many more there may be after them, where the file has them.
        borrowing: how many of them, the last ones, have no keys and values of their own, but those of an
            earlier layer, made of what that one reads.
        lender: what such a layer and the earlier one, the last of its kind, have in common.
        uses: how often the model applies each of them, one time after the other.
        at: the module of a layer's attention.
        outside: words that are not in what stands before `at`: other stacks have the same names.
        size: width of what is read and written; not looked at where the configuration does not say.
        q: its map; likewise `k`, `v`, `o`.
        qkv: one map to all three instead.
        layout: of its rows: all queries, then all keys, then all values; or group by group of heads, the
            queries of a group, its key, its value; or four parts one after the other, each with a fourth of
            the queries, of the values, of the keys.
        latent: keys and values through a latent instead.
        biases: which of "q k v o" have one, the first choice whose condition holds; "k=FIELD" if the field is
            true. Not looked at if there is none.
        q_bias: tensor of the bias of queries, beside `qkv`; likewise `v_bias`.
        transposed: whether maps are stored `[in, out]`.
        heads: number of query heads; `groups` of key heads.
        width: of queries and keys; `value_width` of values, if it is another.
        scale: the scores are multiplied by 1/√ of this, the width of queries if no choice holds; "1" for
            nothing.
        scale_times: what they are multiplied by besides.
        hook: name of code of the family for what none of this can say (`hook_of` in `families/__init__.py`).
        norm: what is read; None without any.
        head_norm: of queries and keys.
        value_norm: what is added to the mean square in an RMSNorm of each head's values, which has no
            weights; "" for no such norm.
        positions: the first that applies.
        also_read_by: what else reads the norm's output, on conditions.
        other_norms: norms that maps outside the attention read.
        window: how many keys a query sees, its own among them; all if no choice holds, or it gives nothing.
        chunk: tokens of the pieces of the text in which queries see keys, likewise.
        temperature: what makes queries count for more the further they stand in a text; None for nothing.
        window_around: whether half of the window lies on either side of the query's own place.
        soft_cap: c where scores s become c · tanh(s / c); none if it is empty or gives nothing.
        clip: c where queries, keys and values are limited to −c … c, likewise.
        sinks: tensor `[heads]`, of scores that take part in the softmax and move nothing; "" without.
        unwritten: why such layers cannot be rewritten; they can if empty.
        known: tensors within the attention's module that are not maps, as patterns.
        ignored: fields of the configuration that `transformers` has and does not run by.
    """

    stack: str = "decoder"
    kind: Literal["self", "causal", "cross"] = "causal"
    both_ways: Expression = ""
    when: Expression = ""
    settings: str = ""
    defaults: dict[str, dict[str, Any]] = Field(default_factory=dict)
    needs: Expression = ""
    layers: Expression = "num_hidden_layers"
    inner: Expression = "1"
    more_layers: Expression = ""
    borrowing: Expression = ""
    lender: Expression = ""
    uses: Expression = "1"
    at: str
    outside: tuple[str, ...] = ()
    size: Expression = "hidden_size | d_model | n_embd | n_embed | dim"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    qkv: str = ""
    layout: FusedLayout = "q k v"
    latent: LatentSpec | None = None
    biases: tuple[Choice, ...] = ()
    q_bias: str = ""
    v_bias: str = ""
    transposed: bool = False
    heads: Expression = "num_attention_heads"
    groups: tuple[Choice, ...] = (Choice(value="num_key_value_heads | num_attention_heads"),)
    width: Expression = "head_dim | hidden_size / num_attention_heads"
    value_width: Expression = ""
    scale: Annotated[str | tuple[Choice, ...], EXPRESSION] = ()
    scale_times: tuple[Choice, ...] = ()
    hook: str = ""
    norm: tuple[NormSpec, ...] = ()
    head_norm: HeadNormSpec | None = None
    value_norm: Expression = ""
    positions: tuple[PositionSpec, ...] = (PositionSpec(kind="rotary"),)
    also_read_by: tuple[Choice, ...] = ()
    other_norms: tuple[OtherNormSpec, ...] = ()
    window: tuple[Choice, ...] = ()
    chunk: tuple[Choice, ...] = ()
    temperature: TemperatureSpec | None = None
    window_around: bool = False
    soft_cap: Expression = ""
    clip: Expression = ""
    sinks: str = ""
    unwritten: str = ""
    known: tuple[str, ...] = ()
    ignored: tuple[Ignored, ...] = ()

    @property
    def why_kept(self) -> str:
        """Why rewritten maps of such layers cannot be written back; "" if they can."""
        if self.unwritten:
            return self.unwritten
        if self.latent:
            return "keys and values come through a latent, whose maps took up the gains of norms between them"
        if self.value_norm:
            return "the values of each head are normalised after their map, which no rewrite allows for"
        return "other layers use the keys and values of these" if self.borrowing else ""
