"""Matrices of a model cannot be written, wherever they were read; files that change are noticed."""

import contextlib
import copy
import io
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from face.tiny import write_checkpoint, write_run
from triptych import DataError, Model, UsageError, load
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.core.read_only import ReadOnlyTensor

pytest.importorskip("transformers", reason="it comes with the extra [dev]")
TEXT = "hear me speak"
REFUSED = r"cannot be written: model\.replace\(place, W_Q=…\) gives a model with another one, and clone\(\)"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """A model of every kind of source."""
    base = tmp_path_factory.mktemp("sources")
    theirs = write_checkpoint("gpt2", base / "folder")
    write_run("run of a language model", base / "run")
    torch.manual_seed(0)
    own = LanguageModel.of(LanguageModelConfig(num_layers=2, d_model=16, num_heads=4), "decoder", 258).eval()
    return {
        "folder": load(base / "folder", device="cpu"),
        "grouped": load(_grouped(base / "grouped"), device="cpu"),
        "run": load(base / "run", device="cpu"),
        "transformers": load(theirs, tokenizer=base / "folder", device="cpu"),
        "module": load(own, tokenizer=base / "folder", device="cpu"),
        "changed": load(base / "folder", device="cpu").ablate("1.2"),
    }


def _grouped(folder: Path) -> Path:
    write_checkpoint("llama", folder)
    return folder


SOURCES = ("folder", "grouped", "run", "transformers", "module", "changed")
MATRICES: dict[str, Callable[[Model], Tensor | None]] = {
    **{f"head.{name}": lambda model, name=name: getattr(model[1, 1], name) for name in ("W_Q", "W_K", "b_V")},
    **{f"head.{name}": lambda model, name=name: getattr(model[1, 1], name) for name in ("W_V", "W_O", "b_Q")},
    **{f"layer.{name}": lambda model, name=name: getattr(model[1], name) for name in ("W_Q", "W_K", "b_O")},
    **{f"layer.{name}": lambda model, name=name: getattr(model[1], name) for name in ("W_V", "W_O", "b_K")},
    "layer.weights": lambda model: model[1].weights.q[0].weight,
    "head.weights": lambda model: model[1, 1].weights.W_V,
    "form": lambda model: model[1, 1].ov.left,
}


def put(matrix: Tensor) -> None:
    matrix[0] = 1.0


def add(matrix: Tensor) -> None:
    matrix += 1


def put_data(matrix: Tensor) -> None:
    matrix.data = torch.zeros(3)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda matrix: matrix.zero_(),
    "an item": put,
    "+=": add,
    "data": lambda matrix: matrix.data.zero_(),
    "other data": put_data,
    "a view": lambda matrix: matrix.unsqueeze(0).fill_(0),
    "the transpose": lambda matrix: matrix.mT.mul_(2),
    "a part": lambda matrix: matrix.unbind()[0].zero_(),
    "detached": lambda matrix: matrix.detach().zero_(),
    "the same type": lambda matrix: matrix.to(matrix.dtype).zero_(),
    "out": lambda matrix: torch.add(matrix, 1, out=matrix),
    "inplace": lambda matrix: F.relu(matrix, inplace=True),
    "several": lambda matrix: torch._foreach_add_([matrix], 1.0),
    "an operation": lambda matrix: torch.ops.aten.zero_.default(matrix),
    "a parameter": lambda matrix: torch.nn.init.zeros_(torch.nn.Parameter(matrix)),
    "other memory": lambda matrix: matrix.set_(torch.zeros(1)),
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source", SOURCES)
def test_writing_into_a_matrix_raises_and_changes_neither_what_is_read_nor_what_runs(
    models: dict[str, Model], source: str
) -> None:
    model = models[source]
    before = {name: matrix.clone() for name, read in MATRICES.items() if (matrix := read(model)) is not None}
    logits = model.run(TEXT).logits
    for name in before:
        for what, write in WRITES.items():
            matrix = MATRICES[name](model)
            assert matrix is not None
            if matrix.ndim > 1 or what not in ("a part", "the transpose"):
                with pytest.raises(UsageError, match=REFUSED):
                    write(matrix)
        for array in (matrix.detach().numpy(), numpy.asarray(matrix)):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
    for name, matrix in before.items():
        assert torch.equal(MATRICES[name](model), matrix)  # type: ignore[arg-type]
    assert torch.equal(model.run(TEXT).logits, logits)


