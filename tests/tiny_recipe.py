"""A recipe for a translator that is trained in seconds, on generated sentences."""

from pathlib import Path
from typing import Any

from triptych.training import resolve
from triptych.training.corpora.generated import generate_pairs

FAST_DEMO = (
    "data.train.generated=300", "data.valid.generated=4", "data.cache=''", "tokenizer.vocab_size=400",
    "training.max_steps=3", "validation.every_steps=3", "validation.max_sentences=2",
)  # fmt: skip


def generated(train: int = 100, valid: int = 10) -> dict[str, Any]:
    """The table `data` of a recipe."""
    numbers = {"train": train, "valid": valid}
    return {part: {"generated": number, "generated_part": part} for part, number in numbers.items()}


def tiny_recipe(train: int = 100, valid: int = 5, **sections: dict[str, Any]) -> dict[str, Any]:
    """The tree of a recipe; of a section, only what differs is given."""
    usual: dict[str, Any] = {
        "data": {**generated(train, valid), "cache": ""},
        "tokenizer": {"vocab_size": 300},
        "model": {
            **{"preset": "tiny", "d_model": 16, "d_ff": 32, "num_heads": 2},
            **{"encoder": {"num_layers": 1}, "decoder": {"num_layers": 1}},
        },
        "training": {"batch_tokens": 400},
        "validation": {"bleu": False, "metric": "loss"},
    }
    return {name: {**usual.get(name, {}), **sections.get(name, {})} for name in (usual | sections)}


def text_tree(
    folder: Path, lines: list[str], task: str = "language-model", **sections: dict[str, Any]
) -> dict[str, Any]:
    """The tree of a recipe of lines, which are written; of a section, only what differs is given."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("\n".join(lines) + "\n")
    train = {"files": [str(text)], "documents": "line"}
    usual: dict[str, Any] = {
        "data": {"train": train, "cache": str(folder / "cache")},
        "tokenizer": {"vocab_size": 301},  # which no number of processes divides
        "model": {"num_layers": 1, "d_model": 16, "num_heads": 2, "context": 16},
        "training": {"batch_size": 8, "warmup_steps": 2, "learning_rate": 0.01, "threads": 1},
    }
    given = {name: {**usual.get(name, {}), **sections.get(name, {})} for name in (usual | sections)}
    return {"task": task, **given}


def text_recipe(text: Path, task: str, context: int) -> Any:
    """A recipe for a tiny model of a text, trained for one step."""
    files = {"files": [str(text)]}
    return resolve(
        {
            "task": task,
            "data": {"train": files, "valid": files, "cache": str(text.parent / "cache")},
            "tokenizer": {"vocab_size": 300},
            "model": {"num_layers": 1, "d_model": 16, "num_heads": 2, "context": context},
            "training": {"max_steps": 1, "batch_size": 2},
        }
    )


def write_sides(folder: Path, part: str, count: int) -> None:
    """Generated sentences, German in `PART.de` and English in `PART.en`."""
    pairs = generate_pairs(count, part, seed=1)
    for side, language in enumerate(("de", "en")):
        (folder / f"{part}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
