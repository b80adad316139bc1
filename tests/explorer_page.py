"""The page to explore a model in a browser: opened, waited for and read."""

import json

from browser import Page, Valued, wait_for

SETTLED = "Number(document.body.dataset.settled) === document.getElementById('explore')?.explorer?.turn"


def text_of(tab: Valued, selector: str) -> str:
    return str(tab.value(f"document.querySelector({json.dumps(selector)}).textContent"))


def open_at(tab: Page, address: str, *, width: int = 900, height: int = 800, theme: str = "light") -> None:
    """Open an address anew on a screen of this size, and wait until all of it is computed."""
    tab.complaints.clear()
    tab.requests.clear()
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    tab.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
    )
    tab.visit("about:blank")
    tab.visit(address)
    wait_for(tab, SETTLED)
