"""Text: metrics of answers, text from outside made safe to print and to quote in prompts, and secrets in it masked.

Trees, pairs, rewards and evaluation share these metrics. The house rules are SQuAD's normalisation with
two corner cases settled (an empty gold answer never matches, two empty answers match); `rules="flashrag"`
reproduces FlashRAG in these cases, for comparison with published numbers.

Secrets are recognised by their shape (the issuer's prefix, or the context: a header, a URL, an
assignment) and by the values in this process's environment, in linear time. They are masked
where text leaves the process: in errors, on the streams of a command, in data that is stored.
Out of scope: a key that was cut, is broken up by blanks, line ends, zero-width or control
characters, or is written in another case; one in base64 (but for `Authorization: Basic`), in
hex or compressed; an opaque one that stands alone in prose and is not in the environment; an
assigned one that consists of plain words; the value of a variable that has fewer than 12
characters, or a name that does not end like that of a secret; a user name in a URL; cookies.
"""

from __future__ import annotations

import json
import os
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, TypeVar, cast

Rules = Literal["house", "flashrag"]
T = TypeVar("T")

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_OR_NOTHING = frozenset({"yes", "no", "noanswer"})
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")


@lru_cache(maxsize=8_192)  # about the answers and queries of the trees in work
def normalize_answer(text: str) -> str:
    """Lower-case a text and remove ASCII punctuation, articles and extra blanks (SQuAD v1.1, FlashRAG).

    >>> normalize_answer("The  U.S. Navy!")
    'us navy'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golden_answers: Sequence[str], *, rules: Rules = "house") -> float:
    """Return 1.0 if the prediction equals a golden answer after normalising, else 0.0 (also if it is missing).

    >>> exact_match("U.S.", ["US", "America"])
    1.0
    """
    return _best(lambda answer, gold, _: float(answer == gold), prediction, golden_answers, rules)


def token_f1(prediction: str | None, golden_answers: Sequence[str], *, rules: Rules = "house") -> float:
    """Return the F1 in [0, 1] of token multisets with the best golden answer (arXiv:2505.14069, eq. 9-11).

    The answers yes, no and noanswer score only if both sides are equal.

    >>> token_f1("new new york", ["New York"])
    0.8
    >>> token_f1("yes it is", ["yes"])
    0.0
    """
    return _best(_f1, prediction, golden_answers, rules)


def cover_match(prediction: str | None, golden_answers: Sequence[str], *, rules: Rules = "house") -> float:
    """Return 1.0 if the prediction contains a golden answer after normalising (ACC, CEM), else 0.0.

    Matches are at token boundaries; `rules="flashrag"` accepts any substring, also an empty one.

    >>> cover_match("in the north", ["no"]), cover_match("in the north", ["no"], rules="flashrag")
    (0.0, 1.0)
    """
    return _best(_cover, prediction, golden_answers, rules)


def items_of(text: str) -> list[str]:
    """Return the items of a list in words, normalised, each once: one a line, or between semicolons, else commas.

    >>> items_of("1. Jaws\\n2. The Terminal (2004)"), items_of("Jaws, Duel, and Hook")
    (['jaws', 'terminal 2004'], ['jaws', 'duel', 'hook'])
    """
    lines = [_BULLET.sub("", line) for line in re.split(r"[\n;]", text) if line.strip()]
    parts = re.split(r",(?:\s*and\b)?|\band\b", text) if len(lines) < 2 else lines
    return list(dict.fromkeys(filter(None, map(normalize_answer, parts))))


def item_f1(prediction: str | None, golden_items: Sequence[Sequence[str]]) -> tuple[float, str]:
    """Return the F1 in [0, 1] of the items of a list in words, and how many are right, in words.

    A golden item is all ways to write it. Items are compared after normalising.

    >>> item_f1("Jaws, Hook and Alien", [["Jaws"], ["Hook", "Hook (1991 film)"], ["Duel"]])[1]
    '2 of 3 items, 1 wrong'
    """
    named, golden = items_of(prediction or ""), [set(map(normalize_answer, ways)) for ways in golden_items]
    found = sum(not ways.isdisjoint(named) for ways in golden)
    return 2 * found / max(1, len(named) + len(golden)), f"{found} of {len(golden)} items, {len(named) - found} wrong"


def _best(
    metric: Callable[[str, str, Rules], float], prediction: str | None, golden_answers: Sequence[str], rules: Rules
) -> float:
    if prediction is None:
        return 0.0
    answer = normalize_answer(prediction)
    return max((metric(answer, normalize_answer(gold), rules) for gold in golden_answers), default=0.0)


@lru_cache(maxsize=8_192)  # an answer is scored when it is given, in its node's rewards and in its row
def _f1(answer: str, gold: str, rules: Rules) -> float:
    if not answer and not gold:
        return 1.0 if rules == "house" else 0.0
    if answer != gold and (answer in _ALL_OR_NOTHING or gold in _ALL_OR_NOTHING):
        return 0.0
    # Multisets: a token counts as often as both sides have it.
    (answer_tokens, answer_length), (gold_tokens, gold_length) = _tokens(answer), _tokens(gold)
    if not (common := (gold_tokens & answer_tokens).total()):
        return 0.0
    precision, recall = common / answer_length, common / gold_length
    return 2 * precision * recall / (precision + recall)


@lru_cache(maxsize=64)  # an answer is compared with each of its golden ones
def _tokens(text: str) -> tuple[Counter[str], int]:
    tokens = text.split()
    return Counter(tokens), len(tokens)


def _cover(answer: str, gold: str, rules: Rules) -> float:
    if rules == "flashrag":
        return float(gold in answer)
    if not gold:
        return float(not answer)
    return float(f" {gold} " in f" {answer} ")


def common_text(question: str) -> str:
    """Return a text in lower case with single blanks, to compare questions without case and white space.

    >>> common_text("Who  made JAWS?")
    'who made jaws?'
    """
    return " ".join(question.casefold().split())


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how long the longest common beginning of two texts, or of two tuples, is.

    >>> common_length("Question: A?", "Question: B?"), common_length((1, 2), (1, 2, 3)), common_length("", "x")
    (10, 2, 0)
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(first), len(second)))


def one_line(text: str) -> str:
    """Replace every run of white space, including line separators, by one blank.

    >>> one_line(" a\\u2028b\\n\\n c ")
    'a b c'
    """
    return " ".join(text.split())


def valid_unicode(text: str) -> str:
    """Replace lone surrogates, which are legal in JSON, but not in UTF-8, Parquet and SQLite."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def quoted(value: object) -> str:
    """Quote a value from outside in a message: one line of at most 60 characters."""
    text = repr(one_line(valid_unicode(str(value))))
    return text if len(text) <= 60 else f"{text[:56]}...'"


