"""Changed models that were saved, against `transformers` on the same files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from torch import Tensor

from face.tiny import write_checkpoint
from triptych import Model, TriptychError, UsageError, load

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT, TARGET = "the cat sat on the mat", "a dog ran"
TRANSLATORS = ("marian", "t5")
CLASSES = {"bert": "AutoModelForMaskedLM", **dict.fromkeys(TRANSLATORS, "AutoModelForSeq2SeqLM")}
Edit = Callable[[Model, str], Model]


EDITS: dict[str, Edit] = {
    "ablate": lambda model, layer: model.ablate(f"{layer}.1"),
    "mean": lambda model, layer: model.ablate(f"{layer}.1", by="mean", text=TARGET),
    "tie": lambda model, layer: model.tie(layer, "W_V", "W_K"),
    "replace": lambda model, layer: model.replace(
        f"{layer}.1", W_Q=model[layer][1].W_Q.flip(0), W_O=model[layer][1].W_O / 2
    ),
    "steer": lambda model, layer: model.steer(
        f"residual.{layer.replace('cross', 'decoder')}", torch.linspace(-1, 1, model.layers[0].d_model)
    ),
}
LAYERS = {
    **{name: ["1"] for name in ("gpt2", "llama", "bert")},
    **{name: ["encoder.1", "decoder.1", "cross.1"] for name in TRANSLATORS},
}
# Maps without a bias have no place for a mean or a direction.
REFUSED = {
    (name, edit): why
    for name in ("llama", "t5")
    for edit, why in (
        ("mean", "the map of o has a bias now, and the format has no place for one"),
        ("steer", "cannot be saved: no bias comes right before it"),
    )
}
CASES = [
    (name, edit, layer)
    for name, layers in LAYERS.items()
    for edit in EDITS
    for layer in layers
    if edit != "steer" or "cross" not in layer
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in LAYERS:
        found[name] = tmp_path_factory.mktemp("tiny") / name
        write_checkpoint(name, found[name])
    return found


def theirs(name: str, folder: Path, model: Model) -> Tensor:
    """Logits of `transformers` for the tokens that the model reads."""
    other = getattr(transformers, CLASSES.get(name, "AutoModelForCausalLM")).from_pretrained(folder).eval()
    (text,) = model.reader.encode([TEXT], [TARGET] if name in TRANSLATORS else None)
    given = {"input_ids": torch.tensor([text.source or text.ids])}
    if text.source is not None:
        given["decoder_input_ids"] = torch.tensor([[other.config.decoder_start_token_id, *text.ids[:-1]]])
    return other(**given).logits[0]


@pytest.mark.sampled(18)
@torch.no_grad()
@pytest.mark.parametrize(("name", "edit", "layer"), CASES)
def test_transformers_gives_the_logits_of_a_changed_model_that_was_saved(
    name: str, edit: str, layer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load(folders[name], device="cpu")
    target = TARGET if name in TRANSLATORS else None
    changed = EDITS[edit](model, layer)
    found = changed.run(TEXT, target=target).logits
    if (why := REFUSED.get((name, edit))) is not None:
        with pytest.raises(TriptychError, match=why):
            changed.save(tmp_path / "changed")
        return
    changed.save(tmp_path / "changed")
    scale = float(found.abs().max().clamp(min=1))
    torch.testing.assert_close(theirs(name, tmp_path / "changed", changed), found, rtol=0, atol=2e-6 * scale)
    assert float((found - model.run(TEXT, target=target).logits).abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["gpt2", "marian"])
def test_a_change_after_a_rewrite_takes_the_certificate_away(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    rewritten = load(folders[name], device="cpu").rewrite("truncate(rank=2)", compare=False)
    rewritten.save(tmp_path / "rewritten")
    (tmp_path / "rewritten" / "README.md").open("a").write("## About\n\nA model.\n")
    assert load(tmp_path / "rewritten").certificate is not None
    load(tmp_path / "rewritten", device="cpu").ablate(f"{LAYERS[name][0]}.1").save(tmp_path / "changed")
    assert load(tmp_path / "changed").certificate is None
    assert (tmp_path / "changed" / "README.md").read_text() == "## About\n\nA model.\n"


def test_a_second_rewrite_names_what_it_was_given(folders: dict[str, Path]) -> None:
    once = load(folders["gpt2"], device="cpu").rewrite("truncate(rank=2)", compare=False)
    twice = once.rewrite("gauge_fix", compare=False)
    assert twice.certificate is not None
    assert twice.certificate.source == f"{folders['gpt2']}, rewritten"


def test_the_tokenizer_that_was_given_is_saved(folders: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    words = {word: number for number, word in enumerate(("<unk>", "<end>", *TEXT.split(), *TARGET.split()))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<end>"
    ).save_pretrained(other)
    model = load(folders["gpt2"], tokenizer=other, device="cpu")
    expected = model.run(TEXT)
    assert len(expected.tokens) == len(TEXT.split())
    for number, one in enumerate((model, model.ablate("1.1"))):
        saved = one.save(tmp_path / f"saved {number}")
        again = load(saved, device="cpu").run(TEXT)
        assert again.tokens == expected.tokens
        assert torch.equal(again.logits, one.run(TEXT).logits)
        theirs = transformers.AutoTokenizer.from_pretrained(saved)
        assert theirs(TEXT)["input_ids"] == [words[word] for word in TEXT.split()]
    rewritten = model.rewrite("fold_value_bias")
    with pytest.raises(UsageError, match="certificate is of the files with their own tokenizer"):
        rewritten.save(tmp_path / "rewritten")
