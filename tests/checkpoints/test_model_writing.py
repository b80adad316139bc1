"""Models that were read are written back in the format of their checkpoint, trained further or not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoints import test_encoder_decoders_run as of_both
from checkpoints import test_encoders_run as of_encoders
from checkpoints import test_models_run as of_decoders
from checkpoints.test_models_run import apart, changed, in_float64, made
from triptych.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.checkpoints.models import ReadModel, changed_tensors, load_encoder_decoder, load_language_model
from triptych.errors import DataError
from triptych.storage.copying import FolderCopy

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# Fused and transposed maps, a tied output; gains stored relative to 1; latents and experts.
IN_EVERY_RUN = ("gpt2", "gemma3, text", "deepseek_v3")
PLACES = {
    **dict.fromkeys(of_both.CASES, of_both),
    **dict.fromkeys(of_encoders.CASES, of_encoders),
    **dict.fromkeys(of_decoders.RUN, of_decoders),
}
NAMES = [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in PLACES]
# Tables of positions that are products of several tensors.
NOT_WRITTEN = [
    name for name in of_encoders.CASES if name.startswith("deberta") and name != "deberta, learned"
]
TOLERANCE = {**of_decoders.TOLERANCE, **of_encoders.TOLERANCE, **of_both.TOLERANCE}


def read(name: str, folder: Path) -> ReadModel:
    return load_encoder_decoder(folder) if PLACES[name] is of_both else load_language_model(folder).model


def write_read_model(model: ReadModel, source: Path, target: Path) -> None:
    checkpoint = open_checkpoint(source, mapped=True)
    assert isinstance(checkpoint, Checkpoint)
    changed = dict(changed_tensors(model, checkpoint))
    with FolderCopy(source, target) as copy:
        copy.write_shards(changed.get)
        copy.write_beside({})
        copy.finish()


@torch.no_grad()
def trained(model: ReadModel) -> ReadModel:
    """The model with other numbers everywhere, alike where layers share a tensor of the file."""
    for parameter in model.parameters():
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.05)
    return model


def outputs(name: str, model: nn.Module) -> Tensor:
    """What a model gives for some tokens, ours or that of `transformers`."""
    ours = not isinstance(model, transformers.PreTrainedModel)
    if PLACES[name] is of_both:
        src, tgt = of_both.some_ids(9), of_both.some_ids(7)
        return model(src, tgt) if ours else of_both.theirs(model, src, tgt).logits
    ids = of_decoders.some_ids()
    if ours:
        return model(ids).logits  # type: ignore[no-any-return]
    return of_encoders.outputs(of_decoders.theirs(model, ids))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_model_with_other_numbers_is_what_transformers_and_we_read_again(name: str, tmp_path: Path) -> None:
    other = PLACES[name].made(name, tmp_path / "made")  # type: ignore[attr-defined]
    model = trained(read(name, tmp_path / "made"))
    if name in NOT_WRITTEN:
        with pytest.raises(DataError, match=r"tables of positions of .* changed"):
            write_read_model(model, tmp_path / "made", tmp_path / "written")
        return
    write_read_model(model, tmp_path / "made", tmp_path / "written")
    expected = outputs(name, model)
    assert apart(outputs(name, read(name, tmp_path / "written")), expected) < 1e-10
    with in_float64():
        again = type(other).from_pretrained(tmp_path / "written", config=other.config, dtype=torch.float64)
    assert apart(outputs(name, again.eval()), expected) < TOLERANCE.get(name, 1e-10)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_numbers_that_came_back_to_what_they_were_are_stored_as_they_were(name: str, tmp_path: Path) -> None:
    PLACES[name].made(name, tmp_path / "made")  # type: ignore[attr-defined]
    write_read_model(read(name, tmp_path / "made"), tmp_path / "made", tmp_path / "written")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("made", "written"))
    assert list(before) == list(after)
    assert all(torch.equal(after[tensor], numbers) for tensor, numbers in before.items())
    for file in (tmp_path / "made").glob("*.json"):
        assert (tmp_path / "written" / file.name).read_bytes() == file.read_bytes()


@torch.no_grad()
def test_only_what_changed_is_rounded_to_the_dtype_of_the_file(tmp_path: Path) -> None:
    made("llama", tmp_path / "made").bfloat16().save_pretrained(tmp_path / "made")
    model = load_language_model(tmp_path / "made", dtype=torch.float32).model
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
    write_read_model(trained(read("gpt2", tmp_path / "made")), tmp_path / "made", tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["transformer.wte.weight"])
    assert not torch.equal(written["lm_head.weight"], table)


@torch.no_grad()
def test_layers_that_share_a_tensor_and_differ_now_are_refused(tmp_path: Path) -> None:
    of_encoders.made("mpnet", tmp_path / "made")
    model = read("mpnet", tmp_path / "made")
    next(p for name, p in model.named_parameters() if name.endswith("bias_table")).add_(1)
    with pytest.raises(DataError, match=r"layers share .*relative_attention_bias.weight"):
        write_read_model(model, tmp_path / "made", tmp_path / "written")
    assert not (tmp_path / "written").exists()


@torch.no_grad()
def test_numbers_that_the_files_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    made("llama", tmp_path / "made").half().save_pretrained(tmp_path / "made")
    model = load_language_model(tmp_path / "made", dtype=torch.float32).model
    model.final_norm.weight[0] = 1e6  # type: ignore[union-attr, index, operator]
    with pytest.raises(DataError, match=r"numbers for model.norm.weight do not fit float16"):
        write_read_model(model, tmp_path / "made", tmp_path / "written")
