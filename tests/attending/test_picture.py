"""Pictures of one head."""

from pathlib import Path
from xml.etree import ElementTree as ET

from attending.viewed import layers_of, long_page, previous
from triptych.running.measuring.weight_maps import HeadWeights
from triptych.seeing.attending.attention_page import ViewedKind
from triptych.seeing.attending.picture import head_svg, is_picture

SVG = "{http://www.w3.org/2000/svg}"


def small(tokens: tuple[str, ...] = ("a", " <b>", "\n")) -> ViewedKind:
    return ViewedKind("decoder", tokens, tokens, layers_of([[HeadWeights.whole(previous(3, 3))]]), 2, 2)


def test_a_picture_has_every_token_twice_and_a_cell_for_every_weight() -> None:
    root = ET.fromstring(head_svg(small(), "head 0"))
    assert [node.text for node in root.iter(f"{SVG}text")] == ["head 0", *("a", "<b>", "↵") * 2]
    # Row 0 and 1 look at the first token alone, row 2 at the first and the second.
    assert [node.text for node in root.iter(f"{SVG}title")][1:] == ["1.000", "1.000", "0.250", "0.750"]


def test_characters_that_xml_cannot_hold_are_escaped() -> None:
    assert r"\u0000" in "".join(ET.fromstring(head_svg(small(("\x00", "\x1b[", "c")))).itertext())


def test_a_long_text_is_drawn_in_groups_of_tokens() -> None:
    kind = long_page(1, 1, 600).texts[0].kinds[0]
    root = ET.fromstring(head_svg(kind))
    assert int(root.attrib["width"]) < 900
    assert {"0", "560"} < {node.text for node in root.iter(f"{SVG}text")}


def test_a_picture_of_ours_is_known_again(tmp_path: Path) -> None:
    data = head_svg(small())
    (tmp_path / "a.svg").write_text(data)
    assert is_picture(tmp_path / "a.svg")
    (tmp_path / "a.svg").write_text(data.replace("triptych", "somebody"))
    assert not is_picture(tmp_path / "a.svg")
