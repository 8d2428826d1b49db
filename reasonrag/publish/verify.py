"""Check files on disk: tables, a run, an index, a model, a training run. `publish` makes the same checks.

The readers of each kind raise one error per problem; this collects them. A journal is checked whenever it is opened, so
it is left out here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonrag.core.config import Config
from reasonrag.core.errors import DataError, InputError, RunError
from reasonrag.core.text import one_line
from reasonrag.core.types import as_finite
from reasonrag.dpo.pairs import Question, repeated_questions
from reasonrag.dpo.preferences import PairRules, check_shards, pairs_in, split_of
from reasonrag.llm.model_folder import check_tensors, model_files
from reasonrag.publish.card import mapping
from reasonrag.retrieval.index.folder import IndexFolder
from reasonrag.spre.tree_rules import SHAPE, check_tree
from reasonrag.storage import tables
from reasonrag.storage.files import read_json
from reasonrag.storage.folder import read_run
from reasonrag.storage.parquet import by_question, column_names, not_finite, read_batches
from reasonrag.training import folder as training
from reasonrag.training.folder import BEST, CHECKPOINTS, MERGED, SUMMARY

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
_WARNINGS = ("contradictions", "texts by split")  # `publish` publishes all the same
_NOT_TABLES = frozenset(("shards", CHECKPOINTS))  # of a run in shards, its own tables are links to theirs
_ROUNDING = 1e-9


@dataclass(slots=True)
class Check:
    """How many things of a kind were checked, and one line for each problem."""

    count: int = 0
    problems: list[str] = field(default_factory=list)


class Verified:
    """The result of checking a path: `checks` by the kind of thing, and the `pairs`."""

    def __init__(self, path: Path) -> None:
        self.path = path
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


def verify(path: Path) -> Verified:
    """Check a file or a folder in every known way; an index may remember its checksums, nothing else is changed.

    Raises:
        RunError: nothing that could be checked is there.
    """
    verified = Verified(path)
    if path.exists():
        _check_tables(verified)
    index = IndexFolder(path)
    for part in index.parts():
        verified.check("files of the index", lambda part=part: len(index.verify(part, fully=True).files))
    if (path / SUMMARY).exists():
        verified.check(_CHECKSUMS, training.check_trained, path)
        verified.check(SUMMARY, training.check_summary, path)
    if (path / CHECKPOINTS).is_dir():  # a published policy has none, and no settings
        verified.check("config.yaml", training.check_settings, path)
    checkpoints = sorted(path.glob(f"{CHECKPOINTS}/checkpoint-*"))
    for checkpoint in checkpoints:
        problem = training.checkpoint_problem(checkpoint)
        verified.note("checkpoints", 1, problem and f"{checkpoint.name}: {problem}")
    for folder in (path, path / MERGED, path / BEST, *checkpoints):
        _check_model(verified, folder)
    if "tensors" in verified.checks:
        verified.note(_CHECKSUMS, 0)  # a count of 0 is printed as "not checked"
    if not verified.checks:
        raise RunError(
            f"{path} {'holds nothing that can be checked' if path.exists() else 'does not exist'}: give a run, a "
            "Parquet file or a folder of them, an index, a model or a training run"
        )
    return verified


def _check_tables(verified: Verified) -> None:
    """Check Parquet files by their columns, then the trees and pairs in them; of a run, also its `run.json`."""
    path = verified.path
    by_kind: dict[str, list[Path]] = defaultdict(list)
    for file in [path] if path.suffix == ".parquet" else sorted(path.rglob("*.parquet")):
        if not any(part in _NOT_TABLES or part.startswith(".") for part in file.relative_to(path).parts):
            verified.check("Parquet files", lambda file=file: by_kind[_kind(file)].append(file))
    for folder in sorted({file.parent for files in by_kind.values() for file in files} - {path.parent}):
        verified.check("folders of Parquet files", check_shards, folder)
    sound: dict[str, list[Path]] = {}
    for kind, files in by_kind.items():
        sound[kind] = [file for file in files if verified.check(kind, _count_rows, file, _TABLES.get(kind))]
    configs: list[Config] = []
    summary = read_json(path / "run.json")
    if summary is not None:
        verified.check("config.yaml", lambda: configs.append(read_run(path)[0]))
    if "nodes" in sound:
        _check_trees(verified, sound["nodes"], configs)
    min_margin = as_finite(mapping(summary or {}, "pairs").get("min_margin")) or 0.0
    for kind in sound:
        for file in sound[kind] if "pairs" in kind else ():
            verified.check("preferences", _add_pairs, verified.pairs, file, min_margin)
    pairs, shared = verified.pairs, len(verified.pairs.shared_texts)
    if pairs.rows:
        verified.check("questions by split", pairs.check_questions, "the pairs")
        problem = f"{shared} texts are in both splits: held-out metrics are not of unseen questions" if shared else ""
        verified.note("texts by split", len(pairs.texts), problem)
        verified.note("contradictions", pairs.rows.total(), str(pairs))
    _check_counts(verified, summary, has_trees="nodes" in sound, readable=by_kind == sound)


def _check_counts(verified: Verified, summary: dict[str, Any] | None, *, has_trees: bool, readable: bool) -> None:
    """Compare the counts in a run's `run.json`, which reports and cards show, with the rows of its tables."""
    path, rows = verified.path, verified.pairs.rows
    has_journal = (path / "journal.sqlite").exists() and not any((path / n).exists() for n in (SUMMARY, CHECKPOINTS))
    if summary is None and (has_journal or (path / "run.json").exists()):
        problem = "run.json is missing or damaged: build-tree has not finished, or lost it; the same command writes it"
        verified.note("run.json", 0, problem)
    if summary is None or not readable or verified.checks["Parquet files"].problems:
        return  # rows that cannot be read were not counted
    counts = {("pairs", "total"): rows.total(), ("pairs", "train"): rows["train"], ("pairs", "test"): rows["test"]}
    if has_journal or has_trees:  # published runs may have no trees
        for name, kind in (("nodes", "nodes"), ("questions", "trees")):
            counts["trees", name] = verified.checks[kind].count
    for (table, name), count in counts.items():
        written = mapping(summary, table).get(name, count)
        command = "`reasonrag pairs`" if table == "pairs" else "the same build-tree command"
        problem = (
            f"run.json says that {table}.{name} is {written}, and the tables hold {count}; write them again with "
            f"{command}"
        )
        verified.note("run.json", 1, "" if written == count else problem)


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


