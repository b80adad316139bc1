"""`triptych rewrite`: what it writes, what it prints, what it refuses."""

import json
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.tiny_marian import write_marian
from command import Command
from small_checkpoints import HEADS, LAYERS, D, gpt2, llama
from tiny_recipe import tiny_recipe
from triptych.core.models import attention_sites
from triptych.core.models.storage import read_own_model
from triptych.core.storage.copying import CERTIFICATE
from triptych.rewriting import whole_models as comparing
from triptych.rewriting.certificate import Certificate, read_certificate
from triptych.rewriting.functions.registry import REWRITES, option_names, purpose, signature
from triptych.rewriting.functions.rewrite import Rewrite
from triptych.rewriting.planning import Plan
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.training import resolve, runs
from triptych.training.progress import LineDisplay

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 8


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


# What it does.


def test_exact_rewrites_are_told_written_and_read_certificate(triptych: Command, tmp_path: Path) -> None:
    source, out = gpt2(tmp_path / "source"), tmp_path / "out"
    answer = triptych("rewrite", source, "-o", out, "--exact").done()
    assert answer.err == ""
    for said in ("fold_norm", "drop_key_bias", "rounding-exact", "parameters", "at most", f"written: {out}"):
        assert said in answer.out
    found = read_certificate(out)
    exact = ["fold", "fold_norm", "drop_key_bias", "fold_value_bias", "prune_heads", "gauge_fix"]
    assert [step.rewrite for step in found.layers[0].steps] == exact
    assert "Heads have other numbers" not in answer.out
    assert [layer.heads for layer in found.layers] == [None] * LAYERS
    assert found.tier == "rounding-exact"
    after = load_file(out / "model.safetensors")
    assert after.keys() == load_file(source / "model.safetensors").keys()
    assert not after["h.0.attn.c_attn.bias"][D:].any()
    triptych("verify", out, "--against", source).done()
    triptych("inspect", out).done()


@pytest.mark.parametrize("step", ["sort_heads", "permute_heads(order=[2, 0, 1, 3])"])
def test_what_renumbers_heads_says_so(triptych: Command, tmp_path: Path, step: str) -> None:
    source, out = gpt2(tmp_path / "source"), tmp_path / "out"
    planned = triptych("rewrite", source, "--do", step, "--plan")
    answer = triptych("rewrite", source, "-o", out, "--do", step).done()
    found, said = read_certificate(out), "Heads have other numbers now in"
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    moved = 0
    for number, layer in enumerate(found.layers):
        name, order = f"h.{number}.attn.c_proj.weight", layer.heads or range(HEADS)
        old, new = (held[name].view(HEADS, -1, D) for held in (before, after))
        assert torch.equal(new, old[list(order)])
        moved += layer.heads is not None
        if layer.heads is not None:
            assert f"{layer.module}: {' '.join(map(str, layer.heads))}" in answer.out
    assert moved
    for text in (planned.out, answer.out, (out / "README.md").read_text()):
        assert f"{said} {moved} of {LAYERS} layers" in text
    triptych("verify", out, "--against", source).done()


def test_heads_that_stay_in_their_places_are_not_renumbered(triptych: Command, tmp_path: Path) -> None:
    source, out = gpt2(tmp_path / "source"), tmp_path / "out"
    answer = triptych("rewrite", source, "-o", out, "--do", "prune_heads(heads=[1])").done()
    assert {layer.heads for layer in read_certificate(out).layers} == {None}
    assert "other numbers" not in answer.out
    held = load_file(out / "model.safetensors")["h.0.attn.c_proj.weight"].view(HEADS, -1, D)
    assert not held[1].any()
    assert held[2].any()


def test_rewrites_by_name_are_done_in_the_order_given(triptych: Command, tmp_path: Path) -> None:
    source, out = gpt2(tmp_path / "source"), tmp_path / "out"
    both = ["fold_norm", "fold_value_bias"]
    options = (*(word for name in both for word in ("--do", name)), "--layers", "0,2", "--json")
    record = triptych("rewrite", source, "-o", out, *options).record()
    assert record == json.loads((out / CERTIFICATE).read_text())
    layers = read_certificate(out).layers
    assert [[step.rewrite for step in layer.steps] for layer in layers] == [both, [], both]
    assert [layer.measured is None for layer in layers] == [False, True, False]


