from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from papers import PAPERS
from papers.comparison import BASE, Claim, Paper, Row, Scale, Table, Variant, evaluation_of, stages
from papers.measures import read_values
from papers.page import page, write
from papers.plan import Plan
from papers.results import comparisons, evaluated, families, renewed, summarise
from reasonrag.storage.files import require_json
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import trajectory_schema
from tools.recompute import of_page

GOLDEN = Path(__file__).parents[1] / "golden" / "papers" / "page.md"
RESULTS = Path(__file__).parents[2] / "docs" / "results"

PAPER = Paper(
    kind="online",
    name="toy",
    title="A toy's ablations",
    preset="demo-hiprag",
    policy="demo:hiprag",
    variants=(
        Variant("with", "with the bonus"),
        Variant("without", "no bonus", ("reward.hiprag.lambda_p=0",), blind=("reward/bonus",)),
    ),
    pairs=(("with", "without"), ("with", BASE)),
    metrics=("em", "osr", "retrievals"),
    curves={"eval_em": "held-out EM", "reward/bonus": "bonus of rollouts", "never": "never there"},
    tables=(
        Table(
            "Table 1",
            "a large model",
            {
                "with": Row("Ours", {"em": (60.0, 50.0), "osr": (4.0, 5.0)}, {"em": 55.1}),
                "without": Row("w/o bonus", {"em": (50.0, 52.0), "osr": (5.0, 4.0)}, {"em": 51.0}),
            },
        ),
    ),
    claims=(Claim("with", "without", "retrievals", -1, "Fig. 9"),),
    notes=("A note.",),
)
SURE_AND_DOUBTFUL = (("a", BASE, 0.0002), ("a", "b", 0.03), ("b", BASE, 0.0002), ("b", "c", 0.5))
SCALE = Scale(seeds=2, test_questions=12, max_steps=6)


def attempt(number, *, em, searches, needless):
    return {
        **dict.fromkeys(trajectory_schema().names),
        **{"dataset": "d", "question_id": str(number), "question": "?", "golden_answers": ["x"]},
        **{"kind": "known" if number < 2 else "bridge", "hops": 2, "answer": "x", "stop_reason": "answered"},
        **{"em": em, "f1": em, "acc": em, "retrievals": searches, "steps": searches + 1, "forced": 0},
        **{"format_rate": 1.0, "steps_over": needless, "searches_known": searches, "trajectory": []},
    }


def evaluate(folder, name, em, searches, needless):
    """Twelve attempts of a policy; the first ones are right."""
    trajectories = evaluation_of(folder, name) / name / "trajectories"
    trajectories.mkdir(parents=True)
    for temperature in (0, 1):
        rows = [
            attempt(n, em=float(n < em - temperature), searches=searches, needless=min(needless, searches))
            for n in range(12)
        ]
        write_parquet(trajectories / f"t{temperature}_s5_k1-00000-of-00001.parquet", rows, trajectory_schema())


def trained(folder, name, best):
    (folder / name).mkdir(parents=True)
    history = [{"step": step, "eval_em": best - 0.1 + step / 60, "reward/bonus": step / 10} for step in range(7)]
    for entry in history if name == "with" else ():  # not in those of earlier versions
        entry["seconds"] = entry["step"] * 5.0
    summary = {"steps": 6, "seconds": 30.0, "best": {"step": 6, "value": best}, "history": history}
    (folder / name / "training.json").write_text(json.dumps(summary))


@pytest.fixture
def plan(tmp_path):
    """A plan whose second seed lacks the variant without a bonus."""
    out = tmp_path / "out"
    plan = Plan(out, stages(PAPER, out, SCALE))
    for seed in range(2):
        folder = out / f"seed-{seed}"
        evaluate(folder, BASE, 3 + seed, 2, 1)
        evaluate(folder, "with", 12, 1, 0)
        trained(folder, "with", 0.8)
        if seed == 0:
            evaluate(folder, "without", 2 + seed, 3, 2)
            trained(folder, "without", 0.5)
    for stage in plan.stages:
        if not ("without" in stage.line and "seed-1" in stage.line) and stage.out.exists():
            plan.done(stage)
    return plan


@pytest.fixture
def figures(plan, tmp_path):
    found = summarise(PAPER, plan, SCALE, evaluated(PAPER, plan, SCALE))
    return found | {"date": "2026-01-01", "commit": "0a78ebd2 of 2026-01-01 02:19", "versions": {"reasonrag": "1"}}


def test_the_page_is_the_golden_one(figures):
    assert "\n".join(page(PAPER, figures)) + "\n" == GOLDEN.read_text(encoding="utf-8")


PUBLISHED = [name for name in PAPERS if (RESULTS / f"{name}.json").exists()]  # of `real`, an earlier version


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_page_follows_from_the_results_beside_it(name):
    paper = PAPERS[name]
    results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert list(comparisons(paper, results["settings"])) == results["comparisons"]
    assert "\n".join(page(paper, results)) + "\n" == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_a_page_is_renewed_from_its_values_with_the_differences_declared_now(figures, plan, tmp_path):
    rows = evaluated(PAPER, plan, SCALE)
    write(PAPER, figures, rows, tmp_path)
    stored, values = require_json(tmp_path / "toy.json", ""), read_values(tmp_path / "toy.values.csv.gz")
    for at_setting in stored["settings"].values():
        del at_setting["differences"]["with - without"]
    again = json.loads(json.dumps(renewed(PAPER, stored, values)))
    assert again["comparisons"] == require_json(tmp_path / "toy.json", "")["comparisons"]
    assert again["settings"] == require_json(tmp_path / "toy.json", "")["settings"]


