"""Run folders that two processes want, or that are harmed: nothing is lost or believed in silence."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.publish.verify import verify
from reasonrag.storage.folder import RunFolder, read_run
from tests import warmed
from tests.e2e import product
from tests.faults.commands import Command, Commands
from tests.faults.matrix import Figure
from tests.llm.tiny import save_tiny_model
from tests.mcts.test_search import random_policy
from tests.pipeline.test_build import QUESTIONS, run
from tests.training.toys import dpo_settings, train, write_pairs

IN_FLIGHT, STORED = 4, 40


def begin(folder: Path) -> Any:
    return RunFolder(folder, load_config(), {"questions": "q"}).open()


@pytest.mark.fault(
    "10",
    "the process that builds is stopped in the middle of a commit",
    "a second one is refused at once, or goes to another folder",
    before="waited a minute for SQLite, then 'database is locked'",
)
def test_a_second_process_waits_for_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Figure) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/d")
    with begin(folder) as first, contextlib.closing(sqlite3.connect(first.journal.path)) as commit:
        first.bind()
        commit.execute("BEGIN IMMEDIATE")
        began = RunFolder.begun_with(folder)["search"]["iterations"]
        other = RunFolder.unnamed("d", load_config(overrides={"seed": 5}), {"questions": "q"})
        assert RunFolder.unnamed("d", load_config(), {"questions": "q"}) == folder
        with pytest.raises(RunError, match=rf"in use by another process \(pid {os.getpid()}") as refused, begin(folder):
            pass
    figure(f"{refused.value}; another configuration: {other}".replace(f"pid {os.getpid()}", "pid N"))
    assert began == load_config().search.iterations and other == Path("runs/d-2")


@pytest.mark.fault(
    "8",
    "`rm -rf RUN`, `rm RUN/journal*` or another journal in its place while a build is at work",
    "ends in one line; nothing more is paid for than was in flight",
    before="paid on into a file without a name, and ended with exit code 0",
)
@pytest.mark.parametrize("harm", ["rm -rf RUN", "rm journal*", "mv copy journal"])
def test_a_journal_that_goes_away(harm: str, tmp_path: Path, figure: Figure) -> None:
    folder, paid = tmp_path / "run", 0

    def policy(prompt: Any, sampling: Any) -> str:
        nonlocal paid
        if paid == STORED:
            shutil.copy(folder / "journal.sqlite", tmp_path / "copy")
            if harm == "rm -rf RUN":
                shutil.rmtree(folder)
            elif harm == "rm journal*":
                for file in folder.glob("journal*"):
                    file.unlink()
            else:
                (tmp_path / "copy").rename(folder / "journal.sqlite")
        paid += 1
        return random_policy(prompt, sampling)

    with pytest.raises(RunError, match="deleted or replaced while this process wrote to it") as ended:
        run(folder, policy, overrides={"policy.concurrency": IN_FLIGHT}, questions=QUESTIONS)
    said = str(ended.value).partition(" was ")[2].partition(";")[0]
    figure(f"{harm}: {said}, {paid - STORED} calls after it, {IN_FLIGHT} in flight")
    assert paid - STORED <= IN_FLIGHT and not list(folder.glob("pairs/*"))


@pytest.mark.fault(
    "flips",
    "config.yaml of a finished run is cut after a section, replaced, or has a flipped bit",
    "`verify` says so; `pairs`, `publish` and training refuse it",
    before="exit code 0; the settings that were cut were read as the defaults",
)
def test_a_configuration_that_is_not_as_it_was_written(tmp_path: Path, figure: Figure) -> None:
    folder = tmp_path / "r"
    run(folder, overrides={"pairs.min_margin": 0.2}, questions=QUESTIONS[:2])
    file = folder / "config.yaml"
    written = file.read_bytes()
    sections = [place for place in range(1, len(written)) if re.match(rb"\n\w", written[place - 1 :])]
    flipped = written.replace(b"0.2", b"0.3")
    harms = [*(written[:place] for place in sections), flipped, b"", b"\0" * 4096, b"garbage"]
    for harmed in harms:
        file.write_bytes(harmed)
        with pytest.raises((RunError, ConfigError), match=r"config\.yaml"):
            read_run(folder)
    run(tmp_path / "other", overrides={"search.iterations": 2}, questions=QUESTIONS[:2])
    harms.append((tmp_path / "other/config.yaml").read_bytes())
    file.write_bytes(harms[-1])
    with pytest.raises(RunError, match=r"config\.yaml or run\.json is that of another run \(search\.iterations: "):
        read_run(folder)
    (problem,) = verify(folder).problems
    figure(f"{len(harms)} of {len(harms)} refused, {len(sections)} of them cut between sections")
    assert "config.yaml" in problem and flipped != written and len(sections) > 5
    file.write_bytes(written.partition(b"\n")[2])  # without its checksum
    assert not verify(folder).problems and read_run(folder)[0].pairs.min_margin == 0.2


@pytest.mark.fault(
    "flips",
    "config.yaml or training.json of a training run is cut, changed, or of another run; or a loss is not a number",
    "`verify` says so; the same command writes config.yaml again",
    before="`verify` read neither: ok, exit code 0",
)
def test_a_training_run_whose_settings_or_metrics_are_not_as_they_were_written(tmp_path: Path, figure: Figure) -> None:
    out, model = tmp_path / "dpo", save_tiny_model(tmp_path / "model")
    settings = dpo_settings(write_pairs(tmp_path / "pairs"), model, max_steps=2)
    train(settings, out)
    assert verify(out).problems == []
    config, training, other = (out / name for name in ("config.yaml", "training.json", "checkpoints/identity.json"))
    settings_written, summary, described = config.read_bytes(), training.read_text(), other.read_text()
    lines = settings_written.splitlines(keepends=True)
    loss = re.search(r'"loss": ([\d.e-]+)', summary)
    assert loss
    harms: list[tuple[Path, bytes | str]] = [
        *((config, b"".join(lines[:number])) for number in range(1, len(lines), 9)),
        *((config, settings_written.replace(b"beta: 0.3", beta)) for beta in (b"beta: 0.5", b"beta: .3")),
        *((config, harm) for harm in (b"", b"\0" * 4096, b"garbage")),
        *((training, summary.replace(loss[0], f'"loss": {value}')) for value in ("NaN", "Infinity", "1e999", "null")),
        (training, summary.replace('"beta": 0.3', '"beta": 0.5')),
        (training, summary[: len(summary) // 2]),
        (other, described.replace('"beta": 0.3', '"beta": 0.5')),
    ]
    said = 0
    for file, harm in harms:
        written = file.read_bytes()
        file.write_bytes(harm if isinstance(harm, bytes) else harm.encode())
        assert file.read_bytes() != written
        said += any(file.name in problem or "config.yaml" in problem for problem in verify(out).problems)
        file.write_bytes(written)
    config.write_bytes(b"")
    train(settings, out)
    figure(f"{said} of {len(harms)} noticed; config.yaml written again: {config.read_bytes() == settings_written}")
    assert said == len(harms) and config.read_bytes() == settings_written and verify(out).problems == []


REFUSED = [
    "build-tree",
    "publish",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("eval", "dpo train", "rl train")),
]


def begun(command: Command) -> tuple[Path, warmed.Child]:
    """Return a folder, and the process that is in the middle of its work there, and stopped: it keeps what it holds."""
    for _ in range(10):
        out = command.new()
        child = command.start(out)
        product.wait_until(lambda child=child: child.poll() is not None or holds_a_lock(child.pid))
        child.stop()
        if child.poll() is None and holds_a_lock(child.pid):
            return out, child
        child.kill()  # it was about to end
    raise AssertionError("it ended each time")


def holds_a_lock(pid: int | None) -> bool:
    fields = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return ["FLOCK", str(pid)] in [[kind, owner] for _, kind, _, _, owner, *_ in fields]


@pytest.mark.slow
@pytest.mark.fault("10", "two processes on one folder", "the second is refused with the pid; a dead one holds nothing")
@pytest.mark.parametrize("name", REFUSED)
def test_a_second_process_is_refused_until_the_first_one_is_dead(name: str, commands: Commands, figure: Figure) -> None:
    command = commands[name]
    out, first = begun(command)
    second = command.start(out)
    code, said = second.wait(60), second.said()
    first.kill()
    first.wait(60)
    refused = code == 2 and f"in use by another process (pid {first.pid} on " in said and "Traceback" not in said
    figure(f"{name}: {'refused in one line, which names the pid' if refused else f'exit code {code}'}")
    assert refused, said
    assert not command.differing(out)
