"""Adapters of PEFT: their configuration, and the factors that they add to the maps of a base model.

    W' = W + s B A,   s = lora_alpha / r, or lora_alpha / √r (rsLoRA)
    W' = m (W + s B A) / ‖W + s B A‖ row by row (DoRA)

Sources: "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), "A Rank Stabilization
Scaling Factor for Fine-Tuning with LoRA" (arXiv:2312.03732), "DoRA: Weight-Decomposed Low-Rank Adaptation"
(arXiv:2402.09353), and `peft/tuners/lora` in github.com/huggingface/peft.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from triptych.core.checkpoints.made_files import TOKENIZER
from triptych.core.storage.hub import fetch_files
from triptych.core.storage.tensors import Tensors, open_tensors
from triptych.errors import DataError
from triptych.untrusted import Stamps, read_json, shown

HEADS = ("lm_head", "embed_out")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
CONFIGURATION = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
# A factor: its module, its part, perhaps the name of the adapter, and "weight" or "bias".
_FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?:\.(?P<of>weight|bias))?"
)
_SAVED = re.compile(r"\.modules_to_save(?:\.default)?(?=\.)|\.base_layer(?=\.)")
# Initialisations that do not change the base model.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_FOLLOWED = ("use_rslora", "use_dora")
_REFUSED = {
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "an adapter that begins at certain tokens of a text (aLoRA)",
    "target_parameters": "factors of parameters instead of modules",
    "trainable_token_indices": "rows of the embedding that were trained alone",
    "arrow_config": "a router between adapters (Arrow)",
    "monteclora_config": "factors that are drawn at random (MonteCLoRA)",
    "kasa_config": "another decomposition than B A (KaSA)",
}
# Patterns are not trusted: the time of a pattern with repeated groups or many repetitions is unbounded.
_REPEATS = re.compile(r"[*+{?]")
_MOST_REPEATS = 2
_LONGEST_PATTERN = 200
_LARGEST = 1e6


@final
@dataclass(frozen=True)
class Factors:
    """Factors of an adapter for one map, in the orientation of `torch.nn.Linear`."""

    down: Tensor  # A, [r, in]
    up: Tensor  # B, [out, r]
    scaling: float
    magnitude: Tensor | None = None  # m of DoRA, [out]

    def added(self, weight: Tensor, base: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return a map, or some of its rows, with the adapter merged; computed in at least float32.

        `base`: the map before other adapters were merged, whose lengths DoRA takes.
        """
        dtype = torch.promote_types(weight.dtype, torch.float32)
        change = self.scaling * (self.up[rows].to(dtype) @ self.down.to(dtype))
        found = weight.to(dtype) + change
        if self.magnitude is None:
            return found
        lengths = torch.linalg.vector_norm(base.to(dtype) + change, dim=1)
        rescaled: Tensor = found * (self.magnitude[rows].to(dtype) / lengths)[:, None]
        return rescaled


