"""A real language model and real questions through the whole loop: demonstrations, SFT, trees, DPO, GRPO, evaluation.

The questions are those of HotpotQA, 2WikiMultiHopQA and MuSiQue in a folder of the user's, searched in the paragraphs
that come with them. `prepare` cuts them into disjoint splits by a hash of their ids. No row of them is on the page.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from papers.comparison import BASE, NO_GUARDS, Paper, Scale, Variant
from papers.plan import Plan, Stage
from reasonrag.core.errors import DataError
from reasonrag.core.secrets import redact_data
from reasonrag.core.table import Table, inert_markdown
from reasonrag.storage.files import read_json, require_json, write_json, write_text, writing

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
_PICTURE = "real-model.tree.svg"
_DEMONSTRATED = 6  # questions that the reader demonstrates for each one that the policy searches a tree of


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel(Paper):
    """The whole loop from a base model on; `OUT/model` and `OUT/data` are what `prepare` makes."""

    chat_template: str | None = None  # of a base model that has none
    builds_trees: bool = True
    in_demo_world: bool = False

    @property
    def page(self) -> str:
        return "real-model"

    @property
    def inputs(self) -> str:
        return " ".join(("", "--model", "MODEL", *self._template, "--data", "DATA"))

    def method(self, steps: int | None) -> str:
        return (
            "`demonstrations` are trees of the extractive reader, which is no language model; `sft` is trained on\n"
            "their best trajectories, every prompt included. `trees` are those of `sft` on other questions;\n"
            "`sft-chosen` and `dpo` are trained from `sft` on their pairs, `dpo-alpha1` on those of the same trees\n"
            "without the shortest-path term of SPRE, and `grpo` from `dpo`. All train adapters (LoRA, rank 16).\n"
            "Rates and steps were set before anything was measured but for the rate of `sft`: with 1e-3 the tag that\n"
            "closes a query became less likely as training went on, so it is 3e-4. `dpo-alpha1` was added after `dpo`\n"
            "had been measured, to see why ([log](../log.md))."
        )

    def steps(self, scale: Scale) -> None:
        return None

    def training(self, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
        limit, iterations = scale.questions or 0, scale.iterations or 0
        demonstrations, trees, sft = folder / "demonstrations", folder / "trees", folder / "sft"
        alpha1 = folder / "pairs-alpha1"
        reader = ("--policy", "extractive", "--prompts", "brief", "--iterations", str(2 * iterations))
        yield self._trees(demonstrations, "demonstrations", _DEMONSTRATED * limit, seed, *reader)
        yield self._trained(folder, "sft", folder.parent / "model", demonstrations, seed, scale)
        shape = ("--iterations", str(iterations), "--rollouts", "1", "--max-children", "2", "--test-share", "0")
        policy = ("--policy", f"hf:{_merged(sft)}", *_ACTING, *shape)
        yield self._trees(trees, "search", limit, seed, *policy, needs=(sft,))
        for name in ("sft-chosen", "dpo"):
            yield self._trained(folder, name, sft, trees, seed, scale)
        yield Stage.writing(alpha1, "pairs", str(trees), "--alpha", "1", needs=(trees,))
        yield self._trained(folder, "dpo-alpha1", sft, alpha1, seed, scale)
        yield self._online(folder, seed, scale)

    def evaluation(self, folder: Path, name: str, seed: int, scale: Scale) -> Stage:
        spec = folder.parent / "model" if name == BASE else _merged(folder / name)
        arguments = ("eval", *_questions(folder, "test"), "--limit", str(scale.test_questions), *_SEARCHED, *_ACTING)
        # A base model writes no step that can be read, and that is a result.
        base = (*self._template, "--max-unreadable", "1") if name == BASE else ()
        policy = ("--policy", f"{name}=hf:{spec}", "--prompts", "brief", *base)
        temperatures = "0,1" if self.sampled is None or name in self.sampled else "0"
        decoding = ("--temperature", temperatures, "--seed", str(seed))
        needs = () if name == BASE else (folder / name,)
        return Stage.writing(folder / "eval" / name, *arguments, *policy, *decoding, needs=needs)

    @property
    def _template(self) -> tuple[str, ...]:
        return ("--chat-template", self.chat_template) if self.chat_template else ()

    def _trees(
        self, out: Path, split: str, limit: int, seed: int, *arguments: str, needs: tuple[Path, ...] = ()
    ) -> Stage:
        sets = (*_questions(out.parent, split), "--limit", str(limit))
        search = ("--lag", "0", "--seed", str(seed))
        return Stage.writing(out, "build-tree", *sets, *_SEARCHED, *search, *arguments, needs=needs)

    def _trained(self, folder: Path, name: str, model: Path, data: Path, seed: int, scale: Scale) -> Stage:
        is_first = name == "sft"
        start = (model, *self._template, "--examples", "trajectories") if is_first else (_merged(model),)
        settings = ("--learning-rate", _RATES[name], "--batch-size", "1", "--accumulation", str(_BATCH))
        steps = min(_STEPS[name], scale.max_steps or _STEPS[name])
        is_dpo = name.startswith("dpo")
        arguments = ("dpo" if is_dpo else "sft", "train", "--data", str(data), "--model", *map(str, start))
        more = ("--set", f"max_steps={steps}", "--save-steps", "10", "--set", "trainer.logging_steps=2", "--merge")
        own = ("--beta", "0.1") if is_dpo else ()
        needs = (data,) if is_first else (data, model)
        return Stage.writing(folder / name, *arguments, *settings, *own, *more, "--seed", str(seed), needs=needs)

    def _online(self, folder: Path, seed: int, scale: Scale) -> Stage:
        dpo = folder / "dpo"
        steps = min(_STEPS["grpo"], scale.max_steps or _STEPS["grpo"])
        batch = ("--questions-per-step", "4", "--group-size", "4", "--batch-size", "4")
        settings = {
            "rollout.max_tokens": _MAX_TOKENS,
            "rollout.batch_size": 16,
            "validation.steps": 0,
            **dict(guard.split("=") for guard in NO_GUARDS),
        }
        arguments = ["rl", "train", *_questions(folder, "search"), *_SEARCHED, "--model", str(_merged(dpo))]
        arguments += ["--reward", "spre", "--method", "lora", "--learning-rate", "5e-5", "--max-steps", str(steps)]
        arguments += [*batch, "--save-steps", "1", "--merge", "--seed", str(seed)]
        for setting, value in settings.items():
            arguments += ["--set", f"{setting}={value}"]
        return Stage.writing(folder / "grpo", *arguments, needs=(dpo,))

    def facts(self, plan: Plan) -> dict[str, Any]:
        folder = plan.out / "seed-0"
        done = {stage.out for stage in plan.stages if plan.is_done(stage)}
        found: dict[str, Any] = {
            "model": _model_facts(plan.out / "model"),
            "splits": read_json(plan.out / "data" / "splits.json") or {},
            "costs": [cost for stage in plan.stages if stage.out in done for cost in _costs(stage, plan)],
        }
        if folder / "sft" in done:
            data = require_json(folder / "sft" / "training.json")["data"]
            found["demonstrations"] = {**data["trajectories"], "steps": data["kinds"]["train"]}
        if folder / "trees" in done:
            found |= {"pairs": _pair_facts(folder / "trees"), "siblings": _sibling_facts(folder / "trees")}
        if folder / "pairs-alpha1" in done:
            found["pairs"]["by_type_alpha1"] = require_json(folder / "pairs-alpha1" / "pairs.json")["by_type"]
        return found

    def draw(self, plan: Plan, folder: Path) -> None:
        """Write the tree of the question of our own with most pairs, which has passages of our own."""
        from reasonrag.report.terminal import picture
        from reasonrag.report.trees import read_trees

        trees = plan.out / "seed-0" / "trees"
        if (trees / "run.json").is_file():
            ours = [tree for tree in read_trees(trees) if tree.root["dataset"] == OURS]
            if ours:
                write_text(folder / _PICTURE, picture(max(ours, key=lambda tree: len(tree.pairs))) + "\n")

    def sections(self, results: Mapping[str, Any]) -> Iterator[str]:
        yield from _data_section(results)
        if pairs := results.get("pairs"):
            yield from _pairs_section(pairs, results["siblings"])
            yield from ["", f"![A tree of `sft` for a question of our own: the best path and its siblings]({_PICTURE})"]
        yield from ["", "## Costs", ""]
        yield "CPU seconds, attempts that were killed included. Everything runs in its own process with transformers;"
        yield "a server of vLLM's CPU build costs about the same ([engines](../engines.md))."
        rows = []
        for cost in results["costs"]:
            per = cost["cpu_s"] / cost["count"] if cost["count"] else math.nan
            rows.append(
                [f"`{cost['stage']}`", f"{cost['cpu_s']:,.0f}", f"{cost['count']:,}", cost["unit"], f"{per:.2f}"]
            )
        yield from ["", *Table("", ["stage", "CPU s", "count", "unit", "CPU s each"], rows).markdown(str)]


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


def _merged(policy: Path) -> Path:
    return policy / "merged"


def _model_facts(model: Path) -> dict[str, Any]:
    config = read_json(model / "config.json") or {}
    names = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    return {name: config[name] for name in names if name in config}


def _costs(stage: Stage, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield what a stage has cost, and for how much work."""
    if (cpu_s := plan.cpu_s.get(stage.line)) is None or stage.arguments[0] == "pairs":  # of an earlier version, or free
        return
    match stage.arguments[:2]:
        case ("build-tree", _):
            unit, count = "calls", require_json(stage.out / "run.json")["calls"]["policy"]["calls"]
        case ("eval", _):
            calls = require_json(stage.out / "metrics.json")["calls"]
            unit, count = "calls", sum(of_policy["policy"]["calls"] for of_policy in calls.values())
        case ("rl", _):
            unit, count = "optimizer steps", require_json(stage.out / "training.json")["steps"]
        case (command, _):
            unit = "pairs" if command == "dpo" else "examples"
            count = _BATCH * require_json(stage.out / "training.json")["steps"]
    name = str(stage.out.relative_to(plan.out / "seed-0"))
    yield {"stage": name, "cpu_s": round(cpu_s, 1), "count": count, "unit": unit}