def test_sure_differences_to_the_base_lend_the_others_nothing():
    differences = {f"{name} - {second}": {"all": {"em": {"p": p}}} for name, second, p in SURE_AND_DOUBTFUL}
    between, to_base = families(PAPER, differences)
    assert [found["p"] for found in between] == [0.03, 0.5]
    assert [found["p"] for found in to_base] == [0.0002, 0.0002]


def test_a_page_of_nothing_says_so(tmp_path):
    out = tmp_path / "empty"
    plan = Plan(out, stages(PAPER, out, SCALE))
    rows = evaluated(PAPER, plan, SCALE)
    text = write(PAPER, summarise(PAPER, plan, SCALE, rows), rows, tmp_path / "results").read_text(encoding="utf-8")
    assert "`base` with seed 0, 1; `with` with seed 0, 1; `without` with seed 0, 1." in text
    assert "of 0 rows of the paper, none compared; 3 more are of variants that this run leaves out." in text


def test_an_evaluation_that_failed_is_not_read_whatever_it_left(tmp_path):
    out = tmp_path / "out"
    plan = Plan(out, stages(PAPER, out, SCALE))
    evaluate(out / "seed-0", BASE, 3, 2, 1)
    assert evaluated(PAPER, plan, SCALE)["greedy"] == {}


def test_curves_are_means_over_seeds_and_what_is_not_there_is_left_out(figures, tmp_path):
    assert figures["curves"]["eval_em"]["with"][-1] == (6, 0.8)
    bonus = figures["curves"]["reward/bonus"]["with"]
    assert bonus[0] == (0, 0.0) and bonus[-1] == (6, pytest.approx((0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 5))
    assert set(figures["curves"]["eval_em"]) == {"with", "without"} and set(figures["curves"]["reward/bonus"]) == {
        "with"
    }
    assert figures["curves"]["never"] == {}
    write(PAPER, figures, {}, tmp_path / "results")
    svg = (tmp_path / "results" / "toy.svg").read_text(encoding="utf-8")
    assert "bonus of rollouts" in svg and "never there" not in svg
    assert (tmp_path / "results" / "toy.png").stat().st_size > 1000


def test_em_is_drawn_by_what_each_variant_has_cost(plan, figures, tmp_path):
    assert figures["by_cost"] == {}  # a plan of an earlier version does not say it
    plan.cpu_s = {stage.line: 60.0 for stage in plan.stages}
    rows = evaluated(PAPER, plan, SCALE)
    figures = summarise(PAPER, plan, SCALE, rows)
    spent = figures["by_cost"]
    assert (spent["with"][0], spent["with"][-1]) == (pytest.approx([0, 0.7]), pytest.approx([60, 0.8]))
    greedy = figures["settings"]["greedy"]["variants"]
    ends = [[0, greedy[BASE]["all"]["em"]["mean"]], [60, greedy["without"]["all"]["em"]["mean"]]]
    assert spent["without"] == ends
    write(PAPER, figures, rows, tmp_path / "results")
    assert "EM by what it has cost" in (tmp_path / "results" / "toy.svg").read_text(encoding="utf-8")


def test_metric_and_searches_are_drawn_by_the_calls_that_training_took(plan, figures, tmp_path):
    rows = evaluated(PAPER, plan, SCALE)
    text = write(PAPER, figures | {"by_calls": {"with": 28_000.0, "without": 31_000.0}}, rows, tmp_path).read_text()
    assert "| calls so far |" in text and "| `without` | 31000 |" in text
    svg = (tmp_path / "toy.svg").read_text(encoding="utf-8")
    assert "EM, greedy" in svg and "EM, sampled (T = 1)" in svg and "thousand calls of the policy" in svg


def test_seeds_that_were_run_elsewhere_are_read_from_the_values_of_the_page(plan, figures, tmp_path):
    write(PAPER, figures, evaluated(PAPER, plan, SCALE), tmp_path)
    rest = replace(SCALE, first_seed=1)
    rows = evaluated(PAPER, plan, rest, tmp_path / "toy.values.csv.gz")
    merged = summarise(PAPER, plan, rest, rows)
    assert merged["settings"] == figures["settings"] and merged["missing"] == figures["missing"]
    assert all(f"seed-{seed}/" not in stage.line for stage in stages(PAPER, tmp_path, rest) for seed in (0, 2))


def test_every_interval_can_be_computed_anew_from_the_values_beside_the_page(plan, tmp_path):
    rows = evaluated(PAPER, plan, SCALE)
    figures = summarise(PAPER, plan, SCALE, rows)
    write(PAPER, figures, rows, tmp_path)
    again = of_page(tmp_path / "toy.json")
    # Three variants and two differences, two decodings, all questions and two kinds.
    assert again.intervals == (3 + 2) * 2 * 3 * len(PAPER.metrics)
    assert again.largest < 1e-9
    before = (tmp_path / "toy.values.csv.gz").read_bytes()
    write(PAPER, figures, rows, tmp_path)
    assert (tmp_path / "toy.values.csv.gz").read_bytes() == before
    figures["settings"]["greedy"]["differences"]["with - base"]["all"]["em"]["low"] += 0.01
    write(PAPER, figures, rows, tmp_path)
    assert of_page(tmp_path / "toy.json").largest == pytest.approx(0.01)
