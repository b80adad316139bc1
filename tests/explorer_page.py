"""The page to explore a model in a browser: opened, waited for and read."""

import json
import time
from typing import Any, Protocol

from browser import Page


class Valued(Protocol):
    """A page of any browser."""

    def value(self, expression: str) -> Any: ...


SETTLED = "Number(document.body.dataset.settled) === document.getElementById('explore')?.explorer?.turn"


def wait_for(tab: Valued, condition: str) -> None:
    """Wait until a condition of the page is true."""
    for _ in range(1200):
        if tab.value(condition):
            return
        time.sleep(0.05)
    raise AssertionError(f"never true: {condition}; {text_of(tab, '#problem')}")


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
