"""Display of results: from records to one self-contained HTML file, or to the terminal.

The package is independent of models and texts; callers fill the records.
"""

from typing import TYPE_CHECKING

from triptych.listed_names import finder

if TYPE_CHECKING:
    from triptych.seeing.reports.html import (
        is_page,
        make_page,
        require_charts,
        short_name,
        write_picture,
        write_report,
    )
    from triptych.seeing.reports.records import (
        AttentionPicture,
        Bar,
        BarChart,
        CurveChart,
        Interval,
        IntervalChart,
        MetricPoint,
        Plot,
        Report,
        ScatterChart,
        Table,
        TranslationSample,
    )
    from triptych.seeing.reports.rows import is_parquet, write_csv, write_parquet
    from triptych.seeing.reports.terminal import (
        render_attention,
        render_samples,
        render_table,
    )

__getattr__ = finder(__name__, __file__)

__all__ = [
    "AttentionPicture",
    "Bar",
    "BarChart",
    "CurveChart",
    "Interval",
    "IntervalChart",
    "MetricPoint",
    "Plot",
    "Report",
    "ScatterChart",
    "Table",
    "TranslationSample",
    "is_page",
    "is_parquet",
    "make_page",
    "render_attention",
    "render_samples",
    "render_table",
    "require_charts",
    "short_name",
    "write_csv",
    "write_parquet",
    "write_picture",
    "write_report",
]
