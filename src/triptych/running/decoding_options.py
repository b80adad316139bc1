"""Options of decoding: beam search, sampling, and the generation of texts.

A model is opened and served with these records; the engines that follow them are in `decoding/`.
"""

from dataclasses import dataclass, field

from triptych.errors import UsageError
from triptych.literals import Stop
from triptych.running.token_rules import NO_RULES, TokenRules

# Limits far above practical values; much larger values overflow integers or memory.
LARGEST_BEAM = 10_000
MOST_TOKENS = 10**9
_LARGEST_ALPHA = 10.0
# A lower temperature makes logits too large for float32; a higher one makes all tokens equally probable.
_LEAST_TEMPERATURE = 1e-6
_LARGEST_TEMPERATURE = 1e6
# A factor of 100 decides every choice; a larger one drives logits out of the range of float32.
_LEAST_PENALTY = 0.01
_LARGEST_PENALTY = 100.0


def require_count(name: str, value: int, most: int) -> None:
    """Raise `ValueError` for a number below 1 or above `most`."""
    if not 1 <= value <= most:
        raise ValueError(
            f"{name} is {value}: it must be at least 1, and at most {most:,}"
        )


def require_alpha(alpha: float) -> None:
    """Raise `ValueError` for a negative or too large exponent of the length penalty."""
    if not 0 <= alpha <= _LARGEST_ALPHA:
        raise ValueError(
            f"alpha is {alpha}: it must be at least 0, and at most {_LARGEST_ALPHA:g}"
        )


