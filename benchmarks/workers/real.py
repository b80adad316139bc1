"""What a person waits for on a model of 270 heads, ours and `transformers`' way; every request by itself.

{"task": "attend, 400 tokens", "way": "triptych", "folder": ..., "text": ..., "work": ...}
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.workers.protocol import Answer, Options, Prepared, seconds_of, serve
from triptych import load
from triptych.serving.exploring import Explorer, Shown

_CLEAN = "When Mary and John went to the store, John gave a drink to"
_CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
_SHOWN = Shown("When Mary and John went to the store, John gave a drink to Mary, and they went home.")
# Tokens of an evaluated text.
_EVALUATED = 8192


def prepare(options: Options) -> Prepared:
    """Nothing is read before a request."""
    torch.set_num_threads(options["threads"])

    def work(request: Options) -> Answer:
        make = _TASKS[request["task"], request["way"]]
        return {"seconds": seconds_of(make(request))}

    return {"threads": torch.get_num_threads()}, work


Work = Callable[[], object]


def _command(*words: str) -> Callable[[Options], Work]:
    """A command line, with the names of files and texts filled in."""

    def make(request: Options) -> Work:
        folder = Path(request["work"])
        folder.mkdir(parents=True, exist_ok=True)
        names = {"model": request["folder"], "page": str(folder / "real.html")}
        if any("{text}" in word for word in words):
            names["text"] = _tokens(request, 400)
        if any("{60kB}" in word for word in words):
            names["60kB"] = str(folder / "60kB.txt")
            content = Path(request["text"]).read_bytes()[:60_000]
            Path(names["60kB"]).write_text(content.decode(errors="ignore"), encoding="utf-8")
        call = [sys.executable, "-m", "triptych", *(word.format(**names) for word in words), "--quiet"]
        return lambda: subprocess.run(call, check=True, stdout=subprocess.DEVNULL)

    return make


def _tokens(request: Options, count: int) -> str:
    tokenizer = load(request["folder"]).reader.tokenizer
    (ids,) = tokenizer.encode([Path(request["text"]).read_text(encoding="utf-8")[: 20 * count]])
    (text,) = tokenizer.decode([ids[:count]])
    return text.strip()


def _attend_with_transformers(request: Options) -> Work:
    text = _tokens(request, 400)
    code = (
        "import sys, torch, transformers\n"
        "folder, text = sys.argv[1:]\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained(folder)\n"
        "kind = transformers.AutoModelForCausalLM\n"
        "model = kind.from_pretrained(folder, attn_implementation='eager').eval()\n"
        "with torch.no_grad():\n"
        "    found = model(**tokenizer(text, return_tensors='pt'), output_attentions=True)\n"
        "assert len(found.attentions) == model.config.num_hidden_layers\n"
    )
    return lambda: subprocess.run([sys.executable, "-c", code, request["folder"], text], check=True)


def _click(part: str) -> Callable[[Options], Work]:
    """A click after the page is there, and after another click."""

    def make(request: Options) -> Work:
        explorer = Explorer(load(request["folder"]))
        explorer.view(_SHOWN)
        clicks: dict[str, Callable[[int], object]] = {
            "row": lambda layer: explorer.row(_SHOWN, str(layer), 3, 12),
            "head": lambda layer: explorer.head((), str(layer), 3),
        }
        clicks[part](3)
        return lambda: clicks[part](10)

    return make


def _sweep(request: Options) -> Work:
    model = load(request["folder"])
    ids = [model.reader.encode([f"{_CLEAN}{name}"])[0].ids[-1] for name in (" Mary", " John")]
    model.run(_CLEAN)
    return lambda: model.sweep(
        _CLEAN, _CORRUPTED, lambda run: run.logits[-1, ids[0]] - run.logits[-1, ids[1]]
    )


def _evaluate(context: int) -> Callable[[Options], Work]:
    def make(request: Options) -> Work:
        model = load(request["folder"], dtype="float32")
        text = _tokens(request, _EVALUATED)
        model.evaluate([_CLEAN], context=context)
        return lambda: model.evaluate([text], context=context)

    return make


def _evaluate_with_transformers(context: int) -> Callable[[Options], Work]:
    """Adjacent windows, one at a time, with the loss that the model computes."""

    def make(request: Options) -> Work:
        import transformers  # only for the peer

        kind: Any = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(request["folder"], dtype=torch.float32).eval()
        ids = torch.tensor([load(request["folder"]).reader.encode([_tokens(request, _EVALUATED)])[0].ids])

        def evaluate() -> None:
            with torch.inference_mode():
                for start in range(0, ids.shape[1], context):
                    window = ids[:, start : start + context]
                    model(window, labels=window).loss.item()

        with torch.inference_mode():
            model(ids[:, :16])
        return evaluate

    return make


_TASKS: dict[tuple[str, str], Callable[[Options], Work]] = {
    ("inspect", "triptych"): _command("inspect", "{model}"),
    ("attend, 400 tokens", "triptych"): _command("attend", "{model}", "{text}"),
    ("attend, 400 tokens", "transformers"): _attend_with_transformers,
    ("one head's step page, 400 tokens", "triptych"): _command(
        "attend", "{model}", "{text}", "--steps", "10.4:-1", "--html", "{page}", "--force"
    ),
    ("explore: a click on a row", "triptych"): _click("row"),
    ("explore: a click on a head", "triptych"): _click("head"),
    ("attend --over, 60 kB", "triptych"): _command("attend", "{model}", "--over", "{60kB}"),
    ("sweep of all heads, one pair", "triptych"): _sweep,
    ("--worth of all heads, 500 tokens", "triptych"): _command(
        "attend", "{model}", "--over", "{60kB}", "--tokens", "500", "--worth", "zero"
    ),
    ("evaluate, windows of 512", "triptych"): _evaluate(512),
    ("evaluate, windows of 512", "transformers"): _evaluate_with_transformers(512),
    ("evaluate, windows of 2,048", "triptych"): _evaluate(2048),
    ("evaluate, windows of 2,048", "transformers"): _evaluate_with_transformers(2048),
}


if __name__ == "__main__":
    serve(prepare)
