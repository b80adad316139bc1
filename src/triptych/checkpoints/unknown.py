"""A family for a checkpoint that no family file knows, from names and shapes, where they leave no choice."""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import final

from triptych.checkpoints.family import AttentionSpec, Choice, Family, PositionSpec
from triptych.checkpoints.settings import Settings
from triptych.checkpoints.tensors import Tensors, shown
from triptych.errors import DataError

# What a map may be called, below the module of its attention.
_NAMES: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "query", "self.query", "q", "wq", "to_q", "q_lin", "query_proj", "attention.query"),
    "k": ("k_proj", "key", "self.key", "k", "wk", "to_k", "k_lin", "key_proj", "attention.key"),
    "v": ("v_proj", "value", "self.value", "v", "wv", "to_v", "v_lin", "value_proj", "attention.value"),
    "o": ("o_proj", "out_proj", "output.dense", "o", "wo", "to_out.0", "to_out", "out_lin", "dense"),
}
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_ROTARY = ("rope_theta", "rope_parameters", "rope_scaling")
# Rotary in another way than over whole heads, or something else beside the scores.
_OTHER_POSITIONS = (
    "rotary_dim", "rotary_pct", "partial_rotary_factor", "rotary_emb_base", "alibi", "relative_attention",
    "position_embedding_type", "relative_attention_num_buckets",
)  # fmt: skip
# Something between the maps and the softmax that names and shapes do not tell of.
_MORE_OF_SCORES = re.compile(r"att.*softcap|attention_multiplier|query_pre_attn|no_rope|scale_attn_by")
_A_NUMBER = re.compile(r"0|[1-9]\d{0,5}")
_EXAMPLE = """[[attention]]
at = "model.layers.{layer}.self_attn"   # q_proj, k_proj, v_proj and o_proj below it are the default names"""


@final
@dataclass(frozen=True)
class _Found:
    """A module that has all four maps: its name with "{layer}" in it, the maps' names, the layers."""

    module: str
    names: dict[str, str]
    layers: frozenset[int]


def work_out_family(settings: Settings, tensors: Tensors, name: str) -> Family:
    """The one way to read the attention that names, shapes and configuration leave.

    Raises:
        DataError: there is none or more than one; with the names that look like attention and the beginning
            of a family file.
    """
    found = _modules(tensors)
    if not found:
        raise DataError(_refusal(tensors, name, "no module has maps to queries, keys, values and output"))
    heads = _first(settings, _HEADS)
    if heads is None:
        raise DataError(_refusal(tensors, name, f"the configuration has none of {', '.join(_HEADS)}"))
    positions = _positions(settings, tensors)
    if positions is None:
        why = "whether its positions are rotary over whole heads, learned or something else cannot be told"
        raise DataError(_refusal(tensors, name, why))
    _require_nothing_else(found, tensors, name)
    if more := next((key for key in settings.record if _MORE_OF_SCORES.search(key)), None):
        raise DataError(_refusal(tensors, name, f"nothing says what {shown(more)} does to the scores"))
    specs = []
    for module in found:
        if module.layers != frozenset(range(len(module.layers))):
            why = f"layers of {module.module} are {sorted(module.layers)}: some are missing"
            raise DataError(_refusal(tensors, name, why))
        specs.append(_spec(module, settings, tensors, heads, positions, name))
    stacks = [spec.stack + spec.kind for spec in specs]
    if len({*stacks}) < len(stacks):
        why = f"{' and '.join(module.module for module in found)} are more than one stack of the same kind"
        raise DataError(_refusal(tensors, name, why))
    if positions.kind == "rotary":
        raise DataError(_which_channels_turn(specs, name))
    assumed = "causal" if any(spec.kind == "causal" for spec in specs) else "seen from both sides"
    told = f"worked out from names and shapes: positions learned, {assumed}"
    return Family(name=told, attention=tuple(specs))


def _modules(tensors: Tensors) -> list[_Found]:
    """Modules with one of the names of every map, by the pattern of their names."""
    weights = [name.removesuffix(".weight") for name in tensors.infos if name.endswith(".weight")]
    by_side: dict[str, dict[str, set[str]]] = {side: defaultdict(set) for side in _NAMES}
    for weight in weights:
        for side, names in _NAMES.items():
            for own in names:
                if weight.endswith("." + own):
                    by_side[side][weight.removesuffix("." + own)].add(own)
    layers: dict[tuple[str, tuple[tuple[str, str], ...]], set[int]] = defaultdict(set)
    for module in by_side["q"]:
        if not all(module in by_side[side] for side in _NAMES):
            continue
        numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", module)
        if len(numbers) != 1 or not _A_NUMBER.fullmatch(numbers[0]) or "{" in module or "}" in module:
            continue
        chosen = tuple((side, max(by_side[side][module], key=len)) for side in _NAMES)
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "{layer}", module)
        layers[pattern, chosen].add(int(numbers[0]))
    return [_Found(pattern, dict(names), frozenset(of)) for (pattern, names), of in sorted(layers.items())]


