"""Families of architectures, one TOML file each: where its attention lies, and how it is written.

A family file says nothing that its configurations say; where something depends on the configuration it
holds an expression (`settings`). `--family my.toml` gives one more.
"""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from triptych.errors import DataError, UsageError

FusedLayout = Literal["q k v", "by group", "q v k in four parts"]

_FOLDER = files("triptych.checkpoints") / "families"
# What holds a value or a condition out of the configuration, in the words of `settings`.
_EXPRESSIONS = (
    "when", "value", "eps", "width", "start", "share", "base", "scaling", "max_distance",
    "buckets", "shared_maps", "image", "patch", "before", "rank", "q_rank", "plain", "turned",
    "both_ways", "needs", "layers", "inner", "more_layers", "uses", "size", "heads", "value_width",
    "scale", "soft_cap", "clip", "field", "borrowing", "value_norm", "factor", "strength", "every",
    "rows", "offset_rows", "activation", "bias", "out_bias", "tied", "residual_scale",
    "from_norm", "number", "top", "normalised", "times", "grouped", "groups", "top_groups", "threshold",
    "beta", "limit", "embedding_scale", "padding", "outputs", "num_types", "embedding_width", "map_bias",
    "token",
)  # fmt: skip


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def expressions(self) -> Iterator[str]:
        """Every value and condition in it, those of its parts included."""
        for name in type(self).model_fields:
            held = getattr(self, name)
            for part in held if isinstance(held, tuple) else (held,):
                if isinstance(part, _Spec):
                    yield from part.expressions()
                elif name in _EXPRESSIONS and isinstance(part, str):
                    yield part


@final
class Choice(_Spec):
    """A value under a condition.

    Attributes:
        when: a condition; always if empty.
        value: an expression.
    """

    when: str = ""
    value: str


@final
class Ignored(_Spec):
    """A field that the model's class in `transformers` has and does not run by; nor does this library.

    Attributes:
        field: its path.
        as_with: what the model does all the same, as if the field said so; "null" for as without it.
    """

    field: str
    as_with: str = "null"


@final
class NormSpec(_Spec):
    """A norm, of what the attention reads or of what other maps do.

    Attributes:
        at: its module; of the attention's own norm, the one whose output the attention reads. With post-norm
            that is the last norm of what stands before it ("{previous}" is the layer before).
        kind: LayerNorm or RMSNorm.
        place: "pre"; "post" where it follows the residual sum; "sandwich" where there is one on both sides.
        offset: what the stored gain is relative to.
        when: on what condition it is there.
        eps: an expression; that of the model (`ModelSpec.eps`) if empty.
        weight: whether it has weights; with them and without `at`, there is no norm.
        memory: of cross-attention, the norm of the same kind whose output keys and values read; "{last}" is
            the last layer of `memory_layers`, the number of layers of the stack that makes it.
    """

    at: str = ""
    kind: Literal["layer", "rms"] = "layer"
    place: Literal["pre", "post", "sandwich"] = "pre"
    offset: float = 0.0
    when: str = ""
    eps: str = ""
    weight: bool = True
    memory: str = ""
    memory_layers: str = ""


@final
class OtherNormSpec(_Spec):
    """A norm whose output maps outside the attention read, and which maps those are.

    Attributes:
        when: on what condition of the configuration it is there.
        norm: the first whose condition holds; none if none does. A name without {layer} is one norm for all
            layers. It may be the norm that the attention reads as well.
        within: the module in which everything lies that reads it.
        read_by: the maps in it that do, as patterns; a map's tensors are NAME.weight and NAME.bias, or where
            they hold several maps NAME and NAME_bias.
        transposed: those of the maps that are stored `[in, out]`, as patterns.
        rest: tensors beside them that do not read it, as patterns. What is neither is a reason not to fold.
        output_map: instead of all these, the map to logits, above the model's own names; not where its tensor
            is that of the embedding, as `tie_word_embeddings` says.
        also_read_by: what else reads it and is no map of these, on conditions.
    """

    when: str = ""
    norm: tuple[NormSpec, ...] = Field(min_length=1)
    within: str = ""
    read_by: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    output_map: str = ""
    also_read_by: tuple[Choice, ...] = ()


