"""Every file that is read: whatever it holds, there is one clear line or a result, soon, in little memory."""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from checkpoints.tiny_marian import write_marian
from mutations import (
    Mutation,
    mutated_bytes,
    mutated_json,
    mutated_safetensors,
    mutated_toml,
)
from small_checkpoints import gpt2, llama
from tiny_recipe import tiny_recipe
from triptych.converting.conversion import convert
from triptych.core.checkpoints import family
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.family import read_family
from triptych.core.models import read_model
from triptych.core.storage.copying import CERTIFICATE
from triptych.errors import ConfigurationWarning, DataError, TriptychError
from triptych.rewriting.certificate import read_certificate
from triptych.rewriting.functions import EXACT
from triptych.rewriting.recipe import RewriteRecipe, read_rewrite_recipe
from triptych.rewriting.verification import verify
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.running.opening import open_translator
from triptych.running.text import load_tokenizer
from triptych.training import TrainingConfig, read_recipe, resolve, runs
from triptych.training.metrics import read_metrics
from triptych.training.optimizers import Optimizer
from triptych.training.progress import LineDisplay
from triptych.training.state import read_state

SECONDS, BYTES = 20, 2 * 10**9
MANY, FEW = 500, 8
LONGEST = 2000  # characters of a message


REWRITE = """
skip_refused = true
calibration = "train.txt"

[[step]]
rewrite = "fold_norm"

[[step]]
rewrite = "prune_heads"
number = 1
on_text = true
layers = [0, 2]

[[step]]
rewrite = "truncate"
forms = ["qk", "ov"]
budget = 0.6
criterion = "centred"
"""


class Case(NamedTuple):
    """A file, and what reads it.

    Attributes:
        folder: which of the folders below has it.
        file: its name.
        mutation: how it is changed.
        read: reads the folder.
    """

    folder: str
    file: str
    mutation: Mutation
    read: Callable[[Path], object]


def _read_all(folder: Path) -> None:
    source = open_checkpoint(folder)
    for site in source.sites:
        source.read(site)


def _read_metrics(folder: Path) -> None:
    read_metrics(folder / "metrics.jsonl")


def _read_state(folder: Path) -> None:
    model = read_model(folder)
    read_state(folder / "state", model, Optimizer(TrainingConfig(), model))