def _spec(
    module: _Found, settings: Settings, tensors: Tensors, heads: str, positions: PositionSpec, name: str
) -> AttentionSpec:
    first = module.module.replace("{layer}", "0")
    shapes = {side: tensors.infos[f"{first}.{own}.weight"].shape for side, own in module.names.items()}
    if not all(len(shape) == 2 for shape in shapes.values()):
        raise DataError(_refusal(tensors, name, f"the maps of {first} are no matrices"))
    groups = _first(settings, _KEY_HEADS) or heads
    num_heads, num_groups = settings.count(heads), settings.count(groups)
    rows = shapes["q"][0]
    width, rest = divmod(rows, num_heads)
    fits = (
        not rest
        and shapes["k"][0] == num_groups * width
        and shapes["v"][0] % num_groups == 0
        and shapes["o"][1] == num_heads * (shapes["v"][0] // num_groups)
        and shapes["q"][1] == shapes["o"][0]
    )
    if not fits:
        shown = ", ".join(f"{side} {list(shape)}" for side, shape in shapes.items())
        why = f"the shapes of {first} ({shown}) do not fit {num_heads} heads on {num_groups} of keys"
        raise DataError(_refusal(tensors, name, why))
    cross = bool(re.search(r"cross|encoder_attn|EncDec", module.module))
    in_decoder = "decoder" in module.module or bool(settings.value("is_decoder"))
    lone = "encoder" not in module.module and not in_decoder
    return AttentionSpec(
        stack="encoder" if "encoder" in module.module else "decoder",
        kind="cross" if cross else "causal" if in_decoder or lone else "self",
        layers=str(len(module.layers)),
        at=module.module,
        **module.names,
        heads=str(num_heads),
        groups=(Choice(value=str(num_groups)),),
        width=str(width),
        value_width=str(shapes["v"][0] // num_groups),
        positions=(PositionSpec(kind="none") if cross else positions,),
    )


def _positions(settings: Settings, tensors: Tensors) -> PositionSpec | None:
    """Rotary over whole heads, as where the configuration says no more; learned; or None."""
    if _first(settings, _OTHER_POSITIONS) not in (None, "position_embedding_type"):
        return None
    kind = settings.value("position_embedding_type")
    if any(re.search(r"relative|rel_pos|distance", tensor) for tensor in tensors.infos):
        return None
    rotary = _first(settings, _ROTARY) is not None
    learned = any(re.search(r"(position|pos)_?(embed|emb)|\bwpe\b", tensor) for tensor in tensors.infos)
    if rotary == learned or kind not in (None, "absolute" if learned else "rotary"):
        return None
    return PositionSpec(kind="rotary" if rotary else "learned")


def _require_nothing_else(found: list[_Found], tensors: Tensors, name: str) -> None:
    """Every tensor that looks like attention is one of the maps that were found, or a bias.

    Raises:
        DataError: there is another.
    """
    known = {
        f"{module.module.replace('{layer}', str(layer))}.{own}.{part}"
        for module in found
        for layer in module.layers
        for own in module.names.values()
        for part in ("weight", "bias")
    }
    modules = tuple(f"{m.module.replace('{layer}', str(layer))}." for m in found for layer in m.layers)
    for tensor in tensors.infos:
        looks = re.search(r"attn|attention|query|key_value|qkv|(^|[._])[qkv]_proj", tensor, re.I)
        is_map = len(tensors.infos[tensor].shape) > 1
        if tensor not in known and ((looks and is_map) or tensor.startswith(modules)):
            raise DataError(_refusal(tensors, name, f"nothing says what {tensor} does"))


def _which_channels_turn(specs: list[AttentionSpec], name: str) -> str:
    """What is asked of the user where all else is worked out."""
    blocks = []
    for spec in specs:
        fields = {"at": spec.at, "stack": spec.stack, "kind": spec.kind, "layers": spec.layers}
        fields |= {side: getattr(spec, side) for side in _NAMES}
        fields |= {"heads": spec.heads, "width": spec.width, "value_width": spec.value_width}
        lines = [f'{field} = "{text}"' for field, text in fields.items()]
        lines.append(f'groups = [{{ value = "{spec.groups[0].value}" }}]')
        if spec.kind != "cross":
            lines.append('positions = [{ kind = "rotary", pairing = "halves" }]')
        blocks.append("[[attention]]\n" + "\n".join(lines))
    return (
        f"{name}: no family file knows it. All but one thing can be worked out: which channels of a head "
        'turn together: "halves" (f and f + width / 2, as in Llama) or "interleaved" (2 f and 2 f + 1, as in '
        "GPT-J). Its rotate_half tells: write this into my.toml with the right one, pass --family my.toml\n"
        'name = "mine"\n' + "\n".join(blocks)
    )


def _first(settings: Settings, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if settings.value(name) is not None), None)


def _refusal(tensors: Tensors, name: str, why: str) -> str:
    looks = sorted(
        tensor for tensor in tensors.infos if re.search(r"attn|attention|query|q_proj|qkv", tensor, re.I)
    )
    shown = ", ".join(looks[:6]) + (" …" if len(looks) > 6 else "")
    return (
        f"{name}: no family file knows it, and it cannot be worked out: {why}. What looks like attention: "
        f"{shown or 'nothing'}. Say how it is written in a file and pass "
        "it with --family my.toml; it begins\n"
        f'name = "mine"\n{_EXAMPLE}'
    )
