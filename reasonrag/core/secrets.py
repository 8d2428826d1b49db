"""Find secrets in text before it is published, and replace them before it is written.

There are two sources: the shapes of keys (by their issuer's prefix, or by their context: a header, a URL, an
assignment), and the values in this process's environment. Both are searched in linear time, and a text without any of
the marks that shapes begin with is skipped at once.

Out of scope: a key that was cut, is broken up by blanks, line ends, zero-width or control characters, or is written in
another case; one in base64 (but for `Authorization: Basic`), in hex or compressed; an opaque one that stands alone in
prose and is not in the environment; an assigned one that consists of plain words; the value of a variable that has
fewer than 12 characters, or a name that does not end like that of a secret; a user name in a URL; cookies.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar, cast

from reasonrag.core.text import one_line, printable

MOST_QUOTED = 1 << 16
"""Characters of a foreign text that are searched: far more than are shown, so that no secret is cut."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Secret:
    """Kind and position (`start`, `end`) of a secret in a text; never the secret itself."""

    kind: str
    start: int
    end: int


def find_secrets(text: str) -> list[Secret]:
    """Return the secrets in a text, from left to right, without overlaps.

    Only the secret part is marked: the password of a URL, the credential of a header, the value of an assignment.

    >>> [(s.kind, s.start, s.end) for s in find_secrets("see ftp://me:hunter2@host/")]
    [('url_password', 13, 20)]
    """
    secrets: list[Secret] = []
    for match in sorted(_matches(text), key=lambda match: (match.start, -match.end)):
        if secrets and match.start < secrets[-1].end:  # such as a known token in a header: one secret, all of it
            previous = secrets.pop()
            match = Secret(previous.kind, previous.start, max(previous.end, match.end))
        secrets.append(match)
    return secrets


def redact(text: str) -> str:
    """Return the text with `***` in place of every secret, or the same object if it holds none.

    >>> redact("Authorization: Bearer 5c1f0e9b7a3d4c2e")
    'Authorization: Bearer ***'
    """
    secrets = find_secrets(text)
    if not secrets:
        return text
    pieces, end = [], 0
    for secret in secrets:
        pieces += [text[end : secret.start], "***"]
        end = secret.end
    return "".join([*pieces, text[end:]])


def excerpt(text: str, limit: int = 300) -> str:
    """Quote foreign words in a message: one printable line without secrets, at most `limit` characters.

    Secrets are replaced first: the first half of a key that was cut would no longer be recognised.
    """
    return printable(one_line(redact(text[:MOST_QUOTED])))[:limit]


def redact_data(value: T, what: str) -> T:
    """`redact` for data that a run stores: a text, or all texts and names in a row.

    Log a warning once for each kind of secret found in `what`: a variable with a secret-sounding name may hold ordinary
    text, and data should not change silently.
    """
    redacted: Any = value
    if isinstance(value, str):
        redacted = redact(value)
        if redacted is not value:
            for secret in find_secrets(value):
                _warn(what, secret.kind)
    elif isinstance(value, Mapping):
        redacted = {redact_data(name, what): redact_data(inner, what) for name, inner in value.items()}
    elif isinstance(value, list | tuple):
        redacted = type(value)(redact_data(inner, what) for inner in value)
    return cast(T, redacted)


@cache
def _warn(what: str, kind: str) -> None:
    import structlog

    structlog.get_logger().warning("what looks like a secret is kept as ***", where=what, kind=kind)


def _matches(text: str) -> Iterator[Secret]:
    folded = text.lower()
    for signs, marks, shapes in _SHAPES_BY_SIGNS:
        if (signs and not _holds(folded, signs)) or not _holds(folded, marks):
            continue
        for shape in shapes:
            if _holds(folded, shape.marks):
                for match in re.finditer(shape.pattern, text):
                    if shape.accepts(match[1]):
                        yield Secret(shape.kind, *match.span(1))
    for value, name in _environment_values():
        start = text.find(value)
        while start >= 0:
            yield Secret(f"value of {name}", start, start + len(value))
            start = text.find(value, start + len(value))


def _holds(text: str, any_of: Iterable[str]) -> bool:
    for mark in any_of:  # noqa: SIM110 -- a generator for `any` costs more than the search itself
        if mark in text:
            return True
    return False


# --- What a value looks like ---


def _random(value: str) -> bool:
    """Return whether letters and digits are mixed as a generator mixes them, unlike in a name with a number.

    >>> [_random(v) for v in ("9f3ac05b", "tok-1234567890abcdef", "Qwen2.5-0.5B-Instruct", "token_type_2")]
    [True, True, False, False]
    """
    if re.fullmatch(_UUID, value):
        return True
    for run in re.findall(_ALPHANUMERIC, value):
        is_mixed = not run.isalpha() and not run.isdecimal()
        if is_mixed and (len(run) >= 16 or len(re.findall(_CHANGE, run)) >= 3):
            return True
    return False


