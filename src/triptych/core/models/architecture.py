"""What the blocks of a Transformer are made of, as data.

Recipes and checkpoints both end here: `configuration` turns what a recipe asks for into these records,
`checkpoints` what a configuration of Hugging Face says. `blocks` and the models are built from them, and know
neither recipes nor families.
"""

from dataclasses import dataclass
from typing import Literal, final

Activation = Literal[
    "relu", "gelu", "gelu_tanh", "gelu_sigmoid", "swish", "relu_squared", "tanh", "sigmoid", "xielu"
]


@final
@dataclass(frozen=True)
class NormConfig:
    """A normalisation over the width of the model.

    Source: Ba et al. 2016, arXiv 1607.06450; Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    # LayerNorm, `(x − mean) / √(var + eps)`, or RMSNorm, `x / √(mean(x²) + eps)`
    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5  # added below the root
    weight: bool = True  # whether there is a weight for each channel
    bias: bool = True  # whether there is a bias for each channel; LayerNorm only
    # channels are multiplied by `offset + weight`, so 1 where weights are stored relative to 1
    offset: float = 0.0


@final
@dataclass(frozen=True)
class FeedForwardConfig:
    """A feed-forward layer.

    `f(x W_1 + b_1) W_2 + b_2`, or with a gate `(f(g) ⊙ (u + offset)) W_2 + b_2`, where `g = x W_g + b_g` and
    `u = x W_1 + b_1`.

    Source: gates: Shazeer 2020, arXiv 2002.05202; beta: Ramachandran et al. 2017, arXiv 1710.05941; offset
    and limit: gpt-oss, github.com/openai/gpt-oss.
    """

    d_ff: int  # inner width
    # f. "gelu" is `x Φ(x)`, "gelu_tanh" its approximation by tanh, "gelu_sigmoid" `x σ(1.702 x)`, "swish" `x
    # σ(beta x)`, "relu_squared" `max(0, x)²`; "xielu" is of feed-forward layers alone, see `XIELU`
    activation: Activation = "relu"
    gated: bool = False  # whether there is a gate
    bias: bool = True  # whether the inner maps have biases; `out_bias` is for W_2
    out_bias: bool = True
    dropout: float = 0.0  # on the inner activations, while training
    beta: float = 1.0  # of "swish"
    offset: float = 0.0  # added to u, for layers with a gate
    # c where g is at most c and u between −c and c, for layers with a gate; None if they have no limit
    limit: float | None = None
    # share s of the gate's channels below their mean plus Φ⁻¹(s) of their standard deviations, which is taken
    # from them; what is then negative becomes 0. For layers with a gate; 0 for none
    sparsity: float = 0.0


# RMSNorms within a mixture of experts: n₁ to n₅ of `ExpertsConfig`.
EXPERTS_NORMS = ("shared_out", "shared", "out", "experts", "router")


@final
@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: feed-forward layers of which every token passes the few that a router chooses.

    The router gives every expert a score, the map `x W_r + b_r` after `scores`. The experts of the highest
    scores are chosen, and their outputs are summed with the scores as weights. With `norm_eps`, the layer is
    `n₁(shared(n₂(x))) + n₃(experts(n₄(x)))`, and the router reads `n₅(x) / √d`.

    Source: Shazeer et al. 2017, arXiv 1701.06538; shared experts: Dai et al. 2024, arXiv 2401.06066; groups:
    DeepSeek-AI 2024, arXiv 2405.04434, section 2.2.2; correction: DeepSeek-AI 2024, arXiv 2412.19437, section
    2.1.2; sparsemixer: Liu et al. 2024, arXiv 2409.12136; norms: `Gemma4TextDecoderLayer` of
    github.com/huggingface/transformers, version 5.23.0.
    """

    expert: FeedForwardConfig  # every one of them
    num_experts: int
    top_k: int  # how many a token passes
    # "softmax" over all experts, "sigmoid" of each, or "sparsemixer": the experts are chosen one after the
    # other, each by a softmax over those not yet chosen and near the best of them. While training,
    # "sparsemixer" chooses as in evaluation, without noise
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    # whether the weights of the chosen are divided by their sum; with "softmax", the same as a softmax over
    # the chosen alone
    normalised: bool = False
    min_sum: float = 0.0  # the least that they are divided by
    scale: float = 1.0  # the weights are multiplied by this
    scale_input: bool = False  # whether the weights multiply what the experts read, not what they give
    router_bias: bool = False  # whether there is b_r
    # whether every expert has a number that is added to its score for the choice, and not for the weight
    correction: bool = False
    groups: int = 1  # experts are in this many groups of one size, the first ones in the first group
    top_groups: int = 1  # how many of the groups a token may choose from
    # what groups are chosen by: their best score, or the sum of their two best
    group_score: Literal["best", "two_best"] = "best"
    # for "sparsemixer"; experts of score s with `best − s > threshold · max(|s|, best)` are out
    threshold: float = 0.0
    shared: FeedForwardConfig | None = None  # a layer that every token passes besides; None without
    norm_eps: float | None = None  # below the roots of the norms within; None without them
    weighted: bool = False  # whether every expert has a number that its weights are multiplied by
    # whether what the shared layer gives is multiplied by a gate, a sigmoid of a map of its token
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k is {self.top_k}: there are {self.num_experts} experts, choose 1 to all")
        if self.num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"{self.num_experts} experts cannot be in {self.groups} groups of one size, of which "
                f"{self.top_groups} are chosen"
            )
        if self.top_k > (there := self.num_experts // self.groups * self.top_groups):
            raise ValueError(
                f"top_k is {self.top_k}: there are {there} experts in the groups that are chosen"
            )


@final
@dataclass(frozen=True)
class SublayerConfig:
    """The frame around attention or a feed-forward layer f."""

    norm: NormConfig | None = NormConfig()  # "pre": `x + f(norm(x))`; "post": `norm(x + f(x))`; None without
    place: Literal["pre", "post"] = "pre"  # where `norm` is
    # of what f adds, before the sum; with a pre-norm, both together are a sandwich
    out_norm: NormConfig | None = None
    scale: float = 1.0  # what f adds is multiplied by this
    dropout: float = 0.0  # on what f adds, while training
    from_norm: bool = False  # whether the sum is taken with the normalised input instead of the input


@final
@dataclass(frozen=True)
class BlockInputConfig:
    """What a block adds of an input of its own: `x + norm((f(x W_g) ⊙ input) W_o)`."""

    width: int  # of the input
    activation: Activation  # f
    norm: NormConfig


@final
@dataclass(frozen=True)
class BlockInputsConfig:
    """Inputs of the blocks, made of tokens t and their embeddings x: `(norm(x W / √d) + √w E[t]) / √2`.

    E has w numbers of a token for each block, and W makes as many of its embedding.

    Source: "per-layer embeddings" of `modeling_gemma3n.py` and `modeling_gemma4.py` in
    github.com/huggingface/transformers, version 5.23.0.
    """

    vocab_size: int  # rows of E
    width: int  # w
    norm: NormConfig  # over the numbers of each block


@final
@dataclass(frozen=True)
class StreamsConfig:
    """Several streams, of which a block computes with one; see `models.streams`."""

    number: int  # of streams
    active: int  # the one that blocks compute with
    scaled: bool  # whether its channels have a number each before a block's own input is made of it
    rank: int  # of the map that is added to what the attention reads
    eps: float  # of the norms


@final
@dataclass(frozen=True)
class BlockConfig:
    """A block: self-attention, cross-attention if there is any, and a feed-forward layer."""

    attention: SublayerConfig  # the frame of the self-attention
    feed_forward: FeedForwardConfig | ExpertsConfig  # the feed-forward layer, or a mixture of them
    feed_forward_frame: SublayerConfig  # its frame
    cross: SublayerConfig | None = None  # the frame of the cross-attention; None without
    # whether attention and feed-forward layer read the same stream, and what both add is added at once.
    # Without a norm in `feed_forward_frame`, the feed-forward layer reads what the attention reads
    parallel: bool = False
    # the block whose keys and values the self-attention uses, its own number where later ones use them, too;
    # None where it alone uses its own
    keys: int | None = None
    input: BlockInputConfig | None = None  # what it adds after the feed-forward layer; None for nothing
    scaled: bool = False  # whether the stream after it is multiplied by a number that the file has
    streams: StreamsConfig | None = None  # None where there is one


@final
@dataclass(frozen=True)
class MaskedTokens:
    """Masked tokens as ESM has them: their rows count as 0, and all rows are multiplied by a number.

    It is the share of tokens that were not masked in training over their share in the text.

    Source: `EsmEmbeddings` of github.com/huggingface/transformers.
    """

    token: int  # in the place of masked ones
    padding: int  # that does not count as a token of the text
    trained: float = 0.15 * 0.8  # share of tokens that were masked in training


@final
@dataclass(frozen=True)
class EmbeddingsConfig:
    """From token ids to the stream."""

    vocab_size: int  # rows of the table
    # of the table, from which a map leads to d_model (with a bias if `map_bias`); d_model without a map if
    # None. With `map_first`, positions are added behind the map
    width: int | None = None
    map_bias: bool = False
    map_first: bool = False
    scale: float = 1.0  # the rows are multiplied by this
    positions: Literal["none", "learned", "sinusoidal"] = "none"  # what is added for the position of a token
    num_positions: int = 0  # rows of learned positions
    position_offset: int = 0  # position p is row `p + position_offset` of the learned or sinusoidal table
    # where positions that are not given count the tokens before that are not this one; this one itself has
    # the position before the first. None where they count all
    padding_id: int | None = None
    # see `attention.sinusoidal`
    sinusoidal_layout: Literal["halves", "interleaved", "tensor2tensor"] = "interleaved"
    num_types: int = 0  # rows of a table for the segments of a text; 0 without
    masked: MaskedTokens | None = None  # what becomes of masked tokens, if not what becomes of all
    norm: NormConfig | None = None  # of the sum; None without
    norm_first: bool = False  # whether the norm is of the sum before positions are added to it
    dropout: float = 0.0  # while training


@final
@dataclass(frozen=True)
class HeadConfig:
    """From the stream to logits."""

    tied: bool = True  # whether the output table is that of the embeddings
    bias: bool = False  # whether every token has a bias
    # of what the output table reads; d_model if None. A map with `map_bias` leads to it, followed by
    # `activation` and `norm`, which BERT and its like have
    width: int | None = None
    transform: bool = False  # whether there is that map
    outputs: int | None = None  # how many logits there are; one for every token if None
    map_bias: bool = True
    activation: Activation | None = None
    norm: NormConfig | None = None
    input_scale: float = 1.0  # what the output table reads is multiplied by this
    scale: float = 1.0  # logits are multiplied by this
    soft_cap: float | None = None  # c where logits s become `c · tanh(s / c)`; None if they do not


@final
@dataclass(frozen=True)
class LanguageModelArchitecture:
    """A decoder or an encoder, alone or as one half of a model."""

    # "decoder" sees a text causally and predicts the next token; "encoder" sees all of it and predicts
    # something of every token, mostly the token itself
    kind: Literal["decoder", "encoder"]
    d_model: int  # width of the stream
    embeddings: EmbeddingsConfig  # of the tokens
    blocks: tuple[BlockConfig, ...]  # each with weights of its own
    final_norm: NormConfig | None = None  # after the last block; None without
    head: HeadConfig | None = HeadConfig()  # to logits; None where the model ends with the stream
    # numbers of the blocks in the order of their use, where one serves several times; from the first to the
    # last if empty
    order: tuple[int, ...] = ()
    inputs: BlockInputsConfig | None = None  # of the blocks; None where they have none

    def __post_init__(self) -> None:
        if self.order and {*self.order} != {*range(len(self.blocks))}:
            raise ValueError(
                f"the order {list(self.order)} does not use each of the {len(self.blocks)} blocks, 0 to "
                f"{len(self.blocks) - 1}"
            )

    @property
    def uses(self) -> tuple[int, ...]:
        """The number of the block that each layer of the model is a use of, in order."""
        return self.order or tuple(range(len(self.blocks)))

    @property
    def streams(self) -> StreamsConfig | None:
        """The streams between blocks; None where there is one."""
        return self.blocks[0].streams if self.blocks else None


@final
@dataclass(frozen=True)
class EncoderDecoderArchitecture:
    """An encoder and a decoder that attends to what it makes."""

    encoder: LanguageModelArchitecture  # without a head
    decoder: LanguageModelArchitecture  # with cross-attention; its embeddings have the encoder's scale
    shared: bool  # whether both have one table

    def __post_init__(self) -> None:
        source = self.encoder.embeddings
        target = self.decoder.embeddings
        if self.shared and source.vocab_size != target.vocab_size:
            raise ValueError(
                f"one table cannot have {source.vocab_size} source and {target.vocab_size} target "
                "tokens: make the vocabulary joint, or do not share the table"
            )
        if source.scale != target.scale:
            raise ValueError(
                f"source embeddings have the scale {source.scale} and target embeddings {target.scale}: "
                "they must be equal"
            )
