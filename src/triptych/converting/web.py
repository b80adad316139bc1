"""One page with a translator or a language model: its weights, its tokenizer and an engine.

`write_web` describes the model as data for `seeing/reports/engine.js`. Attention layers are written as plain
maps W_Q, W_K, W_V and W_O per head. A part of a model that the engine does not compute is refused by name.
"""

import base64
import copy
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from triptych.converting.output_checks import ConversionCheck, WrittenModel
from triptych.core.algebra.positions import ALiBi
from triptych.core.algebra.semantics import AdditiveScores, HeadNorm, Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import MultiHeadAttention
from triptych.core.models import (
    AnyModel,
    AttentionSite,
    EncoderDecoder,
    FeedForwardConfig,
    LanguageModel,
    NormConfig,
    attention_sites,
    blocks_of,
)
from triptych.errors import DataError, TriptychError, UsageError
from triptych.files import write_text
from triptych.literals import Quantization
from triptych.printable import printable
from triptych.running.opening import RECIPE, Reader
from triptych.running.text import (
    BYTE_ALPHABET,
    ByteLevelTokenizer,
    PretrainedTokenizer,
    Tokenizer,
)
from triptych.seeing.attending import PYTHON_OF, HeldOutText
from triptych.seeing.inspection import random_spectra
from triptych.seeing.reports import make_page, short_name
from triptych.training import read_recipe, task_of

# A browser computes with one thread, without a graphics card.
MOST_BYTES = 48 << 20
MOST_PAIRS = 50
_MOST_TOKENS = 4096  # validation tokens of a language model
_EXAMPLE_TOKENS = 13  # a matrix that a small screen shows whole
_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "swish", "relu_squared")
_DTYPES = {"float32": "<f4", "float16": "<f2"}
_LEVELS = 127
# Fields that the engine reads, by the class of the configuration; the other fields have to be unset.
_READ = {
    "LanguageModelArchitecture": "kind d_model embeddings blocks final_norm head",
    "EmbeddingsConfig": "vocab_size scale positions num_positions sinusoidal_layout norm dropout",
    "BlockConfig": "attention feed_forward feed_forward_frame cross",
    "SublayerConfig": "norm place dropout",
    "FeedForwardConfig": "d_ff activation gated bias out_bias dropout",
    "NormConfig": "kind eps weight bias",
    "HeadConfig": "tied bias",
}
_SEMANTICS = (
    "scale",
    "kind",
    "q_norm",
    "k_norm",
    "v_norm",
    "rotary",
    "bias",
    "dropout",
    "gate",
    "scores",
)


class UnfitForPageError(UsageError):
    """A model that a page for the web cannot compute."""


def _refused(what: str, where: str) -> UnfitForPageError:
    return UnfitForPageError(
        f"a page for the web does not compute {what} ({where}): triptych explore MODEL shows such a model"
    )


@final
@dataclass
class _Packer:
    """The tensors of the page as bytes, and the rounded tensors."""

    quantization: Quantization
    index: dict[str, dict[str, Any]] = field(default_factory=dict)
    read: dict[str, Tensor] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(
        self, name: str, tensor: Tensor, heads: int | None = None, *, is_map: bool
    ) -> str:
        """Store a tensor; a map of matrices by the chosen type, anything else in float32."""
        values = tensor.detach().float().cpu().contiguous()
        dtype = self.quantization if is_map else "float32"
        if dtype == "int8":
            factors = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / _LEVELS
            levels = (values / factors).round().to(torch.int8)
            data = factors.numpy().astype("<f4").tobytes() + levels.numpy().tobytes()
            self.read[name] = levels.float() * factors
        else:
            rounded = values.numpy().astype(_DTYPES[dtype])
            self.read[name] = torch.from_numpy(rounded.astype("<f4"))
            data = rounded.tobytes()
        if not bool(self.read[name].isfinite().all()):
            raise DataError(
                f"{name} has values outside of {dtype}: take --quantization float32"
            )
        self.index[name] = {
            "shape": [*values.shape],
            "dtype": dtype,
            "at": self.size,
            "heads": heads,
        }
        # Every tensor begins at a multiple of four bytes.
        data += bytes(-len(data) % 4)
        self.parts.append(data)
        self.size += len(data)
        return name


