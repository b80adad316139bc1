"""Recipes: what is read, what overrides what, and what is refused with which words."""

from pathlib import Path
from typing import Any

import pytest

import triptych
from tiny_recipe import generated
from triptych.core.models import PRESETS, ModelConfig
from triptych.errors import UsageError
from triptych.training import Recipe, read_recipe, resolve

MINIMAL = """
[data]
train = { generated = 100, generated_part = "train" }
valid = { generated = 10, generated_part = "valid" }
"""
DATA = generated()
RECIPES = Path(triptych.__file__).parent / "recipes"


def make(*overrides: str, **sections: Any) -> Recipe:
    return resolve({"data": DATA, **sections}, overrides)


def refusal(*overrides: str, **sections: Any) -> str:
    with pytest.raises(UsageError) as refused:
        make(*overrides, **sections)
    message = str(refused.value)
    assert message.startswith(("the recipe: ", "--set ")), message
    assert "\n" not in message
    return message


def test_what_is_left_out_is_the_papers() -> None:
    recipe = make()
    assert recipe.model == ModelConfig()
    assert (recipe.training.adam_beta1, recipe.training.adam_beta2) == (0.9, 0.98)
    assert (recipe.training.adam_epsilon, recipe.training.label_smoothing) == (1e-9, 0.1)
    assert (recipe.training.warmup_steps, recipe.training.learning_rate) == (4000, None)
    assert (recipe.decoding.beam_size, recipe.decoding.alpha) == (4, 0.6)


def test_a_file_is_read_and_overrides_win(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL + "[training]\nmax_steps = 7\nwarmup_steps = 3\n")
    assert read_recipe(path).training.max_steps == 7
    recipe = read_recipe(path, ["training.max_steps=9", "name=other"])
    assert (recipe.training.max_steps, recipe.training.warmup_steps, recipe.name) == (9, 3, "other")


@pytest.mark.parametrize("name", ["数据 训练", "данные", "a [1]", "emoji😀", "-dash", "a*b", "v1.2_x"])
def test_a_file_of_any_script_gives_the_run_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    assert read_recipe(path).name == name


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("training.max_steps=12", lambda r: r.training.max_steps == 12),
        ("training.learning_rate=1e-3", lambda r: r.training.learning_rate == 1e-3),
        ("training.precision=bf16", lambda r: r.training.precision == "bf16"),
        ('training.precision="bf16"', lambda r: r.training.precision == "bf16"),
        (" training.precision = bf16 ", lambda r: r.training.precision == "bf16"),
        ("tokenizer.joint=true", lambda r: r.tokenizer.joint is True),
        ("model.encoder.attention.d_k=16", lambda r: r.model.encoder.attention.d_k == 16),
        ("seed=0", lambda r: r.seed == 0),
        ("data.cache=a=b", lambda r: r.data.cache == "a=b"),
    ],
)
def test_an_override_sets_one_value(override: str, read: Any) -> None:
    assert read(make(override))


def test_of_two_overrides_the_later_wins() -> None:
    assert make("training.max_steps=1", "training.max_steps=2").training.max_steps == 2


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_taken_whole_and_changed_by_the_other_keys(preset: str) -> None:
    assert make(model={"preset": preset}).model == PRESETS[preset]
    assert make(f"model.preset={preset}").model == PRESETS[preset]
    changed = make(model={"preset": preset, "d_ff": 99, "encoder": {"num_layers": 1}}).model
    assert changed.encoder.num_layers == 1
    assert changed == PRESETS[preset].model_copy(
        update={"d_ff": 99, "encoder": PRESETS[preset].encoder.model_copy(update={"num_layers": 1})}
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_step=3", "unknown key training.max_step: did you mean max_steps?"),
        ("trainnig.max_steps=3", "unknown key trainnig: did you mean training?"),
        ("model.preset=smal", "model.preset is 'smal': did you mean small?"),
        ("model.preset=xxxxxxx", "known are tiny, small, base, big"),
        ("model.d_modle=8", "unknown key model.d_modle: did you mean d_model?"),
        ("model.presets=tiny", "unknown key model.presets: did you mean preset?"),
        ("model.decoder.cross_attention.d_kk=8",
         "unknown key model.decoder.cross_attention.d_kk: did you mean d_k?"),
        ("decoding.zzzz=8", "unknown key decoding.zzzz: known are beam_size, alpha, max_extra_tokens"),
    ],
)  # fmt: skip
def test_an_unknown_key_or_preset_is_refused_with_its_path_and_the_nearest(
    override: str, message: str
) -> None:
    assert message in refusal(override)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.max_steps=0", "training.max_steps: ", "not 0"),
        ("training.precision=fp64", "training.precision: ", "not 'fp64'"),
        ("training.max_steps=many", "training.max_steps: ", "not 'many'"),
        ("model.d_model=1", "model.d_model: ", "not 1"),
        ("model.encoder.num_layers=0", "model.encoder.num_layers: ", "not 0"),
        ("seed=-1", "seed: ", "not -1"),
        (f"tokenizer.vocab_size={2**62}", "tokenizer.vocab_size: ", f"not {2**62}"),
        (f"tokenizer.min_frequency={10**20}", "tokenizer.min_frequency: ", f"not {10**20}"),
        (f"training.threads={10**20}", "training.threads: ", f"not {10**20}"),
        ("training=3", "training: ", "not 3"),
        ("training.max_steps.more=3", "training.max_steps: ", ""),
    ],
)
def test_a_value_out_of_range_is_refused_with_path_and_value(override: str, path: str, value: str) -> None:
    message = refusal(override)
    assert f"the recipe: {path}" in message
    assert value in message


