"""`schema.md`: the columns of `reasonrag.storage.tables`, and the keys of the JSON files.

The keys are described here; a test holds them against files that were written.
"""

from __future__ import annotations

import pyarrow as pa

from docs.reference.markdown import NOTE, cell, code
from reasonrag.core.table import Table
from reasonrag.storage import tables

# Title, where it lies, the table.
TABLES: tuple[tuple[str, str, tables.Described], ...] = (
    ("Trees", "RUN/trees/nodes-*.parquet", tables.tree_schema),
    ("Pairs of steps", "RUN/pairs/{train,test}-*.parquet", tables.pair_schema),
    ("Pairs of trajectories", "of `reasonrag pairs --level trajectory`", tables.trajectory_pair_schema),
    ("Evaluated trajectories", "REPORT/NAME/trajectories/*.parquet", tables.trajectory_schema),
    ("Rollouts of online training", "OUT/rollouts/step-*.parquet", tables.rollout_schema),
    ("Reference plans", "the file that `reasonrag rl plan` writes", tables.plan_schema),
)
NESTED = {
    "message": tables.message,
    "passage": tables.passage,
    "step": tables.step,
    "step of a pair": tables.pair_step,
    "span": tables.span,
    "grade": tables.grade,
}

# Keys of the JSON files; `*` stands for names that the data gives.
RUN_JSON = {
    "questions.total": "questions asked for",
    "questions.finished": "questions with a tree",
    "questions.failed.*": "questions without one, by cause",
    "trees.nodes": "nodes, roots included",
    "trees.by_dataset.*": "trees by data set",
    "trees.by_action.*": "nodes by what they did",
    "trees.questions": "questions that have a tree",
    "trees.by_stop_reason.*": "complete trajectories by how they ended",
    "trees.malformed.*": "steps that could not be read, by reason",
    "trees.unreadable.*": "beginning of the first of them, by reason",
    "trees.without_token_ids": "steps whose tokens the backend did not report, or that held a secret",
    "trees.without_logprobs": "steps without log-probabilities: not asked for, not reported, or of another temperature",
    "trees.iterations_without_value": "visits that had no value to back up",
    "trees.complete_trajectories": "trajectories that ended with an answer",
    "trees.mean_f1": "of their answers; null if there is none",
    "trees.mean_em": "of their answers; null if there is none",
    "trees.mean_outcome": "of their answers, as far as it is known; left out where the outcome is F1",
    "trees.unknown_outcomes": "answers without a verdict; left out where the outcome is F1",
    "trees.distributions.*": "count, mean and quantiles; rounds: searches of a trajectory, and its answer",
    "pairs.total": "pairs of both splits",
    "pairs.train": "pairs for training",
    "pairs.test": "pairs of held-out questions",
    "pairs.questions_with_pairs": "questions with at least one",
    "pairs.by_type.*": "pairs by chosen > rejected",
    "pairs.by_depth.*": "pairs by steps before the decision",
    "pairs.by_dataset.*": "questions with pairs by data set",
    "pairs.distributions.*": "count, mean and quantiles; of tokens where ids are known",
    "pairs.left_out.*": "pairs that were left out, by cause: unsure, one-sided, a shorter path alone, or reversed",
    "pairs.min_margin": "the threshold",
    "pairs.rule": "best or siblings: what was compared in a state",
    "pairs.min_confidence": "smallest probability that the order is right",
    "pairs.path_share": "share that was kept of the pairs that differ only in the length of their paths",
    "pairs.per_question": "most pairs of a question, 0 for all",
    "pairs.test_share": "share of the questions that form the test split",
    "pairs.reward": "what was compared: spre, judge, prm, or the outcome of whole trajectories",
    "pairs.outcome": "what an answer is worth: f1, em, cover, list, judge, or a function by name",
    "pairs.alpha": "decay of the rewards; null for whole trajectories",
    "pairs.level": "step or trajectory",
    "calls.*.calls": "calls of policy, judge and search, over all processes that worked on the run",
    "calls.*.prompt_tokens": "sent",
    "calls.*.completion_tokens": "written",
    "calls.*.calls_without_token_counts": "calls of which the backend reported no tokens",
    "calls.*.cost": "by the prices given; null where one is unknown",
    "seconds": "on the clock, over all processes",
    "seed": "the run's",
    "config_hash": "of configuration and content",
    "content.*": "checksums of questions, corpus, prompts; names and checksums of models",
    "policy": "name, and a checksum where it is a folder",
    "judge": "likewise; null without one",
    "outcome": "what an answer is worth",
    "versions.*": "installed versions of what can change a result",
}
TRAINING_JSON = {
    "stage": "dpo, sft or rl",
    "name": "hash of the identity",
    "model.name": "name of the model that training started from",
    "model.checksum": "its folder's name with a checksum, or its Hub id with the revision",
    "data.source": "name of the folder, file or Hub data set",
    "data.checksum": "checksum of all rows",
    "data.train.*": "number of pairs, or of steps of trajectories, and of questions for training",
    "data.held_out.*": "the same, held out",
    "data.token_ids.*": "steps, and shares of them: whose text was encoded, and would have been encoded differently",
    "data.kinds.*": "steps to learn, by split and kind: query, evidence, answer, forced answer; as far as it is known",
    "data.trajectories.*": "whole trajectories to learn, their questions, mean outcome and mean steps; null for pairs",
    "data.contradictory.*": "pairs that stand beside their reverse, by text and by content; the first few by name",
    "data.lengths.longest": "tokens of the longest prompt with its step",
    "data.lengths.pairs.*": "number of pairs by split",
    "data.lengths.left_out.*": "number of pairs that are too long, by split and depth",
    "data.lengths.max_length": "maximum tokens of prompt and step",
    "data.content.*": "online: checksums of questions, corpus, prompts and judge",
    "data.rows.*": "number of rows for the trainer, by split",
    "steps": "number of optimizer steps",
    "kept_step": "step of the policy in the folder; without `rl train`, the best one on held-out rows",
    "epochs": "passes over the data",
    "seconds": "on the clock, over all processes",
    "tokens_seen": "tokens that the trainer processed, padding excluded",
    "final.*": "the last metrics, under TRL's names",
    "reward": "online: name of the reward function",
    "best.*": "online: step and value of the policy in `best/`",
    "device": "cpu or the GPU's name",
    "processes": "number of processes",
    "mixed_precision": "no, bf16 or fp16: what the forward pass computed in beside the weights' own type",
    "settings.*": "the resolved settings",
    "identity.*": "the settings and checksums that can change a result",
    "files.*": "size in bytes and SHA-256 of each file of the trained model; older runs have none",
    "versions.*": "installed versions of what can change a result",
    "history": "metrics by step",
}
METRICS_JSON = {
    "policy": "the first policy, whose figures follow",
    "setting": "its first setting: temperature, step limit, passages",
    "em|f1|acc|retrievals|steps|forced|format_rate|prompt_tokens|completion_tokens.*": (
        "mean, interval (low, high) and n; null where unknown; see [the metrics](evaluation.md)"
    ),
    "lasj|osr|usr.*": "likewise, with a judge",
    "by_kind.*": "the same by kind of question",
    "by_dataset.*": "the same by data set, if there are several",
    "questions.*": "total, scored, not_tried",
    "failed.*": "questions that a backend let down, by cause",
    "ends.*": "attempts by how they ended",
    "out_of_form.*": "attempts that are not well-formed, by reason",
    "judged.*": "verdicts that are known and unknown, and failures by cause",
    "policies.*": "the same of every policy and setting",
    "settings.*": "the settings of every policy",
    "differences": "paired differences from the first policy: interval, `p`, and `p_adjusted` for how many there are",
    "incomplete": "settings at which more than `--max-failed` of the questions are missing",
    "unjudged": "settings at which more than `--max-failed` of the verdicts are missing",
    "failures": "questions that failed, with policy, setting and cause",
    "judge.*": "who judged what; null without a judge",
    "dataset": "of the questions",
    "split": "of the questions",
    "splits.*": "that of each data set which was read by its name",
    "seed": "of sampling, questions and intervals",
    "rules": "house or flashrag",
    "content.*": "checksums of questions and corpus, and how each policy was asked",
    "asked_differently": "settings in which the policies differ",
    "lost_to_form": "policies that lose points to the form of their replies, not to what they know",
    "calls.*": "calls, tokens and cost of each policy",
    "versions.*": "installed versions of what can change a result",
}
JSON_FILES = {
    "run.json": ("what `build-tree` writes", RUN_JSON),
    "training.json": ("what `dpo train`, `sft train` and `rl train` write", TRAINING_JSON),
    "metrics.json": ("what `eval` writes", METRICS_JSON),
}


