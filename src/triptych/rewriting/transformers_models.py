"""Models that `transformers` runs. Code that came with a checkpoint is never executed."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from triptych.checkpoints.layer import AttentionSource, Site
from triptych.errors import DataError
from triptych.rewriting.running import (
    RANDOM_WINDOWS,
    WINDOW_TOKENS,
    RunnableModel,
    Seen,
    Window,
    first_line,
    read_pairs,
    up_to,
    windows_of_text,
)
from triptych.storage.untrusted import LONGEST_TOKENIZER, require_regular


@final
class TransformersModel(RunnableModel):
    """A model of `transformers`, in float32."""

    def __init__(self, path: Path) -> None:
        import transformers  # large, and only needed here

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._path = path
        try:
            for file in path.iterdir():
                if not file.is_dir():
                    weights = file.suffix in (".safetensors", ".bin")
                    require_regular(file, None if weights else LONGEST_TOKENIZER)
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
        if self.kind == "pairs":
            return up_to(most_tokens, self._pairs(text))
        length = self._at_most(WINDOW_TOKENS)
        return windows_of_text(text, most_tokens, length, self._encode, causal=self.kind == "causal")

    def random_windows(self, seed: int) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(seed)
        size = int(self._config.get_text_config().vocab_size)
        length = self._at_most(32) - 4
        for _ in range(RANDOM_WINDOWS):
            ids = torch.randint(0, size, (1, max(4, length)), generator=generator)
            inputs = {"input_ids": ids}
            if self.kind == "pairs":
                inputs["decoder_input_ids"] = torch.randint(0, size, ids.shape, generator=generator)
            yield Window(inputs, None)

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        """One forward pass."""
        self.seen = {}
        try:
            found = self.model(**window.inputs)
        # What a model's own code says of tokens comes in many classes.
        except Exception as error:
            name, other = type(self.model).__name__, _inputs_besides_text(self.model)
            reads = f" (it reads {other} too)" if other else ""
            raise DataError(
                f"{self._path}: {name} does not run on token ids alone{reads}: {first_line(error)}"
            ) from error
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
        """The module of a tensor's name: the file's names and those in memory may differ at the front."""
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        for candidate in _renamed(name):
            if candidate in modules:
                return modules[candidate]
        ends = [own for own in modules if own and (own.endswith(f".{name}") or name.endswith(f".{own}"))]
        if not ends:
            raise DataError(f"{self._path}: transformers has no module {name}, whose input is to be measured")
        return modules[max(ends, key=len)]

    def _encode(self, text: str, special: bool, *, target: bool = False) -> list[int]:
        said = {"text_target": text} if target else {"text": text}
        ids: list[int] = self._tokenizer(**said, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    @cached_property
    def _tokenizer(self) -> Any:
        import transformers

        try:
            return transformers.AutoTokenizer.from_pretrained(
                self._path, local_files_only=True, trust_remote_code=False
            )
        # Whatever a tokenizer's own code says of its files, it comes in many classes.
        except Exception as error:
            raise DataError(f"{self._path}: its tokenizer cannot be loaded: {first_line(error)}") from error

    def _at_most(self, tokens: int) -> int:
        """A number of tokens, limited to the positions that the model has."""
        config = self._config.get_text_config()
        return min(tokens, int(getattr(config, "max_position_embeddings", None) or tokens))

    def _pairs(self, text: Path) -> Iterator[Window]:
        start = torch.tensor([self._config.decoder_start_token_id])
        for source, target in read_pairs(text):
            wanted = torch.tensor(self._encode(target, True, target=True)[: self._at_most(WINDOW_TOKENS)])
            read = self._encode(source, True)[: self._at_most(4 * WINDOW_TOKENS)]
            inputs = {
                "input_ids": torch.tensor([read]),
                "decoder_input_ids": torch.cat([start, wanted[:-1]])[None],
            }
            yield Window(inputs, wanted)


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
