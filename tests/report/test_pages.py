from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.report import write_report
from reasonrag.report.run_pages import merged
from reasonrag.report.trees import QuestionTree
from tests.e2e import product
from tests.report.finished import write_evaluation, write_pair_training, write_training
from tests.report.hostile import HOSTILE, rows, write_run
from tests.report.reading_pages import Page, listed
from tests.report.toys import rows_of

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
LINKING = ("href", "src", "action", "data", "srcset", "poster", "xlink:href")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports of all kinds of folders, in which every foreign text is hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    finished = {
        "run": write_run(folder / "run", [rows(60, question_id=HOSTILE, dataset=HOSTILE)]),
        "rl": write_training(folder / "rl"),
        "dpo": write_pair_training(folder / "dpo"),
        "evaluation": write_evaluation(folder / "evaluation", 3, failing=[("other", 1)]),
    }
    return {kind: write_report(made).parent for kind, made in finished.items()}


@pytest.fixture(params=("run", "rl", "dpo", "evaluation"))
def hostile(request, reports):
    return reports[request.param]


def pages(report):
    return [Page(path) for path in sorted(report.rglob("*.html"))]


def test_every_question_has_a_page_with_every_node_and_every_pair(run, tmp_path):
    report = write_report(run, tmp_path).parent
    nodes = Counter(row["question_id"] for row in product.tree_rows(run))
    pairs = Counter((p["question_id"], p["chosen_node_id"], p["rejected_node_id"]) for p in product.pair_rows(run))
    shown = Counter()
    for place, _, name, _, count, *_ in listed(report):
        question, details = name.split()[1], Page(report / "questions" / f"{place:05d}.html").details
        assert [node["node_id"] for node in details["nodes"]] == list(range(count)) == list(range(nodes.pop(question)))
        shown.update((question, pair["chosen_node_id"], pair["rejected_node_id"]) for pair in details["pairs"])
    assert (shown, nodes) == (pairs, {})


def test_a_large_run_has_pages_of_a_sample(tmp_path):
    write_run(tmp_path, [rows(2, question_id=f"q{number}") for number in range(1_001)])
    summary = json.loads((tmp_path / "run.json").read_text())
    report = write_report(tmp_path).parent
    assert len(list((report / "questions").iterdir())) == len(listed(report)) == 334
    assert [row[2] for row in listed(report)[:3]] == ["d q0", "d q3", "d q6"]
    page = Page(report / "index.html")
    assert "One question in 3" in page.text and f"nodes: {summary['trees']['nodes']:,}" in page.text


def test_foreign_text_opens_no_element_and_runs_nothing(hostile):
    for page in pages(hostile):
        assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in page.all("img"))
        assert all("src" in script or script.get("type") == "application/json" for script in page.all("script"))
        assert not any(name.startswith("on") or name == "style" for _, found in page.elements for name in found)
        assert "{{ 7*7 }}" in page.source or "{{ 7*7 }}" in page.data


def test_no_control_or_bidi_character_survives(hostile):
    for path in hostile.rglob("*.*"):
        assert not CONTROL.search(path.read_text(encoding="utf-8")), path.name
    assert any("�[31mred�]8;;http://evil.example/�link" in page.text for page in pages(hostile))


def test_pages_reach_for_nothing_but_their_own_files(hostile):
    for page in pages(hostile):
        for _, attributes in page.elements:
            for name in LINKING:
                target = attributes.get(name)
                if target and not target.startswith(("#", "data:")):
                    assert (page.path.parent / target.partition("#")[0]).is_file(), target
        (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
        assert "default-src 'none'" in policy["content"]
        assert "unsafe" not in policy["content"]
    assert "url(" not in (hostile / "report.css").read_text(encoding="utf-8")


def test_siblings_that_say_the_same_are_drawn_as_the_oldest_with_the_children_of_all():
    said = [(-1, ""), (0, "who?"), (0, "Who"), (0, "what"), (1, "x"), (2, "X."), (3, "x")]
    nodes = rows_of([parent for parent, _ in said])
    for row, (_, content) in zip(nodes, said, strict=True):
        row["content"] = content
    assert merged(QuestionTree.of(nodes)) == [0, 1, 1, 3, 4, 4, 6]


def test_tables_and_pictures_have_names_and_ids_occur_once(hostile):
    for page in pages(hostile):
        ids = [found["id"] for _, found in page.elements if "id" in found]
        assert len(ids) == len(set(ids))
        assert len(page.all("main")) == len(page.all("h1")) == 1
        assert page.all("table") == [] or len(page.all("caption")) == len(page.all("table"))
        named = {found.get("aria-labelledby") for _, found in page.elements} - {None}
        assert named <= set(ids)
        assert all(image["alt"] for image in page.all("img"))


def test_a_new_report_replaces_the_old_one_with_the_same_bytes(tmp_path):
    run = write_run(tmp_path / "run", [rows(7, question_id=f"q{n}") for n in range(3)])
    report = write_report(run).parent
    assert all((report / row[12]).is_file() for row in listed(report))
    once = {path.relative_to(report): path.read_bytes() for path in report.rglob("*.*")}
    (report / "questions" / "00099.html").write_text("of a longer run")
    assert write_report(run) == report / "index.html"
    assert {path.relative_to(report): path.read_bytes() for path in report.rglob("*.*")} == once


def test_a_folder_of_nothing_that_has_finished_is_named_with_what_it_lacks(tmp_path):
    with pytest.raises(RunError, match=r"no run\.json or training\.json or metrics\.json, so .*: its command has not"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["training.json", "metrics.json"])
@pytest.mark.parametrize("text", ["{", "[]", '{"policies": {"a": 1}, "history": [1]}', "[" * 100_000])
def test_figures_of_another_make_are_one_line(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=name) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)


def test_pairs_of_whole_trajectories_are_named_at_their_last_nodes(tmp_path):
    tree = rows(15)
    for row in tree[:14]:
        row["f1"] = row["f1"] and 0.0
    tree[14]["f1"] = 1.0
    report = write_report(write_run(tmp_path / "run", [tree], level="trajectory")).parent
    details = Page(report / "questions" / "00000.html").details
    (pair,) = details["pairs"]
    assert (pair["chosen_node_id"], pair["margin"], pair["split"], details["whole"]) == (14, 1.0, "train", True)
    assert tree[pair["rejected_node_id"]]["f1"] == 0.0
    assert listed(report)[0][6] == 1
    assert "Pairs by type" not in Page(report / "index.html").text  # all of which would be 0


@pytest.mark.parametrize("other", [rows(31), rows(7, question_id="elsewhere")])
def test_pairs_of_another_run_are_refused(tmp_path, other):
    run = write_run(tmp_path / "run", [rows(7)])
    (run / "pairs").rename(tmp_path / "own")
    (write_run(tmp_path / "other", [other]) / "pairs").rename(run / "pairs")
    with pytest.raises(DataError, match="they are of another run's trees"):
        write_report(run)
    assert not (run / "report" / "index.html").exists()
