"""A real language model and real questions through the whole loop: demonstrations, SFT, rounds of trees and DPO, GRPO.

The questions are those of five data sets in a folder of the user's, searched in the passages that come with them.
`prepare` cuts them into disjoint splits by a hash of their ids. No row of them is on the page.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from papers.comparison import BASE, NO_GUARDS, Paper, Scale, evaluation_of
from papers.plan import ADDRESS, Stage
from reasonrag.core.errors import DataError
from reasonrag.core.text import common_text, redact_data
from reasonrag.storage.files import write_json, write_text, writing

DATA_SETS = ("hotpotqa", "2wikimultihopqa", "musique", "nq", "popqa")
# Each split ends at this number in [0, 1), the hash of a question's id. Rates and rules are chosen on `dev`.
SPLITS = {"demonstrations": 0.26, "search-1": 0.39, "search-2": 0.52, "search-3": 0.64, "dev": 0.705, "test": 1.0}
_OPENED = ("--open-tags",)
_UNREADABLE = ("--max-unreadable", "1")  # a base model writes no step that can be read, and that is a result
_SEARCHED = ("--top-k", "3", "--set", "retrieval.max_passage_chars=450", "--max-turns", "8")
_MAX_TOKENS = 128  # of a step
_TEMPERATURE = "0.7"  # of trees: at 1, half a billion parameters write few right trajectories
_BRIEF = ("--prompts", "brief")  # a policy that was trained on the format needs no description of it
_COLD = "sft-reader"  # all others go on from it
_SIBLINGS = ("--pair-rule", "siblings", "--min-confidence", "0", "--max-pairs", "0", "--path-share", "1")
# Iterations of trees as parts of `Scale.iterations`: the reader costs next to nothing, of a policy's own trees fresh
# rollouts cost about a third of the calls.
_READ, _BUILT, _PLAIN, _CONFIRMED = 2.0, 4.0, 1.0, 0.65
# Trees of the reader, or of a policy, on questions that no policy before has seen.
_TREES = {
    "trees-reader": ("reader", "demonstrations", _READ),
    "trees-builder": ("reader", "search-1", _BUILT),
    "trees-dpo": ("dpo", "search-2", _CONFIRMED),
    "trees-rejection": ("rejection", "search-2", _PLAIN),
}
# Pairs by other rules than those of the trees.
_PAIRS = {"pairs-outcome": ("trees-builder", ("--level", "trajectory")), "pairs-siblings": ("trees-builder", _SIBLINGS)}
_COLD_START = ("--examples", "trajectories", "--test-share", "0.05", "--learning-rate", "2e-4", "--epochs", "1")
_RIGHT = ("--examples", "trajectories", "--learning-rate", "1e-4", "--epochs", "1")
_DPO = ("--learning-rate", "1e-4", "--beta", "0.1", "--epochs", "1", "--set", "trainer.eval_steps=0.25")
# Policies in the order of training: what each begins with, what it learns, and how.
_TRAINED = {
    _COLD: (BASE, "trees-reader", _COLD_START),
    "dpo": (_COLD, "trees-builder", _DPO),
    "rejection": (_COLD, "trees-builder", _RIGHT),
    "dpo-outcome": (_COLD, "pairs-outcome", _DPO),
    "sft-chosen": (_COLD, "trees-builder", ("--learning-rate", "1e-4", "--epochs", "1")),
    "dpo-siblings": (_COLD, "pairs-siblings", _DPO),
    "dpo-2": ("dpo", "trees-dpo", _DPO),
    "rejection-2": ("rejection", "trees-rejection", _RIGHT),
}
_ADAPTERS = ("--lora-r", "8", "--lora-alpha", "16")
_ONLINE = {"grpo-outcome": ("--reward", "outcome"), "grpo-step": ("--reward", "spre", "--credit", "step")}
_ONLINE_STEPS = 20
_PROMPTED = {"direct": "Direct", "rag": "RAG", "ircot": "IRCoT", "search-o1": "SearchO1"}
_FEW = ("--min-questions", "1")  # whatever comes of so few is a result
_SHARED = ("trees-reader", _COLD, "trees-builder")  # all seeds have those of the first


def real_training(paper: Paper, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
    """Yield the cold start, and what is trained on trees of it, round after round."""
    plan = _Seed(paper, folder, seed, scale)
    made = set(_SHARED) if seed else set()
    for name, (_, data, _) in _TRAINED.items():
        trees = _PAIRS[data][0] if data in _PAIRS else data
        for needed, make in ((trees, plan.trees), (data, plan.pairs), (name, plan.trained)):
            if needed not in made:
                yield make(needed)
                made.add(needed)
    yield from map(plan.online, _ONLINE)


def real_evaluation(paper: Paper, folder: Path, name: str, seed: int, scale: Scale) -> Stage:
    """Return the command that evaluates a policy on the test questions."""
    return _Seed(paper, folder, seed, scale).evaluated(name)


@dataclass(frozen=True, slots=True)
class _Seed:
    """The commands of one seed."""

    paper: Paper
    folder: Path
    seed: int
    scale: Scale

    def at(self, name: str) -> Path:
        """Return the folder of a stage."""
        return (self.folder.parent / "seed-0" if name in _SHARED else self.folder) / name

    def weights(self, name: str) -> Path:
        return self.folder.parent / "model" if name == BASE else self.at(name) / "merged"

    def trees(self, name: str) -> Stage:
        policy, split, part = _TREES[name]
        iterations = max(1, round((self.scale.iterations or 0) * part))
        shape = (
            "--iterations",
            str(iterations),
            "--lag",
            "0",
            "--temperature",
            _TEMPERATURE,
            *_UNREADABLE,
            *(("--confirm", "0") if part in (_READ, _PLAIN) else ()),
        )
        questions = self._questions(split, self.scale.questions)
        return self._acting(self.at(name), policy, "build-tree", *questions, *shape, *_OPENED, *_BRIEF)

    def pairs(self, name: str) -> Stage:
        trees, rule = _PAIRS[name]
        return Stage.writing(self.at(name), "pairs", str(self.at(trees)), *rule, needs=(self.at(trees),))

    def trained(self, name: str) -> Stage:
        start, data, how = _TRAINED[name]
        arguments = ["dpo" if name.startswith("dpo") else "sft", "train", "--data", str(self.at(data))]
        arguments += ["--model", str(self.weights(start)), *(self._template() if start == BASE else ())]
        arguments += [
            *how,
            "--batch-size",
            "4",
            "--accumulation",
            "2" if name.startswith("dpo") else "4",
            "--merge",
            *_ADAPTERS,
        ]
        arguments += ["--set", "trainer.bf16=true"]
        arguments += ["--min-examples", "1", *_FEW]
        arguments += ["--set", f"max_steps={self.scale.max_steps or -1}", "--seed", str(self.seed)]
        needs = [self.at(part) for part in (data, start) if part != BASE]
        return Stage.writing(self.at(name), *arguments, needs=tuple(needs))

    def online(self, name: str) -> Stage:
        arguments = ["rl", "train", *self._questions("search-3", self.scale.questions), *_ONLINE[name]]
        arguments += ["--model", str(self.weights(_COLD)), "--format", "reasonrag", *_OPENED, *_BRIEF]
        arguments += [*_ADAPTERS, "--learning-rate", "2e-5", "--group-size", "8", "--questions-per-step", "4"]
        arguments += ["--max-steps", str(self.scale.max_steps or _ONLINE_STEPS), "--batch-size", "4"]
        arguments += ["--save-steps", "1", "--merge", "--seed", str(self.seed), *_FEW]
        settings = (f"rollout.max_tokens={_MAX_TOKENS}", "rollout.batch_size=128", "validation.steps=0", *NO_GUARDS)
        for setting in settings:
            arguments += ["--set", setting]
        return Stage.writing(self.at(name), *arguments, needs=(self.at(_COLD),))

    def evaluated(self, name: str) -> Stage:
        trained = _OPENED if name == BASE else (*_OPENED, *_BRIEF)
        form = ("--format", f"python:papers.baselines:{_PROMPTED[name]}") if name in _PROMPTED else trained
        is_sampled = self.paper.sampled is None or name in self.paper.sampled
        how = ("--temperature", "0,1" if is_sampled else "0", *_UNREADABLE, *form)
        arguments = ("eval", *self._questions("test", self.scale.test_questions), *how)
        policy = BASE if name in _PROMPTED else name
        return self._acting(evaluation_of(self.folder, name), policy, *arguments, label=f"{name}=")

    def _acting(self, out: Path, policy: str, *arguments: str, label: str = "") -> Stage:
        """Return a command in which a policy acts: served if there is a server, or in the command's own process."""
        acting = (*arguments, "--max-tokens", str(_MAX_TOKENS), "--seed", str(self.seed), "--policy")
        if policy == "reader":
            return Stage.writing(out, *acting, f"{label}extractive")
        model, needs = self.weights(policy), () if policy == BASE else (self.at(policy),)
        if self.paper.is_served:
            served = (f"{label}{ADDRESS}", "--concurrency", "32", "--set", "policy.timeout_s=3600")
            return Stage.writing(out, *acting, *served, needs=needs, serves=model)
        template = self._template() if policy == BASE else ()
        own = (f"{label}hf:{model}", "--set", "policy.dtype=bfloat16", "--set", "policy.batch_size=512", *template)
        return Stage.writing(out, *acting, *own, needs=needs)

    def _template(self) -> tuple[str, ...]:
        return ("--chat-template", self.paper.chat_template) if self.paper.chat_template else ()

    def _questions(self, split: str, limit: int | None) -> tuple[str, ...]:
        """Return the options that name the questions of a split, at most `limit` of each set, and the corpus."""
        data = self.folder.parent / "data"
        sets = ",".join(str(data / split / f"{name}.jsonl") for name in DATA_SETS)
        limited = () if limit is None else ("--limit", str(limit))
        return ("--dataset", sets, "--corpus", str(data / "corpus.jsonl.gz"), *limited, *_SEARCHED)


