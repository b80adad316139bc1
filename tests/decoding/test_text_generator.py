"""Continuations as text: whole characters, stop strings, and the same text as it comes and at the end."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from small_checkpoints import byte_tokenizer
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.errors import DataError, UsageError
from triptych.running.decoding import GenerationOptions, SamplingOptions, TextGenerator
from triptych.running.decoding.text_generator import TextStream
from triptych.running.text import Tokenizer, load_tokenizer
from triptych.running.text.chat import WrittenChat

END = "<|endoftext|>"
SAMPLING = SamplingOptions(temperature=1.0)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for every byte, and one for the end."""
    folder = tmp_path_factory.mktemp("letters")
    byte_tokenizer(folder, END, eos_token=END)
    return load_tokenizer(folder)


def model(vocab_size: int = 257, kind: Any = "decoder") -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(num_layers=1, d_model=16, num_heads=2, d_ff=16)
    made = LanguageModel.of(config, kind, vocab_size).double().eval()
    with torch.no_grad():
        made.embeddings.table.weight.mul_(20)
    return made


def ids(letters: Tokenizer, text: str) -> list[int]:
    return letters.encode([text])[0]


def pushed(letters: Tokenizer, text: str, *stops: str) -> tuple[TextStream, list[str]]:
    stream = TextStream(letters, ids(letters, "prompt"), stops)
    parts = []
    for token in ids(letters, text):
        parts.append(stream.push(token))
        if stream.is_over:
            break
    return stream, [*parts, stream.finish()]


def test_text_ends_before_a_stop_string_of_many_tokens(letters: Tokenizer) -> None:
    stream, parts = pushed(letters, "one, two STOP three", "xyz", "STOP")
    assert stream.is_over
    assert "".join(parts) == stream.text == "one, two "


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none(letters: Tokenizer) -> None:
    stream, parts = pushed(letters, "aSTO!STO", "STOP", "OPS")
    assert parts[:6] == ["a", "", "", "", "STO!", ""]
    assert "".join(parts) == stream.text == "aSTO!STO"
    assert not stream.is_over


def test_a_character_of_many_tokens_comes_whole(letters: Tokenizer) -> None:
    _, parts = pushed(letters, "ü日x")
    assert parts == ["", "ü", "", "", "日", "x", ""]


def test_a_stop_string_that_begins_inside_another_is_found_where_it_begins_first(letters: Tokenizer) -> None:
    assert pushed(letters, "abcde", "bcd", "c")[0].text == "ab"
    assert pushed(letters, "abab!", "ab!")[0].text == "ab"


@pytest.mark.parametrize("stops", [(), ("e", "x"), ("zz",)])
def test_text_as_it_comes_is_the_text_at_the_end_in_any_batch(
    letters: Tokenizer, stops: tuple[str, ...]
) -> None:
    generator = TextGenerator(model(), letters)
    options = GenerationOptions(30, SAMPLING, seed=2, stop_texts=stops)
    prompts = ["Hello", "a", "What is it?", "ü"]
    together = [found.text for (found,) in generator.generate(prompts, options)]
    assert together == ["".join(generator.stream(prompt, options)) for prompt in prompts]
    assert together == [generator.generate([prompt], options)[0][0].text for prompt in prompts]
    assert not any(stop in text for stop in stops for text in together)


def test_a_stop_string_says_so_and_keeps_the_tokens_it_was_found_in(letters: Tokenizer) -> None:
    generator, options = TextGenerator(model(), letters), GenerationOptions(80, SAMPLING, seed=4)
    (free,) = generator.generate(["Hello"], options)[0]
    stop = letters.decode([[token for token in free.ids if token < 128]])[0][5:6]
    (found,) = generator.generate(["Hello"], GenerationOptions(80, SAMPLING, seed=4, stop_texts=(stop,)))[0]
    assert found.finish == "text"
    assert found.text == free.text[: free.text.index(stop)]
    assert found.ids == free.ids[: len(found.ids)]
    assert stop in letters.decode([found.ids])[0]
    assert len(found.pieces) == len(found.ids) == len(found.log_probs)


