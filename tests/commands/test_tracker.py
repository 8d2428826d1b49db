"""`--report-to` of build-tree and eval: the numbers are read back from the file of a real tracker."""

from __future__ import annotations

import shutil
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from reasonrag.storage.files import require_json
from tests.e2e import product

DEMO = ("--preset", "demo", "--policy", "extractive", "--limit", "2", "--report-to", "tensorboard")


def tracked(out):
    """Return the scalars of the run's only file of events: records of length, checksum, event, checksum."""
    (file,) = out.glob("tracked/**/events*")
    content, scalars = file.read_bytes(), {}
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        for value in Event.FromString(content[12 : 12 + length]).summary.value:
            scalars[value.tag] = value.simple_value
        content = content[16 + length :]
    return scalars


@pytest.mark.parametrize("command", ["build-tree", "eval"])
def test_the_numbers_at_the_end_are_sent_to_a_tracker(command, tmp_path):
    out = tmp_path / "out"
    size = ("--iterations", "2") if command == "build-tree" else ()
    done = product.run(command, *DEMO, *size, "--out", str(out))
    assert done.returncode == 0, done.stderr
    sent = tracked(out)
    if command == "build-tree":
        summary = require_json(out / "run.json", "")
        assert sent["pairs/total"] == summary["pairs"]["total"]
        assert sent["trees/nodes"] == summary["trees"]["nodes"] > 0
    else:
        ((setting, found),) = require_json(out / "metrics.json", "")["policies"]["extractive"].items()
        assert sent[f"extractive/{setting}/f1/mean"] == pytest.approx(found["f1"]["mean"])


def test_a_tracker_that_fails_costs_no_result(tmp_path):
    command = ("build-tree", *DEMO, "--iterations", "2", "--out", tmp_path / "out")
    assert product.run(*command).returncode == 0
    shutil.rmtree(tmp_path / "out/tracked")
    (tmp_path / "out/tracked").write_text("no folder")
    (tmp_path / "out/.finished").unlink()
    done = product.run(*command)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "tensorboard did not take the numbers: " in done.stderr


@pytest.mark.parametrize(
    ("name", "problem"), [("excel", "is no tracker; those are aim, clearml"), ("aim", "is not installed; add it with")]
)
def test_a_tracker_that_cannot_be_used_is_refused_before_anything_is_made(name, problem, tmp_path):
    done = product.run("build-tree", *DEMO[:-2], "--report-to", name, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert problem in done.stderr
    assert not (tmp_path / "out").exists()
