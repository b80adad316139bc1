"""JoeyNMT: the model that its `build_model` makes of a configuration, with its own loss or torch's."""

from types import SimpleNamespace

import torch
from joeynmt.model import build_model
from joeynmt.vocabulary import Vocabulary
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workers import training
from benchmarks.workers.protocol import Options, serve
from benchmarks.workers.training import (
    D_FF,
    D_MODEL,
    DROPOUT,
    LABEL_SMOOTHING,
    NUM_HEADS,
    NUM_LAYERS,
    LogitsLearner,
    Text,
)
from triptych.training.corpora.pair_batches import Batch

# JoeyNMT insists on these ids; the tokens that had them take the places that its own leave.
_UNK, _PAD, _BOS, _EOS = range(4)


def build(options: Options, text: Text) -> LogitsLearner:
    """The model; its ids are ours with the special ones moved."""
    vocabulary = Vocabulary(
        [f"t{i}" for i in range(text.vocab_size - 4)],
        SimpleNamespace(
            **{"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"},
            **{"unk_id": _UNK, "pad_id": _PAD, "bos_id": _BOS, "eos_id": _EOS},
            **{"sep_id": None, "sep_token": None, "lang_tags": []},
        ),
    )
    stack = {
        "type": "transformer",
        "num_layers": NUM_LAYERS,
        "num_heads": NUM_HEADS,
        "hidden_size": D_MODEL,
        "ff_size": D_FF,
        "dropout": DROPOUT,
        "layer_norm": "post",
        "embeddings": {"embedding_dim": D_MODEL, "scale": True, "dropout": DROPOUT},
    }
    model = build_model(
        {
            "tied_embeddings": True,
            "tied_softmax": True,
            "initializer": "xavier_uniform",
            "embed_initializer": "xavier_uniform",
            "encoder": dict(stack),
            "decoder": dict(stack),
        },
        vocabulary,
        vocabulary,
    )
    model.loss_function = ("crossentropy", LABEL_SMOOTHING)
    _leave_inner_dropout_out(model)
    moved = _moved_ids(text)

    def logits(model: nn.Module, batch: Batch) -> Tensor:
        src, trg_input = moved[batch.src], moved[batch.tgt_in]
        out, *_ = model._encode_decode(  # type: ignore[operator]
            src=src,
            trg_input=trg_input,
            src_mask=(src != _PAD).unsqueeze(1),
            src_length=(src != _PAD).sum(1),
            trg_mask=(moved[batch.tgt_out] != _PAD).unsqueeze(1),
        )
        # Judged by our ids: its output in our order.
        return out if model.training else out[..., moved]

    def own(found: Tensor, targets: Tensor) -> Tensor:
        return model.loss_function(F.log_softmax(found, dim=-1), trg=moved[targets])

    def of_torch(found: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            found.flatten(0, 1),
            moved[targets].flatten(),
            ignore_index=_PAD,
            label_smoothing=LABEL_SMOOTHING,
            reduction="sum",
        )

    loss = own if options["loss"] == "own loss" else of_torch
    return LogitsLearner(model, logits, options, text, loss)


def _leave_inner_dropout_out(model: nn.Module) -> None:
    """No dropout inside attention and feed-forward, as in the other contenders."""
    for module in model.modules():
        name = type(module).__name__
        if name == "MultiHeadedAttention":
            module.dropout.p = 0.0  # type: ignore[union-attr]
        elif name == "PositionwiseFeedForward":
            module.pwff_layer[2].p = 0.0  # type: ignore[index, union-attr]


def _moved_ids(text: Text) -> Tensor:
    """A permutation: our id to its."""
    moved = torch.full((text.vocab_size,), -1)
    moved[text.pad_id], moved[text.bos_id], moved[text.eos_id] = _PAD, _BOS, _EOS
    taken = {_PAD, _BOS, _EOS}
    moved[moved < 0] = torch.tensor([i for i in range(text.vocab_size) if i not in taken])
    return moved


if __name__ == "__main__":
    serve(lambda options: training.prepare(options, build))