def _check_trees(verified: Verified, files: Sequence[Path], configs: Sequence[Config]) -> None:
    """Check each question's rows, and learn which questions have the same text."""
    # Older runs do not record how SPRE was computed.
    value = next((config.value for config in configs if "weighting" in config.value.model_fields_set), None)
    spre = {"alpha": value.alpha, "weighting": value.weighting} if value else {}
    batches = (batch for file in files for batch in read_batches(file, tables.tree_schema(), columns=SHAPE))
    questions: set[Question] = set()
    for question, tree in by_question(row for batch in batches for row in batch.to_pylist()):
        verified.check("trees", check_tree, tree, fully=True, **spre)
        if question in questions:
            verified.note("trees", 0, f"question {question[1]!r}: its rows are in two places")
        questions.add(question)
    verified.pairs = PairRules(repeated_questions(files))


def _add_pairs(pairs: PairRules, file: Path, min_margin: float) -> int:
    """Add the pairs of a file as `dpo train` reads them; return their number."""
    before, low = pairs.rows.total(), None
    split = "train" if split_of(file.name) == "train" else "test"  # two held-out splits may share questions
    for row in pairs_in(file):
        pairs.add_pair(split, row)
        if row.margin is not None and row.margin < min_margin - _ROUNDING:
            low = low or row
    if low is not None:
        raise DataError(f"{low.place}: margin below min_margin ({min_margin:g}): {low.margin:g}")
    return pairs.rows.total() - before


def _check_model(verified: Verified, folder: Path) -> None:
    """Check a folder of a model: every weight is a number, no file is code, and the tokenizer can be read."""
    where = "" if folder == verified.path else f" of {folder.name}"
    files = [folder] if folder.is_file() else [*model_files(folder), *folder.glob("adapter_model.bin")]
    is_model = any(file.suffix in (".safetensors", ".bin") for file in files)
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
    settings = read_json(file)
    if settings is None:
        return "is not JSON that can be read"
    if file.name == "tokenizer.json":
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no class of its own
            return f"is not a readable tokenizer ({one_line(str(error))[:80]})"
    return "names code that comes with the model (auto_map)" if "auto_map" in settings else ""
