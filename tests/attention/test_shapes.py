"""Modules of which only the shapes are wanted."""

import subprocess
import sys

from triptych.core.algebra.weights import SIDES
from triptych.core.attention import IdentityOV, MultiHeadAttention
from triptych.core.attention.shapes import shapes_only

CODE = """
import sys, triptych
from triptych.seeing.costing import CostSpec
from triptych.training import read_recipe
from triptych.training.layouts import Cluster
triptych.cost(CostSpec(d_model=16, num_heads=2))
triptych.plan(read_recipe("demo"), Cluster(1, device_memory=10**9))
print(sorted({"torch._dynamo", "torch.fx.experimental.symbolic_shapes"} & {*sys.modules}))
"""


def test_shapes_are_those_of_the_layer() -> None:
    whole = MultiHeadAttention(16, 2, IdentityOV())
    with shapes_only():
        outline = MultiHeadAttention(16, 2, IdentityOV())
    assert all(weight.is_meta for weight in outline.parameters())
    shapes = [[link.weight.shape for side in SIDES for link in getattr(one.weights(), side)]
              for one in (whole, outline)]  # fmt: skip
    assert shapes[0] == shapes[1]


def test_no_compiler_is_imported_to_count() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
