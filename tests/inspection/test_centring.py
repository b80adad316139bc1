"""What LayerNorm removes is in no measure: a change along it changes neither the model nor a figure."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from edited import edited_tensors, set_tensors
from small_checkpoints import HEADS, WIDTH, D, bert_that_runs, gpt2_that_runs, llama
from triptych.core.algebra.centring import removed_directions
from triptych.core.algebra.weights import Norm
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.models.configuration import LanguageModelConfig
from triptych.core.models.language_model import LanguageModel
from triptych.core.models.site_configuration import AttentionConfig, PositionsConfig
from triptych.model import load
from triptych.seeing.inspection import MEASURES, inspect
from triptych.seeing.inspection.record import findings

TEXT = "The cat sat on the mat"


def _along(gain: Tensor) -> Tensor:
    """`[d, 1]`: where the output of a LayerNorm with this gain is constant."""
    direction = 1 / gain.double()
    return (direction / direction.norm())[:, None]


def _without(directions: Tensor, W: Tensor) -> Tensor:
    return W.double() - directions @ (directions.mT @ W.double())


def _changed_gpt2(folder: Path) -> None:
    """Add to what every map reads and writes a part that no LayerNorm lets through."""
    with edited_tensors(folder) as tensors:
        for name, tensor in tensors.items():
            if name.endswith("attn.c_attn.weight"):
                at = name.removesuffix("attn.c_attn.weight")
                u, row = _along(tensors[f"{at}ln_1.weight"]), 5 * torch.randn(1, 3 * D).double()
                tensors[name] = (tensor + u @ row).float()
                shift = tensors[f"{at}ln_1.bias"].double()[None] @ u @ row
                tensors[f"{at}attn.c_attn.bias"] -= shift[0].float()
            if name.endswith("attn.c_proj.weight"):  # what is written has another mean
                tensors[name] = tensor + 5 * torch.randn(D, 1)


def _figures(folder: Path) -> dict[str, list[Any]]:
    layers = inspect(open_checkpoint(folder)).layers
    return {m.name: [value for layer in layers for value in layer.figures[m.name]] for m in MEASURES}


def test_a_change_that_no_layer_norm_lets_through_changes_no_figure(tmp_path: Path) -> None:
    folder = gpt2_that_runs(tmp_path / "gpt2")
    before, figures = load(folder), _figures(folder)
    logits = before.run(TEXT).logits
    scores = [before.composition(into).scores for into in ("Q", "K", "V")]  # type: ignore[arg-type]
    W_V = before["1.0"].W_V
    _changed_gpt2(folder)
    after = load(folder)
    assert (after.run(TEXT).logits - logits).abs().max() < 1e-4 * logits.abs().max()
    assert (after["1.0"].W_V - W_V).norm() > W_V.norm()
    for name, values in _figures(folder).items():
        assert values == pytest.approx(figures[name], rel=2e-4, abs=2e-6), name
    for into, own in zip(("Q", "K", "V"), scores, strict=True):
        found = after.composition(into)  # type: ignore[arg-type]
        torch.testing.assert_close(found.scores, own, rtol=1e-4, atol=1e-6, equal_nan=True)
        assert found.chance == pytest.approx((D - 1) ** -0.5)
    head = after["1.0"].folded
    assert head.W_Q.sum(dim=0).abs().max() < 1e-4  # it reads nothing of the mean


def test_figures_are_those_of_maps_that_are_centred_by_hand(tmp_path: Path) -> None:
    folder = gpt2_that_runs(tmp_path / "gpt2")
    _changed_gpt2(folder)
    inspection = inspect(open_checkpoint(folder))
    found, tensors = inspection.layers[1], load_file(folder / "model.safetensors")
    u = _along(tensors["transformer.h.1.ln_1.weight"])
    joined = tensors["transformer.h.1.attn.c_attn.weight"]
    own = slice(2 * WIDTH, 3 * WIDTH)
    W_Q, W_K, W_V = (_without(u, part[:, own]) for part in joined.split(D, dim=1))
    W_O = tensors["transformer.h.1.attn.c_proj.weight"].double()[own]
    W_O = W_O - W_O.mean(dim=1, keepdim=True)
    assert found.spectra["ov"][2] == pytest.approx(torch.linalg.svdvals(W_V @ W_O)[:WIDTH].tolist())
    assert found.spectra["qk"][2] == pytest.approx(torch.linalg.svdvals(W_Q @ W_K.T)[:WIDTH].tolist())
    eigenvalues = torch.linalg.eigvals(W_V @ W_O)
    copying = eigenvalues.real.sum() / eigenvalues.abs().sum()
    assert found.figures["ov_copying"][2] == pytest.approx(float(copying))
    Q, K = (torch.linalg.qr(W).Q for W in (W_Q, W_K))
    overlap = float((Q.T @ K).square().sum()) / WIDTH
    chance = WIDTH / (D - 1)
    assert found.figures["qk_overlap"][2] == pytest.approx(overlap)
    assert found.figures["qk_times_chance"][2] == pytest.approx(overlap / chance)
    assert found.figures["qk_excess"][2] == pytest.approx((overlap - chance) / (1 - chance))
    assert found.centred
    assert "Centred in 3 layers" in " ".join(findings(inspection))


def test_composition_is_that_of_forms_that_are_centred_by_hand(tmp_path: Path) -> None:
    folder = gpt2_that_runs(tmp_path / "gpt2")
    _changed_gpt2(folder)
    model = load(folder)
    tensors = load_file(folder / "model.safetensors")
    centre = torch.eye(D, dtype=torch.float64) - 1 / D

    def read(layer: int, W: Tensor) -> Tensor:
        return centre @ (tensors[f"transformer.h.{layer}.ln_1.weight"].double()[:, None] * W.double())

    one, other = model["0.1"], model["2.3"]
    written = read(0, one.W_V) @ one.W_O.double() @ centre
    forms = {
        "Q": read(2, other.W_Q) @ read(2, other.W_K).T,
        "K": read(2, other.W_K) @ read(2, other.W_Q).T,
        "V": read(2, other.W_V) @ other.W_O.double() @ centre,
    }
    for into, form in forms.items():
        expected = (written @ form).norm() / written.norm() / form.norm()
        found = model.composition(into).scores[0, 1, 2, 3]  # type: ignore[arg-type]
        assert float(found) == pytest.approx(float(expected), rel=1e-4), into


def test_a_post_norm_is_left_out_of_what_the_next_layer_reads(tmp_path: Path) -> None:
    folder = bert_that_runs(tmp_path / "bert")
    gain = 0.5 + torch.rand(D)
    set_tensors(folder, {"encoder.layer.0.output.LayerNorm.weight": gain})
    model, figures = load(folder), _figures(folder)
    vectors = model.run(TEXT).logits
    with edited_tensors(folder) as tensors:
        for side in ("query", "key", "value"):
            weight = tensors[f"encoder.layer.1.attention.self.{side}.weight"]
            weight += 2 * torch.randn(D, 1) @ _along(gain).T.float()
        tensors["encoder.layer.1.attention.output.dense.weight"] += 2 * torch.randn(1, D)
    torch.testing.assert_close(load(folder).run(TEXT).logits, vectors, rtol=0, atol=1e-4)
    for name, values in _figures(folder).items():
        assert values == pytest.approx(figures[name], rel=2e-4, abs=2e-6), name


def test_an_rms_norm_removes_nothing(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama")
    layer = inspect(open_checkpoint(folder), ignore_rotary=True).layers[0]
    tensors = load_file(folder / "model.safetensors")
    W_Q, W_K = (tensors[f"model.layers.0.self_attn.{side}_proj.weight"].double().T for side in "qk")
    S = torch.linalg.svdvals(W_Q[:, :WIDTH] @ W_K[:, :WIDTH].T)[:WIDTH]
    assert layer.spectra["qk"][0] == pytest.approx(S.tolist())
    assert not layer.centred
    assert len(layer.figures["qk_excess"]) == HEADS


def test_a_gain_of_zero_is_a_channel_that_nothing_comes_through() -> None:
    gain = torch.tensor([1.0, 0.0, 2.0, 0.0])
    found = removed_directions(Norm(gain, centred=True))
    assert found is not None
    assert found.tolist() == [[0, 0], [1, 0], [0, 0], [0, 1]]
    small = removed_directions(Norm(torch.tensor([1.0, 1e-30, 2.0]), centred=True))
    assert small is not None
    assert small[:, 0].tolist() == pytest.approx([1e-30, 1.0, 5e-31])
    assert removed_directions(Norm(gain)) is None


def test_maps_that_read_all_that_a_layer_norm_lets_through_share_all_of_it() -> None:
    """With one matrix for each head, W_Q is square and the keys are the input itself."""
    config = LanguageModelConfig(
        num_layers=1,
        d_model=D,
        d_ff=D,
        attention=AttentionConfig(projections="bilinear", num_heads=HEADS),
        positions=PositionsConfig(scheme="sinusoidal"),
        context=16,
    )
    (layer,) = load(LanguageModel.of(config, "decoder", 50)).inspect().layers
    assert layer.figures["qk_overlap"] == pytest.approx([1.0] * HEADS)
