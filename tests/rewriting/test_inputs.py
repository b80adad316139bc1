"""Layers tried on what a text gives them: kept beside the certificate, and tried again from there."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from checkpoints.tiny_marian import write_marian
from rewriting.certificates import failing
from small_checkpoints import cannot_be_run, gpt2_that_runs
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.weights import Norm
from triptych.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.core.checkpoints.stored_layers import Site
from triptych.core.storage.copying import CERTIFICATE
from triptych.errors import DataError
from triptych.files import file_hash
from triptych.rewriting.certificate import read_certificate
from triptych.rewriting.functions import FoldNorm, FoldValueBias, Truncate
from triptych.rewriting.inputs import INPUTS, before_gain, read_inputs, write_inputs
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.verification import verify
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.running.opening import Seen

pytest.importorskip("transformers", reason="it comes with the extra [dev]")
ON_TEXT = "errors measured on what the text gives"
EXACT = RewriteRecipe(step=(FoldNorm(), FoldValueBias()))


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, `text.txt` and what was made of them, `out`."""
    folder = tmp_path_factory.mktemp("on_text")
    text = folder / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 5)
    rewrite_checkpoint(str(gpt2_that_runs(folder / "source")), folder / "out", EXACT, text=text)
    return folder


@pytest.fixture
def out(rewritten: Path, tmp_path: Path) -> Path:
    """A copy of what was made, to be spoiled."""
    shutil.copytree(rewritten / "out", tmp_path / "out")
    return tmp_path / "out"


