"""Inspecting a checkpoint: what is read, what is left out, what is said."""

import csv
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest
import torch
from safetensors.torch import load_file, save_file

from edited import edited_tensors, set_fields
from small_checkpoints import HEADS, LAYERS, WIDTH, D, gpt2, llama
from triptych.core.algebra.semantics import Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import MultiHeadAttention
from triptych.core.attention.projections import parameterisation
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.stored_layers import AttentionLayer, AttentionSource, Site
from triptych.errors import UsageError
from triptych.seeing.inspection import MEASURES, Inspection, inspect
from triptych.seeing.inspection.drawing import shaded_map
from triptych.seeing.inspection.record import (
    average_lines,
    findings,
    heads_page,
    near_copies,
    outliers,
    side_by_side,
)


@final
class OneLayer(AttentionSource):
    """A layer that is already there."""

    def __init__(self, weights: AttentionWeights) -> None:
        self.name, self.written_as, self.known_by = "a layer", "tests", "what it is"
        self.sites, self.num_tensors = (Site("encoder", 0, "self", "layer"),), 0
        self.left_over, self.unread, self._weights = (), {}, weights

    def read(self, site: Site) -> AttentionLayer:
        return AttentionLayer(site, self._weights, ())

    def bytes_of(self, site: Site) -> int:
        return 1

    @property
    def num_parameters(self) -> int:
        return 0

    def input_modules(self, site: Site) -> tuple[str, str]:
        return site.module, site.module

    def longest_text(self, site: Site) -> int:
        return 1

    def broken(self, layer: AttentionLayer) -> dict[str, int]:
        return {}


def inspected(folder: Path, **options: Any) -> Inspection:
    return inspect(open_checkpoint(folder), **options)


def test_every_head_has_a_row_with_every_measure(tmp_path: Path) -> None:
    found = inspected(gpt2(tmp_path))
    rows = found.rows()
    assert len(rows) == LAYERS * HEADS
    names = [measure.name for measure in MEASURES]
    assert list(rows[0])[7:] == names
    assert all(set(layer.figures) == set(names) for layer in found.layers)
    assert all(math.isfinite(row[name]) for row in rows for name in names)
    others = {"wte.weight", "wpe.weight", *(f"h.{i}.mlp.c_fc.weight" for i in range(LAYERS))}
    assert set(found.left_over) == others


def test_figures_are_those_of_the_tensors(tmp_path: Path) -> None:
    found = inspected(gpt2(tmp_path)).layers[1]
    joined = load_file(tmp_path / "model.safetensors")["h.1.attn.c_attn.weight"].double()
    joined = joined - joined.mean(dim=0)  # LayerNorm removes the mean
    head = slice(2 * WIDTH, 3 * WIDTH)
    W_Q, W_K = joined[:, head], joined[:, D:][:, head]
    S = torch.linalg.svdvals(W_Q @ W_K.T)[:WIDTH]
    assert found.spectra["qk"][2] == pytest.approx(S.tolist())
    assert found.figures["qk_cosine"][2] == pytest.approx(float((W_Q * W_K).sum() / W_Q.norm() / W_K.norm()))
    energy = S.square() / S.square().sum()
    assert found.figures["qk_top"][2] == pytest.approx(float(energy[0]))
    kept = int((energy.cumsum(0) < 0.95).sum()) + 1
    assert found.figures["qk_rank_95"][2] == kept


def test_layers_and_heads_may_be_chosen(tmp_path: Path) -> None:
    whole = inspected(gpt2(tmp_path))
    part = inspected(tmp_path, layers=[2], heads=[1, 3])
    assert [layer.layer for layer in part.layers] == [2]
    assert part.layers[0].heads == (1, 3)
    for name, values in part.layers[0].figures.items():
        assert values == [whole.layers[2].figures[name][head] for head in (1, 3)]
    with pytest.raises(UsageError, match="layer 7 does not exist; layers are 0 to 2"):
        inspected(tmp_path, layers=[7])
    with pytest.raises(UsageError, match="head 7 does not exist; heads are 0 to 3"):
        inspected(tmp_path, heads=[7])


