"""`triptych serve`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import triptych
from triptych.cli.failures import say
from triptych.cli.process import KERNELS_KEPT_DECODING, limit_kernel_cache
from triptych.cli.signatures import Options
from triptych.errors import UsageError
from triptych.face import Model, load
from triptych.serving.limits import Limits


def serve(
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    keys_file: Path | None = None,
    shutdown_timeout: float = 30.0,
    limits: Annotated[
        Options,
        "Limits",
        Limits,
        "max_characters max_items max_new_tokens max_bytes max_requests max_waiting "
        "batch_items batch_tokens seconds",
    ],
    opening: Annotated[Options, "Model", load, "device engine precision offline"],
) -> None:
    """Serve models over HTTP.

    Translators answer as LibreTranslate does (/translate, /languages, /detect), language models as OpenAI
    does (/v1/completions, /v1/chat/completions), and all of them at /v1/attend, /v1/inspect and /v1/steps.
    /health says whether a text gets the same bits alone and in a batch on this machine; /metrics has figures
    for Prometheus.

    Options:
        models: A run folder, a folder in Hugging Face's format, or a name on the Hub; or several. NAME=MODEL
            names it; the name of a translator ends in its languages, as in de-en=runs/mine.
        host: Address to listen at. One that other machines can reach needs a key.
        port: Port to listen at.
        workers: Processes that compute, on CPUs. Several have one thread each, and each has the models in
            memory.
        keys_file: File of keys, one per line, of which every request needs one. Default: the keys in
            TRIPTYCH_API_KEY, if any.
        shutdown_timeout: Seconds that running requests get to end when the process is told to stop.

    Examples:
        triptych serve de-en=runs/mine
        triptych serve gpt2 de-en=runs/mine --port 9000 --precision int8
    """
    limit_kernel_cache(KERNELS_KEPT_DECODING)
    named = dict(map(_named, models))
    if len(named) < len(models):
        raise UsageError("two models have one name: write NAME=MODEL to tell them apart")
    allowed = Limits(**limits)
    opened: dict[str, Model] = {name: load(path, **opening) for name, path in named.items()}
    triptych.serve(
        opened,
        host=host,
        port=port,
        workers=workers,
        keys_file=keys_file,
        limits=allowed,
        shutdown_timeout=shutdown_timeout,
        ready=lambda: say(f"serving {', '.join(opened)} at http://{host}:{port}"),
    )


def _named(model: str) -> tuple[str, str]:
    """The name that a model is served by, and the model."""
    name, given, path = model.partition("=")
    return (name, path) if given else (Path(model).name, model)
