"""Tensors by name: what the format's own writer wrote, and files that lie."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from triptych.core.storage.tensors import open_tensors
from triptych.errors import DataError
from triptych.untrusted import LocalBytes, read_json

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.randn(4, 5, dtype=torch.float64),
    "half": torch.randn(7).half(),
    "brain": torch.randn(3, 1, 2).bfloat16(),
    "eight": torch.randn(4).to(torch.float8_e4m3fn),
    "ids": torch.tensor([[1, -2]]),
    "flags": torch.tensor([True, False]),
    "number": torch.tensor(3.0),
    "none": torch.zeros(0, 4),
}


def entry(start: int, end: int, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def assert_holds(path: Path, expected: dict[str, Tensor]) -> None:
    found = open_tensors(path)
    assert set(found.infos) == set(expected)
    for name, tensor in expected.items():
        info, read = found.infos[name], found.read(name)
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        assert info.num_bytes == tensor.numel() * tensor.element_size()
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.float(), tensor.float())


def test_a_safetensors_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_holds(tmp_path, TENSORS)
    assert_holds(tmp_path / "model.safetensors", TENSORS)


def test_only_the_bytes_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"big": torch.zeros(1000, 1000), "small": torch.ones(3)}, tmp_path / "model.safetensors")
    read = 0
    original = LocalBytes.read

    def counted(self: LocalBytes, start: int, length: int) -> bytearray:
        nonlocal read
        read += length
        return original(self, start, length)

    monkeypatch.setattr(LocalBytes, "read", counted)
    assert open_tensors(tmp_path).read("small").tolist() == [1, 1, 1]
    assert read < 1000


@pytest.mark.parametrize("zipped", [True, False])
def test_an_old_torch_file_is_read(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    tensors = {name: tensor for name, tensor in TENSORS.items() if zipped or name != "eight"}  # newer than it
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    assert_holds(tmp_path, tensors)
    torch.save({"state_dict": tensors, "epoch": 3}, path)
    assert_holds(path, tensors)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_are_put_together(tmp_path: Path, kind: str) -> None:
    stem = "model" if kind == "safetensors" else "pytorch_model"
    shards = [dict(list(TENSORS.items())[:4]), dict(list(TENSORS.items())[4:])]
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-0000{number}-of-00002.{kind}"
        if kind == "safetensors":
            save_file(shard, tmp_path / name)
        else:
            torch.save(shard, tmp_path / name)
        index |= dict.fromkeys(shard, name)
    (tmp_path / f"{stem}.{kind}.index.json").write_text(json.dumps({"weight_map": index}))
    assert_holds(tmp_path, TENSORS)


# Files that lie. Each is refused in one line that names the file.


def one(start: int, end: int, data: int = 4, **of: Any) -> tuple[dict[str, Any], int]:
    """A header with the entry of one tensor, and the number of bytes behind it."""
    return {"a": entry(start, end, **of)}, data


TWINS = "{" + ",".join(f'"{i}":0' for i in range(200_000)) + ',"0":0}'
# The header with the number of bytes behind it, or the whole file; and what is said of it.
HEADERS: dict[str, tuple[tuple[Any, int] | bytes, str]] = {
    "empty": (b"", "0 bytes are no safetensors file"),
    "seven bytes": (b"\0" * 7, "7 bytes are no safetensors file"),
    "no header": (b"\0" * 8, "not JSON"),
    "length past the end": (struct.pack("<Q", 1 << 40) + b"{}", "header should have 1,099,511,627,776"),
    "length of all ones": (struct.pack("<Q", (1 << 64) - 1) + b"{}", "header should have"),
    "not JSON": ((b"{nonsense", 0), "not JSON"),
    "not text": ((b"\xff\xfe\xfd", 0), "not JSON"),
    "a list": (([], 0), "record was expected, not a list"),
    "nested": ((b"[" * 100_000, 0), "nested too deeply"),
    "nested record": ((b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 0), "nested too deeply"),
    "twins": ((b'{"a": {}, "a": {}}', 0), "a is there twice"),
    "entry no record": (({"a": 3}, 0), "tensor a: its header entry is no record"),
    "unknown dtype": (one(0, 4, dtype="F31"), "dtype F31 is not one of"),
    "dtype a list": (one(0, 4, dtype=["F32"]), "is not one of"),
    "negative size": (one(0, 4, shape=[-1]), "not a list of sizes"),
    "size a fraction": (one(0, 4, shape=[1.0]), "not a list of sizes"),
    "size true": (one(0, 4, shape=[True]), "not a list of sizes"),
    "negative offset": (one(-4, 0), "not a start and an end"),
    "backwards": (one(4, 0), "not a start and an end"),
    "one offset": (({"a": entry(0, 4) | {"data_offsets": [0]}}, 4), "not a start and an end"),
    "past the end": (one(0, 8, shape=[2]), "truncated; fetch it again"),
    "too many bytes": (one(0, 8, 8), "takes 4 bytes, and it has 8"),
    "huge shape": (one(0, 4, shape=[1 << 40, 1 << 40]), "takes 4,835,703,278,458,516,698,824,704 bytes"),
    "a longer side than there is": (one(0, 0, 0, shape=[0, 1 << 70]), "is not a valid shape"),
    "too many sides": (one(0, 4, shape=[1] * 65), "is not a valid shape"),
    "more bytes than can be written": (one(0, 4, shape=[10**18] * 300), "is not a valid shape"),
    "thousands of digits": (one(0, 10**4000), "and it has"),
    "many twins": ((TWINS.encode(), 4), "0 is there twice"),
    "overlapping": (({"a": entry(0, 8, shape=[2]), "b": entry(4, 8)}, 8), "tensors a and b share bytes"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    content, reason = HEADERS[case]
    if not isinstance(content, bytes):
        header, size = content
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + bytes(size)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"model\.safetensors") as refusal:
        open_tensors(tmp_path)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_shrinks_behind_our_back_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    found = open_tensors(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="was written anew while it was open"):
        found.read("a")


class Malice:
    """Would leave a file behind if it were run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    trace = tmp_path / "it ran"
    torch.save({"a": Malice(trace)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(DataError, match="refused without running it"):
        open_tensors(tmp_path)
    assert not trace.exists()


def test_a_bare_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "it ran"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Malice(trace)))
    with pytest.raises(DataError, match=r"pytorch_model\.bin"):
        open_tensors(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"a": 3}, {3: torch.zeros(1)}], ids=str)
