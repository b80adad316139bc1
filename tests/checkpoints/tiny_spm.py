"""SentencePiece files made by hand: a few lines of protocol buffers, and a double-array trie."""

import struct
from collections.abc import Mapping, Sequence

Piece = tuple[str, float, str]

KINDS = {"unigram": 1, "bpe": 2, "word": 3, "char": 4}
TYPES = {"normal": 1, "unknown": 2, "control": 3, "user_defined": 4, "unused": 5, "byte": 6}
BYTE_PIECES: list[Piece] = [(f"<0x{byte:02X}>", 0.0, "byte") for byte in range(256)]
SPECIALS: list[Piece] = [("<unk>", 0.0, "unknown"), ("<s>", 0.0, "control"), ("</s>", 0.0, "control")]
PIECES: list[Piece] = [
    *SPECIALS,
    ("▁", -1.0, "normal"),
    ("a", -2.0, "normal"),
    ("b", -2.5, "normal"),
    ("c", -3.0, "normal"),
    ("e", -3.0, "normal"),
    ("é", -4.0, "normal"),
    ("f", -3.0, "normal"),
    ("i", -3.0, "normal"),
    (".", -3.5, "normal"),
    ("ab", -1.5, "normal"),
    ("ba", -1.5, "normal"),
    ("aa", -1.25, "normal"),
    ("aba", -0.5, "normal"),
    ("▁a", -1.75, "normal"),
    ("▁ab", -0.75, "unused"),
    ("fi", -1.0, "normal"),
    ("..", -1.0, "normal"),
    ("...", -0.5, "normal"),
    ("<x>", -1.0, "user_defined"),
    ("b c", -1.0, "user_defined"),
]
# The key with the accent, of two characters, stands beside one that is its beginning.
RULES = {
    "\u00a0": " ",
    "\t": " ",
    "ﬁ": "fi",
    "ｅ": "e",
    "e\u0301": "é",
    "ｅ\u0301": "é",
    "\u200b": "",
    "…": "...",
    "\u1100\u1161": "가",
    "ㅤ": " x ",
}


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def block(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def float32(field: int, value: float) -> bytes:
    return varint(field << 3 | 5) + struct.pack("<f", value)


def spm(
    pieces: Sequence[Piece],
    kind: str = "bpe",
    rules: Mapping[str, str] | None = None,
    *,
    byte_fallback: bool = False,
    whitespace_as_suffix: bool = False,
    unk_id: int = 0,
    **normalizer: bool,
) -> bytes:
    """A model file; `normalizer` are flags of the NormalizerSpec."""
    flags = {"add_dummy_prefix": 3, "remove_extra_whitespaces": 4, "escape_whitespaces": 5}
    content = b"".join(
        block(1, block(1, text.encode()) + float32(2, score) + number(3, TYPES[own]))
        for text, score, own in pieces
    )
    trainer = number(3, KINDS[kind]) + number(24, whitespace_as_suffix) + number(35, byte_fallback)
    if unk_id:
        trainer += number(40, unk_id)
    spec = block(1, b"test") + b"".join(number(flags[name], value) for name, value in normalizer.items())
    if rules:
        spec += block(2, charsmap(rules))
    return content + block(2, trainer) + block(3, spec)


def charsmap(rules: Mapping[str, str]) -> bytes:
    """Replacement rules as SentencePiece has them: size, trie, replacements."""
    replacements, values = b"", {}
    for key, replacement in rules.items():
        values[key.encode()] = len(replacements)
        replacements += replacement.encode() + b"\0"
    trie = b"".join(struct.pack("<I", unit) for unit in double_array(values))
    return struct.pack("<I", len(trie)) + trie + replacements


def double_array(values: Mapping[bytes, int]) -> list[int]:
    """A trie as darts-clone stores it, in blocks of 256 units."""
    units: dict[int, int] = {0: 0}
    bases: set[int] = set()  # no two nodes may share theirs: each would have the other's children

    def place(node: int, prefix: bytes) -> None:
        below = {key[len(prefix)] for key in values if key.startswith(prefix) and len(key) > len(prefix)}
        ends = prefix in values
        base = next(
            at
            for at in range(1, 1 << 20)
            if at not in bases and not any(at ^ label in units for label in (*below, *([0] if ends else [])))
        )
        bases.add(base)
        units[node] |= (node ^ base) << 10 | ends << 8
        if ends:
            units[base] = values[prefix] | 1 << 31
        for label in sorted(below):
            units[base ^ label] = label
        for label in sorted(below):
            place(base ^ label, prefix + bytes([label]))

    place(0, b"")
    size = (max(units) // 256 + 1) * 256
    # Empty places have a label that no byte is compared with there.
    return [units.get(i, 1 << 31) for i in range(size)]
