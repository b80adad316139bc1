"""CTranslate2's `Generator`, greedy."""

from collections.abc import Sequence
from typing import final

import ctranslate2

from benchmarks.workers import generation
from benchmarks.workers.generation import Engine
from benchmarks.workers.protocol import Options, serve


@final
class CTranslate2(Engine):
    """Its tokens are the numbers of ours, as texts."""

    def __init__(self, options: Options) -> None:
        self.generator = ctranslate2.Generator(
            options["converted"],
            device="cpu",
            compute_type=options["precision"],
            inter_threads=1,
            intra_threads=options["threads"],
        )

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """No token ends a text."""
        found = self.generator.generate_batch(
            [[str(token) for token in ids] for ids in prompts],
            max_length=new,
            min_length=new,
            end_token=[],
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in found]


if __name__ == "__main__":
    serve(lambda options: generation.prepare(options, CTranslate2))
