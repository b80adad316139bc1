"""Conversion of encoder-decoders to two ONNX graphs, with their tokenizers."""

import copy
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from triptych.converting.output_checks import (
    ConversionCheck,
    Pairs,
    WrittenModel,
    compare_logits,
    compute_logits,
    random_pairs,
)
from triptych.converting.plain import max_positions
from triptych.core.attention import AttentionCache, DecoderCache, PositionIds
from triptych.core.models import (
    EncoderDecoder,
    NewTokens,
    attention_sites,
    blocks_of,
    find_config,
)
from triptych.errors import UsageError
from triptych.extras import is_installed, require_extra
from triptych.running.decoding import (
    Engine,
    FusedAttention,
    beyond_fusing,
    numbers_of,
)
from triptych.running.opening import (
    TARGET_FOLDER,
    Reader,
    write_tokenizers,
)
from triptych.running.text import SentencePieceTokenizer

ENCODER = "encoder.onnx"
DECODER = "decoder.onnx"
_OPSET = 18
_TOLERANCE = 1e-4


@final
class EncoderGraph(nn.Module):
    """Encoder graph: maps source tokens to a mask and the keys and values of every decoder layer."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        super().__init__()
        self.engine = engine
        self.max_tokens = max_tokens
        # Attributes give the tensors of the graph their names.
        self.model = cast(EncoderDecoder, engine.model)
        self.memory_map = engine.memory_map

    def forward(self, src_ids: Tensor) -> tuple[Tensor, ...]:
        """Map ids `[batch, src_len]` to a mask `[batch, src_len]`, then keys and values of each layer."""
        positions = PositionIds(
            torch.arange(src_ids.shape[1]), self.max_tokens, sharing=1
        )
        memory = self.engine.project_memory(self.model.encode(src_ids, positions))
        return (src_ids != self.engine.pad_id, *chain.from_iterable(memory))


@final
class DecoderGraph(nn.Module):
    """Decoder graph: maps new target tokens and cached keys and values to logits and an extended cache."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.vocab = engine.vocab_size
        self.model = cast(EncoderDecoder, engine.model)

    def forward(
        self, tgt_ids: Tensor, mask: Tensor, own: list[Tensor], memory: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Compute a step of at least one token per row."""
        # Positions and additive mask follow from the cache's symbolic length.
        before = own[0].shape[2]
        length = tgt_ids.shape[1]
        ids = torch.arange(length) + before
        seen = torch.arange(before + length)[None, :] <= ids[:, None]
        new = NewTokens(
            PositionIds(ids, self.max_tokens, sharing=1),
            numbers_of(seen[None, None], own[0]),
        )
        cache = DecoderCache(len(own) // 2, JoinedCache)
        for i, (of_own, of_memory) in enumerate(
            zip(cache.own, cache.memory, strict=True)
        ):
            cast(JoinedCache, of_own).entries = (own[2 * i], own[2 * i + 1])
            of_memory.append((memory[2 * i], memory[2 * i + 1]))
        x = self.model.decode(tgt_ids, None, mask[:, None, None, :], cache, new)
        kept = [*chain.from_iterable(layer.entries for layer in cache.own)]
        return (self.model.head(x)[..., : self.vocab], *kept)


@final
class JoinedCache(AttentionCache):
    """Cache for a graph without state: entries are concatenated at every step."""

    entries: tuple[Tensor, ...] = ()

    @property
    def length(self) -> Any:  # an int, or a symbolic int during tracing
        return self.entries[0].shape[2]

    def append(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pairs = zip(self.entries, entries, strict=True)
        self.entries = tuple(torch.cat(pair, dim=2) for pair in pairs)
        return self.entries

    def select(self, rows: Tensor) -> None:
        self.entries = tuple(entry.index_select(0, rows) for entry in self.entries)


def write_onnx(run: Reader, folder: Path) -> WrittenModel:
    """Write a folder with `encoder.onnx` and `decoder.onnx`."""
    require_extra("convert", "onnx", "onnxscript", what="--to onnx")
    for site in attention_sites(run.encoder_decoder):
        if unfit := beyond_fusing(site.layer.weights(), site.stack == "cross"):
            raise UsageError(f"ONNX cannot hold {site.name}: it has {unfit[0]}")
    model = copy.deepcopy(run.encoder_decoder).cpu().float().eval()
    length = max_positions(model, run.decoding.max_extra_tokens)
    target = run.tokenizers.target
    # The graphs trace the fused layers of an engine, with hooks and without packed weights.
    engine = Engine(model, direct=False)
    graphs = EncoderGraph(engine, length), DecoderGraph(engine, length)
    for graph in graphs:
        graph.eval().requires_grad_(False)
    pairs = random_pairs(model, target.bos_id, target.eos_id, src_len=7, tgt_len=5)
    _export_graphs(*graphs, pairs, folder)
    write_tokenizers(run.tokenizers, find_config(model).max_source_tokens + 1, folder)
    (folder / "README.md").write_text(_onnx_readme(run, length), encoding="utf-8")
    done = ("every head written as W_Q, W_K, W_V and W_O",)
    check = _check_graphs(run, folder)
    return WrittenModel(
        "encoder.onnx and decoder.onnx, float32", _count_numbers(folder), done, (check,)
    )


def _count_numbers(folder: Path) -> int:
    """Count the parameters of both graphs; shared tables count twice."""
    import onnx

    graphs = [onnx.load(folder / name).graph for name in (ENCODER, DECODER)]
    tensors = chain.from_iterable(graph.initializer for graph in graphs)
    return sum(math.prod(tensor.dims) for tensor in tensors)


def _export_graphs(
    encoder: EncoderGraph, decoder: DecoderGraph, pairs: Pairs, folder: Path
) -> None:
    with torch.no_grad():
        mask, *memory = encoder(pairs.src)
    names = [
        f"{kind}.{i}"
        for i, kind in product(range(len(memory) // 2), ("keys", "values"))
    ]
    rows = Dim.AUTO
    src_len = Dim.AUTO
    new = Dim.AUTO
    before = Dim.AUTO
    layers = [
        cast(FusedAttention, block.self_attention)
        for block in blocks_of(decoder.model, "decoder")
    ]
    own = [
        torch.randn(len(pairs.src), layer.groups, 2, layer.width)
        for layer in layers
        for _ in range(2)
    ]  # example cache: keys and values of two tokens
    export = partial(
        torch.onnx.export,
        opset_version=_OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    with _without_remarks():
        export(
            encoder,
            (pairs.src,),
            str(folder / ENCODER),
            input_names=["src_ids"],
            output_names=["mask", *(f"memory.{name}" for name in names)],
            dynamic_shapes={"src_ids": {0: rows, 1: src_len}},
        )
        cached = [
            *(f"before.{name}" for name in names),
            *(f"memory.{name}" for name in names),
        ]
        export(
            decoder,
            (pairs.tgt_in, mask, own, memory),
            str(folder / DECODER),
            input_names=["tgt_ids", "mask", *cached],
            output_names=["logits", *(f"now.{name}" for name in names)],
            dynamic_shapes={
                "tgt_ids": {0: rows, 1: new},
                "mask": {0: rows, 1: src_len},
                "own": [{0: rows, 2: before} for _ in own],
                "memory": [{0: rows, 2: src_len} for _ in memory],
            },
        )


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Silence the exporter's warnings and logs: they do not concern the model."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _check_graphs(run: Reader, folder: Path) -> ConversionCheck:
    """Compare the graphs in onnxruntime with the model: whole outputs, then token by token."""
    # The lengths differ from the lengths at export, so that a fixed dimension would show.
    what = "logits of the graphs, run by onnxruntime, and of the model"
    if not is_installed("onnxruntime"):
        return ConversionCheck(
            what,
            False,
            note="onnxruntime is not installed: pip install 'triptych[convert]'",
        )
    target = run.tokenizers.target
    pairs = random_pairs(
        run.encoder_decoder, target.bos_id, target.eos_id, src_len=13, tgt_len=9
    )
    expected = compute_logits(run.encoder_decoder, pairs)
    graphs = OnnxGraphs(folder)
    compare_logits(
        what,
        expected,
        graphs.logits(pairs.src, pairs.tgt_in, step=pairs.tgt_in.shape[1]),
        _TOLERANCE,
    )
    return compare_logits(
        what,
        expected,
        graphs.logits(pairs.src, pairs.tgt_in, step=1),
        _TOLERANCE,
        "token by token too",
    )


@final
class OnnxGraphs:
    """Encoder and decoder graphs, run by onnxruntime on the CPU in a single thread."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._encoder, self._decoder = (
            onnxruntime.InferenceSession(
                str(folder / name), options, providers=["CPUExecutionProvider"]
            )
            for name in (ENCODER, DECODER)
        )

    def logits(self, src: Tensor, tgt_in: Tensor, step: int) -> Tensor:
        """Compute logits `[batch, tgt_len, tgt_vocab_size]`, `step` target tokens at a time."""
        mask, *memory = self._encoder.run(None, {"src_ids": src.numpy()})
        inputs = self._decoder.get_inputs()
        kept = [
            np.zeros((len(src), given.shape[1], 0, given.shape[3]), np.float32)
            for given in inputs
            if given.name.startswith("before.")
        ]
        # The cache starts empty and grows with the outputs of each call.
        found = list[Tensor]()
        names = [given.name for given in inputs]
        for start in range(0, tgt_in.shape[1], step):
            new = tgt_in[:, start : start + step].contiguous().numpy()
            logits, *kept = self._decoder.run(
                None, dict(zip(names, (new, mask, *kept, *memory), strict=True))
            )
            found.append(torch.from_numpy(logits))
        return torch.cat(found, dim=1)


