"""Models that are run: what they read of a text, and which can be run here."""

from pathlib import Path

import pytest
import torch

from checkpoints.test_families import made
from rewriting.test_calibration import bert, text_in
from small_checkpoints import gpt2_that_runs
from triptych.models import EncoderDecoder, ModelConfig, write_model
from triptych.rewriting.comparing import open_original
from triptych.rewriting.running import can_run, open_model

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")


@pytest.mark.parametrize("most_tokens", [1, 63, 64, 65, 100, 150])
def test_a_language_model_predicts_so_many_tokens_of_a_text_each_from_all_before_it_in_its_window(
    most_tokens: int, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What a piece of work is a man! " * 5, encoding="utf-8")
    model = open_model(gpt2_that_runs(tmp_path / "gpt2"))
    windows = list(model.windows(text, most_tokens))
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt2")(text.read_text())["input_ids"]
    assert [len(window.targets) for window in windows if window.targets is not None] == [
        min(64, most_tokens - start) for start in range(0, most_tokens, 64)
    ]
    for number, window in enumerate(windows):
        given, wanted = window.inputs["input_ids"][0].tolist(), window.targets
        assert wanted is not None
        assert given == ids[64 * number : 64 * number + len(given)]
        assert wanted.tolist() == ids[64 * number + 1 : 64 * number + 1 + len(given)]


def test_an_encoder_reads_lines_until_they_have_so_many_tokens(tmp_path: Path) -> None:
    model, text = open_model(bert(tmp_path / "bert")), text_in(tmp_path)
    lengths = [len(line.split()) for line in text.read_text(encoding="utf-8").splitlines()]
    for lines in range(1, 5):
        most_tokens = sum(lengths[:lines])
        for tokens, expected in ((most_tokens, lines), (most_tokens + 1, lines + 1)):
            assert len(list(model.windows(text, tokens))) == expected


def test_without_transformers_a_run_of_ours_can_be_run_and_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    stack = {"num_layers": 1}
    config = ModelConfig.model_validate(
        {"d_model": 8, "d_ff": 8, "num_heads": 2, "encoder": stack, "decoder": stack}
    )
    (tmp_path / "ours").mkdir()
    write_model(EncoderDecoder.of(config, 9, 9), tmp_path / "ours")
    gpt2_that_runs(tmp_path / "gpt2")
    assert can_run(tmp_path / "ours") == can_run(tmp_path / "gpt2") == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert can_run(tmp_path / "ours") == ""
    assert "transformers, which would run it, is not installed" in can_run(tmp_path / "gpt2")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit", "the original cannot be run: ViTModel reads images, not text"),
        (
            "clip",
            "the original cannot be run: CLIPModel reads images besides text, and does not run on text alone",
        ),
    ],
)
def test_a_model_of_pictures_is_not_run_on_text_and_one_line_says_so(
    name: str, reason: str, tmp_path: Path
) -> None:
    made(name, tmp_path)
    assert open_original(tmp_path, None) == reason
