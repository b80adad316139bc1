"""Record what the product answers, so that two versions of the source can be compared to the bit.

    PYTHONPATH=old/src python tests/recorded.py record old.json --runs kept
    PYTHONPATH=new/src python tests/recorded.py record new.json --runs kept
    python tests/recorded.py compare old.json new.json

Only the public interface is used (`import triptych`, `python -m triptych`), so that the script runs on both
versions. Models are small and made here with fixed seeds; checkpoints and texts of `../shared` are added
where they exist. Answers that contain times, versions or paths are recorded without them.

With `--runs FOLDER`, the first recording leaves its runs in the folder, one of them interrupted, and later
recordings open, translate and resume those: the runs of an older version. `compare` exits with 1 if an answer
differs, and lists changed error messages without counting them.
"""

# ruff: noqa: B023 (a lambda of a loop is called before the loop goes on)

import argparse
import contextlib
import gc
import hashlib
import io
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

SHARED = Path(__file__).resolve().parents[2] / "shared"
SHOWN = 300  # characters of an answer that are stored in readable form
# Keys of JSON records whose values differ between two recordings of one version, or name the version.
CHANGING = {"seconds", "tokens_per_second", "sentences_per_second", "peak_share", "tool", "sha256", "version"}
CHANGING |= {"transformers_version", "_name_or_path"}

SENTENCES = (
    "A man is riding a bike.",
    "Two dogs play in the snow with a red ball.",
    "A woman in a blue shirt is cooking dinner, and a child watches.",
    "Children!",
    "People are standing outside of a building near the water at night.",
    "The young girl with curly hair holds a camera.",
)
PROMPTS = ("ROMEO:", "To be or not to be", "The king said that", "First Citizen:\nBefore we proceed")
GERMAN = ("Es ist halb vier.", "Das Buch kostet drei Euro.", "Heute ist der 3. Mai 1984.")
GREEDY = {"beam_size": 1}
PRECISIONS = ("bf16", "int8")

# The keys of each parameterisation for layers of width 32 with four heads.
SITES: dict[str, dict[str, Any]] = {
    "factored": {"q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True},
    "bilinear": {},
    "stacked": {},
    "symmetric": {},
    "shared": {},
    "key_value": {},
    "four_matrix": {},
    "direct": {},
    "grouped": {"num_kv_heads": 2},
    "differential": {"num_kv_heads": 2},
    "latent": {"d_latent": 12},
    "collaborative": {"d_shared": 8},
    "identity_query": {},
    "identity_value": {},
    "identity_output": {},
    "identity_ov": {},
}
LANGUAGE_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": ({"positions": {"scheme": "learned"}}, SITES["factored"]),
    "llama": (
        {"positions": {"scheme": "rotary"}, "norm_kind": "rms", "gated": True, "activation": "swish"},
        {"projections": "grouped", "num_kv_heads": 2},
    ),
    "normed": ({"positions": {"scheme": "rotary"}}, {"qk_norm": True, "output_gate": True}),
    "alibi": ({"positions": {"scheme": "alibi"}}, {"projections": "key_value"}),
    "cosine": ({"norm": "post"}, {"scores": "cosine"}),
    "additive": ({"positions": {"scheme": "learned"}}, {"scores": "additive"}),
    "latent": ({"positions": {"scheme": "learned"}}, {"projections": "latent", "d_latent": 12}),
    "differential": (
        {"positions": {"scheme": "rotary"}},
        {"projections": "differential", "num_kv_heads": 2},
    ),
}

_SMALL = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 40, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 10}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 14, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5,
}  # fmt: skip
_PAIR = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
# Families of `transformers`: the class of a tiny random model, and its settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 40},
    ),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "bert": ("BertModel", _SMALL),
    "opt": (
        "OPTForCausalLM",
        {
            "hidden_size": 24,
            "ffn_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 40,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 24,
        },
    ),
    "bloom": ("BloomForCausalLM", {"hidden_size": 24, "n_layer": 2, "n_head": 4, "vocab_size": 40}),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 7}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 24,
            "d_kv": 7,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 40,
            "decoder_start_token_id": 0,
        },
    ),
    "marian": ("MarianMTModel", _PAIR),
    "youtu": ("YoutuForCausalLM", {**_SMALL, **_LATENT, "pad_token_id": None}),
}
# Every rewrite, with options, and the recipes of several; one that a family refuses is recorded as refused.
REWRITES: dict[str, tuple[str, ...]] = {
    "fold": ("fold",),
    "expand": ("expand",),
    "factor": ("factor",),
    "fold_norm": ("fold_norm",),
    "fold_other_norms": ("fold_other_norms",),
    "drop_key_bias": ("drop_key_bias",),
    "fold_value_bias": ("fold_value_bias",),
    "prune_heads": ("prune_heads(number=1)",),
    "merge_kv_heads": ("merge_kv_heads(num_kv_heads=1)",),
    "truncate": ("truncate(rank=3)",),
    "truncate, energy": ("truncate(energy=0.8, rotary='pairs')",),
    "truncate, budget": ("truncate(budget=0.5)",),
    "gauge_fix": ("gauge_fix",),
    "sort_heads": ("sort_heads",),
    "permute_heads": ("permute_heads(order=[1, 0, 3, 2])",),
    "repeat_kv_heads": ("repeat_kv_heads",),
    "to_latent": ("to_latent",),
    "exact": ("exact",),
    "several": ("fold_norm", "prune_heads(number=1)", "truncate(rank=3)", "gauge_fix", "sort_heads"),
}


