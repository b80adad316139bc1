"""Models with the head of a task run, change and are written as others, with the logits of `transformers`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triptych
from checkpoints.oracle import changed, has_experts, in_float64, saved
from checkpoints.runs import NOT_SAVED, RUNS, TOLERANCE, some
from checkpoints.tiny_models import TINY
from triptych.core.checkpoints.source import Source
from triptych.core.models.storage import read_own_model
from triptych.errors import ConfigurationWarning, TriptychError, UsageError

transformers = pytest.importorskip("transformers")
modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")

_TASKS = (
    *("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"),
    "NextSentencePrediction",
)


def _all_classes() -> dict[str, str]:
    """Classes with the head of a task of every type of models that is run, with a run of the type."""
    of_type: dict[str, str] = {}
    for name, run in RUNS.items():
        of_type.setdefault(run.of_class.config_class.model_type, name)
    found = {}
    for task in _TASKS:
        words = re.sub(r"(?<!^)(?=[A-Z])", "_", task).upper()
        names = getattr(modeling_auto, f"MODEL_FOR_{words}_MAPPING_NAMES")
        found |= {names[kind]: run for kind, run in of_type.items() if kind in names}
    return found


_CLASSES = _all_classes()
_IN_EVERY_RUN = (
    *(f"{model}ForSequenceClassification" for model in ("Bert", "Roberta", "ModernBert", "GPT2", "Bart")),
    *(f"{model}ForSequenceClassification" for model in ("MBart", "EuroBert", "OPT")),
    *("ElectraForMultipleChoice", "DistilBertForTokenClassification", "LlamaForQuestionAnswering"),
    "T5ForTokenClassification",
)
_LABELS = {0: "no", 1: "maybe", 2: "yes"}
_IDS = [7, 5, 21, 33, 9, 14, 2, 1]  # the last two end a text of BART and of T5


def _made(name: str, folder: Path, **changes: Any) -> Any:
    """A tiny model of a class with a head, in float64, saved in a folder."""
    of_class = getattr(transformers, name)
    numbered = {"id2label": _LABELS} if "QuestionAnswering" not in name else {}
    if "NextSentence" in name:
        numbered = {}

    run = RUNS[_CLASSES[name]]

    def configure() -> Any:
        settings = {**TINY[run.tiny].settings, **run.settings, **numbered, **changes}
        config = of_class.config_class(**settings)
        # Falcon's "eager" adds the bias of ALiBi twice (transformers 5.23).
        config._attn_implementation = "sdpa" if run.tiny.startswith("falcon") else "eager"
        if has_experts(config):
            config._experts_implementation = "eager"
        return config

    return saved(of_class, configure, folder, leave=NOT_SAVED.get(run.tiny, ""))


def _theirs(model: Any, ids: list[int]) -> Tensor:
    """The logits of a text, those of start and end next to each other."""
    read = torch.tensor([ids])
    if "MultipleChoice" in type(model).__name__:
        read = read[None]
    with in_float64(), torch.no_grad():
        found = model(input_ids=read)
    if found.get("start_logits") is not None:
        return torch.stack((found["start_logits"], found["end_logits"]), dim=-1)[0]
    return found["logits"][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", some(_CLASSES, _IN_EVERY_RUN))
def test_the_logits_of_a_task_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    expected = _theirs(_made(name, tmp_path), _IDS)
    run = triptych.load(tmp_path).run(_IDS)
    assert run.logits.shape == expected.shape
    assert (run.logits - expected).abs().max() < TOLERANCE.get(_CLASSES[name], 1e-10)
    assert run.labels is not None
    assert len(run.labels) == expected.shape[-1]
    if expected.shape[-1] == len(_LABELS):
        assert run.labels == (*_LABELS.values(),)


def test_an_encoder_alone_is_run_with_the_family_file_of_both_stacks_too(tmp_path: Path) -> None:
    expected = _theirs(_made("T5ForTokenClassification", tmp_path), _IDS)
    file = Path(triptych.__file__).with_name("core") / "checkpoints" / "families" / "t5.toml"
    run = triptych.load(tmp_path, family=file).run(_IDS)
    assert (run.logits - expected).abs().max() < 1e-10


def test_classes_with_the_encoder_alone_are_told_from_classes_with_both_stacks() -> None:
    def translates(name: str) -> bool:
        record = {"architectures": [name], "is_encoder_decoder": True}
        return Source("model", record, "model", Path("model")).translates

    assert not translates("UMT5EncoderModel")
    assert not translates("MT5ForTokenClassification")
    assert translates("T5ForQuestionAnswering")
    assert translates("T5GemmaForTokenClassification")


def test_a_head_reads_the_mean_of_all_tokens_where_its_configuration_says_so(tmp_path: Path) -> None:
    model = _made("ModernBertForSequenceClassification", tmp_path, classifier_pooling="mean")
    run = triptych.load(tmp_path).run(_IDS)
    assert (run.logits - _theirs(model, _IDS)).abs().max() < 1e-10


def test_a_head_reads_the_last_token_that_is_no_padding(tmp_path: Path) -> None:
    model = _made("GPT2ForSequenceClassification", tmp_path, pad_token_id=0)
    long, short = triptych.load(tmp_path).run([_IDS, [*_IDS[:4], 0, 0]])
    assert (long.logits - _theirs(model, _IDS)).abs().max() < 1e-10
    assert (short.logits - _theirs(model, [*_IDS[:4], 0, 0])).abs().max() < 1e-10
    assert (short.logits - _theirs(model, _IDS[:4])).abs().max() < 1e-10


def test_a_head_that_reads_the_end_token_refuses_a_text_without_one(tmp_path: Path) -> None:
    _made("BartForSequenceClassification", tmp_path)
    with pytest.raises(UsageError, match="reads the last end token"):
        triptych.load(tmp_path).run(_IDS[:-2])


_USED = ("BertForSequenceClassification", "Qwen2ForSequenceClassification", "T5ForQuestionAnswering")


@pytest.mark.parametrize("name", some(_USED, {"BertForSequenceClassification", "T5ForQuestionAnswering"}))
def test_models_with_a_task_are_attended_changed_checked_rewritten_and_saved(
    name: str, tmp_path: Path
) -> None:
    _made(name, tmp_path / "in")
    model = triptych.load(tmp_path / "in")
    before = model.run(_IDS).logits
    assert model.check().logits < 1e-4
    assert len(model.attend(_IDS).tokens) == len(_IDS)
    place = "encoder.0.1" if "T5" in name else "0.1"
    assert not torch.equal(model.ablate([place]).run(_IDS).logits, before)
    rewritten = model.rewrite("truncate(rank=2, forms=['ov'])")
    rewritten.save(tmp_path / "out")
    again = triptych.load(tmp_path / "out").run(_IDS)
    assert not torch.equal(again.logits, before)
    assert torch.allclose(again.logits, rewritten.run(_IDS).logits)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [name]


def test_a_tied_table_of_tokens_gives_no_logits_of_a_task(tmp_path: Path) -> None:
    model = _made("Qwen2ForSequenceClassification", tmp_path, tie_word_embeddings=True)
    run = triptych.load(tmp_path).run(_IDS)
    assert (run.logits - _theirs(model, _IDS)).abs().max() < 1e-10


def test_a_head_that_no_family_describes_is_named_and_the_model_runs_to_its_last_state(
    tmp_path: Path,
) -> None:
    model = _made("BertForSequenceClassification", tmp_path)
    other_head = {"classifier.weight": None, "classifier.bias": None, "judge.weight": torch.randn(2, 24)}
    changed(tmp_path, other_head)
    with pytest.warns(ConfigurationWarning, match=r"judge\.weight of the head of its class are not run"):
        run = triptych.load(tmp_path).run(_IDS)
    with in_float64(), torch.no_grad():
        expected = model.bert(torch.tensor([_IDS])).last_hidden_state[0]
    assert (run.logits - expected).abs().max() < 1e-10
    assert run.labels is None


@pytest.mark.parametrize(
    "name", ["AlbertForMultipleChoice", "BartForSequenceClassification", "GPT2ForTokenClassification"]
)
def test_the_head_of_a_task_is_checked_against_transformers(name: str, tmp_path: Path) -> None:
    _made(name, tmp_path)
    checked = triptych.load(tmp_path).check()
    assert checked.logits < 1e-4 < checked.largest
    assert checked.loss is None


def test_a_task_predicts_no_tokens_and_says_so(tmp_path: Path) -> None:
    _made("BartForSequenceClassification", tmp_path / "bart")
    _made("GPT2ForSequenceClassification", tmp_path / "gpt2")
    for folder in ("bart", "gpt2"):
        model = triptych.load(tmp_path / folder)
        assert not {"translate", "generate", "fill"} & {*model.can}
        with pytest.raises(UsageError, match="predicts no next token"):
            _ = model.run(_IDS).loss


_TWO_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForPreTraining": ("bert", {}),
    "AlbertForPreTraining": ("albert", {}),
    "ErnieForPreTraining": ("ernie", {}),
    "MegatronBertForPreTraining": ("megatron-bert", {}),
    "GPT2DoubleHeadsModel": ("gpt2", {"num_labels": 1}),
    "OpenAIGPTDoubleHeadsModel": ("openai-gpt", {"num_labels": 1}),
}


@pytest.mark.parametrize("name", some(_TWO_HEADS, ("BertForPreTraining", "GPT2DoubleHeadsModel")))
def test_of_two_heads_each_gives_its_logits(name: str, tmp_path: Path) -> None:
    tiny, changes = _TWO_HEADS[name]

    def configure() -> Any:
        return TINY[tiny].configured(**changes)

    model = saved(getattr(transformers, name), configure, tmp_path)
    ids = torch.tensor([_IDS])
    with in_float64(), torch.no_grad():
        found = model(ids[None] if "DoubleHeads" in name else ids)
    first, second = [found[key].squeeze(0) for key in found if key.endswith("logits")]
    run = triptych.load(tmp_path).run(_IDS)
    assert (run.logits - first.squeeze(0)).abs().max() < 1e-10
    assert run.second_logits is not None
    assert run.second_logits.shape == second.squeeze(0).reshape(-1).shape
    assert (run.second_logits - second.reshape(-1)).abs().max() < 1e-10
    assert run.second_labels is not None
    assert len(run.second_labels) == len(run.second_logits)
    assert run.labels is None


def test_a_head_of_choices_has_the_activation_of_its_configuration(tmp_path: Path) -> None:
    def configure() -> Any:
        return TINY["gpt2"].configured(num_labels=1, summary_activation="tanh")

    model = saved(transformers.GPT2DoubleHeadsModel, configure, tmp_path)
    with in_float64(), torch.no_grad():
        expected = model(torch.tensor([[_IDS]])).mc_logits
    found = triptych.load(tmp_path).run(_IDS).second_logits
    assert found is not None
    assert (found - expected.reshape(-1)).abs().max() < 1e-10


# A class for each choice of the rows that a head reads, and for norms and activations of its maps.
_WRITTEN = (
    *(f"{model}ForSequenceClassification" for model in ("Bert", "Qwen2", "Bart", "EuroBert", "ModernBert")),
    *("BertForTokenClassification", "BertForQuestionAnswering", "T5GemmaForSequenceClassification"),
    *("BertForPreTraining", "GPT2DoubleHeadsModel"),
)


@pytest.mark.parametrize("name", some(_WRITTEN, ("ModernBertForSequenceClassification", *_WRITTEN[-2:])))
def test_a_model_with_a_head_is_written_as_a_run_with_it(name: str, tmp_path: Path) -> None:
    if name in _TWO_HEADS:
        saved(getattr(transformers, name), TINY[_TWO_HEADS[name][0]].configured, tmp_path / "in")
    else:
        _made(name, tmp_path / "in")
    module = triptych.load(tmp_path / "in").reader.model
    triptych.load(module).save(tmp_path / "out")
    again = read_own_model(tmp_path / "out")
    assert again.architecture == module.architecture
    before = module.state_dict()
    after = again.state_dict()
    assert after.keys() == before.keys()
    assert any(key.startswith(("task.", "second.", "decoder.task.")) for key in after)
    assert all(torch.equal(after[key], before[key]) for key in after)


def test_numbers_that_overflow_in_the_second_head_are_told_of_it(tmp_path: Path) -> None:
    model = saved(transformers.BertForPreTraining, TINY["bert"].configured, tmp_path)
    with in_float64(), torch.no_grad():
        read = model.bert(torch.tensor([_IDS])).pooler_output
    changed(tmp_path, {"cls.seq_relationship.weight": 1.7e308 * read.sign().repeat(2, 1)})
    with pytest.raises(TriptychError, match="the head of the model computed numbers that are not finite"):
        triptych.load(tmp_path).run(_IDS)


def test_a_changed_pair_changes_the_logits_of_both_heads_and_one_head_has_none(tmp_path: Path) -> None:
    saved(transformers.BertForPreTraining, TINY["bert"].configured, tmp_path / "two")
    model = triptych.load(tmp_path / "two")
    before = model.run(_IDS)
    after = model.ablate(["0.1"]).run(_IDS)
    assert before.second_labels == ("next", "random")
    assert not torch.equal(after.second_logits, before.second_logits)
    model.rewrite("fold_value_bias").save(tmp_path / "out")
    again = triptych.load(tmp_path / "out").run(_IDS)
    assert torch.allclose(again.second_logits, before.second_logits)
    saved(transformers.BertForMaskedLM, TINY["bert"].configured, tmp_path / "one")
    assert triptych.load(tmp_path / "one").run(_IDS).second_logits is None
