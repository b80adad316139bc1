"""What tables of family files have in common: expressions, choices between them, norms."""

from collections.abc import Iterator
from typing import Annotated, Literal, final

from pydantic import BaseModel, ConfigDict

# Marks fields that hold a value or a condition out of the configuration, in the words of `settings`.
EXPRESSION = "expression"
Expression = Annotated[str, EXPRESSION]


class Spec(BaseModel):
    """A table of a family file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def expressions(self) -> Iterator[str]:
        """Every value and condition in it, those of its parts included."""
        for name, field in type(self).model_fields.items():
            held = getattr(self, name)
            for part in held if isinstance(held, tuple) else (held,):
                if isinstance(part, Spec):
                    yield from part.expressions()
                elif EXPRESSION in field.metadata and isinstance(part, str):
                    yield part


@final
class Choice(Spec):
    """A value under a condition."""

    when: Expression = ""
    value: Expression


@final
class Ignored(Spec):
    """A field that the model's class in `transformers` has and does not run by; nor does this library."""

    field: Expression
    # what the model does all the same, as if the field said so; "null" for as without it
    as_with: str = "null"


@final
class NormSpec(Spec):
    """A norm, of what the attention reads or of what other maps do."""

    # its module; of the attention's own norm, the one whose output the attention reads. With post-norm that
    # is the last norm of what stands before it ("{previous}" is the layer before).
    at: str = ""
    kind: Literal["layer", "rms"] = "layer"
    # "pre"; "post" where it follows the residual sum; "sandwich" where there is one on both sides
    place: Literal["pre", "post", "sandwich"] = "pre"
    offset: float = 0.0  # what the stored gain is relative to
    when: Expression = ""  # on what condition it is there
    eps: Expression = ""  # an expression; that of the model (`ModelSpec.eps`) if empty.
    weight: bool = True  # whether it has weights; with them and without `at`, there is no norm
    # of cross-attention, the norm of the same kind whose output keys and values read; "{last}" is the last
    # layer of `memory_layers`, the number of layers of the stack that makes it
    memory: str = ""
    memory_layers: Expression = ""
