"""Sentences of a text, and cuts of a text into parts short enough for a model.

Every function here cuts a text into parts that join to the same text: white space stays at the end of the
part before it.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from sentencex import segment
from tokenizers import Regex, pre_tokenizers

from triptych.running.text.scripts import is_unspaced

# No sentence crosses the tab between two cells, or the break between two lines.
_BREAK = re.compile(r"[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]\s*")
# A text without a possible end, or without a word behind it, is a single sentence. Ends are marks of
# sentences, and spaces between letters of Thai or Lao.
_MAY_END = re.compile(
    r"[.!?…‼⁇-⁉。！？｡．؟۔।॥։՜՞။៕។፧።༎;\u037e]"
    r"|[\u0e01-\u0e4e]\s+(?=[\u0e01-\u0e4e])|[\u0e81-\u0ecd]\s+(?=[\u0e81-\u0ecd])"
)
_WORD = re.compile(r"\w")
# The language of a text is not asked for. Abbreviations and dates of these languages are not ends: "Mr.
# Smith", "am 3. Mai"; in Cyrillic "А. С. Пушкин".
_LANGUAGES = ("en", "de")
_CYRILLIC = re.compile(r"[\u0400-\u04ff]")
# Characters that the library reads at once: its time grows with the square of a text of open quotation marks.
_WINDOW = 4096
# Ends that the library does not know: marks in front of a digit ("。2020年", "born. 1991 he"), marks of Khmer
# and Greek, and marks in front of a footnote or markup ("left.[1] She", "**Yes.** No").
_MORE_ENDS = re.compile(
    r"[。！？][”’」』）]*\s*(?=\d)|[!?।॥؟۔][\"”’»)]*\s+(?=\d)|[។៕]\s+(?=\S)"
    r"|(?<=[\u0370-\u03ff\u1f00-\u1fff])[;\u037e]\s+(?=\S)"
    r"|(?<![^\W\d_])(?!(?:approx|[Cc]hap|[Ss]ects?|[Ff]igs|[Aa]bschn|[Vv]ols|[Ss]ept|[Ff]ebr|[Bb]ldg)\.)"
    r"[^\W\d_]{4,}\.\s+(?=\d)"
    r"|[.!?…](?:\[\w{1,3}\])+\s+(?=\S)|[.!?…]\s+(?=\[\d{1,3}\]\s)"
    r"|(?<=[^\W\d_]{4}[.!?…])[*_]{1,3}\s+(?=\S)|[.!?…]\]\([^()\s]*\)\s+(?=\S)"
)
# Words that the library takes for abbreviations; in front of a number they are ("no. 5", "Art. 3"), and in
# front of a capitalised word they are not.
_WORDS_ENDING = re.compile(
    r"(?<![^\s(\"“«„])(?:[Nn]o|[Oo]k|[Aa]rt|me|may|ill|fed|fig|ark|id|la)\.[\"”»“)]*\s+"
    r"(?=[\"“«„(¿¡]?(?:I\s|[A-ZÄÖÜÉ][\w’']))(?![\"“«„(¿¡]?\w\d)"
)
# Words that begin a sentence: an abbreviation in front of them ends a sentence ("etc. They", "usw. Dann"),
# unless it is a title or announces a name ("vs. The").
_BEGINNINGS = (
    "The|This|That|These|Those|It|They|He|She|We|There|Then|But|When|If|I['’]\\w+|"
    "I (?:am|was|have|had|will|would|think|like|do|did|can)|Der|Die|Das|Er|Sie|Es|Wir|Ich|Dann|Danach|Aber|"
    "Wenn|Als|Man|Diese[rsn]?|Il|Elle|Ils|Elles|Nous|Vous|Je|Puis|Mais|El|Ella|Ellos|Los|Las|Pero|Luego|Lui|Lei|"
    "Loro|Poi|Ele|Ela|Eles|Elas|Mas|Depois|Hij|Zij|Het|Он|Она|Они|Оно|Это|Мы|Вы|Но|Потом|Тогда|Там"
)
_ENDING_ABBREVIATION = re.compile(
    r"(?<![\w.])(?<![zd]\.\s)(?!(?:M[rsx]s?|Messrs|Dr|Prof|Rev|Gen|Sen|Rep|Gov|Capt|Col|Lt|Sgt|Hr|Fr|M|MM|Mmes?|"
    r"Mlle|Sra?|vs|cf|feat|viz|e\.g|i\.e|z\.B|d\.h|[A-Z](?=\.\sHe\s))\.)"
    rf"\w+(?:\.\w+)*\.[)\"”»]*\s+(?=[\"“„«(]?(?:{_BEGINNINGS})\s)"
)
# Numbers of a list; a list begins at the start of the text.
_ITEM = re.compile(r"(?:\A\s*|(?<=[^\w\s]\s))(\d{1,3})[.)]\s+(?=[^\W\d_])")
# Quotations and brackets, and the marks at the end of whole sentences inside ("Stop. Now," he said).
_ENCLOSED = re.compile(
    r"\"[^\"]*\"|“[^“”]*”|„[^„“”]*[“”]|«[^«»]*»|»[^«»]*«|「[^「」]*」|『[^『』]*』|（[^（）]*）|\([^()]*\)"
    r"|(?<!\w)'(?:[^']|(?<=\w)'(?=\w))*'(?!\w)|‘(?:[^‘’]|(?<=\w)’(?=\w))*’(?!\w)"
)
_WHOLE = re.compile(r"[.!?…。！？।؟۔,，]\s*$")
_OUTSIDE = re.compile(r"\s+(?=[\"“„«(¿¡]?([^\W\d_]))")
# Thai and Lao have no marks at the end of a sentence, but spaces between clauses. Clauses shorter than this
# are names and items of lists.
_SHORTEST_CLAUSE = 8
_CLAUSE_SPACE = re.compile(
    r"(?<=[\u0e01-\u0e45\u0e47-\u0e4e])\s+(?=[\u0e01-\u0e4e])"
    r"(?!และ|หรือ|กับ|แต่|ซึ่ง|ที่|ว่า|โดย|เพราะ|คือ|ของ|จาก)"
    r"|(?<=[\u0e81-\u0ec5\u0ec7-\u0ecd])\s+(?=[\u0e81-\u0ecd])(?!ແລະ|ຫຼື|ກັບ|ແຕ່|ທີ່|ວ່າ)"
)
# Ends of parts where the sentence goes on, in the languages whose abbreviations the library lacks: titles and
# the like in French, Spanish, Italian, Dutch, Czech, Polish, Vietnamese, Hindi and Arabic, and German
# ordinals behind an article.
_GOES_ON = re.compile(
    r"(?:^|[\s(«„“\"'’])(?:M|MM|Mme|Mmes|Mlle|Mgr|Sra|Srta|Dña|EE|Av|[Ss]ig|[Ss]igg|sig\.(?:ra|na)|[Dd]ott|"
    r"dott\.ssa|prof\.ssa|[Ii]ng|[Aa]vv|[Dd]hr|[Mm]evr|[Bb]ijv|[Nn]apř|tzv|inż|mgr|[Uu]l|TP|डॉ|पं|श्री|प्रो|د|أ|م)\.\s*$"
    r"|(?:^|\s)(?:[AaIi]m|[Dd](?:er|ie|as|em|en|es)|[Zz]u[mr]|[Vv]om|[Bb]eim)\s\d{1,3}\.\s*$"
)
# Ends in front of a small letter, for writers without capitals; the library ignores them in German. German
# abbreviations are left out.
_ENDS_SMALL = re.compile(
    r"[!?]\s*$|(?:^|[\W\d])(?![IVXLCDM]+\.|inkl|exkl|evtl|zzgl|abzgl|allg|bspw|einschl|ggfs|verh)[^\W\d_]{4,}\.\s*$"
)
_LONGEST_TAIL = 16  # characters that _GOES_ON and _ENDS_SMALL look at
_OPENING = "「『“«（"
_CLOSING = "」』”»）"


def split_sentences(text: str) -> list[str]:
    """Split a text behind every sentence, in any language, and at tabs and line breaks."""
    blocks = list[str]()
    start = 0
    for found in _BREAK.finditer(text):
        end = found.end()
        # A line that begins with a small letter continues a wrapped sentence.
        is_one_line_end = found[0].strip(" ") in ("\n", "\r\n")
        if not (is_one_line_end and text[end : end + 1].islower()):
            blocks.append(text[start:end])
            start = end
    blocks.append(text[start:])
    return [*chain.from_iterable(map(_split_block, filter(None, blocks)))] or [text]


def _split_block(text: str) -> list[str]:
    may_end = _MAY_END.search(text)
    if may_end is None or _WORD.search(text, may_end.end()) is None:
        return [text]
    languages = (*_LANGUAGES, "ru") if _CYRILLIC.search(text) else _LANGUAGES
    found_by = [{*_ends(text, language)} for language in languages]
    known = set[int].intersection(*found_by)
    known |= {
        end
        for end in found_by[0]
        if text[end : end + 1].islower() and _matches(_ENDS_SMALL, text, end)
    }
    for ending in (_MORE_ENDS, _WORDS_ENDING, _ENDING_ABBREVIATION):
        known |= {match.end() for match in ending.finditer(text)}
    known |= {
        *_item_starts(text),
        *_enclosed_ends(text),
        *_clause_ends(text),
        len(text),
    }
    ends = sorted(known - {0})
    parts = list[str]()
    start = 0
    has_letters = False
    num_open = 0
    for before, end in pairwise((0, *ends)):
        part = text[before:end]
        has_letters |= any(map(str.isalpha, part))
        num_open += sum(map(part.count, _OPENING)) - sum(map(part.count, _CLOSING))
        is_last = end == len(text)
        if is_last or (has_letters and not _goes_on(text, end, num_open)):
            parts.append(text[start:end])
            start = end
            has_letters = False
            num_open = 0
    return parts


def _ends(text: str, language: str) -> Iterator[int]:
    """Yield the library's ends of sentences; the last part of a window is read again with the next window."""
    start = 0
    while start < len(text):
        window = text[start : start + _WINDOW]
        ends = [*accumulate(map(len, segment(language, window)), initial=start)][1:]
        start += len(window)
        if start < len(text):
            ends.pop()
            start = ends[-1] if ends else start
        yield from ends


