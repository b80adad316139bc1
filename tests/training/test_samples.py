"""The samples of docs/how-to/text.md."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from triptych.errors import UsageError
from triptych.training import read_recipe, resolve
from triptych.training.corpora.corpora import read_parallel
from triptych.training.corpora.generated import generate_pairs
from triptych.training.recipe import LanguageRecipe

TEXT = (Path(__file__).parents[2] / "docs" / "how-to" / "text.md").read_text(encoding="utf-8")
*_PARALLEL, PLAIN = re.findall(r"^```toml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SAMPLES = {tomllib.loads(text)["name"]: text for text in _PARALLEL}
PAIRS = generate_pairs(5, "train", seed=1)


def _write(path: Path) -> None:
    """The text that a sample names, as its format has it."""
    if path.suffix == ".tsv":
        path.write_text("".join(f"{en}\t{de}\n" for de, en in PAIRS))
    elif path.suffix == ".jsonl":
        records = [{"translation": {"en": en, "de": de}} for de, en in PAIRS]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pyarrow.Table.from_pylist([{"en": en, "de": de} for de, en in PAIRS])
        parquet.write_table(table, path)
    else:
        path.write_text("".join(f"{de if path.suffix == '.de' else en}\n" for de, en in PAIRS))


def test_there_is_a_sample_for_every_way_to_give_a_corpus() -> None:
    assert {*SAMPLES} == {"two-files", "tsv", "jsonl", "parquet", "hub", "generated", "several"}
    assert isinstance(resolve(tomllib.loads(PLAIN)), LanguageRecipe)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What `datasets` is asked for; it has the pairs whatever it is."""
    datasets = pytest.importorskip("datasets")
    rows = [{"translation": {"en": en, "de": de}} for de, en in PAIRS]
    asked: list[object] = []

    def load(*place: str, split: str) -> object:
        asked.append((*place, split))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_reads_the_text_that_it_names(name: str, tmp_path: Path, hub: list[object]) -> None:
    (tmp_path / "recipe.toml").write_text(SAMPLES[name].replace("60000", "600"))
    data = read_recipe(tmp_path / "recipe.toml").data
    for spec in (*data.corpora, data.valid):
        for path in (spec.source, spec.target, spec.file):
            if path is not None:
                _write(tmp_path / path)
        corpus = read_parallel(spec, base=tmp_path)
        if spec.generated is None:
            assert list(zip(corpus.target, corpus.source, strict=True)) == PAIRS
        else:
            assert len(corpus) == spec.generated
    wanted = [(spec.hub, spec.config_name, spec.split) for spec in (*data.corpora, data.valid) if spec.hub]
    assert hub == wanted


def test_a_tsv_given_as_source_is_told_its_key() -> None:
    tree = {"data": {"train": {"source": "train.tsv"}, "valid": {"file": "valid.tsv"}}}
    with pytest.raises(UsageError, match=r'data\.train: source = "train\.tsv".* write file = "train\.tsv"'):
        resolve(tree)
