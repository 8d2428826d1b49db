from __future__ import annotations

from itertools import combinations
from pathlib import Path

import click
import pytest

from papers import PAPERS
from papers.comparison import BASE, Scale, outputs, stages
from papers.measures import METRICS
from reasonrag.cli import cli
from reasonrag.commands.options import sources
from reasonrag.commands.train import online_settings
from reasonrag.core.config import load_config
from reasonrag.pipeline.parts import open_questions

SMALL = Scale(seeds=2, questions=30, test_questions=10, max_steps=8)
every_paper = pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
IN_DEMO_WORLD = [paper for paper in PAPERS.values() if paper.in_demo_world]
ONLINE = [paper for paper in PAPERS.values() if paper.kind == "online"]


def parsed(stage):
    """What `reasonrag` makes of a stage's arguments."""
    command: click.Command = cli
    arguments = list(stage.arguments)
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), arguments.pop(0))
        assert found is not None
        command = found
    return command.make_context(command.name, arguments).params


def trainings(paper, scale=SMALL):
    """The resolved settings of each training of the first seed, by variant."""
    found = {}
    for stage in stages(paper, Path("OUT"), scale):
        if stage.arguments[:2] == ("rl", "train") and stage.out.parent == Path("OUT/seed-0"):
            given = parsed(stage)
            given.pop("out")
            found[stage.out.name] = online_settings(given)
    return found


@every_paper
def test_every_command_is_one_that_the_command_line_knows(paper):
    assert all(parsed(stage)["out"] == stage.out for stage in stages(paper, Path("OUT"), SMALL))


@pytest.mark.parametrize("paper", ONLINE, ids=lambda paper: paper.name)
def test_variants_differ_in_their_reward_and_in_nothing_else(paper):
    settings = trainings(paper)
    assert list(settings) == [variant.name for variant in paper.variants]
    for first, second in combinations(settings.values(), 2):
        if first.algorithm != second.algorithm:  # PPO makes as many rollouts, of more questions
            rollouts = {found.rollout.group_size * found.rollout.questions_per_step for found in (first, second)}
            assert len(rollouts) == 1
            continue
        assert (first.reward, first.judge) != (second.reward, second.judge)
        assert first.model_copy(update={name: getattr(second, name) for name in ("reward", "plans", "judge")}) == second
    for found in settings.values():
        assert (found.max_steps, found.limit, found.seed, found.model) == (8, 30, 0, paper.policy)
        assert found.guards.format_rate_drop == found.guards.max_length_growth == 0


def test_the_switches_are_those_of_each_ablation():
    hiprag = {name: found.reward.hiprag for name, found in trainings(PAPERS["hiprag"]).items()}
    assert {name: found.lambda_p for name, found in hiprag.items()} == {
        **{"lp-0": 0, "lp-0.2": 0.2, "lp-0.4": 0.4, "lp-0.6": 0.6, "over-only": 0.4, "under-only": 0.4},
        **{"ppo": 0.4, "beta-grpo": 0.4},
    }
    assert [name for name, found in hiprag.items() if not found.under_search] == ["over-only"]
    assert [name for name, found in hiprag.items() if not found.over_search] == ["under-only"]
    search_p1 = trainings(PAPERS["search-p1"])
    assert [name for name, found in search_p1.items() if found.reward.name == "outcome"] == ["outcome"]
    assert [name for name, found in search_p1.items() if found.plans] == [
        *("full", "no-self", "format-strict", "format-none", "outcome-binary"),
        *("ppo", "path-0.2", "path-0.4", "outcome-0.8", "outcome-1", "judge-0.1", "judge-0.2"),
    ]
    weights = {
        name: (found.reward.search_p1.lambda_p, found.reward.search_p1.lambda_a) for name, found in search_p1.items()
    }
    assert {name: found for name, found in weights.items() if found != (0.3, 0.6)} == {
        **{"path-0.2": (0.2, 0.6), "path-0.4": (0.4, 0.6), "outcome-0.8": (0.3, 0.8), "outcome-1": (0.3, 1)}
    }
    when = {name: found.reward.when_to_search for name, found in trainings(PAPERS["when-to-search"]).items()}
    assert {found.switch_step for found in when.values()} == {4}
    assert [(found.stages, found.no_r_s, found.no_r_a) for found in when.values()] == [
        *(("both", False, False), ("two", False, False), ("one", False, False)),
        *(("both", True, False), ("unified", False, False), ("both", False, True)),
    ]


