"""Models run by `transformers`, for families without a triptych implementation.

Code shipped with a checkpoint is never executed.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_layers import AttentionSource, Site
from triptych.errors import DataError, UsageError, first_line
from triptych.extras import is_installed
from triptych.running.opening.reader import Reader
from triptych.running.opening.readers_of_sources import NotFiniteError, open_reader
from triptych.running.opening.text_reader import (
    RANDOM_TOKENS,
    RANDOM_WINDOWS,
    WINDOW_TOKENS,
    Output,
    Seen,
    TextKind,
    TextReader,
    Window,
)
from triptych.untrusted import LONGEST_TOKENIZER, require_regular

_NO_TRANSFORMERS = (
    "transformers, which would run it, is not installed: pip install 'triptych[run]'"
)


@final
class TransformersReader(TextReader):
    """A model run by `transformers` in float32."""

    def __init__(self, path: Path, tokenizer: Path | None = None) -> None:
        import transformers  # large, and only needed here

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._path = path
        self._tokenizer_folder = path if tokenizer is None else tokenizer
        self.name = str(path)
        try:
            for file in path.iterdir():
                if not file.is_dir():
                    weights = file.suffix in (".safetensors", ".bin")
                    require_regular(file, None if weights else LONGEST_TOKENIZER)
            config = transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
            named = getattr(config, "architectures", None)
            loader = (
                _class_named(named[0]) if named else _class_of_tensors(path, config)
            )
            name = named[0] if named else loader.__name__
            model, found = _loaded(loader, path)
            self.model = model.eval()
        # A model's own code raises errors of many classes.
        except Exception as error:
            raise DataError(
                f"{path}: transformers cannot load it: {first_line(error)}"
            ) from error
        if self.model.main_input_name != "input_ids":
            raise DataError(
                f"{name} reads {_inputs_besides_text(self.model) or 'no token ids'}, not text"
            )
        self._missing = sorted(found["missing_keys"])
        _fill_with_nan(self.model, self._missing)
        self.by = f"transformers {transformers.__version__}"
        # The class of an encoder alone has changed its configuration.
        self._config: Any = model.config
        self._kind: TextKind = (
            "pairs"
            if self._config.is_encoder_decoder
            else "causal"
            if "CausalLM" in name or "LMHead" in name
            else "encoder"
        )

    @property
    def kind(self) -> TextKind:
        return self._kind

    def copied(self) -> "TransformersReader":
        found = copy.copy(self)
        found.model = copy.deepcopy(self.model)
        return found

    def random_windows(self, seed: int) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(seed)
        size = int(self._config.get_text_config().vocab_size)
        length = min(RANDOM_TOKENS, self._longest()) - 4
        for _ in range(RANDOM_WINDOWS):
            ids = torch.randint(0, size, (1, max(4, length)), generator=generator)
            inputs = {"input_ids": ids}
            if self.kind == "pairs":
                inputs["decoder_input_ids"] = torch.randint(
                    0, size, ids.shape, generator=generator
                )
            yield Window(inputs)

    @property
    def output(self) -> Output:
        model: Any = self.model
        name = type(model).__name__
        # Some classes with a head are named like bare models, such as GPT2LMHeadModel.
        has_table = model.get_output_embeddings() is not None
        if name.endswith(("Model", "Encoder")) and not has_table:
            return "hidden states"
        if name.endswith("QuestionAnswering"):
            return "numbers"
        if name.endswith(
            ("Classification", "MultipleChoice", "NextSentencePrediction")
        ):
            several = self._config.problem_type == "multi_label_classification"
            one = name.endswith("MultipleChoice") or self._config.num_labels == 1
            return "numbers" if one or several else "classes"
        return "tokens"

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        try:
            found = self.model(**self._given(window))
        # A model's own code raises errors of many classes.
        except Exception as error:
            name = type(self.model).__name__
            other = _inputs_besides_text(self.model)
            reads = f" (it reads {other} too)" if other else ""
            raise DataError(
                f"{self._path}: {name} does not run on token ids alone{reads}: {first_line(error)}"
            ) from error
        compared = self._compared_part(found)
        result = (
            compared if compared.dim() == 2 else compared[0]
        )  # a text of one class has one row
        if self._missing and result.isnan().any():
            raise DataError(f"{self._path}: there is no tensor for {self._missing[0]}")
        return result

    def _given(self, window: Window) -> dict[str, Tensor]:
        """Return the arguments of a call of the model; multiple choice gets the text as its only choice."""
        if type(self.model).__name__.endswith("MultipleChoice"):
            return {name: ids[None] for name, ids in window.inputs.items()}
        return dict(window.inputs)

    def _compared_part(self, found: Any) -> Tensor:
        """Return the logits (of start and end, if it predicts spans), or else the last hidden states."""
        if found.get("start_logits") is not None:
            return torch.stack((found["start_logits"], found["end_logits"]), dim=-1)
        for name in ("logits", "prediction_logits", "last_hidden_state"):
            result: Tensor | None = found.get(name)
            if result is not None:
                return result
        given = ", ".join(map(str, found))
        raise DataError(
            f"{self._path}: {type(self.model).__name__} gives {given}, none of which is compared"
        )

    def encode(self, text: str) -> list[int]:
        """Encode a text with special tokens."""
        return self._encode(text, True)

    @torch.inference_mode()
    def attentions(self, window: Window) -> dict[str, Any]:
        """Return attention weights `[1, heads, queries, keys]` per layer by kind; None if not available."""
        found = self.model(**self._given(window), output_attentions=True)
        if self.kind == "pairs":
            return {
                kind: found.get(f"{kind}_attentions")
                for kind in ("encoder", "decoder", "cross")
            }
        return dict.fromkeys(("encoder", "decoder"), found.get("attentions"))

    def inputs(
        self, window: Window, source: AttentionSource, sites: Sequence[Site]
    ) -> dict[str, list[Seen]]:
        found: dict[str, list[Seen]] = {}

        def record(
            module: nn.Module, given: tuple[Any, ...], *, site: Site, key: bool
        ) -> None:
            x = given[0].detach()
            x = x.reshape(1, -1, x.shape[-1])  # some layers concatenate all sequences
            seen = found.setdefault(site.name, [])
            seen.append(Seen(seen.pop().x, x) if key else Seen(x, None))

        with contextlib.ExitStack() as stack:
            for site in sites:
                names = source.input_modules(site)
                for name, key in zip(
                    names if site.kind == "cross" else names[:1],
                    (False, True),
                    strict=False,
                ):
                    hook = partial(record, site=site, key=key)
                    stack.callback(
                        self._module(name).register_forward_pre_hook(hook).remove
                    )
            self.outputs(window)
        return found

    def attention_modules(self, site: Site) -> Sequence[nn.Module]:
        """Return the module with the closest name in memory to the layer's name in the file."""
        return [self._module(site.module)]

    def _module(self, name: str) -> nn.Module:
        """Return the module for a name in the file; names in memory may have another prefix."""
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        for candidate in _renamed(name):
            if candidate in modules:
                return modules[candidate]
        ends = [
            own
            for own in modules
            if own and (own.endswith(f".{name}") or name.endswith(f".{own}"))
        ]
        if not ends:
            raise DataError(
                f"{self._path}: transformers has no module {name}, whose input is to be measured"
            )
        return modules[max(ends, key=len)]

    def _encode(self, text: str, special: bool, *, target: bool = False) -> list[int]:
        said = {"text_target": text} if target else {"text": text}
        ids: list[int] = self._tokenizer(
            **said, add_special_tokens=special, verbose=False
        )["input_ids"]
        return ids

    @cached_property
    def _tokenizer(self) -> Any:
        import transformers

        try:
            return transformers.AutoTokenizer.from_pretrained(
                self._tokenizer_folder, local_files_only=True, trust_remote_code=False
            )
        # A tokenizer's own code raises errors of many classes.
        except Exception as error:
            raise DataError(
                f"{self._path}: its tokenizer cannot be loaded: {first_line(error)}"
            ) from error

    def _longest(self) -> int:
        config = self._config.get_text_config()
        return int(
            getattr(config, "max_position_embeddings", None) or 4 * WINDOW_TOKENS
        )

    def _pair(self, source: str, target: str) -> Window:
        start = torch.tensor([self._config.decoder_start_token_id])
        longest = self._longest()
        wanted = torch.tensor(
            self._encode(target, True, target=True)[: min(WINDOW_TOKENS, longest)]
        )
        read = self._encode(source, True)[: min(4 * WINDOW_TOKENS, longest)]
        shifted = torch.cat([start, wanted[:-1]])[None]
        return Window(
            {"input_ids": torch.tensor([read]), "decoder_input_ids": shifted}, wanted
        )