def _onnx_readme(run: Reader, length: int) -> str:
    target = run.tokenizers.target
    extra = run.decoding.max_extra_tokens
    never = sorted({target.pad_id, target.bos_id})
    return f"""# A translation model as ONNX graphs, converted with triptych

`encoder.onnx` reads a sentence once; `decoder.onnx` takes the next tokens of its translation with the keys
and values of those before (none at first), and gives logits and the longer keys and values. Greedy search:

```python
import numpy as np
import onnxruntime
{_tokenizer_code(run)}

encoder = onnxruntime.InferenceSession(f"{{folder}}/encoder.onnx")
decoder = onnxruntime.InferenceSession(f"{{folder}}/decoder.onnx")
inputs = decoder.get_inputs()


def translate(text):
    ids = encode(text)
    mask, *memory = encoder.run(None, {{"src_ids": np.array([[*ids, {run.tokenizers.source.eos_id}]])}})
    kept = [np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32) for i in inputs if "before" in i.name]
    output = [{target.bos_id}]
    while len(output) <= len(ids) + {extra}:
        values = (np.array([output[-1:]]), mask, *kept, *memory)
        logits, *kept = decoder.run(None, {{i.name: value for i, value in zip(inputs, values)}})
        logits[..., {never}] = -np.inf
        output.append(int(logits[0, -1].argmax()))
        if output[-1] == {target.eos_id}:
            break
    return decode([token for token in output[1:] if token != {target.eos_id}])
```

`folder` is the path to this folder. Rows and lengths are free, up to {length} tokens a side; a short source
is filled up with token {run.encoder_decoder.pad_id}.
"""


