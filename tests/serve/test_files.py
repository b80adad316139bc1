"""Files under a server: a change of them ends nothing and changes no answer until the models are reloaded."""

import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from face.tiny import write_run
from served import Served
from small_checkpoints import byte_tokenizer
from triptych.core.models.sites import attention_sites
from triptych.core.storage.tensors import open_tensors
from triptych.errors import DataError
from triptych.model import Model, load, require_same_files
from triptych.running.memory import MappedFiles, own_memory

WIDTH, NUM_TOKENS = 256, 30


def gpt2(folder: Path, seed: int) -> Path:
    """A GPT-2 whose table is large enough to be mapped from its file."""
    torch.manual_seed(seed)
    sizes = {"n_embd": WIDTH, "n_head": 4, "n_layer": 2, "n_positions": 64}
    config = transformers.GPT2Config(vocab_size=byte_tokenizer(folder), **sizes)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("files")
    return [gpt2(parent / name, seed) for seed, name in enumerate(("first", "second"))]


def written(folder: Path) -> str:
    return str(load(folder).generate("The cat", max_new_tokens=NUM_TOKENS).text)


def test_a_long_job_goes_on_unchanged_when_its_file_is_cut_off(folders: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    model = load(folder)
    model.generator()
    os.truncate(folder / "model.safetensors", 100)  # a page of it that is read ends the process
    assert model.generate("The cat", max_new_tokens=NUM_TOKENS).text == written(folders[0])


JOBS: dict[str, Callable[[Model], Any]] = {
    "run": lambda model: model.run("The cat").logits.tolist(),
    "score": lambda model: model.score("The cat"),
    "attend": lambda model: model.attend("The cat")[1, 0].tolist(),
    "evaluate": lambda model: model.evaluate("The cat " * 40, context=32).figures(),
    "evaluate with a head less": lambda model: model.ablate("1.0").evaluate("The cat " * 40).figures(),
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("size", [0, 100])
def test_whatever_runs_a_model_goes_on_unchanged_when_its_file_is_cut_off(
    folders: list[Path], tmp_path: Path, job: str, size: int
) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    model, run = load(folder), JOBS[job]
    layer = attention_sites(model.reader.model)[0].layer
    cut = partial(os.truncate, folder / "model.safetensors", size)
    handle = layer.register_forward_pre_hook(lambda *_: cut())  # while it runs
    found = run(model)
    handle.remove()
    assert (folder / "model.safetensors").stat().st_size == size
    assert found == run(load(folders[0]))


def test_what_shared_a_mapped_file_shares_memory_of_its_own_afterwards(folders: list[Path]) -> None:
    weight = open_tensors(folders[0], mapped=True).read("transformer.wte.weight")
    one, other = (nn.Embedding(len(weight), WIDTH, _weight=weight, _freeze=True) for _ in range(2))
    before = weight.clone()
    assert MappedFiles().hold(one.weight)
    own_memory([one, other])
    assert not MappedFiles().hold(one.weight)
    assert one.weight.data_ptr() == other.weight.data_ptr() != weight.data_ptr()
    assert torch.equal(one.weight, before)


def test_another_process_opens_the_files_that_the_first_one_opened(
    folders: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    theirs = pickle.dumps(load(folder))  # as a process is started with it
    require_same_files(pickle.loads(theirs))
    shutil.copy(folders[1] / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(DataError, match="written anew while it was open"):
        require_same_files(pickle.loads(theirs))


@pytest.mark.slow  # starts a server of its own
def test_every_model_of_an_ensemble_is_looked_at(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run("run of an encoder-decoder", tmp_path / name)
    model = load(tmp_path / "first", ensemble=[tmp_path / "second"])
    require_same_files(model)
    os.utime(tmp_path / "second" / "model.safetensors", (1, 1))
    with pytest.raises(DataError, match=r"second/model\.safetensors was written anew"):
        require_same_files(model)


def test_a_model_is_replaced_by_a_reload_and_a_stream_ends_on_the_model_that_it_began_with(
    folders: list[Path], tmp_path: Path
) -> None:
    first, second = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in folders)
    link = tmp_path / "current"
    link.symlink_to(first)
    key = {"Authorization": "Bearer k"}
    fields: dict[str, Any] = {"prompt": "The cat", "max_tokens": NUM_TOKENS, "temperature": 0}
    with Served({"gpt": load(link)}, keys=["k"]) as served, ThreadPoolExecutor() as pool:

        def text() -> str:
            return str(served.ask("/v1/completions", fields, **key).body["choices"][0]["text"])

        assert text() == written(first)
        shutil.copy(second / "model.safetensors", first / "model.safetensors")  # as cp does, in place
        assert text() == written(folders[0])
        attended = served.ask("/v1/attend", {"text": "The cat"}, **key)
        assert attended.status == 503
        assert attended.body["error"]["message"].startswith(
            "the files of gpt were changed after it was opened"
        )
        link.unlink()
        link.symlink_to(second)
        streamed = pool.submit(served.events, "/v1/completions", {**fields, "stream": True}, None, **key)
        assert served.ask("/admin/reload", {}, **key).body == {"models": ["gpt"]}
        assert text() == written(second)
        events = [event["choices"][0]["text"] for event in streamed.result()]
        assert "".join(events) in (written(folders[0]), written(second))
        assert served.ask("/v1/attend", {"text": "The cat"}, **key).status == 200
        os.truncate(second / "model.safetensors", 100)
        assert text() == written(folders[1])
        failed = served.ask("/admin/reload", {}, **key)
        assert (failed.status, failed.body["error"]) == (
            409,
            "the models cannot be opened anew; the log says why",
        )
        assert text() == written(folders[1])
        assert served.ask("/admin/reload", {}).status == 401
    with Served({"gpt": load(folders[0])}) as served:
        assert served.ask("/admin/reload", {}).status == 403
