"""Replays a recorded third-party agent with our retriever: its own messages and functions, our searches.

A conversation that `contrib.record` kept is a trajectory of this format, so `build-tree` branches each of its steps.
Agents that write calls into texts are read and written by a `Dialect`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from reasonrag.core.errors import DataError
from reasonrag.core.settings import read_yaml
from reasonrag.core.text import inert, map_texts, valid_unicode
from reasonrag.core.types import (
    Action,
    Answer,
    Malformed,
    Message,
    Note,
    Passage,
    Prompt,
    Question,
    Role,
    Search,
    Step,
    StopReason,
    Trajectory,
)
from reasonrag.formats.base import SEALED, fingerprint
from reasonrag.formats.tool_calls import Call as FoundCall
from reasonrag.formats.tool_calls import ToolCallsFormat, parts_of
from reasonrag.llm.base import Sampling
from reasonrag.llm.openai_wire import Wire, messages_of

log = structlog.get_logger()

_SEARCHES = re.compile(r"search|retriev|look_?up|query|find", re.IGNORECASE)
_ANSWERS = re.compile(r"\A(final_answer|final_result|submit|submit_answer)\Z")
_ANSWER = ("final_answer", "answer")  # what a dialect makes of an answer
_RESULT = "recorded"  # id of the passage that holds the result of a recorded search
_ID = re.compile(r"(Calling tools:\n\[\{'id': ')[^']*")

Call = Mapping[str, Any]
Named = tuple[str | None, str | None]  # the functions that search and answer
_Function = tuple[str, list[str], list[str]]  # name, required arguments, and those of them that are texts


class Dialect(NamedTuple):
    """How the agents of a library write calls and their results into texts: an entry of `dialects.yaml`."""

    sign: str  # in the stop strings or the first messages of such agents
    turns: Mapping[Role, str]  # messages that follow a step; none: the calls of functions are messages
    call: str = ""  # pattern of a reply up to the arguments in JSON, with a group `name`; "" if functions are called
    end: str = ""  # what may stand behind a call
    answer: str = ""  # pattern of an answer in a reply, with a group `answer`
    thought: str = ""  # what stands before a thought
    between: Sequence[str] = ()  # in the last message: the turns stand there, and are not messages

    def calls(self, text: str) -> Iterator[FoundCall]:
        """Yield the call in a reply, or its answer as a call of `final_answer`."""
        if called := re.search(self.call, text):
            arguments, end = json.JSONDecoder().raw_decode(text, called.end())
            end += len(text[end:]) if text[end:].strip() == self.end else 0
            yield called.start(), end, called["name"], arguments
        elif answered := re.search(self.answer, text, re.DOTALL):
            yield *answered.span(), _ANSWER[0], {_ANSWER[1]: answered["answer"].strip()}


class RecordedFormat(ToolCallsFormat):
    """The agent's first messages and functions, then its calls with their results; a message without a call answers.

    Its search is the function of that name, or one with a name like "search" or "lookup". A call of a function like
    "final_answer" answers too; an agent that has one answers in no other way. A trajectory that has to end is asked
    without other functions.

    Attributes:
        questions: the questions that a conversation is about.
        trajectories: the conversations as trajectories, by data set and id of the question.
    """

    may_have_more = True

    def __init__(
        self, calls: Iterable[Call], questions: Sequence[Question], *, named: Named = (None, None), **options: Any
    ) -> None:
        """Match conversations to questions, by the question's text in their first messages.

        Args:
            calls: rows of `storage.parquet.read_calls`.
            questions: with golden answers.
            named: the functions that search and answer, each NAME or NAME.ARGUMENT; None: known by their names.
            options: `parser` and how passages are shown, as for `ToolCallsFormat`.

        Raises:
            DataError: no conversation can be branched; the message names the reasons.
        """
        super().__init__(**options)
        self.trajectories: dict[tuple[str, str], list[Trajectory]] = {}
        self._openings: dict[tuple[str, str], tuple[Message, ...]] = {}
        self._closings: dict[tuple[str, str], tuple[Message, ...]] = {}  # of the answer, if it has another prompt
        self._results = {Passage(_RESULT, SEALED)}  # a passage of ours may have any id
        self._thoughts_are_sent = False
        self.dialect = Dialect("", {})
        conversations, prompts, functions = self._read(calls)
        if (found := _find(functions, named[0], _SEARCHES, "query")) is None:
            names = ", ".join(sorted({name for name, _, _ in functions})) or "the recording has none"
            raise DataError(f"no function of the agent searches: {names}; name one, --search-function NAME.ARGUMENT")
        self.function, self.argument = found
        self.answer = _ANSWER if self.dialect.call else _find(functions, named[1], _ANSWERS, "answer")
        unused = Counter[str]()
        asked = {name: _asked(prompts[name][0], questions) for name in conversations if prompts.get(name)}
        # The agent's own words: what all conversations end with.
        own = len(commonprefix([rest[::-1] for _, rest in asked.values()])) if len(asked) > 1 else 0  # noqa: RUF071 -- texts
        for name, conversation in conversations.items():
            reason = "are not as OpenAI writes them"
            question, rest = asked.get(name, (None, ""))
            if name in asked and question is None:
                reason = "are about none of the questions"
            elif rest[: len(rest) - own].strip() and rest[: len(rest) - own + 1].rstrip().endswith("?"):
                reason = "end with a question that is not in the data set"
            elif question is not None:
                with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                    reason = self._take(conversation, prompts[name], question)
            unused.update([reason] if reason else [])
        self.questions = [question for question in questions if _key(question) in self.trajectories]
        reasons = ", ".join(f"{count} {reason}" for reason, count in unused.items())
        if not self.questions:
            raise DataError(
                f"none of {len(conversations)} conversations can be branched: {reasons or 'the recording is empty'}"
            )
        log.info(f"{len(self.questions)} of {len(questions)} questions have a conversation in the recording")
        if reasons:
            log.warning(f"of {len(conversations)} conversations, {reasons}: not branched")

    def _read(
        self, calls: Iterable[Call]
    ) -> tuple[dict[str, list[Call]], dict[str, list[tuple[Message, ...]]], list[_Function]]:
        """Find the dialect; return the calls of each conversation, their prompts if they can be read, and functions."""
        conversations: dict[str, list[Call]] = {}
        prompts: dict[str, list[tuple[Message, ...]]] = {}
        functions: list[_Function] = []
        begun: dict[str, str] = {}  # conversations by the text before their calls
        named: dict[str, list[str]] = {}  # an agent may give one name to the conversations of all questions
        for call in calls:
            name = call["conversation"]
            # An edited recording may hold anything.
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                prompt = messages_of({**call["request"], "messages": _in_turn(call["request"]["messages"])})
                if not conversations:
                    self._find_dialect([*(call["request"].get("stop") or ()), *(message.content for message in prompt)])
                keys = named.setdefault(name, [])
                name = _continued(prompt, {key: prompts[key] for key in keys}) or f"{name}\0{len(keys)}"
                if self.dialect.between:  # each call is one message
                    head, _, rest = prompt[-1].content.partition(self.dialect.between[0])
                    if rest.startswith(self.dialect.between[1]):
                        begun[head] = name
                    name = begun.get(head, name)
                if name not in prompts:
                    keys.append(name)
                if name not in prompts or self.dialect.call:
                    functions += self._functions(prompt, call["message"])
                prompts.setdefault(name, []).append(prompt)
                self._thoughts_are_sent |= any("<think>" in said.content for said in prompt if said.role == "assistant")
            conversations.setdefault(name, []).append(call)
        return conversations, prompts, functions

    @property
    def fingerprint(self) -> str:
        return fingerprint(super().fingerprint, repr((self._openings, self.function, self.argument, self.answer)))

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return the agent's first messages, and the calls with their results; with `final` without other functions."""
        ends = final or (steps and isinstance(steps[-1].action, Note))
        *before, last = (self._closings if ends else self._openings)[_key(question)]
        if not self.dialect.between:
            return Prompt((*before, last, *self.called(steps)))
        head, end, rest = last.content.rpartition(self.dialect.between[1])
        return Prompt((*before, replace(last, content=f"{head}{self._written(steps)}{end}{rest}")))

    def _written(self, steps: Sequence[Step]) -> str:
        return "\n\n".join(message.content for message in self.called(steps))

    def called(self, steps: Sequence[Step]) -> Iterator[Message]:
        if not self.dialect.turns:
            yield from super().called(steps)
            return
        for n, step in enumerate(step for step in steps if isinstance(step.action, Search | Note)):
            name, arguments = parts_of(self.parser, step.completion.text).calls[0]
            arguments = map_texts(arguments, inert)
            fields = {"n": n, "name": name, "arguments": arguments, "json": json.dumps(arguments, ensure_ascii=False)}
            fields["thought"] = self._words(step.completion.text).removeprefix(self.dialect.thought).strip()
            found = "Completed." if isinstance(step.action, Note) else self.documents(step.passages)
            fields["result"] = found.replace("[[ ##", "[\u200a[ ##")  # in a prompt of DSPy, it would begin a field
            for role, text in self.dialect.turns.items():
                yield Message(role, text.format(**fields).strip())

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse a message into a search or the answer, which may be the argument of a function. Never raises."""
        message = parts_of(self.parser, completion)
        name, arguments = message.calls[0] if len(message.calls) == 1 else ("", {})
        if self.answer and name == self.answer[0]:
            text = str(arguments.get(self.answer[1], "")).strip() if isinstance(arguments, dict) else ""
            return Answer(valid_unicode(text), forced=final) if text else Malformed("empty_answer")
        if self.dialect.between and name == "finish" and not final:
            return Note("")  # another prompt asks for the answer
        if self.answer and not message.problem and not message.calls:
            return Malformed("no_call")
        return super().parse(completion, steps, final=final)

    def _words(self, text: str) -> str:
        words = super()._words(text)  # a reasoning parser keeps thoughts apart, and most agents drop them
        return words if self._thoughts_are_sent else words.rpartition("</think>")[2].strip()

    def documents(self, passages: Sequence[Passage]) -> str:
        if len(passages) == 1 and passages[0] in self._results:
            return passages[0].contents  # as the agent read it, but inert
        return super().documents(passages)

    def _take(self, calls: Sequence[Call], prompts: Sequence[tuple[Message, ...]], question: Question) -> str:
        """Keep a conversation as a trajectory, up to its first answer; return why it cannot be branched, or ""."""
        opening = tuple(_inert(message, question.question) for message in prompts[0])
        if self._openings.setdefault(_key(question), opening) != opening:
            return "begin otherwise than another one about their question"
        self._closings.setdefault(_key(question), tuple(self._ending(opening)))
        trajectory = Trajectory(question)
        # A client that had waited too long asks again: the last of equal requests counts.
        last_tries = [n for n in range(len(calls)) if prompts[n : n + 1] != prompts[n + 1 : n + 2]]
        calls, prompts = [calls[n] for n in last_tries], [prompts[n] for n in last_tries]
        for number, call in enumerate(calls):
            if call["finish_reason"] is None:
                return "were broken off by the model's server"
            if trajectory.steps and isinstance(trajectory.steps[-1].action, Note):
                *before, last = (_inert(message, question.question) for message in prompts[number])
                shown = inert(last.content).replace(self._written(trajectory.steps), "", 1)
                self._closings[_key(question)] = (*before, replace(last, content=shown))
            if _compared(self.prompt(question, trajectory.steps)) != _compared(Prompt(prompts[number])):
                return "rewrite their messages"
            for message in _in_turn([call["message"]]):
                prompt = self.prompt(question, trajectory.steps)
                # Read as a server's reply would be: calls and thoughts come in several dialects.
                choice = {"message": message, "finish_reason": call["finish_reason"]}
                completion = Wire("").completion(json.dumps({"choices": [choice]}).encode(), prompt, Sampling())
                action = self.parse(completion.text, trajectory.steps)
                if isinstance(action, Malformed):
                    return f"have a step that is no search and no answer ({action.reason})"
                if isinstance(action, Answer):
                    ended = trajectory.extend(Step(prompt, completion, action), StopReason.ANSWERED)
                    self.trajectories.setdefault(_key(question), []).append(ended)
                    return ""
                step = Step(prompt, completion, action)
                if isinstance(action, Search) and number + 1 < len(calls):
                    step = replace(step, passages=(self._result(trajectory.extend(step), prompts[number + 1]),))
                trajectory = trajectory.extend(step)
        return "have no answer"

    def _result(self, trajectory: Trajectory, following: Sequence[Message]) -> Passage:
        """Return what a search found: the text in the next prompt where ours would show it."""
        *steps, last = trajectory.steps
        expected = self.prompt(trajectory.question, (*steps, replace(last, passages=(Passage(_RESULT, SEALED),))))
        both = zip(_compared(expected), _compared(Prompt(tuple(following))), strict=False)
        places = ((ours.rpartition(SEALED), theirs) for ours, theirs in both if SEALED in ours and ours != theirs)
        # What stands elsewhere is no result, and the next prompt will differ from this one.
        found = "".join(theirs.removeprefix(before).removesuffix(after) for (before, _, after), theirs in places)
        passage = Passage(_RESULT, found)
        self._results.add(passage)
        return passage

    def _ending(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield the messages without functions other than the one that answers."""
        for message in messages:
            tools = json.loads(message.content) if message.role == "tools" else []
            kept = [tool for tool in tools if self.answer and tool["function"]["name"] == self.answer[0]]
            if kept or message.role != "tools":
                yield replace(message, content=json.dumps(kept, ensure_ascii=False)) if kept else message

    def _find_dialect(self, texts: Sequence[str]) -> None:
        dialects = (Dialect(**entry) for entry in read_yaml(Path(__file__).with_name("dialects.yaml")).values())
        self.dialect = next((new for new in dialects if any(new.sign in text for text in texts)), self.dialect)
        self.parser = self.dialect.calls if self.dialect.call else self.parser

    def _functions(self, prompt: Iterable[Message], reply: Mapping[str, Any]) -> Iterator[_Function]:
        """Yield the functions that an agent offers, or calls in a text."""
        for message in prompt:
            for tool in json.loads(message.content) if message.role == "tools" else ():
                schema = tool["function"].get("parameters") or {}
                types = {key: value.get("type", "string") for key, value in (schema.get("properties") or {}).items()}
                required = list(schema.get("required") or types)
                yield str(tool["function"]["name"]), required, [key for key in required if types.get(key) == "string"]
        for name, arguments in parts_of(self.parser, reply["content"]).calls if self.dialect.call else ():
            yield name, [], [argument for argument, value in arguments.items() if isinstance(value, str)]


