"""A checkpoint's folder copied: what is untouched byte for byte, and all of it or nothing."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from edited import edited_json
from triptych.core.storage import shards
from triptych.core.storage.copying import FolderCopy
from triptych.core.storage.shards import TensorHash, tensor_hash
from triptych.errors import DataError, TriptychError, UsageError

TENSORS = {
    "layers.0.q.weight": torch.randn(6, 4),
    "layers.0.k.weight": torch.randn(3, 4, dtype=torch.float16),
    "layers.1.q.weight": torch.randn(6, 4, dtype=torch.bfloat16),
    "embeddings": torch.randn(50, 4, dtype=torch.float64),
    "steps": torch.tensor(7),
    "nothing": torch.zeros(0, 4),
}
CONFIG = '{\n "b": 1,\n  "a": {"x": 2, "y": [1.5, "ü"]}, "last": null\n}'


def write_beside(folder: Path) -> None:
    (folder / "config.json").write_text(CONFIG, encoding="utf-8")
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")


def whole(folder: Path) -> Path:
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt", "note": "keep"})
    write_beside(folder)
    return folder


def sharded(folder: Path, save: Callable[..., object] = save_file, kind: str = "safetensors") -> Path:
    folder.mkdir()
    stem = "model" if kind == "safetensors" else "pytorch_model"
    names = list(TENSORS)
    places = {name: f"{stem}-{1 + (i >= 3):05d}-of-00002.{kind}" for i, name in enumerate(names)}
    for shard in dict.fromkeys(places.values()):
        save({name: TENSORS[name] for name in names if places[name] == shard}, folder / shard)
    size = sum(t.numel() * t.element_size() for t in TENSORS.values())
    index = {"metadata": {"total_size": size, "other": 1}, "weight_map": places}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))
    write_beside(folder)
    return folder


def copied(
    source: Path,
    target: Path,
    new: dict[str, Tensor] | None = None,
    settings: dict[str, object] | None = None,
    extra: dict[str, bytes] | None = None,
) -> tuple[FolderCopy, dict[str, TensorHash]]:
    with FolderCopy(source, target) as copy:
        hashes = copy.write_shards((new or {}).get)
        copy.write_beside(settings or {})
        copy.finish(extra)
        return copy, hashes


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_holds(path: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("make", [whole, sharded])
def test_a_copy_without_changes_is_the_same_files(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    before = content(source)
    result, hashes = copied(source, tmp_path / "target")
    assert content(tmp_path / "target") == before == content(source)
    assert result.left_out == ()
    assert {name: h.read for name, h in hashes.items()} == {n: tensor_hash(t) for n, t in TENSORS.items()}
    assert all(h.read == h.written for h in hashes.values())
    assert names_in(tmp_path) == ["source", "target"]


def test_the_hash_of_a_tensor_is_that_of_its_dtype_shape_and_bytes() -> None:
    tensor = torch.tensor([[1.0, 2.0]])
    expected = hashlib.sha256(b"F32 [1, 2]\n" + bytes.fromhex("0000803f00000040")).hexdigest()
    assert tensor_hash(tensor) == expected
    assert tensor_hash(tensor.mT.contiguous().mT) == expected
    assert tensor_hash(tensor.mT) != expected


def test_a_replaced_tensor_leaves_every_other_byte_alone(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    new = {"layers.0.q.weight": torch.randn(6, 4)}
    _, hashes = copied(source, tmp_path / "target", new)
    assert_holds(tmp_path / "target" / "model.safetensors", {**TENSORS, **new})
    old, now = (content(tmp_path / name)["model.safetensors"] for name in ("source", "target"))
    assert len(old) == len(now)
    assert sum(a != b for a, b in zip(old, now, strict=True)) <= 6 * 4 * 4
    found = hashes["layers.0.q.weight"]
    assert found.read == tensor_hash(TENSORS["layers.0.q.weight"])
    assert found.written == tensor_hash(new["layers.0.q.weight"])


@pytest.mark.parametrize("rows", [1, 4000], ids=["smaller", "larger, with a longer header"])
@pytest.mark.parametrize("make", [whole, sharded])
def test_a_replaced_tensor_may_have_another_shape(
    make: Callable[[Path], Path], rows: int, tmp_path: Path
) -> None:
    source = make(tmp_path / "source")
    new = {name: torch.randn(rows, 4).to(TENSORS[name].dtype) for name in list(TENSORS)[:4]}
    copied(source, tmp_path / "target", new)
    found: dict[str, Tensor] = {}
    for path in (tmp_path / "target").glob("*.safetensors"):
        found |= load_file(path)
        header = path.read_bytes()
        assert int.from_bytes(header[:8], "little") % 8 == 0
    assert found.keys() == TENSORS.keys()
    for name, tensor in {**TENSORS, **new}.items():
        assert torch.equal(found[name], tensor)
    if make is sharded:
        index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
        size = sum(t.numel() * t.element_size() for t in {**TENSORS, **new}.values())
        assert index["metadata"] == {"total_size": size, "other": 1}


def test_texts_in_the_header_are_kept(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    copied(source, tmp_path / "target", {"steps": torch.tensor([1, 2])})
    with safe_open(tmp_path / "target" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "keep"}


def test_a_replacement_of_another_dtype_is_a_mistake(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    with pytest.raises(ValueError, match="F16"):
        copied(source, tmp_path / "target", {"layers.0.k.weight": torch.zeros(3, 4)})
    assert names_in(tmp_path) == ["source"]


def test_pickled_tensors_become_safetensors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_beside(source)
    turned = {**TENSORS, "view": torch.randn(4, 6).mT}
    torch.save(turned, source / "pytorch_model.bin")
    new = {"layers.0.q.weight": torch.randn(2, 4)}
    _, hashes = copied(source, tmp_path / "target", new)
    assert_holds(tmp_path / "target" / "model.safetensors", {**turned, **new})
    assert not list((tmp_path / "target").glob("*.bin"))
    assert hashes["view"].read == tensor_hash(turned["view"])


def test_pickled_shards_become_safetensors_with_an_index(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source", torch.save, "bin")
    result, _ = copied(source, tmp_path / "target")
    assert result.checkpoint == result.folder == tmp_path / "target"
    places = json.loads((result.folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(places) == list(TENSORS)
    for name, shard in places.items():
        assert torch.equal(load_file(tmp_path / "target" / shard)[name], TENSORS[name])
    names = [name for name in names_in(tmp_path / "target") if "model" in name]
    shards_of_2 = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert names == [*shards_of_2, "model.safetensors.index.json", "tokenizer.model"]


def test_a_single_file_is_copied_with_what_is_beside_it(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    (source / "model.safetensors").rename(source / "mine.safetensors")
    result, _ = copied(source / "mine.safetensors", tmp_path / "target")
    assert result.checkpoint == tmp_path / "target" / "mine.safetensors"
    assert content(result.folder) == content(source)


def test_the_same_weights_in_other_formats_are_left_out_and_reported(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    (source / "onnx").mkdir()
    (source / "2_Dense").mkdir()
    others = ["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.onnx"]
    others += ["adapter_model.safetensors"]
    for name in (*others, "onnx/model.json", "2_Dense/model.safetensors"):
        (source / name).write_bytes(b"x")
    result, _ = copied(source, tmp_path / "target")
    assert result.left_out == tuple(sorted([*others, "onnx/"]))
    assert (result.folder / "2_Dense" / "model.safetensors").read_bytes() == b"x"


def test_entries_of_the_configuration_are_set_in_their_places(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    copied(source, tmp_path / "target", settings={"a.x": 3, "new": 4})
    text = (tmp_path / "target" / "config.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"b": 1, "a": {"x": 3, "y": [1.5, "ü"]}, "last": None, "new": 4}
    assert list(json.loads(text)) == ["b", "a", "last", "new"]
    assert (source / "config.json").read_text(encoding="utf-8") == CONFIG


def test_more_files_replace_those_that_were_copied(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    (source / "README.md").write_text("old")
    copied(source, tmp_path / "target", extra={"README.md": b"new", "certificate.json": b"{}"})
    found = content(tmp_path / "target")
    assert (found["README.md"], found["certificate.json"]) == (b"new", b"{}")
    assert (source / "README.md").read_text() == "old"


def test_a_snapshot_in_the_cache_of_the_hub_is_copied_as_files(tmp_path: Path) -> None:
    model = tmp_path / "models--a--b"
    (model / "snapshots").mkdir(parents=True)
    snapshot, blobs = whole(model / "snapshots" / "abc"), model / "blobs"
    blobs.mkdir()
    expected = content(snapshot)
    for path in [p for p in snapshot.iterdir() if p.is_file()]:
        path.rename(blobs / path.name)
        path.symlink_to(Path("../../blobs", path.name))
    copied(snapshot, tmp_path / "target")
    assert content(tmp_path / "target") == expected
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))


@pytest.mark.parametrize("to", ["../secret", "nowhere"])
def test_a_link_out_of_the_folder_is_refused(to: str, tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    (tmp_path / "secret").write_text("key")
    (source / "notes.txt").symlink_to(to)
    with pytest.raises(DataError, match=r"notes\.txt"):
        FolderCopy(source, tmp_path / "target")


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_shard_or_index_that_is_a_link_out_is_refused_but_in_the_cache_of_the_hub(
    name: str, cached: bool, tmp_path: Path
) -> None:
    place = tmp_path / "models--a--b" / "snapshots" if cached else tmp_path
    place.mkdir(parents=True, exist_ok=True)
    source, elsewhere = sharded(place / "source"), (place.parent / "blobs") if cached else tmp_path / "blobs"
    elsewhere.mkdir()
    before = content(source)
    (source / name).rename(elsewhere / "0123")
    (source / name).symlink_to(elsewhere / "0123")
    if cached:
        copied(source, tmp_path / "target")
        assert content(tmp_path / "target") == before
        assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))
        return
    with pytest.raises(DataError, match=rf"{name} is a link out of the folder, to .*/blobs/0123"):
        FolderCopy(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_shards_in_a_folder_that_is_a_link_out_are_refused(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    (tmp_path / "elsewhere").mkdir()
    with edited_json(source / "model.safetensors.index.json") as record:
        for name in set(record["weight_map"].values()):
            (source / name).rename(tmp_path / "elsewhere" / name)
        record["weight_map"] = {tensor: f"inner/{name}" for tensor, name in record["weight_map"].items()}
    (source / "inner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"inner/model-.* is a link out of the folder, to .*/elsewhere/"):
        FolderCopy(source, tmp_path / "target")


def test_weights_in_one_file_that_is_a_link_out_are_refused(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    (source / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (source / "model.safetensors").symlink_to("../elsewhere.safetensors")
    with pytest.raises(DataError, match=r"model\.safetensors is a link out of the folder"):
        FolderCopy(source, tmp_path / "target")


def test_a_link_to_another_file_of_the_folder_is_copied_as_a_file(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    (source / "inner").mkdir()
    (source / "inner" / "model.safetensors").symlink_to("../model.safetensors")
    (source / "notes.txt").symlink_to("config.json")
    copied(source, tmp_path / "target")
    assert (tmp_path / "target" / "notes.txt").read_text() == (source / "config.json").read_text()
    assert not (tmp_path / "target" / "notes.txt").is_symlink()


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    shutil.copy(source / "model-00001-of-00002.safetensors", tmp_path / "x.safetensors")
    with edited_json(source / "model.safetensors.index.json") as record:
        record["weight_map"] = dict.fromkeys(record["weight_map"], "../x.safetensors")
    with pytest.raises(DataError, match="no file of that folder"):
        FolderCopy(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("place", ["source", "source/inner", "there", "no/where"])
def test_a_place_that_cannot_be_is_refused(place: str, tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError):
        FolderCopy(source, tmp_path / place)
    assert names_in(tmp_path) == ["source", "there"]


def test_a_target_that_comes_into_being_meanwhile_is_left_alone(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    with FolderCopy(source, tmp_path / "target") as copy:
        copy.write_shards(lambda name: None)
        copy.write_beside({})
        (tmp_path / "target").mkdir()
        with pytest.raises(UsageError, match="meanwhile"):
            copy.finish()
    assert names_in(tmp_path) == ["source", "target"]
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_a_full_disk_leaves_nothing(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sharded(tmp_path / "source")
    written = 0

    def until_full(write: Callable[..., int]) -> Callable[..., int]:
        def full(*arguments: object) -> int:
            nonlocal written
            written += 1
            if written > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*arguments)

        return full

    for name in ("pwrite", "copy_file_range"):
        monkeypatch.setattr(shards.os, name, until_full(getattr(os, name)))
    with pytest.raises(OSError, match="No space left"):
        copied(source, tmp_path / "target")
    assert written > after
    assert names_in(tmp_path) == ["source"]


def test_a_system_that_does_not_copy_from_file_to_file_is_helped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sharded(tmp_path / "source")

    def cannot(*arguments: object) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(shards.os, "copy_file_range", cannot)
    copied(source, tmp_path / "target")
    assert content(tmp_path / "target") == content(source)


def test_a_copy_that_does_not_fit_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = whole(tmp_path / "source")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(UsageError, match="GB free"):
        FolderCopy(source, tmp_path / "target")


def test_an_error_of_who_replaces_leaves_nothing(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")

    def fail(name: str) -> Tensor | None:
        if name == "steps":
            raise DataError("no")
        return None

    with pytest.raises(DataError), FolderCopy(source, tmp_path / "target") as copy:
        copy.write_shards(fail)
    assert names_in(tmp_path) == ["source"]


def test_two_copies_to_one_place_do_not_disturb_each_other(tmp_path: Path) -> None:
    source = whole(tmp_path / "source")
    with FolderCopy(source, tmp_path / "target") as first:
        first.write_shards(lambda name: None)
        with pytest.raises(DataError), FolderCopy(source, tmp_path / "target"):
            raise DataError("given up")
        first.write_beside({})
        first.finish()
    assert content(tmp_path / "target") == content(source)
    assert names_in(tmp_path) == ["source", "target"]


# Starts a copy for every line that it reads, each in a process of its own.
SLOW_COPIES = """
import os, sys, time
from pathlib import Path
from triptych.core.storage.copying import FolderCopy