def _pair_facts(trees: Path) -> dict[str, Any]:
    """Return the pairs of a run by type and question, and how sure their order is."""
    from reasonrag.report.stats import stats

    counts = stats(trees)
    pairs = counts["pairs"]
    run = require_json(trees / "run.json")
    return {
        "questions": counts["questions"]["finished"],
        "with_pairs": sum(pairs["questions"].values()),
        "total": pairs["total"],
        "by_type": pairs["by_type"],
        "confidence": pairs["confidence"],
        "margin": pairs["margin"],
        "contradictory": pairs["contradictory"],
        "steps": counts["nodes"]["by_action"],
        "malformed": run["trees"]["malformed"],
        "answers": counts["answers"]["total"],
        "mean_f1": counts["answers"]["mean_f1"],
    }


def _sibling_facts(trees: Path) -> dict[str, Any]:
    """Return how much the children of a node differ, in what they say and in their rewards."""
    from reasonrag.report.trees import read_trees
    from reasonrag.spre import decisions_of
    from reasonrag.storage.parquet import read_shards
    from reasonrag.storage.tables import tree_schema

    groups: Counter[str] = Counter()
    entropies: list[float] = []
    for tree in read_trees(trees):
        decided = decisions_of(tree.nodes, alpha=0.9)
        children: defaultdict[int, list[int]] = defaultdict(list)
        for row in tree.nodes[1:]:
            children[row["parent_id"]].append(row["node_id"])
        for below in children.values():
            decisions = [found for child in below if (found := decided[child]) is not None]
            if len(decisions) < 2:
                continue
            said = Counter(decision.content for decision in decisions)
            shares = [count / len(decisions) for count in said.values()]
            entropies.append(-sum(share * math.log(share) for share in shares) / math.log(len(decisions)))
            rewards = {decision.reward for decision in decisions}
            groups["all"] += 1
            groups["said the same"] += len(said) == 1
            groups["equal rewards"] += len(said) > 1 and len(rewards) == 1
            groups["different rewards"] += len(rewards) > 1
    logprobs: dict[str, list[float]] = {}
    for row in read_shards(trees / "trees", "nodes", tree_schema(), columns=("action", "logprobs")):
        logprobs.setdefault(row["action"], []).extend(row["logprobs"] or ())
    nats = {action: round(-fmean(values), 4) for action, values in sorted(logprobs.items()) if values}
    return {**groups, "entropy": round(fmean(entropies), 4) if entropies else None, "nats_a_token": nats}


