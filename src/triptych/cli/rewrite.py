"""`triptych rewrite`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from triptych.algebra.rewrites.registry import (
    EXACT,
    REWRITES,
    option_names,
    read_rewrite,
    require_order,
    signature,
    summary,
)
from triptych.algebra.rewrites.rewrite import Rewrite
from triptych.checkpoints.family import read_family
from triptych.cli.groups import grouped
from triptych.cli.options import open_model
from triptych.cli.progress import progress_bar
from triptych.cli.selection import numbers
from triptych.cli.terminal import Terminal
from triptych.cli.verbose import VerboseOption
from triptych.errors import UsageError
from triptych.face import Model
from triptych.rewriting.certificate import UNPADDED, Certificate, Cost, LayerRecord, NormRecord, card
from triptych.rewriting.planning import Plan, resize_kv_heads
from triptych.rewriting.recipe import RewriteRecipe, read_rewrite_recipe


def _list_rewrites(wanted: bool) -> bool:
    """Every rewrite with its options, from the records."""
    if wanted:
        console = Terminal(soft_wrap=True)
        for kind in REWRITES:
            console.print(f"{signature(kind)}\n    {summary(kind)}\n    {kind.tier}")
            for name in option_names(kind):
                if name not in Rewrite.model_fields:
                    console.print(f"    {name}: {kind.model_fields[name].description}")
        console.print(f"Every rewrite takes layers: {Rewrite.model_fields['layers'].description}.")
        raise typer.Exit
    return wanted


CheckpointArgument = Annotated[
    str, typer.Argument(help="A folder, a run, or a name on the Hub (owner/name, gpt2).")
]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="The output folder; it must not exist.")]
ExactOption = Annotated[bool, typer.Option("--exact", help="Apply every exact rewrite that a layer allows.")]
DoOption = Annotated[
    list[str] | None,
    typer.Option(
        "--do",
        help="One rewrite, several times: drop_key_bias, 'truncate(rank=6)', … (--list names them).",
    ),
]
ListOption = Annotated[
    bool,
    typer.Option(
        "--list", is_eager=True, callback=_list_rewrites, help="Name every rewrite with its options."
    ),
]
RecipeOption = Annotated[Path | None, typer.Option("--recipe", help="A TOML file with the steps, in order.")]
RankOption = Annotated[int | None, typer.Option("--rank", help="Truncate W_QK and W_OV to this rank.")]
EnergyOption = Annotated[
    float | None,
    typer.Option("--energy", help="Truncate to the lowest ranks that keep this share of each form's energy."),
]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", help="Keep this share of all channels (of ranks, in W_QK of rotary heads)."),
]
FormsOption = Annotated[str, typer.Option("--forms", help="Which forms to truncate: qk, ov or qk,ov.")]
Criterion = Literal["free", "uncentred", "centred"]
CriterionOption = Annotated[
    Criterion | None,
    typer.Option(
        "--criterion",
        help="What truncation keeps: the forms (free), or what they compute on the calibration text.",
    ),
]
RotaryOption = Annotated[
    Literal["maps", "pairs"] | None,
    typer.Option(
        "--rotary",
        help="Rotary W_QK: maps, truncate W_Q and W_K before the rotation; pairs, remove whole rotary "
        "pairs, so that keys can be cached narrower.",
    ),
]
CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate", help="A text to run the model on first. Translation models: source, tab, target."
    ),
]
KVHeadsOption = Annotated[
    int | None, typer.Option("--kv-heads", help="Merge or repeat key-value heads to this number.")
]
PruneOption = Annotated[
    int | None,
    typer.Option("--prune", help="Remove this many heads of each layer, the least important ones."),
]
LayersOption = Annotated[
    str | None, typer.Option("--layers", help="Layers to rewrite: 0,3 or 0-5. Default: all.")
]
SkipRefusedOption = Annotated[
    bool,
    typer.Option(
        "--skip-refused", help="If a layer refuses a step, leave the layer as it is instead of stopping."
    ),
]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="Compare both models on this text after the rewrite.")
]
CompareOption = Annotated[
    bool,
    typer.Option(
        "--compare/--no-compare",
        help="Compare both models after the rewrite, without --text on random tokens.",
    ),
]
FamilyOption = Annotated[
    Path | None, typer.Option("--family", help="A family file that describes the checkpoint.")
]
PlanOption = Annotated[bool, typer.Option("--plan", help="Report what would be done; write nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the plan or the certificate as JSON.")]


class _Wanted(NamedTuple):
    """What is done to a checkpoint."""

    exact: ExactOption = False
    do: DoOption = None
    list_rewrites: ListOption = False
    recipe: RecipeOption = None
    rank: RankOption = None
    energy: EnergyOption = None
    budget: BudgetOption = None
    forms: FormsOption = "qk,ov"
    criterion: CriterionOption = None
    rotary: RotaryOption = None
    calibrate: CalibrateOption = None
    kv_heads: KVHeadsOption = None
    prune: PruneOption = None
    layers: LayersOption = None
    skip_refused: SkipRefusedOption = False

    def recipe_for(self, model: Model) -> RewriteRecipe:
        """The same as a recipe."""
        steps = self._steps(model)
        layers = None if self.layers is None else tuple(numbers(self.layers, "--layers"))
        if self.recipe is not None:
            if self.exact or steps or layers is not None:
                raise UsageError("--recipe cannot be combined with --exact, --do and the like")
            found = read_rewrite_recipe(self.recipe)
            update: dict[str, Any] = {"skip_refused": found.skip_refused or self.skip_refused}
            if self.calibrate is not None:
                update["calibration"] = self.calibrate
            return found.model_copy(update=update)
        if self.exact:
            names = [step.name for step in EXACT]
            if twice := next((step.name for step in steps if step.name in names), None):
                raise UsageError(f"--exact does {twice} already: leave one of the two out")
            steps = sorted([*EXACT, *steps], key=attrgetter("place"))
        if not steps:
            raise UsageError(
                "nothing to do: give --exact, --do REWRITE, --rank, --energy, --budget or --recipe"
            )
        if layers is not None:  # a rewrite's own layers go first
            steps = [step if step.layers else step.model_copy(update={"layers": layers}) for step in steps]
        require_order(steps)
        return RewriteRecipe(
            step=tuple(steps), skip_refused=self.skip_refused or self.exact, calibration=self.calibrate
        )

    def _steps(self, model: Model) -> list[Rewrite]:
        """What is named with --do, in that order, then what has an option of its own."""
        own = self._truncations()
        if self.prune is not None:
            on_text = self.calibrate is not None
            own.append({"rewrite": "prune_heads", "number": self.prune, "on_text": on_text})
        if self.kv_heads is not None:
            kv_rewrite = resize_kv_heads(model.layers[0].num_kv_heads, self.kv_heads)
            own.append({"rewrite": kv_rewrite, "num_kv_heads": self.kv_heads})
        named = [*map(read_rewrite, self.do or [])]
        return [*named, *sorted(map(read_rewrite, own), key=attrgetter("place"))]

    def _truncations(self) -> list[dict[str, Any]]:
        """The truncation that options ask for; empty if none does."""
        sizes = {"rank": self.rank, "energy": self.energy, "budget": self.budget}
        cut = {name: value for name, value in sizes.items() if value is not None}
        for option, value in (("--rotary", self.rotary), ("--criterion", self.criterion)):
            if value is not None and not cut:
                raise UsageError(f"{option} needs --rank, --energy or --budget")
        if not cut:
            return []
        how = {
            "forms": self.forms.split(","),
            "criterion": self.criterion or ("free" if self.calibrate is None else "centred"),
            "rotary": self.rotary or "maps",
        }
        return [{"rewrite": "truncate", **how, **cut}]


@grouped
def rewrite(
    checkpoint: CheckpointArgument,
    out: OutOption = None,
    *,
    wanted: _Wanted,
    text: TextOption = None,
    compare: CompareOption = True,
    family: FamilyOption = None,
    plan: PlanOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Rewrite the attention of a checkpoint, with a certificate.

    The result has the format of the original. The certificate says what was changed and what was measured.
    """
    model = open_model(checkpoint, "cpu", family=None if family is None else read_family(family))
    chosen = wanted.recipe_for(model)
    console = Terminal(soft_wrap=True)
    if plan:
        found = model.plan(chosen)
        print(json.dumps(_plain(found))) if as_json else _print_plan(found, console)
        return
    if out is None:
        raise UsageError("give the output folder with --out (or --plan to see what would be done)")
    if text is not None and not compare:
        raise UsageError("--text and --no-compare contradict each other: leave one out")
    with progress_bar("{task.description}", "opening") as tell:
        rewritten = model.rewrite(chosen, out=out, text=text, compare=compare, progress=tell)
    certificate = rewritten.certificate
    assert certificate is not None, "it was written"
    if as_json:
        print(certificate.as_json().decode(), end="")
    else:
        _print_certificate(certificate, out, console)


