"""Train, run, inspect and rewrite Transformers, with the attention matrices of every head at hand.

`__init__.pyi` lists the public names. A name is imported at its first use, so that `triptych --help` does not
import torch.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from triptych.listed_names import modules_of_names

_MODULE_OF = modules_of_names(Path(__file__).with_suffix(".pyi"))

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("triptych")
    if name not in _MODULE_OF:
        from triptych.guesses import about_name

        raise AttributeError(about_name(name))
    found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return [*__all__]
