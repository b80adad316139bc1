"""Changed models: ablate, patch, edit and steer their heads, replace and tie their maps.

Every function takes a source as opened and returns it with one more change. Only parts of the
change itself are run or read.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych.core.attention import LearnedPositions, SinusoidalPositions
from triptych.core.checkpoints.stored_layers import in_ranges
from triptych.core.places import Heads, head_of, in_words
from triptych.errors import UsageError
from triptych.literals import Activation, By
from triptych.running.changes import (
    SIDE_OF,
    Edit,
    HeadTap,
    Part,
    Patch,
    PositionsOff,
    ValueChange,
    WeightChange,
    ablation,
    resampled,
    tied_map,
    with_map,
    without_positions,
)
from triptych.running.changes import Steering as Steering
from triptych.running.changes import changed_copy as changed_copy
from triptych.running.changes import is_patched as is_patched
from triptych.running.opened_source import Opened
from triptych.running.run import Run, run_texts
from triptych.running.text.given import GivenText, as_texts

# Maps missing in KV-sharing layers.
_OF_KEYS = ("W_K", "W_V")


def ablate(
    opened: Opened, heads: Heads, by: By, text: GivenText | Sequence[GivenText] | None
) -> Opened:
    """Replace the outputs of heads by zeros, by means over a text, or by outputs on another text."""
    if by == "zero" and text is not None:
        raise UsageError('a text goes with by="mean" or by="resample"')
    if by != "zero" and text is None:
        raise UsageError(
            f'by="{by}" needs a text: ablate({in_words(heads)!r}, by="{by}", text=…)'
        )
    chosen = opened.find_heads(heads)
    words = f"ablate({in_words(heads)}{'' if by == 'zero' else f', by={by}'})"
    if text is None:
        return opened.changed(ablation(words, chosen))
    runs = run_texts(opened, as_texts(text).texts)
    # The texts run once for all heads; tokens of all texts follow one another.
    values = dict[int, dict[int, Tensor]]()
    for number, own in chosen.items():
        name = opened.places.names[number]
        values[number] = {
            head: torch.cat([run[f"{name}.{head}"].z.detach() for run in runs])
            for head in own
        }
    if by == "mean":
        return opened.changed(ablation(words, values))
    edits: dict[int, dict[Part, Edit]] = {
        number: {head: resampled(z) for head, z in own.items()}
        for number, own in values.items()
    }
    return opened.changed(ValueChange(words, "z", edits))


def patch(
    opened: Opened,
    heads: Heads,
    run: Any,
    what: Activation = "z",
    positions: Sequence[int] | None = None,
) -> Opened:
    """Replace activations of heads with the run's activations at the same positions."""
    if not isinstance(run, Run):
        raise UsageError(
            f"patch takes one run, of run(text): a {type(run).__name__} is none"
        )
    names = opened.places.names
    edits = dict[int, dict[Part, Edit]]()
    is_pair = len(opened.places.stacks) > 1
    for number, own in opened.find_heads(heads).items():
        stack = names[number].partition(".")[0]
        # The decoder of a pair reads a growing target; its encoder, and a model of one stack, the whole text.
        take = partial(
            Patch,
            what,
            positions=positions,
            queries_grow=is_pair and stack != "encoder",
            keys_grow=is_pair and stack == "decoder",
        )
        edits[number] = {
            head: take(values=getattr(run[f"{names[number]}.{head}"], what).detach())
            for head in own
        }
    return opened.changed(ValueChange(f"patch({in_words(heads)}, {what})", what, edits))


def patching_tap(
    opened: Opened, number: int, head: str, run: Run, what: Activation
) -> HeadTap:
    """Return the tap of layer `number` after `patch(opened, head, run, what)`, with all earlier edits."""
    tap = opened.sites_of(opened.reader.model)[number].layer.tap
    before = tap.edits if isinstance(tap, HeadTap) else ()
    change = patch(opened, head, run, what).changes[-1]
    assert isinstance(change, ValueChange)
    return HeadTap((*before, (what, change.heads[number])))


def edit(
    opened: Opened,
    heads: Heads,
    what: Activation,
    with_: Callable[[Tensor], Tensor],
    *,
    together: bool,
) -> Opened:
    """Replace an activation of heads by a function of it."""
    if not callable(with_):
        raise UsageError(
            f"edit takes a function of the value: a {type(with_).__name__} is none"
        )
    edits: dict[int, dict[Part, Edit]] = {
        number: dict.fromkeys(
            [tuple(own)] if together else own, lambda value, first: with_(value)
        )
        for number, own in opened.find_heads(heads).items()
    }
    return opened.changed(ValueChange(f"edit({in_words(heads)}, {what})", what, edits))


