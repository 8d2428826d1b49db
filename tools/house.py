"""Measure the structure of the package and hold it to its budget: `python -m tools.house [--check]`.

`--check` is a part of `make lint`: it fails if a room has more lines of code than `[tool.house.budget]` of
`pyproject.toml` allows, if modules import each other in a circle, or if the docstrings use one of `PHRASES` too often.
Whoever adds a feature raises the budget of its room in the same commit, and writes into the commit which lines went
instead.

`--trace` runs three commands in the demo world under a profiler and counts the files of the package in which a function
ran. It counts helpers, errors and settings too: the number is an upper bound of what a reader has to follow.

Everything else is read from the source, so two checkouts can be compared: `git worktree add ../before e665dd8`, then
`python -m tools.house --trace --before ../before`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
FOLDERS = ("reasonrag", "papers", "contrib", "benchmarks", "tools", "examples", "tests")

# Translated idiom, by its better form. At most `MOST_PHRASES` of each in 10,000 words of docstrings.
PHRASES = {
    "a noun, not 'all that', 'those that', 'what is'": (
        r"all that|those (that|who)|what (is|are|was|were|it|they|a|the|has|have)"
    ),
    "'not' or 'without', not 'is no', 'is none'": r"(is|are|was|were) (no|none)",
    "a verb of the code, not 'told', 'says'": r"told|tells?|says?|said",
    "a noun, not 'nobody', 'somebody', 'whose'": r"nobody|somebody|anybody|everybody|whose",
    "'if' or 'when', not 'where it', 'where they'": r"where (it|they|there|nothing|one)",
    "'after', 'next to', 'again', not 'behind', 'beside', 'anew'": r"behind|beside|anew",
}
MOST_PHRASES = 10.0

# The traced runs. The second one reads the trees that `TREES` makes.
TREES = "build-tree --preset demo --limit 6 --out {folder}/trees"
RUNS = {
    "build-tree": "build-tree --dataset demo --policy extractive --limit 6 --out {folder}/run",
    "dpo train": "dpo train --preset demo --data {folder}/trees --out {folder}/dpo",
    "rl train, one step": "rl train --preset demo-hiprag --max-steps 1 --out {folder}/online",
}
_TRACE = """
import json, os, sys, threading
from pathlib import Path
package = str(Path.cwd() / "reasonrag")
files = set()
def note(frame, event, argument):
    code = frame.f_code
    is_function = code.co_flags & 1 and not code.co_name.startswith("<")  # no module, class body, comprehension
    if event == "call" and is_function and code.co_filename.startswith(package):
        files.add(code.co_filename[len(package) + 1:])
threading.setprofile(note)
sys.setprofile(note)
from reasonrag.__main__ import main
try:
    main()
except SystemExit:
    pass
sys.setprofile(None)
Path(os.environ["TRACED_FILES"]).write_text(json.dumps(sorted(files)))
"""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Source:
    """The Python files of a folder, parsed."""

    def __init__(self, folder: Path) -> None:
        self.texts = {file: file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))}
        self.trees = {file: ast.parse(text) for file, text in self.texts.items()}

    def nodes(self) -> Iterator[ast.AST]:
        """Yield every node of every file."""
        for tree in self.trees.values():
            yield from ast.walk(tree)

    def code_lines(self) -> int:
        """Count the lines that are not blank, a comment or a docstring: explaining is free."""
        return sum(len(code_lines(text, self.trees[file])) for file, text in self.texts.items())

    def comment_lines(self) -> int:
        """Count the lines with nothing but a comment."""
        return sum(line.lstrip().startswith("#") for text in self.texts.values() for line in text.splitlines())

    def mean_line(self) -> float:
        """Return the mean length, in characters, of a line that is not blank."""
        return statistics.mean(len(line) for text in self.texts.values() for line in text.splitlines() if line.strip())

    def function_lengths(self) -> list[int]:
        """Return the length of each function in lines, with its docstring, in ascending order."""
        functions = (node for node in self.nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)

    def local_names(self) -> Iterator[str]:
        """Yield the names that each function binds: arguments, assignments and loop variables."""
        for node in self.nodes():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        names.add(inner.id)
                yield from names - {"self", "cls", "_"}

    def single_caller_helpers(self) -> int:
        """Count the private functions whose name is mentioned exactly once outside of their definition."""
        mentions = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in self.nodes()
            if isinstance(node, ast.Name | ast.Attribute)
        )
        functions = (node for node in self.nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        return sum(re.match(r"_[a-z]", node.name) is not None and mentions[node.name] == 1 for node in functions)

    def docstrings(self) -> str:
        """Return all docstrings as one text."""
        texts = (ast.get_docstring(node) for node in self.nodes() if isinstance(node, _DOCUMENTED))
        return "\n".join(text for text in texts if text)

    def phrases(self) -> dict[str, float]:
        """Return how often the docstrings use each of `PHRASES`, in 10,000 words."""
        text = self.docstrings()
        words = len(re.findall(r"[A-Za-z']+", text))
        return {
            better: 1e4 * len(re.findall(rf"\b({phrase})\b", text, re.IGNORECASE)) / words
            for better, phrase in PHRASES.items()
        }


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold code: no blank line, comment or docstring."""
    documentation: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documentation |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, *_LAYOUT):
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - documentation


