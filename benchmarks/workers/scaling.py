"""How long one of our training steps, or one attention layer, takes at a size.

    {"what": "step", "length": …, "d_model": …, "num_heads": …, "batch": …, "vocab": …, "seconds": …}
    {"what": "attention", "length": …, "d_model": …, "num_heads": …, "batch": …, "seconds": …}

Several sizes may be asked for at once: `{"points": [...]}`. They take turns.
"""

from collections.abc import Callable

import torch

from benchmarks.workers.in_turns import in_turns
from benchmarks.workers.layers import Inputs, Ours, training
from benchmarks.workers.protocol import Answer, Options, Prepared, serve
from benchmarks.workers.training import DROPOUT, NUM_LAYERS, Text
from benchmarks.workers.training_triptych import TrainerLearner
from triptych.cli.process import keep_freed_memory, limit_kernel_cache
from triptych.core.models import DecoderConfig, EncoderConfig, ModelConfig
from triptych.training.corpora.pair_batches import Batch

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prepare(options: Options) -> Prepared:
    """Nothing is built before a request."""
    torch.set_num_threads(options["threads"])

    def work(request: Options) -> Answer:
        calls = {str(i): _call(options, point) for i, point in enumerate(request["points"])}
        samples = in_turns(calls, request["seconds"])
        return {"seconds": [samples[name] for name in calls]}

    return {"threads": torch.get_num_threads()}, work


def _call(options: Options, point: Options) -> Callable[[], object]:
    torch.manual_seed(0)
    if point["what"] == "attention":
        dtype = _DTYPES[options["precision"]]
        layer = Ours(point["d_model"], point["num_heads"])
        layer.module.to(dtype)
        return training(layer, Inputs.of("self", point["batch"], point["length"], point["d_model"], dtype))
    learner = TrainerLearner(options, Text([], [], point["vocab"], 0, 1, 2), _model(point))
    batch = _batch(point)
    return lambda: learner.step(batch)


def _model(point: Options) -> ModelConfig:
    return ModelConfig(
        d_model=point["d_model"],
        d_ff=4 * point["d_model"],
        num_heads=point["num_heads"],
        dropout=DROPOUT,
        encoder=EncoderConfig(num_layers=NUM_LAYERS),
        decoder=DecoderConfig(num_layers=NUM_LAYERS),
    )


def _batch(point: Options) -> Batch:
    """Random ids, no padding."""
    shape = point["batch"], point["length"]
    src, tgt_in, tgt_out = (torch.randint(3, point["vocab"], shape) for _ in range(3))
    return Batch(src, tgt_in, tgt_out, tuple(range(1, shape[0] + 1)), tgt_out.numel())


if __name__ == "__main__":
    limit_kernel_cache()  # as `triptych train` does before it begins
    keep_freed_memory()
    serve(prepare)
