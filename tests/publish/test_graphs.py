"""Trees as GraphML, read back with networkx."""

from __future__ import annotations

import re

import networkx as nx
import pytest

from reasonrag.core.errors import RunError
from reasonrag.publish.exporters import export_graphml
from reasonrag.report.trees import read_trees
from tests.report.toys import rows_of, write_run

FORBIDDEN = "a\x00b\x1b[31mc\x08\ufffe\uffff"
ALLOWED = "\u202e]]> <b>&amp; \u2028 \x85 \N{SNOWMAN} \U0001f40b\ttab\nline"


def test_every_tree_comes_back_with_its_attributes(tmp_path):
    rows = rows_of([-1, 0, 1, 2], "q1")
    for node, text in ((1, ALLOWED), (2, ""), (3, "plain")):
        rows[node] |= {"content": text, "text": text, "visits": node}
    run = write_run(tmp_path / "run", rows, rows_of([-1, 0, 0], "q2"))
    assert export_graphml(run, tmp_path / "graphs") == {"graphs": 2}
    for path, tree in zip(sorted((tmp_path / "graphs").glob("*.graphml")), read_trees(run), strict=True):
        read = nx.read_graphml(path, node_type=int)
        assert nx.is_arborescence(read)
        assert set(read.edges) == {(row["parent_id"], row["node_id"]) for row in tree.nodes[1:]}
        assert {node for node in read if read.nodes[node]["best"]} == set(tree.best_path)
        for row in tree.nodes:
            for name in ("content", "question", "visits", "spre"):
                assert read.nodes[row["node_id"]].get(name) == row[name]
    with pytest.raises(RunError, match=r"holds other files and no graphml-export\.json"):
        export_graphml(run, run)


@pytest.mark.parametrize("id", ["../../etc/passwd", "a/b\\c:*?", "-rf", "x" * 400, "\x1b]8;;\u202e", " ", FORBIDDEN])
def test_any_id_and_text_gives_a_readable_file_within_the_folder(id, tmp_path):
    run = write_run(tmp_path / "run", rows_of([-1, 0], id, content=FORBIDDEN))
    export_graphml(run, tmp_path / "graphs")
    (path,) = (tmp_path / "graphs").glob("*.graphml")
    assert re.fullmatch(r"00000-\w{0,60}\.graphml", path.name, re.ASCII)
    read = nx.read_graphml(path, node_type=int)
    assert read.nodes[0]["question_id"] == re.sub("[\x00\x08\x1b\ufffe\uffff]", "\ufffd", id)
    assert read.nodes[1]["content"] == "a\ufffdb\ufffd[31mc\ufffd\ufffd\ufffd"
