"""The Transformer in one file is the library's Transformer, and learns to translate."""

import ast
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from triptych.core.models import EncoderDecoder, ModelConfig

FILE = Path(__file__).parents[2] / "docs" / "tutorials" / "attention-only.py"
MADE = runpy.run_path(str(FILE))
MAPS = {"W_Q": "q_proj", "W_K": "k_proj", "W_V": "v_proj", "W_O": "o_proj"}
NORMS = {
    "norm": "self_residual",
    "cross_norm": "cross_residual",
    "feed_forward_norm": "feed_forward_residual",
}


def _same_block(ours: nn.Module, of_library: nn.Module) -> None:
    for name, residual in NORMS.items():
        if hasattr(ours, name):
            getattr(of_library, residual).norm.load_state_dict(getattr(ours, name).state_dict())
    of_library.feed_forward.load_state_dict(ours.feed_forward.state_dict())
    for name, there in (("attention", "self_attention"), ("cross_attention", "cross_attention")):
        for matrix, linear in MAPS.items() if hasattr(ours, name) else ():
            stored = getattr(getattr(of_library, there).projections, linear).weight
            stored.copy_(getattr(getattr(ours, name), matrix).T)  # the library stores [out, in], as nn.Linear


@torch.no_grad()
def _in_library(model: nn.Module) -> EncoderDecoder:
    """The library's model with the weights of the file's."""
    stacks = {"encoder": {"num_layers": 2}, "decoder": {"num_layers": 2}}
    config = ModelConfig(d_model=32, d_ff=48, num_heads=4, dropout=0.0, **stacks)
    made = EncoderDecoder.of(config, *2 * [len(model.table)]).eval()
    made.decoder.embeddings.table.weight.copy_(model.table)
    for name in ("encoder", "decoder"):
        for ours, of_library in zip(getattr(model, name), getattr(made, name).blocks, strict=True):
            _same_block(ours, of_library)
    return made


def test_the_same_weights_give_the_logits_and_the_attention_of_the_library() -> None:
    torch.manual_seed(0)
    model = MADE["Transformer"](40, d=32, h=4, d_ff=48)
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    source = torch.randint(4, 40, (3, 9))
    source[1, 6:] = MADE["PAD"]
    target = torch.randint(4, 40, (3, 7))
    made = _in_library(model)
    torch.testing.assert_close(model(source, target), made(source, target), rtol=0, atol=1e-5)
    layer = made.decoder.blocks[0].self_attention
    x = model.embed(target)
    found = layer(x, causal=True, need_weights=True).weights
    model.decoder[0].attention(x, x, torch.ones(7, 7, dtype=torch.bool).tril())
    torch.testing.assert_close(model.decoder[0].attention.weights, found, rtol=0, atol=1e-5)


def test_it_learns_to_translate() -> None:
    random.seed(0)
    torch.manual_seed(0)
    pairs = [MADE["draw_pair"]() for _ in range(6)]
    vocabulary = MADE["Vocabulary"]([text for pair in pairs for text in pair])
    model = MADE["Transformer"](len(vocabulary.tokens), layers=1)
    losses = MADE["train"](model, vocabulary, pairs, steps=70)
    assert losses[-1] < losses[0] / 10
    for source, target in pairs:
        assert MADE["translate"](model, vocabulary, source) == target


def test_tokens_of_a_text_are_the_text() -> None:
    texts = [text for _ in range(50) for text in MADE["draw_pair"]()]
    assert all("".join(MADE["split"](text)) == text for text in texts)
    assert MADE["split"]("hat dreiundfünfzig Bücher.") == ["hat", " drei", "und", "fünfzig", " Bücher", "."]


def test_it_imports_nothing_but_torch_and_the_standard_library() -> None:
    tree = ast.walk(ast.parse(FILE.read_text(encoding="utf-8")))
    imports = [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.name for node in imports for name in node.names if isinstance(node, ast.Import)}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names} == {"torch"}


@pytest.mark.slow
def test_it_trains_on_a_file_of_pairs(tmp_path: Path) -> None:
    random.seed(1)
    pairs = sorted({MADE["draw_pair"]() for _ in range(1000)})
    (tmp_path / "pairs.tsv").write_text("\n".join("\t".join(pair) for pair in pairs) + "\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, FILE, tmp_path / "pairs.tsv"], capture_output=True, text=True, check=True
    )
    *_, first, second, third, right = done.stdout.splitlines()
    assert all(tuple(line.split(" → ")) in pairs for line in (first, second, third))
    assert right.endswith(f"of {len(pairs) // 5} unseen sentences are right to the letter")


@pytest.mark.slow
def test_it_prints_what_it_says_that_it_prints() -> None:
    done = subprocess.run([sys.executable, FILE], capture_output=True, text=True, check=True)
    said = MADE["__doc__"].partition("prints:\n\n")[2].partition("\n\n")[0]
    expected = [line.strip() for line in said.splitlines()]
    printed = done.stdout.splitlines()[-len(expected) :]
    assert printed[1:] == expected[1:]  # the first has the loss, which another machine rounds otherwise
