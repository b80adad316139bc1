"""A family for a checkpoint that no family file knows, from names and shapes, where they leave no choice.

A guess is taken only if every field of the configuration is one of `fields.toml`, every tensor that looks
like attention has its place, the configuration says which way the attention sees, and positions are learned.
What else there is, is named in the refusal.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Never, final

from triptych.checkpoints.attention_spec import AttentionSpec, PositionSpec
from triptych.checkpoints.family import Family
from triptych.checkpoints.fields import listed, not_understood
from triptych.checkpoints.rope import frequencies
from triptych.checkpoints.specs import Choice
from triptych.errors import DataError
from triptych.storage.settings import Settings
from triptych.storage.tensors import Tensors
from triptych.storage.untrusted import shown

# What a map may be called, below the module of its attention.
_NAMES: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "query", "self.query", "q", "wq", "to_q", "q_lin", "query_proj", "attention.query"),
    "k": ("k_proj", "key", "self.key", "k", "wk", "to_k", "k_lin", "key_proj", "attention.key"),
    "v": ("v_proj", "value", "self.value", "v", "wv", "to_v", "v_lin", "value_proj", "attention.value"),
    "o": ("o_proj", "out_proj", "output.dense", "o", "wo", "to_out.0", "to_out", "out_lin", "dense"),
}
# What one tensor with several of these maps is called.
_FUSED = re.compile(
    r"(^|[._])(w?qkv|c_attn|in_proj|query_key_value|qkv_proj|w_?pack|to_qkv|to_kv|kv_proj|key_value)"
    r"([._](weight|proj\.weight))?$",
    re.I,
)
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HEADS_OF_STACK = ("{}_attention_heads", "num_{}_attention_heads", "n_{}_heads", "{}_num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_LONGEST = "max_position_embeddings | n_positions | max_seq_len"
_LOOKS_LIKE_POSITIONS = re.compile(r"(position|pos)_?(embed|emb)|embed_positions|\bwpe\b|\bpos_encod")
_LOOKS_LIKE_ATTENTION = re.compile(r"attn|attention|query|key_value|qkv|(^|[._])[qkv]_proj", re.I)
_OTHER_POSITIONS = re.compile(r"relative|rel_|distance|rotary|rope|inv_freq|alibi")
_A_NUMBER = re.compile(r"0|[1-9]\d{0,5}")
_EXAMPLE = """[[attention]]
at = "model.layers.{layer}.self_attn"   # q_proj, k_proj, v_proj and o_proj below it are the default names"""


@final
@dataclass(frozen=True)
class _Found:
    """A module that has all four maps.

    Attributes:
        module: its name, with "{layer}" in it.
        names: of its maps.
        layers: their numbers.
    """

    module: str
    names: dict[str, str]
    layers: frozenset[int]

    @property
    def first(self) -> str:
        return self.module.replace("{layer}", str(min(self.layers)))


def work_out_family(settings: Settings, tensors: Tensors, name: str) -> Family:
    """The one way to read the attention that names, shapes and configuration leave."""
    return _Guess(settings, tensors, name).family()


