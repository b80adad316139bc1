"""The parts of two models, compared one after the other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

from torch import Tensor

from triptych.core.models import (
    BlockConfig,
    EncoderDecoderArchitecture,
    LanguageModelArchitecture,
    NormConfig,
    SublayerConfig,
)
from triptych.rewriting.differences import attention_pairs, feed_forward_pairs
from triptych.rewriting.differences.affine_maps import (
    PLAIN,
    AffineMap,
    Reading,
    affine,
    rounded_rows,
    unfolded_rows,
)
from triptych.rewriting.differences.attention_pairs import (
    LayerFindings,
    LayerView,
    compare_attention,
)
from triptych.rewriting.differences.difference_records import PartKind
from triptych.rewriting.differences.feed_forward_pairs import (
    FeedForwardView,
    compare_feed_forward,
)
from triptych.rewriting.differences.field_differences import same_number, takes_scale
from triptych.rewriting.differences.rounded import (
    Rounded,
    equal_numbers,
    factor_left_alone,
    finer,
    is_same,
)
from triptych.rewriting.differences.row_maps import (
    RowMap,
    change_of_rows,
    compare_rows,
    explained_rows,
    ignored_columns,
)
from triptych.rewriting.differences.sides import AttentionPlace, Pair, Side, StackName
from triptych.rewriting.differences.turning import Turn, allows_turn, find_turn

_ROWS_AT_A_TIME = 8192
# Modules of a stack after its blocks, compared tensor by tensor.
_OTHERS = ("task", "second", "inputs", "streams")


@final
@dataclass
class Part:
    """A part of both models, and what was found about it.

    Attributes:
        name: name of the part.
        kind: its kind.
        layer: name of the layer; "" outside layers.
        place: its attention layer in A and in B; None for other parts.
        found: reasons, settings, rewrites and sizes of differences.
        has_same_numbers: True if no rewrite was needed.
    """

    name: str
    kind: PartKind
    layer: str = ""
    place: tuple[AttentionPlace, AttentionPlace] | None = None
    found: LayerFindings = field(default_factory=LayerFindings)
    has_same_numbers: bool = False


class BlockPair(NamedTuple):
    """Numbers of a block in A and of its counterpart in B."""

    a: int
    b: int


def frames_of(block: BlockConfig) -> dict[str, SublayerConfig]:
    """Return the residual frames of a block by the names of their modules."""
    frames = {
        "self_residual": block.attention,
        "feed_forward_residual": block.feed_forward_frame,
    }
    if block.cross is not None:
        frames["cross_residual"] = block.cross
    return frames


def is_foldable(block: BlockConfig, frame: SublayerConfig) -> bool:
    """Return True if only the maps of the sub-layer read the norm before it."""
    return (
        frame.norm is not None
        and frame.place == "pre"
        and not frame.from_norm
        and block.streams is None
    )


@final
class StackComparison:
    """Comparison of one stack of A and B by parts."""

    def __init__(self, pair: Pair, stack: StackName, blocks: list[BlockPair]) -> None:
        self.pair = pair
        self.stack = stack
        self.blocks = blocks
        self.made = pair.a.stacks[stack], pair.b.stacks[stack]
        self.prefixes = pair.a.prefix(stack), pair.b.prefix(stack)
        self.turn = self._find_turn()
        self._compared = (
            set[str](),
            set[str](),
        )  # names of compared tensors of A and of B

    def _find_turn(self) -> Turn | None:
        """Return another basis of the stream, if the embeddings differ by a change of basis."""
        if len(self.pair.a.stacks) > 1 or not all(map(allows_turn, self.made)):
            return None
        tables = [own.read(own.table_names[self.stack]) for own in self.pair]
        scales = {made.embeddings.scale for made in self.made}
        if len(scales) > 1 or equal_numbers(tables[0], tables[1]):
            return None
        return find_turn(tables[0], tables[1])

    @property
    def sides(self) -> tuple[tuple[Side, LanguageModelArchitecture, str], ...]:
        return tuple(zip(self.pair, self.made, self.prefixes, strict=True))

    def parts(self) -> Iterator[Part]:
        """Yield the parts of the stack in order."""
        yield self._embeddings()
        for blocks in self.blocks:
            yield from self._block(blocks)
        yield self._head()

    def not_compared(self) -> list[str]:
        """Return the tensors outside the compared parts, except tensors of blocks without a counterpart."""
        found = []
        dropped = [
            {
                own.block_name(self.stack, number)
                for number in {*range(len(made.blocks))}
                - {blocks[side] for blocks in self.blocks}
            }
            for side, (own, made, _) in enumerate(self.sides)
        ]
        for side, (own, _, prefix) in enumerate(self.sides):
            for name in own.names:
                if not name.startswith(prefix) or name in self._compared[side]:
                    continue
                if name.startswith(tuple(f"{block}." for block in dropped[side])):
                    continue
                if prefix or name.partition(".")[0] not in ("encoder", "decoder"):
                    found.append(f"{'AB'[side]}'s {name}")
        return found

    # Names and norms.

    def _tensors(self, own: Side, prefix: str, side: int) -> dict[str, Tensor]:
        """Read all tensors below a prefix, and count them as compared."""
        names = [name for name in own.names if name.startswith(prefix)]
        self._compared[side].update(names)
        return {name.removeprefix(prefix): own.read(name) for name in names}

    def _reading(
        self, own: Side, name: str, config: NormConfig | None, side: int
    ) -> Reading:
        """Return gain and shift of a norm."""
        if config is None:
            return (
                PLAIN if self.turn is None or side else replace(PLAIN, turn=self.turn)
            )
        tensors = self._tensors(own, f"{name}.", side)
        weight = tensors.get("weight")
        bias = tensors.get("bias")
        gain = None if weight is None else weight.double() + config.offset
        shift = None if bias is None or not bool(bias.any()) else bias.double()
        turn = self.turn if side == 0 else None
        return Reading(gain, shift, centred=config.kind == "layer", turn=turn)

    def _frame(
        self, blocks: BlockPair, name: str, found: LayerFindings
    ) -> tuple[tuple[Reading, float], tuple[Reading, float]]:
        """Return what both sub-layers read and the factors of their outputs; compare what cannot move."""
        read = []
        for side, (own, made, _) in enumerate(self.sides):
            number = blocks[side]
            block = made.blocks[number]
            frame = frames_of(block)[name]
            at = f"{own.block_name(self.stack, number)}.{name}"
            reading = self._reading(own, f"{at}.norm", frame.norm, side)
            out = self._reading(own, f"{at}.out_norm", frame.out_norm, side)
            read.append((reading, out, frame, is_foldable(block, frame)))
        (norm_a, out_a, frame_a, folds_a), (norm_b, out_b, frame_b, folds_b) = read
        if frame_a.out_norm is not None and not out_a.same_as(out_b):
            found.reasons.append("the norm after it differs")
        scales = frame_a.scale, frame_b.scale
        if frame_a.out_norm is not None and not same_number(*scales):
            found.reasons.append(
                f"its factor is {scales[0]:g} and {scales[1]:g}, after a norm"
            )
        if frame_a.out_norm is not None:
            scales = 1.0, 1.0
        if same_number(*scales):
            scales = scales[0], scales[0]
        if (folds_a and folds_b) or self.turn is not None:
            return (norm_a, scales[0]), (norm_b, scales[1])
        if not norm_a.same_as(norm_b):
            found.reasons.append(
                "its norm differs, which the residual stream reads too"
            )
        return (PLAIN, scales[0]), (PLAIN, scales[1])

    # Parts.

    def _named(self, number: int) -> str:
        return f"{self.stack}.{number}" if len(self.pair.a.stacks) > 1 else str(number)

    def _embeddings(self) -> Part:
        part = Part(self._named_part("embeddings"), "embeddings")
        found = part.found
        tables = []
        rest = []
        for side, (own, made, prefix) in enumerate(self.sides):
            table = own.table_names[self.stack]
            self._compared[side].add(table)
            tensors = self._tensors(own, f"{prefix}embeddings.", side)
            tensors.pop("table.weight", None)
            scale = made.embeddings.scale if takes_scale(made) else 1.0
            tables.append((own.read(table), scale))
            norm = self._reading(
                own, f"{prefix}embeddings.norm", made.embeddings.norm, side
            )
            rest.append(
                ({n: t for n, t in tensors.items() if not n.startswith("norm.")}, norm)
            )
        if self.turn is None:
            has_same_rows = _compare_tables(tables[0], tables[1], found, "embeddings")
        else:
            has_same_rows = False
            found.steps["turn"] = True
        different = feed_forward_pairs.different_tensors(rest[0][0], rest[1][0])
        found.reasons += [f"{name} differs" for name in different]
        if self.turn is None and not rest[0][1].same_as(rest[1][1]):
            found.reasons.append("the norm of embeddings differs")
        part.has_same_numbers = has_same_rows and not found.reasons
        return part

    def _named_part(self, name: str) -> str:
        return f"{self.stack} {name}" if len(self.pair.a.stacks) > 1 else name

    def _block(self, blocks: BlockPair) -> Iterator[Part]:
        number = blocks.a
        layer = self._named(number)
        own = Part(f"{layer} attention", "attention", layer)
        reading = self._frame(blocks, "self_residual", own.found)
        self._attention(own, blocks, reading, is_cross=False)
        yield own
        configs = [made.blocks[blocks[side]] for side, made in enumerate(self.made)]
        if configs[0].cross is not None and configs[1].cross is not None:
            cross = Part(f"cross.{number} attention", "attention", f"cross.{number}")
            across = self._frame(blocks, "cross_residual", cross.found)
            self._attention(cross, blocks, across, is_cross=True)
            yield cross
        fed = Part(f"{layer} feed-forward", "feed-forward", layer)
        framed = self._frame(blocks, "feed_forward_residual", fed.found)
        if all(
            config.parallel and config.feed_forward_frame.norm is None
            for config in configs
        ):
            framed = tuple((reading[side][0], framed[side][1]) for side in (0, 1))  # type: ignore[assignment]
        self._feed_forward(fed, blocks, framed)
        yield fed
        rest = self._rest_of_block(blocks, layer)
        if rest is not None:
            yield rest

    def _attention(
        self,
        part: Part,
        blocks: BlockPair,
        reading: tuple[tuple[Reading, float], tuple[Reading, float]],
        *,
        is_cross: bool,
    ) -> None:
        places = tuple(
            AttentionPlace(self.stack, number, is_cross) for number in blocks
        )
        part.place = places[0], places[1]
        memories = self._memories() if is_cross else (PLAIN, PLAIN)
        views = [
            LayerView(own.attention(place), read, memory, scale)
            for own, place, (read, scale), memory in zip(
                self.pair, places, reading, memories, strict=True
            )
        ]
        if attention_pairs.same_numbers(views[0], views[1]):
            part.has_same_numbers = not part.found.reasons
            return
        name = self.pair.a.attention_name(places[0])
        _merge(part.found, compare_attention(views[0], views[1], name))

    def _memories(self) -> tuple[Reading, Reading]:
        """Return what the keys and values of cross-attention read: the output of the encoder's last norm."""
        found = []
        for side, own in enumerate(self.pair):
            made = own.architecture
            assert isinstance(made, EncoderDecoderArchitecture)
            found.append(
                self._reading(own, "encoder.final_norm", made.encoder.final_norm, side)
            )
        return found[0], found[1]

    def _feed_forward(
        self,
        part: Part,
        blocks: BlockPair,
        reading: tuple[tuple[Reading, float], tuple[Reading, float]],
    ) -> None:
        views = []
        for side, (own, made, _) in enumerate(self.sides):
            number = blocks[side]
            tensors = self._tensors(
                own, f"{own.block_name(self.stack, number)}.feed_forward.", side
            )
            read, scale = reading[side]
            views.append(
                FeedForwardView(made.blocks[number].feed_forward, tensors, read, scale)
            )
        if feed_forward_pairs.same_numbers(views[0], views[1]):
            part.has_same_numbers = not part.found.reasons
            return
        _merge(part.found, compare_feed_forward(views[0], views[1]))

    def _rest_of_block(self, blocks: BlockPair, layer: str) -> Part | None:
        """Compare the tensors of a block that belong to no sub-layer: they have to be equal."""
        rest = []
        for side, (own, _, _) in enumerate(self.sides):
            at = f"{own.block_name(self.stack, blocks[side])}."
            names = [
                name
                for name in own.names
                if name.startswith(at) and name not in self._compared[side]
            ]
            self._compared[side].update(names)
            rest.append({name.removeprefix(at): own.read(name) for name in names})
        if not rest[0] and not rest[1]:
            return None
        part = Part(f"{layer} other maps", "other", layer)
        part.found.reasons += [
            f"{name} differs" for name in _different(rest[0], rest[1])
        ]
        part.has_same_numbers = not part.found.reasons
        return part

    def _head(self) -> Part:
        part = Part(self._named_part("head"), "head")
        found = part.found
        readings = [
            self._reading(own, f"{prefix}final_norm", made.final_norm, side)
            for side, (own, made, prefix) in enumerate(self.sides)
        ]
        heads = [made.head for made in self.made]
        is_memory = self.stack == "encoder" and isinstance(
            self.pair.a.architecture, EncoderDecoderArchitecture
        )
        folds = all(
            made.head is not None
            and made.task is None
            and made.second is None
            and (made.head.transform or not made.head.activation)
            for made in self.made
        )
        folds = folds and all(
            head is not None and (head.transform or head.norm is None) for head in heads
        )
        if not folds and not is_memory and not readings[0].same_as(readings[1]):
            found.reasons.append("the last norm differs, which is the output")
        is_same = not found.reasons
        if heads[0] is not None and heads[1] is not None:
            is_same = self._compare_head(readings if folds else [PLAIN, PLAIN], found)
        elif heads != [None, None]:
            found.reasons.append("one model predicts tokens and the other does not")
        rest = []
        for side, (own, _, prefix) in enumerate(self.sides):
            others = tuple(f"{prefix}{name}." for name in _OTHERS)
            names = [name for name in own.names if name.startswith(others)]
            self._compared[side].update(names)
            rest.append({name.removeprefix(prefix): own.read(name) for name in names})
        found.reasons += [f"{name} differs" for name in _different(rest[0], rest[1])]
        part.has_same_numbers = is_same and not found.reasons
        return part

    def _compare_head(self, readings: list[Reading], found: LayerFindings) -> bool:
        """Compare the map to logits; return True if its values are equal."""
        tables = []
        maps = []
        for side, (own, made, prefix) in enumerate(self.sides):
            head = made.head
            assert head is not None
            tensors = self._tensors(own, f"{prefix}head.", side)
            stored = tensors.pop("output.weight", None)
            table = own.read(own.table_names[self.stack]) if stored is None else stored
            bias = tensors.pop("output.bias", None)
            tables.append(
                _Table(table, bias, head.input_scale * head.scale, head.scale)
            )
            maps.append(tensors)
        alike = readings[0].same_as(readings[1])
        through_map = "map.weight" in maps[0] and "map.weight" in maps[1]
        has_same_norm = alike
        if through_map and not alike:
            before = _maps_before_tables(maps)
            mapped = [
                own.reading(reading)
                for own, reading in zip(before, readings, strict=True)
            ]
            rounds = rounded_rows(readings[0], readings[1], mapped[0].weight.shape[1])[
                :, None
            ]
            if not is_same(mapped[0].rows(), mapped[1].rows(), rounds):
                found.reasons.append("the map before the output table differs")
            if bool(
                unfolded_rows(before[0], before[1], (readings[0], readings[1])).any()
            ):
                found.reasons.append(
                    "the last norm differs, and the map before the output table has not taken it up"
                )
            found.steps["fold_other_norms"] = True
        found.reasons += [
            f"head.{name} differs"
            for name in feed_forward_pairs.different_tensors(*maps)
        ]
        outer = [PLAIN, PLAIN] if through_map else readings
        return _compare_outputs(tables, outer, found) and has_same_norm


