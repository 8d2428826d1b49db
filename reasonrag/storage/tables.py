"""Schemas of all Parquet tables: columns, types and meanings.

Schemas are never inferred: a column of nulls would get
another type in one shard, and `load_dataset` would fail.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


GRADE = "grade"  # a column that a table may lack


class Described:
    """An Arrow schema when called; `columns` adds the meanings, from which `docs/schema.md` is generated.

    A type is the name of an Arrow type, another `Described` for a struct, `[type]` for a list of it, or
    `{key type: value type}` for a map. pyarrow is imported with the first schema.
    """

    def __init__(self, meaning: str, *columns: tuple[str, Any, str]) -> None:
        self.__doc__ = meaning
        self._columns = columns  # name, type, meaning

    def __call__(self, *, graded: bool = True) -> pa.Schema:
        """Return the schema; with `graded` False without the column `grade`, which only some runs have."""
        return self._schema if graded else self._schema.remove(self._schema.get_field_index(GRADE))

    @cached_property
    def columns(self) -> list[tuple[str, pa.DataType, str]]:
        return [(name, _arrow_type(kind), meaning) for name, kind, meaning in self._columns]

    @cached_property
    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema([(name, kind) for name, kind, _ in self.columns])


def _arrow_type(kind: Any) -> pa.DataType:
    import pyarrow as pa

    # A struct, a list, a map, or the name of a plain type.
    if isinstance(kind, Described):
        return pa.struct(list(kind()))
    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        ((key, value),) = kind.items()
        return pa.map_(_arrow_type(key), _arrow_type(value))
    return pa.type_for_alias(kind)


def _both(name: str, kind: Any, meaning: str) -> tuple[tuple[str, Any, str], tuple[str, Any, str]]:
    """Return the two columns of what the chosen and the rejected side have."""
    return (f"chosen_{name}", kind, meaning), (f"rejected_{name}", kind, f"as chosen_{name}")


_QUESTION: tuple[tuple[str, Any, str], ...] = (
    ("dataset", "string", "name of the data set or file"),
    ("question_id", "string", "the question's id there"),
    ("question", "string", "its text"),
    ("golden_answers", ["string"], "gold answers; any of them is correct"),
)
message = Described(
    "One message of a chat, in the layout of TRL and of chat templates.",
    ("role", "string", "system | tools | user | assistant | call | tool"),
    ("content", "string", "the text"),
)
span = Described(
    "One piece of an open turn, which the policy read as ids of its own.",
    ("text", "string", "text that the policy wrote, or that was inserted"),
    ("token_ids", ["int32"], "as sampled; null if inserted, or if the backend reports none: encoded by itself"),
)
passage = Described(
    "One passage that a search found.",
    ("id", "string", "its id in the corpus"),
    ("contents", "string", "title, newline, text"),
    ("score", "float64", "the retriever's; comparable within one search only"),
)
pair_step = Described(
    "One step of a trajectory that is compared as a whole.",
    ("prompt", [message], "prompt of the policy"),
    ("prefix", "string", "text of the turn that was already open"),
    ("text", "string", "text that the policy wrote"),
    ("end", "string", "stop: at a stop string | turn: the policy ended its turn | length: cut off"),
)
step = Described(
    "One step of an attempt.",
    ("action", "string", "query | evidence | answer | malformed"),
    ("content", "string", "text inside the tag; the reason if the step is malformed"),
    ("prompt", [message], "prompt of the policy"),
    ("prefix", "string", "text of the turn that was already open"),
    ("text", "string", "text that the policy wrote"),
    ("finish_reason", "string", "stop | length | ..., as the backend says"),
    ("prompt_tokens", "int32", "null if the backend reports none"),
    ("completion_tokens", "int32", "null if the backend reports none"),
    ("passages", [passage], "passages that the search returned, best first"),
)
grade = Described(
    "The outcome of an answer, if it is not token F1.",
    ("value", "float64", "in [0, 1]; null if it is unknown"),
    ("error", "float64", "standard error of the value, as verdicts on it differ; 0 for one verdict or a rule"),
    ("reason", "string", "in words; the cause if the value is unknown"),
)
tree_schema = Described(
    "One row per node. `spre` and `value` are null if unknown; node ids count from 0 within a question.",
    *_QUESTION,
    ("node_id", "int32", "within the question; 0 is the root"),
    ("parent_id", "int32", "-1 at the root"),
    ("depth", "int32", "steps from the root"),
    ("origin", "string", "root | expansion | rollout | recorded | completion (of a completer) | confirmation"),
    ("stage", "string", "reasoning | grounding | terminal: what comes next"),
    ("action", "string", "query | evidence | answer | malformed; empty at the root"),
    ("content", "string", "text inside the tag; the reason if the step is malformed"),
    ("stop_reason", "string", "answered | forced_answer | no_answer; null while unfinished"),
    ("prompt", [message], "prompt of the policy; empty at the root"),
    ("prefix", "string", "text of the turn that was already open"),
    ("stop", ["string"], "stop strings of the request"),
    ("text", "string", "text that the policy wrote"),
    ("finish_reason", "string", "stop | length | ..., as the backend says"),
    ("token_ids", ["int32"], "[T] as sampled; null if the backend reports none"),
    ("logprobs", ["float32"], "[T] natural logarithms; null if the backend reports none"),
    ("prompt_tokens", "int32", "null if the backend reports none"),
    ("completion_tokens", "int32", "null if the backend reports none"),
    ("passages", [passage], "passages that the search returned, best first"),
    ("visits", "int32", "N"),
    ("valued", "int32", "visits that had a value to back up"),
    ("value", "float64", "Q, the mean of the values backed up"),
    ("spre", "float64", "mean over the complete trajectories through the node of outcome * alpha**steps"),
    ("f1", "float64", "of the final answer; null in other nodes"),
    ("em", "float64", "of the final answer; null in other nodes"),
    (GRADE, grade, "outcome of the final answer; no column, or null, where the outcome is F1"),
)
pair_schema = Described(
    "One row per preference: TRL's conversational `prompt`, `chosen`, `rejected`, then flat provenance.",
    ("prompt", [message], "prompt of both; an open turn is its last message"),
    ("chosen", [message], "the step of the higher reward, one message"),
    ("rejected", [message], "the step of a sibling, one message"),
    ("pair_id", "string", "unique within the data set"),
    ("question_id", "string", "id of the question; all its pairs are in one split"),
    ("dataset", "string", "name of the data set or file"),
    ("depth", "int32", "steps before the decision, 0 at the root"),
    *_both("type", "string", "query | evidence | answer; a rejected step may be malformed"),
    *_both("end", "string", "stop: at a stop string | turn: the policy ended its turn | length: cut off"),
    *_both("reward", "float64", "SPRE over the pooled nodes, or the search's value if `pairs.reward` is judge or prm"),
    ("margin", "float64", "chosen_reward - rejected_reward"),
    *_both("visits", "int32", "N of the node"),
    ("parent_node_id", "int32", "node_id of the node where the two differ"),
    *_both("node_id", "int32", "node_id of its text and tokens in the trees: the earliest that does the same there"),
    ("prompt_tokens", "int32", "null if the backend reports none"),
    ("policy", "string", "model that wrote both, with a checksum if it is a folder"),
    ("config_hash", "string", "hash of the run's configuration and inputs"),
    *_both(
        "pooled",
        ["int32"],
        "node_id of every step that does the same after the same prompt: the reward is of all of them",
    ),
    *_both("rollouts", "int32", "complete trajectories behind the reward, fresh ones included"),
    *_both("error", "float64", "standard error of the reward; 0 if it is known, null for the search's value"),
    ("confidence", "float64", "probability that the order is right, calibrated on fresh rollouts of real questions"),
    *_both("token_ids", ["int32"], "[T] as sampled; null if the backend reports none"),
    ("turn", [span], "the open turn as the policy read it; null if it read text, or if no turn was open"),
)
trajectory_pair_schema = Described(
    "One row per preference between two whole trajectories of a question, compared by outcome.",
    *_both("steps", [pair_step], "from the first step in which the two differ"),
    ("pair_id", "string", "unique within the data set"),
    ("question_id", "string", "id of the question; all its pairs are in one split"),
    ("dataset", "string", "name of the data set or file"),
    ("depth", "int32", "number of shared steps"),
    *_both("reward", "float64", "outcome of the final answer"),
    ("margin", "float64", "chosen_reward - rejected_reward"),
    *_both("node_id", "int32", "node_id of the answer in the trees"),
    ("policy", "string", "model that wrote both, with a checksum if it is a folder"),
    ("config_hash", "string", "hash of the run's configuration and inputs"),
    *_both("token_ids", [["int32"]], "`token_ids` of each step: as sampled; null if the backend reports none"),
    *_both("turns", [[span]], "of each step, the open turn as the policy read it; null if it read text"),
)
trajectory_schema = Described(
    "One row per attempt at a question, with its scores, prompts, texts and passages.",
    *_QUESTION,
    ("kind", "string", "type of question; empty if the data set has none"),
    ("hops", "int32", "searches that the question needs; null if unknown"),
    ("answer", "string", "null if the trajectory ended without one"),
    ("stop_reason", "string", "answered | forced_answer | no_answer"),
    ("em", "float64", "exact match, 0 or 1"),
    ("f1", "float64", "token F1, 0 to 1"),
    ("acc", "float64", "1 if a golden answer is contained in the prediction"),
    ("retrievals", "int32", "searches"),
    ("steps", "int32", "actions"),
    ("forced", "int32", "1 if the answer was forced at the step limit"),
    ("format_rate", "float64", "1 if it is well-formed"),
    ("prompt_tokens", "int64", "of all steps; null if the backend reports none"),
    ("completion_tokens", "int64", "of all steps; null if the backend reports none"),
    ("well_formed", "bool", "by the format's own checker"),
    ("reason", "string", "why it is not well-formed; empty if it is"),
    ("lasj", "bool", "a judge's verdict on the answer; null without one, as the next four"),
    ("steps_over", "int32", "needless searches"),
    ("searches_known", "int32", "searches with a verdict on whether they were needed"),
    ("steps_under", "int32", "false steps without a search"),
    ("own_steps_known", "int32", "steps without a search, with a verdict on whether they were false"),
    ("trajectory", [step], "all prompts, texts and passages"),
    (GRADE, grade, "outcome of the answer; no column where the outcome is F1"),
)
rollout_schema = Described(
    "One row per trajectory of online training, with the parts of its reward (`OUT/rollouts`).",
    ("step", "int32", "optimizer step of the rollout, from 1"),
    *_QUESTION[:2],  # data set and id
    ("sample", "int32", "number within its group, from 0"),
    ("reward", "float64", "null without a verdict; `cause` says why"),
    ("advantage", "float64", "reward less the mean of its group, divided by its deviation; 0 without a reward"),
    ("row_advantages", ["float64"], "of its training rows: one, or one per step if each step has a prompt of its own"),
    ("cause", "string", "why there is no reward"),
    ("parts", {"string": "float64"}, "components of the reward by name"),
    ("well_formed", "bool", "by the format's own checker"),
    ("reason", "string", "why it is not well-formed"),
    ("answer", "string", "null if the trajectory ended without one"),
    ("stop_reason", "string", "answered | forced_answer | no_answer"),
    ("question", "string", "its text"),
    ("golden_answers", ["string"], "gold answers; any of them is correct"),
    ("turn", "string", "text of the policy and what was inserted in between; the texts of the steps"),
    ("tokens", "int32", "tokens of the turn, or of all steps"),
    ("policy_tokens", "int32", "those of them that the policy wrote"),
    ("truncated", "bool", "cut off by a token limit"),
)
plan_schema = Described(
    "One row per question with a reference plan (Search-P1, eq. 5).",
    *_QUESTION[:2],  # data set and id
    ("planner", "string", "the plan in words"),
    ("steps", ["string"], "searches in order"),
    ("candidates", "int32", "trajectories that were sampled"),
    ("correct", "int32", "trajectories whose answer is correct"),
    ("votes", "int32", "of these, trajectories with a search, from which the plan is; 0: from the golden answer"),
)
