"""Tensors of a model in ONNX: its initialisers, under their names in PyTorch.

Exporters of PyTorch keep the names of most parameters. Transposed matrices have numeric names; the
module of such a matrix follows from the bias added after it, from the scopes in a node's metadata, or from
the node's name. Names and values are read; the graph is not run.

Source: the format at github.com/onnx/onnx (`onnx.proto`).
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from triptych.core.storage.tensor_file import (
    TensorFile,
    TensorInfo,
    is_possible_shape,
    require_printable_name,
)
from triptych.errors import DataError
from triptych.extras import require_extra
from triptych.untrusted import (
    LocalBytes,
    Stamps,
    shown,
    stays_in_folder,
)

_DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
_EXTERNAL = 1
_SCOPES = "pkg.torch.onnx.name_scopes"
_QUOTED = re.compile(r"'([^']*)'")
# The least numbers of inputs and outputs of operations with a rule.
_LEAST = {
    "Identity": (1, 1),
    "MatMul": (2, 1),
    "Gemm": (2, 1),
    "Gather": (2, 1),
    "Reshape": (2, 1),
    "Softmax": (1, 1),
    "Unsqueeze": (1, 1),
}
# The most sizes of a shape.
_MOST_SIZES = 16
# Fields with the values of tensors without bytes.
_FIELDS = ("float_data", "int32_data", "int64_data", "double_data")
_OF_RUNTIME = "com.microsoft"
# Operations with quantised matrices, or with several maps in one operation.
_UNREAD = {
    **dict.fromkeys(
        (
            "MatMulInteger",
            "QLinearMatMul",
            "DynamicQuantizeMatMul",
            "DequantizeLinear",
            "MatMulNBits",
        ),
        "its matrices are quantised",
    ),
    **dict.fromkeys(
        (
            "Attention",
            "MultiHeadAttention",
            "GroupQueryAttention",
            "EmbedLayerNormalization",
        ),
        "the optimiser of ONNX Runtime has merged its operations",
    ),
}


class _Place(NamedTuple):
    initialiser: str
    is_transposed: bool


@final
class OnnxFile(TensorFile):
    """A file of ONNX, with its external data next to it."""

    def __init__(self, path: Path) -> None:
        require_extra("onnx", "onnx", what="a model in ONNX")
        self.name = str(path)
        self._folder = path.parent
        # The graph stays in memory; large tensors are mostly in separate files.
        self._graph = _graph(path)
        self._initialisers = {one.name: one for one in self._graph.initializer}
        self._refuse_unread()
        self._require_connected()
        self._places = dict(self._named())
        self.infos = {}
        for name, (stored, is_transposed) in self._places.items():
            require_printable_name(name, self.name)
            info = self._info(self._initialisers[stored])
            shape = info.shape[::-1] if is_transposed else info.shape
            self.infos[name] = TensorInfo(info.dtype, shape, info.num_bytes)
        self.paths = [path, *dict.fromkeys(self._external_files())]
        self._stamps = Stamps(self.paths)
        # Shapes are not trusted: a shape must fit the number of bytes.
        for stored, _ in self._places.values():
            self._require_filled(self._initialisers[stored])

    def require_same(self) -> None:
        """Check that the files are unchanged since they were opened."""
        self._stamps.require_same()

    def read(self, name: str) -> Tensor:
        stored, is_transposed = self._places[name]
        found = self._numbers(self._initialisers[stored])
        return found.mT.contiguous() if is_transposed else found

    @property
    def head_width(self) -> int | None:
        """The width of a head, from the shape of queries before the first softmax; None if unknown."""
        softmax = next(
            (node for node in self._graph.node if node.op_type == "Softmax"), None
        )
        if softmax is None:
            return None
        # Breadth first, so that the nearest reshaping of queries or keys to heads is found.
        waiting = deque(softmax.input)
        seen = set[str]()
        while waiting:
            name = waiting.popleft()
            node = self._makers.get(name)
            if node is None or name in seen:
                continue
            seen.add(name)
            if node.op_type == "Reshape":
                shape = self._constant_shape(node.input[1])
                if len(shape) == 4 and shape[-1] > 0:
                    return shape[-1]
            waiting += node.input
        return None

    @property
    def operations(self) -> dict[str, Any]:
        """The first node of each operation."""
        found = dict[str, Any]()
        for node in self._graph.node:
            found.setdefault(node.op_type, node)
        return found

    # Names.

    def _named(self) -> Iterator[tuple[str, _Place]]:
        for name in self._initialisers:
            if not _is_anonymous(name):
                yield name, _Place(name, is_transposed=False)
        for node in self._graph.node:
            match node.op_type:
                case "Identity" if node.input[
                    0
                ] in self._initialisers and not _is_anonymous(node.output[0]):
                    yield node.output[0], _Place(node.input[0], is_transposed=False)
                case "MatMul" | "Gemm" | "Gather":
                    yield from self._weight_of(node)

    def _weight_of(self, node: Any) -> Iterator[tuple[str, _Place]]:
        """Yield the matrix of a node under the name of its module's weight, unless it has that name."""
        is_table = node.op_type == "Gather"
        stored = node.input[0 if is_table else 1]
        matrix = self._initialisers.get(stored)
        module = self._module_of(node)
        if (
            matrix is None
            or len(matrix.dims) != 2
            or not module
            or f"{module}.weight" in self._initialisers
        ):
            return
        # A table shared by several modules is stored under the name of a single module.
        if is_table or _is_anonymous(stored):
            lies_turned = any(one.name == "transB" and one.i for one in node.attribute)
            yield (
                f"{module}.weight",
                _Place(stored, is_transposed=not is_table and not lies_turned),
            )

    def _module_of(self, node: Any) -> str:
        if (
            node.op_type == "Gemm"
            and len(node.input) > 2
            and node.input[2].endswith(".bias")
        ):
            return str(node.input[2]).removesuffix(".bias")
        for after in (
            self._readers.get(node.output[0], ()) if node.op_type == "MatMul" else ()
        ):
            if after.op_type == "Add":
                added = [
                    name
                    for name in after.input
                    if name in self._initialisers and name.endswith(".bias")
                ]
                if added:
                    return str(added[0]).removesuffix(".bias")
        scopes = next(
            (one.value for one in node.metadata_props if one.key == _SCOPES), ""
        )
        return _last_scope(scopes) or _module_in_path(node.name)

    @cached_property
    def _readers(self) -> dict[str, list[Any]]:
        found = dict[str, list[Any]]()
        for node in self._graph.node:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def _makers(self) -> dict[str, Any]:
        found = dict[str, Any]()
        for node in self._graph.node:
            found.update(dict.fromkeys(node.output, node))
        return found

    def _constant_shape(self, name: str) -> list[int]:
        """Return the sizes of a shape, with -1 for input-dependent sizes."""
        node = self._makers.get(name)
        if node is None or node.op_type != "Concat":
            return self._constant(name)
        sizes = list[int]()
        for part in node.input:
            sizes += self._constant(part) or [-1]
        return sizes

    def _constant(self, name: str) -> list[int]:
        """Return the integers of a constant, perhaps behind `Unsqueeze`; an empty list for other tensors."""
        node = self._makers.get(name)
        if node is not None and node.op_type == "Unsqueeze":
            name = node.input[0]
            node = self._makers.get(name)
        stored = self._initialisers.get(name)
        if node is not None and node.op_type == "Constant":
            stored = next(
                (one.t for one in node.attribute if one.name == "value"), None
            )
        if stored is None:
            return []
        info = self._info(stored)
        # Sizes are int64 and few; larger constants are weights.
        if info.dtype != torch.int64 or prod(info.shape) > _MOST_SIZES:
            return []
        return [int(size) for size in self._numbers(stored).flatten()]

    # Numbers.

    def _where(self, stored: Any) -> str:
        return f"{self.name}, tensor {shown(stored.name)}"

    def _info(self, stored: Any) -> TensorInfo:
        dtype = _DTYPES.get(stored.data_type)
        if dtype is None:
            raise DataError(
                f"{self._where(stored)}: its type {stored.data_type} is not supported"
            )
        shape = tuple(stored.dims)
        if not is_possible_shape(shape):
            raise DataError(
                f"{self._where(stored)}: shape {shown([*shape])} is not a valid shape"
            )
        return TensorInfo(dtype, shape, prod(shape) * dtype.itemsize)

    def _require_filled(self, stored: Any) -> None:
        """Check that a tensor has as many values as its shape."""
        info = self._info(stored)
        if stored.data_location == _EXTERNAL:
            self._external(stored, info.num_bytes)
            return
        held = len(stored.raw_data)
        # Values outside the raw bytes are in the field of their type.
        if not held:
            values = max(len(getattr(stored, field)) for field in _FIELDS)
            held = values * info.dtype.itemsize
        if held != info.num_bytes:
            raise DataError(
                f"{self._where(stored)}: {held:,} bytes, where its shape takes {info.num_bytes:,}: the file "
                "is damaged"
            )

    def _numbers(self, stored: Any) -> Tensor:
        # Values are stored in another file, in bytes, or in a list of the field for their type.
        self._require_filled(stored)
        info = self._info(stored)
        if not info.num_bytes:
            return torch.empty(info.shape, dtype=info.dtype)
        if stored.data_location == _EXTERNAL:
            file, start = self._external(stored, info.num_bytes)
            content: Any = file.read(start, info.num_bytes)
        elif stored.raw_data:
            content = bytearray(stored.raw_data)
        else:
            from onnx.numpy_helper import to_array

            found = to_array(stored)
            # torch does not know NumPy's bfloat16.
            if info.dtype == torch.bfloat16:
                found = found.astype("float32")
            return torch.from_numpy(found.copy()).to(info.dtype)
        return torch.frombuffer(content, dtype=info.dtype).reshape(info.shape)

    def _external(self, stored: Any, num_bytes: int) -> tuple[LocalBytes, int]:
        """Return the file with a tensor's bytes, and their offset."""
        # Offset and length are text, and not trusted.
        path, entries = self._external_place(stored)
        file = LocalBytes(path)
        try:
            start = int(entries.get("offset", 0))
            length = int(entries.get("length", num_bytes))
        except ValueError:
            start, length = -1, 0
        if start < 0 or length != num_bytes or start + length > file.size:
            raise DataError(
                f"{self._where(stored)}: its bytes are not in {path}: fetch the file again"
            )
        return file, start

    def _external_place(self, stored: Any) -> tuple[Path, Mapping[str, str]]:
        entries = {one.key: one.value for one in stored.external_data}
        location = entries.get("location", "")
        if not stays_in_folder(location):
            raise DataError(
                f"{self._where(stored)} is in {shown(location)}, outside of its folder"
            )
        return self._folder / location, entries

    def _external_files(self) -> Iterator[Path]:
        for name, _ in self._places.values():
            stored = self._initialisers[name]
            if stored.data_location == _EXTERNAL:
                yield self._external_place(stored)[0]

    def _require_connected(self) -> None:
        """Check the number of inputs and outputs of operations with a rule."""
        for node in self._graph.node:
            inputs, outputs = _LEAST.get(node.op_type, (0, 0))
            if len(node.input) < inputs or len(node.output) < outputs:
                raise DataError(
                    f"{self.name}: an operation {node.op_type} has {len(node.input)} inputs and "
                    f"{len(node.output)} outputs: the file is damaged"
                )

    def _refuse_unread(self) -> None:
        for node in self._graph.node:
            # The maps of ONNX's own operation `Attention` are separate operations.
            is_of_onnx = node.op_type == "Attention" and node.domain != _OF_RUNTIME
            why = None if is_of_onnx else _UNREAD.get(node.op_type)
            if why is not None:
                raise DataError(
                    f"{self.name}: {why} (operation {node.op_type}): give the file that it was made of, or "
                    "the checkpoint"
                )


