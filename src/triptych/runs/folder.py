"""Run folders: what lies in one, and the translator that it holds.

A run folder holds `config.json`, `model.safetensors`, `tokenizer.json` (and `tokenizer.target.json` if
the two sides have one each), `recipe.toml`, `metrics.jsonl`, `README.md` and `state/`. A model that was
converted has no recipe: `decoding.toml` says how it is searched.
"""

import tomllib
from pathlib import Path
from typing import Any, final

import tomli_w
from pydantic import ValidationError

from triptych.checkpoints import MarianCheckpoint, model_type, read_marian
from triptych.checkpoints.own import is_own
from triptych.checkpoints.translators import Languages, TranslatorCheckpoint, read_translator
from triptych.decoding import Precision, SearchOptions, Stop, Translator
from triptych.errors import DataError, UsageError
from triptych.files import write_text
from triptych.models import EncoderDecoder, read_model, write_model
from triptych.models.device import find_device
from triptych.storage.untrusted import LONGEST_TEXT, read_json, read_limited
from triptych.text import TokenizerPair
from triptych.training import DecodingConfig, Recipe, read_recipe, require_translation
from triptych.training.state import RUN_FILES, own_files

RECIPE, DECODING, SUMMARY = "recipe.toml", "decoding.toml", "summary.json"


def holds_run(folder: Path) -> bool:
    """Whether a folder is a run's: its recipe and its configuration, ours or a checkpoint's, are there."""
    return (folder / RECIPE).exists() and (is_own(record := settings(folder)) or "model_type" in record)


def require_place(folder: Path, *, force: bool) -> None:
    """A run can be made here, and nothing is lost by it.

    Raises:
        UsageError: it cannot, or the folder holds something and `force` is not given.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a folder for the run (--out)")
    if holds_run(folder):
        raise UsageError(
            f"{folder} already has a run: continue it (--resume {folder}) or give another folder (--out)"
        )
    if (folder / DECODING).exists() and is_own(settings(folder)):
        raise UsageError(f"{folder} has a converted model: give another folder (--out)")
    found = sorted(path.name for path in folder.iterdir())
    if found and not force:
        shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise UsageError(
            f"{folder} holds other files ({shown}): name a folder that is new or empty (--out); --force puts "
            "the run among them, and replaces those with the name of a run's file"
        )
    for name in RUN_FILES:
        if name != "." and (folder / name).exists() and not _is_empty(folder / name):
            raise UsageError(f"{folder / name} is in the way: give another folder (--out)")
    if taken := [path for path in own_files(folder) if path.is_dir()]:
        raise UsageError(f"{taken[0]} is a folder, where a run needs a file: give another folder (--out)")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def settings(folder: Path) -> dict[str, Any]:
    """What a folder's `config.json` says; nothing if it is none."""
    try:
        return read_json(folder / "config.json")
    except DataError:
        return {}


