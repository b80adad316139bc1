"""Runs that go on with the encoder-decoders of other libraries, in their format."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.tiny_marian import write_marian
from checkpoints.tiny_translators import translator_folder
from interrupting import SignalAt, assert_same_run
from triptych.errors import UsageError
from triptych.model import load
from triptych.training import Recipe, read_recipe, resolve, runs
from triptych.training.progress import LineDisplay, SilentDisplay

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

PAIRS = [(f"w{i} w{i + 1} w{i % 9 + 4}", f"w{i + 1} w{i}") for i in range(4, 36)]
MBART: dict[str, Any] = {"tokenizer_class": "MBartTokenizer"}
M2M: dict[str, Any] = {"tokenizer_class": "MBart50TokenizerFast"}
# Model, tokenizer, and the class of `transformers`.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "bart": ({"forced_bos_token_id": 1}, "BartForConditionalGeneration"),
    "mbart": (MBART, "MBartForConditionalGeneration"),
    "m2m_100": (M2M, "M2M100ForConditionalGeneration"),
    "t5": ({"decoder_start_token_id": 0}, "T5ForConditionalGeneration"),
    "t5, not scaled": ({"decoder_start_token_id": 0}, "T5ForConditionalGeneration"),
    "pegasus": ({"decoder_start_token_id": 0}, "PegasusForConditionalGeneration"),
    "umt5": ({"decoder_start_token_id": 0}, "UMT5ForConditionalGeneration"),
}
IN_EVERY_RUN = ("m2m_100",)


def recipe_of(folder: Path, checkpoint: Path, **training: Any) -> Recipe:
    text = folder / "pairs.tsv"
    text.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    usual = {"max_steps": 6, "batch_tokens": 60, "threads": 1, "save_every_steps": 2, "learning_rate": 0.003}
    usual |= {"warmup_steps": 1, "checkpoint": str(checkpoint), "average_last": 1}
    tree = {
        "data": {"train": {"file": str(text)}, "valid": {"file": str(text)}, "cache": ""},
        "training": {**usual, **training},
        "validation": {"every_steps": 3, "max_sentences": 2, "metric": "loss"},
    }
    recipe = resolve(tree)
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_EVERY_RUN else pytest.mark.slow) for n in CASES]
)
def test_a_run_is_the_checkpoint_trained_further_in_its_format(name: str, tmp_path: Path) -> None:
    said, class_name = CASES[name]
    translator_folder(tmp_path / "made", name, **said)
    named = ("de_DE", "en_XX") if said in (MBART, M2M) else None
    languages = {} if named is None else {"languages": named}
    recipe = recipe_of(tmp_path, tmp_path / "made", **languages)
    # Its loss is that of `transformers` for the same tokens and labels.
    prepared = runs.prepare(recipe, Path.cwd(), SilentDisplay())
    objective = prepared.objective()
    batch = objective.train.collate(objective.train.plan(0)[0])
    with torch.no_grad():
        ours = objective.loss(objective.model, batch)
        other = getattr(transformers, class_name).from_pretrained(tmp_path / "made").float().eval()
        labels = batch.tgt_out.masked_fill(batch.tgt_out == 0, -100)
        theirs = other(
            input_ids=batch.src,
            attention_mask=(batch.src != 0).long(),
            decoder_input_ids=batch.tgt_in,
            labels=labels,
        )
    assert float(ours.likelihood) / batch.num_target_tokens == pytest.approx(float(theirs.loss), abs=1e-4)
    # The tokens are those of its tokenizer, between the special tokens of its translations.
    reader = load(tmp_path / "made", languages=named).reader
    (row,) = [i for i, line in enumerate(batch.line_numbers) if line == batch.line_numbers[0]][:1]
    source, target = PAIRS[batch.line_numbers[0] - 1]
    src = [token for token in batch.src[row].tolist() if token]
    assert src == reader.tokenizers.source.encode([source], add_special=True)[0]
    start = reader.tokenizers.target.rules.start
    out = [token for token in batch.tgt_out[row].tolist() if token]
    assert out == [*start[1:], *reader.tokenizers.target.encode([target], add_special=True)[0]]
    assert batch.tgt_in[row, 0] == start[0]
    # A run learns, is resumed to the same bits, and needs its checkpoint no longer.
    runs.train(recipe, tmp_path / "run", LineDisplay())
    runs.train(recipe, tmp_path / "other", SignalAt(4, signal.SIGINT))
    (tmp_path / "made").rename(tmp_path / "gone")
    runs.resume(tmp_path / "other", (), LineDisplay())
    assert_same_run(tmp_path / "other", tmp_path / "run")
    after = runs.validate(tmp_path / "run")["valid_loss"]
    assert after < float(theirs.loss)
    # `transformers` reads it, and its logits are ours.
    again = getattr(transformers, class_name).from_pretrained(tmp_path / "run").eval()
    model = load(tmp_path / "run", languages=named)
    with torch.no_grad():
        logits = again(input_ids=batch.src[:1], decoder_input_ids=batch.tgt_in[:1]).logits
        found = model.reader.encoder_decoder(batch.src[:1], batch.tgt_in[:1])
    assert float((logits - found).abs().max()) < 1e-4
    assert len(model.translate(["w5 w6 w4", "w7"])) == 2
    stored = (tmp_path / "run" / "recipe.toml").read_text()
    assert "[model]" not in stored
    assert "[tokenizer]" not in stored
    assert (
        read_recipe(tmp_path / "run" / "recipe.toml").training
        == read_recipe(tmp_path / "other" / "recipe.toml").training
    )


def test_languages_are_needed_where_the_tokenizer_has_several(tmp_path: Path) -> None:
    translator_folder(tmp_path / "made", "m2m_100", **M2M)
    with pytest.raises(UsageError, match="translates between languages: name them"):
        runs.train(recipe_of(tmp_path, tmp_path / "made"), tmp_path / "run", LineDisplay())
    with pytest.raises(UsageError, match=r"training.languages is for a checkpoint of several languages"):
        resolve({"data": {"train": {"file": "a.tsv"}}, "training": {"languages": ["de_DE", "en_XX"]}})


def test_rdrop_is_refused_for_a_model_without_dropout(tmp_path: Path) -> None:
    translator_folder(tmp_path / "made", "bart")
    with pytest.raises(UsageError, match=r"training.rdrop needs dropout, and .*made is trained without it"):
        runs.train(recipe_of(tmp_path, tmp_path / "made", rdrop=1.0), tmp_path / "run", LineDisplay())
    assert not (tmp_path / "run").exists()


def test_the_bias_of_the_output_counts_in_the_loss_of_a_marian(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    write_marian(tmp_path / "made", dtype=torch.float32, max_position_embeddings=60)
    recipe = recipe_of(tmp_path, tmp_path / "made", rdrop=1.0)
    objective = runs.prepare(recipe, Path.cwd(), SilentDisplay()).objective()
    batch = objective.train.collate(objective.train.plan(0)[0])
    assert objective.model.head.output.bias.abs().max() > 0.1
    with torch.no_grad():
        logits = objective.model.eval()(batch.src, batch.tgt_in)
        real = batch.tgt_out != objective.model.pad_id
        expected = torch.nn.functional.cross_entropy(logits[real], batch.tgt_out[real], reduction="sum")
        assert float(objective.loss(objective.model, batch).likelihood) == pytest.approx(
            float(expected), rel=1e-5
        )
        # Without dropout both passes of R-Drop are the same, and the mean is one of them.
        learned = objective.training_loss(objective.model, batch, 1).likelihood
    assert float(learned) == pytest.approx(float(expected), rel=1e-5)