def printable(text: str) -> str:
    """Replace control and format characters (ANSI, OSC 8, U+202E) for a terminal, and what XML refuses; line ends stay.

    >>> printable("a\\x1b[31mb\\u202ec\\ufffe")
    'a�[31mb�c�'
    """
    shown = text.replace("\n", "").replace("\t", "")
    if shown.isprintable():  # true for most texts, and far faster than checking each character
        return text
    categories = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    hidden = {char for char in shown if unicodedata.category(char) in categories or char in "\ufffe\uffff"}
    return text.translate(dict.fromkeys(map(ord, hidden), "\N{REPLACEMENT CHARACTER}"))


# Openings of structure in texts. `<` right before a letter or a mark
# opens the tags of formats and most special tokens; `[` before `|`, `/`,
# or one word with an underscore or three capitals, and brackets next to
# `~` open those of Mistral, EXAONE, GLM, Kimi, InternLM and MiniMax.
# `ChatTemplate` breaks the other tokens that a known tokenizer declares.
_TAG = r"(?=[/|!?\w\uff5c<▁])"
_BRACKET = re.compile(r"\[(?=[/|]|\w~|(?=\w{1,40}\])[^\]]*?(?:_|[A-Z]{3}))")
OPENINGS = {"<": "‹", "[": "⁅", "]": "⁆"}  # an opening, and the character that stands for it in quoted text


