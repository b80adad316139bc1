"""The small synthetic tasks: every answer is right, and a tokenizer has a token for every word."""

from typing import get_args

import pytest

from triptych.errors import UsageError
from triptych.training.corpora.corpora import CorpusSpec, read_parallel
from triptych.training.corpora.generated import generate_pairs
from triptych.training.corpora.tasks import TASKS, Task
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers


def answer_of_recall(source: str) -> str:
    told, asked = source.split(" ? ")
    values = dict(told.split())
    assert len(values) == 6
    assert sorted(values) == sorted(asked.split())
    return " ".join(values[key] for key in asked.split())


def answer_of_ring(source: str) -> str:
    successor = dict(zip("abcdef", "bcaefd", strict=True))
    contents = {word[0]: word[1:] for word in source.split()}
    assert contents.keys() == successor.keys()
    return " ".join(contents[successor[word[0]]] for word in source.split())


ANSWERS = {
    "copy": lambda source: source,
    "reverse": lambda source: source[::-1],
    "sort": lambda source: " ".join(sorted(source.split())),
    "recall": answer_of_recall,
    "ring": answer_of_ring,
    "modular-addition": lambda source: str(sum(int(word) for word in source.split()) % 59),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_is_right_and_the_parts_are_apart(task: str) -> None:
    parts = {part: generate_pairs(100, part, 0, task) for part in ("train", "valid", "test")}
    for source, target in (pair for pairs in parts.values() for pair in pairs):
        assert target == ANSWERS[task](source)
    sources = {part: {source for source, _ in pairs} for part, pairs in parts.items()}
    assert len(sources["valid"]) == len(sources["test"]) == 100
    assert not sources["valid"] & sources["test"]
    assert not sources["train"] & (sources["valid"] | sources["test"])


def test_every_word_is_a_token() -> None:
    for task in TASKS:
        sources, targets = zip(*generate_pairs(4000, "train", 0, task), strict=True)
        tokenizers = train_tokenizers(TokenizerSpec(vocab_size=700), sources, targets)
        for texts, tokenizer in ((sources, tokenizers.source), (targets, tokenizers.target)):
            lengths = [len(ids) for ids in tokenizer.encode(list(texts))]
            assert lengths == [len(text.split()) for text in texts], task


def test_a_corpus_of_a_task_is_read_and_more_pairs_than_there_are_is_an_error() -> None:
    spec = CorpusSpec(generated=20, generated_part="test", generated_task="ring")
    assert read_parallel(spec).target[0] == generate_pairs(1, "test", 0, "ring")[0][1]
    with pytest.raises(UsageError, match=r"^generated = 5000, .* asked for 5000 distinct sentences"):
        read_parallel(spec.model_copy(update={"generated": 5000, "generated_task": "modular-addition"}))


def test_recipes_may_name_every_task_and_no_other() -> None:
    assert get_args(Task) == tuple(TASKS)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'halve' does not exist; choose one of german-english, copy"):
        generate_pairs(1, "train", 0, "halve")
