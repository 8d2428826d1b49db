"""A policy without a neural network: weak, honest and quick. For trying a corpus before renting a GPU, and for tests.

It sees the prompt and nothing else, and answers in the contract of the `reasonrag` format: names of the question and
of the evidence become queries, the sentence that shares most words with the query becomes evidence, and a span of the
evidence becomes the answer. At temperature 0 each choice is the best one; above, it is drawn.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reasonrag.core.errors import LLMError
from reasonrag.core.text import inert, one_line
from reasonrag.core.types import Completion, Prompt
from reasonrag.demo.answers import Scored, bridges_wanted, candidates, is_demonym, spans
from reasonrag.demo.heuristics import Asked, Kind, analyse, content_words, mentions, sentences, stem_set, stems
from reasonrag.formats.base import Stage
from reasonrag.formats.reasonrag import ECHOES, View, read
from reasonrag.formats.tags import last_tag
from reasonrag.llm.base import Sampling

_STOPS = (("</query>", "</answer>"), ("</evidence>",), ("</answer>",))
_TEMPLATES = {
    "query": "So the next query is <query>{}</query>",
    "evidence": "Based on the query, the relevant evidence is <evidence>{}</evidence>",
    "answer": "So the answer is <answer>{}</answer>",
}


class ExtractiveLLM:
    """Serves prompts of the `reasonrag` format. Stateless; a pure function of the prompt and the sampling.

    `temperature`, `seed` (None counts as 0) and `n` are honoured; `top_p` and `max_tokens` have no meaning here, as
    there are no tokens. Token ids and log-probabilities are None; token counts are words.
    """

    name = "extractive"

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """`[n]` completions; sample `i` draws from `random.Random(seed + i)` and from nothing else.

        Raises:
            LLMError: the prompt is of another format, or a judge's.
        """
        view = _view(prompt)
        prompt_words = sum(len(message.content.split()) for message in prompt.messages)
        texts = (_write(view, _Draw(sampling.temperature, (sampling.seed or 0) + i)) for i in range(sampling.n))
        return tuple(
            Completion(text, prompt_tokens=prompt_words, completion_tokens=len(text.split())) for text in texts
        )

    async def aclose(self) -> None:
        """Nothing to release."""


def _view(prompt: Prompt) -> View:
    try:
        if prompt.stop not in _STOPS:
            raise ValueError(f"its stop strings are {prompt.stop!r}")
        return read(prompt)
    except (ValueError, IndexError) as error:
        raise LLMError(
            "the extractive policy reads prompts of the reasonrag format and cannot serve another format or a judge: "
            f"choose format reasonrag, or a model for this task ({error})",
            cause="refused",
        ) from error


class _Draw:
    """Choices by score: the best at temperature 0 (the first of equals), else a softmax over score / temperature."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._random = random.Random(seed)

    def index(self, scores: Sequence[float], sharpness: float = 2.0) -> int:
        top = max(scores)
        if self._temperature <= 0:
            return scores.index(top)
        weights = [math.exp(sharpness * (score - top) / self._temperature) for score in scores]
        return self._random.choices(range(len(scores)), weights)[0]

    def yes(self, logit: float) -> bool:
        """True with probability sigmoid(logit / temperature)."""
        return self.index((0.0, logit), sharpness=1.0) == 1


@dataclass(frozen=True, slots=True)
class _Notes:
    """The thoughts so far, sorted."""

    asked: Asked
    queries: tuple[str, ...]
    evidence: tuple[str, ...]

    @classmethod
    def of(cls, view: View) -> _Notes:
        tagged = [tag for thought in view.thoughts if (tag := last_tag(thought, tuple(_TEMPLATES)))]
        queries = tuple(body for name, body in tagged if name == "query")
        evidence = tuple(body for name, body in tagged if name == "evidence" and body.lower().rstrip(".") != "none")
        return cls(analyse(view.question), queries, evidence)


def _write(view: View, draw: _Draw) -> str:
    notes = _Notes.of(view)
    if view.final:
        return _tagged("answer", _answer(notes, draw))
    if view.stage is Stage.GROUNDING:
        evidence = _evidence(view, notes, draw)
        return _tagged("evidence", evidence) if evidence else "<evidence>None</evidence>"
    queries = _queries(notes)
    if not queries or draw.yes(_readiness(notes)):
        return _tagged("answer", _answer(notes, draw))
    return _tagged("query", queries[draw.index([score for _, score in queries])][0])


