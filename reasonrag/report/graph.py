"""Export trees as networkx graphs, and write them as files for other tools: GraphML and node-link JSON."""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from reasonrag.core.errors import DataError
from reasonrag.report.trees import QuestionTree, read_trees
from reasonrag.storage.files import write_text, writing
from reasonrag.storage.folder import Folder
from reasonrag.storage.parquet import Row

if TYPE_CHECKING:
    import networkx as nx

_GRAPH_COLUMNS = ("dataset", "question_id", "question", "golden_answers")
# Prompts would repeat the text of all nodes above; only training needs token ids and log-probabilities.
_NODE_COLUMNS = (
    *("depth", "origin", "stage", "action", "content", "text", "stop_reason", "finish_reason"),
    *("prompt_tokens", "completion_tokens", "visits", "valued", "value", "spre", "f1", "em"),
)
_LIST_SEPARATOR = " | "
# XML 1.0, production 2; a carriage return is allowed, but every reader makes a line feed of it.
_NO_XML_CHARACTER = re.compile("[^\t\n\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NOT_IN_A_FILE_NAME = re.compile(r"[^A-Za-z0-9_]+")


def to_networkx(tree: QuestionTree) -> nx.DiGraph:
    """Return a tree as a directed graph with edges from parent to child and ids as nodes.

    The graph's attributes describe the question. A node's attributes are columns of `tables.tree_schema`, `passages`
    (the ids of its passages) and `best` (whether it is on the best path). Missing values are None.
    """
    import networkx as nx

    graph = nx.DiGraph(**{name: tree.root[name] for name in _GRAPH_COLUMNS})
    best = set(tree.best_path)
    for row in tree.nodes:
        passage_ids = [passage["id"] for passage in row["passages"] or ()]
        columns = {name: row[name] for name in _NODE_COLUMNS}
        graph.add_node(row["node_id"], **columns, passages=passage_ids, best=row["node_id"] in best)
    graph.add_edges_from((row["parent_id"], row["node_id"]) for row in tree.nodes[1:])
    return graph


def graphml(graph: nx.DiGraph) -> str:
    """Return a graph as GraphML, which has no nulls, no lists, and not every character.

    Attributes without a value are omitted, lists are joined by ` | `, line ends become line feeds, and characters that
    XML forbids become U+FFFD.
    """
    import networkx as nx

    for attributes in (graph.graph, *graph.nodes.values()):
        for name, value in list(attributes.items()):
            if value is None:
                del attributes[name]
                continue
            text = _LIST_SEPARATOR.join(map(str, value)) if isinstance(value, list) else value
            if isinstance(text, str):
                text = text.replace("\r\n", "\n").replace("\r", "\n")
                attributes[name] = _NO_XML_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", text)
    written = io.BytesIO()
    # Not `write_graphml`, which writes other bytes where lxml is installed, nor `generate_graphml`, which breaks lines
    # at U+2028.
    nx.write_graphml_xml(graph, written)
    return written.getvalue().decode("utf-8")


def write_graphml(run: Path, out: Path) -> int:
    """Write one GraphML file per question of a finished run into a folder; return the number of files.

    Raises:
        RunError: `out` holds other files, or the run has no tables.
        DataError: the rows of a question are not a tree.
    """
    Folder(out, "set of graphs", "*.graphml").claim()
    files = 0
    for tree in read_trees(run):
        write_text(out / file_name(tree.root), graphml(to_networkx(tree)))
        files += 1
    return files


def write_node_link(run: Path, out: Path) -> int:
    """Write networkx's node-link JSON, one question per line, to the file `out`; return the number of lines.

    `networkx.node_link_graph(json.loads(line), edges="edges")` reads a line back. All but ASCII is escaped, so that no
    character from a model acts on a terminal, and lone surrogates survive.

    Raises:
        RunError: the run has no tables.
        DataError: the rows of a question are not a tree, or `out` cannot be written.
    """
    import networkx as nx

    lines = 0
    try:
        with writing(out) as file:
            for tree in read_trees(run):
                data = nx.node_link_data(to_networkx(tree), edges="edges")
                file.write(json.dumps(data, allow_nan=False).encode() + b"\n")
                lines += 1
    except OSError as error:
        raise DataError(f"{out} cannot be written ({error.strerror}); choose another file for --out") from error
    return lines


def file_name(row: Row) -> str:
    """Name a question's GraphML file by the plain characters of its id and a checksum, because ids may hold anything.

    >>> file_name({"dataset": "popqa", "question_id": "../a b"})
    'a_b-f2c8b4d99cdb.graphml'
    """
    digest = hashlib.sha256(json.dumps([row["dataset"], row["question_id"]]).encode()).hexdigest()
    plain = _NOT_IN_A_FILE_NAME.sub("_", row["question_id"]).strip("_")[:60]
    return f"{plain or 'question'}-{digest[:12]}.graphml"
