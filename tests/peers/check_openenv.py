"""OpenEnv's client plays episodes on `env serve`; TRL's GRPOTrainer takes a step on it (`examples/openenv_grpo.py`)."""

from __future__ import annotations

import json
import math
import os
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "reasonrag" / "demo" / "stream_policy"
GROUP, QUESTIONS = 4, 3
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CI": "1", "OMP_NUM_THREADS": "1"}

from openenv.core import GenericEnvClient  # noqa: E402

from examples.openenv_grpo import reward_from_environment, rollouts  # noqa: E402
from tests.peers.world import serving  # noqa: E402


def play(url: str, question: dict[str, str]) -> tuple[float, float]:
    """Return the rewards of an answer that nobody gave, and of no answer."""
    with GenericEnvClient(base_url=url).sync() as client:
        shown = client.reset(**question)
        assert question["question"] in shown.observation["messages"][-1]["content"] and not shown.done
        found = client.step({"text": f"<think>I search.</think><search>{question['question']}</search>"})
        assert "<information>" in found.observation["inserted"] and found.reward is None
        wrong = client.step({"text": "<think>So.</think><answer>nobody at all</answer>"})
        client.reset(**question)
        silent = client.step({"text": "I do not know."})
        assert wrong.done and silent.done and client.state()["question_id"] == question["question_id"]
    return wrong.reward, silent.reward


def train(url: str, questions: list[dict[str, str]]) -> dict[str, float]:
    """Take one optimizer step; return TRL's own metrics of it."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    seen: dict[str, Any] = {}
    play_all = rollouts(url)

    def watched(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rows = play_all(prompts, trainer)
        assert all(len(ids) == len(mask) for ids, mask in zip(rows["completion_ids"], rows["env_mask"], strict=True))
        seen.update(rows)
        return rows

    rows = [{"prompt": [{"role": "user", "content": question["question"]}]} for question in questions]
    settings = GRPOConfig(
        output_dir="grpo",
        max_steps=1,
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * len(questions),
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        seed=1,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(POLICY),
        processing_class=AutoTokenizer.from_pretrained(POLICY),
        reward_funcs=reward_from_environment,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        rollout_func=watched,
    )
    before = {name: weights.detach().clone() for name, weights in trainer.model.named_parameters()}
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    moved = sum(bool((weights != before[name]).any()) for name, weights in trainer.model.named_parameters())
    masks = [mask for row in seen["env_mask"] for mask in row]
    tokenizer = trainer.processing_class
    for ids, mask in zip(seen["completion_ids"], seen["env_mask"], strict=True):
        inserted = tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if not own])
        assert "</search>" not in inserted and "</answer>" not in inserted
    assert math.isfinite(log["loss"]) and (log["grad_norm"] > 0) == (len(set(seen["environment_reward"])) > 1)
    return {
        "trajectories": len(seen["environment_reward"]),
        "mean reward": round(sum(seen["environment_reward"]) / len(seen["environment_reward"]), 3),
        "grad norm": round(log["grad_norm"], 4),
        "weights changed": f"{moved} of {len(before)}",
        "tokens inserted, outside the loss": round(1 - sum(masks) / len(masks), 3),
    }


def main() -> None:
    served = ("env", "serve", "--preset", "demo-outcome", "--port", "0", "--set", "retrieval.cache=cache")
    with serving(*served) as url:
        with urllib.request.urlopen(f"{url}/questions") as listed:
            questions = json.load(listed)[:QUESTIONS]
        assert [play(url, question) for question in questions] == [(0.0, 0.0)] * QUESTIONS
        print(json.dumps(train(url, questions)))


if __name__ == "__main__":
    main()
