"""Certificates that were changed and sealed anew, so that certificate, card and files agree."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from edited import edited_json, edited_tensors
from rewriting.certificates import failing, failures, seal, with_bounds
from rewriting.test_rounding import tiny
from small_checkpoints import gpt2_that_runs
from triptych import EncoderDecoder, ModelConfig
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.models import write_model
from triptych.core.storage.shards import tensor_hash
from triptych.errors import UsageError
from triptych.files import file_hash
from triptych.rewriting.certificate import Certificate, StepRecord, read_certificate
from triptych.rewriting.checking import same_words
from triptych.rewriting.functions import (
    DropKeyBias,
    FoldNorm,
    GaugeFix,
    PruneHeads,
    Rewrite,
    SortHeads,
    Truncate,
)
from triptych.rewriting.measuring import measure_change
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.verification import Claim, verify
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")

NOTHING_ELSE = "nothing else has changed"
TIER = "what was done is of its tier, and within its bounds"
RECIPE = "the recipe, done again"
FUNCTION = "layers compute what the recipe makes"
STEPS = (FoldNorm(), PruneHeads(number=1), Truncate(rank=4), GaugeFix(), SortHeads())


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, a GPT-2, and `out`: a head less, a lower rank and another basis."""
    folder = tmp_path_factory.mktemp("honest")
    tiny("gpt2", folder / "source")
    (folder / "source" / "notes.h5").write_bytes(b"weights in another format")
    rewrite_checkpoint(str(folder / "source"), folder / "out", RewriteRecipe(step=STEPS), compare=False)
    return folder


def made_consistent(folder: Path, source: Path) -> None:
    """All hashes and measurements of a certificate made those of the files as they are now."""
    certificate = read_certificate(folder)
    one, other = open_checkpoint(source), open_checkpoint(folder)
    before = {site.module: site for site in one.sites}
    after = {site.module: site for site in other.sites}
    written = load_file(folder / "model.safetensors")
    layers = []
    for layer in certificate.layers:
        if layer.measured is not None:
            old, new = one.read(before[layer.module]), other.read(after[layer.module])
            measured = measure_change(old, new, bounded=layer.tier == "bounded")
            layer = layer.model_copy(update={"measured": measured})
        layers.append(layer)
    tensors = {
        name: record.model_copy(update={"written": tensor_hash(written[name])})
        for name, record in certificate.tensors.items()
    }
    files = {name: file_hash(folder / name) for name in certificate.files}
    seal(folder, with_entries(certificate, layers=tuple(layers), tensors=tensors, files=files))


def with_entries(certificate: Certificate, **update: Any) -> Certificate:
    return certificate.model_copy(update=update)


def with_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """A tensor of a folder changed."""
    with edited_tensors(folder) as tensors:
        tensors[name] = change(tensors[name])


def named(folder: Path, source: Path, claim: str) -> str:
    """What is found where a claim of a folder fails; it is the only one of its name."""
    (found,) = (check.found for check in failures(folder, source) if check.claim == claim)
    return found


def stated(checks: list[Claim]) -> dict[str, str]:
    return {check.claim: check.found for check in checks if check.held is None}


def test_what_was_written_holds_and_what_is_only_stated_is_listed(honest: Path) -> None:
    checks = verify(honest / "out", honest / "source")
    assert not [check for check in checks if check.held is False], checks
    assert set(stated(checks)) == {"tool", "source, as it was named", "not_compared"}
    assert all(found.startswith("stated, not checked: ") for found in stated(checks).values())
    alone = shutil.copytree(honest / "out", honest / "alone")
    seal(alone, with_entries(read_certificate(alone), source="nowhere"))
    assert "give the original with --against" in stated(verify(alone))["all that the original tells"]


def in_layers(**update: Any) -> Callable[[Certificate], dict[str, Any]]:
    """The first layer with other entries."""

    def forge(certificate: Certificate) -> dict[str, Any]:
        first, *others = certificate.layers
        return {"layers": (first.model_copy(update=update), *others)}

    return forge