@final
class Run:
    """A finished run, opened; or a converted model or a checkpoint of others, which have no recipe."""

    def __init__(
        self,
        folder: Path,
        model: EncoderDecoder,
        tokenizers: TokenizerPair,
        recipe: Recipe | None,
        decoding: DecodingConfig,
    ) -> None:
        self.folder = folder
        self.model = model
        self.tokenizers = tokenizers
        self.recipe = recipe
        self.decoding = decoding

    @classmethod
    def open(cls, folder: Path, device: str = "auto", languages: Languages | None = None) -> "Run":
        """Read a run folder, that of a converted model, or an encoder-decoder in Hugging Face's format.

        Args:
            folder: where it is.
            device: where the model goes; "auto" takes a GPU if there is one.
            languages: of a checkpoint of several languages; those that its files name if None.

        Raises:
            UsageError: there is no such folder, no such device, or languages that the model does not have.
            DataError: files missing or damaged, or a family that cannot be run.
        """
        if not folder.is_dir():
            raise UsageError(f"the run folder {folder} does not exist")
        recipe = None
        if (folder / RECIPE).exists():
            recipe = require_translation(read_recipe(folder / RECIPE), folder)
            decoding = recipe.decoding
        elif (folder / DECODING).exists():
            decoding = _read_decoding(folder / DECODING)
        else:
            return cls._open_checkpoint(folder, device, languages)
        if languages is not None:
            raise UsageError(f"{folder} is a run of one pair of languages: leave out --languages")
        model = read_model(folder).to(find_device(device))
        tokenizers = TokenizerPair.load(folder)
        if recipe is not None:
            check_tokenizers(tokenizers, recipe, folder)
        sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
        if sizes != (model.src_vocab_size, model.tgt_vocab_size):
            raise DataError(
                f"{folder}: the tokenizers have {sizes[0]} and {sizes[1]} tokens, the model "
                f"{model.src_vocab_size} and {model.tgt_vocab_size}: the files come from different runs"
            )
        return cls(folder, model, tokenizers, recipe, decoding)

    @classmethod
    def _open_checkpoint(cls, folder: Path, device: str, languages: Languages | None) -> "Run":
        found = model_type(folder)
        if found is None:
            raise DataError(f"{folder} is not a run folder: it has no {RECIPE}")
        checkpoint: MarianCheckpoint | TranslatorCheckpoint
        stops: dict[str, str] = {}
        if found == "marian" and languages is None:
            checkpoint = read_marian(folder)
        else:
            checkpoint = read_translator(folder, find_device(device), languages)
            stops = {"stop": "full"} if checkpoint.stops_when_full else {}
        beams = {} if checkpoint.num_beams is None else {"beam_size": checkpoint.num_beams}
        decoding = DecodingConfig.model_validate({**beams, **stops, "alpha": checkpoint.length_penalty})
        return cls(folder, checkpoint.model.to(find_device(device)), checkpoint.tokenizers, None, decoding)

    def require_recipe(self) -> None:
        """Its model is a recipe's or Marian's, which can be written in other formats.

        Raises:
            UsageError: it is not.
        """
        if self.model.recipe is None:
            raise UsageError(
                f"{self.folder} is a checkpoint of {model_type(self.folder)}, which is run here, and not "
                "converted: of other libraries' translators only Marian's are, with scaled embeddings and "
                "feed-forward layers of one width"
            )

    def save(self, folder: Path) -> None:
        """Write model, tokenizers and the way to search, without a recipe; `open` reads them again."""
        write_model(self.model, folder)
        self.tokenizers.save(folder)
        write_text(folder / DECODING, tomli_w.dumps(self.decoding.model_dump()))

    def search_options(
        self,
        beam_size: int | None = None,
        alpha: float | None = None,
        num_best: int = 1,
        max_extra_tokens: int | None = None,
        stop: Stop | None = None,
        max_source_tokens: int | None = None,
    ) -> SearchOptions:
        """The recipe's or the checkpoint's way to search, with what is given changed.

        Asking for more translations than its beam holds widens the beam, unless a beam is given.

        Raises:
            UsageError: values that do not go together.
        """
        decoding = self.decoding
        try:
            return SearchOptions(
                beam_size=max(decoding.beam_size, num_best) if beam_size is None else beam_size,
                alpha=decoding.alpha if alpha is None else alpha,
                max_extra_tokens=max_extra_tokens or decoding.max_extra_tokens,
                num_best=num_best,
                stop=stop or decoding.stop,
                max_source_tokens=max_source_tokens,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None

    def translator(
        self, options: SearchOptions | None = None, *, precision: Precision = "fp32", workers: int = 1
    ) -> Translator:
        """A translator with the run's own way to search unless another is given."""
        options = options or self.search_options()
        return Translator(self.model, self.tokenizers, options, precision=precision, workers=workers)


def _read_decoding(path: Path) -> DecodingConfig:
    """How a converted model is searched.

    Raises:
        DataError: not TOML, or not such settings.
    """
    try:
        return DecodingConfig.model_validate(tomllib.loads(read_limited(path, LONGEST_TEXT).decode()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path}: {where}: {first['msg']}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def check_tokenizers(tokenizers: TokenizerPair, recipe: Recipe, folder: Path) -> None:
    """Check that a run's folder has as many tokenizers as its recipe says.

    Raises:
        DataError: the target's own is missing, or left over.
    """
    if tokenizers.joint != recipe.tokenizer.joint:
        state = "left over" if recipe.tokenizer.joint else "missing"
        raise DataError(
            f"{folder}/tokenizer.target.json is {state}: the recipe says tokenizer.joint = "
            f"{str(recipe.tokenizer.joint).lower()}"
        )