class _Table(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    scale: float  # factor of the weight
    bias_scale: float


def _merge(found: LayerFindings, other: LayerFindings) -> None:
    found.reasons += other.reasons
    found.settings += other.settings
    found.steps |= other.steps
    found.heads += other.heads
    found.bounds |= other.bounds
    found.relative = other.relative
    found.has_other_sizes |= other.has_other_sizes


def _different(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ or are missing."""
    return [
        name
        for name in dict.fromkeys((*one, *other))
        if name not in one
        or name not in other
        or not equal_numbers(one[name], other[name])
    ]


def _maps_before_tables(tensors: list[dict[str, Tensor]]) -> list[AffineMap]:
    """Take the maps before the output tables out of the tensors of two heads."""
    weights = [own.pop("map.weight") for own in tensors]
    biases = [own.pop("map.bias", None) for own in tensors]
    dtype = finer(weights[0].dtype, weights[1].dtype)
    return [
        affine(
            Rounded.stored(weight, dtype).mT,
            None if bias is None else Rounded.stored(bias, dtype),
        )
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _compare_tables(
    one: tuple[Tensor, float],
    other: tuple[Tensor, float],
    found: LayerFindings,
    what: str,
) -> bool:
    """Compare tables of tokens with their factors; return True if their values are equal."""
    (table_a, scale_a), (table_b, scale_b) = one, other
    if same_number(scale_a, scale_b):
        scale_b = scale_a
    if table_a.shape[1] != table_b.shape[1]:
        found.differ_in_size(
            f"{what} are {table_a.shape[1]} and {table_b.shape[1]} wide"
        )
        return False
    if not _are_padded(table_a, table_b, found, what):
        return False
    count = min(len(table_a), len(table_b))
    if scale_a == scale_b and equal_numbers(table_a[:count], table_b[:count]):
        return True
    dtype = finer(table_a.dtype, table_b.dtype)
    mine = RowMap(table_a[:count], dtype, scale=scale_a)
    theirs = RowMap(table_b[:count], dtype, scale=scale_b)
    apart = change_of_rows(mine, theirs)
    found.relative = apart.relative if apart.size else None
    if scale_a == scale_b or not _is_scaled_table(mine, theirs):
        found.reasons.append(f"{what} differ")
        return False
    if _ignores_factor(mine, theirs):
        found.reasons.append(
            f"the factor of {what} is {scale_a:g} and {scale_b:g}, and the table has not taken it up"
        )
        return False
    found.steps["scale"] = (scale_a, scale_b)
    found.relative = None
    return False


def _parts_of_rows(one: RowMap, other: RowMap) -> Iterator[tuple[RowMap, RowMap]]:
    for start in range(0, len(one), _ROWS_AT_A_TIME):
        stop = min(start + _ROWS_AT_A_TIME, len(one))
        yield one.part(start, stop), other.part(start, stop)


def _is_scaled_table(one: RowMap, other: RowMap) -> bool:
    """Return True if rounding explains the differences of two tables with their factors."""
    return all(
        bool(explained_rows(mine, theirs).all())
        for mine, theirs in _parts_of_rows(one, other)
    )


def _ignores_factor(one: RowMap, other: RowMap) -> bool:
    """Return True if the stored rows ignore the difference of the factors, in any part of the tables."""
    factors = one.scale, other.scale
    return any(
        factor_left_alone(
            Rounded.stored(mine.weight, mine.dtype),
            Rounded.stored(theirs.weight, theirs.dtype),
            factors,
        )
        for mine, theirs in _parts_of_rows(one, other)
    )


def _are_padded(one: Tensor, other: Tensor, found: LayerFindings, what: str) -> bool:
    """Return True if one table has at most padding besides the rows of the other.

    Padding has zeros, or several equal rows: a single row with other values is that of a token.
    """
    if len(one) == len(other):
        return True
    longer = one if len(one) > len(other) else other
    further = longer[min(len(one), len(other)) :]
    are_equal = len(further) > 1 and bool((further == further[:1]).all())
    if are_equal or not bool(further.any()):
        found.steps["padding"] = abs(len(one) - len(other))
        return True
    found.differ_in_size(f"{what} have {len(one):,} and {len(other):,} rows")
    return False


def _compare_outputs(
    tables: list[_Table], readings: list[Reading], found: LayerFindings
) -> bool:
    """Compare the output tables; return True if their values are equal."""
    one, other = tables
    if same_number(one.scale, other.scale):
        other = other._replace(scale=one.scale)
    if same_number(one.bias_scale, other.bias_scale):
        other = other._replace(bias_scale=one.bias_scale)
    tables = [one, other]
    if one.weight.shape[1] != other.weight.shape[1]:
        found.differ_in_size(
            f"its tables are {one.weight.shape[1]} and {other.weight.shape[1]} wide"
        )
        return False
    if not _are_padded(one.weight, other.weight, found, "rows of the output table"):
        return False
    count = min(len(one.weight), len(other.weight))
    alike = readings[0].same_as(readings[1])
    is_scaled = one.scale != other.scale or one.bias_scale != other.bias_scale
    if alike and not is_scaled:
        biases = [None if own.bias is None else own.bias[:count] for own in tables]
        if not equal_numbers(one.weight[:count], other.weight[:count]):
            found.reasons.append("the output table differs")
        names = [{} if bias is None else {"bias": bias} for bias in biases]
        if feed_forward_pairs.different_tensors(names[0], names[1]):
            found.reasons.append("the bias of the output differs")
        return not found.reasons
    maps = [
        _output_rows(own, reading, tables)
        for own, reading in zip(tables, readings, strict=True)
    ]
    rounds = rounded_rows(readings[0], readings[1], maps[0].width) | is_scaled
    explained = True
    is_left_alone = False
    for mine, theirs in _parts_of_rows(*(own.part(0, count) for own in maps)):
        explained = explained and bool(compare_rows(mine, theirs, rounds).same.all())
        ignored = ignored_columns([mine.unturned], [theirs.unturned])
        is_left_alone |= bool(ignored.any())
    if not explained:
        found.reasons.append("the output table differs")
    if any(reading.turn is not None for reading in readings):
        found.steps["turn"] = True
    elif not alike:
        found.steps["fold_other_norms"] = True
    if is_left_alone:
        found.reasons.append(
            "the last norm or the factor of logits differs, and the output table has not taken it up"
        )
    if is_scaled:
        found.steps["scale"] = (one.scale, other.scale)
    return False


def _output_rows(own: _Table, reading: Reading, tables: list[_Table]) -> RowMap:
    """Return the rows of an output table, which read the last norm."""
    dtype = finer(tables[0].weight.dtype, tables[1].weight.dtype)
    return RowMap(
        own.weight,
        dtype,
        own.bias,
        dtype if own.bias is None else finer(dtype, own.bias.dtype),
        reading,
        scale=own.scale,
        bias_scale=own.bias_scale,
    )