def test_rotary_heads_are_measured_by_rotary_pairs_unless_asked_otherwise(tmp_path: Path) -> None:
    found, raw = inspected(llama(tmp_path)), inspected(tmp_path, ignore_rotary=True)
    layer, ignored = found.layers[0], raw.layers[0]
    assert layer.positions == "rotary"
    # θ of the four pairs: 1, 0.1, 0.01, 0.001; within 64 positions the last two stay below a radian.
    assert layer.rotary_pairs == (2, 2)
    assert ignored.rotary_pairs is None
    assert len(layer.spectra["qk"][0]) == 2 + 4
    assert len(ignored.spectra["qk"][0]) == WIDTH
    assert layer.figures["qk_symmetry"] == [None] * HEADS
    assert None not in ignored.figures["qk_symmetry"]
    assert layer.spectra["ov"] == ignored.spectra["ov"]
    assert "Rotary positions in 3 layers: W_QK is measured by rotary pairs." in " ".join(findings(found))
    assert "Rotary positions are ignored" in " ".join(findings(raw))
    assert "4 query heads share 2 key heads" in findings(found)[0]


def test_what_is_not_finite_is_reported_and_the_rest_is_inspected(tmp_path: Path) -> None:
    broken = torch.randn(D, 3 * D)
    broken[0, 5], broken[3, 6] = math.nan, math.inf  # queries of head 0
    found = inspected(gpt2(tmp_path, {"h.1.attn.c_attn.weight": broken}))
    layer = found.layers[1]
    assert layer.broken == {"h.1.attn.c_attn.weight": 2}
    assert layer.figures["qk_rank"][0] is None
    assert None not in layer.figures["qk_rank"][1:]
    assert found.layers[0].broken == {}
    assert "h.1.attn.c_attn.weight (2 entries)" in " ".join(findings(found))


def test_a_bias_or_a_gain_that_is_not_finite_is_reported_too(tmp_path: Path) -> None:
    bias, gain = "h.0.attn.c_attn.bias", "h.2.ln_1.weight"
    changed = {bias: torch.full((3 * D,), math.nan), gain: torch.full((D,), math.inf)}
    found = inspected(gpt2(tmp_path, changed))
    assert [layer.broken for layer in found.layers] == [{bias: 3 * D}, {}, {gain: D}]
    assert None not in found.layers[0].figures["qk_rank"]


def test_a_norm_of_queries_that_is_not_finite_is_reported_too(tmp_path: Path) -> None:
    with edited_tensors(llama(tmp_path)) as tensors:
        for layer, side in itertools.product(range(LAYERS), "qk"):
            tensors[f"model.layers.{layer}.self_attn.{side}_norm.weight"] = torch.ones(WIDTH)
        tensors["model.layers.1.self_attn.q_norm.weight"][2] = math.nan
    set_fields(tmp_path / "config.json", model_type="qwen3", head_dim=WIDTH)
    found = inspected(tmp_path)
    assert [layer.broken for layer in found.layers] == [{}, {"model.layers.1.self_attn.q_norm.weight": 1}, {}]
    said = " ".join(findings(found))
    assert f"In {LAYERS} of {LAYERS} layers queries and keys are normalised before they meet" in said


def test_a_window_shorter_than_the_text_decides_which_pairs_are_slow(tmp_path: Path) -> None:
    config = llama(tmp_path) / "config.json"
    set_fields(config, model_type="mistral", max_position_embeddings=10**6, rope_theta=10**5)
    turning = []
    for window in (None, 100):
        set_fields(config, sliding_window=window)
        turning.append([layer.rotary_pairs for layer in inspected(tmp_path).layers])
    # Frequencies 10^(-5 f / 4): 1, 0.056, 0.0032, 0.00018.
    assert turning == [[(4, 0)] * LAYERS, [(2, 2)] * LAYERS]
    lists = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.0, 1.0, 1e6]}
    scaling = {"type": "longrope", "original_max_position_embeddings": 4096, **lists}
    set_fields(config, rope_scaling=scaling, sliding_window=None)
    assert [layer.rotary_pairs for layer in inspected(tmp_path).layers] == [(3, 1)] * LAYERS


