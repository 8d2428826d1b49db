"""What every format shares: the Format protocol, the reading of a trajectory, prompt sets, and the parsing of tags.

No parser here raises, and all take linear time: texts come from models and passages.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import named_path
from reasonrag.core.text import find_secrets, quotable
from reasonrag.core.types import Action, Answer, Message, Passage, Prompt, Question, Step, Trajectory

# Replaces an observation wherever a trajectory is parsed. No policy can write it: see `without_seals`.
SEALED = "\ue000"

_SHIPPED_SETS = Path(__file__).parent / "prompts"


class Stage(StrEnum):
    """What the policy decides next (arXiv:2505.14069, sec. 2.2.2)."""

    REASONING = "reasoning"
    GROUNDING = "grounding"
    TERMINAL = "terminal"


@dataclass(frozen=True, slots=True)
class Block:
    """One step in the sense of a paper: some reasoning, perhaps a search with what it found, and a conclusion.

    Texts are stripped. `query` is None if the policy relied
    on its own knowledge; `context` holds the passages found.
    """

    reasoning: str = ""
    query: str | None = None
    context: str = ""
    conclusion: str = ""

    @property
    def is_search(self) -> bool:
        return self.query is not None


@dataclass(frozen=True, slots=True)
class Reading:
    """A trajectory as its format parses it.

    `reason` names in a word or two why the trajectory is not well-formed, for counting; it is "" if it is
    well-formed. Blocks and answer are parsed as far as possible in both cases. `plan` is the plan that
    the policy wrote first, in formats that ask for one.
    """

    well_formed: bool
    reason: str = ""
    blocks: tuple[Block, ...] = ()
    answer: str | None = None
    plan: str = ""

    @property
    def queries(self) -> tuple[str, ...]:
        """The queries of all searches, in the order in which they were made."""
        return tuple(block.query for block in self.blocks if block.query is not None)


class Format(Protocol):
    """How one paper writes a trajectory down. Stateless: every method depends on the steps so far alone."""

    @property
    def name(self) -> str:
        """The key in `FORMATS`, and the folder of its texts in a prompt set."""

    @property
    def append_only(self) -> bool:
        """Whether each prompt extends the one before it, so that a trajectory is one training row."""

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever the same steps could give another prompt."""

    def stage(self, steps: tuple[Step, ...]) -> Stage:
        """Return the kind of decision that comes next, after `steps`."""

    def must_answer(self, steps: tuple[Step, ...], max_steps: int) -> bool:
        """Return whether the next step has to be the answer, if a trajectory has at most `max_steps` actions.

        The passages of a search have to be in a later prompt,
        so this returns True where no step is left to show them.
        """

    def own_step(self, question: Question, steps: tuple[Step, ...]) -> Action | None:
        """Return the action that the format takes next without asking the policy; None if the policy is asked.

        Plain RAG searches for the question before the policy speaks. Text of passages must not decide it.
        """

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return the next prompt. With `final` the policy is asked for its answer and nothing else."""

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse the completion of `prompt(question, steps, final=final)` into an action. Never raises."""

    def read(self, trajectory: Trajectory) -> Reading:
        """Parse a whole trajectory. Text that the engine inserted is never parsed as tags. Never raises."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A folder of instruction texts, `ROOM/NAME.txt`: `default` for real models, `brief` for the demo's tiny ones."""

    folder: Path

    @classmethod
    def find(cls, name: str = "default") -> PromptSet:
        """Return the shipped set of that name, or the folder at that path.

        Raises:
            ConfigError: there is neither.
        """
        shipped = sorted(path.name for path in _SHIPPED_SETS.iterdir() if path.is_dir())
        folder = _SHIPPED_SETS / name if name in shipped else named_path(name)
        if not folder.is_dir():
            raise ConfigError(f"prompt set {name!r} is neither a folder nor one of {', '.join(shipped)}")
        return cls(folder)

    def has(self, name: str) -> bool:
        """Return whether the set has the text `name`."""
        return (self.folder / f"{name}.txt").exists()

    def text(self, name: str) -> str:
        """Return the stripped text `name`, such as `reasonrag/reasoning`.

        Raises:
            ConfigError: the set has no such text, or it holds a secret.
        """
        try:
            text = (self.folder / f"{name}.txt").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"prompt set {self.folder.name!r} has no readable {name}.txt ({error.__class__.__name__}); "
                f"copy {_SHIPPED_SETS.name}/default and edit it"
            ) from error
        if self.folder.parent != _SHIPPED_SETS and (secrets := find_secrets(text)):
            raise ConfigError(
                f"prompt set {self.folder.name!r}: {name}.txt holds what looks like a secret ({secrets[0].kind}); "
                "prompts are kept in runs and policies, so remove it"
            )
        return text