def schema_page() -> str:
    """Every table and every JSON file."""
    lines = [
        "# Schema reference",
        "",
        NOTE,
        "```bash",
        "reasonrag show runs/demo",
        "```",
        "",
        "Schemas are written down, never inferred, so every shard has the same columns whatever its rows hold. Pages",
        "of the Parquet files carry checksums. A list of `message` is one of structs with the columns of `message`",
        "below.",
    ]
    for title, place, table in TABLES:
        place = place if "`" in place else f"`{place}`"
        lines += ["", f"## {title}", "", f"{place[0].upper()}{place[1:]}. {table.__doc__}", "", *_columns(table)]
    lines += ["", "## Nested columns", ""]
    for name, table in NESTED.items():
        lines += [f"### {name}", "", str(table.__doc__), "", *_columns(table), ""]
    lines += ["## JSON files", "", "`*` stands for names that the data gives.", ""]
    for file, (what, keys) in JSON_FILES.items():
        rows = [(code(key.replace("|", "`, `")), meaning) for key, meaning in keys.items()]
        lines += [
            f"### {file}",
            "",
            f"{what[0].upper()}{what[1:]}.",
            "",
            *Table("", ["key", "meaning"], rows).markdown(str),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _columns(table: tables.Described) -> list[str]:
    rows = [(f"`{name}`", arrow(type), cell(meaning)) for name, type, meaning in table.columns]
    return list(Table("", ["column", "type", "meaning"], rows).markdown(str))


def arrow(type: pa.DataType) -> str:
    """A type as a reader would say it; structs by their names."""
    if pa.types.is_list(type):
        return f"list&lt;{arrow(type.value_type)}&gt;"
    if pa.types.is_map(type):
        return f"map&lt;{arrow(type.key_type)}, {arrow(type.item_type)}&gt;"
    known = {str(pa.struct(list(table()))): name for name, table in NESTED.items()}
    return known.get(str(type), {"float": "float32", "double": "float64"}.get(str(type), str(type)))