def _tagged(tag: str, body: str) -> str:
    body = one_line(inert(body)) or "unknown"
    return _TEMPLATES[tag].format(f'"{body}"' if body in ECHOES else body)


def _answer(notes: _Notes, draw: _Draw) -> str:
    found = candidates(notes.asked, notes.evidence, notes.queries)
    return found[draw.index([score for _, score in found])][0]


def _readiness(notes: _Notes) -> float:
    """Log-odds of answering now: much evidence that covers the question speaks for it, an unseen name against it."""
    asked, wanted = notes.asked, stem_set(notes.asked.text)
    covered = len(wanted & stem_set(" ".join(notes.evidence))) / max(len(wanted), 1)
    followed = sum(not stem_set(query) <= wanted for query in notes.queries)
    missing = len(_unseen(notes)) + max(bridges_wanted(asked) - followed, 0)
    return -2.5 + len(notes.evidence) + 2.0 * covered - missing + 0.3 * len(notes.queries)


def _unseen(notes: _Notes) -> list[str]:
    """Names of the question that no evidence mentions."""
    return [name for name in notes.asked.entities if not any(mentions(note, name) for note in notes.evidence)]


def _queries(notes: _Notes) -> list[Scored]:
    """New queries with a score each, best kinds first: none of them repeats an earlier one."""
    asked = notes.asked
    relation = " ".join(asked.relation[:8])
    scored = []
    if not notes.queries:
        scored.append((" ".join(content_words(asked.text)), 1.5))
    unseen = _unseen(notes)
    for name in asked.entities:
        weight = 2.0 if name in unseen else 0.3
        scored += [(f"{name} {relation}", weight), (name, weight - 0.3)]
    for name, score in _bridges(notes):
        scored += [(f"{name} {relation}", score), (name, score - 0.5)]
    earlier = [stem_set(query) for query in notes.queries]
    new = [(one_line(query), score) for query, score in scored if stem_set(query) and stem_set(query) not in earlier]
    return new or ([] if notes.queries else [(asked.text, 0.0)])


def _bridges(notes: _Notes) -> list[Scored]:
    """Names that the evidence brings up, scored as answers are: the next hop starts at one of them."""
    pieces = [piece for note in notes.evidence for piece in sentences(note)]
    found = spans(replace(notes.asked, kind=Kind.BRIDGE), pieces, notes.queries)
    return [(name, score - 0.5) for name, score in found if name[0].isupper() and not is_demonym(name)]


def _evidence(view: View, notes: _Notes, draw: _Draw) -> str:
    """The sentence, at times two, that best fit the latest query; empty where none shares a word with it."""
    query = notes.queries[-1] if notes.queries else view.question
    rows = [(title, text) for title, body in view.documents for text in sentences(body)]
    rows = [row for row in rows if not any(row[1] in note for note in notes.evidence)] or rows
    scores = _overlap(stem_set(query), stem_set(view.question), rows)
    fitting = [(row, score) for row, score in zip(rows, scores, strict=True) if score > 0]
    if not fitting:
        return ""
    first = draw.index([score for _, score in fitting])
    row, score = fitting.pop(first)
    chosen = [row]
    if fitting:
        second = draw.index([score for _, score in fitting])
        if draw.yes(2.0 * (fitting[second][1] - 0.7 * score)):
            chosen.append(fitting[second][0])
    return " ".join(text if not title or mentions(text, title) else f"{title}: {text}" for title, text in chosen)


def _overlap(query: frozenset[str], question: frozenset[str], rows: Sequence[tuple[str, str]]) -> list[float]:
    """`[rows]` the idf-weighted share of the query in each (title, sentence); a title that was asked for adds to it."""
    held = [stems(f"{title} {text}") for title, text in rows]
    count = Counter(word for words in held for word in dict.fromkeys(words))
    idf = {word: math.log(1 + len(rows) / (1 + n)) for word, n in count.items()}
    total = sum(sorted(idf.get(word, 0.0) for word in query)) or 1.0
    scores = []
    for (title, _), words in zip(rows, held, strict=True):
        shared = sum(idf[word] for word in dict.fromkeys(words) if word in query)
        extra = sum(idf[word] for word in dict.fromkeys(words) if word in question and word not in query)
        asked_for = bool(stem_set(title)) and stem_set(title) <= query
        scores.append((4.0 * shared + extra) / total + asked_for if shared else 0.0)
    return scores