def _long_random(value: str) -> bool:
    return len(value) >= 12 and _random(value)


def _dense(value: str) -> bool:
    """Return whether a value after a known prefix is one long or mixed run, unlike the words of a hyphenated name."""
    if len(value) >= 40 and len(re.findall(_CHANGE, value)) >= 3:
        return True
    for run in re.findall(_ALPHANUMERIC, value):
        is_mixed = not run.isalpha() and not run.isdecimal()
        if len(run) >= 32 or (len(run) >= 10 and is_mixed):
            return True
    return False


def _no_word(value: str) -> bool:
    """Return whether a header's value is more than a few joined words, as in a text about headers."""
    return any(
        len(run) >= 20 or not run.isalpha() or len(re.findall(_HUMP, run)) >= 2
        for run in re.findall(_ALPHANUMERIC, value)
    )


def _password(value: str) -> bool:
    password = value.rstrip("!?.:")
    has_letter = any(character.isalpha() for character in password)
    return len(password) >= 8 and has_letter and bool(re.search(_DIGIT_OR_SYMBOL, password))


# Patterns are text until a text holds a mark of their shape: compiling all of them would take 10 ms of every start.
# Compiled ones stay in the cache of `re`.
_ALPHANUMERIC = r"[A-Za-z0-9]+"
_CHANGE = r"(?<=[0-9])[A-Za-z]|(?<=[A-Za-z])[0-9]"
_HUMP = r"(?<=[a-z])[A-Z]"
_DIGIT_OR_SYMBOL = r"[0-9!@#$%^*?~+]"
_UUID = r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


# --- Shapes: nothing follows an unbounded repetition unless it is possessive, so that none is gone through twice ---


@dataclass(frozen=True)
class _Shape:
    """A pattern with the secret as its first group.

    It is tried if the text in lower case holds one of the `marks`, each of which contains one of the `signs`.
    """

    kind: str
    signs: str
    marks: tuple[str, ...]
    pattern: str
    accepts: Callable[[str], bool] = bool  # any text, as no pattern matches an empty one


# A token may begin here: not after a letter or digit, unless that ends an escape sequence of JSON or of a URL.
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbf])|(?<=%[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4}))"
_QUOTE = r"(?:\\{0,7}[\"']|&quot;|&#3[49];|&#x27;|%22)?"
_ASSIGNED = rf"{_QUOTE}\]?\s{{0,4}}(?:=>|:=|==|[:=]|%3[AaDd])\s{{0,4}}b?{_QUOTE}"
_VALUE = r"([^\s\"'<>,;&()\[\]{}|`\\]{8,}+)"
_PEM = r"(?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?-----"

