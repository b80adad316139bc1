"""What layers and heads add to the residual stream, against the streams of `transformers`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from face.tiny import write_checkpoint
from triptych import Model, load
from triptych.core.models.sites import attention_sites

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")
TEXT, TARGET = "hear me speak", "so do I"


class Case(NamedTuple):
    """Where a model of `transformers` has the stream after the attention of a layer."""

    layers: str
    after: str  # the module of a layer that reads it next
    before: str = ""  # the one that reads it before the attention; the layer itself if ""
    place: str = "1"
    # Where attention and feed-forward read the same stream, nothing reads it between the two: `after` is the
    # feed-forward layer, whose output is taken from what the layer adds.
    parallel: bool = False


CASES = {
    "gpt2": Case("transformer.h", "ln_2"),
    "llama": Case("model.layers", "post_attention_layernorm"),
    "gemma2": Case("model.layers", "pre_feedforward_layernorm"),
    "gemma3, text": Case("model.layers", "pre_feedforward_layernorm"),
    "glm4": Case("model.layers", "post_attention_layernorm"),
    "olmo2": Case("model.layers", "mlp"),
    "exaone4": Case("model.layers", "mlp"),
    "granite": Case("model.layers", "post_attention_layernorm"),
    "bloom": Case("transformer.h", "post_attention_layernorm"),
    "cohere": Case("model.layers", "mlp", parallel=True),
    "gpt_neox": Case("gpt_neox.layers", "mlp", parallel=True),
    "falcon, groups": Case("transformer.h", "mlp", parallel=True),
    "bert": Case("bert.encoder.layer", "attention.output.LayerNorm"),
    "t5": Case("encoder.block", "layer.1.layer_norm", place="encoder.1"),
    "bart": Case("model.decoder.layers", "self_attn_layer_norm", place="decoder.1"),
    "t5, cross": Case("decoder.block", "layer.2.layer_norm", "layer.1.layer_norm", "cross.1"),
    "marian": Case("model.decoder.layers", "encoder_attn_layer_norm", "encoder_attn", "cross.1"),
}
SLOW = {"olmo3": Case("model.layers", "mlp"), "gptj": Case("transformer.h", "mlp", parallel=True)}
SLOW |= dict.fromkeys(("mistral", "qwen3", "phi3", "stablelm", "granitemoe", "smollm3"), CASES["llama"])
SLOW |= {"gemma4, text": CASES["gemma2"], "cohere2": CASES["cohere"]}


@contextmanager
def kept(layer: nn.Module, case: Case) -> Iterator[dict[str, Tensor]]:
    """What is read before and after the attention of a layer."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], *made: Any) -> None:
            read = given[0] if given else named["hidden_states"]
            read = read if not made else made[0][0] if isinstance(made[0], tuple) else made[0]
            found[name] = read.clone()  # some models add to it in place

        return hook

    after = layer.get_submodule(case.after)
    with ExitStack() as stack:
        before = layer.get_submodule(case.before)
        stack.callback(before.register_forward_pre_hook(keep("before"), with_kwargs=True).remove)
        if case.parallel:
            stack.callback(layer.register_forward_hook(keep("whole"), with_kwargs=True).remove)
            stack.callback(after.register_forward_hook(keep("fed"), with_kwargs=True).remove)
        else:
            stack.callback(after.register_forward_pre_hook(keep("after"), with_kwargs=True).remove)
        yield found
    if case.parallel:
        found["after"] = found["whole"] - found["fed"]


def gain_of(theirs: Any, model: Model, case: Case) -> Tensor:
    """What the stream of `transformers` gains in an attention layer."""
    layer = attrgetter(case.layers)(theirs)[1]
    (text,) = model.reader.encode([TEXT], [TARGET] if "." in case.place else None)
    with torch.no_grad(), kept(layer, case) as found:
        if text.source is None:
            theirs(torch.tensor([text.ids]))
        else:
            read = torch.tensor([[model.reader.start_id, *text.ids[:-1]]])
            theirs(input_ids=torch.tensor([text.source]), decoder_input_ids=read)
    return (found["after"] - found["before"])[0]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_output_of_a_layer_is_what_the_stream_gains(name: str, tmp_path: Path) -> None:
    case = {**CASES, **SLOW}[name]
    more = {"vocab_size_per_layer_input": 258} if name.startswith("gemma4") else {}
    theirs = write_checkpoint(name.removesuffix(", cross"), tmp_path / "model", **more)
    model = load(tmp_path / "model", device="cpu", dtype="float32")
    expected = gain_of(theirs, model, case)
    run = model.run(TEXT, target=TARGET if "." in case.place else None)
    layer = run[case.place]
    within = 2e-5 * float(expected.abs().max())
    torch.testing.assert_close(layer.output, expected, rtol=0, atol=within)
    sites = {
        site.name if len(model.reader.model.stacks) > 1 else str(site.block): site
        for site in attention_sites(model.reader.model)
    }
    frame, bias = sites[case.place].residual, sites[case.place].layer.weights().o_bias
    heads = [run[case.place, head] for head in range(model[case.place].num_heads)]
    if bias is None:
        bias = torch.zeros(expected.shape[-1])
    of_bias = frame.part_added(bias.expand_as(expected), layer.projected)
    total = torch.stack([head.output for head in heads]).sum(dim=0) + of_bias
    nothing = frame.added(torch.zeros_like(expected))  # the bias of a norm after the layer
    torch.testing.assert_close(total + nothing, expected, rtol=0, atol=2 * within)
    projected = torch.stack([head.projected for head in heads]).sum(dim=0) + bias
    torch.testing.assert_close(projected, layer.projected, rtol=0, atol=1e-5 * float(projected.abs().max()))
    attention = model.attend(TEXT, TARGET if "." in case.place else None)
    steps = attention.steps(case.place, 0, query=1)
    torch.testing.assert_close(steps.output, heads[0].output[1], rtol=0, atol=within)
    torch.testing.assert_close(steps.projected, heads[0].projected[1], rtol=0, atol=within)


@torch.no_grad()
def test_what_a_head_writes_goes_through_the_norm_after_its_layer(tmp_path: Path) -> None:
    theirs = write_checkpoint("gemma2", tmp_path / "model")
    for layer in theirs.model.layers:  # so that the norm turns what it reads
        layer.post_attention_layernorm.weight.normal_(std=3.0)
    theirs.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", device="cpu", dtype="float32")
    read: list[Tensor] = []
    attention = theirs.model.layers[1].self_attn
    hook = attention.register_forward_pre_hook(
        lambda module, given, named: read.append(named["hidden_states"]), with_kwargs=True
    )
    theirs(torch.tensor([model.run(TEXT).ids]))
    hook.remove()
    head = model[1, 3]
    written = theirs.model.layers[1].post_attention_layernorm(read[0][0] @ head.W_V @ head.W_O)
    logits = theirs.lm_head(theirs.model.norm(written))
    nearest = [tuple(model.reader.tokenizer.pieces(ids)) for ids in logits.topk(3).indices.tolist()]
    assert [found for _, found in model.attend(TEXT).writes(1, 3, k=3)] == nearest