def _plain(plan: Plan) -> dict[str, Any]:
    record = asdict(plan)
    for name in ("layers", "norms"):
        record[name] = [part.model_dump(mode="json") for part in getattr(plan, name)]
    record |= {name: getattr(plan, name).model_dump() for name in ("before", "after")}
    record["unpadded"] = None if plan.unpadded is None else plan.unpadded.model_dump()
    return record


def _print_plan(plan: Plan, console: Console) -> None:
    console.print(f"{plan.source}: {plan.family}, {len(plan.layers)} attention layers")
    console.print(_steps_table(plan.layers))
    if plan.norms:
        console.print(_steps_table(plan.norms, "norms beside"))
    _print_savings(plan, console)
    console.print(
        f"attention in the file: {plan.bytes_before:,} bytes now, {plan.bytes_after:,} afterwards"
        + ("" if plan.bytes_after != plan.bytes_before else " (the format keeps its shapes)")
    )
    for name, value in plan.settings.items():
        console.print(f"config.json: {name} = {value}")
    for note in plan.notes:
        console.print(note)


def _steps_table(layers: Sequence[LayerRecord | NormRecord], of: str = "layers") -> Table:
    table = Table("step", of, "tier", "bound", "what")
    for name in dict.fromkeys(step.rewrite for layer in layers for step in layer.steps):
        found = [step for layer in layers for step in layer.steps if step.rewrite == name]
        done = [step for step in found if not step.refused]
        if done:
            said = dict.fromkeys((*(s.choice for s in done if s.choice), *(n for s in done for n in s.notes)))
            tiers = sorted({str(step.tier) for step in done})
            bound = max(step.bound for step in done)
            what = [*said][:4] + (["…"] if len(said) > 4 else [])
            table.add_row(
                name, str(len(done)), ", ".join(tiers), f"{bound:.4g}" if bound else "0", "\n".join(what)
            )
        refused: dict[str, int] = {}
        for step in found:
            if step.refused:
                refused[step.refused] = refused.get(step.refused, 0) + 1
        for reason, count in refused.items():
            table.add_row(name, str(count), "refused", "", reason)
    return table


def _print_savings(of: Plan | Certificate, console: Console) -> None:
    console.print(_savings("attention in the file, all layers", of.before, of.after))
    if of.unpadded is not None:
        console.print(f"{UNPADDED}:")
        console.print(_savings("attention without padding, not in this file", of.before, of.unpadded))


def _savings(title: str, before: Cost, after: Cost) -> Table:
    table = Table(title, "now", "afterwards", "share")
    for what, name in (
        ("parameters", "parameters"),
        ("operations a token", "flops_per_token"),
        ("bytes cached a token", "kv_bytes_per_token"),
    ):
        one, other = getattr(before, name), getattr(after, name)
        if one or other:  # encoders cache nothing
            table.add_row(what, f"{one:,}", f"{other:,}", f"{other / one:.1%}" if one else "")
    return table


def _print_certificate(certificate: Certificate, out: Path, console: Console) -> None:
    console.print(_steps_table(certificate.layers))
    if certificate.norms:
        console.print(_steps_table(certificate.norms, "norms beside"))
    _print_savings(certificate, console)
    console.print(card(certificate, str(out)))
    console.print(f"written: {out}, with certificate.json")
