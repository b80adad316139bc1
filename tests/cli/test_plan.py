"""`triptych plan`."""

from pathlib import Path

import pytest

from command import Command
from triptych.cli.verbs import read_quantity
from triptych.errors import UsageError

RECIPE = """
task = "language-model"
data.train.files = ["nowhere.txt"]
tokenizer.vocab_size = 50
model = {num_layers = 4, d_model = 16, num_heads = 2, context = 8}
training = {batch_size = 1, max_steps = 10}
"""


def test_a_plan_says_what_copies_and_shards_hold_and_send(triptych: Command, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    told = triptych("plan", str(path), "--devices", "2", "--device-memory", "1MB", "--json").record()
    plain = {one["kind"]: one for one in told["layouts"] if not one["checkpointing"]}
    weights = 4 * told["parameters"]
    assert plain["ddp"]["parameter_bytes"] == plain["ddp"]["gradient_bytes"] == weights
    assert plain["ddp"]["optimizer_bytes"] >= 2 * weights
    assert plain["ddp"]["sent_bytes"] == pytest.approx(2 * weights / 2, rel=0.01)
    assert plain["fsdp"]["parameter_bytes"] == pytest.approx(weights / 2, rel=0.01)
    # Gathered forwards and backwards, the root's once; summed once.
    assert 2 * weights / 2 <= plain["fsdp"]["sent_bytes"] <= 3 * weights / 2
    assert plain["fsdp"]["peak_bytes"] < plain["ddp"]["peak_bytes"]
    assert told["notes"][-1].startswith("a batch has 1 rows for 2 devices: 1 of them learn nothing")
    assert told["best"]["training.parallel"] in plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-memory", "80 apples"], "--device-memory is '80 apples'"),
        (["--device-memory", "80GB", "--node-size", "3"], "not a multiple of --node-size 3"),
        (["--device-memory", "80GB", "--set", "training.no_such=1"], "unknown key training.no_such"),
        (["--device-memory", "80GB", "--set", "task=dance"], "task is 'dance'"),
    ],
)
def test_bad_input_is_one_line(triptych: Command, arguments: list[str], message: str) -> None:
    triptych("plan", "paper-base", "--devices", "16", *arguments).refused(message)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80e9),
        ("40GiB", 40 * 2**30),
        ("3.35TB/s", 3.35e12),
        ("400T", 4e14),
        ("4e14", 4e14),
        ("512", 512),
    ],
)
def test_a_quantity_is_a_number_with_a_unit(text: str, size: float) -> None:
    assert read_quantity(text, "--x") == size


@pytest.mark.parametrize("text", ["", "GB", "80 apples", "-80GB", "80GBs", "eighty", "0", "3iB"])
def test_what_is_no_quantity_is_refused_with_the_name_of_its_option(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--device-memory is "):
        read_quantity(text, "--device-memory")
