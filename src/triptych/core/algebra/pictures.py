"""Small pictures of maps and forms: the sizes of blocks of entries.

A picture is a matrix of levels from 0 to 15. A level is the root mean square of a block of entries over the
largest of the picture. Pages draw levels from hexadecimal digits; notebooks show them as PNG files within
HTML.
"""

import base64
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from html import escape
from itertools import islice

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from triptych.printable import table_html

# Resolution of pictures: rows by columns for maps, rows by rows for forms.
ROWS = 24
COLUMNS = 12

_LEVELS = 15
# Colours of levels 0 and 15 in red, green and blue, as on pages.
_ZERO = (0xF4, 0xF1, 0xE8)
_ONE = (0x14, 0x30, 0x4F)
_PIXELS = 6  # size of a block in a notebook
# Number of forms of a batch with a picture.
_MOST_PICTURES = 12


def energies_of_map(
    W: Float[Tensor, "*batch d_in d_out"], columns: int = COLUMNS
) -> Float[Tensor, "*batch rows columns"]:
    """Compute mean squares of blocks of entries, of a matrix or a batch."""
    return (
        _block_means(ROWS, W.shape[-2])
        @ W.square()
        @ _block_means(columns, W.shape[-1]).mT
    )


def energies_of_forms(
    left: Float[Tensor, "forms d_left r"], right: Float[Tensor, "forms d_right r"]
) -> Float[Tensor, "forms rows columns"]:
    """Compute mean squares of blocks of left rightᵀ of each form, by tr(LᵢᵀLᵢ RⱼᵀRⱼ) if cheaper."""
    # Normalise first: squares of very large or small entries overflow or underflow float32.
    tiny = torch.finfo(left.dtype).tiny
    left, right = (
        W / W.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=tiny)
        for W in (left, right)
    )
    if left.shape[-1] ** 2 * ROWS > left.shape[-2] * right.shape[-2]:
        return energies_of_map(left @ right.mT, ROWS)
    one, other = (_products_of_blocks(W).flatten(2) for W in (left, right))
    return (one @ other.mT).clamp(min=0)


def _products_of_blocks(
    W: Float[Tensor, "forms rows width"],
) -> Float[Tensor, "forms blocks width width"]:
    """Compute the mean of wᵀw over the rows w of each block."""
    count = min(ROWS, W.shape[-2])
    if W.shape[-2] % count == 0:
        equal = W.reshape(len(W), count, -1, W.shape[-1])
        products: Tensor = equal.mT @ equal
        return products / equal.shape[-2]
    blocks = W.movedim(-2, 0).tensor_split(count)
    # Blocks may differ by a row: a row of zeros changes no sum.
    padded = pad_sequence([*blocks], batch_first=True).permute(2, 0, 1, 3).contiguous()
    lengths = torch.tensor([len(block) for block in blocks])
    return padded.mT @ padded / lengths[:, None, None]


def levels_of(
    energies: Float[Tensor, "rows columns"],
) -> UInt8[Tensor, "rows columns"]:
    """Return the levels of mean squares, 0 to 15; infinite entries and NaN have level 0."""
    sizes = energies.sqrt().nan_to_num(0.0, 0.0)
    levels = _LEVELS * sizes / sizes.max().clamp(min=torch.finfo(sizes.dtype).tiny)
    return levels.round().to(torch.uint8)


def map_html(name: str, W: Float[Tensor, "d_in d_out"]) -> str:
    """Return a picture of a map for a notebook."""
    W = W.detach().float().cpu()
    largest = W.abs().max().clamp(min=torch.finfo(W.dtype).tiny)
    return _picture_html(name, levels_of(energies_of_map(W / largest)))


def form_html(
    name: str, left: Float[Tensor, "d_left r"], right: Float[Tensor, "d_right r"]
) -> str:
    """Return a picture of the form left rightᵀ for a notebook."""
    factors = (W.detach().float().cpu()[None] for W in (left, right))
    (energies,) = energies_of_forms(*factors)
    return _picture_html(name, levels_of(energies))


def form_in_notebook(
    left: Float[Tensor, "*batch d_left r"], right: Float[Tensor, "*batch d_right r"]
) -> str:
    """Return a form for a notebook: its sizes, with pictures of the form and its factors, or of a batch."""
    *batch, d_left, width = left.shape
    rows = [
        ("form", " × ".join(map(str, (*batch, d_left, right.shape[-2])))),
        ("width", str(width)),
        ("dtype", str(left.dtype)),
        ("device", str(left.device)),
    ]
    return table_html("BilinearForm", rows) + pictures_html(
        _pictures_of_form(left, right)
    )


def _pictures_of_form(left: Tensor, right: Tensor) -> list[str]:
    if left.is_meta or right.is_meta:
        return []
    if left.ndim == 2:
        whole = form_html("left rightᵀ", left, right)
        return [map_html("left", left), map_html("right", right), whole]
    forms = zip(left.flatten(0, -3), right.flatten(0, -3), strict=True)
    first = islice(forms, _MOST_PICTURES)
    return [form_html(str(number), *factors) for number, factors in enumerate(first)]


def pictures_html(pictures: Sequence[str]) -> str:
    """Return pictures next to each other, with a line on their meaning."""
    if not pictures:
        return ""
    rows = "rows are channels of the input; columns are channels of the head, or for forms of the other side"
    return (
        '<div style="display: flex; flex-wrap: wrap; gap: 12px">'
        f"{''.join(pictures)}</div><p><small>Sizes of blocks of entries, darker for larger, each by its own "
        f"largest; {rows}.</small></p>"
    )


def _picture_html(name: str, levels: UInt8[Tensor, "rows columns"]) -> str:
    height, width = (_PIXELS * size for size in levels.shape)
    data = base64.b64encode(_png(levels)).decode("ascii")
    return (
        f'<figure style="margin: 0"><figcaption>{escape(name)}</figcaption>'
        f'<img alt="sizes of the entries of {escape(name)}" width="{width}" height="{height}" '
        f'style="image-rendering: pixelated" src="data:image/png;base64,{data}"></figure>'
    )


def _png(levels: UInt8[Tensor, "rows columns"]) -> bytes:
    """Return a PNG file with a pixel per level and a palette of 16 colours."""
    height, width = levels.shape
    palette = b"".join(map(_colour_of, range(_LEVELS + 1)))
    # Every row begins with its filter, 0: none.
    rows = b"".join(b"\0" + bytes(row) for row in levels.tolist())
    indexed = 3  # colour type: indices into the palette
    header = struct.pack(">IIBBBBB", width, height, 8, indexed, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def _colour_of(level: int) -> bytes:
    share = level / _LEVELS
    mixed = (zero + (one - zero) * share for zero, one in zip(_ZERO, _ONE, strict=True))
    return bytes(map(round, mixed))


@cache
def _block_means(count: int, length: int) -> Float[Tensor, "blocks length"]:
    """Return a matrix for averages over blocks of nearly equal size: `[blocks, length]`."""
    blocks = torch.arange(length).tensor_split(min(count, length))
    return torch.stack(
        [torch.zeros(length).index_fill(0, block, 1 / len(block)) for block in blocks]
    )
