"""Names of other libraries with their equivalents in this library, for error messages about unknown names.

The names belong to TransformerLens, nnsight, transformers, bertviz and torch.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn, final

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
_ENCODE = "token ids are model.encode(text), and model.decode(ids) is their text"
_READY = "a model has no mode and no gradients to switch: model.run(text, grad=True) has gradients"
_DEVICE = "device and dtype are of opening: triptych.load(source, device='cuda:0', dtype='bfloat16')"
_MODULE = "model.reader.model is the torch module, with parameters(), state_dict() and named_modules()"
_TABLE = "the table is model.reader.model.embeddings.table.weight"
_OUTPUT = "the output layer is model.reader.model.head.output"
_LAYERS = (
    "model.layers are the attention layers, model[3] one of them, model[3, 2] a head"
)
_BLOCK = "attention alone is open by its matrices; model.reader.model.blocks[3] has the whole block"
_HEAD_SIZE = "model[3, 2].d_k and model[3, 2].d_v are of a head"
_FIELDS = "model.config has the fields of config.json"
_ADAPTER = (
    "triptych.load(base, adapter=folder) merges an adapter of PEFT when a model is read"
)
_PAGE = (
    "model.attend(text) in a notebook, model.attend(text).page('page.html') elsewhere"
)
_PARTS = "model.lens(text).attribution(token, against=another) is a logit as a sum over heads and layers"
_GRADIENT = "model.run(text, grad=True).gradient('3.2', 'z') is a gradient of the loss"
_OUTPUTS = "run = model.run(text): run.logits, and run['3'].output of a layer"

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
    **dict.fromkeys(("head_view", "model_view", "neuron_view"), _PAGE),
    "hidden_states": "run = model.run(text): run.residual(3) is the stream before block 3",
    "cache": _EVERY_ACTIVATION,
    "blocks": _LAYERS,
    "transformer": _LAYERS,
    "heads": "model[3, 2] is a head, model[3].heads are the heads of a layer",
    "W_Q": _WEIGHTS,
    "W_K": _WEIGHTS,
    "W_V": _WEIGHTS,
    "W_O": _WEIGHTS,
    "QK": "model[3, 2].qk is W_Q W_Kᵀ as a form, model[3, 2].W_QK the matrix",
    "OV": "model[3, 2].ov is W_V W_O as a form, model[3, 2].W_OV the matrix",
    "W_E": _TABLE,
    "W_U": _OUTPUT,
    "to_tokens": _ENCODE,
    "to_string": _ENCODE,
    "to_str_tokens": "model.tokenizer.pieces(ids) has each token in readable form",
    "to_single_str_token": _ENCODE,
    "tokenize": _ENCODE,
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
    "cfg": _FIELDS,
    "summary": "print(model), and model.inspect() of every head",
    "compare": "triptych.diff(a, b) of two models",
    "lm_head": _OUTPUT,
    "embed_tokens": _TABLE,
    "unembed": _OUTPUT,
    "embed": _TABLE,
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
    "to_single_token": _ENCODE,
    "gradients": _READY,
    "zero_grad": _READY,
    "backward": _GRADIENT,
    "grad": _GRADIENT,
    "integrated_gradients": _GRADIENT,
    "loss_fn": "model.run(text).losses has the loss of each token",
    "tokens": "model.run(text).tokens, or model.tokenizer.pieces(model.encode(text))",
    "get_token_position": "model.run(text).tokens are the tokens of a text in their order",
    "tokens_to_residual_directions": _OUTPUT,
    "get_output_embeddings": _OUTPUT,
    "get_input_embeddings": _TABLE,
    "resize_token_embeddings": f"a vocabulary keeps its size; {_TABLE}",
    **dict.fromkeys(("W_in", "W_out", "mlp", "ln1", "ln2"), _BLOCK),
    "W_pos": "the positions are model.reader.model.embeddings.positions",
    **dict.fromkeys(("bert", "roberta", "gpt_neox", "h", "base_model"), _LAYERS),
    **dict.fromkeys(("d_head", "head_dim", "d_k"), _HEAD_SIZE),
    **dict.fromkeys(
        ("n_ctx", "d_vocab", "d_mlp", "max_position_embeddings"),
        _FIELDS,
    ),
    "generation_config": "model.reader.generation.settings has the settings of generation_config.json",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model[3].num_heads: layers may differ",
    "all_composition_scores": "model.composition('Q'), or 'K', or 'V'",
    "set_use_attn_result": _EVERY_ACTIVATION,
    "get_encoder": "model['encoder.3'] is layer 3 of an encoder",
    "get_decoder": "model['decoder.3'] is layer 3 of a decoder",
    "cross_attentions": "model.attend(text)['cross.3'] has the weights of a layer of cross-attention",
    "encoder_attentions": "model.attend(text)['encoder.3'] has the weights of a layer of the encoder",
    "decoder_attentions": "model.attend(text)['decoder.3'] has the weights of a layer of the decoder",
    **dict.fromkeys(("output", "input", "inputs"), _OUTPUTS),
    **dict.fromkeys(("session", "invoke", "cache_all"), _EVERY_ACTIVATION),
    **dict.fromkeys(
        ("load_adapter", "add_adapter", "merge_adapter", "merge_and_unload"), _ADAPTER
    ),
    **dict.fromkeys(
        ("gradient_checkpointing_enable", "compile", "hf_model", "original_model"),
        _MODULE,
    ),
    **dict.fromkeys(("logit_attrs", "direct_logit_attribution"), _PARTS),
    **dict.fromkeys(("chat", "apply_chat_template"), "model.generate(text, chat=True)"),
    **dict.fromkeys(("sample", "complete", "ask"), "model.generate(text)"),
    "quantize": "triptych.load(source, precision='int8')",
    "fit": "triptych.train(recipe) trains; model.evaluate(text) measures",
    "rollout": "model.attend(text).rollout()",
    "visualize": _PAGE,
    "plot": _PAGE,
}
# Names of activations in a cache of TransformerLens, as `cache["pattern", 3]`.
OF_CACHE: Mapping[str, str] = {
    **{name: f"run['3'].{name}" for name in ("q", "k", "v", "z")},
    "pattern": "run['3'].weights",
    "attn_scores": "run['3'].scores",
    "result": "run['3.2'].projected",
    "attn_out": "run['3'].output",
    "resid_pre": "run.residual(3)",
    "resid_post": "run.residual(4), the stream before the next block",
    **dict.fromkeys(
        ("resid_mid", "mlp_out", "embed", "pos_embed"),
        "run.residual(3), the stream before block 3; inside a block only attention is read",
    ),
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
    "mlp": _BLOCK,
    **dict.fromkeys(("hook_pattern", "attentions"), _PATTERN),
    **dict.fromkeys(("hook_q", "hook_k", "hook_v", "hook_z"), _EVERY_ACTIVATION),
    "num_attention_heads": "model[3].num_heads",
    **dict.fromkeys(("d_head", "head_dim", "d_k", "d_v"), _HEAD_SIZE),
    "input": "model.run(text).residual(3) is the stream before block 3",
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
    **dict.fromkeys(("attention", "attend"), _PATTERN),
    **dict.fromkeys(("q", "k", "v", "scores", "output"), _EVERY_ACTIVATION),
    **dict.fromkeys(("d_head", "head_dim"), _HEAD_SIZE),
    "ablate": "model.ablate('3.2')",
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
    "value": "tensors of a run are values already: run.logits",
    "top": "model.lens(text).top(5) has the most probable tokens after each block",
    "logprobs": "model.score(text) has the log-probability of each token",
    "past_key_values": "run['3'].k and run['3'].v of a layer",
    "encoder_attentions": "run['3'].weights of a layer, whose name is 'encoder.3' in an encoder-decoder",
    "decoder_attentions": "run['3'].weights of a layer, whose name is 'decoder.3' in an encoder-decoder",
    "cross_attentions": "run['3'].weights of a layer, whose name is 'cross.3' in an encoder-decoder",
    "encoder_last_hidden_state": "run.residual('encoder.6'), the number of blocks, is the stream at the end",
    "accumulated_resid": "run.residual(3), and model.lens(text).logits(stage)",
    "stack_activation": "run['3'].z of a layer, [heads, queries, d_v]",
    "remove_batch_dim": "nothing to remove: a run is of one text, and run.logits is [length, vocab]",
    **dict.fromkeys(
        (
            "attribution",
            "decompose_resid",
            "get_full_resid_decomposition",
            "logit_attrs",
            "stack_head_results",
        ),
        _PARTS,
    ),
    **dict.fromkeys(("backward", "grad"), _GRADIENT),
    "to": "run.logits.to(device), and so each tensor",
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
    **dict.fromkeys(
        ("model_view", "neuron_view", "html", "to_html"),
        "attention in a notebook, or attention.page('page.html')",
    ),
    **dict.fromkeys(
        ("encoder_attentions", "decoder_attentions", "cross_attentions"),
        "attention['encoder.3'], attention['decoder.3'] and attention['cross.3'] are [heads, queries, keys]",
    ),
    **dict.fromkeys(
        ("layers", "heads", "argmax", "max", "detach"),
        "attention['3'] is a tensor of a layer, [heads, queries, keys]",
    ),
    "align_words": "attention.words('3.2').weights is between words",
    "sentence_b_start": "attention.second is the first token of the second text",
}
# Names of the package.
OF_PACKAGE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "HookedTransformer",
            "HookedEncoder",
            "HookedEncoderDecoder",
            "TransformerBridge",
            "NNsight",
            "TransformersModel",
            "AutoConfig",
            "AutoModel",
            "AutoModelForMaskedLM",
            "AutoModelForSequenceClassification",
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
    **dict.fromkeys(
        ("Trainer", "TrainingArguments", "Seq2SeqTrainer"), "triptych.train(recipe)"
    ),
    "FactoredMatrix": "triptych.BilinearForm, as triptych.load(name)[3, 2].qk",
    "run_with_cache": "triptych.load(name).run(text) has every activation",
    "set_seed": "seed=… of a verb, as triptych.load(name).generate(text, seed=1)",
    "logit_lens": "triptych.load(name).lens(text)",
    "lens": "triptych.load(name).lens(text)",
    "evaluate": "triptych.load(name).evaluate(text)",
    "ablate": "triptych.load(name).ablate('3.2')",
    "fill": "triptych.load(name).fill(text)",
    "tokenizer": "triptych.load(name).tokenizer",
    "PeftModel": _ADAPTER,
    "compare": "triptych.diff(a, b) of two models",
    "inspect": "triptych.load(name).inspect()",
    "generate": "triptych.load(name).generate(text)",
    "translate": "triptych.load(name).translate(text)",
    "attend": "triptych.load(name).attend(text)",
    "convert": "triptych.load(name).convert(path, 'hf')",
}
# Attributes of tokenizers.
OF_TOKENIZER: Mapping[str, str] = {
    **dict.fromkeys(
        ("tokenize", "convert_ids_to_tokens"),
        "model.tokenizer.pieces(ids) has each token in readable form",
    ),
    **dict.fromkeys(
        ("convert_tokens_to_ids", "encode_plus", "batch_encode_plus"), _ENCODE
    ),
    "batch_decode": "model.tokenizer.decode(lists) decodes several texts, model.decode(ids) one",
    "apply_chat_template": "model.tokenizer.chat(messages), or model.tokenizer.chat_ids(messages)",
    **dict.fromkeys(
        ("vocab", "get_vocab"), "model.tokenizer.vocabulary has the tokens by id"
    ),
    "eos_token_id": "model.tokenizer.eos_id",
    "bos_token_id": "model.tokenizer.bos_id",
    "pad_token_id": "model.tokenizer.pad_id",
    "unk_token_id": "model.tokenizer.unk_id",
    "mask_token_id": "model.tokenizer.mask_id",
    **dict.fromkeys(
        ("eos_token", "bos_token", "pad_token", "unk_token", "mask_token"),
        "model.tokenizer.eos_id, .bos_id, .pad_id, .unk_id and .mask_id are their ids",
    ),
    "all_special_ids": "model.tokenizer.special_ids",
    "save_pretrained": "model.tokenizer.save(path); model.save(folder) writes the model with it",
}
TABLES: Mapping[str, Mapping[str, str]] = {
    "model": OF_MODEL,
    "layer": OF_LAYER,
    "head": OF_HEAD,
    "run": OF_RUN,
    "attention": OF_ATTENTION,
    "tokenizer": OF_TOKENIZER,
}
# Replacements for a call of an object, as in other libraries.
_CALLED: Mapping[str, str] = {
    "model": "model.run(text).logits, or model.generate(text) to continue a text",
    "tokenizer": _ENCODE,
}
_LENGTHS = (
    "max_new_tokens, the number of tokens to add",
    "max_extra_tokens: a translation may be longer than its source by that many",
    "max_tokens, the longest text",
)
# Keyword arguments of verbs. Among several answers, the first to begin with an argument of the verb is given.
OF_VERBS: Mapping[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("max_length", "max_tokens", "max_new_tokens"), _LENGTHS),
    "num_beams": "beam_size",
    "beams": "beam_size",
    "beam": "beam_size",
    "length_penalty": "alpha, the exponent of the length penalty",
    "num_return_sequences": "num_samples of generate, num_best of translate",
    "do_sample": "temperature: 0 always takes the most probable token",
    "output_attentions": "model.attend(text)",
    "return_dict": "nothing: a result has names",
    "return_dict_in_generate": "nothing: a result has names",
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
    "return_type": "nothing: run.logits and run.loss of model.run(text)",
    "verbose": "nothing: a verb prints nothing",
    "stop_at_eos": "nothing: a text ends at its end token",
    "eos_token_id": "nothing: the ends of texts are the checkpoint's; stop='a string' adds one",
    "pad_token_id": "nothing: padding is taken care of",
    "attention_mask": "nothing: padding is taken care of",
    "use_cache": "nothing: keys and values are cached",
    "input_ids": "the token ids as the text",
    "return_tensors": "nothing: model.encode(text) is a list of token ids",
    "add_special_tokens": "nothing: model.encode(text) has the special tokens around a text",
    "padding": "nothing: padding is taken care of",
    "truncation": (
        "max_prompt_tokens, the longest prompt",
        "max_tokens, the longest text",
    ),
    "freq_penalty": "repetition_penalty",
    "frequency_penalty": "repetition_penalty",
    "num_samples_per_prompt": "num_samples",
    "num_beam_groups": "beam_size",
    "output_hidden_states": "run.residual(3) of model.run(text)",
    "output_scores": "model.score(text)",
    "decoder_input_ids": "target",
    "forced_bos_token_id": "languages=(source, target) of load",
    "fwd_hooks": "model.edit(place, what, with_=function), a new model",
    "remote": "nothing: a model runs on this machine",
    "dispatch": "nothing: modules are built when a model first runs",
    "fold_ln": "model[3, 2].folded, a head with the norm's weights in its maps",
    "center_writing_weights": "nothing: measures take out what a LayerNorm removes",
    "center_unembed": "nothing: weights are as in the checkpoint",
    "refactor_factored_attn_matrices": "model.rewrite('gauge_fix')",
    "local_files_only": "offline=True of load",
    "low_cpu_mem_usage": "nothing: weights are read when they are used",
    "cache_dir": "the variable HF_HUB_CACHE of the environment",
    "token": "the variable HF_TOKEN of the environment",
    "quantization_config": "precision='int8' of load",
}


def about_attribute(kind: str, name: str) -> str:
    """Return the error for a missing attribute of an object; `kind` is a key of `TABLES`."""
    line = TABLES[kind].get(name)
    article = "an" if kind == "attention" else "a"
    return f"{article} {kind} has no {name!r}" + (f": {line}" if line else "")


def about_name(name: str) -> str:
    """Return the error for a missing name of the package."""
    line = OF_PACKAGE.get(name)
    return f"module 'triptych' has no attribute {name!r}" + (
        f": {line}" if line else ""
    )


def about_activation(place: object) -> str:
    """Return the error for a run's activation named as in a cache; "" for other names."""
    match place:
        case (str(name), *_) if name in OF_CACHE:
            return f"a run has no {place!r}: {OF_CACHE[name]}"
    return ""


