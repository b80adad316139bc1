"""llama.cpp in this process, as the oracle for GGUF files."""

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

xllamacpp = pytest.importorskip("xllamacpp", reason="it comes with the extra [dev]")


class LlamaCpp:
    """A model in llama.cpp, with float32 in its cache and plain kernels."""

    def __init__(self, path: Path, context: int = 64, *, embeds: bool = False) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context
        params.n_batch = params.n_ubatch = max(32, context)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup = params.ui = params.fit_params = False
        params.no_extra_bufts = True
        params.verbosity = -1
        if embeds:
            params.embedding = True
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
        self._server = xllamacpp.Server(params)

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        content = json.dumps(body).encode()
        header = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._server.listening_address + path, content, header)
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text; special tokens that it spells are read as tokens."""
        found = self._post("/tokenize", content=text, add_special=special, parse_special=True)
        return list(found["tokens"])

    def hidden(self, ids: Sequence[int]) -> list[list[float]]:
        """The last hidden state of every token."""
        found: Any = self._post("/embedding", content=list(ids))
        return list(found[0]["embedding"])

    def next_tokens(self, ids: Sequence[int], count: int) -> list[int]:
        """The most probable tokens after these, up to one that ends the text."""
        return list(self._complete(ids, count, 0)["tokens"])

    def log_probabilities(self, ids: Sequence[int], size: int) -> dict[int, float]:
        """Log probabilities of the next token; {} where llama.cpp waits for the rest of a character."""
        answer = self._complete(ids, 1, size)
        if len(answer.get("completion_probabilities", ())) != len(answer["tokens"]):
            return {}
        (found,) = answer["completion_probabilities"]
        return {one["id"]: one["logprob"] for one in found["top_logprobs"]}

    def _complete(self, ids: Sequence[int], count: int, probabilities: int) -> dict[str, Any]:
        return self._post(
            "/completion",
            prompt=list(ids),
            n_predict=count,
            temperature=0,
            n_probs=probabilities,
            return_tokens=True,
            cache_prompt=False,
        )
