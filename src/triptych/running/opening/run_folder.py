"""The files of a run folder, and the search settings of a translator.

A run folder has `config.json`, `model.safetensors`, `tokenizer.json` (and `tokenizer.target.json` for a
separate target tokenizer), `recipe.toml`, `metrics.jsonl`, `README.md` and `state/`. Only training reads the
whole recipe. A converted model has `decoding.toml` with the recipe's table `decoding`.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from triptych.errors import DataError
from triptych.running.text.sentence_tokenizers import TokenizerPair
from triptych.toml import read_toml
from triptych.untrusted import validated

RECIPE = "recipe.toml"
DECODING = "decoding.toml"
TOKENIZER = "tokenizer.json"


class Section(BaseModel):
    """A table of a recipe: immutable, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    # Fields added by a later version. A fingerprint has them only where they are set, so that runs of earlier
    # versions resume.
    later_fields: ClassVar[frozenset[str]] = frozenset()

    def to_fingerprint(self, excluded: Collection[str] = ()) -> bytes:
        """Return the fields as JSON for the fingerprint of a run."""
        fields = type(self).model_fields
        unset = {
            name
            for name in self.later_fields
            if getattr(self, name) == fields[name].default
        }
        return self.model_dump_json(exclude={*excluded, *unset}).encode()


@final
class DecodingConfig(Section):
    """How the finished model translates unless told otherwise; the paper's values.

    Attributes:
        beam_size: hypotheses kept; 1 is greedy.
        alpha: exponent of the length penalty `((5 + |Y|) / 6)^α`.
        max_extra_tokens: an output ends at the length of its input plus this.
        stop: when a sentence is done: "certain", when nothing can overtake what has ended, or "full",
            when beam_size hypotheses have ended.
        split: translate the sentences of a line one by one; false for a model trained on whole documents.
        languages: codes of source and target for a server, as in ["de", "pt-BR"].
    """

    beam_size: int = Field(4, ge=1, le=10_000)
    alpha: float = Field(0.6, ge=0, le=10)
    max_extra_tokens: int = Field(50, ge=1, le=10**9)
    stop: Literal["certain", "full"] = "certain"
    split: bool = True
    languages: tuple[str, str] | None = None

    @field_validator("languages")
    @classmethod
    def _languages_are_known(cls, languages: Any) -> Any:
        from triptych.languages import require_known  # a table that few recipes need

        return require_known(languages)


def read_decoding(folder: Path, tokenizers: TokenizerPair) -> DecodingConfig:
    """Read the search settings of a triptych translator from its recipe or its `decoding.toml`."""
    if (folder / RECIPE).exists():
        recipe = read_toml(folder / RECIPE, "recipe")
        joint = bool(_table(recipe, "tokenizer").get("joint", True))
        check_tokenizers(tokenizers, folder, joint=joint)
        return validated(DecodingConfig, _table(recipe, "decoding"), folder / RECIPE)
    if (folder / DECODING).exists():
        return validated(
            DecodingConfig, read_toml(folder / DECODING, "the file"), folder / DECODING
        )
    raise DataError(f"{folder} is not a run folder: it has no {RECIPE}; give a run")


def check_tokenizers(tokenizers: TokenizerPair, folder: Path, *, joint: bool) -> None:
    """Check that a run folder has one tokenizer if its recipe sets `tokenizer.joint`, and two otherwise."""
    if tokenizers.joint != joint:
        state, do = ("left over", "remove it") if joint else ("missing", "put it back")
        raise DataError(
            f"{folder}/tokenizer.target.json is {state}: the recipe says tokenizer.joint = "
            f"{str(joint).lower()}; {do}"
        )


def _table(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table of a recipe; empty if it is missing."""
    table = recipe.get(name, {})
    return table if isinstance(table, dict) else {}