@final
class HeadNormSpec(_Spec):
    """Norms of queries and keys (QK-norm).

    Attributes:
        q: module within the attention; with "{head}" one for each head; "" for a norm without weights.
            Likewise `k`.
        kind: LayerNorm or RMSNorm.
        over: each head by itself, or the channels of all heads side by side.
        eps: an expression.
        offset: what the stored gain is relative to.
        turned: whether they follow the rotation, and are only there where positions turn something; all of a
            head must be turned then.
        when: on what condition they are there.
    """

    q: str
    k: str
    kind: Literal["layer", "rms"] = "rms"
    over: Literal["head", "all heads"] = "head"
    eps: str = "rms_norm_eps | 1e-6"
    offset: float = 0.0
    turned: bool = False
    when: str = ""


@final
class TemperatureSpec(_Spec):
    """Queries that count for more the further they stand in a text.

    Attributes:
        when: on what condition of the configuration they do.
        unturned: whether they do only in layers whose positions turn nothing.
        strength: of the growth; none if no alternative gives anything.
        every: how many positions share a factor.
        first: the number of the first position.
    """

    when: str = ""
    unturned: bool = False
    strength: str
    every: str
    first: int = 0


@final
class PatchesSpec(_Spec):
    """Tokens that are the patches of a picture, row by row, after some others.

    Attributes:
        image: height and width of the picture, or one number for both.
        patch: those of a patch.
        before: how many tokens stand before the patches, in parts that are added.
    """

    image: str = "image_size"
    patch: str = "patch_size"
    before: tuple[str, ...] = ("1",)


@final
class PositionSpec(_Spec):
    """How positions are told apart, on a condition.

    Attributes:
        kind: of positions.
        when: on what condition; the first position of a list whose condition holds counts.
        pairing: of rotary channels.
        width: channels turned; all of a head if empty. `start` is the first of them.
        share: of the width that is turned, rounded down (an odd number is refused); all of it if not given,
            whatever the configuration says: few models read its `partial_rotary_factor`.
        base: of the frequencies.
        scaling: paths of the record that scales them; the first that is one.
        factor: what turned channels are multiplied by under a scaling, instead of what its kind makes it.
        slopes: how ALiBi's are found: as its authors do, or as MPT does.
        before_scale: whether ALiBi's biases are added before the scores are scaled, and not after.
        stored: tensors with the angles of rotary positions, frequencies `[pairs]` or sines and cosines
            `[positions, 2 · pairs]`. Those that are there must be what the configuration gives.
        table: the tensor of a distance table; of the first layer, for all, with "{layer}" of each its own.
        more_tables: those that are added to it.
        table_norm: the norm that a table of embeddings passes, if the configuration says so.
        both_ways: whether distances have a sign.
        buckets: of distances; of a table all rows if empty.
        max_distance: from where on they share a bucket.
        patches: what positions are, if they are not places in a text. Rotary pairs turn by rows and columns,
            and a distance table has an entry for each pair of them.
        key_map: disentangled: within the attention, the map of the distances that queries meet; likewise
            `query_map` of those that keys meet.
        shared_maps: on what condition the maps of keys and queries serve instead; never if empty.
    """

    kind: Literal[
        "none", "sinusoidal", "learned", "rotary", "alibi", "distance table", "disentangled", "convolution"
    ]
    when: str = ""
    pairing: Literal["halves", "interleaved"] = "halves"
    width: str = ""
    start: str = "0"
    share: str = "1.0"
    base: str = "rope_parameters.rope_theta | rope_theta | 10000.0"
    scaling: tuple[str, ...] = ("rope_scaling", "rope_parameters")
    factor: str = ""
    slopes: Literal["authors", "mpt"] = "authors"
    before_scale: bool = False
    stored: tuple[str, ...] = ()
    table: str = ""
    more_tables: tuple[Choice, ...] = ()
    table_norm: str = ""
    both_ways: bool = True
    buckets: str = ""
    max_distance: str = "relative_attention_max_distance | 128"
    patches: PatchesSpec | None = None
    key_map: str = ""
    query_map: str = ""
    shared_maps: str = ""