def rooms(root: Path) -> dict[str, int]:
    """Return the lines of code of each room of the package; modules at its top are one room, `top`."""
    package = root / "reasonrag"
    counts = {folder.name: Source(folder).code_lines() for folder in sorted(package.iterdir()) if folder.is_dir()}
    top = [file.read_text(encoding="utf-8") for file in package.glob("*.py")]
    counts["top"] = sum(len(code_lines(text, ast.parse(text))) for text in top)
    return {room: lines for room, lines in counts.items() if lines}


def circles(root: Path) -> list[list[str]]:
    """Return the modules of the package that import each other, inside functions and for type checkers too."""
    files = {file: ".".join(file.relative_to(root).with_suffix("").parts) for file in root.glob("reasonrag/**/*.py")}
    known = {name.removesuffix(".__init__") for name in files.values()}
    graph = nx.DiGraph()
    for file, name in files.items():
        module = name.removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            imported: set[str] = set()
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                imported = {alias.name for alias in node.names}
            graph.add_edges_from((module, other) for other in imported & known - {module})
    graph.remove_node("reasonrag")  # the surface names every room, and imports none
    return [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]


def excesses(root: Path) -> list[str]:
    """Return one line for each budget or limit that the checkout does not keep."""
    house = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["house"]
    problems = [f"modules import each other: {', '.join(group)}" for group in circles(root)]
    for room, lines in rooms(root).items():
        if lines > (most := house["budget"].get(room, 0)):
            problems.append(f"{room}: {lines} lines of code, {most} allowed: delete some, or raise [tool.house.budget]")
    for better, rate in Source(root / "reasonrag").phrases().items():
        if rate > MOST_PHRASES:
            problems.append(f"docstrings: {rate:.1f} in 10,000 words, {MOST_PHRASES:g} allowed; write {better}")
    return problems


def traced_files(root: Path) -> dict[str, list[str]]:
    """Run the commands of `RUNS` in a checkout; return, for each, the files of the package in which a function ran."""
    traced = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(root), "TRACED_FILES": f"{folder}/files.json"}
        for name, command in {"": TREES, **RUNS}.items():
            arguments = command.format(folder=folder).split()
            subprocess.run(
                [sys.executable, "-c", _TRACE, *arguments], cwd=root, env=environment, capture_output=True, check=True
            )
            traced[name] = json.loads(Path(folder, "files.json").read_text(encoding="utf-8"))
    del traced[""]
    return traced


def settings(root: Path) -> str:
    """Count the fields of the models that configure commands."""
    code = "from docs.reference.settings import SETTINGS, fields\n"
    code += "print(sum(1 for _, model, *_ in SETTINGS for _ in fields(model)), end='')"
    return subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True)


def measures(root: Path, *, trace: bool) -> dict[str, str]:
    """Return every measure of a checkout by its name, as text."""
    sources = {folder: Source(root / folder) for folder in FOLDERS if (root / folder).is_dir()}
    package = sources["reasonrag"]
    code = {folder: source.code_lines() for folder, source in sources.items()}
    lengths, names = package.function_lengths(), list(package.local_names())
    lines = sum(text.count("\n") for text in package.texts.values())
    comprehensions = sum(isinstance(node, _COMPREHENSIONS) for node in package.nodes())
    rows = {
        "modules of the package": f"{len(package.texts)}",
        "lines of the package": f"{lines:,}",
        "code lines of the package": f"{code['reasonrag']:,}",
        "code lines with " + ", ".join(FOLDERS[1:-1]): f"{sum(code.values()) - code['tests']:,}",
        "code lines of the tests": f"{code['tests']:,}",
        "mean length of a line": f"{package.mean_line():.1f}",
        "function, median": f"{statistics.median(lengths):g}",
        "function, 90 % are at most": f"{lengths[int(0.9 * len(lengths))]}",
        "private functions with one caller": f"{package.single_caller_helpers()}",
        "mean length of a local name": f"{statistics.mean(map(len, names)):.2f}",
        "comprehensions per 1,000 lines": f"{1000 * comprehensions / lines:.1f}",
        "comment lines per 100 code lines": f"{100 * package.comment_lines() / code['reasonrag']:.1f}",
        "settings, those of several commands in each": settings(root),
    }
    rows |= {f"in 10,000 words: {better}": f"{rate:.1f}" for better, rate in package.phrases().items()}
    if trace:
        rows |= {f"files that run, {name}": f"{len(files)}" for name, files in traced_files(root).items()}
        help_text = subprocess.check_output([sys.executable, "-m", "reasonrag", "build-tree", "--help"], cwd=root)
        rows["lines of build-tree --help"] = f"{help_text.count(10)}"
    return rows


def main() -> None:
    """Print the table, or the budgets that are not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the package is above its budget")
    parser.add_argument("--before", type=Path, help="another checkout, for the first column")
    parser.add_argument("--trace", action="store_true", help="also run three commands and count the files they use")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit("\n".join(excesses(ROOT)) or None)
    now = measures(ROOT, trace=arguments.trace)
    before = measures(arguments.before.resolve(), trace=arguments.trace) if arguments.before else {}
    table = Table("measure", "before", "now") if before else Table("measure", "now")
    for name, value in now.items():
        table.add_row(name, *([before.get(name, "")] if before else []), value)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["house"]["budget"]
    by_room = Table("room", "code lines", "budget")
    for room, lines in rooms(ROOT).items():
        by_room.add_row(room, f"{lines}", f"{budget.get(room, 0)}")
    console.print(by_room)


if __name__ == "__main__":
    main()
