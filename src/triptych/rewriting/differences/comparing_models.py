"""The comparison of two models, from the cheapest test to the search for rewrites."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from triptych.core.models import LanguageModelArchitecture
from triptych.progress import Progress, untold
from triptych.rewriting.differences.chains import chain_of, words_of
from triptych.rewriting.differences.checkpoints_read import (
    OF_NO_EFFECT,
    compare_beside,
    compare_read,
)
from triptych.rewriting.differences.difference_records import (
    Difference,
    PartDifference,
    PartKind,
    SettingDifference,
    Verdict,
    weakest,
)
from triptych.rewriting.differences.field_differences import (
    different_fields,
    in_short,
    plain_architecture,
)
from triptych.rewriting.differences.kinds import find_changes
from triptych.rewriting.differences.parts import BlockPair, Part, StackComparison
from triptych.rewriting.differences.predictions import measure_on_text
from triptych.rewriting.differences.rounded import equal_numbers
from triptych.rewriting.differences.sides import (
    AnyArchitecture,
    Pair,
    Side,
    StackName,
    open_side,
)
from triptych.rewriting.differences.text_differences import compare_text_settings
from triptych.running.opened_source import Opened

# Parts are unrelated if their relative difference is larger than this.
_UNRELATED = 0.9
_MOST_NAMED = 4


def compare(
    a: Opened,
    b: Opened,
    *,
    text: Path | None = None,
    also: Opened | None = None,
    progress: Progress = untold,
) -> Difference:
    """Compare two models: prove that their functions are equal, or find the parts where they differ.

    Only the algebra of their weights proves equal functions.

    `text`: a text to measure the difference of the predictions on, if the functions differ. `also`: a third
    model, C, for mixtures of A and C.
    """
    pair = Pair(open_side(a), open_side(b))
    found = _compare_sides(pair, progress)
    texts = compare_text_settings(a.source, b.source)
    found = replace(found, texts=texts.found, notes=(*found.notes, *texts.notes))
    if found.verdict in ("near", "different"):
        third = None if also is None else open_side(also)
        changes = find_changes(pair, found, also=third, progress=progress)
        found = replace(found, changes=changes)
        if third is not None and not any(
            "A and C" in change.kind for change in changes
        ):
            found = replace(
                found, notes=(*found.notes, f"B is no mixture of A and {third.name}")
            )
        if text is not None:
            found = replace(
                found, text=measure_on_text(a, b, text, found.parts, progress)
            )
    return found


def _compare_sides(pair: Pair, progress: Progress) -> Difference:
    one, other = pair
    has_same_bytes = _have_same_bytes(pair, progress)
    if (
        has_same_bytes
        and _are_alike(one.record, other.record)
        and one.architecture == other.architecture
    ):
        return Difference(one.name, other.name, "same bytes")
    if one.architecture is None or other.architecture is None:
        parts, settings, reasons = compare_read(pair, progress)
        found = _judged(pair, parts, settings, reasons, [])
        if not parts:
            found = replace(found, verdict="different")
    else:
        found = _WholeComparison(pair, progress).difference()
    if has_same_bytes and found.verdict == "same numbers":
        return replace(found, verdict="same bytes")
    return found


def _have_same_bytes(pair: Pair, progress: Progress) -> bool:
    """Return True if the models have the same tensors, to the bit, under the same names."""
    infos = pair.a.stored_infos
    if infos != pair.b.stored_infos:
        return False
    for number, name in enumerate(infos):
        progress("comparing bytes", number, len(infos))
        if not _same_bits(pair.a.read_stored(name), pair.b.read_stored(name)):
            return False
    return True


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype.is_floating_point:
        return (
            torch.equal(
                one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
            )
            if (one.ndim)
            else torch.equal(one[None].view(torch.uint8), other[None].view(torch.uint8))
        )
    return torch.equal(one, other)


def _are_alike(one: Any, other: Any) -> bool:
    kept = [
        {name: value for name, value in record.items() if name not in OF_NO_EFFECT}
        for record in (one, other)
    ]
    return kept[0] == kept[1]


@final
class _WholeComparison:
    """The comparison of two runnable models."""

    def __init__(self, pair: Pair, progress: Progress) -> None:
        self.pair = pair
        self.progress = progress

    def difference(self) -> Difference:
        one, other = self.pair
        if one.stacks.keys() != other.stacks.keys():
            kinds = [" and ".join(side.stacks) for side in self.pair]
            return self._different([f"A has {kinds[0]}, and B has {kinds[1]}"])
        blocks = {stack: self._blocks(stack) for stack in one.stacks}
        settings = self._settings(blocks)
        depths = [
            f"{stack}: {len(one.stacks[stack].blocks)} and {len(other.stacks[stack].blocks)} blocks"
            for stack, found in blocks.items()
            if found is None
        ]
        stacks = chain.from_iterable(side.stacks.values() for side in self.pair)
        widths = [made.d_model for made in stacks]
        if len({*widths}) > 1:
            depths.append(f"widths are {widths[0]} and {widths[-1]}")
        if depths:
            return self._different(depths, settings)
        parts = list[Part]()
        for part in self._parts(
            {stack: found for stack, found in blocks.items() if found is not None}
        ):
            parts.append(part)
        beside = self._different_beside()
        if beside:
            more, read = compare_beside(self.pair)
            parts += more
            beside = [name for name in beside if name not in read]
        settings += chain.from_iterable(part.found.settings for part in parts)
        notes = [*self._beside_of_one(), *_of_padding(parts)]
        reasons = [
            f"{name}, which changes no token's prediction, differs" for name in beside
        ]
        reasons += self._not_compared
        return _judged(self.pair, parts, settings, reasons, notes)

    def _different(
        self, reasons: list[str], settings: list[SettingDifference] | None = None
    ) -> Difference:
        one, other = self.pair
        return Difference(
            one.name,
            other.name,
            "different",
            reasons=tuple(reasons),
            settings=in_short(settings or []),
        )

    # Pairs of blocks and their architectures.

    def _blocks(self, stack: StackName) -> list[BlockPair] | None:
        """Pair the blocks of a stack, except blocks with zero output; None if the depths differ."""
        made = [side.stacks[stack] for side in self.pair]
        counts = [len(own.blocks) for own in made]
        if counts[0] == counts[1]:
            return [BlockPair(number, number) for number in range(counts[0])]
        kept = [
            [
                number
                for number in range(count)
                if not _adds_nothing(side, stack, number)
            ]
            for side, count in zip(self.pair, counts, strict=True)
        ]
        if len(kept[0]) != len(kept[1]):
            return None
        return [BlockPair(*numbers) for numbers in zip(*kept, strict=True)]

    def _settings(
        self, blocks: dict[StackName, list[BlockPair] | None]
    ) -> list[SettingDifference]:
        one, other = self.pair
        made = [
            self._plain(side, blocks, number) for number, side in enumerate(self.pair)
        ]
        found = [*different_fields(made[0], made[1], "")]
        if len(one.stacks) > 1 and one.pad_id != other.pad_id:
            found.append(
                SettingDifference("pad_id", str(one.pad_id), str(other.pad_id))
            )
        return found

    def _plain(
        self, side: Side, blocks: dict[StackName, list[BlockPair] | None], number: int
    ) -> AnyArchitecture:
        """Return the plain architecture of a model, restricted to blocks with a counterpart."""

        def kept(
            stack: StackName, made: LanguageModelArchitecture
        ) -> LanguageModelArchitecture:
            pairs = blocks[stack]
            if pairs is None or len(pairs) == len(made.blocks):
                return made
            return replace(
                made, blocks=tuple(made.blocks[own[number]] for own in pairs)
            )

        made = side.architecture
        assert made is not None
        if isinstance(made, LanguageModelArchitecture):
            return plain_architecture(kept(made.kind, made))
        both = replace(
            made,
            encoder=kept("encoder", made.encoder),
            decoder=kept("decoder", made.decoder),
        )
        return plain_architecture(both)

    def _parts(self, blocks: dict[StackName, list[BlockPair]]) -> Iterator[Part]:
        self._not_compared = list[str]()
        done = 0
        total = sum(2 * len(found) + 2 for found in blocks.values())
        for stack, found in blocks.items():
            comparison = StackComparison(self.pair, stack, found)
            for part in comparison.parts():
                done += 1
                self.progress(part.name, min(done, total), total)
                yield part
            self._not_compared += [
                f"{name} was not compared" for name in comparison.not_compared()
            ]

    def _different_beside(self) -> list[str]:
        """Return the tensors of both files outside the models that differ."""
        one, other = self.pair
        there = {*other.beside}
        return [
            name
            for name in one.beside
            if name in there
            and not equal_numbers(one.read_stored(name), other.read_stored(name))
        ]

    def _beside_of_one(self) -> list[str]:
        """Return notes on tensors outside the models, in the file of A or B alone."""
        one, other = self.pair
        there = {*other.beside}
        notes = []
        for side, names in (("A", {*one.beside} - there), ("B", there - {*one.beside})):
            if names:
                some = ", ".join(sorted(names)[:_MOST_NAMED])
                notes.append(f"{side} alone has {some}: not part of what was compared")
        return notes


def _of_padding(parts: list[Part]) -> list[str]:
    """Return a note on padding logits of A or B alone."""
    counts = [part.found.steps.get("padding", 0) for part in parts]
    if not any(counts):
        return []
    return [
        f"vocabularies differ by {max(counts):,} rows of padding, whose logits are not compared"
    ]


def _judged(
    pair: Pair,
    parts: list[Part],
    settings: list[SettingDifference],
    reasons: list[str],
    notes: list[str],
) -> Difference:
    """Return the verdict on all parts."""
    one, other = pair
    found = tuple(_as_difference(part) for part in parts)
    verdict = weakest([part.verdict for part in found])
    if verdict == "different" and not _are_unrelated(parts):
        verdict = "near"
    for setting in in_short(settings):
        reasons.append(f"{setting.name} is {setting.a} in A and {setting.b} in B")
    for part in parts:
        reasons += [f"{part.name}: {reason}" for reason in part.found.reasons]
    if reasons and verdict != "different":
        verdict = "near"
    is_same = verdict == "same function"
    return Difference(
        one.name,
        other.name,
        verdict,
        parts=found,
        chain=chain_of(parts) if is_same else (),
        reasons=tuple(reasons),
        settings=in_short(settings),
        notes=tuple(notes),
    )


def _adds_nothing(side: Side, stack: StackName, number: int) -> bool:
    """Return True if a block leaves the stream unchanged: outputs of its sub-layers are 0."""
    made = side.stacks[stack]
    block = made.blocks[number]
    is_plain = not (
        made.order or block.cross or block.input or block.streams or block.scaled
    )
    frames = (block.attention, block.feed_forward_frame)
    if not is_plain or block.keys is not None:
        return False
    if any(
        frame.place == "post" or frame.out_norm is not None or frame.from_norm
        for frame in frames
    ):
        return False
    at = f"{side.block_name(stack, number)}.feed_forward."
    outer = [name for name in side.names if name.startswith(at) and "outer." in name]
    if not outer or any(bool(side.read(name).any()) for name in outer):
        return False
    place = next(
        own for own in side.places if own.stack == stack and own.block == number
    )
    weights = side.attention(place)
    if weights.o_bias is not None and bool(weights.o_bias.any()):
        return False
    return bool(weights.o) and not bool(weights.o[-1].weight.any())


def _as_difference(part: Part) -> PartDifference:
    found = part.found
    verdict: Verdict = "same numbers" if part.has_same_numbers else "same function"
    if found.reasons or found.settings:
        is_unrelated = found.has_other_sizes or (found.relative or 0.0) >= _UNRELATED
        verdict = "different" if is_unrelated else "near"
    reasons = (
        *found.reasons,
        *(f"{one.name} is {one.a} and {one.b}" for one in found.settings),
    )
    return PartDifference(
        part.name,
        part.kind,
        verdict,
        part.layer,
        steps=words_of(found.steps) if verdict == "same function" else (),
        reasons=reasons,
        relative=found.relative
        if verdict not in ("same numbers", "same function")
        else None,
        heads=tuple(found.heads),
        bounds=found.bounds,
    )


def _are_unrelated(parts: list[Part]) -> bool:
    """Return True if any part has another size, or at least half of the layers of each kind are unrelated.

    A rewrite may change all attention layers much, and leave the feed-forward layers of the model.
    """
    if any(part.found.has_other_sizes for part in parts):
        return True
    kinds: dict[PartKind, list[bool]] = {}
    for part in parts:
        if part.kind in ("attention", "feed-forward"):
            is_far = (part.found.relative or 0.0) >= _UNRELATED
            kinds.setdefault(part.kind, []).append(is_far)
    return bool(kinds) and all(2 * sum(far) >= len(far) for far in kinds.values())