def in_step(place: int, **update: Any) -> Callable[[Certificate], dict[str, Any]]:
    """A step of the first layer with other entries."""

    def forge(certificate: Certificate) -> dict[str, Any]:
        steps = list(certificate.layers[0].steps)
        steps[place] = steps[place].model_copy(update=update)
        return in_layers(steps=tuple(steps))(certificate)

    return forge


def in_measured(name: str, times: float) -> Callable[[Certificate], dict[str, Any]]:
    """What was measured of the first layer, so many times as large."""

    def forge(certificate: Certificate) -> dict[str, Any]:
        measured = certificate.layers[0].measured
        assert measured is not None
        value = getattr(measured, name)
        return in_layers(measured=measured.model_copy(update={name: value * times}))(certificate)

    return forge


def cheaper(name: str) -> Callable[[Certificate], dict[str, Any]]:
    """Costs with a parameter less."""

    def forge(certificate: Certificate) -> dict[str, Any]:
        cost = getattr(certificate, name)
        return {name: cost.model_copy(update={"parameters": cost.parameters - 1})}

    return forge


def cheaper_step(name: str) -> Callable[[Certificate], dict[str, Any]]:
    """Costs of a step with an operation less."""

    def forge(certificate: Certificate) -> dict[str, Any]:
        cost = getattr(certificate.layers[0].steps[2], name)
        return in_step(2, **{name: cost.model_copy(update={"flops_per_token": 1})})(certificate)

    return forge


def other_recipe(place: int, **update: Any) -> Callable[[Certificate], dict[str, Any]]:
    """Another recipe."""

    def forge(certificate: Certificate) -> dict[str, Any]:
        recipe = [dict(step) for step in certificate.recipe]
        recipe[place] |= update
        return {"recipe": tuple(recipe)}

    return forge


