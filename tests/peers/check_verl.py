"""RLHFDataset, `default_compute_score`, reward manager, agent loop, tool: questions of trees, and four whole tasks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import world

MODEL = str(world.ROOT / "reasonrag" / "demo" / "stream_policy")
# What rl train takes, and what verl's text cannot give.
TASKS = {
    "demo-outcome": ["--set", "reward.outcome.format_weight=0.2"],
    "demo-hiprag": ["--set", "reward.hiprag.over_search=false"],
    "demo-search-p1": ["--set", "limit=40", "--set", "reward.search_p1.reference_track=false"],
    "demo-when-to-search": ["--set", "reward.when_to_search.stages=unified"],
}
SIZE = ["--max-steps", "1", "--questions-per-step", "16", "--set", "validation.steps=0"]


def main() -> dict[str, object]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    counts = questions_of_trees(tokenizer)
    for preset, options in TASKS.items():
        counts += whole_task(preset, options, tokenizer)
    assert counts["recorded rollouts"] >= 500 and not counts["of them scored otherwise than recorded"]
    counts += own_loop(Path("demo-outcome-verl"), tokenizer)
    return {"of them scored otherwise than recorded": 0, **counts}


def export(*flags: object) -> None:
    environment = {**os.environ, "PYTHONPATH": str(world.ROOT)}
    subprocess.run([sys.executable, "-m", "contrib.verl", *map(str, flags)], check=True, env=environment)


def questions_of_trees(tokenizer) -> Counter[str]:
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    run = world.run("demo:search_r1")
    world.reasonrag("export", run, "--to", "verl", "--out", Path.cwd() / "verl")
    rows = dataset(tokenizer, *Path("verl").glob("*.parquet"))
    assert len(rows) == 200
    # verl's own loader of a reward function.
    own_score = get_custom_reward_fn(config(f"reward.custom_reward_function.path={world.ROOT}/contrib/verl_reward.py"))
    by_question = {}
    for row in (rows[number] for number in range(len(rows))):
        by_question[row["extra_info"]["dataset"], row["extra_info"]["question_id"]] = row
    counts = Counter({"questions": len(rows)})
    for turn, em, key in world.answered(run):
        row = by_question[key]
        asked = row["data_source"], turn, row["reward_model"]["ground_truth"]
        assert own_score(*asked, extra_info=row["extra_info"]) == em, (turn, em)
        counts["answers that verl_reward.py scores as we do"] += 1
        counts["of them right"] += int(em)
        if key[0] != "hotpotqa":
            try:
                default_compute_score(*asked)
            except NotImplementedError:
                counts["answers of names that verl refuses"] += 1
        elif default_compute_score(*asked) == em:
            counts["answers that verl scores as we do"] += 1
        else:
            assert world.opened_twice(turn), (turn, em)
            counts["scored otherwise, all with an answer's tag opened twice"] += 1
    assert counts["answers of names that verl refuses"]
    return counts


def whole_task(preset: str, options: list[str], tokenizer) -> Counter[str]:
    """Let verl's reward manager score what `rl train` has recorded, by the text alone."""
    import pyarrow.parquet
    import torch
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager

    from reasonrag.formats import FORMATS

    trained, exported = Path.cwd() / preset, Path.cwd() / f"{preset}-verl"
    world.reasonrag("rl", "train", "--preset", preset, *options, *SIZE, "--out", trained)
    export("--preset", preset, *options, "--out", exported)
    rows = dataset(tokenizer, exported / "train.parquet")
    row_of = {row["extra_info"]["question_id"]: row for row in (rows[n] for n in range(len(rows)))}
    counts = Counter({"questions of whole tasks": len(rows)})
    opening = FORMATS[preset.removeprefix("demo-").replace("-", "_").replace("outcome", "search_r1")]().opening

    async def score() -> None:
        manager = load_reward_manager(config(*(exported / "overrides.txt").read_text().splitlines()), tokenizer)
        for rollout in pyarrow.parquet.read_table(next((trained / "rollouts").glob("*.parquet"))).to_pylist():
            row = row_of[rollout["question_id"]]
            # verl's responses begin with the policy's first token.
            ids = tokenizer(rollout["turn"].removeprefix(opening), add_special_tokens=False)["input_ids"]
            tensors = {
                "responses": torch.tensor([ids]),
                "attention_mask": torch.ones(1, len(ids) + 3, dtype=torch.long),
            }
            named = {name: [row[name]] for name in ("data_source", "reward_model", "extra_info")}
            data = DataProto.from_dict(tensors=tensors, non_tensors=named)
            scored = (await manager.run_single(data))["reward_score"]
            counts["recorded rollouts"] += 1
            counts[f"of them {preset}, different values"] += 0
            seen.add(scored)
            if scored != rollout["reward"]:
                print(preset, scored, rollout["reward"], rollout["turn"], file=sys.stderr)
                counts["of them scored otherwise than recorded"] += 1

    seen: set[float] = set()
    asyncio.run(score())
    counts[f"of them {preset}, different values"] = len(seen)
    return counts


