"""Folding of norms into maps outside the attention, one norm at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from triptych.core.algebra.forms import are_finite
from triptych.core.algebra.norm_folding import (
    OtherReaders,
    fold_norm_into_map,
    require_readers_foldable,
)
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import Norm
from triptych.core.checkpoints.norm_readers import NormReader, NormSite
from triptych.core.checkpoints.stored_layers import Site
from triptych.core.storage import Tensors
from triptych.errors import DataError
from triptych.rewriting.certificate import NormRecord, StepRecord
from triptych.rewriting.driver import applies_to, give_back_memory
from triptych.rewriting.folder_formats import Format
from triptych.rewriting.functions.norms import (
    FoldNorm,
    FoldOtherNorms,
)
from triptych.rewriting.functions.rewrite import Rewrite
from triptych.rewriting.measuring import MapErrors, blocks, measure_map, total_errors

_NAME = "fold_other_norms"
IsFolded = Callable[[Site], bool]


@final
@dataclass(frozen=True, eq=False)
class _Examined:
    """An examined norm."""

    norm: Norm | None  # gain and shift as stored; None if refused
    checked: tuple[str, ...] = ()  # satisfied preconditions
    refused: str = ""  # reason of the refusal


@final
class OtherNorms:
    """The norms read by maps outside the attention, under a recipe."""

    def __init__(
        self, form: Format, steps: Sequence[Rewrite], skip_refused: bool
    ) -> None:
        self._tensors = form.tensors
        self._examined: dict[str, _Examined] = {}
        self._errors: dict[str, MapErrors] = {}
        self._biases: dict[str, Tensor] = {}  # new biases of maps already folded
        asked = [step for step in steps if isinstance(step, FoldOtherNorms)]
        along = [step for step in steps if isinstance(step, FoldNorm)]
        sites = form.norm_sites() if asked or along else ()
        self._alone = [
            site
            for site in sites
            if site.attention is None
            and any(applies_to(step, site.layers) for step in asked)
        ]
        self._shared = {
            site.attention.name: site
            for site in sites
            if site.attention is not None
            and any(applies_to(step, site.attention.numbers) for step in along)
        }
        self.owners = dict[
            str, NormSite
        ]()  # norms by the names of their replaceable tensors
        for site in (*self._alone, *self._shared.values()):
            self.owners |= dict.fromkeys(site.all_tensors, site)
        self._nothing = form.why_no_norms if asked and not self._alone else ""
        if not skip_refused:
            self._require_foldable(form.source.name)

    def others(self, site: Site) -> OtherReaders | None:
        """Return the other readers of an attention layer's norm; None without known readers."""
        if (shared := self._shared.get(site.name)) is None:
            return None
        return OtherReaders(
            tuple(reader.module for reader in shared.readers),
            self._look_at(shared).refused,
        )

    def replacement(self, name: str, is_folded: IsFolded) -> Tensor | None:
        """Return the new tensor of a name, measured as saved; None if unchanged."""
        site = self.owners.get(name)
        if (
            site is None
            or self._tensors is None
            or not self._is_to_change(site, is_folded)
        ):
            return None
        norm = self._look_at(site).norm
        assert norm is not None
        reader = next(
            (reader for reader in site.readers if name in reader.tensors), None
        )
        if reader is None:
            old = self._tensors.read(name)
            neutral = neutral_norm(norm)
            new = (
                neutral.weight
                if name == site.own_tensors[0] or neutral.bias is None
                else neutral.bias
            )
        elif name == reader.weight:
            # The map may be the largest tensor of the checkpoint: only its old and new values are in memory.
            give_back_memory()
            before = reader.read(self._tensors)
            after = _fold_into_map(norm, *before)
            self._errors[name] = measure_map(norm, neutral_norm(norm), before, after)
            old, new = (reader.in_other_layout(weight) for weight, _ in (before, after))
            if after[1] is not None:
                self._biases[reader.bias] = after[1]
        elif norm.bias is None or not bool(norm.bias.any()):
            return None
        else:
            old = self._tensors.read(name)
            found = self._biases.pop(name, None)
            new = (
                _fold_into_bias(norm, *reader.read(self._tensors))
                if found is None
                else found
            )
        if not are_finite(new) and are_finite(old):
            for read in site.all_tensors:
                if reason := _why_not_finite(read, self._tensors):
                    raise DataError(f"{reason}: repair the checkpoint first")
            raise RewriteRefusedError(_NAME, _does_not_fit(name, new.dtype)).at(
                site.module
            )
        return None if torch.equal(new, old) else new

    def records(self, is_folded: IsFolded) -> tuple[NormRecord, ...]:
        """Return the actual or planned outcome for each norm."""
        found = []
        if self._nothing:
            found.append(
                _entry("none", (), StepRecord(rewrite=_NAME, refused=self._nothing))
            )
        for site in (*self._shared.values(), *self._alone):
            looked_at = self._look_at(site)
            # A shared norm is folded only together with its attention layer.
            if site.attention is not None and not is_folded(site.attention):
                continue
            if looked_at.norm is None:
                found.append(
                    _entry(
                        site.module,
                        (),
                        StepRecord(rewrite=_NAME, refused=looked_at.refused),
                    )
                )
                continue
            maps = tuple(reader.module for reader in site.readers)
            errors = [self._errors.get(reader.weight) for reader in site.readers]
            known = [error for error in errors if error is not None]
            step = _step(site, looked_at.norm, looked_at.checked)
            measured = (
                total_errors(known) if known and len(known) == len(errors) else None
            )
            found.append(
                NormRecord(
                    module=site.module, maps=maps, steps=(step,), measured=measured
                )
            )
        return tuple(found)

    def _is_to_change(self, site: NormSite, is_folded: IsFolded) -> bool:
        looked_at = self._look_at(site)
        if looked_at.norm is None or _is_neutral(looked_at.norm):
            return False
        return site.attention is None or is_folded(site.attention)

    def _require_foldable(self, source: str) -> None:
        if self._nothing:
            raise RewriteRefusedError(_NAME, f"{source}: {self._nothing}")
        for site in self._alone:
            if reason := self._look_at(site).refused:
                raise RewriteRefusedError(
                    _NAME, reason, "--skip-refused leaves it as it is"
                ).at(site.module)

    def _look_at(self, site: NormSite) -> _Examined:
        if site.module not in self._examined:
            assert self._tensors is not None
            self._examined[site.module] = _examine(site, self._tensors)
        return self._examined[site.module]


