"""Certificates: the claims of a rewrite, verifiable by anyone.

`certificate.json` lists the hash of every tensor, every step with its checks and bounds, and the errors
measured on the saved weights. Its last entry is a hash of all other entries.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any, ClassVar, final

from pydantic import Field, ValidationError, model_serializer

from triptych.core.algebra.cost import WritingCost
from triptych.core.algebra.rewritten import TIERS, Tier
from triptych.core.checkpoints.stored_layers import AttentionLayer
from triptych.core.storage import CERTIFICATE
from triptych.errors import DataError, UsageError, near_path
from triptych.printable import printable, table_html
from triptych.rewriting.driver import StepOutcome
from triptych.rewriting.outcome import EndToEnd as EndToEnd
from triptych.rewriting.outcome import (
    FrozenRecord,
    moved_in_words,
    outcome,
    outcome_in_words,
)
from triptych.untrusted import read_json

MODEL_CARD = "README.md"
CARD_HEADING = "## Rewritten attention"
FORMAT = 1
RANDOM_TOKENS = "random tokens"


@final
class Cost(FrozenRecord):
    """The cost of the weights of an attention layer, and of all layers sharing them.

    Attributes:
        parameters: number of parameters, biases included.
        flops_per_token: operations that make queries, keys, values and output of one token.
        kv_bytes_per_token: bytes cached per token while decoding, in the checkpoint's dtype; 0 for encoders.
    """

    parameters: int
    flops_per_token: int
    kv_bytes_per_token: int

    @classmethod
    def from_writing(cls, cost: WritingCost, layer: AttentionLayer) -> "Cost":
        """Convert the cost of a layer's maps; layers sharing maps each compute and cache."""
        uses = len(layer.site.numbers)
        return cls(
            parameters=cost.parameters,
            flops_per_token=cost.token_flops * uses,
            kv_bytes_per_token=cost.cached_numbers * layer.cache_bytes * uses,
        )

    def plus(self, other: "Cost") -> "Cost":
        return Cost(
            parameters=self.parameters + other.parameters,
            flops_per_token=self.flops_per_token + other.flops_per_token,
            kv_bytes_per_token=self.kv_bytes_per_token + other.kv_bytes_per_token,
        )


@final
class StepRecord(FrozenRecord):
    """One step of one layer.

    Attributes:
        rewrite: its name.
        tier: bit-exact, rounding-exact (equal in exact arithmetic) or bounded.
        checked: the checked preconditions.
        before: the cost of the layer's maps before the step, without padding; `after`: after it.
        choice: the rewrite's decision, with its figures.
        notes: other facts that a reader must know.
        bound: the largest Frobenius norm by which a form of a head moves; 0 if exact.
        error: largest relative mean square error of a head on the calibration text; None without a text.
        refused: reason why the step was skipped; "" if it was done.
    """

    rewrite: str
    tier: Tier | None = None
    checked: tuple[str, ...] = ()
    before: Cost | None = None
    after: Cost | None = None
    choice: str = ""
    notes: tuple[str, ...] = ()
    bound: float = 0.0
    error: float | None = None
    refused: str = ""

    @classmethod
    def from_outcome(cls, outcome: StepOutcome, layer: AttentionLayer) -> "StepRecord":
        """Convert the driver's outcome of a step."""
        if (record := outcome.record) is None:
            return cls(rewrite=outcome.step, refused=outcome.refused)
        return cls(
            rewrite=outcome.step,
            tier=record.tier,
            checked=record.checked,
            before=Cost.from_writing(record.before, layer),
            after=Cost.from_writing(record.after, layer),
            choice=record.choice,
            notes=record.notes,
            bound=record.bound,
            error=record.error,
        )


@final
class Measured(FrozenRecord):
    """Output differences of an attention layer, or of the maps that read a norm, on the probes.

    Outputs before and after are computed from the saved weights, in float64 and in the checkpoint's dtype.

    Attributes:
        worst_absolute: largest absolute difference in float64.
        relative: norm of the difference divided by the norm of the output.
        error_ratio: error of the rewritten layer divided by that of the original, both computed in the
            checkpoint's dtype and compared with the original in float64.
        score_bound: upper bound on the change of a score for all inputs that the norms before the layer can
            produce; None if only rounding differs, or if no bound is known.
        output_bound: the same for the output of a head with unchanged attention weights.
        no_bound: reason for a missing bound; "" with both bounds, or if only rounding differs.
    """

    worst_absolute: float
    relative: float
    error_ratio: float
    score_bound: float | None = None
    output_bound: float | None = None
    no_bound: str = ""


