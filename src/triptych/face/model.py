"""`load(x)` is a model: its layers have heads, it reads texts, and a change gives a new one."""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.converting.conversion import Conversion, convert
from triptych.converting.engines import require_ctranslate2
from triptych.core.attention import LearnedPositions, SinusoidalPositions
from triptych.core.checkpoints.family import Family, read_family
from triptych.core.checkpoints.source import Source, find_source, tokenizer_folder
from triptych.core.checkpoints.stored_layers import in_ranges
from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.core.places import Heads, head_of, in_words
from triptych.errors import UsageError
from triptych.face.running import RunnableModel
from triptych.literals import (
    Activation,
    By,
    Dtype,
    EngineName,
    Precision,
    Quantization,
    TargetFormat,
    check_choices,
)
from triptych.progress import Progress, untold
from triptych.rewriting.against_transformers import Check, check_against_transformers
from triptych.rewriting.functions import Rewrite
from triptych.rewriting.planning import Plan, plan_rewrite
from triptych.rewriting.recipe import RewriteRecipe, to_recipe
from triptych.rewriting.saving import save_changed, save_unchanged
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.running.changes import (
    SIDE_OF,
    Change,
    Edit,
    Part,
    Patch,
    PositionsOff,
    Steering,
    ValueChange,
    WeightChange,
    ablation,
    resampled,
    tied_map,
    with_map,
    without_positions,
)
from triptych.running.opened_source import Opened, why_not_saved
from triptych.running.opening.options import Options
from triptych.running.opening.translators import Languages
from triptych.running.run import Run
from triptych.seeing.sweep import Sweep, sweep_heads
from triptych.user_code import use_code

# Maps that a layer does not have where it borrows keys and values.
_OF_KEYS = ("W_K", "W_V")
# A rewrite as a call or a record, a recipe of several, or the file of one.
Step = str | Rewrite | RewriteRecipe | Path


@check_choices
def load(
    source: object,
    *,
    device: str = "auto",
    dtype: torch.dtype | Dtype | None = None,
    tokenizer: Any = None,
    languages: tuple[str, str] | None = None,
    engine: EngineName = "triptych",
    precision: Precision = "fp32",
    offline: bool = False,
    family: Family | str | Path | None = None,
    strict: bool = False,
    shortlist: str | Path | None = None,
    ensemble: Sequence[str | Path] = (),
    code: str | Path | None = None,
) -> "Model":
    """Open a model: `load("gpt2")[3, 2].W_Q`, `load("runs/demo").translate("Guten Tag.")`.

    Opening reads the configuration and the headers of the files. A weight is read when it is first used;
    from the Hub, only its bytes. Modules are built when the model first runs.

    Args:
        source: a run folder, a folder or a tensor file in Hugging Face's format, a name on the Hub
            (`owner/name`, with `@revision` or without; a path of that name comes first), a `transformers`
            model, or a model of triptych in memory.
        device: auto, cpu, cuda or cuda:N; auto takes a GPU if there is one.
        dtype: type of the parameters when the model runs. Default: that of the files.
        tokenizer: the folder of a tokenizer, or a tokenizer of `transformers`, which reads texts in the place
            of the files' own. A model in memory needs one to read texts.
        languages: for a translator of several languages (mBART, NLLB): source and target as its tokenizer
            spells them, such as de_DE and en_XX.
        engine: the library that translates and generates: triptych, ctranslate2 (faster in int8 on CPUs;
            needs the extra of that name), or auto: ctranslate2 for translation on a CPU where it is installed
            and computes the same model, otherwise triptych. A line says which.
        precision: type of the maps when text is translated or generated: fp32; int8 (CPU only) and bf16 (on
            GPUs and CPUs with AVX-512) are faster and change some texts. On x86-64 CPUs no text depends on
            the others of its batch; docs/how-to/generating.md has the exceptions.
        offline: read models of the Hub only from the cache on this machine; HF_HUB_OFFLINE=1 does the same.
        family: a family file that describes the checkpoint, where its configuration does not say enough.
        strict: refuse a configuration with keys that `transformers` does not follow. Without it they are
            named in a warning, and followed neither there nor here.
        shortlist: for a translator, a file that `triptych shortlist` wrote: the output layer computes only
            the tokens that it lists for a sentence, which is faster.
        ensemble: for a translator, others with the same tokenizers: each token is chosen by the mean of the
            probabilities of all. Only translation uses them.
        code: the file whose classes a run names, such as a parameterisation of your own. It is executed, and
            must be the file that the run was trained with. Nothing that lies in a run is ever executed.

    Raises:
        UsageError: nothing of that name here, or something that is not a model.
        DataError: nothing of that name on the Hub, or no way there.
    """
    if code is not None:
        use_code(code)
    if engine != "triptych" and dtype is not None:
        raise UsageError(f"--engine {engine} rounds by --precision: leave out --dtype")
    if engine == "ctranslate2":
        require_ctranslate2()
    options = Options(
        device,
        getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        tokenizer_folder(tokenizer) if isinstance(source, LanguageModel | EncoderDecoder) else None,
        None if languages is None else Languages(*languages),
        engine,
        precision,
        None if shortlist is None else Path(shortlist),
        tuple(find_source(one, offline=offline) for one in ensemble),
    )
    described = read_family(Path(family)) if isinstance(family, str | Path) else family
    if isinstance(source, LanguageModel | EncoderDecoder):
        of_files = {"family": family, "strict": strict, "languages": languages, "offline": offline}
        if stray := next((name for name, value in of_files.items() if value), None):
            raise UsageError(f"{stray} is for a model in files: leave it out for one in memory")
        return Model(Opened(f"a module ({type(source).__name__})", None, options, module=source))
    if isinstance(source, Model):
        raise UsageError(f"{source.name} is opened already: use it, or load what it was opened from")
    found = find_source(source, tokenizer=tokenizer, offline=offline, family=described, strict=strict)
    return Model(Opened(found.name, found, options))


