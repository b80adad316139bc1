"""Models in other containers: records around the weights, ONNX, and modules with layers of `torch.nn`."""

import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import load_file
from torch import Tensor, nn

import triptych
from small_checkpoints import llama
from triptych.core.storage.onnx_file import OnnxFile
from triptych.core.storage.pickled import Pickled
from triptych.errors import ConfigurationWarning, DataError, TriptychError

D, HEADS = 16, 4
IDS = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "llama"
    llama(folder)
    return folder


def average(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor / 2 for name, tensor in weights.items()}


def renamed(prefix: str) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: {f"{prefix}{name}": tensor for name, tensor in weights.items()}


WRAPPED: Mapping[str, Callable[[dict[str, Tensor]], Any]] = {
    "Lightning": lambda w: {"state_dict": renamed("model.")(w), "epoch": 3, "callbacks": {}},
    "a state of training": lambda w: {"model": w, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}},
    "data parallel": lambda w: {"model_state_dict": renamed("module.")(w), "step": 7},
    "compiled": lambda w: renamed("_orig_mod.")(w),
    "compiled layers": lambda w: {
        name.replace(".self_attn.", "._orig_mod.self_attn."): tensor for name, tensor in w.items()
    },
    "an average beside": lambda w: {"net": w, "ema": average(w), "step": 1},
    "an average alone": lambda w: {"ema_state_dict": w, "config": {"lr": 0.1}},
    "two records": lambda w: {"model": {"state_dict": renamed("_fsdp_wrapped_module.")(w)}},
    "DeepSpeed": lambda w: {"module": w, "dp_world_size": 2, "optimizer": None},
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_weights_are_found_within_the_usual_records(kind: str, plain: Path, tmp_path: Path) -> None:
    weights = load_file(plain / "model.safetensors")
    torch.save(WRAPPED[kind](weights), tmp_path / "last.pt")
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    expected = triptych.load(plain)[1, 2]
    found = triptych.load(tmp_path / "last.pt")[1, 2]
    assert torch.equal(found.W_Q, expected.W_Q)
    assert torch.equal(found.W_O, expected.W_O)


class Mine(nn.Module):
    """A class whose instances are pickled by reference: reading one would import it."""


def test_a_pickled_module_is_refused_without_running_it(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(2, 2), Mine()), tmp_path / "model.pt")
    with pytest.raises(TriptychError, match=r"refused without running it.*save its state_dict\(\)"):
        Pickled(tmp_path / "model.pt")


@pytest.mark.filterwarnings("ignore")
def test_a_program_of_torchscript_is_refused_by_its_name(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), content)
    (tmp_path / "model.pt").write_bytes(content.getvalue())
    with pytest.raises(TriptychError, match="it is a program of TorchScript, which is not run"):
        Pickled(tmp_path / "model.pt")


def test_two_names_that_differ_by_a_wrapper_are_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2), "_orig_mod.a.weight": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(TriptychError, match=r"a\.weight is there twice"):
        Pickled(tmp_path / "model.pt")


# ONNX