def prepare(model: Path, data: Path, out: Path) -> None:
    """Write `out/data`, the questions by split and one corpus of all paragraphs, and `out/model`, the model.

    Args:
        model: folder of a transformers model.
        data: folder with `questions/NAME.jsonl` and `corpus/NAME.jsonl.gz` for each of `DATA_SETS`, in the layout of
            FlashRAG: id, question, golden_answers and metadata; id and contents.
        out: the folder of the comparison.

    Raises:
        DataError: a file or the model is missing or cannot be read.
    """
    if not (model / "config.json").is_file():
        raise DataError(f"{model} is no folder of a transformers model: it has no config.json; give one as --model")
    splits: dict[str, dict[str, list[dict[str, Any]]]] = {split: {} for split in SPLITS}
    corpus: dict[str, dict[str, Any]] = {}
    asked: set[str] = set()
    for name in DATA_SETS:
        for row in _rows(data / "questions" / f"{name}.jsonl"):
            text = common_text(row["question"])
            if text not in asked and _is_answered(row.get("metadata", {})):
                asked.add(text)
                splits[split_of(name, row["id"])].setdefault(name, []).append(row)
        for row in _rows(data / "corpus" / f"{name}.jsonl.gz"):
            corpus.setdefault(row["contents"], row)
    for split, by_set in splits.items():
        if empty := [name for name in DATA_SETS if name not in by_set]:
            raise DataError(f"{data}: no question of {empty[0]} falls into the split {split}; give more questions")
        folder = out / "data" / split
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in by_set.items():
            write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with writing(out / "data" / "corpus.jsonl.gz") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        packed.writelines(json.dumps(row).encode() + b"\n" for row in corpus.values())
    counts = {split: {name: len(rows) for name, rows in by_set.items()} for split, by_set in splits.items()}
    write_json(out / "data" / "splits.json", counts | {"passages": len(corpus), "shared": _shared_passages(splits)})
    shutil.copytree(model, out / "model", copy_function=_linked, dirs_exist_ok=True)