def _continued(prompt: tuple[Message, ...], conversations: dict[str, list[tuple[Message, ...]]]) -> str | None:
    """Return the conversation that a prompt continues, of those under its name; None if it begins one."""
    for key, prompts in reversed(conversations.items()):
        first = prompts[0]
        if prompt == first:  # a client asks again, or this is another attempt
            return key if prompts[-1] == first else None
        if any(first[-1].content in message.content for message in prompt):
            return key
    longest = max(conversations, key=lambda key: len(conversations[key][0]), default=None)
    return longest if longest and len(prompt) > len(conversations[longest][0]) else None


def _key(question: Question) -> tuple[str, str]:
    return question.dataset, question.id


def _asked(prompt: Sequence[Message], questions: Sequence[Question]) -> tuple[Question | None, str]:
    """Return the question that a conversation is about, None if it is about none, and what is written after it."""
    users = "\n".join(message.content for message in prompt if message.role == "user")
    # Examples come first, and one question may be part of another one:
    # the last that is named is meant, and the longest of those.
    ends = {each: users.rfind(each.question) + len(each.question) for each in questions if each.question in users}
    question = max(ends, key=lambda each: (ends[each], len(each.question)), default=None)
    return question, users[ends[question] :] if question else ""


def _inert(message: Message, question: str) -> Message:
    """Return a first message of an agent whose results and question are inert; its other words are the agent's own."""
    if message.role == "user":
        return replace(message, content=message.content.replace(question, inert(question)))
    return replace(message, content=inert(message.content)) if message.role == "tool" else message


