"""CTranslate2 continuing texts in the place of our own engine."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from triptych.converting.ctranslate2 import write_generator
from triptych.decoding import Precision, length_penalty
from triptych.decoding.generation import (
    Finish,
    Generated,
    GenerationOptions,
    NewToken,
    OtherEngine,
    batches_of,
    check_prompts,
    collected,
    limit_of_prompt,
)
from triptych.decoding.sampling import SamplingOptions
from triptych.engines.converted import converted, hash_of
from triptych.engines.ctranslate2 import compute_type, find_place, require_ctranslate2
from triptych.errors import DataError, UsageError
from triptych.models import LanguageModel
from triptych.models.blocks import Block

_Ends = Callable[[int, int], bool]


@final
class CTranslate2Generator(OtherEngine):
    """A decoder-only model that CTranslate2 runs: greedy, or with a beam.

    Attributes:
        max_tokens: longest text (`LanguageModel.context`), as none is read again here; None if there is no
            limit.
    """

    def __init__(
        self,
        model: LanguageModel,
        precision: Precision = "fp32",
        device: str = "auto",
        num_tokens: int | None = None,
    ) -> None:
        """Convert a model, or find it converted, and load it."""
        require_ctranslate2()
        import ctranslate2

        place, index = find_place(device)
        kind = compute_type(precision, place)
        self.max_tokens = model.context
        never = range(model.vocab_size if num_tokens is None else num_tokens, model.vocab_size)
        self._never = [[str(token)] for token in never] or None
        texts = [str(model.architecture), *(_in_full(block) for block in model.blocks)]
        name = f"ctranslate2-{ctranslate2.__version__}-{hash_of(model, texts)}"

        def write(folder: Path) -> None:
            write_generator(model, folder)

        with converted(name, write) as folder:
            try:
                self._generator = ctranslate2.Generator(
                    str(folder),
                    device=place,
                    device_index=index,
                    compute_type=kind,
                    inter_threads=1,
                    intra_threads=torch.get_num_threads(),
                )
            except (RuntimeError, ValueError) as error:
                raise DataError(f"{folder} cannot be read by CTranslate2 ({error}): remove it") from None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions,
        ends: _Ends = lambda row, token: False,
        batch_rows: int = 32,
    ) -> list[list[Generated]]:
        """Continue prompts, those of one length together."""
        self.check(options)
        check_prompts(prompts, self.max_tokens, options.max_prompt_tokens)
        if options.beam_size > 1:
            return [self._beam_search(ids, options) for ids in prompts]
        found: list[list[Generated]] = [[] for _ in prompts]
        # Of prompts of several lengths CTranslate2 takes the ends of the longer ones for tokens that it made.
        for batch in batches_of(prompts, batch_rows, pads=False):
            grown = self._greedy([(i, prompts[i]) for i in batch], options, ends)
            for i in batch:
                found[i] = [collected(grown[i])]
        return found

    def stream(self, prompt: Sequence[int], options: GenerationOptions, ends: _Ends) -> Iterator[NewToken]:
        """Continue a prompt without a beam, token by token."""
        self.check(options)
        check_prompts([prompt], self.max_tokens, options.max_prompt_tokens)
        limit = limit_of_prompt(len(prompt), options.max_new_tokens, self.max_tokens)
        steps = self._generator.generate_tokens(
            [str(token) for token in prompt],
            max_length=limit,
            end_token=list(options.stop_ids),
            suppress_sequences=self._never,
            return_log_prob=True,
        )
        for length, step in enumerate(steps, start=1):
            new = _new_token(0, step, length, limit, options, ends)
            yield new
            if new.finish is not None:
                return

    def logits(self, ids: Int[Tensor, "rows length"]) -> Float[Tensor, "rows length vocab"]:
        """Logits of the token after each of `ids`; on the CPU, and in fp32."""
        found = self._generator.forward_batch([[str(token) for token in row] for row in ids.tolist()])
        return torch.as_tensor(numpy.asarray(found))

    @staticmethod
    def check(options: GenerationOptions) -> None:
        """Check that CTranslate2 has the options."""
        if options.sampling != SamplingOptions():
            raise UsageError(
                "--engine ctranslate2 takes the most probable tokens and draws none: leave out temperature, "
                "filters and repetition penalty, or use --engine triptych"
            )

    def _greedy(
        self, prompts: Sequence[tuple[int, Sequence[int]]], options: GenerationOptions, ends: _Ends
    ) -> dict[int, list[NewToken]]:
        limits = [limit_of_prompt(len(ids), options.max_new_tokens, self.max_tokens) for _, ids in prompts]
        grown: dict[int, list[NewToken]] = {number: [] for number, _ in prompts}

        def take(step: Any) -> bool:
            number = prompts[step.batch_id][0]
            tokens = grown[number]
            if tokens and tokens[-1].finish is not None:
                return True
            limit = limits[step.batch_id]
            tokens.append(_new_token(number, step, len(tokens) + 1, limit, options, ends))
            return tokens[-1].finish is not None

        self._ask([ids for _, ids in prompts], max(limits), options, callback=take)
        return grown

    def _beam_search(self, prompt: Sequence[int], options: GenerationOptions) -> list[Generated]:
        limit = limit_of_prompt(len(prompt), options.max_new_tokens, self.max_tokens)
        k = options.beam_size
        (result,) = self._ask([prompt], limit, options, beam_size=k, num_hypotheses=k, length_penalty=0)
        found = []
        for ids in result.sequences_ids:
            ended = bool(ids) and ids[-1] in options.stop_ids
            texts = [[str(token) for token in (*prompt, *ids)]]
            (scored,) = self._generator.score_batch(texts, max_input_length=0)
            log_probs = tuple(scored.log_probs[-len(ids) :])
            score = sum(log_probs) / length_penalty(len(log_probs), options.alpha)
            finish: Finish = "length" if limit == options.max_new_tokens else "positions"
            own = tuple(ids[:-1] if ended else ids)
            found.append(Generated(own, log_probs, "token" if ended else finish, score))
        return sorted(found, key=lambda one: -one.score)[: options.num_samples]

    def _ask(
        self, prompts: Sequence[Sequence[int]], limit: int, options: GenerationOptions, **more: Any
    ) -> Any:
        return self._generator.generate_batch(
            [[str(token) for token in ids] for ids in prompts],
            max_length=limit,
            end_token=list(options.stop_ids),
            suppress_sequences=self._never,
            return_end_token=True,
            include_prompt_in_result=False,
            return_scores=True,
            **more,
        )


def _in_full(block: nn.Module) -> str:
    """What a block's attention does besides its maps; two that differ are never one text."""
    assert isinstance(block, Block)
    semantics = block.self_attention.semantics
    frequencies = None if semantics.rotary is None else semantics.rotary.frequencies.tolist()
    return f"{semantics} {frequencies}"  # a tensor's text is rounded


def _new_token(
    row: int, step: Any, length: int, limit: int, options: GenerationOptions, ends: _Ends
) -> NewToken:
    token = step.token_id
    finish: Finish | None = None
    if token in options.stop_ids:
        finish = "token"
    elif ends(row, token):
        finish = "text"
    elif length == limit:
        finish = "length" if length == options.max_new_tokens else "positions"
    return NewToken(row, token, step.log_prob, finish)
