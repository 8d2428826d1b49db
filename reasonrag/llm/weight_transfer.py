"""Send the trainer's weights, with adapters merged, over NCCL to the workers of a vLLM server."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.secrets import excerpt

if TYPE_CHECKING:
    from torch import Tensor

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
            ConfigError: TRL or vLLM is not installed here, there is no CUDA device, or the server has no
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
        """Send chunk by chunk. The tensors of a chunk are computed before the workers are told to receive it.

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
    """Return what an error says, else its type."""
    return excerpt(str(error), 200) or type(error).__name__
