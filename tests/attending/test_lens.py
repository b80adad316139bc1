"""The logit lens, and a logit as a sum over heads and layers, against the model's own logits in float64."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import triptych
from checkpoints.tiny_models import TINY
from face.tiny import write_checkpoint
from triptych.errors import UsageError
from triptych.model import Model

pytest.importorskip("transformers")
TEXT = "two young men"
TOKEN, OTHER = 7, 9
# The kinds of frames: a LayerNorm before, an RMSNorm and groups, norms on both sides and a soft cap, a norm
# after the sum, both sub-layers of one stream, experts, scaled sums; and attention to an encoder.
KINDS = ("gpt2", "llama 3", "gemma2", "openai-gpt", "gpt_neox", "mixtral", "granite", "marian", "t5")
_PLACE = TemporaryDirectory()


@cache
def model_of(name: str) -> Model:
    folder = Path(_PLACE.name) / name
    if not folder.exists():
        write_checkpoint(name, folder)
    return triptych.load(folder, dtype="float64", device="cpu")


def close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-10 * max(1.0, abs(other))


def check_sums(model: Model, position: int) -> None:
    """Compare the sum of all parts of a logit and of a difference with the logits of a run."""
    lens, run = model.lens(TEXT), model.run(TEXT)
    torch.testing.assert_close(lens.logits(), run.logits, rtol=1e-12, atol=1e-12)
    for against in (None, OTHER):
        found = lens.attribution(TOKEN, against, position)
        assert close(found.total, found.logit)
        logits = run.logits[position]
        if found.soft_cap is not None:
            logits = found.soft_cap * torch.atanh(logits / found.soft_cap)
        wanted = float(logits[TOKEN] - (0 if against is None else logits[against]))
        assert abs(found.total - wanted) < 1e-7
        names = {layer.name for layer in model.layers if not layer.name.startswith("encoder")}
        assert {name.rpartition(".")[0] for name in found.heads} == names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_the_parts_of_a_logit_sum_to_it(name: str) -> None:
    check_sums(model_of(name), 1)


DECODERS = [name for name, tiny in TINY.items() if tiny.model.endswith(("ForCausalLM", "LMHeadModel"))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*DECODERS} - {*KINDS}))
def test_the_parts_of_a_logit_sum_to_it_in_every_family_or_are_refused(name: str) -> None:
    try:
        model = model_of(name)
    except Exception as error:  # noqa: BLE001 (whatever transformers says of a tiny configuration with these tokens)
        pytest.skip(f"cannot be made with these tokens: {error}")
    if model.why_not_run:
        pytest.skip(model.why_not_run)
    try:
        check_sums(model, -1)
    except UsageError as error:
        assert "no sum" in str(error)  # noqa: PT017


def test_a_head_adds_what_it_writes_through_the_last_norm_and_the_output_table() -> None:
    """The formula of direct logit attribution, by hand."""
    model = model_of("gpt2")
    run = model.run(TEXT)
    end = model.reader.language_model
    stream = run.residual(2)[-1]
    size = (stream.var(unbiased=False) + end.final_norm.eps).sqrt()  # type: ignore[operator]
    written = run["1.2"].output[-1]
    read = (written - written.mean()) / size * end.final_norm.weight
    rows = end.head.output.weight  # type: ignore[union-attr]
    wanted = float((read @ (rows[TOKEN] - rows[OTHER])).detach())
    assert close(model.lens(TEXT).attribution(TOKEN, OTHER)["1.2"], wanted)


def test_directions_that_were_added_and_heads_that_are_off_are_parts_too() -> None:
    model = (
        model_of("gpt2")
        .ablate("0.1")
        .steer("residual.1", torch.randn(24))
        .steer("residual.2", torch.randn(24))
    )
    check_sums(model, -1)
    found = model.lens(TEXT).attribution("e")
    assert found["0.1"] == 0.0
    assert found["direction before 1"] != 0.0
    assert found["direction after 1"] != 0.0


def test_the_first_stage_is_the_embedding_and_the_last_the_model() -> None:
    model = model_of("llama 3")
    lens, run = model.lens(TEXT), model.run(TEXT)
    end = model.reader.language_model
    with torch.no_grad():
        wanted = end.head(end.final_norm(run.residual(0)))  # type: ignore[misc]
    torch.testing.assert_close(lens.logits(0), wanted)
    table = lens.top(2)
    assert [row.stage for row in table] == ["embedding", "block 0", "block 1"]
    best = int(run.logits[-1, :258].argmax())
    assert table[-1].tokens[0][0] == model.tokenizer.pieces([best])[0]
    with pytest.raises(UsageError, match="there is no stage 3"):
        lens.logits(3)


def test_a_logit_that_is_no_sum_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="predicts no tokens"):
        model_of("distilbert").lens(TEXT)
    lens = model_of("bert").lens(TEXT)
    assert lens.logits().shape == (len(TEXT), 258)
    with pytest.raises(UsageError, match=r"an activation .* before its output table"):
        lens.attribution("e")


def test_a_token_is_named_by_its_text_or_its_id() -> None:
    lens = model_of("gpt2").lens(TEXT)
    assert lens.attribution(" ").token == "▁"
    assert (
        lens.attribution("e").record()
        == lens.attribution(model_of("gpt2").tokenizer.encode("e")[0][0]).record()
    )
    with pytest.raises(UsageError, match=r"'men' is 3 tokens \('m', 'e', 'n'\)"):
        lens.attribution("men")
    with pytest.raises(UsageError, match="ids are 0 to 257"):
        lens.attribution(258)
    with pytest.raises(UsageError, match=r"there is no part .9\.9."):
        lens.attribution("e")["9.9"]