def inert(text: str, tags: tuple[str, ...] = ()) -> str:
    """Return text from outside (a passage, a question) without anything that parses as a tag or special token.

    The opening bracket of anything tag-like becomes `‹` (or `⁅`), which stays
    readable for people and models. So a tag that still stands in a prompt is
    ours. In the policy's earlier words the format's own `tags` stay.

    >>> inert("x < 5 </answer><|im_end|> [INST] [1]")
    'x < 5 ‹/answer>‹|im_end|> ⁅INST] [1]'
    >>> inert("<query>a</query><|im_start|>", tags=("query",))
    '<query>a</query>‹|im_start|>'
    """
    text = _BRACKET.sub(OPENINGS["["], _tag_opening(tags).sub(OPENINGS["<"], valid_unicode(text)))
    return text.replace("]~", f"{OPENINGS[']']}~")


@cache
def _tag_opening(kept: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"<(?!/?(?:{'|'.join(map(re.escape, kept))})>){_TAG}" if kept else f"<{_TAG}")


@lru_cache(maxsize=8_192)  # all steps that follow a search show its passages, and verdicts are asked on all steps
def quotable(text: str, tags: tuple[str, ...] = ()) -> str:
    """Return text from outside in one line, with nothing that parses as a tag (`inert`)."""
    return one_line(inert(text, tags))


def pace(count: float, seconds: float) -> str:
    """Return how many a second, for people.

    >>> pace(4200, 10), pace(25, 10), pace(2, 50), pace(0, 10)
    ('420/s', '2.5/s', '0.04/s', '0/s')
    """
    rate = count / seconds if seconds > 0 else 0.0
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"


def duration(seconds: float) -> str:
    """Return a length of time for people.

    >>> duration(75), duration(7300)
    ('1 min 15 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# --- Secrets ---

MOST_QUOTED = 1 << 16
"""Characters of a foreign text that are searched: far more than are shown, so that no secret is cut."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Kind and position (`start`, `end`) of a secret in a text; never the secret itself."""

    kind: str
    start: int
    end: int