def as_plain(value: Any) -> Any:
    """Convert an answer to JSON: floats by all their digits, tensors by the hash of their bytes."""
    import numpy
    import torch

    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return repr(value)
        case torch.Tensor():
            stored = value.detach().cpu().contiguous()
            raw = stored.flatten().view(torch.uint8) if stored.numel() else stored.flatten()
            first = [repr(number) for number in stored.flatten()[:3].tolist()]
            return {
                "tensor": _hash(raw.numpy().tobytes()),
                "dtype": str(stored.dtype).removeprefix("torch."),
                "shape": list(stored.shape),
                "first": first,
            }
        case numpy.ndarray():
            return as_plain(torch.from_numpy(numpy.ascontiguousarray(value)))
        case numpy.generic():
            return as_plain(value.item())
        case Mapping():
            return {str(key): as_plain(item) for key, item in value.items() if key not in CHANGING}
        case Path():
            return str(value)
        case _ if isinstance(value, Sequence):
            return [as_plain(item) for item in value]
    raise TypeError(f"recorded.py cannot record a {type(value).__name__}: choose its fields")


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


class CommandFailedError(Exception):
    """A command that ended with another exit code than 0: a refusal to record."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Recorder:
    """The answers recorded so far, by name."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, str]] = {}
        self._began = time.monotonic()

    def record(self, name: str, answer: Callable[[], Any]) -> None:
        """Store what a call gives, or that it was refused or failed."""
        from triptych import TriptychError

        assert name not in self.answers, f"{name} is recorded twice"
        words = ""
        try:
            # JSON is written in the order of the keys, so that an order of fields is not compared.
            found = json.dumps(as_plain(answer()), ensure_ascii=False, sort_keys=True)
        except (TriptychError, CommandFailedError) as error:
            found = f"refused (exit code {error.exit_code})"
            words = str(error)
        except Exception as error:  # noqa: BLE001 - a fault of one version is an answer to compare, too
            found = f"failed: {type(error).__name__}"
            words = str(error)
        self.answers[name] = {"digest": _hash(found.encode()), "shown": found[:SHOWN]}
        if words:
            self.answers[name]["words"] = words

    def say(self, section: str) -> None:
        """Print a line of progress."""
        seconds = time.monotonic() - self._began
        print(f"{seconds:6.0f} s  {len(self.answers):4} answers  {section}", file=sys.stderr, flush=True)


def call(*arguments: object) -> str:
    """Call `python -m triptych` in this process; return what it printed."""
    before = sys.argv, signal.getsignal(signal.SIGINT)
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    sys.argv = ["triptych", *map(str, arguments)]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_module("triptych", run_name="__main__", alter_sys=True)
            except SystemExit as stop:
                code = int(stop.code or 0)
            out.flush()
            err.flush()
    finally:
        sys.argv = before[0]
        signal.signal(signal.SIGINT, before[1])
        gc.enable()  # the command turns it off while it imports
    if code:
        raise CommandFailedError(code, err.buffer.getvalue().decode().strip())
    return out.buffer.getvalue().decode()


def called_json(*arguments: object) -> Any:
    """Call the command with --json; return the record that it printed, or one for each line."""
    printed = call(*arguments, "--json")
    try:
        return json.loads(printed)
    except json.JSONDecodeError:
        return [json.loads(line) for line in printed.splitlines()]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what training prints on standard error."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


# What is taken of an answer.


