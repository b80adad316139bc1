"""Changes of a model, against `transformers` with the same change written by hand."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from small_checkpoints import gpt2_that_runs
from triptych import Model, TriptychError, UsageError, load
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.literals import Activation
from triptych.running.changes import Patch
from triptych.running.opening import TextIds

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"
pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no trained checkpoints here")
TEXT = "First Citizen: Before we proceed any further, hear me speak."
OTHER = "First Senator: Before they proceed no further, have we done."  # with as many tokens
SOURCE, TARGET = "Two men are walking.", "Zwei Männer gehen spazieren."


@pytest.fixture(scope="module")
def gpt2() -> Model:
    return load(CHECKPOINTS / "gpt2", device="cpu")


@pytest.fixture(scope="module")
def translator() -> Model:
    return load(CHECKPOINTS / "marian-multi30k", device="cpu")


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").eval()


def close(one: Tensor, other: Tensor) -> None:
    """Within 1e-6 of the largest logit."""
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * float(other.abs().max().clamp(min=1)))


@pytest.mark.slow
@torch.no_grad()
def test_ablating_each_head_is_zeroing_its_rows_of_the_output_map() -> None:
    gpt2 = load(CHECKPOINTS / "gpt2", device="cpu", dtype="float64")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2", dtype=torch.float64)
    theirs.eval()
    ids = torch.tensor([gpt2.run(TEXT).ids])
    whole = float(gpt2.run(TEXT).loss)
    moved = 0
    for layer in range(6):
        rows = theirs.transformer.h[layer].attn.c_proj.weight
        for head in range(8):
            own, kept = slice(head * 32, head * 32 + 32), rows.data.clone()
            rows.data[own] = 0
            expected = float(cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:]))  # its own loss is float32
            rows.data = kept
            found = float(gpt2.ablate(f"{layer}.{head}").run(TEXT).loss)
            assert found == pytest.approx(expected, abs=1e-6)
            moved += abs(found - whole) > 1e-4
    assert moved > 40
    assert float(gpt2.run(TEXT).loss) == whole


@torch.no_grad()
def test_a_patched_head_is_a_hook_before_the_output_map(gpt2: Model, theirs: Any) -> None:
    run = gpt2.run(OTHER)
    z, ids = run["2.3"].z, torch.tensor([gpt2.run(TEXT).ids])

    def hook(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = given[0].clone()
        x[0, :, 3 * 32 : 4 * 32] = z
        return (x,)

    hooked = theirs.transformer.h[2].attn.c_proj.register_forward_pre_hook(hook)
    expected = theirs(ids).logits[0]
    hooked.remove()
    found = gpt2.patch("2.3", run).run(TEXT).logits
    close(found, expected)
    assert float((found - gpt2.run(TEXT).logits).abs().max()) > 1e-2


@torch.no_grad()
def test_a_direction_is_added_before_its_block(gpt2: Model, theirs: Any) -> None:
    vector, ids = torch.randn(256), torch.tensor([gpt2.run(TEXT).ids])
    block = theirs.transformer.h[3]
    hooked = block.register_forward_pre_hook(lambda _, given: (given[0] + 2 * vector, *given[1:]))
    expected = theirs(ids).logits[0]
    hooked.remove()
    close(gpt2.steer("residual.3", vector, 2.0).run(TEXT).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("place", ["encoder.0.1", "decoder.2.3", "cross.1.2"])
def test_heads_of_an_encoder_decoder_are_ablated_before_the_output_map(translator: Model, place: str) -> None:
    other = transformers.MarianMTModel.from_pretrained(CHECKPOINTS / "marian-multi30k").eval()
    stack, layer, head = place.split(".")
    blocks = (other.model.encoder if stack == "encoder" else other.model.decoder).layers
    attention = blocks[int(layer)].encoder_attn if stack == "cross" else blocks[int(layer)].self_attn
    run = translator.run(SOURCE, target=TARGET)
    attention.out_proj.weight[:, int(head) * 64 : int(head) * 64 + 64] = 0
    source = torch.tensor([translator.reader.encode([SOURCE], [TARGET])[0].source])
    read = torch.tensor([[other.config.decoder_start_token_id, *run.ids[:-1]]])
    expected = other(input_ids=source, decoder_input_ids=read).logits[0]
    found = translator.ablate(place).run(SOURCE, target=TARGET).logits
    close(found, expected)
    assert float((found - run.logits).abs().max()) > 1e-3


CHANGES = {
    "ablate": lambda model, run: model.ablate("3.*"),
    "mean": lambda model, run: model.ablate("3.1", by="mean", text=TEXT),
    "resample": lambda model, run: model.ablate("3.1", by="resample", text=TEXT),
    "edit": lambda model, run: model.edit("1.*", "scores", lambda scores: 2 * scores),
    "steer": lambda model, run: model.steer("residual.6", torch.linspace(-2, 2, 256)),
    "tie": lambda model, run: model.tie("*", "W_V", "W_K"),
}


@pytest.mark.sampled(3)
@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_cached_generation_of_a_changed_model_is_that_of_whole_texts(gpt2: Model, name: str) -> None:
    changed = CHANGES[name](gpt2, gpt2.run("Second Citizen: After they"))
    ids = list(gpt2.run("First Citizen: Before").ids)
    for _ in range(6):
        hidden = changed.reader.run([TextIds(tuple(ids))]).hidden
        ids.append(int(changed.reader.logits(hidden)[0, -1].argmax()))
    found = changed.generate(["First Citizen: Before", "O"], max_new_tokens=6)
    assert list(found[0].ids) == ids[-6:]
    assert (
        gpt2.generate("First Citizen: Before", max_new_tokens=6).ids
        == load(CHECKPOINTS / "gpt2", device="cpu").generate("First Citizen: Before", max_new_tokens=6).ids
    )


@torch.no_grad()
@pytest.mark.parametrize("what", ["q", "k", "v", "scores", "weights", "z"])
def test_a_patched_text_is_continued_by_tokens_that_are_not_patched(gpt2: Model, what: Any) -> None:
    prompts, run = ["First Citizen: Before", "First Citizen: Speak"], gpt2.run("Second Citizen: Before")
    assert len({len(gpt2.run(one).ids) for one in prompts} | {len(run.ids)}) == 1
    own = torch.stack([getattr(run[2, head], what) for head in range(8)])

    def put(value: Tensor) -> Tensor:
        """As the patch, on a whole text."""
        new = own if what not in ("scores", "weights") else cut(own, value.shape[-1])
        return torch.cat([new[None], value[:, :, own.shape[1] :]], dim=2)

    def cut(rows: Tensor, keys: int) -> Tensor:
        return torch.nn.functional.pad(rows, (0, keys - rows.shape[-1]))

    patched, whole = gpt2.patch("2.*", run, what), gpt2.edit("2.*", what, put, together=True)
    for prompt, found in zip(prompts, patched.generate(prompts, max_new_tokens=6), strict=True):
        ids = list(gpt2.run(prompt).ids)
        for _ in range(6):
            ids.append(
                int(whole.reader.logits(whole.reader.run([TextIds(tuple(ids))]).hidden)[0, -1].argmax())
            )
        assert list(found.ids) == ids[-6:]


@torch.no_grad()
@pytest.mark.parametrize(
    "what",
    ["q", *(pytest.param(one, marks=pytest.mark.slow) for one in ("weights", "k", "v", "scores", "z"))],
)
def test_a_run_of_another_length_is_not_patched(gpt2: Model, translator: Model, what: Any) -> None:
    short, long = "We speak, we two.", "We speak, we two, and we shall speak."
    for run, text in ((short, long), (long, short)):
        for positions in (None, [0], [-1]):
            patched = gpt2.patch("2.1", gpt2.run(run), what, positions=positions)
            for use in (
                patched.run,
                patched.attend,
                patched.score,
                patched.evaluate,
                lambda text, by=patched, own=run: by.run([text, own]),
                lambda text, by=patched, own=run: by.run([text, own], grad=True),
                lambda text, by=patched, own=run: by.attend([text, own]),
                lambda text, by=patched: by.generate(text, max_new_tokens=2),
            ):
                with pytest.raises(UsageError, match=rf"the run has \d+ tokens and the text \d+: {what} are"):
                    use(text)
            assert patched.run(run).losses.shape == gpt2.run(run).losses.shape
            assert patched.evaluate(run).nats == pytest.approx(float(patched.run(run).losses.sum()), abs=1e-4)
    pairs = (SOURCE, TARGET), ("Two men in blue are walking.", TARGET), (SOURCE, TARGET + " Und so.")
    for place in ("encoder.1.2", "decoder.1.2", "cross.1.2"):
        for one, other in ((0, 1), (1, 0), (0, 2), (2, 0)):
            patched = translator.patch(place, translator.run(pairs[one][0], target=pairs[one][1]), what)
            reads = {"encoder": (0, 0), "decoder": (1, 1), "cross": (1, 0)}[place.split(".")[0]]
            lengths = [
                [len(side) for side in (run.source_tokens or (), run.tokens)]
                for run in (translator.run(s, target=t) for s, t in (pairs[one], pairs[other]))
            ]
            sides = {reads[1]} if what in ("k", "v") else {reads[0]} if what in ("q", "z") else {*reads}
            source, target = pairs[other]
            if any(lengths[0][side] != lengths[1][side] for side in sides):
                with pytest.raises(UsageError, match=f"{what} are patched between texts of one length"):
                    patched.run(source, target=target)
            else:
                assert patched.run(source, target=target).logits.isfinite().all()


@torch.no_grad()
def test_searched_translations_are_patched_from_their_first_token(translator: Model) -> None:
    other = translator.run("Two men are running.", target=TARGET)
    patched = translator.patch("cross.*", other, "z")
    before = patched.run(SOURCE, target=TARGET).logits
    found = patched.translate(SOURCE).text
    assert torch.equal(patched.run(SOURCE, target=TARGET).logits, before)  # no position of the search stays
    assert found == translator.edit("cross.*", "z", lambda z: z).translate("Two men are running.").text
    with pytest.raises(UsageError, match="k are patched between texts of one length"):
        translator.patch("encoder.1.2", other, "k").translate([SOURCE, "Two men in blue are walking."])


def test_beams_over_a_model_with_edits_are_those_of_the_fused_engine(translator: Model) -> None:
    lines = [SOURCE, "A woman in a red dress is dancing.", "A dog."]
    plain = translator.edit("*", "z", lambda z: z)
    for ours, fused in zip(plain.translate(lines), translator.translate(lines), strict=True):
        assert ours.text == fused.text
        assert ours.candidates[0].score == pytest.approx(fused.candidates[0].score, abs=1e-5)
    ablated = translator.ablate("cross.*")
    zeroed = translator.edit("cross.*", "z", torch.zeros_like)
    assert [one.text for one in ablated.translate(lines)] == [one.text for one in zeroed.translate(lines)]


@torch.no_grad()
def test_texts_of_a_padded_batch_are_changed_as_each_alone(gpt2: Model, translator: Model) -> None:
    texts = [TEXT, "Speak, speak."]
    changed = gpt2.edit("2.*", "weights", lambda weights: weights.sqrt()).ablate("4.1")
    for together, text in zip(changed.run(texts), texts, strict=True):
        close(together.logits, changed.run(text).logits)
    halved = translator.edit("encoder.*", "scores", lambda scores: scores / 2)
    sources, targets = [SOURCE, "A dog."], [TARGET, "Ein Hund."]
    for together, source, target in zip(halved.run(sources, target=targets), sources, targets, strict=True):
        close(together.logits, halved.run(source, target=target).logits)


@pytest.mark.parametrize("what", ["q", "k", "scores", "weights"])
def test_attention_of_an_edited_head_is_what_the_run_had(gpt2: Model, translator: Model, what: Any) -> None:
    for model, layer, read in ((gpt2, "3", (TEXT,)), (translator, "cross.1", (SOURCE, TARGET))):
        edited = model.edit(f"{layer}.2", what, lambda value: value * value.sin())
        attended, run = edited.attend(*read), edited.run(read[0], target=(*read, None)[1])
        close(attended[layer], run[layer].weights)
        assert (attended[layer, 2] - model.attend(*read)[layer, 2]).abs().max() > 1e-3
        (kept,) = attended.of("cross" if "." in layer else "decoder").layers[int(layer[-1])].maps(3, [2])
        torch.testing.assert_close(
            torch.tensor(kept.weights).sort(dim=1).values, attended[layer, 2].topk(3).values.flip(1)
        )


@torch.no_grad()
def test_heads_of_a_scale_of_their_own_are_replaced_one_after_another() -> None:
    """Exchanged within a layer, two heads change nothing; `edit` meets the queries of the layer as it was."""
    config = LanguageModelConfig(num_layers=1, d_model=24, num_heads=4, context=16, bias=False)
    outside = config.attention.model_copy(update={"scale": "outside"})
    torch.manual_seed(0)
    module = LanguageModel.of(config.model_copy(update={"attention": outside}), "decoder", 11).eval()
    ids = [*range(8)]
    model = load(module)
    one, other = model["0.1"], model["0.2"]

    def as_in(head: Any) -> dict[str, Tensor]:
        return {"W_Q": head.W_Q, "W_K": head.W_K, "W_V": head.W_V, "W_O": head.W_O}

    exchanged = model.replace("0.1", **as_in(other)).replace("0.2", **as_in(one))
    torch.testing.assert_close(exchanged.run(ids).logits, model.run(ids).logits, atol=1e-5, rtol=0)
    seen = []
    for of in (model, exchanged):
        of.edit("0.0", "q", lambda q: seen.append(q) or q).run(ids)
    torch.testing.assert_close(seen[0], seen[1], atol=1e-6, rtol=0)


@torch.no_grad()
def test_without_positions_is_one_position_for_all_tokens() -> None:
    for path in ("gpt2", "llama-gqa"):
        model, theirs = (
            load(CHECKPOINTS / path, device="cpu"),
            transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / path).eval(),
        )
        plain = model.without_positions()
        ids = torch.tensor([plain.run(TEXT).ids])
        if path == "gpt2":
            theirs.transformer.wpe.weight.zero_()
            expected = theirs(ids).logits[0]
        else:  # rotary positions tell distances apart, which are 0
            expected = theirs(ids, position_ids=torch.zeros_like(ids)).logits[0]
        found = plain.run(TEXT)
        assert (found.logits - expected).abs().max() < 1e-4
        assert (found.logits - model.run(TEXT).logits).abs().max() > 1
        text = plain.generate(TEXT, max_new_tokens=6)
        assert found.logits[-1].argmax() == text.ids[0]
        with pytest.raises(UsageError, match="weights cannot express"):
            plain.save("nowhere")
        with pytest.raises(UsageError, match="no positions"):
            plain.without_positions()


def test_gradients_reach_activations(gpt2: Model) -> None:
    run = gpt2.run(TEXT, grad=True)
    gradient = run.gradient("3.2")
    step = 1e-2 * torch.randn_like(gradient)
    up, down = (
        float(gpt2.edit("3.2", "z", lambda z, s=sign: z + s * step).run(TEXT).loss) for sign in (1, -1)
    )
    assert (up - down) / 2 == pytest.approx(float((gradient * step).sum()), rel=0.05, abs=2e-6)
    both = gpt2.run([TEXT, TEXT[:20]], grad=True)
    for what in ("z", "k", "weights"):
        for found, text in zip(both, (TEXT, TEXT[:20]), strict=True):
            alone = gpt2.run(text, grad=True).gradient("3.2", what)
            torch.testing.assert_close(found.gradient("3.2", what), alone, rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="grad=True"):
        gpt2.run(TEXT).gradient("3.2")


@torch.no_grad()
def test_what_weights_can_say_is_saved_and_read_by_transformers(gpt2: Model, tmp_path: Path) -> None:
    changed = (
        gpt2.ablate("3.2")
        .ablate("1.1", by="mean", text=TEXT)
        .tie(2, "W_K", "W_Q")
        .replace("4.5", W_V=torch.zeros(256, 32))
        .steer("residual.3", torch.linspace(-1, 1, 256))
    )
    changed.save(tmp_path / "changed")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "changed").eval()
    run = changed.run(TEXT)
    close(other(torch.tensor([run.ids])).logits[0], run.logits)
    close(load(tmp_path / "changed", device="cpu").run(TEXT).logits, run.logits)
    with pytest.raises(UsageError, match=r"edit\(1\.1, scores\) cannot be saved"):
        gpt2.edit("1.1", "scores", torch.relu).save(tmp_path / "edited")
    with pytest.raises(UsageError, match="no bias comes right before it"):
        load(CHECKPOINTS / "llama-gqa").steer("residual.3", torch.ones(256)).save(tmp_path / "steered")


def test_a_rewrite_is_a_model_with_a_certificate_that_is_saved_with_it(gpt2: Model, tmp_path: Path) -> None:
    smaller = gpt2.rewrite("truncate(rank=6)", compare=False)
    assert smaller.certificate is not None
    assert smaller.certificate.tier == "bounded"
    assert gpt2.certificate is None
    again = load(smaller.save(tmp_path / "smaller"))
    assert again.certificate == smaller.certificate
    assert float(again[2, 1].qk.singular_values()[6]) < 1e-4 * float(again[2, 1].qk.singular_values()[0])
    plan = gpt2.plan("truncate(rank=6)")
    assert plan.before == smaller.certificate.before


@torch.no_grad()
def test_changed_models_and_modules_in_memory_are_rewritten_too(gpt2: Model, theirs: Any) -> None:
    ablated = gpt2.ablate("3.2")
    pruned = ablated.rewrite("fold_value_bias", "prune_heads", compare=False, skip_refused=True)
    assert pruned.certificate is not None
    assert pruned.certificate.source.endswith(", ablate(3.2)")
    (_, dead) = pruned.certificate.layers[3].steps
    assert "1 of 8 heads left out: 2" in dead.choice
    close(pruned.run(TEXT).logits, ablated.run(TEXT).logits)
    in_memory = load(theirs, tokenizer=CHECKPOINTS / "gpt2").rewrite("truncate(rank=6)", compare=False)
    on_disk = gpt2.rewrite("truncate(rank=6)", compare=False)
    assert torch.equal(in_memory[2, 1].W_Q, on_disk[2, 1].W_Q)
    own = LanguageModel.of(LanguageModelConfig(num_layers=1, d_model=16, num_heads=2), "decoder", 13).eval()
    smaller = load(own).rewrite("prune_heads(number=1)")
    assert smaller.certificate is not None
    assert smaller.certificate.end_to_end is not None
    assert smaller.layers[0].num_heads == 1
    assert load(own).plan("prune_heads(number=1)").before == smaller.certificate.before


def test_a_module_whose_tokenizer_is_elsewhere_is_rewritten_on_random_tokens(tmp_path: Path) -> None:
    own = LanguageModel.of(LanguageModelConfig(num_layers=1, d_model=16, num_heads=2), "decoder", 13).eval()
    assert load(own, tokenizer=tmp_path).rewrite("prune_heads(number=1)").layers[0].num_heads == 1


def test_a_refused_rewrite_leaves_no_folder(
    gpt2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TriptychError, match="rank"):
        gpt2.rewrite("truncate(rank=999)", compare=False)
    assert [*tmp_path.iterdir()] == []


def test_one_string_that_ends_a_text_is_not_taken_for_its_letters(gpt2: Model) -> None:
    whole = gpt2.generate(TEXT, max_new_tokens=20).text
    end = whole[20:26]
    assert set(end) & set(whole[: whole.index(end)])
    assert gpt2.generate(TEXT, max_new_tokens=20, stop=end).text == whole[: whole.index(end)]


@torch.no_grad()
def test_a_sweep_patches_every_head_and_finds_the_one_that_matters(tmp_path: Path) -> None:
    model = load(gpt2_that_runs(tmp_path / "gpt2"), device="cpu")
    clean, corrupted = ["The cat sat", "A dog ran"], ["The dog sat", "A cat ran"]
    found = model.sweep(clean, corrupted, lambda run: run.logits[-1, 5])
    assert found.values.shape == (12, 2)
    one = model.patch("2.3", model.run(clean[1])).run(corrupted[1]).logits[-1, 5]
    assert float(found.values[found.heads.index("2.3"), 1]) == pytest.approx(float(one))
    assert (found.low <= found.mean.double() + 1e-6).all()
    with pytest.raises(UsageError, match="pair 1 has"):
        model.sweep("The cat", "The cat sat", lambda run: 0.0)
    with pytest.raises(UsageError, match=r"the metric of pair 1 is \[nan, nan\]"):
        model.sweep("The cat", "The dog", lambda run: float("nan"))


@torch.no_grad()
@pytest.mark.parametrize("what", ["z", "k", "weights"])
def test_a_sweep_is_every_patch_by_itself_to_any_metric(tmp_path: Path, what: Activation) -> None:
    # The metric reads the logits, the streams of all blocks, and activations before, at and after the patch.
    def metric(run: Any) -> Tensor:
        layers = (run[layer] for layer in range(3))
        inside = sum(found.weights.square().sum() + found.output.abs().sum() for found in layers)
        streams = sum(run.residual(block).abs().sum() for block in range(4))
        return (
            run.logits[-1, 5] + run.loss + inside + streams + run["1.2"].z.sum() + run["1.3"].projected.sum()
        )

    model = load(gpt2_that_runs(tmp_path / "gpt2"), device="cpu").ablate("0.1").edit("1.2", "z", torch.tanh)
    clean = "The cat sat"
    corrupted = "The dog sat"
    found = model.sweep(clean, corrupted, metric, what)
    run = model.run(clean)
    slow = [float(metric(model.patch(head, run, what).run(corrupted))) for head in found.heads]
    torch.testing.assert_close(
        found.values[:, 0], torch.tensor(slow, dtype=torch.float64), rtol=1e-5, atol=1e-5
    )
    assert len(set(slow)) > 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.ablate("9"), "has no layer 9: its layers are 0 to 5"),
        (lambda model: model.ablate("3.8"), "layer 3 has no head 8: its heads are 0 to 7"),
        (lambda model: model.ablate("*.9"), "matches no head"),
        (lambda model: model.ablate("3.2", by="mean"), "needs a text"),
        (lambda model: model.steer("stream.3", torch.ones(256)), "not a place in the residual stream"),
        (lambda model: model.steer("residual.7", torch.ones(256)), "residual.0 to residual.6"),
        (
            lambda model: model.steer("residual.1", torch.ones(3)),
            r"shape \[3\], and the stream is \[256\]",
        ),
        (lambda model: model.replace("3", W_Q=torch.ones(2, 2)), r"W_Q is \[8, 256, 32\] here"),
        (
            lambda model: model.replace("3.99", W_Q=torch.ones(256, 32)),
            "layer 3 has no head 99: its heads are 0 to 7",
        ),
        (lambda model: model.run(TEXT, grad=True).gradient("3.99"), "layer 3 has no head 99"),
        (
            lambda model: Patch("z", torch.ones(4, 5), None)(torch.zeros(1, 4, 32), 0),
            "z of the run are 5 wide, and of the model 32",
        ),
        (lambda model: model.generate(TEXT, stream=True, beam_size=2), "one text without a beam"),
        (lambda model: model.tie("3", "W_O", "W_Q"), "W_O reads what heads mixed"),
        (lambda model: model.edit("3.2", "z", lambda z: z[:, :1]).run(TEXT), "gave shape"),
        (
            lambda model: model.edit("3.2", "z", lambda z: None).run(TEXT),
            "z gave a NoneType: return a tensor",
        ),
        (lambda model: model.edit("3.2", "q", lambda q: 0).run(TEXT), "q gave a int: return a tensor"),
        (
            lambda model: model.edit("3.2", "z", lambda z: z.round().long()).run(TEXT),
            "z gave numbers of int64: return floating-point numbers",
        ),
        (
            lambda model: model.edit("3.2", "z", lambda z: z.to(torch.complex64)).run(TEXT),
            "z gave numbers of complex64",
        ),
        (lambda model: model.run(TEXT)["7.1"], "has no layer 7"),
        (lambda model: model.run(TEXT).residual(9), "no residual 9"),
        (lambda model: model.run(TEXT, max_tokens=2), "at most 2 are read at once: .*raise max_tokens"),
        (lambda model: model.score(TEXT, max_tokens=2), "at most 2 are read at once"),
        (lambda model: model.edit("3.2", "z", torch.relu).rewrite("expand"), "cannot be saved"),
        (lambda model: model.ablate("3.2", by="zeros"), "by='zeros' is not one of zero, mean, resample"),
        (lambda model: model.ablate(3, 2), "by=2 is not one of zero, mean, resample"),
        (lambda model: model.ablate("3.-1"), "is not a place in a model"),
        (
            lambda model: model.attend_over(TEXT, worth="median"),
            "worth='median' is not one of zero, mean, even",
        ),
        (lambda model: model.attend_over(TEXT, most_tokens=0), "number of tokens to read is 0"),
        (
            lambda model: model.patch("3.2", model.run(TEXT), positions=[99]),
            "there is no position 99: the run",
        ),
        (
            lambda model: model.run(TEXT, grad=True).gradient("3.2", "output"),
            "'output' is not one of q, k, v",
        ),
        (lambda model: model.run(__file__), "is a file, and a string is the text itself"),
        (lambda model: model["*.2"], r"may be several heads: changes take it, as in ablate\("),
        (lambda model: load("gpt2", precision="fp16"), "precision='fp16' is not one of fp32, bf16, int8"),
        (lambda model: load("gpt2", dtype="bf16"), "dtype='bf16' is not one of float32, bfloat16"),
        (load, "is opened already"),
        (lambda model: model.rewrite(), "nothing to do: name a rewrite"),
        (lambda model: model.cost().total("flops"), "what='flops' is not one of parameters, flops_per_token"),
    ],
)
def test_what_is_not_there_is_one_line_that_says_what_is(gpt2: Model, change: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        change(gpt2)


@torch.no_grad()
def test_a_position_below_0_is_counted_from_the_end_of_the_run(gpt2: Model) -> None:
    run, other = gpt2.run("My lord the king is dead"), "My lady the king is dead"
    last = gpt2.patch("3.2", run, positions=[-1]).run(other)["3.2"].z
    assert torch.equal(last[-1], run["3.2"].z[-1])
    assert torch.equal(last[:-1], gpt2.run(other)["3.2"].z[:-1])


def test_numbers_count_from_the_end_wherever_a_place_is_given(gpt2: Model) -> None:
    assert [layer.name for layer in gpt2] == [str(number) for number in range(6)]
    assert gpt2[-1, -1].name == gpt2["5.7"].name
    run, attention = gpt2.run(TEXT), gpt2.attend(TEXT)
    assert torch.equal(run[-1, -1].z, run["5.7"].z)
    assert torch.equal(attention[-1, -1], attention["5.7"])
    assert torch.equal(run.residual("residual.3"), run.residual(3))
    assert gpt2.ablate(3).changes == ("ablate(3)",)
    assert gpt2.ablate(["3.2", "4.1"]).changes == gpt2.ablate("3.2, 4.1").changes


# Without the checks of annotations that all other tests have.
WRONG = """
import sys, numpy, torch, triptych
model = triptych.load(sys.argv[1], device="cpu")
assert model[numpy.int64(-1), numpy.int64(0)].name == model["5.0"].name
model.steer("residual.1", numpy.zeros(256)).replace("3.2", W_Q=numpy.zeros((256, 32)))
for wrong in (
    lambda: model[0:2], lambda: model[3, 0:2], lambda: model[3][0:2], lambda: model[None], lambda: model[3.0],
    lambda: model.attend("a b")[3, 0:2], lambda: model.ablate(model[3, 2]), lambda: model.ablate(None),
    lambda: model.edit("3.2", "z", 5), lambda: model.score(["a"]), lambda: triptych.load(model),
):
    try:
        print("nothing:", wrong())
    except triptych.UsageError as error:
        print(error)