def _item_starts(text: str) -> Iterator[int]:
    """Yield the starts of the items of a numbered list, the first one excluded."""
    numbers = _ITEM.finditer(text)
    first = next(numbers, None)
    if first is None or first.start() > 0:
        return
    before = int(first[1])
    for found in numbers:
        if int(found[1]) == before + 1:
            before += 1
            yield found.start(1)


def _enclosed_ends(text: str) -> Iterator[int]:
    """Yield the ends of sentences in quotations and brackets, and behind brackets with whole sentences."""
    for found in _ENCLOSED.finditer(text):
        start = found.start() + 1
        inside = found[0][1:-1]
        if not _WHOLE.search(inside, max(0, len(inside) - 2)):
            continue
        parts = _split_block(inside)
        yield from [*accumulate(map(len, parts), initial=start)][1:-1]
        outside = _OUTSIDE.match(text, found.end())
        is_sentence = found[0][0] == "(" and inside[0].isupper() and " " in inside
        if outside and is_sentence and outside[1].isupper() and inside[-1] != ",":
            yield outside.end()


def _clause_ends(text: str) -> Iterator[int]:
    spaces = [found.span() for found in _CLAUSE_SPACE.finditer(text)]
    marks = [(0, 0), *spaces, (len(text), len(text))]
    for before, here, after in zip(marks, marks[1:], marks[2:], strict=False):
        if min(here[0] - before[1], after[0] - here[1]) >= _SHORTEST_CLAUSE:
            yield here[1]


