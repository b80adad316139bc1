"""Encoder-decoders of others searched by our engine, against `generate` of `transformers`."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import triptych
from checkpoints.oracle import in_float64
from checkpoints.runs import made, some
from checkpoints.tiny_translators import WORDS, translator_folder, write_tokenizer
from decoding.plain_search import search
from triptych.core.checkpoints.stored_models import load_encoder_decoder
from triptych.core.models import EncoderDecoder
from triptych.errors import TriptychError, UsageError
from triptych.running.decoding import Engine, Hypothesis, SearchOptions
from triptych.running.text import OutputRules

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

END, MOST = 2, 40
SOURCES = [[5, 9, 4, 7, 11, END], [3, 8, END], [6, 6, 8, 10, 12, 13, 4, 9, END]]


class Case(NamedTuple):
    """A model, what its decoder reads first, how outputs are made, and the logit that their end gets."""

    model: str
    start: tuple[int, ...]
    settings: Mapping[str, Any] = MappingProxyType({})
    of_the_end: float = 3.5  # more than random weights would give it


CASES = {
    "bart, whose outputs begin with their end": Case("bart", (END,)),
    "bart, a first token forced": Case("bart", (END, 1)),
    "bart, no repeats": Case("bart", (END, 1), {"no_repeat_ngram_size": 2, "min_length": 7}),
    "mbart, a language first": Case("mbart", (30,)),
    "m2m_100, a language forced": Case("m2m_100", (END, 31)),
    "pegasus": Case("pegasus", (0,)),
    "blenderbot": Case("blenderbot", (1,)),
    "blenderbot-small": Case("blenderbot-small", (1,)),
    "t5": Case("t5", (0,)),
    "t5, not scaled": Case("t5, not scaled", (0,), {"no_repeat_ngram_size": 3}, of_the_end=13.0),
    "umt5": Case("umt5", (0,)),
}
IN_EVERY_RUN = ("bart, no repeats", "t5")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of BART."""
    folder = tmp_path_factory.mktemp("small")
    translator_folder(folder, "bart")
    return folder


def favour_the_end(other: Any, model: EncoderDecoder, logit: float) -> None:
    """Give both models a larger logit of the end, so that no output reaches the limit on length.

    There they differ on purpose: of a forced end `transformers` does not count the log-probability.
    """
    bonus = torch.zeros(model.tgt_vocab_size, dtype=torch.float64)
    bonus[END] = logit
    other.lm_head.bias = nn.Parameter(bonus)
    output = model.head.output
    output.bias = nn.Parameter(bonus if output.bias is None else output.bias + bonus)


def searched(case: Case, model: EncoderDecoder, beam_size: int) -> list[list[Hypothesis]]:
    """What our engine finds for each source."""
    least, no_repeat = (case.settings.get(name, 0) for name in ("min_length", "no_repeat_ngram_size"))
    rules = OutputRules(case.start, END, min_length=least, no_repeat=no_repeat)
    engine, found = Engine(model), []
    for ids in SOURCES:
        options = SearchOptions(beam_size, 0.0, MOST, beam_size)
        found += search(engine, torch.tensor([ids]), options, rules)
    return found


def generated(model: Any, case: Case, ids: list[int], beam_size: int) -> list[tuple[tuple[int, ...], float]]:
    """What `transformers` finds: the tokens of each output up to its end, and its log-probability."""
    start, *forced = case.start
    options = {"num_beams": beam_size, "num_return_sequences": beam_size}
    if beam_size > 1:
        options |= {"length_penalty": 0.0, "early_stopping": "never"}
    with in_float64(), torch.no_grad():
        found = model.generate(
            torch.tensor([ids]),
            max_new_tokens=len(ids) - 1 + MOST + len(forced) + 1,
            do_sample=False,
            decoder_start_token_id=start,
            forced_bos_token_id=forced[0] if forced else None,
            forced_eos_token_id=END,
            eos_token_id=END,
            pad_token_id=model.config.pad_token_id,
            output_scores=True,
            return_dict_in_generate=True,
            **case.settings,
            **options,
        )
    scores = found.sequences_scores.tolist() if beam_size > 1 else [0.0] * beam_size
    outputs = [row[len(case.start) :] for row in found.sequences.tolist()]
    return [
        (tuple(output[: output.index(END)]), score) for output, score in zip(outputs, scores, strict=True)
    ]


