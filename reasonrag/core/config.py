"""The settings of `build-tree`, `eval` and `rl plan`: questions, retrieval, models, format, tree search, pairs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from reasonrag.core.settings import EXECUTION, Flag, Section, Tree, carried_settings, gather, merge, validate


class QuestionsConfig(Section):
    """Which questions to use. Their content, not their path, is part of the identity of a run."""

    dataset: Annotated[
        str | None,
        Field(
            description="questions: a known data set (hotpotqa, 2wikimultihopqa, musique, popqa, ...), demo, or a "
            "JSONL or Parquet file"
        ),
        Flag("--dataset"),
        EXECUTION,
    ] = None
    split: Annotated[
        str | None, Field(description="split of a known data set: train, dev or test"), Flag("--split"), EXECUTION
    ] = None
    limit: Annotated[
        int | None,
        Field(ge=1, description="use a random sample of this many questions (default: all)"),
        Flag("--limit"),
        EXECUTION,
    ] = None
    world_seed: Annotated[int, Field(description="seed of the demo world"), Flag("--world-seed"), EXECUTION] = 0


class RetrievalConfig(Section):
    """Where to search. The fingerprint of the retriever, reranking included, is part of the identity of a run."""

    kind: Annotated[
        str | None,
        Field(
            description="how to search an index: bm25, dense or hybrid (default: the best that it has). Without "
            "an index also remote, or python:PACKAGE.MODULE:NAME"
        ),
        Flag("--retriever"),
        EXECUTION,
    ] = None
    corpus: Annotated[
        str | None,
        Field(description="corpus to search: a JSONL(.gz, .zst) or Parquet file with id and contents"),
        Flag("--corpus"),
        EXECUTION,
    ] = None
    index: Annotated[
        str | None, Field(description="folder of an index that `index build` made"), Flag("--index"), EXECUTION
    ] = None
    encoder: Annotated[
        str | None,
        Field(
            description="sentence-transformers model that encodes passages and queries: a Hub id or a folder. "
            "Needed only if the model has moved since the index was built"
        ),
        Flag("--encoder"),
        EXECUTION,
    ] = None
    reranker: Annotated[
        str | None,
        Field(description="cross-encoder that reorders what an index finds: a Hub id or a folder"),
        Flag("--reranker"),
        EXECUTION,
    ] = None
    rerank_depth: Annotated[
        int, Field(ge=1, description="passages per query that the reranker reads"), Flag("--rerank-depth"), EXECUTION
    ] = 20
    gpu: Annotated[bool, Field(description="search the vectors of an index on all GPUs"), Flag("--gpu"), EXECUTION] = (
        False
    )
    device: Annotated[
        str | None,
        Field(description="device of encoder and reranker, for example cpu, cuda or cuda:1"),
        Flag("--device"),
        EXECUTION,
    ] = None
    url: Annotated[
        tuple[str, ...],
        Field(description="URL of a retrieval server that speaks POST /retrieve"),
        Flag("--retriever-url"),
        EXECUTION,
    ] = ()
    identity: Annotated[
        str, Field(description="what the retrieval servers hold, for example corpus and index by name")
    ] = "remote"
    top_k: Annotated[int, Field(ge=1, le=100, description="passages per search"), Flag("--top-k")] = 3
    passage_order: Annotated[
        Literal["best_first", "best_last"], Field(description="order of the passages in a prompt")
    ] = "best_first"
    max_passage_chars: Annotated[
        int, Field(ge=100, description="maximum characters of a passage in a prompt; the rest is cut off")
    ] = 4000
    cache: Annotated[str, Field(description="folder that keeps the indexes of corpora"), EXECUTION] = (
        "~/.cache/reasonrag"
    )
    timeout_s: Annotated[
        float, Field(gt=0, description="timeout in seconds of one request to a retrieval server"), EXECUTION
    ] = 60.0

    @model_validator(mode="after")
    def _one_place(self) -> RetrievalConfig:
        if self.url and self.corpus:
            raise ValueError("both a corpus and a retrieval server are given; the server has its own, leave one out")
        if self.index and (self.url or self.corpus):
            raise ValueError(
                "an index and another place to search are given; the index has its own corpus, leave one out"
            )
        if self.reranker and not self.index:
            raise ValueError("a reranker reorders what an index finds; give one as --index")
        return self

    @field_validator("url", mode="before")
    @classmethod
    def _one_url(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class ModelConfig(Section):
    """A policy or a judge. The name of the model, not its address, is part of the identity of a run."""

    spec: Annotated[
        str | None,
        Field(
            description="model that acts: http(s)://HOST:PORT/v1, hf:NAME_OR_PATH, vllm:NAME_OR_PATH, "
            "demo[:FORMAT], extractive, or python:PACKAGE.MODULE:FACTORY"
        ),
        Flag("--policy", env="REASONRAG_POLICY"),
        EXECUTION,
    ] = None
    model: Annotated[
        str | None,
        Field(description="model name that the policy's server expects"),
        Flag("--policy-model", env="REASONRAG_POLICY_MODEL"),
        EXECUTION,
    ] = None
    api: Annotated[
        Literal["chat", "completions"],
        Field(description="API of the server: chat sends messages, completions sends text or token ids"),
    ] = "chat"
    tokenizer: Annotated[str | None, Field(description="tokenizer for api=completions (default: the model's own)")] = (
        None
    )
    vllm: Annotated[bool, Field(description="the server is vLLM: request token ids and stop strings")] = False
    api_key_env: Annotated[
        str,
        Field(description="name of the environment variable with the server's API key; never the key itself"),
        EXECUTION,
    ] = "OPENAI_API_KEY"
    revision: Annotated[str | None, Field(description="revision of a Hub model: commit, tag or branch")] = None
    trust_remote_code: Annotated[bool, Field(description="run Python code that comes with a model")] = False
    temperature: Annotated[
        float, Field(ge=0, le=5, description="sampling temperature; 0 is greedy decoding"), Flag("--temperature")
    ] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, description="nucleus sampling: probability mass that is kept")] = 1.0
    max_tokens: Annotated[int, Field(ge=1, description="maximum tokens of one completion"), Flag("--max-tokens")] = 512
    logprobs: Annotated[bool, Field(description="request token log-probabilities from a server"), EXECUTION] = False
    processed_logprobs: Annotated[
        bool, Field(description="the server reports log-probabilities at the sampling temperature"), EXECUTION
    ] = False
    timeout_s: Annotated[
        float, Field(gt=0, description="timeout in seconds of one request to a server, retries included"), EXECUTION
    ] = 300.0
    max_retries: Annotated[int, Field(ge=0, description="maximum retries of a failed request"), EXECUTION] = 6
    concurrency: Annotated[int, Field(ge=1, description="maximum requests in flight at a server"), EXECUTION] = 64
    batch_size: Annotated[int, Field(ge=1, description="prompts per batch of a model in this process"), EXECUTION] = 32
    device: Annotated[
        str | None,
        Field(description="device of hf: models: cpu, cuda, cuda:1, ... (default: the first GPU, else the CPU)"),
        EXECUTION,
    ] = None
    dtype: Annotated[
        str | None,
        Field(description="dtype of the weights: float32, bfloat16 or float16 (default: the backend's choice)"),
    ] = None
    input_price: Annotated[
        float | None,
        Field(ge=0, description="price of one million prompt tokens of the policy"),
        Flag("--input-price"),
        EXECUTION,
    ] = None
    output_price: Annotated[
        float | None,
        Field(ge=0, description="price of one million completion tokens of the policy"),
        Flag("--output-price"),
        EXECUTION,
    ] = None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """Return the cost of some tokens in the currency of the prices; None if a price is unknown."""
        if self.input_price is None or self.output_price is None:
            return None
        return (prompt_tokens * self.input_price + completion_tokens * self.output_price) / 1e6


class JudgeConfig(ModelConfig):
    """A model that gives verdicts, by default with greedy decoding."""

    spec: Annotated[
        str | None,
        Field(description="model that judges: as for --policy, or demo-judge[:WORLD_SEED[:ERROR]]"),
        Flag("--judge"),
        EXECUTION,
    ] = None
    model: Annotated[
        str | None, Field(description="model name that the judge's server expects"), Flag("--judge-model"), EXECUTION
    ] = None
    temperature: Annotated[float, Field(ge=0, le=5, description="sampling temperature; 0 is greedy decoding")] = 0.0
    input_price: Annotated[
        float | None,
        Field(ge=0, description="price of one million prompt tokens of the judge"),
        Flag("--judge-input-price"),
        EXECUTION,
    ] = None
    output_price: Annotated[
        float | None,
        Field(ge=0, description="price of one million completion tokens of the judge"),
        Flag("--judge-output-price"),
        EXECUTION,
    ] = None


class FormatConfig(Section):
    """How steps are written. The prompt texts, not their name, are part of the identity of a run."""

    name: Annotated[
        str,
        Field(
            description="format of the steps: reasonrag, search_r1, hiprag, search_p1, when_to_search, or "
            "python:PACKAGE.MODULE:NAME"
        ),
        Flag("--format"),
    ] = "reasonrag"
    prompts: Annotated[
        str, Field(description="prompt texts: default, brief, or a folder"), Flag("--prompts"), EXECUTION
    ] = "default"
    max_steps: Annotated[
        int,
        Field(ge=1, description="maximum actions of the policy in a trajectory; the last one must answer"),
        Flag("--max-turns"),
    ] = 8


class SearchConfig(Section):
    """Budget and shape of a tree (arXiv:2505.14069, App. A)."""

    iterations: Annotated[int, Field(ge=1, description="MCTS iterations per tree"), Flag("--iterations")] = 64
    max_calls: Annotated[
        int | None,
        Field(ge=1, description="maximum policy and judge calls per tree, as a second limit beside iterations"),
        Flag("--max-calls"),
    ] = None
    max_children: Annotated[int, Field(ge=1, description="maximum children of a node"), Flag("--max-children")] = 3
    selection: Annotated[
        Literal["puct", "ucb1"],
        Field(description="formula that selects a child: PUCT (Eq. 5) or UCB1"),
        Flag("--selection"),
    ] = "puct"
    c_uct: Annotated[float, Field(ge=0, description="exploration weight in Eq. 5 and UCB1")] = 1.414
    rejudge_terminal: Annotated[bool, Field(description="ask the judge again at every visit of an answer")] = False


class ValueConfig(Section):
    """How nodes get values: by rollouts (Eq. 1) or a judge (Eq. 6), and SPRE."""

    kind: Annotated[
        Literal["rollout", "judge"],
        Field(description="what estimates the value of a new node: rollouts (Eq. 1) or a judge (Eq. 6)"),
        Flag("--value"),
    ] = "rollout"
    rollouts: Annotated[int, Field(ge=1, description="rollouts per new node: k of Eq. 1"), Flag("--rollouts")] = 2
    alpha: Annotated[
        float, Field(gt=0, le=1, description="SPRE decay per action; 1 removes the shortest-path term"), Flag("--alpha")
    ] = 0.9
    weighting: Annotated[
        Literal["trajectories", "visits"],
        Field(
            description="how the SPRE of a node is averaged: every complete trajectory once, or children by their "
            "visits"
        ),
    ] = "trajectories"


class PairsConfig(Section):
    """Which siblings become pairs (arXiv:2505.14069, sec. 2.2.3). Other pairs can be derived without model calls."""

    min_margin: Annotated[
        float,
        Field(ge=0, description="minimum difference between the two rewards of a pair"),
        Flag("--min-margin"),
        EXECUTION,
    ] = 0.01
    reward: Annotated[
        Literal["spre", "judge"],
        Field(description="reward that pairs compare: SPRE, or the judge's values"),
        Flag("--pair-reward"),
        EXECUTION,
    ] = "spre"
    alpha: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="SPRE decay per action; 1 removes the shortest-path term (default: value.alpha)",
        ),
        Flag("--alpha"),
        EXECUTION,
    ] = None
    level: Annotated[
        Literal["step", "trajectory"],
        Field(description="what pairs compare: sibling steps, or whole trajectories by outcome"),
        Flag("--level"),
        EXECUTION,
    ] = "step"
    test_share: Annotated[
        float,
        Field(ge=0, lt=1, description="share of the questions whose pairs form the test split"),
        Flag("--test-share"),
        EXECUTION,
    ] = 0.1


class RunConfig(Section):
    """How a run proceeds; nothing here changes a result."""

    concurrency: Annotated[
        int, Field(ge=1, description="questions processed at the same time"), Flag("--concurrency"), EXECUTION
    ] = 64
    max_failed: Annotated[
        float,
        Field(ge=0, le=1, description="maximum share of failed questions; above it, the exit code is 1"),
        Flag("--max-failed"),
        EXECUTION,
    ] = 0.05


class Config(Section):
    """Everything that a run depends on."""

    seed: Annotated[
        int, Field(description="random seed; the same seed repeats every random choice"), Flag("--seed")
    ] = 0
    questions: QuestionsConfig = QuestionsConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    policy: ModelConfig = ModelConfig()
    judge: JudgeConfig = JudgeConfig()
    format: FormatConfig = FormatConfig()
    search: SearchConfig = SearchConfig()
    value: ValueConfig = ValueConfig()
    pairs: PairsConfig = PairsConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _no_contradiction(self) -> Config:
        if self.value.kind != "judge" and (self.judge.spec or self.judge.model):
            raise ValueError("a judge is named, but nodes are valued by rollouts; add --value judge, or leave it out")
        if self.value.kind != "judge" and self.pairs.reward == "judge":
            raise ValueError("pairs.reward is judge, but no judge values the nodes; add --value judge, or take spre")
        if self.pairs.reward == "judge" and self.pairs.alpha is not None:
            raise ValueError("pairs.alpha is for SPRE, but pairs.reward is judge; leave one of them out")
        if self.pairs.level == "trajectory" and (self.pairs.reward == "judge" or self.pairs.alpha is not None):
            raise ValueError("whole trajectories are compared by the F1 of their answers; leave reward and alpha out")
        return self

    @property
    def prices(self) -> dict[str, ModelConfig]:
        """Return the model whose prices count for each kind of call; without a judge, the policy judges."""
        own = self.judge.spec or self.judge.model or self.judge.input_price is not None
        return {"policy": self.policy, "judge": self.judge if own else self.policy}


# The tiny policy was trained on brief prompts with one passage per query, and is useless with others.
_DEMO_POLICY: Tree = {
    "policy": {"max_tokens": 48},
    "format": {"prompts": "brief"},
    "retrieval": {"top_k": 1},
}

PRESETS: dict[str, Tree] = {
    "paper": {
        # Appendix A: Eq. 5 selects, one judge call (Eq. 6) values a node; App. E.1: the top 3 passages.
        "search": {"selection": "puct"},
        "value": {"kind": "judge"},
        "retrieval": {"top_k": 3},
    },
    "official": {
        # The published builder: 64 iterations, 2 children, 7 free steps and then a forced answer, UCB1, judge values,
        # terminal nodes judged at every visit, inner rewards weighted by visits, best passage last.
        "search": {"iterations": 64, "max_children": 2, "selection": "ucb1", "c_uct": 1.414, "rejudge_terminal": True},
        "value": {"kind": "judge", "alpha": 0.9, "weighting": "visits"},
        "format": {"max_steps": 8},
        "retrieval": {"top_k": 3, "passage_order": "best_last"},
    },
    "demo": {
        **_DEMO_POLICY,
        "policy": {"spec": "demo", **_DEMO_POLICY["policy"]},
        "questions": {"dataset": "demo", "split": "train"},
        "search": {"iterations": 8},
    },
}


def load_config(
    *, preset: str | None = None, file: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Return the resolved configuration. The folder of a policy supplies its prompts, unless others are given.

    Args:
        preset: a key of `PRESETS`.
        file: YAML file with the sections of `Config`.
        overrides: dotted names to values, `{"search.iterations": 32}`.

    Raises:
        ConfigError: a key is unknown (the message has the nearest name), a value out of range, or the file not YAML.
    """
    asked = gather(PRESETS, preset=preset, file=file, overrides=overrides)
    policy = asked.get("policy")
    tree = carried_settings(policy.get("spec")) if isinstance(policy, dict) else {}
    merge(tree, asked)
    return validate(Config, tree)
