"""Replays a recorded third-party agent with our retriever: its own messages and functions, our searches.

A conversation that `contrib.record` kept is a trajectory
of this format, so `build-tree` branches each of its steps.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
_RESULT = "recorded"  # id of the passage that holds the result of a recorded search

Call = Mapping[str, Any]


class RecordedFormat(ToolCallsFormat):
    """The agent's first messages and functions, then its calls with their results; a message without a call answers.

    Its search is the function with one required argument and a name like "search" or "lookup". A
    trajectory that has to end is asked without functions.

    Attributes:
        questions: the questions that a conversation is about.
        trajectories: the conversations as trajectories, by data set and id of the question.
    """

    def __init__(self, calls: Iterable[Call], questions: Sequence[Question], *, parser: str, **options: Any) -> None:
        """Match conversations to questions, by the question's text in their first messages.

        Args:
            calls: rows of `storage.parquet.read_calls`.
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
        self._thoughts_are_sent = False
        conversations: dict[str, list[Call]] = {}
        for call in calls:
            conversations.setdefault(call["conversation"], []).append(call)
        prompts: dict[str, list[tuple[Message, ...]]] = {}
        unused = Counter[str]()
        for name, conversation in conversations.items():
            # An edited recording may hold anything.
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                prompts[name] = [messages_of(call["request"]) for call in conversation]
                self._find_search(prompts[name][0])
                for message in prompts[name][-1]:
                    self._thoughts_are_sent |= message.role == "assistant" and "<think>" in message.content
        for name, conversation in conversations.items():
            reason = "are not as OpenAI writes them"
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                reason = self._take(conversation, prompts[name], questions)
            unused.update([reason] if reason else [])
        self.questions = [question for question in questions if _key(question) in self.trajectories]
        reasons = ", ".join(f"{count} {reason}" for reason, count in unused.items())
        if not self.questions:
            raise DataError(
                f"none of {len(conversations)} conversations can be branched: {reasons or 'the recording is empty'}"
            )
        if reasons:
            log.warning(f"of {len(conversations)} conversations, {reasons}: not branched")

    @property
    def fingerprint(self) -> str:
        return fingerprint(super().fingerprint, repr(self._openings))

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return the agent's first messages, and the calls with their results; with `final` without functions."""
        opening = self._openings[_key(question)]
        messages = [message for message in opening if not (final and message.role == "tools")]
        return Prompt((*messages, *self.called(steps)))

    def _words(self, text: str) -> str:
        words = super()._words(text)  # a reasoning parser keeps thoughts apart, and most agents drop them
        return words if self._thoughts_are_sent else words.rpartition("</think>")[2].strip()

    def documents(self, passages: Sequence[Passage]) -> str:
        if len(passages) == 1 and passages[0] in self._results:
            return passages[0].contents  # as the agent read it, but inert
        return super().documents(passages)

    def _take(
        self, calls: Sequence[Call], prompts: Sequence[tuple[Message, ...]], questions: Sequence[Question]
    ) -> str:
        """Keep a conversation as a trajectory, up to its first answer; return why it cannot be branched, or ""."""
        users = "\n".join(message.content for message in prompts[0] if message.role == "user")
        named = [question for question in questions if question.question in users]
        # One question may be part of another one: the longest that is named is meant.
        if not named:
            return "are about none of the questions"
        question = max(named, key=lambda candidate: len(candidate.question))
        prompts = [tuple(_inert(message, question.question) for message in messages) for messages in prompts]
        if self._openings.setdefault(_key(question), prompts[0]) != prompts[0]:
            return "begin otherwise than another one about their question"
        if not self._find_search(prompts[0]):
            return "have no function that searches"
        trajectory = Trajectory(question)
        for number, call in enumerate(calls):
            prompt = self.prompt(question, trajectory.steps)
            if _stripped(prompt.messages) != _stripped(prompts[number]):
                return "rewrite their messages"
            # Read as a server's reply would be: calls and thoughts come in several dialects.
            choice = {"message": call["message"], "finish_reason": call["finish_reason"]}
            completion = Wire("").completion(json.dumps({"choices": [choice]}).encode(), prompt, Sampling())
            action = self.parse(completion.text, trajectory.steps)
            if isinstance(action, Malformed):
                return f"have a step that is no search and no answer ({action.reason})"
            if isinstance(action, Answer):
                ended = trajectory.extend(Step(prompt, completion, action), StopReason.ANSWERED)
                self.trajectories.setdefault(_key(question), []).append(ended)
                return ""
            following = prompts[number + 1][len(prompt.messages) :] if number + 1 < len(calls) else ()
            results = [message.content for message in following if message.role == "tool"]
            passage = Passage(_RESULT, "\n".join(results))
            self._results.add(passage)
            trajectory = trajectory.extend(Step(prompt, completion, action, (passage,)))
        return "have no answer"

    def _find_search(self, opening: Sequence[Message]) -> bool:
        """Take name and argument of the function that searches; return whether there is one."""
        for message in opening:
            for tool in json.loads(message.content) if message.role == "tools" else ():
                name = tool["function"]["name"]
                required = tool["function"].get("parameters", {}).get("required", ())
                if _SEARCHES.search(name) and len(required) == 1:
                    self.function, self.argument = name, required[0]
                    return True
        return False


def _key(question: Question) -> tuple[str, str]:
    return question.dataset, question.id


def _inert(message: Message, question: str) -> Message:
    """Return a message of an agent whose results and question are inert; its other words are the agent's own."""
    if message.role == "user":
        return replace(message, content=message.content.replace(question, inert(question)))
    return replace(message, content=inert(message.content)) if message.role == "tool" else message


def _stripped(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content.strip()) for message in messages]
