"""Names of other libraries with their equivalents in this library, for error messages about unknown names.

The names belong to TransformerLens, nnsight, transformers, bertviz and torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

_EVERY_ACTIVATION = (
    "run = model.run(text) has every activation: run['3.2'].q, .k, .v, .scores, .weights, .z, .output, and "
    "run.residual(3)"
)
_PATTERN = (
    "model.attend(text)[3, 2] has the weights of head 2 of layer 3, [queries, keys]"
)
_A_CHANGE = (
    "a change gives a new model: model.ablate('3.2'), .patch, .steer, .edit(place, what, with_=function); "
    "there are no hooks to remove"
)
_WEIGHTS = (
    "the matrices are model[3, 2].W_Q, .W_K, .W_V, .W_O, and model[3].W_Q of all heads"
)
_ENCODE = "token ids are model.tokenizer.encode(text)[0], and model.tokenizer.decode([ids])[0] is their text"
_READY = "a model has no mode and no gradients to switch: model.run(text, grad=True) has gradients"
_DEVICE = "device and dtype are of opening: triptych.load(source, device='cuda:0', dtype='bfloat16')"
_MODULE = "model.reader.model is the torch module, with parameters(), state_dict() and named_modules()"

# Attributes of a model.
OF_MODEL: Mapping[str, str] = {
    "run_with_cache": _EVERY_ACTIVATION,
    "run_with_hooks": _A_CHANGE,
    "add_hook": _A_CHANGE,
    "hooks": _A_CHANGE,
    "reset_hooks": _A_CHANGE,
    "register_forward_hook": _A_CHANGE,
    "hook_dict": _EVERY_ACTIVATION,
    "hook_pattern": _PATTERN,
    "trace": f"{_EVERY_ACTIVATION}; {_A_CHANGE}",
    "scan": _EVERY_ACTIVATION,
    "attention": _PATTERN,
    "attentions": _PATTERN,
    "get_attention": _PATTERN,
    "output_attentions": _PATTERN,
    "head_view": "model.attend(text) in a notebook, model.attend(text).page('page.html') elsewhere",
    "hidden_states": "run = model.run(text): run.residual(3) is the stream before block 3",
    "cache": _EVERY_ACTIVATION,
    "blocks": "model.layers are the attention layers, model[3] one of them, model[3, 2] a head",
    "transformer": "model.layers are the attention layers, model[3] one of them, model[3, 2] a head",
    "heads": "model[3, 2] is a head, model[3].heads are the heads of a layer",
    "W_Q": _WEIGHTS,
    "W_K": _WEIGHTS,
    "W_V": _WEIGHTS,
    "W_O": _WEIGHTS,
    "QK": "model[3, 2].qk is W_Q W_Kᵀ as a form, model[3, 2].W_QK the matrix",
    "OV": "model[3, 2].ov is W_V W_O as a form, model[3, 2].W_OV the matrix",
    "W_E": "the table is model.reader.model.embeddings.table.weight",
    "W_U": "the output layer is model.reader.model.head.output.weight",
    "to_tokens": _ENCODE,
    "to_string": _ENCODE,
    "to_str_tokens": "model.tokenizer.pieces(ids) has each token in readable form",
    "tokenize": _ENCODE,
    "encode": _ENCODE,
    "decode": _ENCODE,
    "forward": "run = model.run(text): run.logits",
    "logits": "run = model.run(text): run.logits",
    "loss": "model.evaluate(text).nats_per_token, and model.score(text) of each token",
    "perplexity": "model.evaluate(text).perplexity",
    "predict": "model.generate(text), model.translate(text), model.fill(text) or model.run(text)",
    "parameters": _MODULE,
    "named_parameters": _MODULE,
    "named_modules": _MODULE,
    "modules": _MODULE,
    "state_dict": _MODULE,
    "load_state_dict": f"{_MODULE}; model.replace(place, W_Q=…) gives a model with other weights",
    "to": _DEVICE,
    "cuda": _DEVICE,
    "cpu": _DEVICE,
    "half": _DEVICE,
    "float": _DEVICE,
    "bfloat16": _DEVICE,
    "eval": _READY,
    "train": "triptych.train(recipe) trains; model.evaluate(text) measures",
    "no_grad": _READY,
    "requires_grad_": _READY,
    "save_pretrained": "model.save(folder) writes the model in the format that it came from",
    "push_to_hub": "model.save(folder), then upload the folder with huggingface_hub",
    "from_pretrained": "triptych.load(name)",
    "prune_heads": "model.ablate('3.2') switches a head off; model.rewrite('prune_heads') removes heads",
    "num_params": "model.num_parameters",
    "n_layers": "model.num_layers",
    "n_heads": "model[3].num_heads",
    "num_heads": "model[3].num_heads: layers may differ",
    "hidden_size": "model.d_model",
    "vocab_size": "model.tokenizer.vocab_size",
    "cfg": "model.config has the fields of config.json",
    "summary": "print(model), and model.inspect() of every head",
    "compare": "triptych.diff(a, b) of two models",
}
# Keyword arguments of verbs.
OF_VERBS: Mapping[str, str] = {
    "max_length": "max_new_tokens, the number of tokens to add",
    "max_tokens": "max_new_tokens, the number of tokens to add",
    "num_beams": "beam_size",
    "beams": "beam_size",
    "beam": "beam_size",
    "length_penalty": "alpha, the exponent of the length penalty",
    "num_return_sequences": "num_samples of generate, num_best of translate",
    "do_sample": "temperature: 0 always takes the most probable token",
    "output_attentions": "model.attend(text)",
    "return_dict": "nothing: a result has names",
    "stopping_criteria": "stop='a string'",
    "stop_strings": "stop='a string'",
    "streamer": "stream=True",
    "tgt_lang": "languages=(source, target) of load",
    "src_lang": "languages=(source, target) of load",
    "device_map": "device of load",
    "torch_dtype": "dtype of load",
    "text_pair": "a tuple of both as the text: (first, second)",
    "pair": "a tuple of both as the text: (first, second)",
    "batch_size": "nothing: a list of texts is put into batches",
}


def about_attribute(name: str) -> str:
    """Return the error for a missing attribute of a model."""
    line = OF_MODEL.get(name)
    return f"a model has no {name!r}" + (f": {line}" if line else "")


def about_arguments(verb: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return the error for keyword arguments that a verb does not have."""
    name = sorted(unknown)[0]
    near = OF_VERBS.get(name) or ", ".join(get_close_matches(name, known, n=1))
    return f"{verb} has no argument {name!r}" + (f": use {near}" if near else "")


def about_places(verb: str, given: Sequence[object]) -> str:
    """Return the end of an error for a layer and a head given as two arguments; "" for other arguments."""
    match given:
        case [_, int(layer), int(head), *_]:
            return f"; head {head} of layer {layer} is {verb}('{layer}.{head}')"
    return ""