def test_nothing_chosen_is_refused(tmp_path: Path) -> None:
    gpt2(tmp_path)
    with pytest.raises(UsageError, match="no layers are chosen"):
        inspected(tmp_path, layers=[])
    with pytest.raises(UsageError, match="no heads are chosen"):
        inspected(tmp_path, heads=[])


def test_figures_of_rotary_pairs_are_not_set_beside_those_of_forms(tmp_path: Path) -> None:
    one, other = inspected(gpt2(tmp_path / "gpt2")), inspected(llama(tmp_path / "llama"))
    rows = {row[0]: row[1:] for row in side_by_side(one, other).rows}
    assert rows["figures of W_QK describe the"] == ("form", "rotary pairs", "not to be compared")
    assert "effective rank of W_QK" not in rows
    assert "effective rank of W_OV" in rows
    assert "effective rank of W_QK" in {row[0] for row in side_by_side(one, one).rows}
    assert "near-copies of W_QK are left out" in " ".join(findings(other))
    assert "left out" not in " ".join(findings(one))


def test_a_stack_that_is_not_in_the_file_is_said_to_be_missing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("checkpoints.test_families").made("bart", tmp_path)
    with edited_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if "decoder" in name]:
            del tensors[name]
    found = inspected(tmp_path)
    assert found.absent == ("decoder",)
    assert "Not in the file, though in the configuration: decoder" in " ".join(findings(found))


def test_what_stands_between_maps_and_heads_is_said(tmp_path: Path) -> None:
    rotary = inspected(llama(tmp_path / "llama"))
    assert {row["qk_of"] for row in rotary.rows()} == {"rotary pairs"}
    assert {row["qk_of"] for row in inspected(tmp_path / "llama", ignore_rotary=True).rows()} == {
        "form, rotary ignored"
    }
    assert {row["positions"] for row in inspected(gpt2(tmp_path / "gpt2")).rows()} == {"learned"}
    # Two key heads serve two query heads each: their likeness to values is counted once.
    assert f"of {LAYERS * HEADS // 2} pairs above chance" in " ".join(average_lines(rotary))


def test_near_copies_are_found_across_layers_whatever_their_basis(tmp_path: Path) -> None:
    source = load_file(gpt2(tmp_path) / "model.safetensors")
    first, last = source["h.0.attn.c_attn.weight"], source["h.2.attn.c_attn.weight"].clone()
    out, out_last = source["h.0.attn.c_proj.weight"], source["h.2.attn.c_proj.weight"].clone()
    one, other = slice(WIDTH, 2 * WIDTH), slice(3 * WIDTH, 4 * WIDTH)
    G = torch.randn(WIDTH, WIDTH)
    last[:, other] = first[:, one] @ G
    last[:, D:][:, other] = -first[:, D:][:, one] @ torch.linalg.inv(G).T
    last[:, 2 * D :][:, other] = first[:, 2 * D :][:, one]
    out_last[other] = out[one]
    changed = {"h.2.attn.c_attn.weight": last, "h.2.attn.c_proj.weight": out_last}
    found = inspected(gpt2(tmp_path, changed)).copies
    pairs = {(copy.form, copy.one, copy.other): copy.cosine for copy in found}
    names = "decoder 0, head 1", "decoder 2, head 3"
    assert pairs == {("qk", *names): pytest.approx(-1, abs=1e-4), ("ov", *names): pytest.approx(1)}
    found = inspected(tmp_path)
    assert "1 pair of heads look alike" in " ".join(findings(found))
    assert near_copies(found).rows[0][1:3] == names


def test_what_could_be_folded_is_counted_or_refused_with_the_reason(tmp_path: Path) -> None:
    foldable = inspected(gpt2(tmp_path)).layers[0].foldable
    assert foldable == {"drop the key bias": D, "fold the value bias": D}
    assert all(str(reason) for reason in inspected(llama(tmp_path / "llama")).layers[0].foldable.values())