def _compared(prompt: Prompt) -> list[str]:
    """Return the messages of a prompt as they are compared: inert, without white space around them, ids numbered."""
    numbers = itertools.count()
    texts = (f"{message.role}\n{inert(message.content).strip()}" for message in prompt.messages)
    return [_ID.sub(lambda found: f"{found[1]}call_{next(numbers)}", text) for text in texts]


def _in_turn(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with one call in each, followed by its result: calls at once are steps in turn.

    >>> calls = [{"id": "1"}, {"id": "2"}]
    >>> results = [{"role": "tool", "tool_call_id": call["id"]} for call in reversed(calls)]
    >>> turned = _in_turn([{"role": "assistant", "tool_calls": calls}, *results])
    >>> [message.get("tool_call_id", "") for message in turned]
    ['', '1', '', '2']
    """
    waiting, turned = list(messages), []
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            turned.append(message)
            continue
        results = {result["tool_call_id"]: [result] for result in waiting[: len(calls)] if result["role"] == "tool"}
        del waiting[: len(results)]
        for call in calls:
            turned += [{**message, "tool_calls": [call]}, *results.get(call["id"], ())]
            message = {"role": message["role"], "content": None}
    return turned


def _find(
    functions: Iterable[_Function], named: str | None, known: re.Pattern[str], usual: str
) -> tuple[str, str] | None:
    """Return name and argument of the function that is named NAME or NAME.ARGUMENT, or has a known name.

    The argument is the only required one that is a text, or the only required one, or the usual one.
    """
    wanted, _, argument = (named or "").partition(".")
    for name, required, texts in functions:
        if name == wanted or (not named and known.search(name)):
            candidates = ([argument] * bool(argument), texts, required, [key for key in required if key == usual])
            if keys := next((keys for keys in candidates if len(keys) == 1), None):
                return name, keys[0]
    return None
