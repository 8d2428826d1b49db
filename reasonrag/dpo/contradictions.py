"""What has to hold between the preferences of a data set of any origin.

None contradicts another one, as A > B and B > A after one prompt, and no question is in two splits.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import normalize_answer, quoted
from reasonrag.dpo.pairs import Question
from reasonrag.dpo.preferences import BY_PROMPT
from reasonrag.dpo.token_rows import ChatSides, CheckedRow, StepSides
from reasonrag.storage.files import short_hash
from reasonrag.storage.shards import common_text

Said = tuple[str, str]  # type of a step ("" if it is unknown), and its text

_NAMED = 3
_TAGGED = re.compile(r".*<(\w+)>([^<]*)</\1>\s*", re.DOTALL)


class Contradictions:
    """Counts pairs that stand beside their reverse, as they are added.

    Attributes:
        same_text: pairs (prompt, A, B) for which the data set also has (prompt, B, A).
        same_content: the same, with A and B compared by the text inside their last tag, normalised.
        named: the names of the first few, each with the pair that it reverses.
        pairs: the names of all of them.

    >>> found = Contradictions()
    >>> found.add("1", "Who?", [("", "<answer>Jo</answer>")], [("", "<answer>Al</answer>")])
    >>> found.add("2", "Who?", [("", "<answer>Al</answer>")], [("", "<answer>JO!</answer>")])
    >>> found.same_text, found.same_content, found.named
    (0, 2, [('1', '2')])
    """

    def __init__(self, repeated: Collection[tuple[str, str]] = ()) -> None:
        """Take the questions whose pairs those of another question may contradict, if `begin` tells them apart."""
        self.total = self.same_text = self.same_content = 0
        self.named: list[tuple[str, str]] = []
        self.pairs: set[str] = set()
        self._repeated = repeated
        self._question: tuple[str, str] | None = None
        self._lasting: defaultdict[bytes, list[str]] = defaultdict(list)
        self._names = self._lasting  # of the pairs by what they prefer

    def begin(self, dataset: str, question_id: str) -> None:
        """Say whose pairs come next. Pairs of questions that are not `repeated` are forgotten after them."""
        if self._question != (dataset, question_id):
            self._question = (dataset, question_id)
            self._names = self._lasting if self._question in self._repeated else defaultdict(list)

    def add(self, name: str, prompt: object, chosen: Sequence[Said], rejected: Sequence[Said]) -> None:
        """Add a pair: its name, the prompt in any form that `repr` tells apart, and the steps of both sides."""
        self.total += 1
        state = _key(prompt)
        texts = [[text for _, text in side] for side in (chosen, rejected)]
        contents = [[_content(*said) for said in side] for side in (chosen, rejected)]
        by_text, by_content = self._add(name, state, *texts), self._add(name, state, *contents)
        self.same_text += by_text
        self.same_content += by_content

    def _add(self, name: str, state: bytes, chosen: Sequence[object], rejected: Sequence[object]) -> int:
        """Return how many more pairs stand beside their reverse."""
        same = self._names[_key(state, chosen, rejected)]
        same.append(name)
        reverse = self._names.get(_key(state, rejected, chosen))
        if not reverse:
            return 0
        self.pairs |= {name, *reverse}
        named = (reverse[0], name)
        if len(self.named) < _NAMED and named not in self.named:
            self.named.append(named)
        return 1 + (len(reverse) if len(same) == 1 else 0)  # the first of its kind contradicts all of its reverses

    def add_row(self, row: CheckedRow) -> None:
        """Add a checked row of any layout."""
        sides = row.sides
        if isinstance(sides, StepSides):
            asked = sides.chosen[0].prompt
            prompt: object = asked.messages, asked.prefix
            chosen, rejected = ([step.text for step in side] for side in (sides.chosen, sides.rejected))
        elif isinstance(sides, ChatSides):
            prompt = sides.prompt
            chosen, rejected = ([message["content"] for message in side] for side in (sides.chosen, sides.rejected))
        else:
            prompt, chosen, rejected = sides.prompt, [sides.chosen], [sides.rejected]
        first, second = row.types
        self.add(row.place, prompt, [(first, text) for text in chosen], [(second, text) for text in rejected])

    def summary(self) -> dict[str, Any]:
        """Return the counts and the first names as JSON can hold them."""
        return {"same_text": self.same_text, "same_content": self.same_content, "named": list(map(list, self.named))}

    def __str__(self) -> str:
        """Say how many there are and name the first; an empty text if there is none."""
        if not self.same_text and not self.same_content:
            return ""
        count = max(self.same_text, self.same_content)
        named = ", ".join(f"{first} and {second}" for first, second in self.named)
        return (
            f"{count} of {self.total} pairs contradict each other, {self.same_text} of them word for word: the same "
            f"two steps after the same prompt, preferred the other way round (first: {named})"
        )


class PairRules(Contradictions):
    """Counts the pairs of splits, those that contradict each other, and what two splits share.

    Args:
        repeated: what `repeated_questions` returns, if the trees are known: pairs of a question then come one after
            another. Otherwise prompts are compared, without regard to case and white space.

    Attributes:
        rows: the number of pairs by split.
        texts: the first split of each question, whatever its ids; of unknown trees, of each prompt, as a digest.
        shared_texts: those in two splits.
    """

    def __init__(self, repeated: Mapping[Question, Question] | None = None) -> None:
        super().__init__(repeated or ())
        self.rows: Counter[str] = Counter()
        self.texts: dict[object, str] = {}
        self.shared_texts: set[object] = set()
        self._firsts = repeated
        self._questions: dict[Question, str] = {}
        self._shared: set[Question] = set()

    def add_pair(self, split: str, row: CheckedRow) -> None:
        """Add a pair of a split."""
        if self._firsts is not None:
            self.begin(*row.group)
        self.add_row(row)
        self.rows[split] += 1
        text = _prompt_digest(row) if self._firsts is None else self._firsts.get(row.group, row.group)
        if self.texts.setdefault(text, split) != split:
            self.shared_texts.add(text)
        if self._questions.setdefault(row.group, split) != split and not row.group[1].startswith(BY_PROMPT):
            self._shared.add(row.group)

    def check_questions(self, name: str) -> int:
        """Return how many questions have pairs; raise DataError if one is in two splits. `name` is that of the data."""
        if self._shared:
            dataset, question = min(self._shared)
            more = len(self._shared) - 1
            raise DataError(
                f"{name}: question {quoted(question)}{f' of {quoted(dataset)}' if dataset else ''} is in both splits"
                f"{f', and {more} more are' if more else ''}, so the held-out metrics would mean nothing; split by "
                "question, as build-tree does"
            )
        return len(self._questions)


def _prompt_digest(row: CheckedRow) -> str:
    if isinstance(row.sides, StepSides):
        asked = row.sides.chosen[0].prompt
        texts = [*(message.content for message in asked.messages), asked.prefix]
    else:
        prompt = row.sides.prompt
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return short_hash(common_text("\n".join(texts)))


def _content(type: str, text: str) -> Said:
    """Return type and text inside the last tag, normalised; the whole step if there is none, or it cannot be parsed."""
    tagged = None if type == "malformed" else _TAGGED.fullmatch(text)
    if tagged is None:
        return type, text.strip()
    return type or tagged[1], normalize_answer(tagged[2]) or text.strip()


def _key(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:16]
