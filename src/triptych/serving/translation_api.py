"""LibreTranslate's interface: `/translate`, `/languages`, `/detect` and the settings of its page."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triptych.languages import closeness, name_of
from triptych.running.decoding import Translation
from triptych.seeing.attending import AlignedWords
from triptych.serving.answers import json_answer
from triptych.serving.limits import RequestError
from triptych.serving.markup import Markup, TextRun
from triptych.serving.request_fields import Fields, Uploaded
from triptych.serving.served_models import Aligning, ServedModel, Translating
from triptych.serving.server import Server
from triptych.serving.text_files import ENDINGS, KeptFile, TextFile

_MOST_ALTERNATIVES = 8


async def answer_translate(server: Server, request: Request) -> Response:
    """Translate a text or several: `q`, `source` (a code or auto), `target`, `format`, `alternatives`.

    `glossary` forces terms: an object of terms and their translations. `details` adds score,
    log-probability and tokens of each translation of a line; `alignments` adds the source word of each word.
    """
    fields = await server.fields(request)
    body = await translate_texts(server, request, fields, _texts(fields))
    is_list = isinstance(fields["q"], list)
    return await json_answer(
        lambda: body if is_list else {name: values[0] for name, values in body.items()}
    )


async def translate_texts(
    server: Server, request: Request, fields: Fields, texts: Sequence[str]
) -> dict[str, list[Any]]:
    """Translate texts as the fields ask for; returns the parts of the answer; a part has a value per text."""
    source = _language(fields, "source")
    target = _language(fields, "target")
    server.check_texts(texts)
    wanted = _Wanted.read(server, fields)
    body = dict[str, list[Any]]()
    of_source = {source: [*range(len(texts))]}
    if source == "auto":
        shares = await asyncio.to_thread(
            lambda: [_confidences(server, [text], target) for text in texts]
        )
        of_source = {}
        for number, confidences in enumerate(shares):
            code = max(confidences, key=lambda one: confidences[one])
            of_source.setdefault(code, []).append(number)
            detected = {
                "confidence": round(100 * confidences[code], 1),
                "language": code,
            }
            body.setdefault("detectedLanguage", []).append(detected)
    for code, numbers in of_source.items():
        model = (
            None
            if closeness(code, target) > 1
            else _translator_of(server, code, target)
        )
        found = await _translate_by(
            server, request, model, [texts[number] for number in numbers], wanted
        )
        for name, values in found.items():
            placed = body.setdefault(name, [None] * len(texts))
            for number, value in zip(numbers, values, strict=True):
                placed[number] = value
    return body


class _Wanted(NamedTuple):
    """Options of a request for each translation."""

    is_html: bool
    alternatives: int
    glossary: tuple[tuple[str, str], ...]
    details: bool
    alignments: bool

    @classmethod
    def read(cls, server: Server, fields: Fields) -> "_Wanted":
        kind = fields.get("format") or "text"
        if kind not in ("text", "html"):
            raise RequestError(400, f"format: {kind} is none of text and html")
        return cls(
            kind == "html",
            _num_alternatives(fields),
            _glossary(server, fields),
            bool(fields.get("details")),
            bool(fields.get("alignments")),
        )


async def _translate_by(
    server: Server,
    request: Request,
    model: ServedModel | None,
    texts: Sequence[str],
    wanted: _Wanted,
) -> dict[str, list[Any]]:
    """Translate texts of one language; without a model they are returned unchanged."""
    alternatives = wanted.alternatives
    documents = await _documents(server, texts) if wanted.is_html and model else []
    runs = [*chain.from_iterable(document.runs for document in documents)]
    pieces = [[run.text for run in document.runs] for document in documents]
    pieces = pieces or [text.split("\n") for text in texts]
    lines = [*chain.from_iterable(pieces)]
    found = dict[int, Translation]()
    words = dict[tuple[int, int], AlignedWords | None]()
    ranked = [list(lines) for _ in range(1 + alternatives)]
    if model is not None:
        job = Translating(model, 1 + alternatives, wanted.glossary)
        found = await _translate_lines(server, request, job, lines)
        for number, result in found.items():
            for rank, own in enumerate(ranked):
                own[number] = _at_rank(result, rank)
        # Attention aligns words, for the answer and for elements inside a run.
        pairs = {}
        for rank, number in product(range(1 + alternatives), found):
            if (rank == 0 and wanted.alignments) or (
                documents and runs[number].needs_words
            ):
                pairs[number, rank] = [
                    (part.source, _at_rank(part, rank).strip())
                    for part in found[number].sentences
                ]
        each = (
            await server.compute(request, Aligning(model), [*pairs.values()])
            if pairs
            else []
        )
        words = dict(zip(pairs, each, strict=True))
    if documents:
        ranked = await asyncio.to_thread(_with_elements, runs, ranked, words)
    joined = [
        [
            documents[number].translated(own) if documents else "\n".join(own)
            for number, own in enumerate(_by_text(pieces, of_rank))
        ]
        for of_rank in ranked
    ]
    body: dict[str, list[Any]] = {
        "translatedText": joined[0]
    }  # every value is a list over texts
    if alternatives:
        body["alternatives"] = [
            [of_rank[text] for of_rank in joined[1:]] for text in range(len(texts))
        ]
    if wanted.details:
        details = [
            _details(found[at]) if at in found else None for at in range(len(lines))
        ]
        body["details"] = [
            [*filter(None, of_text)] for of_text in _by_text(pieces, details)
        ]
    if wanted.alignments:
        links = [_links(words.get((at, 0))) for at in range(len(lines))]
        body["alignments"] = _by_text(pieces, links)
    return body


async def _documents(server: Server, texts: Sequence[str]) -> list[Markup]:
    """Parse HTML texts outside the event loop."""
    most = server.limits.max_tags
    return await asyncio.to_thread(lambda: [Markup(text, most) for text in texts])


def _with_elements(
    runs: Sequence[TextRun],
    ranked: Sequence[Sequence[str]],
    words: Mapping[tuple[int, int], AlignedWords | None],
) -> list[list[str]]:
    """Insert the elements of the runs into their translations of all ranks."""
    return [
        [
            run.html(text, words.get((number, rank)) if run.needs_words else None)
            for number, (run, text) in enumerate(zip(runs, own, strict=True))
        ]
        for rank, own in enumerate(ranked)
    ]


async def _translate_lines(
    server: Server, request: Request, job: Translating, lines: Sequence[str]
) -> dict[int, Translation]:
    """Translate the lines with text; returns translations by line index."""
    wanted = {number: line for number, line in enumerate(lines) if line.strip()}
    results = await server.compute(request, job, [*wanted.values()])
    read = await asyncio.to_thread(
        job.model.model.reader.tokenizers.source.encode, [*wanted.values()]
    )
    new = (
        len(one.pieces)
        for one in chain.from_iterable(result.candidates for result in results)
    )
    server.count_tokens(sum(map(len, read)), sum(new))
    return dict(zip(wanted, results, strict=True))


def _at_rank(one: Translation, rank: int) -> str:
    """Return an alternative; a line with fewer repeats its last."""
    return one.candidates[min(rank, len(one.candidates) - 1)].text


def _links(words: AlignedWords | None) -> list[tuple[str, str]]:
    """Return pairs of each word of a translation and its source word."""
    if (
        words is None or not words.source
    ):  # all tokens are unknown, or the line was too long
        return []
    return [
        (word.text, words.source[at].text)
        for word, at in zip(words.target, words.links, strict=True)
    ]


async def answer_translate_file(server: Server, request: Request) -> Response:
    """Translate a file, `file` of a form with `source` and `target`: text, HTML or SubRip subtitles."""
    fields = await server.fields(request, max_files=1)
    given = fields.get("file")
    if not isinstance(given, Uploaded):
        raise RequestError(
            400, "Invalid request: missing file parameter (of a multipart form)"
        )
    file = TextFile.read(given.name, given.content)
    wanted = Fields(
        fields | {"format": "html" if file.is_html else "text", "alternatives": 0}
    )
    body = await translate_texts(server, request, wanted, file.texts)
    content = file.translated(body["translatedText"]).encode()
    token = server.files.keep(KeptFile(file.name_in(fields["target"]), content))
    return JSONResponse(
        {"translatedFileUrl": f"{request.base_url}download_file/{token}"}
    )


async def answer_download(server: Server, request: Request) -> Response:
    """A translated file, for a while after it was translated."""
    kept = server.files.find(request.path_params["token"])
    if kept is None:
        raise RequestError(404, "there is no such file any more: translate it again")
    # A browser saves it, whatever it is: it would have this server's origin on a page.
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(kept.name)}",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(
        kept.content, media_type="application/octet-stream", headers=headers
    )


async def answer_languages(server: Server, request: Request) -> Response:
    """The languages that are translated, each with its targets."""
    targets: dict[str, list[str]] = {}
    for model in _translators(server):
        assert model.languages is not None
        # If models name a language differently, it has the code of the first model.
        source, target = (
            next((code for code in targets if closeness(one, code) > 1), one)
            for one in model.languages
        )
        targets.setdefault(source, [])
        targets.setdefault(target, [])
        if target not in targets[source]:
            targets[source].append(target)
    return JSONResponse(
        [
            {"code": code, "name": name_of(code), "targets": [*to, code]}
            for code, to in targets.items()
        ]
    )


async def answer_detect(server: Server, request: Request) -> Response:
    """The language of a text, among those that are translated."""
    fields = await server.fields(request)
    texts = _texts(fields)
    server.check_texts(texts)
    confidences = await asyncio.to_thread(_confidences, server, texts, None)
    found = [
        {"confidence": round(100 * share, 1), "language": code}
        for code, share in confidences.items()
    ]
    return JSONResponse(sorted(found, key=lambda one: -one["confidence"]))


async def answer_settings(server: Server, request: Request) -> Response:
    """What LibreTranslate's page asks for first."""
    # The page selects the languages of the first translator.
    first = next((model.languages for model in _translators(server)), None)
    source, target = first or ("", "")
    return JSONResponse(
        {
            "apiKeys": server.needs_key,
            "keyRequired": server.needs_key,
            "charLimit": server.limits.max_characters,
            "frontendTimeout": 500,
            "language": {
                "source": {"code": source, "name": name_of(source)},
                "target": {"code": target, "name": name_of(target)},
            },
            "suggestions": False,
            "filesTranslation": True,
            "supportedFilesFormat": [*ENDINGS],
        }
    )


