"""`triptych serve`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import triptych
from triptych.cli.failures import say
from triptych.cli.process import (
    KERNELS_KEPT_DECODING,
    keep_libraries,
    limit_kernel_cache,
)
from triptych.cli.signatures import Options
from triptych.errors import UsageError
from triptych.launch import end_now
from triptych.model import Model, load
from triptych.serving import hangups
from triptych.serving.limits import Limits
from triptych.threads import are_left


def serve(
    models: Sequence[str],
    *,
    server: Annotated[
        Options,
        "Server",
        triptych.serve,
        "host port workers keys_file shutdown_timeout",
    ],
    limits: Annotated[
        Options,
        "Limits",
        Limits,
        "max_characters max_items max_new_tokens max_bytes max_requests max_strangers max_connections "
        "max_waiting max_tags max_attended max_weights batch_items batch_tokens seconds body_seconds "
        "stranger_seconds",
    ],
    opening: Annotated[
        Options, "Model", load, "device engine precision offline strict adapter"
    ],
) -> None:
    """Serve models over HTTP.

    Translators answer as LibreTranslate does (/translate, /languages, /detect), language models as OpenAI
    does (/v1/completions, /v1/chat/completions), and all of them at /v1/attend, /v1/inspect and /v1/steps.
    /health says whether a text gets the same bits alone and in a batch on this machine; /metrics has figures
    for Prometheus.

    Options:
        models: A run folder, a folder in Hugging Face's format, or a name on the Hub; or several. NAME=MODEL
            names it; the name of a translator ends in its languages, as in de-en=runs/mine.
        workers: Processes that compute, on CPUs. Several have one thread each, and each has the models in
            memory.

    Examples:
        triptych serve de-en=runs/mine
        triptych serve gpt2 de-en=runs/mine --port 9000 --precision int8
    """
    limit_kernel_cache(KERNELS_KEPT_DECODING)
    keep_libraries()
    with hangups.ignored():
        _serve(models, server, limits, opening)
    say("stopped")
    if are_left():
        end_now(0)


def _serve(
    models: Sequence[str],
    server: dict[str, Any],
    limits: dict[str, Any],
    opening: dict[str, Any],
) -> None:
    named = dict(map(_name_and_model, models))
    if len(named) < len(models):
        raise UsageError(
            "two models have one name: write NAME=MODEL to tell them apart"
        )
    allowed = Limits(**limits)
    opened: dict[str, Model] = {
        name: load(path, **opening) for name, path in named.items()
    }
    address = f"http://{server['host']}:{server['port']}"
    ready = partial(say, f"serving {', '.join(opened)} at {address}")
    triptych.serve(opened, limits=allowed, ready=ready, **server)


def _name_and_model(model: str) -> tuple[str, str]:
    """The name that a model is served by, and the model."""
    name, given, path = model.partition("=")
    return (name, path) if given else (Path(model).name, model)