@final
class LatentSpec(_Spec):
    """Keys and values out of a narrow latent, and queries perhaps too (DeepSeek).

    Attributes:
        q_down: modules within the attention; likewise the others. Queries have a single map where there is no
            `q_rank`.
        rank: of the latent of keys and values.
        q_rank: of that of queries.
        plain: channels of a head that are not turned.
        turned: those that are; keys share one for all heads.
        value: width of a head's values.
        eps: of the norms of the latents.
    """

    q_down: str = "q_a_proj"
    q_norm: str = "q_a_layernorm"
    q_up: str = "q_b_proj"
    kv_down: str = "kv_a_proj_with_mqa"
    kv_norm: str = "kv_a_layernorm"
    kv_up: str = "kv_b_proj"
    rank: str = "kv_lora_rank"
    q_rank: str = "q_lora_rank"
    plain: str = "qk_nope_head_dim"
    turned: str = "qk_rope_head_dim"
    value: str = "v_head_dim"
    eps: str = "1e-6"


@final
class AttentionSpec(_Spec):
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
            earlier layer, made of what that one reads. They are reported, and not read.
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
        window: of keys that are seen.
        chunk: of the text, in whose pieces queries see keys.
        temperature: of queries.
        window_around: whether half of the window lies on either side of the query's own place.
        soft_cap: of scores.
        clip: of queries, keys and values.
        sinks: tensor with a score a head.
        unwritten: why such layers cannot be rewritten; they can if empty.
        known: tensors within the attention's module that are not maps, as patterns.
        ignored: fields of the configuration that `transformers` has and does not run by.
    """

    stack: str = "decoder"
    kind: Literal["self", "causal", "cross"] = "causal"
    both_ways: str = ""
    when: str = ""
    settings: str = ""
    defaults: dict[str, dict[str, Any]] = {}
    needs: str = ""
    layers: str = "num_hidden_layers"
    inner: str = "1"
    more_layers: str = ""
    borrowing: str = ""
    uses: str = "1"
    at: str
    outside: tuple[str, ...] = ()
    size: str = "hidden_size | d_model | n_embd | n_embed | dim"
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
    heads: str = "num_attention_heads"
    groups: tuple[Choice, ...] = (Choice(value="num_key_value_heads | num_attention_heads"),)
    width: str = "head_dim | hidden_size / num_attention_heads"
    value_width: str = ""
    scale: str | tuple[Choice, ...] = ()
    scale_times: tuple[Choice, ...] = ()
    hook: str = ""
    norm: tuple[NormSpec, ...] = ()
    head_norm: HeadNormSpec | None = None
    value_norm: str = ""
    positions: tuple[PositionSpec, ...] = (PositionSpec(kind="rotary"),)
    also_read_by: tuple[Choice, ...] = ()
    other_norms: tuple[OtherNormSpec, ...] = ()
    window: tuple[Choice, ...] = ()
    chunk: tuple[Choice, ...] = ()
    temperature: TemperatureSpec | None = None
    window_around: bool = False
    soft_cap: str = ""
    clip: str = ""
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


@final
class EmbeddedPositionsSpec(_Spec):
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
    when: str = ""
    table: str = ""
    rows: str = "max_position_embeddings"
    offset_rows: str = "0"
    padding: str = ""
    layout: Literal["halves", "interleaved", "tensor2tensor"] = "interleaved"


@final
class FeedForwardSpec(_Spec):
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

    when: str = ""
    there: str = ""
    at: str = "layers.{layer}.mlp"
    inner: str = "up_proj"
    gate: str = ""
    outer: str = "down_proj"
    fused: Literal["", "gate inner", "inner gate"] = ""
    alternating: bool = False
    transposed: bool = False
    bare: bool = False
    size: str = "intermediate_size"
    activation: str = "hidden_act"
    bias: str = "false"
    out_bias: str = ""
    beta: str = ""
    offset: float = 0.0
    limit: str = ""
    experts: "ExpertsSpec | None" = None


@final
class ExpertsSpec(_Spec):
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

    number: str
    top: str = "num_experts_per_tok"
    router: str = "gate"
    router_bias: bool = False
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalised: str = "false"
    min_sum: float = 0.0
    times: str = ""
    scale_input: bool = False
    correction: str = ""
    grouped: str = ""
    groups: str = ""
    top_groups: str = ""
    group_score: Literal["best", "two_best"] = "best"
    threshold: str = ""
    shared: FeedForwardSpec | None = None


@final
class MaskedSpec(_Spec):
    """Masked tokens whose rows count as 0; see `architecture.MaskedTokens`.

    Attributes:
        when: on what condition they do.
        token: that stands for masked ones.
        padding: that is not counted.
    """

    when: str = ""
    token: str
    padding: str


@final
class HeadSpec(_Spec):
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
        tied: on what condition its weight is the table of the embeddings.
        bias: on what condition it has a bias.
        scale: of the logits.
        over_root: logits are divided by the root of the first of these whose condition holds.
        soft_cap: of the logits.
    """

    at: str = "lm_head"
    when: str = ""
    transform: str = ""
    map_bias: str = "true"
    activation: str = ""
    norm: tuple[NormSpec, ...] = ()
    bias_at: tuple[str, ...] = ()
    outputs: str = ""
    tied: str = "tie_word_embeddings | true"
    bias: str = "false"
    scale: str = ""
    over_root: tuple[Choice, ...] = ()
    soft_cap: str = ""