def _texts(fields: Fields) -> list[str]:
    given = fields.get("q")
    texts = [given] if isinstance(given, str) else given
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) for text in texts)
    ):
        raise RequestError(
            400, "Invalid request: missing q parameter (a text, or a list of texts)"
        )
    return texts


def _language(fields: Fields, name: str) -> str:
    if not isinstance(given := fields.get(name), str) or not given:
        raise RequestError(400, f"Invalid request: missing {name} parameter")
    return given


def _num_alternatives(fields: Fields) -> int:
    try:
        count = int(fields.get("alternatives") or 0)
    except (TypeError, ValueError, OverflowError):
        count = -1
    if not 0 <= count <= _MOST_ALTERNATIVES:
        raise RequestError(
            400, f"alternatives: give a number from 0 to {_MOST_ALTERNATIVES}"
        )
    return count


def _glossary(server: Server, fields: Fields) -> tuple[tuple[str, str], ...]:
    """Read terms and their translations: an object, or its JSON text in a form."""
    given = fields.get("glossary") or {}
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(
        isinstance(term, str) for term in given.values()
    ):
        raise RequestError(
            400, "glossary: give an object of terms and their translations"
        )
    for texts in ([*given], [*given.values()]):
        server.check_texts(texts)
    return tuple(given.items())


