"""The loss of a model on a text, window by window, against the plain sum."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
from small_checkpoints import gpt2_that_runs
from triptych.converting.engines import evaluate_text
from triptych.core.models import LanguageModel, LanguageModelConfig, PositionsConfig
from triptych.errors import DataError, UsageError
from triptych.running import token_nats
from triptych.running.decoding import GenerationOptions
from triptych.running.decoding.likelihood import measure_likelihood, token_losses
from triptych.running.opening import open_language_model
from triptych.running.text import Tokenizer
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizer, train_tokenizers

TEXTS = ["the cat sat on the mat", "a dog ran", "", "where is the cat now, and where is the dog?"]


def model(vocab_size: int, scheme: Any = "learned", kind: Any = "decoder") -> LanguageModel:
    torch.manual_seed(0)
    positions = PositionsConfig(scheme=scheme, max_tokens=16)
    sizes = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16, "context": 8}
    config = LanguageModelConfig(**sizes, positions=positions)
    made = LanguageModel.of(config, kind, vocab_size).double().eval()
    with torch.no_grad():
        made.embeddings.table.weight.mul_(40)
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizers(TokenizerSpec(vocab_size=300), TEXTS, TEXTS).source


@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (5, 5), (16, 7), (1, 1)])
def test_every_token_but_the_first_is_predicted_once_from_its_window(context: int, stride: int) -> None:
    own, ids = model(30), torch.randint(0, 30, (41,), generator=torch.Generator().manual_seed(1))
    found = torch.cat(token_losses(own, ids.tolist(), context, stride))
    expected = []
    for target in range(1, len(ids)):
        window = 0 if target <= context else math.ceil((target - context) / stride)
        read = ids[window * stride : target]
        assert 1 <= len(read) <= context
        log_probs = own(read[None]).logits[0, -1].log_softmax(dim=-1)
        expected.append(-log_probs[ids[target]])
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["head", "head with a cap", "no head"])
def test_losses_in_pieces_are_those_of_all_logits_at_once(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = None if kind == "no head" else model(30).to(dtype).head
    if head is not None and kind == "head with a cap":
        head.config = replace(head.config, soft_cap=2.0)
    width = 30 if head is None else 16
    rows = torch.randn(23, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    targets = torch.randint(0, 30, (23,), generator=torch.Generator().manual_seed(3))
    checked = list[torch.Tensor]()
    monkeypatch.setattr(token_nats, "_LOGITS_AT_A_TIME", 150)
    monkeypatch.setattr(token_nats, "_MIN_ROWS", 4)
    found = token_nats.nats_of(targets, rows, head, checked.append)
    logits = (rows if head is None else head(rows)).float()
    assert kind != "head with a cap" or logits.abs().max() <= 2
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    torch.testing.assert_close(torch.cat(checked), logits.logsumexp(dim=-1))
    assert [len(part) for part in checked] == [5, 5, 5, 5, 3]


def test_documents_are_scored_each_by_itself(tokenizer: Tokenizer) -> None:
    own = model(tokenizer.vocab_size)
    found = measure_likelihood(own, tokenizer, TEXTS, context=8)
    alone = [measure_likelihood(own, tokenizer, [text], context=8) for text in TEXTS if text]
    assert found.nats == pytest.approx(sum(one.nats for one in alone))
    assert (found.tokens, found.documents, found.units) == (sum(o.tokens for o in alone), 3, "documents")
    low, high = found.interval
    assert low < found.nats_per_token < high
    assert min(o.nats_per_token for o in alone) <= low + 1e-9
    assert found.perplexity == pytest.approx(math.exp(found.nats / found.tokens))
    assert alone[2].units == "windows"


def test_bits_per_byte_count_the_bytes_that_were_predicted(tokenizer: Tokenizer) -> None:
    text = "die Katze läuft"
    found = measure_likelihood(model(tokenizer.vocab_size), tokenizer, [text])
    ids = tokenizer.encode([text])[0]
    first = len(tokenizer.decode([ids[:1]])[0].encode())
    assert found.num_bytes == len(text.encode()) - first
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / found.num_bytes)


def test_the_default_window_is_that_of_training_or_as_long_as_the_model_can_read(
    tokenizer: Tokenizer,
) -> None:
    for scheme, longest in (("learned", 16), ("rotary", 1024)):
        own = model(tokenizer.vocab_size, scheme)
        found = measure_likelihood(own, tokenizer, TEXTS)
        assert (found.context, found.stride) == (8, 8)
        own.recipe_limit = None  # as of another library's checkpoint
        found = measure_likelihood(own, tokenizer, TEXTS)
        assert (found.context, found.stride) == (longest, longest)


def test_what_cannot_be_scored_is_refused(tokenizer: Tokenizer) -> None:
    own = model(tokenizer.vocab_size)
    with pytest.raises(UsageError, match=r"17 tokens.*16 positions"):
        measure_likelihood(own, tokenizer, TEXTS, context=17)
    with pytest.raises(UsageError, match="stride is 9"):
        measure_likelihood(own, tokenizer, TEXTS, context=8, stride=9)
    with pytest.raises(DataError, match="at least two tokens"):
        measure_likelihood(own, tokenizer, ["", ""])
    with pytest.raises(UsageError, match="encoder"):
        measure_likelihood(model(tokenizer.vocab_size, kind="encoder"), tokenizer, TEXTS)


SHARED = Path(__file__).parents[3] / "shared"


@pytest.mark.parametrize(
    ("name", "nats", "characters"),
    [
        ("gpt2", 3.83085174, 3000),
        ("llama-gqa", 3.39126298, 3000),
        pytest.param("gpt2", 4.22857599, None, marks=pytest.mark.slow),
        pytest.param("llama-gqa", 3.96571538, None, marks=pytest.mark.slow),
    ],
)
def test_trained_models_have_the_loss_that_transformers_computes(
    name: str, nats: float, characters: int | None
) -> None:
    file = SHARED / "data" / "tinyshakespeare" / "input.txt"
    if not file.exists():
        pytest.skip("the shared data is not here")
    whole = file.read_text(encoding="utf-8")
    # By transformers 5.23 in float32: the last 5 % of the text, windows of 128 tokens side by side.
    text = whole[int(len(whole) * 0.95) :][:characters]
    found = evaluate_text(open_language_model(SHARED / "checkpoints" / name, "cpu"), [text], context=128)
    assert found.nats_per_token == pytest.approx(nats, abs=1e-6)


def test_ctranslate2_scores_a_text_as_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ctranslate2", reason="needs CTranslate2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gpt2_that_runs(tmp_path / "gpt2")
    text = "What a piece of work is a man! " * 4
    ours, theirs = (
        triptych.load(tmp_path / "gpt2", device="cpu", engine=engine).evaluate(text, context=16, stride=9)
        for engine in ("triptych", "ctranslate2")
    )
    assert theirs.tokens == ours.tokens
    assert theirs.nats == pytest.approx(ours.nats, rel=1e-5)
    with pytest.raises(UsageError, match="leave out --dtype"):
        triptych.load(tmp_path / "gpt2", engine="ctranslate2", dtype=torch.float32)


def test_a_model_is_run_in_the_dtype_asked_for(tmp_path: Path) -> None:
    gpt2_that_runs(tmp_path / "gpt2")
    text = "What a piece of work is a man! " * 4
    exact, rounded = (
        triptych.load(tmp_path / "gpt2", device="cpu", dtype=dtype).evaluate(text, context=16)
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert rounded.nats != exact.nats
    assert rounded.nats == pytest.approx(exact.nats, rel=1e-2)
    generator = triptych.load(tmp_path / "gpt2", device="cpu", dtype=torch.bfloat16).generator()
    assert generator.model.embeddings.table.weight.dtype == torch.bfloat16
    assert generator.generate(["What"], GenerationOptions(3))[0][0].ids


def test_a_text_of_which_too_much_is_unknown_has_no_bits_per_byte() -> None:
    known = "the cat sat on the mat. " * 400
    own = train_tokenizer(TokenizerSpec(kind="characters", vocab_size=60), [known])
    plain = measure_likelihood(model(own.vocab_size), own, [known], context=8)
    assert plain.unknown == 0
    assert plain.bits_per_byte is not None
    for hidden, given in (("今", True), ("今" * 20, False), ("今天" * 3000, False)):
        found = measure_likelihood(model(own.vocab_size), own, [known + hidden], context=8)
        assert found.unknown == pytest.approx(len(hidden) / len(known + hidden))
        assert (found.bits_per_byte is not None) == given
        assert (found.why_no_bits == "") == given
        assert found.figures()["unknown"] == found.unknown
