"""What a family file makes of a checkpoint: a model's architecture, and where its tensors come from.

The attention layers have their own map (`layer_map`); this is the rest: embeddings, norms, feed-forward
layers, head. Both together account for every tensor of the file.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Never, final

import torch

from triptych.checkpoints.checkpoint import Checkpoint
from triptych.checkpoints.family import EmbeddedPositionsSpec, FeedForwardSpec, ModelSpec, NormSpec
from triptych.checkpoints.fields import listed, not_understood_of_model
from triptych.checkpoints.layer import Site
from triptych.checkpoints.layer_map import LayerMap, norm_tensors, tensor_names
from triptych.checkpoints.place import Place
from triptych.checkpoints.positions import stored_angles
from triptych.checkpoints.reading import LayerReader, require_shape
from triptych.checkpoints.tensor_maps import Halves, Named, Shape, Transposed
from triptych.errors import DataError
from triptych.models.architecture import (
    Activation,
    BlockConfig,
    EmbeddingsConfig,
    FeedForwardConfig,
    HeadConfig,
    LanguageModelArchitecture,
    NormConfig,
    SublayerConfig,
)

# By their names in `transformers`. Those of one row are one function, computed by formulas that round apart.
_ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
    "quick_gelu": "gelu_sigmoid",
    **dict.fromkeys(("silu", "swish"), "swish"),
    "relu": "relu",
    "relu2": "relu_squared",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}  # fmt: skip

Entry = tuple[tuple[str, ...], Named]


@final
@dataclass(frozen=True)
class ModelMap:
    """A model as it lies in a checkpoint.

    Attributes:
        architecture: what it is made of.
        sites: the attention layer of every block.
        tensors: from the stored tensors to the others of `LanguageModel`, by their names there.
    """

    architecture: LanguageModelArchitecture
    sites: tuple[Site, ...]
    tensors: LayerMap


def model_map(checkpoint: Checkpoint) -> ModelMap:
    """What a checkpoint's model is made of.

    Raises:
        DataError: its family cannot be run; a field of the configuration that is not understood; a tensor
            that is missing, left over or of another shape. It is named.
    """
    spec = checkpoint.family.model
    if spec is None:
        raise DataError(
            f"{checkpoint.name}: checkpoints of {checkpoint.family.name} can be read, and not run"
        )
    return _Mapping(checkpoint, spec).model_map()


@final
class _Mapping:
    """One checkpoint."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        self.checkpoint, self.spec, self.tensors = checkpoint, spec, checkpoint.tensors
        sites = checkpoint.sites
        if others := [site for site in sites if site.stack != spec.stack or site.kind == "cross"]:
            self._refuse(f"{others[0].module} is no self-attention of its {spec.stack}: it cannot be run")
        self.sites = sites
        self.first = checkpoint.place(sites[0])
        self.settings = self.first.settings
        for choice in spec.refused:
            if self.settings.holds(choice.when):
                self._refuse(f"{checkpoint.family.name} cannot be run: {choice.value}")
        if strange := not_understood_of_model(checkpoint.family, self.settings):
            self._refuse_field(strange)
        self.entries: list[Entry] = []

    def model_map(self) -> ModelMap:
        architecture = self._architecture()
        found = ModelMap(architecture, self.sites, LayerMap(dict(self.entries)))
        self._account(found)
        return found

    # The parts, each of which also enters its tensors.

    def _architecture(self) -> LanguageModelArchitecture:
        spec, both_ways = self.spec, {site.kind == "self" for site in self.sites}
        if spec.kind == "decoder" and len(both_ways) > 1:
            self._refuse("some of its layers see later tokens and some do not: it cannot be run")
        embeddings = self._embeddings()
        blocks = tuple(self._block(number, site) for number, site in enumerate(self.sites))
        final_norm = self._norm("final_norm", self.first, spec.final_norm)
        return LanguageModelArchitecture(
            kind="encoder" if True in both_ways else "decoder",
            d_model=self.d_model,
            embeddings=embeddings,
            blocks=blocks,
            final_norm=final_norm,
            head=self._head(),
        )

    @cached_property
    def d_model(self) -> int:
        return self.settings.count(self.first.spec.size)

    def _embeddings(self) -> EmbeddingsConfig:
        spec, place = self.spec, self.first
        table = f"{place.beside(spec.embedding)}.weight"
        said = self.settings.value("vocab_size")
        self._enter("embeddings.table.weight", table, (said if isinstance(said, int) else None, self.d_model))
        found = EmbeddingsConfig(
            self.tensors.infos[table].shape[0],
            scale=self._number(spec.embedding_scale) * self._number(place.chosen(spec.root_scale)) ** 0.5,
            norm=self._norm("embeddings.norm", place, spec.embedding_norm),
        )
        positions = place.first(spec.positions)
        kind = "none" if positions is None else positions.kind
        embedded = place.position.kind
        if kind != (embedded if embedded in ("learned", "sinusoidal") else "none"):
            self._refuse(f"its attention says that positions are {embedded}, its embeddings {kind}")
        return found if positions is None else self._with_positions(found, positions)

    def _with_positions(self, found: EmbeddingsConfig, spec: EmbeddedPositionsSpec) -> EmbeddingsConfig:
        rows, offset = self.settings.count(spec.rows), self.settings.whole(spec.offset_rows)
        if spec.kind == "learned":
            name = f"{self.first.beside(spec.table)}.weight"
            self._enter("embeddings.positions.weight", name, (rows + offset, self.d_model))
        return replace(
            found,
            positions=spec.kind,
            num_positions=rows,
            position_offset=offset,
            sinusoidal_layout=spec.layout,
        )

    def _block(self, number: int, site: Site) -> BlockConfig:
        spec, place, at = self.spec, self.checkpoint.place(site), f"blocks.{number}"
        own, parallel = place.norm, place.chosen(spec.parallel)
        norms = spec.attention_norm or ((own,) if own is not None and own.place != "post" else ())
        return BlockConfig(
            self._frame(f"{at}.self_residual", place, norms, spec.attention_out_norm),
            self._feed_forward(f"{at}.feed_forward", place),
            self._frame(
                f"{at}.feed_forward_residual", place, spec.feed_forward_norm, spec.feed_forward_out_norm
            ),
            parallel=bool(parallel) and place.holds(parallel),
        )

    def _frame(
        self, ours: str, place: Place, norms: tuple[NormSpec, ...], out_norms: tuple[NormSpec, ...]
    ) -> SublayerConfig:
        norm = place.first(norms)
        return SublayerConfig(
            self._norm(f"{ours}.norm", place, norms),
            "post" if norm is not None and norm.place == "post" else "pre",
            self._norm(f"{ours}.out_norm", place, out_norms),
            self._number(self.spec.residual_scale, place),
            from_norm=place.holds(self.spec.from_norm),
        )

    def _norm(self, ours: str, place: Place, norms: tuple[NormSpec, ...]) -> NormConfig | None:
        """A norm; a LayerNorm has a bias where the file has one, and 0 for it elsewhere, as there."""
        norm = place.first(norms)
        if norm is None or (norm.weight and not norm.at):
            return None
        eps = place.number(norm.eps or self.spec.eps)
        weight, bias = norm_tensors(self.tensors, place.beside(norm.at))
        has_bias = norm.kind == "layer" and bias in self.tensors.infos
        if norm.weight:
            self._enter(f"{ours}.weight", weight, (self.d_model,))
        if has_bias:
            self._enter(f"{ours}.bias", bias, (self.d_model,))
        return NormConfig(norm.kind, eps, norm.weight, has_bias, norm.offset)

    def _feed_forward(self, ours: str, place: Place) -> FeedForwardConfig:
        spec = place.first(self.spec.feed_forward)
        if spec is None:
            self._refuse(f"the feed-forward layer of block {place.layer} is of no kind that is known")
        size, name = place.count(spec.size), place.value(spec.activation)
        if name not in _ACTIVATIONS:
            self._refuse(f"activation {name!r} is not one of {', '.join(_ACTIVATIONS)}: it cannot be run")
        bias = place.holds(spec.bias)
        out_bias = place.holds(spec.out_bias) if spec.out_bias else bias
        gated = bool(spec.gate or spec.fused)
        self._feed_forward_maps(ours, place, spec, size, (bias, out_bias))
        return FeedForwardConfig(size, _ACTIVATIONS[name], gated, bias, out_bias)

    def _feed_forward_maps(
        self, ours: str, place: Place, spec: FeedForwardSpec, size: int, biases: tuple[bool, bool]
    ) -> None:
        at, d_model, (bias, out_bias) = place.beside(spec.at), self.d_model, biases

        def enter(parts: tuple[str, ...], module: str, shape: tuple[int, int], has_bias: bool) -> None:
            weight, own_bias = tensor_names(f"{at}.{module}" if at else module)
            steps = (Halves(),) if len(parts) == 2 else ()
            stored = Named((weight,), shape, steps)
            if spec.transposed:
                stored = Named((weight,), shape[::-1], (Transposed(), *steps))
            self._add(tuple(f"{ours}.{part}.weight" for part in parts), stored)
            if has_bias:
                self._add(
                    tuple(f"{ours}.{part}.bias" for part in parts), Named((own_bias,), shape[:1], steps)
                )

        if spec.fused:
            enter(tuple(spec.fused.split()), spec.inner, (2 * size, d_model), bias)
        else:
            enter(("inner",), spec.inner, (size, d_model), bias)
            if spec.gate:
                enter(("gate",), spec.gate, (size, d_model), bias)
        enter(("outer",), spec.outer, (d_model, size), out_bias)

    def _head(self) -> HeadConfig:
        spec, vocab_size = self.spec.head, self.tensors.infos[self._table].shape[0]
        module = self._output_module()
        tied, bias = self.settings.holds(spec.tied), self.settings.holds(spec.bias)
        if tied:
            self._require_same(f"{module}.weight")
        else:
            self._enter("head.output.weight", f"{module}.weight", (vocab_size, self.d_model))
        if bias:
            self._enter("head.output.bias", f"{module}.bias", (vocab_size,))
        cap = self.settings.value(spec.soft_cap) if spec.soft_cap else None
        return HeadConfig(
            tied=tied,
            bias=bias,
            scale=self._number(spec.scale),
            soft_cap=None if cap is None else self.settings.number(spec.soft_cap),
        )

    def _output_module(self) -> str:
        """The output map: it stands above the names that attention layers share, as far as there are some."""
        outer = self.first.prefix.split(".")[:-1]
        above = ["".join(f"{part}." for part in outer[:count]) for count in range(len(outer), -1, -1)]
        names = [f"{at}{self.spec.head.at}" for at in above]
        return next((name for name in names if f"{name}.weight" in self.tensors.infos), names[-1])

    def _require_same(self, output: str) -> None:
        """A tied output map may be in the file as well, if it is the table.

        Raises:
            DataError: it is another.
        """
        if output not in self.tensors.infos:
            return
        if not torch.equal(self.tensors.read(output), self.tensors.read(self._table)):
            self._refuse(f"{output} is not {self._table}, though {self.spec.head.tied} says so")
        self.twice = output

    twice = ""

    @property
    def _table(self) -> str:
        return f"{self.first.beside(self.spec.embedding)}.weight"

    # Tensors.

    def _enter(self, ours: str, name: str, shape: Shape) -> None:
        self._add((ours,), Named((name,), shape))

    def _add(self, ours: tuple[str, ...], stored: Named) -> None:
        for name in stored.names:
            if name not in self.tensors.infos:
                raise DataError(f"{self.tensors.name}: there is no tensor {name}")
            if stored.shape is not None:
                of = f"{self.tensors.where(name)}, tensor {name}"
                require_shape(of, [*self.tensors.infos[name].shape], [*stored.shape])
        self.entries.append((ours, stored))

    def _account(self, found: ModelMap) -> None:
        """Every tensor is read, or changes nothing.

        Raises:
            DataError: one is neither.
        """
        used = {*found.tensors.names, self.twice}
        patterns = [*self.spec.rest]
        for site in found.sites:
            place = self.checkpoint.place(site)
            used |= LayerReader(place, self.tensors).map.names
            used |= {*stored_angles(place)}
            patterns += [place.within(known) for known in place.spec.known]
        strange = [
            name
            for name in self.tensors.infos
            if name not in used and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if strange:
            what = "tensor" if len(strange) == 1 else "tensors"
            self._refuse(f"{what} {listed(strange)}: {self.checkpoint.family.name} does not know what for")

    # What is refused.

    def _number(self, expression: str, place: Place | None = None) -> float:
        """A factor; 1 for an empty expression."""
        return (self.first if place is None else place).number(expression) if expression else 1.0

    def _refuse(self, why: str) -> Never:
        raise DataError(f"{self.checkpoint.name}: {why}")

    def _refuse_field(self, names: list[str]) -> Never:
        raise DataError(
            f"{self.settings.where}: it is not known what {listed(names)} changes in a model of "
            f"{self.checkpoint.family.name}: delete what changes nothing"
        )