@final
class LayerRecord(FrozenRecord):
    """The weights of one attention layer, or of several that share them.

    Attributes:
        module: its name in the checkpoint.
        layers: numbers of the layers of the model that share these weights; left out of the file for a
            layer without shared weights.
        steps: the steps that were done or refused.
        heads: previous numbers of its heads, in their present order; None if all numbers are
            unchanged.
        measured: errors on the probes; None if the layer did not change.
        measured_on_text: errors on inputs of the original layer at some positions of the comparison text;
            None without a text.
    """

    module: str
    layers: tuple[int, ...] = ()
    steps: tuple[StepRecord, ...]
    heads: tuple[int, ...] | None = None
    measured: Measured | None = None
    measured_on_text: Measured | None = None

    @model_serializer(mode="wrap")
    def _leave_out_empty(
        self, write: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Omit entries missing in older certificates, so that these are read and written unchanged."""
        record = write(self)
        if not self.layers:
            record.pop("layers", None)
        if self.heads is None:
            record.pop("heads", None)
        return record

    @property
    def count(self) -> int:
        """Number of layers of the model with these weights."""
        return len(self.layers) or 1

    @property
    def changed(self) -> bool:
        """Return True if a step was done."""
        return any(not step.refused for step in self.steps)

    @property
    def took_up_norm(self) -> bool:
        """Return True if the maps have absorbed the norm before the layer."""
        return any(
            step.rewrite == "fold_norm" and not step.refused for step in self.steps
        )

    @property
    def tier(self) -> Tier:
        """The weakest tier of its steps."""
        return _weakest(self.steps)


@final
class NormRecord(FrozenRecord):
    """A norm read by maps outside the attention.

    Attributes:
        module: its name in the checkpoint, or "none" if it is unknown.
        maps: the modules outside the attention with its weight and bias absorbed.
        steps: the steps that were done or refused: fold_other_norms, and fold_norm if an attention layer
            reads it too.
        measured: errors of the outputs of these maps together; None without a change.
    """

    module: str
    maps: tuple[str, ...]
    steps: tuple[StepRecord, ...]
    measured: Measured | None = None
    count: ClassVar[int] = 1  # like layers

    @property
    def tier(self) -> Tier:
        """The weakest tier of its steps."""
        return _weakest(self.steps)


def _weakest(steps: Iterable[StepRecord]) -> Tier:
    done = [step.tier for step in steps if step.tier is not None]
    return max(done, key=TIERS.index, default="bit-exact")


@final
class TensorRecord(FrozenRecord):
    """Hashes of a tensor, read and written: sha256 over dtype, shape and bytes; None if it does not exist."""

    read: str | None
    written: str | None


@final
class Probes(FrozenRecord):
    """The random inputs of the layers' measurements.

    Attributes:
        count: number of sequences.
        length: positions per sequence.
        seed: seed of the inputs; they are normal and standardised at each position.
    """

    count: int
    length: int
    seed: int


@final
class Certificate(FrozenRecord):
    """The steps of a rewrite and their measurements.

    Attributes:
        format: version of this record.
        tool: the program that wrote it, with its version.
        source: the given name of the original checkpoint.
        family: the family of the checkpoint.
        dtype: dtype of its attention weights.
        settings: the fields of its configuration that changed.
        recipe: the requested steps.
        calibration: hash of the calibration text; None without a text.
        layers: one entry per attention layer.
        norms: norms read by maps outside the attention, if a step concerned them; otherwise left out.
        before: cost of the original attention layers; `after`: cost of the written layers with padding.
        unpadded: cost of the new maps without padding, each layer with widths of its own; None for a file
            without padding.
        tensors: every tensor read or written.
        files: sha256 of the other written files.
        left_out: files of the source excluded from the copy.
        probes: the random inputs of the layers' measurements.
        end_to_end: comparison of the whole models; None without a comparison (reason: `not_compared`).
        not_on_text: reason for missing measurements on inputs from the text; "" with them, or without a text.
        sha256: hash of all other entries.
    """

    format: int = FORMAT
    tool: str
    source: str
    family: str
    dtype: str
    settings: dict[str, Any]
    recipe: tuple[dict[str, Any], ...]
    calibration: str | None = None
    layers: tuple[LayerRecord, ...]
    norms: tuple[NormRecord, ...] = ()
    before: Cost
    after: Cost
    unpadded: Cost | None = None
    tensors: dict[str, TensorRecord]
    files: dict[str, str]
    left_out: tuple[str, ...] = ()
    probes: Probes
    end_to_end: EndToEnd | None = None
    not_compared: str = ""
    not_on_text: str = ""
    sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$")

    @property
    def tier(self) -> Tier:
        """The weakest tier of its layers and norms."""
        tiers = [layer.tier for layer in self.layers] + [
            norm.tier for norm in self.norms
        ]
        return max(tiers, key=TIERS.index, default="bit-exact")

    @property
    def outcome(self) -> str:
        """A sentence on the change of the whole model: no change, below 0.01 nats, noticeable or ruined."""
        return outcome_in_words(self.end_to_end, self.not_compared)

    @model_serializer(mode="wrap")
    def _leave_out_empty(
        self, write: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Omit entries missing in older certificates, so that these are read and written unchanged."""
        record = write(self)
        for name in ("norms", "unpadded"):
            if not getattr(self, name):
                record.pop(name, None)
        return record

    def __repr__(self) -> str:
        return in_lines(*self._shown())

    __str__ = __repr__  # pydantic's lists every field

    def _repr_html_(self) -> str:
        return table_html(*self._shown())

    def _shown(self) -> tuple[str, list[tuple[str, str]]]:
        rows = shown_rewrite((*self.layers, *self.norms), self.before, self.after)
        if self.end_to_end is not None:
            rows.insert(0, ("outcome", outcome(self.end_to_end)))
        if (found := self.end_to_end) is not None:
            rows.append(
                (
                    "whole models",
                    f"{'hidden states' if found.output == 'hidden states' else 'logits'} within "
                    f"{found.worst_logit:.3g} on {found.tokens:,} tokens",
                )
            )
        return f"Certificate {self.source}: {self.family}, {self.tier}", rows

    def sealed(self) -> "Certificate":
        """Return the certificate with the hash of all other entries."""
        return self.model_copy(
            update={"sha256": _seal(self.model_dump(mode="json", exclude={"sha256"}))}
        )

    def as_json(self) -> bytes:
        """Return the bytes of the file."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def in_lines(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a title and a line per row, each shortened to the width of a terminal."""
    return "\n".join(
        shorten(line, 100, placeholder=" …") for line in (title, *map(": ".join, rows))
    )


def shown_rewrite(
    parts: Sequence[LayerRecord | NormRecord], before: Cost, after: Cost
) -> list[tuple[str, str]]:
    """Summarise a rewrite in at most six rows: its steps, and the cost before and after."""
    names = list(
        dict.fromkeys(
            step.rewrite for step in chain.from_iterable(part.steps for part in parts)
        )
    )
    moved = sum(
        isinstance(part, LayerRecord) and part.heads is not None for part in parts
    )
    rows = []
    # A row is reserved for renumbered heads, if any.
    most = 3 if moved else 4
    for name in names[:most]:
        found = [
            (part.count, step)
            for part in parts
            for step in part.steps
            if step.rewrite == name
        ]
        done = [step for _, step in found if not step.refused]
        bound = max((step.bound for step in done), default=0.0)
        number = sum(count for count, step in found if not step.refused)
        total = sum(count for count, _ in found)
        said = f"{number} of {total}, {_weakest(done)}" if done else "refused"
        rows.append(
            (name, said + (f", forms move by at most {bound:.3g}" if bound else ""))
        )
    if len(names) > most:
        rows.append(("…", ", ".join(names[most:])))
    if moved:
        rows.append(
            (
                "renumbered",
                f"heads of {moved} layers have other numbers: layers[…].heads",
            )
        )
    return [*rows, ("attention", _said_costs("", before, after).strip())]


def said_layers(layers: Sequence[LayerRecord]) -> str:
    """Describe the number of attention layers, and of distinct weights if layers share them."""
    count = sum(layer.count for layer in layers)
    shared = (
        f" with the weights of {len(layers)}, each rewritten once"
        if count > len(layers)
        else ""
    )
    return f"{count} attention layer{'s' * (count != 1)}{shared}"


def _seal(record: dict[str, Any]) -> str:
    plain = json.dumps(
        record, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    # JSON can spell a lone surrogate, invalid in UTF-8; our writer never produces it.
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()


def read_certificate(path: Path) -> Certificate:
    """Read a certificate from its file or its folder."""
    folder = path
    path = path / CERTIFICATE if path.is_dir() else path
    if not folder.exists():
        raise UsageError(f"{folder} does not exist{near_path(folder)}")
    if not path.exists():
        raise UsageError(
            f"{folder}: it is no rewritten checkpoint: there is no {CERTIFICATE}"
        )
    if path.suffix != ".json":
        raise UsageError(
            f"{path} is no certificate: give a rewritten checkpoint or its {CERTIFICATE}"
        )
    record = read_json(path)
    if "format" not in record:
        raise UsageError(
            f"{path} is no certificate: give a rewritten checkpoint or its {CERTIFICATE}"
        )
    if record["format"] != FORMAT:
        raise DataError(
            f"{path}: format {record['format']!r}, but {FORMAT} is read: rewrite again"
        )
    try:
        found = Certificate.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path}: {where}: {first['msg']}") from None
    # Entries unknown to the writing version are omitted from either record.
    if found.model_dump(mode="json", exclude_unset=True) != record:
        raise DataError(
            f"{path}: it does not read back as it was written: it was edited"
        )
    if found.sha256 != _seal(
        {name: value for name, value in record.items() if name != "sha256"}
    ):
        raise DataError(
            f"{path}: its hash does not match: it was changed after it was written"
        )
    return found


_MEANING: dict[Tier, str] = {
    "bit-exact": "the same numbers in another order or place",
    "rounding-exact": "the same function, except for rounding of the saved numbers",
    "bounded": "another function; the first line says how far from the first",
}


def card(certificate: Certificate, folder: str = "path/to/this/folder") -> str:
    """Return the section of the model card about a rewrite."""
    paragraphs = [
        "\n".join(map(printable, lines))
        for lines in _card_paragraphs(certificate, folder)
    ]
    return "\n\n".join(paragraphs) + "\n"


def former_card(certificate: Certificate) -> str:
    """Return the section in the words of earlier versions, for checkpoints written by these."""
    found = card(certificate).replace(f"\n\n{_said_outcome(certificate)}", "", 1)
    for now, before in _FORMER_WORDS.items():
        found = found.replace(now, before, 1)
    return found


def _said_outcome(certificate: Certificate) -> str:
    return printable(f"**{certificate.outcome}**")


def _card_paragraphs(certificate: Certificate, folder: str) -> Iterator[list[str]]:
    """Yield the lines of each paragraph."""
    yield [CARD_HEADING]
    yield [_said_outcome(certificate)]
    maps = [
        *chain.from_iterable(
            norm.maps for norm in certificate.norms if norm.measured is not None
        )
    ]
    and_maps = (
        f" {len(maps)} maps outside it took up the norms that they read."
        if maps
        else ""
    )
    yield [
        f"The attention of this model was rewritten by {certificate.tool} from `{certificate.source}` "
        f"({certificate.family}).{and_maps} Nothing else was changed. "
        f"The rewrite is **{certificate.tier}: {_MEANING[certificate.tier]}**."
    ]
    lines: list[str] = []
    # A line per step: counts of layers and norms, with reasons of refusals.
    for name in dict.fromkeys(str(step["rewrite"]) for step in certificate.recipe):
        lines += _step_lines(name, certificate.layers, "layers")
        lines += _step_lines(
            name, certificate.norms, "norms that maps outside the attention read"
        )
    yield lines
    if any(layer.layers for layer in certificate.layers):
        yield [f"The model has {said_layers(certificate.layers)}."]
    if said := renumbered(certificate.layers):
        yield [said]
    yield [
        _said_costs("In this file: attention", certificate.before, certificate.after)
    ]
    if certificate.unpadded is not None:
        yield [_said_costs(UNPADDED, certificate.before, certificate.unpadded)]
    probes = certificate.probes
    compared = certificate.end_to_end
    on_text = (
        [layer.measured_on_text for layer in certificate.layers]
        if compared is not None
        else []
    )
    for what, found in (
        (
            f"Measured on the saved numbers, {probes.count} random sequence{'s' * (probes.count > 1)} of "
            f"{probes.length}: the output of a layer moves by at most",
            [layer.measured for layer in certificate.layers],
        ),
        (
            "The output of a map outside the attention that took up a norm moves by at most",
            [norm.measured for norm in certificate.norms],
        ),
        (
            f"On the layers' inputs at some positions of {compared and compared.text}, the output of a layer "
            "moves by at most",
            on_text,
        ),
    ):
        if moved := [one.relative for one in found if one is not None]:
            yield [f"{what} {max(moved):.2g} of its size."]
    if certificate.not_on_text:
        yield [
            f"Layers were not tried on their inputs for the text: {certificate.not_on_text}."
        ]
    yield [_whole_model(certificate)]
    words = shlex.join(("triptych", "verify", folder, "--against", certificate.source))
    text = " --calibrate TEXT" if certificate.calibration else ""
    yield [f"Try it again: `{words}{text}`."]


# Maximum number of layers in a summary of renumbered heads.
_LAYERS_SHOWN = 12
UNPADDED = (
    "This format has fixed shapes: what the new maps do not need is filled with zeros. Without "
    "them, each layer with widths of its own, the attention would have"
)
_FORMER_WORDS = {
    _MEANING["bounded"]: "another function, near the first",
    UNPADDED: (
        "This format has fixed shapes: what the new maps do not need is filled with zeros. As a run of "
        "triptych, where each layer has its own widths, the attention would have"
    ),
}


def _said_costs(what: str, before: Cost, after: Cost) -> str:
    pairs = [
        ("parameters", before.parameters, after.parameters),
        ("operations a token", before.flops_per_token, after.flops_per_token),
        ("bytes cached a token", before.kv_bytes_per_token, after.kv_bytes_per_token),
    ]
    said = (f"{name} {one:,} → {other:,}" for name, one, other in pairs if one or other)
    return f"{what} {'; '.join(said)}."


def renumbered(layers: Sequence[LayerRecord]) -> str:
    """Describe the renumbered heads; "" if their order is unchanged."""
    moved = [layer for layer in layers if layer.heads is not None]
    if not moved:
        return ""
    said = [
        f"{layer.module}: {' '.join(map(str, layer.heads or ()))}"
        for layer in moved[:_LAYERS_SHOWN]
    ]
    more = (
        f"; and {len(moved) - _LAYERS_SHOWN} more layers"
        if len(moved) > _LAYERS_SHOWN
        else ""
    )
    return (
        f"Heads have other numbers now in {len(moved)} of {len(layers)} layers. The numbers that they had, "
        f"in their new order: {'; '.join(said)}{more}."
    )


def _step_lines(
    name: str, parts: Sequence[LayerRecord | NormRecord], what: str
) -> Iterator[str]:
    """Yield one line about a step if it applied to any of `parts`."""
    found = [
        (part.count, step)
        for part in parts
        for step in part.steps
        if step.rewrite == name
    ]
    reasons = dict.fromkeys(step.refused for _, step in found if step.refused)
    if found:
        done = sum(count for count, step in found if not step.refused)
        said = f"; refused elsewhere: {'; '.join(reasons)}" if reasons else ""
        yield f"- `{name}`: {done} of {sum(count for count, _ in found)} {what}{said}"


def _whole_model(certificate: Certificate) -> str:
    found = certificate.end_to_end
    if found is None:
        return f"Whole models were not compared: {certificate.not_compared}."
    rows = "tokens" if found.output != "classes" else "predictions"
    entries = "entries" if found.output == "hidden states" else "logits"
    said = (
        f"Whole models on {found.text} ({found.tokens:,} {rows}, by {found.by}): {entries} differ by at most "
        f"{found.worst_logit:.3g}, {moved_in_words(found)}"
    )
    if found.loss_before_nats is not None and found.loss_after_nats is not None:
        said += f"; loss {found.loss_before_nats:.4f} → {found.loss_after_nats:.4f} nats a token"
    return said + "."
