"""What each of several processes does in `test_parallel.py`: `ranks.py CHECK [ARGUMENT…] [then CHECK …]`.

Every process compares what it got together with the others with what one process gets alone.
"""

import copy
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from triptych.core.attention import PARAMETERISATIONS
from triptych.core.models import PRESETS, EncoderDecoder, LanguageModel, LanguageModelConfig
from triptych.core.models.blocks import recompute_activations
from triptych.core.models.initial import DeferredInit
from triptych.core.models.storage import model_tensors
from triptych.errors import TriptychError
from triptych.launch import end_now
from triptych.processes import World, launched
from triptych.running.text import TokenSequences
from triptych.training import TrainingConfig, ValidationConfig
from triptych.training.computing import Computing, LazyParameters, NotCounted, Whole, rows_of_rank
from triptych.training.corpora.encoded import EncodedCorpus
from triptych.training.corpora.packing import NOT_COUNTED, LanguageBatch
from triptych.training.corpora.pair_batches import TokenBatches
from triptych.training.distributed import spread as in_shards
from triptych.training.objectives import LanguageObjective, Objective, TranslationObjective
from triptych.training.optimizers import Optimizer
from triptych.training.sections import OptimisationConfig
from triptych.training.sharded_state import ShardedStates, read_sharded_state
from triptych.training.state import Counters, find_state, read_counters

# No number of ranks here divides it.
VOCAB = 37
CONTEXT = 7


@dataclass(frozen=True)
class Rows:
    """Rows of a language model's text, drawn by their numbers."""

    masked: bool
    plans: list[np.ndarray] = field(default_factory=list)

    def plan(self, epoch: int) -> list[np.ndarray]:
        del epoch
        return self.plans

    def collate(self, indices: np.ndarray) -> LanguageBatch:
        rows = [np.random.default_rng(int(index)).integers(0, VOCAB, CONTEXT + 1) for index in indices]
        tokens = torch.from_numpy(np.stack(rows))
        ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
        if self.masked:
            targets[:, ::2] = NOT_COUNTED
        # As many targets as its number says, so that ranks have different numbers of them.
        for row, index in zip(targets, indices.tolist(), strict=True):
            row[1 + index % (CONTEXT - 1) :] = NOT_COUNTED
        return LanguageBatch(ids, targets, None, int((targets != NOT_COUNTED).sum()))

    @property
    def num_target_tokens(self) -> int:
        return 1


def translation(tie: str = "all", dropout: float = 0.0, **attention: object) -> Objective[Any, Any]:
    config = PRESETS["tiny"].model_dump(exclude_none=True)
    site = {"num_layers": 2, "attention": attention}
    sizes = {"d_model": 16, "d_ff": 8, "num_heads": 2, "dropout": dropout, "tie_embeddings": tie}
    config |= {**sizes, "encoder": site, "decoder": {**site, "cross_attention": attention}}
    model = EncoderDecoder.of(type(PRESETS["tiny"]).model_validate(config), VOCAB, VOCAB, 0)
    lengths = np.random.default_rng(0).integers(1, 9, 40)
    sides = [
        TokenSequences.pack([np.random.default_rng([side, i]).integers(3, VOCAB, n).tolist()
                             for i, n in enumerate(lengths)])
        for side in range(2)
    ]  # fmt: skip
    corpus = EncodedCorpus(*sides, np.arange(40), "made up")
    batches = TokenBatches(corpus, max_tokens=30, seed=0, pad_id=0, bos_id=1, eos_id=2)
    validation = ValidationConfig(bleu=False, metric="loss")
    return TranslationObjective(model, batches, batches, TrainingConfig(), validation, None)


def language(
    kind: str = "decoder",
    *,
    tie: bool = True,
    positions: str = "rotary",
    dropout: float = 0.0,
    **attention: object,
) -> Objective[Any, Any]:
    config = LanguageModelConfig.model_validate(
        {"num_layers": 2, "d_model": 16, "d_ff": 8, "num_heads": 2, "tie_embeddings": tie, "norm_kind": "rms",
         "dropout": dropout, "context": CONTEXT, "positions": {"scheme": positions}, "attention": attention}
    )  # fmt: skip
    model = LanguageModel.of(config, kind, VOCAB)  # type: ignore[arg-type]
    rows = Rows(masked=kind == "encoder")
    return LanguageObjective(model, rows, rows, 1.0)  # type: ignore[arg-type]


