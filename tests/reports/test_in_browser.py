"""A report in a browser: its charts are drawn, nothing is asked for, and the browser has nothing to say."""

from pathlib import Path

import pytest

from browser import found_browser, page_in
from triptych.reports import Bar, BarChart, MetricPoint, Report, write_report


def test_charts_are_drawn_without_complaint_or_request(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    browser = found_browser()
    if browser is None:
        pytest.skip("no Chromium or Chrome is on the PATH")
    bars = (Bar("one", 2.0, "two", "before"), Bar("one", 1.0, "one", "after"))
    curve = tuple(MetricPoint(step, train_loss=1 / (step + 1)) for step in range(3))
    path = tmp_path / "report.html"
    write_report(Report("a run", charts=(BarChart("bytes", bars),), metrics=curve), path)
    with page_in(browser, tmp_path / "profile") as page:
        page.open(path)
        drawn = "document.querySelectorAll('.chart svg').length"
        for _ in range(50):
            if page.value(f"new Promise((done) => setTimeout(() => done({drawn}), 100))") == 2:
                break
        assert page.value(drawn) == 2
        assert page.complaints == []
        assert {url.split(":")[0] for url in page.requests} <= {"file", "data"}
