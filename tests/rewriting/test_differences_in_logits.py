"""A verdict "same" against the logits of `transformers` in float64, over all families."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import runs
from checkpoints.oracle import has_experts, in_float64
from checkpoints.test_families import inputs
from checkpoints.tiny_models import TINY, transformers
from edited import edited_tensors, set_fields, with_value
from rewriting.pairs_of_models import WEIGHTS, moved_entry
from small_checkpoints import save_changed
from triptych.errors import TriptychError
from triptych.model import load
from triptych.rewriting.differences.comparing_models import compare
from triptych.rewriting.differences.difference_records import Difference
from triptych.rewriting.functions import EXACT, SortHeads
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

SAME = ("same bytes", "same numbers", "same function")
# Models that run, with heads, and tiny models of all other families.
NAMES = (*runs.RUNS, *(name for name in TINY if name not in runs.RUNS))
# Units in the last place by which an entry of a rewritten model moves.
ULPS = (1, 4, 16, 64, 256)
# Logits of equal functions in float64 differ by less than this, relative to the largest.
EQUAL = 1e-11
Path_ = tuple[str | int, ...]


def made(name: str, folder: Path) -> Path:
    """A tiny model with random numbers everywhere, in float32."""
    if name in runs.RUNS:
        runs.made(name, folder)
    else:
        torch.manual_seed(0)
        model = getattr(transformers, TINY[name].model)(TINY[name].configured())
        save_changed(model, folder, 0.1)
    with edited_tensors(folder) as tensors:
        tensors |= {own: part.float() for own, part in tensors.items() if part.is_floating_point()}
    set_fields(folder / "config.json", dtype="float32")
    return folder


def difference(a: Path, b: Path) -> Difference:
    return compare(load(a)._opened, load(b)._opened)


def class_of(name: str) -> Any:
    return runs.RUNS[name].of_class if name in runs.RUNS else getattr(transformers, TINY[name].model)


def outputs(name: str, folder: Path) -> Tensor | None:
    """All outputs of `transformers` in float64; None if it cannot read a tensor or run the model."""
    of_class = class_of(name)
    config = of_class.config_class.from_pretrained(folder)
    how: dict[str, Any] = {"attn_implementation": "sdpa" if name.startswith("falcon") else "eager"}
    if has_experts(config):
        how["experts_implementation"] = "eager"
    with in_float64(), torch.no_grad():
        model, about = of_class.from_pretrained(
            folder, dtype=torch.float64, output_loading_info=True, ignore_mismatched_sizes=True, **how
        )
        if any(about[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return None
        model.eval()
        torch.manual_seed(1)
        if name in runs.RUNS and runs.RUNS[name].kind != "pairs":
            # Every token, the special ones too.
            ids = torch.cat([torch.randperm(40), torch.arange(8)]).view(4, 12)
            logits: Tensor = runs.outputs(model(input_ids=ids)).flatten()
            return logits
        if name in runs.RUNS:
            of_pairs: Tensor = runs.outputs(runs.theirs(model, *runs.read_by(name))).flatten()
            return of_pairs
        found = model(**inputs(model))
        kept = [part for part in found.to_tuple() if isinstance(part, Tensor) and part.is_floating_point()]
        return torch.cat([part.double().flatten() for part in kept])


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max() / one.abs().max())


def entries(tensors: dict[str, Tensor], seed: int) -> Iterator[tuple[str, int]]:
    """A random entry of every tensor that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        places = tensor.flatten().nonzero().flatten()
        if tensor.is_floating_point() and len(places):
            yield name, int(places[torch.randint(len(places), (1,), generator=generator)])


def with_tensors(folder: Path, out: Path, tensors: dict[str, Tensor]) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    return out


def false_sames_of_entries(name: str, place: Path, seed: int = 0) -> tuple[int, list[str]]:
    """The number of comparisons with an entry moved by one unit, and the wrong verdicts among them."""
    before = made(name, place / "a")
    tensors = load_file(before / WEIGHTS)
    expected = outputs(name, before)
    wrong = []
    count = 0
    for own, entry in entries(tensors, seed):
        for ulps in (1, 5):
            after = with_tensors(
                before, place / "b", {**tensors, own: moved_entry(tensors[own], entry, ulps)}
            )
            found = difference(before, after)
            count += 1
            if found.verdict not in SAME:
                continue
            logits = outputs(name, after)
            assert expected is not None
            assert logits is not None
            if not (size := apart(expected, logits)) < EQUAL:
                wrong.append(f"{own}[{entry}] by {ulps}: {found.verdict}, logits {size:.1e} apart")
    return count, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_entry_moved_by_one_unit_is_never_the_same(name: str, tmp_path: Path) -> None:
    count, wrong = false_sames_of_entries(name, tmp_path)
    assert count
    assert not wrong