@final
class Model(RunnableModel):
    """A model whose layers have heads. A change gives a new model, which shares memory with this one.

    `model[3, 2]` is head 2 of layer 3, `model["cross.3"][2]` one of an encoder-decoder's cross-attention.
    """

    @check_choices
    def ablate(self, heads: Heads, by: By = "zero", *, text: str | Sequence[str] | None = None) -> "Model":
        """The model with some heads off: what they give W_O is replaced.

        Of layers that share their weights only those named lose heads, and the model can be saved if all do.

        Args:
            heads: `"3.2"`, `"3"` for a layer, `"*.2"`, `"cross.*"`; several, by commas or in a list.
            by: what takes the place: "zero", the "mean" over a text, or what the head gives on another text,
                position by position ("resample").
            text: for "mean" and "resample".

        Raises:
            UsageError: there is no such head, or a text is missing.
        """
        if by == "zero" and text is not None:
            raise UsageError('a text goes with by="mean" or by="resample"')
        if by != "zero" and text is None:
            raise UsageError(f'by="{by}" needs a text: ablate({in_words(heads)!r}, by="{by}", text=…)')
        chosen, words = self._heads(heads), f"ablate({in_words(heads)}{'' if by == 'zero' else f', by={by}'})"
        if text is None:
            return self._changed(ablation(words, chosen))
        runs = self.run([text] if isinstance(text, str) else list(text))
        values = {
            number: {head: torch.cat([run[f"{name}.{head}"].z.detach() for run in runs]) for head in own}
            for number, own in chosen.items()
            for name in [self._places.names[number]]
        }
        if by == "mean":
            return self._changed(ablation(words, values))
        edits: dict[int, dict[Part, Edit]] = {
            number: {head: resampled(z) for head, z in own.items()} for number, own in values.items()
        }
        return self._changed(ValueChange(words, "z", edits))

    @check_choices
    def patch(
        self,
        heads: Heads,
        run: Run,
        what: Activation = "z",
        *,
        positions: Sequence[int] | None = None,
    ) -> "Model":
        """The model with activations of some heads taken from a run, position by position.

        It then reads texts of as many tokens as the run's; a continuation that is generated grows from there.

        Args:
            heads: as in `ablate`.
            run: of this model or another one with such heads, on one text of its own.
            what: which activation: q, k, v, scores, weights or z.
            positions: of the run's text, at which it is taken, below 0 from its end; all if None.

        Raises:
            UsageError: there is no such head or position; when the model runs, the lengths do not fit.
        """
        if not isinstance(run, Run):
            raise UsageError(f"patch takes one run, of run(text): a {type(run).__name__} is none")
        names, edits = self._places.names, dict[int, dict[Part, Edit]]()
        is_pair = len(self._places.stacks) > 1
        for number, own in self._heads(heads).items():
            stack = names[number].partition(".")[0]
            take = partial(
                Patch,
                what,
                positions=positions,
                queries_grow=is_pair and stack != "encoder",
                keys_grow=is_pair and stack == "decoder",
            )
            edits[number] = {
                head: take(values=getattr(run[f"{names[number]}.{head}"], what).detach()) for head in own
            }
        return self._changed(ValueChange(f"patch({in_words(heads)}, {what})", what, edits))

    @check_choices
    def edit(
        self,
        heads: Heads,
        what: Activation,
        with_: Callable[[Tensor], Tensor],
        *,
        together: bool = False,
    ) -> "Model":
        """The model with a formula of your own between two steps of its heads.

        Args:
            heads: as in `ablate`.
            what: which value: q, k, v, scores, weights or z.
            with_: from the value of one head, `[batch, …]` as in `Run`, to what takes its place, of the same
                shape.
            together: whether `with_` gets the named heads of a layer at once, `[batch, heads, …]`.

        Raises:
            UsageError: there is no such head or value.
        """
        if not callable(with_):
            raise UsageError(f"edit takes a function of the value: a {type(with_).__name__} is none")
        edits: dict[int, dict[Part, Edit]] = {
            number: dict.fromkeys([tuple(own)] if together else own, lambda value, first: with_(value))
            for number, own in self._heads(heads).items()
        }
        return self._changed(ValueChange(f"edit({in_words(heads)}, {what})", what, edits))

    def steer(self, place: str, vector: Float[Tensor, " d_model"], scale: float = 1.0) -> "Model":
        """The model with a direction added to its residual stream.

        Args:
            place: `"residual.3"`: before block 3; `"residual.encoder.3"` of an encoder-decoder. The number of
                blocks is the end of the stack.
            vector: `[d_model]`.
            scale: what it is multiplied by.

        Raises:
            UsageError: there is no such place, or the vector has another width.
        """
        stack, block = self._places.residual(place)
        width, vector = self.layers[0].d_model, torch.as_tensor(vector)
        if vector.shape != (width,):
            raise UsageError(f"the vector has shape {list(vector.shape)}, and the stream is [{width}]")
        if any(half.streams is not None for half in self.opened.model.stacks.values()):
            raise UsageError(f"{self.name} has several residual streams, and steer changes one")
        direction = scale * vector.detach().to(self.opened.model.parameters().__next__().device)
        return self._changed(Steering(f"steer({place}, {scale:g})", stack, block, direction))

    def replace(self, place: str | int, **maps: Tensor) -> "Model":
        """The model with other maps in a layer or a head: `model.replace("3.2", W_Q=…)`.

        Where layers share their weights, all of them have the new map; `changes` says which they are.

        Args:
            place: a layer or a head.
            maps: W_Q, W_K, W_V or W_O; shapes as `Layer` and `Head` have them.

        Raises:
            UsageError: another shape, a map that heads share, or no such place.
        """
        number, head = self._places.find(place)
        if head is not None:
            head = head_of(head, self.layers[number].num_heads, f"layer {self._places.names[number]}")
        if unknown := [name for name in maps if name not in SIDE_OF]:
            raise UsageError(f"{unknown[0]} is not one of {', '.join(SIDE_OF)}")
        self._require_own_maps(number, maps)
        numbers, where = self._sharing([number])
        changed = self._changed(
            *(
                WeightChange(
                    f"replace({place}, {name}){where}",
                    dict.fromkeys(
                        numbers, partial(with_map, name=name, given=torch.as_tensor(given), head=head)
                    ),
                )
                for name, given in maps.items()
            )
        )
        changed.layers[number].weights  # noqa: B018 (a shape that does not fit is an error now)
        return changed

    def tie(self, place: str | int, name: str, to: str) -> "Model":
        """The model with one map of a layer in the place of another: `model.tie("3", "W_K", "W_Q")`.

        Where layers share their weights, the maps of all of them are tied; `changes` says which they are.

        Args:
            place: a layer, or "*" for all.
            name: the map that is replaced: W_Q, W_K or W_V.
            to: the map that takes its place.

        Raises:
            UsageError: the maps do not fit each other.
        """
        if unknown := [map_ for map_ in (name, to) if map_ not in SIDE_OF]:
            raise UsageError(f"{unknown[0]} is not one of {', '.join(SIDE_OF)}")
        named = [*range(len(self.layers))] if str(place) == "*" else [self._places.layer(place)]
        if str(place) == "*" and name in _OF_KEYS:  # what layers borrow is tied where it is
            named = [number for number in named if self.layers[number].borrows is None]
        for number in named:
            self._require_own_maps(number, [name])
        numbers, where = self._sharing(named)
        tied = partial(tied_map, name=name, to=to)
        words = f"tie({place}, {name}, {to}){where}"
        changed = self._changed(WeightChange(words, dict.fromkeys(numbers, tied)))
        for number in numbers:
            changed.layers[number].weights  # noqa: B018
        return changed

    def without_positions(self) -> "Model":
        """The model without positions: nothing turns queries and keys, or is added to scores or embeddings.

        Raises:
            UsageError: the model has no positions besides the causal mask.
        """
        own = tuple(
            number for number, layer in enumerate(self.layers) if layer.outline.semantics.positions != "none"
        )
        added = any(
            isinstance(part, LearnedPositions | SinusoidalPositions) for part in self.opened.model.modules()
        )
        if not own and not added:
            raise UsageError(f"{self.name} has no positions to leave out")
        return self._changed(PositionsOff("without_positions()", dict.fromkeys(own, without_positions)))

    @check_choices
    def sweep(
        self,
        clean: str | Sequence[str],
        corrupted: str | Sequence[str],
        metric: Callable[[Run], float | Tensor],
        what: Activation = "z",
        *,
        progress: Progress = untold,
    ) -> Sweep:
        """Patch every head in turn from a run on clean text into one on corrupted text.

        Args:
            clean: a text, or several.
            corrupted: as many texts, each with as many tokens as the clean one.
            metric: of a run, a number.
            what: which activation is patched.
            progress: told the head, how many are done, and of how many.

        Returns:
            By head, the metric after the patch, with bootstrap intervals over texts.

        Raises:
            UsageError: there are not as many texts, or not as many tokens in a pair.
        """
        texts = [[one] if isinstance(one, str) else list(one) for one in (clean, corrupted)]
        run = self._opened.sites_of(self.reader.model)
        return sweep_heads(
            [f"{layer.name}.{head}" for layer in self.layers[: len(run)] for head in range(layer.num_heads)],
            self.run,
            lambda head, run, text: self.patch(head, run, what).run(text),
            (texts[0], texts[1]),
            metric,
            what,
            progress,
        )

    def plan(
        self,
        *steps: Step,
        layers: Sequence[int] | None = None,
        calibration: str | Path | None = None,
        skip_refused: bool = False,
    ) -> Plan:
        """What a rewrite would do, without doing it; arguments and errors as in `rewrite`."""
        recipe = to_recipe(steps, calibration, layers=layers, skip_refused=skip_refused)
        with self._files() as source:
            return plan_rewrite(source, recipe)

    def rewrite(
        self,
        *steps: Step,
        layers: Sequence[int] | None = None,
        out: str | Path | None = None,
        calibration: str | Path | None = None,
        skip_refused: bool = False,
        text: str | Path | None = None,
        compare: bool = True,
        progress: Progress | None = None,
    ) -> "Model":
        """The model with its attention written in another way, and a certificate of what that changed.

            model.rewrite("fold_value_bias", "truncate(rank=6)").save("smaller")

        The certificate compares with this model: where it was rewritten before, give all steps at once for
        one that compares with the first.

        Args:
            steps: rewrites, as calls or as records, in order; "exact" for all exact ones; or a recipe, or its
                file.
            layers: numbers of the layers that steps without layers of their own rewrite; all if None.
            out: the folder to write; a temporary one, which `save` copies, if None.
            calibration: a text to run the model on first, for the rewrites that use one; for a translator,
                lines of source, tab, target.
            skip_refused: if a layer refuses a step, leave the layer as it is instead of stopping.
            text: compare both models on this text after the rewrite.
            compare: compare both models after the rewrite, on random tokens if no text is given.
            progress: told what is being done, how much is done, and the total.

        Raises:
            RewriteRefusedError: a layer refuses a step, with the reason.
            UsageError: an unknown rewrite, or the folder exists.
        """
        temporary = Path(mkdtemp(prefix="triptych-")) if out is None else None
        name = str(out) if temporary is None else f"{self.name}, rewritten"
        target = Path(name) if temporary is None else temporary / "rewritten"
        try:
            with self._files() as source:
                certificate = rewrite_checkpoint(
                    source,
                    target,
                    to_recipe(steps, calibration, layers=layers, skip_refused=skip_refused),
                    text=None if text is None else Path(text),
                    compare=compare,
                    progress=progress,
                )
                files = source.at(target)
            files.name = name
            if temporary is None:
                files.where = str(target / "config.json")
        except BaseException:  # an interruption too leaves nothing behind
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        # A model in memory has its tokenizer among its files now.
        options = replace(self._opened.options, tokenizer=None)
        rewritten = Model(Opened(name, files, options, temporary=temporary))
        rewritten.certificate = certificate
        return rewritten

    def check(self, text: str | None = None, target: str | None = None) -> Check:
        """Compare logits, losses and attention weights with `transformers`, which has to be installed.

        Args:
            text: what both read; random tokens if None.
            target: of an encoder-decoder, what its decoder produces; its own translation if None.

        Raises:
            UsageError: a run of triptych, or a change that weights cannot express; or no `transformers`.
            DataError: one of the two does not run it.
        """
        with self._files() as source:
            return check_against_transformers(source, text, target)

    def save(self, path: str | Path) -> Path:
        """Write the model in the format that it came from; returns the folder.

        A rewritten model is written with its certificate. Changes that weights can say are written into them.
        A tokenizer that the model was loaded with takes the place of that of the files.

        Args:
            path: the folder to make.

        Raises:
            UsageError: the folder exists, or weights cannot express a change, which is named.
            RewriteRefusedError: the format has no place for it.
        """
        target = Path(path)
        for change in self._changes:
            if reason := why_not_saved(change, self._opened.attention):
                raise UsageError(f"{change.words} cannot be saved: {reason}")
        if self._changes:
            save_changed(self._opened, self._attention, self._changes, target)
        else:
            save_unchanged(self._opened, target)
        return target

    @check_choices
    def convert(
        self, path: str | Path, to: TargetFormat, quantization: Quantization = "float32"
    ) -> Conversion:
        """Write the model in another format: "hf", "ctranslate2", "onnx" or "triptych".

        Args:
            path: the folder to make.
            to: the format.
            quantization: type of the weights, for ctranslate2.

        Raises:
            UsageError: the model does not fit the format, or it was changed.
        """
        if self._opened.options.shortlist is not None and to != "ctranslate2":
            raise UsageError(f"{to} has no place for a shortlist: leave it out, or convert to ctranslate2")
        if self._changes:
            raise UsageError(
                f"{self.name} was changed ({', '.join(self.changes)}): save it, and convert what was saved"
            )
        return convert(self.opened, Path(path), to, quantization)

    def _require_own_maps(self, number: int, names: Iterable[str]) -> None:
        """Check that a layer has the maps that are to change, and does not borrow them."""
        layer = self.layers[number]
        borrowed = [name for name in names if name in _OF_KEYS]
        if borrowed and layer.borrows is not None:
            raise UsageError(
                f"layer {layer.name} has keys and values of layer {layer.borrows}: change {borrowed[0]} there"
            )

    def _sharing(self, numbers: Collection[int]) -> tuple[list[int], str]:
        """Add all layers that share weights with the given ones; also return words on the added ones."""
        layers = self._opened.attention.layers
        sites = {layers[number].site for number in numbers}
        found = [number for number, layer in enumerate(layers) if layer.site in sites]
        if len(found) == len(numbers):
            return found, ""
        shared = ", ".join(in_ranges(site.numbers) for site in self._opened.attention.sites if site in sites)
        return found, f" in layers {shared}, which share their weights"

    def _heads(self, heads: Heads) -> dict[int, tuple[int, ...]]:
        return self._places.heads(in_words(heads), [layer.num_heads for layer in self.layers])

    def _changed(self, *changes: Change) -> "Model":
        return Model(self._opened, (*self._changes, *changes))

    @contextmanager
    def _files(self) -> Iterator[Source]:
        """The files that a rewrite reads; a changed model, and a module in memory, are saved to be read."""
        if not self._changes and self._opened.module is None:
            yield self._opened.files
            return
        with TemporaryDirectory(prefix="triptych-") as place:
            saved = self.save(Path(place, "model"))
            if self._opened.module is None:
                source = self._opened.files.at(saved)
            else:
                if self._opened.options.tokenizer is not None and not self._opened.why_not_run:
                    self._opened.model.save_tokenizers(saved)
                source = find_source(saved)
                source.where = f"{self.name}/config.json"
            source.name = ", ".join((self.name, *self.changes))
            yield source


def renamed(model: Model, name: str, *, is_mapped: bool = True) -> Model:
    """Return the same model under another name, which its records and messages have instead of a path.

    Weights that are looked at are mapped from their files, or else (`is_mapped` is False) read, so that no
    change of a file can end the process.
    """
    return Model(model._opened.named(name, is_mapped=is_mapped), model._changes)


def reopened(model: Model) -> Model:
    """Open the model that is now where one was found, with the same options and changes."""
    return Model(model._opened.reopened(), model._changes)


def require_same_files(model: Model) -> None:
    """Check that a model's files are those that it was opened from; `DataError` if one was changed."""
    model._opened.require_same()
