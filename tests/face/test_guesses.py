"""First guesses of people who know other libraries: a guess works, or its error has the line that does."""

import re
from collections.abc import Iterator
from importlib.metadata import version
from inspect import signature
from typing import Any

import pytest
import torch

import triptych
from small_checkpoints import gpt2_that_runs
from triptych import guesses
from triptych.errors import UsageError
from triptych.model import Model, load

TEXT = "The cat sat on the mat"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(gpt2_that_runs(tmp_path_factory.mktemp("guesses") / "gpt2"))


def test_what_a_model_is_has_the_names_that_are_typed_first(model: Model) -> None:
    assert (model.num_layers, model.d_model) == (len(model.layers), model.layers[0].d_model)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert triptych.__version__ == version("triptych")
    assert f"{model.tokenizer.vocab_size:,} tokens" in repr(model.tokenizer)
    assert model.config["model_type"] == "gpt2"
    with pytest.raises(TypeError):
        model.config["model_type"] = "llama"  # type: ignore[index]
    ids = model.encode(TEXT)
    assert model.tokenizer.encode(TEXT) == [ids]
    assert model.decode(ids) == TEXT
    assert list(model.run(TEXT).ids) == ids


def test_ids_are_those_that_a_run_reads_and_their_text_is_given_back(model: Model) -> None:
    translator = load("demo")
    sentence = "Der Zug kommt um halb vier an."
    ids = translator.encode(sentence)
    assert translator.tokenizer.pieces(ids) == list(translator.attend(sentence, "It is late.").source_tokens)
    assert translator.decode(ids) == sentence
    assert translator.encode(ids) == ids
    longer = "cat " * 2000  # past the model's positions
    assert len(model.encode(longer)) > 1000
    assert model.decode([]) == ""
    assert model.decode(torch.tensor([model.encode(TEXT)])) == TEXT  # a batch of one, as other libraries have
    with pytest.raises(UsageError, match="encode takes one text"):
        model.encode([TEXT, TEXT])  # type: ignore[arg-type]
    for given in ([[1, 2], [3]], 5, TEXT, [1.5], [TEXT]):
        with pytest.raises(UsageError, match="decode takes the token ids of one text"):
            model.decode(given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="token id"):
        model.decode([model.tokenizer.vocab_size])


def test_a_result_is_printed_as_its_text(model: Model) -> None:
    continued = model.generate(TEXT, max_new_tokens=3)
    assert str(continued) == continued.text
    (drawn, _) = model.generate([TEXT, TEXT], max_new_tokens=3)
    assert f"{drawn}" == drawn.text
    translated = load("demo").translate("Der Zug kommt um halb vier an.", num_best=2)
    assert str(translated) == translated.text == str(translated.candidates[0])


def test_the_two_products_have_the_names_of_the_pages(model: Model) -> None:
    head = model[1, 0]
    torch.testing.assert_close(head.W_QK, head.W_Q @ head.W_K.mT)
    torch.testing.assert_close(head.W_OV, head.W_V @ head.W_O)
    assert head.qk.shape == head.W_QK.shape == (model.d_model, model.d_model)
    torch.testing.assert_close(torch.from_numpy(head.ov.numpy()), head.W_OV)
    rounded = head.qk.to(torch.bfloat16)  # which numpy does not have
    torch.testing.assert_close(torch.from_numpy(rounded.numpy()), rounded.dense().float())


@pytest.fixture(scope="module")
def things(model: Model) -> dict[str, Any]:
    """By the names that answers have for them: a model, what it gives for a text, a layer and a head."""
    run, attention = model.run(TEXT), model.attend(TEXT)
    return {
        "model": model,
        "run": run,
        "attention": attention,
        "layer": model[1],
        "head": model[1, 0],
        "triptych": triptych,
        "text": TEXT,
        "tokenizer": model.tokenizer,
    }


