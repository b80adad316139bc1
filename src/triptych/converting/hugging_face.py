"""A model of ours as a folder of Hugging Face's."""

from functools import partial
from pathlib import Path

import torch

from triptych.checkpoints.marian import read_marian
from triptych.checkpoints.marian_tokenizers import TARGET_FOLDER, write_tokenizers
from triptych.checkpoints.marian_writing import Searching, architecture_for, write_checkpoint
from triptych.converting.checks import (
    TOLERANCES,
    ConversionCheck,
    Written,
    compare_logits,
    compare_tokenizers,
    logits_of,
    quiet_transformers,
    random_pairs,
)
from triptych.converting.plain_heads import plain_model
from triptych.errors import DataError
from triptych.extras import is_installed
from triptych.opening import OpenedModel
from triptych.text import SentencePieceTokenizer, SentenceTokenizer

_LOGITS = "logits of the folder, read by transformers, and of the model"
_IDS = "token ids of AutoTokenizer and ours"


def write_hf(run: OpenedModel, folder: Path) -> Written:
    """Fill a folder that `AutoModelForSeq2SeqLM` and `AutoTokenizer` read."""
    architecture_for(run.encoder_decoder)
    plain = plain_model(run.encoder_decoder, "Hugging Face's format")
    decoding = run.decoding
    searching = Searching(
        decoding.beam_size, decoding.alpha, decoding.max_extra_tokens, decoding.stop == "certain"
    )
    architecture = write_checkpoint(plain.model, plain.num_heads, run.tokenizers, searching, folder)
    write_tokenizers(run.tokenizers, run.encoder_decoder.config.max_source_tokens + 1, folder)
    (folder / "README.md").write_text(_readme(run, architecture), encoding="utf-8")
    checks = [_check_read_again(run, folder)] if architecture == "marian" else []
    checks += _check_with_transformers(run, folder)
    parameters = sum(parameter.numel() for parameter in plain.model.parameters())
    return Written(architecture, parameters, plain.done, tuple(checks))


def _check_read_again(run: OpenedModel, folder: Path) -> ConversionCheck:
    """Check the folder with our own reader of Marian checkpoints."""
    model, tokenizers = read_marian(folder)
    for ours, found in (
        (run.tokenizers.source, tokenizers.source),
        (run.tokenizers.target, tokenizers.target),
    ):
        compare_tokenizers("tokenizers of the folder", ours, partial(_with_end, found))
    target = run.tokenizers.target
    pairs = random_pairs(run.encoder_decoder, target.bos_id, target.eos_id)
    return compare_logits(
        "logits of the folder, read by triptych, and of the model",
        logits_of(run.encoder_decoder, pairs),
        logits_of(model, pairs),
        TOLERANCES[model.tgt_embedding.weight.dtype],
    )


def _with_end(tokenizer: SentenceTokenizer, text: str) -> list[int]:
    return [*tokenizer.encode([text])[0], tokenizer.eos_id]


def _check_with_transformers(run: OpenedModel, folder: Path) -> list[ConversionCheck]:
    if not is_installed("transformers"):
        note = "transformers is not installed: pip install 'triptych[convert]'"
        return [ConversionCheck(_LOGITS, False, note=note), ConversionCheck(_IDS, False, note=note)]
    with quiet_transformers():
        return [_check_logits(run, folder), *_check_ids(run, folder)]


def _check_logits(run: OpenedModel, folder: Path) -> ConversionCheck:
    from transformers import AutoModelForSeq2SeqLM

    theirs = AutoModelForSeq2SeqLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, trust_remote_code=False
    ).eval()
    target = run.tokenizers.target
    pairs = random_pairs(run.encoder_decoder, target.bos_id, target.eos_id)
    with torch.no_grad():
        found = theirs(
            input_ids=pairs.src,
            attention_mask=pairs.mask(run.encoder_decoder.pad_id).long(),
            decoder_input_ids=pairs.tgt_in,
        ).logits
    dtype = run.encoder_decoder.tgt_embedding.weight.dtype
    if found.dtype != dtype:
        raise DataError(f"{folder} is read as {found.dtype}, and the model is {dtype}")
    # Marian's positions in transformers are numbers of float32 in any dtype.
    tolerance = max(TOLERANCES[dtype], 1e-6) if theirs.config.model_type == "marian" else TOLERANCES[dtype]
    return compare_logits(
        _LOGITS, logits_of(run.encoder_decoder, pairs), found, tolerance, f"{pairs.tgt_in.numel()} tokens"
    )


def _check_ids(run: OpenedModel, folder: Path) -> list[ConversionCheck]:
    from transformers import AutoTokenizer

    pieces = isinstance(run.tokenizers.source, SentencePieceTokenizer)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    checks = [
        compare_tokenizers(
            f"{_IDS}, source",
            run.tokenizers.source,
            lambda text: list(tokenizer(text)["input_ids"]),
        )
    ]
    target = tokenizer
    if not run.tokenizers.joint and not pieces:
        target = AutoTokenizer.from_pretrained(
            folder / TARGET_FOLDER, local_files_only=True, trust_remote_code=False
        )
    checks.append(
        compare_tokenizers(
            f"{_IDS}, target",
            run.tokenizers.target,
            lambda text: list(target(text_target=text)["input_ids"]),
            lambda ids: str(target.decode(ids, skip_special_tokens=True)),
        )
    )
    return checks


def _readme(run: OpenedModel, architecture: str) -> str:
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

Architecture: {architecture}. Sources have at most {run.encoder_decoder.config.max_source_tokens} tokens.
{penalty}"""
