"""Sentences of ten languages, and the white space between them."""

import time
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.running.text.sentences import (
    Spaced,
    cut_to_fit,
    graphemes,
    split_sentences,
    without_invisible,
)

# Sentences of a paragraph; in each language with what looks like an end and is none.
PARAGRAPHS = {
    "de": [
        "Wir fahren am 3. Mai nach Berlin.",
        "Dr. Müller trank z. B. 3.5 Liter.",
        "„Wirklich?“, fragte er.",
        "Ja … vielleicht!",
        "Im 19. Jahrhundert war das anders.",
    ],
    "en": [
        "Mr. Smith paid 3.50 dollars.",
        'He said "stop."',
        "She left.",
        '"Why?" he asked.',
        "Well... maybe.",
        "See version 1.2.3 at example.com!",
    ],
    "fr": ["Nous avons vu M. Dupont.", "Il a dit : « Bonjour ! »", "Où est-il ?", "Ça coûte 3,50 euros."],
    "es": ["El Sr. Pérez llegó.", "¿Dónde está?", "¡Aquí!", "Cuesta 3.50 euros."],
    "ru": ["Привет.", "А. С. Пушкин родился в 1799 г. в Москве.", "Где он работает?", "Закройте дверь!"],
    "zh": ["你好。", "今天天气很好！", "他在哪里工作？", "他说：“你好。”", "价格是3.5元。", "2020年他来了。"],
    "ja": ["こんにちは。", "「元気？」と彼は言った。", "公園へ行きましょう！", "3.5キロです。"],
    "th": ["สวัสดีครับคุณครู", "วันนี้อากาศดีมาก", "ฉันชอบดื่มชาและกาแฟ"],
    "hi": ["नमस्ते।", "डॉ. शर्मा आए।", "वह कहाँ काम करता है?", "3.5 किलो है।"],
    "ar": ["مرحبا.", "أين يعمل؟", "وصل د. أحمد.", "الطقس جميل اليوم!"],
}
SPACES = {"zh": "", "ja": ""}


@pytest.mark.parametrize("language", PARAGRAPHS)
def test_a_paragraph_of_ten_languages_is_split_behind_each_sentence(language: str) -> None:
    sentences = PARAGRAPHS[language]
    parts = split_sentences(SPACES.get(language, " ").join(sentences))
    assert [part.strip() for part in parts] == sentences


@pytest.mark.parametrize("language", PARAGRAPHS)
def test_any_white_space_may_part_any_two_sentences(language: str) -> None:
    for first, second in product(PARAGRAPHS[language], repeat=2):
        for gap in (SPACES.get(language, " "), "  ", "\t", " \u3000", "\u00a0"):
            assert split_sentences(first + gap + second) == [first + gap, second]


@pytest.mark.parametrize("language", PARAGRAPHS)
def test_a_sentence_alone_is_one(language: str) -> None:
    for sentence in PARAGRAPHS[language]:
        assert split_sentences(sentence) == [sentence]


def test_sentences_of_people_who_write_everything_small_are_split_too() -> None:
    parts = split_sentences("there he went. it was late! so what? nothing.")
    assert parts == ["there he went. ", "it was late! ", "so what? ", "nothing."]
    german = "Das kostet inkl. der Steuer ca. drei Euro bzw. vier."
    assert split_sentences(german) == [german]


@pytest.mark.parametrize("word", ["no", "No", "me", "may", "ill", "art", "ok", "Art", "id"])
def test_words_that_are_also_abbreviations_end_sentences(word: str) -> None:
    assert split_sentences(f"It is {word}. She left.") == [f"It is {word}. ", "She left."]
    assert split_sentences(f"It is {word}. I left.") == [f"It is {word}. ", "I left."]


@pytest.mark.parametrize("text", ["See no. 5 of 8.", "Das gilt nach Art. 3 nicht.", "It is No. A5 here."])
def test_abbreviations_in_front_of_numbers_end_no_sentence(text: str) -> None:
    assert split_sentences(text) == [text]


@pytest.mark.parametrize(
    "text", ["OK?Yes", "Yahoo!Japan", "1. First item", "...", "", " ", "และ ครับ", "(He left.)", "Hm … so"]
)
def test_what_is_no_end_of_a_sentence_stays(text: str) -> None:
    assert split_sentences(text) == [text]


# Texts that people paste: "|" is where a sentence ends.
PASTED = """
"I came home. |It was late. |Nobody was there."
He said: “I came home. |It was late,” and left. |She laughed.
„Ich kam heim. |Es war spät.“ |Dann ging er.
'I came home. |It's late. |Go.' |She left.
“你好。|今天天气很好。|我们去公园。”|他说。
今天天气很好！ 　|2020年他来了。|2021年也是。
「こんにちは。|今日は天気がいいです。」と彼は言った。
(He left. |She stayed.) |Then it rained.
They sang "Help! I need somebody" in a bar (the U.S. one).
1. Buy it. |2. Sell it. |3. Go home.
1. Mai bis 2. Mai ist frei.
- First one. |- Second one.
He left.[1] |She stayed.[2][3] |It rained.
**It rained.** |Then it *stopped.* |Good.
[Read this.](https://example.com/a?b=c) |Then go on.
Look at https://example.com/a_(b)?c=d&e=1! |It is good.
Wow!!! |Great. |😀 Next one. |👍🏽 Done!
We met at 5 p.m. |Then we left. |We met at 5 p.m. on Monday.
Pens, ink, etc. |They are cheap. |Pens etc. are cheap.
He left the U.S. |He came back. |Then he joined the U.S. Army.
Das Brot usw. |Dann gingen wir. |Wie z. B. Die Zeit.
Heinrich VIII. war König.
Er wurde 1990 geboren. |1991 ging er.
Il part à 8 h. |Il revient.
Il sig. Rossi è qui. |La sig.ra Verdi no.
EE. UU. es grande.
И т. д. и т. п. |Она ушла.
Τι κάνεις; |Καλά είμαι.
The train arrives at four.The next one is late.
Use Node.js and System.Out of Yahoo!Japan here.
"""