@final
class Adapter:
    """The folder of an adapter.

    Attributes:
        name: path for messages.
        record: `adapter_config.json`.
        modules: names of the modules with factors, with the names of their tensors by part.
        saved: names of replaced tensors of the base, mapped to their names in the file.
    """

    def __init__(self, name: str, record: Mapping[str, Any], tensors: Tensors) -> None:
        self.name = name
        self.record = record
        self._tensors = tensors
        self.modules: dict[str, dict[str, str]] = {}
        self.saved: dict[str, str] = {}
        for stored in tensors.infos:
            self._sort(stored)
        self._refuse()
        if not self.modules and not self.saved:
            raise DataError(f"{name}: the adapter has no tensors")

    @property
    def base(self) -> str | None:
        """Path or name on the Hub of the base, as stored in the configuration."""
        found = self.record.get("base_model_name_or_path")
        return found if isinstance(found, str) and found else None

    @property
    def is_transposed(self) -> bool:
        """True if maps are stored as [in, out] (`fan_in_fan_out`, for GPT-2)."""
        return self.record.get("fan_in_fan_out") is True

    def adapts(self, names: Collection[str]) -> bool:
        """Return True if a module with a name in `names` has factors."""
        return any(module.rpartition(".")[2] in names for module in self.modules)

    def saves_untied(self, names: Collection[str]) -> bool:
        """Return True if a module with a name in `names` is saved whole, without weight tying."""
        listed = self.record.get("modules_to_save") or ()
        is_copied = any(
            isinstance(one, str) and one.rpartition(".")[2] in names for one in listed
        )
        return is_copied and self.record.get("ensure_weight_tying") is not True

    def shape_of(self, stored: str) -> tuple[int, ...]:
        return self._tensors.infos[stored].shape

    def read(self, stored: str) -> Tensor:
        return self._tensors.read(stored)

    def factors(self, module: str) -> Factors:
        parts = self.modules[module]
        if "lora_embedding_A" in parts:
            # Of an embedding [tokens, width], A is [r, tokens] and B [width, r]: it is the map transposed.
            up = self.read(parts["lora_embedding_A"]).mT
            return Factors(
                self.read(parts["lora_embedding_B"]).mT,
                up,
                self._scaling(module, up.shape[1]),
            )
        down = self.read(parts["lora_A"])
        magnitude = parts.get("lora_magnitude_vector")
        return Factors(
            down,
            self.read(parts["lora_B"]),
            self._scaling(module, down.shape[0]),
            None if magnitude is None else self.read(magnitude).flatten(),
        )

    def bias(self, module: str) -> Tensor | None:
        """Read the change of a module's bias; None if the bias is unchanged."""
        parts = self.modules[module]
        if "lora_B.bias" not in parts:
            return None
        return self._scaling(module, self.shape_of(parts["lora_A"])[0]) * self.read(
            parts["lora_B.bias"]
        )

    def shape(self, module: str) -> tuple[int, int]:
        """Return [out, in] of the map of a module; an embedding's is [tokens, width]."""
        parts = self.modules[module]
        if "lora_embedding_A" in parts:
            return self.shape_of(parts["lora_embedding_A"])[1], self.shape_of(
                parts["lora_embedding_B"]
            )[0]
        return self.shape_of(parts["lora_B"])[0], self.shape_of(parts["lora_A"])[1]

    def is_embedding(self, module: str) -> bool:
        return "lora_embedding_A" in self.modules[module]

    def require_complete(self) -> None:
        """Check that every module has two matrices of one rank."""
        for module, parts in self.modules.items():
            first, second = (
                ("lora_embedding_A", "lora_embedding_B")
                if self.is_embedding(module)
                else ("lora_A", "lora_B")
            )
            where = f"{self.name}: {shown(module)}"
            if missing := [part for part in (first, second) if part not in parts]:
                raise DataError(f"{where} has no {missing[0]}: fetch the adapter again")
            shapes = [self.shape_of(parts[part]) for part in (first, second)]
            if any(len(shape) != 2 for shape in shapes):
                raise DataError(
                    f"{where} has factors of shapes {shapes}: those of a convolution are not read"
                )
            if shapes[0][0] != shapes[1][1] or not shapes[0][0]:
                raise DataError(
                    f"{where} has factors of shapes {shapes}, which do not fit each other"
                )
            if "lora_magnitude_vector" in parts:
                if self.is_embedding(module):
                    raise DataError(
                        f"{where}: DoRA of an embedding is not read: merge it with PEFT"
                    )
                if (
                    math.prod(self.shape_of(parts["lora_magnitude_vector"]))
                    != shapes[1][0]
                ):
                    raise DataError(
                        f"{where}: lora_magnitude_vector does not fit {shapes[1][0]} outputs"
                    )
            elif self.record.get("use_dora") is True and not self.is_embedding(module):
                raise DataError(
                    f"{where} has no lora_magnitude_vector, which DoRA needs: fetch it again"
                )
            self._scaling(module, shapes[0][0])

    # Enters a tensor of the file in `modules` if it is a factor, or else in `saved`.
    def _sort(self, stored: str) -> None:
        name = stored.removeprefix(_PREFIX)
        if (found := _FACTOR.fullmatch(name)) is not None:
            part = found["part"] + (".bias" if found["of"] == "bias" else "")
            self.modules.setdefault(found["module"], {})[part] = stored
        elif ".original_module." not in name:
            self.saved[_SAVED.sub("", name)] = stored

    def _refuse(self) -> None:
        """Refuse adapters except sums of a base and low-rank maps."""
        method = self.record.get("peft_type")
        merge = "merge it with PEFT (merge_and_unload, save_pretrained), and give that folder"
        if method != "LORA":
            raise DataError(
                f"{self.name}: an adapter of the method {shown(method)}, and only LORA is read: {merge}"
            )
        for field, what in _REFUSED.items():
            if self.record.get(field):
                raise DataError(
                    f"{self.name}: {field} is set: {what} is not read: {merge}"
                )
        for field, value in self.record.items():
            if field.startswith("use_") and value and field not in _FOLLOWED:
                raise DataError(
                    f"{self.name}: {shown(field)} is set, which is not followed: {merge}"
                )
        if self.record.get("ensure_weight_tying") is True and self.adapts(
            (*HEADS, *EMBEDDINGS)
        ):
            raise DataError(
                f"{self.name}: ensure_weight_tying with factors of an embedding is not read: {merge}"
            )
        start = self.record.get("init_lora_weights")
        if not any(start is plain or start == plain for plain in _PLAIN_STARTS):
            raise DataError(
                f"{self.name}: init_lora_weights is {shown(start)}, which changes the base, too: {merge}"
            )

    def _scaling(self, module: str, rank: int) -> float:
        alpha = self.record.get("lora_alpha", 8)
        patterns = self.record.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise DataError(f"{self.name}: alpha_pattern is no record")
        for pattern, value in patterns.items():
            if self._fits(pattern, module):
                alpha = value
                break
        if (
            isinstance(alpha, bool)
            or not isinstance(alpha, int | float)
            or not abs(alpha) <= _LARGEST
        ):
            raise DataError(
                f"{self.name}: lora_alpha is {shown(alpha)}, and a number is needed"
            )
        return (
            alpha / math.sqrt(rank)
            if self.record.get("use_rslora") is True
            else alpha / rank
        )

    def _fits(self, pattern: str, module: str) -> bool:
        """Match a module by PEFT's rule: a regular expression for its whole name or the name's end."""
        repeats = len(_REPEATS.findall(pattern))
        is_slow = repeats > _MOST_REPEATS or (repeats and ")" in pattern)
        if is_slow or len(pattern) > _LONGEST_PATTERN or "(?" in pattern:
            raise DataError(
                f"{self.name}: alpha_pattern has {shown(pattern)}: give names of modules"
            )
        try:
            return re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error:
            raise DataError(
                f"{self.name}: alpha_pattern has {shown(pattern)}, no regular expression"
            ) from None


