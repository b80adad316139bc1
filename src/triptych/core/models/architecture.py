"""Architectures of Transformers as data.

`configuration` converts recipes into these records, `checkpoints` converts configurations of Hugging Face.
`blocks` and the models are built from the records, without knowledge of recipes and families.
"""

from dataclasses import dataclass
from typing import Literal, final

Activation = Literal[
    "relu",
    "gelu",
    "gelu_tanh",
    "gelu_sigmoid",
    "swish",
    "relu_squared",
    "tanh",
    "sigmoid",
    "xielu",
]


@final
@dataclass(frozen=True)
class NormConfig:
    """A normalisation over the width of the model.

    Source: Ba et al. 2016, arXiv 1607.06450; Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    # LayerNorm, `(x − mean) / √(var + eps)`, or RMSNorm, `x / √(mean(x²) + eps)`
    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5  # constant below the root
    weight: bool = True  # True for a weight per channel
    bias: bool = True  # True for a bias per channel; LayerNorm only
    # offset of stored weights: the factor of a channel is `offset + weight`
    offset: float = 0.0


@final
@dataclass(frozen=True)
class FeedForwardConfig:
    """A feed-forward layer.

    `f(x W_1 + b_1) W_2 + b_2`, or gated, `(f(g) ⊙ (u + offset)) W_2 + b_2`, where `g = x W_g + b_g` and
    `u = x W_1 + b_1`.

    Source: gates: Shazeer 2020, arXiv 2002.05202; beta: Ramachandran et al. 2017, arXiv 1710.05941; offset
    and limit: gpt-oss, github.com/openai/gpt-oss.
    """

    d_ff: int  # inner width
    # f. "gelu" is `x Φ(x)`, "gelu_tanh" its approximation by tanh, "gelu_sigmoid" `x σ(1.702 x)`, "swish" `x
    # σ(beta x)`, "relu_squared" `max(0, x)²`; "xielu" is only for feed-forward layers, see `XIELU`
    activation: Activation = "relu"
    gated: bool = False  # True for a gated layer
    bias: bool = True  # True for biases of the inner maps; `out_bias` is for W_2
    out_bias: bool = True
    dropout: float = 0.0  # dropout on the inner activations in training
    beta: float = 1.0  # beta of "swish"
    offset: float = 0.0  # added to u in gated layers
    # limit c of gated layers: g is clipped to at most c, u to [−c, c]; None without a limit
    limit: float | None = None
    # expected share s of zeros of the gate in gated layers: g becomes `max(0, g − mean − Φ⁻¹(s) std)`, with
    # mean and standard deviation over the channels; 0 for no sparsity
    sparsity: float = 0.0


# RMSNorms within a mixture of experts: n₁ to n₅ of `ExpertsConfig`.
EXPERTS_NORMS = ("shared_out", "shared", "out", "experts", "router")


@final
@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: a router chooses a few feed-forward layers for every token.

    The router scores every expert by the map `x W_r + b_r` and the function `scores`. The experts with the
    highest scores are chosen, and their outputs are summed with the scores as weights. If `norm_eps` is
    given, the layer is `n₁(shared(n₂(x))) + n₃(experts(n₄(x)))`, and the router reads `n₅(x) / √d`.

    Source: Shazeer et al. 2017, arXiv 1701.06538; shared experts: Dai et al. 2024, arXiv 2401.06066; groups:
    DeepSeek-AI 2024, arXiv 2405.04434, section 2.2.2; correction: DeepSeek-AI 2024, arXiv 2412.19437, section
    2.1.2; sparsemixer: Liu et al. 2024, arXiv 2409.12136; norms: `Gemma4TextDecoderLayer` of
    github.com/huggingface/transformers, version 5.23.0.
    """

    expert: FeedForwardConfig  # architecture of every expert
    num_experts: int
    top_k: int  # number of chosen experts per token
    # "softmax" over all experts, "sigmoid" of every score, or "sparsemixer": experts are chosen one after the
    # other, by a softmax over the remaining experts near the best score, without noise in training too
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    # True to divide the weights of chosen experts by their sum; "softmax" is then a softmax over the chosen
    # experts
    normalised: bool = False
    min_sum: float = 0.0  # lower bound of that sum
    scale: float = 1.0  # factor of the weights
    # True if the weights multiply inputs of experts instead of outputs
    scale_input: bool = False
    router_bias: bool = False  # True for a bias b_r
    # True for a stored correction per expert, added to scores for the choice but not for the weights
    correction: bool = False
    groups: int = 1  # number of groups of consecutive experts, of equal size
    top_groups: int = 1  # number of groups from which a token may choose
    # score of a group: its best score, or the sum of its two best scores
    group_score: Literal["best", "two_best"] = "best"
    # for "sparsemixer": experts of score s with `best − s > threshold · max(|s|, best)` are left out
    threshold: float = 0.0
    shared: FeedForwardConfig | None = (
        None  # additional layer for every token; None without
    )
    norm_eps: float | None = (
        None  # epsilon of the norms n₁ to n₅; None without these norms
    )
    weighted: bool = False  # True for a learned factor per expert on its weights
    # True for a gate on the output of the shared layer, the sigmoid of a map of the token
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k is {self.top_k}: there are {self.num_experts} experts, choose 1 to all"
            )
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
    """The residual frame around attention or a feed-forward layer f."""

    norm: NormConfig | None = (
        NormConfig()
    )  # "pre": `x + f(norm(x))`; "post": `norm(x + f(x))`; None without
    place: Literal["pre", "post"] = "pre"  # position of `norm`
    # norm of the output of f, before the sum; together with a pre-norm, a sandwich norm
    out_norm: NormConfig | None = None
    scale: float = 1.0  # factor of the output of f
    dropout: float = 0.0  # dropout on the output of f in training
    from_norm: bool = (
        False  # True for a sum with the normalised input instead of the input
    )