# Two batches of an update: one that the ranks do not divide, and one with fewer rows than ranks.
UPDATE = [np.array([0, 1, 2, 3, 4]), np.array([5])]


def new_optimizer(objective: Objective[Any, Any]) -> Optimizer:
    return Optimizer(OptimisationConfig(optimizer="adamw", adam_epsilon=1e-2), objective.model)


def spread(objective: Objective[Any, Any], kind: str, precision: str, world: World, **more: Any) -> Computing:
    if kind == "ddp":
        return Whole(objective, precision, world)
    return in_shards(objective, kind, precision, world, **more)  # type: ignore[arg-type]


def learn(
    computing: Computing,
    objective: Objective[Any, Any],
    world: World | None,
    rounds: int = 1,
    optimizer: Optimizer | None = None,
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Gradients of an update, then steps of the optimizer; the loss, the norm and the gradients."""
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    optimizer = optimizer or new_optimizer(objective)
    computing.set_mode(training=True)
    gradients: dict[str, torch.Tensor] = {}
    total = norm = 0.0
    for step in range(1, rounds + 1):
        optimizer.zero_grad()
        computing.begin_update(step)
        parts = []
        for indices in UPDATE:
            own, counted = rows_of_rank(indices, rank, size)
            batch = objective.train.collate(own)
            parts.append(batch if counted else NotCounted(batch))
        counts = [sum(float(part.num_target_tokens) for part in parts)]
        tokens = int(counts[0] if world is None else world.sum(counts)[0])
        losses = [
            computing.learn(part, step, tokens, last=number == len(parts)).item()
            for number, part in enumerate(parts, start=1)
        ]
        total = sum(losses) if world is None else world.sum([sum(losses)])[0]
        if not gradients:
            named = objective.model.named_parameters()
            gradients = {name: whole(weight.grad) for name, weight in named if weight.grad is not None}
        norm = computing.clip(0.05)
        optimizer.step(0.05)
        computing.follow()
    return total, norm, gradients


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def assert_learns_alike(
    make: Callable[[], Objective[Any, Any]], kind: str, world: World, rounds: int = 2
) -> None:
    """A spread model and one process learn the same."""
    torch.manual_seed(3)
    alone = make()
    together = copy.deepcopy(alone)
    expected = learn(Whole(alone, "fp32"), alone, None, rounds)
    computing = spread(together, kind, "fp32", world)
    found = learn(computing, together, world, rounds)
    assert found[2].keys() == expected[2].keys(), found[2].keys() ^ expected[2].keys()
    for name, gradient in expected[2].items():
        assert_close(name, found[2][name], gradient, rtol=1e-5)
    assert abs(found[0] - expected[0]) < 1e-4 * abs(expected[0]), (found[0], expected[0])
    assert abs(found[1] - expected[1]) < 1e-4 * expected[1], (found[1], expected[1])
    weights = dict(together.model.named_parameters())
    for name, weight in alone.model.named_parameters():
        assert_close(name, whole(weights[name]), weight.detach(), rtol=1e-4)
    for on_host in (False, True):
        with computing.whole(on_host=on_host) as gathered:
            assert (gathered is not None) == world.is_first
        if gathered is not None:
            batch = alone.train.collate(UPDATE[0])
            expected_loss, loss = (alone.loss(model, batch).likelihood for model in (alone.model, gathered))
            assert_close("the whole model's loss", loss, expected_loss, rtol=1e-4)


def assert_close(name: str, found: torch.Tensor, expected: torch.Tensor, rtol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6, msg=lambda told: f"{name}: {told}")


def gradients_of_three_kinds(world: World, arguments: Sequence[str]) -> None:
    for kind in arguments:
        assert_learns_alike(translation, kind, world)
        assert_learns_alike(lambda: language(tie=False, qk_norm=True, output_gate=True), kind, world)
        assert_learns_alike(lambda: language("encoder", positions="learned"), kind, world)


SITES: dict[str, dict[str, Any]] = {
    "factored": {"d_k": 3, "d_v": 5}, "bilinear": {"num_heads": 1}, "stacked": {}, "symmetric": {},
    "shared": {}, "key_value": {}, "four_matrix": {}, "direct": {}, "grouped": {"num_kv_heads": 1},
    "differential": {"num_kv_heads": 1}, "latent": {"d_latent": 9}, "collaborative": {"d_shared": 6},
    "identity_query": {}, "identity_value": {}, "identity_output": {}, "identity_ov": {},
}  # fmt: skip


def every_parameterisation(world: World, arguments: Sequence[str]) -> None:
    assert SITES.keys() == PARAMETERISATIONS.keys()
    for kind in arguments:
        for name, options in SITES.items():
            assert_learns_alike(
                lambda site={"projections": name, **options}: translation("target", **site), kind, world, 1
            )


def narrow_blocks(world: World, arguments: Sequence[str]) -> None:
    """In bfloat16, losses and norms are near those of float32, and not equal to them."""
    for kind in arguments:
        torch.manual_seed(3)
        for alone in (translation(), language(positions="learned")):
            together = copy.deepcopy(alone)
            expected = learn(Whole(alone, "fp32"), alone, None, 3)
            computing = spread(together, kind, "bf16", world)
            found = learn(computing, together, world, 3)
            assert found[0] != expected[0]
            assert abs(found[0] - expected[0]) < 0.02 * abs(expected[0]), (found[0], expected[0])
            assert abs(found[1] - expected[1]) < 0.1 * expected[1], (found[1], expected[1])


def blocks_that_compute_again(world: World, arguments: Sequence[str]) -> None:
    """Activation checkpointing changes no bit, with dropout and in bfloat16."""
    for kind in arguments:
        for make, precision in ((translation, "fp32"), (language, "bf16")):
            found = []
            for recompute in (False, True):
                torch.manual_seed(3)
                objective = make(dropout=0.2)
                if recompute:
                    recompute_activations(objective.model.blocks)
                found.append(learn(spread(objective, kind, precision, world), objective, world, 2))
            assert found[0][:2] == found[1][:2]
            assert all(torch.equal(found[1][2][name], value) for name, value in found[0][2].items())


def muon(world: World, arguments: Sequence[str]) -> None:
    """The changes of matrices are those of one process."""
    for kind in arguments:
        torch.manual_seed(3)
        alone = language(tie=False)
        together = copy.deepcopy(alone)
        begun = {name: value.detach().clone() for name, value in alone.model.named_parameters()}
        chosen = OptimisationConfig(optimizer="muon", adam_epsilon=1e-2)
        learn(Whole(alone, "fp32"), alone, None, 2, Optimizer(chosen, alone.model))
        computing = spread(together, kind, "fp32", world)
        learn(computing, together, world, 2, Optimizer(chosen, together.model))
        weights = dict(together.model.named_parameters())
        for name, weight in alone.model.named_parameters():
            # The iteration is in bfloat16, which shows in single entries.
            change, apart = weight.detach() - begun[name], whole(weights[name]) - weight.detach()
            assert apart.norm() < 0.05 * change.norm(), (kind, name, apart.norm() / change.norm())


def states_in_shards(world: World, arguments: Sequence[str]) -> None:
    """A state of shards, written while training goes on, is read whole by every other layout."""
    folder = Path(arguments[0])
    torch.manual_seed(3)
    alone = language(tie=True)
    objectives = {kind: copy.deepcopy(alone) for kind in ("fsdp", "ddp", "alone")}
    saving = spread(objectives["fsdp"], "fsdp", "fp32", world)
    learn(Whole(alone, "fp32"), alone, None, 3)
    optimizer = new_optimizer(objectives["fsdp"])
    learn(saving, objectives["fsdp"], world, 2, optimizer)
    states = ShardedStates(folder, world, keep=1)
    tensors = {f"model.{name}": value for name, value in model_tensors(objectives["fsdp"].model).items()}
    states.save(Counters(step=2), {**tensors, **dict(optimizer.tensors())}, lambda: None)
    with torch.no_grad():
        for weight in objectives["fsdp"].model.parameters():
            weight.mul_(0.0)  # what is saved must not follow
    states.finish()
    path = find_state(folder)
    assert path is not None
    assert read_counters(folder).step == 2
    for kind in ("ddp", "fsdp", "alone"):
        objective = objectives[kind]
        computing: Computing = Whole(objective, "fp32") if kind == "alone" else saving
        if kind == "ddp":
            computing = spread(objective, "ddp", "fp32", world)
        resumed = new_optimizer(objective)
        read_sharded_state(path, objective.model, resumed, World() if kind == "alone" else world)
        learn(computing, objective, None if kind == "alone" else world, 1, resumed)
        weights = dict(objective.model.named_parameters())
        for name, weight in alone.model.named_parameters():
            assert_close(f"{kind}: {name}", whole(weights[name]), weight.detach(), rtol=1e-4)


def made_in_shards(world: World, arguments: Sequence[str]) -> None:
    """A model that is made in shards begins as one that is made whole, and is never whole."""
    for kind in arguments:
        for precision in ("fp32", "bf16"):
            for make in (translation, language, lambda: language("encoder", tie=False, positions="learned")):
                torch.manual_seed(3)
                expected = dict(make().model.named_parameters())
                torch.manual_seed(3)
                with DeferredInit() as deferred:
                    objective = make()
                parameters = LazyParameters(torch.device("cpu"), deferred.values(objective.model))
                computing = spread(objective, kind, precision, world, parameters=parameters)
                found = {name: whole(weight) for name, weight in objective.model.named_parameters()}
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], value) for name, value in expected.items())
                if precision == "fp32":
                    assert learn(computing, objective, world, 2)[0] > 0


def memory_of_shards(world: World, arguments: Sequence[str]) -> None:
    """Building takes the memory of the shards and of a few parameters, not that of the model."""
    sizes = {"num_layers": 24, "d_model": 256, "d_ff": 1024, "num_heads": 2, "context": CONTEXT}
    with DeferredInit() as deferred:
        small = language()
    parameters = LazyParameters(torch.device("cpu"), deferred.values(small.model))
    spread(small, "fsdp", "fp32", world, parameters=parameters)  # torch imports what it needs
    with DeferredInit() as deferred:
        model = LanguageModel.of(LanguageModelConfig.model_validate(sizes), "decoder", VOCAB)
    rows = Rows(masked=False)
    objective = LanguageObjective(model, rows, rows, 1.0)  # type: ignore[arg-type]
    num_bytes = sum(4 * weight.numel() for weight in model.parameters())
    assert num_bytes > 70e6
    parameters = LazyParameters(torch.device("cpu"), deferred.values(model))
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident_bytes("VmRSS")
    spread(objective, "fsdp", "fp32", world, parameters=parameters)
    taken = resident_bytes("VmHWM") - before
    assert taken < 0.75 * num_bytes, (taken, num_bytes)


def resident_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:")) * 1024


def full_disk(world: World, arguments: Sequence[str]) -> None:
    """One rank cannot write: all say so, and the state before stays."""
    folder = Path(arguments[0])
    torch.manual_seed(3)
    objective = language(tie=True)
    spread(objective, "fsdp", "fp32", world)
    tensors = {f"model.{name}": value for name, value in model_tensors(objective.model).items()}
    states = ShardedStates(folder, world, keep=1)
    states.save(Counters(step=1), tensors, lambda: None)
    states.finish()
    if world.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    states.save(Counters(step=2), tensors, lambda: None)
    with pytest.raises(TriptychError, match=r"could not be saved \(rank 1: "):
        states.finish()
    assert read_counters(folder).step == 1


def another_text(world: World, arguments: Sequence[str]) -> None:
    world.require_same({"the text": "same"})
    with pytest.raises(TriptychError, match="rank 1 has another version of the text"):
        world.require_same({"the text": str(world.rank)})


def main() -> None:
    torch.set_num_threads(1)
    with launched("cpu", 2.0) as world:
        for call in " ".join(sys.argv[1:]).split(" then "):
            check, *arguments = call.split()
            globals()[check](world, arguments)
    end_now(0)


if __name__ == "__main__":
    main()