@pytest.mark.parametrize("marked", PASTED.strip().splitlines())
def test_sentences_in_quotations_lists_and_markup_are_split_and_abbreviations_are_not(marked: str) -> None:
    assert split_sentences(marked.replace("|", "")) == marked.split("|")


def test_no_sentence_crosses_a_tab_or_a_line_break_and_wrapped_lines_are_one_sentence() -> None:
    assert split_sentences("12\t13\tabc\t\td") == ["12\t", "13\t", "abc\t\t", "d"]
    assert split_sentences("12\n\n13\r\n  Abc\nd") == ["12\n\n", "13\r\n  ", "Abc\nd"]


TEXTS = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from(" .!?…。「」\n\t1aあกА"),
        st.sampled_from(" .,;:\"'“”„«»‘’()（）[]*_A"),
    ),
    max_size=80,
)


@given(text=TEXTS)
def test_parts_join_to_the_text_and_so_does_white_space(text: str) -> None:
    parts = split_sentences(text)
    assert "".join(parts) == text
    spaced = Spaced.of(parts)
    assert spaced.join(spaced.texts) == text
    assert all(one == one.strip() != "" for one in spaced.texts)


def test_white_space_is_kept_apart_from_the_sentences() -> None:
    spaced = Spaced.of(split_sentences("  Hi there. \r\n\tWho is it?\n\n Me.  "))
    assert spaced.texts == ("Hi there.", "Who is it?", "Me.")
    assert spaced.join(["A", "B", "C"]) == "  A \r\n\tB\n\n C  "


def test_a_long_paragraph_is_split_as_a_short_one() -> None:
    sentence = "Dr. Müller kommt am 3. Mai. "
    assert split_sentences(sentence * 400) == [sentence] * 400


@pytest.mark.parametrize(
    "text",
    ["1. ", "A. ", '"a." ', "「あ。", "。1", "ก ข ", "... ", "( ", "('a", "'a'b", "a.](", "\n", "ab\u0301"],
)
def test_no_text_takes_long(text: str) -> None:
    started = time.process_time()
    split_sentences(text * 10_000)
    assert time.process_time() - started < 5.0  # quadratic ones took minutes for ten times as much


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("👩‍👩‍👧‍👦🇩🇪👍🏽", ["👩‍👩‍👧‍👦", "🇩🇪", "👍🏽"]),
        ("กำลัง", ["กำ", "ลั", "ง"]),
        ("vie\u0323\u0302t", ["v", "i", "e\u0323\u0302", "t"]),
        ("क्षत्रिय", ["क्ष", "त्रि", "य"]),
        ("각", ["각"]),
    ],
)
def test_graphemes_are_the_characters_that_a_reader_sees(text: str, seen: list[str]) -> None:
    assert graphemes(text) == seen
    parts = cut_to_fit(text * 20, lambda part: len(part) <= 12)
    assert "".join(parts) == text * 20
    assert [one for part in parts for one in graphemes(part)] == seen * 20


@pytest.mark.parametrize(
    ("text", "limit", "ends"),
    [
        ("今天天气很好。我们去公园散步吧！你想喝什么茶？" * 5, 30, "。！？"),
        ("如果明天下雨，我们就在家里看书，喝茶，听音乐，" * 5, 12, "，"),
        ("كيف حالك؟ أنا بخير. أين تعمل؟ " * 5, 30, "؟."),
        ("आज मौसम अच्छा है। मुझे चाय पसंद है। " * 5, 40, "।"),
    ],
)
def test_long_texts_of_any_script_are_cut_behind_sentences_and_clauses(
    text: str, limit: int, ends: str
) -> None:
    parts = cut_to_fit(text, lambda part: len(part) <= limit)
    assert "".join(parts) == text
    assert all(part.strip()[-1] in ends for part in parts)


def test_byte_order_marks_around_a_text_are_space_that_is_kept() -> None:
    spaced = Spaced.of(["\ufeff alpha\u200b\n", "\u200bbeta", "\ufeff"])
    assert spaced == Spaced(("alpha", "beta"), ("\ufeff ", "\u200b\n\u200b", "\ufeff"))
    assert Spaced.of(["a\ufeffb"]).texts == ("a\ufeffb",)


def test_characters_that_show_nothing_are_not_read_but_joiners_are_where_they_join() -> None:
    assert without_invisible("\u200fDo\u00adnau\u200d \u202atrip\u202c\x07\ufeff\u200b!") == "Donau trip!"
    assert without_invisible("Vi\u200bệ\u200b\u200dt —\u200bso\u200d\u202c\u200b\n\u200cb") == "Việt —so\nb"
    for kept in ("می\u200cخواهم", "क्\u200dष", "👩\u200d👩", "សួ\u200bស្តី", "a\tb\nc\u0085"):
        assert without_invisible(kept) == kept
    # Older texts of Malayalam write a letter of its own so, Persian the first form of one, Kurdish a vowel.
    for word in ("അവന്\u200d", "ه\u200d", "به\u200c", "क्\u200d"):
        for text in (word, f"{word} a", f"({word}.)", f"a {word}2"):
            assert without_invisible(text) == text
