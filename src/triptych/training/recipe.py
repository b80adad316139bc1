"""Recipes: all settings of a training run, in one validated tree.

A recipe is TOML. An unknown key is an error with its path and the nearest known key; `--set a.b=value`
overrides values; the result, with every default written down, is stored with the run.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, final, get_args

import tomli_w
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from triptych import user_code
from triptych.core.models import PRESETS, LanguageModelConfig, ModelConfig
from triptych.errors import UsageError, near_path, nearest
from triptych.running.opening import (
    DecodingConfig,
    Section,
)
from triptych.running.text import MaskingSpec, record_ending
from triptych.toml import read_toml
from triptych.training.corpora.tokenizer_training import TokenizerSpec
from triptych.training.sections import (
    ONE_CORPUS,
    SEVERAL_CORPORA,
    ContinuedModelConfig,
    DataConfig,
    LanguageDataConfig,
    LanguageTrainingConfig,
    LanguageValidationConfig,
    TrainingConfig,
    ValidationConfig,
)

RecipeT = TypeVar("RecipeT", bound="_AnyRecipe")

_SHIPPED = Path(__file__).parents[1] / "recipes"
# A string of JSON with half of a surrogate pair, Python's form of bytes outside UTF-8.
_NOT_UTF8 = re.compile('"([^"]*[\ud800-\udfff][^"]*)"')


_LONGEST_NAME = (
    200  # bytes; file systems allow 255, and files beside a run have longer names
)

# Keys that training chooses for every task where a recipe leaves them out.
_CHOSEN = (
    *(
        "training.warmup_steps",
        "training.learning_rate",
        "training.schedule",
        "training.clip_norm",
    ),
    *("training.precision", "validation.every_steps"),
)


def shipped_recipes() -> list[str]:
    """Return the names of the recipes of the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe: an existing path, or the name of a recipe of the package."""
    path = Path(name)
    shipped = shipped_recipes()
    if path.is_file():
        return path
    if str(name) in shipped:
        return _SHIPPED / f"{name}.toml"
    if path.exists():
        return path  # reading it raises the error
    if not path.suffix and (
        near := nearest(str(name), shipped)
    ):  # a folder may be named as the recipe
        raise UsageError(f"there is no recipe {name}: did you mean {near}?")
    known = near_path(path) or f": give a TOML file, or one of {', '.join(shipped)}"
    raise UsageError(f"there is no recipe {name}{known}")


class _AnyRecipe(Section):
    """Keys of every recipe.

    Attributes:
        name: name of the run; its folder is `runs/NAME` unless another is given. Default: the name of the
            recipe's file.
        seed: seed of the weights, the dropout and the order of the text.
        data_seed: seed of the order of the text and of masking; `seed` by default.
        initial_values: "in_order", drawn one after the other, or "by_name", drawn from the seed and the name
            of each parameter, so that models start from equal values in all parameters they share.
        code: the SHA-256 of each file with classes named in the recipe (docs/how-to/own-attention.md).
            Training writes it; a recipe with it needs that very file, given with `--code`.
    """

    name: str = Field("run", min_length=1)
    seed: int = Field(1, ge=0, lt=2**63)
    data_seed: int | None = Field(None, ge=0, lt=2**63)
    initial_values: Literal["in_order", "by_name"] = "in_order"
    code: dict[str, str] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _code_is_the_same(cls, tree: Any) -> Any:
        """Compare the files before the other keys are validated: validation executes the named files."""
        if isinstance(tree, dict) and "code" in tree:
            digests = tree["code"]
            if not isinstance(digests, dict):
                raise ValueError("code is a table with the SHA-256 of each file")
            if unknown := user_code.named_files(tree) - digests.keys():
                raise ValueError(
                    f"{min(unknown)} is named without the SHA-256 of that file"
                )
            user_code.require_digests(digests)
        return tree

    @field_validator("name")
    @classmethod
    def _name_is_of_a_folder(cls, name: str) -> str:
        is_shown = name.isprintable() and name == name.strip()
        if (
            not is_shown
            or {*name} & {*"/\\"}
            or name.startswith(".")
            or len(name.encode()) > _LONGEST_NAME
        ):
            raise ValueError(
                f"{name!r} cannot be the name of a folder: leave out slashes, a leading dot, outer spaces "
                f"and characters that are not shown, and keep it below {_LONGEST_NAME} bytes"
            )
        return name

    @property
    def order_seed(self) -> int:
        """The seed of the order of the text and of masking."""
        return self.seed if self.data_seed is None else self.data_seed

    def filled(self: RecipeT, choices: dict[str, Any]) -> RecipeT:
        """Return the recipe with these values for its missing keys.

        Raises:
            UsageError: the values do not fit the recipe's other keys.
        """
        tree = merge(choices, self.model_dump(mode="json", exclude_unset=True))
        try:
            return type(self).model_validate(tree)
        except ValidationError as error:
            raise UsageError(
                f"the recipe, with defaults for its text: {explain_invalid(error, type(self))}"
            ) from None

    def to_toml(self) -> str:
        """Return the resolved recipe with every default written down."""
        return tomli_w.dumps(
            self.model_dump(mode="json", exclude_none=True, exclude=self._left_out)
        )

    @property
    def _left_out(self) -> set[str]:
        """Keys at the top that a file leaves out."""
        return set() if self.code else {"code"}


class Recipe(_AnyRecipe):
    """The recipe of a translation run.

    Attributes:
        task: the learned task. The tables below belong to "translation".
    """

    task: Literal["translation"] = "translation"
    data: DataConfig
    tokenizer: TokenizerSpec = TokenizerSpec()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()
    decoding: DecodingConfig = DecodingConfig()
    chosen_keys: ClassVar[tuple[str, ...]] = (
        *(
            "tokenizer.vocab_size",
            "model.d_model",
            "model.d_ff",
            "model.num_heads",
            "model.norm",
        ),
        *("training.max_steps", "training.batch_tokens", *_CHOSEN),
        *("model.encoder.num_layers", "model.decoder.num_layers"),
    )

    @property
    def num_vocabularies(self) -> int:
        """The number of vocabularies, 1 or 2."""
        return 1 if self.tokenizer.joint else 2

    @property
    def is_copied(self) -> bool:
        """True if the run is a copy of a checkpoint, with its model and tokenizer, in its format."""
        given = {"model", "tokenizer"} & self.model_fields_set
        return self.training.checkpoint is not None and not given

    @property
    def _left_out(self) -> set[str]:
        copied = {"model", "tokenizer"} if self.is_copied else set()
        return super()._left_out | copied

    @model_validator(mode="after")
    def _embeddings_fit_tokenizer(self) -> "Recipe":
        # A checkpoint may have two tokenizers of one vocabulary, as Marian's do.
        is_fresh = self.training.checkpoint is None
        if is_fresh and self.model.tie_embeddings == "all" and not self.tokenizer.joint:
            raise ValueError(
                "model.tie_embeddings is 'all' but tokenizer.joint is false: one table needs one "
                "vocabulary; set tie_embeddings = 'target' or joint = true"
            )
        return self

    @model_validator(mode="after")
    def _positions_reach(self) -> "Recipe":
        positions = self.model.positions
        needed = self.data.max_sentence_tokens + 1
        if positions.scheme == "learned" and positions.max_tokens < needed:
            raise ValueError(
                f"model.positions.max_tokens is {positions.max_tokens}: data.max_sentence_tokens "
                f"{self.data.max_sentence_tokens} and the end of sentence need {needed}"
            )
        return self

    @model_validator(mode="after")
    def _passes_differ(self) -> "Recipe":
        model = self.model
        rdrop = self.training.rdrop
        attentions = (
            model.encoder.attention,
            model.decoder.attention,
            model.decoder.cross_attention,
        )
        if self.training.rdrop_after and not rdrop:
            raise ValueError(
                "training.rdrop_after says when R-Drop begins, but training.rdrop is 0"
            )
        if rdrop and not any(
            (
                model.dropout,
                model.activation_dropout,
                *(attention.dropout for attention in attentions),
            )
        ):
            raise ValueError(
                f"training.rdrop is {rdrop} but the model has no dropout, so that both passes "
                "are equal: set model.dropout or leave out rdrop"
            )
        if rdrop and self.training.teacher is not None:
            raise ValueError(
                "training.rdrop and training.teacher do not go together: leave out one"
            )
        return self

    @model_validator(mode="after")
    def _begins_in_one_way(self) -> "Recipe":
        if self.training.languages is not None and self.training.checkpoint is None:
            raise ValueError(
                "training.languages is for a checkpoint of several languages: leave it out"
            )
        if self.training.checkpoint is not None:
            if self.training.teacher is not None:
                raise ValueError(
                    "training.checkpoint and training.teacher do not go together: leave out one"
                )
            if self.initial_values != "in_order":
                raise ValueError(
                    "initial_values is for fresh weights: training.checkpoint has its own"
                )
        return self

    @model_validator(mode="after")
    def _languages_are_named(self) -> "Recipe":
        if self.data.drop_other_languages and self.decoding.languages is None:
            raise ValueError(
                "data.drop_other_languages compares with decoding.languages: name them, as in ['de', 'en']"
            )
        return self

    @model_validator(mode="after")
    def _output_can_be_trained(self) -> "Recipe":
        if self.model.output_bias and self.training.checkpoint is None:
            raise ValueError(
                "model.output_bias is only for imported checkpoints: leave it out"
            )
        return self


class TextRecipe(_AnyRecipe):
    """The recipe of a language model's run.

    Attributes:
        task: a decoder learns the next token, or an encoder masked tokens.
    """

    task: Literal["language-model", "masked-language-model"]
    data: LanguageDataConfig
    model: LanguageModelConfig | ContinuedModelConfig
    training: LanguageTrainingConfig = LanguageTrainingConfig()
    masking: MaskingSpec = MaskingSpec()
    validation: LanguageValidationConfig = LanguageValidationConfig()
    chosen_keys: ClassVar[tuple[str, ...]] = (
        *(
            "tokenizer.vocab_size",
            "model.d_model",
            "model.d_ff",
            "model.num_heads",
            "model.norm",
        ),
        *(
            "model.num_layers",
            "model.context",
            "training.max_steps",
            "training.batch_size",
            *_CHOSEN,
        ),
    )
    num_vocabularies: ClassVar[int] = 1

    @property
    def kind(self) -> Literal["decoder", "encoder"]:
        """The kind of the model."""
        return "decoder" if self.task == "language-model" else "encoder"

    @model_validator(mode="after")
    def _sections_belong_to_the_task(self) -> "TextRecipe":
        if (
            self.task == "language-model"
            and "masking" in self.model_fields_set
            and self.masking != MaskingSpec()
        ):
            raise ValueError("masking is for task = 'masked-language-model'")
        if self.task != "language-model" and self.validation.sample_tokens:
            raise ValueError(
                "validation.sample_tokens is for task = 'language-model': an encoder writes no text"
            )
        return self


@final
class LanguageRecipe(TextRecipe):
    """The recipe of a run with fresh weights and a new tokenizer."""

    tokenizer: TokenizerSpec = TokenizerSpec()
    model: LanguageModelConfig = LanguageModelConfig()


@final
class ContinuedRecipe(TextRecipe):
    """The recipe of a run continuing with the model and tokenizer of a checkpoint."""

    model: ContinuedModelConfig

    @model_validator(mode="after")
    def _weights_are_given(self) -> "ContinuedRecipe":
        if self.initial_values != "in_order":
            raise ValueError(
                "initial_values is for fresh weights: model.checkpoint has its own, leave it out"
            )
        return self


AnyRecipe = Recipe | LanguageRecipe | ContinuedRecipe
_Kind = type[Recipe] | type[LanguageRecipe] | type[ContinuedRecipe]


def require_translation(recipe: AnyRecipe, where: Path | str) -> Recipe:
    """Return the recipe if it is the recipe of a translation run, else raise `UsageError`."""
    if not isinstance(recipe, Recipe):
        raise UsageError(
            f"{where} is a run of a {recipe.task.replace('-', ' ')}, which does not translate"
        )
    return recipe


def read_recipe(
    path: str | Path, overrides: Sequence[str] = (), checkpoint: str | None = None
) -> AnyRecipe:
    """Read a TOML recipe and apply `a.b=value` overrides.

    Args:
        path: path of the recipe, or the name of a built-in recipe.
        overrides: keys by their paths, with values.
        checkpoint: the checkpoint to continue with, instead of the recipe's keys of the tokenizer and of the
            model, except its context: `model.checkpoint`, or `training.checkpoint` of a translator.

    Raises:
        UsageError: the file is missing or not TOML, or a key or value is not valid.
    """
    path = find_recipe(path)
    try:
        tree = read_toml(path, "recipe")
    except UsageError:
        if path.suffix == ".toml" or not path.is_file():
            raise
        kind = "--tsv" if record_ending(path) else "--text"
        made = f"{path.name.split('.')[0]}.toml"
        command = shlex.join(["triptych", "new", made, kind, str(path)])
        raise UsageError(
            f"{path} is no recipe; to make one for this text: {command}"
        ) from None
    if (
        name := "".join(sign if sign.isprintable() else "-" for sign in path.stem)
        .strip()
        .lstrip(".")
    ):
        tree.setdefault("name", name)
    if (path.parent / "config.json").exists():
        tree.setdefault(
            "code", {}
        )  # a run's recipe: the files named in it are not executed
    if checkpoint is not None:
        tree = _continuing(tree, checkpoint, str(path))
    return resolve(tree, overrides, origin=str(path))


def _continuing(tree: dict[str, Any], checkpoint: str, origin: str) -> dict[str, Any]:
    """Return the recipe of a run continuing with a checkpoint."""
    kept = {
        key: value
        for key, value in tree.items()
        if key not in ("tokenizer", "initial_values")
    }
    if _recipe_type(tree, origin) is Recipe:
        kept.pop("model", None)
        return merge(kept, {"training": {"checkpoint": checkpoint}})
    model = tree.get("model")
    context = (
        {"context": model["context"]}
        if isinstance(model, dict) and "context" in model
        else {}
    )
    return {**kept, "model": {"checkpoint": checkpoint, **context}}


def resolve(
    tree: dict[str, Any], overrides: Sequence[str] = (), origin: str = "the recipe"
) -> AnyRecipe:
    """Make a recipe of a tree of plain values, a model preset and overrides.

    Files with classes named in the tree are executed, unless it is a run's recipe, with their SHA-256.

    `model.preset` names the configuration that the other keys of `[model]` change; without a preset,
    training chooses it by the size of the text.
    """
    for override in overrides:
        tree = merge(tree, _parse_override(override))
    kind = _recipe_type(tree, origin)
    if not isinstance(tree.get("model", {}), dict):
        how = f": write model.preset={tree['model']!r}" if kind is Recipe else ""
        raise UsageError(f"{origin}: model is a section, not a value{how}")
    if kind is Recipe and "preset" in tree.get("model", {}):
        model = dict(tree["model"])
        preset = model.pop("preset")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise UsageError(
                f"{origin}: model.preset is {preset!r}{_suggest(str(preset), list(PRESETS))}"
            )
        tree = {
            **tree,
            "model": merge(PRESETS[preset].model_dump(exclude_none=True), model),
        }
    # With `code`, the validator compares the files with their SHA-256 before it executes them.
    if "code" not in tree and user_code.named_files(tree):
        user_code.use_named(tree)
        tree = {**tree, "code": user_code.file_digests(tree)}
    if wrong := _NOT_UTF8.search(json.dumps(tree, ensure_ascii=False, default=str)):
        raise UsageError(
            f"{origin}: {wrong[1]} is not UTF-8, as recipes are: rename it"
        )
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"{origin}: {explain_invalid(error, kind)}") from None


def _recipe_type(tree: dict[str, Any], origin: str) -> _Kind:
    """Return the type of recipe for a tree's task."""
    task = tree.get("task", "translation")
    model = tree.get("model")
    continued = isinstance(model, dict) and "checkpoint" in model
    tasks = dict[str, _Kind]()
    for kind in (Recipe, ContinuedRecipe if continued else LanguageRecipe):
        tasks |= dict.fromkeys(get_args(kind.model_fields["task"].annotation), kind)
    if not isinstance(task, str) or task not in tasks:
        raise UsageError(
            f"{origin}: task is {task!r}{_suggest(str(task), list(tasks))}"
        )
    return tasks[task]


