"""Run whole models on text, to compare original and rewritten ones and to record inputs of attention layers.

Triptych runs every model that it can; `transformers` runs the others. No code that came with a checkpoint
is executed (`trust_remote_code` is off).
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from triptych.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.checkpoints.layer import AttentionSource, Site
from triptych.checkpoints.models import read_model
from triptych.checkpoints.own import OwnModel, is_own
from triptych.errors import DataError, UsageError
from triptych.extras import is_installed
from triptych.models import EncoderDecoder, LanguageModel, attention_sites
from triptych.models.blocks import Block
from triptych.runs import Run
from triptych.storage.tensors import read_json
from triptych.text import Tokenizer, load_tokenizer, read_tokenizer

WINDOW_TOKENS = 128
_RANDOM_WINDOWS = 4
_FARTHEST = 4
_NO_TRANSFORMERS = "transformers, which would run it, is not installed: pip install 'triptych[run]'"
RunnableKind = Literal["causal", "pairs", "encoder"]


@final
@dataclass(frozen=True, eq=False)
class Window:
    """The input of a model for a piece of text.

    Attributes:
        inputs: token ids by argument, `[1, length]` each.
        targets: the token that comes next at each position, `[length]`; None where nothing is predicted.
    """

    inputs: Mapping[str, Tensor]
    targets: Tensor | None


@final
@dataclass(frozen=True, eq=False)
class Seen:
    """The inputs of a layer: `x` for the queries, and `memory` for keys and values in cross-attention."""

    x: Tensor
    memory: Tensor | None


class RunnableModel(ABC):
    """A model that can be run.

    Attributes:
        by: the library that runs it.
        kind: how it reads text.
        model: its module.
        seen: the inputs of the watched layers in the last run, by name, one for each use of the layer.
    """

    by: str
    kind: RunnableKind
    model: nn.Module
    seen: dict[str, list[Seen]]

    @abstractmethod
    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        """Cut a text into windows.

        Raises:
            UsageError: the text is not of the kind that the model reads.
        """

    @abstractmethod
    def random_windows(self, seed: int) -> Iterator[Window]:
        """Windows of random tokens."""

    @abstractmethod
    def outputs(self, window: Window) -> Tensor:
        """Logits, or hidden states of a model without a vocabulary on top, `[length, width]`."""

    @abstractmethod
    def watch(self, source: AttentionSource, sites: Sequence[Site]) -> "contextlib.ExitStack":
        """Record the inputs of attention layers in `seen`, until the returned stack is closed."""

    @abstractmethod
    def attention_module(self, site: Site) -> nn.Module:
        """The module of an attention layer.

        Raises:
            DataError: the model has none.
        """

    def attention_outputs(self, source: AttentionSource, window: Window) -> list[tuple[str, Tensor]]:
        """The outputs of attention layers with their names, in the order in which they run.

        Raises:
            DataError: the model has no module of a layer's name.
        """
        found: list[tuple[str, Tensor]] = []

        def keep(module: nn.Module, given: Any, output: Any, *, name: str) -> None:
            found.append((name, output if isinstance(output, Tensor) else output[0]))

        with contextlib.ExitStack() as stack:
            for site in source.sites:
                hook = partial(keep, name=site.name)
                stack.callback(self.attention_module(site).register_forward_hook(hook).remove)
            self.outputs(window)
        return found


class Compared(NamedTuple):
    """Comparison of two models on the same windows.

    Attributes:
        tokens: number of predicted tokens.
        worst_logit: largest difference of a logit.
        divergence_nats: mean KL divergence of the second model's next token from the first's.
        loss_before_nats: loss of the first model per token; None if nothing is predicted. Likewise
            `loss_after_nats` of the second.
        farthest: the windows on which logits differ most, the worst first.
    """

    tokens: int
    worst_logit: float
    divergence_nats: float
    loss_before_nats: float | None
    loss_after_nats: float | None
    farthest: tuple[Window, ...] = ()


@torch.inference_mode()
def compared(original: RunnableModel, rewritten: RunnableModel, windows: Iterator[Window]) -> Compared:
    """Compare two models on a text.

    Raises:
        UsageError: there are no windows.
    """
    tokens, worst, divergence, predicted = 0, 0.0, 0.0, 0
    losses, farthest = [0.0, 0.0], list[tuple[float, Window]]()
    for window in windows:
        one, other = original.outputs(window).double(), rewritten.outputs(window).double()
        apart = largest_difference(one, other)
        worst = max(worst, apart)
        farthest = sorted([*farthest, (apart, window)], key=lambda pair: -pair[0])[:_FARTHEST]
        log_p, log_q = one.log_softmax(dim=-1), other.log_softmax(dim=-1)
        divergence += float((log_p.exp() * (log_p - log_q)).sum().clamp(min=0))
        tokens += len(one)
        if window.targets is not None:
            predicted += len(window.targets)
            for place, found in enumerate((log_p, log_q)):
                losses[place] -= float(found.gather(-1, window.targets[:, None]).sum())
    if not tokens:
        raise UsageError("the text is empty: there is nothing to compare on")
    before, after = (loss / predicted if predicted else None for loss in losses)
    return Compared(
        tokens, worst, divergence / tokens, before, after, tuple(window for _, window in farthest)
    )


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two outputs; infinite if an entry is NaN in only one of them."""
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0).max())


