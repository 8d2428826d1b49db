"""The language model head on scored tokens alone, on a CPU too: with a large vocabulary it costs more than the model.

Imports torch, so it is itself imported only once a training run starts.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn

_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_IGNORED_LABEL = -100


def score_labels_only(model: nn.Module) -> None:
    """Let the fused head that TRL gave `model` compute log-probabilities only where the next token has a label.

    TRL 1.16 does so with Triton, and scores every position elsewhere. The backbone reads all positions. Its hidden
    states are cut down to those that are scored on their way to TRL's head, so bias, softcapping, scale, and parameters
    that are sharded over processes stay TRL's business. Other devices than a CPU, and calls without a fused head, are
    left as they are.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    fused = base.forward

    @functools.wraps(fused)  # keeps the signature, which `generate` reads
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not kwargs.get("fused_lm_head") or labels is None or labels.device.type != "cpu":
            return fused(*args, **kwargs)
        next_tokens = labels[:, 1:]
        scored = next_tokens != _IGNORED_LABEL

        def keep_scored(module: nn.Module, inputs: Any, outputs: Any) -> None:
            outputs.last_hidden_state = outputs.last_hidden_state[:, :-1][scored][None]

        hook = self.base_model.register_forward_hook(keep_scored)
        try:
            outputs = fused(*args, **(kwargs | {"labels": None, "shift_labels": next_tokens[scored][None]}))
        finally:
            hook.remove()
        for name in _PER_TOKEN:
            if (values := getattr(outputs, name)) is not None:
                setattr(outputs, name, values.new_zeros(scored.shape).masked_scatter(scored, values))
        outputs.label_mask = scored
        return outputs

    base.forward = types.MethodType(forward, base)
