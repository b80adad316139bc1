"""What the command was asked for, as the tables see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.race import Contender, Race


class NotHereError(Exception):
    """A table needs something that this machine has not; the message says what."""


@dataclass(frozen=True)
class Command:
    """What the command was asked for.

    Attributes:
        root: the repository.
        python: of the environment with the peers.
        rounds: of every final.
        quick: a try: small sizes, few steps, figures worth nothing.
        only: names, or beginnings of names, of the contenders wanted; all if empty.
        threads: of every contender where the table does not say otherwise.
        compiled: whether torch.compile is tried for peers in training, which takes up to ten minutes each.
        steps: of the loss curves.
        lengths: of the attention table; likewise `kinds`, `dtypes`.
        console: where it says how it goes.
        results: folder of the JSON files.
    """

    root: Path
    python: Path
    rounds: int
    quick: bool
    only: tuple[str, ...]
    threads: int
    results: Path
    compiled: bool
    steps: int
    lengths: tuple[int, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    console: Console

    @property
    def work(self) -> Path:
        """For what is prepared, and for logs."""
        return self.root / ".bench" / "work"

    @property
    def shared(self) -> Path:
        """Real text and checkpoints, where they are."""
        return self.root.parent / "shared"

    def tell(self, line: str) -> None:
        """Say how it goes."""
        self.console.print(f"  {line}", highlight=False, markup=False)

    def race(self, told: Mapping[str, Any]) -> Race:
        """Workers that are told this."""
        return Race(
            python=self.python,
            root=self.root,
            logs=self.work / "logs",
            told=told,
            tell=self.tell,
        )

    def chosen(self, contenders: Sequence[Contender]) -> list[Contender]:
        """Those wanted; ours always, for the ratios. A try looks at two alternatives a stage."""
        wanted = [name.lower() for name in self.only]
        return [
            replace(contender, stages=tuple(s[:2] for s in contender.stages)) if self.quick else contender
            for contender in contenders
            if not wanted
            or contender.name.startswith("triptych")
            or any(contender.name.lower().startswith(name) for name in wanted)
        ]