def _parse_override(text: str) -> dict[str, Any]:
    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise UsageError(f"--set {text!r} is not of the form section.key=value")
    try:
        leaf: Any = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        leaf = value.strip()  # a bare word is a string
    return _nested(path.strip(), leaf)


def _nested(path: str, leaf: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        leaf = {key: leaf}
    return leaf  # type: ignore[no-any-return]


def value_at(recipe: AnyRecipe, key: str) -> Any:
    """The value of a key, named by its path; None if the recipe leaves it out."""
    found: Any = recipe.model_dump(mode="json")
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(found, dict) or section not in found:
            raise UsageError(
                f"a recipe has no key {key}: there is no section {section}"
            )
        found = found[section]
    return found.get(last) if isinstance(found, dict) else None


def with_values(recipe: AnyRecipe, values: Mapping[str, Any]) -> AnyRecipe:
    """The recipe with the values of some keys, each named by its path."""
    tree = recipe.model_dump(mode="json", exclude_unset=True)
    for key, value in values.items():
        tree = merge(tree, _nested(key, value))
    return resolve(tree)


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of keys, overridden by the values of another tree section by section."""
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if nested else value
    return merged


def explain_invalid(error: ValidationError, kind: type[BaseModel]) -> str:
    """Describe the first error by the path of its key, with the nearest known key for an unknown key."""
    first = error.errors()[0]
    tags = (ONE_CORPUS, SEVERAL_CORPORA)
    keys = [str(part) for part in first["loc"] if part not in tags]
    path = ".".join(keys)
    if first["type"] == "extra_forbidden":
        return f"unknown key {path}{_suggest(keys[-1], _known_keys(kind, keys[:-1]))}"
    if first["type"] == "unknown_option":
        path = ".".join([path, first["ctx"]["key"]])
        return (
            f"unknown key {path}: {first['ctx']['hint']} ({first['msg'].split(':')[0]})"
        )
    # pydantic puts this prefix before messages of our validators.
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    where = f"{path}: " if path else ""
    shown = (
        f", not {first['input']!r}"
        if not isinstance(first["input"], dict | BaseModel)
        else ""
    )
    return f"{where}{message}{shown}{more}"


def _known_keys(kind: type[BaseModel], path: list[str]) -> list[str]:
    section: Any = kind
    for part in path:
        if not part.isdigit():  # a number is of an item of a list
            section = _section_in(section.model_fields[part].annotation)
    keys = list(section.model_fields)
    return [*keys, "preset"] if kind is Recipe and path == ["model"] else keys


def _section_in(annotation: Any) -> Any:
    """Return the section of an annotation, such as of an optional section or a list of sections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _suggest(word: str, known: list[str]) -> str:
    close = nearest(word, known)
    return f": did you mean {close}?" if close else f": known are {', '.join(known)}"