def _graph(path: Path) -> Any:
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    LocalBytes(path)  # refuses pipes and devices
    try:
        return onnx.load(path, load_external_data=False).graph
    except DecodeError as error:
        raise DataError(
            f"{path}: it is no file of ONNX ({error}): fetch it again"
        ) from None


def _is_anonymous(name: str) -> bool:
    """Return True for a name made by an exporter: `onnx::MatMul_470`, `val_40`, `/m/Constant_output_0`."""
    return "." not in name or name.startswith(("onnx::", "/"))


def _last_scope(scopes: str) -> str:
    """Return the module in the scopes of a node, such as "['', 'm', 'm.q_proj', 'linear']"."""
    names = _QUOTED.findall(scopes)
    return str(names[-2]) if len(names) > 1 else ""


def _module_in_path(name: str) -> str:
    """Return the module in the name of a node, such as "/m/layers/layers.0/q_proj/MatMul"."""
    *modules, _ = name.strip("/").split("/")
    # A list of modules is named once, and again in front of the number of a module in it.
    again = [after.startswith(f"{module}.") for module, after in pairwise(modules)]
    kept = [
        module
        for module, is_again in zip(modules, [*again, False], strict=False)
        if not is_again
    ]
    return re.sub(r"\s", "", ".".join(kept))