def _class_named(name: str) -> Any:
    """Return a class of `transformers`, `AutoModel` for unknown names."""
    import transformers

    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(
        found, transformers.PreTrainedModel
    )
    return found if is_model else transformers.AutoModel


def _class_of_tensors(path: Path, config: Any) -> Any:
    """Return the class with the tensors of the files, `AutoModel` if no class has these tensors."""
    import transformers

    heads = (
        (
            transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
            transformers.AutoModelForSeq2SeqLM,
        ),
        (transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.AutoModelForMaskedLM),
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
    )
    known = [loader for mapping, loader in heads if type(config) in mapping]
    for loader in (transformers.AutoModel, *known):
        model, found = _loaded(loader, path)
        if not found["missing_keys"] and not found["unexpected_keys"]:
            return type(model)
    return transformers.AutoModel


def _loaded(loader: Any, path: Path) -> Any:
    """Return a model in float32, and a record of the tensors that the files lack or have in excess."""
    return loader.from_pretrained(
        path,
        local_files_only=True,
        trust_remote_code=False,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )


def _fill_with_nan(model: nn.Module, names: Sequence[str]) -> None:
    """Fill parameters missing in the file with NaN, so that dependent outputs become NaN."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            if name in parameters:
                parameters[name].fill_(torch.nan)


def _inputs_besides_text(model: Any) -> str:
    """Return the further input modalities of a model: "images", "audio", …; "" for text alone."""
    given = getattr(model, "input_modalities", ())
    names = (given,) if isinstance(given, str) else given
    return " and ".join(
        {"image": "images", "video": "videos"}.get(name, name)
        for name in names
        if name != "text"
    )


def _renamed(name: str) -> Iterator[str]:
    """Yield a module's name in the file, then its names in memory in versions of `transformers`."""
    yield name
    yield name.removeprefix("model.")
    yield name.replace("language_model.model.", "model.language_model.")
    yield f"model.{name}"
    new = name.replace("attention.attention.query", "attention.q_proj").replace(
        "attention.attention.key", "attention.k_proj"
    )
    yield new
    yield new.replace("encoder.layer.", "layers.")