def _require_read(config: Any, where: str) -> None:
    """Check that a configuration sets only fields that the engine reads."""
    read = _READ[type(config).__name__].split()
    for one in fields(config):
        default = one.default if one.default is not MISSING else None
        value = getattr(config, one.name)
        if one.name not in read and value != default:
            raise _refused(f"{one.name} = {value!r}", where)


@final
class _Described:
    """A model as data for the engine."""

    def __init__(self, reader: Reader, quantization: Quantization) -> None:
        self.reader = reader
        self.packer = _Packer(quantization)
        model = reader.model
        self.sites = {
            (str(site.stack), site.block): site for site in attention_sites(model)
        }
        self.attention: dict[str, AttentionWeights] = {}
        # The module whose tensor is stored under a name, transposed or not, to build the rounded model.
        self.stored: list[tuple[nn.Parameter, str, bool]] = []
        self.record = {
            "kind": model.architecture.__class__.__name__,
            "source": isinstance(model, EncoderDecoder),
            "stacks": {
                name: self._stack(name, stack) for name, stack in model.stacks.items()
            },
            "tensors": self.packer.index,
        }

    def _parameter(self, name: str, given: Tensor, *, transposed: bool = False) -> str:
        assert isinstance(given, nn.Parameter)
        self.stored.append((given, name, transposed))
        return self.packer.add(
            name, given.mT if transposed else given, is_map=given.ndim > 1
        )

    def _norm(
        self, config: NormConfig | None, module: nn.Module, name: str
    ) -> dict[str, Any] | None:
        if config is None:
            return None
        _require_read(config, name)
        found: dict[str, Any] = {"eps": config.eps, "centred": config.kind == "layer"}
        for part in ("weight", "bias"):
            if (given := getattr(module, part, None)) is not None:
                found[part] = self._parameter(f"{name}.{part}", given)
        return found

    def _stack(self, name: str, stack: LanguageModel) -> dict[str, Any]:
        made = stack.architecture
        where = f"the {name}"
        _require_read(made, where)
        _require_read(made.embeddings, f"the embeddings of {where}")
        if made.kind == "encoder" and not self.reader.translates:
            raise _refused(
                "an encoder alone, which neither translates nor writes", where
            )
        # The order of tensors in the file is that of the calls below.
        found: dict[str, Any] = {
            "d_model": made.d_model,
            "scale": made.embeddings.scale,
            "positions": self._positions(name, stack),
            "embedding_norm": self._norm(
                made.embeddings.norm, stack.embeddings.norm, f"{name}.embeddings.norm"
            ),
            "final_norm": self._norm(
                made.final_norm, stack.final_norm, f"{name}.final_norm"
            ),
        }
        model = self.reader.model
        shares = (
            isinstance(model, EncoderDecoder)
            and model.architecture.shared
            and name == "decoder"
        )
        found["table"] = (
            "encoder.table"
            if shares
            else self._parameter(f"{name}.table", stack.embeddings.table.weight)
        )
        if stack.head is not None and made.head is not None:
            _require_read(made.head, "the output layer")
            if not made.head.tied:
                found["output"] = self._parameter("output", stack.head.output.weight)
            if made.head.bias:
                found["output_bias"] = self._parameter(
                    "output.bias", stack.head.output.bias
                )
        found["blocks"] = [self._block(name, i) for i in range(len(made.blocks))]
        return found

    def _positions(self, name: str, stack: LanguageModel) -> dict[str, Any] | None:
        config = stack.architecture.embeddings
        match config.positions:
            case "none":
                return None
            case "learned":
                table = stack.embeddings.positions.weight
                assert isinstance(table, nn.Parameter)
                return {"table": self._parameter(f"{name}.positions", table)}
        if config.sinusoidal_layout not in ("interleaved", "halves"):
            raise _refused(
                f"sinusoidal_layout = {config.sinusoidal_layout!r}", f"the {name}"
            )
        return {"layout": config.sinusoidal_layout}

    def _block(self, stack: str, number: int) -> dict[str, Any]:
        model = self.reader.model
        made = model.stacks[stack].architecture.blocks[number]  # type: ignore[index]
        block = blocks_of(model, stack)[number]
        name = f"{stack}.{number}"
        _require_read(made, f"block {name}")
        # Each sub-layer: its frame with the norm, then its own maps.
        frames = {
            "self": (made.attention, block.self_residual),
            "ff": (made.feed_forward_frame, block.feed_forward_residual),
        }
        if made.cross is not None:
            frames["cross"] = (made.cross, block.cross_residual)
        found: dict[str, Any] = {"cross": None}
        for part, (config, residual) in frames.items():
            _require_read(config, f"block {name}")
            found[part] = {
                "place": config.place,
                "norm": self._norm(config.norm, residual.norm, f"{name}.{part}.norm"),
            }
        found["self"] |= self._layer(self.sites[stack, number])
        if made.cross is not None:
            found["cross"] |= self._layer(self.sites["cross", number])
        found["ff"] |= self._feed_forward(
            made.feed_forward, block.feed_forward, f"{name}.ff"
        )
        return found

    def _feed_forward(
        self, config: Any, module: nn.Module, name: str
    ) -> dict[str, Any]:
        if not isinstance(config, FeedForwardConfig):
            raise _refused("a mixture of experts", name)
        _require_read(config, name)
        if config.activation not in _ACTIVATIONS:
            raise _refused(f"activation = {config.activation!r}", name)
        # The engine multiplies rows from the left: x W, and `nn.Linear` stores Wᵀ.
        tensors = {}
        for part, of in (("inner", "1"), ("outer", "2"), ("gate", "g")):
            linear = getattr(module, part)
            if linear is None:
                continue
            at = f"{name}.W_{of}"
            tensors[f"W_{of}"] = self._parameter(at, linear.weight, transposed=True)
            if linear.bias is not None:
                tensors[f"b_{of}"] = self._parameter(f"{name}.b_{of}", linear.bias)
        return {"activation": config.activation, "tensors": tensors}

    def _layer(self, site: AttentionSite) -> dict[str, Any]:
        weights = site.layer.weights(site.kind)
        name = site.name
        if weights.norms_within:
            raise _refused("norms between the maps of a head", name)
        heads = weights.num_heads
        found = {
            "name": name if self.reader.translates else str(site.block),
            **self._semantics(weights.semantics, weights, name),
        }
        tensors: dict[str, str] = {}
        # The layer of the rounded model has the same maps.
        chains: dict[str, tuple[Link, ...]] = {}
        shared = {}
        for side in ("q", "k", "v", "o"):
            link = weights.multiplied(side)
            to = side.upper()
            at = f"{name}.W_{to}"
            tensors[f"W_{to}"] = self.packer.add(at, link.weight, heads, is_map=True)
            shared[f"W_{to}"] = link.copies < heads
            bias = None
            if link.bias is not None:
                tensors[f"b_{to}"] = self.packer.add(
                    f"{name}.b_{to}", link.bias, heads, is_map=False
                )
                bias = self.packer.read[f"{name}.b_{to}"]
            chains[side] = (Link(self.packer.read[at], bias),)
        if weights.o_bias is not None:
            tensors["b_O"] = self.packer.add(
                f"{name}.b_O", weights.o_bias, is_map=False
            )
        self.attention[name] = replace(
            weights.to(torch.float32),
            **chains,  # type: ignore[arg-type]
        )
        return {**found, "tensors": tensors, "shared": shared}

    def _semantics(
        self, semantics: Semantics, weights: AttentionWeights, name: str
    ) -> dict[str, Any]:
        if unfit := semantics.beyond(_SEMANTICS):
            raise _refused(unfit[0], name)
        # Every field of `_SEMANTICS`, in a form known to the engine.
        found: dict[str, Any] = {"scale": semantics.scale, "kind": semantics.kind}
        heads = weights.num_heads
        for side in ("q_norm", "k_norm", "v_norm"):
            norm = getattr(semantics, side)
            if norm is not None:
                width = weights.width(side[0])  # type: ignore[arg-type]
                found[side] = self._head_norm(norm, heads, width, f"{name}.{side}")
        if (rotary := semantics.rotary) is not None:
            if rotary.start or rotary.factor != 1 or rotary.places is not None:
                raise _refused("rotary positions of some channels or places", name)
            if rotary.long is not None:
                raise _refused("rotary positions that change with the length", name)
            found["rotary"] = {
                "frequencies": rotary.frequencies.double().tolist(),
                "pairing": rotary.pairing,
            }
        if semantics.bias is not None:
            if not isinstance(semantics.bias, ALiBi):
                raise _refused(f"{semantics.positions} biases of positions", name)
            found["slopes"] = semantics.bias.slopes.tolist()
        if (scores := semantics.scores) is not None:
            if not isinstance(scores, AdditiveScores):
                raise _refused(f"scores = {scores.name!r}", name)
            found["additive"] = self.packer.add(
                f"{name}.additive", scores.weight, heads, is_map=False
            )
        if (gate := semantics.gate) is not None:
            if gate.whole:
                raise _refused("differential attention", name)
            rows = gate.weight.reshape(heads, -1, weights.d_model)
            found["gate"] = {
                "weight": self.packer.add(f"{name}.gate", rows.mT, heads, is_map=False)
            }
            if gate.bias is not None:
                found["gate"]["bias"] = self.packer.add(
                    f"{name}.gate.bias",
                    gate.bias.reshape(heads, -1),
                    heads,
                    is_map=False,
                )
        return found

    def _head_norm(
        self, norm: HeadNorm, heads: int, width: int, name: str
    ) -> dict[str, Any]:
        if norm.over != "head" or norm.channels is not None or norm.turned:
            raise _refused("a norm over several heads, or over some channels", name)
        found: dict[str, Any] = {"eps": norm.eps, "centred": norm.centred}
        for part, given in norm.tensors().items():
            value = norm.gain(torch.float32) if part == "weight" else given
            rows = value.reshape(-1, value.shape[-1])
            rows = rows.repeat_interleave(heads // len(rows), dim=0)
            found[part] = self.packer.add(
                f"{name}.{part}", rows.expand(heads, width), heads, is_map=False
            )
        return found

    def chance(self) -> dict[str, list[float]]:
        """Return mean spectra of random forms by the width of their maps."""
        widths = set[tuple[int, int]]()
        for weights in self.attention.values():
            widths |= {(weights.d_model, weights.width(side)) for side in ("q", "v")}
        return {
            str(width): random_spectra(d_model, width).values.mean(dim=0).tolist()
            for d_model, width in sorted(widths)
        }

    @torch.no_grad()
    def rounded(self) -> Reader:
        """Return the model with the weights of the page, in float32."""
        # Attention layers are replaced by layers of their plain maps; all other tensors are rounded.
        read = self.packer.read
        model: AnyModel = copy.deepcopy(self.reader.model).float().eval()
        names = {
            id(given): name for name, given in self.reader.model.named_parameters()
        }
        own = dict(model.named_parameters())
        for given, name, transposed in self.stored:
            value = read[name].mT if transposed else read[name]
            own[names[id(given)]].copy_(value)
        for site in attention_sites(model):
            layer = MultiHeadAttention.from_weights(self.attention[site.name], 0.0)
            attribute = "cross" if site.stack == "cross" else "self"
            block = blocks_of(model, site.stack)[site.block]
            setattr(block, f"{attribute}_attention", layer.eval())
        return self.reader.with_model(model)


# Tokenizers.


def _tokenizer_record(tokenizer: Tokenizer, which: str) -> dict[str, Any]:
    """Return a tokenizer as data for the engine."""

    def refused(what: str) -> UnfitForPageError:
        return _refused(what, which)

    match tokenizer:
        case ByteLevelTokenizer():
            record = json.loads(tokenizer.to_json())
        case PretrainedTokenizer():
            record = json.loads(tokenizer.inner_json)
        case _:
            raise refused("a tokenizer of SentencePiece")
    # Special tokens are not pieces of a text: the engine finds them by their names.
    model = record["model"]
    special = []
    for token in record["added_tokens"]:
        if not token["special"] or token["rstrip"] or token["single_word"]:
            raise refused(f"the added token {token['content']!r}")
        special.append({name: token[name] for name in ("id", "content", "lstrip")})
    if (record["post_processor"] or {}).get("type") not in (None, "ByteLevel"):
        raise refused("special tokens around a text")
    found: dict[str, Any] = {"tokens": [*tokenizer.vocabulary], "special": special}
    found |= _normalisation(record, refused)
    kinds = {"BPE": "bpe", "Unigram": "unigram"}
    if model["type"] not in kinds:
        raise refused(f"a tokenizer of the kind {model['type']}")
    found["kind"] = kinds[model["type"]]
    ids = {token["id"] for token in special}
    others = [piece for i, piece in enumerate(found["tokens"]) if i not in ids]
    if record["pre_tokenizer"] is None:
        if model.get("merges") or any(len(piece) != 1 for piece in others):
            raise refused("pieces that are no bytes and no characters")
        return found | {"kind": "characters", "unknown": tokenizer.unk_id}
    if not {*BYTE_ALPHABET} <= {*others}:
        raise refused("a vocabulary without all bytes")
    if found["kind"] == "unigram":
        return found | {"scores": [score for _, score in model["vocab"]]}
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    flags = ("byte_fallback", "ignore_merges")
    if any(model.get(name) for name in (*odd, *flags)):
        raise refused("byte pairs with a prefix, a suffix or a fallback")
    merges = [
        pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]
    ]
    return found | {"merges": merges}