def _translators(server: Server) -> list[ServedModel]:
    return [model for model in server.models.values() if model.languages is not None]


def _translator_of(server: Server, source: str, target: str) -> ServedModel:
    """Return the translator with languages nearest to two codes."""

    def fit(model: ServedModel) -> tuple[int, int]:
        assert model.languages is not None
        return closeness(target, model.languages[1]), closeness(
            source, model.languages[0]
        )

    fitting = [model for model in _translators(server) if all(fit(model))]
    if not fitting:
        pairs = (
            ", ".join(
                "-".join(m.languages) for m in _translators(server) if m.languages
            )
            or "none"
        )
        raise RequestError(
            400, f"{source} to {target} is not supported; what is: {pairs}"
        )
    return max(fitting, key=fit)


def _confidences(
    server: Server, texts: Sequence[str], target: str | None
) -> dict[str, float]:
    """Return a probability for each source language, higher for fewer tokens of the texts.

    A tokenizer trained on a language encodes its text with fewer and longer tokens.
    """
    # Probabilities are proportional to count⁻⁴, from the first 1,000 characters.
    able = [
        model
        for model in _translators(server)
        if model.languages and (target is None or closeness(target, model.languages[1]))
    ]
    if not able:
        raise RequestError(400, f"auto to {target} is not supported")
    joined = "\n".join(texts)[:1000]
    counts: dict[str, int] = {}
    for model in able:
        assert model.languages is not None
        encoded = model.model.reader.tokenizers.source.encode(joined.split("\n"))
        counts[model.languages[0]] = max(1, sum(map(len, encoded)))
    weights = {
        code: (min(counts.values()) / count) ** 4 for code, count in counts.items()
    }
    return {code: weight / sum(weights.values()) for code, weight in weights.items()}


def _by_text(pieces: Sequence[Sequence[str]], values: Sequence[Any]) -> list[list[Any]]:
    """Group values of lines by text."""
    taken = iter(values)
    return [[next(taken) for _ in of_text] for of_text in pieces]


def _details(one: Translation) -> dict[str, Any]:
    candidates = [
        {
            "text": of.text,
            "score": of.score,
            "log_prob": of.log_prob,
            "finish": of.finish,
            "tokens": [*of.pieces],
        }
        for of in one.candidates
    ]
    return {"source": one.source, "finish": one.finish, "candidates": candidates}


ROUTES = (
    ("POST", "/translate", answer_translate),
    ("POST", "/translate_file", answer_translate_file),
    ("GET", "/download_file/{token}", answer_download),
    ("GET", "/languages", answer_languages),
    ("POST", "/detect", answer_detect),
    ("GET", "/frontend/settings", answer_settings),
)