@pytest.mark.parametrize("options", [["--rank", "3"], ["--energy", "0.8"], ["--budget", "0.6"]])
def test_lower_ranks_are_bounded_and_hold_when_tried_again(
    triptych: Command, tmp_path: Path, options: list[str]
) -> None:
    source, out = gpt2(tmp_path / "source"), tmp_path / "out"
    answer = triptych("rewrite", source, "-o", out, *options).done()
    assert "bounded" in answer.out
    found = read_certificate(out)
    assert found.tier == "bounded"
    assert found.after == found.before  # in this format
    assert found.unpadded is not None
    assert found.unpadded.parameters < found.before.parameters
    assert "not in this file" in answer.out
    assert all(layer.steps[0].bound > 0 for layer in found.layers)
    triptych("verify", out, "--against", source).done()


def test_what_is_kept_may_be_what_counts_on_a_text(
    triptych: Command, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    found = []
    for options in (("--rank", "4"), ("--rank", "4", "--calibrate", text)):
        out = tmp_path / str(len(options))
        triptych("rewrite", checkpoint, "-o", out, *options, "--text", text).done()
        found.append(read_certificate(out))
    free, on_text = found
    assert [one.recipe[0]["criterion"] for one in found] == ["free", "centred"]
    assert (free.calibration is None, on_text.calibration is None) == (True, False)
    assert all(layer.steps[0].error is not None for layer in on_text.layers)
    divergences = [one.end_to_end.divergence_nats for one in (on_text, free) if one.end_to_end]
    assert divergences[0] < divergences[1]


def test_whole_models_are_compared_on_the_text_given(
    triptych: Command, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    answer = triptych("rewrite", checkpoint, "-o", tmp_path / "out", "--exact", "--text", text).done()
    found = read_certificate(tmp_path / "out").end_to_end
    assert found is not None
    assert (found.text, found.tokens) == ("text.txt", len(TEXT) - 1)
    assert found.worst_logit < 1e-3
    assert found.loss_before_nats == pytest.approx(found.loss_after_nats, abs=1e-4)
    assert "Whole models on text.txt" in answer.out


def test_whole_models_are_not_run_where_that_is_not_wanted(
    triptych: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path) -> None:
        raise AssertionError(f"{path} was opened to be run")

    monkeypatch.setattr(comparing, "open_text_reader", opened)
    out = tmp_path / "out"
    answer = triptych("rewrite", checkpoint, "-o", out, "--do", "fold_norm", "--no-compare").done()
    assert read_certificate(out).end_to_end is None
    assert read_certificate(out).not_compared == "it was not asked for"
    assert "Whole models were not compared: it was not asked for." in answer.out


def test_a_model_whose_file_lacks_tensors_is_not_compared_with_random_ones_in_their_place(
    triptych: Command, tmp_path: Path
) -> None:
    triptych("rewrite", llama(tmp_path / "source"), "-o", tmp_path / "out", "--exact").done()
    assert "there is no tensor for " in read_certificate(tmp_path / "out").not_compared


def test_a_size_of_ranks_takes_its_place_among_the_rewrites_named(triptych: Command, tmp_path: Path) -> None:
    do = ("--do", "repeat_kv_heads(num_kv_heads=4)", "--rank", "8")
    plan = triptych("rewrite", llama(tmp_path / "source"), *do, "--plan", "--json").record()
    assert [step["rewrite"] for step in plan["layers"][0]["steps"]] == ["truncate", "repeat_kv_heads"]
    answer = triptych("rewrite", tmp_path / "source", "--do", "repeat_kv_heads(num_kv_heads=3)", "--plan")
    answer.refused("num_kv_heads 3 is no multiple of 2 that divides 4 heads", code=1)


# A plan.


def test_a_plan_is_printed_and_nothing_written(triptych: Command, tmp_path: Path) -> None:
    source = gpt2(tmp_path / "source")
    answer = triptych("rewrite", source, "--exact", "--rank", "3", "--plan", "-o", tmp_path / "out").done()
    assert "3 attention layers" in answer.out
    assert "truncate" in answer.out
    assert "bytes now" in answer.out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_plan_is_json_on_request(triptych: Command, tmp_path: Path) -> None:
    do = ("--do", "merge_kv_heads(num_kv_heads=1)")
    plan = triptych("rewrite", llama(tmp_path / "source"), *do, "--plan", "--json").record()
    assert plan.keys() == {field.name for field in fields(Plan)}
    assert plan["settings"] == {"num_key_value_heads": 1}
    assert plan["bytes_after"] < plan["bytes_before"]
    assert [step["rewrite"] for step in plan["layers"][2]["steps"]] == ["merge_kv_heads"]
    assert plan["after"]["kv_bytes_per_token"] < plan["before"]["kv_bytes_per_token"]


# Refusals.


def test_a_refused_step_is_one_line_and_leaves_nothing(triptych: Command, tmp_path: Path) -> None:
    tensors = load_file(llama(tmp_path / "source") / "model.safetensors")
    assert "model.layers.0.self_attn.k_proj.bias" not in tensors
    answer = triptych("rewrite", tmp_path / "source", "-o", tmp_path / "out", "--do", "to_latent")
    answer.refused("to_latent at decoder 0 refused: ", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "nothing to do: give --exact, --do REWRITE"),
        (["--exact", "NO OUT"], "give the output folder with --out"),
        (["--rank", "3", "--energy", "0.5"], "give one of rank, energy and budget (given: rank and energy)"),
        (["--exact", "--do", "fold_norm"], "exact does fold_norm already"),
        (["--do", "exact", "--do", "fold_norm"], "exact does fold_norm already"),
        (["--recipe", "RECIPE", "--exact"], "--recipe cannot be combined"),
        (["--recipe", "RECIPE", "--layers", "0"], "--recipe cannot be combined"),
        (["--recipe", "nothing.toml"], "nothing.toml: No such file"),
        (["--do", "melt"], "there is no rewrite melt: there are fold, expand"),
        (["--do", "truncate"], "truncate: give one of rank, energy and budget"),
        (["--do", "truncat(rank=3)"], "there is no rewrite truncat (did you mean truncate?): there are fold"),
        (["--do", "truncate(rnk=3)"], "truncate has no option rnk (did you mean rank?): there are forms, "),
        (["--do", "truncate(rank='3')"], "truncate.rank: Input should be a valid integer"),
        (["--do", "truncate(rank=True)"], "truncate.rank: Input should be a valid integer"),
        (["--do", "truncate(rank=2, rank=3)"], "truncate(rank=2, rank=3): rank is given twice"),
        (["--do", "truncate(3)"], "truncate(3): give options by name, as in truncate(rank=6)"),
        (["--do", "truncate(rank=open('x'))"], "rank is open('x'): write a number, a string or a list"),
        (["--do", "truncate(rank=3"], "is no rewrite: write truncate(rank=6), or expand"),
        (["--do", "fold; expand"], "is no rewrite: write truncate(rank=6), or expand"),
        (["--recipe", "BOTH"], "do and [[step]] say the same in two ways"),
        (["--do", "merge_kv_heads"], "merge_kv_heads.num_kv_heads: Field required"),
        (["--do", "gauge_fix", "--do", "fold_norm"], "fold_norm must come before gauge_fix"),
        (["--rank", "0"], "truncate.rank: Input should be greater than or equal to 1"),
        (["--rank", "9"], "truncate: rank is 9, and the widest head has 8 channels"),
        (["--energy", "1.5"], "truncate.energy: it is a share above 0 and up to 1, such as 0.5, and not 1.5"),
        (["--do", "truncate(rank=3, forms=['qk', 'vo'])"], "truncate.forms.1: Input should be 'qk' or 'ov'"),
        (["--do", "truncate(rank=3, forms=['qk', 'qk'])"], "truncate: forms is qk,qk: give qk, ov or both"),
        (
            ["--do", "merge_kv_heads(num_kv_heads=0)"],
            "num_kv_heads: Input should be greater than or equal to 1",
        ),
        (["--do", "prune_heads(number=0)"], "prune_heads.number: Input should be greater than or equal to 1"),
        (
            ["--do", "truncate(rank=3, criterion='centred')"],
            "truncate needs a text: give one with --calibrate",
        ),
        (["--rank", "3", "--calibrate", "no.txt"], "no.txt does not exist"),
        (["--rank", "3", "--calibrate", "."], ". is a folder; give a file in it"),
        (["--rank", "3", "--calibrate", "BINARY"], "binary is UTF-16"),
        (["--exact", "--calibrate", "TEXT"], "no step uses the calibration text"),
        (["--exact", "--text", "no.txt"], "no.txt does not exist"),
        (["--exact", "--text", "TEXT", "--no-compare"], "--text and --no-compare contradict"),
        (["--exact", "--text", "BINARY"], "binary is UTF-16"),
        (["--exact", "--layers", "7"], "layer 7 does not exist; layers are 0 to 2"),
        (["--exact", "--layers", "x"], "--layers x: write numbers from 0"),
        (["--exact", "--family", "no.toml"], "no.toml: No such file"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(
    triptych: Command, tmp_path: Path, text: Path, options: list[str], reason: str
) -> None:
    source, out = gpt2(tmp_path / "source"), tmp_path / "out"
    (tmp_path / "rewrite.toml").write_text('[[step]]\nrewrite = "fold_norm"\n')
    (tmp_path / "both.toml").write_text('do = ["expand"]\n[[step]]\nrewrite = "fold_norm"\n')
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    names = {"RECIPE": "rewrite.toml", "BOTH": "both.toml", "BINARY": "binary"}
    places = {"TEXT": text, **{name: tmp_path / file for name, file in names.items()}}
    target = [] if "NO OUT" in options else ["-o", out]
    answer = triptych("rewrite", source, *target, *(places.get(o, o) for o in options if o != "NO OUT"))
    assert answer.code == (1 if "BINARY" in options else 2), answer
    assert reason in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""
    assert not out.exists()


@pytest.mark.parametrize("kind", ["checkpoint", "run"])
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("there", "exists"),
        ("link", "exists"),
        ("source/inside", "is inside"),
        ("no/such/out", "the folder"),
    ],
)
def test_a_place_that_will_not_do_is_one_line_before_anything_is_done(
    triptych: Command, small_run: Path, tmp_path: Path, kind: str, target: str, reason: str
) -> None:
    source = tmp_path / "source"
    gpt2(source) if kind == "checkpoint" else shutil.copytree(small_run, source)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    triptych("rewrite", source, "-o", tmp_path / target, "--exact").refused(reason)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "source", "there"]
    assert not any((tmp_path / "there").iterdir())


