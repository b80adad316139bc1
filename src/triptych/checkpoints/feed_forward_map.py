"""The feed-forward layer of a block, alone or as a mixture of experts, and where its tensors come from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from triptych.checkpoints.entries import Entry
from triptych.checkpoints.layer_map import tensor_names
from triptych.checkpoints.model_spec import ExpertsSpec, FeedForwardSpec
from triptych.checkpoints.place import Place
from triptych.checkpoints.tensor_maps import (
    Alternating,
    Halves,
    Named,
    Shape,
    StackRows,
    TensorMap,
    Transposed,
)
from triptych.errors import DataError
from triptych.models.architecture import Activation, ExpertsConfig, FeedForwardConfig
from triptych.storage.tensors import Tensors
from triptych.storage.untrusted import shown

# By their names in `transformers`. Those of one row are one function, computed by formulas that round apart.
ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
    "quick_gelu": "gelu_sigmoid",
    **dict.fromkeys(("silu", "swish"), "swish"),
    "relu": "relu",
    "relu2": "relu_squared",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}  # fmt: skip


def activation(place: Place, expression: str) -> Activation:
    """An activation by the name that the configuration has for it."""
    name = place.settings.word(expression, place.layer)
    if name is None or name not in ACTIVATIONS:
        raise DataError(
            f"{place.settings.where}: activation {shown(name)!r} is not one of {', '.join(ACTIVATIONS)}: "
            "the model cannot be run"
        )
    return ACTIVATIONS[name]


@final
class FeedForwardMap:
    """A block's feed-forward layer as the first fitting entry of the family has it.

    Attributes:
        config: what it is made of.
        entries: which of our tensors come from which stored ones.
    """

    config: FeedForwardConfig | ExpertsConfig

    def __init__(
        self, ours: str, place: Place, specs: Sequence[FeedForwardSpec], d_model: int, tensors: Tensors
    ) -> None:
        self.place, self.d_model, self.tensors = place, d_model, tensors
        self.entries = list[Entry]()
        spec = next(
            (spec for spec in specs if place.holds(spec.when) and self._is_there(spec, tensors)), None
        )
        if spec is None:
            raise DataError(
                f"{tensors.name}: the feed-forward layer of block {place.layer} is of no kind that is known"
            )
        self.config = (
            self._layer(ours, spec) if spec.experts is None else self._mixture(ours, spec, spec.experts)
        )

    def _is_there(self, spec: FeedForwardSpec, tensors: Tensors) -> bool:
        return not spec.there or self._name(spec, spec.there) in tensors.infos

    def _name(self, spec: FeedForwardSpec, name: str) -> str:
        return self.place.beside(f"{spec.at}.{name}", expert=0)

    def _config(self, spec: FeedForwardSpec) -> FeedForwardConfig:
        place, bias = self.place, self.place.holds(spec.bias)
        return FeedForwardConfig(
            place.count(spec.size),
            activation(place, spec.activation),
            bool(spec.gate or spec.fused),
            bias,
            place.holds(spec.out_bias) if spec.out_bias else bias,
            beta=place.number(spec.beta) if spec.beta else 1.0,
            offset=spec.offset,
            limit=place.optional_number(spec.limit),
        )

    def _layer(self, ours: str, spec: FeedForwardSpec) -> FeedForwardConfig:
        config = self._config(spec)
        self._maps(ours, spec, config, None)
        return config

    def _mixture(self, ours: str, spec: FeedForwardSpec, experts: ExpertsSpec) -> ExpertsConfig:
        place, expert = self.place, self._config(spec)
        count = place.count(experts.number)
        self._maps(ours, spec, expert, count)
        router, router_bias = tensor_names(self._name(spec, experts.router))
        self._add((f"{ours}.router.weight",), (router,), (count, self.d_model))
        if experts.router_bias:
            self._add((f"{ours}.router.bias",), (router_bias,), (count,))
        if experts.correction:
            self._add((f"{ours}.router.correction",), (self._name(spec, experts.correction),), (count,))
        shared = experts.shared if experts.shared and place.holds(experts.shared.when) else None
        grouped = bool(experts.groups) and place.holds(experts.grouped)
        try:
            return ExpertsConfig(
                expert,
                count,
                place.count(experts.top),
                experts.scores,
                place.holds(experts.normalised),
                experts.min_sum,
                place.number(experts.times) if experts.times else 1.0,
                experts.scale_input,
                experts.router_bias,
                bool(experts.correction),
                place.count(experts.groups) if grouped else 1,
                place.count(experts.top_groups) if grouped else 1,
                experts.group_score,
                place.number(experts.threshold) if experts.threshold else 0.0,
                None if shared is None else self._layer(f"{ours}.shared", shared),
            )
        except ValueError as error:
            raise DataError(f"{place.settings.where}: {error}") from None

    def _maps(self, ours: str, spec: FeedForwardSpec, config: FeedForwardConfig, experts: int | None) -> None:
        """The maps of a layer, or of all of its experts."""
        size, d_model = config.d_ff, self.d_model
        if spec.fused:
            split = (Alternating() if spec.alternating else Halves()).along(0 if experts is None else 1)
            parts = tuple(spec.fused.split())
            self._map(ours, parts, spec, spec.inner, (2 * size, d_model), config.bias, experts, (split,))
        else:
            self._map(ours, ("inner",), spec, spec.inner, (size, d_model), config.bias, experts)
            if spec.gate:
                self._map(ours, ("gate",), spec, spec.gate, (size, d_model), config.bias, experts)
        self._map(ours, ("outer",), spec, spec.outer, (d_model, size), config.out_bias, experts)

    def _map(
        self,
        ours: str,
        parts: tuple[str, ...],
        spec: FeedForwardSpec,
        module: str,
        shape: tuple[int, int],
        has_bias: bool,
        experts: int | None,
        steps: tuple[TensorMap, ...] = (),
    ) -> None:
        single = "{expert}" in module or experts is None
        count: tuple[int, ...] = () if single or experts is None else (experts,)
        turned: tuple[TensorMap, ...] = (Transposed(),) if spec.transposed else ()
        stacked: tuple[TensorMap, ...] = (StackRows(),) if "{expert}" in module else ()
        weights, biases = zip(*self._names(spec, module, experts), strict=True)
        stored = shape[::-1] if spec.transposed else shape
        self._add(self._parts(ours, parts, "weight"), weights, (*count, *stored), (*turned, *stacked, *steps))
        if has_bias:
            self._add(self._parts(ours, parts, "bias"), biases, (*count, shape[0]), (*stacked, *steps))

    def _parts(self, ours: str, parts: tuple[str, ...], kind: str) -> tuple[str, ...]:
        return tuple(f"{ours}.{part}.{kind}" for part in parts)

    def _names(self, spec: FeedForwardSpec, module: str, experts: int | None) -> Iterator[tuple[str, str]]:
        """Names of weight and bias, of every expert where each has its own.

        Up to the first that is not there: a configuration may say any number.
        """
        for number in range(experts or 1) if "{expert}" in module else (0,):
            name = self.place.beside(f"{spec.at}.{module}", expert=number)
            names = (name, f"{name}_bias") if spec.bare else tensor_names(name)
            yield names
            if names[0] not in self.tensors.infos:
                return

    def _add(
        self, ours: tuple[str, ...], names: tuple[str, ...], shape: Shape, steps: tuple[TensorMap, ...] = ()
    ) -> None:
        self.entries.append((ours, Named(names, shape, steps)))