def open_model(path: Path) -> RunnableModel:
    """Open a model to run it.

    Raises:
        UsageError: we cannot run it, and `transformers` is not installed or has no such model.
    """
    if _is_run_by_us(path):
        return OwnRunnable(path)
    try:
        return LanguageRunnable(path)
    except DataError as error:
        if not is_installed("transformers"):
            raise UsageError(f"{error}; {_NO_TRANSFORMERS}") from None
    return TransformersModel(path)


def read_whole_text(path: Path) -> str:
    """Read a text file.

    Raises:
        UsageError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: it is not UTF-8: {error.reason} at byte {error.start}") from None


def can_run(path: Path) -> str:
    """Why a model cannot be run here; "" if it can."""
    if not path.is_dir():
        return "it is not a folder"
    if _is_run_by_us(path) or is_installed("transformers"):
        return ""
    try:
        LanguageRunnable(path)
    except DataError as error:
        return f"{error}; {_NO_TRANSFORMERS}"
    return ""


def _is_run_by_us(path: Path) -> bool:
    """Whether a model is one of ours that translates, or a Marian translator, which becomes one."""
    record = read_json(path / "config.json")
    if is_own(record):
        return record.get("model_type") != "triptych"  # which language models have
    return record.get("model_type") == "marian"


@final
class TransformersModel(RunnableModel):
    """A model of `transformers`, in float32."""

    def __init__(self, path: Path) -> None:
        import transformers  # large, and only needed here

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._path = path
        try:
            config = transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
            name = (getattr(config, "architectures", None) or ["AutoModel"])[0]
            loader = getattr(transformers, name, None)
            if not (isinstance(loader, type) and issubclass(loader, transformers.PreTrainedModel)):
                loader = transformers.AutoModel
            loaded: Any = loader.from_pretrained(
                path,
                local_files_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
            self.model, found = loaded
            self.model.eval()
        # Whatever a model's own code says of a checkpoint, it comes in many classes.
        except Exception as error:
            raise DataError(f"{path}: transformers cannot load it: {first_line(error)}") from error
        if self.model.main_input_name != "input_ids":
            raise DataError(f"{name} reads {_inputs_besides_text(self.model) or 'no token ids'}, not text")
        self._missing = sorted(found["missing_keys"])
        _fill_with_nan(self.model, self._missing)
        self.by = f"transformers {transformers.__version__}"
        self._config: Any = config
        self.kind = (
            "pairs"
            if config.is_encoder_decoder
            else "causal"
            if "CausalLM" in name or "LMHead" in name
            else "encoder"
        )

    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        """Windows of 128 tokens side by side; for pairs a line with a tab is one, for encoders a line."""
        if self.kind == "causal":
            ids = self._tokens(read_whole_text(text), special=False)
            return side_by_side(ids[: most_tokens + 1], self._at_most(WINDOW_TOKENS))
        lines = read_whole_text(text).splitlines()
        if self.kind == "pairs":
            return self._pairs(text, lines, most_tokens)
        length = self._at_most(WINDOW_TOKENS)
        texts = (self._tokens(line, special=True)[:length].tolist() for line in lines if line.strip())
        return _until(most_tokens, texts)

    def random_windows(self, seed: int) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(seed)
        size = int(self._config.get_text_config().vocab_size)
        length = self._at_most(32) - 4
        for _ in range(_RANDOM_WINDOWS):
            ids = torch.randint(0, size, (1, max(4, length)), generator=generator)
            inputs = {"input_ids": ids}
            if self.kind == "pairs":
                inputs["decoder_input_ids"] = torch.randint(0, size, ids.shape, generator=generator)
            yield Window(inputs, None)

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        """One forward pass.

        Raises:
            DataError: the file lacks tensors that the output depends on (`transformers` draws random ones
                for these); or the model reads more than text.
        """
        self.seen = {}
        try:
            found = self.model(**window.inputs)
        except (AttributeError, TypeError, ValueError) as error:
            if other := _inputs_besides_text(self.model):
                name = type(self.model).__name__
                raise DataError(
                    f"{name} reads {other} besides text, and does not run on text alone"
                ) from error
            raise
        result: Tensor = (found.logits if "logits" in found else found.last_hidden_state)[0]
        if self._missing and result.isnan().any():
            raise DataError(f"{self._path}: there is no tensor for {self._missing[0]}")
        return result

    def watch(self, source: AttentionSource, sites: Sequence[Site]) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for site in sites:
            of_queries, of_keys = source.input_modules(site)

            def hear(
                module: nn.Module, given: tuple[Any, ...], *, site: Site = site, key: bool = False
            ) -> None:
                x = given[0].detach()
                x = x.reshape(1, -1, x.shape[-1])  # some layers put all sequences one behind the other
                if not key:
                    self.seen.setdefault(site.name, []).append(Seen(x, None))
                elif site.kind == "cross":
                    last = self.seen[site.name].pop()
                    self.seen[site.name].append(Seen(last.x, x))

            for name, key in ((of_queries, False), (of_keys, True)):
                if not key or site.kind == "cross":
                    stack.callback(
                        self._module(name).register_forward_pre_hook(partial(hear, key=key)).remove
                    )
        return stack

    def attention_module(self, site: Site) -> nn.Module:
        """The module whose name in memory is closest to the layer's name in the file."""
        return self._module(site.module)

    def _module(self, name: str) -> nn.Module:
        """The module of a tensor's name: the file's names and those in memory may differ at the front.

        Raises:
            DataError: there is none.
        """
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        for candidate in _renamed(name):
            if candidate in modules:
                return modules[candidate]
        ends = [own for own in modules if own and (own.endswith(f".{name}") or name.endswith(f".{own}"))]
        if not ends:
            raise DataError(f"{self._path}: transformers has no module {name}, whose input is to be measured")
        return modules[max(ends, key=len)]

    def _tokens(self, text: str, *, special: bool, target: bool = False) -> Tensor:
        tokenizer = self._tokenizer()
        said = {"text_target": text} if target else {"text": text}
        return torch.tensor(tokenizer(**said, add_special_tokens=special, verbose=False)["input_ids"])

    def _tokenizer(self) -> Any:
        if not hasattr(self, "_cached"):
            import transformers

            try:
                self._cached: Any = transformers.AutoTokenizer.from_pretrained(
                    self._path, local_files_only=True, trust_remote_code=False
                )
            except Exception as error:
                raise DataError(
                    f"{self._path}: its tokenizer cannot be loaded: {first_line(error)}"
                ) from error
        return self._cached

    def _at_most(self, tokens: int) -> int:
        """A number of tokens, limited to the positions that the model has."""
        config = self._config.get_text_config()
        return min(tokens, int(getattr(config, "max_position_embeddings", None) or tokens))

    def _pairs(self, text: Path, lines: list[str], most_tokens: int) -> Iterator[Window]:
        start_id = self._config.decoder_start_token_id
        done = 0
        for number, line in enumerate(lines, start=1):
            source, tab, target = line.partition("\t")
            if not tab:
                raise UsageError(f"{text}, line {number}: expected a source, a tab and a target")
            wanted = self._tokens(target, special=True, target=True)[: self._at_most(WINDOW_TOKENS)]
            given = torch.cat([torch.tensor([start_id]), wanted[:-1]])
            inputs = {
                "input_ids": self._tokens(source, special=True)[None, : self._at_most(4 * WINDOW_TOKENS)],
                "decoder_input_ids": given[None],
            }
            yield Window(inputs, wanted)
            done += len(wanted)
            if done >= most_tokens:
                return


