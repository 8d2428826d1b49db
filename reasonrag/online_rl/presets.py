"""Published settings of online training, and those of the demo world."""

from __future__ import annotations

from reasonrag.core.settings import Tree

# Shared by the papers: Qwen2.5 with Wikipedia and E5, whole batches of rollouts on one node, in bfloat16.
_GRPO: Tree = {
    "method": "full",
    "loss_type": "grpo",
    "epsilon": 0.2,
    "beta": 1e-3,
    "lr_scheduler_type": "constant_with_warmup",
    "per_device_train_batch_size": 4,
}

_DEMO: Tree = {
    "data": "demo",
    "method": "full",
    "device": "cpu",
    "dtype": "float32",
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
    "max_steps": 40,
    "per_device_train_batch_size": 64,
    "rollout": {"group_size": 8, "questions_per_step": 8, "batch_size": 64},
    "validation": {"limit": 60, "steps": 20},
    "save_steps": 20,
    "loss_type": "dapo",
    "epsilon_high": 0.28,
}


def _demo(model: str, reward: Tree, **more: object) -> Tree:
    """Return the preset of a reward in the demo world, with a policy that was trained on its format."""
    judge: Tree = {} if reward["name"] in ("outcome", "spre") else {"judge": {"spec": "demo-judge"}}
    return {**_DEMO, "model": model, "reward": reward, **judge, **more}


# A third of these questions need no search: a needless one is detected only if the policy knows the answer.
_DEMO_HIPRAG = _demo(
    "demo:hiprag", {"name": "hiprag"}, split="train-famous", validation={**_DEMO["validation"], "metric": "acc"}
)

# Search-R1's GRPO scripts, release v0.3 (arXiv:2503.09516): 512 questions, 5 attempts each, 4 searches.
_SEARCH_R1: Tree = {
    **_GRPO,
    "model": "Qwen/Qwen2.5-3B-Instruct",
    "data": "nq,hotpotqa",
    "format": {"name": "search_r1", "max_steps": 5},
    "reward": {"name": "outcome", "outcome": {"preset": "search-r1-v0.3"}},
    "learning_rate": 5e-7,
    "warmup_ratio": 0.285,
    "max_steps": 1005,
    "rollout": {"group_size": 5, "questions_per_step": 512, "minibatches": 2, "max_tokens": 500},
    "retrieval": {"top_k": 3},
}

# HiPRAG (arXiv:2510.07794, sec. 4.3) on the same scripts: lambda_f 0.2, lambda_p 0.4, 400 steps.
_HIPRAG: Tree = {
    **_SEARCH_R1,
    "format": {"name": "hiprag", "max_steps": 5},
    "reward": {"name": "hiprag", "hiprag": {"lambda_f": 0.2, "lambda_p": 0.4}},
    "max_steps": 400,
    "save_steps": 50,
}

RL_PRESETS: dict[str, Tree] = {
    # After DPO, in ReasonRAG's format: 8 steps and 3 passages (arXiv:2505.14069). The paper has no online stage; the
    # batch and the optimizer are those of verl-agent's search run (arXiv:2505.10978), which also trains on steps.
    "reasonrag": {
        **_GRPO,
        "data": "hotpotqa,2wikimultihopqa",
        "format": {"name": "reasonrag", "max_steps": 8},
        "reward": {"name": "spre", "spre": {"alpha": 0.9}},
        "learning_rate": 1e-6,
        "warmup_ratio": 0.1,
        "rollout": {"group_size": 5, "questions_per_step": 256, "minibatches": 2, "max_tokens": 512},
        "retrieval": {"top_k": 3},
    },
    "search-r1": _SEARCH_R1,
    "hiprag": _HIPRAG,
    # Its main experiments: train_ppo_format.sh of its code, one attempt a question, verl's defaults where it sets
    # nothing (entropy bonus, token-mean loss, clip range of values; gamma and lambda are 1).
    "hiprag-ppo": {
        **_HIPRAG,
        "algorithm": "ppo",
        "loss_type": "dapo",
        "learning_rate": 1e-6,
        "ppo": {"learning_rate": 1e-5, "warmup_ratio": 0.015},
        "rollout": {**_SEARCH_R1["rollout"], "group_size": 1},
        "trainer": {"entropy_coef": 1e-3},
    },
    # Search-P1 (App. B): 16 attempts (32 for 3B), temperature 0.6 and top-p 0.95, so that rollouts and the trainer
    # follow different distributions, clip 0.2 to 0.28, KL 0.001, 4 calls. The accuracy of sampled answers, every 10
    # steps, decides which policy is best. Its token top-k of 20 is not offered.
    "search-p1": {
        **_GRPO,
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "data": "nq,hotpotqa",
        "format": {"name": "search_p1", "max_steps": 5},
        "reward": {"name": "search-p1", "search_p1": {"lambda_p": 0.3, "lambda_a": 0.6, "lambda_f": 0.1, "alpha": 0.8}},
        "epsilon_high": 0.28,
        "learning_rate": 1e-6,
        "warmup_ratio": 0.1,
        "save_steps": 10,
        "rollout": {
            "group_size": 16,
            "questions_per_step": 32,
            "minibatches": 2,
            "temperature": 0.6,
            "top_p": 0.95,
            "max_tokens": 4096,
            "max_trajectory_tokens": 8192,
        },
        "importance": "off",
        "validation": {"steps": 10, "temperature": 0.6, "metric": "acc"},
        "retrieval": {"top_k": 3},
    },
    # Learning when to search (Table 5): DAPO, 32 attempts at 32 questions, 500 steps, 5 passages; a judge decides
    # which answers are correct (sec. 4.1); no KL, as the text describes DAPO, though Table 5 lists 1e-4.
    "when-to-search": {
        "model": "Qwen/Qwen2.5-3B-Instruct",
        "data": "2wikimultihopqa",
        "method": "full",
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "sampling": {"dynamic": True},
        "format": {"name": "when_to_search", "max_steps": 6},
        "reward": {"name": "when-to-search", "when_to_search": {"beta": 0.3, "correct": "judge"}},
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "max_steps": 500,
        "save_steps": 30,
        "per_device_train_batch_size": 4,
        "rollout": {"group_size": 32, "questions_per_step": 32, "max_tokens": 8192, "max_trajectory_tokens": 16384},
        "validation": {"steps": 30},
        "retrieval": {"top_k": 5},
    },
    "demo-outcome": _demo("demo:search_r1", {"name": "outcome"}),
    # With the others' 3e-4 it is as accurate, and an attempt in twenty is out of form.
    "demo-reasonrag": _demo("demo", {"name": "spre"}, learning_rate=1e-4),
    "demo-hiprag": _DEMO_HIPRAG,
    "demo-hiprag-ppo": {
        **_DEMO_HIPRAG,
        "algorithm": "ppo",
        "ppo": {"learning_rate": 1e-3},
        "rollout": {**_DEMO["rollout"], "group_size": 1, "questions_per_step": 64},
    },
    "demo-search-p1": _demo("demo:search_p1", {"name": "search-p1"}),
    "demo-when-to-search": _demo(
        "demo:when_to_search", {"name": "when-to-search", "when_to_search": {"switch_step": 20}}, split="train-famous"
    ),
}
