"""Scores that are no scaled products, and the scale outside the softmax: each against the formula by hand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych import user_code
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.attention import (
    AlibiPositions,
    Factored,
    Grouped,
    LayerCache,
    MultiHeadAttention,
    Parameterisation,
    RotaryPositions,
)
from triptych.core.models import EncoderDecoder, LanguageModel, LanguageModelConfig, ModelConfig
from triptych.core.models.site_configuration import AttentionConfig
from triptych.errors import UsageError
from triptych.rewriting.functions.rank import truncate
from triptych.running.decoding import SearchOptions
from triptych.running.decoding.engine import Engine
from triptych.running.decoding.generation import generate_tokens
from triptych.running.decoding.sentence_decoder import SentenceDecoder
from triptych.running.decoding_options import GenerationOptions
from triptych.running.text.tokenizers import OutputRules

D, H, WIDTH, N = 24, 4, 6, 7
KINDS: list[dict[str, str]] = [{"scores": "additive"}, {"scores": "cosine"}, {"scale": "outside"}]
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-attention.md"
OWN = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)[1]


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_FILES", {})
    (tmp_path / "mine.py").write_text(OWN)
    user_code.use_code(tmp_path / "mine.py")


def layer_of(kind: dict[str, str], chosen: Parameterisation | None = None, **more: Any) -> MultiHeadAttention:
    layer = MultiHeadAttention(D, H, chosen, **kind, **more).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return layer


def by_hand(layer: MultiHeadAttention, kind: dict[str, str], x: Tensor, groups: int = H) -> Tensor:
    """The output, head by head and pair by pair."""
    maps, total = layer.projections, torch.zeros_like(x)
    for i in range(H):
        g = i * groups // H
        q = x @ maps.q_proj.weight.view(H, WIDTH, D)[i].T
        k = x @ maps.k_proj.weight.view(groups, WIDTH, D)[g].T
        v = x @ maps.v_proj.weight.view(groups, WIDTH, D)[g].T
        scores = torch.stack([torch.stack([pair(layer, kind, i, a, b) for b in k[0]]) for a in q[0]])
        hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = weights @ v
        if kind.get("scale") == "outside":
            mixed = mixed / WIDTH**0.5
        total = total + mixed @ maps.o_proj.weight[:, WIDTH * i : WIDTH * (i + 1)].T
    return total


def pair(layer: MultiHeadAttention, kind: dict[str, str], head: int, q: Tensor, k: Tensor) -> Tensor:
    match kind:
        case {"scores": "additive"}:
            return layer.scores_weight[head] @ torch.tanh(q + k)
        case {"scores": "cosine"}:
            eps = 1e-6 * WIDTH
            cosine = q @ k / ((q @ q + eps) * (k @ k + eps)).sqrt()
            return WIDTH**0.5 * layer.q_norm_weight[head, 0] * cosine
        case {"scores": "mine.py:Distance"}:
            return -(q - k) @ (q - k) * layer.scores_width[head] / 2
        case _:
            return q @ k


ALL = [*KINDS, {"scores": "mine.py:Distance"}]


@pytest.mark.parametrize("kind", ALL, ids=str)
@pytest.mark.parametrize("groups", [H, 2])
def test_outputs_and_gradients_are_those_of_the_formula(kind: dict[str, str], groups: int) -> None:
    layer = layer_of(kind, Factored() if groups == H else Grouped(num_kv_heads=groups))
    x = torch.randn(1, N, D, dtype=torch.double, requires_grad=True)
    found, wanted = layer(x, causal=True).output, by_hand(layer, kind, x, groups)
    torch.testing.assert_close(found, wanted)
    inputs = [x, *layer.parameters()]
    gradients = (torch.autograd.grad(output.square().sum(), inputs) for output in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_formula_weights_steps_and_a_cache_agree_with_the_layer(kind: dict[str, str]) -> None:
    layer, x = layer_of(kind, positions=AlibiPositions()).eval(), torch.randn(2, N, D, dtype=torch.double)
    with torch.no_grad():
        given = layer(x, causal=True, need_weights=True)
        torch.testing.assert_close(run_layer(layer.weights("causal"), x), given.output)
        torch.testing.assert_close(layer.steps(x, causal=True).output, given.output)
        torch.testing.assert_close(layer.steps(x, causal=True).weights, given.weights)
        torch.testing.assert_close(layer.queries_and_keys(x, causal=True).weights(), given.weights)
        cache = LayerCache()
        token_by_token = [layer(x[:, i : i + 1], causal=True, cache=cache).output for i in range(N)]
        torch.testing.assert_close(torch.cat(token_by_token, dim=1), given.output)
        long = torch.randn(1, 600, D, dtype=torch.double)
        whole = layer(long, causal=True, need_weights=True).output
        torch.testing.assert_close(layer(long, causal=True).output, whole)


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_a_layer_of_its_weights_is_the_same_layer_and_its_configuration_too(kind: dict[str, str]) -> None:
    layer, x = layer_of(kind), torch.randn(2, N, D, dtype=torch.double)
    again = MultiHeadAttention.from_weights(layer.weights(), named=True)
    torch.testing.assert_close(again(x).output, layer(x).output)
    assert {"scores": "dot", "scale": "inside", **kind}.items() <= dict(AttentionConfig.of(again)).items()
    made = AttentionConfig.of(layer).layer(D, H)
    shapes = [[(n, p.shape) for n, p in one.named_parameters()] for one in (made, layer)]
    assert shapes[0] == shapes[1]
    some = layer.weights().semantics.select_heads([2, 0])
    assert all(part.shape[0] == 2 for part in (some.scores.tensors().values() if some.scores else ()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scale_outside_is_known_after_it_was_rounded(dtype: torch.dtype) -> None:
    weights = layer_of({"scale": "outside"}).to(dtype).weights()
    for given in (weights, weights.to(torch.float32)):
        assert AttentionConfig.of(MultiHeadAttention.from_weights(given, named=True)).scale == "outside"


def test_a_configuration_without_these_options_is_stored_as_before() -> None:
    assert not {"scores", "scale"} & AttentionConfig().model_dump().keys()
    assert AttentionConfig(scores="cosine").model_dump()["scores"] == "cosine"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scores": "addtive"}, "'addtive' is not one of dot, cosine, additive"),
        ({"scores": "additive", "scale": "outside"}, "scores = 'additive' are no product"),
        ({"scores": "cosine", "qk_norm": True}, "cosine scores normalise queries and keys"),
        ({"scores": "cosine", "projections": "collaborative"}, "collaborative cannot have qk_norm"),
        ({"scores": "additive"}, "'additive' cannot have rotary positions: .* no product"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, UsageError), match=message):
        LanguageModelConfig.model_validate(
            {"num_layers": 1, "d_model": D, "num_heads": H, "attention": given}
        )


def test_a_layer_refuses_additive_scores_of_turned_queries() -> None:
    with pytest.raises(ValueError, match="cannot have rotary positions"):
        MultiHeadAttention(D, H, scores="additive", positions=RotaryPositions())


def test_the_fast_path_refuses_other_scores() -> None:
    layer, x = layer_of({"scores": "additive"}), torch.randn(1, N, D, dtype=torch.double)
    with pytest.raises(ValueError, match="the fast path has no scores"):
        layer(x, path="fast")


def test_a_rewrite_of_queries_and_keys_is_refused_and_one_of_values_is_not() -> None:
    weights = layer_of({"scores": "additive"}).weights()
    x = torch.randn(2, N, D, dtype=torch.double)
    with pytest.raises(RewriteRefusedError, match=r"scores that are no product .*; leave qk out"):
        truncate(weights, qk_rank=2)
    cut = truncate(weights, ov_rank=WIDTH).weights
    torch.testing.assert_close(run_layer(cut, x), run_layer(weights, x))


LM = {"num_layers": 1, "d_model": D, "num_heads": H, "context": 32, "positions": {"scheme": "alibi"}}


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_language_models_decode_as_the_whole_text_is_read(kind: dict[str, str]) -> None:
    model = LanguageModel.of(
        LanguageModelConfig.model_validate({**LM, "attention": kind}), "decoder", 50
    ).eval()
    prompt = [1, 2, 3]
    ((found,),) = generate_tokens(Engine(model), [prompt], GenerationOptions(max_new_tokens=8))
    ids = list(prompt)
    for _ in range(8):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(found.ids) == ids[3:]


@pytest.mark.parametrize("kind", ALL, ids=str)
def test_translators_search_as_their_logits_say(kind: dict[str, str]) -> None:
    config = ModelConfig.model_validate(
        {
            **{"d_model": D, "d_ff": 16, "num_heads": H, "tie_embeddings": "none"},
            "encoder": {"num_layers": 1, "attention": kind},
            "decoder": {"num_layers": 1, "attention": kind, "cross_attention": kind},
        }
    )
    model = EncoderDecoder.of(config, 40, 40).eval()
    rules = OutputRules((1,), 2)
    decoder = SentenceDecoder([model], 2, rules, SearchOptions(beam_size=1, max_extra_tokens=6))
    ((best,),) = decoder.decode([[5, 6, 7]])
    src, tgt = torch.tensor([[5, 6, 7, 2]]), [1]
    for token in best.ids:
        logits = model(src, torch.tensor([tgt]))[0, -1]
        assert int(logits.argmax()) == token
        tgt.append(token)
