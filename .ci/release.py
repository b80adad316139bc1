#!/usr/bin/env python3
"""Build the sdist and the wheel, install the wheel in a clean environment, and try it.

    make release-check                 # the versions of constraints.txt
    make release-check OPTIONS=lowest  # the lowest versions that pyproject.toml allows
    make release-check OPTIONS=newest  # whatever pip takes today

Tried are the commands `--version`, `demo`, `translate` and `inspect`, and a few lines of Python, in an empty
folder, so that nothing of the checkout is imported. The sdist and the wheel are left in dist/.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("demo", "reports")
SMOKE = """
import triptych
model = triptych.load("demo")
assert model.translate("Der Zug kommt um halb vier an.").text, "nothing is translated"
smaller = model.rewrite("truncate(rank=8)", out="smaller")
assert all(check.held is not False for check in triptych.verify("smaller")), "a claim does not hold"
print("smoke test passed:", triptych.__file__)
"""


def call(*command: object, where: Path = ROOT, constraint: Path | None = None) -> None:
    """Run a command; only pip is given the constraint."""
    print("$", *command, flush=True)
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if constraint is not None:
        own["PIP_CONSTRAINT"] = str(constraint)
    subprocess.run([*map(str, command)], cwd=where, env=own, check=True)


def lowest() -> str:
    """The lowest version of each direct dependency, of the package and of the extras that are installed."""
    optional = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(line for extra in EXTRAS for line in optional[extra])]
    found = (
        re.fullmatch(r"([\w.-]+)>=([\w.]+)", line) for line in wanted if not line.startswith("triptych[")
    )
    return "".join(f"{match[1]}=={match[2]}\n" for match in found if match)


def environment(folder: Path) -> Path:
    """A new environment's Python."""
    venv.create(folder, with_pip=True, clear=True)
    return folder / "bin" / "python"


def main() -> None:
    versions = (sys.argv[1:] or ["pinned"])[0]
    if versions not in ("pinned", "lowest", "newest"):
        sys.exit(f"{versions}: give lowest or newest, or nothing")
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    if cited is None or cited[1] != PROJECT["version"]:
        sys.exit(f"CITATION.cff is not of version {PROJECT['version']}")
    with tempfile.TemporaryDirectory(prefix="triptych-release-") as name:
        place = Path(name)
        constraint = place / "constraints.txt"
        pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        constraint.write_text({"pinned": pinned, "lowest": lowest(), "newest": ""}[versions])
        builder = environment(place / "builder")
        call(builder, "-m", "pip", "install", "--quiet", "hatchling", constraint=ROOT / "constraints.txt")
        call(builder, "-m", "hatchling", "build", "--directory", ROOT / "dist")
        wheel = ROOT / "dist" / f"triptych-{PROJECT['version']}-py3-none-any.whl"
        python = environment(place / "clean")
        call(python, "-m", "pip", "install", "--quiet", f"{wheel}[{','.join(EXTRAS)}]", constraint=constraint)
        call(python, "-m", "pip", "check")
        trial, command = place / "trial", python.parent / "triptych"
        trial.mkdir()
        (trial / "test.de").write_text("Guten Tag.\n", encoding="utf-8")
        call(command, "--version", where=trial)
        call(command, "demo", where=trial)
        call(command, "translate", "demo", "test.de", where=trial)
        call(command, "inspect", "demo", where=trial)
        call(python, "-c", SMOKE, where=trial)
    print(f"release check passed with {versions} versions: {wheel.name} and its sdist are in dist/")


if __name__ == "__main__":
    main()
