"""The picture of the first screen: one sentence translated with a layer of attention on, and with it off.

`python docs/pictures/first_screen.py` draws `first-screen-light.svg` and `first-screen-dark.svg` anew.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from torch import Tensor

import triptych
from triptych.seeing.attending.alignment import word_weights

TEXT, LAYER = "Der Zug kommt um halb vier an.", "cross.1"
LOOKS = {
    "light": {
        "ink": "#1f2328",
        "soft": "#656d76",
        "cell": "9, 105, 218",
        "line": "#d0d7de",
        "mark": "#bc4c00",
    },
    "dark": {
        "ink": "#e6edf3",
        "soft": "#8d96a0",
        "cell": "88, 166, 255",
        "line": "#30363d",
        "mark": "#f0883e",
    },
}
WIDTH, HEIGHT, CELL = 780, 392, 26
TOP, LEFT, PANEL = 112, 78, 390
FONT = "-apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


def map_of_words(model: triptych.Model) -> tuple[list[str], list[str], Tensor]:
    """Return source words, translated words, and weights `[target, source]`: the mean of all heads."""
    found = model.attend(TEXT)
    aligned = found.words()
    weights = word_weights(found[LAYER].mean(dim=0), aligned.source, aligned.target)
    return [word.text for word in aligned.source], [word.text for word in aligned.target], weights


def panel(
    x: int, look: dict[str, str], source: list[str], target: list[str], weights: Tensor | None, output: str
) -> Iterator[str]:
    """Draw a switch, the map of the layer (empty where it is off), and the translation."""
    on = weights is not None
    yield f'<g transform="translate({x}, 0)" fill="{look["ink"]}">'
    yield (
        f'<rect x="{LEFT}" y="14" width="34" height="18" rx="9" fill="{look["mark"] if on else "none"}" '
        f'stroke="{look["mark"]}"/><circle cx="{LEFT + (25 if on else 9)}" cy="23" r="6" '
        f'fill="{"#ffffff" if on else look["mark"]}"/>'
    )
    yield f'<text x="{LEFT + 44}" y="28" font-weight="600">{LAYER} {"on" if on else "off"}</text>'
    for column, word in enumerate(source):
        at = LEFT + CELL * (column + 0.5)
        yield f'<text transform="translate({at}, {TOP - 8}) rotate(-45)">{escape(word)}</text>'
    for row, word in enumerate(target):
        y = TOP + CELL * row
        yield f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(word)}</text>'
        for column in range(len(source)):
            # Shades are the square root of the weight, as on the page of attention.
            shade = 0.0 if weights is None else float(weights[row, column]) ** 0.5
            yield (
                f'<rect x="{LEFT + CELL * column}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="3" '
                f'fill="rgb({look["cell"]})" fill-opacity="{shade:.2f}" stroke="{look["line"]}"/>'
            )
    before, _, last = output.removesuffix(".").rpartition(" ")
    yield (
        f'<text x="20" y="{HEIGHT - 16}" font-size="17">{escape(before)} '
        f'<tspan font-weight="700" fill="{look["mark"]}">{escape(last)}</tspan>.</text></g>'
    )


def draw(look: dict[str, str], model: triptych.Model) -> str:
    """Return the picture as SVG."""
    source, target, weights = map_of_words(model)
    off = model.ablate(LAYER)
    outputs = [one.translate(TEXT).text for one in (model, off)]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="14">',
            f"<title>{escape(TEXT)} On: {escape(outputs[0])} Off: {escape(outputs[1])}</title>",
            *panel(0, look, source, target, weights, outputs[0]),
            *panel(PANEL, look, source, map_of_words(off)[1], None, outputs[1]),
            "</svg>\n",
        ]
    )


def main() -> None:
    model = triptych.load("demo")
    for name, look in LOOKS.items():
        path = Path(__file__).with_name(f"first-screen-{name}.svg")
        path.write_text(draw(look, model), encoding="utf-8")


if __name__ == "__main__":
    main()