@pytest.mark.parametrize("kind", guesses.TABLES)
def test_a_name_of_another_library_is_answered_by_ours(kind: str, things: dict[str, Any]) -> None:
    for name, line in guesses.TABLES[kind].items():
        assert not hasattr(type(things[kind]), name), name
        with pytest.raises(AttributeError, match=f"{kind} has no '{name}': {re.escape(line)}"):
            getattr(things[kind], name)


def test_a_name_that_the_package_does_not_have_is_answered_by_ours() -> None:
    for name, line in guesses.OF_PACKAGE.items():
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': {re.escape(line)}"):
            getattr(triptych, name)


def parts_of_lines() -> Iterator[str]:
    for table in (*guesses.TABLES.values(), guesses.OF_PACKAGE):
        for line in table.values():
            yield from re.findall(r"(?<![\w'.])(?:model|run|attention|triptych)(?:\['?[^]]*\])?\.\w+", line)


@pytest.mark.parametrize("part", sorted(set(parts_of_lines())))
def test_what_an_answer_names_is_there(part: str, things: dict[str, Any]) -> None:
    ours = (("[3, 2]", "[1, 0]"), ("[3]", "[1]"), ("'3.2'", "'1.0'"), ("'3'", "'1'"), ("[5]", "[0]"))
    for one, of_the_tiny_model in ours:
        part = part.replace(one, of_the_tiny_model)
    place, _, name = part.rpartition(".")
    assert hasattr(eval(place, dict(things)), name)


# What people type who know TransformerLens, nnsight, transformers, bertviz or torch. A line works, or its
# error names what does.
TYPED = """
triptych.HookedTransformer.from_pretrained("gpt2")
triptych.TransformerBridge
triptych.NNsight
triptych.AutoModelForCausalLM.from_pretrained("gpt2")
triptych.AutoTokenizer
triptych.pipeline("text-generation")
triptych.from_pretrained("gpt2")
triptych.head_view
triptych.ActivationCache
triptych.inspect(model)
model(text)
model.run_with_cache(text)
model.run_with_hooks(text, fwd_hooks=[])
model.add_hook("hook_pattern", print)
model.hook_dict
model.to_tokens(text)
model.to_str_tokens(text)
model.to_single_token(" cat")
model.W_Q[1, 0]
model.W_E
model.W_U
model.blocks[1].attn
model.cfg.n_layers
model.cfg.d_model
model.ln_final
model.trace(text)
model.transformer.h[1].attn.c_attn
model.lm_head
model.config["n_layer"]
model.config["vocab_size"]
model.generate(text, max_new_tokens=2)
model.generate(text, max_length=20)
model.generate(text, do_sample=True)
model.generate(text, num_beams=4)
model.generate(text, skip_special_tokens=True)
model.run(text, output_attentions=True)
model.run(text, names_filter="pattern")
model.parameters()
model.state_dict()
model.to("cuda")
model.eval()
model.half()
model.device
model.dtype
model.num_parameters
model.tokenizer.encode(text)
model.tokenizer.decode([[1, 2]])
model.tokenizer.vocab_size
model.encode(text)
model.decode([1, 2])
model.save_pretrained("folder")
model.prune_heads({1: [0]})
model.ablate(1, 0)
model.ablate("1.0").run(text).loss
model.logit_lens(text)
model.lens(text).attribution("t", against="e")
model.layers[1].self_attn.q_proj.weight
model.layers[1].heads[0].W_Q
model.layers[1].n_heads
model[1].W_Q[0]
model[1, 0].QK
model[1, 0].W_QK
model[1, 0].pattern
model["1.0"].ov.svd()
len(model.layers)
run.logits.argmax(-1)
run.attentions[1]
run.hidden_states
run["1.0"].weights
run["blocks.1.attn.hook_pattern"]
run.loss
attention[1][0]
attention[1, 0]
attention.attentions
attention.plot()
attention.heatmap()
attention.numpy()
attention.shape
attention.tokens
triptych.load("gpt2", torch_dtype="float16")
triptych.load("gpt2", device_map="auto")
triptych.load("gpt2", trust_remote_code=True)
triptych.load("gpt2", attn_implementation="eager")
triptych.load("gpt2", fold_ln=False)
triptych.load("gpt2", center_writing_weights=False)
triptych.load("gpt2", local_files_only=True)
triptych.load("gpt2", dispatch=True)
triptych.HookedEncoder.from_pretrained("bert-base-cased")
triptych.TransformersModel("gpt2")
triptych.neuron_view.show(model)
model.loss_fn(run.logits, text)
model.W_pos
model.tokens_to_residual_directions(" cat")
model.get_token_position(" cat", text)
model.all_composition_scores("Q")
model.set_use_attn_result(True)
model.run(text, return_type="loss")
model.run(text, prepend_bos=False)
model.generate(text, stop_at_eos=False)
model.generate(text, freq_penalty=1.0)
model.generate(text, return_dict_in_generate=True)
model.generate(text, attention_mask=None)
model.generate(text, max_new_tokens=2)[0]["generated_text"]
model.config.n_embd
model.config.hidden_size
model.tokenizer(text, return_tensors="pt")
model.tokenizer.convert_ids_to_tokens([1, 2])
model.tokenizer.eos_token_id
model.tokenizer.apply_chat_template([])
model.get_input_embeddings()
model.get_encoder()
model.merge_and_unload()
model.output.logits
model.transformer.h[1].output[0].save()
model.layers[1].input
model.session()
run["pattern", 1]
run["resid_post", 1]
run.accumulated_resid(layer=-1)
run.decompose_resid()
run.logit_attrs(" cat")
run.stack_head_results()
run.remove_batch_dim()
run.cross_attentions
attention.model_view()
attention.encoder_attentions
""".strip().splitlines()
# What an answer names: a call or an attribute of ours, an argument, or how a place is written.
ANSWER = re.compile(
    r"(model|run|attention)[.[]\w?|attention in|triptych\.load|use \w+|write a layer|ablate\('"
)


