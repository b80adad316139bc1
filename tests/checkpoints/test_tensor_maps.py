"""Maps between stored tensors and ours: undone by their inverses, every number where it belongs."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from triptych.core.checkpoints.layer_map import TRANSPOSED, Named, head_rows, split_rows
from triptych.core.checkpoints.specs import FusedLayout
from triptych.core.checkpoints.stored_layers import MapSizes
from triptych.errors import DataError

LAYOUTS: tuple[FusedLayout, ...] = ("q k v", "by group", "q v k in four parts")


def read(stored: Named, tensors: dict[str, Tensor]) -> Sequence[Tensor]:
    return stored.read(lambda name, shape: tensors[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    groups=st.sampled_from([4, 8]),
    times=st.integers(1, 3),
    width=st.integers(1, 4),
    value_width=st.integers(1, 4),
    transposed=st.booleans(),
    bias=st.booleans(),
)
def test_writing_what_was_read_gives_what_was_stored(
    layout: FusedLayout, groups: int, times: int, width: int, value_width: int, transposed: bool, bias: bool
) -> None:
    heads = groups * times
    rows = heads * width + groups * (width + value_width)
    tensor = torch.arange(float(rows)) if bias else torch.arange(3.0 * rows).view(rows, 3)
    stored = Named(("qkv",))
    if transposed and not bias:
        tensor, stored = tensor.mT.contiguous(), stored.then(TRANSPOSED)
    stored = stored.then(
        split_rows(layout, MapSizes(heads, groups, width, value_width)), head_rows(heads, groups, groups)
    )
    parts = read(stored, {"qkv": tensor})
    assert [(len(part), part.shape[-1]) for part in parts] == [
        *((heads, width), (groups, width), (groups, value_width))
    ]
    written = dict(stored.write(parts))
    assert written.keys() == {"qkv"} == {*stored.names}
    assert torch.equal(written["qkv"], tensor)


def test_rows_go_to_queries_keys_and_values_as_their_layout_says() -> None:
    sizes = MapSizes(4, 2, 1, 1)
    rows = {"qkv": torch.arange(8.0)}
    first, second = (read(Named(("qkv",)).then(split_rows(layout, sizes)), rows) for layout in LAYOUTS[:2])
    assert [part.tolist() for part in first] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert [part.tolist() for part in second] == [[0, 1, 4, 5], [2, 6], [3, 7]]
    third = read(
        Named(("qkv",)).then(split_rows(LAYOUTS[2], MapSizes(4, 4, 1, 1))), {"qkv": torch.arange(12.0)}
    )
    assert [part.tolist() for part in third] == [[0, 3, 6, 9], [2, 5, 8, 11], [1, 4, 7, 10]]
    with pytest.raises(DataError, match="6 heads cannot lie in 4 parts"):
        read(Named(("qkv",)).then(split_rows(LAYOUTS[2], MapSizes(6, 6, 1, 1))), {"qkv": torch.arange(18.0)})