def slowly(name):
    time.sleep(0.02)

for line in sys.stdin:
    child = os.fork()
    if not child:
        with FolderCopy(Path(sys.argv[1]), Path(sys.argv[2])) as copy:
            print(os.getpid(), flush=True)
            copy.write_shards(slowly)
            copy.write_beside({})
            copy.finish({"certificate.json": b"{}"})
        time.sleep(60)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def test_a_process_killed_at_any_moment_leaves_all_or_nothing(tmp_path: Path) -> None:
    source, target = sharded(tmp_path / "source"), tmp_path / "target"
    expected = {**content(source), "certificate.json": b"{}"}
    chance, absent = random.Random(1), 0
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_COPIES, source, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        for longest in (0, *[0.1] * 3, *[0.3] * 6):
            print("go", file=starter.stdin, flush=True)
            child = int(starter.stdout.readline())
            time.sleep(chance.uniform(0, longest))
            os.kill(child, signal.SIGKILL)
            assert starter.stdout.readline() == "ended\n"
            assert len(list(tmp_path.glob(".target.partial-*"))) <= 1  # those before it are gone
            if target.exists():
                assert content(target) == expected
                shutil.rmtree(target)
            else:
                absent += 1
                assert names_in(tmp_path)[0].startswith(".target.partial-")
        starter.stdin.close()
    assert absent
    copied(source, target)
    assert names_in(tmp_path) == ["source", "target"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TriptychError):
        FolderCopy(tmp_path, tmp_path.parent / "target")
