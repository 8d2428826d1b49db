"""Native tool calls: the policy calls `search(query)` as its family of models does, and its chat template shows it.

Each step is a message of the assistant: one call, or the answer. What was called and found before are
messages too, so a policy is asked here as a host of agents would ask it, in this process, with a rendered
prompt, or with `tools` at a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from reasonrag.core.text import inert, map_texts, one_line, valid_unicode
from reasonrag.core.types import Action, Answer, Malformed, Message, Prompt, Question, Search, Step, Trajectory
from reasonrag.formats.base import Block, InstructedFormat, Reading, fingerprint

# Where in a message a call begins and ends, its name, and its arguments.
Call = tuple[int, int, Any, Any]
Parser = Callable[[str], Iterator[Call]]

_NAME, _ARGUMENT = "search", "query"

_TAGGED = re.compile(r"<tool_call>\s*(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_XML = re.compile(r"<function=([^<>]*)>")
_XML_ARGUMENT = re.compile(r"<parameter=([^<>]*)>(.*?)(?:</parameter>|\Z)", re.DOTALL)
_JSON = re.compile(r'(?:```json\s*)?(?=\{\s*"name"\s*:)')
_BARE = re.compile(r'\{\s*"(name|arguments)"\s*:.*"(name|arguments)"\s*:', re.DOTALL)  # a call without its tag
_PYTHON_TAG = "<|python_tag|>"  # stands before Llama's calls; engines leave it out of texts, servers may not


def _tagged_calls(text: str) -> Iterator[Call]:
    """Yield `<tool_call>` around JSON (Hermes, Qwen 2.5 and 3), or around `<function=NAME>` (Qwen 3 Coder, 3.5)."""
    for match in _TAGGED.finditer(text):
        if name := _XML.match(match[1]):
            arguments = {found[1]: found[2].strip("\n") for found in _XML_ARGUMENT.finditer(match[1])}
            yield *match.span(), name[1], arguments
        else:
            call = json.loads(match[1])
            yield *match.span(), call["name"], call["arguments"]


def _bare_calls(text: str) -> Iterator[Call]:
    """Yield JSON with `parameters` (Llama 3)."""
    position = 0
    while match := _JSON.search(text, position):
        call, position = json.JSONDecoder().raw_decode(text, match.end())
        yield match.start(), position, call["name"], call["parameters"]


PARSERS: dict[str, Parser] = {"hermes": _tagged_calls, "llama3": _bare_calls}

# What a chat template that shows calls of a family holds; the first one that it holds counts.
_SIGNS = {"<tool_call>": "hermes", '"parameters": ': "llama3"}


def parser_of(template: str) -> str | None:
    """Return the key in `PARSERS` of the calls that a chat template shows; None if no parser knows them."""
    return next((name for sign, name in _SIGNS.items() if sign in template), None)


class ToolCallsFormat(InstructedFormat):
    """One function, `search(query)`; each step is a message with one call, or the answer.

    The answer is the whole text of the first message without a call, after its thinking. Text before a
    call is the policy's thought, which it reads again. A malformed step is not shown to the policy:
    `unreadable_call`, `untagged_call` (its JSON alone), `unknown_function`, `bad_arguments`, `empty_query`,
    `several_calls`, `text_after_call`, `unexpected_call` where the answer is asked for, `unclosed_think`,
    `empty_answer`, and `cut_off`, which the engine finds. A trajectory without one is well-formed.
    """

    name = "tool_calls"
    append_only = False
    instructions = ("instruction", "answer", _NAME, _ARGUMENT)
    function, argument = _NAME, _ARGUMENT
    may_have_more: ClassVar[bool] = False  # arguments than the query

    def __init__(self, *args: Any, parser: str = "hermes", **options: Any) -> None:
        """Read the instructions as the base class does; `parser` is the key in `PARSERS` of the policy's calls."""
        super().__init__(*args, **options)
        self.parser = PARSERS[parser]
        argument = {"type": "string", "description": self.texts[_ARGUMENT]}
        parameters = {"type": "object", "properties": {_ARGUMENT: argument}, "required": [_ARGUMENT]}
        function = {"name": _NAME, "description": self.texts[_NAME], "parameters": parameters}
        self.tools = json.dumps([{"type": "function", "function": function}], ensure_ascii=False)

    @property
    def fingerprint(self) -> str:
        return fingerprint(super().fingerprint, self.tools)

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return instruction, function, question, and the calls with their results; with `final` no function."""
        # Without a function a model cannot call one: that forces the answer.
        messages = [Message("system", self.texts["answer" if final else "instruction"])]
        if not final:
            messages.append(Message("tools", self.tools))
        messages.append(Message("user", one_line(inert(question.question))))
        return Prompt((*messages, *self.called(steps)))

    def called(self, steps: Sequence[Step]) -> Iterator[Message]:
        """Yield the searches of a trajectory as messages: the words before a call, the call, and its result."""
        for step in steps:
            if isinstance(step.action, Search):
                if words := self._words(step.completion.text):
                    yield Message("assistant", words)
                calls = parts_of(self.parser, step.completion.text).calls
                arguments = map_texts(calls[0][1] if calls else {}, inert) | {self.argument: inert(step.action.query)}
                yield Message("call", json.dumps({"name": self.function, "arguments": arguments}, ensure_ascii=False))
                yield Message("tool", self.documents(step.passages))

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse a message into a search, or without a call into the answer. Never raises."""
        message = parts_of(self.parser, completion)
        if message.problem:
            return Malformed(message.problem)
        if not message.calls:
            return Answer(message.words, forced=final) if message.words else Malformed("empty_answer")
        if final:
            return Malformed("unexpected_call")
        if len(message.calls) > 1:
            return Malformed("several_calls")
        if message.after:
            return Malformed("text_after_call")
        name, arguments = message.calls[0]
        if name != self.function:
            return Malformed("unknown_function")
        is_call = isinstance(arguments, dict) and (self.may_have_more or len(arguments) == 1)
        query = arguments.get(self.argument) if is_call else None
        if not isinstance(query, str):
            return Malformed("bad_arguments")
        query = one_line(valid_unicode(query))
        return Search(query) if query else Malformed("empty_query")

    def read(self, trajectory: Trajectory) -> Reading:
        """Parse a trajectory: a search is a block, which the words of the next step conclude; so is a mere answer."""
        blocks: list[Block] = []
        reason, answer = "", None
        for step in trajectory.steps:
            action = step.action
            if isinstance(action, Malformed):
                reason = reason or action.reason
                continue
            message = parts_of(self.parser, step.completion.text)
            thought = f"{message.thinking} {message.words}".strip() if message.calls else message.thinking
            if blocks and not blocks[-1].conclusion:
                blocks[-1] = replace(blocks[-1], conclusion=thought)
            if isinstance(action, Search):
                blocks.append(Block(thought, action.query, self.documents(step.passages)))
            elif isinstance(action, Answer):
                answer = action.answer
                blocks = blocks or [Block(thought)]
                blocks[-1] = replace(blocks[-1], conclusion=blocks[-1].conclusion or answer)
        reason = reason or ("no_answer" if answer is None else "")
        return Reading(not reason, reason, tuple(blocks), answer)

    def _words(self, text: str) -> str:
        """Return the words before a call for the next prompt, with their thinking as templates know it."""
        message = parts_of(self.parser, text)
        words = inert(message.words)
        return f"<think>\n{inert(message.thinking)}\n</think>\n\n{words}".strip() if message.thinking else words