def _goes_on(text: str, end: int, num_open: int) -> bool:
    """Return True if the sentence goes on at an end of the library."""
    behind = text[end]
    last = text[end - 1]
    if not last.isspace():
        # "OK?Yes" and "Yahoo!Japan" are left alone, as is a quotation with Japanese particles behind it.
        if last.isascii() and behind.isascii():
            return True
        if last in "」』" and "ぁ" <= behind <= "ゟ":
            return True
        if behind.isdigit() and num_open > 0:
            return True
    return _matches(_GOES_ON, text, end)


def _matches(pattern: re.Pattern[str], text: str, end: int) -> bool:
    return pattern.search(text[max(0, end - _LONGEST_TAIL) : end]) is not None


# Cuts inside a sentence in order of preference: behind clauses, behind spaces.
_CLAUSES = re.compile(r"(?<=[,;:–—،؛])\s+|(?<=[，、；：])(?=\S)")
_SPACES = re.compile(r"\s+")
_GRAPHEMES = pre_tokenizers.Split(Regex(r"\X"), "isolated")
# Signs that join the letter behind them to the letter before, in the scripts of India.
_JOINING = frozenset("\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u200d")


def _behind(boundary: re.Pattern[str]) -> Callable[[str], list[str]]:
    def cut(text: str) -> list[str]:
        ends = [0, *(found.end() for found in boundary.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(ends) if end > start]

    return cut


def graphemes(text: str) -> list[str]:
    """Split a text into its characters as a reader sees them, with their marks and joined parts."""
    found = list[str]()
    for _, (start, end) in _GRAPHEMES.pre_tokenize_str(text):
        if found and found[-1][-1] in _JOINING and text[start].isalpha():
            found[-1] += text[start:end]
        else:
            found.append(text[start:end])
    return found


def spans_of_words(text: str) -> list[tuple[int, int]]:
    """Return the ranges of a text's words; scripts without spaces between words are split into characters."""
    found = list[tuple[int, int]]()
    for word in re.finditer(r"\S+", text):
        start = word.start()
        begin = start
        before = ""
        parts = graphemes(word[0]) if any(map(is_unspaced, word[0])) else [word[0]]
        for character in parts:
            if start > begin and (is_unspaced(character[0]) or is_unspaced(before)):
                found.append((begin, start))
                begin = start
            before = character[0]
            start += len(character)
        found.append((begin, start))
    return found


_CUTS = (split_sentences, _behind(_CLAUSES), _behind(_SPACES))


def cut_to_fit(text: str, fits: Callable[[str], bool], level: int = 0) -> list[str]:
    """Cut a text into parts that fit: behind sentences, else clauses, else spaces, else graphemes.

    A grapheme that does not fit is cut between its code points. `fits` is asked about texts without outer
    white space.
    """
    if fits(text.strip()) or len(text) <= 1:
        return [text]
    if level == len(_CUTS):
        characters = graphemes(text)
        pieces: Sequence[str] = characters if len(characters) > 1 else text
        middle = len(pieces) // 2
        halves = "".join(pieces[:middle]), "".join(pieces[middle:])
        return [*chain.from_iterable(cut_to_fit(half, fits, level) for half in halves)]
    # Neighbouring parts are joined as long as they fit; longer parts are cut at the next level.
    joined = list[str]()
    for part in _CUTS[level](text):
        if joined and fits(f"{joined[-1]}{part}".strip()):
            joined[-1] += part
        else:
            joined.append(part)
    return [*chain.from_iterable(cut_to_fit(part, fits, level + 1) for part in joined)]


# Invisible characters besides spaces, control and format characters: fillers of Hangul, vowels of
# Khmer, selectors of variants, the empty pattern of Braille.
_SHOWS_NOTHING = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def is_invisible(text: str) -> bool:
    """Return True for a text without a character that a reader sees."""
    return all(
        char.isspace()
        or unicodedata.category(char) in ("Cc", "Cf")
        or _SHOWS_NOTHING.match(char)
        for char in text
    )


# Control characters, soft hyphens, marks of direction and the like.
_NOT_READ = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]"
)
# Joiners and zero-width spaces between letters of Europe, marks and spaces. Next to other scripts and in
# emoji they have a meaning, also at the end of a word: "ه\u200d." in Persian, "ന്\u200d" in Malayalam.
_EUROPEAN = "\t-\r -~\u00a0-\u052f\u1e00-\u200a\u2010-\u205f"
_STRAY_JOINERS = re.compile(f"(?<![^{_EUROPEAN}])[\u200b-\u200d]+(?![^{_EUROPEAN}])")