def test_no_method_of_a_tensor_writes_into_a_read_only_one() -> None:
    """Every method whose name ends as those that write, with arguments of several forms."""
    numbers = torch.rand(4, 4) + 1
    arguments: list[tuple[Any, ...]] = [
        (),
        (1,),
        (0.5,),
        (torch.rand(4, 4),),
        (torch.rand(4, 4), torch.rand(4, 4)),
        (0, 1),
        (0, torch.tensor([0]), 3.0),
        (0, torch.tensor([0]), torch.rand(1, 4)),
        (torch.ones(4, 4) > 0, 3.0),
    ]
    names = [name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")]
    assert len(names) > 150
    for name in [*names, "__iadd__", "__imul__", "__setitem__", "__ior__"]:
        for given in arguments:
            own = numbers.clone()
            with contextlib.suppress(Exception):  # what fails has not written either
                getattr(ReadOnlyTensor.of(own), name)(*given)
            assert torch.equal(own, numbers), (name, given)


def test_what_is_computed_of_a_matrix_is_a_tensor_of_ones_own(models: dict[str, Model]) -> None:
    matrix = models["folder"][1, 1].W_Q
    for own in (
        matrix + 1,
        matrix @ matrix.mT,
        matrix.clone(),
        matrix.double(),
        copy.deepcopy(matrix),
        pickle.loads(pickle.dumps(matrix)),
        torch.from_dlpack(matrix),
        torch.zeros_like(matrix).copy_(matrix),
        models["folder"][1, 1].ov.svd()[0],
    ):
        assert type(own) is Tensor
        own.zero_()
    file = io.BytesIO()
    torch.save(matrix, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), matrix)
    assert repr(matrix) == repr(matrix.clone())
    assert float(torch.func.grad(lambda x: (x**2).sum())(matrix).sum()) == pytest.approx(
        float(2 * matrix.sum()), rel=1e-5
    )
    double = models["folder"].replace("1.1", W_Q=2 * matrix)
    assert torch.equal(double[1, 1].W_Q, 2 * matrix)


def written_anew(folder: Path) -> None:
    write_checkpoint("llama", folder.with_name("other"), initializer_range=0.5)
    shutil.copyfile(folder.with_name("other") / "model.safetensors", folder / "model.safetensors")


def replaced(folder: Path) -> None:
    written_anew(folder)
    (folder / "model.safetensors").rename(folder / "new")
    (folder / "new").rename(folder / "model.safetensors")


def in_another_order(folder: Path) -> None:
    """The same tensors at other places of a file of the same size."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qo"]
    places = [header[name]["data_offsets"] for name in names]
    body = bytearray(raw[8 + length :])
    parts = [bytes(body[start:end]) for start, end in places]
    for name, place, part in zip(names, reversed(places), parts, strict=True):
        header[name]["data_offsets"] = place
        body[slice(*place)] = part
    new = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", length) + new + body)


def other_settings(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))


def gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", [written_anew, replaced, in_another_order, other_settings, gone])
def test_a_folder_that_changes_while_it_is_open_is_noticed(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_checkpoint("llama", folder)
    for file in folder.iterdir():  # not in the same tick of the clock
        os.utime(file, (1, 1))
    fresh, read, run = (load(folder, device="cpu") for _ in range(3))
    matrix, logits = read[1, 1].W_Q.clone(), run.run(TEXT).logits
    whole = read[1].W_V.clone()
    change(folder)
    said = "was there when the model was opened, and is gone" if change is gone else "was written anew while"
    for use in (
        lambda: fresh[1, 1].W_Q,
        lambda: fresh.run(TEXT),
        lambda: fresh.inspect(),
        lambda: fresh.rewrite("fold_value_bias"),
        lambda: fresh.save(tmp_path / "copy"),
        lambda: read[1, 1].W_Q,
        lambda: read[1].W_V,
        lambda: read[0].W_Q,
        lambda: read.run(TEXT),
        lambda: run[1, 1].W_Q,
        lambda: run.rewrite("fold_value_bias"),
        lambda: run.ablate("1.1").save(tmp_path / "copy"),
    ):
        with pytest.raises(DataError, match=f"{said}.*open the model again"):
            use()
    assert torch.equal(run.run(TEXT).logits, logits)  # of the file that was opened
    assert whole.shape[0] == 4
    if change is not gone:
        again = load(folder, device="cpu")
        assert again.run(TEXT).logits.shape == logits.shape
        assert torch.equal(again[1, 1].W_Q, matrix) == (change in (in_another_order, other_settings))


def test_weights_that_come_in_front_of_others_are_noticed_and_others_may_come(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    shutil.move(folder / "model.safetensors", folder / "first.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "first.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load(folder, device="cpu")
    (folder / "directions.safetensors").write_bytes(b"of somebody else")
    assert model.run(TEXT).logits.isfinite().all()
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    for use in (lambda: model[0, 1].W_Q, lambda: model.rewrite("fold_value_bias")):
        with pytest.raises(DataError, match=r"model\.safetensors was not there when the model was opened"):
            use()


def test_a_run_that_is_trained_on_is_noticed(tmp_path: Path) -> None:
    write_run("run of a language model", tmp_path / "run")
    model = load(tmp_path / "run", device="cpu")
    (tmp_path / "run" / "state.json").write_text("{}")  # which says nothing of what it computes
    assert model[0, 1].W_Q.shape == (16, 4)
    path = tmp_path / "run" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="written anew while it was open: open the model again"):
        model.run(TEXT)


def test_a_model_of_transformers_that_is_changed_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    theirs = write_checkpoint("gpt2", tmp_path / "model")
    model = load(theirs, tokenizer=tmp_path / "model", device="cpu")
    assert torch.equal(model[1, 1].W_Q, theirs.transformer.h[1].attn.c_attn.weight[:, 6:12])
    with torch.no_grad():
        theirs.transformer.h[1].attn.c_attn.weight.mul_(2)
    for use in (lambda: model[1, 1].W_Q, lambda: model.run(TEXT)):
        with pytest.raises(DataError, match="parameters of GPT2LMHeadModel were changed after it was opened"):
            use()
