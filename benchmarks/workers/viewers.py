"""From a checkpoint and a text to a page of every head, ours and others' ways; every request by itself.

{"way": "triptych", "folder": ..., "tokens": 1024, "page": ..., "most_gb": 12}
"""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.workers.protocol import Answer, Options, Prepared, seconds_of, serve
from triptych.running.opening import TextIds, open_reader
from triptych.running.text import load_tokenizer
from triptych.seeing.attending import attend_tokens


def prepare(options: Options) -> Prepared:
    """Nothing is read before a request."""
    torch.set_num_threads(options["threads"])

    def work(request: Options) -> Answer:
        most = int(request["most_gb"] * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        folder, page = Path(request["folder"]), Path(request["page"])
        ids = load_tokenizer(folder).encode([Path(request["text"]).read_text(encoding="utf-8")])[0]
        ids = ids[: request["tokens"]]
        page.unlink(missing_ok=True)
        seconds = seconds_of(lambda: _WAYS[request["way"]](folder, ids, page))
        size = page.stat().st_size
        page.unlink()
        return {"seconds": seconds, "page_mb": size / 1e6, "tokens": len(ids)}

    return {"threads": torch.get_num_threads()}, work


def _triptych(folder: Path, ids: list[int], page: Path) -> None:
    (found,) = attend_tokens(open_reader(folder, "cpu"), [TextIds(tuple(ids))])
    found.page(page)


def _weights(folder: Path, ids: list[int]) -> tuple[Tensor, ...]:
    """The weights of every layer, as `transformers` returns them."""
    import transformers  # only for the peers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        found: Any = model(torch.tensor([ids]), output_attentions=True, logits_to_keep=1)
    weights: tuple[Tensor, ...] = found.attentions
    return weights


def _pieces(folder: Path, ids: list[int]) -> list[str]:
    return load_tokenizer(folder).pieces(ids)


def _head_view(folder: Path, ids: list[int], page: Path) -> None:
    from bertviz import head_view

    drawn = head_view(_weights(folder, ids), _pieces(folder, ids), html_action="return")
    page.write_text(drawn.data, encoding="utf-8")


def _model_view(folder: Path, ids: list[int], page: Path) -> None:
    from bertviz import model_view

    drawn = model_view(_weights(folder, ids), _pieces(folder, ids), html_action="return")
    page.write_text(drawn.data, encoding="utf-8")


def _circuitsvis(folder: Path, ids: list[int], page: Path) -> None:
    from circuitsvis.attention import attention_heads

    tokens = _pieces(folder, ids)
    drawn = [str(attention_heads(attention=own[0], tokens=tokens)) for own in _weights(folder, ids)]
    page.write_text("".join(drawn), encoding="utf-8")


def _transformer_lens(folder: Path, ids: list[int], page: Path) -> None:
    """Its weights, drawn by CircuitsVis, as its demonstrations do."""
    import transformers
    from circuitsvis.attention import attention_heads
    from transformer_lens.model_bridge import TransformerBridge

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    bridge: Any = TransformerBridge.boot_transformers(str(folder), hf_model=model, device="cpu")
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(bridge.cfg.n_layers)]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(torch.tensor([ids]), names_filter=lambda name: name in names)
    tokens = _pieces(folder, ids)
    drawn = [str(attention_heads(attention=cache[name][0], tokens=tokens)) for name in names]
    page.write_text("".join(drawn), encoding="utf-8")


_WAYS: dict[str, Callable[[Path, list[int], Path], None]] = {
    "triptych": _triptych,
    "bertviz head_view": _head_view,
    "bertviz model_view": _model_view,
    "CircuitsVis": _circuitsvis,
    "TransformerLens + CircuitsVis": _transformer_lens,
}


if __name__ == "__main__":
    serve(prepare)