def about_call(kind: str) -> str:
    """Return the error for a model or a tokenizer called like a function."""
    return f"a {kind} is not called: {_CALLED[kind]}"


def about_item(kind: str, verb: str) -> str:
    """Return the error for a subscript of a verb's result."""
    return f"a {kind} has no items: model.{verb}(text).text is its text"


def about_arguments(verb: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return the error for keyword arguments that a verb does not have."""
    name = sorted(unknown)[0]
    near = _answer(name, {*known})
    return f"{verb} has no argument {name!r}" + (f": use {near}" if near else "")


def _answer(name: str, known: Collection[str]) -> str:
    """Return the answer for a keyword argument of a verb with some arguments, "" without an answer."""
    if name not in OF_VERBS:
        return ", ".join(get_close_matches(name, known, n=1))
    answers = OF_VERBS[name]
    if isinstance(answers, str):
        return answers
    return next((one for one in answers if re.split(r"\W", one)[0] in known), "")


def about_places(verb: str, given: Sequence[object]) -> str:
    """Return the end of an error for a layer and a head given as two arguments; "" for other arguments."""
    match given:
        case [_, int(layer), int(head), *_]:
            return f"; head {head} of layer {layer} is {verb}('{layer}.{head}')"
    return ""


@final
class ConfigFields(Mapping[str, object]):
    """The fields of `config.json` by key; the error for an attribute shows access by the nearest key."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> object:
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # A copy asks for attributes before it has the fields.
            fields = [] if name.startswith("_") else [*self._fields]
            near = get_close_matches(name, fields, n=1)
            field = repr(near[0]) if near else "field"
            raise AttributeError(
                f"a configuration has no attribute {name!r}: model.config[{field}], and list(model.config)"
            )

    def __repr__(self) -> str:
        return repr(self._fields)