@final
class AdapterFolder:
    """A folder with `adapter_config.json`, and the tensors next to it.

    `name`: the adapter's name on the Hub, for messages; "" for a folder of the user.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder = folder
        self.name = name or str(folder)
        self.weights = next(
            (path for name in _WEIGHTS if (path := folder / name).is_file()), None
        )
        if self.weights is None:
            raise DataError(
                f"{folder}: it has {CONFIGURATION}, and no {_WEIGHTS[0]}: fetch it, too"
            )
        self._stamps = Stamps([folder / CONFIGURATION, self.weights])
        self.adapter = Adapter(
            self.name, read_json(folder / CONFIGURATION), open_tensors(self.weights)
        )
        self.adapter.require_complete()

    def require_same(self) -> None:
        self._stamps.require_same()


def adapter_on_hub(hub_id: str, *, offline: bool = False) -> AdapterFolder:
    """Fetch an adapter from the Hub, with the tokenizer in its repository, if any.

    Raises NoConfigurationError for the repository of a model.
    """
    folder = fetch_files(
        hub_id,
        (CONFIGURATION, _WEIGHTS[0]),
        if_there=TOKENIZER,
        offline=offline,
    )
    return AdapterFolder(folder, hub_id)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIGURATION).is_file()


def adapters_below(folder: Path) -> Iterator[Path]:
    """Yield the folders of adapters in a folder; PEFT writes several adapters in folders of their names."""
    yield from (path.parent for path in sorted(folder.glob(f"*/{CONFIGURATION}")))
