"""What CTranslate2 has here: itself, its devices and its precisions."""

from typing import Literal

from triptych.decoding import Precision
from triptych.errors import UsageError
from triptych.extras import require_extra
from triptych.models.device import find_device

_COMPUTE_TYPES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8_float32"}


def require_ctranslate2() -> None:
    """Check that CTranslate2 is installed."""
    require_extra("ctranslate2", "ctranslate2", what="--engine ctranslate2")


def compute_type(precision: Precision, device: str) -> str:
    """CTranslate2's name of a precision."""
    import ctranslate2

    wanted = _COMPUTE_TYPES[precision]
    supported = ctranslate2.get_supported_compute_types(device)
    if wanted not in supported:
        able = ", ".join(name for name, theirs in _COMPUTE_TYPES.items() if theirs in supported)
        raise UsageError(f"CTranslate2 cannot compute in {precision} on this {device}: it can in {able}")
    return wanted


def find_place(device: str) -> tuple[Literal["cpu", "cuda"], int]:
    """CTranslate2's device and its number."""
    import ctranslate2

    found = find_device(device)
    count = ctranslate2.get_cuda_device_count()
    if found.type == "cuda" and (found.index or 0) < count:
        return "cuda", found.index or 0
    if found.type == "cuda" and device != "auto":
        raise UsageError(f"device {device!r} is given, but CTranslate2 sees {count} GPUs here")
    return "cpu", 0
