"""Conversion of runs and their tokenizers to the format of `transformers`.

A run that continued from a checkpoint keeps the format of its family. A model trained with a recipe is
written in a fitting format (`target_formats`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych.converting import target_formats as formats
from triptych.converting.output_checks import (
    TOLERANCES,
    ConversionCheck,
    WrittenModel,
    compare_logits,
    compare_tokenizers,
    compute_logits,
    random_pairs,
)
from triptych.converting.plain import plain_model
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.core.models import LanguageModel, find_config, write_weights
from triptych.errors import DataError
from triptych.extras import is_installed, quiet_transformers
from triptych.files import write_json, write_text
from triptych.running.opening import (
    TARGET_FOLDER,
    Reader,
    read_marian,
    write_tokenizers,
)
from triptych.running.text import (
    PretrainedTokenizer,
    SentencePieceTokenizer,
    SentenceTokenizer,
)
from triptych.training.continuing import copy_checkpoint, goes_on

_LOGITS = "logits of the folder, read by {}, and of the model"
_IDS = "token ids of AutoTokenizer and ours"
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_SAMPLES = (
    "A little girl, 3 years old: it costs $12.50!",
    "  two  spaces\tand a tab\n",
    "snake_case é ½ 🙂",
    "",
)


def write_hf_translator(run: Reader, folder: Path) -> WrittenModel:
    """Write a folder for `AutoModelForSeq2SeqLM` and `AutoTokenizer`."""
    formats.translator_type(run.encoder_decoder)  # raises before any work is done
    plain = plain_model(run.encoder_decoder, "Hugging Face's format")
    made = formats.translator(plain, run.tokenizers, run.decoding.max_extra_tokens)
    architecture = str(made.settings["model_type"])
    _write_checkpoint(folder, made.settings, made.tensors)
    write_json(folder / "generation_config.json", _generation(made.settings, run))
    write_tokenizers(
        run.tokenizers, find_config(run.encoder_decoder).max_source_tokens + 1, folder
    )
    write_text(folder / "README.md", _hf_readme(run, architecture))
    checks = [_check_read_again(run, folder)] if architecture == "marian" else []
    checks += _with_transformers(_check_logits, _check_ids, run, folder)
    parameters = sum(parameter.numel() for parameter in plain.model.parameters())
    return WrittenModel(
        architecture, parameters, (*plain.done, *made.done), tuple(checks)
    )


def write_hf_language_model(opened: Reader, folder: Path) -> WrittenModel:
    """Write a folder for `AutoModelForCausalLM` or `AutoModelForMaskedLM`, and for `AutoTokenizer`."""
    # A run that continued from a checkpoint can be copied; other models are exported.
    if goes_on(opened.folder):
        copy_checkpoint(opened.folder, folder)
        name = "as the checkpoint that the run went on with"
        folded = tuple[str, ...]()
    else:
        made = formats.language_model(opened.language_model)
        tokenizer = opened.tokenizer
        assert isinstance(tokenizer, PretrainedTokenizer)
        ids = {
            f"{kind}_token_id": getattr(tokenizer, f"{kind}_id")
            for kind in ("bos", "eos", "pad")
        }
        _write_checkpoint(
            folder, {**made.settings, **ids, "use_cache": True}, made.tensors
        )
        tokenizer.save_files(folder)
        name = str(made.settings["model_type"])
        folded = made.done
    again = load_language_model(folder)
    model = opened.language_model
    checks = [_compare(model, again.eval(), "triptych")]
    checks += _with_transformers(
        _check_language_model, _check_ids_of_texts, opened, folder
    )
    count = sum(parameter.numel() for parameter in again.parameters())
    return WrittenModel(name, count, folded, tuple(checks))


def _write_checkpoint(
    folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    write_json(folder / "config.json", settings)
    write_weights(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def _generation(settings: Mapping[str, Any], run: Reader) -> dict[str, Any]:
    """Build `generation_config.json`."""
    decoding = run.decoding
    names = ("bos", "decoder_start", "eos", "forced_eos", "pad")
    record: dict[str, Any] = {
        f"{name}_token_id": settings[f"{name}_token_id"] for name in names
    }
    record |= {
        "bad_words_ids": [
            [token]
            for token in dict.fromkeys((record["pad_token_id"], record["bos_token_id"]))
        ],
        "max_length": settings["max_position_embeddings"],
        "num_beams": decoding.beam_size,
        # As in triptych's search, the remaining probabilities are normalised to a sum of 1.
        "renormalize_logits": True,
    }
    if decoding.beam_size > 1:
        record["length_penalty"] = decoding.alpha
        record["early_stopping"] = "never" if decoding.stop == "certain" else True
    return record


def _with_transformers(
    logits: Any, ids: Any, opened: Reader, folder: Path
) -> list[ConversionCheck]:
    """Run both checks with `transformers`, or record them as not run if it is missing."""
    if not is_installed("transformers"):
        note = "transformers is not installed: pip install 'triptych[convert]'"
        return [
            ConversionCheck(what, False, note=note)
            for what in (_LOGITS.format("transformers"), _IDS)
        ]
    with quiet_transformers(), torch.no_grad():
        return [logits(opened, folder), *ids(opened, folder)]


def _check_read_again(run: Reader, folder: Path) -> ConversionCheck:
    """Check the folder with triptych's reader of Marian checkpoints."""
    model, tokenizers = read_marian(folder)
    for ours, found in (
        (run.tokenizers.source, tokenizers.source),
        (run.tokenizers.target, tokenizers.target),
    ):
        compare_tokenizers("tokenizers of the folder", ours, partial(_with_end, found))
    target = run.tokenizers.target
    pairs = random_pairs(run.encoder_decoder, target.bos_id, target.eos_id)
    return compare_logits(
        _LOGITS.format("triptych"),
        compute_logits(run.encoder_decoder, pairs),
        compute_logits(model, pairs),
        TOLERANCES[model.decoder.embeddings.table.weight.dtype],
    )


