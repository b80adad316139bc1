"""The page of the translator that comes with the package, which other pages link into.

`python docs/demo_page.py docs/demo.html` (`make docs`) writes it.
"""

import sys
from pathlib import Path

import triptych


def main(path: Path) -> None:
    """Write the page anew."""
    path.unlink(missing_ok=True)
    triptych.load("demo", device="cpu").convert(path, "web")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
