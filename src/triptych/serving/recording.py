"""Page as a file: one text, with recorded answers instead of a server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triptych.errors import TriptychError
from triptych.files import write_text
from triptych.model import Model
from triptych.printable import printable
from triptych.progress import Progress, untold
from triptych.seeing.attending import HeldOutText
from triptych.seeing.reports import make_page
from triptych.serving.exploring import Explorer, Shown, rounded

_DIGITS = 4
_NEW_TOKENS = 12
# Recorded ranks of W_QK, as shares of d_k.
_RANKS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


def write_page(
    model: Model,
    text: str,
    path: Path,
    held_out: HeldOutText | None = None,
    progress: Progress = untold,
) -> None:
    """Write the page of one text as a self-contained HTML file.

    The file has all attention weights, one row of every head, every row of the most informative head, the
    matrices of every head, and the separate what-ifs of this head, with their loss on the held-out text.
    """
    name = Path(model.name).name
    recorded = _Recording(
        Explorer(model, held_out=held_out), name, text, progress
    ).answers
    title = f"Explore attention: {printable(name)}"
    write_text(path, make_page("explore.html", title=title, answers=recorded))


class _Recording:
    """Recorded answers by question, with the same spelling of questions as in the page's script."""

    def __init__(
        self, explorer: Explorer, name: str, text: str, progress: Progress
    ) -> None:
        self.explorer = explorer
        self.name = name
        self.text = text
        self.progress = progress
        self.answers: dict[str, Any] = {"text": text}
        about = explorer.about()
        self.keep(
            "models", {}, {"models": [{"name": name, "languages": None, **about}]}
        )
        written = self.write(())
        self.target = written["candidates"][0]["text"] if written["candidates"] else ""
        data = self.view("view", ())
        self.view("gallery", ())
        kinds = data["texts"][0]["kinds"]
        layers = [(kind, layer) for kind in kinds for layer in kind["layers"]]
        for done, (kind, layer) in enumerate(layers):
            progress(f"{kind['kind']} layer {layer['number']}", done, len(layers))
            for head in layer["heads"]:
                self.row((), kind, layer["number"], head["number"])
                fields = {
                    "changes": [],
                    "layer": self.place(layer["number"], kind),
                    "head": head["number"],
                }
                found = explorer.head((), fields["layer"], head["number"])
                self.keep("head", {"model": name, **fields}, found)
        telling = next((kind for kind in kinds if kind["kind"] == "cross"), kinds[0])
        at, head = telling["telling"]
        layer = telling["layers"][at]["number"]
        for query in range(len(telling["queries"])):
            self.row((), telling, layer, head, query)
        calls = [*self.what_ifs(self.place(layer, telling), head)]
        for done, call in enumerate(calls):
            progress(f"what if {call}", done, len(calls))
            try:
                self.row((call,), telling, layer, head)
                self.view("view", (call,))
                self.write((call,))
                self.compare((call,))
            except (
                TriptychError
            ) as error:  # the page shows the reason of a refused what-if
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

    def write(self, changes: tuple[str, ...]) -> Any:
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