def _tokenizer_code(run: Reader) -> str:
    """Return Python code to open the tokenizers of a converted model, for its README."""
    if isinstance(run.tokenizers.source, SentencePieceTokenizer):
        setup = """import json
import sentencepiece

source = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/source.spm")
target = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/target.spm")
ids = json.load(open(f"{folder}/vocab.json", encoding="utf-8"))
unknown = ids[json.load(open(f"{folder}/tokenizer_config.json", encoding="utf-8"))["unk_token"]]


def encode(text):
    return [ids.get(piece, unknown) for piece in source.encode(text, out_type=str)]


def decode(tokens):
    pieces = {token: piece for piece, token in TARGET_IDS.items()}
    return target.decode([pieces[token] for token in tokens])
"""
        apart = run.tokenizers.source.vocabulary != run.tokenizers.target.vocabulary
        of_target = (
            'json.load(open(f"{folder}/target_vocab.json", encoding="utf-8"))'
            if apart
            else "ids"
        )
        return setup.replace("TARGET_IDS", of_target)
    file = (
        "tokenizer.json" if run.tokenizers.joint else f"{TARGET_FOLDER}/tokenizer.json"
    )
    return f"""from tokenizers import Tokenizer

source = Tokenizer.from_file(f"{{folder}}/tokenizer.json")
source.encode_special_tokens = True
target = Tokenizer.from_file(f"{{folder}}/{file}")


def encode(text):
    return source.encode(text, add_special_tokens=False).ids


def decode(tokens):
    return target.decode(tokens)
"""