def _linked(source: str, target: str) -> None:
    """Give a file another name, or copy it to another disk; no command follows a symbolic link out of its folder."""
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _is_answered(metadata: Mapping[str, Any]) -> bool:
    """Return whether the passages hold what a question needs, as far as the data set says."""
    marked = [metadata[key] for key in ("gold_ids", "answer_bearing_ids") if key in metadata]
    return metadata.get("answerable") is not False and (not marked or any(marked))


def split_of(dataset: str, question_id: str) -> str:
    """Return the split of a question, which depends on its data set and id alone.

    >>> split_of("musique", "2hop__1_2"), split_of("musique", "2hop__2_2")
    ('search-1', 'search-2')
    """
    digest = hashlib.sha256(f"{dataset}/{question_id}".encode()).digest()
    share = int.from_bytes(digest[:4], "big") / 2**32
    return next(split for split, end in SPLITS.items() if share < end)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                row["id"], row["contents" if path.suffix == ".gz" else "question"]
                yield redact_data(row, "a question or a passage")
    except (OSError, ValueError, KeyError, TypeError) as error:
        files = ", ".join(DATA_SETS)
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}); --data needs questions/NAME.jsonl and "
            f"corpus/NAME.jsonl.gz for {files}, with id and question, and id and contents"
        ) from error


def _shared_passages(splits: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> int:
    """Return how many test questions have a supporting passage that a question of another split has too."""
    support: dict[str, list[set[str]]] = {}
    for split, by_set in splits.items():
        rows = [row for of_set in by_set.values() for row in of_set]
        support[split] = [set(row.get("metadata", {}).get("gold_ids", ())) for row in rows]
    trained = set().union(*(ids for split in SPLITS if split != "test" for ids in support[split]))
    return sum(not trained.isdisjoint(ids) for ids in support["test"])