def false_sames_after_rewrites(name: str, place: Path) -> tuple[int, list[str]]:
    """The number of comparisons with a rewritten model and an entry moved, and the wrong verdicts among them.

    Rounding of the rewritten tensors, by half a unit at random, moves logits by some amount. A verdict is
    wrong if logits move by more than four times that amount.
    """
    before = made(name, place / "a")
    recipe = RewriteRecipe.model_validate({"step": (*EXACT, SortHeads()), "skip_refused": True})
    try:
        rewrite_checkpoint(str(before), place / "w", recipe)
    except TriptychError:
        return 0, []
    expected = outputs(name, before)
    rewritten = outputs(name, place / "w")
    if expected is None or rewritten is None:
        return 0, []
    old = load_file(before / WEIGHTS)
    tensors = load_file(place / "w" / WEIGHTS)
    generator = torch.Generator().manual_seed(2)
    rounded = {}
    for own, tensor in tensors.items():
        if own in old and torch.equal(old[own], tensor):
            rounded[own] = tensor
            continue
        # Half a unit, in the next wider dtype.
        unit = torch.nextafter(tensor.abs(), torch.tensor(torch.inf)).double() - tensor.abs().double()
        rounded[own] = tensor.double() + unit * (torch.rand(tensor.shape, generator=generator) - 0.5)
    again = outputs(name, with_tensors(place / "w", place / "r", rounded))
    assert again is not None
    allowed = 4 * max(apart(rewritten, again), apart(expected, rewritten)) + EQUAL
    wrong = []
    count = 0
    for number, (own, entry) in enumerate(entries(tensors, 3)):
        for ulps in (ULPS[number % 5], 1 << 12):
            missed = {**tensors, own: moved_entry(tensors[own], entry, ulps)}
            after = with_tensors(place / "w", place / "b", missed)
            found = difference(before, after)
            count += 1
            if found.verdict in SAME:
                logits = outputs(name, after)
                assert logits is not None
                if not (size := apart(expected, logits)) <= allowed:
                    wrong.append(
                        f"{own}[{entry}] by {ulps}: {found.verdict}, logits {size:.1e} apart, "
                        f"rounding {allowed:.1e}"
                    )
    return count, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_entry_of_a_rewritten_model_moves_no_logits_beyond_rounding(name: str, tmp_path: Path) -> None:
    _, wrong = false_sames_after_rewrites(name, tmp_path)
    assert not wrong


_ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu", "tanh", "quick_gelu", "gelu_pytorch_tanh", "sigmoid")
# Settings without an effect on what is computed from tokens.
_OF_FILES = {"architectures", "transformers_version", "dtype", "_name_or_path", "model_type"}


def fields(record: dict[str, Any], at: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every field of a configuration with its value, those of records within and entries of lists too."""
    for name, value in record.items():
        if name in _OF_FILES:
            continue
        yield (*at, name), value
        if isinstance(value, dict):
            yield from fields(value, (*at, name))
        elif isinstance(value, list):
            yield from (((*at, name, number), own) for number, own in enumerate(value[:2]))


def other_values(value: Any) -> tuple[Any, ...]:
    match value:
        case bool():
            return (not value,)
        case int():
            return value + 1, value - 1
        case float():
            return 1.5 * value if value else 0.25, 1.0001 * value
        case str():
            names = [*_ACTIVATIONS, "sliding_attention", "full_attention", "absolute", "relative_key"]
            return tuple(name for name in names if name != value)[:3] if value in names else ()
        case None:
            return 3, 0.5, True
        case _:
            return ()


def false_sames_of_settings(name: str, place: Path) -> tuple[int, list[str]]:
    """The number of comparisons with a setting changed, and the wrong verdicts among them."""
    before = made(name, place / "a")
    record = json.loads((before / "config.json").read_text())
    expected = outputs(name, before)
    after = place / "b"
    shutil.copytree(before, after)
    wrong = []
    count = 0
    for field, value in fields(record):
        if name == "youtu" and field == ("pad_token_id",):  # `transformers` makes zeros of its row
            continue
        for other in other_values(value):
            (after / "config.json").write_text(json.dumps(with_value(record, field, other)))
            try:
                found = difference(before, after)
            except TriptychError:
                continue
            count += 1
            if found.verdict not in SAME:
                continue
            try:
                logits = outputs(name, after)
            except Exception:  # noqa: BLE001 (no model of `transformers` with this value)
                continue
            if logits is not None and expected is not None and not (size := apart(expected, logits)) < EQUAL:
                wrong.append(f"{field}: {value} and {other}: {found.verdict}, logits {size:.1e} apart")
    return count, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_setting_that_moves_logits_is_never_the_same(name: str, tmp_path: Path) -> None:
    count, wrong = false_sames_of_settings(name, tmp_path)
    assert count
    assert not wrong