@pytest.mark.parametrize("name", some(CASES, IN_EVERY_RUN))
def test_greedy_and_beam_search_find_what_generate_of_transformers_finds(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    other, model = made(case.model, tmp_path), load_encoder_decoder(tmp_path)
    favour_the_end(other, model, case.of_the_end)
    greedy, beams = searched(case, model, 1), searched(case, model, 3)
    for ids, (ours,), of_beam in zip(SOURCES, greedy, beams, strict=True):
        assert ours.ids == generated(other, case, ids, 1)[0][0]
        theirs = generated(other, case, ids, 3)
        assert max(len(found.ids) for found in of_beam) < MOST
        assert [found.ids for found in of_beam] == [output for output, _ in theirs]
        # `transformers` rounds the logits of a beam search to float32, whatever the model's dtype is.
        assert [found.log_prob for found in of_beam] == pytest.approx(
            [score for _, score in theirs], rel=1e-6, abs=1e-6
        )


def test_lines_are_translated_as_transformers_does_it_from_the_files_alone(tmp_path: Path) -> None:
    other = translator_folder(tmp_path, "bart", forced_bos_token_id=1, num_beams=1, no_repeat_ngram_size=2)
    model = triptych.load(tmp_path)
    found = model.translate(["w5 w9 w4", "", "w7"], max_extra_tokens=5)
    seen = model.attend("w5 w9 w4")
    assert found[1].text == ""
    assert seen.source_tokens == ("<s>", "▁w5", "▁w9", "▁w4", "</s>")
    assert seen.tokens[0] == "<s>"  # which is forced
    assert seen.of("decoder")[0].shape[-1] == len(seen.tokens)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for translation, words in ((found[0], 3), (found[2], 1)):
        given = tokenizer([translation.source], return_tensors="pt")["input_ids"]
        with in_float64():
            # <s> of the source counts, and here the first and the last token of the output.
            (theirs,) = other.generate(
                given,
                max_new_tokens=words + 1 + 5 + 2,
                no_repeat_ngram_size=2,
                forced_bos_token_id=1,
                forced_eos_token_id=2,
                decoder_start_token_id=2,
            ).tolist()
        assert translation.text == " ".join(WORDS[i] for i in theirs if i > 3 and i < 38)


def test_languages_stand_where_the_class_of_the_tokenizer_puts_them(tmp_path: Path) -> None:
    translator_folder(tmp_path / "behind", "mbart", tokenizer_class="MBartTokenizer")
    translator_folder(tmp_path / "before", "m2m_100", tokenizer_class="MBart50TokenizerFast")
    behind, before = (
        triptych.load(tmp_path / name, languages=("de_DE", "en_XX")).translator()
        for name in ("behind", "before")
    )
    for translator, source, start in ((behind, [9, 2, 38], (39,)), (before, [38, 9, 2], (2, 39))):
        assert translator.tokenizers.source.encode(["w9"], add_special=True) == [source]
        assert translator.tokenizers.target.rules.start == start
        assert translator.tokenizers.target.encode(["w9"], add_special=True) == [[9, 2]]


@pytest.mark.parametrize(
    ("made_of", "languages", "said"),
    [
        ({"tokenizer_class": "MBart50Tokenizer"}, None, r"name them \(--languages SOURCE TARGET\)"),
        (
            {"tokenizer_class": "MBart50Tokenizer"},
            ("fr", "en_XX"),
            "no language 'fr': its languages are de_DE, en_XX",
        ),
        ({}, ("de_DE", "en_XX"), r"\(PreTrainedTokenizer\) has no languages to choose"),
        (
            {"repetition_penalty": 1.2},
            None,
            "repetition_penalty is 1.2, which the search here does not follow",
        ),
        ({"eos_token_id": [2, 3]}, None, r"eos_token_id is \[2, 3\]: one token has to end outputs"),
        ({"bad_words_ids": [[4, 5]]}, None, r"bad_words_ids has \[4, 5\]: only single tokens"),
        ({"around": ("<s>", "$A")}, None, "puts nothing behind a text"),
    ],
)
def test_what_cannot_be_searched_as_asked_is_refused_by_name(
    made_of: dict[str, Any], languages: tuple[str, str] | None, said: str, small: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(small, tmp_path / "model")
    write_tokenizer(folder, **made_of)
    with pytest.raises(TriptychError, match=said):
        triptych.load(folder, languages=languages).translator()


def test_a_checkpoint_that_is_only_run_is_not_converted(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a checkpoint of bart, which is run here, and not converted"):
        triptych.load(small).convert(tmp_path / "out", "ctranslate2")
    with pytest.raises(UsageError, match="which is run here, and not converted"):
        triptych.load(small, engine="ctranslate2").translator()
