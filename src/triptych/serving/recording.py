"""Page as a file: one text, with recorded answers instead of a server."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, final

from triptych.errors import TriptychError
from triptych.files import write_text
from triptych.model import Model
from triptych.printable import printable
from triptych.progress import Progress, untold
from triptych.seeing.attending import HeldOutText
from triptych.seeing.reports import make_page, short_name
from triptych.serving.exploring import Explorer, Shown, rounded

_DIGITS = 4
_NEW_TOKENS = 12
# Recorded ranks of W_QK, as shares of d_k.
_RANKS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


class RecordingCost(NamedTuple):
    """Estimated cost of a recording."""

    seconds: float
    bytes: float


@final
class Recording:
    """Recorded answers by question, with the same spelling of questions as in the page's script.

    The file has all attention weights, one row of every head, every row of the most informative head, the
    matrices of every head, and the separate what-ifs of this head, with their loss on the held-out text.
    """

    def __init__(
        self, model: Model, text: str, held_out: HeldOutText | None = None
    ) -> None:
        """Read the text; `estimate` and `write` compute the answers."""
        self.explorer = Explorer(model, held_out=held_out)
        self.name = printable(short_name(model.name))
        self.text = text
        self.answers: dict[str, Any] = {"text": text}
        about = self.explorer.about()
        self.keep(
            "models",
            {},
            {"models": [{"name": self.name, "languages": None, **about}]},
        )
        written = self.write_text(())
        self.target = written["candidates"][0]["text"] if written["candidates"] else ""
        data = self.view("view", ())
        kinds = data["texts"][0]["kinds"]
        self.layers = [(kind, layer) for kind in kinds for layer in kind["layers"]]
        # The head of the what-ifs and of all rows.
        self.telling = next(
            (kind for kind in kinds if kind["kind"] == "cross"), kinds[0]
        )
        at, self.head = self.telling["telling"]
        self.layer = self.telling["layers"][at]["number"]
        self.calls = [*self.what_ifs(self.place(self.layer, self.telling), self.head)]

    def estimate(self) -> RecordingCost:
        """Record the first layer and the first what-if, and estimate the cost of all."""
        layer = self._cost(lambda: self.record_layer(*self.layers[0]))
        what_if = self._cost(lambda: self.record_what_if(self.calls[0]))
        layers, calls = len(self.layers), len(self.calls)
        return RecordingCost(
            layers * layer.seconds + calls * what_if.seconds,
            layers * layer.bytes + calls * what_if.bytes,
        )

    def _cost(self, record: Callable[[], None]) -> RecordingCost:
        size = self.size
        began = time.monotonic()
        record()
        return RecordingCost(time.monotonic() - began, self.size - size)

    @property
    def size(self) -> int:
        """The length of the answers as JSON."""
        return len(json.dumps(self.answers))

    def write(self, path: Path, progress: Progress = untold) -> None:
        """Compute the remaining answers and write a self-contained HTML file."""
        self.view("gallery", ())
        for done, (kind, layer) in enumerate(self.layers):
            progress(f"{kind['kind']} layer {layer['number']}", done, len(self.layers))
            self.record_layer(kind, layer)
        for query in range(len(self.telling["queries"])):
            self.row((), self.telling, self.layer, self.head, query)
        for done, call in enumerate(self.calls):
            progress(f"what if {call}", done, len(self.calls))
            self.record_what_if(call)
        page = make_page("explore.html", title=self.name, answers=self.answers)
        write_text(path, page)

    def record_layer(self, kind: dict[str, Any], layer: dict[str, Any]) -> None:
        """Record one row and the matrices of every head of a layer."""
        for head in layer["heads"]:
            self.row((), kind, layer["number"], head["number"])
            fields = {
                "changes": [],
                "layer": self.place(layer["number"], kind),
                "head": head["number"],
            }
            found = self.explorer.head((), fields["layer"], head["number"])
            self.keep("head", {"model": self.name, **fields}, found)

    def record_what_if(self, call: str) -> None:
        """Record the effect of a what-if, or the reason of its refusal."""
        try:
            self.row((call,), self.telling, self.layer, self.head)
            self.view("view", (call,))
            self.write_text((call,))
            self.compare((call,))
        except TriptychError as error:
            self.answers[f"why {call}"] = str(error)

    def place(self, number: int, kind: dict[str, Any]) -> str:
        """Return the name of a layer in `Model`."""
        is_one_stack = "." not in self.explorer.model.layers[0].name
        return str(number) if is_one_stack else f"{kind['kind']}.{number}"

    def what_ifs(self, layer: str, head: int) -> Iterator[str]:
        """Yield the page's what-ifs for one head."""
        model = self.explorer.model
        place = f"{layer}.{head}"
        others = [
            f"{layer}.{other}"
            for other in range(model[layer].num_heads)
            if other != head
        ]
        yield from (f"ablate({place})", f"even({place})", f"unscaled({place})")
        if others:
            yield f"ablate({' '.join(others)})"
        yield from (
            f"tie({layer}, W_Q, W_K)",
            f"tie({layer}, W_K, W_V)",
            "without_positions()",
        )
        yield from (f"rewrite({name})" for name in self.explorer.about()["exact"])
        d_k = model[place].d_k
        for rank in sorted({max(1, round(share * d_k)) for share in _RANKS}):
            yield f"truncate({place}, {rank})"

    def keep(self, question: str, fields: dict[str, Any], found: Any) -> Any:
        asked = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        self.answers[f"{question} {asked}"] = rounded(found, _DIGITS)
        return found

    def asked(self, changes: tuple[str, ...]) -> dict[str, Any]:
        return {
            "model": self.name,
            "text": self.text,
            "target": self.target,
            "changes": list(changes),
        }

    def write_text(self, changes: tuple[str, ...]) -> Any:
        fields = {
            "model": self.name,
            "text": self.text,
            "changes": list(changes),
            "count": _NEW_TOKENS,
        }
        return self.keep(
            "write", fields, self.explorer.write(self.text, changes, _NEW_TOKENS)
        )

    def view(self, question: str, changes: tuple[str, ...]) -> Any:
        asked = Shown(self.text, self.target, changes)
        found = self.explorer.view(asked, measured=question == "gallery")
        return self.keep(question, self.asked(changes), found)

    def compare(self, changes: tuple[str, ...]) -> None:
        if (text := self.explorer.held_out) is not None:
            fields = {
                "model": self.name,
                "changes": list(changes),
                "parts": text.num_parts,
            }
            self.keep(
                "held_out", fields, self.explorer.compare(changes, text.num_parts)
            )

    def row(
        self,
        changes: tuple[str, ...],
        kind: dict[str, Any],
        number: int,
        head: int,
        query: int | None = None,
    ) -> None:
        last = len(kind["queries"]) - 1
        if query is None:  # the row that the page shows first
            query = min(1, last) if kind["kind"] == "cross" else last
        layer = self.place(number, kind)
        found = self.explorer.row(
            Shown(self.text, self.target, changes), layer, head, query
        )
        self.keep(
            "row",
            {**self.asked(changes), "layer": layer, "head": head, "query": query},
            found,
        )
