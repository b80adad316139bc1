"""Settings of `generation_config.json`, against `transformers` with the same file."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from face.tiny import write_checkpoint
from triptych import DataError, Model, UsageError, load
from triptych.errors import GenerationNote
from triptych.running.decoding.sampling import RowState, allowed, filtered
from triptych.running.opening.generation_config import Asked, GenerationConfig

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")
TEXT, LONG = "hear me speak", 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generation") / "model"
    write_checkpoint("llama", folder, initializer_range=0.5)
    return folder


def with_settings(folder: Path, **settings: Any) -> Model:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257, **settings}))
    return load(folder, device="cpu")


def theirs(folder: Path, ids: tuple[int, ...], **more: Any) -> list[int]:
    """What `transformers` continues with, its end left out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    read = torch.tensor([ids])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(read, attention_mask=torch.ones_like(read), pad_token_id=256, **more)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    new = found[0, len(ids) :].tolist()
    return new[:-1] if new and new[-1] in ends else new


def plain(folder: Path) -> list[int]:
    return list(with_settings(folder).generate(TEXT, max_new_tokens=LONG).ids)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_greedy_texts_are_those_of_transformers_with_the_same_file(folder: Path) -> None:
    g = plain(folder)
    assert len(g) == LONG
    changed = 0
    for settings in (
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3, "repetition_penalty": 1.05},
        {"suppress_tokens": g[:3]},
        {"begin_suppress_tokens": [g[0]]},
        {"bad_words_ids": [[g[1]], [g[4], g[5]], [257]]},
        {"bad_words_ids": [[g[3], g[4], g[5]]]},
        {"eos_token_id": g[5]},
        {"eos_token_id": [257, g[7]]},
        {"eos_token_id": g[3], "min_new_tokens": 8},
        {"eos_token_id": [g[3]], "min_length": 20},
        {"temperature": 0.6, "top_p": 0.9},
        {"do_sample": False, "top_k": 3},
        {"num_beams": 1, "guidance_scale": None, "stop_strings": None, "forced_eos_token_id": None},
    ):
        model = with_settings(folder, **settings)
        expected = theirs(folder, model.run(TEXT).ids, max_new_tokens=LONG)
        assert list(model.generate(TEXT, max_new_tokens=LONG).ids) == expected, settings
        changed += expected != g
        whole = [list(one.ids) for one in model.generate([TEXT, "O", TEXT], max_new_tokens=LONG)]
        assert whole[0] == whole[2] == expected
    assert changed >= 11


@pytest.mark.filterwarnings("ignore")
def test_lengths_are_those_of_the_file_unless_they_are_given(folder: Path) -> None:
    for settings, long in (
        ({"max_new_tokens": 5}, 5),
        ({"max_length": 17}, 17 - len(TEXT)),
        ({"max_length": 17, "max_new_tokens": 6}, 6),
        ({}, 128),
    ):
        model = with_settings(folder, eos_token_id=[], **settings)
        found = model.generate(TEXT)
        assert len(found.ids) == long
        assert found.finish in ("length", "positions")
        if settings:
            assert list(found.ids) == theirs(folder, model.run(TEXT).ids, eos_token_id=None)[:long]
        assert len(model.generate(TEXT, max_new_tokens=3).ids) == 3
        assert len(model.generate(TEXT, generation_config="ignore", max_new_tokens=9).ids) == 9
    model = with_settings(folder, max_length=8)
    with pytest.raises(UsageError, match=r"13 tokens, and max_length of generation_config\.json allows 8"):
        model.generate(TEXT)


DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    {"temperature": 1.3, "min_p": 0.1, "top_k": 0},
    {"typical_p": 0.6, "top_k": 0},
    {"typical_p": 0.9, "top_p": 0.95, "suppress_tokens": [1, 2, 3]},
    {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    {},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", DRAWS)
def test_tokens_are_drawn_from_the_probabilities_of_transformers(
    folder: Path, settings: dict[str, Any]
) -> None:
    model = with_settings(folder, do_sample=True, **settings)
    sampling = model.reader.generation.sampling(Asked())
    other = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config, _ = other._prepare_generation_config(None)
    ids = [7, 9, 5, 6, 7, 9, 6]
    other._prepare_special_tokens(config, device="cpu")
    processors = other._get_logits_processor(config, len(ids) - 2)
    torch.manual_seed(0)
    for scale in (1.0, 4.0):
        logits = scale * torch.randn(3, 258)
        rows = [RowState(0, 0, ids[:-2]) for _ in logits]
        for row in rows:
            row.take(ids[-2])
            row.take(ids[-1])
        ours = filtered(allowed(logits, sampling, rows), sampling).softmax(dim=-1)
        expected = processors(torch.tensor([ids] * 3), logits.clone()).softmax(dim=-1)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
        assert (ours > 0).sum() < 3 * 258
    with pytest.warns(GenerationNote, match="do_sample true"):
        texts = {model.generate(TEXT, seed=seed, max_new_tokens=8).text for seed in range(4)}
    assert len(texts) > 1


def test_what_is_given_wins_and_a_line_says_what_is_taken_from_the_file(folder: Path) -> None:
    model = with_settings(folder, do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.05)
    said = (
        "generation_config.json: repetition_penalty 1.05, do_sample true, temperature 0.6, top_p 0.9; top_k "
        "50, which is usual in transformers"
    )
    with pytest.warns(GenerationNote) as notes:
        model.generate(TEXT, max_new_tokens=2)
    assert [str(note.message) for note in notes] == [said]
    settings = model.reader.generation
    for asked, expected in (
        (Asked(), (1.05, 0.6, 50, 0.9)),
        (Asked(temperature=0.0), (1.05, 0.0, None, None)),
        (Asked(temperature=1.5, top_k=3), (1.05, 1.5, 3, 0.9)),
        (Asked(repetition_penalty=1.0, top_p=0.5), (1.0, 0.6, 50, 0.5)),
    ):
        found = settings.sampling(asked)
        assert (found.repetition_penalty, found.temperature, found.top_k, found.top_p) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy = model.generate(TEXT, max_new_tokens=8, temperature=0.0, repetition_penalty=1.0)
        ignored = model.generate(TEXT, max_new_tokens=8, generation_config="ignore")
        beam = model.generate(TEXT, max_new_tokens=8, beam_size=2, repetition_penalty=1.0)
    assert greedy.ids == ignored.ids
    assert beam.ids
    quiet = with_settings(folder, temperature=0.6, top_p=0.9)
    with pytest.warns(GenerationNote, match=r"most probable token each time, since do_sample is not true"):
        assert quiet.generate(TEXT, max_new_tokens=8).ids == greedy.ids
    assert quiet.reader.generation.sampling(Asked(temperature=0.5)).top_p == 0.9
    with_settings(folder, do_sample=True, temperature=0.6)
    line = [sys.executable, "-m", "triptych", "generate", str(folder), TEXT, "--max-new-tokens", "2"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stderr == (
        "triptych: generation_config.json: do_sample true, temperature 0.6; top_k 50, which is usual in "
        "transformers\n"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 3}, "num_beams is 3, which is not followed"),
        ({"sequence_bias": [[[1], -10.0]]}, "sequence_bias is"),
        ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty is 1.2"),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id is 0"),
        ({"forced_bos_token_id": 0}, "forced_bos_token_id is 0"),
        ({"exponential_decay_length_penalty": [2, 1.1]}, "exponential_decay_length_penalty"),
        ({"epsilon_cutoff": 1e-3, "do_sample": True}, "epsilon_cutoff is 0.001"),
        ({"eta_cutoff": 1e-3, "do_sample": True}, "eta_cutoff is 0.001"),
        ({"stop_strings": ["."]}, "stop_strings is"),
        ({"num_return_sequences": 2}, "num_return_sequences is 2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha is 0.6"),
    ],
)
def test_settings_without_a_counterpart_are_refused_by_name(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    model = with_settings(folder, **settings)
    with pytest.raises(UsageError, match=f"{said}.*--generation-config ignore"):
        model.generate(TEXT, max_new_tokens=2)
    assert len(model.generate(TEXT, max_new_tokens=2, generation_config="ignore").ids) == 2
    assert model.run(TEXT).loss > 0  # nothing else needs the file


def test_settings_that_a_beam_does_not_follow_are_refused_with_one(folder: Path) -> None:
    model = with_settings(folder, num_beams=4, repetition_penalty=1.2)
    with pytest.raises(UsageError, match=r"repetition_penalty is 1\.2, which is not followed with a beam"):
        model.generate(TEXT, max_new_tokens=2, beam_size=2)
    assert model.generate(TEXT, max_new_tokens=2, beam_size=2, repetition_penalty=1.0).ids


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 0.0, "do_sample": True}, "temperature is 0.0: it must be a number above 0"),
        ({"top_p": 1.5, "do_sample": True}, "top_p is 1.5: it must be above 0 and at most 1"),
        ({"top_k": "many", "do_sample": True}, "top_k is .*many.*: it must be a whole number"),
        ({"bad_words_ids": [5]}, "bad_words_ids is .*: it must be a list of lists of token ids"),
        ({"eos_token_id": "</s>"}, "eos_token_id is .*: it must be a token id, or a list of them"),
        ({"do_sample": "yes"}, "do_sample is .*: it must be true or false"),
    ],
)
def test_a_setting_of_another_kind_is_one_line(folder: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        with_settings(folder, **settings).generate(TEXT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": -1.0},
        {"eta_cutoff": 0.1},
        {"top_h": 0.1},
    ],
    ids=str,
)
def test_a_setting_of_drawing_that_is_not_followed_stops_nobody_who_draws_nothing(
    folder: Path, settings: dict[str, Any]
) -> None:
    model = with_settings(folder, **settings)
    ours = model.generate(TEXT, max_new_tokens=8)
    assert [*ours.ids] == theirs(folder, model.run(TEXT).ids, max_new_tokens=8)
    assert model.generate(TEXT, max_new_tokens=2, beam_size=2).ids
    assert model.run(TEXT).loss > 0
    (name,) = settings
    drawing = with_settings(folder, **settings, do_sample=True)
    with pytest.raises((DataError, UsageError), match=f"{name} is .*--generation-config ignore"):
        drawing.generate(TEXT, max_new_tokens=2)
    assert drawing.generate(TEXT, max_new_tokens=2, generation_config="ignore").ids


def test_every_setting_of_transformers_is_followed_refused_or_changes_no_text() -> None:
    harmless = {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "low_memory"),
        *("return_dict_in_generate", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
        *("compile_config", "disable_compile", "continuous_batching_config", "transformers_version"),
        *("_from_model_config", "remove_invalid_values"),
        # They change how fast the same text comes.
        *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "speculation_type"),
        "assistant_ensemble_weight",
        # They change what a beam finds, which `num_beams` asks for, or how scores are shown.
        *("early_stopping", "length_penalty", "renormalize_logits"),
    }
    from triptych.running.opening.generation_config import _KINDS, _NOT_FOLLOWED

    theirs = set(vars(transformers.GenerationConfig()))
    assert theirs == harmless | _KINDS.keys() | (_NOT_FOLLOWED.keys() & theirs)
    assert not harmless & (_KINDS.keys() | _NOT_FOLLOWED.keys())
    assert GenerationConfig().settings == {}