def open_text_reader(path: Source | Path) -> TextReader:
    """Open a model on the CPU, in float32; recipe and Marian translators keep their dtype."""
    source = find_source(path)
    try:
        return _own(source)
    except (DataError, UsageError) as error:
        if _is_run_by_us_alone(source) or isinstance(error, NotFiniteError):
            raise
        if not is_installed("transformers"):
            raise UsageError(f"{error}; {_NO_TRANSFORMERS}") from None
    return TransformersReader(source.folder, source.tokenizer_folder)


def why_not_run(path: Source | Path) -> str:
    """Return the reason why a model cannot be run here; "" if it can."""
    if isinstance(path, Path) and not path.is_dir():
        return "it is not a folder"
    source = find_source(path)
    if _is_run_by_us_alone(source) or is_installed("transformers"):
        return ""
    try:
        _own(source)
    except (DataError, UsageError) as error:
        return f"{error}; {_NO_TRANSFORMERS}"
    return ""


def _own(source: Source) -> Reader:
    """Open a model run by triptych."""
    dtype = None if _is_run_by_us_alone(source) else torch.float32
    reader = open_reader(source, "cpu", dtype)
    if not source.is_own and not reader.has_tokenizer:
        reader.tokenizer.encode("")  # raises the error about the missing tokenizer
    if reader.translates:
        if reader.unsearched is not None:
            raise reader.unsearched
        return reader
    reader.require_vocabulary()
    checkpoint = open_checkpoint(source, mapped=True)
    return reader.with_longest(checkpoint.longest_text(checkpoint.sites[0]))


def _is_run_by_us_alone(source: Source) -> bool:
    """Return True for a triptych translator or a Marian translator."""
    return source.translates and (
        source.is_own or source.record.get("model_type") == "marian"
    )