def neutral_norm(norm: Norm) -> Norm:
    """Return gain 1 and shift 0, in the norm's storage convention."""
    shift = None if norm.bias is None else torch.zeros_like(norm.bias)
    return replace(
        norm, weight=torch.full_like(norm.weight, 1 - norm.offset), bias=shift
    )


def _examine(site: NormSite, tensors: Tensors) -> _Examined:
    """Examine whether a norm can be folded into all of its readers."""
    if reason := site.refused:
        return _Examined(None, refused=reason)
    try:
        norm = site.read(tensors) if site.spec.place == "pre" else None
        slots = {reader.module: bool(reader.bias) for reader in site.readers}
        checked = require_readers_foldable(site.spec.place, norm, slots)
    except RewriteRefusedError as refused:
        return _Examined(None, refused=refused.reason)
    assert norm is not None
    # Values must be finite, and readers able to store the product.
    for name in site.own_tensors:
        if reason := _why_not_finite(name, tensors):
            return _Examined(None, refused=reason)
    for reader in site.readers:
        if reason := _why_not_foldable(norm, reader, tensors):
            return _Examined(None, refused=reason)
    if not site.layers:
        checked = (*checked, "the output map is not the embedding")
    return _Examined(norm, checked)


def _why_not_finite(name: str, tensors: Tensors) -> str:
    if name not in tensors.infos or are_finite(numbers := tensors.read(name)):
        return ""
    count = int((~numbers.isfinite()).sum())
    return f"tensor {name} has {count:,} numbers that are not finite (NaN or infinite)"


