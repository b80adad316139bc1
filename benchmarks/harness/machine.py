"""What the figures were taken on, and of what."""

import json
import math
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Instructions that decide how fast matrix products can be.
_TELLING_FLAGS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "i8mm", "bf16"),
)
_LIST_PACKAGES = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps({d.name: d.version for d in distributions()}))"
)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory_mb() -> float:
    """Memory that can be taken now, in MiB; without bound where the system does not say."""
    found = _key_values(Path("/proc/meminfo")).get("MemAvailable")
    return int(found.split()[0]) / 2**10 if found else math.inf


def describe_machine() -> dict[str, Any]:
    """Processor, memory, system, and how busy it is now."""
    processor = _key_values(Path("/proc/cpuinfo"))
    memory = _key_values(Path("/proc/meminfo")).get("MemTotal", "0 kB").split()[0]
    flags = processor.get("flags", processor.get("Features", "")).split()
    return {
        "cpu": processor.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_used": cores(),
        "memory_gb": round(int(memory) / 2**20, 1),
        "flags": [flag for flag in _TELLING_FLAGS if flag in flags],
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
    }


def describe_code(root: Path) -> dict[str, Any]:
    """The commit, and whether the working tree differs from it."""
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "-uno")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def package_versions(python: Path) -> dict[str, str]:
    """Every package of an environment."""
    printed = subprocess.run([python, "-c", _LIST_PACKAGES], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(printed.stdout)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def today() -> str:
    """Date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _key_values(path: Path) -> dict[str, str]:
    """The first value of each key of a file like /proc/cpuinfo; nothing where there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if ":" in line)
    found: dict[str, str] = {}
    for key, _, value in pairs:
        found.setdefault(key.strip(), value.strip())
    return found
