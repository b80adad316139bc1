"""Special tokens that a text spells out, and token ids in the place of a text, on the command line."""

from pathlib import Path

import pytest

from command import Command
from face.tiny import write_checkpoint

pytest.importorskip("transformers")
TEXT = "a <end> b"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    write_checkpoint("gpt2", folder)
    return folder


def test_literal_reads_a_special_token_of_a_text_as_its_characters(
    triptych: Command, gpt2: Path, cwd: Path
) -> None:
    Path("text.txt").write_text(TEXT)
    for command, texts in (("attend", [TEXT]), ("generate", [TEXT]), ("evaluate", ["--text", "text.txt"])):
        read = [triptych(command, gpt2, *texts, *more, "--json") for more in ([], ["--literal"])]
        assert [answer.code for answer in read] == [0, 0], read[1].err
        assert read[0].out != read[1].out, command


def test_literal_is_an_option_of_translators(triptych: Command, tmp_path: Path) -> None:
    write_checkpoint("t5", tmp_path / "t5")
    read = [triptych("translate", tmp_path / "t5", TEXT, *more) for more in ([], ["--literal"])]
    assert [answer.code for answer in read] == [0, 0], read[1].err
    assert read[0].out != read[1].out


def test_token_ids_are_read_in_the_place_of_a_text(triptych: Command, gpt2: Path) -> None:
    found = [triptych("attend", gpt2, *given, "--json").record() for given in (["hi"], ["--ids", "71,72"])]
    assert found[0] == found[1]
    texts = [triptych("generate", gpt2, *given).out for given in (["hi"], ["--ids", "71,72"])]
    assert texts[0] == texts[1]
    assert triptych("generate", gpt2, "--ids", "72,x").code == 2
