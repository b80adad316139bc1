"""Ours: a checkpoint mapped from its file, continued by an `Engine`."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

from benchmarks.workers import generation
from benchmarks.workers.generation import Engine
from benchmarks.workers.protocol import Options, serve
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.running import decoding
from triptych.running.decoding import GenerationOptions, generate_tokens


@final
class Ours(Engine):
    """Greedy, all prompts in one batch."""

    def __init__(self, options: Options) -> None:
        self.engine = decoding.Engine(load_language_model(Path(options["checkpoint"])), options["precision"])

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """No token ends a text."""
        found = generate_tokens(
            self.engine, prompts, GenerationOptions(max_new_tokens=new), batch_rows=len(prompts)
        )
        return [list(one.ids) for (one,) in found]


if __name__ == "__main__":
    serve(lambda options: generation.prepare(options, Ours))
