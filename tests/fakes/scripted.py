"""An LLM that replays given completions or computes them, for tests and demos."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reasonrag.core.errors import LLMError
from reasonrag.core.types import Completion, Prompt
from reasonrag.llm.base import Sampling

Reply = str | Completion | Exception


class ScriptedLLM:
    """Replays a script, or computes each reply with a function.

    Attributes:
        prompts: prompts of all requests so far, in order.
        samplings: their sampling parameters, in the same order.
    """

    def __init__(
        self, replies: Sequence[Reply] | Callable[[Prompt, Sampling], Reply], *, name: str = "scripted"
    ) -> None:
        """Take the script.

        Args:
            replies: one reply per request in order: a text, a `Completion`, or an exception to raise. Or a pure
                function of prompt and sampling.
            name: name in run identities.
        """
        self.name = name
        self.prompts: list[Prompt] = []
        self.samplings: list[Sampling] = []
        self._function = replies if callable(replies) else None
        self._script = iter(()) if callable(replies) else iter(tuple(replies))

    @staticmethod
    def decode(token_ids: Sequence[int]) -> str:
        """Return the text of tokens that are characters."""
        return "".join(map(chr, token_ids))

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return the next reply. Tokens are blank-separated words.

        Raises:
            LLMError: the script has ended (`script_exhausted`).
        """
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        reply = self._reply(prompt, sampling)
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, Completion):
            return reply
        shown = " ".join([*(message.content for message in prompt.messages), prompt.prefix])
        return Completion(reply, prompt_tokens=len(shown.split()), completion_tokens=len(reply.split()))

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""

    def _reply(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if self._function is not None:
            return self._function(prompt, sampling)
        for reply in self._script:
            return reply
        raise LLMError(
            f"the script of {self.name!r} has no reply to request {len(self.prompts)}", cause="script_exhausted"
        )