@every_paper
def test_a_paper_declares_only_what_there_is(paper):
    assert set(paper.metrics) <= METRICS.keys() and len(set(paper.names)) == len(paper.names)
    assert {name for pair in paper.pairs for name in pair} <= set(paper.names)
    for table in paper.tables:
        assert table.rows.keys() <= set(paper.names)
    for claim in paper.claims:
        assert (claim.first, claim.second) in paper.pairs and claim.metric in paper.metrics


@pytest.mark.parametrize("paper", IN_DEMO_WORLD, ids=lambda paper: paper.name)
def test_every_variant_is_trained_and_evaluated_on_questions_that_no_training_sees(paper):
    plan = stages(paper, Path("OUT"), SMALL)
    for seed in range(2):
        folder = Path("OUT") / f"seed-{seed}"
        evaluated = {stage.out.name: stage for stage in plan if stage.out.parent == folder / "eval"}
        assert set(evaluated) == set(paper.names)
        trained = {stage.out.name for stage in plan if stage.out.parent == folder and stage.arguments[1] == "train"}
        assert trained == set(paper.names) - {BASE}
        for name, stage in evaluated.items():
            spec = paper.policy if name == BASE else f"hf:{folder / name}"
            assert f"{name}={spec}" in stage.arguments
            assert "--split test --limit 10 --temperature 0,1" in stage.line
    for stage in plan:
        assert stage.line.count("--split test") == stage.line.count("--split") == (stage.arguments[0] == "eval")


def test_plans_are_made_for_the_questions_that_are_trained_on():
    paper = PAPERS["search-p1"]
    (stage,) = (s for s in stages(paper, Path("OUT"), Scale(seeds=1, questions=30)) if s.arguments[1] == "plan")
    given = parsed(stage)
    asked = sources({name: given[name] for name in ("preset", "file", "assignments", "questions__limit")})
    config = load_config(**asked)
    planned = {question.id for question in open_questions(config)}
    trained = {question.id for question in open_questions(trainings(paper)["full"].as_config())}
    assert len(planned) == 30 and planned == trained


@every_paper
def test_what_a_stage_reads_is_written_before_it(paper):
    written = set()
    for stage in stages(paper, Path("OUT"), SMALL):
        assert set(stage.needs) <= written
        assert all(str(need) in stage.line for need in stage.needs)
        written.add(stage.out)


@pytest.mark.parametrize("name", [variant.name for variant in PAPERS["reasonrag"].variants])
def test_one_variant_of_table_3_brings_what_it_reads_and_nothing_else(name):
    paper, scale = PAPERS["reasonrag"], Scale(seeds=1)
    wanted = outputs(paper, Path("OUT"), scale, [name])
    plan = [stage for stage in stages(paper, Path("OUT"), scale) if stage.out in wanted]
    kind, number = name.rsplit("-", 1)
    rounds = [f"{kind}-{earlier}" for earlier in range(1, int(number) + 1)]
    assert [stage.out.name for stage in plan if stage.arguments[1] == "train"] == rounds
    read = {argument for stage in plan for argument in stage.arguments if argument.startswith("OUT")}
    assert read == {str(path) for path in wanted}, "what a command reads is written by another"
    is_online = kind.startswith(("grpo", "ppo"))
    assert [stage.out.name for stage in plan].count(f"trees-{kind}-{number}") == (number != "1")
    assert sum(stage.arguments[0] == "build-tree" for stage in plan) == (0 if is_online else len(rounds))


@pytest.mark.parametrize("paper", [paper for paper in PAPERS.values() if paper.by_table], ids=lambda paper: paper.name)
def test_what_one_table_asks_for_is_trained_and_compared_only_if_it_is_asked_for(paper):
    usual = outputs(paper, Path("OUT"), SMALL, paper.usual)
    for names in paper.by_table.values():
        assert names[0] == paper.main in paper.usual
        for name in names[1:]:
            assert not any(name in path.parts for path in usual)
            assert (paper.main, name) in paper.compared([name]) and (paper.main, name) not in paper.compared(
                paper.usual
            )
            assert any({paper.main, name} <= table.rows.keys() for table in paper.tables)


@every_paper
def test_all_variants_are_the_whole_plan(paper):
    whole = {stage.out for stage in stages(paper, Path("OUT"), SMALL)}
    assert outputs(paper, Path("OUT"), SMALL, paper.names) == whole
