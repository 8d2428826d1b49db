"""`reasonrag verify`: what is wrong with a run, a table, an index, a model or a training run, in one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from reasonrag.commands import inspect
from reasonrag.core.errors import RunError
from reasonrag.publish.verify import verify
from reasonrag.storage.tables import pair_schema, tree_schema
from tests.faults.matrix import Figure
from tests.publish.toys import edit_json, recount, write_policy, write_run

PAIRS, TREES = "pairs/train-00000-of-00001.parquet", "trees/nodes-00000-of-00001.parquet"
NAN = float("nan")


def set_in(table: str, row: int, **values: object) -> Callable[[Path], None]:
    """Change a row of a table behind the back of its writer."""

    def edit(run: Path) -> None:
        rows = pq.read_table(run / table).to_pylist()
        rows[row] |= values
        schema = tree_schema() if table == TREES else pair_schema()
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), run / table, write_page_checksum=True)

    return edit


def reverse_a_pair(run: Path) -> None:
    rows = pq.read_table(run / PAIRS).to_pylist()
    other = rows[0] | {"chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"], "pair_id": "other"}
    pq.write_table(pa.Table.from_pylist([*rows, other], schema=pair_schema()), run / PAIRS)
    recount(run)


WRONG: dict[str, Callable[[Path], object]] = {
    "node 3: its parent, 5, does not come before it": set_in(TREES, 3, parent_id=5),
    "node 0: its spre is 0.9, and by the answers below it": set_in(TREES, 0, spre=0.9),
    "node 1: its value, 0.5, is of 9 of 6 visits": set_in(TREES, 1, valued=9),
    "node 6: its em, 7.0, is not in [0, 1]": set_in(TREES, 6, em=7.0),
    "logprobs[] holds NaN or an infinity": set_in(TREES, 2, logprobs=[0.0, NAN]),
    "margin is not chosen_reward less rejected_reward in 1 row": set_in(PAIRS, 0, margin=0.9),
    "chosen and rejected are equal in 1 row": set_in(
        PAIRS, 0, rejected=[{"role": "assistant", "content": ""}], chosen=[{"role": "assistant", "content": ""}]
    ),
    "1 questions are in both splits, the first is 'held out' of 'demo'": set_in(PAIRS, 0, question_id="held out"),
    "pairs contradict each other": reverse_a_pair,
    "holds pairs of another run, not of the run.json beside it": set_in(PAIRS, 0, config_hash="of another run"),
    "1 texts are in both splits": set_in(PAIRS, 0, question_id="q1"),
    "trees.nodes is 99": lambda run: edit_json(run / "run.json", lambda held: held["trees"].update(nodes=99)),
    "run.json is missing or damaged": lambda run: ((run / "run.json").unlink(), (run / "journal.sqlite").touch()),
    "1 of 2 files of train-*.parquet are there": lambda run: (run / PAIRS).rename(
        run / "pairs/train-00000-of-00002.parquet"
    ),
    "cannot be read": lambda run: (run / TREES).write_bytes(b"PAR1"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_a_sound_run_has_no_problems_and_everything_was_counted(run: Path) -> None:
    found = verify(run)
    assert found.problems == []
    counted = {what: check.count for what, check in found.checks.items()}
    assert counted["nodes"] == 7 and counted["pairs"] == counted["preferences"] == 2 and counted["run.json"] == 5
    assert verify(run / PAIRS).problems == verify(run / "trees").problems == []


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_with_a_run_is_said_in_one_line(run: Path, said: str) -> None:
    if "texts" in said:
        rows = pq.read_table(run / TREES).to_pylist()
        twice = [row | {"question_id": name} for name in ("q0", "q1", "held out") for row in rows]
        pq.write_table(pa.Table.from_pylist(twice, schema=tree_schema()), run / TREES)
        (run / "run.json").write_text("{}")
    WRONG[said](run)
    problems = verify(run).problems
    assert any(said in problem for problem in problems), problems
    assert said != "cannot be read" or "the tables hold" not in str(problems)  # nothing is said of what was not counted
    assert not any("\n" in problem for problem in problems)


def changed(file: str, **values: object) -> Callable[[Path], object]:
    return lambda policy: edit_json(policy / file, lambda held: held.update(values))


BROKEN: dict[str, Callable[[Path], object]] = {
    "model.safetensors: b holds NaN or infinities": lambda policy: save_torch(
        {"a": tensor([1.0]), "b": tensor([1.0, NAN])}, policy / "model.safetensors"
    ),
    "model.safetensors: w holds NaN": lambda policy: save_file(
        {"w": np.array([1, np.inf], np.float32)}, policy / "model.safetensors"
    ),
    "no safetensors file, or damaged": lambda policy: (policy / "model.safetensors").write_bytes(b"\xff" * 40),
    "pytorch_model.bin is pickled": lambda policy: (policy / "pytorch_model.bin").write_bytes(b"\x80\x04"),
    "config.json names code that comes with the model": changed("config.json", auto_map={"AutoModel": "x.Y"}),
    "modeling_x.py is code": lambda policy: (policy / "modeling_x.py").write_text("1/0"),
    "tokenizer.json is not a readable tokenizer": lambda policy: (policy / "tokenizer.json").write_text("{}"),
    "config.json is damaged: its checksum differs": changed("training.json", files={"config.json": [59, "0" * 64]}),
    "tokenizer.json has": changed("training.json", files={"tokenizer.json": [1, ""]}),
    "checkpoint-2: complete.json is missing": lambda policy: None,
}


def tensor(values: list[float]) -> object:
    import torch

    return torch.tensor(values, dtype=torch.bfloat16)


@pytest.mark.parametrize("said", BROKEN)
def test_what_is_wrong_with_a_model_is_said_in_one_line(tmp_path: Path, said: str) -> None:
    policy = write_policy(tmp_path / "policy")
    BROKEN[said](policy)
    assert any(said in problem for problem in verify(policy).problems), verify(policy).problems


def test_nothing_to_check_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match="nothing that can be checked"):
        verify(tmp_path)
    with pytest.raises(RunError, match="does not exist"):
        verify(tmp_path / "mistyped.parquet")


def test_pairs_in_the_columns_of_trl_are_checked_as_they_are_trained_on(tmp_path: Path) -> None:
    pairs = {"prompt": ["Who?"] * 3, "chosen": ["Jo", "Al", "x"], "rejected": ["Al", "Jo", "x"]}
    pq.write_table(pa.table(pairs), tmp_path / "trl.parquet")
    equal, against = verify(tmp_path / "trl.parquet").problems
    assert "chosen and rejected are equal in 1 row (3)" in equal
    assert against.startswith("2 of 2 pairs contradict each other")


@pytest.mark.fault(
    "9",
    "the checksums of a trained model are gone, with training.json",
    "`verify` says what it could not check",
    before="ok, with a flipped bit in a weight",
)
def test_the_command_prints_a_line_for_each_check_or_problem_and_exits_with_1_if_there_is_any(
    run: Path, tmp_path: Path, figure: Figure, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*paths: Path, as_json: bool = False) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            inspect.verify.callback(paths, as_json)  # type: ignore[misc]
        return ended.value.code, capsys.readouterr().out

    other, model = write_run(tmp_path / "other"), write_policy(tmp_path / "policy") / "model.safetensors"
    code, text = printed(run, other, model)
    (unchecked,) = [line for line in text.splitlines() if not line.startswith("ok: ")]
    figure(unchecked.replace(str(model), "MODEL"))
    assert unchecked == f"not checked: {model}: files that have a checksum in training.json: 0"
    assert code == 0 and f"ok: {other}: nodes: 7\n" in text
    WRONG["trees.nodes is 99"](other)
    code, text = printed(run, other)
    problem = "run.json says that trees.nodes is 99, and the tables hold 7; write them again with the same build-tree"
    assert (code, text.splitlines()[-1]) == (1, f"problem: {other}: {problem} command")
    read = json.loads(printed(run, other, as_json=True)[1])
    assert [sum(len(check["problems"]) for check in checks.values()) for checks in read.values()] == [0, 1]
