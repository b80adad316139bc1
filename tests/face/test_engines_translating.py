"""CTranslate2 in the place of our own search: the same hypotheses, scores and options."""

import errno
import itertools
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triptych import load
from triptych.converting import conversion_cache
from triptych.converting import engines as cache
from triptych.converting.engines import make_searcher
from triptych.core.models import EncoderDecoder, ModelConfig
from triptych.errors import DataError, EngineNote, UsageError
from triptych.files import cache_folder
from triptych.literals import Precision, Stop
from triptych.running.decoding import SearchOptions, Translation, Translator
from triptych.running.opening import Reader
from triptych.running.opening.run_folder import DecodingConfig
from triptych.running.text import TokenizerPair
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers

SHARED = Path(__file__).parents[3] / "shared"
MARIAN, MULTI30K = SHARED / "checkpoints" / "marian-multi30k", SHARED / "data" / "multi30k"
GERMAN = [
    "Der Hund schläft.",
    "Ein Mann liest ein Buch.",
    "Zwei Kinder spielen im Park.",
    "Das Haus ist rot.",
]
ENGLISH = ["The dog sleeps.", "A man reads a book.", "Two children play in the park.", "The house is red."]
LINES = [*GERMAN, "", "Ein Hund spielt.", "Das Buch ist rot, und das Haus ist rot.", "Kinder"]

ctranslate2 = pytest.importorskip("ctranslate2", reason="needs CTranslate2")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizers() -> TokenizerPair:
    return train_tokenizers(TokenizerSpec(vocab_size=330, joint=False), GERMAN * 4, ENGLISH * 4)


@pytest.fixture
def run(tokenizers: TokenizerPair, tmp_path: Path) -> Reader:
    """A model of random weights that pays attention to its source and mostly ends soon."""
    torch.manual_seed(3)
    site = {"projections": "grouped", "num_kv_heads": 1}
    tree = {
        "d_model": 16,
        "d_ff": 32,
        "num_heads": 2,
        "tie_embeddings": "none",
        "max_source_tokens": 30,
        "encoder": {"num_layers": 1, "attention": site},
        "decoder": {"num_layers": 2, "attention": site, "cross_attention": {}},
    }
    source, target = tokenizers.source, tokenizers.target
    model = EncoderDecoder.of(ModelConfig.model_validate(tree), source.vocab_size, target.vocab_size, 0)
    with torch.no_grad():
        model.head.output.weight.mul_(3)
        end = model.head.output.weight[target.eos_id]
        model.decoder.blocks[-1].feed_forward_residual.norm.bias.copy_(5 * end / end.square().sum())
        for block in model.decoder.blocks:
            block.cross_attention.projections.v_proj.weight.mul_(6)
    decoding = DecodingConfig(beam_size=3, alpha=0.6, max_extra_tokens=12)
    return Reader("run", tmp_path / "run", model.eval(), tokenizers, decoding=decoding)


def both(run: Reader, options: SearchOptions) -> tuple[list[Translation], list[Translation]]:
    searcher = make_searcher(run, options, "fp32", 1, "cpu")
    theirs = Translator(run.model, run.tokenizers, options, decoder=searcher)
    return run.translator(options).translate(LINES), theirs.translate(LINES)


@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(beam_size=1),
        SearchOptions(beam_size=4, alpha=0.0, stop="full"),
        SearchOptions(beam_size=4, alpha=1.5, num_best=3, stop="full"),
        SearchOptions(beam_size=3, max_extra_tokens=1, stop="full"),
    ],
    ids=["greedy", "beam", "n-best, longer outputs preferred", "at the limit"],
)
def test_hypotheses_and_scores_are_those_of_our_own_search(run: Reader, options: SearchOptions) -> None:
    ours, theirs = both(run, options)
    assert len({translation.text for translation in ours}) > 3
    for expected, found in zip(ours, theirs, strict=True):
        assert [c.pieces for c in found.candidates] == [c.pieces for c in expected.candidates]
        for one, other in zip(found.candidates, expected.candidates, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)
            assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)


