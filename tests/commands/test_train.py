"""How the commands that train end: `dpo`, `sft`, `prm` and `rl train` share `run_training`."""

from __future__ import annotations

import signal

import pytest

from reasonrag.commands.train import run_training
from reasonrag.core.errors import Interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_a_signal_stopped_ends_with_its_code_and_says_how_to_go_on(number, capsys, monkeypatch):
    def train(config, out, log):
        raise Interrupted("stopped after step 4 of 6", number=number)

    monkeypatch.setattr("sys.argv", ["reasonrag", "rl", "train", "--out", "policies/rl"])
    with pytest.raises(SystemExit) as ended:
        run_training(train, None, None)
    assert ended.value.code == 128 + number
    said = capsys.readouterr().err
    assert "stopped after step 4 of 6. Resume with:" in said and "reasonrag rl train --out policies/rl" in said