def test_a_torch_file_without_named_tensors_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pytorch_model\.bin"):
        open_tensors(tmp_path)


def test_a_torch_tensor_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(1000, 1000)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match="tensor a: it claims more numbers than it holds"):
        open_tensors(tmp_path)


def test_parameters_in_a_torch_file_are_read_as_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.nn.Parameter(torch.ones(3))}, tmp_path / "pytorch_model.bin")
    found = open_tensors(tmp_path).read("a")
    assert not found.requires_grad
    assert found.tolist() == [1, 1, 1]


def test_a_torch_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path)
    whole = path.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"pytorch_model\.bin cannot be read as weights"):
            open_tensors(tmp_path)


INDEXES: dict[str, tuple[Any, str]] = {
    "no map": ({}, "has no weight_map"),
    "empty map": ({"weight_map": {}}, "has no weight_map"),
    "map a list": ({"weight_map": ["a"]}, "has no weight_map"),
    "up": ({"weight_map": {"a": "../secret.safetensors"}}, "no file of that folder"),
    "up in the middle": ({"weight_map": {"a": "x/../../secret.safetensors"}}, "no file of that folder"),
    "up, backwards": ({"weight_map": {"a": "..\\secret.safetensors"}}, "no file of that folder"),
    "absolute": ({"weight_map": {"a": "/etc/passwd"}}, "no file of that folder"),
    "a drive": ({"weight_map": {"a": "C:\\secret.safetensors"}}, "no file of that folder"),
    "a control character": ({"weight_map": {"a": "x\n\x1b]0;.safetensors"}}, "no file of that folder"),
    "nothing": ({"weight_map": {"a": ""}}, "no file of that folder"),
    "a number": ({"weight_map": {"a": 3}}, "no file of that folder"),
    "missing shard": ({"weight_map": {"a": "other.safetensors"}}, "other.safetensors is missing"),
    "missing tensor": ({"weight_map": {"z": "one.safetensors"}}, "does not hold tensor z"),
    "unlisted tensor": ({"weight_map": {"a": "one.safetensors"}}, "tensor b, which is not listed"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, folder / "one.safetensors")
    index, reason = INDEXES[case]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError) as refusal:
        open_tensors(folder)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_checkpoint_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no model\.safetensors"):
        open_tensors(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        open_tensors(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"nonsense", b"\xff", b"[1]", b""])
def test_settings_that_are_no_record_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"config\.json"):
        read_json(path)
