"""Layers and heads as a person holds them, of models of several kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import runs
from checkpoints.test_families import made
from small_checkpoints import byte_tokenizer
from triptych import Model, TriptychError, UsageError, load
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.heads import RotaryForm
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.core.models.site_configuration import AttentionConfig, PositionsConfig

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")
pytestmark = pytest.mark.filterwarnings("ignore")


def tiny(name: str, folder: Path) -> tuple[Model, Any]:
    """A tiny model of `transformers`, and the same opened by us."""
    theirs = made(name, folder)
    return load(folder, device="cpu"), theirs


def test_a_layer_without_keys_of_its_own_says_whose_it_uses(tmp_path: Path) -> None:
    model, theirs = tiny("gemma3n", tmp_path)
    assert [layer.borrows for layer in model.layers] == [None, None, None, "1", "2"]
    maps = theirs.model.layers[1].self_attn
    head = model[3, 2]
    assert (head.borrows, head.group) == ("1", (2, 3))
    assert torch.equal(head.W_K, maps.k_proj.weight[10:20].T.float())
    assert torch.equal(head.W_V, maps.v_proj.weight[10:20].T.float())
    assert torch.equal(head.W_Q, theirs.model.layers[3].self_attn.q_proj.weight[20:30].T.float())
    assert "keys and values of layer 1" in repr(head)
    assert "keys and values of layer 1" in repr(model[3])
    costs = model.cost().layers
    assert costs[3].cache_bytes_per_token == 0 < costs[1].cache_bytes_per_token
    assert costs[3].parameters < costs[1].parameters
    assert model.why_not_run == ""


def test_of_several_residual_streams_each_is_seen_and_none_is_steered(tmp_path: Path) -> None:
    runs.made("gemma3n", tmp_path, {"vocab_size": 257})
    byte_tokenizer(tmp_path, "<end>")
    model = load(tmp_path, device="cpu")
    run = model.run("abc def")
    assert run.residual(0).shape == run.residual(4).shape == (7, 4, 24)
    assert run.residual(5).shape == (7, 24)
    assert len(model.generate("abc", max_new_tokens=4).ids) == 4
    with pytest.raises(UsageError, match="several residual streams, and steer changes one"):
        model.steer("residual.3", torch.ones(24))
    with pytest.raises(UsageError, match="no output table reads"):
        model.attend("abc def").writes(3, 2)


@pytest.mark.parametrize(
    ("name", "rewritten", "why"),
    [
        ("gemma3n", False, "has no tokenizer"),
        ("deepseek_v3", True, "has no tokenizer"),
        ("llama", True, "has no tokenizer"),
        ("vit", True, "can be read, and not run"),
    ],
)
def test_what_a_model_can_is_named_with_why_it_cannot_run(
    name: str, rewritten: bool, why: str, tmp_path: Path
) -> None:
    model, _ = tiny(name, tmp_path)
    runs = ("run", "generate") if "tokenizer" in why else ()  # on token ids
    assert model.can == ("read", *(["rewrite"] if rewritten else []), *runs)
    assert (why in model.why_not_run) is not bool(runs)
    assert "\n" not in model.why_not_run
    with pytest.raises(TriptychError, match=why):
        model.run("A text.")


def test_scores_that_are_no_product_have_no_form() -> None:
    config = LanguageModelConfig(
        num_layers=1,
        d_model=16,
        num_heads=2,
        positions=PositionsConfig(scheme="learned"),
        attention=AttentionConfig(scores="additive"),
    )
    head = load(LanguageModel.of(config, "decoder", 13).eval())[0, 1]
    with pytest.raises(UsageError, match=r"head 0\.1: scores that are no product of queries and keys"):
        head.qk  # noqa: B018
    assert head.ov.effective_rank() > 1


def test_a_head_that_turns_by_patches_has_no_form_of_a_distance() -> None:
    places = torch.tensor([[0.0, 0.0], [-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]])
    rotary = RotaryEmbedding(torch.tensor([0.7, 0.3]), places=places)
    form = RotaryForm(torch.randn(6, 4), torch.randn(6, 4), rotary)
    with pytest.raises(UsageError, match="positions of patches have a row and a column"):
        form.at(1)
    assert form.pairs.energies.shape == (2, 2, 2)
