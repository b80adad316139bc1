"""Texts as every verb reads them: special tokens, token ids, nothing at all, white space, what is no text."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
from face.tiny import write_checkpoint
from small_checkpoints import byte_tokenizer
from triptych.errors import UsageError

SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"
END = "<|endoftext|>"
TEXT = f"One two.{END}Three four five six."


@pytest.fixture(scope="module")
def gpt2() -> triptych.Model:
    return triptych.load(SHARED / "gpt2", device="cpu")


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(SHARED / "gpt2")


def test_every_verb_reads_a_special_token_of_a_text_as_transformers(gpt2: Any, theirs: Any) -> None:
    from transformers import AutoModelForCausalLM

    ids = theirs(TEXT, return_tensors="pt").input_ids
    module = AutoModelForCausalLM.from_pretrained(SHARED / "gpt2", dtype=torch.float32)
    with torch.no_grad():
        loss = float(module(ids, labels=ids).loss)
    read = tuple(ids[0].tolist())
    assert gpt2.run(TEXT).ids == gpt2.attend(TEXT).ids == read
    assert END in gpt2.attend(TEXT).tokens
    assert gpt2.evaluate(TEXT).nats_per_token == pytest.approx(loss, abs=1e-5)
    scores = [score for _, score in gpt2.score(TEXT)]
    assert -sum(scores) / len(scores) == pytest.approx(loss, abs=1e-5)
    assert gpt2.attend_over([TEXT] * 2).tokens == 2 * len(read)
    new = module.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert gpt2.generate(TEXT, max_new_tokens=4).ids == tuple(new.tolist())


def test_as_text_a_special_token_is_its_characters(gpt2: Any) -> None:
    plain = gpt2.run(TEXT, special_tokens="text").ids
    assert gpt2.attend(TEXT, special_tokens="text").ids == plain
    assert len(plain) > len(gpt2.run(TEXT).ids)
    assert not {*plain} & gpt2.reader.tokenizer.special_ids
    assert gpt2.reader.tokenizer.decode([plain]) == [TEXT]
    assert len(gpt2.score(TEXT, special_tokens="text")) == len(plain) - 1
    assert gpt2.evaluate(TEXT, special_tokens="text").tokens == len(plain) - 1
    assert gpt2.attend_over([TEXT] * 2, special_tokens="text").tokens == 2 * len(plain)
    as_text = gpt2.generate(TEXT, special_tokens="text", max_new_tokens=3)
    assert as_text == gpt2.generate([*plain], max_new_tokens=3)
    assert as_text.log_probs != gpt2.generate(TEXT, max_new_tokens=3).log_probs
    with pytest.raises(UsageError, match="special_tokens='both' is not one of tokens, text"):
        gpt2.run(TEXT, special_tokens="both")


def test_token_ids_are_a_text(gpt2: Any) -> None:
    ids = [*gpt2.run(TEXT).ids]
    for given in (ids, torch.tensor(ids)):
        assert torch.equal(gpt2.run(given).logits, gpt2.run(TEXT).logits)
        assert gpt2.attend(given).ids == tuple(ids)
        assert gpt2.score(given) == gpt2.score(TEXT)
        assert gpt2.generate(given, max_new_tokens=3) == gpt2.generate(TEXT, max_new_tokens=3)
    streamed = gpt2.generate(ids, max_new_tokens=3, stream=True)
    assert "".join(streamed) == gpt2.generate(TEXT, max_new_tokens=3).text
    several = gpt2.run([ids, "One two.", [5]])
    assert [len(run.ids) for run in several] == [len(ids), len(gpt2.run("One two.").ids), 1]
    with pytest.raises(UsageError, match="text 2 has the token id 99999: ids are from 0 to"):
        gpt2.run([ids, [99_999]])
    with pytest.raises(UsageError, match="chat puts a text into a template"):
        gpt2.generate(ids, chat=True)


def test_an_empty_text_is_the_token_that_begins_one(gpt2: Any) -> None:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(SHARED / "gpt2", dtype=torch.float32)
    new = module.generate(max_new_tokens=4, do_sample=False)[0, 1:]
    assert gpt2.generate("", max_new_tokens=4).ids == tuple(new.tolist())
    begin = module.config.bos_token_id
    assert gpt2.run("").ids == gpt2.attend("").ids == (begin,)
    assert [run.ids[0] for run in gpt2.run(["", "One"])] == [begin, *gpt2.run("One").ids[:1]]


@pytest.mark.parametrize("text", ["\n", "  ", "\n\n\t", "\u00a0\u2003"])
def test_white_space_is_a_text(text: str, gpt2: Any, theirs: Any) -> None:
    ids = tuple(theirs(text).input_ids)
    assert gpt2.run(text).ids == gpt2.attend(text).ids == ids
    assert len(gpt2.score(text)) == len(ids) - 1
    assert len(gpt2.generate(text, max_new_tokens=2).ids) == 2


def test_a_model_without_a_tokenizer_runs_on_token_ids_and_shows_them(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SHARED / "gpt2" / name, folder)
    model = triptych.load(folder, device="cpu")
    ids = [5, 6, 7]
    whole = triptych.load(SHARED / "gpt2", device="cpu")
    assert {"run", "generate"} <= {*model.can}
    assert "convert" not in model.can
    run = model.run(ids)
    assert torch.equal(run.logits, whole.run(ids).logits)
    assert run.tokens == ("5", "6", "7")
    assert torch.equal(model.attend(ids)[0, 0], whole.attend(ids)[0, 0])
    assert [score for _, score in model.score(ids)] == [score for _, score in whole.score(ids)]
    found = model.generate(ids, max_new_tokens=3)
    assert found.ids == whole.generate(ids, max_new_tokens=3).ids
    assert found.text.split() == [str(token) for token in found.ids]
    for verb in (model.run, model.generate, model.evaluate):
        with pytest.raises(triptych.TriptychError, match="; token ids are read without one"):
            verb("A text.")


def test_an_encoders_text_may_hold_its_special_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    named = {"mask_token": "<mask>", "sep_token": "[SEP]", "tokenizer_class": "PreTrainedTokenizerFast"}
    size = byte_tokenizer(tmp_path, "[SEP]", "<mask>", end="[SEP]", **named)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=size, max_position_embeddings=64, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    model = triptych.load(tmp_path, device="cpu")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "One <mask>[SEP]two <mask>."
    ids = tuple(other(text).input_ids)
    assert model.run(text).ids == model.attend(text).ids == ids
    assert ids.count(other.mask_token_id) == ids.count(other.sep_token_id) == 2
    assert len(model.fill(text)) == len(model.fill(text.replace("<mask>", "[MASK]"))) == 2
    assert model.run("").ids == tuple(other("").input_ids)
    plain = model.run(text, special_tokens="text").ids
    assert other.mask_token_id not in plain
    assert plain[-1] == other.sep_token_id


NO_TEXTS = [None, 5, b"bytes", ["a", None], [["a"]], float("nan"), {"a": 1}, "a\ud800b", ["a", "\udc00"]]


def test_what_is_no_text_is_refused_in_one_line_by_every_verb() -> None:
    # In a process of its own: here, types are checked before the library sees them.
    code = f"""
