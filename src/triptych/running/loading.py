"""Opening of a source by the arguments of `load`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from triptych.core.checkpoints.family import Family, read_family
from triptych.core.checkpoints.source import find_source, tokenizer_folder
from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.errors import UsageError
from triptych.literals import EngineName, Precision
from triptych.running.opened_source import Opened
from triptych.running.opening.options import Options, require_ctranslate2
from triptych.running.opening.translators import Languages
from triptych.user_code import use_code


def open_source(
    source: object,
    *,
    device: str,
    dtype: torch.dtype | str | None,
    tokenizer: Any,
    languages: tuple[str, str] | None,
    engine: EngineName,
    precision: Precision,
    offline: bool,
    family: Family | str | Path | None,
    strict: bool,
    shortlist: str | Path | None,
    ensemble: Sequence[str | Path],
    code: str | Path | None,
) -> Opened:
    """Find a source: files, a name on the Hub, or a model in memory; nothing is run."""
    if code is not None:
        use_code(code)
    if engine != "triptych" and dtype is not None:
        raise UsageError(f"--engine {engine} rounds by --precision: leave out --dtype")
    if engine == "ctranslate2":
        require_ctranslate2()
    is_module = isinstance(source, LanguageModel | EncoderDecoder)
    options = Options(
        device,
        getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        tokenizer_folder(tokenizer) if is_module else None,
        None if languages is None else Languages(*languages),
        engine,
        precision,
        None if shortlist is None else Path(shortlist),
        tuple(find_source(one, offline=offline) for one in ensemble),
    )
    described = read_family(Path(family)) if isinstance(family, str | Path) else family
    if isinstance(source, LanguageModel | EncoderDecoder):
        of_files = {"family": family, "strict": strict, "languages": languages, "offline": offline}
        if stray := next((name for name, value in of_files.items() if value), None):
            raise UsageError(f"{stray} is for a model in files: leave it out for one in memory")
        return Opened(f"a module ({type(source).__name__})", None, options, module=source)
    found = find_source(source, tokenizer=tokenizer, offline=offline, family=described, strict=strict)
    return Opened(found.name, found, options)