def test_layers_that_clip_say_so_and_lose_no_rank(tmp_path: Path) -> None:
    layer = inspected(clipped_mpt(tmp_path)).layers[0]
    assert "queries, keys and values are clipped at ±0.5, which the forms leave out" in layer.caveats
    assert layer.cut == {}


def clipped_mpt(folder: Path) -> Path:
    at = "transformer.blocks.0"
    tensors = {
        f"{at}.attn.Wqkv.weight": torch.randn(3 * D, D),
        f"{at}.attn.out_proj.weight": torch.randn(D, D),
        f"{at}.norm_1.weight": torch.ones(D),
    }
    config = {"model_type": "mpt", "d_model": D, "n_heads": 4, "n_layers": 1}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"attn_config": {"clip_qkv": 0.5}}))
    return folder


def test_what_lower_ranks_would_save_is_counted_from_both_factors(tmp_path: Path) -> None:
    found = inspected(gpt2(tmp_path))
    for layer in found.layers:
        for form in ("qk", "ov"):
            kept = (layer.figures[f"{form}_rank_{keep}"] for keep in (99, 95, 90))
            saved = [sum(2 * D * (WIDTH - rank) for rank in ranks if rank is not None) for ranks in kept]
            assert layer.cut[form] == saved
    assert any(layer.cut["qk"][2] for layer in found.layers)
    # Keys and values of a group cannot be cut for one head alone, nor what turns with the position.
    assert all(layer.cut == {} for layer in inspected(llama(tmp_path / "llama")).layers)


