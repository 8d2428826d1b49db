"""An LLM that replays given completions, or computes them: what tests and demos speak to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from reasonrag.core.errors import LLMError
from reasonrag.core.types import Completion, Prompt
from reasonrag.llm.base import Sampling

Reply = str | Completion | Exception


class ScriptedLLM:
    """Replays `replies` in the order of the requests, or calls them.

    Attributes:
        prompts: of all requests so far, in order.
        samplings: likewise.
    """

    def __init__(
        self, replies: Sequence[Reply] | Callable[[Prompt, Sampling], Reply], *, name: str = "scripted"
    ) -> None:
        """Take the script.

        Args:
            replies: a text, a whole `Completion`, or an exception to raise, one per sample in order; or a pure function
                of prompt and sampling, which is called once per sample with `n=1` and that sample's own seed.
            name: what identifies it in run identities.
        """
        self.name = name
        self.prompts: list[Prompt] = []
        self.samplings: list[Sampling] = []
        self._function = replies if callable(replies) else None
        self._script = iter(()) if callable(replies) else iter(tuple(replies))

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """`[n]` replies. Tokens are counted as words parted by blanks; the prompt counts for the first sample only.

        Raises:
            LLMError: the script has run out (`script_exhausted`).
        """
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        return tuple(self._completion(prompt, sampling, index) for index in range(sampling.n))

    async def aclose(self) -> None:
        """Nothing to release."""

    def _completion(self, prompt: Prompt, sampling: Sampling, index: int) -> Completion:
        seed = None if sampling.seed is None else sampling.seed + index
        reply = self._reply(prompt, replace(sampling, n=1, seed=seed))
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        shown = " ".join([*(message.content for message in prompt.messages), prompt.prefix])
        return Completion(reply, prompt_tokens=0 if index else len(shown.split()), completion_tokens=len(reply.split()))

    def _reply(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if self._function is not None:
            return self._function(prompt, sampling)
        for reply in self._script:
            return reply
        raise LLMError(
            f"the script of {self.name!r} has no reply to request {len(self.prompts)}", cause="script_exhausted"
        )
