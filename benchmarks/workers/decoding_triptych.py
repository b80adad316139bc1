"""Ours: `open_translator` on the Marian checkpoint, a `Translator` with its own worker processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch

from benchmarks.workers import decoding
from benchmarks.workers.decoding import Engine, Output
from benchmarks.workers.protocol import Options, serve
from triptych.running.decoding import Translator
from triptych.running.opening import open_translator


@final
class Ours(Engine):
    """A translator at a time: its way to search is fixed when its workers start."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options["threads"])
        self.options = options
        self.run = open_translator(Path(options["checkpoint"]), "cpu")
        self.made_for: tuple[int, int] | None = None
        self.translator: Translator | None = None

    def get_ready(self, beam: int, batch: int) -> bool:
        """Put the translator together if it is another one that is asked for; the one place for settings."""
        if self.made_for == (beam, batch):
            return False
        if self.translator is not None:
            self.translator.close()
        self.translator = Translator(
            self.run.encoder_decoder,
            self.run.tokenizers,
            # "full", the rule of CTranslate2, and nearly that of generate.
            self.run.search_options(beam_size=beam, stop=self.options.get("stop", "full")),
            batch_sentences=batch,
            precision=self.options["precision"],
            workers=self.options["workers"],
        )
        self.translator.start_workers()
        self.made_for = beam, batch
        return True

    def translate(self, lines: Sequence[str], beam: int, batch: int) -> list[Output]:
        """Lines in their order."""
        assert self.translator is not None
        return [
            Output(found.text, sum(len(c.pieces) + found.num_pieces for c in found.candidates[:1]))
            for found in self.translator.translate(lines)
        ]


if __name__ == "__main__":
    serve(lambda options: decoding.prepare(options, Ours))
