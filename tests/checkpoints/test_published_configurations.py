"""Configurations as people publish them, odd keys and all: with small sizes they run as in `transformers`."""

import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from checkpoints.oracle import apart  # noqa: E402
from checkpoints.published import Built, Published, built, published  # noqa: E402
from checkpoints.runs import attention_weights, outputs, some, theirs  # noqa: E402
from triptych.core.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from triptych.core.checkpoints.stored_models import load_encoder_decoder, load_language_model  # noqa: E402
from triptych.core.models import EncoderDecoder, LanguageModel  # noqa: E402
from triptych.errors import DataError  # noqa: E402
from triptych.running.opening import record_calls  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
PUBLISHED = {of.source: of for of in published()}
IN_EVERY_RUN = {
    *("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "google/gemma-2-2b", "tiiuae/falcon-40b"),
    *("allenai/scibert_scivocab_uncased", "intfloat/e5-mistral-7b-instruct", "google-t5/t5-small"),
    *("meta-llama/Llama-4-Scout-17B-16E-Instruct", "allenai/Olmo-3.1-32B-Instruct"),
    "microsoft/bitnet-b1.58-2B-4T",
}
# BLOOM writes the root of 2/π with eight digits, RoFormer sines and cosines with seven; Marian's are float32.
TOLERANCE = {"bloom": 1e-9, "roformer": 1e-7, "marian": 1e-6}


def loaded(of: Built) -> LanguageModel | EncoderDecoder:
    return load_encoder_decoder(of.folder) if of.pairs else load_language_model(of.folder)


def given_by(model: LanguageModel | EncoderDecoder, ids: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Logits of tokens, or of the head of a task."""
    *_, last = model.stacks.values()
    if last.task is None:
        return outputs(model(*ids))
    if isinstance(model, EncoderDecoder):
        hidden = model.decode(ids[1], model.encode(ids[0]), model.memory_mask(ids[0]))
    else:
        hidden = model.hidden(*ids)
    logits = torch.stack([last.task(rows, own) for rows, own in zip(hidden, ids[0], strict=True)])
    return logits if logits.dim() == 3 else logits[..., None]


@pytest.mark.parametrize("source", some(PUBLISHED, IN_EVERY_RUN))
@torch.no_grad()
def test_a_published_configuration_runs_as_in_transformers(source: str, tmp_path: Path) -> None:
    of: Published = PUBLISHED[source]
    made = built(of, tmp_path / "built")
    if of.outcome != "run":
        with pytest.raises(DataError, match=re.escape(of.outcome)):
            loaded(made)
        return
    weights = made.model.config._attn_implementation == "eager"
    wanted = theirs(made.model, *made.ids, output_attentions=weights)
    model = loaded(made)
    with record_calls(model) as calls:
        found = given_by(model, made.ids)
    tolerance = TOLERANCE.get(made.model.config.model_type, 1e-10)
    assert apart(found, outputs(wanted)) < tolerance * max(1.0, float(outputs(wanted).abs().max()))
    if weights:
        for ours, layer in attention_weights(calls, wanted):
            assert apart(ours, layer) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("source", [of.source for of in PUBLISHED.values() if "not run" in of.outcome])
def test_the_attention_of_a_model_that_is_not_run_is_read(source: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(built(PUBLISHED[source], tmp_path / "built").folder)
    assert checkpoint.sites
    for site in checkpoint.sites:
        assert checkpoint.read(site).weights.num_heads > 0


def test_there_are_many_types_and_most_are_run() -> None:
    types = {of.config.get("model_type") for of in PUBLISHED.values()}
    assert len(PUBLISHED) >= 200
    assert len(types) >= 100
    assert sum(of.outcome == "run" for of in PUBLISHED.values()) >= 190
