"""Text in, text out."""

from dataclasses import replace

import pytest
import torch

from decoding.plain_search import search
from triptych.core.models import EncoderDecoder, ModelConfig
from triptych.running.decoding import Candidate, Engine, SearchOptions, Translation, Translator
from triptych.running.decoding.sentence_decoder import SentenceDecoder
from triptych.running.input_limits import LONGEST_LINE
from triptych.running.text import TokenizerPair
from triptych.running.text.sentences import cut_to_fit, split_sentences
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers

GERMAN = ["Der Hund schläft.", "Ein Mann liest ein Buch.", "Zwei Kinder spielen im Park."]
GERMAN += ["Das Haus ist rot."]
ENGLISH = ["The dog sleeps.", "A man reads a book.", "Two children play in the park.", "The house is red."]
LONG = "Der Hund schläft. Ein Mann liest ein Buch, und zwei Kinder spielen im Park. Das Haus ist rot."
LIMIT = 12


@pytest.fixture(scope="module")
def tokenizers() -> TokenizerPair:
    return train_tokenizers(TokenizerSpec(vocab_size=330, joint=False), GERMAN * 4, ENGLISH * 4)


@pytest.fixture
def translator(tokenizers: TokenizerPair) -> Translator:
    sizes = {"d_model": 16, "d_ff": 32, "num_heads": 2, "dropout": 0.5, "max_source_tokens": LIMIT}
    stacks = {"encoder": {"num_layers": 1}, "decoder": {"num_layers": 2}}
    config = ModelConfig.model_validate({**sizes, **stacks, "tie_embeddings": "none"})
    model = EncoderDecoder.of(config, tokenizers.source.vocab_size, tokenizers.target.vocab_size)
    with torch.no_grad():
        model.head.output.weight.mul_(2)
        for block in model.decoder.blocks:
            block.cross_attention.projections.v_proj.weight.mul_(6)
    return Translator(model, tokenizers, SearchOptions(beam_size=2, max_extra_tokens=4))


def texts(translations: list[Translation]) -> list[str]:
    return [translation.text for translation in translations]


def test_a_line_is_encoded_searched_and_decoded(translator: Translator, tokenizers: TokenizerPair) -> None:
    (translation,) = translator.translate([GERMAN[0]])
    (ids,) = tokenizers.source.encode([GERMAN[0]])
    src = torch.tensor([[*ids, tokenizers.source.eos_id]])
    engine = Engine(translator.model, never=(0, 1))
    ((best,),) = search(engine, src, translator.options, tokenizers.target.rules)
    assert translation.source == GERMAN[0]
    assert translation.text == tokenizers.target.decode([best.ids])[0]
    assert translation.candidates[0].pieces == tuple(tokenizers.target.pieces(best.ids))
    assert translation.candidates[0].score == pytest.approx(best.score, abs=1e-5)
    assert translation.num_pieces == 1


@pytest.mark.parametrize("empty", ["", "   ", "\t\n", "\u200b\u00ad", " \ufeff \u2060", "\u3164\ufe0f\u2800"])
def test_a_line_without_a_visible_character_is_its_own_translation(
    translator: Translator, empty: str
) -> None:
    (translation,) = translator.translate([empty])
    candidate = Candidate(empty, (), 0.0, 0.0)
    assert translation == Translation(source=empty, candidates=(candidate,), num_pieces=0)
    first, second = (translator.translate(line).text for line in GERMAN[:2])
    assert texts(translator.translate([GERMAN[0], empty, GERMAN[1]])) == [first, empty, second]


def test_invisible_characters_inside_a_sentence_change_no_translation(translator: Translator) -> None:
    for shown, given in zip(
        GERMAN, ["Der Hu\u00adnd schläft.", "\u200fEin Mann\u200d liest ein Buch.\x07"], strict=False
    ):
        assert translator.translate(given).text == translator.translate(shown).text
        assert translator.translate(given).source == given


def test_a_string_is_one_line(translator: Translator) -> None:
    (expected,) = translator.translate([GERMAN[0]])
    assert translator.translate(GERMAN[0]) == expected
    assert list(translator.translate_stream(GERMAN[0])) == [expected]
    assert list(translator.translate_stream([GERMAN[0], [GERMAN[0]]])) == [expected, expected]


def test_lines_may_come_one_by_one(translator: Translator) -> None:
    assert translator.translate(line for line in GERMAN) == translator.translate(GERMAN)


def test_no_lines_give_no_translations(translator: Translator) -> None:
    assert translator.translate([]) == []


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        # Beside the longest, with its end, there is room for 12 tokens: two of 6, three of 4, four of 3.
        (12, 9, [[2, 3], [0, 4, 5], [6, 1]]),
        (12, 2, [[2, 3], [0, 4], [5, 6], [1]]),
        (11, 9, [[2], [3], [0, 4], [5, 6, 1]]),
        (1, 9, [[2], [3], [0], [4], [5], [6], [1]]),
    ],
)
def test_batches_hold_as_many_tokens_as_they_may(
    translator: Translator, tokens: int, most: int, expected: list[list[int]]
) -> None:
    parts = (translator.model, translator.tokenizers, translator.options)
    one = Translator(*parts, tokens, batch_sentences=most)
    assert isinstance(one.decoder, SentenceDecoder)
    assert list(one.decoder.batches([[7] * length for length in (3, 1, 5, 5, 2, 2, 2)])) == expected


