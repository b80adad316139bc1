"""Models that were read are written back in the format of their checkpoint, trained further or not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.oracle import apart, changed, in_float64
from checkpoints.runs import ENCODERS, RUNS, TOLERANCE, loaded, made, outputs, read_by, some, theirs
from triptych.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.core.checkpoints.stored_models import changed_tensors, load_language_model
from triptych.core.models import AnyModel
from triptych.core.storage.copying import FolderCopy
from triptych.errors import DataError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# Fused and transposed maps, a tied output; gains stored relative to 1; latents and experts.
IN_EVERY_RUN = ("gpt2", "gemma3, text", "deepseek_v3")
NAMES = some(RUNS, IN_EVERY_RUN)
# Tables of positions that are products of several tensors.
NOT_WRITTEN = [name for name in ENCODERS if name.startswith("deberta") and name != "deberta, learned"]


def write_read_model(model: AnyModel, source: Path, target: Path) -> None:
    checkpoint = open_checkpoint(source, mapped=True)
    assert isinstance(checkpoint, Checkpoint)
    changed = dict(changed_tensors(model, checkpoint))
    with FolderCopy(source, target) as copy:
        copy.write_shards(changed.get)
        copy.write_beside({})
        copy.finish()


@torch.no_grad()
def trained(model: AnyModel) -> AnyModel:
    """The model with other numbers everywhere, alike where layers share a tensor of the file."""
    for parameter in model.parameters():
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.05)
    return model


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_model_with_other_numbers_is_what_transformers_and_we_read_again(name: str, tmp_path: Path) -> None:
    other = made(name, tmp_path / "made")
    model = trained(loaded(name, tmp_path / "made"))
    if name in NOT_WRITTEN:
        with pytest.raises(DataError, match=r"tables of positions of .* changed"):
            write_read_model(model, tmp_path / "made", tmp_path / "written")
        return
    write_read_model(model, tmp_path / "made", tmp_path / "written")
    ids = read_by(name)
    expected = outputs(model(*ids))
    assert apart(outputs(loaded(name, tmp_path / "written")(*ids)), expected) < 1e-10
    with in_float64():
        again = type(other).from_pretrained(tmp_path / "written", config=other.config, dtype=torch.float64)
    assert apart(outputs(theirs(again.eval(), *ids)), expected) < TOLERANCE.get(name, 1e-10)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_numbers_that_came_back_to_what_they_were_are_stored_as_they_were(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "made")
    write_read_model(loaded(name, tmp_path / "made"), tmp_path / "made", tmp_path / "written")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("made", "written"))
    assert list(before) == list(after)
    assert all(torch.equal(after[tensor], numbers) for tensor, numbers in before.items())
    for file in (tmp_path / "made").glob("*.json"):
        assert (tmp_path / "written" / file.name).read_bytes() == file.read_bytes()


@torch.no_grad()
def test_only_what_changed_is_rounded_to_the_dtype_of_the_file(tmp_path: Path) -> None:
    made("llama", tmp_path / "made").bfloat16().save_pretrained(tmp_path / "made")
    model = load_language_model(tmp_path / "made", dtype=torch.float32)
    model.blocks[0].feed_forward.inner.weight[0, 0] = 1 / 3  # type: ignore[union-attr, index, operator]
    write_read_model(model, tmp_path / "made", tmp_path / "written")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("made", "written"))
    differing = {name for name in before if not torch.equal(before[name], after[name])}
    assert differing == {"model.layers.0.mlp.up_proj.weight"}
    assert after[differing.pop()][0, 0] == torch.tensor(1 / 3).bfloat16()


@torch.no_grad()
def test_a_tied_map_that_is_in_the_file_as_well_changes_with_the_table(tmp_path: Path) -> None:
    made("gpt2", tmp_path / "made")
    table = load_file(tmp_path / "made" / "model.safetensors")["transformer.wte.weight"]
    changed(tmp_path / "made", {"lm_head.weight": table.clone()})
    write_read_model(trained(loaded("gpt2", tmp_path / "made")), tmp_path / "made", tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["transformer.wte.weight"])
    assert not torch.equal(written["lm_head.weight"], table)


@torch.no_grad()
def test_layers_that_share_a_tensor_and_differ_now_are_refused(tmp_path: Path) -> None:
    made("mpnet", tmp_path / "made")
    model = loaded("mpnet", tmp_path / "made")
    next(p for name, p in model.named_parameters() if name.endswith("bias_table")).add_(1)
    with pytest.raises(DataError, match=r"layers share .*relative_attention_bias.weight"):
        write_read_model(model, tmp_path / "made", tmp_path / "written")
    assert not (tmp_path / "written").exists()


@torch.no_grad()
def test_numbers_that_the_files_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    made("llama", tmp_path / "made").half().save_pretrained(tmp_path / "made")
    model = load_language_model(tmp_path / "made", dtype=torch.float32)
    model.final_norm.weight[0] = 1e6  # type: ignore[union-attr, index, operator]
    with pytest.raises(DataError, match=r"numbers for model.norm.weight do not fit float16"):
        write_read_model(model, tmp_path / "made", tmp_path / "written")
