"""Check files on disk: tables, a run, an index, a model, a training run. `publish` makes the same checks.

The readers of each kind raise one error per problem; this collects them. A journal is checked whenever it
is opened, so it is left out here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError, InputError, RunError
from reasonrag.core.text import one_line
from reasonrag.dpo.pairs import Question, repeated_questions
from reasonrag.dpo.preferences import PairRules, check_of_run, check_shards, pairs_in, split_of
from reasonrag.llm.model_folder import check_base, check_tensors, model_files, shards_problem
from reasonrag.retrieval.index import IndexFolder
from reasonrag.spre.estimate import SHAPE, check_tree
from reasonrag.storage import tables
from reasonrag.storage.files import read_json, reading
from reasonrag.storage.folder import read_config, read_run
from reasonrag.storage.parquet import by_question, column_names, not_finite, read_batches
from reasonrag.storage.questions import rollout_files
from reasonrag.training import run as training
from reasonrag.training.run import BEST, CHECKPOINTS, MARKER, MERGED, SUMMARY

_TABLES = {
    "nodes": tables.tree_schema,
    "pairs": tables.pair_schema,
    "pairs of trajectories": tables.trajectory_pair_schema,
    "trajectories": tables.trajectory_schema,
    "rollouts": tables.rollout_schema,
    "plans": tables.plan_schema,
}
_OTHER = "pairs of others"
_CHECKSUMS = f"files that have a checksum in {SUMMARY}"
_WARNINGS = ("pairs checked for contradictions", "texts by split")  # `publish` publishes all the same
_NOT_TABLES = frozenset(("shards", CHECKPOINTS))  # of a run in shards, its own tables are links to theirs


@dataclass(slots=True)
class Check:
    """How many things of a kind were checked, and one line for each problem."""

    count: int = 0
    problems: list[str] = field(default_factory=list)


class Verified:
    """The result of checking a path: `checks` by the kind of thing, and the `pairs`."""

    def __init__(self) -> None:
        self.checks: defaultdict[str, Check] = defaultdict(Check)
        self.pairs = PairRules()

    def check(self, what: str, test: Callable[..., int | None], *arguments: Any, **options: Any) -> bool:
        """Add the count that a test returns (None: one thing); return False, and keep the problem, if it raises one."""
        try:
            count = test(*arguments, **options)
        except InputError as error:
            self.note(what, 0, str(error))
            return False
        self.note(what, 1 if count is None else count)
        return True

    def note(self, what: str, count: int, problem: str = "") -> None:
        """Count checked things, and keep a problem of them."""
        self.checks[what].count += count
        self.checks[what].problems += filter(None, [problem])

    @property
    def problems(self) -> list[str]:
        return [problem for check in self.checks.values() for problem in check.problems]

    def refuse_grave(self) -> None:
        """Raise DataError with the first problem that is more than a warning, if there is any."""
        grave = [problem for what, check in self.checks.items() if what not in _WARNINGS for problem in check.problems]
        if grave:
            more = f" (and {len(grave) - 1} more problems; `reasonrag verify` lists them)" if grave[1:] else ""
            raise DataError(f"{grave[0]}{more}")


def mapping(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the mapping under a name; an empty one if there is another value."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def verify(path: Path) -> Verified:
    """Check a file or a folder in every known way; an index may remember its checksums, nothing else is changed.

    Raises:
        RunError: nothing that could be checked is there.
    """
    verified = Verified()
    with reading(path) if (path / "run.json").is_file() else nullcontext():  # a training run is written bit by bit
        if path.exists():
            _check_tables(path, verified)
    index = IndexFolder(path)
    for part in index.parts():
        verified.check("files of the index", lambda part=part: len(index.verify(part, fully=True).files))
    if (path / SUMMARY).exists():
        verified.check(_CHECKSUMS, training.check_trained, path)
        verified.check(SUMMARY, training.check_summary, path)
    if (path / CHECKPOINTS).is_dir():  # a published policy has none, and no settings
        verified.check("config.yaml", lambda: bool(read_config(path, "the same command")))
    if any(path.glob("rollouts/step-*")):
        verified.check("rollouts by step", lambda: len(rollout_files(path)))
    checkpoints = sorted(path.glob(f"{CHECKPOINTS}/checkpoint-*"))
    checkpoints += [marker.parent for marker in path.glob(f"{BEST}/{MARKER}")]
    for kept in (*checkpoints, *path.glob(f"{CHECKPOINTS}/rows-*")):  # the same command makes the latter again
        problem = training.checkpoint_problem(kept)
        verified.note("checkpoints" if kept in checkpoints else "token rows", 1, problem and f"{kept.name}: {problem}")
    for folder in dict.fromkeys((path, path / MERGED, path / BEST, *checkpoints)):
        _check_model(folder, "" if folder == path else f" of {folder.name}", verified)
    if "tensors" in verified.checks:
        verified.note(_CHECKSUMS, 0)  # a count of 0 is printed as "not checked"
    if not verified.checks:
        raise RunError(
            f"{path} {'holds nothing that can be checked' if path.exists() else 'does not exist'}: give a run, a "
            "Parquet file or a folder of them, an index, a model or a training run"
        )
    return verified


def _check_tables(path: Path, verified: Verified) -> None:
    """Check Parquet files by their columns, then the trees and pairs in them; of a run, also its `run.json`."""
    # Files are told apart by their columns: tables of others, and single files, have no names of ours.
    files_of: defaultdict[str, list[Path]] = defaultdict(list)
    for file in [path] if path.suffix == ".parquet" else sorted(path.rglob("*.parquet")):
        if not any(part in _NOT_TABLES or part.startswith(".") for part in file.relative_to(path).parts):
            verified.check("Parquet files", lambda file=file: files_of[_kind(file)].append(file))
    for folder in sorted({file.parent for files in files_of.values() for file in files} - {path.parent}):
        verified.check("folders of Parquet files", check_shards, folder)
    sound: dict[str, list[Path]] = {}
    for kind, files in files_of.items():
        sound[kind] = [file for file in files if verified.check(kind, _count_rows, file, _TABLES.get(kind))]
    summary = read_json(path / "run.json")
    if "nodes" in sound:
        _check_trees(path, sound["nodes"], verified)
    elif summary is not None:
        verified.check("config.yaml", lambda: read_run(path) and None)
    # Pairs come after the trees: which questions have the same text is known from these.
    for kind in sound:
        for file in sound[kind] if "pairs" in kind else ():
            verified.check("preferences", _add_pairs, verified.pairs, file, summary or {})
    pairs, shared = verified.pairs, len(verified.pairs.shared_texts)
    if pairs.rows:
        verified.check("questions by split", pairs.check_questions, "the pairs")
        problem = f"{shared} texts are in both splits: held-out metrics are not of unseen questions" if shared else ""
        verified.note("texts by split", len(pairs.texts), problem)
        verified.note("pairs checked for contradictions", pairs.rows.total(), str(pairs))
    if summary is None:
        is_run = (path / "run.json").exists() or (path / "journal.sqlite").exists()
        if is_run and not (path / SUMMARY).exists() and not (path / CHECKPOINTS).exists():
            problem = "run.json is missing or damaged: the same build-tree command writes it"
            verified.note("run.json", 0, problem)
    elif files_of == sound and not verified.checks["Parquet files"].problems:  # what cannot be read was not counted
        # Published runs have no journal, and may have no trees.
        _check_counts(verified, summary, trees="nodes" in sound or (path / "journal.sqlite").exists())


def _check_counts(verified: Verified, summary: Mapping[str, Any], *, trees: bool) -> None:
    """Compare the counts in a run's `run.json`, which reports and cards show, with the rows of its tables."""
    rows = verified.pairs.rows
    counts = {("pairs", "total"): rows.total(), ("pairs", "train"): rows["train"], ("pairs", "test"): rows["test"]}
    if trees:
        counts["trees", "nodes"] = verified.checks["nodes"].count
        counts["trees", "questions"] = verified.checks["trees"].count
    for (table, name), count in counts.items():
        written = mapping(summary, table).get(name, count)
        command = "`reasonrag pairs`" if table == "pairs" else "the same build-tree command"
        problem = f"run.json says that {table}.{name} is {written}, and the tables hold {count}; write them again with "
        verified.note("run.json", 1, "" if written == count else problem + command)


