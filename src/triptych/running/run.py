"""The run of a model on a text: logits, loss, and the activations of every layer and head."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from triptych.core.algebra.forms import at_least_float32
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention import ACTIVATIONS, LayerSteps, Tap
from triptych.core.models import AttentionSite, Residual, sharing_copy
from triptych.core.places import PlaceNames, head_of
from triptych.errors import UsageError
from triptych.guesses import about_activation, about_attribute
from triptych.literals import Activation, SpecialTokens, check_choices
from triptych.printable import table_html
from triptych.running.batching import EvaluationMode
from triptych.running.opened_source import Opened
from triptych.running.opening.labels import label_number, no_label
from triptych.running.opening.layer_calls import (
    LayerCall,
    Recording,
    TextIds,
    record_calls,
    record_residuals,
)
from triptych.running.opening.reader import Reader
from triptych.running.opening.rerunning import begins_anywhere, run_from
from triptych.running.text.encoding import token_id
from triptych.running.text.given import (
    Text,
    as_ids,
    as_texts,
    refuse_file_name,
    require_ids,
)


@final
class Activations:
    """The activations of a layer or a head on a text.

    The dimension `heads` is absent for a single head.

    Attributes:
        name: name of the layer or head, `3` or `3.2`.
        q: queries as compared with keys, `[heads, queries, d_k]`.
        k: keys as compared with queries, `[heads, keys, d_k]`.
        v: values, `[heads, keys, d_v]`.
        scores: softmax inputs before the mask, `[heads, queries, keys]`.
        weights: attention weights, `[heads, queries, keys]`.
        z: input of W_O, `[heads, queries, d_v]`.
        projected: `z W_O`, `[queries, d_model]`; layers sum over heads and add the output bias.
        output: addition to the residual stream, `[queries, d_model]`: `projected`, including a norm or a
            multiplier after the layer (Gemma 2, OLMo 2, Granite). Heads have their share of the sum.
    """

    def __init__(
        self,
        name: str,
        steps: LayerSteps,
        weights: AttentionWeights,
        frame: Residual,
        head: int | None = None,
    ) -> None:
        """Store the activations of a layer, or of head number `head`; `frame` adds them to the stream."""
        self.name = name
        self.steps = steps
        self._weights = weights
        self._frame = frame
        self._head = head
        for what in ACTIVATIONS:
            value = getattr(steps, what)[0]
            setattr(self, what, value if head is None else value[head])

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    weights: Tensor
    z: Tensor

    @cached_property
    def projected(self) -> Float[Tensor, "queries d_model"]:
        if self._head is None:
            return self.steps.output[0]
        return self.z @ self._weights.W_O[self._head].to(self.z)

    @cached_property
    def output(self) -> Float[Tensor, "queries d_model"]:
        if self._head is None:
            return self._frame.added(self.projected)
        return self._frame.part_added(self.projected, self.steps.output[0])

    def __repr__(self) -> str:
        shapes = "  ".join(
            f"{what} {list(getattr(self, what).shape)}" for what in ACTIVATIONS
        )
        return f"Activations {self.name}: {shapes}  projected, output {list(self.projected.shape)}"


@final
class Run:
    """The run of a model on one text.

    Attributes:
        model: name of the model.
        tokens: tokens of the text in readable form, or target tokens of an encoder-decoder.
        ids: token ids of `tokens`.
        source_tokens: source tokens of an encoder-decoder in readable form; None for other models.
        second: number of the first token of the second text of a pair; None for a single text.
        logits: logits of the next token at each position, or of `tokens` in an encoder-decoder,
            `[length, vocab]`. With the head of a task one for each of `labels`: `[labels]` for the text, or
            `[length, labels]` where each token has a class. Hidden states, without a head.
        labels: names of the classes (`id2label`) that the head of a task tells apart; None for other models.
        second_logits: logits `[labels]` of the second head (next sentence, sentence order, choice) for
            `second_labels`; None for models with a single head.
        second_labels: names of the classes of the second head; None for models with a single head.
    """

    def __init__(
        self,
        reader: Reader,
        places: PlaceNames,
        order: Mapping[int, str],
        text: TextIds,
        recording: Recording,
        row: int,
        graph: Mapping[str, Mapping[Activation, Tensor]] | None = None,
    ) -> None:
        """Read the run from a row of a recording; `order` has the site name of each layer by number."""
        self.model = reader.name
        self._reader = reader
        self._places = places
        self._order = order
        self._graph = graph
        self._text = text
        self._row = row
        self._recording = recording
        self.ids, self.tokens = text.ids, tuple(reader.tokenizer.pieces(text.ids))
        self.source_tokens = (
            None
            if text.source is None
            else tuple(reader.source_tokenizer.pieces(text.source))
        )
        self.logits = reader.text_logits(
            recording.hidden[row, : len(text.ids)], text.ids
        )
        self.second = text.second
        self.labels = reader.labels
        self.second_logits = reader.second_logits(
            recording.hidden[row, : len(text.ids)], text.ids
        )
        self.second_labels = reader.second_labels
        # A loss needs next-token logits; encoders do not have them.
        self._predicts = reader.predicts

    @property
    def losses(self) -> Float[Tensor, " predicted"]:
        """The negative log-probability of every predicted token, in nats.

        Raises:
            UsageError: the model is an encoder: it does not predict next tokens.
        """
        if not self._predicts:
            raise UsageError(
                f"{self.model} predicts no next token, so its run has no loss"
            )
        ids = torch.tensor(self.ids, device=self.logits.device)
        if self._text.source is None:
            return F.cross_entropy(
                at_least_float32(self.logits[:-1]), ids[1:], reduction="none"
            )
        return F.cross_entropy(at_least_float32(self.logits), ids, reduction="none")

    @property
    def loss(self) -> Float[Tensor, ""]:
        """The mean of `losses`, in nats per token."""
        return self.losses.mean()

    def __getitem__(self, place: str | int | tuple[str | int, int]) -> Activations:
        """Return the activations of a layer (`3`, `"cross.3"`) or of a head (`"3.2"`, or `3, 2`).

        Raises:
            UsageError: the layer or head does not exist; the message lists the valid names.
        """
        call, head = self._call(place)
        with torch.set_grad_enabled(call.x.requires_grad):
            steps = call.steps()
        name = self._places.names[self._places.find(place)[0]]
        name = name if head is None else f"{name}.{head}"
        return Activations(name, steps, call.layer.weights(), call.site.residual, head)

    def residual(self, place: int | str) -> Float[Tensor, "length *streams d_model"]:
        """Return the residual stream before a block (`3`, `"residual.3"`, `"encoder.3"`) or at a stack's end.

        Gemma 3n has several streams before a block, `[length, streams, d_model]`.

        Raises:
            UsageError: the block does not exist.
        """
        # The number of blocks names the end of the stack, before the final norm.
        place = str(place).removeprefix("residual.")
        stack, _, number = place.rpartition(".")
        streams = self._recording.residuals
        stack = stack or next(iter(streams))
        if len(streams) > 1 and "." not in place:
            raise UsageError(
                f"residual({place}) could be of {' or '.join(streams)}: write encoder.{place}"
            )
        found = streams.get(stack, ())
        if not number.isdecimal() or int(number) >= len(found):
            raise UsageError(
                f"there is no residual {place}: {stack} has 0 to {len(found) - 1}, the last at its end"
            )
        length = (
            len(self.ids)
            if stack != "encoder" or self._text.source is None
            else len(self._text.source)
        )
        return found[int(number)][self._row, :length]

    @check_choices
    def gradient(
        self, place: str | int, what: Activation = "z", of: Tensor | None = None
    ) -> Tensor:
        """Compute the gradient of a scalar with respect to an activation; needs a run with `grad=True`.

        Args:
            place: layer or head.
            what: name of the activation.
            of: scalar computed from this run; its loss if None.

        Raises:
            UsageError: the run was made without `grad=True`, or the layer or head does not exist.
        """
        if self._graph is None:
            raise UsageError("the run has no gradients: run(text, grad=True)")
        call, head = self._call(place)
        kept = self._graph[call.site.name][what]
        (found,) = torch.autograd.grad(
            self.loss if of is None else of, kept, retain_graph=True
        )
        # The recording is a padded batch: keep the row of this text, without padding.
        queries, keys = self._lengths(call)
        own = found[self._row, :, : keys if what in ("k", "v") else queries]
        own = own[..., :keys] if what in ("scores", "weights") else own
        return own if head is None else own[head]

    def _call(
        self, place: str | int | tuple[str | int, int]
    ) -> tuple[LayerCall, int | None]:
        """Return the call of a layer, and the number of the named head; None for a whole layer."""
        if isinstance(place, tuple) and (answer := about_activation(place)):
            raise UsageError(answer)
        number, head = self._places.find(place)
        site = self._order.get(number, "")
        name = self._places.names[number]
        if site not in self._calls:
            raise UsageError(f"layer {name} did not run on this text")
        call = self._calls[site]
        return call, None if head is None else head_of(
            head, call.layer.num_heads, f"layer {name}"
        )

    @cached_property
    def _calls(self) -> dict[str, LayerCall]:
        return {
            call.site.name: call.of_row(self._row, *self._lengths(call))
            for call in self._recording.calls
        }

    def _lengths(self, call: LayerCall) -> tuple[int, int]:
        own = len(self.ids)
        source = len(self._text.source or ())
        if call.kind == "encoder" and self._text.source is not None:
            return source, source
        return own, source if call.kind == "cross" else own

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(about_attribute("run", name))

    def __repr__(self) -> str:
        source = (
            ""
            if self.source_tokens is None
            else f"{len(self.source_tokens)} source tokens, "
        )
        loss = (
            f", loss {float(self.loss.detach()):.4f} nats per token"
            if self._predicts and len(self.ids) > 1
            else ""
        )
        return (
            f"Run of {self.model}: {source}{len(self.tokens)} tokens{loss}\n"
            f"  logits {list(self.logits.shape)}; layers {', '.join(self._places.names[:8])}"
            f"{' …' if len(self._places.names) > 8 else ''}"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("tokens", " ".join(self.tokens[:32])),
            ("logits", str(list(self.logits.shape))),
        ]
        if self._predicts and len(self.ids) > 1:
            rows.append(("loss", f"{float(self.loss.detach()):.4f} nats per token"))
        rows.append(("layers", ", ".join(self._places.names[:32])))
        return table_html(f"Run of {self.model}", rows)


def run_given(
    opened: Opened,
    text: Any,
    target: Any = None,
    *,
    grad: bool = False,
    max_tokens: int | None = None,
    special_tokens: SpecialTokens = "tokens",
) -> Run | list[Run]:
    """Run a model on one text or several, strings or token ids; return one run or a list of runs."""
    given = as_texts(refuse_file_name(text))
    targets = None if target is None else as_texts(target, "target").texts
    found = run_texts(
        opened,
        given.texts,
        targets,
        grad=grad,
        max_tokens=max_tokens,
        special_tokens=special_tokens,
    )
    return found[0] if given.is_one else found


def run_texts(
    opened: Opened,
    texts: Sequence[Text],
    targets: Sequence[Text] | None = None,
    *,
    grad: bool = False,
    max_tokens: int | None = None,
    special_tokens: SpecialTokens = "tokens",
) -> list[Run]:
    """Run a model on texts, as one padded batch."""
    reader = opened.reader
    ids = reader.encode(texts, targets, 0, max_tokens, special_tokens)
    reader.check(ids, max_tokens)
    sites = opened.sites_of(reader.model)
    order = {number: site.name for number, site in enumerate(sites)}
    places = opened.places  # read before the model runs: its files may change meanwhile
    recorded = _recorded_graph(sites) if grad else nullcontext()
    with torch.set_grad_enabled(grad), recorded as graph:
        recording = reader.run(ids, residuals=True)
        return [
            Run(reader, places, order, one, recording, row, graph)
            for row, one in enumerate(ids)
        ]


@torch.no_grad()
def tapped_runs(
    opened: Opened, run: Run, number: int, taps: Sequence[Tap]
) -> Iterator[Run]:
    """Yield a run of the same text for each tap of a layer, given by its number in model order.

    `run` is a run of `opened` on one text alone. The text is repeated in one batch, a row per tap, and runs
    from this layer; outputs of earlier layers do not change.
    """
    reader = opened.reader.with_model(sharing_copy(opened.reader.model))
    model = reader.model
    site = opened.sites_of(model)[number]
    site.layer.tap = partial(_tap_each_row, taps)
    texts = [run._text] * len(taps)
    before = run._recording
    if begins_anywhere(model):
        with (
            EvaluationMode(model),
            record_calls(model) as calls,
            record_residuals(model, True) as streams,
        ):
            hidden = run_from(model, before, site, len(taps))
        after = Recording(
            (*texts,),
            hidden,
            (*calls,),
            {name: (*own,) for name, own in streams.items()},
        )
    else:
        after = reader.run(texts, residuals=True)
    for row, tap in enumerate(taps):
        one = slice(row, row + 1)
        # A shallow copy of the layer shares the parameters and has a separate tap.
        layer = copy.copy(site.layer)
        layer.tap = tap
        of_row = dict(run._calls)
        for call in after.calls:
            kept = call.of_row(row, *run._lengths(call))
            tapped = call.site.name == site.name
            of_row[call.site.name] = (
                replace(kept, site=site._replace(layer=layer)) if tapped else kept
            )
        residuals = dict[str, tuple[Tensor, ...]]()
        for name, own in before.residuals.items():
            # Blocks that did not run again keep the streams of the run before.
            new = after.residuals.get(name, ())
            kept_streams = own[: len(own) - len(new)]
            residuals[name] = (*kept_streams, *(stream[one] for stream in new))
        recording = Recording(
            (run._text,), after.hidden[one], (*of_row.values(),), residuals
        )
        yield Run(reader, run._places, run._order, run._text, recording, 0)


def _tap_each_row(
    taps: Sequence[Tap], name: Activation, value: Tensor, first: int | None
) -> Tensor:
    return torch.cat(
        [tap(name, value[row : row + 1], first) for row, tap in enumerate(taps)]
    )


def logit_difference(
    one: str | int, other: str | int
) -> Callable[[Run], Float[Tensor, ""]]:
    """Return a metric of a run: the difference of two logits, of classes or of tokens.

    With the head of a sequence classification, classes are named by label or number. The
    compared tokens are next tokens after the text, or tokens at the only mask of an encoder.
    """

    def difference(run: Run) -> Float[Tensor, ""]:
        logits, numbers = _compared_logits(run, (one, other))
        return logits[numbers[0]] - logits[numbers[1]]

    return difference


def _compared_logits(
    run: Run, names: Sequence[str | int]
) -> tuple[Float[Tensor, " outputs"], list[int]]:
    """Return the logits of a run for a difference, and the numbers of the compared classes or tokens."""
    # A model without labels predicts tokens.
    if run.labels is None:
        tokenizer = run._reader.tokenizer
        return run.logits[_predicting(run)], [token_id(tokenizer, one) for one in names]
    if run.logits.ndim > 1:
        raise UsageError(
            f"{run.model} has a head for each token: a difference of two classes is of whole texts"
        )
    numbers = list[int]()
    for name in names:
        number = label_number(run.labels, name)
        if number is None:
            raise UsageError(f"{run.model} {no_label(run.labels, name)}")
        numbers.append(number)
    return run.logits, numbers


def _predicting(run: Run) -> int:
    """Return the position of the compared logits: the last token, or an encoder's mask."""
    # The decoder of an encoder-decoder is given its target: no token after it is predicted.
    reader = run._reader
    if reader.kind == "pairs" or reader.last_stack.head is None:
        raise UsageError(
            f"{run.model} predicts no token after a text: a difference of logits is of two tokens of a "
            "language model, or of two classes"
        )
    if reader.predicts:
        return len(run.ids) - 1
    mask = reader.tokenizer.mask_id
    masked = [place for place, token in enumerate(run.ids) if token == mask]
    if len(masked) != 1:
        raise UsageError(
            f"the text has {len(masked)} masks: a difference of logits of an encoder is at its only mask"
        )
    return masked[0]