def test_more_than_sixty_first_guesses_are_tried() -> None:
    assert len({*TYPED}) == len(TYPED) > 60


@pytest.mark.parametrize("typed", TYPED)
def test_a_first_guess_works_or_is_answered_by_a_line_that_does(typed: str, things: dict[str, Any]) -> None:
    try:
        assert eval(typed, dict(things)) is not None
    except (AttributeError, TypeError, UsageError) as error:
        said = str(error).partition(": ")[2] or str(error)
        assert ANSWER.search(said), error  # noqa: PT017
        assert "\n" not in said


@pytest.mark.parametrize("name", [one for one in guesses.OF_VERBS if one != "max_new_tokens"])
def test_an_argument_of_another_library_is_answered_by_ours(name: str, model: Model) -> None:
    with pytest.raises(TypeError, match=f"generate has no argument {name!r}: use "):
        model.generate(TEXT, **{name: 1})  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["max_length", "max_tokens", "max_new_tokens", "truncation"])
def test_an_answer_names_an_argument_that_the_verb_has(name: str, model: Model) -> None:
    translator = load("demo")
    for verb in (model.generate, model.run, model.evaluate, translator.translate):
        if name in signature(verb).parameters:
            continue
        with pytest.raises(TypeError, match=f"has no argument '{name}'") as caught:
            verb(TEXT, **{name: 1})  # type: ignore[operator]
        _, use, answer = str(caught.value).partition(": use ")
        assert not use or re.split(r"\W", answer)[0] in signature(verb).parameters


def test_an_argument_with_a_slip_is_answered_by_the_nearest(model: Model) -> None:
    with pytest.raises(TypeError, match="generate has no argument 'temprature': use temperature"):
        model.generate(TEXT, temprature=1)  # type: ignore[call-overload]


def test_a_head_given_as_two_numbers_is_answered_by_its_name(model: Model) -> None:
    with pytest.raises(UsageError, match=r"ablate\('1.0'\)"):
        model.ablate(1, 0)  # type: ignore[arg-type]


def test_no_other_attribute_is_explained(model: Model) -> None:
    with pytest.raises(AttributeError, match=r"a model has no 'nothing_of_this_name'$"):
        model.nothing_of_this_name  # noqa: B018
