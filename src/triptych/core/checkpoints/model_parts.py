"""Configurations and tensors of a model's norms, feed-forward layers and head."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Never, cast, final, get_args

import torch

from triptych.core.checkpoints.layer_map import (
    ONLY_ROW,
    STACK_ROWS,
    TRANSPOSED,
    Named,
    Shape,
    TensorMap,
    alternating,
    halves,
    norm_tensors,
    tensor_names,
)
from triptych.core.checkpoints.reading import require_shape
from triptych.core.checkpoints.specs import (
    ExpertsSpec,
    FeedForwardSpec,
    HeadSpec,
    ModelSpec,
    NormSpec,
    TaskHeadSpec,
    TaskMapSpec,
)
from triptych.core.checkpoints.stored_layers import Place
from triptych.core.models.architecture import (
    EXPERTS_NORMS,
    Activation,
    ExpertsConfig,
    FeedForwardConfig,
    HeadConfig,
    NormConfig,
    Pooling,
    TaskHeadConfig,
    TaskMapConfig,
)
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import Tensors
from triptych.errors import DataError
from triptych.untrusted import shown

Entry = tuple[tuple[str, ...], Named]


@final
class Entries:
    """The entries of a model's tensors, collected part by part."""

    def __init__(self, name: str, tensors: Tensors) -> None:
        self.name = name
        self.tensors = tensors
        self.found: list[Entry] = []  # names in the model, with the stored tensors
        self.copies: dict[
            str, str
        ] = {}  # duplicate stored tensors, with the name of the original

    def enter(self, ours: str, name: str, shape: Shape) -> None:
        """Enter a tensor stored without conversion; raise DataError if it is missing or of another shape."""
        self.add((ours,), Named((name,), shape))

    def add(
        self, ours: tuple[str, ...], stored: Named
    ) -> None:  # enter stored tensors with conversions
        for name in stored.names:
            if name not in self.tensors.infos:
                raise DataError(
                    f"{self.tensors.name}: there is no tensor {name}; fetch the checkpoint again"
                )
            if stored.shape is not None:
                of = f"{self.tensors.where(name)}, tensor {name}"
                require_shape(of, [*self.tensors.infos[name].shape], [*stored.shape])
        self.found.append((ours, stored))

    def norm(
        self, ours: str, place: Place, norm: NormSpec, module: str, width: int, eps: str
    ) -> NormConfig:
        """Enter a norm; a LayerNorm has a bias if the file has its tensor, and else a bias of 0."""
        weight, bias = norm_tensors(self.tensors, module)
        has_bias = norm.kind == "layer" and bias in self.tensors.infos
        if norm.weight:
            self.enter(f"{ours}.weight", weight, (width,))
        if has_bias:
            self.enter(f"{ours}.bias", bias, (width,))
        return NormConfig(
            norm.kind, place.number(norm.eps or eps), norm.weight, has_bias, norm.offset
        )

    def require_copy(self, name: str, original: str, why: str) -> None:
        """Enter a duplicate of a tensor, if the file has it; refuse it if its values differ."""
        if name not in self.tensors.infos or name == original:
            return
        if not self.are_equal(name, original):
            self.refuse(
                f"{name} is not {original}{why}: set tie_word_embeddings to false in config.json, as "
                "transformers runs two tensors that differ"
            )
        self.copies[name] = original

    def are_equal(self, name: str, other: str) -> bool:
        """Return True if two stored tensors have the same values."""
        return torch.equal(self.tensors.read(name), self.tensors.read(other))

    def refuse(self, why: str) -> Never:
        raise DataError(f"{self.name}: {why}")


def above(prefix: str, name: str, tensors: Tensors) -> str:
    """Return the name of a module or tensor below the longest leading part of a prefix with such a name."""
    outer = prefix.split(".")[:-1]
    names = [
        "".join(f"{part}." for part in outer[:count]) + name
        for count in range(len(outer), -1, -1)
    ]
    infos = tensors.infos
    return next(
        (found for found in names if found in infos or f"{found}.weight" in infos),
        names[-1],
    )


# Activations by their names in `transformers`. Names in a row are one function, rounded differently.
ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
    "quick_gelu": "gelu_sigmoid",
    **dict.fromkeys(("silu", "swish"), "swish"),
    "relu": "relu",
    "relu2": "relu_squared",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "xielu": "xielu",
}  # fmt: skip


