"""What a search, and every use of a policy, depends on: questions, retrieval, models, format, budget, pairs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from reasonrag.core.settings import EXECUTION, Flag, Section, Tree, carried_settings, gather, merge, validate


class QuestionsConfig(Section):
    """Which questions. Their content, not their place, is part of a run's identity."""

    dataset: Annotated[
        str | None,
        Field(
            description="questions: a known data set (hotpotqa, 2wikimultihopqa, musique, popqa, ...), demo, or a file"
        ),
        Flag("--dataset"),
        EXECUTION,
    ] = None
    split: Annotated[
        str | None, Field(description="split of a named data set: train, dev or test"), Flag("--split"), EXECUTION
    ] = None
    limit: Annotated[
        int | None,
        Field(ge=1, description="a seeded sample of this many questions; all of them if not given"),
        Flag("--limit"),
        EXECUTION,
    ] = None
    world_seed: Annotated[int, Field(description="which demo world: its seed"), Flag("--world-seed"), EXECUTION] = 0


class RetrievalConfig(Section):
    """Where searches go. What is found there, reordered or not, is part of a run's identity by its fingerprint."""

    kind: Annotated[
        str | None,
        Field(description="how passages are found: bm25, dense, hybrid, remote, or python:PACKAGE.MODULE:NAME"),
        Flag("--retriever"),
        EXECUTION,
    ] = None
    corpus: Annotated[
        str | None,
        Field(description="a file with id and contents: JSONL(.gz, .zst) or Parquet"),
        Flag("--corpus"),
        EXECUTION,
    ] = None
    index: Annotated[str | None, Field(description="a folder that `index build` made"), Flag("--index"), EXECUTION] = (
        None
    )
    encoder: Annotated[
        str | None,
        Field(description="where the model that built a dense index lies now, if it was moved"),
        Flag("--encoder"),
        EXECUTION,
    ] = None
    reranker: Annotated[
        str | None,
        Field(description="a cross-encoder that reorders what an index found: a Hub id or a folder"),
        Flag("--reranker"),
        EXECUTION,
    ] = None
    rerank_depth: Annotated[
        int, Field(ge=1, description="passages that the reranker reads for a query"), Flag("--rerank-depth"), EXECUTION
    ] = 20
    gpu: Annotated[bool, Field(description="search an index's vectors on all GPUs"), Flag("--gpu"), EXECUTION] = False
    device: Annotated[
        str | None,
        Field(description="where encoder and reranker run: cpu, cuda, cuda:1, ..."),
        Flag("--device"),
        EXECUTION,
    ] = None
    url: Annotated[
        tuple[str, ...], Field(description="a server that speaks POST /retrieve"), Flag("--retriever-url"), EXECUTION
    ] = ()
    identity: Annotated[str, Field(description="what the servers hold, for example corpus and index by name")] = (
        "remote"
    )
    top_k: Annotated[int, Field(ge=1, le=100, description="passages per search"), Flag("--top-k")] = 3
    passage_order: Annotated[
        Literal["best_first", "best_last"], Field(description="the order in which a prompt shows passages")
    ] = "best_first"
    max_passage_chars: Annotated[
        int, Field(ge=100, description="characters of a passage that a prompt shows; the rest is cut off")
    ] = 4000
    cache: Annotated[str, Field(description="a folder in which indexes of corpora are kept"), EXECUTION] = (
        "~/.cache/reasonrag"
    )
    timeout_s: Annotated[
        float, Field(gt=0, description="seconds that one request to a retrieval server may take"), EXECUTION
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
    """A policy or a judge. The model's own name, not its address, is part of a run's identity."""

    spec: Annotated[
        str | None,
        Field(description="the model: http(s)://HOST:PORT/v1, hf:NAME_OR_PATH, vllm:NAME_OR_PATH, demo, extractive"),
        Flag("--policy", env="REASONRAG_POLICY"),
        EXECUTION,
    ] = None
    model: Annotated[
        str | None,
        Field(description="the model's name at its server"),
        Flag("--policy-model", env="REASONRAG_POLICY_MODEL"),
        EXECUTION,
    ] = None
    api: Annotated[
        Literal["chat", "completions"],
        Field(description="what a server is sent: chat is messages, completions is text or token ids"),
    ] = "chat"
    tokenizer: Annotated[
        str | None, Field(description="a tokenizer for api=completions; the model's own if not given")
    ] = None
    vllm: Annotated[bool, Field(description="the server is vLLM: ask it for token ids and stop strings")] = False
    api_key_env: Annotated[
        str, Field(description="the environment variable that holds the key of a server; never the key"), EXECUTION
    ] = "OPENAI_API_KEY"
    revision: Annotated[str | None, Field(description="of a model on the Hub: a commit, a tag or a branch")] = None
    trust_remote_code: Annotated[bool, Field(description="run code that comes with a model")] = False
    temperature: Annotated[float, Field(ge=0, le=5, description="of sampling; 0 is greedy"), Flag("--temperature")] = (
        1.0
    )
    top_p: Annotated[
        float, Field(gt=0, le=1, description="nucleus of sampling: share of the probability that is kept")
    ] = 1.0
    max_tokens: Annotated[int, Field(ge=1, description="tokens of one reply"), Flag("--max-tokens")] = 512
    logprobs: Annotated[bool, Field(description="ask a server for token log-probabilities"), EXECUTION] = False
    processed_logprobs: Annotated[
        bool, Field(description="the server reports them at the sampling temperature"), EXECUTION
    ] = False
    timeout_s: Annotated[
        float, Field(gt=0, description="seconds that one request to a server may take, retries included"), EXECUTION
    ] = 300.0
    max_retries: Annotated[int, Field(ge=0, description="further attempts after a request that failed"), EXECUTION] = 6
    concurrency: Annotated[int, Field(ge=1, description="requests in flight at a server"), EXECUTION] = 64
    batch_size: Annotated[int, Field(ge=1, description="prompts at once, of a model in this process"), EXECUTION] = 32
    device: Annotated[
        str | None, Field(description="of hf: models: cpu, cuda, cuda:1, ...; the first GPU if there is one"), EXECUTION
    ] = None
    dtype: Annotated[
        str | None, Field(description="of the weights: float32, bfloat16 or float16; the backend's choice if not given")
    ] = None
    input_price: Annotated[
        float | None, Field(ge=0, description="price of a million prompt tokens"), Flag("--input-price"), EXECUTION
    ] = None
    output_price: Annotated[
        float | None, Field(ge=0, description="price of a million completion tokens"), Flag("--output-price"), EXECUTION
    ] = None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """In the currency of the prices, per million tokens; None where a price is unknown."""
        if self.input_price is None or self.output_price is None:
            return None
        return (prompt_tokens * self.input_price + completion_tokens * self.output_price) / 1e6


class JudgeConfig(ModelConfig):
    """A model that gives verdicts: greedy unless asked otherwise."""

    spec: Annotated[
        str | None,
        Field(description="the judge: as a policy is named, or demo-judge[:WORLD_SEED[:ERROR]]"),
        Flag("--judge"),
        EXECUTION,
    ] = None
    model: Annotated[
        str | None, Field(description="the judge's name at its server"), Flag("--judge-model"), EXECUTION
    ] = None
    temperature: Annotated[float, Field(ge=0, le=5, description="of sampling; 0 is greedy")] = 0.0
    input_price: Annotated[
        float | None,
        Field(ge=0, description="price of a million prompt tokens of the judge"),
        Flag("--judge-input-price"),
        EXECUTION,
    ] = None
    output_price: Annotated[
        float | None,
        Field(ge=0, description="price of a million completion tokens of the judge"),
        Flag("--judge-output-price"),
        EXECUTION,
    ] = None


class FormatConfig(Section):
    """How steps are written. The prompt texts, not the set's name, are part of a run's identity."""

    name: Annotated[
        str,
        Field(description="how steps are written: reasonrag, search_r1, hiprag, ..., or python:PACKAGE.MODULE:NAME"),
        Flag("--format"),
    ] = "reasonrag"
    prompts: Annotated[
        str, Field(description="the instruction texts: default, brief, or a folder"), Flag("--prompts"), EXECUTION
    ] = "default"
    max_steps: Annotated[
        int, Field(ge=1, description="actions of a trajectory; the last one has to answer"), Flag("--max-turns")
    ] = 8


class SearchConfig(Section):
    """Budget and shape of a tree (arXiv:2505.14069, App. A)."""

    iterations: Annotated[int, Field(ge=1, description="visits to the root of a tree"), Flag("--iterations")] = 64
    max_calls: Annotated[
        int | None,
        Field(ge=1, description="policy and judge calls of a tree: a budget beside iterations"),
        Flag("--max-calls"),
    ] = None
    max_children: Annotated[int, Field(ge=1, description="children of a node"), Flag("--max-children")] = 3
    selection: Annotated[
        Literal["puct", "ucb1"],
        Field(description="how a child is chosen on the way down: PUCT (Eq. 5) or UCB1"),
        Flag("--selection"),
    ] = "puct"
    c_uct: Annotated[float, Field(ge=0, description="weight of exploration in Eq. 5 and UCB1")] = 1.414
    rejudge_terminal: Annotated[bool, Field(description="ask the judge again at every visit of an answer")] = False


class ValueConfig(Section):
    """How nodes are valued: Eq. 1 by rollouts, or Eq. 6 by a judge; and SPRE."""

    kind: Annotated[
        Literal["rollout", "judge"],
        Field(description="what values a new node: rollouts (Eq. 1) or a judge (Eq. 6)"),
        Flag("--value"),
    ] = "rollout"
    rollouts: Annotated[int, Field(ge=1, description="rollouts from a new node: k of Eq. 1"), Flag("--rollouts")] = 2
    alpha: Annotated[
        float, Field(gt=0, le=1, description="decay per action; 1 leaves the shortest-path term out"), Flag("--alpha")
    ] = 0.9
    weighting: Annotated[
        Literal["trajectories", "visits"],
        Field(description="how a node's SPRE is averaged: each complete trajectory once, or children by their visits"),
    ] = "trajectories"


class PairsConfig(Section):
    """Which siblings become pairs (arXiv:2505.14069, sec. 2.2.3). Pairs are derived anew without any call."""

    min_margin: Annotated[
        float, Field(ge=0, description="smallest difference of rewards"), Flag("--min-margin"), EXECUTION
    ] = 0.01
    reward: Annotated[
        Literal["spre", "judge"],
        Field(description="what pairs compare: SPRE, or the judge's values"),
        Flag("--pair-reward"),
        EXECUTION,
    ] = "spre"
    alpha: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="decay per action, 1 leaves the shortest-path term out; value.alpha if not given",
        ),
        Flag("--alpha"),
        EXECUTION,
    ] = None
    level: Annotated[
        Literal["step", "trajectory"],
        Field(description="what is compared: sibling steps, or whole trajectories by outcome"),
        Flag("--level"),
        EXECUTION,
    ] = "step"
    test_share: Annotated[
        float, Field(ge=0, lt=1, description="share of questions held out"), Flag("--test-share"), EXECUTION
    ] = 0.1