def _why_not_foldable(norm: Norm, reader: NormReader, tensors: Tensors) -> str:
    """Return the reason against absorbing a norm into a map's tensors; "" if possible."""
    for name in reader.tensors:
        if how := tensors.packed_as(name):
            return f"tensor {name} is stored as {how}, which cannot take other numbers"
        dtype = tensors.infos[name].dtype
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return f"tensor {name} is stored in {dtype}, which cannot take other numbers".replace(
                "torch.", ""
            )
    shape = tensors.infos[reader.weight].shape
    if len(shape) not in (2, 3):
        return f"tensor {reader.weight} of shape {list(shape)} is no map"
    read = shape[-2] if reader.transposed else shape[-1]
    if (read,) != tuple(norm.weight.shape):
        return f"{reader.module} reads {read} channels, and the norm has shape {list(norm.weight.shape)}"
    # Wider dtypes can represent any likely product and are checked when written.
    if torch.float16 in (tensors.infos[name].dtype for name in reader.tensors):
        weight, bias = reader.read(tensors)
        for block, *new in _folded_blocks(norm, weight, bias):
            for name, old, part in zip(
                reader.tensors, (weight, bias), new, strict=False
            ):
                if old is None or part is None or part.dtype != torch.float16:
                    continue
                if not are_finite(part) and are_finite(old[block]):
                    return _does_not_fit(name, torch.float16)
    return ""


def _fold_into_map(
    norm: Norm, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    new = torch.empty_like(weight)
    new_bias = None if bias is None else torch.empty_like(bias)
    for block, part, part_of_bias in _folded_blocks(norm, weight, bias):
        new[block] = part
        if new_bias is not None and part_of_bias is not None:
            new_bias[block] = part_of_bias
    return new, new_bias


def _fold_into_bias(norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the bias of the map with the norm folded."""
    assert bias is not None
    new = torch.empty_like(bias)
    for block, _, part in _folded_blocks(norm, weight, bias):
        assert part is not None
        new[block] = part
    return new


def _folded_blocks(
    norm: Norm, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[tuple[int | slice, ...], Tensor, Tensor | None]]:
    """Yield blocks of the map with the norm folded, computed in float64 and cast once."""
    shift = None if norm.bias is None else norm.bias.double()
    wide = replace(norm, weight=norm.weight.double(), bias=shift)
    for block in blocks(weight):
        part = None if bias is None else bias[block].double()
        new, new_bias = fold_norm_into_map(wide, weight[block].double(), part)
        cast = None if bias is None or new_bias is None else new_bias.to(bias.dtype)
        yield block, new.to(weight.dtype), cast


def _does_not_fit(name: str, dtype: torch.dtype) -> str:
    said = str(dtype).removeprefix("torch.")
    return f"tensor {name}: with the gain in it, numbers do not fit {said}"


def _is_neutral(norm: Norm) -> bool:
    neutral = neutral_norm(norm)
    same_shift = norm.bias is None or not bool(norm.bias.any())
    return same_shift and torch.equal(norm.weight, neutral.weight)


def _step(site: NormSite, norm: Norm, checked: tuple[str, ...]) -> StepRecord:
    name = _NAME if site.attention is None else "fold_norm"
    if _is_neutral(norm):
        return StepRecord(
            rewrite=name, tier="bit-exact", notes=("gain and shift do nothing already",)
        )
    stored = 1 - norm.offset
    return StepRecord(
        rewrite=name,
        tier="rounding-exact",
        checked=checked,
        notes=(
            f"of the norm a gain of 1 (stored as {stored:g}) and no shift are left",
        ),
    )


def _entry(module: str, maps: tuple[str, ...], step: StepRecord) -> NormRecord:
    return NormRecord(module=module, maps=maps, steps=(step,))
