"""Expressions over a configuration, as used in family files.

num_attention_heads                      a field
rope_parameters.rope_theta | 10000       the first alternative present and not null
hidden_size / num_attention_heads        a product, quotient (`//` rounds down), sum or difference, from left
                                         to right
#layers_block_type                       the length of a list or string
hidden_act | 'silu'                      a string in quotes is a constant
layer_types[]                            the entry of this layer in a list, its character in a string, or the
                                         field of a record under its number
layer_types[] == sliding_attention       a condition; also !=, <, >=, a bare field (true?), !field
attn_config.softmax_scale != null        a field is present and not null
rope_parameters.rope_theta is null       a field is present and null
slow_but_exact and pretraining_tp >= 2   all conditions are true
layer % 2 == 1                           a condition on the layer's number; also (layer + 1) % 2, a field
                                         in place of 2 (pattern | 6), layer >= max_window_layers
layer in full_attn_idxs                  a list contains this layer
"""

import operator
import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, final

from triptych.errors import DataError
from triptych.untrusted import shown

# Limit of layers, far above any real model: a check of a configuration visits every layer.
MOST_LAYERS = 10_000
_MISSING = object()
_LARGEST = 1e15
_CONDITION = re.compile(r"(.+?)\s*(==|!=|>=|<|\sin\s|\sis\s)\s*(.+)")
_LAYER = re.compile(r"\blayer\b")
_QUOTED = re.compile(r"'[^']*'")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">=": operator.ge,
}


