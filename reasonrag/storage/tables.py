"""Schemas of all Parquet tables: columns, types and meanings.

Schemas are never inferred: a shard whose column is all null would get another type, and `load_dataset` would fail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

Column = tuple[str, "pa.DataType", str]  # name, type, meaning


class Described:
    """An Arrow schema when called; `columns` adds the meanings, from which `docs/schema.md` is generated."""

    def __init__(self, columns: Callable[[Any], list[Column]]) -> None:
        self._columns = columns  # called with pyarrow, which is imported with the first schema
        self.__doc__ = columns.__doc__

    def __call__(self) -> pa.Schema:
        return self._schema

    @cached_property
    def columns(self) -> list[Column]:
        import pyarrow as pa

        return self._columns(pa)

    @cached_property
    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema([(name, type) for name, type, _ in self.columns])


@Described
def message(pa: Any) -> list[Column]:
    """One message of a chat, in the layout of TRL and of chat templates."""
    return [("role", pa.string(), "system | user | assistant"), ("content", pa.string(), "the text")]


@Described
def passage(pa: Any) -> list[Column]:
    """One passage that a search found."""
    return [
        ("id", pa.string(), "its id in the corpus"),
        ("contents", pa.string(), "title, newline, text"),
        ("score", pa.float64(), "the retriever's; comparable within one search only"),
    ]


@Described
def pair_step(pa: Any) -> list[Column]:
    """One step of a trajectory that is compared as a whole."""
    return [
        ("prompt", _list(message), "prompt of the policy"),
        ("prefix", pa.string(), "text of the turn that was already open"),
        ("text", pa.string(), "text that the policy wrote"),
        ("end", pa.string(), "stop: at a stop string | turn: the policy ended its turn | length: cut off"),
    ]


@Described
def step(pa: Any) -> list[Column]:
    """One step of an attempt."""
    return [
        ("action", pa.string(), "query | evidence | answer | malformed"),
        ("content", pa.string(), "text inside the tag; the reason if the step is malformed"),
        ("prompt", _list(message), "prompt of the policy"),
        ("prefix", pa.string(), "text of the turn that was already open"),
        ("text", pa.string(), "text that the policy wrote"),
        ("finish_reason", pa.string(), "stop | length | ..., as the backend says"),
        ("prompt_tokens", pa.int32(), "null if the backend reports none"),
        ("completion_tokens", pa.int32(), "null if the backend reports none"),
        ("passages", _list(passage), "passages that the search returned, best first"),
    ]


@Described
def tree_schema(pa: Any) -> list[Column]:
    """One row per node. `spre` and `value` are null if unknown; node ids count from 0 within a question."""
    return [
        ("dataset", pa.string(), "name of the data set or file"),
        ("question_id", pa.string(), "the question's id there"),
        ("question", pa.string(), "its text"),
        ("golden_answers", pa.list_(pa.string()), "gold answers; any of them is correct"),
        ("node_id", pa.int32(), "within the question; 0 is the root"),
        ("parent_id", pa.int32(), "-1 at the root"),
        ("depth", pa.int32(), "steps from the root"),
        ("origin", pa.string(), "root | expansion | rollout"),
        ("stage", pa.string(), "reasoning | grounding | terminal: what comes next"),
        ("action", pa.string(), "query | evidence | answer | malformed; empty at the root"),
        ("content", pa.string(), "text inside the tag; the reason if the step is malformed"),
        ("stop_reason", pa.string(), "answered | forced_answer | no_answer; null while unfinished"),
        ("prompt", _list(message), "prompt of the policy; empty at the root"),
        ("prefix", pa.string(), "text of the turn that was already open"),
        ("stop", pa.list_(pa.string()), "stop strings of the request"),
        ("text", pa.string(), "text that the policy wrote"),
        ("finish_reason", pa.string(), "stop | length | ..., as the backend says"),
        ("token_ids", pa.list_(pa.int32()), "[T] as sampled; null if the backend reports none"),
        ("logprobs", pa.list_(pa.float32()), "[T] natural logarithms; null if the backend reports none"),
        ("prompt_tokens", pa.int32(), "null if the backend reports none"),
        ("completion_tokens", pa.int32(), "null if the backend reports none"),
        ("passages", _list(passage), "passages that the search returned, best first"),
        ("visits", pa.int32(), "N"),
        ("valued", pa.int32(), "visits that had a value to back up"),
        ("value", pa.float64(), "Q, the mean of the values backed up"),
        ("spre", pa.float64(), "mean over the complete trajectories through the node of F1 * alpha**steps"),
        ("f1", pa.float64(), "of the final answer; null in other nodes"),
        ("em", pa.float64(), "of the final answer; null in other nodes"),
    ]


@Described
def pair_schema(pa: Any) -> list[Column]:
    """One row per preference: TRL's conversational `prompt`, `chosen`, `rejected`, then flat provenance."""
    return [
        ("prompt", _list(message), "prompt of both; an open turn is its last message"),
        ("chosen", _list(message), "the step of the higher reward, one message"),
        ("rejected", _list(message), "the step of a sibling, one message"),
        ("pair_id", pa.string(), "unique within the data set"),
        ("question_id", pa.string(), "id of the question; all its pairs are in one split"),
        ("dataset", pa.string(), "name of the data set or file"),
        ("depth", pa.int32(), "steps before the decision, 0 at the root"),
        ("chosen_type", pa.string(), "query | evidence | answer"),
        ("rejected_type", pa.string(), "query | evidence | answer | malformed"),
        ("chosen_end", pa.string(), "stop: at a stop string | turn: the policy ended its turn | length: cut off"),
        ("rejected_end", pa.string(), "as chosen_end"),
        ("chosen_reward", pa.float64(), "SPRE, or the judge's value if `pairs.reward` is judge"),
        ("rejected_reward", pa.float64(), "as chosen_reward; lower"),
        ("margin", pa.float64(), "chosen_reward - rejected_reward"),
        ("chosen_visits", pa.int32(), "N of the chosen node"),
        ("rejected_visits", pa.int32(), "N of the rejected node"),
        ("parent_node_id", pa.int32(), "node_id of the node where the two differ"),
        ("chosen_node_id", pa.int32(), "node_id in the trees"),
        ("rejected_node_id", pa.int32(), "node_id in the trees"),
        ("prompt_tokens", pa.int32(), "null if the backend reports none"),
        ("policy", pa.string(), "model that wrote both, with a checksum if it is a folder"),
        ("config_hash", pa.string(), "hash of the run's configuration and inputs"),
    ]


