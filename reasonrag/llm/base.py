"""The LLM protocol: a prompt in, completions out. A policy and a judge speak the same one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from reasonrag.core.types import Completion, Prompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample.

    Args:
        n: completions wanted for the prompt.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        max_tokens: of one completion.
        seed: of the first completion; sample `i` uses `seed + i`. Two requests with the same prompt and seed get the
            same text from a backend that honours seeds. None leaves it to the backend.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    seed: int | None = None


class LLM(Protocol):
    """Writes completions. Safe to call from many tasks at once: a backend bounds its own concurrency and batches."""

    @property
    def name(self) -> str:
        """What identifies the model in run identities and data sets: no URL, no path of one machine, no secret."""
        ...

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """`[n]` completions, independent of each other.

        Raises:
            LLMError: no answer after every retry, or the request was refused.
        """
        ...

    async def aclose(self) -> None:
        """Release sockets, threads and memory. Calling it twice does no harm."""
        ...


def restore_stop(text: str, stop: tuple[str, ...]) -> str:
    """Put back the closing tag that a server cut off when it stopped at it.

    Servers that speak the OpenAI protocol drop the stop string and rarely say which one it was. Where `text` ends
    inside `<x>` and `</x>` is one of the stop strings, that was it; anything else is left as it is.

    >>> restore_stop("So the next query is <query>Jaws", ("</query>", "</answer>"))
    'So the next query is <query>Jaws</query>'
    >>> restore_stop("no tag here", ("</query>",))
    'no tag here'
    """
    opened = {s: text.rfind(f"<{s[2:]}") for s in stop if s.startswith("</")}
    unclosed = {s: at for s, at in opened.items() if at >= 0 and text.rfind(s) < at}
    return text + max(unclosed, key=lambda s: unclosed[s]) if unclosed else text