@final
class ModelSpec(_Spec):
    """What of a model its attention layers do not say: embeddings, frames, feed-forward layers, head.

    Names of modules may hold {layer}, as those of the attention, below the same prefix.

    Attributes:
        kind: "decoder" without an encoder, or "encoder" without a decoder.
        encoder: the other stack of a model that has both; all the rest is then of the decoder.
        stack: of the attention layers that make up its blocks.
        refused: why it cannot be run, on conditions of the configuration.
        eps: of norms that do not say another.
        embedding: module of the table.
        copies: modules that hold the table once more, if the file has them.
        embedding_scale: what its rows are multiplied by; `root_scale`: by the root of the first of
            these whose condition holds.
        embedding_width: of the table, where a map leads from it to the width of the model;
            `embedding_map`: that map, which is there if the file has it.
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
    eps: str = "rms_norm_eps | 1e-6"
    embedding: str = "embed_tokens"
    copies: tuple[str, ...] = ()
    embedding_width: str = ""
    embedding_map: str = ""
    types: str = ""
    num_types: str = "type_vocab_size"
    embedding_scale: str = ""
    root_scale: tuple[Choice, ...] = ()
    positions: tuple[EmbeddedPositionsSpec, ...] = ()
    masked: MaskedSpec | None = None
    embedding_norm: tuple[NormSpec, ...] = ()
    norm_first: bool = False
    parallel: tuple[Choice, ...] = ()
    from_norm: str = "false"
    residual_scale: str = ""
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


@final
class Unread(_Spec):
    """Attention that is known and not read.

    Attributes:
        names: of its tensors, a pattern.
        why: for reports.
    """

    names: str
    why: str


@final
class Family(_Spec):
    """An architecture family.

    Attributes:
        name: for people.
        model_types: of configurations.
        refused: why its checkpoints cannot be read, on conditions of the configuration.
        attention: its kinds of attention layers; none where all are refused.
        model: what its models are made of besides; None where they can be read, and not run.
        rest: tensors that look like attention by their names and are not, as patterns.
        unread: attention that is reported, and not read.
    """

    name: str
    model_types: tuple[str, ...] = ()
    refused: tuple[Choice, ...] = ()
    attention: tuple[AttentionSpec, ...] = ()
    model: ModelSpec | None = None
    rest: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()

    @model_validator(mode="after")
    def _require_attention(self) -> "Family":
        if not self.attention and not any(not choice.when for choice in self.refused):
            raise ValueError("there is no [[attention]]")
        return self


def half_of(family: Family, half: str) -> Family:
    """The family as files have it in which one half of its models, "encoder" or "decoder", was saved alone.

    The names of its tensors then begin below that word.
    """

    def below(held: Any) -> Any:
        match held:
            case str():
                return held.removeprefix(f"{half}.")
            case dict():
                return {key: below(value) for key, value in held.items()}
            case list() | tuple():
                return [below(value) for value in held]
        return held

    record = family.model_dump(exclude_unset=True)
    below_half = {part: below(record[part]) for part in ("attention", "model") if part in record}
    return Family.model_validate({**record, **below_half})


def family_of(model_type: str) -> Family | None:
    """The family that knows a configuration's `model_type`; None if there is none."""
    return next((family for family in families() if model_type in family.model_types), None)


