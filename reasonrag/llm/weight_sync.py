"""Hand new weights from the trainer to the vLLM server that writes the rollouts, by files that both see.

The server needs vLLM's development routes, of version 0.22 or later:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs

Whoever reaches these routes can do anything with the server: it listens on this machine alone.

Generation is paused during a push. Running requests finish first, with the old weights; requests that
arrive during the pause wait, or from vLLM 0.33 on are refused with 503 and sent again by `ServerLLM`,
and run with the new weights. So no completion mixes two versions, and none is cut short, but its waiting
time counts against `ServerLLM`'s `timeout_s`.

A server on the trainer's own card (`--enable-sleep-mode`) sleeps while the policy trains: it gives all of its
memory back, and takes the weights of the next push as it wakes.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import stamina
import structlog

from reasonrag.core.calls import check_url
from reasonrag.core.errors import ConfigError, LLMError, ReasonRAGError
from reasonrag.core.text import MOST_QUOTED, excerpt
from reasonrag.llm.openai_wire import readable

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger()

_TIMEOUT_S = 60.0
_ATTEMPTS = 3  # of a control request: each may be repeated
_FILE_BYTES = 1 << 30  # of a file, whose tensors are held at once, unless a single one is larger
# Parts that PEFT, checkpointing and torch.compile add to the names of the weights that they wrap.
_WRAPPERS = re.compile(
    r"^base_model\.model\.|(?<![^.])(?:base_layer|original_module|token_adapter|modules_to_save\.[^.]+"
    r"|_checkpoint_wrapped_module|_orig_mod)\."
)


class VLLMServerSync:
    """Pushes weights into a vLLM server: write, pause, load, reset the prefix cache, resume.

    The reset is needed because text after a prefix that was cached with
    the old weights would belong to no policy. If the loading or the reset
    fails, the server stays paused, and the next successful push resumes.

    Of several processes (`torch.distributed`), rank 0 pushes.
    The others iterate over the tensors too, as gathering a
    sharded tensor needs all of them, and raise if rank 0 fails.
    """

    def __init__(
        self,
        base_url: str,
        folder: Path,
        *,
        sleeps: bool = False,
        pause_timeout_s: float = 600.0,
        backoff_s: float = 1.0,
    ) -> None:
        """Describe the server; nothing is sent before the first push.

        Args:
            base_url: address of the server, with or without `/v1`; the server must not require a key.
            folder: gets the weights, and nothing else; the server reads it by this path, on this machine or on a disk
                that both see.
            sleeps: whether the server sleeps between `sleep` and the next push.
            pause_timeout_s: seconds for the running requests to finish, and for a load.
            backoff_s: wait before the second attempt of a control
                request, with jitter; doubled for the third.

        Raises:
            ConfigError: the address cannot be used.
        """
        check_url(base_url, example="http://127.0.0.1:8000/v1")
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._folder = folder.resolve()
        self.sleeps = sleeps
        self._pause_timeout_s, self._backoff_s = pause_timeout_s, backoff_s

    def push(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push these weights, and return when the server uses them. Every process of the trainer has to call this.

        Args:
            named_tensors: every weight under its name in the model's checkpoint (`merged_parameters`), in
                the same order in every process; iterated once.

        Raises:
            ConfigError: the server was started without its development routes.
            LLMError: with cause `weight_sync`; the message gives the state of the server.
        """
        import torch.distributed as dist

        is_group = dist.is_available() and dist.is_initialized()
        problem: ReasonRAGError | None = None
        try:
            if is_group and dist.get_rank() != 0:
                for _ in named_tensors:
                    pass
            else:
                self._push(named_tensors)
        except ReasonRAGError as error:
            problem = error
        finally:
            # An unfinished generator keeps its tensors alive for as long as the traceback exists.
            if hasattr(named_tensors, "close"):
                named_tensors.close()
        # A process that raised alone would leave the others waiting at the next collective operation.
        messages = [None if problem is None else str(problem)]
        if is_group:  # all processes wait for rank 0 here
            dist.broadcast_object_list(messages, src=0)
        if problem is not None:
            raise problem
        if messages[0] is not None:
            raise _failed(messages[0])

    def sleep(self) -> None:
        """Let the server give its memory back until the next push; its requests end first. Rank 0 asks."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            self._call("/sleep?level=2&mode=wait", self._pause_timeout_s)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _push(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        try:
            write_weights(self._folder, named_tensors, _FILE_BYTES)
        except (OSError, MemoryError) as error:
            raise _failed(f"the weights cannot be written into {self._folder}: {reason(error)}") from error
        try:
            # "abort" would cut completions short, "keep" would finish them with other weights.
            self._call("/pause?mode=wait", self._pause_timeout_s)
        except LLMError as error:
            # A request that got no reply may have paused it nevertheless.
            raise _failed(f"{self._root} cannot be paused: {error}; if it is, the next push resumes it") from error
        try:
            if self.sleeps:
                self._call("/wake_up?tags=weights", self._pause_timeout_s)
            load = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
            self._call("/collective_rpc", self._pause_timeout_s, json.dumps(load).encode())
            if self.sleeps:
                self._call("/wake_up?tags=kv_cache", self._pause_timeout_s)
            # Without the flag, vLLM before 0.26 kept the cache
            # silently while any request held a block of it.
            payload = self._call("/reset_prefix_cache?reset_running_requests=true")
            if payload.strip() and json.loads(payload).get("success", True) is not True:
                raise _failed("the prefix cache was not reset")
        except Exception as error:
            raise _failed(
                f"{self._root} did not take the weights: {reason(error)}. It reads {self._folder}, and may hold "
                "a part of them, so it stays paused; push again, or restart it"
            ) from error
        self._call("/resume")
        log.info("weights pushed", server=self._root)

    def _call(self, path: str, timeout_s: float = _TIMEOUT_S, body: bytes = b"") -> bytes:
        """POST with retries after transient failures; raise LLMError, or ConfigError without that endpoint."""
        passing = (OSError, http.client.HTTPException)
        retries = stamina.retry_context(
            on=passing, attempts=_ATTEMPTS, timeout=timeout_s, wait_initial=self._backoff_s, wait_jitter=self._backoff_s
        )
        try:
            for attempt in retries:
                with attempt:
                    status, payload = _post(self._root + path, timeout_s, body)
                    if status >= 500:
                        raise OSError(f"HTTP {status}: {readable(payload)}")
        except passing as error:
            raise _failed(f"{path}: {reason(error)}") from error
        if status == 404:
            raise ConfigError(
                f"the server at {self._root} has no {path.partition('?')[0]}, so it cannot take new weights; "
                "start vLLM with VLLM_SERVER_DEV_MODE=1"
            )
        if status != 200:
            raise _failed(f"{path}: HTTP {status}: {readable(payload)}")
        return payload


def _post(url: str, timeout_s: float, body: bytes) -> tuple[int, bytes]:
    # Not urllib, which follows redirects and takes the proxy of the environment.
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with contextlib.closing(connect(parts.netloc, timeout=timeout_s)) as connection:
        connection.request("POST", url.removeprefix(f"{parts.scheme}://{parts.netloc}"), body=body)
        response = connection.getresponse()
        return response.status, response.read(MOST_QUOTED)


def _failed(message: str) -> LLMError:
    return LLMError(message, cause="weight_sync")


def reason(error: Exception) -> str:
    """Return the message of an error, or its type if it has none."""
    return excerpt(str(error), 200) or type(error).__name__


def write_weights(folder: Path, named_tensors: Iterable[tuple[str, Tensor]], file_bytes: int) -> None:
    """Write the tensors as safetensors of at most `file_bytes` or one tensor into a folder that held others."""
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    held: dict[str, Tensor] = {}
    count = size = 0
    for name, tensor in named_tensors:
        if held and size + tensor.nbytes > file_bytes:
            save_file(held, folder / f"model-{count:05}.safetensors")
            held, count, size = {}, count + 1, 0
        held[name] = tensor.contiguous().cpu()
        size += tensor.nbytes
    save_file(held, folder / f"model-{count:05}.safetensors")


def merged_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a model, with adapters merged, under its name in the base model's checkpoint.

    The model itself does not change by a bit: adapters are merged into copies of
    their layers, one after another, as subtracting them in bfloat16 would degrade
    the base weights with every push. Tied weights are yielded once. Weights
    sharded over processes (FSDP2) are gathered, so every process has to iterate.

    Args:
        model: a model of transformers, bare or wrapped by PEFT, such as
            `accelerator.unwrap_model(trainer.model)`.

    Raises:
        ConfigError: the weights are quantised or sharded by FSDP1 or
            ZeRO-3, or the adapter cannot be merged (prompt learning).
    """
    layers, hidden = _adapted(model)
    adapters = {id(parameter) for layer in layers for parameter in layer.parameters()}
    owners: dict[int, list[Any]] = {}  # of each base weight; tied layers share one
    for layer in layers:
        for parameter in layer.get_base_layer().parameters():
            adapters.discard(id(parameter))
            if not layer.merged:
                owners.setdefault(id(parameter), []).append(layer)
    for name, parameter in model.named_parameters():  # tied weights come once
        if id(parameter) in adapters or name.startswith(hidden):
            continue
        if "_flat_param" in name or hasattr(parameter, "ds_id") or not parameter.is_floating_point():
            raise ConfigError(
                f"the weight {name} is quantised, or sharded by FSDP1 or DeepSpeed ZeRO-3, and a server cannot take "
                "it; train in bfloat16, with FSDP2 (fsdp_version: 2) or ZeRO-2"
            )
        tensor = _merged(parameter, owners[id(parameter)]) if id(parameter) in owners else parameter.detach()
        yield _WRAPPERS.sub("", name), tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _adapted(model: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Return the layers with an adapter, and the name prefixes of copies that are not in use."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ConfigError("an adapter that learns prompts cannot be merged into weights; train LoRA, or all weights")
    layers, hidden = [], []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            layers.append(module)
        elif isinstance(module, ModulesToSaveWrapper):
            hidden.append(f"{name}.original_module.")
            unused = set(module.modules_to_save) - set(module.active_adapters)
            hidden += [f"{name}.modules_to_save.{adapter}." for adapter in sorted(unused)]
    return layers, tuple(hidden)


def _merged(parameter: Any, layers: list[Any]) -> Any:
    """Return a copy of a base weight with the adapters of its layers merged."""
    copies: dict[int, Any] = {}  # by the id of what was copied
    for layer in copy.deepcopy(layers, copies):
        layer.merge()
    return copies[id(parameter)].detach()