def _with_end(tokenizer: SentenceTokenizer, text: str) -> list[int]:
    return [*tokenizer.encode([text])[0], tokenizer.eos_id]


def _check_logits(run: Reader, folder: Path) -> ConversionCheck:
    from transformers import AutoModelForSeq2SeqLM

    theirs = AutoModelForSeq2SeqLM.from_pretrained(
        folder, dtype="auto", **_LOCAL
    ).eval()
    target = run.tokenizers.target
    pairs = random_pairs(run.encoder_decoder, target.bos_id, target.eos_id)
    found = theirs(
        input_ids=pairs.src,
        attention_mask=pairs.mask(run.encoder_decoder.pad_id).long(),
        decoder_input_ids=pairs.tgt_in,
    ).logits
    dtype = run.encoder_decoder.decoder.embeddings.table.weight.dtype
    if found.dtype != dtype:
        raise DataError(f"{folder} is read as {found.dtype}, and the model is {dtype}")
    # Marian's positions in transformers are rounded to float32 in any dtype.
    tolerance = (
        max(TOLERANCES[dtype], 1e-6)
        if theirs.config.model_type == "marian"
        else TOLERANCES[dtype]
    )
    what = _LOGITS.format("transformers")
    own = compute_logits(run.encoder_decoder, pairs)
    return compare_logits(what, own, found, tolerance, f"{pairs.tgt_in.numel()} tokens")


def _check_ids(run: Reader, folder: Path) -> list[ConversionCheck]:
    from transformers import AutoTokenizer

    # A pair of SentencePiece models is a single tokenizer in transformers.
    pieces = isinstance(run.tokenizers.source, SentencePieceTokenizer)
    tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    checks = [
        compare_tokenizers(
            f"{_IDS}, source",
            run.tokenizers.source,
            lambda text: list(tokenizer(text)["input_ids"]),
        )
    ]
    target = tokenizer
    if not run.tokenizers.joint and not pieces:
        target = AutoTokenizer.from_pretrained(folder / TARGET_FOLDER, **_LOCAL)
    checks.append(
        compare_tokenizers(
            f"{_IDS}, target",
            run.tokenizers.target,
            lambda text: list(target(text_target=text)["input_ids"]),
            lambda ids: str(target.decode(ids, skip_special_tokens=True)),
        )
    )
    return checks


def _check_language_model(opened: Reader, folder: Path) -> ConversionCheck:
    import transformers

    auto = (
        transformers.AutoModelForCausalLM
        if opened.language_model.causal
        else transformers.AutoModelForMaskedLM
    )
    theirs = auto.from_pretrained(folder, dtype="auto", **_LOCAL).eval()
    return _compare(opened.language_model, theirs, "transformers")


@torch.no_grad()
def _compare(model: LanguageModel, again: Any, library: str) -> ConversionCheck:
    length = min(24, model.max_tokens or 24)
    ids = torch.randint(
        model.vocab_size, (3, length), generator=torch.Generator().manual_seed(0)
    )
    tolerance = TOLERANCES[model.embeddings.table.weight.dtype]
    return compare_logits(
        _LOGITS.format(library), model.eval()(ids).logits, again(ids).logits, tolerance
    )


def _check_ids_of_texts(opened: Reader, folder: Path) -> list[ConversionCheck]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    for text in _SAMPLES:
        found = list(tokenizer(text)["input_ids"])
        (own,) = opened.tokenizer.encode(text, add_special=True, parse_special=True)
        if found != own:
            raise DataError(
                f"{_IDS}: {text!r} is {found} there and {own} here: nothing is written"
            )
    return [ConversionCheck(_IDS, True, note=f"{len(_SAMPLES)} texts")]


def _hf_readme(run: Reader, architecture: str) -> str:
    own = isinstance(run.tokenizers.source, SentencePieceTokenizer)
    own_target = not run.tokenizers.joint and not own
    target = (
        f'target = AutoTokenizer.from_pretrained("path/to/this/folder/{TARGET_FOLDER}")'
        if own_target
        else "target = source"
    )
    alpha = run.decoding.alpha
    penalty = (
        ""
        if alpha == 0
        else f"""
triptych divides log-probabilities by ((5 + n) / 6)^{alpha}, transformers by n^{alpha}: with the length
penalty off (`length_penalty=0.0`, `--alpha 0`) both search alike.
"""
    )
    return f"""---
library_name: transformers
pipeline_tag: translation
---

# A translation model, converted with triptych

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

source = AutoTokenizer.from_pretrained("path/to/this/folder")
{target}
model = AutoModelForSeq2SeqLM.from_pretrained("path/to/this/folder")
batch = source(["A sentence."], return_tensors="pt", padding=True)
print(target.batch_decode(model.generate(**batch), skip_special_tokens=True))
```

Architecture: {architecture}. Sources have at most {run.encoder_decoder.max_source_tokens} tokens.
{penalty}"""
