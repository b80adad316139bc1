"""What a run found, shown: records → one self-contained HTML file, or the terminal.

The room knows nothing of models or text; whoever has something to show fills the records.
"""

from typing import TYPE_CHECKING, Any

from triptych.reports.records import (
    AttentionPicture,
    Bar,
    BarChart,
    ComparisonReport,
    MetricPoint,
    RunReport,
    Table,
    TranslationSample,
)
from triptych.reports.terminal import render_attention, render_samples, render_table

if TYPE_CHECKING:
    from triptych.reports.html import write_comparison_report, write_run_report

__all__ = [
    "AttentionPicture",
    "Bar",
    "BarChart",
    "ComparisonReport",
    "MetricPoint",
    "RunReport",
    "Table",
    "TranslationSample",
    "render_attention",
    "render_samples",
    "render_table",
    "write_comparison_report",
    "write_run_report",
]


def __getattr__(name: str) -> Any:
    # What draws takes half a second to import, which every other command would wait for.
    if name in ("write_comparison_report", "write_run_report"):
        from triptych.reports import html

        return getattr(html, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