@pytest.mark.parametrize("key", ["file", "files"])
def test_a_name_that_is_not_utf8_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="txt is not UTF-8, as recipes are"):
        resolve({"data": {"train": {key: "\udcff.txt"}}})


@pytest.mark.parametrize("override", ["training.max_steps", "=3", "  =3"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    assert refusal(override) == f"--set {override!r} is not of the form section.key=value"


def test_a_recipe_without_data_is_refused() -> None:
    with pytest.raises(UsageError, match="the recipe: data: "):
        resolve({})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["validation.bleu=false"], "validation: metric is 'bleu' but bleu = false"),
        (["tokenizer.joint=false"], "model.tie_embeddings is 'all' but tokenizer.joint is false"),
        (["model.num_heads=7"], "model: num_heads 7 does not divide d_model 512"),
        (["data.train.file=a.tsv"], "data.train: "),
        (["training.max_steps=0", "seed=-1"], "(and 1 more)"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_both(
    overrides: list[str], message: str
) -> None:
    assert message in refusal(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["validation.bleu=false", "validation.metric=loss"],
        ["tokenizer.joint=false", "model.tie_embeddings=target"],
        ["model.num_heads=7", "model.d_k=8", "model.d_v=9"],
    ],
)
def test_what_a_refusal_advises_is_accepted(overrides: list[str]) -> None:
    assert isinstance(make(*overrides), Recipe)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no recipe .*bad\.toml"),
        (b"\xff\xfe\x00", r"recipe .*bad\.toml cannot be read"),
        *(
            (content, r"recipe .*bad\.toml is not valid TOML: .+\(at ")
            for content in (b"[data", b"a = ", b"x = 1\nx = 2\n")
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_name(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_recipe(tmp_path / "bad.toml")
    with pytest.raises(UsageError, match=f"recipe {tmp_path} cannot be read"):
        read_recipe(tmp_path)


def test_a_bad_value_in_a_file_is_refused_with_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL + "[training]\nmax_steps = 0\n")
    with pytest.raises(UsageError, match=r"recipe\.toml: training\.max_steps: "):
        read_recipe(path)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.preset=tiny", "training.max_epochs=3", "validation.max_sentences=9", "seed=4"],
        ["model.encoder.attention.num_heads=2", "model.d_v=5", "training.learning_rate=3e-4"],
        ["tokenizer.joint=false", "model.tie_embeddings=none", "training.threads=1"],
    ],
)
def test_the_resolved_recipe_reads_back_the_same(tmp_path: Path, overrides: list[str]) -> None:
    recipe = make(*overrides)
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(path) == recipe


def test_a_written_recipe_does_not_depend_on_the_presets() -> None:
    text = make("model.preset=tiny").to_toml()
    assert "preset" not in text
    assert "d_model = 128" in text


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_the_recipes_that_come_along_are_valid(path: Path) -> None:
    recipe = read_recipe(path)
    assert resolve(recipe.model_dump(mode="json", exclude_none=True)) == recipe


@pytest.mark.parametrize(
    "override",
    ["model=tiny", "model.preset=[]", "model.preset={}", "name='../x'", "name=''", "name='.x'", "name='a '"],
)
def test_a_value_of_the_wrong_kind_is_a_usage_error(override: str) -> None:
    data = {"generated": 10, "generated_part": "train"}
    with pytest.raises(UsageError, match=r"model|name"):
        resolve({"data": {"train": data, "valid": data}}, [override])


def test_a_recipe_is_found_by_its_name_too_and_a_file_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_recipe("demo").name == "triptych-demo"
    (tmp_path / "demo").mkdir()  # as a run that was made of it
    assert read_recipe("demo").name == "triptych-demo"
    generated = 'generated = 5\ngenerated_part = "{0}"\n'
    parts = "".join(f"[data.{part}]\n{generated.format(part)}" for part in ("train", "valid"))
    (tmp_path / "multi30k").write_text(f'name = "mine"\n{parts}')
    assert read_recipe("multi30k").name == "mine"
