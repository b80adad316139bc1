"""Conversion of vocabulary files older than `tokenizer.json` by `transformers` (the extra `run`)."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from tokenizers import AddedToken

from triptych.errors import DataError
from triptych.extras import quiet_transformers, require_extra
from triptych.running.text.sentencepiece import load_sentencepiece
from triptych.running.text.tokenizer_classes import CLASSES, class_of
from triptych.running.text.tokenizer_making import LARGEST_ID, Kind, require_added
from triptych.running.text.tokenizer_settings import Token, TokenizerSettings
from triptych.untrusted import LONGEST_TOKENIZER, read_limited

# Names of vocabulary files.
VOCABULARIES = (
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
)


def find_vocabulary(folder: Path) -> Path:
    """Return the vocabulary file of a checkpoint without `tokenizer.json`."""
    for name in VOCABULARIES:
        if (folder / name).exists() and (
            name != "vocab.json" or (folder / "merges.txt").exists()
        ):
            return folder / name
    raise DataError(
        f"{folder} has no tokenizer: none of tokenizer.json, vocab.json with merges.txt, "
        f"{', '.join(VOCABULARIES[1:])}; copy it from where the checkpoint comes from"
    )


def convert_vocabulary(
    path: Path, settings: TokenizerSettings
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Convert a vocabulary file by `transformers`; return the tokenizer and its named special tokens."""
    name = class_of(settings, is_byte_level=False)
    if name is None:
        stated = (
            settings.tokenizer_class or settings.model_type or "no class of tokenizers"
        )
        raise ValueError(
            f"the files name {stated}, which is known by its tokenizer.json alone; fetch that file"
        )
    libraries = ("transformers", "sentencepiece", "google.protobuf")[
        : 3 if path.suffix == ".model" else 1
    ]
    require_extra(
        "run",
        *libraries,
        what=f"a checkpoint with {path.name} and without tokenizer.json",
    )
    merges = [path.with_name("merges.txt")] if path.name == "vocab.json" else []
    try:
        files = {
            file.name: read_limited(file, LONGEST_TOKENIZER) for file in (path, *merges)
        }
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    kind, size = _look_at(path.name, files[path.name])
    if kind != (wanted := CLASSES[name].kind):
        raise ValueError(
            f"{name} has a vocabulary of {wanted}, and it is one of {kind}; fetch tokenizer.json"
        )
    import transformers  # large, and only needed here

    # `transformers` gets copies of these files only: settings of the checkpoint may name files elsewhere.
    with quiet_transformers(), TemporaryDirectory() as folder:
        for file, copied in files.items():
            (Path(folder) / file).write_bytes(copied)
        config = json.dumps(_settings_record(settings))
        (Path(folder) / "tokenizer_config.json").write_text(config, encoding="utf-8")
        made = getattr(transformers, name).from_pretrained(
            folder, local_files_only=True
        )
    inner: tokenizers.Tokenizer = made.backend_tokenizer
    if 2 * inner.get_vocab_size() < size:
        raise ValueError(f"{name} does not read it; fetch tokenizer.json")
    require_added(inner, settings)
    return inner, {
        key: token
        for key, token in made.special_tokens_map.items()
        if isinstance(token, str)
    }


def _look_at(name: str, content: bytes) -> tuple[Kind, int]:
    """Check a vocabulary file; return the kind of its vocabulary and its number of tokens."""
    # SentencePiece files state their algorithm in the trainer's specification: 1 is unigram, 2 is BPE.
    if name == "vocab.txt":
        return "words", content.count(b"\n")
    if name == "vocab.json":
        ids = json.loads(content)
        if not isinstance(ids, dict) or not all(
            isinstance(number, int) and 0 <= number <= LARGEST_ID
            for number in ids.values()
        ):
            raise ValueError("it is not a record of tokens and their ids")
        return "pairs", len(ids)
    processor = load_sentencepiece(content)
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    match proto.ModelProto.FromString(content).trainer_spec.model_type:
        case 1:
            return "unigrams", len(processor)
        case 2:
            return "pairs", len(processor)
        case _:
            raise ValueError(
                "it cuts text into words or characters, not by unigram or bpe"
            )


def _settings_record(settings: TokenizerSettings) -> dict[str, object]:
    """Return the settings for `tokenizer_config.json`: flags, numeric values and tokens, but not paths."""
    for name in ("extra_ids", "offset"):
        settings.count(name, 0)

    def plain(token: Token) -> object:
        return (
            token
            if isinstance(token, str)
            else {"__type": "AddedToken", **_flags(token)}
        )

    found: dict[str, object] = {
        name: value
        for name, value in settings.record.items()
        if value is None
        or isinstance(value, int | float)
        or name in ("src_lang", "mask_token_sent")
    }
    given = {name: plain(token) for name, token in settings.given.items()}
    found |= {name: token for name, token in given.items() if name.endswith("_token")}
    own = {name: token for name, token in given.items() if not name.endswith("_token")}
    if own or settings.extra is not None:
        found["extra_special_tokens"] = own or [
            plain(token) for token in settings.extra or ()
        ]
    if settings.added:
        found["added_tokens_decoder"] = {
            str(i): _flags(token) for i, token in settings.added.items()
        }
    return found


def _flags(token: AddedToken) -> dict[str, object]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(token, name) for name in names}