def fingerprint(*texts: str) -> str:
    """Return 16 hex digits that change with any of the texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def chat(system: str, user: str) -> tuple[Message, Message]:
    """Return the messages of a prompt that has an instruction and one turn of the user."""
    return Message("system", system), Message("user", user)


class InstructedFormat:
    """Base class of the shipped formats: reads the instruction texts and decides how passages are shown."""

    name: ClassVar[str]
    append_only: ClassVar[bool]
    room: ClassVar[str] = ""  # the folder of the texts in a prompt set; the format's name if empty
    instructions: ClassVar[tuple[str, ...]]  # names of the texts in it
    optional: ClassVar[tuple[str, ...]] = ()  # names of texts that a prompt set may lack

    def __init__(
        self,
        prompts: PromptSet | None = None,
        *,
        passage_order: Literal["best_first", "best_last"] = "best_first",
        max_passage_chars: int = 4000,
    ) -> None:
        """Read the instructions.

        Args:
            prompts: the set that the texts come from; the shipped `default` set if None.
            passage_order: how the passages of a search are shown; training and
                inference must agree. ReasonRAG's published tree builder showed
                the best one last, its published inference showed it first.
            max_passage_chars: longer passages are cut there, with a mark.
        """
        prompts = prompts or PromptSet.find()
        room = self.room or self.name
        # Read once: the texts are part of the fingerprint, whatever happens to the files later.
        names = (*self.instructions, *(name for name in self.optional if prompts.has(f"{room}/{name}")))
        self.texts = {name: prompts.text(f"{room}/{name}") for name in names}
        self.passage_order = passage_order
        self.max_passage_chars = max_passage_chars

    @property
    def fingerprint(self) -> str:
        return fingerprint(*self.texts.values(), self.passage_order, str(self.max_passage_chars))

    def stage(self, steps: Sequence[Step]) -> Stage:
        return Stage.TERMINAL if any(isinstance(step.action, Answer) for step in steps) else Stage.REASONING

    def must_answer(self, steps: Sequence[Step], max_steps: int) -> bool:
        """Return True for the last action: it has to be the answer."""
        return len(steps) >= max_steps - 1

    def own_step(self, question: Question, steps: Sequence[Step]) -> Action | None:
        return None

    def quoted_passages(self, passages: Sequence[Passage]) -> list[tuple[str, str]]:
        """Return `[number] title` and text of each passage in the order shown, inert and cut to size."""
        # Training and inference have to agree on the order.
        shown = passages if self.passage_order == "best_first" else tuple(reversed(passages))
        quoted = []
        for number, passage in enumerate(shown, 1):
            quoted.append((f"[{number}] {self._quote(passage.title)}", self._quote(passage.text)))
        return quoted

    def documents(self, passages: Sequence[Passage]) -> str:
        """Return the passages as the policy reads them."""
        return "\n".join(f"{title}\n{text}" for title, text in self.quoted_passages(passages)) or "None found."

    def _quote(self, text: str) -> str:
        quoted = quotable(text)
        return quoted if len(quoted) <= self.max_passage_chars else quoted[: self.max_passage_chars] + " [cut]"


def without_seals(text: str) -> str:
    """Return the text with every seal replaced by a visible character; removing them could join text into tags.

    >>> without_seals("<th\\ue000ink>")
    '<th�ink>'
    """
    return text.replace(SEALED, "\N{REPLACEMENT CHARACTER}")


def seal(text: str, names: Sequence[str], *, search: str, found: str) -> tuple[str, list[str]]:
    """Replace each observation by a seal, so that nothing in it is parsed as a tag; also return the observations.

    An observation is the text in `<found>` if the last tag of `names` before it closes a search or
    another observation, so a policy that only mentions the tag makes none. It ends at the first closing
    tag, or at the end of a text that was cut off. If another observation begins before that, it was never
    closed: it ends at the next tag, and stays unclosed, so the steps after it are not part of it. An
    observation that a policy writes right after its search cannot be distinguished from an engine's.

    >>> seal("<q>a</q> <i>b</q></i>", ["q", "i"], search="q", found="i")[1]
    ['b</q>']
    >>> seal("the <i>tag</i>", ["q", "i"], search="q", found="i")[1]
    []
    >>> seal("<q>a</q><i>b <q>c</q><i>d</i>", ["q", "i"], search="q", found="i")[1]
    ['b', 'd']
    """
    text = without_seals(text)
    opening, closing = f"<{found}>", f"</{found}>"
    pattern = _tag_pattern(tuple(names))
    pieces: list[str] = []
    bodies: list[str] = []
    copied = position = 0  # the text up to `copied` is in `pieces`; the next tag is searched from `position`
    closed = -1  # where the next closing tag begins; searched once, or many open tags would take quadratic time
    after_search = False
    while tag := pattern.search(text, position):
        position = tag.end()
        if not (after_search and tag[0] == opening):
            after_search = tag[0] == f"</{search}>"
            continue
        if closed < position:
            closed = text.find(closing, position)
            closed = len(text) if closed < 0 else closed
        # The body ends at its closing tag, or at the first tag in it if another observation begins there.
        inner = itertools.pairwise(pattern.finditer(text, position, closed))
        is_closed = not any(before[0] == f"</{search}>" and after[0] == opening for before, after in inner)
        end = closed if is_closed else next(pattern.finditer(text, position)).start()
        pieces += text[copied:position], SEALED
        bodies.append(text[position:end].strip())
        copied, position = end, end + len(closing) * is_closed
        after_search = is_closed
    return "".join([*pieces, text[copied:]]), bodies


def elements(text: str, names: Sequence[str]) -> tuple[list[tuple[str, str]], str, bool]:
    """Return every well-formed element `<name>body</name>` in order, the first broken tag, and whether text is stray.

    Elements are not nested. A broken tag is never closed, or closed without having been opened. Stray
    text is text between elements that is not white space.

    >>> elements("<think>a</think> <answer>b</answer>", ["think", "answer"])
    ([('think', 'a'), ('answer', 'b')], '', False)
    >>> elements("so <answer>b</answer></think>", ["think", "answer"])
    ([('answer', 'b')], 'unopened_think', True)
    """
    well_formed: list[tuple[str, str]] = []
    broken, stray = "", False
    position = 0
    opened: re.Match[str] | None = None  # the tag whose body is being read
    for tag in _tag_pattern(tuple(names)).finditer(text):
        closes = bool(tag[1])
        if opened is None:
            stray = stray or bool(text[position : tag.start()].strip())
        if closes and opened is not None and opened[2] == tag[2]:
            well_formed.append((tag[2], text[opened.end() : tag.start()].strip()))
        elif closes:
            broken = broken or f"unopened_{tag[2]}"
        elif opened is not None:
            broken = broken or f"unclosed_{opened[2]}"
        opened, position = None if closes else tag, tag.end()
    if opened is not None:
        broken = broken or f"unclosed_{opened[2]}"
    return well_formed, broken, stray or (opened is None and bool(text[position:].strip()))


@cache
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Match every opening and closing tag; group 1 is the slash, group 2 the name."""
    return re.compile(rf"<(/?)({'|'.join(map(re.escape, names))})>")


def last_tag(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Return name and stripped body of the last well-formed tag `<name>body</name>` among `names`, or None.

    The body may span lines and holds no other tag of `names`, so an unclosed tag before it does no harm.

    >>> last_tag("<query>U.S. Navy, 3.5 million</query>", ["query", "answer"])
    ('query', 'U.S. Navy, 3.5 million')
    >>> last_tag("<answer>open <query>x</query>", ["query", "answer"])
    ('query', 'x')
    """
    return next(reversed(tags(text, names)), None)


def tags(text: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and stripped body of every well-formed tag among `names`, in order; none within another.

    >>> tags("<query>a</query> then <answer> b </answer>", ["query", "answer"])
    [('query', 'a'), ('answer', 'b')]
    """
    return elements(text, names)[0]