def find_secrets(text: str) -> list[Secret]:
    """Return the secrets in a text, from left to right, without overlaps.

    Only the secret part is marked: the password of a URL,
    the credential of a header, the value of an assignment.

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
    if not (secrets := find_secrets(text)):
        return text
    starts, ends = [0, *(secret.end for secret in secrets)], [*(secret.start for secret in secrets), len(text)]
    return "***".join(text[start:end] for start, end in zip(starts, ends, strict=True))


def excerpt(text: str, limit: int = 300) -> str:
    """Quote foreign words in a message: one printable line without secrets, at most `limit` characters.

    Secrets are replaced first: the first half of a key that was cut would no longer be recognised.
    """
    return printable(one_line(redact(text[:MOST_QUOTED])))[:limit]


def redact_data(value: T, what: str) -> T:
    """`redact` for data that a run stores: a text, or all texts and names in a row.

    Log a warning once for each kind of secret found in
    `what`: a variable with a secret-sounding name may hold
    ordinary text, and data should not change silently.
    """
    redacted: Any = value
    if isinstance(value, str):
        redacted = redact(value)
        if redacted is not value:
            for secret in find_secrets(value):
                _warn(what, secret.kind)
    elif isinstance(value, Mapping):
        redacted = {}
        for name, inner in value.items():
            if is_key := isinstance(inner, str) and bool(inner) and bool(_KEY_NAME.fullmatch(str(name))):
                _warn(what, f"value of {name}")
            redacted[redact_data(name, what)] = "***" if is_key else redact_data(inner, what)
    elif isinstance(value, list | tuple):
        redacted = type(value)(redact_data(inner, what) for inner in value)
    return cast(T, redacted)


@cache
def _warn(what: str, kind: str) -> None:
    import structlog

    structlog.get_logger().warning("what looks like a secret is kept as ***", where=what, kind=kind)


def _matches(text: str) -> Iterator[Secret]:
    folded = text.lower()
    for signs, shapes in _SHAPES_BY_SIGNS.items():
        if signs and not any(map(folded.__contains__, signs)):
            continue
        for shape in shapes:
            if any(map(folded.__contains__, shape.marks)):
                matches = re.finditer(shape.pattern, text)
                yield from (Secret(shape.kind, *match.span(1)) for match in matches if shape.accepts(match[1]))
    for value, name in _environment_values().items():
        if value in text:
            found = re.finditer(re.escape(value), text)
            yield from (Secret(f"value of {name}", *match.span()) for match in found)


# Patterns are text until a text holds a mark of their shape: compiling all of them would take 10 ms of
# every start. Compiled ones stay in the cache of `re`.
_CHANGE = r"(?<=[0-9])[A-Za-z]|(?<=[A-Za-z])[0-9]"
_UUID = r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def _runs(value: str) -> list[tuple[str, bool]]:
    """Return the runs of letters and digits in a value, each with whether it holds both."""
    runs = re.findall(r"[A-Za-z0-9]+", value)
    return [(run, not run.isalpha() and not run.isdecimal()) for run in runs]


def _random(value: str) -> bool:
    """Return whether letters and digits are mixed as a generator mixes them, unlike in a name with a number.

    >>> [_random(v) for v in ("9f3ac05b", "tok-1234567890abcdef", "Qwen2.5-0.5B-Instruct", "token_type_2")]
    [True, True, False, False]
    """
    if re.fullmatch(_UUID, value):
        return True
    return any(mixed and (len(run) >= 16 or len(re.findall(_CHANGE, run)) >= 3) for run, mixed in _runs(value))


def _dense(value: str) -> bool:
    """Return whether a value after a known prefix is one long or mixed run, unlike the words of a hyphenated name."""
    if len(value) >= 40 and len(re.findall(_CHANGE, value)) >= 3:
        return True
    return any(len(run) >= 32 or (len(run) >= 10 and mixed) for run, mixed in _runs(value))


def _no_word(value: str) -> bool:
    """Return whether a header's value is more than a few joined words, as in a text about headers."""
    humps = r"(?<=[a-z])[A-Z]"
    return any(len(run) >= 20 or not run.isalpha() or len(re.findall(humps, run)) >= 2 for run, _ in _runs(value))


def _password(value: str) -> bool:
    # A sentence may end after the word "password: something".
    password = value.rstrip("!?.:")
    has_letter = any(character.isalpha() for character in password)
    return len(password) >= 8 and has_letter and bool(re.search(r"[0-9!@#$%^*?~+]", password))


@dataclass(frozen=True)
class _Shape:
    """A pattern with the secret as its first group.

    It is tried if the text in lower case holds one of the
    `signs`, if there are any, and one of the `marks`.

    Nothing follows an unbounded repetition in it unless
    that is possessive, so that no text is searched twice.
    """

    kind: str
    signs: str
    marks: tuple[str, ...]
    pattern: str
    accepts: Callable[[str], bool] = bool  # any text, as no pattern matches an empty one