@final
class Settings:
    """A configuration, or a record within a configuration.

    Attributes:
        record: contents.
        where: file and path, for messages.
        path: dotted path of a record within its configuration; "" for the whole configuration.
        outermost: the whole configuration.
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        where: str,
        path: str = "",
        outermost: "Settings | None" = None,
    ) -> None:
        self.record = record
        self.where = where
        self.path = path
        self.outermost = outermost or self

    def below(self, path: str) -> "Settings":
        """Return the record at a path, or the settings themselves for ""."""
        if not path:
            return self
        found = self._field(path, 0)
        if not isinstance(found, dict):
            raise DataError(f"{self.where}: {path} is not a record")
        within = f"{self.path}.{path}" if self.path else path
        return Settings(found, f"{self.where}, {path}", within, self.outermost)

    def over(self, defaults: Mapping[str, Any]) -> "Settings":
        """Return the settings with defaults for missing fields and null records."""
        missing = {
            name: value
            for name, value in defaults.items()
            if name not in self.record
            or (isinstance(value, dict) and self.record[name] is None)
        }
        if not missing:
            return self
        return Settings(
            {**self.record, **missing}, self.where, self.path, self.outermost
        )

    def value(self, expression: str, layer: int = 0) -> Any:
        """Return the value of an expression, or None if all alternatives are missing or null."""
        for alternative in expression.split("|"):
            found = self._computed(alternative.strip(), layer)
            if found is not _MISSING and found is not None:
                return found
        return None

    def count(self, expression: str, layer: int = 0) -> int:
        """Return the value of an expression as an integer of at least 1."""
        found = self.value(expression, layer)
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if (
            isinstance(found, bool)
            or not isinstance(found, int)
            or not 1 <= found <= _LARGEST
        ):
            raise DataError(
                f"{self.where}: {expression} is {_describe(found)}: a whole number of at least 1 is needed"
                + (
                    f", of at most {_LARGEST:,.0f}"
                    if isinstance(found, int) and found > 1
                    else ""
                )
            )
        return found

    def whole(self, expression: str, layer: int = 0) -> int:
        """Return the value of an expression as an integer of at least 0."""
        return (
            0 if self.value(expression, layer) == 0 else self.count(expression, layer)
        )

    def number(self, expression: str, layer: int = 0) -> float:
        """Return the value of an expression as a float."""
        found = self.value(expression, layer)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise DataError(
                f"{self.where}: {expression} is {_describe(found)}: a number is needed"
            )
        if not -_LARGEST <= found <= _LARGEST:
            raise DataError(
                f"{self.where}: {expression} is {_describe(found)}: too large, or no number"
            )
        return float(found)

    def positive(self, expression: str, layer: int = 0) -> float:
        """Return the value of an expression as a float above 0."""
        found = self.number(expression, layer)
        if found <= 0:
            raise DataError(
                f"{self.where}: {expression} is {found:g}: a number above 0 is needed"
            )
        return found

    def word(self, expression: str, layer: int = 0) -> str | None:
        """Return the value of an expression as a string, or None if it is missing."""
        found = self.value(expression, layer)
        if found is not None and not isinstance(found, str):
            raise DataError(
                f"{self.where}: {expression} is {_describe(found)}: a text is needed"
            )
        return found

    def holds(self, condition: str, layer: int = 0) -> bool:
        """Return True if a condition is true or empty."""
        # "and" binds least: split there first, then by the comparison.
        condition = condition.strip()
        if not condition:
            return True
        if " and " in condition:
            return all(self.holds(part, layer) for part in condition.split(" and "))
        if found := _CONDITION.fullmatch(condition):
            left, sign, right = found.groups()
            number = self._layer_number(left, layer)
            if number is None and _LAYER.search(left) and "%" not in left:
                raise DataError(
                    f"the condition {shown(condition)} of a family file: the number of a layer is layer or "
                    "(layer + 1), or the remainder of either: (layer + 1) % N"
                )
            value = self.value(left, layer) if number is None else number
            if sign.strip() == "is":
                return self._field(left, layer) is None
            if sign.strip() == "in":
                return isinstance(listed := self.value(right), list) and value in listed
            if right.strip() == "null" and sign in ("==", "!="):
                return (value is None) == (sign == "==")
            wanted: Any = _literal(right)
            if isinstance(wanted, str) and (number is not None or sign in ("<", ">=")):
                wanted = self.value(wanted, layer)
            if value is None or (
                isinstance(wanted, int) and not isinstance(value, int | float)
            ):
                return sign == "!="
            try:
                return _COMPARISONS[sign](value, wanted)
            except TypeError:  # a string and a number cannot be ordered
                return False
        if condition.startswith("!"):
            return not self.value(condition[1:].strip(), layer)
        return bool(self.value(condition, layer))

    def _layer_number(self, expression: str, layer: int) -> int | None:
        """Return the value of `layer`, `layer % N` or `(layer + 1) % N`; None for other words or no N."""
        found = re.fullmatch(r"(layer|\(layer \+ 1\))(?:\s*%\s*(.+))?", expression)
        if found is None:
            return None
        number = layer if found[1] == "layer" else layer + 1
        if found[2] is None:
            return number
        return (
            None
            if self.value(found[2], layer) is None
            else number % self.count(found[2], layer)
        )

    def _computed(self, expression: str, layer: int) -> Any:
        parts = re.split(r"\s+(//|[*/+-])\s+", expression)
        # Operators are applied from left to right. An exact quotient of integers is an integer.
        total = self._term(parts[0], layer)
        for sign, part in zip(parts[1::2], parts[2::2], strict=True):
            other = self._term(part, layer)
            if not _are_numbers(total, other) or ("/" in sign and not other):
                return _MISSING
            try:
                if sign == "*":
                    total = total * other
                elif sign in ("+", "-"):
                    total = total + other if sign == "+" else total - other
                elif sign == "//" or (
                    isinstance(total, int)
                    and isinstance(other, int)
                    and not total % other
                ):
                    total = total // other
                else:
                    total = total / other
            except OverflowError:
                raise DataError(
                    f"{self.where}: {expression} is a number too large"
                ) from None
        return total

    def _term(self, term: str, layer: int) -> Any:
        if _QUOTED.fullmatch(term):
            return term[1:-1]
        if term.startswith("#"):
            found = self._field(term[1:], layer)
            return len(found) if isinstance(found, list | str) else _MISSING
        literal = _literal(term)
        return literal if not isinstance(literal, str) else self._field(term, layer)

    def _field(self, path: str, layer: int) -> Any:
        # `_MISSING` is a missing field, None a null in the file.
        found: Any = self.record
        for name in path.split("."):
            of_layer = name.endswith("[]")
            name = name.removesuffix("[]")
            if not isinstance(found, dict) or name not in found:
                return _MISSING
            found = found[name]
            if of_layer:
                if isinstance(found, dict):
                    found = found.get(str(layer), _MISSING)
                elif isinstance(found, list | str) and layer < len(found):
                    found = found[layer]
                else:
                    return _MISSING
        return found


def paths_in(expression: str) -> set[str]:
    """Return the paths of the fields in a value or a condition."""
    sides: list[str] = []
    for part in _QUOTED.sub("", expression).split(" and "):
        found = _CONDITION.fullmatch(part.strip())
        if found is None:
            sides.append(part)
        else:
            both = found[1].split()[0] in ("layer", "(layer") or found[2] in ("<", ">=")
            sides += [found[1], found[3]] if both else [found[1]]
    found_words = chain.from_iterable(
        re.findall(r"[A-Za-z_][\w.]*(?:\[\])?", side) for side in sides
    )
    words = {word.removesuffix("[]") for word in found_words}
    return words - {"layer", "null", "true", "false"}


def _literal(text: str) -> Any:
    """Convert a number, "true" or "false" to its value; return any other string unchanged."""
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _are_numbers(*values: Any) -> bool:
    return all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in values
    )


def _describe(value: Any) -> str:
    return (
        "missing"
        if value is None
        else f"'{shown(value)}'"
        if isinstance(value, str)
        else shown(value)
    )