def _kind(file: Path) -> str:
    """Return which of our tables a file is: the one that it shares most names with, so that damaged names are seen."""
    names = set(column_names(file))
    shares = {}
    for kind, table in _TABLES.items():
        ours = set(table().names)
        shares[kind] = len(names & ours) / len(names | ours)
    best = max(shares, key=lambda kind: shares[kind])
    return best if shares[best] > 0.5 else _OTHER  # TRL's three names are among ours, too


def _count_rows(file: Path, table: tables.Described | None) -> int:
    """Return the number of rows in a file; raise DataError if it is damaged, or a number is NaN or infinite."""
    rows = 0
    for batch in read_batches(file, None if table is None else table()):
        rows += batch.num_rows
        if column := not_finite(batch):
            raise DataError(f"{file.name}: {column} holds NaN or an infinity")
    return rows


def _check_trees(path: Path, files: Sequence[Path], verified: Verified) -> None:
    """Check each question's rows, and learn which questions have the same text."""
    spre: dict[str, Any] = {}
    if read_json(path / "run.json") is not None:
        names = {"alpha", "weighting"}
        verified.check("config.yaml", lambda: spre.update(read_run(path)[0].value.model_dump(include=names)))
    # The columns of the shape alone: texts are most of a table and prove nothing about the tree.
    batches = (batch for file in files for batch in read_batches(file, tables.tree_schema(), columns=SHAPE))
    questions: set[Question] = set()
    for question, tree in by_question(row for batch in batches for row in batch.to_pylist()):
        verified.check("trees", check_tree, tree, fully=True, **spre)
        if question in questions:
            verified.note("trees", 0, f"question {question[1]!r}: its rows are in two places")
        questions.add(question)
    verified.pairs = PairRules(repeated_questions(files))