def encode_given(opened: Opened, text: Any) -> list[int]:
    """Return the token ids of the model's input for one text, whatever its length."""
    given = as_texts(refuse_file_name(text))
    if not given.is_one:
        raise UsageError(
            "encode takes one text; model.tokenizer.encode takes several, without special tokens"
        )
    (found,) = opened.to_run.encode_inputs(given.texts)
    return [*found.ids]


def decode_given(opened: Opened, ids: Any) -> str:
    """Return the text of token ids, without special tokens."""
    text = as_ids(ids)
    tokenizer = opened.to_run.source_tokenizer
    require_ids(text, tokenizer.vocab_size, "the text")
    (found,) = tokenizer.decode([text])
    return found


@torch.no_grad()
def score_text(
    opened: Opened,
    text: Any,
    target: Any,
    *,
    max_tokens: int | None,
    special_tokens: SpecialTokens,
) -> list[tuple[str, float]]:
    """Return the predicted tokens of one text with their log-probabilities in nats."""
    given = as_texts(refuse_file_name(text))
    if not given.is_one:
        raise UsageError("score takes one text: a string, or its token ids")
    targets = None if target is None else as_texts(target, "target").texts
    (run,) = run_texts(
        opened,
        given.texts,
        targets,
        max_tokens=max_tokens,
        special_tokens=special_tokens,
    )
    losses = run.losses.tolist()
    # The first token of a text without a source is not predicted.
    predicted = run.tokens[len(run.tokens) - len(losses) :]
    return [(token, -loss) for token, loss in zip(predicted, losses, strict=True)]


@contextmanager
def _recorded_graph(
    sites: Sequence[AttentionSite],
) -> Iterator[dict[str, dict[Activation, Tensor]]]:
    """Record the activations of layers by site as nodes of the autograd graph of the run."""
    found: dict[str, dict[Activation, Tensor]] = {site.name: {} for site in sites}
    with ExitStack() as stack:
        for site in sites:
            before = site.layer.tap
            site.layer.tap = _keeping(found[site.name], before)
            stack.callback(setattr, site.layer, "tap", before)
        yield found


def _keeping(found: dict[Activation, Tensor], before: Tap | None) -> Tap:
    def keep(name: Activation, value: Tensor, first: int | None) -> Tensor:
        found[name] = value if before is None else before(name, value, first)
        return found[name]

    return keep
