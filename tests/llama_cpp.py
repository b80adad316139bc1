"""llama.cpp as the oracle for GGUF files: its server in this process, and its interface in C in another.

The server takes no encoder with a decoder. `python tests/llama_cpp.py FILE JSON` calls the interface in C,
where a wrong layout of a record would end the process.
"""

import ctypes
import json
import subprocess
import sys
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


def translated(
    path: Path, source: Sequence[int], target: Sequence[int], texts: Sequence[str] = ()
) -> tuple[list[float], list[list[int]]]:
    """The logits after `target` of an encoder with a decoder, and the token ids of texts."""
    found = _asked(path, source=list(source), target=list(target), texts=list(texts))
    return found["logits"], found["ids"]


def encoded(path: Path, ids: Sequence[int]) -> list[list[float]]:
    """The last hidden states of an encoder that an encoder with a decoder leaves."""
    states: list[list[float]] = _asked(path, source=list(ids), target=[], texts=[])["states"]
    return states


def _asked(path: Path, **question: list[Any]) -> dict[str, Any]:
    run = (sys.executable, __file__, str(path), json.dumps(question))
    # What llama.cpp tells on the way is not always UTF-8.
    answer = subprocess.run(run, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    found: dict[str, Any] = json.loads(answer)
    return found


class _Options(ctypes.Structure):
    """Options of a model or a context: larger than either, as they are always the last argument."""

    _fields_ = (("content", ctypes.c_char * 1024),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


def main() -> None:
    """Answer one question in the interface in C."""
    path, asked = sys.argv[1], json.loads(sys.argv[2])
    (file,) = Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(file))
    for name, result, arguments in (
        ("llama_model_default_params", _Options, ()),
        ("llama_context_default_params", _Options, ()),
        ("llama_model_load_from_file", ctypes.c_void_p, (ctypes.c_char_p, _Options)),
        ("llama_init_from_model", ctypes.c_void_p, (ctypes.c_void_p, _Options)),
        ("llama_model_get_vocab", ctypes.c_void_p, (ctypes.c_void_p,)),
        ("llama_batch_get_one", _Batch, (ctypes.POINTER(ctypes.c_int32), ctypes.c_int32)),
        ("llama_encode", ctypes.c_int32, (ctypes.c_void_p, _Batch)),
        ("llama_decode", ctypes.c_int32, (ctypes.c_void_p, _Batch)),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), (ctypes.c_void_p, ctypes.c_int32)),
        ("llama_set_embeddings", None, (ctypes.c_void_p, ctypes.c_bool)),
        ("llama_get_embeddings", ctypes.POINTER(ctypes.c_float), (ctypes.c_void_p,)),
        ("llama_model_n_embd", ctypes.c_int32, (ctypes.c_void_p,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_backend_init()
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    context = library.llama_init_from_model(model, library.llama_context_default_params())
    vocabulary = ctypes.c_void_p(library.llama_model_get_vocab(model))
    if not asked["target"]:
        library.llama_set_embeddings(context, True)
        tokens = (ctypes.c_int32 * len(asked["source"]))(*asked["source"])
        assert library.llama_encode(context, library.llama_batch_get_one(tokens, len(tokens))) == 0
        width = library.llama_model_n_embd(model)
        numbers = library.llama_get_embeddings(context)[: width * len(tokens)]
        print(json.dumps({"states": [numbers[at : at + width] for at in range(0, len(numbers), width)]}))
        return
    for ids, read in ((asked["source"], library.llama_encode), (asked["target"], library.llama_decode)):
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        assert read(context, library.llama_batch_get_one(tokens, len(ids))) == 0
    logits = library.llama_get_logits_ith(context, -1)
    found = []
    for text in asked["texts"]:
        room = (ctypes.c_int32 * 256)()
        content = text.encode()
        count = library.llama_tokenize(
            vocabulary, content, len(content), room, len(room), ctypes.c_bool(True), ctypes.c_bool(True)
        )
        found.append(list(room[:count]))
    size = library.llama_vocab_n_tokens(vocabulary)
    print(json.dumps({"logits": list(logits[:size]), "ids": found}))


if __name__ == "__main__":
    main()
