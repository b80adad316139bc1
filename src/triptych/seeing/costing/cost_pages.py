"""A readable cost report: tables for the terminal, and a page with charts."""

from collections.abc import Callable
from itertools import chain

from triptych.seeing.costing.counting import CostReport, CostRow, CostSpec
from triptych.seeing.reports.records import (
    Bar,
    BarChart,
    Report,
    Table,
)

LEGEND = (
    "FLOPs are per token and of matrix products, a multiplication and an addition being two; every",
    "query with every key. Training is forward and backward, 3 × prefill. Not counted: softmax,",
    "scale, biases, diagonal maps. Kept for backward: by a fused kernel; attention written out keeps",
    "its weights too. FLOP/B: over what must move, the maps once and each tensor in and out.",
)
FORMULA_LEGEND = (
    "W_i: one map per head, W_g: one per group, W: one for all; the superscript names its sides.",
    "I_i: the i-th slice of the input; diag(m_i): a learned factor per channel; c: a constant.",
    "Parameters without biases.",
)


def format_count(number: float | int) -> str:
    """Format a number with three digits: 131, 65.5K, 1.05M, 2.15G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= 0.9995 * size:
            return f"{_three_digits(number / size)}{unit}"
    return f"{number}" if isinstance(number, int) else _three_digits(number)


def format_bytes(number: float | int) -> str:
    """Format bytes with three digits: 512 B, 2.00 KiB, 8.00 MiB."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if number >= 0.9995 * 1024**power:
            return f"{_three_digits(number / 1024**power)} {unit}"
    return f"{number:.0f} B"


def _three_digits(number: float) -> str:
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def describe_layer(spec: CostSpec) -> str:
    """Describe the counted layer in one line."""
    heads = "1 head" if spec.num_heads == 1 else f"{spec.num_heads} heads"
    biases = "with biases" if spec.biases else "no biases"
    return (
        f"one attention layer: d_model {spec.d_model:,}, {heads}, d_k {spec.key_width:,}, "
        f"d_v {spec.value_width:,}, {biases}, {spec.dtype}"
    )


def describe_work(spec: CostSpec) -> str:
    """Describe the counted work in one line: sequences, tokens of training and prefill, context."""
    sequences = "1 sequence" if spec.batch == 1 else f"{spec.batch:,} sequences"
    return (
        f"{sequences}: training and prefill of {spec.length:,} tokens, decoding at a context of "
        f"{spec.context:,}"
    )


def own_sizes(report: CostReport) -> str:
    """Describe the sizes specific to a parameterisation in one line; may be empty."""
    return ", ".join(
        f"{row.name}: {name} {value:,}"
        for row in report.rows
        for name, value in row.sizes.items()
        if name not in ("d", "h", "d_k", "d_v")
    )


def notes(report: CostReport) -> list[str]:
    """Return notes on the rows: absorbed routes, and omitted parameterisations."""
    found = []
    for row in report.rows:
        # Only the absorbed route needs a note.
        absorbed = [
            name
            for name, route in (
                ("prefill", row.prefill_route),
                ("decode", row.decode_route),
            )
            if route == "absorbed"
        ]
        if absorbed:
            found.append(
                f"{row.name}, {' and '.join(absorbed)}: the absorbed route, attending to what is cached as "
                "it is, takes fewer FLOPs"
            )
    return found + [f"{left.name} left out: {left.reason}" for left in report.left_out]