def test_how_far_the_three_maps_are_from_one(tmp_path: Path) -> None:
    with edited_tensors(gpt2(tmp_path)) as tensors:
        same, rotated, unrelated = (tensors[f"h.{i}.attn.c_attn.weight"] for i in range(3))
        for joined in (same, rotated):
            joined[:, D : 2 * D] = joined[:, 2 * D :] = joined[:, :D]
        for start in range(D, 3 * D, WIDTH):
            rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
            rotated[:, start : start + WIDTH] @= rotation
    layers = inspected(tmp_path).layers
    assert layers[0].figures["qkv_apart"] == pytest.approx([0.0] * HEADS, abs=1e-6)
    assert all(x is not None and x > 0.2 for x in layers[1].figures["qkv_apart"])
    assert layers[1].figures["qkv_apart_rotated"] == pytest.approx([0.0] * HEADS, abs=1e-6)
    # By the definition, of the third.
    read = unrelated.double() - unrelated.double().mean(dim=0)  # LayerNorm removes the mean
    head = read.unflatten(1, (3, HEADS, WIDTH))[:, :, 1]
    lost = (head - head.mean(dim=1, keepdim=True)).square().sum() / head.square().sum()
    assert layers[2].figures["qkv_apart"][1] == pytest.approx(float(lost))


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    inspected(gpt2(tmp_path), progress=lambda *of: told.append(of))
    total = 4 * LAYERS * (D * 3 * D + 3 * D + D * D + D)
    assert [of[1] for of in told] == [0, total // 3, 2 * total // 3, total, total]
    assert [of[0] for of in told[-2:]] == ["heads that are nearly the same", ""]
    assert {of[2] for of in told} == {total}
    assert told[1][0] == "decoder 1"


def test_the_page_holds_everything_and_asks_for_nothing(tmp_path: Path) -> None:
    text = heads_page([inspected(gpt2(tmp_path)), inspected(llama(tmp_path / "llama"))], "triptych inspect …")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    data = json.loads(text.split('id="report">')[1].split("</script>")[0])
    assert [len(model["layers"]) for model in data["models"]] == [LAYERS, LAYERS]
    assert {measure["name"] for measure in data["measures"]} == {measure.name for measure in MEASURES}
    assert sorted(name for _, names in data["groups"] for name in names) == sorted(m.name for m in MEASURES)
    layer = data["models"][0]["layers"][0]
    assert max(layer["spectra"]["qk"][0]) == 1000
    assert len(layer["angles"]["qv"]) == HEADS


@pytest.mark.parametrize("times", [1.0, 1e25])  # whose square is no float32
@pytest.mark.parametrize("width", [4, 64])  # of a narrow head W_QK is not formed
def test_pictures_are_root_mean_squares_of_blocks_of_entries(width: int, times: float) -> None:
    size = 24 * 6
    weights = MultiHeadAttention(size, 2, parameterisation("factored", d_k=width, d_v=12)).weights()
    (q,), (k,) = weights.q, weights.k
    q, k = replace(q, weight=q.weight * times), replace(k, weight=k.weight / times)
    weights = replace(weights, q=(q,), k=(k,))
    q, k, v = weights.W_Q[1], weights.W_K[1], weights.W_V[1]
    found = inspect(OneLayer(weights)).layers[0].pictures
    for name, matrix in (("v", v), ("qk", q @ k.mT), ("ov", v @ weights.W_O[1])):
        rows, columns = 24, 12 if name == "v" else 24
        blocks = matrix.detach().reshape(rows, size // rows, columns, -1).square().mean((1, 3)).sqrt()
        digits = torch.tensor([[int(digit, 16) for digit in row] for row in found[name][1]])
        assert (digits - 15 * blocks / blocks.max()).abs().max() < 0.51
    assert "pictures" not in Inspection.record(inspect(OneLayer(weights)))["layers"][0]


def test_a_picture_has_no_more_blocks_than_a_narrow_memory_has_channels() -> None:
    weights = MultiHeadAttention(144, 2, parameterisation("factored", d_k=4, d_v=12)).weights("cross")
    k, v = (Link(getattr(weights, side)[0].weight[:, :10]) for side in "kv")
    found = inspect(OneLayer(replace(weights, k=(k,), v=(v,)))).layers[0].pictures
    sizes = {"q": (24, 4), "k": (10, 4), "v": (10, 12), "qk": (24, 10), "ov": (10, 24)}
    assert {name: (len(rows), len(rows[0])) for name, (rows, _) in found.items()} == sizes


def test_an_inspection_writes_its_page_its_rows_and_everything(tmp_path: Path) -> None:
    found = inspected(gpt2(tmp_path / "model"))
    found.page(tmp_path / "page.html")
    found.to_csv(tmp_path / "heads.csv")
    found.to_json(tmp_path / "all.json")
    assert "Layer by head" in (tmp_path / "page.html").read_text()
    with (tmp_path / "heads.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["qk_top"] for row in rows] == [str(row["qk_top"]) for row in found.rows()]
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["layers"][0]["spectra"]["qk"] == found.layers[0].spectra["qk"]
    assert len(repr(found).splitlines()) <= 8
    assert "<table>" in found._repr_html_()


def test_a_table_of_pandas_has_a_row_per_head_and_its_absence_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = inspected(gpt2(tmp_path))
    with monkeypatch.context() as without:
        without.setattr("triptych.seeing.reports.rows.is_installed", lambda name: False)
        with pytest.raises(UsageError, match="needs pandas: pip install pandas"):
            found.to_pandas()
    pytest.importorskip("pandas")
    frame = found.to_pandas()
    assert len(frame) == LAYERS * HEADS
    assert frame["qk_top"].tolist() == [row["qk_top"] for row in found.rows()]


def test_the_terminal_has_a_map_and_outliers(tmp_path: Path) -> None:
    found = inspected(gpt2(tmp_path))
    lines = shaded_map(found.layers, "qk_effective_rank")
    assert len(lines) == 1 + LAYERS
    assert all(line.count("│") == 2 for line in lines[1:])
    assert shaded_map(inspected(llama(tmp_path / "llama")).layers, "qk_symmetric_share") == []
    assert any("effective rank" in row[0] for row in outliers(found).rows)


def test_rotary_pairs_have_a_scale_of_their_own_in_the_map(tmp_path: Path) -> None:
    form, rotary = inspected(gpt2(tmp_path / "gpt2")), inspected(llama(tmp_path / "llama"))
    mixed = replace(form, layers=(form.layers[0], rotary.layers[0]))
    head, *rows = shaded_map(mixed.layers, "qk_effective_rank")
    for found in mixed.layers:
        values = found.figures["qk_effective_rank"]
        assert f"{min(values):.3g} to '█' {max(values):.3g} ({found.qk_of})" in head
    assert all("█" in row for row in rows)
    assert "rotary pairs" not in shaded_map(mixed.layers, "ov_effective_rank")[0]


def test_weights_that_are_used_again_and_again_are_said_to_be(tmp_path: Path) -> None:
    at = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    names = ("query", "key", "value", "dense")
    tensors = {f"{at}.{name}.weight": torch.randn(D, D) for name in names}
    tensors |= {f"{at}.{name}.bias": torch.randn(D) for name in (*names, "LayerNorm")}
    save_file({**tensors, f"{at}.LayerNorm.weight": torch.ones(D)}, tmp_path / "model.safetensors")
    config = {"model_type": "albert", "hidden_size": D, "num_attention_heads": HEADS}
    config |= {"num_hidden_layers": 12, "num_hidden_groups": 1, "inner_group_num": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = " ".join(findings(inspected(tmp_path)))
    assert "layers 0 to 11 share these weights" in said


def test_shares_of_more_directions_are_those_of_the_spectrum(tmp_path: Path) -> None:
    layer = inspected(gpt2(tmp_path)).layers[0]
    energies = torch.tensor(layer.spectra["ov"][1]).square()
    for count in (2, 4, 8, 32):
        share = float(energies[:count].sum() / energies.sum())
        assert layer.figures[f"ov_top_{count}"][1] == pytest.approx(share)


def rank_lost() -> dict[str, torch.Tensor]:
    """Layer 1 of a GPT-2 whose head 2 has one value twice, and whose head 3 has no queries."""
    joined = torch.randn(D, 3 * D)
    values = 2 * D + 2 * WIDTH
    joined[:, values] = joined[:, values + 1]
    joined[:, 3 * WIDTH : 4 * WIDTH] = 0
    return {"h.1.attn.c_attn.weight": joined}


def test_the_condition_of_a_form_that_lacks_full_rank_is_infinite(tmp_path: Path) -> None:
    found = inspected(gpt2(tmp_path, rank_lost()))
    figures = found.layers[1].figures
    assert [math.isinf(value or 0) for value in figures["ov_condition"]] == [False, False, True, False]
    assert figures["ov_rank"][2] == WIDTH - 1
    assert figures["qk_condition"][3] == math.inf
    assert figures["qk_rank"][3] == 0
    said = " ".join(findings(found))
    of = f"lacks full rank in 1 of {LAYERS * HEADS} heads, first in decoder 1"
    assert f"W_QK {of}, head 3" in said
    assert f"W_OV {of}, head 2" in said
    assert "lacks full rank" not in " ".join(findings(inspected(gpt2(tmp_path / "whole"))))


def test_a_form_that_a_narrow_map_makes_lacks_full_rank_whatever_rounding_leaves() -> None:
    torch.manual_seed(9)
    narrow = Link(torch.randn(1, D, 5)), Link(torch.randn(HEADS, 5, WIDTH))
    k, v = (Link(torch.randn(HEADS, D, WIDTH)) for _ in "kv")
    o = Link(torch.randn(HEADS, WIDTH, D))
    weights = AttentionWeights(
        d_model=D, num_heads=HEADS, q=narrow, k=(k,), v=(v,), o=(o,), semantics=Semantics(1.0)
    )
    figures = inspect(OneLayer(weights)).layers[0].figures
    assert figures["qk_rank"] == [5.0] * HEADS
    assert figures["qk_condition"] == [math.inf] * HEADS
    assert all(1 < (condition or 0) < 1e4 for condition in figures["ov_condition"])


def test_an_infinite_condition_is_shown_in_tables_and_on_the_page(tmp_path: Path) -> None:
    lost, whole = inspected(gpt2(tmp_path / "lost", rank_lost())), inspected(gpt2(tmp_path / "whole"))
    row = next(row for row in side_by_side(whole, lost).rows if row[0] == "condition of W_OV")
    assert row[2:] == ("∞", "+∞")
    row = next(row for row in side_by_side(lost, lost).rows if row[0] == "condition of W_OV")
    assert row[1:] == ("∞", "∞", "–")
    assert sum("∞" in line for line in shaded_map(lost.layers, "ov_condition")) == 1
    data = heads_page([lost], "").split('id="report">')[1].split("</script>")[0]
    layers = json.loads(data)["models"][0]["layers"]
    assert layers[1]["figures"]["ov_condition"][2] == "Infinity"


def counted_pairs(weights: AttentionWeights) -> tuple[str, ...]:
    """What the averages say how many pairs of Q and K, Q and V, K and V there are."""
    said = " ".join(average_lines(inspect(OneLayer(weights.to(torch.float64)))))
    return tuple(re.findall(r"of (\d+ \w+) above chance", said))


def test_a_map_that_all_heads_share_counts_once() -> None:
    torch.manual_seed(7)
    one_key = MultiHeadAttention(D, HEADS, parameterisation("grouped", num_kv_heads=1)).weights()
    assert counted_pairs(one_key) == ("4 heads", "4 heads", "1 pair")
    # What heads weigh differently is still the same subspace; their values are their own.
    mixed = MultiHeadAttention(D, HEADS, parameterisation("collaborative", d_shared=12)).weights()
    assert counted_pairs(mixed) == ("1 pair", "4 heads", "4 heads")
    assert inspect(OneLayer(mixed)).layers[0].maps == {"q": HEADS, "k": 1, "v": HEADS}


def test_of_heads_that_share_keys_and_values_one_stands_among_the_outliers(tmp_path: Path) -> None:
    rows = outliers(inspected(llama(tmp_path))).rows
    heads = next(heads for title, heads in rows if title == "highest overlap of W_K and W_V over chance")
    groups = [re.sub(r"head (\d): .*", lambda m: str(int(m[1]) // 2), of) for of in heads.split("; ")]
    assert len(groups) == len(set(groups)) == 3


def test_a_form_that_all_heads_share_is_no_near_copy_of_itself() -> None:
    torch.manual_seed(8)
    q, k = (Link(torch.randn(HEADS, D, WIDTH)) for _ in "qk")
    v, o = Link(torch.randn(1, D, WIDTH)), Link(torch.randn(1, WIDTH, D))
    shared = AttentionWeights(
        d_model=D, num_heads=HEADS, q=(q,), k=(k,), v=(v,), o=(o,), semantics=Semantics(1.0)
    )
    assert inspect(OneLayer(shared)).copies == ()
    written_out = replace(shared, v=(v.repeat(HEADS),), o=(o.repeat(HEADS),))
    assert len(inspect(OneLayer(written_out)).copies) == HEADS * (HEADS - 1) // 2


def test_the_mean_of_copying_is_set_beside_how_means_of_random_heads_spread() -> None:
    torch.manual_seed(9)
    heads, d, width = 9, 12, 8
    maps = {side: (Link(torch.randn(heads, d, width, dtype=torch.float64)),) for side in "qkv"}
    o = (Link(torch.randn(heads, width, d, dtype=torch.float64)),)
    weights = AttentionWeights(d_model=d, num_heads=heads, o=o, semantics=Semantics(1.0), **maps)
    said = " ".join(average_lines(inspect(OneLayer(weights))))
    found = re.search(r"copying score of W_OV: ([-+.\d]+) \(random: 0 ± ([.\d]+)\)", said)
    assert found is not None
    forms = torch.randn(3000, heads, d, width, dtype=torch.float64)
    eigenvalues = torch.linalg.eigvals(torch.randn(3000, heads, width, d, dtype=torch.float64) @ forms)
    means = (eigenvalues.real.sum(dim=-1) / eigenvalues.abs().sum(dim=-1)).mean(dim=1)
    assert float(found[2]) == pytest.approx(float(means.std()), rel=0.08)
    assert abs(float(found[1])) < 4 * float(found[2])
    assert f"(random: {(1 + 1 / d) / 2:.3f})" in said
