"""Embeddings that begin with word vectors of a file, and embeddings that are not trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import triptych
from studying import BASE
from triptych.core.models import EncoderDecoder, LanguageModel, LanguageModelConfig, ModelConfig
from triptych.core.models.storage import read_own_model
from triptych.core.models.vectors import WordVectors
from triptych.errors import DataError, TriptychError
from triptych.running.text import read_tokenizer

PIECES = ["▁the", "▁Cat", "s", None, "▁"]
LINES = "the 1 2 3\ncat 4 5 6\n<pad> 9 9 9\ndog 7 8 9\n"


def drawn() -> Tensor:
    return torch.randn(len(PIECES), 3)


@pytest.mark.parametrize("header", ["", "4 3\n"])
def test_tokens_take_the_vectors_of_their_words_and_the_others_keep_what_was_drawn(
    tmp_path: Path, header: str
) -> None:
    (tmp_path / "vectors.txt").write_text(header + LINES)
    vectors, table = WordVectors(tmp_path / "vectors.txt", PIECES, 3), drawn()
    found = vectors.into(table)
    given = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    factor = table.square().mean().sqrt() / given.square().mean().sqrt()
    torch.testing.assert_close(found[:2], given * factor)
    torch.testing.assert_close(found[2:], table[2:])
    assert vectors.describe().endswith("vectors of 2 of 5 tokens")


def test_a_safetensors_file_has_a_row_for_each_token(tmp_path: Path) -> None:
    rows = drawn()
    save_file({"rows": rows}, tmp_path / "vectors.safetensors")
    table = drawn()
    found = WordVectors(tmp_path / "vectors.safetensors", PIECES, 3).into(table)
    torch.testing.assert_close(found, rows * (table.square().mean() / rows.square().mean()).sqrt())
    save_file({"rows": rows[:4].clone()}, tmp_path / "vectors.safetensors")
    with pytest.raises(DataError, match=r"one tensor \[5, 3\] is needed, .* and it has \[4, 3\]"):
        WordVectors(tmp_path / "vectors.safetensors", PIECES, 3).into(table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 1 2\n", r"line 1: a vector of 2 numbers, and the embeddings are 3 wide \(model.d_model\)"),
        ("1 5\nthe 1 2 3 4 5\n", "line 2: a vector of 5 numbers"),
        ("the 1 2 x\n", "line 1: not 3 finite numbers"),
        ("the 1 2 nan\n", "line 1: not 3 finite numbers"),
        ("dog 1 2 3\n", "a vector for no token"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "vectors.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        WordVectors(tmp_path / "vectors.txt", PIECES, 3).into(drawn())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat.\n" * 40)
    numbers = [
        f"{letter} " + " ".join(str(i + j % 3) for j in range(16)) for i, letter in enumerate("thecas")
    ]
    (tmp_path / "letters.txt").write_text("\n".join(numbers) + "\n")
    recipe = BASE + '[model.embeddings]\nvectors = "letters.txt"\nfrozen = true\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    return tmp_path


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_begins_with_the_vectors_leaves_them_and_resumes_without_the_file(
    place: Path, optimizer: str
) -> None:
    recipe = triptych.read_recipe(place / "recipe.toml", [f"training.optimizer={optimizer}"])
    triptych.train(recipe, place / "run")
    model = read_own_model(place / "run")
    assert isinstance(model, LanguageModel)
    table = model.embeddings.table.weight
    assert not table.requires_grad
    tokens = read_tokenizer(place / "run" / "tokenizer.json")
    rows = {piece: table[i] for i, piece in enumerate(tokens.pieces(range(tokens.vocab_size)))}
    wanted = torch.tensor([float(1 + j % 3) for j in range(16)])
    assert torch.cosine_similarity(rows["h"], wanted, dim=0) == pytest.approx(1.0)
    torch.testing.assert_close(rows["a"] / rows["h"], (wanted + 3) / wanted)
    (place / "letters.txt").unlink()
    triptych.resume(place / "run", ["training.max_steps=6"])
    again = read_own_model(place / "run")
    assert torch.equal(table, again.embeddings.table.weight)
    own = dict(model.named_parameters())
    moved = [name for name, p in again.named_parameters() if not torch.equal(p, own[name])]
    assert moved
    assert "embeddings.table.weight" not in moved


def test_a_run_without_its_vectors_does_not_begin(place: Path) -> None:
    (place / "letters.txt").unlink()
    with pytest.raises(TriptychError, match=r"letters\.txt: the vectors cannot be read"):
        triptych.train(triptych.read_recipe(place / "recipe.toml"), place / "run")
    assert not (place / "run").exists()


def test_frozen_tables_get_no_gradient_and_all_else_does() -> None:
    config = ModelConfig.model_validate(
        {
            **{"d_model": 16, "d_ff": 16, "num_heads": 2, "tie_embeddings": "target"},
            **{"encoder": {"num_layers": 1}, "decoder": {"num_layers": 1}},
            "embeddings": {"frozen": True},
        }
    )
    model = EncoderDecoder.of(config, 10, 12)
    model(torch.tensor([[3, 4]]), torch.tensor([[1, 5]])).square().sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"encoder.embeddings.table.weight", "decoder.embeddings.table.weight"}


def test_a_configuration_without_these_options_is_stored_as_before() -> None:
    assert "embeddings" not in ModelConfig().model_dump()
    assert "embeddings" not in LanguageModelConfig().model_dump()
    assert ModelConfig.model_validate({"embeddings": {"frozen": True}}).model_dump()["embeddings"]["frozen"]


def test_vectors_of_a_table_that_there_is_not_are_refused() -> None:
    with pytest.raises(ValueError, match="tie_embeddings = 'all' has one table"):
        ModelConfig.model_validate({"embeddings": {"target_vectors": "x.txt"}})
