from __future__ import annotations

import io
import re

from rich.console import Console

from reasonrag.report.terminal import drawing
from reasonrag.report.trees import QuestionTree, tree_of
from tests.report.toys import answer, rows_of


def shown(tree, width=80, **cut):
    out = io.StringIO()
    Console(file=out, width=width).print(drawing(tree, **cut))
    return out.getvalue()


def test_every_node_is_drawn_with_its_figures(run):
    tree = tree_of(run, "q3")
    lines = shown(tree).splitlines()
    assert tree.root["question"] in lines[0]
    assert sum("N=" in line for line in lines) == len(tree.nodes)
    for row in tree.nodes[1:]:
        mark = "* " if row["node_id"] in tree.best_path else ""
        assert any(f"─ {mark}{row['action']}  N={row['visits']} " in line for line in lines)


def test_marks_without_colour_tell_best_malformed_ended_and_cut_off_nodes_apart():
    rows = rows_of([-1, 0, 0, 0, 0, 0], **answer("Spielberg", spre=0.9))
    rows[2] |= {"action": "malformed", "content": "no tag", "text": "It is\n\x1b[1mLucas"}
    rows[3] |= {"action": "malformed", "content": "two tags", "stop_reason": "no_answer"}
    rows[4] |= {"finish_reason": "length"}
    lines = shown(QuestionTree.of(rows)).splitlines()
    nodes = [line.split("─ ", 1)[1].split("  N=")[0] for line in lines if "─ " in line]
    assert nodes == ["query", "! malformed", "!x malformed", "~ query", "* answer"]
    assert any(line.endswith("no tag: It is \N{REPLACEMENT CHARACTER}[1mLucas") for line in lines)
    assert lines[-1].startswith("* path to the best answer  ! malformed")
    assert "\x1b" not in "".join(lines)


def test_a_tree_is_cut_below_a_depth_and_beside_the_best_path_with_the_number_of_nodes_below():
    rows = rows_of([-1, 0, 0, 1, 3, 2, 5], **answer("Spielberg", spre=0.9))  # 2, 5 and 6 are the best path
    tree = QuestionTree.of(rows)
    for cut, expected in (({"best": True}, [1, 2, 5, 6]), ({"depth": 2}, [1, 2, 3, 5])):
        assert sorted(int(node) for node in re.findall(r"node (\d+)", shown(tree, **cut))) == expected
    assert shown(tree, best=True).count("+2 nodes") == 1  # below node 1
