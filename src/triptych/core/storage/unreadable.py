"""Unsupported files and formats: their descriptions, and advice on conversion."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from triptych.errors import DataError
from triptych.untrusted import shown


class Kind(NamedTuple):
    """A kind of unsupported files."""

    names: tuple[str, ...]  # patterns of names in a folder
    what: str  # description
    remedy: str  # advice


# Kinds in order of precedence: the purpose of a folder comes before files that may also be in it.
KINDS = (
    Kind(
        ("*/adapter_config.json",),
        "adapters of PEFT, each in a folder of its own",
        "give one of these folders, or the base model and them (--adapter, adapter=)",
    ),
    Kind(
        ("model-*-of-*.safetensors", "pytorch_model-*-of-*.bin"),
        "weights in parts, and no index of the parts",
        "fetch model.safetensors.index.json (pytorch_model.bin.index.json), too",
    ),
    Kind(
        ("model_index.json",),
        "a pipeline of diffusers, of several models",
        "give the folder of one of them, such as text_encoder",
    ),
    Kind(
        ("consolidated*.safetensors", "consolidated*.pth"),
        "weights under the names of their authors, not those of transformers",
        "fetch the same model in Hugging Face's format (model*.safetensors)",
    ),
    Kind(
        ("shared_vocabulary.*", "source_vocabulary.*", "vocabulary.json"),
        "a model that CTranslate2 converted",
        "give the checkpoint that it was converted from",
    ),
    Kind(
        ("*.onnx", "onnx/*.onnx"),
        "several models in ONNX",
        "give the file of one of them",
    ),
    Kind(
        ("openvino_model.xml", "*.tflite", "*.mlmodel", "*.mlpackage", "*.engine"),
        "a model compiled for another engine",
        "give the checkpoint that it was made of",
    ),
    Kind(
        ("zero_to_fp32.py", "*.distcp", "global_step*"),
        "a state of training that is spread over processes",
        "gather it first, with zero_to_fp32.py of DeepSpeed or torch.distributed.checkpoint.format_utils",
    ),
    Kind(
        ("weights.npz", "weights.*.npz"),
        "weights of MLX in NumPy's format",
        "give the checkpoint that they were converted from",
    ),
    Kind(
        ("tf_model.h5", "flax_model*.msgpack", "saved_model.pb", "*.ckpt.index"),
        "weights of TensorFlow or Flax",
        "fetch the same model as safetensors, or convert it with a transformers before version 5 "
        "(from_pretrained(FOLDER, from_tf=True) or from_flax=True)",
    ),
    Kind(
        ("*.nemo", "*.zip", "*.tar", "*.tar.gz", "*.tgz", "*.7z"),
        "an archive",
        "unpack it, and give the folder with config.json in it",
    ),
    Kind(
        ("checkpoint-*/config.json", "checkpoint-*/model.safetensors"),
        "a folder with the checkpoints of a training run of transformers",
        "give one of them",
    ),
    Kind(
        ("0_Transformer/config.json", "0_*/config.json"),
        "a model of sentence-transformers whose Transformer has a folder of its own",
        "give that folder",
    ),
    Kind(
        ("modules.json", "config_sentence_transformers.json"),
        "a model of sentence-transformers without its weights",
        "fetch it whole: config.json and model.safetensors",
    ),
)
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS = tuple(f"*{suffix}" for suffix in SUFFIXES)
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "*.model",
)
# Ends of names of parts of quantised maps, with the method.
_QUANTISED = (
    (".W_q", "HQQ"),
    (".weight._data", "quanto"),
    (".weight_scales", "EETQ"),
    (".weight_scale_2", "NVFP4"),
    (".weight_zero_point", "integers with zero points (compressed-tensors)"),
    (".weight_packed", "compressed-tensors in packed integers"),
    (".codebooks", "AQLM"),
    (".trellis", "QTIP or EXL3"),
    (".q_weight", "EXL2"),
)
_MARKS = (
    ".lora_A",
    ".lora_B",
    ".lora_embedding_",
    ".base_layer.",
    ".ia3_",
    ".lora_magnitude_vector",
)


def what_is(path: Path) -> str:
    """Describe a folder or file without a readable checkpoint, with advice; return "" if it is unknown."""
    if path.is_file():
        kind = next(
            (kind for kind in KINDS if any(path.match(name) for name in kind.names)),
            None,
        )
        if kind is None or path.suffix in SUFFIXES:
            return ""
        return f"it holds {kind.what}: {kind.remedy}"
    if not path.is_dir():
        return ""
    # Known kinds first: their files may include weights or a tokenizer, too.
    for kind in KINDS:
        if (found := next(_matching(path, kind.names), None)) is not None:
            file = shown(str(found.relative_to(path)))
            return f"it holds {kind.what} ({file}): {kind.remedy}"
    if (weights := next(_matching(path, _WEIGHTS), None)) is not None:
        has_config = (path / "config.json").is_file()
        config = "" if has_config else " with the config.json of the model next to it"
        return f"weights are in {shown(weights.name)}: give that file{config}"
    if next(_matching(path, _TOKENIZERS), None) is not None:
        return "it has a tokenizer and no weights: fetch model.safetensors and config.json as well"
    if not any(path.iterdir()):
        return "it is empty"
    return ""


def onnx_in(folder: Path) -> Path | None:
    """Return the file of a model in ONNX in a folder; None unless the folder has exactly one such file."""
    found = [*_matching(folder, ("model.onnx", "onnx/model.onnx"))]
    found = found or [*_matching(folder, ("*.onnx", "onnx/*.onnx"))]
    return found[0] if len(found) == 1 else None


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def refuse_adapters(name: str, tensors: Mapping[str, Any]) -> None:
    """Raise DataError if tensors include weights of an adapter."""
    found = next(
        (tensor for tensor in tensors if any(mark in f".{tensor}" for mark in _MARKS)),
        None,
    )
    if found is not None:
        raise DataError(
            f"{name}: {shown(found)} belongs to an adapter of PEFT (LoRA or the like) that is not merged: "
            "merge it (merge_and_unload) and save the model again, or save the adapter alone "
            "(PeftModel.save_pretrained), and give it with its base (--adapter, adapter=)"
        )


def quantisation_of(tensors: Collection[str]) -> tuple[str, str] | None:
    """Return a tensor of an unsupported quantised map and its method, or None without such a tensor."""
    for name in tensors:
        for end, method in _QUANTISED:
            if name.endswith(end):
                return name, method
        if (
            name.endswith(".scales")
            and f"{name.removesuffix('scales')}biases" in tensors
        ):
            return name, "MLX"
    return None
