"""Answer normalisation and metrics, and text from outside made safe to print, store and quote in prompts.

Trees, pairs, rewards and evaluation share these metrics. The house rules are SQuAD's normalisation with two corner
cases settled (an empty gold answer never matches, two empty answers match); `rules="flashrag"` reproduces FlashRAG in
these cases, for comparison with published numbers.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Literal

Rules = Literal["house", "flashrag"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_OR_NOTHING = frozenset({"yes", "no", "noanswer"})


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
    return _best(_exact, prediction, golden_answers, rules)


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


def _best(
    metric: Callable[[str, str, Rules], float], prediction: str | None, golden_answers: Iterable[str], rules: Rules
) -> float:
    if prediction is None:
        return 0.0
    answer = normalize_answer(prediction)
    return max((metric(answer, normalize_answer(gold), rules) for gold in golden_answers), default=0.0)


def _exact(answer: str, gold: str, rules: Rules) -> float:
    return float(answer == gold)


@lru_cache(maxsize=8_192)  # an answer is scored when it is given, in its node's rewards and in its row
def _f1(answer: str, gold: str, rules: Rules) -> float:
    if not answer and not gold:
        return 1.0 if rules == "house" else 0.0
    if answer != gold and (answer in _ALL_OR_NOTHING or gold in _ALL_OR_NOTHING):
        return 0.0
    answer_tokens, gold_tokens = answer.split(), gold.split()
    common = sum((Counter(answer_tokens) & Counter(gold_tokens)).values())
    if not common:
        return 0.0
    precision, recall = common / len(answer_tokens), common / len(gold_tokens)
    return 2 * precision * recall / (precision + recall)


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


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how long the longest common beginning of two texts, or of two tuples, is.

    >>> common_length("Question: A?", "Question: B?"), common_length((1, 2), (1, 2, 3)), common_length("", "x")
    (10, 2, 0)
    """
    low, high = 0, min(len(a), len(b))
    while low < high:  # halving compares slices, in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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
    """Replace control and format characters (ANSI, OSC 8, U+202E) for a terminal; line ends stay.

    >>> printable("a\\x1b[31mb\\u202ec")
    'a�[31mb�c'
    """
    shown = text.replace("\n", "").replace("\t", "")
    if shown.isprintable():  # true for most texts, and far faster than checking each character
        return text
    hidden = {char for char in shown if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")}
    return text.translate(dict.fromkeys(map(ord, hidden), "\N{REPLACEMENT CHARACTER}"))


# Openings of structure in texts. `<` right before a letter or a mark opens the tags of formats and most special tokens;
# `[` before `|`, `/`, or one word with an underscore or three capitals, and brackets next to `~` open those of Mistral,
# EXAONE, GLM, Kimi, InternLM and MiniMax. `ChatTemplate` breaks the other tokens that a known tokenizer declares.
_TAG = r"(?=[/|!?\w\uff5c<▁])"
_BRACKET = re.compile(r"\[(?=[/|]|\w~|(?=\w{1,40}\])[^\]]*?(?:_|[A-Z]{3}))")
OPENINGS = {"<": "‹", "[": "⁅", "]": "⁆"}  # an opening, and the character that stands for it in quoted text


def inert(text: str, tags: tuple[str, ...] = ()) -> str:
    """Return text from outside (a passage, a question) without anything that parses as a tag or special token.

    The opening bracket of anything tag-like becomes `‹` (or `⁅`), which stays readable for people and models. So a tag
    that still stands in a prompt is ours. In the policy's earlier words the format's own `tags` stay.

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


def pace(count: float, seconds: float, unit: str = "") -> str:
    """Return how fast something is done, for people: so many a second, or so many seconds for each `unit`.

    >>> pace(4200, 10), pace(25, 10), pace(4, 10), pace(2, 50, "call"), pace(2, 50), pace(0, 10)
    ('420/s', '2.5/s', '.4/s', '25 s a call', '.04/s', '0/s')
    """
    rate = count / seconds if seconds > 0 else 0.0
    if unit and 0 < rate < 0.1:
        return f"{duration(1 / rate)} a {unit}"
    return (f"{rate:,.0f}" if rate >= 10 or not rate else f"{rate:.2g}".removeprefix("0")) + "/s"


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
