"""The files of a run folder, and the search settings of a translator.

A run folder has `config.json`, `model.safetensors`, `tokenizer.json` (and `tokenizer.target.json` for a
separate target tokenizer), `recipe.toml`, `metrics.jsonl`, `README.md` and `state/`. Only training reads the
whole recipe. A converted model has `decoding.toml` with the recipe's table `decoding`.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from triptych.errors import DataError, UsageError
from triptych.literals import Stop
from triptych.running.decoding_options import SamplingOptions, SearchOptions
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

    def search_options(
        self,
        beam_size: int | None = None,
        alpha: float | None = None,
        num_best: int = 1,
        max_extra_tokens: int | None = None,
        stop: Stop | None = None,
        max_source_tokens: int | None = None,
        split: bool | None = None,
        no_repeat_ngram_size: int | None = None,
        seed: int = 0,
        **sampling: Any,
    ) -> SearchOptions:
        """Return the search options: the arguments, or else these settings.

        `sampling` are arguments of `SamplingOptions`, or None. Translations are drawn without a beam.
        """
        given = {name: value for name, value in sampling.items() if value is not None}
        # Without a given beam size, the beam is at least as large as the number of results.
        try:
            drawing = SamplingOptions(**given)
            if drawing.is_greedy and drawing.has_filter:
                raise ValueError(
                    "top_k, top_p and min_p go with a temperature above 0: leave them out"
                )
            if beam_size is None:
                beam_size = max(self.beam_size, num_best) if drawing.is_greedy else 1
            return SearchOptions(
                beam_size=beam_size,
                alpha=self.alpha if alpha is None else alpha,
                max_extra_tokens=max_extra_tokens or self.max_extra_tokens,
                num_best=num_best,
                stop=stop or self.stop,
                max_source_tokens=max_source_tokens,
                split=self.split if split is None else split,
                no_repeat_ngram_size=no_repeat_ngram_size,
                sampling=drawing,
                seed=seed,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None


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
