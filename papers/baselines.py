"""The papers' rivals that need no training: a prompt or a few, and searches that no policy asked for.

Each is a format that a configuration names: `--format python:papers.baselines:RAG`. Each names its own paper. Where
that leaves something open, FlashRAG's reproduction counts (arXiv:2405.13576), with which ReasonRAG measured its Table 2
(App. E.2). Prompts have the layout of `reasonrag`, which `reasonrag.formats.reasonrag.read` reads.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from reasonrag.core.errors import RunError
from reasonrag.core.text import one_line, quotable
from reasonrag.core.types import (
    Action,
    Answer,
    Completion,
    Malformed,
    Message,
    Note,
    Passage,
    Prompt,
    Question,
    Search,
    Span,
    Step,
    Trajectory,
)
from reasonrag.formats.base import PromptSet, Reading, Stage, last_tag
from reasonrag.formats.reasonrag import ECHOES, ReasonRAGFormat, thought

_LINE = ("\n",)
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)\"'][a-z0-9)\"'][.?!]) ")  # not that of "Dr." or "T."
_PROMPTS = Path(__file__).parent / "prompts"
_MOST_PASSAGES = 15  # that IRCoT keeps (arXiv:2212.10509)
_ANSWER = re.compile(r"\banswer is: *(\S.*)")  # of IRCoT, FLARE and Self-Ask; the others have a tag


class Baseline(ReasonRAGFormat):
    """A format with prompts of its own beside this module, unless the prompt set has a folder `baselines`."""

    room = "baselines"

    def __init__(self, prompts: PromptSet | None = None, **shown: Any) -> None:
        prompts = prompts or PromptSet.find()
        if not (prompts.folder / self.room).is_dir():
            prompts = PromptSet(_PROMPTS / ("brief" if prompts.folder.name == "brief" else "default"))
        super().__init__(prompts, **shown)


class Direct(Baseline):
    """The answer at once, from what the policy knows: Naive Generation, Direct Inference, Zero-shot. No search."""

    name = "direct"
    instructions: ClassVar[tuple[str, ...]] = ("direct",)

    def must_answer(self, steps: Sequence[Step], max_steps: int) -> bool:
        return False  # the number of steps is fixed, and the last one answers

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return the instruction, the question, and the passages of the latest search if there was one."""
        return self._chat(self.instructions[0], question, passages=_found(steps))

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse the answer, which is the whole text where none is marked, as in FlashRAG."""
        answer = _answer(completion) or one_line(completion.rpartition("<answer>")[2])
        return Answer(answer, forced=final) if answer not in ("", *ECHOES) else Malformed("no_answer", ends=True)

    def read(self, trajectory: Trajectory) -> Reading:
        """Parse a trajectory; its reason is "untagged" if the answer is a whole text, without a mark."""
        reading, last = super().read(trajectory), trajectory.steps[-1]
        is_marked = not reading.well_formed or not last.asked or _answer(last.completion.text)
        return reading if is_marked else replace(reading, well_formed=False, reason="untagged")


class CoT(Direct):
    """Reasoning, then the answer, without a search (zero-shot chain of thought, arXiv:2205.11916)."""

    name = "cot"
    instructions = ("cot",)


class RAG(Direct):
    """One search for the question itself, then the answer: Standard RAG, Naive (arXiv:2005.11401). RC is 1."""

    name = "rag"
    instructions: ClassVar[tuple[str, ...]] = ("rag",)

    def own_step(self, question: Question, steps: Sequence[Step]) -> Action | None:
        return None if steps else Search(one_line(question.question))


class IterRetGen(RAG):
    """Iter-RetGen: three times RAG; the next query is the question and the last answer (arXiv:2305.15294). RC is 3."""

    name = "iter_retgen"
    rounds: ClassVar[int] = 3

    def own_step(self, question: Question, steps: Sequence[Step]) -> Action | None:
        if steps and isinstance(said := steps[-1].action, Note):
            return Search(one_line(f"{question.question} {said.evidence}"))
        return super().own_step(question, steps)

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Return a note before the last round: the answer, or all that was said instead, as the paper appends it."""
        if not final and sum(isinstance(step.action, Search) for step in steps) < self.rounds:
            return Note(_answer(completion) or one_line(completion))
        return super().parse(completion, steps, final=final)


