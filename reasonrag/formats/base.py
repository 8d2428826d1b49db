"""The Format protocol: steps so far to prompt, completion to action."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Protocol

from reasonrag.core.types import Action, Prompt, Question, Step, Trajectory
from reasonrag.formats.reading import Reading

PassageOrder = Literal["best_first", "best_last"]


class Stage(StrEnum):
    """What the policy decides next (arXiv:2505.14069, sec. 2.2.2)."""

    REASONING = "reasoning"
    GROUNDING = "grounding"
    TERMINAL = "terminal"


class Format(Protocol):
    """How one paper writes a trajectory down. Stateless: all it needs is the steps so far."""

    @property
    def name(self) -> str:
        """Its key in `FORMATS`."""
        ...

    @property
    def append_only(self) -> bool:
        """Whether each prompt extends the one before it, so that a trajectory is one training row."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same steps could give another prompt: the texts of the prompt set."""
        ...

    def stage(self, steps: tuple[Step, ...]) -> Stage:
        """What comes next after `steps`."""
        ...

    def must_answer(self, steps: tuple[Step, ...], max_steps: int) -> bool:
        """Whether the step after `steps` has to be the answer, in a trajectory of at most `max_steps` actions."""
        ...

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """What to ask next. With `final` the policy is asked for its answer and nothing else."""
        ...

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """What the completion of `prompt(question, steps, final=final)` decides. Total: never raises."""
        ...

    def read(self, trajectory: Trajectory) -> Reading:
        """The whole trajectory; what the engine put in is known for what it is, whatever it says. Total."""
        ...

    def read_text(self, text: str) -> Reading:
        """A trajectory of unknown origin, from its text alone. Total, in linear time."""
        ...
