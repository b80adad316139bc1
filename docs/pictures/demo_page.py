"""The picture of the demo's page, in one state.

`python docs/pictures/demo_page.py docs/demo.html` draws `demo-page.png` anew with Chromium.
"""

import shutil
import subprocess
import sys
from pathlib import Path

STATE = (
    "#cross.1.1&text=Der+Zug+kommt+um+halb+vier+an.&if=tie(encoder.0,+W_Q,+W_K)&if=tie(encoder.1,+W_Q,+W_K)"
)
_SIZE = "1400,860"
# The page computes its losses, too.
_MILLISECONDS = 30_000


def main(page: Path) -> None:
    """Draw the picture."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "no Chromium is on the PATH"
    picture = Path(__file__).with_name("demo-page.png")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={_SIZE}"]
    waits = f"--virtual-time-budget={_MILLISECONDS}"
    address = page.resolve().as_uri() + STATE
    subprocess.run([browser, *options, waits, f"--screenshot={picture}", address], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
