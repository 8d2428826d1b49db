"""A real language model and real questions through the whole loop: demonstrations, SFT, trees, DPO, GRPO, evaluation.

The questions are those of HotpotQA, 2WikiMultiHopQA and MuSiQue in a folder of the user's, searched in the paragraphs
that come with them. `prepare` cuts them into disjoint splits by a hash of their ids. No row of them is on the page.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from papers.comparison import BASE, NO_GUARDS, Paper, Scale
from papers.plan import Stage
from reasonrag.core.errors import DataError
from reasonrag.core.text import redact_data
from reasonrag.storage.files import write_json, write_text, writing

DATA_SETS = ("hotpotqa", "2wikimultihopqa", "musique")
# Each split ends at this number in [0, 1), the hash of a question's id.
SPLITS = {"demonstrations": 0.45, "search": 0.77, "test": 1.0}
# Questions and passages of our own, so that a page can show a tree. They are searched and trained on with the others.
OURS = "ours"
_QUESTIONS = (
    ("windows", "In which town was the artist born who made the windows of Vardal Library?", "Lillesand"),
    ("bridges", "Which bridge was opened first, Harrow Bridge or Tamsin Bridge?", "Tamsin Bridge"),
    ("organ", "Who built the organ of the church that Otto Brandt designed?", "Ines Carvalho"),
)
_PASSAGES = (
    "Vardal Library\nVardal Library is a public library opened in 1987. Its windows were made by Maren Holt.",
    "Maren Holt\nMaren Holt is a glass artist. She was born in Lillesand in 1951 and works in Bergen.",
    "Lillesand Museum\nLillesand Museum shows boats and sails. It stands near Vardal Square.",
    "Harrow Bridge\nHarrow Bridge crosses the river Enn. It was opened in 1931.",
    "Tamsin Bridge\nTamsin Bridge is a stone bridge over the river Enn, opened in 1874.",
    "Otto Brandt\nOtto Brandt was an architect. He designed the church of Saint Olga and two schools.",
    "Saint Olga\nSaint Olga is a church of 1902. Its organ, with 41 stops, was built by Ines Carvalho.",
)
_BATCH = 6  # examples per optimizer step
_STEPS = {"sft": 200, "sft-chosen": 40, "dpo": 50, "dpo-alpha1": 50, "grpo": 10}
_RATES = {"sft": "3e-4", "sft-chosen": "2e-4", "dpo": "5e-5", "dpo-alpha1": "5e-5"}
_SEARCHED = ("--top-k", "2", "--set", "retrieval.max_passage_chars=300", "--max-turns", "5")
_MAX_TOKENS = 192  # of a step; the longest demonstration has 170
_ACTING = ("--max-tokens", str(_MAX_TOKENS), "--set", "policy.dtype=bfloat16")
_FEW = ("--min-examples", "1", "--min-questions", "1")  # the comparison is of what so few pairs do
_DEMONSTRATED = 6  # questions that the reader demonstrates for each one that the policy searches a tree of


def real_training(paper: Paper, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
    """Yield demonstrations, SFT on them, trees of that policy, and what is trained on their pairs."""
    limit, iterations = scale.questions or 0, scale.iterations or 0
    demonstrations, trees, sft = folder / "demonstrations", folder / "trees", folder / "sft"
    alpha1 = folder / "pairs-alpha1"

    def searched(out: Path, split: str, limit: int, *arguments: str, needs: tuple[Path, ...] = ()) -> Stage:
        sets = (*_questions(folder, split), "--limit", str(limit), *_SEARCHED)
        return Stage.writing(out, "build-tree", *sets, "--lag", "0", "--seed", str(seed), *arguments, needs=needs)

    def trained(name: str, model: Path, data: Path) -> Stage:
        is_first, is_dpo = name == "sft", name.startswith("dpo")
        start = (str(model), *_template(paper), "--examples", "trajectories") if is_first else (str(model / "merged"),)
        steps = min(_STEPS[name], scale.max_steps or _STEPS[name])
        arguments = ["dpo" if is_dpo else "sft", "train", "--data", str(data), "--model", *start]
        arguments += ["--learning-rate", _RATES[name], "--batch-size", "1", "--accumulation", str(_BATCH)]
        arguments += [*(("--beta", "0.1") if is_dpo else ()), "--set", f"max_steps={steps}", "--save-steps", "10"]
        arguments += ["--set", "trainer.logging_steps=2", "--merge", "--seed", str(seed), *_FEW]
        return Stage.writing(folder / name, *arguments, needs=(data,) if is_first else (data, model))

    reader = ("--policy", "extractive", "--prompts", "brief", "--iterations", str(2 * iterations))
    yield searched(demonstrations, "demonstrations", _DEMONSTRATED * limit, *reader)
    yield trained("sft", folder.parent / "model", demonstrations)
    shape = ("--iterations", str(iterations), "--rollouts", "1", "--max-children", "2", "--test-share", "0")
    yield searched(trees, "search", limit, "--policy", f"hf:{sft / 'merged'}", *_ACTING, *shape, needs=(sft,))
    for name in ("sft-chosen", "dpo"):
        yield trained(name, sft, trees)
    yield Stage.writing(alpha1, "pairs", str(trees), "--alpha", "1", needs=(trees,))
    yield trained("dpo-alpha1", sft, alpha1)
    dpo = folder / "dpo"
    steps = min(_STEPS["grpo"], scale.max_steps or _STEPS["grpo"])
    arguments = ["rl", "train", *_questions(folder, "search"), *_SEARCHED, "--model", str(dpo / "merged")]
    arguments += ["--reward", "spre", "--method", "lora", "--learning-rate", "5e-5", "--max-steps", str(steps)]
    arguments += ["--questions-per-step", "4", "--group-size", "4", "--batch-size", "4", "--save-steps", "1", "--merge"]
    arguments += ["--seed", str(seed), "--min-questions", "1"]
    settings = (f"rollout.max_tokens={_MAX_TOKENS}", "rollout.batch_size=16", "validation.steps=0", *NO_GUARDS)
    for setting in settings:
        arguments += ["--set", setting]
    yield Stage.writing(folder / "grpo", *arguments, needs=(dpo,))


def real_evaluation(paper: Paper, folder: Path, name: str, seed: int, scale: Scale) -> Stage:
    """Return the command that evaluates a variant, or the model itself, on the test questions."""
    spec = folder.parent / "model" if name == BASE else folder / name / "merged"
    arguments = ("eval", *_questions(folder, "test"), "--limit", str(scale.test_questions), *_SEARCHED, *_ACTING)
    # A base model writes no step that can be read, and that is a result.
    base = (*_template(paper), "--max-unreadable", "1") if name == BASE else ()
    temperatures = "0,1" if paper.sampled is None or name in paper.sampled else "0"
    policy = ("--policy", f"{name}=hf:{spec}", "--prompts", "brief", *base)
    decoding = ("--temperature", temperatures, "--seed", str(seed))
    needs = () if name == BASE else (folder / name,)
    return Stage.writing(folder / "eval" / name, *arguments, *policy, *decoding, needs=needs)


def _template(paper: Paper) -> tuple[str, ...]:
    return ("--chat-template", paper.chat_template) if paper.chat_template else ()


def prepare(model: Path, data: Path, out: Path) -> None:
    """Write `out/data`, the questions by split and one corpus of all paragraphs, and link `out/model` to the model.

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
    for name in DATA_SETS:
        for row in _rows(data / "questions" / f"{name}.jsonl"):
            if row.get("metadata", {}).get("answerable") is not False:
                splits[split_of(name, row["id"])].setdefault(name, []).append(row)
        for row in _rows(data / "corpus" / f"{name}.jsonl.gz"):
            corpus.setdefault(row["contents"], row)
    splits["search"][OURS] = [{"id": id, "question": text, "golden_answers": [gold]} for id, text, gold in _QUESTIONS]
    for number, contents in enumerate(_PASSAGES):
        corpus[contents] = {"id": f"{OURS}-{number}", "contents": contents}
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
    (out / "model").unlink(missing_ok=True)
    (out / "model").symlink_to(model.resolve(), target_is_directory=True)


def split_of(dataset: str, question_id: str) -> str:
    """Return the split of a question, which depends on its data set and id alone.

    >>> split_of("musique", "2hop__1_2"), split_of("musique", "2hop__2_2")
    ('demonstrations', 'search')
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


def _questions(folder: Path, split: str) -> tuple[str, ...]:
    """Return the options that name the questions of a split and the corpus; `folder` is that of a seed."""
    data = folder.parent / "data"
    names = (*DATA_SETS, OURS) if split == "search" else DATA_SETS
    sets = ",".join(str(data / split / f"{name}.jsonl") for name in names)
    return ("--dataset", sets, "--corpus", str(data / "corpus.jsonl.gz"))
