"""OpenAI's interface to encoders: `/v1/embeddings`."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from starlette.requests import Request
from starlette.responses import Response
from torch.nn import functional as F

from triptych.core.models import require_finite_values
from triptych.running.decoding import (
    LONGEST_SHOWN,
    check_length,
)
from triptych.running.text import encode_texts
from triptych.serving.answers import json_answer
from triptych.serving.completions import read_token_ids
from triptych.serving.limits import RequestError
from triptych.serving.openai_fields import EMBEDDINGS, check_fields
from triptych.serving.served_models import JobOfEach
from triptych.serving.server import Server


async def embed(server: Server, request: Request) -> Response:
    """Vectors of texts by an encoder: `input` (texts or token ids), `encoding_format` (float or base64).

    A vector is the mean of the last layer over the tokens, those at the ends included, divided by its length.
    """
    fields = await server.fields(request)
    check_fields(fields, EMBEDDINGS)
    model = server.model(fields.get("model"), "run")
    form = fields.get("encoding_format", "float")
    opened = model.model.reader
    if opened.translates or opened.language_model.causal:
        raise RequestError(400, f"{model.name} is not an encoder: it embeds no texts")
    if fields.get("dimensions") not in (
        None,
        width := opened.language_model.architecture.d_model,
    ):
        raise RequestError(400, f"dimensions: {model.name} has {width}; leave it out")
    tokenizer = opened.tokenizer
    texts = await read_token_ids(
        server,
        fields,
        "input",
        lambda text: encode_texts(tokenizer, [text])[0],
        tokenizer.vocab_size,
    )
    for ids in texts:
        check_length(
            "input", len(ids), opened.language_model.max_tokens, None, LONGEST_SHOWN
        )
    # Lengths are checked first, so that one long text fails the whole request before it is computed.
    vectors: list[list[float]] = await server.compute(request, Embedding(model), texts)
    read = sum(map(len, texts))
    server.count_tokens(read, 0)
    usage = {"prompt_tokens": read, "total_tokens": read}

    def record() -> dict[str, Any]:
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if form == "base64" else vector,
            }
            for index, vector in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": model.name, "usage": usage}

    return await json_answer(record)


@final
@dataclass(frozen=True)
class Embedding(JobOfEach):
    """Embeddings of token ids, computed one text at a time."""

    @torch.inference_mode()
    def of(self, given: Sequence[int]) -> list[float]:
        model = self.model.model.reader.language_model.eval()
        read = torch.tensor([list(given)], device=model.embeddings.table.weight.device)
        hidden = model.hidden(read)[0]
        require_finite_values(model, hidden, partial(model.hidden, read))
        found: list[float] = F.normalize(hidden.float().mean(dim=0), dim=0).tolist()
        return found


def _base64(vector: Sequence[float]) -> str:
    """Encode a vector as little-endian float32 in base64."""
    return base64.b64encode(
        torch.tensor(vector).numpy().astype("<f4").tobytes()
    ).decode()


ROUTES = (("POST", "/v1/embeddings", embed),)
