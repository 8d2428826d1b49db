"""Replays a recorded third-party agent with our retriever: its own messages and functions, our searches.

A conversation that `contrib.record` kept is a trajectory of this format, so `build-tree` branches each of its steps.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from reasonrag.core.errors import DataError
from reasonrag.core.text import inert
from reasonrag.core.types import (
    Answer,
    Malformed,
    Message,
    Passage,
    Prompt,
    Question,
    Step,
    StopReason,
    Trajectory,
)
from reasonrag.formats.base import fingerprint
from reasonrag.formats.tool_calls import ToolCallsFormat
from reasonrag.llm.base import Sampling
from reasonrag.llm.openai_wire import Wire, messages_of

log = structlog.get_logger()

_SEARCHES = re.compile(r"search|retriev|look_?up|query|find", re.IGNORECASE)
_FOUND = "recorded"  # the id of the passage that holds what a recorded search returned

Call = Mapping[str, Any]


class RecordedFormat(ToolCallsFormat):
    """The agent's first messages and functions, then its calls with their results; a message without a call answers.

    Its search is the function with one required argument and a name like "search" or "lookup". A trajectory
    that has to end is asked without functions.

    Attributes:
        questions: the questions that a conversation is about.
        trajectories: the conversations as trajectories, by data set and id of the question.
    """

    def __init__(self, calls: Iterable[Call], questions: Sequence[Question], *, parser: str, **options: Any) -> None:
        """Match conversations to questions, by the question's text in their first messages.

        Args:
            calls: rows of `storage.records.read_calls`.
            questions: with golden answers.
            parser: as for `ToolCallsFormat`.
            options: how passages are shown, as for every format.

        Raises:
            DataError: no conversation can be branched; the message names the reasons.
        """
        super().__init__(parser=parser, **options)
        self.trajectories: dict[tuple[str, str], list[Trajectory]] = {}
        self._openings: dict[tuple[str, str], tuple[Message, ...]] = {}
        self._results: set[Passage] = set()  # a passage of ours may have any id
        conversations: dict[str, list[Call]] = {}
        for call in calls:
            conversations.setdefault(call["conversation"], []).append(call)
        sent: list[Message] = []
        readable, unused = [], Counter[str]()
        for told in conversations.values():
            with self._counting(unused):
                asked = [messages_of(call["request"]) for call in told]
                self._has_search(asked[0])
                sent += asked[-1]
                readable.append((told, asked))
        self._thoughts_are_sent = any("<think>" in m.content for m in sent if m.role == "assistant")
        for told, asked in readable:
            with self._counting(unused):
                unused[self._take(told, asked, questions)] += 1
        del unused[""]
        self.questions = [q for q in questions if (q.dataset, q.id) in self.trajectories]
        said = ", ".join(f"{count} {reason}" for reason, count in unused.items())
        if not self.questions:
            raise DataError(
                f"none of {len(conversations)} conversations can be branched: {said or 'the recording is empty'}"
            )
        if said:
            log.warning(f"of {len(conversations)} conversations, {said}: not branched")

    @property
    def fingerprint(self) -> str:
        return fingerprint(super().fingerprint, repr(self._openings))

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return the agent's first messages, and the calls with their results; with `final` without functions."""
        opening = self._openings[question.dataset, question.id]
        messages = [message for message in opening if not (final and message.role == "tools")]
        return Prompt((*messages, *self.called(steps)))

    def _words(self, message: str) -> str:
        words = super()._words(message)  # a reasoning parser keeps thoughts apart, and most agents drop them
        return words if self._thoughts_are_sent else words.rpartition("</think>")[2].strip()

    def documents(self, passages: Sequence[Passage]) -> str:
        if len(passages) == 1 and passages[0] in self._results:
            return passages[0].contents  # as the agent read it, but inert
        return super().documents(passages)

    @staticmethod
    @contextlib.contextmanager
    def _counting(unused: Counter[str]) -> Iterator[None]:
        """Count a conversation that is not an OpenAI chat: an edited recording may hold anything."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError):
            unused["are not as OpenAI writes them"] += 1

    def _take(self, calls: Sequence[Call], asked: Sequence[tuple[Message, ...]], questions: Sequence[Question]) -> str:
        """Keep a conversation as a trajectory, up to its first answer; return why it cannot be branched, or ""."""
        users = "\n".join(message.content for message in asked[0] if message.role == "user")
        question = max((q for q in questions if q.question in users), key=lambda q: len(q.question), default=None)
        if question is None:
            return "are about none of the questions"
        key = question.dataset, question.id
        asked = [tuple(_inert(message, question.question) for message in messages) for messages in asked]
        if self._openings.setdefault(key, asked[0]) != asked[0]:
            return "begin otherwise than another one about their question"
        if not self._has_search(asked[0]):
            return "have no function that searches"
        trajectory = Trajectory(question)
        for number, call in enumerate(calls):
            prompt = self.prompt(question, trajectory.steps)
            if [_stripped(m) for m in prompt.messages] != [_stripped(m) for m in asked[number]]:
                return "rewrite their messages"
            choice = {"message": call["message"], "finish_reason": call["finish_reason"]}
            (completion,) = Wire("").completions(json.dumps({"choices": [choice]}).encode(), prompt, Sampling())
            action = self.parse(completion.text, trajectory.steps)
            if isinstance(action, Malformed):
                return f"have a step that is no search and no answer ({action.reason})"
            step = Step(prompt, completion, action)
            if isinstance(action, Answer):
                self.trajectories.setdefault(key, []).append(trajectory.extend(step, StopReason.ANSWERED))
                return ""
            found = asked[number + 1][len(prompt.messages) :] if number + 1 < len(calls) else ()
            result = "\n".join(message.content for message in found if message.role == "tool")
            found_then = Passage(_FOUND, result)
            self._results.add(found_then)
            trajectory = trajectory.extend(Step(prompt, completion, action, (found_then,)))
        return "have no answer"

    def _has_search(self, opening: Sequence[Message]) -> bool:
        """Take name and argument of the function that searches."""
        for message in (message for message in opening if message.role == "tools"):
            for function in (tool["function"] for tool in json.loads(message.content)):
                required = function.get("parameters", {}).get("required", ())
                if _SEARCHES.search(function["name"]) and len(required) == 1:
                    self.function, self.argument = function["name"], required[0]
                    return True
        return False


def _inert(message: Message, question: str) -> Message:
    """Return a message of an agent whose results and question are inert; its other words are the agent's own."""
    if message.role == "user":
        return replace(message, content=message.content.replace(question, inert(question)))
    return replace(message, content=inert(message.content)) if message.role == "tool" else message


def _stripped(message: Message) -> tuple[str, str]:
    return message.role, message.content.strip()
