"""Pairs of tiny models over families, of which the second came from the first by a known kind of change.

    python tests/named_kinds.py                                    print what `diff` misses, and the table
    python tests/named_kinds.py --page docs/results/differences.md    put the table on the page as well
    python tests/named_kinds.py llama gemma2                       some families

Models have the classes of `transformers` and random weights. A pair counts as named if `diff` names the kind
of its change and no other, and as found if an exact change is called the same function.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoints.tiny_models import TINY, transformers
from rewriting.pairs_of_models import (
    each,
    in_layers,
    in_two_files,
    noise,
    of_rank,
    on_levels,
    save_model,
    tensors_of,
    without_small,
    write,
)
from triptych import Difference, TriptychError, diff, load
from triptych.rewriting.functions import EXACT, SortHeads
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint

FAMILIES = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "codegen", "opt", "bloom", "mpt", "falcon, groups"),
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3, text", "phi", "phi3"),
    *("stablelm", "starcoder2", "olmo2", "cohere", "granite", "glm"),
    *("deepseek_v3", "bert", "bart", "t5"),
)
SAME = ("same bytes", "same numbers", "same function")
EXACT_KIND = "same function"
NO_KIND = "no kind"
START, END = "<!-- table of tests/named_kinds.py -->", "<!-- end of the table -->"
Tensors = dict[str, Tensor]
Settings = dict[str, Any]

_NORMS = ("norm", "ln_", "layer_norm")
_OUTPUTS = (
    *(".o_proj.weight", ".out_proj.weight", ".attn.c_proj.weight", ".self_attention.dense.weight"),
    *(
        ".self_attn.dense.weight",
        ".attention.dense.weight",
        ".attention.output.dense.weight",
        ".SelfAttention.o.weight",
    ),
)
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "decoder_layers")
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_SCALES = (
    *("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"),
    *("query_pre_attn_scalar", "logit_scale"),
)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


class Made(NamedTuple):
    """A pair: the kind of its change, and the folder of the second model."""

    kind: str
    change: str  # in words, a row of the table
    folder: Path
    also: Path | None = None


class Outcome(NamedTuple):
    """The comparison of a pair."""

    family: str
    made: Made
    result: str  # "named", "missed", "false name", "same" for a wrong verdict, or "refused"
    said: str


class Family:
    """A family with a model, and the pairs that its files allow."""

    def __init__(self, name: str, base: Path) -> None:
        self.name = name
        self.base = base
        own = TINY[name]
        self._tie = {} if name in ("bert", "bart", "t5") else {"tie_word_embeddings": False}
        self.config = own.configured(**self._tie)
        self.source = self._saved("a", self.config, seed=0)
        self.tensors = tensors_of(self.source)
        self.record = self.config.to_dict()
        self._number = 0

    def _saved(self, name: str, config: Any, *, seed: int) -> Path:
        return save_model(self.base / name, config, seed=seed, model=TINY[self.name].model)

    def _written(self, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
        self._number += 1
        return write(self.source, self.base / f"b{self._number}", tensors, **settings)

    # The parts of a model by the names in its files.

    @property
    def maps(self) -> list[str]:
        """Names of the matrices of layers."""
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor.ndim == 2
            and re.search(r"\.\d+\.", name)
            and not self._is_norm(name)
            and "relative_attention_bias" not in name
        ]

    @property
    def norms(self) -> list[str]:
        """Names of the gains of norms."""
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor.ndim == 1 and self._is_norm(name) and name.endswith("weight")
        ]

    def _is_norm(self, name: str) -> bool:
        return any(word in name.lower() for word in _NORMS)

    @property
    def outputs(self) -> list[str]:
        return [name for name in self.maps if name.endswith(_OUTPUTS)]

    @property
    def tables(self) -> list[str]:
        """Names of the tensors with a row, or an entry, for each token."""
        size = self.record["vocab_size"]
        return [
            name
            for name, tensor in self.tensors.items()
            if not re.search(r"\.\d+\.", name) and size in (len(tensor), tensor.shape[-1])
        ]

    @property
    def layers(self) -> str:
        """Start of the names of the layers: of the decoder, if there are two stacks."""
        starts = [name[: found.start(1)] for name in self.maps if (found := re.search(r"\.(\d+)\.", name))]
        own = [start for start in starts if "decoder" in start]
        return (own or starts)[0]

    def setting(self, *names: str) -> tuple[str, Any] | None:
        """Return the first of these settings that the configuration has."""
        return next(((name, self.record[name]) for name in names if self.record.get(name)), None)

    @property
    def num_heads(self) -> int:
        found = self.setting(*_NUM_HEADS)
        assert found is not None
        return int(found[1])

    @property
    def width(self) -> int:
        """Width of the heads."""
        found = self.setting("hidden_size", "n_embd", "d_model")
        return int(self.record.get("head_dim") or (found[1] if found else 0) // self.num_heads)

    @property
    def turned(self) -> int:
        """Number of channels of a head that rotary positions turn."""
        share = _share_turned(self.record)
        return int(self.record.get("rotary_dim") or self.width * share) // 2 * 2

    # Pairs.

    def pairs(self) -> Iterator[Made]:
        """Yield the pairs of this family, each made when it is asked for."""
        for find in (_of_entries, _of_layers, _of_conversions, _of_configurations, _of_functions):
            torch.manual_seed(5)
            yield from find(self)


def _of_entries(family: Family) -> Iterator[Made]:
    """Yield changes of the entries of tensors."""
    own = family.tensors
    maps = family.maps

    def made(kind: str, change: str, tensors: Tensors, **settings: Any) -> Made:
        return Made(kind, change, family._written(tensors, **settings))

    yield made("rounded", "rounded to bfloat16, all tensors", each(own, _floats(torch.bfloat16)))
    yield made(
        "rounded", "rounded to float16, maps of layers", each(own, lambda _, tensor: tensor.half(), *maps)
    )
    to_eight = each(own, lambda _, tensor: tensor.to(torch.float8_e4m3fn).float(), *maps)
    yield made("rounded", "rounded to float8 (e4m3), maps of layers", to_eight)
    yield made("quantised", "16 levels by rows of the stored maps", each(own, on_levels(4, None), *maps))
    if grouped := [name for name in maps if own[name].shape[1] % 16 == 0 and own[name].shape[1] > 16]:
        levels = each(own, on_levels(4, 16, torch.float16), *grouped)
        yield made("quantised", "16 levels by groups of 16", levels)
    yield made("merged LoRA", "a product of rank 2 added to every map", each(own, of_rank(2), *maps))
    yield made("pruned", "the smallest 40 % of the entries set to 0", each(own, without_small(0.4), *maps))
    if outputs := family.outputs:
        change = "a product of rank 1 added to the attention's output"
        yield made("merged LoRA", change, each(own, of_rank(1), *outputs))
        change = "the first head off: its rows of W_O are 0"
        yield made("pruned", change, each(own, _without_head(family), *outputs))
    yield made("fine-tuned", "noise of 3 % in all entries", each(own, noise(0.03)))
    last = max(
        int(found[1]) for name in maps if (found := re.match(rf"{re.escape(family.layers)}(\d+)\.", name))
    )
    tuned = each(own, noise(0.05), f"{family.layers}{last}.")
    yield made("fine-tuned from a layer on", "noise of 5 % in the last layer", tuned)
    yield made("few entries", "one entry of a map moved by 1", each(own, _with_one_entry, maps[1]))
    yield made("scaled", "one map times 3", each(own, lambda _, tensor: 3 * tensor, maps[0]))
    random = each(own, lambda _, tensor: torch.randn_like(tensor), *maps)
    yield made(NO_KIND, "other random maps: no kind fits", random)
    other = family._saved("other", family.config, seed=1)
    theirs = tensors_of(other)
    mean = {name: (own[name] + theirs[name]) / 2 for name in own}
    yield Made("mean of A and C", "the mean of two models", family._written(mean), other)
    shares = {name: 0.7 * own[name] + 0.3 * theirs[name] for name in own}
    yield Made("mean of A and C", "0.7 of one model and 0.3 of another", family._written(shares), other)


def _of_layers(family: Family) -> Iterator[Made]:
    """Yield changes of whole layers."""
    found = family.setting(*_NUM_LAYERS)
    at = family.layers
    counts = Counter(
        place[1] for name in family.tensors if (place := re.match(rf"{re.escape(at)}(\d+)\.", name))
    )
    # Layers with other tensors, such as the first of T5, cannot change their places.
    if found is None or len({*counts.values()}) > 1:
        return
    name, count = found
    orders = {
        "layers reordered": [1, 0, *range(2, count)],
        "layers dropped": [*range(count - 1)],
        "layers repeated": [*range(count), count - 1],
    }
    words = {
        "layers reordered": "the first two layers exchanged",
        "layers dropped": "without the last layer",
        "layers repeated": "the last layer twice",
    }
    for kind, order in orders.items():
        config = TINY[family.name].configured(**family._tie, **{name: len(order)})
        settings = {} if len(order) == count else config.to_dict()
        yield Made(kind, words[kind], family._written(in_layers(family.tensors, order, at), **settings))


def _of_conversions(family: Family) -> Iterator[Made]:
    """Yield mistakes of conversions."""
    own = family.tensors
    record = family.record
    size = record["vocab_size"]
    resized = each(own, lambda _, tensor: _with_rows(tensor, size), *family.tables)
    yield Made("embeddings resized", "five more tokens", family._written(resized, vocab_size=size + 5))
    if family.norms:
        step = 1.0 if "gemma" in family.name else -1.0
        without = each(own, lambda _, tensor: tensor + step, *family.norms)
        yield Made("gain without its 1", "gains of norms stored without their 1", family._written(without))
    if square := [name for name in family.maps if own[name].shape[0] == own[name].shape[1]]:
        transposed = each(own, lambda _, tensor: tensor.mT, *square)
        yield Made("transposed", "square maps transposed", family._written(transposed))
    shard = in_two_files(family.source, family.base / "stale", noise(0.1), stale=0)
    yield Made("stale shard", "one of two files of another training", shard)
    queries_and_keys = [
        name for name in own if re.search(r"\.[qk]_proj\.(weight|bias)$", name) and "latent" not in name
    ]
    width = family.width
    turned = family.turned
    if queries_and_keys and _is_rotary(record) and turned >= 4:
        other = each(own, _other_layout(width, turned), *queries_and_keys)
        yield Made("rotary layout", "rows of q and k in the other rotary layout", family._written(other))
    has_norms_of_heads = any(".norms." in name for name in own)  # one tensor for each head
    is_grouped = record.get("num_key_value_heads", family.num_heads) < family.num_heads
    if is_grouped and queries_and_keys and not has_norms_of_heads:
        tiled = each(own, _tiled, ".k_proj.", ".v_proj.")
        settings = {"num_key_value_heads": 2 * record["num_key_value_heads"]}
        yield Made(
            "key-value heads tiled", "key-value heads tiled, not repeated", family._written(tiled, **settings)
        )


def _of_configurations(family: Family) -> Iterator[Made]:
    """Yield the same weights with another configuration."""
    record = family.record
    for names, what in (
        (_EPS, "epsilon"),
        (_SCALES, "scale"),
        (_CAPS, "soft cap"),
        (("sliding_window",), "window"),
    ):
        for name in names:
            value = record.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                other = 100 * value if what == "epsilon" else 2 * value
                folder = family._written(family.tensors, **{name: other})
                yield Made("another configuration", f"another {what}", folder)
                break
    rope = record.get("rope_parameters")
    # The first pair turns by 1 radian per position whatever the base.
    if isinstance(rope, dict) and family.turned >= 4 and (others := _with_other_base(rope)) != rope:
        folder = family._written(family.tensors, rope_parameters=others)
        yield Made("another configuration", "another rotary base", folder)


def _of_functions(family: Family) -> Iterator[Made]:
    """Yield the same function in another writing, and near misses of it."""
    own = family.tensors
    yield Made(EXACT_KIND, "every tensor in float64", family._written(each(own, _floats(torch.float64))))
    yield Made(
        EXACT_KIND, "in two files", in_two_files(family.source, family.base / "two", noise(0.0), stale=0)
    )
    for change, steps in (("all exact rewrites", EXACT), ("heads sorted", (SortHeads(),))):
        out = family.base / change
        recipe = RewriteRecipe(step=steps, skip_refused=True)
        try:
            rewrite_checkpoint(str(family.source), out, recipe, compare=False)
        except TriptychError:
            continue
        missed = each(tensors_of(out), _moved, family.maps[len(family.maps) // 2])
        folder = write(out, family.base / f"{change} missed", missed)
        yield Made(EXACT_KIND, change, out)
        yield Made("near miss", f"{change}, and an entry moved by 256 units", folder)


# Changes of single tensors.


def _floats(dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    return lambda _, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _with_one_entry(_: str, tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[2, 3] += 1.0
    return changed


def _moved(_: str, tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    place = int(changed.abs().argmax())
    entry = changed.view(-1)[place]
    step = torch.nextafter(entry, torch.tensor(float("inf"))) - entry
    changed.view(-1)[place] = entry + 256 * step
    return changed


def _without_head(family: Family) -> Callable[[str, Tensor], Tensor]:
    is_transposed = family.name == "gpt2"

    def change(_: str, tensor: Tensor) -> Tensor:
        changed = (tensor.mT if is_transposed else tensor).clone()
        changed[:, : changed.shape[1] // family.num_heads] = 0.0
        return changed.mT if is_transposed else changed

    return change


def _with_rows(tensor: Tensor, size: int) -> Tensor:
    dim = 0 if len(tensor) == size else tensor.ndim - 1
    more = tensor.narrow(dim, 0, 5) * 0.9
    return torch.cat([tensor, more], dim)


def _other_layout(width: int, turned: int) -> Callable[[str, Tensor], Tensor]:
    """Return the permutation of the turned channels of each head from halves to neighbouring pairs."""

    def change(_: str, tensor: Tensor) -> Tensor:
        heads = tensor.unflatten(0, (-1, width)).clone()
        pairs = heads[:, :turned].unflatten(1, (2, -1))
        heads[:, :turned] = pairs.transpose(1, 2).flatten(1, 2)
        return heads.flatten(0, 1)

    return change


def _tiled(_: str, tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


def _share_turned(record: Settings) -> float:
    rope = record.get("rope_parameters")
    found = record.get("partial_rotary_factor") or (rope or {}).get("partial_rotary_factor")
    return float(found or 1.0)


def _is_rotary(record: Settings) -> bool:
    return "rope_parameters" in record or "rotary_dim" in record


def _with_other_base(rope: Settings) -> Settings:
    """Return settings of rotary positions with twice the base, of every kind of layer."""
    return {
        name: _with_other_base(value)
        if isinstance(value, dict)
        else 2 * value
        if name == "rope_theta" and value
        else value
        for name, value in rope.items()
    }


# Comparisons.


def outcome(family: Family, made: Made) -> Outcome:
    """Compare a pair, and judge what is said about it."""
    found = diff(family.source, made.folder, also=made.also)
    return Outcome(family.name, made, _judged(made.kind, found), repr(found))


def _judged(kind: str, found: Difference) -> str:
    is_same = found.verdict in SAME
    if kind == EXACT_KIND:
        return "named" if is_same else "missed"
    if is_same:
        return "same"
    names = {change.kind for change in found.changes}
    if kind == "near miss":
        return "named"
    wanted = set() if kind == NO_KIND else {kind}
    if names - wanted:
        return "false name"
    return "named" if names == wanted else "missed"


def outcomes(families: Iterable[str], base: Path) -> Iterator[Outcome]:
    """Yield the outcome of every pair of some families."""
    for name in families:
        folder = base / re.sub(r"\W+", "-", name)
        family = Family(name, folder)
        load(family.source)
        for made in family.pairs():
            yield outcome(family, made)
            if made.also is None:
                shutil.rmtree(made.folder, ignore_errors=True)
        shutil.rmtree(folder)


def table(found: Iterable[Outcome]) -> str:
    """Return the rows of the page: a kind of change each, and what was missed."""
    found = [*found]
    rows: dict[tuple[bool, str], Counter[str]] = {}
    for one in found:
        is_exact = one.made.kind in (EXACT_KIND, "near miss")
        rows.setdefault((is_exact, one.made.change), Counter())[one.result] += 1
    families = sorted({one.family for one in found}, key=[*FAMILIES].index)
    own = [one for one in found if one.made.kind not in (EXACT_KIND, "near miss")]
    named = sum(one.result == "named" for one in own)
    exact = [one for one in found if one.made.kind == EXACT_KIND]
    misses = [one for one in found if one.made.kind == "near miss"]
    same = sum(one.result == "same" for one in found)
    lines = [
        f"{len(found)} pairs of {len(families)} families: {'; '.join(families)}.",
        "",
        f"Kinds: {named} of {len(own)} named. Exact changes: {sum(o.result == 'named' for o in exact)} of "
        f'{len(exact)} found. Near misses: {len(misses)}. Wrong "same": {same}.',
        "",
        "| change | pairs | named | without its name | false name |",
        "|---|---:|---:|---:|---:|",
    ]
    for (is_exact, change), counts in rows.items():
        if not is_exact:
            cells = (counts.total(), counts["named"], counts["missed"] + counts["same"], counts["false name"])
            lines.append(f"| {change} | {' | '.join(map(str, cells))} |")
    lines += ["", "| change | pairs | the same function | not |", "|---|---:|---:|---:|"]
    for (is_exact, change), counts in rows.items():
        if is_exact:
            is_miss = change.endswith("units")
            same_here = counts["same"] if is_miss else counts["named"]
            lines.append(f"| {change} | {counts.total()} | {same_here} | {counts.total() - same_here} |")
    missed = [one for one in found if one.result != "named"]
    if missed:
        lines += ["", "Not named, or named wrongly:", ""]
        lines += [f"- {one.family}, {one.made.change}: {one.result}" for one in missed]
    return "\n".join(lines)


def put_on_page(text: str, page: Path) -> None:
    """Replace the table of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def kept_outcomes(file: Path | None, again: Iterable[str]) -> list[Outcome]:
    """Return the outcomes that an earlier call kept, except those of families to compare again."""
    if file is None or not file.exists():
        return []
    rows = json.loads(file.read_text())
    return [
        Outcome(family, Made(kind, change, Path(folder)), result, said)
        for family, kind, change, folder, result, said in rows
        if family not in again
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--page", type=Path)
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep outcomes, and take those of other families"
    )
    parser.add_argument("--verbose", action="store_true", help="print the comparison of each missed pair")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    families = [*dict.fromkeys(arguments.families)]
    found = kept_outcomes(arguments.keep, arguments.families)
    with tempfile.TemporaryDirectory() as base:
        for one in outcomes(families, Path(base)):
            found.append(one)
            if one.result != "named":
                print(f"{one.family}, {one.made.change}: {one.result}", file=sys.stderr, flush=True)
                if arguments.verbose:
                    print(one.said, file=sys.stderr, flush=True)
            if arguments.keep:
                rows = [[*one[:1], *map(str, one.made[:3]), *one[2:]] for one in found]
                arguments.keep.write_text(json.dumps(rows))
    text = table(found)
    print(text)
    if arguments.page:
        put_on_page(text, arguments.page)


if __name__ == "__main__":
    main()
