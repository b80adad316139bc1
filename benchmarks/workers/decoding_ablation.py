"""Ours with one lever off: `{"off": LEVER, …}`, or "nothing"; else as `decoding_triptych`."""

from benchmarks.workers import decoding
from benchmarks.workers.decoding import Engine
from benchmarks.workers.decoding_triptych import Ours
from benchmarks.workers.protocol import Options, serve
from triptych.running.decoding.sentence_decoder import SentenceDecoder

IN_BF16, IN_FP32 = "int8 (bf16)", "int8 (fp32)"
WORKERS, STOP, ORDER = "workers (one thread)", "stop when full (certain)", "lines of like length together"
LEVERS = (IN_BF16, IN_FP32, WORKERS, STOP, ORDER)


def build(options: Options) -> Engine:
    """Ours, without a lever."""
    off = options["off"]
    changed = {
        **options,
        "precision": {IN_BF16: "bf16", IN_FP32: "fp32"}.get(off, "int8"),
        "workers": 1 if off == WORKERS else options["workers"],
        "stop": "certain" if off == STOP else "full",
    }
    if off == ORDER:
        SentenceDecoder.batches = _as_they_come  # type: ignore[method-assign, assignment]
    return Ours(changed)


def _as_they_come(self: SentenceDecoder, sentences: list[list[int]]) -> list[list[int]]:
    size = self.batch_sentences or len(sentences)
    return [[*range(i, min(i + size, len(sentences)))] for i in range(0, len(sentences), size)]


if __name__ == "__main__":
    serve(lambda options: decoding.prepare(options, build))
