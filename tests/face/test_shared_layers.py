"""Layers that share their weights, each by itself, against `transformers` with hooks that count calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.tiny_models import TINY
from face.tiny import write_checkpoint
from triptych import Model, UsageError, load
from triptych.rewriting.certificate import said_layers

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT, OTHER = "the cat sat on the mat", "two dogs ran to a park"
HEADS, WIDTH = 4, 6
# How many layers there are, groups, and layers in one group.
SHAPES = {"one group": (12, 1, 1), "three groups": (12, 3, 1), "two in a group": (3, 1, 2), "both": (6, 3, 2)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Model, Any]]:
    found = {}
    for name, (layers, groups, inner) in SHAPES.items():
        folder = tmp_path_factory.mktemp("tiny") / name.replace(" ", "-")
        theirs = write_checkpoint(
            "albert",
            folder,
            num_hidden_layers=layers,
            num_hidden_groups=groups,
            inner_group_num=inner,
            num_attention_heads=HEADS,
        )
        found[name] = load(folder), theirs
    return found


@contextmanager
def before_output(theirs: Any, change: Callable[[int, Tensor], Tensor | None]) -> Iterator[list[str]]:
    """Their model with a function of the number of a call and what meets W_O; yields the names of calls."""
    calls: list[str] = []

    def hook(name: str) -> Any:
        def changed(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor] | None:
            calls.append(name)
            found = change(len(calls) - 1, given[0])
            return None if found is None else (found,)

        return changed

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in theirs.named_modules()
        if name.endswith(".attention.dense")
    ]
    yield calls
    for handle in handles:
        handle.remove()


def logits_of(theirs: Any, ours: Model, text: str = TEXT) -> Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([ours.run(text).ids])).logits[0]  # type: ignore[no-any-return]


def outputs_of(theirs: Any, ours: Model, text: str = TEXT) -> tuple[list[str], list[Tensor]]:
    """The names of the calls of their layers, and what met W_O in each, `[heads, length, width]`."""
    found: list[Tensor] = []
    with before_output(theirs, lambda number, z: found.append(z[0])) as calls:
        logits_of(theirs, ours, text)
    return calls, [z.unflatten(-1, (HEADS, WIDTH)).transpose(0, 1) for z in found]


def without(
    heads: dict[int, list[int]], instead: Tensor | float = 0.0
) -> Callable[[int, Tensor], Tensor | None]:
    """What leaves heads of some calls out."""

    def change(number: int, z: Tensor) -> Tensor | None:
        parts = z.clone().unflatten(-1, (HEADS, WIDTH))
        parts[:, :, heads.get(number, [])] = instead
        return parts.flatten(-2)

    return change


@pytest.mark.parametrize("shape", SHAPES)
def test_every_use_is_a_layer_that_says_whose_weights_it_has(tiny: Any, shape: str) -> None:
    ours, theirs = tiny[shape]
    calls, outputs = outputs_of(theirs, ours)
    assert [layer.name for layer in ours.layers] == [str(number) for number in range(len(calls))]
    first = [calls.index(name) for name in calls]
    assert [layer.shares for layer in ours.layers] == [
        None if place == number else str(place) for number, place in enumerate(first)
    ]
    run = ours.run(TEXT)
    for number, z in enumerate(outputs):
        assert torch.allclose(run[number].z, z, atol=1e-5)
    with torch.no_grad():
        weights = theirs(torch.tensor([run.ids]), output_attentions=True).attentions
    for number, expected in enumerate(weights):
        assert torch.allclose(ours.attend(TEXT)[number], expected[0], atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_change_is_of_the_layers_that_it_names(tiny: Any, shape: str) -> None:
    ours, theirs = tiny[shape]
    count = len(ours.layers)
    last, z = count - 2, ours.run(OTHER)[f"{count - 2}.1"].z
    mean = z.mean(dim=0)
    for changed, heads, instead in (
        (ours.ablate(f"{last}.1"), {last: [1]}, 0.0),
        (ours.ablate("*.1"), {number: [1] for number in range(count)}, 0.0),
        (ours.ablate(f"{last}.1", by="mean", text=OTHER), {last: [1]}, mean),
        (ours.ablate(f"{last}.1", by="resample", text=OTHER), {last: [1]}, z[:, None]),
        (ours.patch(f"{last}.1", ours.run(OTHER)), {last: [1]}, z[:, None]),
        (ours.edit(f"{last}.1", "z", lambda z: 0 * z), {last: [1]}, 0.0),
    ):
        with before_output(theirs, without(heads, instead)):
            expected = logits_of(theirs, ours)
        assert torch.allclose(changed.run(TEXT).logits, expected, atol=2e-5), changed.changes
    assert not torch.allclose(ours.ablate(f"{last}.1").run(TEXT).logits, ours.run(TEXT).logits, atol=1e-3)


def test_a_direction_enters_the_stream_once(tiny: Any) -> None:
    ours, theirs = tiny["one group"]
    vector, calls = torch.linspace(-1, 1, 24), 0

    def steer(module: Any, given: tuple[Tensor, ...]) -> Any:
        nonlocal calls
        calls += 1
        return (given[0] + vector, *given[1:]) if calls == 6 else None

    layer = next(module for name, module in theirs.named_modules() if name.endswith("albert_layers.0"))
    handle = layer.register_forward_pre_hook(steer)
    expected = logits_of(theirs, ours)
    handle.remove()
    assert torch.allclose(ours.steer("residual.5", vector).run(TEXT).logits, expected, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", ["one group", "both"])
def test_a_patch_of_a_run_into_itself_changes_nothing(tiny: Any, shape: str) -> None:
    ours, _ = tiny[shape]
    run = ours.run(TEXT)
    for what in ("q", "k", "v", "scores", "weights", "z"):
        for place in ("1.2", "*.2"):
            moved = ours.patch(place, run, what).run(TEXT).logits - run.logits
            assert float(moved.abs().max()) < 1e-5
    moved = ours.ablate("1.2", by="resample", text=TEXT).run(TEXT).logits - run.logits
    assert float(moved.abs().max()) < 1e-5


@pytest.mark.parametrize("shape", ["one group", "both"])
def test_a_gradient_is_the_derivative(tiny: Any, shape: str) -> None:
    ours, _ = tiny[shape]
    exact = load(ours.name, dtype="float64")
    run = exact.run(TEXT, grad=True)
    for layer in (0, 1, len(exact.layers) - 1):
        slope = run.gradient(f"{layer}.1", "z", of=run.logits[3, 7])[3, 2]

        def moved(by: float, layer: int = layer) -> float:
            def edit(z: Tensor) -> Tensor:
                z = z.clone()
                z[:, 3, 2] += by
                return z

            return float(exact.edit(f"{layer}.1", "z", edit).run(TEXT).logits[3, 7])

        assert float(slope) == pytest.approx((moved(1e-4) - moved(-1e-4)) / 2e-4, rel=1e-5, abs=1e-8)
        assert float(slope) != 0


def test_sweep_goes_through_every_layer(tiny: Any) -> None:
    ours, theirs = tiny["two in a group"]
    found = ours.sweep(OTHER, TEXT, lambda run: run.logits[2, 5])
    assert found.heads == tuple(f"{layer}.{head}" for layer in range(6) for head in range(HEADS))
    _, outputs = outputs_of(theirs, ours, OTHER)
    for place, value in zip(found.heads, found.values[:, 0].tolist(), strict=True):
        layer, head = map(int, place.split("."))
        with before_output(theirs, without({layer: [head]}, outputs[layer][head][:, None])):
            assert value == pytest.approx(float(logits_of(theirs, ours)[2, 5]), abs=2e-5)


def test_weights_are_shared_until_a_change_makes_something_else_of_them(tiny: Any) -> None:
    ours, _ = tiny["one group"]
    one = ours.ablate("10.1")
    assert not one.layers[10][1].W_O.any()
    assert torch.equal(one.layers[11].W_O, ours.layers[0].W_O)
    assert (one.layers[10].shares, one.layers[11].shares) == (None, "0")
    assert [layer.layer for layer in one.inspect().layers] == [0, 10]
    assert {layer.shares for layer in ours.ablate("*.1").layers[1:]} == {"0"}
    assert len(ours.inspect().layers) == 1


def test_a_change_of_weights_is_of_all_that_share_them_and_says_so(tiny: Any) -> None:
    ours, _ = tiny["three groups"]
    flipped = ours[5, 1].W_Q.flip(0)
    changed = ours.replace("5.1", W_Q=flipped).tie("0", "W_V", "W_K")
    assert changed.changes == (
        "replace(5.1, W_Q) in layers 4 to 7, which share their weights",
        "tie(0, W_V, W_K) in layers 0 to 3, which share their weights",
    )
    for number in range(12):
        assert torch.equal(changed[number, 1].W_Q, flipped if 4 <= number < 8 else ours[number, 1].W_Q)
        assert torch.equal(changed[number, 1].W_V, ours[number, 1].W_K if number < 4 else ours[number, 1].W_V)


def test_what_all_layers_with_some_weights_lose_can_be_saved_and_nothing_less(
    tiny: Any, tmp_path: Path
) -> None:
    ours, theirs = tiny["three groups"]
    for changed, said in (
        (ours.ablate("10.1"), "layers 8 to 11 share their weights, and it changes layer 10 alone"),
        (
            ours.ablate("0.1, 1.1, 5"),
            "layers 0 to 3 share their weights, and it changes layers 0 and 1 alone",
        ),
        (ours.ablate("*.1", by="mean", text=TEXT), "makes something else of each of them"),
        (ours.steer("residual.3", torch.ones(24)), "the bias that would take the direction in after layer 2"),
    ):
        assert "rewrite" not in changed.can
        with pytest.raises(UsageError, match="cannot be saved") as caught:
            changed.save(tmp_path / "refused")
        assert said in str(caught.value)
    saved = ours.ablate("8.1, 9.1, 10.1, 11.1").replace("4", W_V=2 * ours[4].W_V).save(tmp_path / "saved")
    again = transformers.AlbertForMaskedLM.from_pretrained(saved, attn_implementation="eager").eval()
    with before_output(theirs, without({number: [1] for number in range(8, 12)})) as calls:
        expected = logits_of(theirs, ours)
    changed = ours.ablate("8.1, 9.1, 10.1, 11.1")
    assert len(calls) == 12
    assert torch.allclose(changed.run(TEXT).logits, expected, atol=2e-5)
    both = changed.replace("4", W_V=2 * ours[4].W_V)
    assert torch.allclose(both.run(TEXT).logits, logits_of(again, ours), atol=2e-5)


def test_a_rewrite_counts_layers_and_the_weights_that_they_share(tiny: Any, tmp_path: Path) -> None:
    ours, _ = tiny["three groups"]
    plan = ours.plan("truncate(rank=3)", layers=[5])
    assert said_layers(plan.layers) == "12 attention layers with the weights of 3, each rewritten once"
    assert [(record.layers, bool(record.steps)) for record in plan.layers] == [
        ((0, 1, 2, 3), False),
        ((4, 5, 6, 7), True),
        ((8, 9, 10, 11), False),
    ]
    cost = ours.cost()
    assert (
        plan.before.parameters
        == cost.total()
        == sum(layer.weights.num_parameters for layer in ours.layers[::4])
    )
    assert plan.before.flops_per_token == cost.total("flops_per_token") == 12 * cost.layers[0].flops_per_token
    assert [row.shares for row in cost.layers[:5]] == [None, "0", "0", "0", None]
    rewritten = ours.rewrite("truncate(rank=3)", layers=[5], out=tmp_path / "out")
    ranks = [int(torch.linalg.matrix_rank(layer[0].qk.dense(), rtol=1e-5)) for layer in rewritten.layers]
    assert ranks == [6] * 4 + [3] * 4 + [6] * 4
    with pytest.raises(UsageError, match="layer 12 does not exist; layers are 0 to 11"):
        ours.plan("truncate(rank=3)", layers=[12])


def test_inspect_takes_the_number_of_any_layer(tiny: Any) -> None:
    ours, _ = tiny["three groups"]
    (found,) = ours.inspect(layers=[10]).layers
    assert (found.layer, found.caveats[0]) == (8, "layers 8 to 11 share these weights")


def test_perceiver_goes_through_its_layers_in_rounds(tmp_path: Path) -> None:
    case = TINY["perceiver"]
    model = transformers.PerceiverModel(case.configured(num_blocks=3, num_self_attends_per_block=2)).eval()
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert [(layer.name, layer.shares) for layer in ours.encoder.layers] == [
        ("encoder.0", None),
        ("encoder.1", None),
        ("encoder.2", "encoder.0"),
        ("encoder.3", "encoder.1"),
        ("encoder.4", "encoder.0"),
        ("encoder.5", "encoder.1"),
    ]


def test_borrowed_keys_and_values_are_changed_where_they_are(tmp_path: Path) -> None:
    write_checkpoint("gemma4, text", tmp_path / "gemma", vocab_size_per_layer_input=258, pad_token_id=0)
    ours = load(tmp_path / "gemma")
    assert [layer.borrows for layer in ours.layers] == [None, None, "0", "1"]
    with pytest.raises(UsageError, match="layer 2 has keys and values of layer 0: change W_K there"):
        ours.replace("2", W_K=ours[2].W_K / 2)
    with pytest.raises(UsageError, match="layer 3 has keys and values of layer 1: change W_V there"):
        ours.tie("3", "W_V", "W_K")
    changed = ours.replace("0", W_V=ours[0].W_V.flip(0))
    assert torch.equal(changed[2].W_V, changed[0].W_V)
    assert not torch.equal(changed[2].W_V, ours[2].W_V)
    run = changed.run(TEXT)
    assert torch.equal(run[2].v, run[0].v)
    assert not torch.allclose(run[2].v, ours.run(TEXT)[2].v)
    both = ours.tie("*", "W_V", "W_K")
    assert torch.equal(both[3].W_V, both[1].W_K)
