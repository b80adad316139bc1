"""The head of a model, from the stream to logits, and where its tensors come from."""

from typing import final

from triptych.checkpoints.entries import Entries, above
from triptych.checkpoints.feed_forward_map import activation
from triptych.checkpoints.model_spec import HeadSpec, ModelSpec
from triptych.checkpoints.place import Place
from triptych.checkpoints.tensor_maps import Named, OnlyRow
from triptych.models.architecture import HeadConfig


@final
class HeadMap:
    """A model's head as the family has it.

    Attributes:
        config: what it is made of; None if the model ends with the stream.
    """

    config: HeadConfig | None

    def __init__(
        self, place: Place, spec: ModelSpec, entries: Entries, d_model: int, table: str, table_width: int
    ) -> None:
        self.place, self.spec, self.entries, self.d_model = place, spec, entries, d_model
        self.table, self.table_width = table, table_width
        self.settings, self.infos = place.settings, entries.tensors.infos
        self.config = self._of_decoder(spec.head) if spec.kind == "decoder" else self._of_encoder()

    def _of_decoder(self, spec: HeadSpec) -> HeadConfig:
        vocab_size = self.infos[self.table].shape[0]
        module, width, transform = self._above(spec.at), self.d_model, self._above(spec.transform)
        has_map = bool(spec.transform) and f"{transform}.weight" in self.infos
        if has_map:
            width = self._map(transform)
        tied, bias = self.settings.holds(spec.tied), self.settings.holds(spec.bias)
        if spec.tied_if_missing:
            tied = f"{module}.weight" not in self.infos
        if tied and width != self.table_width:
            self.entries.refuse(
                f"{self.table} is {self.table_width} wide, and what reads it as output table {width}"
            )
        self._output(module, vocab_size, width, tied=tied)
        names = [name for name in map(self._above, spec.bias_at) if name in self.infos]
        if names:
            bias = True
            self.entries.add(("head.output.bias",), Named((names[0],), (1, vocab_size), (OnlyRow(),)))
        elif bias:
            self.entries.enter("head.output.bias", f"{module}.bias", (vocab_size,))
        over_root = self.place.factor(self.place.chosen(spec.over_root))
        cap = self.settings.value(spec.soft_cap) if spec.soft_cap else None
        return HeadConfig(
            tied=tied,
            bias=bias,
            width=width if has_map else None,
            transform=has_map,
            map_bias=not has_map,
            scale=self.place.factor(spec.scale) * over_root**-0.5,
            soft_cap=None if cap is None else self.settings.number(spec.soft_cap),
        )

    def _of_encoder(self) -> HeadConfig | None:
        for spec in self.spec.heads:
            first = self._above(spec.transform or spec.at)
            if self.settings.holds(spec.when) and f"{first}.weight" in self.infos:
                return self._with_transform(spec, first if spec.transform else "")
        return None

    def _with_transform(self, spec: HeadSpec, transform: str) -> HeadConfig:
        place, width, map_bias = self.place, self.d_model, False
        if transform:
            width, map_bias = self._map(transform), place.holds(spec.map_bias)
        if map_bias:
            self.entries.enter("head.map.bias", f"{transform}.bias", (width,))
        norm = place.first(spec.norm)
        outputs = self.settings.count(spec.outputs) if spec.outputs else None
        count, output = outputs or self.infos[self.table].shape[0], self._above(spec.at)
        tied = outputs is None and self.settings.holds(spec.tied)
        if tied and width != self.table_width:
            self.entries.refuse(
                f"{transform}.weight leads to {width} channels, and {self.table} has {self.table_width}"
            )
        self._output(output, count, width, tied=tied)
        return HeadConfig(
            tied=tied,
            bias=self._output_bias(spec, output, count, tied=tied),
            width=width,
            transform=bool(transform),
            outputs=outputs,
            map_bias=map_bias,
            activation=activation(place, spec.activation) if spec.activation else None,
            norm=None
            if norm is None
            else self.entries.norm("head.norm", place, norm, self._above(norm.at), width, self.spec.eps),
        )

    def _map(self, transform: str) -> int:
        """Enter the map before the output; the width that it leads to."""
        width = self.infos[f"{transform}.weight"].shape[0]
        self.entries.enter("head.map.weight", f"{transform}.weight", (width, self.d_model))
        return width

    def _output(self, module: str, count: int, width: int, *, tied: bool) -> None:
        """Enter the output map; a tied one may be in the file as well, if it is the table."""
        if tied:
            why = f", though {self.spec.head.tied} says so"
            self.entries.require_copy(f"{module}.weight", self.table, why)
        else:
            self.entries.enter("head.output.weight", f"{module}.weight", (count, width))

    def _output_bias(self, spec: HeadSpec, output: str, count: int, *, tied: bool) -> bool:
        """Enter the bias of the output, which files may have under two names; one if tied."""
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
                self.entries.require_copy(other, found[0], f": both are the bias of {output}")
            else:
                self.entries.copies[other] = found[0]
        return True

    def _above(self, name: str) -> str:
        return above(self.place.prefix, name, self.entries.tensors)
