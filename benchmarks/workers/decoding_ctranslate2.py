"""CTranslate2 on the checkpoint that its own converter made."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import ctranslate2

from benchmarks.workers import decoding
from benchmarks.workers.decoding import Engine, Output
from benchmarks.workers.pieces import Pieces
from benchmarks.workers.protocol import Options, serve

_LONGEST = 200  # generation_config's


@final
class CTranslate2(Engine):
    """It sorts, cuts into batches and shares out among its workers itself."""

    def __init__(self, options: Options) -> None:
        self.translator = ctranslate2.Translator(
            options["converted"],
            device="cpu",
            compute_type=options["precision"],
            inter_threads=options["workers"],
            intra_threads=options["threads"],
        )
        self.pieces = Pieces(Path(options["checkpoint"]))

    def translate(self, lines: Sequence[str], beam: int, batch: int) -> list[Output]:
        """Lines in their order."""
        found = self.translator.translate_batch(
            [self.pieces.split(line) for line in lines],
            beam_size=beam,
            max_batch_size=batch,
            max_decoding_length=_LONGEST,
        )
        made = [result.hypotheses[0] for result in found]
        return [Output(self.pieces.join(some), len(some) + 1) for some in made]


if __name__ == "__main__":
    serve(lambda options: decoding.prepare(options, CTranslate2))
