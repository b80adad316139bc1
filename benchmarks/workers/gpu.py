"""What a GPU gives: products, attention alone, training steps and translations, ours and a peer's in turns.

    {"what": "product", "size": 8192, "seconds": 1}
    {"what": "attention", "batch": …, "length": …, "num_heads": …, "width": …, "causal": …, "seconds": …}
    {"what": "training", "batch": …, "length": …, "compile": …, "seconds": …}
    {"what": "decoding", "checkpoint": …, "source": …, "beam": …, "batch": …, "rounds": …}

Everything in bfloat16. With `{"device": "cpu"}` it runs the same without a GPU, slowly.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import MarianMTModel

from benchmarks.workers import training_marian
from benchmarks.workers.decoding import Output
from benchmarks.workers.decoding_marian import translate_with
from benchmarks.workers.in_turns import in_turns
from benchmarks.workers.pieces import Pieces
from benchmarks.workers.protocol import Answer, Options, Prepared, seconds_of, serve
from benchmarks.workers.training import LABEL_SMOOTHING, Learner, Text
from benchmarks.workers.training_triptych import TrainerLearner
from triptych.core.algebra.semantics import Semantics
from triptych.core.attention import attention
from triptych.core.attention.operation import explain_inputs
from triptych.core.attention.routes import Inputs
from triptych.core.models import PRESETS, ModelConfig
from triptych.running.decoding import Translator
from triptych.running.opening import open_translator
from triptych.training.corpora.pair_batches import Batch

OURS = "triptych"
PEERS = {
    "attention": "torch's scaled_dot_product_attention",
    "training": "Hugging Face MarianMT",
    "decoding": "Hugging Face generate",
}
_VOCAB_SIZE = 37_000


def prepare(options: Options) -> Prepared:
    """Nothing is built before a request."""
    device = torch.device(options["device"])
    torch.set_float32_matmul_precision("high")
    answers: dict[str, Callable[[torch.device, Options], Answer]] = {
        "product": _product,
        "attention": _attention,
        "training": _training,
        "decoding": _decoding,
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name}, lambda request: answers[request["what"]](device, request)


def _waited_for(device: torch.device, call: Callable[[], object]) -> Callable[[], object]:
    """The call, and the end of what it has put on the GPU."""

    def run() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _product(device: torch.device, request: Options) -> Answer:
    a, b = (torch.randn(request["size"], request["size"], device=device).bfloat16() for _ in range(2))
    call = _waited_for(device, lambda: a @ b)
    return {"seconds": in_turns({"product": call}, request["seconds"])["product"]}


def _attention(device: torch.device, request: Options) -> Answer:
    """Forward alone, and forward with backward; and the kernel that ours takes."""
    shape = request["batch"], request["length"], request["num_heads"], request["width"]
    causal = request["causal"]
    q, k, v = (torch.randn(shape, device=device).bfloat16().transpose(1, 2) for _ in range(3))
    upstream = torch.randn_like(q)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=causal).output

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    calls = {OURS: ours, PEERS["attention"]: theirs}
    with torch.no_grad():
        apart = float((ours(q, k, v) - theirs(q, k, v)).abs().max())

    def forward(call: Callable[..., torch.Tensor]) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                call(q, k, v)

        return _waited_for(device, run)

    def both(call: Callable[..., torch.Tensor]) -> Callable[[], object]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return _waited_for(device, lambda: torch.autograd.grad(call(*inputs), inputs, upstream))

    given = Inputs(q, k, v, None, None, causal, Semantics(q.shape[-1] ** -0.5), 0.0)
    passes = {"forward": forward, "forward + backward": both}
    return {
        "seconds": {
            name: in_turns({of: make(call) for of, call in calls.items()}, request["seconds"])
            for name, make in passes.items()
        },
        "largest_difference": apart,
        "kernel": explain_inputs(given, need_weights=False, path="auto").kernel,
    }


def _training(device: torch.device, request: Options) -> Answer:
    """Whole steps of the paper's base model on one batch of random ids; FLOPs as torch counts them."""
    torch.manual_seed(0)
    config = PRESETS[request["preset"]].model_copy(update={"norm": "post"})
    text = Text([], [], _VOCAB_SIZE, 0, 1, 2)
    shape = request["batch"], request["length"]
    src, tgt_in, tgt_out = (torch.randint(3, _VOCAB_SIZE, shape) for _ in range(3))
    batch = Batch(src, tgt_in, tgt_out, tuple(range(1, shape[0] + 1)), tgt_out.numel())
    there = replace(batch, src=src.to(device), tgt_in=tgt_in.to(device), tgt_out=tgt_out.to(device))
    if device.type == "cuda":
        batch = batch.pinned()  # as `triptych train` makes them
    settings = {"device": device.type, "compile": request["compile"], "compiled": request["compile"]}
    ours: Learner = TrainerLearner({**settings, "precision": "bf16"}, text, config)
    theirs = training_marian.build(
        {**settings, "precision": "bf16 autocast", "attention": "sdpa", "sizes": _sizes(config)}, text
    )
    counted = TrainerLearner({"device": device.type, "precision": "bf16"}, text, config)
    with FlopCounterMode(display=False) as counter:
        counted.step(batch)
    del counted
    calls = {
        OURS: _waited_for(device, lambda: ours.step(batch)),
        PEERS["training"]: _waited_for(device, lambda: theirs.step(there)),
    }
    return {
        "seconds": in_turns(calls, request["seconds"]),
        "tokens": batch.num_target_tokens,
        "flops": counter.get_total_flops(),
        "label_smoothing": LABEL_SMOOTHING,
    }


def _sizes(config: ModelConfig) -> Options:
    return {
        "d_model": config.d_model,
        "encoder_layers": config.encoder.num_layers,
        "decoder_layers": config.decoder.num_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
    }


def _extend(outputs: list[Output], call: Callable[[], Sequence[Output]]) -> None:
    outputs.extend(call())


def _decoding(device: torch.device, request: Options) -> Answer:
    """The same lines by both, round by round; ours with its steps recorded as graphs."""
    folder = Path(request["checkpoint"])
    lines = Path(request["source"]).read_text(encoding="utf-8").splitlines()[: request["num_lines"]]
    run = open_translator(folder, device.type)
    translator = Translator(
        run.encoder_decoder,
        run.tokenizers,
        run.search_options(beam_size=request["beam"], stop="full"),
        batch_sentences=request["batch"],
        precision="bf16",
    )
    model: Any = MarianMTModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    translate = translate_with(model.to(device).eval(), Pieces(folder))

    def ours() -> list[Output]:
        return [
            Output(found.text, sum(len(c.pieces) + found.num_pieces for c in found.candidates[:1]))
            for found in translator.translate(lines)
        ]

    def theirs() -> list[Output]:
        size = request["batch"]
        by_length = sorted(lines, key=len, reverse=True)
        batches = [by_length[start : start + size] for start in range(0, len(lines), size)]
        return [output for batch in batches for output in translate(batch, request["beam"])]

    found: dict[str, list[dict[str, float]]] = {OURS: [], PEERS["decoding"]: []}
    calls: dict[str, Callable[[], Sequence[Output]]] = {OURS: ours, PEERS["decoding"]: theirs}
    for number in range(request["rounds"] + 1):
        for name, call in calls.items():
            outputs: list[Output] = []
            seconds = seconds_of(_waited_for(device, partial(_extend, outputs, call)))
            if number:  # the first warms up
                found[name].append({"seconds": seconds, "tokens": sum(output.tokens for output in outputs)})
    return {"rounds": found}


if __name__ == "__main__":
    serve(prepare)
