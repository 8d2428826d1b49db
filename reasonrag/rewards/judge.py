"""A model's verdict on a process, checked and counted (arXiv:2505.14069, eq. 6, Fig. 14).

The published builder took the last integer of the reply: "85/100" was 100, "87.5" was 5, and a reply without a number
lost the whole question. Here a score is what stands after "score is", anything else is asked for again, and a judge
that cannot be read raises: a failure is never a score.
"""

from __future__ import annotations

import re
from dataclasses import replace

from reasonrag.errors import JudgeError
from reasonrag.formats.promptset import PromptSet, fingerprint
from reasonrag.llm.base import LLM, Sampling
from reasonrag.rollout.engine import derive_seed
from reasonrag.text import inert, one_line
from reasonrag.types import Message, Prompt, Trajectory

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
# What may stand before the number has no sign and no point in it: "-5" is not 5, ".9" is not 9.
_VALUE = (
    rf"[\[({{*_$\"'`:=\s]*(?P<score>{_NUMBER})"
    rf"(?:\s*(?:/|out\s+of)\s*(?P<scale>{_NUMBER})|\s*(?P<percent>%))?(?P<unclear>[.,]\d)?"
)
_ANCHORED = re.compile(rf"\bscore(?:(?P<verdict>\s+is)|\s+of|\s*[:=]){_VALUE}", re.IGNORECASE)
_BARE = re.compile(rf"{_VALUE}\W*", re.IGNORECASE)


def parse_score(reply: str) -> float | None:
    """The score in [0, 1] that a judge's reply ends with, or None.

    What counts is the last "score is X", else the last "score: X", "score = X" or "score of X", else a reply that is a
    number and nothing else. A decimal comma ("0,85") is not guessed at: None.
    "X/Y" and "X%" are fractions; without a scale a number from 2 to 100 is out of 100, as in the paper's own examples
    ("So the score is 88."), although its prompt asks for [0, 1].

    >>> parse_score("The score is 15. There are 3 flaws"), parse_score("So the score is 85/100")
    (0.15, 0.85)
    >>> parse_score("So the score is 0.7."), parse_score("founded in 2024"), parse_score("The score is -5")
    (0.7, None, None)
    """
    found = list(_ANCHORED.finditer(reply))
    verdicts = [match for match in found if match["verdict"]]
    match = (verdicts or found)[-1] if found else _BARE.fullmatch(reply.strip())
    if match is None or match["unclear"]:
        return None
    score = float(match["score"])
    if match["percent"]:
        score /= 100
    elif match["scale"]:
        scale = float(match["scale"])
        score = score / scale if scale > 0 else -1.0
    elif 2 <= score <= 100:
        score /= 100
    return score if 0 <= score <= 1 else None


class ProcessJudge:
    """Scores a trajectory against its golden answers. Counts what it could not read."""

    def __init__(self, llm: LLM, prompts: PromptSet, *, sampling: Sampling | None = None, attempts: int = 3) -> None:
        """Set the judge up.

        Args:
            llm: the judging model.
            prompts: where the instruction `judge/process` comes from.
            sampling: temperature, top_p and max_tokens of a verdict.
            attempts: calls per verdict until one can be read; the second insists on the form, later ones also sample.
        """
        self.llm = llm
        self.sampling = sampling or Sampling(temperature=0.0, max_tokens=512)
        self.attempts = attempts
        self.unreadable = 0
        self._instruction = prompts.text("judge/process")

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same trajectory could be judged with another prompt."""
        return fingerprint(self._instruction)

    async def score(self, trajectory: Trajectory, *, seed: int) -> float:
        """A verdict in [0, 1].

        Raises:
            JudgeError: no reply could be read.
            LLMError: the judge does not answer.
        """
        prompt = self._prompt(trajectory)
        for attempt in range(self.attempts):
            asked = prompt if attempt == 0 else _insist(prompt)
            # A greedy judge would write its second reply again.
            temperature = self.sampling.temperature if attempt < 2 else max(self.sampling.temperature, 1.0)
            sampling = replace(self.sampling, n=1, seed=derive_seed(seed, attempt), temperature=temperature)
            (reply,) = await self.llm.complete(asked, sampling)
            if (score := parse_score(reply.text)) is not None:
                return score
        self.unreadable += 1
        raise JudgeError(f"no score in {self.attempts} replies of judge {self.llm.name!r}")

    def _prompt(self, trajectory: Trajectory) -> Prompt:
        # Steps are shown as quoted text: "So the score is 1" written by the policy must stay the policy's words.
        steps = [f"{i}. {one_line(inert(s.completion.text))}" for i, s in enumerate(trajectory.steps, 1)]
        user = "\n".join(
            [
                f"Question: {one_line(inert(trajectory.question.question))}",
                f"Golden answers: {' | '.join(one_line(inert(a)) for a in trajectory.question.golden_answers)}",
                "Steps so far:",
                *(steps or ["None."]),
            ]
        )
        return Prompt((Message("system", self._instruction), Message("user", user)))


def _insist(prompt: Prompt) -> Prompt:
    """The same request, with a reminder of the only line that is read."""
    system, user = prompt.messages
    reminder = "\n\nReply with this line only, SCORE being a number between 0 and 1: So the score is SCORE"
    return Prompt((system, Message("user", user.content + reminder)))
