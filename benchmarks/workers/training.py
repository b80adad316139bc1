"""What the workers of the training table share: the text, the step, the judgement.

A contender brings a `Learner`; most need only a model that gives logits. Requests:

    {"batches": N}      N steps over the first N batches; answers seconds, tokens, loss
    {"curve": STEPS, "every": E}   as many steps over batches that do not repeat, judged every E
"""

import copy
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.workers.protocol import Answer, Options, Prepared
from triptych.training import TrainingConfig, learning_rate
from triptych.training.corpora.pair_batches import Batch

LABEL_SMOOTHING = 0.1
DROPOUT = 0.1
D_MODEL, D_FF, NUM_HEADS, NUM_LAYERS = 256, 1024, 4, 3
# One schedule for all: 100 steps up, then the paper's way down.
SCHEDULE = TrainingConfig(
    learning_rate=7e-4, warmup_steps=100, label_smoothing=LABEL_SMOOTHING, adam_beta2=0.98, adam_epsilon=1e-9
)
_WARM_UP_BATCHES = 3
_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@dataclass(frozen=True)
class Text:
    """The batches, and the ids that mean something."""

    train: list[Batch]
    valid: list[Batch]
    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int


class Learner(ABC):
    """A contender's model, and how it takes a step."""

    model: nn.Module

    @abstractmethod
    def step(self, batch: Batch) -> float:
        """One update; the smoothed loss a token."""

    @abstractmethod
    def valid_loss(self, batches: Sequence[Batch]) -> float:
        """Cross-entropy a target token without smoothing, in nats, computed in float32."""


@final
class LogitsLearner(Learner):
    """A model that gives logits at every position, trained as its users do.

    Options: `precision` ("fp32", "fp32 with bf16 products", "bf16 autocast", "bf16 weights"),
    `optimizer` ("fused", "foreach"), `kernel` of torch's fused attention ("math kernel" or its own choice),
    `compiled`, `device` ("cpu").
    """

    def __init__(
        self,
        model: nn.Module,
        logits: Callable[[nn.Module, Batch], Tensor],
        options: Options,
        text: Text,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """Put a learner together.

        Args:
            model: with fresh weights.
            logits: `[batch, tgt_len, vocab]` of a batch, by a model.
            options: of the setting.
            text: for its pad_id.
            loss: sum over tokens, of logits and targets; torch's cross-entropy if None.
        """
        if options["precision"] == "fp32 with bf16 products":
            torch.set_float32_matmul_precision("medium")
        self.narrow = options["precision"] == "bf16 weights"
        self.autocast = options["precision"] == "bf16 autocast"
        self.device = options.get("device", "cpu")
        self.model = model.to(self.device, torch.bfloat16 if self.narrow else None)
        self.model.train()
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=0.0,
            betas=(SCHEDULE.adam_beta1, SCHEDULE.adam_beta2),
            eps=SCHEDULE.adam_epsilon,
            fused=options.get("optimizer", "fused") == "fused",
            foreach=True if options.get("optimizer") == "foreach" else None,
        )
        self.kernels = [SDPBackend.MATH] if options.get("kernel") == "math kernel" else list(_KERNELS)
        self.logits = logits
        self.pad_id = text.pad_id
        self.loss = loss or self._cross_entropy
        self.called: Any = torch.compile(self.model, dynamic=True) if options.get("compiled") else self.model
        self.steps = 0

    def step(self, batch: Batch) -> float:
        """Forward, backward, Adam."""
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps, SCHEDULE, D_MODEL)
        self.optimizer.zero_grad()
        with sdpa_kernel(self.kernels):
            with self._precision():
                total = self.loss(self.logits(self.called, batch), batch.tgt_out)
            loss = total / batch.num_target_tokens
            loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def valid_loss(self, batches: Sequence[Batch]) -> float:
        """Of a copy in float32."""
        return valid_loss(self.model, self.logits, batches, self.pad_id)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16) if self.autocast else nullcontext()

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            targets.reshape(-1),
            ignore_index=self.pad_id,
            label_smoothing=LABEL_SMOOTHING,
            reduction="sum",
        )


def valid_loss(
    model: nn.Module, logits: Callable[[nn.Module, Batch], Tensor], batches: Sequence[Batch], pad_id: int
) -> float:
    """Cross-entropy a target token without smoothing, in nats, of a float32 copy of a model."""
    judged = copy.deepcopy(model).float().eval()
    of_training = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    total = tokens = 0.0
    with torch.no_grad():
        for batch in batches:
            found = logits(judged, batch).float()
            targets = batch.tgt_out.reshape(-1)
            loss = F.cross_entropy(
                found.reshape(-1, found.shape[-1]), targets, ignore_index=pad_id, reduction="sum"
            )
            total += float(loss)
            tokens += batch.num_target_tokens
    torch.set_float32_matmul_precision(of_training)
    return total / tokens


def prepare(options: Options, build: Callable[[Options, Text], Learner]) -> Prepared:
    """Read the text, build the learner, warm it up."""
    torch.set_num_threads(options["threads"])
    torch.manual_seed(options.get("seed", 1))
    text = read_text(options["text"])
    started = time.perf_counter()
    learner = build(options, text)
    # What is compiled meets new shapes for longer.
    first = _WARM_UP_BATCHES * (3 if options.get("compiled") else 1)
    for batch in text.train[:first] if options.get("warm_up", True) else ():
        learner.step(batch)
    about = {
        "parameters": sum(p.numel() for p in learner.model.parameters() if p.requires_grad),
        "threads": torch.get_num_threads(),
        "prepared_seconds": round(time.perf_counter() - started, 2),
    }

    def work(request: Options) -> Answer:
        if "curve" in request:
            return _curve(learner, text, request["curve"], request["every"])
        return _steps(learner, text.train[: request["batches"]])

    return about, work


def read_text(path: str) -> Text:
    """What `harness.workload.prepare_training` wrote."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["about"])

        def batches(part: str, number: int) -> list[Batch]:
            sides = ("src", "tgt_in", "tgt_out")
            found = []
            for i in range(number):
                src, tgt_in, tgt_out = (file.get_tensor(f"{part}.{i}.{side}").long() for side in sides)
                tokens = int((tgt_out != about["pad_id"]).sum())
                found.append(Batch(src, tgt_in, tgt_out, tuple(range(1, len(src) + 1)), tokens))
            return found

        return Text(
            train=batches("train", about["num_train"]),
            valid=batches("valid", about["num_valid"]),
            vocab_size=about["vocab_size"],
            pad_id=about["pad_id"],
            bos_id=about["bos_id"],
            eos_id=about["eos_id"],
        )


def _steps(learner: Learner, batches: Sequence[Batch]) -> Answer:
    started = time.perf_counter()
    for batch in batches:
        loss = learner.step(batch)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": sum(batch.num_target_tokens for batch in batches), "loss": loss}


def _curve(learner: Learner, text: Text, steps: int, every: int) -> Answer:
    judged = {}
    for number, batch in enumerate(text.train[:steps], start=1):
        learner.step(batch)
        if number % every == 0:
            judged[number] = learner.valid_loss(text.valid)
    return {"valid_loss": judged}
