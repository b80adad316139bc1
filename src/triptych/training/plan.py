"""How long a run will take, measured before it begins."""

from triptych.training.loop import Trainer
from triptych.training.progress import duration

# Of the batch that is timed on a CPU: enough for its usual rate, and over in seconds with any model.
_TIMED_TOKENS = 1024
_DAY = 86400.0


def describe_plan(trainer: Trainer) -> str:
    """The steps to come and about how long they take on this machine; empty if there are none.

    A small batch of the text goes through the model, forward and backward, and its time is scaled to the
    tokens of the run; validations and updates of the weights are not in it. A plan that takes longer than a
    day says so, and what would make it shorter.
    """
    steps = trainer.steps_left
    if not steps:
        return ""
    text = trainer.objective.train
    passes = steps / trainer.steps_per_epoch
    indices = text.plan(0)[0]
    if trainer.device.type == "cpu":
        indices = trainer.objective.timed_part(indices, _TIMED_TOKENS)
    batch = text.collate(indices)
    tokens = batch.num_target_tokens * trainer.world.size
    seconds = passes * text.num_target_tokens * trainer.measure_seconds(batch) / tokens
    told = f"plan: {steps:,} steps, {passes:.1f} passes over the text, about {duration(seconds)}"
    if seconds <= _DAY:
        return told
    return (
        f"{told} on this machine: longer than a day. Fewer training.max_steps, a smaller model.preset, "
        "training.precision = 'bf16' or a GPU make it shorter (Ctrl-C stops, --resume goes on)"
    )
