"""Codes of languages: how names of models and requests write them."""

import pytest

from triptych.languages import closeness, find_language, languages_in, name_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("de-en", ("de", "en")),
        ("en-pt-br", ("en", "pt-br")),
        ("en-pt-BR", ("en", "pt-BR")),
        ("zh-Hans-en", ("zh-Hans", "en")),
        ("en-zh_Hant", ("en", "zh_Hant")),
        ("en-zh-tw", ("en", "zh-tw")),
        ("eng_Latn-zho_Hans", ("eng_Latn", "zho_Hans")),
        ("de_DE-en_XX", ("de_DE", "en_XX")),
        ("EN-ZH", ("en", "zh")),
        ("en-fil", ("en", "fil")),
        ("opus-mt-en-es", ("en", "es")),  # not Maltese to English of Spain
        ("opus-mt-fr-ca", ("fr", "ca")),
        ("fr-ca-en", ("fr-ca", "en")),
        ("models/opus-mt-tc-big-en-pt", ("en", "pt")),
        ("my.multi30k-en-de", ("en", "de")),
        ("demo", None),
        ("run-1", None),
        ("my_it", None),
        ("en-xx", None),
    ],
)
def test_a_name_ends_in_two_languages_with_their_scripts_and_regions(
    name: str, expected: tuple[str, str] | None
) -> None:
    assert languages_in(name) == expected


@pytest.mark.parametrize(
    ("code", "offered", "expected"),
    [
        ("pt-br", "pt-br", 3),
        ("pt_BR", "pt-br", 2),
        ("pb", "pt-BR", 2),
        ("pt", "pt-BR", 1),
        ("pt-PT", "pt-BR", 0),
        ("zh-CN", "zh", 2),
        ("zh-Hans", "zh", 2),
        ("zh-TW", "zh-Hant", 2),
        ("zt", "zh-Hant", 2),
        ("zh-TW", "zh", 0),
        ("EN", "en", 2),
        ("en-US", "en", 1),
        ("eng_Latn", "en", 2),
        ("de_DE", "de", 2),
        ("ger", "de", 2),
        ("chi", "zh-CN", 2),
        ("sr-Latn", "sr", 0),
        ("xx", "en", 0),
    ],
)
def test_a_wanted_code_fits_an_offered_one_of_the_same_language(
    code: str, offered: str, expected: int
) -> None:
    assert closeness(code, offered) == expected


def test_languages_have_english_names() -> None:
    assert name_of("de") == "German"
    assert name_of("pt-br") == "Portuguese (Brazil)"
    assert name_of("zt") == "Chinese (Traditional)"
    assert name_of("srp_Latn") == "Serbian (Latin)"
    assert name_of("eng_Latn") == "English"
    assert name_of("ceb") == "Cebuano"
    assert find_language("klingon") is None
