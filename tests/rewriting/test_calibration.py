"""Moments of the layers of checkpoints over a text: in several passes, and of layers that are used again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rewriting.certificates import failing
from small_checkpoints import save_changed, with_words
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.stored_layers import AttentionLayer
from triptych.rewriting.calibration import gather_moments
from triptych.rewriting.functions import LayerToRewrite, PruneHeads, Truncate
from triptych.rewriting.functions.moments import Moments
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.running.opening import Reader, open_text_reader

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")

HEADS, WIDTH, USES = 2, 6, 3
COMMON = {"vocab_size": 40, "hidden_size": 12, "num_attention_heads": HEADS, "intermediate_size": 16}


def saved(model: Any, folder: Path) -> Path:
    """With the words w0 to w39."""
    with_words(save_changed(model, folder), 40)
    return folder


def bert(folder: Path) -> Path:
    torch.manual_seed(1)
    return saved(transformers.BertModel(transformers.BertConfig(**COMMON, num_hidden_layers=3)), folder)


def albert(folder: Path) -> Path:
    torch.manual_seed(2)
    config = transformers.AlbertConfig(**COMMON, embedding_size=8, num_hidden_layers=USES)
    return saved(transformers.AlbertModel(config), folder)


def text_in(folder: Path) -> Path:
    path = folder / "text.txt"
    lines = [" ".join(f"w{(7 * line + 3 * word) % 40}" for word in range(4 + line % 5)) for line in range(9)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def as_read(layer: AttentionLayer) -> AttentionWeights:
    return layer.weights.to(torch.float64)


def gathered(folder: Path, text: Path, **options: int) -> dict[str, Moments]:
    source = open_checkpoint(folder)
    return gather_moments(source, folder, source.sites, as_read, text, **options)


def test_layers_that_do_not_fit_together_are_heard_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, text = bert(tmp_path / "source"), text_in(tmp_path)
    passes = []
    model = open_text_reader(folder)
    windows = model.windows
    monkeypatch.setattr(model, "windows", lambda *given: passes.append(1) or windows(*given))
    monkeypatch.setattr("triptych.rewriting.calibration.open_text_reader", lambda folder: model)
    together = gathered(folder, text)
    assert len(passes) == 1
    apart = gathered(folder, text, most_bytes=1)
    assert len(passes) == 1 + 3
    one_layer = 8 * (4 * 12 * 12 + 4 * 12 + 3 * HEADS * WIDTH * (WIDTH + 1))
    in_twos = gathered(folder, text, most_bytes=2 * one_layer)
    assert len(passes) == 1 + 3 + 2
    for found in (apart, in_twos):
        assert list(found) == list(together)
        for name, moments in found.items():
            for part in ("q", "k", "q_mean", "k_mean", "mixed", "mixed_mean"):
                torch.testing.assert_close(getattr(moments, part), getattr(together[name], part))


@torch.no_grad()
def test_a_layer_used_several_times_is_heard_each_time(tmp_path: Path) -> None:
    folder, text = albert(tmp_path / "source"), text_in(tmp_path)
    (found,) = gathered(folder, text).values()
    model = transformers.AlbertModel.from_pretrained(folder, attn_implementation="eager").eval()
    attention = model.encoder.albert_layer_groups[0].albert_layers[0].attention
    queries, keys, tokens = [], [], 0
    for window in open_text_reader(folder).windows(text, 1000):
        hidden = model(**window.inputs, output_hidden_states=True).hidden_states
        assert len(hidden) == USES + 1
        for x in hidden[:USES]:
            queries.append(attention.query(x)[0].double())
            keys.append(attention.key(x)[0].double())
            tokens += x.shape[1]
    assert found.count == found.key_count == tokens
    for made, second, mean in ((queries, found.q, found.q_mean), (keys, found.k, found.k_mean)):
        of_heads = torch.cat(made).unflatten(1, (HEADS, WIDTH)).transpose(0, 1)
        torch.testing.assert_close(second, of_heads.mT @ of_heads / tokens, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mean, of_heads.mean(dim=1), rtol=1e-4, atol=1e-5)


def test_a_decoder_that_sees_both_ways_is_heard(tmp_path: Path) -> None:
    folder, text = tmp_path / "source", text_in(tmp_path)
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": HEADS, "head_dim": WIDTH}
    config = transformers.LlamaConfig(**COMMON, **sizes, is_causal=False)
    saved(transformers.LlamaForCausalLM(config), folder)
    assert isinstance(open_text_reader(folder), Reader)
    found = gathered(folder, text)
    assert len(found) == 2
    assert all(moments.count > 0 for moments in found.values())


def test_heads_are_dead_by_their_weights_whatever_a_text_says(tmp_path: Path) -> None:
    folder, text = bert(tmp_path / "source"), text_in(tmp_path)
    (name, moments), *_ = gathered(folder, text).items()
    checkpoint = open_checkpoint(folder)
    read = checkpoint.read(next(site for site in checkpoint.sites if site.name == name))
    silent = replace(moments, mixed=torch.zeros_like(moments.mixed))
    layer = LayerToRewrite(name, read.weights.to(torch.float64), moments=silent)
    assert PruneHeads(on_text=True).apply(layer).weights.num_heads == HEADS
    assert PruneHeads(on_text=True, number=1).apply(layer).weights.num_heads == HEADS - 1


def test_a_layer_used_several_times_is_truncated_on_a_text(tmp_path: Path) -> None:
    folder, text = albert(tmp_path / "source"), text_in(tmp_path)
    recipe = RewriteRecipe(step=(Truncate(rank=3, criterion="centred"),), calibration=text)
    found = rewrite_checkpoint(str(folder), tmp_path / "out", recipe, text=text)
    assert found.layers[0].steps[0].error is not None
    assert 0 < found.layers[0].steps[0].error < 1
    assert failing(tmp_path / "out", folder) == []