def tiny_bert(**more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    config = transformers.BertConfig(
        vocab_size=30, max_position_embeddings=16, attn_implementation="eager", **sizes, **more
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


class OfIds(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids)[0]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny BERT, and its file in ONNX."""
    model = tiny_bert(layer_norm_eps=1e-7)
    path = tmp_path_factory.mktemp("onnx") / "encoder.onnx"
    axes = {"input_ids": {1: "tokens"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.tensor([IDS])
        options = {"dynamo": False, "input_names": ["input_ids"], "dynamic_axes": axes}
        torch.onnx.export(OfIds(model).eval(), (ids,), path, **options)
    return model, path


def test_an_encoder_in_onnx_runs_as_the_module_it_was_exported_from(exported: tuple[Any, Path]) -> None:
    model, path = exported
    opened = triptych.load(path)
    with pytest.warns(ConfigurationWarning, match=r"no config\.json: sizes are read from its graph"):
        run = opened.run([7, 8, 9, 10, 2, 1])
    expected = model(torch.tensor([[7, 8, 9, 10, 2, 1]])).last_hidden_state[0]
    assert (run.logits - expected).abs().max() < 1e-5
    query = model.encoder.layer[1].attention.self.query.weight
    assert torch.equal(opened[1, 2].W_Q, query[8:12].T)


@pytest.mark.filterwarnings("ignore:.*there is no config.json")
def test_every_matrix_of_an_export_has_its_name_again(exported: tuple[Any, Path]) -> None:
    model, path = exported
    file = OnnxFile(path)
    assert any(
        name.startswith("onnx::MatMul") for name in (one.name for one in onnx.load(path).graph.initializer)
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(file.read(f"model.{name}"), tensor), name


@pytest.mark.filterwarnings("ignore:.*there is no config.json")
def test_a_model_in_onnx_is_rewritten_and_verified(exported: tuple[Any, Path], tmp_path: Path) -> None:
    _, path = exported
    opened = triptych.load(path)
    expected = opened.run(IDS).logits
    opened.rewrite("drop_key_bias").save(tmp_path / "new")
    assert torch.allclose(triptych.load(tmp_path / "new").run(IDS).logits, expected, atol=1e-5)
    assert all(claim.held is not False for claim in triptych.verify(tmp_path / "new", against=path))


def test_a_config_beside_the_file_or_above_its_folder_is_used(
    exported: tuple[Any, Path], tmp_path: Path
) -> None:
    model, path = exported
    model.config.save_pretrained(tmp_path)
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(path.read_bytes())
    expected = model(torch.tensor([IDS])).last_hidden_state[0]
    for place in (tmp_path, tmp_path / "onnx" / "model.onnx"):
        assert (triptych.load(place).run(IDS).logits - expected).abs().max() < 1e-5


def write_graph(
    path: Path, *, kind: str = "MatMul", domain: str = "", location: str = "", length: int = 24
) -> Tensor:
    """A graph with one matrix, which its exporter named by a number; `location`: file with its numbers."""
    matrix = torch.arange(6.0).reshape(2, 3)
    stored = helper.make_tensor("val_3", TensorProto.FLOAT, [2, 3], matrix.numpy().tobytes(), raw=True)
    if location:
        stored.ClearField("raw_data")
        stored.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "8"), ("length", str(length))):
            stored.external_data.add(key=key, value=value)
        (path.parent / "w.data").write_bytes(b"\0" * 8 + matrix.numpy().tobytes())
    node = helper.make_node(kind, ["x", "val_3"], ["y"], name="node_linear", domain=domain)
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'net', 'net.up', 'linear']")
    graph = helper.make_graph([node], "g", [], [], [stored])
    onnx.save(helper.make_model(graph), path)
    return matrix


@pytest.mark.parametrize("location", ["", "w.data"])
def test_a_matrix_without_a_bias_is_named_by_its_scopes(location: str, tmp_path: Path) -> None:
    matrix = write_graph(tmp_path / "m.onnx", location=location)
    file = OnnxFile(tmp_path / "m.onnx")
    assert torch.equal(file.read("net.up.weight"), matrix.T)
    assert file.infos["net.up.weight"].shape == (3, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "MatMulInteger"}, "quantised"),
        (
            {"kind": "Attention", "domain": "com.microsoft"},
            "the optimiser of ONNX Runtime has merged its operations",
        ),
        ({"location": "../w.data"}, "outside of its folder"),
        ({"location": "w.data", "length": 4000}, "its bytes are not in"),
    ],
)
def test_what_is_not_read_of_onnx_is_refused_in_a_line(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_graph(tmp_path / "m.onnx", **options)
    with pytest.raises(TriptychError, match=said):
        OnnxFile(tmp_path / "m.onnx").read("net.up.weight")


def of_shape(sizes: list[int], **more: Any) -> TensorProto:
    return TensorProto(name="net.up.weight", dims=sizes, data_type=TensorProto.FLOAT, **more)


DAMAGED: Mapping[str, tuple[list[Any], list[TensorProto], str]] = {
    "more numbers than bytes": ([], [of_shape([1 << 40, 1 << 40])], "0 bytes, where its shape takes 4,8"),
    "fewer numbers than bytes": (
        [],
        [of_shape([2], raw_data=bytes(12))],
        "12 bytes, where its shape takes 8",
    ),
    "a list without its end": ([], [of_shape([3], float_data=[1.0])], "4 bytes, where its shape takes 12"),
    "a size below 0": ([], [of_shape([-2, -2])], r"shape \[-2, -2\] is not a valid shape"),
    "no inputs": ([helper.make_node("Identity", [], ["a.b"])], [], "an operation Identity has 0 inputs"),
    "one input": ([helper.make_node("MatMul", ["x"], ["y"])], [], "an operation MatMul has 1 inputs"),
    "no outputs": ([helper.make_node("Gemm", ["x", "y"], [])], [], "2 inputs and 0 outputs"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_file_of_onnx_is_refused_when_it_is_opened(fault: str, tmp_path: Path) -> None:
    nodes, tensors, said = DAMAGED[fault]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [], tensors)), tmp_path / "m.onnx")
    with pytest.raises(DataError, match=said):
        OnnxFile(tmp_path / "m.onnx")


def of_heads(path: Path, shape: list[Any], name: str = "") -> int | None:
    """The width of heads in a graph that reshapes queries before its softmax."""
    nodes = [
        helper.make_node("Softmax", ["scores"], ["mixed"], name=name),
        helper.make_node("MatMul", ["queries", "keys"], ["scores"], name=name),
        helper.make_node("Reshape", ["x", "shape"], ["queries"], name=name),
        *shape,
    ]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [])), path)
    return OnnxFile(path).head_width


def constant(name: str, **more: Any) -> Any:
    four = TensorProto(name=name, dims=[4], data_type=TensorProto.INT64, **more)
    return helper.make_node("Constant", [], [name], value=four)


@pytest.mark.parametrize("name", ["", "a node"])
def test_the_width_of_heads_is_found_among_nodes_without_names(name: str, tmp_path: Path) -> None:
    sizes = constant("shape", int64_data=[1, 5, 2, 8])
    assert of_heads(tmp_path / "m.onnx", [sizes], name) == 8


def test_shapes_that_name_themselves_or_double_are_no_shapes(tmp_path: Path) -> None:
    itself = [helper.make_node("Concat", ["shape"], ["shape"])]
    assert of_heads(tmp_path / "m.onnx", itself) is None
    doubled = [helper.make_node("Concat", [f"{i}", f"{i}"], [f"{i + 1}"]) for i in range(60)]
    doubled[-1].output[0] = "shape"
    assert of_heads(tmp_path / "m.onnx", doubled) is None


def test_a_constant_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(32))
    (tmp_path / "folder").mkdir()
    outside = constant("shape", data_location=TensorProto.EXTERNAL)
    outside.attribute[0].t.external_data.add(key="location", value="../secret")
    with pytest.raises(DataError, match=r"tensor shape is in \.\./secret, outside of its folder"):
        of_heads(tmp_path / "folder" / "m.onnx", [outside])


def test_a_damaged_file_of_onnx_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("{}")
    with pytest.raises(TriptychError, match="it is no file of ONNX"):
        triptych.load(tmp_path / "m.onnx")


# Modules with layers of torch.nn


def layer(kind: Any = nn.TransformerEncoderLayer, **more: Any) -> Any:
    return kind(D, HEADS, 24, batch_first=True, **more)


MODULES: Mapping[str, tuple[Callable[[], nn.Module], list[tuple[str, str]]]] = {
    "attention alone": (lambda: nn.MultiheadAttention(D, HEADS), [("self", "")]),
    "a layer": (layer, [("self", "self_attn")]),
    "a layer of a decoder": (
        lambda: layer(nn.TransformerDecoderLayer),
        [("causal", "self_attn"), ("cross", "multihead_attn")],
    ),
    "an encoder": (
        lambda: nn.TransformerEncoder(layer(norm_first=True), 2, enable_nested_tensor=False),
        [("self", "layers.0.self_attn"), ("self", "layers.1.self_attn")],
    ),
    "both": (
        lambda: nn.Transformer(D, HEADS, 1, 1, 24),
        [
            ("self", "encoder.layers.0.self_attn"),
            ("causal", "decoder.layers.0.self_attn"),
            ("cross", "decoder.layers.0.multihead_attn"),
        ],
    ),
    "within another": (
        lambda: nn.ModuleDict({"net": nn.TransformerDecoder(layer(nn.TransformerDecoderLayer), 1)}),
        [("causal", "net.layers.0.self_attn"), ("cross", "net.layers.0.multihead_attn")],
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", MODULES)
def test_the_heads_of_layers_of_torch_are_those_of_their_parameters(name: str) -> None:
    make, expected = MODULES[name]
    module = make()
    opened = triptych.load(module)
    assert len(opened.layers) == len(expected)
    found = {one.outline.semantics.kind: one for one in opened.layers}
    for kind, at in expected[-1:]:
        attention: Any = module.get_submodule(at)
        q, k, v = attention.in_proj_weight.detach().chunk(3)
        head = found[kind][1]
        assert torch.equal(head.W_Q, q[4:8].T)
        assert torch.equal(head.W_K, k[4:8].T)
        assert torch.equal(head.W_V, v[4:8].T)
        assert torch.equal(head.W_O, attention.out_proj.weight.detach()[:, 4:8].T)


def test_a_changed_module_is_opened_again() -> None:
    module = layer()
    opened = triptych.load(module)
    nn.init.ones_(module.self_attn.in_proj_weight)
    with pytest.raises(TriptychError, match="changed after it was opened"):
        _ = opened.layers[0].weights


@pytest.mark.parametrize("more", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8, "vdim": 8}])
def test_what_is_not_read_of_an_attention_of_torch_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(TriptychError, match=r"MultiheadAttention: .*which is not supported"):
        triptych.load(nn.MultiheadAttention(D, HEADS, **more))


def begun(source: Any) -> str:
    """The beginning of a family file in the error for a model that none knows."""
    with pytest.raises(TriptychError) as error:
        _ = triptych.load(source).layers
    (note,) = error.value.__notes__
    return str(note).replace('{ kind = "?" }', '{ kind = "none" }').replace('kind = "?"', 'kind = "self"')


def test_layers_without_a_number_and_layers_from_1_on_are_read_by_the_file_that_the_error_begins(
    tmp_path: Path,
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.MultiheadAttention(D, HEADS)
            self.second = nn.MultiheadAttention(D, HEADS)

    for module, names in (
        (Two(), ["first", "second"]),
        (nn.Sequential(nn.Embedding(9, D), layer(), layer()), ["1.self_attn", "2.self_attn"]),
    ):
        (tmp_path / "my.toml").write_text(begun(module))
        opened = triptych.load(module, family=tmp_path / "my.toml")
        for number, name in enumerate(names):
            attention: Any = module.get_submodule(name)
            assert torch.equal(opened[number, 3].W_Q, attention.in_proj_weight.detach()[12:16].T)


def test_a_begun_file_has_the_stacks_and_names_of_an_encoder_with_a_decoder(tmp_path: Path) -> None:
    state = {}
    for stack, parts in (
        ("encoder", ["self_attention"]),
        ("decoder", ["self_attention", "encoder_attention"]),
    ):
        for part in parts:
            for name in ("fc_q", "fc_k", "fc_v", "fc_o"):
                state[f"{stack}.layers.0.{part}.{name}.weight"] = torch.randn(D, D)
        state[f"{stack}.layers.0.ff.up.weight"] = torch.randn(24, D)
        state[f"{stack}.layers.0.ff.down.weight"] = torch.randn(D, 24)
        state[f"{stack}.tok_embedding.weight"] = torch.randn(9, D)
    torch.save(state, tmp_path / "w.pt")
    note = begun(tmp_path / "w.pt").replace('"?"', '"4"').replace("/ ?", "/ 4")
    (tmp_path / "my.toml").write_text(note)
    opened = triptych.load(tmp_path / "w.pt", family=tmp_path / "my.toml")
    assert [(one.name, one.outline.semantics.kind) for one in opened.layers] == [
        ("encoder.0", "self"),
        ("decoder.0", "causal"),
        ("cross.0", "cross"),
    ]
    assert torch.equal(
        opened["cross.0.1"].W_K, state["decoder.layers.0.encoder_attention.fc_k.weight"][4:8].T
    )
    assert '# embedding = "decoder.tok_embedding"' in note
    assert '# inner = "ff.up"' in note


def test_a_saved_module_is_read_again(tmp_path: Path) -> None:
    module = nn.Transformer(D, HEADS, 1, 1, 24, batch_first=True)
    triptych.load(module).save(tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "torch.nn.Transformer"
    )
    again = triptych.load(tmp_path / "saved")
    assert torch.equal(again["encoder.0.1"].W_Q, triptych.load(module)["encoder.0.1"].W_Q)