@pytest.mark.parametrize("batch_tokens", [1, 20, 2048])
def test_translations_come_in_the_order_of_the_lines(translator: Translator, batch_tokens: int) -> None:
    lines = [GERMAN[3], LONG, GERMAN[1], "", GERMAN[0], GERMAN[2], GERMAN[1]]
    alone = [translator.translate([line])[0].text for line in lines]
    assert len(set(alone)) > 4
    small = Translator(translator.model, translator.tokenizers, translator.options, batch_tokens)
    found = small.translate(lines)
    assert [translation.source for translation in found] == lines
    assert texts(found) == alone


def test_a_stream_gives_what_the_whole_gives(translator: Translator) -> None:
    whole = texts(translator.translate(GERMAN))
    stream = translator.translate_stream(iter([GERMAN[:1], [], GERMAN[1:]]))
    assert next(stream).text == whole[0]
    assert texts(list(stream)) == whole[1:]


def test_weights_that_change_between_two_calls_are_noticed(translator: Translator) -> None:
    before = translator.translate(GERMAN)
    with torch.no_grad():
        translator.model.decoder.blocks[0].cross_attention.projections.v_proj.weight.mul_(-1)
    after = translator.translate(GERMAN)
    anew = Translator(translator.model, translator.tokenizers, translator.options).translate(GERMAN)
    assert texts(after) == texts(anew)
    assert [t.candidates for t in after] != [t.candidates for t in before]


@pytest.mark.parametrize("split", [True, False])
def test_a_long_line_is_translated_in_pieces_and_none_is_dropped(
    translator: Translator, tokenizers: TokenizerPair, split: bool
) -> None:
    def fits(text: str) -> bool:
        return len(tokenizers.source.encode([text])[0]) <= LIMIT

    own = Translator(translator.model, tokenizers, replace(translator.options, split=split))
    sentences = split_sentences(LONG) if split else [LONG]
    pieces = [part.strip() for sentence in sentences for part in cut_to_fit(sentence, fits)]
    assert len(pieces) > 1
    (translation,) = own.translate([LONG])
    assert translation.num_pieces == len(pieces)
    assert [part.source for part in translation.parts] == [one.strip() for one in sentences if split]
    parts = own.translate(pieces)
    assert all(part.num_pieces == 1 for part in parts)
    assert translation.text == " ".join(texts(parts))
    best = [part.candidates[0] for part in parts]
    assert translation.candidates[0].pieces == tuple(piece for c in best for piece in c.pieces)
    assert translation.candidates[0].score == pytest.approx(sum(c.score for c in best), abs=1e-5)
    assert translation.candidates[0].log_prob == pytest.approx(sum(c.log_prob for c in best), abs=1e-4)


def test_the_white_space_of_a_line_is_that_of_its_translation(translator: Translator) -> None:
    first, second = texts(translator.translate(GERMAN[:2]))
    (translation,) = translator.translate([f"  {GERMAN[0]}\t \r{GERMAN[1]}\n\n{GERMAN[0]} "])
    assert translation.text == f"  {first}\t \r{second}\n\n{first} "
    assert [part.source for part in translation.parts] == [GERMAN[0], GERMAN[1], GERMAN[0]]


def test_the_longest_line_is_the_models_or_less_and_stated_where_it_has_none(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizers = translator.model, translator.tokenizers

    def made(limit: int | None) -> Translator:
        return Translator(model, tokenizers, SearchOptions(max_source_tokens=limit))

    assert (made(None).max_source_tokens, made(LIMIT + 1).max_source_tokens) == (LIMIT, LIMIT)
    assert made(5).translate(GERMAN[1]).num_pieces > 1
    monkeypatch.setattr(type(model), "max_source_tokens", None)
    assert (made(None).max_source_tokens, made(LIMIT + 1).max_source_tokens) == (LONGEST_LINE, LIMIT + 1)


def test_a_long_word_is_translated_in_pieces_too(translator: Translator) -> None:
    (translation,) = translator.translate(["Donaudampfschifffahrtsgesellschaft" * 5])
    assert translation.num_pieces > 5
    assert translation.text


def test_as_many_candidates_come_as_were_asked_for_best_first(translator: Translator) -> None:
    options = SearchOptions(beam_size=3, num_best=3, max_extra_tokens=4)
    several = Translator(translator.model, translator.tokenizers, options)
    for translation in several.translate([GERMAN[0], LONG]):
        scores = [candidate.score for candidate in translation.candidates]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert len({candidate.pieces for candidate in translation.candidates}) == 3


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_evaluated_and_put_back_as_it_was(translator: Translator, training: bool) -> None:
    translator.model.train(training)
    first = translator.translate(GERMAN)
    assert translator.translate(GERMAN) == first  # half of everything would be dropped
    assert translator.model.training is training
