"""An exact judge of the demo world: `--value judge` without a model that could judge, and with errors on demand.

It reads the prompt that `rewards.judge.ProcessJudge` writes and nothing else, looks the question up in its world, and
replies as that prompt asks. It grades steps of the `reasonrag` format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from reasonrag.demo.demonstrations import demo_format
from reasonrag.demo.lexicon import SPLITS
from reasonrag.demo.world import demo_questions
from reasonrag.errors import ConfigError, LLMError
from reasonrag.llm.base import Sampling
from reasonrag.text import exact_match, inert, one_line
from reasonrag.types import Action, Answer, Completion, Malformed, Note, Prompt, Question, Search, Step

NOTHING = 0.2  # of a trajectory without a step that helps or harms
ALL_NOTED = 0.8  # with every needed fact noted, and no answer yet
PER_NEEDLESS_STEP = 0.9  # as alpha of SPRE
# Low enough that a trajectory with any wrong note is worth less than none: 0.8 * 0.25 = NOTHING, less the wasted step.
PER_WRONG_NOTE = 0.25

_UNKNOWN = "This question is not of the demo world that this judge knows."
# A judge's prompt shows the tags of a step with another bracket (`text.inert`).
_SHOWN_TAG = re.compile(r"‹(?=/?(?:query|evidence|answer)>)")
_NUMBERED = re.compile(r"\d+\. ?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Findings:
    """What a judge can say of the steps so far.

    Args:
        needed: facts that the question needs.
        noted: how many of them are noted rightly.
        asked: whether the last query asks for one that is not, and its passages are not yet read.
        needless: steps that brought nothing: repeated or unneeded searches and their notes, a search in vain, what
            cannot be read; every step before the answer where the question is about a famous entity.
        wrong: notes that say something else of a needed fact than is true, or something else than was asked for. A
            note of nothing is needless, not wrong.
        right: whether the final answer is (house exact match); None while there is none.
    """

    needed: int
    noted: int
    asked: bool
    needless: int
    wrong: int
    right: bool | None

    @property
    def score(self) -> float:
        """In [0, 1]: a right answer 1, a wrong one 0; unfinished, from 0.2 with nothing to 0.8 with every fact noted.

        Between the two every fact counts alike, half for the right query and half for the note. Each needless step
        takes a factor of 0.9, each wrong note of an unfinished trajectory one of 0.25.
        """
        worth = PER_NEEDLESS_STEP**self.needless
        if self.right is not None:
            return worth * self.right
        progress = (self.noted + self.asked / 2) / self.needed
        return worth * PER_WRONG_NOTE**self.wrong * (NOTHING + (ALL_NOTED - NOTHING) * progress)

    def reply(self) -> str:
        """In the judge's contract."""
        ended = "" if self.right is None else f" The answer is {'right' if self.right else 'wrong'}."
        return (
            f"{self.noted} of {self.needed} needed facts noted, {self.wrong} wrong notes, "
            f"{self.needless} needless steps.{ended} {_verdict(self.score)}"
        )