def counts_table(report: CostReport) -> Table:
    """Return a table with a row per parameterisation and a column per cost."""
    # Line breaks keep columns narrow in terminals.
    return Table(
        title="Cost",
        columns=(
            "",
            "parameters",
            "KV per\ntoken",
            "KV\ncache",
            "training\nFLOPs",
            "prefill\nFLOPs",
            "decode\nFLOPs",
            "kept for\nbackward",
            "prefill\nFLOP/B",
            "decode\nFLOP/B",
        ),
        rows=tuple(
            (
                row.name,
                format_count(row.parameters),
                f"{row.cached_numbers:,}",
                format_bytes(row.cache_bytes),
                format_count(row.training_flops),
                format_count(row.prefill_flops),
                format_count(row.decode_flops),
                format_bytes(row.activation_bytes),
                format_count(row.prefill_intensity),
                format_count(row.decode_intensity),
            )
            for row in report.rows
        ),
        caption=" ".join(LEGEND),
        numeric=tuple(range(1, 10)),
    )


def formula_table(report: CostReport) -> Table:
    """Return a table of each parameterisation's forms, and formulas of parameters (no biases) and cache."""
    lines: list[tuple[str, str, str]] = []
    # Four lines per parameterisation, with the name on the first line.
    for row in report.rows:
        formulas = row.formulas
        lines += (
            (row.name, "W_QK", formulas.W_QK),
            ("", "W_OV", formulas.W_OV),
            ("", "parameters", f"{formulas.parameters} = {formulas.num_parameters:,}"),
            ("", "KV per token", f"{formulas.cache} = {formulas.num_cached:,}"),
        )
    return Table(
        title="Formulas",
        columns=("", "", ""),
        rows=tuple(lines),
        caption=" ".join(FORMULA_LEGEND),
    )


def cost_page(report: CostReport, command: str = "") -> Report:
    """Make the page of a count; `command` is shown as its origin."""
    spec = report.spec
    rows = report.rows
    # All charts have the order of the rows.
    charts = [
        _bars("Parameters", rows, lambda row: row.parameters, format_count),
        _bars(
            "Cache",
            rows,
            lambda row: row.cache_bytes,
            format_bytes,
            f"What decoding keeps of {spec.context:,} tokens, for the whole batch.",
        ),
        BarChart(
            "FLOPs per token",
            tuple(chain.from_iterable(map(_flops_bars, rows))),
            unit="FLOPs",
            caption=f"Prefill of {spec.length:,} tokens, a step of decoding at {spec.context:,}.",
        ),
        _bars(
            "Activations",
            rows,
            lambda row: row.activation_bytes,
            format_bytes,
            "Kept for the backward pass, the whole batch, through a fused kernel.",
        ),
    ]
    facts = [
        ("d_model", f"{spec.d_model:,}"),
        ("heads", f"{spec.num_heads}"),
        ("d_k, d_v", f"{spec.key_width:,}, {spec.value_width:,}"),
        ("biases", "yes" if spec.biases else "no"),
        ("numbers", spec.dtype),
        ("sequences", f"{spec.batch:,}"),
        ("training, prefill", f"{spec.length:,} tokens"),
        ("decoding at", f"{spec.context:,} tokens"),
    ]
    tables = [counts_table(report), formula_table(report)]
    said = [f"Other sizes: {own_sizes(report)}."] if own_sizes(report) else []
    said += [f"{note[0].upper()}{note[1:]}." for note in notes(report)]
    return Report(
        title="What a parameterisation of attention costs",
        summary="One attention layer in each parameterisation, at one size.\n\n"
        + " ".join(said),
        facts=tuple(facts),
        charts=tuple(charts),
        tables=tuple(tables),
        commands=(command,) if command else (),
    )


def _flops_bars(row: CostRow) -> tuple[Bar, Bar]:
    prefill = row.prefill_flops
    decode = row.decode_flops
    return (
        Bar(row.name, prefill, format_count(prefill), "prefill"),
        Bar(row.name, decode, format_count(decode), "decode"),
    )


def _bars(
    title: str,
    rows: tuple[CostRow, ...],
    value: Callable[[CostRow], int],
    words: Callable[[int], str],
    caption: str = "",
) -> BarChart:
    return BarChart(
        title,
        tuple(Bar(row.name, value(row), words(value(row))) for row in rows),
        caption=caption,
    )
