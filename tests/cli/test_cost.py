import re
from pathlib import Path

import pytest

from command import Command
from triptych.core.attention import PARAMETERISATIONS

SMALL = ("--d-model", 16, "--num-heads", 2, "--length", 4, "--context", 6)


@pytest.fixture(autouse=True)
def _hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_all_parameterisations_stand_side_by_side_within_100_columns(triptych: Command) -> None:
    answer = triptych("cost").done()
    lines = [line.rstrip() for line in answer.out.splitlines()]
    assert max(map(len, lines)) <= 100
    assert "…" not in answer.out
    first = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert set(PARAMETERISATIONS) <= set(first)
    assert first["factored"] == (
        ["1.05M", "1,024", "8.00", "MiB", "9.44M", "3.15M", "6.29M", "5.00", "MiB", "110", "0.50"]
    )
    assert "d_model 512, 8 heads, d_k 64, d_v 64" in lines[0]
    assert "latent, decode: the absorbed route" in answer.out
    assert "W_QK" not in answer.out


def test_a_file_gets_whole_numbers_whatever_the_width(
    triptych: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    answer = triptych("cost", "--only", "collaborative")
    assert "…" not in answer.out
    assert re.search(r"^ collaborative +1\.05M .* 1\.66 *$", answer.out, re.MULTILINE)


def test_a_narrow_terminal_gets_the_columns_in_parts(
    triptych: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    answer = triptych("cost", "--only", "collaborative")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", answer.out)
    rows = [line.split() for line in plain.splitlines() if line.startswith(" collaborative ")]
    assert rows == [
        ["collaborative", "1.05M", "1,024", "8.00", "MiB", "20.4M"],
        ["collaborative", "6.82M", "21.0M", "13.0", "MiB", "111", "1.66"],
    ]


def test_large_sizes_still_fit(triptych: Command) -> None:
    answer = triptych(
        "cost", "--d-model", 16384, "--num-heads", 128, "--context", 131072, "--batch", 64
    ).done()
    assert "…" not in answer.out
    assert max(len(line.rstrip()) for line in answer.out.splitlines()) <= 100


def test_formulas_come_with_their_numbers(triptych: Command) -> None:
    answer = triptych("cost", "--only", "grouped", "--num-kv-heads", 2, "--formulas")
    text = " ".join(answer.out.split())
    assert "W_QK W_i^Q W_g^Kᵀ" in text
    assert "parameters h·d·d_k + num_kv_heads·d·(d_k + d_v) + h·d·d_v = 655,360" in text
    assert "KV per token num_kv_heads·(d_k + d_v) = 256" in text


def test_json_holds_the_counts_the_size_and_what_was_left_out(triptych: Command) -> None:
    record = triptych(
        "cost", "--json", "--num-kv-heads", 3, "--dtype", "bf16", "--bias", "--batch", 2
    ).record()
    assert record["spec"]["biases"] is True
    left_out = {
        "grouped": "num_kv_heads 3 does not divide num_heads 8",
        "differential": "2 × num_kv_heads 3 does not divide num_heads 8",
    }
    assert {row["name"]: row["reason"] for row in record["left_out"]} == left_out
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == [name for name in PARAMETERISATIONS if name not in left_out]
    assert rows["factored"]["parameters"] == 4 * 512**2 + 4 * 512
    assert rows["factored"]["cache_bytes"] == 2 * 2048 * 1024 * 2
    assert rows["factored"]["formulas"]["num_parameters"] == 4 * 512**2


def test_a_page_is_written_beside_what_is_printed(triptych: Command, tmp_path: Path) -> None:
    page = tmp_path / "cost.html"
    answer = triptych("cost", *SMALL, "--html", page).done()
    assert f"page: {page}" in answer.out
    text = page.read_text()
    for name in PARAMETERISATIONS:
        assert f"<td>{name}</td>" in text
    assert "triptych cost --d-model 16" in text
    triptych("cost", *SMALL, "--html", page, "--json").record()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-heads", 7), "num_heads 7 does not divide d_model 512: give both d_k and d_v"),
        (("--html", "no/such/folder/page.html"), "the folder of no/such/folder/page.html does not exist"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_exit_code_2(
    triptych: Command, options: tuple[object, ...], message: str
) -> None:
    assert triptych("cost", *options).refused(message).err.startswith("triptych: ")