def _resealed(folder: Path) -> None:
    """A certificate whose own hash is right whatever it says."""
    path = folder / CERTIFICATE
    try:
        record = json.loads(path.read_bytes())
        plain = {key: value for key, value in record.items() if key != "sha256"}
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        path.write_text(json.dumps({**plain, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    except (ValueError, AttributeError):
        pass
    verify(folder)


CASES = {
    "configuration of a run": Case("run", "config.json", mutated_json, open_translator),
    "weights of a run": Case("run", "model.safetensors", mutated_safetensors, open_translator),
    "tokenizer of a run": Case("run", "tokenizer.json", mutated_json, open_translator),
    "recipe of a run": Case("run", "recipe.toml", mutated_toml, open_translator),
    "state of a run": Case("run", "state/last.safetensors", mutated_safetensors, _read_state),
    "metrics of a run": Case(
        "run", "metrics.jsonl", mutated_bytes, lambda f: read_metrics(f / "metrics.jsonl")
    ),
    "recipe": Case("run", "recipe.toml", mutated_toml, lambda folder: read_recipe(folder / "recipe.toml")),
    "decoding of a converted model": Case("converted", "decoding.toml", mutated_toml, open_translator),
    "tokenizer of a converted model": Case("converted", "tokenizer.json", mutated_json, open_translator),
    "Marian's configuration": Case("marian", "config.json", mutated_json, open_translator),
    "Marian's generation": Case("marian", "generation_config.json", mutated_json, open_translator),
    "Marian's vocabulary": Case("marian", "vocab.json", mutated_json, open_translator),
    "Marian's tokenizer settings": Case("marian", "tokenizer_config.json", mutated_json, open_translator),
    "Marian's SentencePiece": Case("marian", "source.spm", mutated_bytes, open_translator),
    "Marian's weights": Case("marian", "model.safetensors", mutated_safetensors, open_translator),
    "configuration of a checkpoint": Case("gpt2", "config.json", mutated_json, _read_all),
    "configuration of a rotary checkpoint": Case("llama", "config.json", mutated_json, _read_all),
    "weights of a checkpoint": Case("gpt2", "model.safetensors", mutated_safetensors, _read_all),
    "pickled weights of a checkpoint": Case("pickled", "pytorch_model.bin", mutated_bytes, _read_all),
    "tokenizer of a checkpoint": Case("tokenizer", "tokenizer.json", mutated_json, load_tokenizer),
    "chat template of a checkpoint": Case("tokenizer", "chat_template.jinja", mutated_bytes, load_tokenizer),
    "index of a checkpoint": Case("sharded", "model.safetensors.index.json", mutated_json, _read_all),
    "certificate": Case("rewritten", CERTIFICATE, mutated_json, read_certificate),
    "certificate, its own hash right": Case("rewritten", CERTIFICATE, mutated_json, _resealed),
    "family": Case("toml", "family.toml", mutated_toml, lambda folder: read_family(folder / "family.toml")),
    "recipe of a rewrite": Case(
        "toml", "rewrite.toml", mutated_toml, lambda folder: read_rewrite_recipe(folder / "rewrite.toml")
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind, sound."""
    base = tmp_path_factory.mktemp("sound")
    training = {"max_steps": 2, "batch_tokens": 500, "warmup_steps": 1}
    tree = tiny_recipe(model={"d_ff": 16}, training=training, validation={"every_steps": 2})
    runs.train(resolve(tree), base / "run", LineDisplay())
    (base / "marian").mkdir()
    write_marian(base / "marian", torch_dtype=None)
    (base / "marian" / "generation_config.json").write_text('{"num_beams": 4, "length_penalty": 1.0}')
    convert(open_translator(base / "marian", "cpu"), base / "converted", "triptych")
    gpt2(base / "gpt2")
    llama(base / "llama")
    _shard(gpt2(base / "sharded"))
    torch.save(load_file(gpt2(base / "pickled") / "model.safetensors"), base / "pickled/pytorch_model.bin")
    (base / "pickled/model.safetensors").unlink()
    (base / "tokenizer").mkdir()
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["a text"], vocab_size=300)
    tokenizer.save(str(base / "tokenizer/tokenizer.json"))
    (base / "tokenizer/chat_template.jinja").write_text("{{ messages }}")
    exact = RewriteRecipe.model_construct(step=tuple(EXACT), skip_refused=True)
    rewrite_checkpoint(str(base / "gpt2"), base / "rewritten", exact, compare=False)
    (base / "toml").mkdir()
    known = Path(family.__file__).parent / "families"
    (base / "toml" / "family.toml").write_bytes((known / "llama.toml").read_bytes())
    (base / "toml" / "rewrite.toml").write_text(REWRITE)
    return base


def _shard(folder: Path) -> None:
    """A checkpoint of one file, put into two with an index."""
    tensors = load_file(folder / "model.safetensors")
    index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": {}}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        index["weight_map"] |= dict.fromkeys(names, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@contextmanager
def limited() -> Iterator[None]:
    """No more memory than `BYTES` beyond what the process has, and no more time than `SECONDS`."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, before[1]))
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def failures(case: Case, sound: Path, place: Path, count: int) -> list[str]:
    """What went wrong with so many mutations of a file, by the seed of each."""
    shutil.copytree(sound / case.folder, place)
    content = (sound / case.folder / case.file).read_bytes()
    case.read(place)  # as it is, it can be read
    found = []
    for seed in range(count):
        chance = random.Random(f"{case.folder}/{case.file} {seed}")
        (place / case.file).write_bytes(case.mutation(content, chance))
        started = time.monotonic()
        try:
            with limited(), warnings.catch_warnings():
                warnings.simplefilter("ignore", ConfigurationWarning)
                case.read(place)
        except TriptychError as error:
            first, *_ = str(error).split("\n")  # what could be done may follow
            if not 10 < len(first) < LONGEST:
                found.append(f"seed {seed}: not one clear line: {str(error)[:200]!r}")
        except Exception as error:  # noqa: BLE001 (whatever it is, it is told by the seed that made it)
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            at = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else ""
            found.append(f"seed {seed}: {type(error).__name__} at {at}: {str(error)[:200]}")
        if (took := time.monotonic() - started) > SECONDS:
            found.append(f"seed {seed}: took {took:.1f} s")
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_one_clear_line_or_read(name: str, folders: Path, tmp_path: Path) -> None:
    assert failures(CASES[name], folders, tmp_path / "folder", FEW) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_damaged_files_are_one_clear_line_or_read(name: str, folders: Path, tmp_path: Path) -> None:
    assert failures(CASES[name], folders, tmp_path / "folder", MANY) == []


@pytest.mark.parametrize("name", [name for name in CASES if "hash right" not in name])
def test_a_pipe_a_device_and_a_file_without_measure_are_one_line(
    name: str, folders: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    shutil.copytree(folders / case.folder, tmp_path / "folder")
    path = tmp_path / "folder" / case.file
    content = path.read_bytes()
    tensors = path.suffix in (".safetensors", ".bin")
    for stand_in in ("a pipe", "a device") if tensors else ("a pipe", "a device", "1 TB"):
        path.unlink()
        if stand_in == "a pipe":
            os.mkfifo(path)
        elif stand_in == "a device":
            path.symlink_to("/dev/zero")
        else:
            path.write_bytes(content)
            os.truncate(path, 10**12)
        with limited(), pytest.raises(TriptychError) as error:
            case.read(tmp_path / "folder")
        assert "\n" not in str(error.value)
        assert "not a regular file" in str(error.value) or "bytes, the most" in str(error.value)


@pytest.mark.parametrize("size", [10**9, 2**31, 10**30])
@pytest.mark.parametrize("name", ["vocab_size", "d_model", "encoder_layers"])
def test_a_size_past_all_measure_is_refused_before_anything_of_it_is_made(
    name: str, size: int, folders: Path, tmp_path: Path
) -> None:
    shutil.copytree(folders / "marian", tmp_path / "marian")
    path = tmp_path / "marian" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {name: size}))
    with limited(), pytest.raises(DataError):
        open_translator(tmp_path / "marian", "cpu")
