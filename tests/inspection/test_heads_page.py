"""The page of heads at its full size, and in a browser."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from browser import Page
from triptych.seeing.inspection import MEASURES, InspectedLayer
from triptych.seeing.inspection.drawing import render_heads

LAYERS, HEADS, WIDTH = 25, 40, 128
LARGEST = 5_000_000


def inspected_layer(**given: Any) -> InspectedLayer:
    """A layer of a decoder in which only what is given matters."""
    plain: dict[str, Any] = {
        **dict.fromkeys(("stack", "kind", "module", "positions"), "decoder"),
        **{
            key: {}
            for key in ("maps", "subspaces", "cut", "foldable", "broken", "spectra", "angles", "pictures")
        },
        **dict.fromkeys(("layer", "num_key_heads", "d_model", "d_k", "d_v", "parameters", "num_bytes"), 0),
        **{"turns": False, "rotary_pairs": None, "caveats": (), "centred": False},
    }
    return InspectedLayer(**{**plain, **given})


@pytest.fixture(scope="module")
def page() -> str:
    """Of 1,000 heads, as wide as those of Llama."""
    torch.manual_seed(1)

    def rows(largest: float) -> list[list[float]]:
        return (largest * torch.rand(HEADS, WIDTH)).sort(descending=True).values.tolist()

    layers = [
        inspected_layer(
            layer=layer,
            module=f"model.layers.{layer}.self_attn",
            heads=tuple(range(HEADS)),
            num_heads=HEADS,
            figures={m.name: [None, float("inf"), *torch.randn(HEADS - 2).tolist()] for m in MEASURES},
            pictures={side: [["0123456789ab"] * 24] * HEADS for side in ("q", "k", "v")}
            | {"qk": [["0123456789abcdef01234567"] * 24] * HEADS},
            spectra={form: rows(30.0) for form in ("qk", "ov")},
            angles={pair: [row[::-1] for row in rows(90.0)] for pair in ("qk", "qv", "kv")},
        )
        for layer in range(LAYERS)
    ]
    return render_heads(
        "a thousand heads",
        [("a thousand heads", layers)],
        summary=[("", "", ("Made up.",))],
        facts=[("heads", "1,000")],
    )


def test_a_thousand_heads_make_a_page_below_five_megabytes(page: str) -> None:
    assert 1_000_000 < len(page.encode()) < LARGEST


@pytest.fixture
def shown(page: str, tab: Page, tmp_path: Path) -> Page:
    """The page in a browser, and how long it took."""
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    print(f"{len(page):,} bytes shown after {tab.open(file):.2f} s")
    return tab


HEADING = "document.querySelector('#detail h3').textContent"
FOCUS = "document.activeElement.dataset.at ?? document.activeElement.id"


def test_a_browser_shows_the_page_without_complaint_and_asks_for_nothing(shown: Page) -> None:
    assert shown.value("document.querySelectorAll('[role=gridcell]').length") == LAYERS * HEADS
    assert shown.value("document.querySelectorAll('#detail svg path').length") == 5
    assert shown.value("[...document.querySelectorAll('#detail canvas')].map((one) => one.className)") == [
        *("q", "k", "v", "qk")
    ]
    assert shown.value("[...document.querySelectorAll('#detail td')].some((td) => td.textContent === '–')")
    assert {url.split(":")[0] for url in shown.requests} <= {"file", "data"}
    assert shown.complaints == []


def test_a_head_is_chosen_by_the_keyboard_alone(shown: Page) -> None:
    places = []
    for _ in range(3):
        shown.press("Tab")
        places.append(shown.value(FOCUS))
    assert places == ["theme", "measure", "0 0 0"]
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"):
        shown.press(key)
    assert shown.value(HEADING) == "decoder 0, head 0"
    shown.press("Enter")
    assert shown.value(HEADING) == "decoder 1, head 1"
    assert shown.value("[...document.querySelectorAll('#detail td')].some((td) => td.textContent === '∞')")
    assert shown.value("document.querySelectorAll('[aria-selected=true]').length") == 1
    assert shown.value("document.querySelectorAll('[role=gridcell][tabindex=\"0\"]').length") == 1
    # The map is one stop: the next is behind it, and the way back leads to the head.
    shown.press("Tab")
    assert shown.value(FOCUS) not in ("1 1 1", "0 0 0")
    assert shown.complaints == []


# As much of a browser as the page's script needs to draw its maps.
DOM = """
class Node {
  constructor(tag) {
    Object.assign(this, { tag, children: [], dataset: {}, style: { setProperty() {} } });
  }
  setAttribute(name, value) { this[name] = value; }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  addEventListener() {}
  getContext() { return { fillRect() {} }; }
  set textContent(text) { this.children = [text]; }
  get textContent() {
    return this.children.map((child) => (child instanceof Node ? child.textContent : String(child))).join("");
  }
}
const known = new Map();
globalThis.document = {
  getElementById(id) { if (!known.has(id)) known.set(id, new Node(id)); return known.get(id); },
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  addEventListener() {},
  querySelectorAll: () => [],
  querySelector: () => null,
  documentElement: new Node("html"),
};
const colours = { "--zero": "#000000", "--one": "#0000ff" };
globalThis.getComputedStyle = () => ({ getPropertyValue: (name) => colours[name] ?? "#888888" });
globalThis.addEventListener = () => {};
globalThis.matchMedia = () => ({ matches: false });
document.getElementById("report").children = [process.argv[2]];
"""
TOLD = """
const below = (node) => (node instanceof Node ? [node, ...node.children.flatMap(below)] : []);
console.log(JSON.stringify({
  scales: known.get("scales").children.map((scale) => scale.textContent),
  cells: below(known.get("maps")).filter((node) => node.title).map((node) => node.style.background),
}));
"""


def test_figures_of_another_kind_have_a_scale_of_their_own(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on the PATH")

    def layer(pairs: tuple[int, int] | None, *values: float) -> InspectedLayer:
        figures = {"qk_effective_rank": [*values], "ov_effective_rank": [*values]}
        heads = tuple(range(len(values)))
        turns = pairs is not None
        return inspected_layer(
            heads=heads, num_heads=len(heads), figures=figures, turns=turns, rotary_pairs=pairs
        )

    def shown(name: str) -> dict[str, list[str]]:
        page = render_heads(
            "two",
            [("one", (layer(None, 8.0, 32.0),)), ("other", (layer((1, 1), 11.0, 21.0),))],
            measures=[measure for measure in MEASURES if measure.name == name],
        )
        data = page.split('id="report">')[1].split("</script>")[0]
        script = page.split('<script type="module">')[1].split("</script>")[0]
        (tmp_path / "page.mjs").write_text(f"{DOM}\n{script}\n{TOLD}", encoding="utf-8")
        done = subprocess.run(
            [node, tmp_path / "page.mjs", data], capture_output=True, text=True, check=True, timeout=60
        )
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    apart, together = shown("qk_effective_rank"), shown("ov_effective_rank")
    assert [scale.split("median")[0] for scale in apart["scales"]] == ["form:832", "rotary pairs:1121"]
    assert apart["cells"] == ["rgb(0,0,0)", "rgb(0,0,255)"] * 2
    assert [scale.split("median")[0] for scale in together["scales"]] == ["832"]
    assert together["cells"] == ["rgb(0,0,0)", "rgb(0,0,255)", "rgb(0,0,32)", "rgb(0,0,138)"]