@pytest.mark.parametrize(
    ("kind", "at"),
    [("checkpoint", "writing"), ("checkpoint", "comparing"), ("run", "rewriting"), ("run", "comparing")],
)
def test_an_interruption_leaves_nothing_behind(
    triptych: Command,
    small_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    at: str,
) -> None:
    source = gpt2(tmp_path / "source") if kind == "checkpoint" else small_run
    before = sorted(tmp_path.iterdir())

    def stopped(*arguments: Any, progress: Any, **options: Any) -> Certificate:
        def interrupt(what: str, done: int, total: int) -> None:
            if what.startswith(at):
                raise KeyboardInterrupt

        return rewrite_checkpoint(*arguments, progress=interrupt, **options)

    monkeypatch.setattr("triptych.rewriting.opened_models.rewrite_checkpoint", stopped)
    answer = triptych("rewrite", source, "-o", tmp_path / "out", "--exact")
    assert answer.code == 130
    assert sorted(tmp_path.iterdir()) == before


# Runs of ours, and Marian.

SENTENCES = b"Um halb vier kommt der Zug an.\neinundzwanzig\nDas kostet drei Euro.\nam 3. Mai 1999\n"


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose heads are written in three ways."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    tree = tiny_recipe(
        200,
        tokenizer={"vocab_size": 400},
        model={
            **{"d_model": 32, "d_ff": 64, "dropout": 0.0, "norm": "pre", "max_source_tokens": 40},
            "encoder": {"num_layers": 1, "attention": {"projections": "stacked"}},
            "decoder": {
                "num_layers": 1,
                "attention": {"projections": "four_matrix"},
                "cross_attention": {"projections": "key_value"},
            },
        },
        training={"max_steps": 15, "learning_rate": 0.01, "warmup_steps": 5},
        validation={"every_steps": 15},
        decoding={"beam_size": 2, "max_extra_tokens": 8},
    )
    runs.train(resolve(tree), folder, LineDisplay())
    return folder