"""


def test_arguments_of_another_type_are_one_line(gpt2: Model) -> None:
    command = [sys.executable, "-c", WRONG, gpt2.name]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [" ".join(line.split()[-5:]) for line in lines[:6]] == ["as 3.2; layers[:2] has several"] * 6
    assert [line.split(":")[0] for line in lines[6:]] == [
        "a Head names no head",
        "a NoneType names no head",
        "edit takes a function of the value",
        "score takes one text",
        f"{gpt2.name} is opened already",
    ]


def test_maps_that_do_not_fit_each_other_are_not_tied(translator: Model) -> None:
    with pytest.raises(UsageError, match="in cross-attention queries read the decoder's stream"):
        translator.tie("cross.1", "W_K", "W_Q")
    with pytest.raises(UsageError, match=r"W_K cannot be tied to W_Q: it is .*\[2, 256, 32\]"):
        load(CHECKPOINTS / "llama-gqa").tie("1", "W_K", "W_Q")
    with pytest.raises(UsageError, match="heads 4 to 7 share W_K"):
        load(CHECKPOINTS / "llama-gqa").replace("1.5", W_K=torch.ones(256, 32))


def test_places_are_spelled_alike_everywhere(translator: Model) -> None:
    assert translator["cross.1"].name == "cross.1"
    assert translator["cross.1"][2].name == translator["cross.1.2"].name == "cross.1.2"
    with pytest.raises(UsageError, match=r"layer 1 could be encoder\.1, decoder\.1, cross\.1"):
        translator[1]
    attention = translator.attend(SOURCE, TARGET)
    assert torch.equal(attention["cross.1", 2], attention["cross.1"][2])
    assert list(attention["cross.1", 2].shape) == [6, 6]