@dataclass(frozen=True)
class SamplingOptions:
    """Options for choosing the next token. The filters apply in this order."""

    # factor p for tokens already in the text or its prompt: positive logits are divided by p, negative logits
    # multiplied by p; 1 for no penalty. It also affects greedy choices. Source: Keskar et al. 2019,
    # arXiv 1909.05858, section 4.1
    repetition_penalty: float = 1.0
    temperature: float = 0.0  # divisor of logits; 0 chooses the most probable token
    top_k: int | None = None  # keep the k most probable tokens; None for all
    # keep the smallest set of most probable tokens with a total probability ≥ p. Source: Holtzman et al.
    # 2020, arXiv 1904.09751
    top_p: float | None = None
    # keep tokens with a probability ≥ p times the largest probability. Source: Nguyen et al. 2024,
    # arXiv 2407.01082
    min_p: float | None = None
    # keep the tokens with information nearest to the entropy, up to a total probability ≥ p. Source: Meister
    # et al. 2023, arXiv 2202.00666
    typical_p: float | None = None
    rules: TokenRules = NO_RULES  # forbidden next tokens, also for greedy choices

    def __post_init__(self) -> None:
        if (
            self.temperature != 0
            and not _LEAST_TEMPERATURE <= self.temperature <= _LARGEST_TEMPERATURE
        ):
            raise ValueError(
                f"temperature is {self.temperature}: it must be 0, or from {_LEAST_TEMPERATURE} to "
                f"{_LARGEST_TEMPERATURE:g}"
            )
        if not _LEAST_PENALTY <= self.repetition_penalty <= _LARGEST_PENALTY:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}: it must be from {_LEAST_PENALTY} to "
                f"{_LARGEST_PENALTY:g}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: it must be at least 1")
        for name, value in (
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("typical_p", self.typical_p),
        ):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} is {value}: it must be above 0 and at most 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_filter(self) -> bool:
        """True if a filter removes tokens before the draw."""
        return any(
            value is not None
            for value in (self.top_k, self.top_p, self.min_p, self.typical_p)
        )


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search for a translation: beam search, or sampling at a temperature."""

    beam_size: int = 4  # hypotheses kept at every step; 1 is greedy
    alpha: float = 0.6  # exponent of the length penalty; 0 for no penalty
    max_extra_tokens: int = (
        50  # maximum length of an output, minus the length of its source
    )
    num_best: int = 1  # number of returned hypotheses, at most beam_size
    # end of the search for a sentence. "certain": open hypotheses cannot overtake the num_best-th finished
    # hypothesis any more. "full": beam_size hypotheses have finished; most toolkits use this criterion. It
    # takes about half the steps. Greedy search ends at the first finished hypothesis
    stop: Stop = "certain"
    # maximum length of a sentence read at once; None for the model's limit, or 1,024 if it is unlimited
    max_source_tokens: int | None = None
    split: bool = True  # translate the sentences of a line one by one
    # size of n-grams allowed only once in a translation; 0 for no rule, None for the checkpoint's
    no_repeat_ngram_size: int | None = None
    # repetition penalty, for any search; with a temperature, num_best translations are drawn, without a beam
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int = 0  # seed of sampling

    def __post_init__(self) -> None:
        require_count("beam_size", self.beam_size, LARGEST_BEAM)
        require_count("max_extra_tokens", self.max_extra_tokens, MOST_TOKENS)
        require_alpha(self.alpha)
        if self.no_repeat_ngram_size is not None and self.no_repeat_ngram_size < 0:
            raise ValueError(
                f"no_repeat_ngram_size is {self.no_repeat_ngram_size}: it must be at least 0"
            )
        if not self.sampling.is_greedy:
            require_count("num_best", self.num_best, LARGEST_BEAM)
            if self.beam_size > 1:
                raise ValueError(
                    f"beam_size is {self.beam_size}, and a temperature draws translations without a beam: "
                    "give one of them"
                )
        elif not 1 <= self.num_best <= self.beam_size:
            raise ValueError(
                f"num_best is {self.num_best}: it must be between 1 and beam_size ({self.beam_size})"
            )
        if self.max_source_tokens is not None:
            require_count("max_source_tokens", self.max_source_tokens, MOST_TOKENS)


@dataclass(frozen=True)
class GenerationOptions:
    """Options of text generation."""

    max_new_tokens: int = 128  # maximum number of tokens of a continuation
    sampling: SamplingOptions = field(
        default_factory=SamplingOptions
    )  # choice of each token
    seed: int = 0  # seed of sampling
    num_samples: int = (
        1  # continuations of each prompt; a beam returns the best hypotheses
    )
    beam_size: int = 1  # hypotheses of a deterministic beam search; 1 for no beam
    alpha: float = 0.0  # exponent of the beam's length penalty, `((5 + length) / 6)^alpha`; 0 for no penalty
    stop_ids: tuple[int, ...] = ()  # a continuation ends before any of these tokens
    stop_texts: tuple[str, ...] = ()  # a continuation ends before any of these strings
    num_top: int = 0  # most probable tokens reported for each position; 0 with a beam
    # maximum length of a prompt; None for the model's number of positions, or 32,768 if the model is
    # unlimited and reads a prompt whole
    max_prompt_tokens: int | None = None
    max_length: int | None = None  # maximum length of a text, prompt included

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is not None:
            require_count("max_prompt_tokens", self.max_prompt_tokens, MOST_TOKENS)
        require_count("max_new_tokens", self.max_new_tokens, MOST_TOKENS)
        if self.max_length is not None:
            require_count("max_length", self.max_length, MOST_TOKENS)
        require_count("num_samples", self.num_samples, LARGEST_BEAM)
        require_count("beam_size", self.beam_size, LARGEST_BEAM)
        require_alpha(self.alpha)
        # Contradictory options are refused rather than ignored.
        if "" in self.stop_texts:
            raise ValueError(
                "a stop string is empty: it would end every text before it begins"
            )
        if self.beam_size > 1:
            if self.sampling != SamplingOptions():
                raise ValueError(
                    "beam search takes the most probable texts: give no sampling option with it"
                )
            if self.num_samples > self.beam_size:
                raise ValueError(
                    f"num_samples is {self.num_samples}, but a beam of {self.beam_size} holds fewer texts"
                )
        elif self.sampling.is_greedy and self.num_samples > 1:
            raise ValueError(
                "the samples of temperature 0 are all alike: give a temperature above 0"
            )

    def most_new(self, num_prompt: int) -> int:
        """Return the number of tokens that a prompt may grow by."""
        if self.max_length is None:
            return self.max_new_tokens
        if num_prompt >= self.max_length:
            raise UsageError(
                f"the prompt has {num_prompt:,} tokens, and max_length of generation_config.json allows "
                f"{self.max_length:,} in all: give max_new_tokens"
            )
        return min(self.max_new_tokens, self.max_length - num_prompt)
