"""Native tool calls: the policy calls `search(query)` as its family of models does, and its chat template shows it.

Each step is a message of the assistant: one call, or the answer. What was called and found before are messages too, so
a policy is asked here as a host of agents would ask it, in this process, with a rendered prompt, or with `tools` at a
server.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from reasonrag.core.text import inert, one_line, valid_unicode
from reasonrag.core.types import Action, Answer, Malformed, Message, Prompt, Question, Search, Step, Trajectory
from reasonrag.formats.base import Block, InstructedFormat, Reading, fingerprint
from reasonrag.formats.tags import observed

# Where in a message a call begins and ends, its name, and its arguments.
Call = tuple[int, int, Any, Any]

_NAME, _ARGUMENT = "search", "query"
_FENCES = ("```", "'''")  # Gemma's, and what stands for them in quoted text
_MOST_CODE = 10_000  # characters: Python's parser takes more than linear time

_TAGGED = re.compile(r"<tool_call>\s*(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_XML = re.compile(r"<function=([^<>]*)>")
_XML_ARGUMENT = re.compile(r"<parameter=([^<>]*)>(.*?)(?:</parameter>|\Z)", re.DOTALL)
_JSON = re.compile(r'(?:```json\s*)?(?=\{\s*"name"\s*:)')
_CODE = re.compile(r"```tool_code\b(.*?)(?:```|\Z)|\A\s*(\[\s*\w+\(.*)\Z", re.DOTALL)
_GEMMA4 = re.compile(r"call:([\w.-]+)\{")
# Special tokens around calls and texts in them. Engines leave them out of texts, servers may not.
_TOKENS = re.compile(
    r'<\|python_tag\|>|<\|tool_call>|<tool_call\|>|<\|tool_response>|<(?:start|end)_function_call>|<\|"\|>|<escape>'
)
# What is left of a chat template between messages once its special tokens are gone.
_ROLES = re.compile(r"\b(?:user|tool)\n(<tool_response>)|(</tool_response>)\s*assistant\n")


def _tagged(text: str) -> Iterator[Call]:
    """Find `<tool_call>` around JSON (Hermes, Qwen 2.5 and 3), or around `<function=NAME>` (Qwen 3 Coder, 3.5)."""
    for found in _TAGGED.finditer(text):
        if name := _XML.match(found[1]):
            given = {argument[1]: argument[2].strip("\n") for argument in _XML_ARGUMENT.finditer(found[1])}
            yield *found.span(), name[1], given
        else:
            call = json.loads(found[1])
            yield *found.span(), call["name"], call["arguments"]


def _bare(text: str) -> Iterator[Call]:
    """Find JSON with `parameters` (Llama 3)."""
    position = 0
    while found := _JSON.search(text, position):
        call, position = json.JSONDecoder().raw_decode(text, found.end())
        yield found.start(), position, call["name"], call["parameters"]


def _code(text: str) -> Iterator[Call]:
    """Find Python behind ```` ```tool_code ````, a list of Python calls, or JSON with `parameters` (Gemma 3)."""
    fenced = [(found, call) for found in _CODE.finditer(text) for call in _python_calls(found[1] or found[2] or "")]
    for found, (name, given) in fenced:
        yield *found.span(), name, given
    for start, end, name, given in () if fenced else _bare(text):
        yield start, end + 4 * text.startswith("\n```", end), name, given


def _python_calls(code: str) -> Iterator[tuple[Any, Any]]:
    """Yield the calls of a piece of Python that holds nothing else; a `print` around one is left out."""
    with warnings.catch_warnings(action="ignore"):  # about escapes in its texts
        values = [getattr(line, "value", None) for line in ast.parse(code.strip()[:_MOST_CODE]).body]
    for call in (item for value in values for item in (value.elts if isinstance(value, ast.List) else [value])):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "print" and call.args:
            call = call.args[0]
        if not isinstance(call, ast.Call):
            raise ValueError("not a call")
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        given |= dict(zip([_ARGUMENT], map(ast.literal_eval, call.args), strict=False))
        yield getattr(call.func, "attr", getattr(call.func, "id", None)), given