class RunConfig(Section):
    """How the run goes; nothing here changes a result."""

    concurrency: Annotated[
        int, Field(ge=1, description="questions in work at a time"), Flag("--concurrency"), EXECUTION
    ] = 64
    max_failed: Annotated[
        float,
        Field(ge=0, le=1, description="share of failed questions above which the run fails"),
        Flag("--max-failed"),
        EXECUTION,
    ] = 0.05


class Config(Section):
    """Everything a run depends on."""

    seed: Annotated[int, Field(description="of every draw; same seed, same rows"), Flag("--seed")] = 0
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
        """Whose prices each kind of call has: the policy's own where the policy is the judge."""
        own = self.judge.spec or self.judge.model or self.judge.input_price is not None
        return {"policy": self.policy, "judge": self.judge if own else self.policy}


# The tiny policy was trained on brief prompts with one passage a query; it is of no use with others.
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
    """The resolved configuration. A policy's folder brings the prompts that it knows, unless others are asked for.

    Args:
        preset: a key of `PRESETS`.
        file: YAML; the same tree as `Config`.
        overrides: dotted names to values, `{"search.iterations": 32}`.

    Raises:
        ConfigError: an unknown key (with the nearest name), a value out of range, a file that is not YAML.
    """
    asked = gather(PRESETS, preset=preset, file=file, overrides=overrides)
    policy = asked.get("policy")
    tree = carried_settings(policy.get("spec")) if isinstance(policy, dict) else {}
    merge(tree, asked)
    return validate(Config, tree)