def test_what_is_kept_is_what_the_models_own_layers_are_given(rewritten: Path) -> None:
    import transformers

    given = read_inputs(rewritten / "out" / INPUTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        rewritten / "source", attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(rewritten / "source")
    ids = tokenizer((rewritten / "text.txt").read_text(), return_tensors="pt")["input_ids"]
    heard = {}
    layer = model.transformer.h[1].attn
    layer.register_forward_hook(lambda module, x, y: heard.update(x=x[0], y=y[0]))
    source = open_checkpoint(rewritten / "source")
    name = source.sites[1].name
    with torch.no_grad():
        model(ids[:, : source.longest_text(source.sites[1])])
    length = given[name].x.shape[1]
    assert length == 16
    torch.testing.assert_close(given[name].x, heard["x"][:, :length], rtol=1e-5, atol=1e-6)
    read = source.read(source.sites[1])
    found = run_layer(read.weights, given[name].x)
    torch.testing.assert_close(found, heard["y"][:, :length], rtol=1e-4, atol=1e-5)


def test_layers_are_tried_on_the_text_and_tried_again_without_the_model(
    rewritten: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = read_certificate(rewritten / "out")
    for layer in certificate.layers:
        assert layer.measured_on_text is not None
        assert 0 < layer.measured_on_text.relative < 1e-6
    assert "some positions of text.txt" in (rewritten / "out" / "README.md").read_text()
    monkeypatch.setitem(sys.modules, "transformers", None)  # what is not there cannot be imported
    checks = {check.claim: check for check in verify(rewritten / "out")}
    assert all(check.held is not False for check in checks.values() if check.claim != "whole models compared")
    assert checks["whole models compared"].held is None
    assert f"{len(certificate.layers)} layers" in checks[ON_TEXT].found


def test_with_the_text_the_inputs_themselves_are_made_again(rewritten: Path, out: Path) -> None:
    text = rewritten / "text.txt"
    assert failing(rewritten / "out", text=text) == []
    given = read_inputs(out / INPUTS)
    first = next(iter(given))
    write_inputs(out / INPUTS, given | {first: Seen(given[first].x * 1.1, None)})
    with_inputs_as_they_are(out)
    assert "inputs kept of the text" in failing(out, text=text)


def resealed(out: Path, **changes: object) -> None:
    certificate = read_certificate(out).model_copy(update=changes)
    (out / CERTIFICATE).write_bytes(certificate.sealed().as_json())


def with_inputs_as_they_are(out: Path) -> None:
    """The hash of the inputs in the certificate made that of their file."""
    resealed(out, files={**read_certificate(out).files, INPUTS: file_hash(out / INPUTS)})


def test_other_inputs_are_noticed(out: Path) -> None:
    tensors = load((out / INPUTS).read_bytes())
    (out / INPUTS).write_bytes(save({name: -2 * tensor for name, tensor in tensors.items()}))
    assert failing(out) == ["other files as written"]
    with_inputs_as_they_are(out)
    assert failing(out) == [ON_TEXT]


def test_another_figure_is_noticed(out: Path) -> None:
    layers = list(read_certificate(out).layers)
    measured = layers[0].measured_on_text
    assert measured is not None
    other = measured.model_copy(update={"relative": measured.relative * 1.01})
    layers[0] = layers[0].model_copy(update={"measured_on_text": other})
    resealed(out, layers=tuple(layers))
    assert ON_TEXT in failing(out)


def test_a_layer_that_is_left_out_is_noticed(out: Path) -> None:
    layers = list(read_certificate(out).layers)
    errors = [layer.measured_on_text.relative for layer in layers if layer.measured_on_text is not None]
    least = errors.index(min(errors))  # the card names the largest
    layers[least] = layers[least].model_copy(update={"measured_on_text": None})
    resealed(out, layers=tuple(layers))
    assert failing(out) == [ON_TEXT]


def test_inputs_of_an_earlier_rewrite_are_not_taken_along(rewritten: Path, tmp_path: Path) -> None:
    recipe = RewriteRecipe(step=(Truncate(rank=2),))
    again = rewrite_checkpoint(str(rewritten / "out"), tmp_path / "again", recipe)
    assert not (tmp_path / "again" / INPUTS).exists()
    assert all(layer.measured_on_text is None for layer in again.layers)
    assert failing(tmp_path / "again") == []


def test_cross_attention_keeps_what_its_keys_are_made_of(tmp_path: Path) -> None:
    source, pairs = tmp_path / "source", tmp_path / "pairs.tsv"
    source.mkdir()
    torch.manual_seed(7)
    write_marian(source, dtype=torch.float32)
    pairs.write_text("a b c\tc b a\nb\ta\n" * 3)
    recipe = RewriteRecipe(step=(FoldValueBias(),))
    done = rewrite_checkpoint(str(source), tmp_path / "out", recipe, text=pairs)
    given = read_inputs(tmp_path / "out" / INPUTS)
    with_memory = {name for name, found in given.items() if found.memory is not None}
    assert with_memory == {site.name for site in open_checkpoint(source).sites if site.kind == "cross"}
    assert with_memory
    assert all(layer.measured_on_text is not None for layer in done.layers)
    assert failing(tmp_path / "out") == []


def test_a_model_whose_layers_cannot_be_listened_to_is_compared_all_the_same(
    rewritten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(self: Checkpoint, site: Site) -> tuple[str, str]:
        raise DataError(f"{self.name}: {site.name} has no module of its own for its maps")

    monkeypatch.setattr(Checkpoint, "input_modules", deaf)
    # It is run by `transformers`, then.
    monkeypatch.setattr("triptych.core.checkpoints.stored_models.read_language_model", cannot_be_run)
    done = rewrite_checkpoint(str(rewritten / "source"), tmp_path / "out", EXACT, text=rewritten / "text.txt")
    assert done.end_to_end is not None
    assert "no module of its own" in done.not_on_text
    assert done.not_on_text in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / INPUTS).exists()
    assert failing(tmp_path / "out", text=rewritten / "text.txt") == []


def test_a_gain_is_taken_off_and_a_channel_without_one_is_zero() -> None:
    norm = Norm(torch.tensor([1.0, -1.0, 2.0]), torch.tensor([0.5, 0.25, 0.0]), offset=1.0)
    normal = torch.tensor([[[3.0, 4.0, -5.0]]], dtype=torch.float64)
    given = normal * (norm.weight + 1) + torch.tensor([0.5, 0.25, 0.0])
    expected = torch.tensor([[[3.0, 0.0, -5.0]]], dtype=torch.float64)
    torch.testing.assert_close(before_gain(given, norm), expected)
    assert before_gain(given, None) is given


def test_a_file_of_inputs_that_is_damaged_is_refused(out: Path) -> None:
    (out / INPUTS).write_bytes(b"\x10")
    with pytest.raises(DataError):
        read_inputs(out / INPUTS)
    (out / INPUTS).unlink()
    with pytest.raises(DataError, match="is missing"):
        read_inputs(out / INPUTS)
    assert json.loads((out / CERTIFICATE).read_text())["files"][INPUTS]
