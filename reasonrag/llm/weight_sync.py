"""Push new weights from the trainer to the vLLM server that writes the rollouts.

The server needs vLLM's RLHF endpoints, available from version 0.22 on if it is started as

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' \
        --logprobs-mode processed_logprobs

Generation is paused during a push. Running requests finish first, with the old weights; requests that arrive during the
pause wait, and run with the new weights. So no completion mixes two versions, and none is cut short, but its waiting
time counts against `ServerLLM`'s `timeout_s`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from reasonrag.core.calls import Retries, Unavailable, check_url
from reasonrag.core.errors import ConfigError, LLMError, ReasonRAGError
from reasonrag.core.text import MOST_QUOTED, excerpt
from reasonrag.llm.openai_wire import readable

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger()

_TIMEOUT_S = 60.0
_MAX_RETRIES = 2


class VLLMServerSync:
    """Pushes weights into a vLLM server: pause, transfer, reset the prefix cache, resume.

    The reset is needed because text after a prefix that was cached with the old weights would belong to no policy. If
    the transfer or the reset fails, the server stays paused, `version` is None, and the next successful push resumes.

    Of several processes (`torch.distributed`), rank 0 pushes. The others iterate over the tensors too, as gathering a
    sharded tensor needs all of them, and raise if rank 0 fails.

    Attributes:
        version: number of complete pushes; None if the server's weights are unknown.
    """

    def __init__(
        self,
        base_url: str,
        *,
        transport: NCCLTransport | None = None,
        pause_timeout_s: float = 600.0,
        backoff_s: float = 1.0,
    ) -> None:
        """Describe the server; nothing is sent before the first push.

        Args:
            base_url: address of the server, with or without `/v1`; the server must not require a key.
            transport: sends the tensors; None uses NCCL to the server's GPUs.
            pause_timeout_s: seconds for the running requests to finish.
            backoff_s: wait before the second attempt of a control request, with jitter; doubled for the third.

        Raises:
            ConfigError: the address cannot be used.
        """
        check_url(base_url, example="http://127.0.0.1:8000/v1")
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._transport = transport or NCCLTransport(self._root)
        self._pause_timeout_s = pause_timeout_s
        self._backoff_s = backoff_s
        self._connected = False
        self._pushed = 0
        self.version: int | None = None

    def push(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Push these weights, and return when the server uses them. Every process of the trainer has to call this.

        Args:
            named_tensors: every weight under its name in the model's checkpoint (`merged_parameters`), in the same
                order in every process; iterated once.

        Raises:
            ConfigError: the server was started without weight transfer, or this process has no GPU.
            LLMError: with cause `weight_sync`; the message gives the state of the server.
        """
        problem: ReasonRAGError | None = None
        try:
            if _rank() == 0:
                self._push(named_tensors)
            else:
                for _ in named_tensors:
                    pass
        except ReasonRAGError as error:
            problem = error
        finally:
            # An unfinished generator keeps its tensors alive for as long as the traceback exists.
            if hasattr(named_tensors, "close"):
                named_tensors.close()
        elsewhere = _from_rank_0(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        if elsewhere is not None:
            self.version = None
            raise LLMError(elsewhere, cause="weight_sync")
        self._pushed += 1
        self.version = self._pushed

    def close(self) -> None:
        if self._connected:
            self._connected = False
            self._transport.close()

    def _push(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        began = time.monotonic()
        if not self._connected:
            self._transport.connect()
            self._connected = True
        self._pause()
        self.version = None
        try:
            self._transport.send(named_tensors)
            self._reset_prefix_cache()
        except Exception as error:
            raise _failed(
                f"{self._root} did not take the weights of push {self._pushed + 1}: {reason(error)}. It may hold a "
                "part of them, so it stays paused; push again, or restart it"
            ) from error
        try:
            self._call("/resume")
        except LLMError as error:
            raise _failed(f"{self._root} has taken the weights and stays paused: {error}") from error
        log.info("weights pushed", server=self._root, push=self._pushed + 1, seconds=round(time.monotonic() - began, 2))

    def _pause(self) -> None:
        """Pause generation after the running requests; if that fails, resume the server with its old weights."""
        try:
            # "abort" would cut completions short, "keep" would finish them with other weights.
            self._call("/pause?mode=wait", self._pause_timeout_s)
        except LLMError as error:
            state = "it is paused, with unknown weights"
            if self.version is not None:  # it may have paused nevertheless
                with contextlib.suppress(LLMError):
                    self._call("/resume")
                state = f"it still has the weights of push {self.version}"
            raise _failed(f"{self._root} cannot be paused: {error}; {state}") from error

    def _reset_prefix_cache(self) -> None:
        # Without the flag, vLLM before 0.26 kept the cache silently while any request held a block of it.
        raw = self._call("/reset_prefix_cache?reset_running_requests=true")
        with contextlib.suppress(ValueError):  # an empty body reports no failure
            reply = json.loads(raw)
            if isinstance(reply, dict) and reply.get("success", True) is not True:
                raise _failed("the prefix cache was not reset")

    def _call(self, path: str, timeout_s: float = _TIMEOUT_S) -> bytes:
        """POST with retries after transient failures: every control request may be repeated.

        Raises:
            ConfigError: the server does not have the endpoint.
            LLMError: the request failed.
        """
        retries = Retries(deadline_s=timeout_s, max_retries=_MAX_RETRIES, first_wait_s=self._backoff_s)
        try:
            return retries.run(partial(self._send, path, timeout_s))
        except Unavailable as failure:
            raise _failed(str(failure)) from failure

    def _send(self, path: str, timeout_s: float) -> bytes:
        try:
            status, raw = _post(self._root + path, timeout_s)
        except TimeoutError as error:
            raise _failed(f"{path}: no answer in {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{path}: {reason(error)}") from error
        if status == 200:
            return raw
        if status == 404:
            raise ConfigError(
                f"the server at {self._root} has no {path.partition('?')[0]}, so it cannot take new weights; "
                'start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "nccl"}\''
            )
        message = f"{path}: HTTP {status}: {readable(raw)}"
        raise Unavailable(message) if status >= 500 else _failed(message)


def _post(url: str, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    with contextlib.closing(connect(parts.netloc, timeout=timeout_s)) as connection:
        connection.request("POST", url.removeprefix(f"{parts.scheme}://{parts.netloc}"), body=b"")
        response = connection.getresponse()
        return response.status, response.read(MOST_QUOTED)


def _failed(message: str) -> LLMError:
    return LLMError(message, cause="weight_sync")


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0


def _from_rank_0(problem: str | None) -> str | None:
    """Return rank 0's problem in every process. All processes wait for each other here."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return problem
    problems = [problem]
    dist.broadcast_object_list(problems, src=0)
    return problems[0]


_CHUNK_BYTES = 1 << 30  # of the tensors held at once, unless a single one is larger
# Parts that PEFT, checkpointing and torch.compile add to the names of the weights that they wrap.
_WRAPPERS = re.compile(
    r"^base_model\.model\.|(?<![^.])(?:base_layer|original_module|token_adapter|modules_to_save\.[^.]+"
    r"|_checkpoint_wrapped_module|_orig_mod)\."
)


@dataclass
class NCCLTransport:
    """Broadcasts tensors from this process's GPU to the GPUs of a vLLM server, with TRL's client.

    Attributes:
        root: the server's address without `/v1`.
        group_port: a free port of this machine, to which the workers connect.
        device: a CUDA device that the server does not use; `cuda` is the current one.
    """

    root: str
    group_port: int = 51216
    device: int | str = "cuda"
    _client: Any = field(default=None, init=False)

    def connect(self) -> None:
        """Form a group with the server's workers.

        Raises:
            ConfigError: TRL or vLLM is not installed here, this machine has no CUDA device, or the server has no
                weight-transfer engine.
            LLMError: with cause `weight_sync`: the server cannot be reached, or the group cannot be formed.
        """
        try:
            from trl.generation.vllm_client import VLLMClient

            self._client = VLLMClient(base_url=self.root, group_port=self.group_port)
            self._client.init_communicator(device=self.device)
        except ImportError as error:
            raise ConfigError(
                f"weights cannot be sent from here ({reason(error)}); install reasonrag[train,vllm] beside the trainer"
            ) from error
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(f"weights cannot be sent to {self.root}: {reason(error)}") from error
        except Exception as error:
            raise LLMError(f"{self.root}: {reason(error)}", cause="weight_sync") from error

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send chunk by chunk. The tensors of a chunk are computed before the workers start to receive it.

        An iterator that failed during a broadcast would leave the workers waiting forever. If this raises, the server
        may hold a part of the weights.
        """
        send_chunks(self._client, named_tensors, _CHUNK_BYTES)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close_communicator()


def send_chunks(client: Any, named_tensors: Iterable[tuple[str, Tensor]], chunk_bytes: int) -> None:
    """Send one weight update with `client` (TRL's `VLLMClient`), in chunks of at most `chunk_bytes` or one tensor."""
    with client.weight_update():
        for chunk in _chunks(named_tensors, chunk_bytes):
            client.update_named_params(
                [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in chunk],
                iter(chunk),
            )


def _chunks(named_tensors: Iterable[tuple[str, Tensor]], chunk_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        if chunk and size + tensor.nbytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor.contiguous()))
        size += tensor.nbytes
    if chunk:
        yield chunk


def merged_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a model, with adapters merged, under its name in the base model's checkpoint.

    The model itself does not change by a bit: each adapted layer is merged only while it is copied, and then restored
    from a copy; subtracting the adapter in bfloat16 would degrade the base weights with every push. Tied weights are
    yielded once. Weights sharded over processes (FSDP2) are gathered, so every process has to iterate.

    Args:
        model: a model of transformers, bare or wrapped by PEFT, such as `accelerator.unwrap_model(trainer.model)`.

    Raises:
        ConfigError: the weights are quantised or sharded by FSDP1 or ZeRO-3, or the adapter cannot be merged (prompt
            learning).
    """
    layers, hidden = _adapted(model)
    adapters = {id(p) for layer in layers for p in layer.parameters()}
    owners: dict[int, list[Any]] = defaultdict(list)
    for layer in layers:
        for parameter in layer.get_base_layer().parameters():
            adapters.discard(id(parameter))
            if not layer.merged:
                owners[id(parameter)].append(layer)
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters or name.startswith(hidden):
            continue
        public = _WRAPPERS.sub("", name)
        _check_whole(public, parameter)
        tensor = _merged(parameter, owners[id(parameter)]) if owners[id(parameter)] else parameter.detach()
        yield public, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _adapted(model: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Return the layers with an adapter, and the name prefixes of copies that are not in use."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper
    except ImportError:
        return [], ()
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


def _check_whole(name: str, parameter: Any) -> None:
    if "_flat_param" in name or hasattr(parameter, "ds_id"):
        raise ConfigError(
            f"the weight {name} is sharded by FSDP1 or DeepSpeed ZeRO-3 and cannot be gathered by itself; "
            "train with FSDP2 (fsdp_version: 2), or with ZeRO-2"
        )
    if not parameter.is_floating_point():
        raise ConfigError(
            f"the weight {name} is quantised ({parameter.dtype}) and a server cannot take it; "
            "load the policy in bfloat16, or write the rollouts with the trainer's own model"
        )


def _merged(parameter: Any, layers: Sequence[Any]) -> Any:
    """Return a copy of a base weight with the active adapters of its layers merged; tied layers share the weight."""
    import torch

    with torch.no_grad():
        own = [p for layer in layers for p in layer.get_base_layer().parameters()]
        saved = [p.detach().clone() for p in own]
        try:
            for layer in layers:
                layer.merge()
            return parameter.detach().clone()
        finally:
            for layer in layers:
                layer.unmerge()
            for p, before in zip(own, saved, strict=True):
                p.data.copy_(before)


def reason(error: Exception) -> str:
    """Return the message of an error, or its type if it has none."""
    return excerpt(str(error), 200) or type(error).__name__