def steer(opened: Opened, place: str, vector: Any, scale: float) -> Opened:
    """Add a direction to the residual stream."""
    stack, block = opened.places.residual(place)
    width = opened.layers[0].d_model
    vector = torch.as_tensor(vector)
    if vector.shape != (width,):
        raise UsageError(
            f"the vector has shape {list(vector.shape)}, and the stream is [{width}]"
        )
    model = opened.to_run.model
    if any(half.streams is not None for half in model.stacks.values()):
        raise UsageError(
            f"{opened.name} has several residual streams, and steer changes one"
        )
    direction = scale * vector.detach().to(next(model.parameters()).device)
    return opened.changed(
        Steering(f"steer({place}, {scale:g})", stack, block, direction)
    )


def replace_maps(opened: Opened, place: str | int, maps: Mapping[str, Any]) -> Opened:
    """Replace maps of a layer or of a head, also in other layers with the same weights."""
    number, head = opened.places.find(place)
    if head is not None:
        head = head_of(
            head,
            opened.layers[number].num_heads,
            f"layer {opened.places.names[number]}",
        )
    _require_maps(maps)
    _require_own_maps(opened, number, maps)
    numbers, where = _sharing(opened, [number])
    changes = []
    for name, given in maps.items():
        new = partial(with_map, name=name, given=torch.as_tensor(given), head=head)
        changes.append(
            WeightChange(
                f"replace({place}, {name}){where}", dict.fromkeys(numbers, new)
            )
        )
    changed = opened.changed(*changes)
    changed.layers[number].weights  # noqa: B018 (raises now if a shape does not fit)
    return changed


def tie(opened: Opened, place: str | int, name: str, to: str) -> Opened:
    """Replace one map of a layer, or of all layers, by another map."""
    _require_maps([name, to])
    named = (
        [*range(len(opened.layers))]
        if str(place) == "*"
        else [opened.places.layer(place)]
    )
    if (
        str(place) == "*" and name in _OF_KEYS
    ):  # a borrowed map is tied in the lending layer
        named = [number for number in named if opened.layers[number].borrows is None]
    for number in named:
        _require_own_maps(opened, number, [name])
    numbers, where = _sharing(opened, named)
    tied = partial(tied_map, name=name, to=to)
    changed = opened.changed(
        WeightChange(f"tie({place}, {name}, {to}){where}", dict.fromkeys(numbers, tied))
    )
    for number in numbers:
        changed.layers[number].weights  # noqa: B018 (raises now if the maps do not fit)
    return changed


def turn_positions_off(opened: Opened) -> Opened:
    """Remove all positions besides the causal mask."""
    own = [
        number
        for number, layer in enumerate(opened.layers)
        if layer.outline.semantics.positions != "none"
    ]
    modules = opened.to_run.model.modules()
    added = any(
        isinstance(part, LearnedPositions | SinusoidalPositions) for part in modules
    )
    if not own and not added:
        raise UsageError(f"{opened.name} has no positions to leave out")
    return opened.changed(
        PositionsOff("without_positions()", dict.fromkeys(own, without_positions))
    )


def _require_maps(names: Iterable[str]) -> None:
    if unknown := [name for name in names if name not in SIDE_OF]:
        raise UsageError(f"{unknown[0]} is not one of {', '.join(SIDE_OF)}")


def _require_own_maps(opened: Opened, number: int, names: Iterable[str]) -> None:
    """Check that a layer has the named maps itself, and does not borrow them."""
    layer = opened.layers[number]
    borrowed = [name for name in names if name in _OF_KEYS]
    if borrowed and layer.borrows is not None:
        raise UsageError(
            f"layer {layer.name} has keys and values of layer {layer.borrows}: change {borrowed[0]} there"
        )


def _sharing(opened: Opened, numbers: Collection[int]) -> tuple[list[int], str]:
    """Add all layers sharing weights with the given layers; also describe the added layers."""
    source = opened.unchanged.attention
    sites = {source.layers[number].site for number in numbers}
    found = [
        number for number, layer in enumerate(source.layers) if layer.site in sites
    ]
    if len(found) == len(numbers):
        return found, ""
    shared = ", ".join(
        in_ranges(site.numbers) for site in source.sites if site in sites
    )
    return found, f" in layers {shared}, which share their weights"
