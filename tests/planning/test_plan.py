"""What a plan says of devices that are not here, against what is known of them."""

import dataclasses

import pytest

from triptych.errors import UsageError
from triptych.planning import Cluster, read_quantity
from triptych.planning.plans import exchange_seconds, plan
from triptych.planning.simulation import simulated_processes
from triptych.planning.standing_in import filled
from triptych.planning.steps import Step, simulate_step
from triptych.planning.tracking import Exchange
from triptych.training import AnyRecipe, resolve


def recipe(num_layers: int = 1, *overrides: str) -> AnyRecipe:
    model = {"num_layers": num_layers, "d_model": 64, "d_ff": 128, "num_heads": 4, "context": 16}
    tree = {"task": "language-model", "data": {"train": {"files": ["a"]}}, "tokenizer": {"vocab_size": 500}}
    return filled(resolve({**tree, "model": model}, ["training.batch_size=8", *overrides]))[0]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80e9),
        ("40GiB", 40 * 2**30),
        ("3.35TB/s", 3.35e12),
        ("400T", 4e14),
        ("4e14", 4e14),
        ("512", 512),
    ],
)
def test_a_quantity_is_a_number_with_a_unit(text: str, size: float) -> None:
    assert read_quantity(text, "--x") == size


@pytest.mark.parametrize("text", ["", "GB", "80 apples", "-80GB", "80GBs", "eighty", "0", "3iB"])
def test_what_is_no_quantity_is_refused_with_the_name_of_its_option(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--device-memory is "):
        read_quantity(text, "--device-memory")


@pytest.mark.parametrize(
    ("devices", "node_size", "message"),
    [(12, 8, "not a multiple of --node-size 8"), (0, 8, "--devices is 0"), (8, -1, "--node-size is -1")],
)
def test_devices_that_make_no_machines_of_one_size_are_refused(
    devices: int, node_size: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Cluster(devices, 10**9, node_size)


def test_an_exchange_between_machines_uses_every_devices_link_and_waits_for_each_machine() -> None:
    cluster = Cluster(64, 10**9, link_bandwidth=1e9, node_bandwidth=6e9, link_latency=0.5)
    assert exchange_seconds(Exchange("allgather", 8, 1), 12 * 10**9, 3, cluster) == 2
    assert exchange_seconds(Exchange("allgather", 8, 2), 12 * 10**9, 3, cluster) == 3 + 3 * 0.5
    assert exchange_seconds(Exchange("allgather", 64, 8), 12 * 10**9, 1, cluster) == 2 + 7 * 0.5
    assert exchange_seconds(Exchange("allreduce", 2, 2), 10**9, 1, cluster) == 1 + 2 * 0.5


def test_a_recipe_that_goes_on_with_a_checkpoint_is_refused() -> None:
    tree = {"task": "language-model", "data": {"train": {"files": ["a"]}}, "model": {"checkpoint": "gpt2"}}
    with pytest.raises(UsageError, match="write its sizes under"):
        filled(resolve(tree))


def test_of_two_processes_each_holds_half_and_gathers_the_rest() -> None:
    with simulated_processes(2):
        step = simulate_step(recipe(), Cluster(2, 10**9), "fsdp")
    assert step.parameters == step.gradients
    assert step.optimizer == pytest.approx(2 * step.parameters, rel=0.01)
    assert step.peak > step.parameters + step.gradients + step.optimizer
    whole = 2 * step.parameters
    assert step.sent[Exchange("reducescatter", 2, 1)] == pytest.approx(whole / 2, rel=0.01)
    assert whole / 2 <= step.sent[Exchange("allgather", 2, 1)] <= whole


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["true", "false"])
@pytest.mark.parametrize("kind", [None, "ddp", "fsdp", "hybrid"])
def test_few_layers_say_exactly_what_many_need(kind: str | None, checkpointing: str) -> None:
    cluster = Cluster(1 if kind is None else 4, 10**9, node_size=2)
    of = recipe(7, f"training.activation_checkpointing={checkpointing}")
    with simulated_processes(cluster.devices):
        few, more, whole = (simulate_step(of, cluster, kind, layers) for layers in (4, 5, 7))  # type: ignore[arg-type]
    assert_equal_steps(few.of_layers(7, 4, more), whole, without={"moved"} if kind == "ddp" else set())


def assert_equal_steps(one: Step, other: Step, without: set[str]) -> None:
    names = {field.name for field in dataclasses.fields(Step)} - {"stretches"} - without
    assert {name: getattr(one, name) for name in names} == {name: getattr(other, name) for name in names}
    assert (one.peak, one.peak_in) == (other.peak, other.peak_in)


@pytest.mark.parametrize("bleu", [True, False])
def test_a_translators_shards_need_a_device_that_holds_the_whole_model_to_translate_with_it(
    bleu: bool,
) -> None:
    tree = {
        "data": {part: {"generated": 9, "generated_part": part} for part in ("train", "valid")},
        "model": {"preset": "tiny", "d_model": 32, "d_ff": 32, "num_heads": 2},
        "validation": {"bleu": bleu, "metric": "loss"},
    }
    asked = ["training.batch_tokens=500", "training.precision='fp32'"]
    planned = plan(resolve(tree, asked), Cluster(2, 10**9))
    assert planned.figures()["host_bytes"] == 4 * planned.num_parameters
    for one in planned.layouts:
        held = one.step.parameters + one.step.gradients + one.step.optimizer
        whole = 4 * planned.num_parameters if bleu and one.layout.kind == "fsdp" else 0
        assert one.validating == held + whole
    (sharded, *_) = [one for one in planned.layouts if one.layout.kind == "fsdp"]
    assert sharded.needed == max(sharded.step.peak, sharded.validating)
