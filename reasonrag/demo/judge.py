"""An exact judge of the demo world: `--value judge` without a judge model, and with errors on demand.

It reads only the requests that `rewards.judge` and `rewards.verdicts` write, recognises them by the labels of their
lines in any prompt set, and replies in their contracts. This module scores processes of the `reasonrag` format;
`demo.verdicts` holds the verdicts for formats of one growing turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.models import ModelAddress
from reasonrag.core.text import exact_match
from reasonrag.core.types import Action, Answer, Completion, Malformed, Note, Prompt, Question, Search, Step
from reasonrag.demo import verdicts
from reasonrag.demo.knowledge import Knowledge, knowledge_of
from reasonrag.demo.verdicts import Fields, Verdict
from reasonrag.formats import PromptSet, ReasonRAGFormat
from reasonrag.llm.base import Sampling

NOTHING = 0.2  # score of a trajectory without a step that helps or harms
ALL_NOTED = 0.8  # score with every needed fact noted, and no answer yet
PER_NEEDLESS_STEP = 0.9  # the factor that alpha is in SPRE
# Low enough that a wrong note is worse than no step at all: 0.8 * 0.25 = NOTHING, less the wasted step.
PER_WRONG_NOTE = 0.25

# A judge's prompt shows the tags of a step with another bracket (`text.inert`).
_SHOWN_TAG = re.compile(r"‹(?=/?(?:query|evidence|answer)>)")
_NUMBERED = re.compile(r"\d+\. ?(.*)", re.DOTALL)
_LABELLED = re.compile(r"([A-Z][a-z0-9 ]*):(?: (.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Findings:
    """What an exact judge finds in the steps so far."""

    needed: int  # facts that the question needs
    noted: int  # those that are noted correctly
    asked: bool  # whether the last query asks for a missing one, and its passages are not yet read
    # Steps that contribute nothing: repeated or unneeded searches and their notes, a failed search, a malformed step;
    # if the question is about a famous entity, every step before the answer.
    needless: int
    # Notes that state a needed fact incorrectly, or something else than was asked for. An empty note is needless.
    wrong: int
    right: bool | None  # whether the final answer is an exact match; None while there is no answer

    @property
    def score(self) -> float:
        """Score in [0, 1]: 1 for a correct answer, 0 for a wrong one, and 0.2 to 0.8 for an unfinished trajectory.

        Every needed fact adds the same amount, half for the query and half for the note. Each needless step multiplies
        the score by 0.9, each wrong note of an unfinished trajectory by 0.25.
        """
        worth = PER_NEEDLESS_STEP**self.needless
        if self.right is not None:
            return worth * self.right
        progress = (self.noted + self.asked / 2) / self.needed
        return worth * PER_WRONG_NOTE**self.wrong * (NOTHING + (ALL_NOTED - NOTHING) * progress)

    def reply(self) -> str:
        """Return the reply in the contract of `rewards.judge`."""
        ended = "" if self.right is None else f" The answer is {'right' if self.right else 'wrong'}."
        return (
            f"{self.noted} of {self.needed} needed facts noted, {self.wrong} wrong notes, "
            f"{self.needless} needless steps.{ended} {_verdict(self.score)}"
        )


def examine(question: Question, actions: Sequence[Action]) -> Findings:
    """Judge the actions of one attempt at a question of the demo world.

    Args:
        question: with `path` and `known` in its metadata, as `demo.world.ask` writes them.
        actions: in order; actions after an answer are ignored.
    """
    facts: dict[str, str] = {hop["query"]: hop["evidence"] for hop in question.metadata["path"]}
    noted: set[str] = set()
    asked: str | None = None
    needless = wrong = taken = 0
    right: bool | None = None
    for action in actions:
        match action:
            case Answer(answer):
                right = exact_match(answer, question.golden_answers) > 0
                break
            case Search(query):
                asked = next((q for q in facts if q not in noted and exact_match(query, [q])), None)
                needless += asked is None
            case Note(evidence):
                fact = next((q for q in facts if q not in noted and exact_match(evidence, [facts[q]])), None)
                if fact is not None:
                    noted.add(fact)
                else:
                    needless += 1 + (asked is not None)  # a failed search has to be repeated
                    misstates = any(evidence.startswith(q) and not exact_match(evidence, [facts[q]]) for q in facts)
                    wrong += bool(evidence) and (asked is not None or misstates)
                asked = None
            case Malformed():
                needless += 1
        taken += 1
    if question.metadata["known"]:
        needless = taken
    return Findings(len(facts), len(noted), asked is not None, needless, wrong, right)


def process(world: Knowledge, fields: Fields) -> Verdict | None:
    """Score a process with `examine`; a wrong verdict is uniform in [0, 1]."""
    question = verdicts.asked_question(world, fields)
    if question is None:
        return None
    findings = examine(question, _actions([_SHOWN_TAG.sub("<", text) for text in fields["Steps so far"]]))
    return Verdict(findings.reply(), lambda rng: _verdict(rng.random()))


# By the labels of the request.
_JUDGES: dict[tuple[str, ...], Callable[[Knowledge, Fields], Verdict | None]] = {
    ("Question", "Golden answers", "Steps so far"): process,
    ("Statement 1", "Statement 2"): verdicts.same_meaning,
    ("Reasoning", "Conclusion"): verdicts.step_holds,
    ("Question", "Golden answers", "Reference planner", "Reference path", "Trajectory"): verdicts.path,
    ("Prediction", "Reference answers"): verdicts.answer,
    ("Question to plan", "Golden answers"): verdicts.plan,
    ("Question", "Golden answers", "Planner", "Path"): verdicts.vote,
}


class DemoJudge:
    """An LLM that judges questions of one demo world (all splits). A pure function of prompt and sampling.

    With probability `error_rate` a verdict is replaced by a wrong one: a boolean by its opposite, scores by random
    ones, a plan by one with a needless or a missing step or a wrong answer. The prompt and the seed of the sampling
    (None counts as 0) decide all of it. A question of another world gets an unparseable reply: a missing verdict.
    Temperature, `top_p` and `max_tokens` have no effect.
    """

    def __init__(self, world_seed: int = 0, *, error_rate: float = 0.0) -> None:
        """Create the judge of the world `world_seed`; raise ConfigError if the error rate is not in [0, 1]."""
        if not 0 <= error_rate <= 1:
            raise ConfigError(f"the error rate of demo-judge must be between 0 and 1, not {error_rate:g}")
        self.name = f"demo-judge:{world_seed}:{error_rate:g}"
        self._error_rate = error_rate
        self._world = knowledge_of(world_seed)

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """Return `[n]` verdicts; sample `i` has the seed `seed + i`. Token counts are counts of words.

        Raises:
            LLMError: the prompt is not a judge's (`refused`).
        """
        fields = _read(prompt)
        is_vote = "Path 1" in fields  # a vote numbers its candidates
        labels = (label.rstrip("0123456789 ") if is_vote else label for label in fields)
        judge = _JUDGES.get(tuple(dict.fromkeys(labels)))
        if judge is None:
            raise LLMError("demo-judge can only answer the prompts of judges", cause="refused")
        verdict = judge(self._world, fields)
        words = sum(len(message.content.split()) for message in prompt.messages)
        completions = []
        for number in range(sampling.n):
            text = "This is not of the demo world that this judge knows."  # parsed as no verdict
            if verdict is not None:
                seed = str((sampling.seed or 0) + number)
                rng = Random("\0".join(["demo judge", seed, *(message.content for message in prompt.messages)]))
                text = verdict.wrong(rng) if rng.random() < self._error_rate else verdict.right
            prompt_tokens = 0 if number else words
            completions.append(Completion(text, prompt_tokens=prompt_tokens, completion_tokens=len(text.split())))
        return tuple(completions)

    async def aclose(self) -> None:
        pass


def open_judge(address: ModelAddress, config: ModelConfig) -> DemoJudge:
    """Open the judge at `demo-judge[:WORLD_SEED[:ERROR]]`; raise ConfigError if the address has another form."""
    seed, _, error_rate = address.rest.partition(":")
    try:
        return DemoJudge(int(seed or 0), error_rate=float(error_rate or 0))
    except ValueError as problem:
        raise ConfigError(
            f"{address} is not of the form demo-judge:WORLD_SEED:ERROR, such as demo-judge:0:0.1"
        ) from problem


def _verdict(score: float) -> str:
    return f"So the score is {score:.4f}"


def _read(prompt: Prompt) -> dict[str, str | list[str]]:
    """Parse the fields of a request as `rewards.judge.quoted` writes them; an empty dict for any other prompt."""
    fields: dict[str, str | list[str]] = {}
    listed: list[str] | None = None
    for line in prompt.messages[-1].content.split("\n"):
        if listed is not None and (numbered := _NUMBERED.fullmatch(line)):
            listed.append(numbered[1])
        elif (labelled := _LABELLED.fullmatch(line)) is None:
            if line and line != "None.":
                return {}
            if not line:
                break  # a second attempt adds a reminder behind an empty line
        else:
            listed = [] if labelled[2] is None else None
            fields[labelled[1]] = labelled[2] if listed is None else listed
    return fields


@cache
def demo_format() -> ReasonRAGFormat:
    """Return ReasonRAG's format with the `brief` prompts, as the shipped policy is trained in it."""
    return ReasonRAGFormat(PromptSet.find("brief"))


def _actions(texts: Sequence[str]) -> list[Action]:
    """Parse steps of the `reasonrag` format."""
    format, steps = demo_format(), tuple[Step, ...]()
    for number, text in enumerate(texts, 1):
        action = format.parse(text, steps)
        if number == len(texts) and isinstance(action, Malformed):
            # At the step limit any step has to answer, and the judge cannot see the limit.
            action = format.parse(text, steps, final=True)
        steps = (*steps, Step(Prompt(()), Completion(text), action))
    return [step.action for step in steps]