class IRCoT(RAG):
    """IRCoT: each sentence of a chain of thought is the next query, and passages pile up (arXiv:2212.10509).

    The first search is for the question. The pile holds each passage once, best score last, as FlashRAG orders it; the
    passages of the first search alone stand as they were found. A chain without an answer is read by a second prompt.
    """

    name = "ircot"
    instructions: ClassVar[tuple[str, ...]] = ("ircot", "rag")
    most_sentences: ClassVar[int] = 5  # as in FlashRAG's experiments (its class alone makes 2, the paper 8)

    def must_answer(self, steps: Sequence[Step], max_steps: int) -> bool:
        """Return True once the chain is full, or for the last of `max_steps` calls; every search is read by then."""
        return len(self._chain(steps)) >= self.most_sentences or sum(step.asked for step in steps) >= max_steps - 1

    def own_step(self, question: Question, steps: Sequence[Step]) -> Action | None:
        if steps and isinstance(said := steps[-1].action, Note):
            return Search(said.evidence)
        return super().own_step(question, steps)

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        if final:
            return self._chat("rag", question, self._chain(steps), _pile(steps))
        return self._chat("ircot", question, self._chain(steps), _pile(steps), _LINE)

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse one sentence, which is a note, or the answer."""
        sentence = _sentence(completion)
        if final or _answer(sentence):
            return super().parse(completion if final else sentence, steps, final=final)
        return Note(sentence) if sentence else Malformed("no_sentence", ends=True)

    def _chain(self, steps: Sequence[Step]) -> list[str]:
        return [thought(step.action.evidence) for step in steps if isinstance(step.action, Note)]


class FLARE(IRCoT):
    """FLARE: a sentence is written again with passages if one of its tokens was unlikely (arXiv:2305.06983, sec. 3.2).

    The query is the sentence without its unlikely tokens (the paper's beta is theta, as in FlashRAG); a sentence of
    unlikely tokens alone stands. The engine sets `decode`, which spells the policy's tokens.
    """

    name = "flare"
    instructions = ("flare", "rag", "direct")
    threshold: ClassVar[float] = 0.2  # theta: a token that is less likely makes it search
    decode: Callable[[Sequence[int]], str] | None = None

    def own_step(self, question: Question, steps: Sequence[Step]) -> Action | None:
        """Return a search for a sentence that is unsure, the answer that a sure one gives, or None.

        Raises:
            RunError: the policy reports no log-probabilities, or no tokens that can be decoded.
        """
        if not steps or not isinstance(sentence := steps[-1].action, Note):
            return None
        rewritten = len(steps) > 1 and isinstance(steps[-2].action, Search)
        if not rewritten and (query := self._query(sentence.evidence, steps[-1].completion)):
            return Search(query)
        answer = _answer(sentence.evidence)
        return Answer(answer) if answer else None

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return the sentences so far; behind a search, its passages too."""
        searched = steps[-1].passages if steps and isinstance(steps[-1].action, Search) else None
        if final:
            return self._chat("direct" if searched is None else "rag", question, self._chain(steps), searched)
        return self._chat("flare", question, self._chain(steps), searched, _LINE)

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse one sentence as a note, also one that answers: `own_step` decides whether it may stand."""
        sentence = _sentence(completion)
        if final or not sentence:
            return super().parse(completion, steps, final=final)
        return Note(sentence)

    def _chain(self, steps: Sequence[Step]) -> list[str]:
        """Return the sentences that stand: those behind which no search was made."""
        followed = itertools.pairwise([*(step.action for step in steps), None])
        return [
            thought(action.evidence)
            for action, then in followed
            if isinstance(action, Note) and not isinstance(then, Search)
        ]

    def _query(self, sentence: str, completion: Completion) -> str:
        """Return the likely tokens of a sentence; "" if all of them are likely, or none is."""
        ids, logprobs, decode = completion.token_ids, completion.logprobs, self.decode
        if logprobs is None or ids is None or decode is None or len(ids) != len(logprobs):
            missing = "no log-probabilities" if logprobs is None else "no tokens that can be decoded"
            raise RunError(
                f"format flare searches where a token is unlikely, and the policy reports {missing}; take a model in "
                "this process (hf:, vllm:), or add --set policy.logprobs=true --set policy.vllm=true "
                "--set policy.api=completions for a vLLM server"
            )
        # The shortest head of the reply that holds the sentence: what comes behind it was not read.
        length = bisect_left(range(len(ids)), True, key=lambda length: sentence in decode(ids[:length]))
        likely = [id for id, p in zip(ids[:length], logprobs[:length], strict=True) if p >= math.log(self.threshold)]
        return one_line(decode(likely)) if len(likely) < length else ""


class SelfAsk(RAG):
    """Self-Ask with a search engine: follow-up questions and intermediate answers (arXiv:2210.03350).

    As in FlashRAG, the first search is for the question, the passages of the latest search are always shown, and the
    policy is called five times. If it has not answered by then it is asked to, as in the original.
    """

    name = "self_ask"
    asks = "Follow up:"
    instructions = ("self_ask", "rag")
    most_calls: ClassVar[int] = 5

    def must_answer(self, steps: Sequence[Step], max_steps: int) -> bool:
        """Return True for the last call, or behind a reply that neither asks nor answers, as in the original."""
        is_astray = bool(steps) and isinstance(steps[-1].action, Malformed)
        return is_astray or sum(step.asked for step in steps) >= min(max_steps - 1, self.most_calls)

    def stage(self, steps: Sequence[Step]) -> Stage:
        return super().stage([step for step in steps if step.asked])

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return the question, the lines so far, and the passages of the latest search."""
        lines = []
        for step in steps:
            if isinstance(step.action, Search) and step.asked:
                lines.append(f"Follow up: {thought(step.action.query)}")
            elif isinstance(step.action, Note):
                lines.append(f"Intermediate answer: {thought(step.action.evidence) or 'unknown'}")
        # The policy decides whether it needs a follow-up question: "Yes." is written once it has asked one.
        lines.insert(0, "Are follow up questions needed here:" + " Yes." * bool(lines))
        if final:
            return self._chat("rag", question, lines, _found(steps))
        is_asked = self.stage(steps) is Stage.GROUNDING
        return self._chat("self_ask", question, lines, _found(steps), _LINE if is_asked else ("Intermediate answer:",))

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse the intermediate answer; or the first line that answers, or else the first that asks."""
        if final:
            return super().parse(completion, steps, final=final)
        if self.stage(steps) is Stage.GROUNDING:
            said = _line(completion).removeprefix("Intermediate answer:").strip()
            return Note(said) if said else Malformed("no_intermediate_answer")
        lines = completion.splitlines()
        for answer in filter(None, map(_answer, lines)):
            return Answer(answer)
        for line in lines:
            if query := one_line(line.partition(self.asks)[2]):
                return Search(query)
        return Malformed("no_follow_up")


class SearchO1(Baseline):
    """Search-o1: one growing turn of reasoning that searches, and a chat beside it that sums up what was found.

    arXiv:2501.05366, sec. 3.3 and 3.4 and App. A: the tags, Reason-in-Documents, the answer in a box.
    """

    name = "search_o1"
    asks = "<|begin_search_query|>"
    instructions = ("search_o1", "search_o1_documents")

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return the turn so far, with the box opened if `final`; behind a search, the chat that reads its passages."""
        turn: list[Span] = []
        for step in steps:
            if isinstance(step.action, Search):
                turn.append(Span(step.completion.text, step.completion.token_ids, by_policy=True))
                if _QUERY_END not in step.completion.text:  # servers leave the stop string out
                    turn.append(Span(_QUERY_END))
            elif isinstance(step.action, Note):
                found = quotable(step.action.evidence)
                turn.append(Span(f"\n\n<|begin_search_result|>{found}{_RESULT_END}\n\n"))
        if self.stage(steps) is Stage.GROUNDING and not final:
            said = "".join(span.text for span in turn).split("\n\n")
            thoughts = [thought(part) for part in said if part.strip()]
            return self._chat("search_o1_documents", question, thoughts, _found(steps), (_RESULT_END,))
        user = Message("user", f"Question: {quotable(question.question)}")
        messages = (Message("system", self.texts["search_o1"]), user)
        if final:
            return Prompt(messages, (*turn, Span(_BOX)), ("}",))
        return Prompt(messages, tuple(turn), (_QUERY_END,))

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        if final:
            answer = one_line(completion.partition("}")[0])
            return Answer(answer, forced=True) if answer else Malformed("no_answer", ends=True)
        if self.stage(steps) is Stage.GROUNDING:
            said = one_line(completion.rpartition("**Final Information**")[2].removesuffix(_RESULT_END))
            return Note(said) if said else Malformed("no_information")
        _, searches, query = completion.rpartition(self.asks)
        if searches:
            query = one_line(query.partition(_QUERY_END)[0])
            return Search(query) if query else Malformed("empty_query", ends=True)
        answer = one_line(boxes[-1]) if (boxes := _BOXED.findall(completion)) else ""
        return Answer(answer) if answer else Malformed("no_answer", ends=True)


_QUERY_END, _RESULT_END = "<|end_search_query|>", "<|end_search_result|>"
_BOX = "\n\n\\boxed{"
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def _line(text: str) -> str:
    """Return the first line of a text, in case that a server went on behind it."""
    return one_line(text.strip().partition("\n")[0])


def _sentence(text: str) -> str:
    """Return the first sentence of the first line.

    >>> _sentence("Dr. No is a film of 1962. It is by T. Young.")
    'Dr. No is a film of 1962.'
    """
    return _SENTENCE_END.split(_line(text), maxsplit=1)[0]


def _pile(steps: Sequence[Step]) -> list[Passage]:
    """Return all passages once, with their best score, best last; those of one search in its order."""
    searches = [step.passages for step in steps if isinstance(step.action, Search)]
    if len(searches) < 2:
        return list(*searches)
    best: dict[str, Passage] = {}
    for passage in itertools.chain(*searches):
        if passage.id not in best or passage.score > best[passage.id].score:
            best[passage.id] = passage
    return sorted(best.values(), key=lambda passage: passage.score)[-_MOST_PASSAGES:]


def _found(steps: Sequence[Step]) -> tuple[Passage, ...] | None:
    """Return the passages of the latest search; None if there was none."""
    return next((step.passages for step in reversed(steps) if isinstance(step.action, Search)), None)


def _answer(text: str) -> str:
    """Return what a text answers, in the tag or behind "answer is:"; "" if it answers nothing.

    >>> _answer("So the answer is <answer>Dr. No</answer>"), _answer("So the answer is: Dr. No.")
    ('Dr. No', 'Dr. No')
    """
    tag = last_tag(text, ("answer",))
    said = _ANSWER.findall(text)
    body = tag[1] if tag else said[-1].strip().removesuffix(".") if said else ""
    return "" if body in ECHOES else body


# In the order of ReasonRAG's Table 2, by what they do.
BASELINES: dict[str, type[Baseline]] = {
    format.name: format for format in (Direct, CoT, RAG, FLARE, IterRetGen, IRCoT, SelfAsk, SearchO1)
}
