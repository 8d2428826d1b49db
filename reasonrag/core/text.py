"""Text: answer normalisation and metrics, and making quoted text inert.

One implementation serves tree, pairs, rewards and evaluation. The house rules are SQuAD's normalisation with two corner
cases settled (an empty gold answer never matches, both empty is a match); `rules="flashrag"` reproduces what FlashRAG
computes in those corners, for comparison with published numbers.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal

Rules = Literal["house", "flashrag"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_OR_NOTHING = frozenset({"yes", "no", "noanswer"})


@lru_cache(maxsize=65_536)
def normalize_answer(text: str) -> str:
    """Lower-case, delete ASCII punctuation, drop a/an/the, squeeze blanks (SQuAD v1.1, FlashRAG).

    >>> normalize_answer("The  U.S. Navy!")
    'us navy'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golden_answers: Sequence[str], *, rules: Rules = "house") -> float:
    """1.0 if the prediction equals a golden answer after normalising, else 0.0. A missing prediction scores 0.

    >>> exact_match("U.S.", ["US", "America"])
    1.0
    """
    return _best(_exact, prediction, golden_answers, rules)


def token_f1(prediction: str | None, golden_answers: Sequence[str], *, rules: Rules = "house") -> float:
    """F1 in [0, 1] on token multisets, over the best golden answer (arXiv:2505.14069, eq. 9-11).

    yes, no and noanswer count only when both sides are equal.

    >>> token_f1("new new york", ["New York"])
    0.8
    >>> token_f1("yes it is", ["yes"])
    0.0
    """
    return _best(_f1, prediction, golden_answers, rules)


def cover_match(prediction: str | None, golden_answers: Sequence[str], *, rules: Rules = "house") -> float:
    """1.0 if a golden answer is contained in the prediction after normalising (ACC, CEM), else 0.0.

    Contained means at token boundaries; `rules="flashrag"` takes any substring, and an empty one.

    >>> cover_match("in the north", ["no"]), cover_match("in the north", ["no"], rules="flashrag")
    (0.0, 1.0)
    """
    return _best(_cover, prediction, golden_answers, rules)


def _best(
    metric: Callable[[str, str, Rules], float], prediction: str | None, golden_answers: Iterable[str], rules: Rules
) -> float:
    if prediction is None:
        return 0.0
    said = normalize_answer(prediction)
    return max((metric(said, normalize_answer(gold), rules) for gold in golden_answers), default=0.0)


def _exact(said: str, gold: str, rules: Rules) -> float:
    return float(said == gold)


def _f1(said: str, gold: str, rules: Rules) -> float:
    if not said and not gold:
        return 1.0 if rules == "house" else 0.0
    if said != gold and (said in _ALL_OR_NOTHING or gold in _ALL_OR_NOTHING):
        return 0.0
    said_tokens, gold_tokens = said.split(), gold.split()
    common = sum((Counter(said_tokens) & Counter(gold_tokens)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said_tokens), common / len(gold_tokens)
    return 2 * precision * recall / (precision + recall)


def _cover(said: str, gold: str, rules: Rules) -> float:
    if rules == "flashrag":
        return float(gold in said)
    if not gold:
        return float(not said)
    return float(f" {gold} " in f" {said} ")


def one_line(text: str) -> str:
    """The text with every run of white space (line separators too) squeezed to one blank.

    >>> one_line(" a\\u2028b\\n\\n c ")
    'a b c'
    """
    return " ".join(text.split())


def valid_unicode(text: str) -> str:
    """The text without lone surrogates: legal in JSON, refused by UTF-8, Parquet and SQLite."""
    return text.encode("utf-8", "replace").decode("utf-8")


def quoted(value: object) -> str:
    """A value from outside, fit for a message of one line: at most 60 characters, nothing that breaks the line."""
    text = repr(one_line(valid_unicode(str(value))))
    return text if len(text) <= 60 else f"{text[:56]}...'"


def printable(text: str) -> str:
    """The text for a terminal: no control or format character (ANSI, OSC 8, U+202E) survives, lines do.

    >>> printable("a\\x1b[31mb\\u202ec")
    'a�[31mb�c'
    """
    if text.replace("\n", "").replace("\t", "").isprintable():  # most text, seen far faster than by each character
        return text
    return "".join("\N{REPLACEMENT CHARACTER}" if _hidden(char) else char for char in text)


def _hidden(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


# What a chat template or a format could take for structure: a tag or special token opens with `<` right before a
# letter, `/`, `|`, `!` or a full-width bar (DeepSeek's tokens); `[INST]` and its like are tokens of Mistral's.
_TAG_OPENING = re.compile(r"<(?=[/|!?\w\uff5c<▁])")
_BRACKET_TOKEN = re.compile(
    r"\[(?=/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|IMG|PREFIX|SUFFIX)\])"
)
_SPECIAL_TOKEN = re.compile(r"<(?=[|\uff5c])|<(?=/?(?:s|bos|eos|pad|unk|mask|start_of_turn|end_of_turn|think)>)")


def inert(text: str) -> str:
    """Quoted text (a passage, a question) in which nothing can be taken for a tag or a special token.

    The opening bracket of anything tag-like becomes `‹` (or `⁅`): readable for people and models, structure for nobody.

    >>> inert("x < 5 </answer><|im_end|> [INST]")
    'x < 5 ‹/answer>‹|im_end|> ⁅INST]'
    """
    return _BRACKET_TOKEN.sub("⁅", _TAG_OPENING.sub("‹", valid_unicode(text)))


def inert_tokens(text: str) -> str:
    """The policy's own earlier words, shown to it again: its format's tags stay, special tokens do not.

    >>> inert_tokens("<query>a</query><|im_start|>")
    '<query>a</query>‹|im_start|>'
    """
    return _BRACKET_TOKEN.sub("⁅", _SPECIAL_TOKEN.sub("‹", valid_unicode(text)))
