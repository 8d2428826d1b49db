from __future__ import annotations

from types import SimpleNamespace

import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.online_rl.train import _reject_sharded_weights


@pytest.mark.parametrize(("fsdp", "deepspeed"), [("full_shard", None), ([], "zero3.json")])
def test_sharded_weights_make_no_rollouts_in_this_process(fsdp, deepspeed):
    with pytest.raises(ConfigError, match="--rollout-url"):
        _reject_sharded_weights(SimpleNamespace(fsdp=fsdp, deepspeed=deepspeed), "use --rollout-url")


def test_whole_weights_do():
    _reject_sharded_weights(SimpleNamespace(fsdp=[], deepspeed=None), "")
