"""What a whole trajectory says, whatever its tags are: the paper's own steps, the answer, whether it is in form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """One step in a paper's own sense: some reasoning, a search with what it found or none, and what was concluded.

    Texts are stripped. `query` is None where the policy relied on what it knows; `context` is what the search brought.
    """

    reasoning: str = ""
    query: str | None = None
    context: str = ""
    conclusion: str = ""

    @property
    def is_search(self) -> bool:
        """Whether this step asked for passages."""
        return self.query is not None


@dataclass(frozen=True, slots=True)
class Reading:
    """A trajectory as its format reads it.

    `reason` names in a word or two why it is not well-formed, to count by; "" where it is. Blocks and answer are read
    as far as they can be, well-formed or not. `plan` is what the policy declared first, in formats that ask for it.
    """

    well_formed: bool
    reason: str = ""
    blocks: tuple[Block, ...] = ()
    answer: str | None = None
    plan: str = ""

    @property
    def queries(self) -> tuple[str, ...]:
        """What was searched for, in order."""
        return tuple(block.query for block in self.blocks if block.query is not None)
