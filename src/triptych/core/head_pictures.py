"""Pictures of the maps and forms of a head for a notebook.

`heads.py` imports this module when a notebook shows a head: heads and forms of `heads.py` are given as `Any`.
"""

from contextlib import suppress
from typing import Any

from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.pictures import form_html, map_html, pictures_html
from triptych.core.storage.hub import Repository
from triptych.errors import TriptychError, UsageError
from triptych.printable import table_html

# Distances with a picture of the form of a rotary head.
_SHOWN_DISTANCES = (0, 1, 16)
# Largest size of a layer on the Hub, in bytes, for pictures of its heads.
_MOST_FETCHED = 32 << 20


def pictures_of_head(head: Any) -> str:
    """Return pictures of W_Q, W_K and W_V, and of the forms of the head."""
    if not _is_near(head):
        return ""
    try:
        maps = [("W_Q", head.W_Q), ("W_K", head.W_K), ("W_V", head.W_V)]
    except TriptychError:
        # A notebook shows the table where weights cannot be read.
        return ""
    found = [map_html(name, W) for name, W in maps]
    with suppress(UsageError):
        form = head.qk
        at = "" if isinstance(form, BilinearForm) else " at distance 0"
        found.append(form_html(f"W_QK{at}", form.left, form.right))
    with suppress(UsageError):
        found.append(form_html("W_OV", head.ov.left, head.ov.right))
    return pictures_html(found)


def rotary_in_notebook(form: Any) -> str:
    """Return a rotary form for a notebook: its sizes, with pictures of the form at some distances."""
    shape = f"{form.left.shape[0]} × {form.right.shape[0]}"
    rows = [("form at every distance", shape), ("width", str(form.left.shape[1]))]
    pictures = [map_html("W_Q", form.left), map_html("W_K", form.right)]
    # Positions of patches are pairs: the form without a rotation is shown.
    distances = _SHOWN_DISTANCES if form.rotary.places is None else (0,)
    for distance in distances:
        own = form.at(distance) if distance else form
        pictures.append(form_html(f"W_QK at distance {distance}", own.left, own.right))
    return table_html("RotaryForm", rows) + pictures_html(pictures)


def _is_near(head: Any) -> bool:
    """Return True if the maps are on this machine, or small enough to be fetched for a picture."""
    # The files of a layer are private to this package: hence the access to `_source`.
    stored = head.layer._source
    if stored.source is None or not isinstance(stored.source.found, Repository):
        return True
    size: int = stored.bytes_of(head.layer._site)
    return size <= _MOST_FETCHED