@final
@dataclass(frozen=True)
class BlockInputConfig:
    """An additional input of a block: `x + norm((f(x W_g) ⊙ input) W_o)`."""

    width: int  # width of the input
    activation: Activation  # f
    norm: NormConfig


@final
@dataclass(frozen=True)
class BlockInputsConfig:
    """Inputs of the blocks from tokens t and their embeddings x: `(norm(x W / √d) + √w E[t]) / √2`.

    E has w values per token and block; W maps the embedding to as many values.

    Source: "per-layer embeddings" of `modeling_gemma3n.py` and `modeling_gemma4.py` in
    github.com/huggingface/transformers, version 5.23.0.
    """

    vocab_size: int  # rows of E
    width: int  # w
    norm: NormConfig  # norm over the w values of each block


@final
@dataclass(frozen=True)
class StreamsConfig:
    """Several residual streams with one active stream; see `models.streams`."""

    number: int  # number of streams
    active: int  # index of the active stream, the stream of the sub-layers
    scaled: bool  # True for a learned scale per channel of the active stream, for `BlockInputConfig`
    rank: int  # rank of the low-rank residual map
    eps: float  # epsilon of the norms


@final
@dataclass(frozen=True)
class BlockConfig:
    """A block: self-attention, cross-attention if there is any, and a feed-forward layer."""

    attention: SublayerConfig  # frame of the self-attention
    feed_forward: (
        FeedForwardConfig | ExpertsConfig
    )  # feed-forward layer or mixture of experts
    feed_forward_frame: SublayerConfig  # frame of the feed-forward layer
    cross: SublayerConfig | None = None  # frame of the cross-attention; None without
    # True if attention and feed-forward layer read the same stream and their outputs are added together.
    # Without a norm in `feed_forward_frame`, the feed-forward layer has the same input as the attention
    parallel: bool = False
    # number of the block whose keys and values the self-attention uses: an earlier block, or this block if
    # later blocks share its keys and values; None without KV sharing
    keys: int | None = None
    input: BlockInputConfig | None = (
        None  # additional input after the feed-forward layer; None without
    )
    scaled: bool = False  # True for a stored factor of the stream after the block
    streams: StreamsConfig | None = None  # several streams; None for a single stream


@final
@dataclass(frozen=True)
class MaskedTokens:
    """Rescaling for masked tokens, as in ESM: rows of masked tokens are 0, and all rows share a factor.

    The factor is the share of unmasked tokens in training over the share of unmasked tokens in the text.

    Source: `EsmEmbeddings` of github.com/huggingface/transformers.
    """

    token: int  # id of the mask token
    padding: int  # id of the padding token, not counted as a token of the text
    trained: float = 0.15 * 0.8  # share of masked tokens in training