def without_invisible(text: str) -> str:
    """Return a text without the characters inside it that neither show nor change how others show."""
    return _STRAY_JOINERS.sub("", _NOT_READ.sub("", text))


# A byte order mark and a zero-width space.
_NO_WIDTH = "\ufeff\u200b"


def _space_before(chars: Iterable[str]) -> int:
    """Count the leading characters of white space, characters without width included."""
    return next(
        i for i, char in enumerate(chars) if not (char.isspace() or char in _NO_WIDTH)
    )


class Spaced(NamedTuple):
    """Texts without outer white space, and the white space before, between and behind them.

    Byte order marks and zero-width spaces around a text count as white space.
    """

    texts: tuple[str, ...]
    spaces: tuple[str, ...]  # one more than texts

    @classmethod
    def of(cls, parts: Sequence[str]) -> "Spaced":
        """Separate parts of a text from the white space around them; invisible parts join it."""
        texts = list[str]()
        spaces = [""]
        for part in parts:
            if is_invisible(part):
                spaces[-1] += part
                continue
            start = _space_before(part)
            end = len(part) - _space_before(reversed(part))
            spaces[-1] += part[:start]
            spaces.append(part[end:])
            texts.append(part[start:end])
        return cls(tuple(texts), tuple(spaces))

    def join(self, texts: Sequence[str]) -> str:
        """Join other texts with the same white space."""
        between = (
            text + space for text, space in zip(texts, self.spaces[1:], strict=True)
        )
        return self.spaces[0] + "".join(between)