_SHAPES = (
    _Shape("hugging_face", "_", ("hf_",), r"(hf_[A-Za-z0-9]{30,})"),
    _Shape("github", "_", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"(gh[pousr]_[A-Za-z0-9]{30,})"),
    _Shape("github", "_", ("github_pat_",), r"(github_pat_[A-Za-z0-9_]{22,})"),
    _Shape("wandb", "_", ("wandb_v",), r"(wandb_v[0-9]_[A-Za-z0-9_]{30,})"),
    _Shape("anthropic", "-", ("sk-ant-",), rf"{_START}(sk-ant-[A-Za-z0-9_-]{{16,}}+)", _dense),
    _Shape("openai", "-", ("sk-",), rf"{_START}(sk-(?!ant-)[A-Za-z0-9_-]{{16,}}+)", _dense),
    # Groq, Replicate, Jina, npm, Stripe; NVIDIA, Tavily, Perplexity, xAI, PyPI.
    _Shape(
        "api_key",
        "_",
        ("gsk_", "r8_", "jina_", "npm_", "k_live_"),
        rf"{_START}((?:gsk|r8|jina|npm|[sr]k_live)_[A-Za-z0-9_-]{{20,}}+)",
        _dense,
    ),
    _Shape(
        "api_key",
        "-",
        ("nvapi-", "tvly-", "pplx-", "xai-", "pypi-"),
        rf"{_START}((?:nvapi|tvly|pplx|xai|pypi)-[A-Za-z0-9_-]{{20,}}+)",
        _dense,
    ),
    _Shape("gitlab", "-", ("glpat-",), r"(glpat-[A-Za-z0-9_-]{20,})"),
    _Shape("slack", "-", ("xox",), rf"{_START}(xox[abeoprs]-[A-Za-z0-9-]{{10,}}+)", _dense),
    _Shape(
        "private_key",
        "-",
        ("-----begin",),
        # To its end, or, if it was cut, as far as base64 goes.
        rf"(-----BEGIN {_PEM}(?:(?:[^-\"<>]|-(?!----))*+-----END {_PEM}"
        r"|(?:(?:\s|\\[nr])*+[A-Za-z0-9+/=]{20,}+)++))",
    ),
    _Shape("aws", "", ("akia", "asia"), rf"{_START}((?:AKIA|ASIA)[A-Z0-9]{{16}})(?![A-Za-z0-9])"),
    _Shape("google", "", ("aiza",), r"(AIza[A-Za-z0-9_-]{35,})"),
    _Shape("jwt", "", ("eyj",), rf"{_START}(eyJ[A-Za-z0-9_-]{{8,}}+\.eyJ[A-Za-z0-9_-]{{8,}}+\.[A-Za-z0-9_-]{{8,}})"),
    _Shape("wandb", "", ("wandb",), r"(?i)wandb[^\n]{0,48}?(?<![0-9a-f])([0-9a-f]{40})(?![0-9a-f])"),
    _Shape("authorization", "", ("bearer",), r"(?ai)bearer(?:\s|%20|\+){1,4}([\w.~+/=%-]{16,}+)", _random),
    _Shape(
        "authorization",
        ":=,",
        ("authorization",),
        rf"(?ai)authorization{_QUOTE}\s{{0,4}}[:=,]\s{{0,4}}b?{_QUOTE}"
        r"(?:(?:bearer|basic|token|digest|negotiate|api-?key)(?:\s|%20|\+){1,4})?([\w.~+/=%:@!$^-]{8,}+)",
        _no_word,
    ),
    _Shape(
        "assignment",
        ":=%",
        ("key", "token", "secret", "credential"),
        r"(?i)(?:(?:api|access|secret|auth|private|signing|encryption|account|shared|master)[_-]?key|token|secret"
        rf"|credentials?|(?<=[?&])key){_ASSIGNED}{_VALUE}",
        _long_random,
    ),
    _Shape(
        "assignment",
        ":=%",
        ("passw", "passphrase", "pwd"),
        rf"(?i)(?:passw(?:or)?d|passphrase|pwd){_ASSIGNED}{_VALUE}",
        _password,
    ),
    _Shape("url_password", "@", ("://", ":\\/\\/"), r":(?:\\?/){2}[^\s/?#@:\"'<>]*+:(?!\*\*\*@)([^\s/?#\"'<>]+)@"),
    _Shape(
        "url_password",
        "%",
        ("%3a%2f%2f",),
        r"(?i)%3a%2f%2f(?:(?!%3a|%40|%2f)[^\s\"'<>&/])*+%3a(?!\*\*\*)((?:(?!%40|%2f)[^\s\"'<>&/])++)%40",
    ),
)
# Most texts lack most of the signs, and searching for one character is far cheaper than for a word.
_SHAPES_BY_SIGNS = []
for _signs in dict.fromkeys(shape.signs for shape in _SHAPES):
    _shapes = [shape for shape in _SHAPES if shape.signs == _signs]
    _SHAPES_BY_SIGNS.append((_signs, [mark for shape in _shapes for mark in shape.marks], _shapes))


# --- The environment ---

_AWS_SECRET_KEY = r"[A-Za-z0-9/+]{40}"
_SECRET_NAME = (
    r"(?i)(?:TOKEN|KEY|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|PWD|_PAT|CREDENTIAL|AUTH|AUTHORIZATION)S?(?:_?\d+)?$"
)


_environment: dict[Any, Any] = {}  # as it was when `_values` was read from it
_values: tuple[tuple[str, str], ...] = ()


def _environment_values() -> tuple[tuple[str, str], ...]:
    """Return the values of variables with secret names, in every form that a text may hold them in, with the names."""
    global _environment, _values
    # The undecoded variables: walking `os.environ` at every reply would take more time than the search for secrets.
    now = getattr(os.environ, "_data", os.environ)
    if now != _environment:
        _environment = dict(now)
        forms: dict[str, str] = {}
        for name, value in os.environ.items():
            if re.search(_SECRET_NAME, name) and len(value.strip()) >= 12 and not _harmless(value.strip()):
                forms |= dict.fromkeys(_forms(value.strip()), name)
        _values = tuple(forms.items())
    return _values


@lru_cache(maxsize=64)
def _forms(value: str) -> tuple[str, ...]:
    """Return a value as it is, and as URLs, JSON, Python and HTML write it."""
    import html
    import json
    from urllib.parse import quote, quote_plus

    # Undecodable bytes arrive as lone surrogates, which cannot be encoded.
    encoded = [quote(value, safe="", errors="replace"), quote(value, errors="replace")]
    encoded.append(quote_plus(value, errors="replace"))
    lower = [re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), form) for form in encoded]
    escaped = [json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]]
    return (value, *encoded, *lower, *escaped, html.escape(value))


def _harmless(value: str) -> bool:
    """Return whether a value is a number, a plain word or a path: no credential, and common in texts."""
    if re.fullmatch(r"[+-]?[0-9.,_]+", value):
        return True
    if value.isalpha() and (value.islower() or value.isupper() or value.istitle()):
        return len(value) <= 20
    # A secret key of AWS may begin with a slash, too.
    return value.startswith(("/", "~/", "./", "../")) and not (re.fullmatch(_AWS_SECRET_KEY, value) and _random(value))