@Described
def trajectory_pair_schema(pa: Any) -> list[Column]:
    """One row per preference between two whole trajectories of a question, compared by outcome."""
    return [
        ("chosen_steps", _list(pair_step), "from the first step in which the two differ"),
        ("rejected_steps", _list(pair_step), "as chosen_steps"),
        ("pair_id", pa.string(), "unique within the data set"),
        ("question_id", pa.string(), "id of the question; all its pairs are in one split"),
        ("dataset", pa.string(), "name of the data set or file"),
        ("depth", pa.int32(), "number of shared steps"),
        ("chosen_reward", pa.float64(), "F1 of the final answer"),
        ("rejected_reward", pa.float64(), "F1 of the final answer; lower"),
        ("margin", pa.float64(), "chosen_reward - rejected_reward"),
        ("chosen_node_id", pa.int32(), "node_id of the answer in the trees"),
        ("rejected_node_id", pa.int32(), "node_id of the answer in the trees"),
        ("policy", pa.string(), "model that wrote both, with a checksum if it is a folder"),
        ("config_hash", pa.string(), "hash of the run's configuration and inputs"),
    ]


@Described
def trajectory_schema(pa: Any) -> list[Column]:
    """One row per attempt at a question, with its scores, prompts, texts and passages."""
    return [
        ("dataset", pa.string(), "name of the data set or file"),
        ("question_id", pa.string(), "the question's id there"),
        ("question", pa.string(), "its text"),
        ("golden_answers", pa.list_(pa.string()), "gold answers; any of them is correct"),
        ("kind", pa.string(), "type of question; empty if the data set has none"),
        ("hops", pa.int32(), "searches that the question needs; null if unknown"),
        ("answer", pa.string(), "null if the trajectory ended without one"),
        ("stop_reason", pa.string(), "answered | forced_answer | no_answer"),
        ("em", pa.float64(), "exact match, 0 or 1"),
        ("f1", pa.float64(), "token F1, 0 to 1"),
        ("acc", pa.float64(), "1 if a golden answer is contained in the prediction"),
        ("retrievals", pa.int32(), "searches"),
        ("steps", pa.int32(), "actions"),
        ("forced", pa.int32(), "1 if the answer was forced at the step limit"),
        ("format_rate", pa.float64(), "1 if it is well-formed"),
        ("prompt_tokens", pa.int64(), "of all steps; null if the backend reports none"),
        ("completion_tokens", pa.int64(), "of all steps; null if the backend reports none"),
        ("well_formed", pa.bool_(), "by the format's own checker"),
        ("reason", pa.string(), "why it is not well-formed; empty if it is"),
        ("lasj", pa.bool_(), "a judge's verdict on the answer; null without one, as the next four"),
        ("steps_over", pa.int32(), "needless searches"),
        ("searches_known", pa.int32(), "searches with a verdict on whether they were needed"),
        ("steps_under", pa.int32(), "false steps without a search"),
        ("own_steps_known", pa.int32(), "steps without a search, with a verdict on whether they were false"),
        ("trajectory", _list(step), "all prompts, texts and passages"),
    ]


