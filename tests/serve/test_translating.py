"""LibreTranslate's habits: codes of languages, several languages in one request, files."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from served import Served
from triptych.errors import DataError
from triptych.model import Model, load
from triptych.serving import translation_api
from triptych.serving.limits import Limits
from triptych.serving.served_models import ServedModel
from triptych.serving.text_files import KeptFile, KeptFiles, TextFile

SUBTITLES = """1
00:00:01,000 --> 00:00:02,500
{\\an8}twelve <i>and</i>
seventy & five

2
00:00:03,000 --> 00:00:04,000
- one?
- two!

"""


@pytest.fixture(scope="module")
def served(translator: Model) -> Iterator[Served]:
    """A server of two translators, for clients with a key."""
    with Served({"de-pt-br": translator, "zh-Hans-de": translator}, keys=["secret"]) as served:
        yield served


KEY = {"X_API_Key": "secret"}


def test_codes_with_regions_and_scripts_are_served_under_their_names_and_aliases(
    served: Served, translator: Model
) -> None:
    found = served.ask("/languages", **KEY).body
    assert {one["code"]: (one["name"], one["targets"]) for one in found} == {
        "de": ("German", ["pt-br", "de"]),
        "pt-br": ("Portuguese (Brazil)", ["pt-br"]),
        "zh-Hans": ("Chinese (Simplified)", ["de", "zh-Hans"]),
    }
    expected = translator.translate("zwei").text
    for source, target in (("de", "pt-BR"), ("DE", "pb"), ("de_DE", "pt"), ("zh-CN", "deu_Latn")):
        answer = served.ask("/translate", {"q": "zwei", "source": source, "target": target}, **KEY)
        assert (answer.status, answer.body) == (200, {"translatedText": expected})
    refused = served.ask("/translate", {"q": "zwei", "source": "de", "target": "zh-TW"}, **KEY)
    assert refused.status == 400
    assert "de to zh-TW is not supported; what is: de-pt-br, zh-Hans-de" in refused.body["error"]
    settings = served.ask("/frontend/settings").body
    assert settings["language"]["target"] == {"code": "pt-br", "name": "Portuguese (Brazil)"}
    assert settings["suggestions"] is False


def test_each_text_of_a_list_is_translated_from_its_own_language(
    served: Served, translator: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    languages = {"eins": "de", "dois": "pt-br", "zwei": "de"}

    def confidences(server: Any, texts: list[str], target: str | None) -> dict[str, float]:
        (text,) = texts
        return {"de": 0.25, "pt-br": 0.25, languages[text]: 0.75}

    monkeypatch.setattr(translation_api, "_confidences", confidences)
    fields = {"q": [*languages], "source": "auto", "target": "pt-br"}
    body = served.ask("/translate", fields, **KEY).body
    assert [one["language"] for one in body["detectedLanguage"]] == ["de", "pt-br", "de"]
    translated = [one.text for one in translator.translate(["eins", "zwei"])]
    assert body["translatedText"] == [translated[0], "dois", translated[1]]


def test_a_run_knows_its_languages_and_so_does_what_is_saved_of_it(small_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "demo"))
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace("[decoding]", '[decoding]\nlanguages = ["de", "en"]'))
    (tmp_path / "saved").mkdir()
    load(run).reader.save(tmp_path / "saved")
    names = {"demo": run, "saved": tmp_path / "saved", "fr-en": run}
    found = []
    for name, folder in names.items():
        with closing(ServedModel(name, load(folder), Limits())) as model:
            found.append(model.languages)
    assert found == [("de", "en"), ("de", "en"), ("fr", "en")]
    (run / "recipe.toml").write_text(recipe.replace("[decoding]", '[decoding]\nlanguages = ["xx", "en"]'))
    with pytest.raises(DataError, match="'xx' is no code of a language"):
        load(run).translate("zwei")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "zwei\n\n  drei\n", ["zwei\n\n  drei\n"]),
        ("a.HTML", "<p>zwei <b>drei</b></p>", ["<p>zwei <b>drei</b></p>"]),
        ("a.srt", SUBTITLES, ["twelve <i>and</i> seventy &amp; five", "- one?", "- two!"]),
    ],
)
def test_a_file_gives_its_texts_and_is_the_same_with_them_put_back(
    name: str, content: str, expected: list[str]
) -> None:
    for text in (content, content.replace("\n", "\r\n")):
        file = TextFile.read(name, b"\xef\xbb\xbf" + text.encode())
        assert file.is_html is not name.endswith(".txt")
        assert [one.replace("\r\n", "\n") for one in file.texts] == expected
        assert file.translated(file.texts) == text
    assert file.name_in("pt-BR") == f"a_pt-BR{name[1:]}"


def test_a_translated_subtitle_has_as_many_lines_of_about_the_same_length() -> None:
    file = TextFile.read("a.srt", SUBTITLES.encode())
    found = file.translated(["aa bb <font color='red x'>cc</font> dd ee ff", "- eins", "- zwei"])
    assert found.split("\n")[2:4] == ["{\\an8}aa bb <font color='red x'>cc</font>", "dd ee ff"]


def test_a_form_with_a_file_is_translated_and_others_are_refused_by_name(
    served: Served, translator: Model
) -> None:
    given = {"a.txt": b"zwei\ndrei\n", "a.docx": b"x", "a": b"x", "a.srt": b"\xff"}
    answers = {name: send_file(served, name, content) for name, content in given.items()}
    assert answers["a.docx"][0] == 400
    assert "file: .docx is not translated; what is: .txt, .html, .htm, .srt" in answers["a.docx"][1]["error"]
    assert "a name without an ending" in answers["a"][1]["error"]
    assert "byte 0 is no text in UTF-8" in answers["a.srt"][1]["error"]
    assert answers["a.txt"][0] == 200
    path = answers["a.txt"][1]["translatedFileUrl"].removeprefix(served.address)
    found = served.ask(path)  # without a key: nobody guesses the address
    assert found.headers["content-disposition"] == "attachment; filename*=UTF-8''a_pt-BR.txt"
    assert found.body == "\n".join([*(one.text for one in translator.translate(["zwei", "drei"])), ""])
    assert served.ask("/download_file/none").status == 404


def send_file(served: Served, name: str, content: bytes) -> tuple[int, Any]:
    """Post a form with a file, as a browser does."""
    parts = [("source", b"de"), ("target", b"pt-BR"), ("api_key", b"secret")]
    body = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (key.encode(), value)
        for key, value in parts
    )
    head = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
    body += head + content + b"\r\n--x--\r\n"
    answer = served.send("/translate_file", body, **{"Content-Type": "multipart/form-data; boundary=x"})
    return answer.status, json.loads(answer.body)


def test_translated_files_are_kept_for_a_while_and_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = KeptFiles()
    tokens = [files.keep(KeptFile("a", b"x" * (1 << 20))) for _ in range(40)]
    assert [files.find(token) is not None for token in tokens] == [False] * 8 + [True] * 32
    monkeypatch.setattr("time.monotonic", lambda: 1e12)
    assert not any(map(files.find, tokens))
