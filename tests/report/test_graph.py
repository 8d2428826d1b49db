from __future__ import annotations

import json
import re

import networkx as nx
import pytest

from reasonrag.core.errors import DataError, RunError
from reasonrag.report.graph import file_name, graphml, to_networkx, write_graphml, write_node_link
from reasonrag.report.trees import QuestionTree, read_trees
from tests.report.toys import rows_of, write_run

FORBIDDEN = "a\x00b\x1b[31mc\x08\ufffe\uffff"
ALLOWED = "\u202e]]> <b>&amp; \u2028 \x85 \N{SNOWMAN} \U0001f40b\ttab\nline"


def same(found, graph):
    """Whether two graphs have the same nodes, edges and attributes, in this order."""
    for ours, theirs in ((found.nodes, graph.nodes), (found.edges, graph.edges)):
        assert list(ours.items()) == list(theirs.items())
    assert {name: found.graph[name] for name in graph.graph} == graph.graph
    assert nx.is_arborescence(found)
    return True


def in_graphml(graph):
    """As GraphML can hold it: nothing that is None, no list."""
    for attributes in (graph.graph, *graph.nodes.values()):
        for name, value in list(attributes.items()):
            if value is None:
                del attributes[name]
            elif isinstance(value, list):
                attributes[name] = " | ".join(value)
    return graph


def read_lines(file):
    return [nx.node_link_graph(json.loads(line), edges="edges") for line in file.read_text("utf-8").splitlines()]


def test_every_tree_of_a_run_comes_back_from_graphml(run, tmp_path):
    assert write_graphml(run, tmp_path) == len(list(tmp_path.glob("*.graphml"))) == 16
    for tree in read_trees(run):
        found = nx.read_graphml(tmp_path / file_name(tree.root), node_type=int)
        assert same(found, in_graphml(to_networkx(tree)))


def test_every_tree_of_a_run_comes_back_from_node_link_json(run, tmp_path):
    assert write_node_link(run, tmp_path / "trees.jsonl") == 16
    for found, tree in zip(read_lines(tmp_path / "trees.jsonl"), read_trees(run), strict=True):
        assert same(found, to_networkx(tree))


def test_text_that_xml_allows_comes_back_and_the_rest_is_replaced(tmp_path):
    rows = rows_of([-1, 0, 1, 2], "q1")
    for node, text in ((1, ALLOWED), (2, FORBIDDEN), (3, "")):
        rows[node] |= {"content": text, "text": text}
    run = write_run(tmp_path / "run", rows)
    write_graphml(run, tmp_path / "graphs")
    found = nx.read_graphml(tmp_path / "graphs" / file_name(rows[0]), node_type=int)
    assert found.nodes[1]["content"] == found.nodes[1]["text"] == ALLOWED
    assert found.nodes[2]["content"] == "a\ufffdb\ufffd[31mc\ufffd\ufffd\ufffd"
    assert found.nodes[3]["content"] == ""
    write_node_link(run, tmp_path / "trees.jsonl")
    (line,) = read_lines(tmp_path / "trees.jsonl")
    assert [line.nodes[node]["text"] for node in (1, 2, 3)] == [ALLOWED, FORBIDDEN, ""]
    assert (tmp_path / "trees.jsonl").read_text("ascii").removesuffix("\n").isprintable()


def test_lone_surrogates_and_carriage_returns_never_break_a_file():
    graph = to_networkx(QuestionTree.of(rows_of([-1, 0], content="a\ud800b\r\nc\rd")))
    found = nx.parse_graphml(graphml(graph).removeprefix("<?xml version='1.0' encoding='utf-8'?>"), node_type=int)
    assert found.nodes[1]["content"] == "a\ufffdb\nc\nd"


@pytest.mark.parametrize("id", ["../../etc/passwd", "a/b\\c:*?", "-rf", "CON", ".", "x" * 400, "\x1b]8;;\u202e", " "])
def test_any_id_has_a_file_name_of_its_own_within_the_folder(id, tmp_path):
    run = write_run(tmp_path / "run", rows_of([-1, 0], id), rows_of([-1, 0], f"{id} "))
    assert write_graphml(run, tmp_path / "graphs") == 2
    files = list((tmp_path / "graphs").glob("*.graphml"))
    assert all(re.fullmatch(r"\w{1,60}-[0-9a-f]{12}\.graphml", path.name, re.ASCII) for path in files)
    ids = {nx.read_graphml(path).graph["question_id"] for path in files}
    assert ids == {shown.replace("\x1b", "\ufffd") for shown in (id, f"{id} ")}


def test_files_of_somebody_else_are_left_alone(run, tmp_path):
    with pytest.raises(RunError, match="holds other files and no set of graphs"):
        write_graphml(run, run)
    with pytest.raises(DataError, match=r"cannot be written \(No such file or directory\)"):
        write_node_link(run, tmp_path / "nowhere/trees.jsonl")
    with pytest.raises(DataError, match="cannot be written"):
        write_node_link(run, tmp_path)