def fields_of(found: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


def of_translation(found: Any) -> Any:
    """Texts, pieces and scores of a translation."""
    return [fields_of(one, "text", "pieces", "score", "log_prob") for one in found.candidates]


def of_continuation(found: Any) -> Any:
    """Text, token ids and log-probabilities of a continuation, or of several samples."""
    if isinstance(found, list | tuple):
        return [of_continuation(one) for one in found]
    return fields_of(found, "text", "ids", "log_probs", "score", "finish")


def of_likelihood(found: Any) -> Any:
    """Loss of a text, with its interval."""
    names = ("nats", "tokens", "num_bytes", "context", "stride", "documents", "interval", "nats_per_token")
    return fields_of(found, *names)


def of_scores(found: Any) -> Any:
    """BLEU and chrF of translations, with their intervals."""
    scores = [[one.name, one.value, one.low, one.high, one.signature] for one in found.scores]
    return {"translations": list(found.translations), "scores": scores}


def of_run(found: Any, heads: Sequence[str]) -> Any:
    """Logits, loss and the activations of some heads."""
    parts = ("q", "k", "v", "scores", "weights", "z", "projected", "output")
    return {
        "logits": found.logits,
        "loss": found.loss,
        "tokens": list(found.tokens),
        "heads": {head: fields_of(found[head], *parts) for head in heads},
    }


def of_tensors(file: Path) -> dict[str, Any]:
    """Tensors of a safetensors file: their names, and their values without their names."""
    from safetensors.torch import load_file

    tensors = load_file(file)
    digests = {name: as_plain(value)["tensor"] for name, value in tensors.items()}
    values = _hash("".join(sorted(digests.values())).encode())
    return {"count": len(tensors), "values": values, "names": _hash("\n".join(sorted(digests)).encode())}


def of_folder(folder: Path) -> dict[str, Any]:
    """Files of a checkpoint; the format of a run's own `config.json` may change, so it is left out."""
    found: dict[str, Any] = {}
    own = (folder / "recipe.toml").exists()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found[name] = of_tensors(file)
        elif file.suffix == ".onnx":
            found[name] = of_graph(file)
        elif file.suffix == ".json" and file.name not in {"certificate.json", "summary.json"}:
            if not (own and file.name == "config.json"):
                found[name] = _hash(json.dumps(as_plain(json.loads(file.read_text()))).encode())
        elif file.suffix in {".bin", ".spm", ".txt", ".vocab"}:
            found[name] = _hash(file.read_bytes())
    return found


def of_graph(file: Path) -> Any:
    """Operations and constants of an ONNX graph, without the names that exporting gives them."""
    import onnx

    graph = onnx.load(file).graph
    constants = sorted(_hash(onnx.numpy_helper.to_array(one).tobytes()) for one in graph.initializer)
    return {
        "inputs": [one.name for one in graph.input],
        "outputs": [one.name for one in graph.output],
        "operations": dict(Counter(node.op_type for node in graph.node)),
        "order": _hash(" ".join(node.op_type for node in graph.node).encode()),
        "constants": _hash("".join(constants).encode()),
    }


def of_trained(folder: Path) -> dict[str, Any]:
    """Weights and loss curve of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"weights": of_tensors(folder / "model.safetensors"), "metrics": as_plain(lines)}


def of_certificate(file: Path) -> Any:
    """A certificate without times, versions and sources; hashes of a run's own files are left out."""
    record = json.loads(file.read_text())
    if record["family"] == "triptych":
        del record["files"]
    return {key: value for key, value in record.items() if key != "source"}


# Models that are made here.


def write_toml(file: Path, tree: Mapping[str, Any]) -> Path:
    """Write a recipe: nested tables, and values as JSON has them."""

    def lines(table: Mapping[str, Any], at: str) -> Iterator[str]:
        if at:
            yield f"[{at}]"
        for key, value in table.items():
            if not isinstance(value, Mapping):
                yield f"{key} = {json.dumps(value)}"
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield from lines(value, f"{at}.{key}" if at else key)

    file.write_text("\n".join(lines(tree, "")) + "\n")
    return file


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with the values of another in it."""
    found = dict(base)
    for key, value in changes.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def translator_recipe(site: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the recipe of a tiny translator whose layers all have one kind of attention."""
    training = {
        "max_steps": 24, "warmup_steps": 8, "learning_rate": 0.01, "batch_tokens": 600, "log_every_steps": 4,
        "save_every_steps": 8, "threads": 1, "device": "cpu",
    }  # fmt: skip
    base = {
        "data": {
            "cache": "cache",
            "train": {"generated": 300, "generated_part": "train"},
            "valid": {"generated": 6, "generated_part": "valid"},
        },
        "tokenizer": {"vocab_size": 320},
        "model": {
            "preset": "tiny",
            "d_model": 32,
            "d_ff": 48,
            "num_heads": 4,
            "encoder": {"num_layers": 1, "attention": dict(site)},
            "decoder": {"num_layers": 2, "attention": dict(site), "cross_attention": dict(site)},
        },
        "training": training,
        "validation": {"every_steps": 12, "bleu": False, "metric": "loss"},
        "decoding": {"beam_size": 3, "alpha": 0.6, "max_extra_tokens": 12},
    }
    return merged(base, changes)


def language_recipe(task: str, site: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the recipe of a tiny model of the text that `write_text` writes."""
    base = {
        "task": task,
        "data": {"cache": "cache", "train": {"files": ["text.txt"], "documents": "line"}},
        "tokenizer": {"vocab_size": 320},
        "model": {"num_layers": 2, "d_model": 32, "num_heads": 4, "context": 48, "attention": dict(site)},
        "training": {
            "max_steps": 24,
            "warmup_steps": 4,
            "learning_rate": 0.01,
            "batch_size": 8,
            "log_every_steps": 4,
            "save_every_steps": 8,
            "threads": 1,
            "device": "cpu",
        },
        "validation": {"every_steps": 12},
    }
    return merged(base, changes)


def write_text(file: Path) -> None:
    """Write sentences of a small grammar, drawn with a fixed seed."""
    drawn = random.Random(7)
    people = ("the king", "a young woman", "my lord", "the old sailor", "every child")
    acts = ("sees", "follows", "remembers", "never forgets", "calls for")
    things = ("the sea", "a red ball", "two dogs", "his crown", "the long road home")
    ends = (".", "!", ", and says nothing.", " at night.", " once more.")
    lines = [
        f"{drawn.choice(people)} {drawn.choice(acts)} {drawn.choice(things)}{drawn.choice(ends)}"
        for _ in range(600)
    ]
    file.write_text("\n".join(lines) + "\n")


def train(name: str, tree: Mapping[str, Any]) -> Path:
    """Train a run of this recipe in the folder of the name."""
    import triptych

    with quiet():
        triptych.train(write_toml(Path(f"{name.replace('/', '-')}.toml"), tree), name)
    return Path(name)


def make_checkpoint(name: str) -> Path:
    """Write a tiny random model of a family of `transformers`, with biases and norms that do something."""
    import torch
    import transformers

    model_class, settings = FAMILIES[name]
    kind = getattr(transformers, model_class)
    torch.manual_seed(11)
    model = kind(kind.config_class(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = Path("families") / name
    with quiet():
        model.save_pretrained(folder)
    return folder


# Sections of a recording.


def record_translators(recorder: Recorder) -> None:
    """Record a trained Marian: searches, precisions, batches, measures."""
    import triptych

    source = "shared/checkpoints/marian-multi30k"
    searches: dict[str, dict[str, Any]] = {
        "greedy": GREEDY,
        "beam": {"beam_size": 4},
        "full": {"beam_size": 3, "alpha": 0.0, "stop": "full"},
        "n-best": {"beam_size": 4, "num_best": 3},
    }
    model = triptych.load(source, device="cpu")
    for name, search in searches.items():
        for number, one in enumerate(model.translate(list(SENTENCES), **search)):
            recorder.record(f"marian/{name}/{number}", lambda: of_translation(one))
    for number in (0, 2, 4):
        recorder.record(f"marian/alone/{number}", lambda: of_translation(model.translate(SENTENCES[number])))
    for precision in PRECISIONS:
        rounded = triptych.load(source, device="cpu", precision=precision)
        for name in ("greedy", "beam"):
            for number, one in enumerate(rounded.translate(list(SENTENCES), **searches[name])):
                recorder.record(f"marian/{precision}/{name}/{number}", lambda: of_translation(one))
    glossary = {"bike": "Rad"}
    recorder.record(
        "marian/glossary", lambda: of_translation(model.translate(SENTENCES[0], glossary=glossary))
    )
    recorder.record("marian/pieces", lambda: of_translation(model.translate(" ".join(SENTENCES * 2))))
    lines = [(SHARED / f"data/multi30k/test_2016_flickr.{side}") for side in ("en", "de")]
    if all(file.exists() for file in lines):
        texts = [file.read_text().splitlines()[:12] for file in lines]
        recorder.record("marian/evaluate", lambda: of_scores(model.evaluate(*texts, beam_size=2)))
    pair = SENTENCES[0], "Ein Mann fährt Fahrrad."
    recorder.record("marian/score", lambda: model.score(pair[0], pair[1]))
    heads = ("encoder.0.1", "decoder.2.3", "cross.1.0")
    recorder.record("marian/run", lambda: of_run(model.run(pair[0], target=pair[1]), heads))
    for place in heads:
        recorder.record(f"marian/attend/{place}", lambda: model.attend(*pair)[place])
    recorder.record("marian/ablate", lambda: of_translation(model.ablate("cross.1").translate(SENTENCES[1])))
    recorder.record("marian/inspect", lambda: model.inspect().rows())
    recorder.record("marian/cli", lambda: called_json("translate", source, SENTENCES[1], "--n-best", 2))


def record_generators(recorder: Recorder) -> None:
    """Record two trained language models: sampling, beams, precisions, changes, measures."""
    import triptych

    for short in ("gpt2", "llama-gqa"):
        record_generator(recorder, short, f"shared/checkpoints/{short}")
        model = triptych.load(f"shared/checkpoints/{short}", device="cpu")
        for name, text in (("wikitext", "data/wikitext2/valid.txt"), ("plays", "data/tinyshakespeare")):
            file = next(iter(sorted((SHARED / text).glob("*.txt"))), SHARED / text)
            if file.is_file():
                part = file.read_text()[:3000]
                recorder.record(
                    f"{short}/evaluate/{name}",
                    lambda: of_likelihood(model.evaluate(part, context=128, stride=64)),
                )


def record_generator(recorder: Recorder, short: str, source: str) -> None:
    """Record one language model."""
    import torch

    import triptych

    ways: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "sampled": {"temperature": 0.8, "seed": 1},
        "top-k": {"temperature": 1.0, "top_k": 20, "seed": 2},
        "top-p": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02, "seed": 3, "num_samples": 2},
        "penalised": {"temperature": 0.0, "repetition_penalty": 1.3},
        "beam": {"beam_size": 3, "num_samples": 2, "alpha": 0.5},
        "stop": {"temperature": 0.7, "seed": 5, "stop": ["."]},
    }
    model = triptych.load(source, device="cpu")
    prompts = list(PROMPTS)
    for name, way in ways.items():
        found = model.generate(prompts, max_new_tokens=16, **way)
        for number, one in enumerate(found):
            recorder.record(f"{short}/{name}/{number}", lambda: of_continuation(one))
    for precision in PRECISIONS:
        rounded = triptych.load(source, device="cpu", precision=precision)
        for number, one in enumerate(rounded.generate(prompts, max_new_tokens=16, temperature=0.0)):
            recorder.record(f"{short}/{precision}/{number}", lambda: of_continuation(one))
    text = PROMPTS[1]
    alone = {"max_new_tokens": 12, "temperature": 0.9, "seed": 1}
    recorder.record(f"{short}/alone", lambda: of_continuation(model.generate(text, **alone)))
    recorder.record(f"{short}/stream", lambda: "".join(model.generate(text, stream=True, **alone)))
    recorder.record(f"{short}/score", lambda: model.score(text))
    recorder.record(f"{short}/run", lambda: of_run(model.run(text), ("0.1", "1.0")))
    recorder.record(f"{short}/residual", lambda: model.run(text).residual(1))
    recorder.record(f"{short}/gradient", lambda: model.run(text, grad=True).gradient("1.0", "z"))
    recorder.record(f"{short}/attend", lambda: model.attend(text)[1, 2])
    recorder.record(f"{short}/inspect", lambda: model.inspect().rows())
    recorder.record(
        f"{short}/head",
        lambda: (
            fields_of(model[1, 2], "W_Q", "W_K", "W_V", "W_O")
            | {"ov": model[1, 2].ov.singular_values(), "between": str(model[1, 2].between)}
        ),
    )
    recorder.record(f"{short}/composition", lambda: [str(one) for one in model.composition("V").top(3)])
    recorder.record(f"{short}/cost", lambda: model.cost().total("parameters"))
    direction = model.run(text).residual(1)[-1].detach()
    changes: dict[str, Callable[[], Any]] = {
        "ablated": lambda: model.ablate("0.1, 1.*"),
        "mean": lambda: model.ablate("1.2", by="mean", text=PROMPTS[2]),
        "steered": lambda: model.steer("residual.1", direction, 0.5),
        "edited": lambda: model.edit("*.2", "scores", lambda scores: scores / 2),
        "tied": lambda: model.tie("1", "W_K", "W_V"),
        "unplaced": lambda: model.without_positions(),
    }
    for name, change in changes.items():
        recorder.record(
            f"{short}/changed/{name}",
            lambda: {
                "loss": change().evaluate(text).nats,
                "text": of_continuation(change().generate(text, max_new_tokens=6, temperature=0.0)),
            },
        )
    clean = torch.tensor([5, 9, 11, 30])
    corrupted = torch.tensor([5, 19, 11, 30])
    recorder.record(
        f"{short}/changed/patched", lambda: model.patch("1.1", model.run(clean)).run(corrupted).logits
    )
    recorder.record(f"{short}/over", lambda: called_json("attend", source, "--over", "short.txt"))
    recorder.record(f"{short}/cli", lambda: called_json("generate", source, text, "--max-new-tokens", 5))


def translators() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield name, sizes and attention of the translators to train.

    The kinds of models take turns. Nearly all of them can be written in every other format.
    """
    kinds: tuple[dict[str, Any], ...] = (
        {"norm": "post"},
        {"norm": "pre", "positions": {"scheme": "learned"}},
        {"norm": "post", "activation": "gelu", "tie_embeddings": "none"},
        {"norm": "pre", "positions": {"scheme": "none"}, "activation": "swish"},
    )
    for number, (name, options) in enumerate(SITES.items()):
        yield name, kinds[number % len(kinds)], {"projections": name, **options}
    grouped = {"projections": "grouped", "num_kv_heads": 2}
    yield "rotary", {"norm": "pre", "positions": {"scheme": "rotary"}}, grouped
    yield "alibi", {"positions": {"scheme": "alibi"}}, {"scale": "outside"}


def record_runs(recorder: Recorder) -> None:
    """Record translators of every parameterisation and language models of several, trained here."""
    import triptych

    for name, model, site in translators():
        folder = train(f"runs/{name}", translator_recipe(site, model=model, training={"max_steps": 12}))
        opened = triptych.load(folder, device="cpu")
        record_translations(recorder, f"own/{name}", opened)
        rounded = triptych.load(folder, device="cpu", precision="int8")
        recorder.record(f"own/{name}/int8", lambda: of_translation(rounded.translate(GERMAN[1])))
        recorder.record(
            f"own/{name}/run",
            lambda: of_run(opened.run(GERMAN[0], target="It is"), ("encoder.0.1", "cross.1.2")),
        )
        recorder.record(f"own/{name}/inspect", lambda: opened.inspect().rows())
    for name, (model, site) in LANGUAGE_MODELS.items():
        folder = train(f"runs/lm-{name}", language_recipe("language-model", site, model=model))
        if name in {"gpt2", "llama"}:
            record_generator(recorder, f"lm-{name}", str(folder))
            continue
        opened = triptych.load(folder, device="cpu")
        recorder.record(
            f"lm-{name}/greedy",
            lambda: of_continuation(opened.generate("the king", max_new_tokens=12, temperature=0.0)),
        )
        recorder.record(
            f"lm-{name}/sampled",
            lambda: of_continuation(opened.generate("a young", max_new_tokens=12, temperature=1.0, seed=4)),
        )
        recorder.record(f"lm-{name}/run", lambda: of_run(opened.run("the king sees"), ("0.1", "1.2")))
        recorder.record(
            f"lm-{name}/evaluate",
            lambda: of_likelihood(opened.evaluate("my lord remembers the sea.")),
        )
    recorder.record("cost", lambda: called_json("cost", "--num-kv-heads", 2))


def record_translations(recorder: Recorder, name: str, model: Any) -> None:
    """Record a few translations of a run."""
    for search, options in (("greedy", GREEDY), ("beam", {"num_best": 2})):
        for number, one in enumerate(model.translate(list(GERMAN), **options)):
            recorder.record(f"{name}/{search}/{number}", lambda: of_translation(one))


def record_rewrites(recorder: Recorder) -> None:
    """Record every rewrite of every family of `FAMILIES` and of some runs, with certificates."""
    import triptych

    sources = {name: make_checkpoint(name) for name in FAMILIES}
    # Runs are whole models with texts; of them, some rewrites that families of fixed sizes refuse.
    sources |= {f"own {name}": Path("runs") / name for name in ("stacked", "bilinear", "rotary")}
    for family, folder in sources.items():
        model = triptych.load(folder, device="cpu")
        for number, (name, steps) in enumerate(REWRITES.items()):
            out = Path("rewritten") / f"{family} {number}"
            # The whole models are compared once for each family: that takes most of the time.
            options = {"skip_refused": name == "exact", "compare": name in {"exact", "truncate"}}
            recorder.record(f"rewrite/{family}/{name}", lambda: rewritten(model, steps, out, options))
        recorder.say(f"rewrites of {family}")
    text = Path("short.txt")
    for short in ("gpt2", "llama-gqa"):
        source = Path("shared/checkpoints") / short
        if source.exists():
            model, out = triptych.load(source, device="cpu"), Path("rewritten") / f"{short} half"
            options: dict[str, Any] = {"calibration": text, "text": text}
            steps = ("truncate(budget=0.5, criterion='centred')",)
            recorder.record(f"rewrite/{short}/calibrated", lambda: rewritten(model, steps, out, options))
            recorder.record(
                f"rewrite/{short}/verified",
                lambda: called_json("verify", out, "--against", source, "--text", text),
            )
    gpt2, recipe = sources["gpt2"], Path("rewrite.toml")
    recipe.write_text(
        'skip_refused = true\ndo = ["fold_norm", "truncate(rank=2, layers=[0])", "gauge_fix"]\n'
    )
    for name, arguments in {
        "exact": ("--exact",),
        "recipe": ("--recipe", recipe),
        "budget": ("--budget", 0.5),
        "energy": ("--energy", 0.9, "--layers", "1"),
    }.items():
        out = Path("rewritten") / f"command {name}"
        recorder.record(f"rewrite/command/{name}", lambda: rewritten_by_command(gpt2, out, arguments))
    planned = ("--do", "truncate(rank=2)", "--do", "gauge_fix", "--plan")
    recorder.record("rewrite/command/plan", lambda: called_json("rewrite", gpt2, *planned))
    recorder.record("rewrite/list", lambda: call("rewrite", "--list"))


def rewritten(model: Any, steps: Sequence[str], out: Path, options: Mapping[str, Any]) -> Any:
    """Rewrite a model; return the digests of its files and its certificate."""
    model.rewrite(*steps, out=out, **options)
    return {"files": of_folder(out), "certificate": of_certificate(out / "certificate.json")}


def rewritten_by_command(source: Path, out: Path, arguments: Sequence[object]) -> Any:
    """Rewrite a model on the command line; return the digests of its files and its certificate."""
    call("rewrite", source, "--out", out, *arguments)
    return {"files": of_folder(out), "certificate": of_certificate(out / "certificate.json")}


def record_exports(recorder: Recorder) -> None:
    """Record runs and checkpoints in other formats."""
    exports: list[tuple[str, tuple[object, ...]]] = []
    for name, _, _ in translators():
        exports.append((f"runs/{name}", ("--to", "hf")))
        exports.append((f"runs/{name}", ("--to", "ctranslate2")))
    exports += [
        ("runs/grouped", ("--to", "ctranslate2", "--quantization", "int8")),
        ("runs/stacked", ("--to", "onnx")),
        ("runs/grouped", ("--to", "onnx")),
        *((f"runs/lm-{name}", ("--to", "hf")) for name in LANGUAGE_MODELS),
        *((f"runs/lm-{name}", ("--to", "ctranslate2")) for name in ("gpt2", "llama", "normed")),
    ]
    if Path("shared/checkpoints").exists():
        exports.append(("shared/checkpoints/marian-multi30k", ("--from", "hf")))
        exports += [(f"shared/checkpoints/{name}", ("--to", "ctranslate2")) for name in ("gpt2", "llama-gqa")]
    for number, (source, arguments) in enumerate(exports):
        out = Path("exports") / str(number)
        words = " ".join(map(str, arguments)).replace("--", "")
        recorder.record(f"export/{source}/{words}", lambda: exported(source, out, arguments))
        if number % 10 == 9:
            recorder.say(f"export {number + 1} of {len(exports)}")


def exported(source: str, out: Path, arguments: Sequence[object]) -> dict[str, Any]:
    """Convert a model; return the digests of the files, and what was changed for the format."""
    record = called_json("convert", source, "--out", out, *arguments)
    return {"files": of_folder(out), "folded": record["folded"], "parameters": record["parameters"]}


def record_training(recorder: Recorder) -> None:
    """Record five trained runs, and one that was killed and resumed."""
    import triptych

    dropout = {"dropout": 0.1}
    trained = {
        "factored": translator_recipe({"projections": "factored"}, model=dropout, training={"max_steps": 40}),
        "latent": translator_recipe(
            {"projections": "latent", "d_latent": 12},
            model={"positions": {"scheme": "learned"}},
            training={"max_steps": 30, "optimizer": "adamw", "weight_decay": 0.1, "rdrop": 0.5},
        ),
        "language": language_recipe(
            "language-model",
            {"projections": "grouped", "num_kv_heads": 2},
            model={**dropout, "positions": {"scheme": "rotary"}},
            training={"max_steps": 40, "optimizer": "muon", "clip_norm": 1.0},
        ),
        "masked": language_recipe("masked-language-model", {}, model=dropout, training={"max_steps": 40}),
    }
    for name, tree in trained.items():
        folder = train(f"trained/{name}", tree)
        recorder.record(f"train/{name}", lambda: of_trained(folder))
    record_masked(recorder, Path("trained/masked"))
    recipe = translator_recipe({"projections": "symmetric"}, training={"max_steps": 20})
    teacher = triptych.load("trained/factored", device="cpu")
    with quiet():
        student = teacher.distil(
            write_toml(Path("student.toml"), recipe), "distilled", beam_size=2, teacher_weight=0.4
        )
        triptych.train(student.recipe, "distilled/student")
    recorder.record("train/distilled", lambda: of_trained(Path("distilled/student")))
    recorder.record("train/distilled/text", lambda: _hash(Path("distilled/train.jsonl").read_bytes()))
    record_resumed(recorder, "train/resumed", interrupted(Path("trained/interrupted")))
    if Path("shared/checkpoints").exists():
        tree = language_recipe("language-model", {}, training={"max_steps": 4, "batch_size": 2})
        del tree["tokenizer"], tree["model"]
        tree["model"] = {"checkpoint": "shared/checkpoints/gpt2", "context": 32}
        folder = train("trained/continued", tree)
        recorder.record("train/continued", lambda: of_trained(folder))


def record_masked(recorder: Recorder, folder: Path) -> None:
    """Record a masked language model."""
    import triptych

    model = triptych.load(folder, device="cpu")
    texts = ("the king [MASK] the sea.", "every [MASK] calls for [MASK] dogs.")
    for number, text in enumerate(texts):
        recorder.record(
            f"masked/fill/{number}",
            lambda: [[[one.text, one.probability] for one in mask] for mask in model.fill(text, 3)],
        )
    recorder.record("masked/attend", lambda: model.attend("the king sees the sea.")[1, 2])
    recorder.record("masked/cli", lambda: called_json("fill", folder, texts[0]))


def interrupted(folder: Path) -> Path:
    """Train in a process of its own, and kill it in the middle."""
    tree = translator_recipe({"projections": "grouped", "num_kv_heads": 2}, training={"max_steps": 200})
    recipe = write_toml(Path("interrupted.toml"), tree)
    command = [sys.executable, "-m", "triptych", "train", str(recipe), "--out", str(folder), "--quiet"]
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (folder / "state" / "last.safetensors").exists():
            time.sleep(0.002)
        process.kill()
        if process.wait() == -signal.SIGKILL:
            return folder
    raise RuntimeError("the run ended before it could be killed")


def record_resumed(recorder: Recorder, name: str, folder: Path) -> None:
    """Resume a run that was killed, and record what it became; the step of the kill makes no difference."""
    import triptych

    with quiet():
        triptych.resume(folder)
    recorder.record(name, lambda: of_trained(folder))


def record_kept(recorder: Recorder, kept: Path) -> None:
    """Record runs of an older version; make them if the folder has none."""
    import triptych

    names = ("factored", "latent", "language", "masked")
    if not kept.exists():
        partial = kept.with_name(f"{kept.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        for name in names:
            shutil.copytree(Path("trained") / name, partial / name)
        shutil.copytree(interrupted(Path("unfinished")), partial / "interrupted")
        partial.rename(kept)
    shutil.copytree(kept, "kept")
    for name in ("factored", "latent"):
        model = triptych.load(f"kept/{name}", device="cpu")
        record_translations(recorder, f"kept/{name}", model)
        recorder.record(f"kept/{name}/evaluate", lambda: of_run(model.run(GERMAN[2], target="On"), ()))
    language = triptych.load("kept/language", device="cpu")
    recorder.record(
        "kept/language",
        lambda: of_continuation(language.generate("the king", max_new_tokens=12, temperature=1.0, seed=9)),
    )
    masked = triptych.load("kept/masked", device="cpu")
    recorder.record("kept/masked", lambda: [one.text for one in masked.fill("the king [MASK] the sea.")[0]])
    with quiet():
        triptych.resume("kept/latent", ["training.max_steps=36"])
    recorder.record("kept/latent, longer", lambda: of_trained(Path("kept/latent")))
    record_resumed(recorder, "kept/interrupted", Path("kept/interrupted"))


def record(file: Path, kept: Path | None) -> None:
    """Record every section in a temporary folder, where all names are relative."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    recorder = Recorder()
    home = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="recorded-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        os.chdir(folder)
        try:
            prepare()
            sections: list[Callable[[Recorder], None]] = [record_runs, record_rewrites, record_exports]
            sections.append(record_training)
            if Path("shared/checkpoints").exists():
                sections = [record_translators, record_generators, *sections]
            if kept is not None:
                sections.append(lambda recorder: record_kept(recorder, kept))
            for section in sections:
                section(recorder)
                recorder.say(getattr(section, "__doc__", None) or "Record runs of an older version.")
        finally:
            os.chdir(home)
    file.write_text(json.dumps(recorder.answers, indent=1, ensure_ascii=False) + "\n")
    counts = Counter(name.split("/")[0] for name in recorder.answers)
    shown = [answer["shown"] for answer in recorder.answers.values()]
    refused = sum(words.startswith("refused") for words in shown)
    failed = [name for name, answer in recorder.answers.items() if answer["shown"].startswith("failed")]
    print(f"{len(shown)} answers ({refused} refusals, {len(failed)} failures) in {file}")
    for name in failed:
        print(f"failed: {name}: {recorder.answers[name]['shown']}: {recorder.answers[name]['words']}")
    print(", ".join(f"{name} {count}" for name, count in counts.items()))


def prepare() -> None:
    """Write the texts, and link the folder of checkpoints and data."""
    if SHARED.exists():
        Path("shared").symlink_to(SHARED)
    for name in ("families", "rewritten", "exports", "runs", "trained"):
        Path(name).mkdir()
    write_text(Path("text.txt"))
    Path("short.txt").write_text("".join(Path("text.txt").read_text().splitlines(keepends=True)[:40]))


def compare(old: Path, new: Path) -> int:
    """Print each difference of two recordings; return 1 if there is one."""
    first, second = (json.loads(file.read_text()) for file in (old, new))
    wrong = 0
    for name in [*first, *(name for name in second if name not in first)]:
        one, other = first.get(name), second.get(name)
        if one is None or other is None:
            wrong += 1
            print(f"{name}: only in {new if one is None else old}")
        elif one["digest"] != other["digest"]:
            wrong += 1
            print(f"{name}:\n  {old}: {one['shown']}\n  {new}: {other['shown']}")
        elif one.get("words") != other.get("words"):
            print(f"{name}: the message changed (not counted):\n  {one.get('words')}\n  {other.get('words')}")
    print(f"{len(first)} and {len(second)} answers, {wrong} differ")
    return int(wrong > 0)


def main() -> int:
    """Parse the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="record the version on PYTHONPATH")
    recording.add_argument("file", type=Path)
    recording.add_argument("--runs", type=Path, help="a folder of runs of an older version; made if missing")
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    asked = parser.parse_args()
    if asked.command == "compare":
        return compare(asked.old, asked.new)
    record(asked.file.resolve(), asked.runs and asked.runs.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
