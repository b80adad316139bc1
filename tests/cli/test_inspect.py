"""`triptych inspect`: what it prints, what it writes, what it refuses."""

import csv
import io
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from command import Command
from small_checkpoints import WIDTH, D, gpt2, gpt2_that_runs
from triptych.seeing.inspection import MEASURES


def test_it_says_in_words_what_it_found(triptych: Command, small_run: Path) -> None:
    answer = triptych("inspect", small_run).done()
    assert "attention layers of triptych" in answer.out
    assert "× chance" in answer.out
    assert "effective rank of W_QK" in answer.out
    assert "lowest effective rank" in answer.out


def test_json_has_everything(triptych: Command, small_run: Path) -> None:
    record = triptych("inspect", small_run, "--json").record()
    assert record["family"] == "triptych"
    kinds = [layer["kind"] for layer in record["layers"]]
    assert kinds == ["self", "causal", "cross", "causal", "cross"]
    cross = record["layers"][2]
    assert set(cross["figures"]["qk_overlap"]) == {None}
    assert None not in cross["figures"]["kv_overlap"]
    assert set(record["measures"]) == {measure.name for measure in MEASURES}
    assert record["summary"]


def test_csv_and_parquet_have_a_row_a_head(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    as_csv, as_parquet = tmp_path / "heads.csv", tmp_path / "heads.parquet"
    triptych("inspect", small_run, "--csv", as_csv, "--parquet", as_parquet).done()
    rows = list(csv.DictReader(io.StringIO(as_csv.read_text())))
    table = pyarrow.parquet.read_table(as_parquet)
    places = ["checkpoint", "stack", "layer", "kind", "head", "module", "positions", "qk_of"]
    columns = [*places, *(m.name for m in MEASURES)]
    assert list(rows[0]) == table.column_names == columns
    assert len(rows) == table.num_rows == 5 * 2
    assert float(rows[3]["ov_effective_rank"]) == table["ov_effective_rank"][3].as_py()
    assert rows[4]["qk_overlap"] == ""
    assert table["qk_overlap"][4].as_py() is None
    assert {str(table.schema.field(m.name).type) for m in MEASURES} == {"double"}


def test_two_checkpoints_stand_side_by_side(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    call = ("inspect", small_run, "--compare", small_run, "--html", page, "--layers", "0")
    assert [len(record["layers"]) for record in triptych(*call, "--json").record()] == [3, 3]
    assert page.read_text().count('"num_heads":2') == 6
    table = triptych(*call).out.rpartition("mean over the heads")[2].splitlines()
    (*_, one, other, difference) = next(line for line in table if "copying score of W_OV" in line).split()
    assert (one, float(difference)) == (other, 0)


def test_heads_that_are_nearly_the_same_are_listed(triptych: Command, tmp_path: Path) -> None:
    tensors = load_file(gpt2(tmp_path) / "model.safetensors")
    gpt2(
        tmp_path, {name.replace("h.0.", "h.2."): t for name, t in tensors.items() if name.startswith("h.0.")}
    )
    out = triptych("inspect", tmp_path).out
    table = out[out.index("nearly the same") :]
    assert "decoder 0, head 3" in table
    assert "decoder 2, head 3" in table
    assert "look alike (W_QK)" in table
    assert "move the same (W_OV)" in table


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--layers", "x"], "write numbers from 0 like 0,3 or 0-5"),
        (["--heads", "0,5-3"], "--heads 0,5-3: 5 comes after 3"),
        (["--layers", "9"], "layer 9 does not exist; layers are 0 to 1"),
        (["--heads", "5-7"], "head 7 does not exist; heads are 0 to 1"),
        (["--html", "no/such/page.html"], "make it first"),
        (["--family", "no.toml"], "no.toml: No such file"),
        (["--family", "FAMILY"], "is a run: leave out --family"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    triptych: Command, small_run: Path, tmp_path: Path, options: list[str], reason: str
) -> None:
    family = tmp_path / "family.toml"
    family.write_text('name = "mine"\n[[attention]]\nat = "h.{layer}"\n')
    triptych("inspect", small_run, *(family if o == "FAMILY" else o for o in options)).refused(reason)


@pytest.mark.parametrize("command", ["attend", "explore", "lens", "translate"])
def test_a_run_needs_no_family_file(triptych: Command, small_run: Path, tmp_path: Path, command: str) -> None:
    family = tmp_path / "family.toml"
    family.write_text('name = "mine"\n[[attention]]\nat = "h.{layer}"\n')
    text = ("--text", "ein") if command == "explore" else ("ein",)
    triptych(command, small_run, *text, "--family", family).refused("is a run: leave out --family")


def test_what_is_read_is_not_written_over(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    weights, same = small_run / "model.safetensors", tmp_path / "out.x"
    before = weights.read_bytes()
    for source in (small_run, weights):
        triptych("inspect", source, "--csv", weights).refused("is a file of the checkpoint")
    assert weights.read_bytes() == before
    triptych("inspect", small_run, "--csv", same, "--html", same).refused("is given twice")
    assert not same.exists()
    assert "cannot be written" in triptych("inspect", small_run, "--csv", tmp_path).err


def test_a_runs_tensor_file_stands_for_the_run(triptych: Command, small_run: Path) -> None:
    record = triptych("inspect", small_run / "model.safetensors", "--json").record()
    assert len(record["layers"]) == 5
    assert not any("_proj" in name for name in record["left_over"])


def test_what_is_infinite_and_what_is_not_measured_are_told_apart(triptych: Command, tmp_path: Path) -> None:
    joined = torch.randn(D, 3 * D)
    joined[:, 2 * D] = 0  # a value of head 0
    joined[0, 2 * D + WIDTH] = math.nan  # one of head 1
    folder = gpt2(tmp_path / "model", {"h.0.attn.c_attn.weight": joined})
    as_csv, as_parquet = tmp_path / "heads.csv", tmp_path / "heads.parquet"
    answer = triptych("inspect", folder, "--json", "--csv", as_csv, "--parquet", as_parquet)
    figures = json.loads(answer.out, parse_constant=pytest.fail)["layers"][0]["figures"]
    assert figures["ov_condition"][:2] == ["Infinity", None]
    rows = list(csv.DictReader(io.StringIO(as_csv.read_text())))
    assert [row["ov_condition"] for row in rows[:2]] == ["inf", ""]
    assert pyarrow.parquet.read_table(as_parquet)["ov_condition"][:2].to_pylist() == [math.inf, None]


def test_a_field_that_is_not_followed_is_one_line_of_warning_and_in_the_json(
    triptych: Command, tmp_path: Path
) -> None:
    folder = gpt2(tmp_path / "model", config={"clip_qkv": 8})
    answer = triptych("inspect", folder, "--json").done()
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("triptych: warning: ")
    assert "clip_qkv is not read by GPT-2 in transformers" in answer.err
    assert answer.record()["warnings"] == [answer.err.removeprefix("triptych: warning: ").rstrip()]


def test_a_refusal_is_one_line_and_the_rest_comes_with_verbose(triptych: Command, tmp_path: Path) -> None:
    folder = gpt2(tmp_path / "model", config={"model_type": "nobodys"})
    answer = triptych("inspect", folder)
    assert answer.code == 1
    assert answer.err.count("\n") == 1
    assert answer.err.endswith("(more with --verbose)\n")
    assert "no family file knows model_type 'nobodys'" in answer.err
    said = triptych("inspect", folder, "--verbose").err
    assert "[[attention]]" in said
    assert "more with --verbose" not in said
    assert said.endswith("\ncode file: triptych explain file\n")


def test_several_checkpoints_are_inspected_at_once(triptych: Command, small_run: Path, cwd: Path) -> None:
    shutil.copytree(small_run, "one")
    gpt2(Path("two"))
    three = ("inspect", "one", "two", "one", "--layers", "0", "--csv", "heads.csv")
    records = triptych(*three, "--json").record()
    names = ["one", "two", "one (2)"]
    assert [record["name"] for record in records] == names
    rows = csv.DictReader(io.StringIO(Path("heads.csv").read_text()))
    heads = zip(names, (6, 4, 6), strict=True)
    assert [row["checkpoint"] for row in rows] == [name for name, number in heads for _ in range(number)]
    out = triptych(*three).out
    side_by_side = out[out.rindex("mean over the heads") :].splitlines()
    assert side_by_side[0].split()[-4:] == ["one", "two", "one", "(2)"]
    line = next(line for line in side_by_side if line.strip().startswith("copying score of W_OV"))
    first, between, last = line.split()[-3:]
    assert first == last != between


def test_a_deep_model_shows_the_ten_heads_that_tell_most_and_the_others_with_all(
    triptych: Command, tmp_path: Path
) -> None:
    folder = gpt2_that_runs(tmp_path / "deep", layers=11)
    answer = triptych("inspect", folder)
    assert "The 10 of 44 heads that tell most; --all shows every head." in answer.out
    assert "│" not in answer.out
    shown = re.findall(r"^ decoder (\d+), head (\d+) ", answer.out, re.MULTILINE)
    # The first head is the farthest from the mean by one of the measures, in standard deviations.
    record = triptych("inspect", folder, "--json").record()
    names = ["qk_effective_rank", "ov_effective_rank", "qk_times_chance", "qk_symmetric_share", "ov_copying"]
    figures = [np.array([layer["figures"][name] for layer in record["layers"]]) for name in names]
    apart = np.max([abs(own - own.mean()) / own.std() for own in figures], axis=0)
    order = np.argsort(-apart, axis=None)[:10]
    assert [(int(layer), int(head)) for layer, head in shown] == [divmod(int(place), 4) for place in order]
    for options in (("--all",), ("--heads", "0-3"), ("--layers", "0-10")):
        whole = triptych("inspect", folder, *options)
        assert whole.out.count("│") >= 2 * 11 * 5
        assert "tell most" not in whole.out
    assert triptych("inspect", folder, "--json", "--all").code == 2