CLAIMS: dict[str, tuple[Callable[[Certificate], dict[str, Any]], str]] = {
    "family": (lambda _: {"family": "Llama"}, "family and dtype"),
    "dtype": (lambda _: {"dtype": "bfloat16"}, "family and dtype"),
    "settings": (lambda _: {"settings": {"n_inner": 7}}, NOTHING_ELSE),
    "a step of the recipe": (lambda c: {"recipe": c.recipe[:-1]}, RECIPE),
    "a rank of the recipe": (other_recipe(2, rank=5), RECIPE),
    "a step that there is not": (other_recipe(2, rewrite="melt"), RECIPE),
    "calibration": (lambda _: {"calibration": "0" * 64}, RECIPE),
    "a layer": (lambda c: {"layers": c.layers[:1]}, NOTHING_ELSE),
    "a layer twice": (lambda c: {"layers": (*c.layers, c.layers[0])}, NOTHING_ELSE),
    "layer.measured": (in_layers(measured=None), NOTHING_ELSE),
    "step.tier": (in_step(2, tier="rounding-exact"), RECIPE),
    "step.checked": (in_step(0, checked=("nothing was looked at",)), RECIPE),
    "step.before": (cheaper_step("before"), RECIPE),
    "step.after": (cheaper_step("after"), RECIPE),
    "step.choice": (in_step(1, choice="1 of 4 heads left out: 9"), RECIPE),
    "step.notes": (in_step(2, notes=("nothing is lost",)), RECIPE),
    "step.bound of pruned heads": (in_step(1, bound=0.0), RECIPE),
    "step.bound of a lower rank": (in_step(2, bound=1e-3), RECIPE),
    "step.error": (in_step(2, error=1e-6), RECIPE),
    "step.refused": (in_step(3, refused="it was not wanted", tier=None), RECIPE),
    "worst_absolute": (in_measured("worst_absolute", 0.99), "errors measured on the probes"),
    "relative": (in_measured("relative", 0.99), "errors measured on the probes"),
    "error_ratio": (in_measured("error_ratio", 0.1), "errors measured on the probes"),
    "before": (cheaper("before"), "costs"),
    "after": (cheaper("after"), "costs"),
    "unpadded": (lambda _: {"unpadded": None}, "costs"),
    "left_out": (lambda _: {"left_out": ()}, NOTHING_ELSE),
    "all layers": (lambda _: {"layers": ()}, NOTHING_ELSE),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_that_was_forged_and_sealed_is_noticed(name: str, honest: Path, out: Path) -> None:
    forge, claim = CLAIMS[name]
    certificate = read_certificate(out)
    seal(out, with_entries(certificate, **forge(certificate)))
    assert claim in failing(out, honest / "source")


def test_every_entry_of_a_certificate_and_of_a_step_is_forged_here_or_elsewhere() -> None:
    elsewhere = {
        *("format", "tool", "source", "tensors", "files", "probes", "sha256"),  # test_checkpoint.py
        *("norms", "end_to_end", "not_compared", "not_on_text"),  # test_norms.py, test_verify.py
        *("recipe", "layers", "rewrite"),
    }
    forged = {name.removeprefix("step.").partition(" ")[0] for name in CLAIMS}
    assert Certificate.model_fields.keys() | StepRecord.model_fields.keys() <= forged | elsewhere


@pytest.fixture
def out(honest: Path, tmp_path: Path) -> Path:
    """A copy of what was made, to be forged."""
    return shutil.copytree(honest / "out", tmp_path / "out")


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, a GPT-2, and `out`, whose heads have other numbers."""
    folder = tmp_path_factory.mktemp("renumbered")
    tiny("gpt2", folder / "source")
    recipe = RewriteRecipe(step=(SortHeads(),))
    rewrite_checkpoint(str(folder / "source"), folder / "out", recipe, compare=False)
    return folder


@pytest.mark.parametrize(
    "change",
    [lambda heads: (heads[1], heads[0], *heads[2:]), lambda heads: (*heads[:-1], 7), lambda heads: None],
    ids=["two of them exchanged", "one that there is not", "left out"],
)
def test_numbers_that_heads_did_not_have_are_noticed(
    change: Callable[[tuple[int, ...]], tuple[int, ...] | None], renumbered: Path, tmp_path: Path
) -> None:
    certificate = read_certificate(renumbered / "out")
    heads = certificate.layers[0].heads
    assert heads is not None
    assert failing(renumbered / "out", renumbered / "source") == []
    out = shutil.copytree(renumbered / "out", tmp_path / "out")
    seal(out, with_entries(certificate, **in_layers(heads=change(heads))(certificate)))
    assert failing(out, renumbered / "source") == [RECIPE]


def test_a_bound_that_is_a_thousandth_smaller_is_noticed(honest: Path, out: Path) -> None:
    certificate = read_certificate(out)
    first, *others = certificate.layers
    seal(out, with_entries(certificate, layers=(with_bounds(first, 0.999), *others)))
    assert RECIPE in failing(out, honest / "source")


@pytest.mark.parametrize("name", ["tool", "source", "not_compared"])
def test_what_nothing_tells_is_said_not_to_be_checked(name: str, honest: Path, out: Path) -> None:
    seal(out, with_entries(read_certificate(out), **{name: "something else"}))
    checks = verify(out, honest / "source")
    assert not [check for check in checks if check.held is False]
    assert any("something else" in found for found in stated(checks).values())
    if name == "tool":
        assert "checked, choice, notes of steps" in stated(checks)


def test_a_file_that_was_taken_out_is_noticed(honest: Path, out: Path) -> None:
    certificate = read_certificate(out)
    (out / "generation_config.json").unlink()
    files = {name: digits for name, digits in certificate.files.items() if name != "generation_config.json"}
    seal(out, with_entries(certificate, files=files))
    assert failing(out, honest / "source") == [NOTHING_ELSE]


def test_a_file_that_was_put_beside_is_noticed(out: Path) -> None:
    shutil.copyfile(out / "model.safetensors", out / "adapter_model.safetensors")
    assert failing(out) == ["other files as written"]


@pytest.mark.parametrize("made", ["folder elsewhere", "nothing", "pipe"])
def test_links_and_pipes_that_were_put_beside_are_noticed(made: str, out: Path, tmp_path: Path) -> None:
    place = out / "additional_chat_templates"
    if made == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path if made == "folder elsewhere" else tmp_path / "nothing")
    (check,) = failures(out)
    assert check.claim == "other files as written"
    assert "additional_chat_templates is not in the certificate" in check.found


def test_a_rewritten_checkpoint_in_the_hubs_cache_holds(honest: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--me--it" / "snapshots" / "abc", tmp_path / "models--me--it" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((honest / "out").iterdir())):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    assert failing(snapshot, honest / "source") == []


def test_a_tensor_that_was_put_into_the_file_is_named(out: Path) -> None:
    with edited_tensors(out) as tensors:
        tensors["h.0.adapter"] = torch.ones(2)
    (check,) = failures(out)
    assert (check.claim, check.found) == ("tensors as written", "h.0.adapter is not in the certificate")


def test_other_weights_of_a_bounded_layer_are_noticed_though_all_is_measured_anew(
    honest: Path, out: Path
) -> None:
    with_tensor(out, "transformer.h.1.attn.c_proj.weight", lambda weight: 1.01 * weight)
    made_consistent(out, honest / "source")
    (check,) = failures(out, honest / "source")
    assert check.claim == FUNCTION
    assert "transformer.h.1.attn" in check.found


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "encoder.layer.0.attention.output.LayerNorm.weight"),
        ("t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    ],
)
def test_what_the_probes_do_not_see_of_a_layer_is_not_to_change(
    family: str, name: str, tmp_path: Path
) -> None:
    source, out = tiny(family, tmp_path / "source"), tmp_path / "out"
    recipe = RewriteRecipe(step=(GaugeFix(),), skip_refused=True)
    rewrite_checkpoint(str(source), out, recipe, compare=False)
    assert failing(out, source) == []

    def last_row(numbers: Tensor) -> Tensor:
        changed = numbers.clone()
        changed[-1] += 3.0  # of distances the farthest, which 16 positions do not have
        return changed

    with_tensor(out, name, last_row)
    made_consistent(out, source)
    assert name in named(out, source, NOTHING_ELSE)


@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 1.03), (torch.float16, 1.005)])
def test_a_change_of_a_few_percent_that_calls_itself_rounding_is_noticed(
    dtype: torch.dtype, times: float, tmp_path: Path
) -> None:
    source, out = tiny("gpt2", tmp_path / "source", dtype), tmp_path / "out"
    rewrite_checkpoint(str(source), out, RewriteRecipe(step=(GaugeFix(),)), compare=False)
    assert failing(out, source) == []
    with_tensor(out, "transformer.h.1.attn.c_proj.weight", lambda weight: times * weight)
    made_consistent(out, source)
    measured = read_certificate(out).layers[1].measured
    assert measured is not None
    assert 0 < measured.relative < 0.04
    assert failing(out, source) == [TIER]


# Runs of ours.


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, a model of ours, and `out`, its norms folded and its key biases gone."""
    folder = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    stacks = {"encoder": {"num_layers": 1}, "decoder": {"num_layers": 1}}
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 24, "norm": "pre", "tie_embeddings": "none"}
    config = ModelConfig.model_validate({**sizes, **stacks})
    model = EncoderDecoder.of(config, 20, 20, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    (folder / "source").mkdir()
    write_model(model, folder / "source")
    (folder / "source" / "vocabulary.txt").write_text("a b c")
    recipe = RewriteRecipe(step=(FoldNorm(), DropKeyBias(), Truncate(rank=5)), skip_refused=True)
    rewrite_checkpoint(str(folder / "source"), folder / "out", recipe, compare=False)
    return folder


def test_a_run_of_ours_holds(own: Path) -> None:
    assert failing(own / "out", own / "source") == []


def test_other_weights_of_a_run_are_noticed(own: Path, tmp_path: Path) -> None:
    tensors = load_file(own / "out" / "model.safetensors")
    names = [name for name in tensors if "attention" not in name]
    feed_forward = next(name for name in names if tensors[name].ndim > 1)
    norm = next(name for name in names if "norm" in name)
    for name in (feed_forward, norm, "tgt_embedding.weight"):
        out = shutil.copytree(own / "out", tmp_path / name)
        with_tensor(out, name, lambda numbers: numbers + 0.5)
        made_consistent(out, own / "source")
        assert name in named(out, own / "source", NOTHING_ELSE)


@pytest.mark.parametrize("name", ["config.json", "vocabulary.txt"])
def test_other_files_of_a_run_are_noticed(name: str, own: Path, tmp_path: Path) -> None:
    out = shutil.copytree(own / "out", tmp_path / "out")
    if name == "config.json":
        with edited_json(out / name) as record:
            record["model"]["dropout"] = 0.25
    else:
        (out / name).write_text("c b a")
    made_consistent(out, own / "source")
    assert name in named(out, own / "source", NOTHING_ELSE)


# Steps that look at a text.


def rewritten_on_text(folder: Path, *steps: Rewrite) -> tuple[Path, Path, Path]:
    """The folder of a GPT-2, what was made of it, and the text that the steps looked at."""
    source, text = gpt2_that_runs(folder / "source"), folder / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 5)
    recipe = RewriteRecipe(step=steps, calibration=text)  # type: ignore[arg-type]
    rewrite_checkpoint(str(source), folder / "out", recipe, compare=False)
    return source, folder / "out", text


