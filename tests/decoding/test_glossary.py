"""Forced terms: they are in the output, and nothing else changes."""

import itertools
import pickle
import re
import unicodedata
from typing import Literal

import pytest

from decoding.test_search import BOS, EOS, PAD, RULES, log_prob_of, make_model
from decoding.test_translator import ENGLISH, GERMAN, tokenizers, translator  # noqa: F401 - fixtures
from triptych.errors import UsageError
from triptych.running.decoding import Engine, SearchOptions, Translator, length_penalty
from triptych.running.decoding.glossary import Glossary, Sentence, Terms
from triptych.running.decoding.search import sentence_text
from triptych.running.decoding.token_loop import Loop
from triptych.running.text import ByteLevelTokenizer, TokenizerPair

TERMS = {"Hund": "children", "Buch": "red park", "ein Haus": "book"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("terms", [[(3,)], [(3, 4)], [(4, 3), (3, 5)], [(5, 5)]])
def test_a_beam_as_large_as_the_search_space_finds_the_best_output_with_the_terms(
    terms: list[tuple[int, ...]],
) -> None:
    model, source = make_model(vocab_size=6), [4]
    outputs = [ids for length in range(5) for ids in itertools.product([3, 4, 5], repeat=length)]
    have = [
        ids
        for ids in outputs
        if all(any(ids[place : place + len(term)] == term for place in range(5)) for term in terms)
    ]
    scores = {ids: log_prob_of(model, source, ids) / length_penalty(len(ids) + 1, 0.6) for ids in have}
    options = SearchOptions(beam_size=300, max_extra_tokens=3, num_best=len(have))
    engine = Engine(model, never=(PAD, BOS))
    text = sentence_text(engine, [*source, EOS], options, RULES, Terms(terms))
    Loop(engine).run([text])
    found = {one.ids: one.score for one in text.best[: options.num_best]}
    assert found == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_small_beam_ends_with_all_terms_though_they_share_tokens(beam_size: int, seed: int) -> None:
    engine = Engine(make_model(seed=seed), never=(PAD, BOS))
    terms = [(5, 6, 7), (6, 7, 8), (7, 5), (6, 6)]
    options = SearchOptions(beam_size=beam_size, max_extra_tokens=6)
    text = sentence_text(engine, [9, 4, 10, 11, EOS], options, RULES, Terms(terms))
    Loop(engine).run([text])
    ids = text.best[0].ids
    assert all(any(ids[place : place + len(term)] == term for place in range(len(ids))) for term in terms)
    short = SearchOptions(max_extra_tokens=1)
    with pytest.raises(UsageError, match="need 10 tokens, and its translation may have 5"):
        sentence_text(engine, [9, 4, 10, 11, EOS], short, RULES, Terms(terms))


def test_a_translation_has_the_terms_of_its_sentence_as_whole_words(translator: Translator) -> None:  # noqa: F811
    lines = ["Der Hund liest ein Buch.", "Ein Haus, ein Hund.", *GERMAN]
    plain, held = translator.translate(lines), translator.with_glossary(TERMS).translate(lines)
    wanted = [["children", "red park"], ["book", "children"], ["children"], ["red park"], [], []]
    for before, after, terms in zip(plain, held, wanted, strict=True):
        assert all(re.search(rf"\b{term}\b", after.text) for term in terms), after
        assert (before == after) is (not terms)
    alone = translator.with_glossary(TERMS)
    assert [alone.translate(line) for line in lines] == held
    assert translator.translate(lines) == plain


def test_what_is_sent_to_a_worker_keeps_its_terms(tokenizers: TokenizerPair) -> None:  # noqa: F811
    sent = pickle.loads(pickle.dumps(Glossary(TERMS, tokenizers.target).sentence("Hund", [4, 5])))
    assert isinstance(sent, Sentence)
    assert (sent, sent.terms.tokens) == ([4, 5], {*tokenizers.target.encode("children")[0]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hund und Haus", ["dog", "house"]),
        ("der hund", ["dog"]),
        ("Hunde, Hundehaus, HUND", []),
        ("Haus am Park, Haus", ["park", "house"]),
        ("(Hund)Hund", ["dog"]),
    ],
)
def test_terms_are_whole_words_and_the_longest_counts(
    tokenizers: TokenizerPair,  # noqa: F811
    text: str,
    expected: list[str],
) -> None:
    glossary = Glossary({"Hund": "dog", "Haus": "house", "Haus am Park": "park"}, tokenizers.target)
    found = glossary.sentence(text, []).terms
    tokens = {token for ids in tokenizers.target.encode(expected) for token in ids} if expected else set()
    assert (set() if found is None else found.tokens) == tokens


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC"), ("NFD", "NFD")])
def test_a_term_is_found_in_whatever_form_it_is_written(
    tokenizers: TokenizerPair,  # noqa: F811
    forms: tuple[Literal["NFC", "NFD"], ...],
) -> None:
    of_term, of_text = forms
    glossary = Glossary({unicodedata.normalize(of_term, "trà"): "tea"}, tokenizers.target)
    assert glossary.sentence(unicodedata.normalize(of_text, "Tôi uống trà."), []).terms is not None


def test_a_term_that_is_empty_or_cannot_be_written_is_refused(
    translator: Translator,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="'' → 'dog': give a term"):
        translator.with_glossary({"": "dog"})
    monkeypatch.setattr(ByteLevelTokenizer, "decode", lambda self, ids: ["<unk>"] * len(ids))
    with pytest.raises(UsageError, match="cannot write 'dog' \\(they give '<unk>'"):
        translator.with_glossary({"Hund": "dog"})