class Parts(NamedTuple):
    """A message of the policy: what is wrong with it, or its parts. `words` stand before the calls, `after` after."""

    problem: str = ""
    thinking: str = ""
    words: str = ""
    calls: tuple[tuple[Any, Any], ...] = ()  # name and arguments of each
    after: str = ""


@lru_cache(maxsize=4_096)  # the words of a step are in the prompts of all later steps
def parts_of(parser: Parser, text: str) -> Parts:
    """Parse a message. `<tool_call>` is read whatever the parser: so is written what a server has parsed."""
    # A thought may hold anything, also an example of a call.
    thinking, _, text = text.rpartition("</think>")
    if "<think>" in text:
        return Parts("unclosed_think")
    text = text.replace(_PYTHON_TAG, "")
    try:
        calls = list((_tagged_calls if "<tool_call>" in text else parser)(text))
    except (ValueError, LookupError, TypeError, RecursionError):
        return Parts("unreadable_call")
    if not calls and _BARE.search(text):
        return Parts("untagged_call")
    thinking = thinking.strip().removeprefix("<think>").strip()
    start, end = (calls[0][0], calls[-1][1]) if calls else (len(text), len(text))
    named = tuple((name, arguments) for _, _, name, arguments in calls)
    return Parts("", thinking, text[:start].strip(), named, text[end:].strip())