def _data_section(results: Mapping[str, Any]) -> Iterator[str]:
    splits, model = results["splits"], results["model"]
    shape = ", ".join(f"{name.replace('_', ' ')} {inert_markdown(value)}" for name, value in model.items())
    yield from ["", "## Model, questions and passages", "", f"Model: {shape}."]
    if splits:
        rows = [[f"`{split}`", *(splits[split].get(name, 0) for name in (*DATA_SETS, OURS))] for split in SPLITS]
        yield from ["", *Table("", ["split", *DATA_SETS, "our own"], rows).markdown(str), ""]
        yield f"A hash of its id decides the split of a question. {splits['passages']:,} passages are searched in one"
        yield f"corpus by BM25; the policy reads the first 300 characters of two. {splits['shared']} test questions"
        yield "share a supporting passage with a question that something was trained on. `found`: a passage that was"
        yield "returned holds a golden answer, beyond the first 300 characters too; `noted`: a note of the policy holds"
        yield "one; both without questions that yes or no answers."
    if demonstrated := results.get("demonstrations"):
        steps = ", ".join(f"{count:,} {kind}" for kind, count in demonstrated["steps"].items())
        yield ""
        yield f"The reader's trees have an answer of F1 .8 or more for {demonstrated['questions']} of"
        yield f"{demonstrated['of_questions']} questions. {demonstrated['trajectories']} trajectories are learned, of"
        yield f"{demonstrated['mean_steps']:.1f} steps on average: {steps}."