def test_texts_are_the_same_without_the_scores_that_a_greedy_search_leaves_out() -> None:
    lines = [*LINES, "ß!?"]
    model = load("demo", engine="ctranslate2")
    for beam_size, extra in itertools.product((1, 2), (None, 1)):
        translator = model.translator(beam_size=beam_size, max_extra_tokens=extra)
        with_scores = translator.translate(lines)
        without = translator.without_scores().translate(lines)
        assert [found.text for found in without] == [found.text for found in with_scores]
        assert [found.finish for found in without] == [found.finish for found in with_scores]
        assert ("length" in {found.finish for found in without}) == (extra == 1)
        missing = {math.isnan(found.candidates[0].score) for found in without if found.num_pieces}
        assert missing == {beam_size == 1}
        assert translator.translate(lines) == with_scores  # the translator itself keeps them


def test_a_model_is_converted_once_and_another_one_apart(run: Reader) -> None:
    options = SearchOptions(beam_size=1)
    both(run, options)
    (first,) = cache_folder().iterdir()
    changed = first.stat().st_mtime_ns
    both(run, options)
    assert [*cache_folder().iterdir()] == [first]
    assert first.stat().st_mtime_ns == changed
    with torch.no_grad():
        run.model.head.output.weight[7] += 1
    both(run, options)
    both(run, SearchOptions(beam_size=1, max_extra_tokens=9))  # other positions
    assert len([*cache_folder().iterdir()]) == 3


def test_of_the_models_of_one_configuration_only_the_newest_stay_in_the_cache(run: Reader) -> None:
    options = SearchOptions(beam_size=1)
    both(run, SearchOptions(beam_size=1, max_extra_tokens=9))  # another configuration
    (other,) = cache_folder().iterdir()
    os.utime(other, (0, 0))
    for age in range(6, 0, -1):
        with torch.no_grad():
            run.model.head.output.weight[7] += 1
        before = {*cache_folder().iterdir()}
        both(run, options)
        (new,) = {*cache_folder().iterdir()} - before
        os.utime(new, (1e9 - age, 1e9 - age))
    found = {folder: folder.stat().st_mtime for folder in cache_folder().iterdir()}
    assert sorted(found.values()) == [0, 1e9 - 4, 1e9 - 3, 1e9 - 2, 1e9 - 1]
    assert found[other] == 0