def own_loop(exported: Path, tokenizer) -> Counter[str]:
    """Roll questions out by our engine in verl's loop, on a server that is greedy, and by ours alone."""
    import hydra
    import torch
    from omegaconf import OmegaConf
    from transformers import AutoModelForCausalLM
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.workers.rollout.replica import TokenOutput

    from reasonrag.core.types import Trajectory
    from reasonrag.online_rl.settings import load_rl_settings
    from reasonrag.online_rl.task import open_task
    from reasonrag.pipeline.parts import open_engine, open_llm
    from reasonrag.rewards.base import trajectory_text

    class Greedy:
        model = AutoModelForCausalLM.from_pretrained(MODEL)

        async def generate(self, request_id, prompt_ids, sampling_params):
            asked = torch.tensor([prompt_ids])
            limits = {"max_new_tokens": sampling_params["max_tokens"], "stop_strings": sampling_params["stop"]}
            made = self.model.generate(asked, do_sample=False, tokenizer=tokenizer, **limits)
            ids = made[0, len(prompt_ids) :].tolist()
            return TokenOutput(token_ids=ids, log_probs=[0.0] * len(ids))

    loop = hydra.utils.instantiate(
        OmegaConf.load(exported / "agent.yaml")[0],
        trainer_config=DictConfigWrap(config(*(exported / "overrides.txt").read_text().splitlines())),
        server_manager=Greedy(),
        tokenizer=tokenizer,
    )
    settings = load_rl_settings(file=exported / "task.yaml")
    task = open_task(settings)
    rows = dataset(tokenizer, exported / "train.parquet")
    counts: Counter[str] = Counter()

    async def run() -> None:
        greedy = task.config.policy.model_copy(update={"spec": "demo:search_r1", "temperature": 0.0})
        setup = task.config.model_copy(update={"policy": greedy})
        engine = open_engine(setup, open_llm(greedy, "policy"), task.retriever, task.format)
        for number in range(20):
            made = await loop.run({"temperature": 0.0}, **rows[number])
            (ours,) = await engine.run([Trajectory(task.questions[number])], seeds=[0])
            assert tokenizer.decode(made.response_ids, skip_special_tokens=True) == trajectory_text(ours)
            written = [i for i, m in zip(made.response_ids, made.response_mask, strict=True) if m]
            assert written == [i for step in ours.steps for i in step.completion.token_ids]
            counts["rollouts in verl's loop with our engine's tokens"] += 1

    asyncio.run(run())
    return counts


def dataset(tokenizer, *files: Path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    options = OmegaConf.create({"max_prompt_length": 1024, "return_raw_chat": True})
    return RLHFDataset(sorted(map(str, files)), tokenizer, options)


def config(*overrides: str):
    """Return verl's own configuration with overrides; an unknown name is an error."""
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=list(overrides))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        figures = main()
    print(json.dumps(figures))
