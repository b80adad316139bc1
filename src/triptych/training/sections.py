"""The tables of a recipe, with the meanings and defaults of their keys."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from triptych.literals import BleuTokenizer
from triptych.running.opening import Section
from triptych.running.text import LanguageCorpusSpec
from triptych.training.corpora.corpora import CorpusSpec, TrainingCorpusSpec

# Tags of the two forms of a training text; error messages leave them out.
ONE_CORPUS = "<table>"
SEVERAL_CORPORA = "<list>"

# Criteria of the best model of a translator.
Metric = Literal["bleu", "chrf", "loss"]


def _form_of(text: Any) -> str:
    return SEVERAL_CORPORA if isinstance(text, list | tuple) else ONE_CORPUS


TrainingText = Annotated[
    Annotated[TrainingCorpusSpec, Tag(ONE_CORPUS)]
    | Annotated[
        tuple[TrainingCorpusSpec, ...], Field(min_length=1), Tag(SEVERAL_CORPORA)
    ],
    Discriminator(_form_of),
]


class DataConfig(Section):
    """The text.

    Attributes:
        train: training text, a corpus or a list of corpora with weights (`[[data.train]]`); the tokenizer is
            trained on it alone.
        valid: validation text during training. The default is a part of `train`.
        valid_share: share of the pairs of `train` that validate if `valid` is not given, 2,000 at most;
            pairs with the same source stay together.
        max_sentence_tokens: training pairs with a longer side are skipped and counted.
        max_line_chars: longer lines are skipped before tokenizing and counted.
        max_length_ratio: skip and count training pairs with a larger ratio of the two lengths in characters.
        drop_duplicates: skip and count training pairs that repeat an earlier pair.
        drop_validation: skip and count training pairs whose source is in `valid`.
        drop_other_languages: skip and count training pairs with a source or target in another language
            than `decoding.languages`; py3langid finds the language (`pip install 'triptych[languages]'`).
        cache: folder for tokenized text, shared by runs; none if empty.
    """

    train: TrainingText
    valid: CorpusSpec | None = None
    valid_share: float = Field(0.05, gt=0, lt=1)
    max_sentence_tokens: int = Field(256, ge=2)
    max_line_chars: int = Field(10_000, ge=1)
    max_length_ratio: float | None = Field(None, ge=1)
    drop_duplicates: bool = False
    drop_validation: bool = False
    drop_other_languages: bool = False
    cache: str = ".cache/triptych"

    @property
    def corpora(self) -> tuple[TrainingCorpusSpec, ...]:
        """The corpora of the training text."""
        return self.train if isinstance(self.train, tuple) else (self.train,)

    @model_validator(mode="after")
    def _has_a_validation_text(self) -> "DataConfig":
        if self.drop_validation and self.valid is None:
            raise ValueError(
                "drop_validation needs valid: without it, no validation source is in the training text"
            )
        return self


class OptimisationConfig(Section):
    """The optimisation of a model for any task.

    Attributes:
        max_steps: the run ends after this many updates.
        max_epochs: the run also ends after this many passes over the text.
        accumulate_batches: number of batches in the gradient of one update.
        optimizer: "adam", "adamw" with decay, or "muon": Muon for the matrices of the blocks, AdamW for all
            other parameters.
        weight_decay: for "adamw" and "muon". Each update shrinks weights by this times the learning rate,
            except biases, norms and embeddings.
        muon_momentum: decay of Muon's mean of the gradients.
        learning_rate: the peak, reached at the end of the warm-up. The default is the paper's,
            `d_model^-0.5 · warmup_steps^-0.5`.
        min_learning_rate: the learning rate at which "linear", "cosine" and "wsd" end.
        warmup_steps: updates of linear warm-up.
        schedule: after the warm-up: "inverse_sqrt", as in the paper; "linear" or "cosine" to the minimum at
            max_steps; or "wsd", constant at the peak, then linear to the minimum.
        decay_share: share of max_steps in which "wsd" falls.
        adam_beta1: decay of Adam's mean of the gradients.
        adam_beta2: decay of Adam's mean of their squares.
        adam_epsilon: added to Adam's denominator.
        clip_norm: largest norm of the gradients, by clipping; 0 for no clipping.
        precision: "bf16" computes in bfloat16; the trained weights stay float32. "auto" is "bf16" where the
            device has products in bfloat16 (GPUs, CPUs with AVX-512), and "fp32" elsewhere.
        activation_checkpointing: keep only the input of each block and recompute the block for the gradients.
            It saves memory and costs one more forward pass; the gradients are the same.
        compile: compile the blocks with `torch.compile`, about a minute; for GPUs.
        average_last: number of last checkpoints (one per validation) to average at the end.
        early_stopping: number of validations without improvement after which training stops; 0 is off.
        save_every_steps: number of updates between saves of the state; every validation saves it, too.
        log_every_steps: number of updates between lines of `metrics.jsonl`.
        threads: number of CPU threads; by default as many as torch chooses.
        device: "auto" uses a GPU if available.
        keep_states: number of saved states kept by several processes; a single process keeps its last state.
        parallel: distribution of the work: "ddp" copies the model to each process, "fsdp" shards it over all
            processes, "hybrid" shards within a machine and copies across, "none" is for one process. Default:
            "ddp" if the model with its optimizer takes less than half of a device, otherwise "hybrid" on
            several machines with several processes each, and "fsdp" elsewhere.
        shard_size: number of processes that share one copy of the model with parallel = "hybrid"; it must
            divide the number of processes. The default is the processes of a machine, and 2 on a single one.
        timeout_minutes: longest wait of a process for other processes before the run ends with an error.
    """

    max_steps: int = Field(100_000, ge=1)
    max_epochs: int | None = Field(None, ge=1)
    accumulate_batches: int = Field(1, ge=1)
    optimizer: Literal["adam", "adamw", "muon"] = "adam"
    weight_decay: float = Field(0.0, ge=0)
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    learning_rate: float | None = Field(None, gt=0)
    min_learning_rate: float = Field(0.0, ge=0)
    warmup_steps: int = Field(4000, ge=1)
    schedule: Literal["inverse_sqrt", "linear", "cosine", "wsd"] = "inverse_sqrt"
    decay_share: float = Field(0.2, gt=0, le=1)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    adam_epsilon: float = Field(1e-9, gt=0)
    clip_norm: float = Field(0.0, ge=0)
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    activation_checkpointing: bool = False
    compile: bool = False
    average_last: int = Field(5, ge=1)
    early_stopping: int = Field(0, ge=0)
    save_every_steps: int = Field(1000, ge=1)
    log_every_steps: int = Field(50, ge=1)
    threads: int | None = Field(None, ge=1, le=10_000)
    device: str = "auto"
    parallel: Literal["none", "ddp", "fsdp", "hybrid"] | None = None
    keep_states: int = Field(2, ge=1)
    shard_size: int | None = Field(None, ge=2)
    timeout_minutes: float = Field(10.0, gt=0)

    @model_validator(mode="after")
    def _options_are_used(self) -> "OptimisationConfig":
        if self.weight_decay and self.optimizer == "adam":
            raise ValueError(
                "weight_decay is given, but optimizer = 'adam' has none: choose 'adamw'"
            )
        if self.min_learning_rate:
            if self.schedule == "inverse_sqrt":
                raise ValueError(
                    "min_learning_rate is given, but schedule = 'inverse_sqrt' has no minimum"
                )
            if (
                self.learning_rate is not None
                and self.min_learning_rate > self.learning_rate
            ):
                raise ValueError(
                    f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}"
                )
        return self


class TrainingConfig(OptimisationConfig):
    """The optimisation of a model for translation; defaults are the paper's.

    Training chooses some keys left out of a recipe (`choices.py`): max_steps and batch_tokens follow the
    size of the text and the machine; where warmup_steps is left out, it is a tenth of the steps, at most
    4,000, and learning_rate, schedule ("linear") and clip_norm (1) are chosen with it.

    Attributes:
        checkpoint: a translator to go on with (`--from`): a run, a folder in Hugging Face's format, or a name
            on the Hub. Weights, tokenizers, `[model]` and the missing keys of `[decoding]` are its own; the
            learning rate that training chooses is a tenth of that for fresh weights. With another library's
            checkpoint, except Marian's, a recipe has neither `[model]` nor `[tokenizer]`.
        languages: source and target language for a multilingual checkpoint (mBART, NLLB), as its tokenizer
            names them ("de_DE").
        batch_tokens: maximum of padded source tokens, and of padded target tokens, in a batch.
        label_smoothing: probability spread evenly over all tokens.
        bpe_dropout: probability with which a merge of byte-pair encoding is left out, so that each pass reads
            other pieces of the training text; 0 is off, 0.1 is usual. Needs kind "bpe".
        rdrop: weight of R-Drop; 0 is off. Every batch runs through the model twice with different dropout,
            and the divergence of the two outputs is penalised. For little text; takes twice the time.
        rdrop_after: the update after which R-Drop starts.
        teacher: folder of a translator in triptych's format, a second source of target probabilities, written
            by `triptych distil --teacher-weight`. Its tokenizers are the run's.
        teacher_weight: share of the cross-entropy against the teacher's probabilities in the loss; the
            remaining share is the cross-entropy against the text.
    """

    checkpoint: str | None = None
    languages: tuple[str, str] | None = None
    batch_tokens: int = Field(25_000, ge=2)
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    bpe_dropout: float = Field(0.0, ge=0, lt=1)
    rdrop: float = Field(0.0, ge=0)
    rdrop_after: int = Field(0, ge=0)
    teacher: str | None = None
    teacher_weight: float = Field(0.5, gt=0, le=1)


class ValidationConfig(Section):
    """Validation of a run during training.

    Attributes:
        every_steps: updates between validations. The default is a tenth of the steps, at most 1,000.
        metric: criterion of the best model: "loss" (lower), or "bleu" or "chrf" (higher; before the 95 %
            bootstrap interval of BLEU lies above 5 both are noise, and the loss decides).
        bleu: True to translate the validation text as well, for BLEU and chrF.
        bleu_tokenize: the tokenizer of BLEU in sacreBLEU. The default fits the references: "13a", "zh" for
            Chinese, "ja-mecab" for Japanese where it is installed, else "char", as for Thai.
        max_sentences: number of its first sentences to translate; all by default.
        beam_size: 1 is greedy.
    """

    later_fields = frozenset({"bleu_tokenize"})

    every_steps: int = Field(1000, ge=1)
    metric: Metric = "bleu"
    bleu: bool = True
    bleu_tokenize: BleuTokenizer | None = None
    max_sentences: int | None = Field(None, ge=1)
    beam_size: int = Field(1, ge=1, le=10_000)

    @model_validator(mode="after")
    def _metric_is_measured(self) -> "ValidationConfig":
        if self.metric != "loss" and not self.bleu:
            raise ValueError(
                f"metric is '{self.metric}' but bleu = false: measure it or set metric = 'loss'"
            )
        return self


class LanguageDataConfig(Section):
    """The text of a language model.

    Attributes:
        train: training text; the tokenizer is trained on it alone.
        valid: validation text during training. The default is the end of `train`.
        valid_share: share of the characters of `train` that validate if `valid` is not given.
        within_documents: tokens attend only within their own document; otherwise the documents are one text.
        cache: folder for tokenized text, shared by runs; training maps it into memory.
    """

    train: LanguageCorpusSpec
    valid: LanguageCorpusSpec | None = None
    valid_share: float = Field(0.1, gt=0, lt=1)
    within_documents: bool = False
    cache: str = Field(".cache/triptych", min_length=1)


class LanguageTrainingConfig(OptimisationConfig):
    """The optimisation of a language model.

    Training chooses some keys left out of a recipe (`choices.py`): max_steps, batch_size, warmup_steps and
    learning_rate follow the size of the text, the model and the machine.

    Attributes:
        batch_size: rows of `model.context` tokens in a batch.
    """

    batch_size: int = Field(32, ge=1)
    max_steps: int = Field(5000, ge=1)
    optimizer: Literal["adam", "adamw", "muon"] = "adamw"
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: int = Field(200, ge=1)
    schedule: Literal["inverse_sqrt", "linear", "cosine", "wsd"] = "cosine"
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    clip_norm: float = Field(1.0, ge=0)
    average_last: int = Field(1, ge=1)


class LanguageValidationConfig(Section):
    """Validation of a run during training, by its loss on the whole validation text.

    Attributes:
        every_steps: updates between validations. The default is a tenth of the steps, at most 1,000.
        sample_tokens: length of the text generated at each validation; 0 for no text.
        sample_prompt: beginning of that text; if empty, it begins like a document.
    """

    every_steps: int = Field(500, ge=1)
    sample_tokens: int = Field(0, ge=0, le=10**9)
    sample_prompt: str = ""


class ContinuedModelConfig(Section):
    """A model initialised with the weights of a checkpoint.

    Attributes:
        checkpoint: a folder in Hugging Face's format, or a name on the Hub; its tokenizer cuts the text.
        context: longest text in tokens that the model is trained on.
    """

    checkpoint: str = Field(min_length=1)
    context: int = Field(128, ge=2)