@final
@dataclass(frozen=True)
class EmbeddingsConfig:
    """Embeddings: the map from token ids to the stream."""

    vocab_size: int  # rows of the table
    # width of the table, followed by a map to d_model (with a bias if `map_bias`); if None, d_model without a
    # map. If `map_first`, positions are added after the map
    width: int | None = None
    map_bias: bool = False
    map_first: bool = False
    scale: float = 1.0  # factor of the rows
    positions: Literal["none", "learned", "sinusoidal"] = (
        "none"  # position encoding added to the rows
    )
    num_positions: int = (
        0  # number of learned positions, or stated limit of sinusoidal positions
    )
    position_offset: int = (
        0  # position p is row `p + position_offset` of the learned or sinusoidal table
    )
    # padding token, which default positions do not count: padding has the position before the first token.
    # None to count all tokens
    padding_id: int | None = None
    # see `attention.sinusoidal`
    sinusoidal_layout: Literal["halves", "interleaved", "tensor2tensor"] = "interleaved"
    num_types: int = 0  # rows of the table of segments (token types); 0 without
    masked: MaskedTokens | None = None  # rescaling for masked tokens; None without
    norm: NormConfig | None = None  # norm of the sum; None without
    norm_first: bool = False  # True for a norm before positions are added
    dropout: float = 0.0  # dropout in training


@final
@dataclass(frozen=True)
class HeadConfig:
    """The language-model head: the map from the stream to logits."""

    tied: bool = True  # True if the output table is the table of the embeddings
    bias: bool = False  # True for a bias per token
    # width of the input of the output table; d_model if None. A map (with a bias if `map_bias`), `activation`
    # and `norm` may precede the output table, as in BERT
    width: int | None = None
    transform: bool = False  # True for that map
    outputs: int | None = None  # number of logits; the size of the vocabulary if None
    map_bias: bool = True
    activation: Activation | None = None
    norm: NormConfig | None = None
    input_scale: float = 1.0  # factor of the input of the output table
    scale: float = 1.0  # factor of the logits
    soft_cap: float | None = None  # c in `c · tanh(s / c)` of logits s; None for no cap


# Rows of the stream read by a task head: each token, the first, the last except padding, the next row after
# it, the final row, the last end token, or the mean of tokens ("late": the mean of their logits).
Pooling = Literal["each", "first", "last", "next", "final", "end", "mean", "late"]


@final
@dataclass(frozen=True)
class TaskMapConfig:
    """A map of a task head, `norm(f(x W + b))`."""

    outputs: int
    bias: bool
    activation: Activation | None = None  # f; None for the identity
    norm: NormConfig | None = None


@final
@dataclass(frozen=True)
class TaskHeadConfig:
    """The head of a task: maps from rows of the stream to one logit per label."""

    pooling: Pooling
    maps: tuple[TaskMapConfig, ...]
    labels: tuple[str, ...]  # names of the logits
    token: int | None = None  # padding token of "last" and "next", end token of "end"
    several: bool = False  # True = a text may have several labels
    # True if the decoder input, the text once more, begins with the last token of the text instead of the
    # start token of targets
    wraps: bool = False


@final
@dataclass(frozen=True)
class LanguageModelArchitecture:
    """The architecture of a decoder or an encoder, alone or as one half of a model."""

    # "decoder" attends causally and predicts the next token; "encoder" attends to the whole text and makes a
    # prediction for every token, mostly the token itself
    kind: Literal["decoder", "encoder"]
    d_model: int  # width of the stream
    embeddings: EmbeddingsConfig  # embeddings of the tokens
    blocks: tuple[BlockConfig, ...]  # blocks with separate weights
    final_norm: NormConfig | None = None  # norm after the last block; None without
    # head to logits of tokens; None for a model without such a head
    head: HeadConfig | None = HeadConfig()
    task: TaskHeadConfig | None = None  # head of a task; None without
    # head of a task in addition to the head to logits of tokens; None without
    second: TaskHeadConfig | None = None
    # numbers of the blocks in order of use, for models with repeated blocks; if empty, every block once
    order: tuple[int, ...] = ()
    inputs: BlockInputsConfig | None = None  # additional inputs; None without

    def __post_init__(self) -> None:
        if self.order and {*self.order} != {*range(len(self.blocks))}:
            raise ValueError(
                f"the order {list(self.order)} does not use each of the {len(self.blocks)} blocks, 0 to "
                f"{len(self.blocks) - 1}"
            )

    @property
    def uses(self) -> tuple[int, ...]:
        """Block number for each layer of the model, in order of use."""
        return self.order or tuple(range(len(self.blocks)))

    @property
    def streams(self) -> StreamsConfig | None:
        """The streams between blocks; None for a single stream."""
        return self.blocks[0].streams if self.blocks else None


@final
@dataclass(frozen=True)
class EncoderDecoderArchitecture:
    """The architecture of an encoder and a decoder with cross-attention to the encoder's output."""

    encoder: LanguageModelArchitecture  # architecture without a head
    decoder: LanguageModelArchitecture  # architecture with cross-attention; embedding scale of the encoder
    shared: bool  # True if encoder and decoder share one embedding table

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