@final
class LanguageRunnable(RunnableModel):
    """A run of a language model, or a checkpoint of others that becomes one, in float32.

    Raises:
        DataError: it does not, with the reason.
    """

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        if isinstance(checkpoint, Checkpoint):
            model = read_model(checkpoint, torch.float32)
        elif isinstance(checkpoint, OwnModel) and isinstance(checkpoint.model, LanguageModel):
            model = checkpoint.model.float()
        else:
            raise DataError(f"{path} holds no language model")
        self.model: LanguageModel = model
        self._is_own = isinstance(checkpoint, OwnModel)
        self.by = "triptych"
        self.kind = "causal" if self.model.causal and self.model.head is not None else "encoder"
        self._path = path
        self._longest = checkpoint.longest_text(checkpoint.sites[0])
        self._tokenizer: Tokenizer | None = None

    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        """Windows of 128 tokens side by side; for encoders a line is one."""
        if self._tokenizer is None:
            path, size = self._path, self.model.vocab_size
            read_own = self._is_own
            self._tokenizer = (
                read_tokenizer(path / "tokenizer.json") if read_own else load_tokenizer(path, vocab_size=size)
            )
        encode, length = self._tokenizer.encode, min(WINDOW_TOKENS, self._longest)
        whole = read_whole_text(text)
        if self.kind == "causal":
            ids = torch.tensor(encode([whole], parse_special=True)[0])
            return side_by_side(ids[: most_tokens + 1], length)
        lines = [line for line in whole.splitlines() if line.strip()]
        return _until(most_tokens, (encode([line], add_special=True)[0][:length] for line in lines))

    def random_windows(self, seed: int) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(seed)
        length = max(4, min(32, self._longest) - 4)
        for _ in range(_RANDOM_WINDOWS):
            ids = torch.randint(0, self.model.vocab_size, (1, length), generator=generator)
            yield Window({"input_ids": ids}, None)

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        self.seen = {}
        result: Tensor = self.model(window.inputs["input_ids"]).logits
        return result[0]

    def watch(self, source: AttentionSource, sites: Sequence[Site]) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for site in sites:

            def hear(module: nn.Module, given: tuple[Any, ...], *, site: Site = site) -> None:
                self.seen.setdefault(site.name, []).append(Seen(given[0].detach(), None))

            stack.callback(self.attention_module(site).register_forward_pre_hook(hear).remove)
        return stack

    def attention_module(self, site: Site) -> nn.Module:
        return cast(Block, self.model.blocks[site.layer]).self_attention


