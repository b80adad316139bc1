"""`triptych rewrite`."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from triptych.cli.options import load_model, numbers
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json, progress_bar
from triptych.errors import UsageError
from triptych.model import Model, load
from triptych.rewriting.certificate import (
    UNPADDED,
    Certificate,
    Cost,
    LayerRecord,
    NormRecord,
    card,
    renumbered,
    said_layers,
)
from triptych.rewriting.functions import (
    REWRITES,
    Rewrite,
    option_names,
    purpose,
    read_rewrite,
    signature,
)
from triptych.rewriting.opened_models import Plan


def rewrite(
    model: str | None = None,
    *,
    out: Path | None = None,
    exact: bool = False,
    do: Sequence[str] = (),
    recipe: Path | None = None,
    rank: int | None = None,
    energy: float | None = None,
    budget: float | None = None,
    layers: str | None = None,
    list: bool = False,
    plan: bool = False,
    rewriting: Annotated[
        Options, "Options", Model.rewrite, "calibration text compare skip_refused"
    ],
    opening: Annotated[Options, "Options", load, "family offline strict adapter"],
    as_json: bool = False,
) -> None:
    """Rewrite the attention of a checkpoint, with a certificate.

    The result has the format of the original. The certificate says what was changed and what was measured.

    Rewrites:
        exact: Apply every exact rewrite that a layer allows.
        do: One rewrite as a call: drop_key_bias, 'truncate(rank=6)', … May be repeated (--list names them).
        recipe: A TOML file with the steps, in order.
        rank: Truncate W_QK and W_OV to this rank; with --calibrate, keeping what they compute on the text.
        energy: Truncate to the lowest ranks that keep this share of each form's energy.
        budget: Keep this share of all channels (of ranks, in W_QK of rotary heads).
        layers: Layers to rewrite: 0,3 or 0-5. Default: all.
        list: Name every rewrite with its options.

    Options:
        out: The output folder; it must not exist.
        plan: Report what would be done; write nothing.
        as_json: Print the plan or the certificate as JSON.

    Examples:
        triptych rewrite gpt2 --exact --out gpt2-exact
        triptych rewrite gpt2 --do "prune_heads(number=1)" --do "truncate(rank=6)" --plan
    """
    console = Terminal(soft_wrap=True)
    if list:
        _print_rewrites(console)
        return
    if model is None:
        raise UsageError("give a checkpoint to rewrite, or --list")
    sizes = {"rank": rank, "energy": energy, "budget": budget}
    cut = {name: size for name, size in sizes.items() if size is not None}
    steps = _steps_of_options(
        exact, do, cut, on_text=rewriting["calibration"] is not None
    )
    if recipe is not None and (steps or layers is not None):
        raise UsageError("--recipe cannot be combined with --exact, --do and the like")
    if recipe is None and not steps:
        raise UsageError(
            "nothing to do: give --exact, --do REWRITE, --rank, --energy, --budget or --recipe"
        )
    if recipe is not None:
        steps = [recipe]
    rewriting["layers"] = numbers(layers, "--layers")
    opened = load_model(model, opening={"device": "cpu", **opening})
    if plan:
        del rewriting["text"], rewriting["compare"]
        found = opened.plan(*steps, **rewriting)
        print_json(_plan_record(found)) if as_json else _print_plan(found, console)
        return
    if out is None:
        raise UsageError(
            "give the output folder with --out (or --plan to see what would be done)"
        )
    if rewriting["text"] is not None and not rewriting["compare"]:
        raise UsageError("--text and --no-compare contradict each other: leave one out")
    with progress_bar("{task.description}", "opening", of_bytes=False) as tell:
        rewritten = opened.rewrite(*steps, out=out, **rewriting, progress=tell)
    certificate = rewritten.certificate
    assert certificate is not None, "it was written"
    if as_json:
        print(certificate.as_json().decode(), end="")
    else:
        _print_certificate(certificate, out, console)


def _steps_of_options(
    exact: bool, do: Sequence[str], cut: dict[str, Any], *, on_text: bool
) -> Sequence[Rewrite | str | Path]:
    """Return the rewrites of --do, in that order, and the truncation; "exact" for all exact rewrites."""
    steps = [read_rewrite(step) for step in do if step != "exact"]
    if cut:
        criterion = "centred" if on_text else "free"
        own = read_rewrite({"rewrite": "truncate", "criterion": criterion, **cut})
        steps.insert(sum(step.place <= own.place for step in steps), own)
    return [*steps, *["exact"] * (exact or "exact" in do)]


def _print_rewrites(console: Console) -> None:
    """Every rewrite with its options, from the records."""
    for kind in REWRITES:
        tier = f"{kind.tier}; refused: {kind.where_refused()}"
        console.print(f"{signature(kind)}\n    {purpose(kind)}\n    {tier}")
        for name in option_names(kind):
            if name not in Rewrite.model_fields:
                console.print(f"    {name}: {kind.model_fields[name].description}")
    console.print(
        f"Every rewrite takes layers: {Rewrite.model_fields['layers'].description}."
    )


def _plan_record(plan: Plan) -> dict[str, Any]:
    record = asdict(plan)
    for name in ("layers", "norms"):
        record[name] = [part.model_dump(mode="json") for part in getattr(plan, name)]
    record |= {name: getattr(plan, name).model_dump() for name in ("before", "after")}
    record["unpadded"] = None if plan.unpadded is None else plan.unpadded.model_dump()
    return record


def _print_plan(plan: Plan, console: Console) -> None:
    console.print(f"{plan.source}: {plan.family}, {said_layers(plan.layers)}")
    console.print(_steps_table(plan.layers))
    if plan.norms:
        console.print(_steps_table(plan.norms, "other norms"))
    if said := renumbered(plan.layers):
        console.print(said)
    _print_savings(plan, console)
    console.print(
        f"attention in the file: {plan.bytes_before:,} bytes now, {plan.bytes_after:,} afterwards"
        + (
            ""
            if plan.bytes_after != plan.bytes_before
            else " (the format keeps its shapes)"
        )
    )
    for name, value in plan.settings.items():
        console.print(f"config.json: {name} = {value}")
    for note in plan.notes:
        console.print(note)


def _steps_table(
    layers: Sequence[LayerRecord | NormRecord], of: str = "layers"
) -> Table:
    table = Table("step", of, "tier", "bound", "what")
    for name in dict.fromkeys(
        step.rewrite for step in chain.from_iterable(layer.steps for layer in layers)
    ):
        found = [
            (layer.count, step)
            for layer in layers
            for step in layer.steps
            if step.rewrite == name
        ]
        done = [step for _, step in found if not step.refused]
        if done:
            said = dict.fromkeys(
                (
                    *(s.choice for s in done if s.choice),
                    *chain.from_iterable(s.notes for s in done),
                )
            )
            tiers = sorted({str(step.tier) for step in done})
            bound = max(step.bound for step in done)
            what = [*said][:4] + (["…"] if len(said) > 4 else [])
            table.add_row(
                name,
                str(sum(count for count, step in found if not step.refused)),
                ", ".join(tiers),
                f"{bound:.4g}" if bound else "0",
                "\n".join(what),
            )
        refused: dict[str, int] = {}
        for count, step in found:
            if step.refused:
                refused[step.refused] = refused.get(step.refused, 0) + count
        for reason, number in refused.items():
            table.add_row(name, str(number), "refused", "", reason)
    return table


def _print_savings(of: Plan | Certificate, console: Console) -> None:
    console.print(
        _savings_table("attention in the file, all layers", of.before, of.after)
    )
    if of.unpadded is not None:
        console.print(f"{UNPADDED}:")
        console.print(
            _savings_table(
                "attention without padding, not in this file", of.before, of.unpadded
            )
        )


def _savings_table(title: str, before: Cost, after: Cost) -> Table:
    table = Table(title, "now", "afterwards", "share")
    for what, name in (
        ("parameters", "parameters"),
        ("operations a token", "flops_per_token"),
        ("bytes cached a token", "kv_bytes_per_token"),
    ):
        one = getattr(before, name)
        other = getattr(after, name)
        if one or other:  # encoders do not cache
            table.add_row(
                what, f"{one:,}", f"{other:,}", f"{other / one:.1%}" if one else ""
            )
    return table


def _print_certificate(certificate: Certificate, out: Path, console: Console) -> None:
    console.print(certificate.outcome)
    console.print(_steps_table(certificate.layers))
    if certificate.norms:
        console.print(_steps_table(certificate.norms, "other norms"))
    _print_savings(certificate, console)
    console.print(card(certificate, str(out)))
    console.print(f"written: {out}, with certificate.json")
