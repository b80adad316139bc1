"""Conversion of models to Hugging Face, CTranslate2, ONNX, GGUF and pages, and of Marian's to triptych.

The result is written to a temporary folder, read again and compared with the original model. Only then is
the folder renamed to its final name.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from triptych.converting import ctranslate2, hugging_face
from triptych.converting.gguf_writing import write_gguf
from triptych.converting.onnx import write_onnx
from triptych.converting.output_checks import ConversionCheck, WrittenModel
from triptych.converting.target_formats import require_recipe
from triptych.converting.web import write_web
from triptych.core.checkpoints.source import is_own_config
from triptych.core.models import has_config, read_model
from triptych.errors import DataError, UsageError
from triptych.files import write_folder
from triptych.literals import Quantization, TargetFormat
from triptych.printable import printable
from triptych.running.opened_source import Opened, changes_in_words
from triptych.running.opening import Reader
from triptych.running.text import TokenizerPair
from triptych.training.continuing import goes_on
from triptych.untrusted import read_json


@final
@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    source: str
    target: str
    format: str  # target format; "run" for triptych's format
    architecture: str  # name of the architecture in the target format
    parameters: int  # number of parameters in the target
    folded: tuple[
        str, ...
    ]  # descriptions of the changes needed to fit the target format
    checks: tuple[ConversionCheck, ...]  # checks of the result

    def record(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)


def can_convert(opened: Reader) -> bool:
    """Return True if a target format may support the model."""
    if opened.translates:
        return has_config(opened.encoder_decoder)
    return opened.language_model.causal or goes_on(opened.folder)


def convert_opened(
    source: Opened, target: Path, to: TargetFormat, quantization: Quantization | None
) -> Conversion:
    """Convert a model without changes; each format has a default of `quantization`."""
    if source.options.shortlist is not None and to != "ctranslate2":
        raise UsageError(
            f"{to} has no place for a shortlist: leave it out, or convert to ctranslate2"
        )
    if source.changes:
        raise UsageError(
            f"{source.name} was changed ({changes_in_words(source)}): save it, and convert what was saved"
        )
    if to == "web":
        _require_free(target)
        written = write_web(source.to_run, target, quantization or "float16")
        return Conversion(source.name, str(target), to, *written)
    quantization = quantization or "float32"
    if to == "gguf":
        _require_free(target)
        return Conversion(
            source.name, str(target), to, *write_gguf(source, target, quantization)
        )
    return convert(source.to_run, target, to, quantization)


def convert(
    opened: Reader,
    target: Path,
    to: TargetFormat,
    quantization: Quantization = "float32",
) -> Conversion:
    """Convert a model and write it to `target` in another format."""
    # Check options before any work is done.
    if quantization == "float16":
        raise UsageError("--quantization float16 goes with --to gguf or web alone")
    if quantization != "float32" and to != "ctranslate2":
        other = "--from hf" if to == "triptych" else f"--to {to}"
        raise UsageError(
            f"--quantization {quantization} goes with --to ctranslate2, gguf or web, not with {other}"
        )
    if opened.translates:
        require_recipe(opened)
        if to == "triptych" and is_own_config(read_json(opened.folder / "config.json")):
            raise UsageError(
                f"{opened.folder} is a run already: give a folder in Hugging Face's format"
            )
    elif to not in ("hf", "ctranslate2"):
        raise UsageError(
            f"{opened.folder} is a model of one text, which is converted --to hf, ctranslate2 or gguf alone"
        )
    elif (
        to == "hf"
        and opened.language_model.recipe_limit is None
        and not goes_on(opened.folder)
    ):
        raise UsageError(
            f"{opened.folder} is in Hugging Face's format already: copy the folder"
        )
    _require_free(target)
    written: list[WrittenModel] = []
    write_folder(
        target,
        lambda folder: written.append(_write_format(opened, folder, to, quantization)),
    )
    return Conversion(
        str(opened.folder), str(target), "run" if to == "triptych" else to, *written[0]
    )


def _require_free(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise UsageError(
            f"{target} exists: choose another name for the output, nothing is overwritten"
        )
    if not target.absolute().parent.is_dir():
        raise UsageError(f"the folder of {target} does not exist: make it first")


def _write_format(
    opened: Reader, folder: Path, to: TargetFormat, quantization: Quantization
) -> WrittenModel:
    match to:
        case "hf" if opened.translates:
            return hugging_face.write_hf_translator(opened, folder)
        case "hf":
            return hugging_face.write_hf_language_model(opened, folder)
        case "ctranslate2" if opened.translates:
            return ctranslate2.write_ct2_translator(opened, folder, quantization)
        case "ctranslate2":
            return ctranslate2.write_ct2_generator(opened, folder, quantization)
        case "onnx":
            return write_onnx(opened, folder)
        case "triptych":
            return _write_ours(opened, folder)
        case "gguf" | "web":
            raise UsageError(
                f"{opened.name}: a model in this format is one file, and no folder"
            )


def _write_ours(run: Reader, folder: Path) -> WrittenModel:
    run.save(folder)
    (folder / "README.md").write_text(_run_readme(run.folder), encoding="utf-8")
    # Compare bit for bit: the format is triptych's, so that values must not be rounded.
    again = dict(read_model(folder).named_parameters())
    tokenizers = TokenizerPair.load(folder)
    same = all(
        torch.equal(again[name], tensor)
        for name, tensor in run.encoder_decoder.named_parameters()
    )
    for ours, theirs in (
        (tokenizers.source, run.tokenizers.source),
        (tokenizers.target, run.tokenizers.target),
    ):
        same = same and ours.to_json() == theirs.to_json()
    if not same:
        raise DataError(
            f"{folder} does not read back as it was written: check the disk"
        )
    check = ConversionCheck(
        "every tensor and both tokenizers are read again bit for bit", True
    )
    return WrittenModel(
        "encoder-decoder",
        sum(tensor.numel() for tensor in again.values()),
        (),
        (check,),
    )


def _run_readme(source: Path) -> str:
    return f"""---
library_name: triptych
tags: [translation]
---

# A translation model, converted with triptych

It came from `{printable(source.name)}`, a Marian checkpoint in Hugging Face's format.

```sh
echo "A sentence." | triptych translate path/to/this/folder
```

`decoding.toml` says how it is searched.
"""