def projections(run: Path) -> list[str]:
    """As config.json names them: encoder, decoder, cross-attention."""
    layers = {site.name: site.layer for site in attention_sites(read_own_model(run))}
    return [layers[name].parameterisation.name for name in ("encoder.0", "decoder.0", "cross.0")]


def test_of_runs_of_ours_norms_outside_the_attention_are_left_alone_and_that_is_said(
    triptych: Command, mixed_run: Path, tmp_path: Path
) -> None:
    said = "of runs of ours only the attention is rewritten"
    triptych("rewrite", mixed_run, "-o", tmp_path / "out", "--do", "fold_other_norms").refused(said, code=1)
    assert not (tmp_path / "out").exists()
    triptych("rewrite", mixed_run, "-o", tmp_path / "out", "--exact").done()
    (norm,) = read_certificate(tmp_path / "out").norms
    assert norm.steps[0].refused == said
    triptych("verify", tmp_path / "out").done()


def test_a_plan_says_which_norms_would_be_folded(triptych: Command, tmp_path: Path) -> None:
    changed = {f"h.{layer}.ln_2.weight": torch.rand(D) for layer in range(2)}
    changed |= {f"h.{layer}.mlp.c_fc.bias": torch.rand(4 * D) for layer in range(2)}
    options = ("--do", "fold_other_norms", "--skip-refused", "--plan", "--json")
    plan = triptych("rewrite", gpt2(tmp_path / "source", changed), *options).record()
    found = {norm["module"]: norm for norm in plan["norms"]}
    assert found["h.0.ln_2"]["maps"] == ["h.0.mlp.c_fc"]
    assert found["h.0.ln_2"]["steps"][0]["tier"] == "rounding-exact"
    assert "no tensor h.2.ln_2.weight" in found["h.2.ln_2"]["steps"][0]["refused"]
    shown = triptych("rewrite", tmp_path / "source", *options[:-1]).out
    assert "fold_other_norms" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_run_written_in_other_ways_translates_as_before(
    triptych: Command, mixed_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    triptych("rewrite", mixed_run, "-o", out, "--exact").done()
    assert projections(mixed_run) == ["stacked", "four_matrix", "key_value"]
    assert projections(out) == ["factored", "factored", "key_value"]
    before, after = (triptych("translate", run, stdin=SENTENCES) for run in (mixed_run, out))
    assert before.code == 0, before.err
    assert after.out == before.out
    assert before.out.strip()
    found = read_certificate(out)
    assert found.end_to_end is not None
    assert found.end_to_end.by == "triptych"
    assert found.end_to_end.worst_logit < 1e-4
    assert found.after.parameters < found.before.parameters
    triptych("verify", out, "--against", mixed_run).done()


def test_a_rewritten_run_keeps_all_but_what_training_goes_on_from(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    triptych("rewrite", small_run, "-o", out, "--rank", "4").done()
    assert {path.name for path in out.iterdir()} == {
        *(path.name for path in small_run.iterdir() if path.is_file()),
        CERTIFICATE,
    }
    assert "state/" in read_certificate(out).left_out
    assert read_certificate(out).tier == "bounded"
    sizes = [(run / "model.safetensors").stat().st_size for run in (small_run, out)]
    assert sizes[1] < sizes[0]
    assert (out / "README.md").read_text().count("## Rewritten attention") == 1
    triptych("train", "--resume", out).refused("was rewritten: resume the original run instead")


@pytest.mark.parametrize(
    ("name", "to", "reason"),
    [
        ("notes.txt", "../secret", "notes.txt is a link out of the folder, to "),
        ("notes.txt", "nowhere", "notes.txt is not a regular file (a broken link?)"),
        ("model.safetensors", "../secret", "model.safetensors is a link out of the folder, to "),
    ],
)
def test_a_run_with_a_link_that_leads_elsewhere_is_one_line(
    triptych: Command, small_run: Path, tmp_path: Path, name: str, to: str, reason: str
) -> None:
    source = tmp_path / "run"
    shutil.copytree(small_run, source)
    (tmp_path / "secret").write_text("key")
    if (source / name).exists():
        (source / name).replace(tmp_path / "secret")
    (source / name).symlink_to(to)
    triptych("rewrite", source, "-o", tmp_path / "out", "--do", "gauge_fix").refused(reason, code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "secret"]


def test_of_links_in_a_run_files_become_files_and_folders_are_left_behind(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(small_run, source)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("key")
    (source / "more").symlink_to("../elsewhere")
    (source / "notes.txt").symlink_to("config.json")
    triptych("rewrite", source, "-o", out, "--do", "gauge_fix").done()
    assert "more/" in read_certificate(out).left_out
    assert not (out / "more").exists()
    assert not (out / "notes.txt").is_symlink()
    assert (out / "notes.txt").read_text() == (source / "config.json").read_text()


def test_a_run_is_compared_and_calibrated_on_pairs(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("halb vier\thalf past three\neinundzwanzig\ttwenty-one\n" * 5)
    out = tmp_path / "out"
    triptych("rewrite", small_run, "-o", out, "--rank", "8", "--calibrate", pairs, "--text", pairs).done()
    found = read_certificate(out).end_to_end
    assert found is not None
    assert found.loss_before_nats is not None
    triptych("verify", out, "--against", small_run, "--text", pairs).done()
    pairs.write_text("no tab in here\n")
    answer = triptych("rewrite", small_run, "-o", tmp_path / "other", "--exact", "--text", pairs)
    answer.refused("line 1: expected a source, a tab and a target")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_marian_translator_stays_one(triptych: Command, tmp_path: Path) -> None:
    source, out, pairs = tmp_path / "source", tmp_path / "out", tmp_path / "pairs.tsv"
    source.mkdir()
    torch.manual_seed(7)
    write_marian(source, dtype=torch.float32)
    pairs.write_text("a b c\tc b a\nb\ta\n" * 3)
    triptych("rewrite", source, "-o", out, "--exact", "--text", pairs).done()
    found = read_certificate(out)
    assert found.family == "Marian"
    assert found.end_to_end is not None
    assert found.end_to_end.worst_logit < 1e-4
    assert found.end_to_end.loss_before_nats is not None
    assert (out / "source.spm").is_file()
    # Post-norm: the gain stays where it is, and that is said.
    assert all(layer.steps[1].refused for layer in found.layers)
    triptych("verify", out, "--against", source, "--text", pairs).done()
    for run in (source, out):
        triptych("translate", run, stdin=b"a b c\n").done()


def test_a_marian_translator_that_stays_as_large_is_offered_the_format_that_shrinks(
    triptych: Command, tmp_path: Path
) -> None:
    source, rank = tmp_path / "marian", ("--rank", "2")
    source.mkdir()
    write_marian(source, dtype=torch.float32)
    planned = ("rewrite", source, "--out", tmp_path / "no", "--plan", "--json")
    plan = triptych(*planned, *rank).record()
    assert plan["bytes_after"] == plan["bytes_before"]
    (offer,) = [note for note in plan["notes"] if "--from hf" in note]
    assert "rewrite RUN" in offer
    triptych("convert", source, "--from", "hf", "--out", tmp_path / "run")
    triptych("rewrite", tmp_path / "run", "--out", tmp_path / "small", *rank)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("run", "small")]
    assert sizes[1] < sizes[0]
    assert not triptych(*planned, "--do", "gauge_fix").record()["notes"]


# The page about it.

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "rewriting.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCS.read_text(), flags=re.DOTALL | re.MULTILINE)


def table_of_rewrites() -> str:
    rows = [
        f"| `{kind.name}` | {purpose(kind)[:-1]} | {kind.tier} | {kind.where_refused()} |"
        for kind in REWRITES
    ]
    return "\n".join(("| name | what | tier | refused where |", "|---|---|---|---|", *rows))


def table_of_options() -> str:
    rows = ["| rewrite | option | what |", "|---|---|---|"]
    for kind in REWRITES:
        own = [name for name in option_names(kind) if name not in Rewrite.model_fields]
        for place, name in enumerate(own):
            said = kind.model_fields[name].description
            rows.append(f"| {'' if place else f'`{kind.name}`'} | `{name}` | {said} |")
    return "\n".join(rows)


def test_the_tables_of_the_page_are_those_of_the_records() -> None:
    page = DOCS.read_text()
    assert f"\n{table_of_rewrites()}\n\n" in page
    assert f"\n{table_of_options()}\n\n" in page


def test_the_list_names_every_rewrite_with_its_options(triptych: Command) -> None:
    answer = triptych("rewrite", "--list").done()
    for kind in REWRITES:
        assert signature(kind) in answer.out
        assert purpose(kind) in answer.out
        for name in option_names(kind):
            assert name in answer.out


def test_a_call_on_the_command_line_and_in_a_recipe_mean_the_same(triptych: Command, tmp_path: Path) -> None:
    calls = ["fold_norm", "prune_heads(number=1, layers=[0, 2])", "truncate(rank=4, forms=['ov'])"]
    written = (f"do = {json.dumps(calls)}", _TABLES)
    certificates = []
    source = gpt2(tmp_path / "source")
    for number, options in enumerate(([part for call in calls for part in ("--do", call)], *written)):
        out = tmp_path / f"out{number}"
        if isinstance(options, str):
            (tmp_path / "rewrite.toml").write_text(options)
            options = ["--recipe", str(tmp_path / "rewrite.toml")]
        triptych("rewrite", source, "-o", out, *options, "--no-compare").done()
        certificates.append(read_certificate(out))
    assert certificates[0].recipe == certificates[1].recipe == certificates[2].recipe
    assert certificates[0].tensors == certificates[1].tensors == certificates[2].tensors
    given = {"rewrite": "prune_heads", "layers": [0, 2], "number": 1}
    assert certificates[0].recipe[1] == given | {"on_text": False, "by_loss": False}


_TABLES = """
[[step]]
rewrite = "fold_norm"
[[step]]
rewrite = "prune_heads"
number = 1
layers = [0, 2]
[[step]]
rewrite = "truncate"
rank = 4
forms = ["ov"]
"""


def test_the_commands_and_the_recipe_of_the_page_run(triptych: Command, checkpoint: Path, cwd: Path) -> None:
    shutil.copytree(checkpoint, "gpt2")
    for name in ("train.txt", "test.txt"):
        Path(name).write_text(TEXT)
    recipe, calls = blocks("toml")
    Path("rewrite.toml").write_text(recipe)
    Path("calls.toml").write_text(calls)
    triptych("rewrite", "gpt2", "--plan", "--recipe", "calls.toml").done()
    lines = [line for block in blocks("sh") for line in block.splitlines() if line]
    assert len(lines) > 5
    for line in lines:
        triptych(*shlex.split(line, comments=True)[1:]).done()