def test_without_a_home_folder_or_with_a_full_disk_a_model_translates(
    run: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def has_no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    options = SearchOptions(beam_size=1)
    with monkeypatch.context() as patched:
        patched.delenv("XDG_CACHE_HOME")
        patched.setattr(Path, "home", has_no_home)
        ours, theirs = both(run, options)
        with pytest.raises(UsageError, match="there is no home folder: set XDG_CACHE_HOME"):
            cache_folder()
    assert [t.text for t in ours] == [t.text for t in theirs]
    monkeypatch.setattr(cache, "require_recipe", lambda _: None)  # `run` is no folder
    monkeypatch.setattr(conversion_cache, "write_folder", fails)
    with pytest.warns(EngineNote, match="engine auto: triptych translates: .*No space left"):
        translator = cache.make_translator(run, cache.Options("cpu", engine="auto"), beam_size=1)
    assert translator.engine == "triptych"
    assert translator.translate(LINES) == cache.make_translator(
        run, cache.Options("cpu"), beam_size=1
    ).translate(LINES)


def test_without_a_place_for_the_cache_nothing_is_left_behind(
    run: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    ours, theirs = both(run, SearchOptions(beam_size=1))
    assert [t.text for t in ours] == [t.text for t in theirs]
    assert not [*(tmp_path / "temporary").iterdir()]


def test_a_damaged_cache_is_one_line_that_names_it(run: Reader) -> None:
    options = SearchOptions(beam_size=1)
    both(run, options)
    (folder,) = cache_folder().iterdir()
    (folder / "model.bin").write_bytes(b"half")
    with pytest.raises(DataError, match=f"{folder} cannot be read by CTranslate2"):
        make_searcher(run, options, "fp32", 1, "cpu")


def test_what_ctranslate2_cannot_do_is_refused_by_name(run: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SearchOptions(beam_size=3, stop="certain")
    with pytest.raises(UsageError, match='stop must be "full", and it is "certain"'):
        make_searcher(run, options, "fp32", 1, "cpu")
    monkeypatch.setattr(ctranslate2, "get_supported_compute_types", lambda device: {"float32", "int8"})
    with pytest.raises(UsageError, match="CTranslate2 cannot compute in bf16 on this cpu: it can in fp32"):
        make_searcher(run, SearchOptions(beam_size=1), "bf16", 1, "cpu")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(UsageError, match="CTranslate2 is not installed: pip install ctranslate2"):
        load("no folder", engine="ctranslate2")


def test_a_model_that_does_not_fit_is_refused_with_its_reason(tokenizers: TokenizerPair) -> None:
    tree = {"d_model": 16, "d_ff": 8, "num_heads": 2, "tie_embeddings": "none"}
    tree |= {"positions": {"scheme": "alibi"}, "encoder": {"num_layers": 1}, "decoder": {"num_layers": 1}}
    sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
    model = EncoderDecoder.of(ModelConfig.model_validate(tree), *sizes, 0)
    run = Reader("a run", Path("a run"), model, tokenizers, decoding=DecodingConfig())
    with pytest.raises(UsageError, match="'alibi', and CTranslate2 has no positions inside attention"):
        make_searcher(run, SearchOptions(beam_size=1), "fp32", 1, "cpu")
    assert not cache_folder().exists() or not [*cache_folder().iterdir()]


@pytest.mark.slow
@pytest.mark.skipif(not MARIAN.is_dir(), reason="needs ../shared/checkpoints/marian-multi30k")
def test_a_trained_checkpoint_translates_as_our_own_engine_does() -> None:
    lines = (MULTI30K / "test_2016_flickr.en").read_text(encoding="utf-8").splitlines()[:20]
    ours = load(MARIAN, device="cpu").translate(lines, stop="full")
    exact = load(MARIAN, device="cpu", engine="ctranslate2").translate(lines)
    rounded = load(MARIAN, device="cpu", engine="ctranslate2", precision="int8").translate(lines)
    assert sum(one.text == other.text for one, other in zip(ours, exact, strict=True)) >= 19
    assert sum(one.text == other.text for one, other in zip(ours, rounded, strict=True)) >= 14


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_fast", [True, False])
def test_a_precision_that_the_device_has_no_products_in_is_said_to_be_slow(
    precision: Precision, is_fast: bool, run: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.converting.engines.has_fast_bf16", lambda kind: is_fast)
    with warnings.catch_warnings(record=True, action="always") as notes:
        cache.make_translator(run, cache.Options("cpu", precision=precision))
    assert len(notes) == (precision == "bf16" and not is_fast)


def test_auto_takes_ctranslate2_where_it_computes_the_same_model_and_says_so(
    run: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(glossary: dict[str, str] | None = None, stop: Stop | None = None, num_best: int = 1) -> str:
        options = cache.Options("cpu", engine="auto")
        with pytest.warns(EngineNote) as notes:
            translator = cache.make_translator(
                run, options, 1, glossary, stop, beam_size=2, num_best=num_best
            )
        assert translator.translate(LINES)
        said = str(notes[0].message)
        assert translator.engine == ("ctranslate2" if "CTranslate2 translates" in said else "triptych")
        return said

    monkeypatch.setattr(cache, "require_recipe", lambda _: None)  # `run` is no folder
    assert taken().startswith("engine auto: CTranslate2 translates: it is faster on CPUs")
    asked = cache.Options("cpu", engine="ctranslate2")
    assert cache.make_translator(run, asked, 2, beam_size=2).workers == 2
    assert "triptych translates: CTranslate2 takes no glossary" in taken({"Hund": "dog"})
    assert "triptych translates: lists of the best translations are triptych's" in taken(num_best=2)
    assert 'stop must be "full", and it is "certain"' in taken(stop="certain")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert "CTranslate2 is not installed: pip install ctranslate2" in taken()


def test_batches_read_ahead_give_the_same_translations_and_an_error_comes_after_the_lines_before_it() -> None:
    translator = load("demo", engine="ctranslate2").translator()
    batches = [[line, "Kinder"] for line in GERMAN]
    expected = [*translator.translate_stream(batches)]
    assert [*translator.reading_ahead().translate_stream(batches)] == expected

    def broken() -> Iterator[list[str]]:
        yield from batches
        raise DataError("no more")

    found = translator.reading_ahead().translate_stream(broken())
    assert [next(found) for _ in expected] == expected
    with pytest.raises(DataError, match="no more"):
        next(found)


def test_a_translator_that_does_not_read_ahead_asks_for_no_batch_before_it_gives_the_last() -> None:
    asked = []

    def batches() -> Iterator[list[str]]:
        for line in GERMAN:
            asked.append(line)
            yield [line]

    found = load("demo", engine="ctranslate2").translator().translate_stream(batches())
    for number, translation in enumerate(found, start=1):
        assert translation.source == asked[-1]
        assert len(asked) == number