# A token may begin here: not after a letter or digit,
# unless that ends an escape sequence of JSON or of a URL.
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbf])|(?<=%[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4}))"
_QUOTE = r"(?:\\{0,7}[\"']|&quot;|&#3[49];|&#x27;|%22)?"
_ASSIGNED = rf"{_QUOTE}\]?\s{{0,4}}(?:=>|:=|==|[:=]|%3[AaDd])\s{{0,4}}b?{_QUOTE}"
_KEY_NAME = re.compile(r"(?i)(?:\w+[_-])?(?:api[_-]?key|authorization|password|passphrase|(?:access|auth)[_-]?token)")
_VALUE = r"[^\s\"'<>,;&()\[\]{}|`\\]"  # one character
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
        "_-",
        ("gsk_", "r8_", "jina_", "npm_", "k_live_", "nvapi-", "tvly-", "pplx-", "xai-", "pypi-"),
        rf"{_START}((?:(?:gsk|r8|jina|npm|[sr]k_live)_|(?:nvapi|tvly|pplx|xai|pypi)-)[A-Za-z0-9_-]{{20,}}+)",
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
        rf"|credentials?|(?<=[?&])key){_ASSIGNED}({_VALUE}{{12,}}+)",
        _random,
    ),
    _Shape(
        "assignment",
        ":=%",
        ("passw", "passphrase", "pwd"),
        rf"(?i)(?:passw(?:or)?d|passphrase|pwd){_ASSIGNED}({_VALUE}{{8,}}+)",
        _password,
    ),
    _Shape("assignment", "-", ("--",), rf"(?i)--[\w-]{{0,40}}(?:key|token|secret)\s{{1,4}}({_VALUE}{{12,}}+)", _random),
    _Shape("url_password", "@", ("://", ":\\/\\/"), r":(?:\\?/){2}[^\s/?#@:\"'<>]*+:(?!\*\*\*@)([^\s/?#\"'<>]+)@"),
    _Shape(
        "url_password",
        "%",
        ("%3a%2f%2f",),
        r"(?i)%3a%2f%2f(?:(?!%3a|%40|%2f)[^\s\"'<>&/])*+%3a(?!\*\*\*)((?:(?!%40|%2f)[^\s\"'<>&/])++)%40",
    ),
)

# Most texts lack most signs, and searching for one
# character is far cheaper than for a word, or a pattern.
_SHAPES_BY_SIGNS: dict[str, list[_Shape]] = {}
for _shape in _SHAPES:
    _SHAPES_BY_SIGNS.setdefault(_shape.signs, []).append(_shape)

_SECRET_NAME = (
    r"(?i)(?:TOKEN|KEY|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|PWD|_PAT|CREDENTIAL|AUTH|AUTHORIZATION)S?(?:_?\d+)?$"
)
_environment: dict[Any, Any] = {}  # as it was when `_values` was read from it
_values: dict[str, str] = {}


def _environment_values() -> dict[str, str]:
    """Return the values of variables with secret names, in every form that a text may hold them in, with the names."""
    global _environment, _values
    # The undecoded variables: walking `os.environ` at every
    # reply would take more time than the search for secrets.
    now = getattr(os.environ, "_data", os.environ)
    if now != _environment:
        _environment, _values = dict(now), {}
        for name, value in os.environ.items():
            if re.search(_SECRET_NAME, name) and len(value.strip()) >= 12 and not _harmless(value.strip()):
                _values |= dict.fromkeys(_forms(value.strip()), name)
    return _values


@lru_cache(maxsize=64)
def _forms(value: str) -> tuple[str, ...]:
    """Return a value as it is, and as URLs, JSON, Python and HTML write it."""
    import html
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
    is_aws_key = re.fullmatch(r"[A-Za-z0-9/+]{40}", value) and _random(value)
    return value.startswith(("/", "~/", "./", "../")) and not is_aws_key


# --- JSON ---


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' stands in it twice

    Raises:
        ValueError: it is not JSON, nested too deeply, or an object has the same key twice.
    """
    try:
        return _JSON.decode(text if isinstance(text, str) else text.decode(json.detect_encoding(text)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON (an `object_pairs_hook`); raise ValueError if a key stands in it twice.

    Readers disagree on which of two equal keys counts: Python
    takes the last one, Arrow and the Hub refuse the text.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name[:80]!r} stands in it twice")
    return values


_JSON = json.JSONDecoder(object_pairs_hook=unique)


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a JSON value with every text in it changed; names of fields stay as they are."""
    if isinstance(value, Mapping):
        return {name: map_texts(inner, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value
