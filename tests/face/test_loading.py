"""Opening a model: what is read of it, from where, and what stands for it without a connection."""

import gc
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors.torch import save_file

from hub_server import BY_RANGES, Hub, in_place_of_the_hub, settled
from small_checkpoints import gpt2_that_runs, llama
from triptych import DataError, UsageError, load

D, HEADS, GROUPS, WIDTH, LAYERS = 8192, 64, 8, 128, 41


def large_llama(folder: Path) -> Path:
    """A Llama of 20 GB whose file is sparse: all numbers are 0, but for W_Q of one head."""
    folder.mkdir()
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (1000, D)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{side}_proj.weight": (D, D) for side in "qo"}
        shapes |= {f"{at}.self_attn.{side}_proj.weight": (GROUPS * WIDTH, D) for side in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (4096, D) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (D, 4096)}
        shapes |= {f"{at}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    start = 8 + len(text) + header["model.layers.40.self_attn.q_proj.weight"]["data_offsets"][0]
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        file.seek(start + 7 * WIDTH * D * 2)
        file.write(torch.ones(WIDTH * D, dtype=torch.float16).numpy().tobytes())
    settings = {"model_type": "llama", "hidden_size": D, "num_attention_heads": HEADS, "vocab_size": 1000}
    settings |= {"num_key_value_heads": GROUPS, "num_hidden_layers": LAYERS, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


MEASURED = """
    import json, re, sys, time

    import torch

    import triptych
    import triptych.core.heads
    import triptych.running.opened_source
    from triptych import untrusted

    read = 0

    def counted(function):
        def count(self, start, length):
            global read
            read += length
            return function(self, start, length)
        return count

    untrusted.LocalBytes.read = counted(untrusted.LocalBytes.read)
    untrusted.MappedBytes.read = counted(untrusted.MappedBytes.read)

    def peak():  # of this program alone, which rusage is not after a fork
        return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

    before, started = peak(), time.monotonic()
    W_Q = triptych.load(sys.argv[1])[40, 7].W_Q
    total, seconds = float(W_Q.float().sum()), time.monotonic() - started
    most = peak()
    print(json.dumps({"sum": total, "read": read, "more": most - before, "peak": most, "seconds": seconds}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is Linux's to tell")
def test_one_heads_map_of_a_checkpoint_of_20_gb_is_read_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = large_llama(tmp_path / "large")
    header = (folder / "model.safetensors").stat().st_blocks * 512
    assert (folder / "model.safetensors").stat().st_size > 20e9
    answer = subprocess.run(
        [sys.executable, "-c", dedent(MEASURED), str(folder)], check=True, capture_output=True, text=True
    )
    found = json.loads(answer.stdout)
    assert found["sum"] == WIDTH * D
    assert found["read"] <= header + 2 * WIDTH * D * 2  # the header, and the map once or as a page
    assert found["more"] < 100_000  # in 1024 bytes
    with capsys.disabled():
        print(f"\none head of 20 GB: {found['seconds']:.2f} s, peak {found['peak'] / 1024:.0f} MB")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With a Llama of which every layer is larger than what is fetched at once."""
    folder = llama(tmp_path / "repository")
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {}
    for layer in range(settings["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for side, rows in (("q", 512), ("k", 128), ("v", 128), ("o", 512)):
            tensors[f"{at}.self_attn.{side}_proj.weight"] = torch.randn(rows, 512)
        tensors[f"{at}.input_layernorm.weight"] = torch.randn(512)
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr("triptych.core.storage.hub._TAKEN_WHOLE", BY_RANGES)
    with in_place_of_the_hub(folder, tmp_path / "cache", monkeypatch) as server:
        yield server


@pytest.mark.filterwarnings("ignore::triptych.errors.SourceNote")
def test_one_heads_map_on_the_hub_is_fetched_by_its_range(hub: Hub) -> None:
    model = load("someone/model")
    assert "8 heads" in repr(model)
    head = model[2, 7]
    assert "W_Q [512, 64]" in repr(head)
    assert head.between == ["rotary positions"]
    assert head.group == (4, 5, 6, 7)
    opened = settled(hub)
    here = load(hub.folder)[2, 7]
    assert torch.equal(head.W_Q, here.W_Q)
    assert settled(hub) - opened == 512 * 64 * 4
    assert torch.equal(head.W_K, here.W_K)
    assert torch.equal(head.W_V, here.W_V)
    assert settled(hub) - opened == 3 * 512 * 64 * 4
    assert torch.equal(head.W_O, here.W_O)  # its columns lie apart: all of the map is fetched
    assert settled(hub) - opened == (3 * 64 + 512) * 512 * 4
    assert model.cost().total() == load(hub.folder).cost().total()
    assert settled(hub) - opened == (3 * 64 + 512) * 512 * 4


@pytest.mark.filterwarnings("ignore::triptych.errors.SourceNote")
@pytest.mark.parametrize("how", ["offline", "HF_HUB_OFFLINE"])
def test_offline_what_was_fetched_is_read_and_nobody_is_asked(
    hub: Hub, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how != "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    W_Q = load("someone/model")[2, 7].W_Q
    hub.status = 500  # who asks now is told nothing
    if how != "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    offline = how == "offline"
    with pytest.raises(DataError, match=r"^someone/model: model.safetensors is not in .*no connection"):
        repr(load("someone/model", offline=offline))
    with pytest.raises(DataError, match=r"^other/model: no such path, and it is not in .*: load it once"):
        load("other/model", offline=offline)
    hub.status = None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    load("someone/model")._opened.files.path  # noqa: B018 (all of it is fetched)
    hub.status = 500
    if how != "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("someone/model", "someone/model@main", f"someone/model@{'c' * 40}"):
        assert torch.equal(load(name, offline=offline)[2, 7].W_Q, W_Q)


def test_a_model_of_transformers_is_read_in_the_memory_that_it_has(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    folder = gpt2_that_runs(tmp_path / "gpt2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model = load(theirs, tokenizer=transformers.AutoTokenizer.from_pretrained(folder), device="cpu")
    text = "What a piece of work is a man!"
    run = model.run(text)
    with torch.no_grad():
        torch.testing.assert_close(run.logits, theirs(torch.tensor([run.ids])).logits[0], rtol=0, atol=1e-5)
    held = {parameter.data_ptr() for parameter in theirs.parameters()}
    shared = [parameter for parameter in model.reader.model.parameters() if parameter.data_ptr() in held]
    assert {parameter.numel() for parameter in shared} >= {theirs.transformer.wte.weight.numel()}
    written = model._opened.files.settings_folder
    assert not [*written.glob("*.safetensors")]  # nothing was written for it
    assert torch.equal(model[1, 2].W_Q, load(folder)[1, 2].W_Q)
    changed = model.ablate("1.2")
    again = load(changed.save(tmp_path / "changed"), device="cpu")
    torch.testing.assert_close(again.run(text).logits, changed.run(text).logits, rtol=0, atol=1e-5)
    del model, changed, run, shared
    gc.collect()
    assert not written.exists()


def test_what_is_no_model_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^a dict is no model: give a folder, a name on the Hub"):
        load({})
    with pytest.raises(UsageError, match=r"nowhere: there is no such file or folder") as refused:
        load(tmp_path / "nowhere")
    assert "\n" not in str(refused.value)