def _normalisation(record: Mapping[str, Any], refused: Any) -> dict[str, bool]:
    """Return the treatment of a text before it is cut, and check that of the tokens after it."""
    # The tokenizers of `train_tokenizers` and `train_tokenizer`, and GPT-2's, are of this form.
    rules = record["normalizer"]
    names = [rule["type"] for rule in (rules or {}).get("normalizers", [rules]) if rule]
    if names not in ([], ["NFC"], ["NFC", "Prepend"]):
        raise refused(f"the normalizer {' and '.join(names)}")
    cut = record["pre_tokenizer"]
    if cut is not None and (cut["type"] != "ByteLevel" or cut["add_prefix_space"]):
        raise refused(f"the pre-tokenizer {cut['type']}")
    return {
        "nfc": "NFC" in names,
        "prepends": "Prepend" in names,
        "words": cut is not None and cut["use_regex"],
    }


# The whole page.


def _search_record(reader: Reader) -> dict[str, Any]:
    """Return the limits, ends and options of a search."""
    if not reader.translates:
        generator = reader.generator()
        only = reader.language_model
        return {
            "ends": [*generator.end_ids],
            "never": [],
            "choices": reader.tokenizer.vocab_size,
            "begin": reader.begin_id,
            "positions": only.max_tokens,
        }
    rules = reader.tokenizers.target.rules
    if len(rules.start) != 1 or rules.min_length or rules.no_repeat:
        # Marian and other imported translators may have such rules.
        raise _refused("rules of the output, such as forbidden repeats", reader.name)
    options = reader.search_options()
    model = reader.encoder_decoder
    return {
        "start": rules.start[0],
        "ends": [rules.end],
        "never": [*rules.never],
        "choices": model.tgt_vocab_size,
        "end": reader.tokenizers.source.eos_id,
        "beam_size": options.beam_size,
        "alpha": options.alpha,
        "max_extra_tokens": options.max_extra_tokens,
        "full": options.stop == "full",
        "positions": model.max_target_tokens,
        "max_source_tokens": model.max_source_tokens,
    }


