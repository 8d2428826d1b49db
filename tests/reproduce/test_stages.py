from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reasonrag.core.errors import RunError
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


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != BASE])
def test_one_variant_brings_what_it_reads_and_nothing_else(tmp_path, name):
    folder = tmp_path / "seed-0"
    plan = stages(tmp_path, Scale(seeds=1, only=(name,)))
    assert [s.out.name for s in plan if s.arguments[1] == "train"] == [name]
    written = {str(stage.out) for stage in plan}
    read = {argument for stage in plan for argument in stage.arguments if argument.startswith(str(folder))} - written
    assert read == set(), "what a stage reads is written by another"
    assert sum(stage.arguments[0] == "build-tree" for stage in plan) == 1
    assert len({stage.line for stage in plan} - {stage.line for stage in stages(tmp_path, Scale(seeds=1))}) == 1


def test_trees_and_trainings_never_see_another_split_than_train(tmp_path):
    for stage in stages(tmp_path, Scale(seeds=1)):
        assert ("--split" in stage.arguments) == (stage.arguments[0] == "eval")


def quick(out: Path, *needs: Path) -> Stage:
    """A command that is soon done, and writes nothing."""
    return Stage(("--version", out.name), out, needs)


def test_some_stages_are_run_and_the_others_wait(tmp_path):
    stages = [quick(tmp_path / "a"), quick(tmp_path / "b")]
    said = []
    plan = Plan(tmp_path / "out", stages)
    assert plan.run(said.append, only={tmp_path / "b"}) == 0
    assert plan.is_done(stages[1]) and not plan.is_done(stages[0])
    assert said == [f"[2/2] $ {stages[1].line}"]


def test_a_command_that_fails_ends_only_what_needs_it(tmp_path):
    broken = Stage(("no-such-command",), tmp_path / "never")
    needing, other = quick(tmp_path / "w", broken.out), quick(tmp_path / "v")
    said = []
    plan = Plan(tmp_path / "out", [broken, needing, other])
    assert plan.run(said.append, keep_going=True) == 2
    assert [plan.is_done(stage) for stage in plan.stages] == [False, False, True]
    assert f"[2/3] left out, as {broken.out} is not there: {needing.line}" in said


def test_two_commands_run_at_a_time_and_what_needs_them_waits(tmp_path):
    first, second = quick(tmp_path / "a"), quick(tmp_path / "b")
    third = quick(tmp_path / "c", first.out, second.out)
    said = []
    plan = Plan(tmp_path / "out", [third, first, second])
    assert plan.run(said.append, jobs=2) == 0
    assert [line[:5] for line in said] == ["[2/3]", "[3/3]", "[1/3]"]
    logs = sorted((tmp_path / "out" / "logs").glob("*.log"))
    assert [log.name for log in logs] == ["001.log", "002.log", "003.log"]
    assert all("version" in log.read_text() for log in logs)


def test_a_plan_may_grow_where_it_is_allowed_to_and_keeps_what_is_done(tmp_path):
    small, large = [quick(tmp_path / "a")], [quick(tmp_path / "a"), quick(tmp_path / "b")]
    Plan(tmp_path / "out", small).done(small[0])
    with pytest.raises(RunError, match="another plan"):
        Plan(tmp_path / "out", large)
    grown = Plan(tmp_path / "out", large, grows=True)
    assert grown.is_done(large[0]) and not grown.is_done(large[1])
    with pytest.raises(RunError, match="another plan"):
        Plan(tmp_path / "out", small, grows=True)


def test_a_signal_is_handed_on_and_nothing_more_is_started(tmp_path):
    """Whoever is asked to stop while two commands run stops both, and says so by its exit code."""
    plan = "from pathlib import Path; import sys; from reasonrag.reproduce.stages import Plan, Stage; "
    plan += "out = Path(sys.argv[1]); "
    plan += "stages = [Stage(('demo', 'policy', '--out', str(out / n)), out / n) for n in 'abc']; "
    plan += "sys.exit(Plan(out / 'plan', stages).run(lambda line: print(line, flush=True), jobs=2, keep_going=True))"
    child = subprocess.Popen([sys.executable, "-c", plan, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    begun = [child.stdout.readline() for _ in range(2)]
    child.send_signal(signal.SIGTERM)
    rest, _ = child.communicate(timeout=60)
    assert child.returncode == 143
    assert [line[:6] for line in begun] == ["[1/3] ", "[2/3] "] and "[3/3]" not in rest
    assert rest.count("ended with exit code 143") == 2