@final
class _Guess:
    """One checkpoint that no family file knows."""

    def __init__(self, settings: Settings, tensors: Tensors, name: str) -> None:
        self.tensors, self.name = tensors, name
        self.model_type = settings.value("model_type")
        self.records = _records_with_heads(settings)
        self.above, self.path = settings, self.records[0] if len(self.records) == 1 else ""
        self.settings = settings.below(self.path)

    def family(self) -> Family:
        found = self._modules()
        if not found:
            self._refuse(self._why_no_module())
        if len(self.records) > 1:
            self._refuse(
                f"{listed(self.records)} each say how many heads there are, and not of which modules"
            )
        self._require_understood()
        self._require_nothing_else(found)
        specs = [self._spec(module) for module in found]
        stacks = [spec.stack + spec.kind for spec in specs]
        if len({*stacks}) < len(stacks):
            several = " and ".join(module.module for module in found)
            self._refuse(f"{several} are more than one stack of the same kind")
        if self._turns():
            self._ask_which_channels_turn(specs)
        seen = "causal" if any(spec.kind == "causal" for spec in specs) else "seen from both sides"
        told = f"worked out from names and shapes: positions learned, {seen}"
        return Family(name=told, attention=tuple(specs))

    # What is there.

    def _modules(self) -> list[_Found]:
        """Modules with one of the names of every map, by the pattern of their names."""
        weights = [name.removesuffix(".weight") for name in self.tensors.infos if name.endswith(".weight")]
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
        return [
            _Found(pattern, dict(names), frozenset(of)) for (pattern, names), of in sorted(layers.items())
        ]

    def _why_no_module(self) -> str:
        fused = sorted(
            name for name, info in self.tensors.infos.items() if _FUSED.search(name) and len(info.shape) > 1
        )
        if fused:
            return (
                f"{shown(fused[0])} holds several maps in one, and how its rows are shared out among "
                "queries, keys, values and heads cannot be told from its shape"
            )
        seen = sorted(
            {
                name.removesuffix(".weight").rpartition(".")[2]
                for name, info in self.tensors.infos.items()
                if _LOOKS_LIKE_ATTENTION.search(name) and len(info.shape) > 1 and name.endswith(".weight")
            }
        )
        return (
            "no module has maps to queries, keys, values and output by names that are known: its attention "
            f"has {listed([shown(name) for name in seen]) or 'no map'}"
        )

    def _require_understood(self) -> None:
        """Every field of the configuration is known to leave attention alone, or is read here."""
        strange = not_understood(self.settings.record, f"{self.path}." if self.path else "")
        if self.path:
            above = {name: value for name, value in self.above.record.items() if name != self.path}
            strange = [*not_understood(above), *strange]
        if strange:
            self._refuse(f"nothing says what {listed(strange)} in {self.above.where} does to attention")

    def _require_nothing_else(self, found: list[_Found]) -> None:
        """Every tensor that looks like attention is one of the maps that were found, or a bias."""
        places = [
            (module.module.replace("{layer}", str(layer)), module)
            for module in found
            for layer in module.layers
        ]
        known = {
            f"{at}.{own}.{part}"
            for at, module in places
            for own in module.names.values()
            for part in ("weight", "bias")
        }
        modules = tuple(f"{at}." for at, _ in places)
        for name, info in self.tensors.infos.items():
            looks = _LOOKS_LIKE_ATTENTION.search(name) and len(info.shape) > 1
            if name not in known and (looks or name.startswith(modules)):
                self._refuse(f"nothing says what tensor {shown(name)} does")
        for module in found:
            if module.layers != frozenset(range(len(module.layers))):
                self._refuse(f"layers of {module.module} are {sorted(module.layers)}: some are missing")

    # One module.

    def _spec(self, module: _Found) -> AttentionSpec:
        shapes = {
            side: self.tensors.infos[f"{module.first}.{own}.weight"].shape
            for side, own in module.names.items()
        }
        if not all(len(shape) == 2 for shape in shapes.values()):
            self._refuse(f"the maps of {module.first} are no matrices")
        stack, kind = self._direction(module.module)
        heads = self._heads(module.module, stack)
        groups = next((name for name in _KEY_HEADS if self.settings.value(name) is not None), None)
        num_groups = heads if groups is None else self.settings.count(groups)
        width, rest = divmod(shapes["q"][0], heads)
        said = self.settings.value("head_dim")
        fits = (
            not rest
            and said in (None, width)
            and shapes["k"][0] == num_groups * width
            and not heads % num_groups
            and shapes["v"][0] % num_groups == 0
            and shapes["o"][1] == heads * (shapes["v"][0] // num_groups)
            and shapes["q"][1] == shapes["o"][0]
        )
        if not fits:
            sizes = ", ".join(f"{side} {list(shape)}" for side, shape in shapes.items())
            self._refuse(
                f"the shapes of {module.first} ({sizes}) do not fit {heads} heads on {num_groups} of keys"
            )
        if kind != "cross" and not self._turns():
            self._require_learned_positions(module, shapes["q"][1], width)
        turned = PositionSpec(kind="rotary") if self._turns() else PositionSpec(kind="learned")
        return AttentionSpec(
            stack=stack,
            kind=kind,
            settings=self.path,
            layers=str(len(module.layers)),
            at=module.module,
            **module.names,
            heads=str(heads),
            groups=(Choice(value=str(num_groups)),),
            width=str(width),
            value_width=str(shapes["v"][0] // num_groups),
            positions=(PositionSpec(kind="none") if kind == "cross" else turned,),
        )

    def _direction(self, module: str) -> tuple[str, Literal["self", "causal", "cross"]]:
        """Stack and kind, where the configuration says which way the model sees."""
        value = self.settings.value
        classes = self.above.value("architectures")
        ends = str(classes[0]) if isinstance(classes, list) and len(classes) == 1 else ""
        inside = {word for word in ("encoder", "decoder") if word in module}
        cross = bool(re.search(r"cross|encoder_attn|EncDec", module))
        if self.above.value("is_encoder_decoder"):
            if ends.endswith(("ForConditionalGeneration", "MTModel")) and inside:
                stack = "decoder" if "decoder" in inside else "encoder"
                return stack, "cross" if cross else "causal" if stack == "decoder" else "self"
        elif ends.endswith("ForCausalLM") and value("is_decoder") is not False and "encoder" not in inside:
            if not cross and not value("add_cross_attention"):
                return "decoder", "causal"
        elif (
            ends.endswith("ForMaskedLM") and not value("is_decoder") and "decoder" not in inside and not cross
        ):
            return "encoder", "self"
        return self._refuse(
            f"whether {module} sees what comes later cannot be told from architectures "
            f"({shown(ends) or 'none'}), is_decoder and names"
        )

    def _heads(self, module: str, stack: str) -> int:
        """Number of heads that the configuration gives this stack; several names must agree."""
        own = [name for form in _HEADS_OF_STACK if self._has(name := form.format(stack))]
        other = "decoder" if stack == "encoder" else "encoder"
        of_other = any(self._has(form.format(other)) for form in _HEADS_OF_STACK)
        names = own or [name for name in _HEADS if self._has(name)]
        if not names or (of_other and not own):
            known = ", ".join((*_HEADS, *(form.format(stack) for form in _HEADS_OF_STACK[:1])))
            self._refuse(f"the configuration does not say how many heads {module} has (as one of {known})")
        found = {self.settings.count(name) for name in names}
        if len(found) > 1:
            self._refuse(f"{' and '.join(names)} are not the same number of heads")
        return found.pop()

    def _has(self, name: str) -> bool:
        return self.settings.value(name) is not None

    # Positions.

    def _turns(self) -> bool:
        return any(self._has(name) for name in ("rope_theta", "rope_parameters", "rope_scaling"))

    def _require_learned_positions(self, module: _Found, d_model: int, width: int) -> None:
        """There is a table of positions as wide as the model, and no other kind of positions."""
        infos = self.tensors.infos
        tables = {name: infos[name].shape for name in infos if _LOOKS_LIKE_POSITIONS.search(name)}
        tables = {name: shape for name, shape in tables.items() if len(shape) > 1}
        strange = [name for name in infos if _OTHER_POSITIONS.search(name)]
        longest = self.settings.value(_LONGEST)
        fits = isinstance(longest, int) and all(
            len(shape) == 2 and shape[1] == d_model != width and shape[0] >= longest
            for shape in tables.values()
        )
        kind = self.settings.value("position_embedding_type")
        if strange or not tables or not fits or kind not in (None, "absolute"):
            seen = next(iter((*strange, *tables)), "no tensor")
            self._refuse(
                f"which positions {module.module} has cannot be told ({shown(seen)} is there): a table that "
                "is added to the input is read, as wide as the model and as long as the configuration says"
            )

    def _ask_which_channels_turn(self, specs: list[AttentionSpec]) -> Never:
        """Ask the user for the one thing that is left."""
        kind = self.settings.value("position_embedding_type")
        tables = [name for name in self.tensors.infos if _LOOKS_LIKE_POSITIONS.search(name)]
        strange = [name for name in self.tensors.infos if re.search(r"relative|rel_|distance|alibi", name)]
        if tables or strange or kind not in (None, "rotary"):
            what = next(iter((*tables, *strange)), f"position_embedding_type {kind}")
            self._refuse(f"its positions are rotary, and nothing says what {shown(what)} does")
        self._require_known_scaling()
        blocks = []
        for spec in specs:
            fields = {"at": spec.at, "stack": spec.stack, "kind": spec.kind, "layers": spec.layers}
            fields |= {"settings": spec.settings} if spec.settings else {}
            fields |= {side: getattr(spec, side) for side in _NAMES}
            fields |= {"heads": spec.heads, "width": spec.width, "value_width": spec.value_width}
            lines = [f'{field} = "{text}"' for field, text in fields.items()]
            lines.append(f'groups = [{{ value = "{spec.groups[0].value}" }}]')
            if spec.kind != "cross":
                lines.append('positions = [{ kind = "rotary", pairing = "halves" }]')
            blocks.append("[[attention]]\n" + "\n".join(lines))
        error = DataError(
            f"{self.name}: no family file knows {self._type()}: say with --family my.toml which channels of "
            'a head turn together, "halves" (as in Llama) or "interleaved" (as in GPT-J)'
        )
        error.add_note(
            'All else is worked out. "halves" turns f with f + width / 2, "interleaved" 2 f with 2 f + 1; '
            "rotate_half of the model's code tells. Write this into my.toml with the right one:\n"
            'name = "mine"\n' + "\n".join(blocks)
        )
        raise error

    def _require_known_scaling(self) -> None:
        for name in ("rope_scaling", "rope_parameters"):
            record = self.settings.value(name)
            if record is None:
                continue
            try:
                if not isinstance(record, Mapping):
                    raise ValueError("it is no record")
                frequencies(record, 2 * len(record.get("short_factor") or (1, 1)), 10000.0, 2048.0)
            except (ValueError, TypeError, ArithmeticError) as error:
                self._refuse(f"{name} cannot be followed: {error}")

    # Refusing.

    def _type(self) -> str:
        return f"model_type {shown(self.model_type)!r}"

    def _refuse(self, why: str) -> Never:
        looks = sorted(name for name in self.tensors.infos if _LOOKS_LIKE_ATTENTION.search(name))
        error = DataError(
            f"{self.name}: no family file knows {self._type()}, and it cannot be worked out: {why}; describe "
            "it with --family my.toml"
        )
        error.add_note(
            f"What looks like attention: {listed(looks) or 'nothing'}.\nA family file says how it is "
            f'written; it begins\nname = "mine"\n{_EXAMPLE}'
        )
        raise error


def _records_with_heads(settings: Settings) -> list[str]:
    """The records that say how many heads there are: "" for the whole, or else those within that do."""

    def says(record: Mapping[str, object]) -> bool:
        stacks = [form.format(stack) for form in _HEADS_OF_STACK for stack in ("encoder", "decoder")]
        return any(record.get(name) is not None for name in (*_HEADS, *stacks))

    if says(settings.record):
        return [""]
    within = [name for name, value in settings.record.items() if isinstance(value, dict) and says(value)]
    return [name for name in within if re.fullmatch(r"\w+", name)]