def side_by_side(ids: Tensor, length: int) -> Iterator[Window]:
    """Windows of so many tokens, each token after the first predicted once."""
    for start in range(0, len(ids) - 1, length):
        piece = ids[start : start + length + 1]
        yield Window({"input_ids": piece[None, :-1]}, piece[1:])


def _until(most_tokens: int, lines: Iterable[Sequence[int]]) -> Iterator[Window]:
    """Lines as windows that predict nothing, up to so many tokens."""
    done = 0
    for ids in lines:
        yield Window({"input_ids": torch.tensor([ids])}, None)
        done += len(ids)
        if done >= most_tokens:
            return


@final
class OwnRunnable(RunnableModel):
    """A run of ours, or a Marian translator."""

    def __init__(self, path: Path) -> None:
        self._run = Run.open(path, "cpu")
        self.model: EncoderDecoder = self._run.model.eval()
        self.by, self.kind = "triptych", "pairs"

    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        tokenizers = self._run.tokenizers
        done = 0
        for number, line in enumerate(read_whole_text(text).splitlines(), start=1):
            source, tab, target = line.partition("\t")
            if not tab:
                raise UsageError(f"{text}, line {number}: expected a source, a tab and a target")
            (src,), (tgt,) = tokenizers.source.encode([source]), tokenizers.target.encode([target])
            end, begin = tokenizers.target.eos_id, tokenizers.target.bos_id
            wanted = torch.tensor([*tgt, end])
            inputs = {
                "src": torch.tensor([[*src, tokenizers.source.eos_id]]),
                "tgt": torch.tensor([[begin, *tgt]]),
            }
            yield Window(inputs, wanted)
            done += len(wanted)
            if done >= most_tokens:
                return

    def random_windows(self, seed: int) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(_RANDOM_WINDOWS):
            src = torch.randint(0, self.model.src_vocab_size, (1, 24), generator=generator)
            tgt = torch.randint(0, self.model.tgt_vocab_size, (1, 24), generator=generator)
            pad = self.model.pad_id
            filled = {
                "src": src.masked_fill(src == pad, pad + 1),
                "tgt": tgt.masked_fill(tgt == pad, pad + 1),
            }
            yield Window(filled, None)

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        self.seen = {}
        result: Tensor = self.model(window.inputs["src"], window.inputs["tgt"])
        return result[0]

    def watch(self, source: AttentionSource, sites: Sequence[Site]) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for site in sites:

            def hear(
                module: nn.Module, given: tuple[Any, ...], by_name: dict[str, Any], *, site: Site = site
            ) -> None:
                memory = by_name.get("memory") if site.kind == "cross" else None
                self.seen.setdefault(site.name, []).append(Seen(given[0].detach(), memory))

            layer = self.attention_module(site)
            stack.callback(layer.register_forward_pre_hook(hear, with_kwargs=True).remove)
        return stack

    def attention_module(self, site: Site) -> nn.Module:
        layers = {(str(there.stack), there.block): there.layer for there in attention_sites(self.model)}
        stack = "cross" if site.kind == "cross" else "encoder" if site.stack == "encoder" else "decoder"
        return layers[stack, site.layer]


def _fill_with_nan(model: nn.Module, names: Sequence[str]) -> None:
    """Fill parameters that the file lacks with NaN, so that outputs which depend on them are NaN."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            if name in parameters:
                parameters[name].fill_(torch.nan)


def _inputs_besides_text(model: Any) -> str:
    """What a model of `transformers` reads besides text: "images", "audio", …; "" if nothing."""
    given = getattr(model, "input_modalities", ())
    names = (given,) if isinstance(given, str) else given
    return " and ".join(
        {"image": "images", "video": "videos"}.get(name, name) for name in names if name != "text"
    )


def first_line(error: Exception) -> str:
    """The first line of an error that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def _renamed(name: str) -> Iterator[str]:
    """A module's name in the file, and its names in memory in versions of `transformers`."""
    yield name
    yield name.removeprefix("model.")
    yield name.replace("language_model.model.", "model.language_model.")
    yield f"model.{name}"
    new = name.replace("attention.attention.query", "attention.q_proj").replace(
        "attention.attention.key", "attention.k_proj"
    )
    yield new
    yield new.replace("encoder.layer.", "layers.")
