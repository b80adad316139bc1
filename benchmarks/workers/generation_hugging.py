"""Hugging Face's `generate`, greedy.

Options: `precision` ("fp32", "bf16", or "int8" by torch's dynamic quantization), `attention`, `cache`
("dynamic cache", "static cache"), `compiled`.
"""

from collections.abc import Sequence
from typing import final

import torch
from transformers import AutoModelForCausalLM

from benchmarks.workers import generation
from benchmarks.workers.generation import Engine
from benchmarks.workers.protocol import Options, serve


@final
class Hugging(Engine):
    def __init__(self, options: Options) -> None:
        dtype = torch.bfloat16 if options["precision"] == "bf16" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(
            options["checkpoint"], dtype=dtype, attn_implementation=options["attention"]
        ).eval()
        if options["precision"] == "int8":
            self.model = torch.ao.quantization.quantize_dynamic(self.model, {torch.nn.Linear}, torch.qint8)
        self.cache = {"static cache": "static"}.get(options["cache"])
        if options.get("compiled"):
            self.model.forward = torch.compile(self.model.forward, dynamic=self.cache is None)
        # It compiles by itself with a static cache, where it can; the option above alone is to decide.
        self.model.generation_config.disable_compile = True

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """No token ends a text."""
        ids = torch.tensor(prompts)
        found = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=self.cache,
        )
        return found[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    serve(lambda options: generation.prepare(options, Hugging))
