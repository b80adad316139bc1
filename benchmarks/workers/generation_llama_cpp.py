"""llama.cpp as the wheel `xllamacpp` has it, greedy: the engine of its server, called without HTTP.

Its files are written by `generation_checkpoint`, where a token's text is its number.
"""

from collections.abc import Sequence
from typing import final

import xllamacpp

from benchmarks.workers import generation
from benchmarks.workers.generation import Engine
from benchmarks.workers.protocol import Options, serve


@final
class LlamaCpp(Engine):
    """A server for each number of prompts, with a slot for each; to stop one that was never asked hangs."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.servers: dict[int, xllamacpp.Server] = {}
        self._server(1)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """No token ends a text."""
        found = self._server(len(prompts)).handle_completions(
            {
                "prompt": [list(ids) for ids in prompts],
                "max_tokens": new,
                "samplers": ["top_k"],
                "top_k": 1,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        choices = sorted(found["choices"], key=lambda choice: choice["index"])
        return [[int(token) for token in choice["text"].split()] for choice in choices]

    def _server(self, batch: int) -> xllamacpp.Server:
        if batch not in self.servers:
            params = xllamacpp.CommonParams()
            params.model.path = f"{self.options['gguf']}/{self.options['precision']}.gguf"
            params.n_ctx, params.n_parallel = batch * self.options["positions"], batch
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.options["threads"]
            if self.options["precision"] == "fp32":  # keys and values are fp16 otherwise
                params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.cache_ram_mib, params.verbosity = 0, -1
            self.servers[batch] = xllamacpp.Server(params)
        return self.servers[batch]


if __name__ == "__main__":
    serve(lambda options: generation.prepare(options, LlamaCpp))
