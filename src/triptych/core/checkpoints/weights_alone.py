"""Weights without a configuration next to them: files of `torch.save`, safetensors and ONNX."""

import shutil
from pathlib import Path
from typing import Any, final

from triptych.core.checkpoints.model_types import model_types_of_tensors
from triptych.core.checkpoints.written_files import WrittenFiles, tokenizer_files
from triptych.core.storage.onnx_file import OnnxFile
from triptych.core.storage.pickled import Pickled
from triptych.core.storage.tensors import Tensors, of_one, open_tensors
from triptych.errors import DataError
from triptych.files import write_json
from triptych.untrusted import Stamps, read_json

_CONFIG = "config.json"
# Activations by their characteristic ONNX operation.
_ACTIVATIONS = {"Erf": "gelu", "Gelu": "gelu", "Relu": "relu"}
_LIKE_BERT = ("bert", "roberta", "xlm-roberta", "camembert", "electra")


@final
class WeightsAlone(WrittenFiles):
    """A file of weights; its other files are made when they are needed.

    Attributes:
        record: configuration next to an ONNX file, in a file of `torch.save`, or read from the graph of ONNX.
        where: source of the configuration, for messages.
        notes: sentences on the source of the configuration.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self._stamps = Stamps([path])
        self._onnx = OnnxFile(path) if path.suffix == ".onnx" else None
        self._beside = _folder_with_config(path) if self._onnx else path.parent
        self._tokenizer = tokenizer_files(self._beside)
        self.has_tokenizer = bool(self._tokenizer)
        self.where = name
        self.notes: tuple[str, ...] = ()
        self.record = self._read_record()

    def require_same(self) -> None:
        """Check that the file is unchanged since it was opened."""
        self._stamps.require_same()
        if self._onnx is not None:
            self._onnx.require_same()

    def tensors(self, *, mapped: bool = False) -> Tensors:
        """Open the tensors under the names in the file."""
        self.require_same()
        if self._onnx is not None:
            return of_one(self._onnx)
        assert self.path is not None
        return open_tensors(self.path, mapped=mapped)

    def write_beside(self, folder: Path) -> None:
        write_json(folder / _CONFIG, self.record)
        for path in self._tokenizer:
            shutil.copyfile(path, folder / path.name)

    def _read_record(self) -> dict[str, Any]:
        # A configuration in a file takes precedence over sizes worked out here.
        if self._onnx is not None:
            config = self._beside / _CONFIG
            if config.is_file():
                self.where = str(config)
                return read_json(config)
            record = _of_graph(self._onnx)
            self.notes = (
                f"{self.name}: there is no {_CONFIG}: sizes are read from its graph",
            )
            return record
        assert self.path is not None
        if self.path.suffix == ".safetensors":
            return {}
        opened = Pickled(self.path)
        if opened.record:
            self.notes = (
                f"{self.name}: there is no {_CONFIG}: sizes are those in the file",
            )
        return opened.record


def _folder_with_config(path: Path) -> Path:
    """Return the folder of an ONNX model's other files: the file's folder, or the folder above `onnx`."""
    folder = path.parent
    above = folder.parent
    is_below = (
        folder.name == "onnx"
        and not (folder / _CONFIG).is_file()
        and (above / _CONFIG).is_file()
    )
    return above if is_below else folder


def _of_graph(file: OnnxFile) -> dict[str, Any]:
    """Return the configuration of an encoder like BERT, by the names, shapes and operations of its graph."""
    kinds = [
        kind for kind in model_types_of_tensors(of_one(file)) if kind in _LIKE_BERT
    ]
    width = file.head_width
    operations = file.operations
    activation = next(
        (word for name, word in _ACTIVATIONS.items() if name in operations), None
    )
    eps = [
        one.f
        for one in getattr(operations.get("LayerNormalization"), "attribute", ())
        if one.name == "epsilon"
    ]
    if not (kinds and width and activation and eps):
        raise DataError(
            f"{file.name}: there is no config.json, and the graph does not tell all sizes of the model: put "
            "the config.json of the checkpoint that it was exported from next to it"
        )
    # Shapes of tensors give all sizes except the width of heads, a constant of the graph.
    sizes = {name: info.shape for name, info in file.infos.items()}

    def shape_of(end: str) -> tuple[int, ...]:
        return next(shape for name, shape in sizes.items() if name.endswith(end))

    vocabulary, d_model = shape_of("embeddings.word_embeddings.weight")
    queries = [name for name in sizes if name.endswith(".attention.self.query.weight")]
    return {
        "model_type": kinds[0],
        "vocab_size": vocabulary,
        "hidden_size": d_model,
        "num_hidden_layers": len(queries),
        "num_attention_heads": d_model // width,
        "intermediate_size": shape_of(".intermediate.dense.weight")[0],
        "hidden_act": activation,
        "max_position_embeddings": shape_of("embeddings.position_embeddings.weight")[0],
        "type_vocab_size": shape_of("embeddings.token_type_embeddings.weight")[0],
        "layer_norm_eps": float(f"{eps[0]:.6g}"),
    }