def test_steps_that_look_at_a_text_are_done_again_with_it(tmp_path: Path) -> None:
    source, out, text = rewritten_on_text(tmp_path, Truncate(rank=5, criterion="uncentred"))
    assert failing(out, source) == failing(out, source, calibration=text) == []
    assert stated(verify(out, source))[RECIPE].endswith("give it with --calibrate")
    assert RECIPE not in stated(verify(out, source, calibration=text))

    certificate = read_certificate(out)
    first = certificate.layers[0]
    assert first.steps[0].error is not None
    seal(out, with_entries(certificate, **in_step(0, error=first.steps[0].error / 2)(certificate)))
    assert RECIPE in failing(out, source, calibration=text)
    assert failing(out, source) == []  # it is said not to be checked
    seal(out, with_entries(certificate, **in_step(0, rewrite="sort_heads")(certificate)))
    assert failing(out, source)  # also without the text
    seal(out, certificate)
    (tmp_path / "other.txt").write_text("another text\n")
    with pytest.raises(UsageError, match="is not the calibration text"):
        verify(out, source, calibration=tmp_path / "other.txt")


def test_a_form_that_moves_beyond_its_bound_is_noticed_without_the_text(tmp_path: Path) -> None:
    # A step that finds no head to leave out, and leaves all in their places.
    source, out, _ = rewritten_on_text(tmp_path, PruneHeads(), Truncate(rank=5, criterion="uncentred"))
    assert failing(out, source) == []
    with_tensor(out, "transformer.h.1.attn.c_proj.weight", lambda weight: 3 * weight)
    made_consistent(out, source)
    assert failing(out, source) == [TIER]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("rank 3 of 8", "rank 3 of 8", True),
        ("rank 3 of 8", "rank 4 of 8", False),
        ("rank 3 of 8", "ranks 3 of 8", False),
        ("at most 0.50", "at most 0.51", True),
        ("at most 0.50", "at most 0.52", False),
        ("at most 1.5e-07", "at most 1.6e-07", True),
        ("at most 1.5e-07", "at most 1.7e-07", False),
        ("at most 2e-07", "at most 3e-07", True),
    ],
)
def test_notes_are_the_same_but_for_the_last_digit_of_a_number(one: str, other: str, same: bool) -> None:
    assert same_words(one, other) is same
