from __future__ import annotations

from pathlib import Path

import pytest

from reasonrag.errors import RunError
from reasonrag.reproduce.reasonrag import BASE, MAIN, VARIANTS, Scale, stages
from reasonrag.reproduce.stages import Plan, Stage


def world(out: Path) -> Stage:
    """A command that needs a second."""
    return Stage(("demo", "world", "--out", str(out)), out)


def test_a_stage_is_said_run_and_not_done_twice(tmp_path):
    said = []
    stages = [world(tmp_path / "w")]
    assert Plan(tmp_path / "out", stages).run(said.append) == 0
    assert (tmp_path / "w" / "corpus.jsonl").exists()
    assert Plan(tmp_path / "out", stages).run(said.append) == 0
    assert said == [
        f"[1/1] $ reasonrag demo world --out {tmp_path / 'w'}",
        f"[1/1] done before: reasonrag demo world --out {tmp_path / 'w'}",
    ]


def test_a_command_that_fails_ends_the_plan_with_its_exit_code_and_is_tried_again(tmp_path):
    broken = Stage(("pairs", str(tmp_path / "nothing")), tmp_path / "never")
    plan = [broken, world(tmp_path / "w")]
    said = []
    assert Plan(tmp_path / "out", plan).run(said.append) == 2
    assert not (tmp_path / "w").exists()
    assert Plan(tmp_path / "out", plan).run(said.append) == 2
    assert said == [f"[1/2] $ {broken.line}"] * 2


def test_a_folder_belongs_to_one_plan(tmp_path):
    out = tmp_path / "out"
    Plan(out, stages(out, Scale(seeds=1)))
    Plan(out, stages(out, Scale(seeds=1)))
    for other in (Scale(seeds=1, questions=30), Scale(seeds=2)):
        with pytest.raises(RunError, match="holds another plan"):
            Plan(out, stages(out, other))
    (out / "plan.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        Plan(out, stages(out, Scale(seeds=1)))


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(RunError, match="other files"):
        Plan(tmp_path, stages(tmp_path, Scale()))


def test_every_variant_is_trained_and_evaluated_for_every_seed_on_test_questions(tmp_path):
    plan = stages(tmp_path, Scale(seeds=2, test_questions=50))
    for seed in range(2):
        folder = tmp_path / f"seed-{seed}"
        trained = {s.out.name for s in plan if s.out.parent == folder and s.arguments[1] == "train"}
        assert trained == set(VARIANTS) - {BASE}
        (evaluation,) = (stage for stage in plan if stage.out == folder / "eval")
        assert f"{MAIN}=hf:{folder / MAIN}" in evaluation.arguments and f"{BASE}=demo" in evaluation.arguments
        assert evaluation.line.count("--split test --limit 50 --temperature 0,1") == 1


def test_trees_and_trainings_never_see_another_split_than_train(tmp_path):
    for stage in stages(tmp_path, Scale(seeds=1)):
        assert ("--split" in stage.arguments) == (stage.arguments[0] == "eval")