# Heads of tasks, instead of a map to tokens or as a second head: the ends of class names after the last "For"
# (RoFormerForMultipleChoice).
_HEADS = {
    "task": r".*For(\w*Classification|QuestionAnswering\w*|MultipleChoice|NextSentencePrediction)",
    "second": r".*(PreTraining|DoubleHeads)(?:Model)?",
}
# Ends of class names with "Model" of classes with a head.
_CLASSES_WITH_A_HEAD = ("LMHeadModel", "DoubleHeadsModel", "MTModel")
_OF_XIELU = (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))


def class_name(settings: Settings) -> str:
    """Return the name of a checkpoint's class in `transformers`; "" if the configuration omits it."""
    named = settings.outermost.value("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def task_of_class(settings: Settings, head: str = "task") -> str:
    """Return what follows "For" in the name of a class with a head for a task; "" for other classes."""
    found = re.fullmatch(_HEADS[head], class_name(settings))
    return found[1] if found else ""


def activation(place: Place, expression: str) -> Activation:
    """Return the activation for a name in the configuration."""
    name = place.settings.word(expression, place.layer)
    if name is None or name not in ACTIVATIONS:
        raise DataError(
            f"{place.settings.where}: activation {shown(name)!r} is not one of {', '.join(ACTIVATIONS)}: "
            "the model cannot be run"
        )
    return ACTIVATIONS[name]


@final
class FeedForwardMap:
    """A block's feed-forward layer, described by the first fitting entry of the family."""

    config: FeedForwardConfig | ExpertsConfig

    def __init__(
        self,
        ours: str,
        place: Place,
        specs: Sequence[FeedForwardSpec],
        entries: Entries,
        d_model: int,
    ) -> None:
        self.place = place
        self.entries = entries
        self.d_model = d_model
        self.tensors = tensors = entries.tensors
        # A condition on the configuration, or a tensor of the file, selects the entry.
        fitting = (spec for spec in specs if place.holds(spec.when))
        named = (
            s for s in fitting if not s.there or self._name(s, s.there) in tensors.infos
        )
        spec = next(named, None)
        if spec is None:
            raise DataError(
                f"{tensors.name}: the feed-forward layer of block {place.layer} is of no kind that is known"
            )
        self.config = (
            self._layer(ours, spec)
            if spec.experts is None
            else self._mixture(ours, spec, spec.experts)
        )

    def _name(self, spec: FeedForwardSpec, name: str) -> str:
        return self.place.beside(f"{spec.at}.{name}", expert=0)

    def _config(self, spec: FeedForwardSpec) -> FeedForwardConfig:
        place = self.place
        bias = self.place.holds(spec.bias)
        outer = self.tensors.infos.get(f"{self._name(spec, spec.outer)}.weight")
        return FeedForwardConfig(
            outer.shape[-1]
            if outer is not None and not spec.size
            else place.count(spec.size),
            activation(place, spec.activation),
            bool(spec.gate or spec.fused),
            bias,
            place.holds(spec.out_bias) if spec.out_bias else bias,
            beta=place.number(spec.beta) if spec.beta else 1.0,
            offset=spec.offset,
            limit=place.optional_number(spec.limit),
            sparsity=self._share(spec.sparsity),
        )

    def _share(self, expression: str) -> float:
        found = self.place.optional_number(expression) or 0.0
        if not 0 <= found < 1:
            self.entries.refuse(
                f"{expression} is {found}: a share from 0 to below 1 is needed"
            )
        return found

    def _layer(self, ours: str, spec: FeedForwardSpec) -> FeedForwardConfig:
        config = self._config(spec)
        for name, shape in _OF_XIELU if config.activation == "xielu" else ():
            self._add(
                (f"{ours}.activation.{name}",),
                (self._name(spec, f"act_fn.{name}"),),
                shape,
            )
        self._maps(ours, spec, config, None)
        return config

    def _mixture(
        self, ours: str, spec: FeedForwardSpec, experts: ExpertsSpec
    ) -> ExpertsConfig:
        place = self.place
        expert = self._config(spec)
        count = place.count(experts.number)
        self._maps(ours, spec, expert, count)
        router, router_bias = tensor_names(self._name(spec, experts.router))
        self._add((f"{ours}.router.weight",), (router,), (count, self.d_model))
        if experts.router_bias:
            self._add((f"{ours}.router.bias",), (router_bias,), (count,))
        if experts.correction:
            self._correction(
                f"{ours}.router.correction", self._name(spec, experts.correction), count
            )
        if experts.expert_scale:
            self._add(
                (f"{ours}.router.expert_scale",),
                (self._name(spec, experts.expert_scale),),
                (count,),
            )
        if experts.shared_gate:
            self._add(
                (f"{ours}.shared_gate",),
                (self._name(spec, experts.shared_gate),),
                (1, self.d_model),
            )
        for part, name in zip(EXPERTS_NORMS, experts.norms, strict=False):
            self._add(
                (f"{ours}.norms.{part}.weight",), (place.beside(name),), (self.d_model,)
            )
        # Shared experts and groups are optional within a family.
        shared = (
            experts.shared
            if experts.shared and place.holds(experts.shared.when)
            else None
        )
        grouped = bool(experts.groups) and place.holds(experts.grouped)
        try:
            return ExpertsConfig(
                expert,
                count,
                place.count(experts.top),
                experts.scores,
                place.holds(experts.normalised),
                place.number(experts.min_sum),
                place.number(experts.times) if experts.times else 1.0,
                experts.scale_input,
                experts.router_bias,
                bool(experts.correction),
                place.count(experts.groups) if grouped else 1,
                place.count(experts.top_groups) if grouped else 1,
                experts.group_score,
                place.number(experts.threshold) if experts.threshold else 0.0,
                None if shared is None else self._layer(f"{ours}.shared", shared),
                place.number(experts.eps) if experts.norms else None,
                bool(experts.expert_scale),
                bool(experts.shared_gate),
            )
        except ValueError as error:
            raise DataError(f"{place.settings.where}: {error}") from None

    def _correction(self, ours: str, name: str, count: int) -> None:
        """Enter a value for each expert, stored as a vector or as a matrix with one row."""
        info = self.tensors.infos.get(name)
        if info is not None and len(info.shape) == 2:
            self._add((ours,), (name,), (1, count), (ONLY_ROW,))
        else:
            self._add((ours,), (name,), (count,))

    def _maps(
        self,
        ours: str,
        spec: FeedForwardSpec,
        config: FeedForwardConfig,
        experts: int | None,
    ) -> None:
        size = config.d_ff
        d_model = self.d_model
        # A fused tensor is split along its rows, the second dimension of stacked experts.
        if spec.fused:
            split = (alternating if spec.alternating else halves)(
                0 if experts is None else 1
            )
            parts = tuple(spec.fused.split())
            self._map(
                ours,
                parts,
                spec,
                spec.inner,
                (2 * size, d_model),
                config.bias,
                experts,
                (split,),
            )
        else:
            self._map(
                ours,
                ("inner",),
                spec,
                spec.inner,
                (size, d_model),
                config.bias,
                experts,
            )
            if spec.gate:
                self._map(
                    ours,
                    ("gate",),
                    spec,
                    spec.gate,
                    (size, d_model),
                    config.bias,
                    experts,
                )
        self._map(
            ours,
            ("outer",),
            spec,
            spec.outer,
            (d_model, size),
            config.out_bias,
            experts,
        )

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
        # The order of the steps: transpose every tensor, stack experts, then split fused rows.
        single = "{expert}" in module or experts is None
        count: tuple[int, ...] = () if single or experts is None else (experts,)
        turned: tuple[TensorMap, ...] = (TRANSPOSED,) if spec.transposed else ()
        stacked: tuple[TensorMap, ...] = (STACK_ROWS,) if "{expert}" in module else ()
        weights, biases = zip(*self._names(spec, module, experts), strict=True)
        stored = shape[::-1] if spec.transposed else shape
        named = tuple(f"{ours}.{part}" for part in parts)
        of_weights = tuple(f"{name}.weight" for name in named)
        self._add(of_weights, weights, (*count, *stored), (*turned, *stacked, *steps))
        if has_bias:
            of_biases = tuple(f"{name}.bias" for name in named)
            self._add(of_biases, biases, (*count, shape[0]), (*stacked, *steps))

    def _names(
        self, spec: FeedForwardSpec, module: str, experts: int | None
    ) -> Iterator[tuple[str, str]]:
        """Yield the names of weight and bias: once, or for every expert up to the first missing weight."""
        for number in range(experts or 1) if "{expert}" in module else (0,):
            name = self.place.beside(f"{spec.at}.{module}", expert=number)
            names = (name, f"{name}_bias") if spec.bare else tensor_names(name)
            yield names
            if names[0] not in self.tensors.infos:
                return

    def _add(
        self,
        ours: tuple[str, ...],
        names: tuple[str, ...],
        shape: Shape,
        steps: tuple[TensorMap, ...] = (),
    ) -> None:
        self.entries.add(ours, Named(names, shape, steps))


@final
class OutputHeadMap:
    """A model's head, described by its family."""

    config: HeadConfig | None  # None if the model ends with the stream

    def __init__(
        self,
        place: Place,
        spec: ModelSpec,
        entries: Entries,
        d_model: int,
        table: str,
        table_width: int,
    ) -> None:
        self.place = place
        self.spec = spec
        self.entries = entries
        self.d_model = d_model
        self.table = table
        self.table_width = table_width
        self.settings = place.settings
        self.infos = entries.tensors.infos
        heads = (
            filter(self._is_there, spec.heads)
            if spec.kind == "encoder"
            else [spec.head]
        )
        self.config = (
            None if self._is_left_out() else next(map(self._config, heads), None)
        )

    def _is_left_out(self) -> bool:
        """Return True for a class without a map to tokens, such as a decoder without an output table."""
        spec = self.spec.head
        if task_of_class(self.settings):
            return True
        if self.spec.kind == "encoder" or self._is_tied(spec):
            return False
        # A class with a head has a file with its table; a file without it is incomplete.
        name = class_name(self.settings)
        has_head = not name.endswith("Model") or name.endswith(_CLASSES_WITH_A_HEAD)
        return not has_head and f"{self._above(spec.at)}.weight" not in self.infos

    def _is_tied(self, spec: HeadSpec) -> bool:
        own = f"{self._above(spec.at)}.weight"
        if spec.outputs:  # another number of outputs than tokens
            return False
        if own not in self.infos:
            return spec.tied_if_missing or self.settings.holds(spec.tied)
        if spec.tied_if_missing or not self.settings.holds(spec.tied):
            return False
        # As in `transformers`, two tables with different values are both used, whatever the flag.
        return own == self.table or self.entries.are_equal(own, self.table)

    def _is_there(self, spec: HeadSpec) -> bool:
        first = self._above(spec.transform or spec.at)
        return self.settings.holds(spec.when) and f"{first}.weight" in self.infos

    def _config(self, spec: HeadSpec) -> HeadConfig:
        place = self.place
        settings = self.settings
        infos = self.infos
        enter = self.entries.enter
        module = self._above(spec.at)
        transform = self._above(spec.transform)
        norm = place.first(spec.norm)
        has_map = bool(spec.transform) and f"{transform}.weight" in infos
        width = self.d_model
        map_bias = has_map and place.holds(spec.map_bias)
        if has_map:
            width = infos[f"{transform}.weight"].shape[0]
            enter("head.map.weight", f"{transform}.weight", (width, self.d_model))
        if map_bias:
            enter("head.map.bias", f"{transform}.bias", (width,))
        # A head with its own number of outputs cannot be tied to the table of tokens.
        outputs = settings.count(spec.outputs) if spec.outputs else None
        count = outputs or infos[self.table].shape[0]
        tied = self._is_tied(spec)
        if tied and width != self.table_width:
            self.entries.refuse(
                f"{self.table} is {self.table_width} wide, and what reads it as output table {width}"
            )
        if tied:  # the file may contain the output map as well
            self.entries.require_copy(f"{module}.weight", self.table, "")
        else:
            enter("head.output.weight", f"{module}.weight", (count, width))
        cap = settings.value(spec.soft_cap) if spec.soft_cap else None
        return HeadConfig(
            tied=tied,
            bias=self._output_bias(spec, module, count, tied=tied),
            width=width if has_map else None,
            transform=has_map,
            outputs=outputs,
            map_bias=map_bias or not has_map,
            activation=activation(place, spec.activation) if spec.activation else None,
            norm=norm
            and self.entries.norm(
                "head.norm", place, norm, self._above(norm.at), width, self.spec.eps
            ),
            scale=place.factor(spec.scale)
            * place.factor(place.chosen(spec.over_root)) ** -0.5,
            soft_cap=None if cap is None else settings.number(spec.soft_cap),
        )

    def _output_bias(
        self, spec: HeadSpec, output: str, count: int, *, tied: bool
    ) -> bool:
        """Enter the output bias, stored under one name or two; return True if there is a bias."""
        # A decoder's bias is a matrix with one row (BART's `final_logits_bias`).
        rows = [name for name in map(self._above, spec.bias_at) if name in self.infos]
        if rows and self.spec.kind == "decoder":
            self.entries.add(
                ("head.output.bias",), Named((rows[0],), (1, count), (ONLY_ROW,))
            )
            return True
        if not self.settings.holds(spec.bias):
            return False
        own = f"{output}.bias"
        names = [self._above(name) for name in spec.bias_at] or [own]
        if not tied and own in self.infos:
            names = [own, *(name for name in names if name != own)]
        found = [name for name in names if name in self.infos] or names[:1]
        self.entries.enter("head.output.bias", found[0], (count,))
        for other in found[1:]:
            if tied:
                self.entries.require_copy(
                    other, found[0], f": both are the bias of {output}"
                )
            else:
                self.entries.copies[other] = found[0]
        return True

    def _above(self, name: str) -> str:
        return above(self.place.prefix, name, self.entries.tensors)


@final
class TaskHeadMap:
    """The head of a task, described by the first fitting entry of the family."""

    config: TaskHeadConfig | None  # None without a head that the family describes

    def __init__(
        self, place: Place, spec: ModelSpec, entries: Entries, d_model: int, ours: str
    ) -> None:
        self.place = place
        self.spec = spec
        self.entries = entries
        self.d_model = d_model
        self.ours = ours
        task = task_of_class(place.settings, ours)
        fitting = (
            own for own in spec.tasks if task in own.classes and self._is_there(own)
        )
        self.config = next(map(self._config, fitting), None)

    def _is_there(self, spec: TaskHeadSpec) -> bool:
        infos = self.entries.tensors.infos
        weights = [f"{self._above(own.at)}.weight" for own in spec.maps]
        return self.place.holds(spec.when) and all(name in infos for name in weights)

    def _config(self, spec: TaskHeadSpec) -> TaskHeadConfig:
        settings = self.place.settings
        pooling = settings.word(self.place.chosen(spec.pooling) or "'each'")
        if pooling not in get_args(Pooling):
            self.entries.refuse(
                f"its head reads the tokens of kind {shown(pooling)}, which is not known"
            )
        maps = list[TaskMapConfig]()
        for own in spec.maps:
            maps.append(
                self._map(len(maps), own, maps[-1].outputs if maps else self.d_model)
            )
        token = "eos_token_id" if pooling == "end" else "pad_token_id"
        said = settings.value(token) if pooling in ("last", "next", "end") else None
        read = said if isinstance(said, int) else None
        if pooling == "end" and read is None:
            self.entries.refuse(
                f"its head reads the end token, and {settings.where} has no eos_token_id"
            )
        labels = spec.labels or _labels(settings, maps[-1].outputs)
        kind = settings.outermost.value("problem_type")
        several = kind == "multi_label_classification"
        wraps = self.place.holds(spec.wraps)
        return TaskHeadConfig(
            cast(Pooling, pooling), (*maps,), labels, read, several, wraps
        )

    def _map(self, number: int, spec: TaskMapSpec, inputs: int) -> TaskMapConfig:
        module = self._above(spec.at)
        infos = self.entries.tensors.infos
        outputs = infos[f"{module}.weight"].shape[0]
        has_bias = f"{module}.bias" in infos
        ours = f"{self.ours}.maps.{number}"
        self.entries.enter(f"{ours}.weight", f"{module}.weight", (outputs, inputs))
        if has_bias:
            self.entries.enter(f"{ours}.bias", f"{module}.bias", (outputs,))
        norm = self.place.first(spec.norm)
        return TaskMapConfig(
            outputs,
            has_bias,
            activation(self.place, spec.activation) if spec.activation else None,
            norm
            and self.entries.norm(
                f"{self.ours}.norms.{number}",
                self.place,
                norm,
                self._above(norm.at),
                outputs,
                self.spec.eps,
            ),
        )

    def _above(self, name: str) -> str:
        return above(self.place.prefix, name, self.entries.tensors)


def _labels(settings: Settings, count: int) -> tuple[str, ...]:
    """Return the names of classes in `id2label`, or else names by number as in `transformers`."""
    said = settings.outermost.value("id2label")
    named = said if isinstance(said, dict) else {}
    return tuple(
        str(named.get(str(number), f"LABEL_{number}")) for number in range(count)
    )
