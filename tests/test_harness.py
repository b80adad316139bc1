"""The adapter for lm-evaluation-harness."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from small_checkpoints import gpt2_that_runs
from triptych.errors import UsageError
from triptych.running.decoding import score_continuations
from triptych.running.opening import open_language_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions, a token for every byte, one of which ends texts."""
    folder = gpt2_that_runs(tmp_path_factory.mktemp("gpt2"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    return folder


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; where lm_eval is not installed, over a stand-in for the class that it derives from."""
    if importlib.util.find_spec("lm_eval") is None:
        model = ModuleType("lm_eval.api.model")
        model.LM = type("LM", (), {"__init__": lambda self: None})  # type: ignore[attr-defined]
        monkeypatch.setattr("triptych.extras.is_installed", lambda name: True)
        for name, module in (("lm_eval", ModuleType("lm_eval")), ("lm_eval.api", ModuleType("lm_eval.api"))):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "lm_eval.api.model", model)
        monkeypatch.delitem(sys.modules, "triptych.harness", raising=False)
    return importlib.import_module("triptych.harness")


def asked(*arguments: Any) -> Any:
    """A request as the harness has it."""
    return SimpleNamespace(args=arguments)


def plain(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation][:-1]])).logits[0].double()
    own = logits[len(context) - 1 :]
    log_probs = own.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum()
    return float(log_probs), own.argmax(-1).tolist() == continuation


def test_the_likelihood_of_a_continuation_is_the_models_whatever_is_asked_beside_it(
    harness: Any, checkpoint: Path
) -> None:
    opened = open_language_model(checkpoint, "cpu")
    (end,) = opened.tokenizer.encode(["!"], parse_special=True)[0]
    cases = [("What is", " it"), ("a ", "b"), ("", "alone"), ("The end of it", ".")]
    found = harness.HarnessModel(str(checkpoint), "cpu", batch_size=3).loglikelihood(
        [asked(*case) for case in cases]
    )
    for (context, continuation), (log_prob, greedy) in zip(cases, found, strict=True):
        before = opened.tokenizer.encode([context.rstrip()])[0] or [end]
        whole = opened.tokenizer.encode([context + continuation])[0]
        after = whole if not context else whole[len(before) :]
        expected = plain(opened.model, before, after)
        assert (log_prob, greedy) == (pytest.approx(expected[0], rel=1e-5), expected[1])


def test_a_continuation_that_the_model_would_choose_is_greedy(harness: Any, checkpoint: Path) -> None:
    model = harness.HarnessModel(str(checkpoint), "cpu")
    for context in ("What", "is", "it"):
        (text,) = model.generate_until([asked(context, {"until": [], "max_gen_toks": 1})])
        if len(text) == 1 and text.isascii():
            break
    else:
        pytest.fail("no context has a continuation that is text")
    assert model.loglikelihood([asked(context, text)])[0][1]
    assert not model.loglikelihood([asked(context, "~" if text != "~" else "#")])[0][1]


def test_a_long_text_is_scored_whole_in_windows(harness: Any, checkpoint: Path) -> None:
    opened = open_language_model(checkpoint, "cpu")
    model = harness.HarnessModel(str(checkpoint), "cpu")
    text = "What a piece of work is a man! " * 5
    text = text.replace("!", "?")
    (found,) = model.loglikelihood_rolling([asked(text)])
    (end,) = opened.tokenizer.encode(["!"], parse_special=True)[0]
    ids = [end, *opened.tokenizer.encode([text])[0]]
    expected = 0.0
    for start in range(1, len(ids), 64):
        stop = min(start + 64, len(ids))
        before = ids[max(0, stop - 65) : start]
        expected += plain(opened.model, before, ids[start:stop])[0]
    assert found == pytest.approx(expected, rel=1e-5)


def test_text_is_generated_until_a_stop_string_and_prompts_are_cut_to_fit(
    harness: Any, checkpoint: Path
) -> None:
    model = harness.HarnessModel(str(checkpoint), "cpu")
    options = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.7}
    alone = [model.generate_until([asked(text, options)])[0] for text in ("What", "x" * 100)]
    assert model.generate_until([asked("What", options), asked("x" * 100, options)]) == alone
    assert alone[1] == model.generate_until([asked("x" * 56, options)])[0]


def test_texts_past_the_limit_lose_their_beginning(checkpoint: Path) -> None:
    opened = open_language_model(checkpoint, "cpu")
    before, after = [*range(70)], [5, 6, 7]
    (found,) = score_continuations(opened.model, [(before, after)], 64)
    assert found[0] == pytest.approx(plain(opened.model, before[-62:], after)[0], rel=1e-5)
    assert score_continuations(opened.model, [([1], [])], 64) == [(0.0, True)]
    (longer,) = score_continuations(opened.model, [([1], before)], 64)
    assert longer[0] == pytest.approx(plain(opened.model, before[-65:-64], before[-64:])[0], rel=1e-5)
    ((exact, _),) = score_continuations(opened.model.double(), [([1], after)], 64)
    assert exact == pytest.approx(plain(opened.model, [1], after)[0], rel=1e-12)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        pytest.skip("lm_eval is installed")
    monkeypatch.delitem(sys.modules, "triptych.harness", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'triptych\[lm-eval\]'"):
        importlib.import_module("triptych.harness")


def test_a_task_made_of_a_local_file_is_evaluated(checkpoint: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from triptych.harness import HarnessModel

    lines = [
        {"q": "What is", "choices": [" it", " that"], "gold": 0},
        {"q": "a", "choices": ["b", "c"], "gold": 1},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {
        "task": "local_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    model = HarnessModel(str(checkpoint), "cpu")
    found = lm_eval.simple_evaluate(model, tasks=[task], bootstrap_iters=0)
    scores = [model.loglikelihood([asked(line["q"], choice) for choice in line["choices"]]) for line in lines]
    right = [
        max(range(2), key=lambda i, of=of: of[i][0]) == line["gold"]
        for of, line in zip(scores, lines, strict=True)
    ]
    assert math.isclose(found["results"]["local_choices"]["acc,none"], sum(right) / 2)
