"""Verbs available for a model with its changes."""

from triptych.converting.conversion import can_convert
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.models import LanguageModel
from triptych.running.opened_source import Opened
from triptych.running.opening import Reader


def capabilities(source: Opened) -> tuple[str, ...]:
    """List the available verbs: read, rewrite, run, translate, generate, fill, convert."""
    found = ["read"]
    if _is_writable(source):
        found.append("rewrite")
    if source.why_not_run:
        return tuple(found)
    found.append("run")
    opened = source.unchanged.ready
    if verb := _verb_of_outputs(opened):
        found.append(verb)
    if not source.changes and opened.has_tokenizer and can_convert(opened):
        found.append("convert")
    return tuple(found)


def _is_writable(opened: Opened) -> bool:
    source = opened.unchanged.attention
    if isinstance(source, Checkpoint) and all(
        source.place(site).spec.why_kept for site in source.sites
    ):
        return False
    return not opened.why_not_saved


def _verb_of_outputs(opened: Reader) -> str:
    """Return the verb for the model's outputs: translate, generate, fill, or ""."""
    if opened.is_searched:
        return "translate"
    model = opened.model
    if (
        not isinstance(model, LanguageModel)
        or model.head is None
        or model.head.config.outputs is not None
    ):
        return ""
    if model.causal:
        return "generate"
    return "fill" if opened.has_tokenizer else ""
