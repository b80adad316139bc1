"""Layers that predict further tokens are read and rewritten, and left aside where a model runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.oracle import apart, changed, opened
from checkpoints.runs import made, some_ids, theirs
from small_checkpoints import with_words
from triptych import UsageError, load
from triptych.core.checkpoints.stored_models import changed_tensors, load_language_model
from triptych.errors import ConfigurationWarning
from triptych.rewriting.verification import verify

pytest.importorskip("transformers", reason="it comes with the extra [dev]")

WORDS, TEXT = 40, "w3 w5 w7 w9 w3 w5"
pytestmark = pytest.mark.filterwarnings("ignore::triptych.errors.ConfigurationWarning")


def with_further_layer(name: str, folder: Path) -> Any:
    """A tiny model, in the folder with one layer more and the words w0 to w39."""
    other = made(name, folder)
    held = load_file(folder / "model.safetensors")
    number = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    last, at = f"model.layers.{number - 1}.", f"model.layers.{number}."
    more = {at + own.removeprefix(last): tensor + 0.01 for own, tensor in held.items() if last in own}
    gain = held["model.norm.weight"]
    width = len(gain)
    more |= {f"{at}{own}.weight": gain.clone() for own in ("enorm", "hnorm", "shared_head.norm")}
    more[f"{at}eh_proj.weight"] = torch.ones(width, 2 * width, dtype=gain.dtype)
    for table in ("embed_tokens", "shared_head.head"):
        more[f"{at}{table}.weight"] = torch.ones(WORDS, width, dtype=gain.dtype)
    changed(folder, more, {"num_nextn_predict_layers": 1})
    with_words(folder, WORDS)
    return other


@pytest.mark.parametrize(
    ("name", "at"),
    [("ernie4_5_moe", "model.mtp_block.0"), ("exaone_moe", "mtp.layers.0"), ("mellum", "mtp.layers.0")],
)
@torch.no_grad()
def test_layers_that_predict_further_tokens_are_left_aside(name: str, at: str, tmp_path: Path) -> None:
    other, ids = made(name, tmp_path), some_ids()
    parts = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "norm.weight")
    changed(tmp_path, {f"{at}.{part}": torch.ones(2, 2) for part in parts}, {"num_nextn_predict_layers": 1})
    found = load_language_model(tmp_path)(ids).logits
    assert apart(found, theirs(other, ids).logits) < 1e-10


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3"])
@torch.no_grad()
def test_those_under_the_next_numbers_are_read_and_not_run(name: str, tmp_path: Path) -> None:
    other, ids = with_further_layer(name, tmp_path), some_ids()
    model = load_language_model(tmp_path)
    assert apart(model(ids).logits, theirs(other, ids).logits) < 1e-10
    source = opened(tmp_path)
    assert len(source.sites) == len(model.blocks) + 1
    for parameter in model.parameters():
        parameter.mul_(1.5)
    written = {stored for stored, _ in changed_tensors(model, source)}
    assert written
    assert not any(f"layers.{len(model.blocks)}." in stored for stored in written)


@torch.no_grad()
def test_places_in_them_can_be_read_and_changed_but_not_run(tmp_path: Path) -> None:
    with_further_layer("glm4_moe", tmp_path / "one")
    model = load(tmp_path / "one")
    with pytest.warns(ConfigurationWarning, match=r"layers\.2\.self_attn predicts further tokens"):
        names = [layer.name for layer in model.layers]
    assert names == ["0", "1", "2"]
    run = model.run(TEXT)
    with pytest.raises(UsageError, match="layer 2 did not run on this text"):
        run["2.0"]
    with pytest.raises(UsageError, match="layer 2 did not run on this text"):
        model.run(TEXT, grad=True).gradient("2.0")
    ablated = model.ablate("2.0")
    assert torch.equal(ablated.run(TEXT).logits, run.logits)
    assert not torch.equal(model.ablate("1.0").run(TEXT).logits, run.logits)
    assert not load(ablated.save(tmp_path / "ablated"))["2.0"].W_O.any()
    assert not torch.equal(model.without_positions().run(TEXT).logits, run.logits)
    swept = model.sweep(TEXT, "w3 w5 w7 w9 w3 w6", lambda run: run.logits[-1, 3])
    assert {place.partition(".")[0] for place in swept.heads} == {"0", "1"}


def test_rewrites_reach_them_and_texts_do_not(tmp_path: Path) -> None:
    with_further_layer("glm4_moe", tmp_path / "one")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n * n % WORDS}" for n in range(200)))
    model = load(tmp_path / "one")
    for exact in ("fold_norm", "gauge_fix"):
        done = model.rewrite(exact, text=text, out=tmp_path / exact).certificate
        assert done is not None
        assert [layer.measured is not None for layer in done.layers] == [True] * 3
        assert [layer.measured_on_text is not None for layer in done.layers] == [True, True, False]
        claims = verify(tmp_path / exact, tmp_path / "one", text)
        assert [claim for claim in claims if claim.held is False] == []
    for step in (
        "truncate(rank=4, forms=['ov'], criterion='centred')",
        "prune_heads(number=2, by_loss=True)",
    ):
        with pytest.raises(UsageError, match=r"layers\.2\.self_attn is not run on the calibration text"):
            model.rewrite(step, calibration=text)
        found = model.rewrite(step, layers=[0, 1], calibration=text).certificate
        assert found is not None
        assert found.layers[2].measured is None