def test_the_end_token_ends_a_text(letters: Tokenizer) -> None:
    ending = model()
    with torch.no_grad():  # whatever was read, the end is likely
        ending.embeddings.table.weight[256] = ending.embeddings.table.weight[:256].mean(0) + 8.0
    samples = GenerationOptions(200, SamplingOptions(temperature=3.0), num_samples=6)
    found = TextGenerator(ending, letters).generate(["Hello"], samples)[0]
    assert "token" in {one.finish for one in found}
    for one in found:
        assert 256 not in one.ids
        assert END not in one.text


def test_a_beam_gives_texts_best_first(letters: Tokenizer) -> None:
    options = GenerationOptions(12, beam_size=4, num_samples=3)
    found = TextGenerator(model(), letters).generate(["Hello"], options)[0]
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert [one.text for one in found] == letters.decode([one.ids for one in found])


def test_the_texts_of_a_beam_end_before_a_stop_string(letters: Tokenizer) -> None:
    options = GenerationOptions(12, beam_size=4, num_samples=3)
    generator = TextGenerator(model(), letters)
    free = generator.generate(["Hello"], options)[0]
    stop = free[0].text[4]
    stopped = generator.generate(["Hello"], replace(options, stop_texts=(stop,)))[0]
    for whole, cut in zip(free, stopped, strict=True):
        assert cut.text == whole.text.split(stop)[0]
        assert cut.finish == ("text" if stop in whole.text else whole.finish)
        assert cut.ids == whole.ids[: len(cut.ids)]
        assert stop not in letters.decode([cut.ids[:-1]])[0]
        assert len(cut.log_probs) >= len(cut.ids) == len(cut.pieces)


def test_rows_of_the_table_past_the_tokenizers_tokens_are_never_chosen(letters: Tokenizer) -> None:
    larger = model(300)
    with torch.no_grad():
        larger.embeddings.table.weight[257:] *= 30
    for options in (GenerationOptions(20, SAMPLING, num_samples=4), GenerationOptions(5, beam_size=3)):
        for found in TextGenerator(larger, letters).generate(["Hello"], options)[0]:
            assert max(found.ids) < 257


def test_what_cannot_be_is_refused(letters: Tokenizer) -> None:
    with pytest.raises(DataError, match="257 tokens, but the model 200"):
        TextGenerator(model(200), letters)
    with pytest.raises(UsageError, match="encoder"):
        TextGenerator(model(kind="encoder"), letters)
    generator = TextGenerator(model(), letters)
    with pytest.raises(UsageError, match="prompt 2 is empty"):
        generator.generate(["a", ""], GenerationOptions(3))
    with pytest.raises(UsageError, match="no chat template"):
        generator.generate(["a"], GenerationOptions(3), chat=True)


def test_a_chat_goes_through_the_template(letters: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(self: Tokenizer, messages: Any, _: bool) -> WrittenChat:
        text = "".join(f"[{message['role']}]{message['content']}{END}" for message in messages)
        return WrittenChat(text, [(0, len(text))])

    monkeypatch.setattr(type(letters), "_written", written)
    assert TextGenerator(model(), letters).encode("Hi", chat=True) == [*ids(letters, "[user]Hi"), 256]


def test_weights_that_change_between_two_calls_are_noticed(letters: Tokenizer) -> None:
    changing = model()
    generator, options = TextGenerator(changing, letters), GenerationOptions(12)
    before = generator.generate(["Hello"], options)
    with torch.no_grad():
        changing.blocks[0].feed_forward.outer.weight.mul_(-4)
    after = generator.generate(["Hello"], options)
    assert after == TextGenerator(changing, letters).generate(["Hello"], options)
    assert after != before
