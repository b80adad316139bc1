"""What a run found, shown: records → one self-contained HTML file, or the terminal.

The room knows nothing of models or text; whoever has something to show fills the records.
"""

from triptych.reports.html import write_run_report
from triptych.reports.records import AttentionPicture, MetricPoint, RunReport, Table, TranslationSample
from triptych.reports.terminal import render_attention, render_samples

__all__ = [
    "AttentionPicture",
    "MetricPoint",
    "RunReport",
    "Table",
    "TranslationSample",
    "render_attention",
    "render_samples",
    "write_run_report",
]
