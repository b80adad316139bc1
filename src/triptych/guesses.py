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
    "lm_head": "the output layer is model.reader.model.head.output",
    "embed_tokens": "the table is model.reader.model.embeddings.table.weight",
    "unembed": "the output layer is model.reader.model.head.output",
    "embed": "the table is model.reader.model.embeddings.table.weight",
    "ln_final": "the last norm is model.reader.model.final_norm",
    "OV_circuit": "model[3, 2].ov is W_V W_O as a form",
    "logit_lens": "model.lens(text).top()",
    "logit_attribution": "model.lens(text).attribution(' mat', against=' dog')",
    "activation_patching": "model.sweep(clean, corrupted, metric), or model.patch('3.2', run) of one head",
    "get_attention_scores": "model.run(text)['3.2'].scores are the inputs of the softmax",
    "generate_text": "model.generate(text)",
    "model": "model.reader.model is the torch module",
    "named_hooks": _A_CHANGE,
    "intervene": _A_CHANGE,
    "to_single_token": "model.tokenizer.encode(text)[0] has the ids of a text",
    "gradients": _READY,
    "zero_grad": _READY,
}
# Attributes of layers and heads.
OF_LAYER: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "self_attn",
            "attn",
            "attention",
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "c_attn",
            "c_proj",
            "weight",
        ),
        "a layer has model[3].W_Q, .W_K, .W_V, .W_O of all heads, and model[3].weights as stored",
    ),
    "mlp": "attention alone is open by its matrices; model.reader.model.blocks[3] has the whole block",
    "W_QK": "model[3, 2].W_QK of one head",
    "W_OV": "model[3, 2].W_OV of one head",
    "pattern": _PATTERN,
    "n_heads": "model[3].num_heads",
    "output": "model.run(text)['3'].output",
}
OF_HEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "weight", "query", "key", "value"),
        "a head has model[3, 2].W_Q, .W_K, .W_V, .W_O and the biases model[3, 2].b_Q, .b_K, .b_V",
    ),
    "QK": "model[3, 2].qk is W_Q W_Kᵀ as a form, model[3, 2].W_QK the matrix",
    "OV": "model[3, 2].ov is W_V W_O as a form, model[3, 2].W_OV the matrix",
    "pattern": _PATTERN,
    "z": "model.run(text)['3.2'].z",
    "svd": "model[3, 2].ov.svd(), model[3, 2].qk.svd()",
    "eigenvalues": "model[3, 2].ov.eigenvalues()",
}
# Attributes of runs and of attention on a text.
OF_RUN: Mapping[str, str] = {
    "attentions": "run['3.2'].weights of a head, run['3'].weights of a layer",
    "attention": "run['3.2'].weights of a head, run['3'].weights of a layer",
    "pattern": "run['3.2'].weights of a head",
    "hidden_states": "run.residual(3) is the stream before block 3",
    "cache": _EVERY_ACTIVATION,
    "keys": "run['3.2'].k of a head",
    "input_ids": "run.ids",
    "str_tokens": "run.tokens",
    "probs": "run.logits.softmax(-1)",
    "last_hidden_state": "run.residual(12), the number of blocks, is the stream at the end",
    "save": "tensors of a run are values already: run.logits",
}
OF_ATTENTION: Mapping[str, str] = {
    "attentions": "attention['3'] is [heads, queries, keys], attention['3.2'] of one head",
    "pattern": "attention['3.2'] is [queries, keys] of a head",
    "plot": "attention in a notebook, or attention.page('page.html')",
    "show": "attention in a notebook, or attention.page('page.html')",
    "heatmap": "attention.save('head.svg', heads='3.2') draws a head",
    "head_view": "attention in a notebook, or attention.page('page.html')",
    "numpy": "attention.to_numpy() is [layers, heads, queries, keys]",
    "shape": "attention.to_numpy().shape, or attention['3'].shape of a layer",
    "mean": "attention['3'].mean(0) is the mean of a layer's heads",
    "to_dataframe": "attention.to_pandas()",
}
# Names of the package.
OF_PACKAGE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "HookedTransformer",
            "TransformerBridge",
            "NNsight",
            "AutoModel",
            "AutoModelForCausalLM",
            "AutoModelForSeq2SeqLM",
            "AutoTokenizer",
            "from_pretrained",
            "load_model",
            "open",
            "pipeline",
        ),
        "triptych.load(name) opens a model with its tokenizer",
    ),
    **dict.fromkeys(
        ("head_view", "model_view", "neuron_view", "attention_pattern"),
        "triptych.load(name).attend(text) is shown in a notebook; .page(path) writes the page",
    ),
    "ActivationCache": "triptych.load(name).run(text) has every activation",
    "Trainer": "triptych.train(recipe)",
    "compare": "triptych.diff(a, b) of two models",
    "inspect": "triptych.load(name).inspect()",
    "generate": "triptych.load(name).generate(text)",
    "translate": "triptych.load(name).translate(text)",
    "attend": "triptych.load(name).attend(text)",
    "convert": "triptych.load(name).convert(path, 'hf')",
}
TABLES: Mapping[str, Mapping[str, str]] = {
    "model": OF_MODEL,
    "layer": OF_LAYER,
    "head": OF_HEAD,
    "run": OF_RUN,
    "attention": OF_ATTENTION,
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
    "load_in_8bit": "precision='int8' of load",
    "load_in_4bit": "precision='int8' of load",
    "attn_implementation": "nothing: weights are computed whatever kernel runs",
    "trust_remote_code": "nothing: code of a checkpoint is never executed",
    "revision": "the name with @revision in load",
    "prepend_bos": "nothing: a text is read as its tokenizer reads it; token ids are taken as they are",
    "names_filter": "run['3.2'] of the run",
    "skip_special_tokens": "nothing: a result has none",
}


def about_attribute(kind: str, name: str) -> str:
    """Return the error for a missing attribute of a model, a layer, a head, a run, or attention on a text."""
    line = TABLES[kind].get(name)
    article = "an" if kind == "attention" else "a"
    return f"{article} {kind} has no {name!r}" + (f": {line}" if line else "")


def about_name(name: str) -> str:
    """Return the error for a missing name of the package."""
    line = OF_PACKAGE.get(name)
    return f"module 'triptych' has no attribute {name!r}" + (
        f": {line}" if line else ""
    )


def about_call() -> str:
    """Return the error for a model called like a function."""
    return "a model is not called: model.run(text).logits, or model.generate(text) to continue a text"


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