def _pairs_section(pairs: Mapping[str, Any], siblings: Mapping[str, Any]) -> Iterator[str]:
    yield from ["", "## Trees and pairs of the policy", ""]
    steps = sum(pairs["steps"].values())
    malformed = ", ".join(f"{inert_markdown(name)} {count}" for name, count in pairs["malformed"].items()) or "none"
    yield f"{pairs['questions']} questions, {steps:,} sampled steps, {pairs['answers']:,} answers of mean F1"
    unread = pairs["steps"].get("malformed", 0)
    yield f"{pairs['mean_f1'] or 0:.3f}. Steps that could not be read: {unread} ({malformed})."
    a_question = pairs["total"] / pairs["questions"]
    yield f"{pairs['total']} pairs, {a_question:.1f} a question, of {pairs['with_pairs']} questions:"
    kinds = ("query", "evidence", "answer", "malformed")
    by_type = pairs["by_type"]
    rows = [[chosen, *(by_type.get(chosen, {}).get(kind, 0) for kind in kinds)] for chosen in kinds[:-1]]
    yield from ["", *Table("", ["chosen", *(f"rejected {kind}" for kind in kinds)], rows).markdown(str), ""]
    if "by_type_alpha1" in pairs:
        left = pairs["by_type_alpha1"]
        kept = ", ".join(f"{left.get(name, 0)} {name}" for name in ("answer > query", "query > answer"))
        yield f"Without the shortest-path term: {sum(left.values())} pairs, {kept}."
    if pairs["confidence"]:
        yield f"Probability that the order of a pair is right: mean {pairs['confidence']['mean']:.2f}, median"
        yield f"{pairs['confidence']['median']:.2f}. Margin: median {pairs['margin']['median']:.3f}."
    if groups := siblings.get("all"):
        shares = ", ".join(f"{name} {siblings[name] / groups:.0%}" for name in siblings if name in _GROUPS)
        yield f"Of {groups} sets of siblings: {shares}. Entropy of what siblings say: {siblings['entropy']:.2f} of the"
        yield (
            "largest possible. Nats a sampled token: "
            + ", ".join(f"{name} {value:.2f}" for name, value in siblings["nats_a_token"].items())
            + "."
        )


_GROUPS = ("said the same", "equal rewards", "different rewards")

REAL = RealModel(
    name="real",
    title="A real language model and real questions",
    policy="hf:OUT/model",
    variants=(
        Variant("sft", "SFT on whole trajectories of the reader"),
        Variant("sft-chosen", "then SFT on the chosen steps of its own pairs"),
        Variant("dpo", "DPO on the same pairs, from `sft`"),
        Variant("dpo-alpha1", "DPO on pairs by F1 alone, without the shortest-path term, from `sft`"),
        Variant("grpo", "then GRPO on steps, rewarded by SPRE of the trajectory"),
    ),
    pairs=(
        *((name, BASE) for name in ("sft", "sft-chosen", "dpo", "dpo-alpha1", "grpo")),
        *((name, "sft") for name in ("sft-chosen", "dpo", "dpo-alpha1", "grpo")),
        ("dpo", "sft-chosen"),
        ("dpo", "dpo-alpha1"),
        ("grpo", "dpo"),
    ),
    metrics=(
        *("f1", "em", "acc", "format_rate", "parsed", "retrievals", "steps", "early", "forced", "found", "noted"),
    ),
    by_kind=("f1", "em", "retrievals", "early", "noted"),
    curves={
        "mean_token_accuracy": "SFT: token accuracy",
        "rewards/accuracies": "DPO: pairs in order",
        "rewards/margins": "DPO: margin of rewards",
        "rollout/reward": "GRPO: reward of rollouts",
        "rollout/flat_groups": "GRPO: groups of equal rewards",
        "entropy": "entropy, nats a token",
    },
    sampled=("sft",),
    scale=Scale(seeds=1, questions=25, test_questions=100, iterations=8),
)