def _validation_text(reader: Reader) -> tuple[HeldOutText | None, str]:
    """Return the first validation sentences of a run, or None with the reason."""
    if not (reader.folder / RECIPE).is_file():
        return None, "no recipe names a validation text"
    # The text of a run may lie on another machine: the page is then made without it.
    try:
        task = task_of(read_recipe(reader.folder / RECIPE))
        texts, targets = task.validation_text(Path())
        if targets is not None:
            texts, targets = texts[:MOST_PAIRS], targets[:MOST_PAIRS]
        return HeldOutText(reader, texts, targets, most_tokens=_MOST_TOKENS), ""
    except TriptychError as error:
        return None, f"the validation text cannot be read: {error}"


def _held_out_record(reader: Reader, text: HeldOutText) -> dict[str, Any]:
    """Return the first sentences or windows of a validation text as data for the engine."""
    windows = text.windows.within(_MOST_TOKENS)
    parts = [
        {
            "unit": unit,
            "ids": [*window.text.ids],
            "source": None if window.text.source is None else [*window.text.source],
        }
        for unit, window in zip(windows.unit_of, windows.windows, strict=True)
    ]
    if not reader.translates:
        return {"name": text.name, "units": windows.units, "windows": parts}
    return {"name": text.name, "units": "sentences", "windows": parts[:MOST_PAIRS]}