def _gemma4(text: str) -> Iterator[Call]:
    """Find `call:NAME{ARGUMENT:TEXT}` (Gemma 4, FunctionGemma)."""
    found = [*_GEMMA4.finditer(text)]
    for call, following in zip(found, [*(call.start() for call in found[1:]), len(text)], strict=False):
        closing = text.rindex("}", call.end(), following)
        argument, _, value = text[call.end() : closing].partition(":")
        yield call.start(), closing + 1, call[1], {argument: value}


PARSERS: dict[str, Callable[[str], Iterator[Call]]] = {
    "hermes": _tagged,
    "llama3": _bare,
    "gemma": _code,
    "gemma4": _gemma4,
}

# What a chat template that shows calls of a family holds; the first one found counts.
_SIGNS = {
    "<tool_call>": "hermes",
    "<|tool_call>": "gemma4",
    "<start_function_call>": "gemma4",
    "tool_code": "gemma",
    "<|tool_call_start|>": "gemma",  # LFM2 writes lists of Python calls
    '"parameters": ': "llama3",
}


def parser_of(template: str) -> str | None:
    """Return the key in `PARSERS` of the calls that a chat template shows; None if no parser knows them."""
    return next((name for sign, name in _SIGNS.items() if sign in template), None)


class ToolCallsFormat(InstructedFormat):
    """One function, `search(query)`; each step is a message with one call, or the answer.

    The answer is the whole text of the first message without a call, after its thinking. Text before a call is the
    policy's thought, which it reads again. A malformed step is not shown to the policy: `unreadable_call`,
    `unknown_function`, `bad_arguments`, `empty_query`, `several_calls`, `text_after_call`, `unexpected_call` where the
    answer is asked for, `unclosed_think`, `empty_answer`, and `cut_off`, which the engine finds. A trajectory without
    one is well-formed.
    """

    name = "tool_calls"
    append_only = False
    instructions = ("instruction", "answer", _NAME, _ARGUMENT)
    search, found = "tool_call", "tool_response"  # the tags of a trajectory as text
    function, argument = _NAME, _ARGUMENT

    def __init__(self, *args: Any, parser: str = "hermes", **options: Any) -> None:
        """Read the instructions as the base class does; `parser` is the key in `PARSERS` of the policy's calls."""
        super().__init__(*args, **options)
        self.parser = parser
        argument = {"type": "string", "description": self.texts[_ARGUMENT]}
        parameters = {"type": "object", "properties": {_ARGUMENT: argument}, "required": [_ARGUMENT]}
        function = {"name": _NAME, "description": self.texts[_NAME], "parameters": parameters}
        self.tools = json.dumps([{"type": "function", "function": function}], ensure_ascii=False)

    @property
    def fingerprint(self) -> str:
        return fingerprint(super().fingerprint, self.tools)

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return instruction, function, question, and the calls with their results; with `final` no function."""
        messages = [Message("system", self.texts["answer" if final else "instruction"])]
        if not final:
            messages.append(Message("tools", self.tools))
        messages.append(Message("user", one_line(_inert(question.question))))
        return Prompt((*messages, *self.called(steps)))

    def called(self, steps: Sequence[Step]) -> Iterator[Message]:
        """Yield the searches of a trajectory as messages: the words before a call, the call, and its result."""
        for step in steps:
            if isinstance(step.action, Search):
                if words := self._words(step.completion.text):
                    yield Message("assistant", words)
                call = {"name": self.function, "arguments": {self.argument: _inert(step.action.query)}}
                yield Message("call", json.dumps(call, ensure_ascii=False))
                yield Message("tool", self.documents(step.passages))

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse a message into a search, or without a call into the answer. Never raises."""
        problem, _, words, calls, after = _read(self.parser, completion)
        if problem:
            return Malformed(problem)
        if not calls:
            return Answer(words, forced=final) if words else Malformed("empty_answer")
        if final or len(calls) > 1 or after:
            return Malformed("unexpected_call" if final else "several_calls" if calls[1:] else "text_after_call")
        name, given = calls[0]
        if name != self.function:
            return Malformed("unknown_function")
        if not isinstance(given, dict) or [*given] != [self.argument] or not isinstance(given[self.argument], str):
            return Malformed("bad_arguments")
        query = one_line(valid_unicode(given[self.argument]))
        return Search(query) if query else Malformed("empty_query")

    def read(self, trajectory: Trajectory) -> Reading:
        """Parse a trajectory: a search is a block, which the words of the next step conclude; so is a mere answer."""
        return self._reading([(s.action, s.completion.text, self.documents(s.passages)) for s in trajectory.steps])

    def read_text(self, text: str) -> Reading:
        """Parse messages in a row, each search followed by its result in `<tool_response>`."""
        return self._reading([(self.parse(message, ()), message, found) for message, found in self.observed(text)])

    def observed(self, text: str) -> list[tuple[str, str]]:
        """Return the messages of a text, each with what its search found; roles between them are left out."""
        text = _ROLES.sub(r"\1\2", text)
        return observed(text, (self.search, self.found), search=self.search, found=self.found)

    def _reading(self, said: Sequence[tuple[Action, str, str]]) -> Reading:
        """Return the reading of steps, each an action, its message, and the result of its search."""
        blocks: list[Block] = []
        reason, answer = "", None
        for action, message, context in said:
            if isinstance(action, Malformed):
                reason = reason or action.reason
                continue
            _, thinking, before, calls, _ = _read(self.parser, message)
            thought = f"{thinking} {before}".strip() if calls else thinking
            if blocks and not blocks[-1].conclusion:
                blocks[-1] = replace(blocks[-1], conclusion=thought)
            if isinstance(action, Search):
                blocks.append(Block(thought, action.query, context))
            elif isinstance(action, Answer):
                answer = action.answer
                blocks = blocks or [Block(thought)]
                blocks[-1] = replace(blocks[-1], conclusion=blocks[-1].conclusion or answer)
        reason = reason or ("no_answer" if answer is None else "")
        return Reading(not reason, reason, tuple(blocks), answer)

    def _words(self, message: str) -> str:
        """Return the words before a call for the next prompt, with their thinking as templates know it."""
        if self.parser == "gemma4":  # its template puts them after the result, and ends the turn there
            return ""
        _, thinking, before, _, _ = _read(self.parser, message)
        return f"<think>\n{_inert(thinking)}\n</think>\n\n{_inert(before)}".strip() if thinking else _inert(before)

    def _quote(self, text: str) -> str:
        return super()._quote(text).replace(*_FENCES)


def _inert(text: str) -> str:
    """Return text without anything that parses as a tag, a special token, or one of Gemma's fences."""
    return inert(text).replace(*_FENCES)


@lru_cache(maxsize=4_096)  # the words of a step are in the prompts of all later steps
def _read(parser: str, message: str) -> tuple[str, str, str, list[tuple[Any, Any]], str]:
    """Return a problem, the thinking, the words before the calls, the calls (name, arguments) and the words after them.

    With a problem the rest is empty. `<tool_call>` is read whatever the parser: so is written what a server has parsed.
    """
    thinking, _, text = message.rpartition("</think>")
    if "<think>" in text:
        return "unclosed_think", "", "", [], ""
    text = _TOKENS.sub("", text)
    try:
        calls = list((_tagged if "<tool_call>" in text else PARSERS[parser])(text))
    except (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError):
        return "unreadable_call", "", "", [], ""
    start, end = (calls[0][0], calls[-1][1]) if calls else (len(text), len(text))
    named = [(name, arguments) for _, _, name, arguments in calls]
    return "", thinking.strip().removeprefix("<think>").strip(), text[:start].strip(), named, text[end:].strip()
