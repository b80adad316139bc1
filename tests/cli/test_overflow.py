"""Weights that are numbers, and what is computed of them that is none: one error that names the layer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import triptych as library
from command import Command
from face.tiny import write_checkpoint
from served import Served
from small_checkpoints import gpt2_that_runs
from triptych.core.models.overflow import NumbersOverflowError

TEXT = "w1 w2 w3 w4 w5 w6"


def in_float16(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """The same checkpoint in float16, its tensors changed."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.half().clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 in float16 whose second feed-forward layer is too large for that."""
    found = gpt2_that_runs(tmp_path_factory.mktemp("overflow") / "model")

    def enlarge(tensors: dict[str, Tensor]) -> None:
        (large,) = [name for name in tensors if name.endswith("h.1.mlp.c_proj.weight")]
        tensors[large] = tensors[large].sign() * 6e4

    return in_float16(found, enlarge)


CALLS: dict[str, Callable[[library.Model], object]] = {
    "run": lambda model: model.run(TEXT),
    "run with gradients": lambda model: model.run(TEXT, grad=True),
    "generate": lambda model: model.generate(TEXT, max_new_tokens=2),
    "generate with a beam": lambda model: model.generate(TEXT, max_new_tokens=2, beam_size=2),
    "score": lambda model: model.score(TEXT),
    "evaluate": lambda model: model.evaluate(TEXT),
    "attend": lambda model: model.attend(TEXT),
    "attend_over": lambda model: model.attend_over(TEXT),
    "worth": lambda model: model.attend_over(TEXT, worth="zero"),
    "sweep": lambda model: model.sweep(TEXT, TEXT, lambda run: run.loss),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_overflows_is_one_error_that_names_the_layer(
    folder: Path, call: Callable[[library.Model], object]
) -> None:
    place = (
        r"^(the feed-forward layer in )?layer 1 of the model computed numbers that are not finite .*float16"
    )
    with pytest.raises(NumbersOverflowError, match=f"{place}; read the model in float32 or bfloat16"):
        call(library.load(folder))
    for dtype in ("float32", "bfloat16"):
        call(library.load(folder, dtype=dtype))


TRANSLATIONS: dict[str, Callable[[library.Model], object]] = {
    "run": lambda model: model.run(TEXT, target="w2 w1"),
    "score": lambda model: model.score(TEXT, target="w2 w1"),
    "attend": lambda model: model.attend(TEXT, target="w2 w1"),
    "translate": lambda model: model.translate(TEXT, max_extra_tokens=2),
    "translate without a beam": lambda model: model.translate(TEXT, beam_size=1, max_extra_tokens=2),
    "translate several": lambda model: model.translate([TEXT, "w3"], num_best=2),
}


@pytest.fixture(scope="module")
def translators(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Translators in float16 of which one map of one stack is too large for that."""
    found = {}
    for stack in ("encoder", "decoder"):
        path = tmp_path_factory.mktemp("overflow") / "model"
        write_checkpoint("marian", path)
        named = f"{stack}.layers.1.fc2.weight"

        def enlarge(tensors: dict[str, Tensor], named: str = named) -> None:
            (large,) = [name for name in tensors if name.endswith(named)]
            tensors[large] = tensors[large].sign() * 6e4

        found[stack] = in_float16(path, enlarge)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("call", TRANSLATIONS.values(), ids=TRANSLATIONS)
def test_what_overflows_in_a_translator_names_the_layer_of_its_stack(
    translators: dict[str, Path], stack: str, call: Callable[[library.Model], object]
) -> None:
    place = rf"^(the feed-forward layer in )?layer {stack}\.1 of the model computed numbers that are not"
    with pytest.raises(NumbersOverflowError, match=place):
        call(library.load(translators[stack], dtype="float16"))


@pytest.mark.parametrize("beam", [1, 2])
def test_what_overflows_behind_a_prompt_names_the_part_too(tmp_path: Path, beam: int) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors["transformer.wte.weight"][:, 0] = 900
        tensors["transformer.wpe.weight"][20:, 0] = 65_000

    model = library.load(in_float16(gpt2_that_runs(tmp_path / "gpt2"), enlarge))
    prompt = "w" * 10
    assert model.run(prompt).logits.isfinite().all()
    with pytest.raises(NumbersOverflowError, match=r"^the embeddings of the model computed numbers"):
        model.generate(prompt, max_new_tokens=20, beam_size=beam)


COMMANDS = {
    "attend": ("attend", "MODEL", TEXT),
    "attend --json": ("attend", "MODEL", TEXT, "--json"),
    "attend --csv": ("attend", "MODEL", TEXT, "--csv", "OUT"),
    "attend --html": ("attend", "MODEL", TEXT, "--html", "OUT"),
    "attend --svg": ("attend", "MODEL", TEXT, "--heads", "2.1", "--svg", "OUT"),
    "attend --steps": ("attend", "MODEL", TEXT, "--steps", "2.1:3"),
    "attend --over": ("attend", "MODEL", "--over", "TEXT"),
    "attend --over --explain": ("attend", "MODEL", "--over", "TEXT", "--explain"),
    "attend --over --worth": ("attend", "MODEL", "--over", "TEXT", "--worth", "zero"),
    "evaluate": ("evaluate", "MODEL", "--text", "TEXT", "--json"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_the_command_says_so_and_writes_nothing(
    folder: Path, words: tuple[str, ...], triptych: Command, tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT * 4)
    named = {"MODEL": folder, "TEXT": text, "OUT": out}
    triptych(*(named.get(word, word) for word in words)).refused("not finite", code=1)
    assert not out.exists()


def test_a_model_that_overflows_on_any_text_is_not_served(folder: Path) -> None:
    place = r"layer 1 of the model computed numbers that are not finite .*float16"
    with pytest.raises(NumbersOverflowError, match=place), Served({"gpt": library.load(folder)}):
        pass


def test_a_server_gives_no_embeddings_that_are_no_numbers(tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        (large,) = [name for name in tensors if name.endswith("layer.1.output.dense.weight")]
        tensors[large] = tensors[large].sign() * 6e4

    write_checkpoint("bert", tmp_path / "model")
    folder = in_float16(tmp_path / "model", enlarge)
    with Served({"bert": library.load(folder, dtype="float16")}) as served:
        answer = served.ask("/v1/embeddings", {"input": "hear me speak"})
        assert answer.status == 400
        assert "layer 1 of the model computed numbers that are not finite" in answer.body["error"]["message"]
    with Served({"bert": library.load(folder, dtype="float32")}) as served:
        (found,) = served.ask("/v1/embeddings", {"input": "hear me speak"}).body["data"]
        assert torch.tensor(found["embedding"]).norm() == pytest.approx(1.0, abs=1e-5)


def test_a_bias_that_hides_tokens_is_no_overflow(tmp_path: Path) -> None:
    model = library.load(gpt2_that_runs(tmp_path / "model"))
    language = model.reader.language_model
    assert language.head is not None
    hidden = torch.zeros(language.vocab_size)
    hidden[3] = -torch.inf
    language.head.output.bias = torch.nn.Parameter(hidden)
    assert model.run("w1 w2").logits[:, 3].isinf().all()
    assert json.dumps(model.evaluate("w1 w2 w4").figures(), allow_nan=False)


def test_a_server_answers_log_probabilities_that_overflow_with_one_line(tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        # Of the token w from the 46th place on, the sum is too large.
        tensors["transformer.wpe.weight"][45:] = 65_000
        tensors["transformer.wte.weight"][letter] = 900

    folder = gpt2_that_runs(tmp_path / "gpt2")
    (letter,) = library.load(folder).reader.tokenizer.encode(["w"])[0]
    in_float16(folder, enlarge)
    asked = {"max_tokens": 0, "echo": True, "logprobs": 2}
    with Served({"m": library.load(folder)}) as served:
        short = served.ask("/v1/completions", asked | {"prompt": "w" * 10})
        long = served.ask("/v1/completions", asked | {"prompt": "w" * 50})
    assert short.status == 200
    assert long.status == 400
    assert "computed numbers that are not finite" in long.body["error"]["message"]
