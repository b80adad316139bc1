"""What every test runs under: checked shapes, a fixed seed, no time limit on a drawn example."""

import gc
import os

# Read when torch loads OpenMP: threads that wait spin briefly, as the command's do. The cores are busy.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import checking
from browser import Page, found_browser, page_in
from sampling import mark_unsampled

# Tensors of tests are small: two threads on one wait for each other, and much longer beside other work.
# What a test starts as a command inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Before the package is imported for the first time; tests are collected after this file.
checking.install()

import triptych  # noqa: E402 - checked, too
from triptych.training import machine  # noqa: E402

# Every training measures the rate of this machine: in tests with small products.
machine._SIZES["cpu"] = (192,)

# Two busy cores would make a limit in milliseconds fail by chance.
# The gate draws the same examples every time: one commit, one answer. `make test-all` draws new ones.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("triptych", deadline=None, derandomize=True)
hypothesis.settings.load_profile("triptych")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    # `torch.manual_seed` writes down the stack for every kind of device that is not there: 2 ms a test.
    torch.default_generator.manual_seed(20170612)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(20170612)


def pytest_collection() -> None:
    gc.disable()  # nothing of what collecting makes is garbage


@pytest.hookimpl(tryfirst=True)  # before the tests marked slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_unsampled(items)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def demo() -> triptych.Model:
    """The translator that comes with the package."""
    return triptych.load("demo", device="cpu")


@pytest.fixture(scope="session")
def demo_page(demo: triptych.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its page for the web, in float16."""
    path = tmp_path_factory.mktemp("web") / "demo.html"
    demo.convert(path, "web")
    return path


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of a browser."""
    browser = found_browser()
    if browser is None:
        pytest.skip("no Chromium or Chrome is on the PATH")
    with page_in(browser, tmp_path_factory.mktemp("profile")) as opened:
        yield opened