import json, sys, triptych
from triptych.errors import TriptychError
model = triptych.load({str(SHARED / "gpt2")!r}, device="cpu")
translator = triptych.load({str(SHARED / "marian-multi30k")!r}, device="cpu")
verbs = {{
    "run": model.run, "attend": model.attend, "score": model.score, "evaluate": model.evaluate,
    "attend_over": model.attend_over, "encode": model.reader.tokenizer.encode,
    "generate": lambda given: model.generate(given, max_new_tokens=1),
    "translate": translator.translate,
    "translated run": translator.run, "target": lambda given: translator.run("a", target=given),
    "source encode": translator.reader.tokenizers.source.encode,
    "stream": lambda given: [*translator.translate(given, stream=True)],
    "references": lambda given: translator.evaluate(["a"], given),
}}
found = []
for name, verb in verbs.items():
    for given in {NO_TEXTS!r}:
        if name == "target" and given is None:
            continue
        try:
            verb(given)
            found.append([name, repr(given), "no error"])
        except triptych.UsageError as error:
            if "\\n" in str(error) or "damaged" in str(error) or "empty" in str(error):
                found.append([name, repr(given), str(error)])
        except Exception as error:
            found.append([name, repr(given), repr(error)])
print(json.dumps(found))
""".replace("nan,", "float('nan'),")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_translator_of_a_checkpoint_reads_special_tokens_of_a_sentence(tmp_path: Path) -> None:
    write_checkpoint("t5", tmp_path / "t5")
    model = triptych.load(tmp_path / "t5")
    sentence = "two <end> men"
    read = model.translator().translate([sentence])[0].text
    plain = model.translator(special_tokens="text").translate([sentence])[0].text
    assert read != plain
    assert model.translate(sentence).text == read
    assert model.translate(sentence, special_tokens="text").text == plain