def examine(question: Question, actions: Sequence[Action]) -> Findings:
    """Judge the actions of one attempt at a question of the demo world.

    Args:
        question: with `path` and `known` in its metadata, as `demo.world.ask` writes them.
        actions: in their order; those after an answer do not count.
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
                    needless += 1 + (asked is not None)  # a search in vain has to be made again
                    wrong += bool(evidence) and (asked is not None or _misstates(evidence, facts))
                asked = None
            case Malformed():
                needless += 1
        taken += 1
    if question.metadata["known"]:
        needless = taken
    return Findings(len(facts), len(noted), asked is not None, needless, wrong, right)


def _misstates(evidence: str, facts: dict[str, str]) -> bool:
    """Whether the note is about a needed fact and says something else."""
    return any(evidence.startswith(query) and not exact_match(evidence, [facts[query]]) for query in facts)


class DemoJudge:
    """An LLM that judges, for the questions of one demo world (all splits). A pure function of prompt and sampling.

    With probability `error_rate` a score is replaced by one that is uniform in [0, 1]; whether, and by which, depends
    on the seed of the sampling (None counts as 0) and the prompt alone. A question of another world gets a reply
    without a score, so that its verdict is missing. Temperature, `top_p` and `max_tokens` have no meaning here.
    """

    def __init__(self, world_seed: int = 0, *, error_rate: float = 0.0) -> None:
        """Learn the questions of a world.

        Args:
            world_seed: of `demo.make_world`.
            error_rate: share of wrong scores, in [0, 1].

        Raises:
            ConfigError: the error rate is none.
        """
        if not 0 <= error_rate <= 1:
            raise ConfigError(f"the error rate of demo-judge lies between 0 and 1, not at {error_rate:g}")
        self.name = f"demo-judge:{world_seed}:{error_rate:g}"
        self._error_rate = error_rate
        self._questions = {
            _head(question): question for split in SPLITS for question in demo_questions(split, seed=world_seed)
        }

    @classmethod
    def from_spec(cls, rest: str) -> DemoJudge:
        """`[WORLD_SEED[:ERROR]]`, what follows `demo-judge:`.

        Raises:
            ConfigError: it is something else.
        """
        seed, _, error = rest.partition(":")
        try:
            return cls(int(seed or 0), error_rate=float(error or 0))
        except ValueError as problem:
            raise ConfigError(
                f"demo-judge:{rest} is not of the form demo-judge:WORLD_SEED:ERROR, such as demo-judge:0:0.1"
            ) from problem

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """`[n]` verdicts; sample `i` has the seed `seed + i`. Tokens are counted as words.

        Raises:
            LLMError: this is not a judge's prompt (`refused`).
        """
        head, steps = _read(prompt)
        question = self._questions.get(head)
        findings = examine(question, _actions(steps)) if question else None
        words = sum(len(message.content.split()) for message in prompt.messages)
        texts = (self._reply(prompt, findings, (sampling.seed or 0) + i) for i in range(sampling.n))
        return tuple(
            Completion(text, prompt_tokens=0 if i else words, completion_tokens=len(text.split()))
            for i, text in enumerate(texts)
        )

    async def aclose(self) -> None:
        """Nothing to release."""

    def _reply(self, prompt: Prompt, findings: Findings | None, seed: int) -> str:
        if findings is None:
            return _UNKNOWN
        rng = Random("\0".join(["demo judge", str(seed), *(message.content for message in prompt.messages)]))
        return _verdict(rng.random()) if rng.random() < self._error_rate else findings.reply()


def _verdict(score: float) -> str:
    return f"So the score is {score:.4f}"


def _head(question: Question) -> str:
    """How a judge's prompt begins. The answers are part of it: another world may ask the same and answer otherwise."""
    answers = " | ".join(one_line(inert(answer)) for answer in question.golden_answers)
    return f"Question: {one_line(inert(question.question))}\nGolden answers: {answers}"


def _read(prompt: Prompt) -> tuple[str, list[str]]:
    """The first two lines of a judge's prompt, and the texts of the steps."""
    lines = prompt.messages[-1].content.split("\n")
    opening = [line.partition(":")[0] for line in lines[:3]]
    if opening != ["Question", "Golden answers", "Steps so far"]:
        raise LLMError("demo-judge reads the prompts of the process judge and no others", cause="refused")
    steps = []
    for line in lines[3:]:
        if (numbered := _NUMBERED.fullmatch(line)) is None:
            break  # "None.", or the reminder of a second attempt
        steps.append(_SHOWN_TAG.sub("<", numbered[1]))
    return "\n".join(lines[:2]), steps


def _actions(texts: Sequence[str]) -> list[Action]:
    """The steps as the format reads them."""
    format, steps = demo_format(), tuple[Step, ...]()
    for number, text in enumerate(texts, 1):
        action = format.parse(text, steps)
        if number == len(texts) and isinstance(action, Malformed):
            # At the step limit an answer is asked for whatever came before, and the judge cannot see the limit.
            action = format.parse(text, steps, final=True)
        steps = (*steps, Step(Prompt(()), Completion(text), action))
    return [step.action for step in steps]