@Described
def rollout_schema(pa: Any) -> list[Column]:
    """One row per trajectory of online training, with the parts of its reward (`OUT/rollouts`)."""
    return [
        ("step", pa.int32(), "optimizer step of the rollout, from 1"),
        ("dataset", pa.string(), "name of the data set or file"),
        ("question_id", pa.string(), "the question's id there"),
        ("sample", pa.int32(), "number within its group, from 0"),
        ("reward", pa.float64(), "null without a verdict; `cause` says why"),
        (
            "advantage",
            pa.float64(),
            "reward less the mean of its group, divided as `scale_rewards` says; 0 without a reward",
        ),
        ("cause", pa.string(), "why there is no reward"),
        ("parts", pa.map_(pa.string(), pa.float64()), "components of the reward by name"),
        ("well_formed", pa.bool_(), "by the format's own checker"),
        ("reason", pa.string(), "why it is not well-formed"),
        ("answer", pa.string(), "null if the trajectory ended without one"),
        ("stop_reason", pa.string(), "answered | forced_answer | no_answer"),
        ("question", pa.string(), "its text"),
        ("golden_answers", pa.list_(pa.string()), "gold answers; any of them is correct"),
        ("turn", pa.string(), "text of the policy and what was inserted in between"),
        ("tokens", pa.int32(), "tokens of the turn"),
        ("policy_tokens", pa.int32(), "tokens of the turn that the policy wrote"),
        ("truncated", pa.bool_(), "cut off by a token limit"),
    ]


@Described
def plan_schema(pa: Any) -> list[Column]:
    """One row per question with a reference plan (Search-P1, eq. 5)."""
    return [
        ("dataset", pa.string(), "name of the data set or file"),
        ("question_id", pa.string(), "the question's id there"),
        ("planner", pa.string(), "the plan in words"),
        ("steps", pa.list_(pa.string()), "searches in order"),
        ("candidates", pa.int32(), "candidate plans that could be parsed"),
        ("correct", pa.int32(), "candidates whose answer is correct"),
        ("votes", pa.int32(), "candidates that were voted on; 0 if there was no vote"),
    ]


def _list(row: Described) -> pa.DataType:
    import pyarrow as pa

    return pa.list_(pa.struct(list(row())))
