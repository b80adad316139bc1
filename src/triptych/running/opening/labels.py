"""Names and numbers of the classes of a task head."""

from collections.abc import Sequence

from triptych.printable import shortened

_LONGEST_SHOWN = 40
_MOST_SHOWN = 8


def label_number(labels: Sequence[str], given: object) -> int | None:
    """Return the number of a class, given by its name or its number; None if it is not known."""
    if isinstance(given, str) and given in labels:
        return labels.index(given)
    is_number = isinstance(given, str) and given.isascii() and given.isdigit()
    number = int(str(given)) if is_number or isinstance(given, int) else -1
    return number if 0 <= number < len(labels) else None


def listed(labels: Sequence[str]) -> str:
    """Return the names of the first classes."""
    return ", ".join(labels[:_MOST_SHOWN]) + (
        ", …" if len(labels) > _MOST_SHOWN else ""
    )


def no_label(labels: Sequence[str], given: object) -> str:
    """Return the end of an error for an unknown class, after the name of the model."""
    shown = shortened(str(given), _LONGEST_SHOWN)
    return f"has no label {shown!r}: its labels are {listed(labels)}, or numbers from 0 to {len(labels) - 1}"