@cache
def families() -> tuple[Family, ...]:
    """All families that come along."""
    return tuple(_read_all())


def read_family(path: Path) -> Family:
    """A family file of a user's own.

    Raises:
        UsageError: it is not there, no TOML, or says something that a family does not have.
    """
    try:
        record = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    try:
        family = Family.model_validate(_expanded(record, path.stem))
        for spec in family.attention:
            _try_names(spec)
        return family
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {where}: {first['msg']}") from None
    except DataError as error:
        raise UsageError(str(error)) from None


def _read_all() -> Iterator[Family]:
    for entry in sorted(_FOLDER.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            yield Family.model_validate(
                _expanded(tomllib.loads(entry.read_text(encoding="utf-8")), entry.name)
            )


def _try_names(spec: AttentionSpec) -> None:
    """Fill in the numbers that names may hold.

    Raises:
        DataError: a name holds something else in braces.
    """
    head_norm = () if spec.head_norm is None else (spec.head_norm.q, spec.head_norm.k)
    beside = [name for norm in spec.norm for name in (norm.at, norm.memory)]
    beside += [p.table for p in spec.positions]
    for position in spec.positions:
        beside += [*position.stored, *(choice.value for choice in position.more_tables)]
    for other in spec.other_norms:
        beside += [other.within, *(norm.at for norm in other.norm)]
    for name in (spec.at, *beside, *(p.table_norm for p in spec.positions), *head_norm):
        try:
            name.format(layer=0, inner=0, head=0, previous=0, last=0)
        except (KeyError, IndexError, ValueError):
            raise DataError(
                f"{name}: the placeholders of a name are {{layer}}, {{inner}} and {{head}}, "
                "of a norm also {previous} and {last}"
            ) from None


def _expanded(record: dict[str, Any], where: str) -> dict[str, Any]:
    """A record with `like = "NAME"` in attention entries replaced by the first entry of that family.

    In `[model]`, by the `[model]` of that family.
    """
    entries, model = record.get("attention"), record.get("model")
    if isinstance(model, dict) and "like" in model:
        record = {**record, "model": _model_laid_over(model, where)}
    if not isinstance(entries, list):
        return record
    return {**record, "attention": [_laid_over(entry, where) for entry in entries]}


def _model_laid_over(model: dict[str, Any], where: str) -> dict[str, Any]:
    """The tables of a `[model]` over those of another, one key at a time."""
    other = _family_record(str(model["like"]), where).get("model")
    if not isinstance(other, dict):
        raise DataError(f"{where}: {model['like']} has no [model] for `like`")
    own = {key: value for key, value in model.items() if key != "like"}
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(other.get(key), dict):
            own[key] = {**other[key], **value}
    return {**other, **own}


def _family_record(name: str, where: str) -> dict[str, Any]:
    path = _FOLDER / f"{name}.toml"
    if not re.fullmatch(r"\w+", name) or not path.is_file():
        raise DataError(f"{where}: there is no family {name} for `like`")
    return _expanded(tomllib.loads(path.read_text(encoding="utf-8")), name)


def _laid_over(entry: Any, where: str) -> Any:
    if not isinstance(entry, dict) or "like" not in entry:
        return entry
    name, _, number = str(entry["like"]).partition("#")
    others = _family_record(name, where)["attention"]
    if not (number or "0").isdecimal() or int(number or 0) >= len(others):
        raise DataError(f"{where}: {name} has attention 0 to {len(others) - 1}, and not {number}")
    other = others[int(number or 0)]
    return {**other, **{key: value for key, value in entry.items() if key != "like"}}
