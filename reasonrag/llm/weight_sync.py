"""Push new weights from the trainer to the vLLM server that writes the rollouts.

The server needs vLLM's RLHF endpoints, available from version 0.22 on if it is started as

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' \
        --logprobs-mode processed_logprobs

Generation is paused during a push. Running requests finish first, with the old weights; requests that
arrive during the pause wait, or from vLLM 0.33 on are refused with 503 and sent again by `ServerLLM`,
and run with the new weights. So no completion mixes two versions, and none is cut short, but its waiting
time counts against `ServerLLM`'s `timeout_s`.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import re
from collections.abc import Iterable, Iterator
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
_GROUP_PORT = 51216  # of this machine, to which the server's workers connect
_CHUNK_BYTES = 1 << 30  # of the tensors held at once, unless a single one is larger
# Parts that PEFT, checkpointing and torch.compile add to the names of the weights that they wrap.
_WRAPPERS = re.compile(
    r"^base_model\.model\.|(?<![^.])(?:base_layer|original_module|token_adapter|modules_to_save\.[^.]+"
    r"|_checkpoint_wrapped_module|_orig_mod)\."
)


class VLLMServerSync:
    """Pushes weights into a vLLM server: pause, transfer, reset the prefix cache, resume.

    The reset is needed because text after a prefix that was cached with
    the old weights would belong to no policy. If the transfer or the reset
    fails, the server stays paused, and the next successful push resumes.

    Of several processes (`torch.distributed`), rank 0 pushes.
    The others iterate over the tensors too, as gathering a
    sharded tensor needs all of them, and raise if rank 0 fails.
    """

    def __init__(
        self, base_url: str, *, client: Any = None, pause_timeout_s: float = 600.0, backoff_s: float = 1.0
    ) -> None:
        """Describe the server; nothing is sent before the first push.

        Args:
            base_url: address of the server, with or without `/v1`; the server must not require a key.
            client: sends the tensors, with the methods of TRL's `VLLMClient`; None is one of them, which
                broadcasts from this process's current GPU to the GPUs of the server.
            pause_timeout_s: seconds for the running requests to finish.
            backoff_s: wait before the second attempt of a control
                request, with jitter; doubled for the third.

        Raises:
            ConfigError: the address cannot be used.
        """
        check_url(base_url, example="http://127.0.0.1:8000/v1")
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._client = client
        self._pause_timeout_s, self._backoff_s = pause_timeout_s, backoff_s

    def push(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push these weights, and return when the server uses them. Every process of the trainer has to call this.

        Args:
            named_tensors: every weight under its name in the model's checkpoint (`merged_parameters`), in
                the same order in every process; iterated once.

        Raises:
            ConfigError: the server was started without weight transfer, or this process has no GPU.
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

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close_communicator()

    def _push(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._client is None:
            self._client = _connected(self._root)
        try:
            # "abort" would cut completions short, "keep" would finish them with other weights.
            self._call("/pause?mode=wait", self._pause_timeout_s)
        except LLMError as error:
            # A request that got no reply may have paused it nevertheless.
            raise _failed(f"{self._root} cannot be paused: {error}; if it is, the next push resumes it") from error
        try:
            send_chunks(self._client, named_tensors, _CHUNK_BYTES)
            # Without the flag, vLLM before 0.26 kept the cache
            # silently while any request held a block of it.
            payload = self._call("/reset_prefix_cache?reset_running_requests=true")
            if payload.strip() and json.loads(payload).get("success", True) is not True:
                raise _failed("the prefix cache was not reset")
        except Exception as error:
            raise _failed(
                f"{self._root} did not take the weights: {reason(error)}. It may hold a "
                "part of them, so it stays paused; push again, or restart it"
            ) from error
        self._call("/resume")
        log.info("weights pushed", server=self._root)

    def _call(self, path: str, timeout_s: float = _TIMEOUT_S) -> bytes:
        """POST with retries after transient failures; raise LLMError, or ConfigError without that endpoint."""
        passing = (OSError, http.client.HTTPException)
        retries = stamina.retry_context(
            on=passing, attempts=_ATTEMPTS, timeout=timeout_s, wait_initial=self._backoff_s, wait_jitter=self._backoff_s
        )
        try:
            for attempt in retries:
                with attempt:
                    status, payload = _post(self._root + path, timeout_s)
                    if status >= 500:
                        raise OSError(f"HTTP {status}: {readable(payload)}")
        except passing as error:
            raise _failed(f"{path}: {reason(error)}") from error
        if status == 404:
            raise ConfigError(
                f"the server at {self._root} has no {path.partition('?')[0]}, so it cannot take new weights; "
                'start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\''
            )
        if status != 200:
            raise _failed(f"{path}: HTTP {status}: {readable(payload)}")
        return payload


def _post(url: str, timeout_s: float) -> tuple[int, bytes]:
    # Not urllib, which follows redirects and takes the proxy of the environment.
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with contextlib.closing(connect(parts.netloc, timeout=timeout_s)) as connection:
        connection.request("POST", url.removeprefix(f"{parts.scheme}://{parts.netloc}"), body=b"")
        response = connection.getresponse()
        return response.status, response.read(MOST_QUOTED)


def _failed(message: str) -> LLMError:
    return LLMError(message, cause="weight_sync")


def reason(error: Exception) -> str:
    """Return the message of an error, or its type if it has none."""
    return excerpt(str(error), 200) or type(error).__name__


def _connected(root: str) -> Any:
    """Return TRL's client in a group with the workers of the server, which use other GPUs.

    Raises:
        ConfigError: TRL or vLLM is not installed here, this machine has no CUDA device, the server has no
            weight-transfer engine or cannot be reached.
    """
    try:
        from trl.generation.vllm_client import VLLMClient

        client = VLLMClient(base_url=root, group_port=_GROUP_PORT)
        client.init_communicator(device="cuda")
    except Exception as error:
        raise ConfigError(
            f"weights cannot be sent to {root}: {reason(error)}; pip install 'trl[vllm]' here too"
        ) from error
    return client


def send_chunks(client: Any, named_tensors: Iterable[tuple[str, Tensor]], chunk_bytes: int) -> None:
    """Send one weight update with `client` (TRL's `VLLMClient`), in chunks of at most `chunk_bytes` or one tensor.

    The tensors of a chunk are computed before the workers
    start to receive it: an iterator that failed during a
    broadcast would leave the workers waiting forever.
    """
    # The server prepares its weights once for all chunks, and finishes them once.
    with client.weight_update():
        for chunk in _chunks(named_tensors, chunk_bytes):
            client.update_named_params(
                [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in chunk],
                iter(chunk),
            )


def _chunks(named_tensors: Iterable[tuple[str, Tensor]], chunk_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    chunk: list[tuple[str, Tensor]] = []
    chunk_size = 0
    for name, tensor in named_tensors:
        if chunk and chunk_size + tensor.nbytes > chunk_bytes:
            yield chunk
            chunk, chunk_size = [], 0
        chunk.append((name, tensor.contiguous()))
        chunk_size += tensor.nbytes
    if chunk:
        yield chunk


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