def _example(reader: Reader, held_out: Mapping[str, Any] | None) -> str:
    """Return a validation sentence as the first text of the page, or "" if `held_out` is None."""
    if held_out is None:
        return ""
    windows = held_out["windows"]
    if not reader.translates:
        return reader.tokenizer.decode([windows[0]["ids"][:_EXAMPLE_TOKENS]])[0]
    sources = [window["source"][:-1] for window in windows]
    nearest = min(sources, key=lambda ids: abs(len(ids) - _EXAMPLE_TOKENS))
    return reader.tokenizers.source.decode([nearest])[0]


@torch.no_grad()
def _difference(reader: Reader, rounded: Reader) -> ConversionCheck:
    """Compare the logits of the page's weights with the model's on random tokens."""
    most = 0.0
    for window in reader.random_windows(0):
        before = reader.outputs(window).float()
        after = rounded.outputs(window).float()
        most = max(most, float((after - before).abs().max()))
    if not most < float("inf"):
        raise DataError(
            "the logits of the page's weights are not finite: nothing is written"
        )
    return ConversionCheck("logits of the weights on the page", True, most)


def write_web(
    reader: Reader,
    path: Path,
    quantization: Quantization = "float16",
    *,
    text: str = "",
    held_out: HeldOutText | None = None,
) -> WrittenModel:
    """Write a model as an HTML page to run it in a browser.

    The page begins with `text`, by default a sentence of `held_out`. Losses are computed on `held_out`, by
    default a run's validation text. Raises `UnfitForPageError` for a model that the page cannot compute.
    """
    if reader.ensemble:
        raise UnfitForPageError(
            "a page for the web has one model: leave out the ensemble"
        )
    if not reader.has_tokenizer:
        raise UnfitForPageError(
            f"{reader.name} has no tokenizer: a page reads and writes text"
        )
    if reader.translates and not reader.is_searched:
        raise _refused("an encoder-decoder without a search", reader.name)
    parameters = sum(given.numel() for given in {*reader.model.parameters()})
    bytes_of = {"float32": 4, "float16": 2, "int8": 1}[quantization]
    if parameters * bytes_of > MOST_BYTES:
        raise UnfitForPageError(
            f"{reader.name} has {parameters:,} parameters, {parameters * bytes_of / 2**20:,.0f} MiB in "
            f"{quantization}, and a page has at most {MOST_BYTES >> 20} MiB of weights: triptych explore "
            "MODEL shows it, and --quantization int8 is the smallest"
        )
    # Unsupported models are refused before anything is computed.
    described = _Described(reader, quantization)
    check = _difference(reader, described.rounded())
    why = ""
    if held_out is None:
        held_out, why = _validation_text(reader)
    losses = None if held_out is None else _held_out_record(reader, held_out)
    tokenizer = (
        {
            "source": _tokenizer_record(reader.tokenizers.source, "the tokenizer"),
            "target": None
            if reader.tokenizers.joint
            else _tokenizer_record(reader.tokenizers.target, "the target's tokenizer"),
        }
        if reader.translates
        else {
            "source": _tokenizer_record(reader.tokenizer, "the tokenizer"),
            "target": None,
        }
    )
    name = printable(short_name(reader.name))
    record = {
        **described.record,
        "name": name,
        "search": _search_record(reader),
        "tokenizers": tokenizer,
        "held_out": losses,
        "example": text or _example(reader, losses),
        "python": dict(PYTHON_OF),
        "chance": described.chance(),
        "source_of": name,
    }
    weights = base64.b64encode(b"".join(described.packer.parts)).decode("ascii")
    difference = check.largest_difference or 0.0
    about = (
        f"The model has {parameters:,} parameters, here in {quantization}. The logits are within "
        f"{difference:.2g} of those that Python computes from the original weights (on random tokens)."
    )
    page = make_page(
        "web.html",
        title=name,
        answers=None,
        model=record,
        weights=weights,
        about=about,
        intro=f"A {'translator' if reader.translates else 'language model'}, computed in this page",
    )
    write_text(path, page)
    kind = "encoder-decoder" if reader.translates else "language model"
    of_loss = (
        f"no held-out text for the loss ({why})"
        if losses is None
        else f"{len(losses['windows'])} {losses['units']} of held-out text for the loss"
    )
    folded = ("every head written as W_Q, W_K, W_V and W_O", of_loss)
    return WrittenModel(kind, parameters, folded, (check,))