def _add_pairs(pairs: PairRules, file: Path, summary: Mapping[str, Any]) -> int:
    """Add the pairs of a file as `dpo train` reads them; return their number."""
    check_of_run(file, summary)
    before = pairs.rows.total()
    split = "train" if split_of(file.name) == "train" else "test"  # two held-out splits may share questions
    for row in pairs_in(file):
        pairs.add_row(split, row)
    return pairs.rows.total() - before


def _check_model(folder: Path, where: str, verified: Verified) -> None:
    """Check a folder of a model: every weight is a number, no file is code, and the tokenizer can be read."""
    files = [folder] if folder.is_file() else [*model_files(folder), *folder.glob("adapter_model.bin")]
    is_model = any(file.suffix in (".safetensors", ".bin") for file in files)
    if problem := shards_problem(folder):
        verified.note(f"index of weights{where}", 1, problem)
    if (folder / "adapter_config.json").is_file():
        verified.check(f"model of the adapter{where}", check_base, folder)
    for file in files if is_model else ():
        if file.suffix == ".safetensors":
            verified.check(f"tensors{where}", check_tensors, file)
        elif file.suffix in (".json", ".py", ".bin"):
            problem = _settings_problem(file)
            verified.note(f"settings of the model{where}", 1, problem and f"{file.name} {problem}")


def _settings_problem(file: Path) -> str:
    if file.suffix == ".bin":
        return "is pickled, and unpickling can run code; save the weights as safetensors"
    if file.suffix == ".py":
        return "is code that comes with the model; no command runs it without --trust-remote-code"
    if (settings := read_json(file)) is None:
        return "is not JSON that can be read"
    if file.name == "tokenizer.json":
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no class of its own
            return f"is not a readable tokenizer ({one_line(str(error))[:80]})"
    return "names code that comes with the model (auto_map)" if "auto_map" in settings else ""
