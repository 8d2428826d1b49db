"""Train a policy on its own rollouts, through TRL: GRPO, DAPO, RLOO, REINFORCE++ or PPO.

`train_online` reads from top to bottom: task -> engine and
reward -> batches of rollouts -> rows -> train -> save.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.settings import expect
from reasonrag.llm.base import Sampling
from reasonrag.llm.server import ServerLLM
from reasonrag.llm.weight_sync import VLLMServerSync
from reasonrag.online_rl.collector import BatchPlan, Collector, RolloutLoop, Validation, collapse
from reasonrag.online_rl.settings import RLSettings
from reasonrag.online_rl.task import batched_retrievers, open_task, open_task_reward
from reasonrag.pipeline.parts import open_engine, served_by
from reasonrag.rollout import derive_seed
from reasonrag.training.model import load_weights, lora_config
from reasonrag.training.run import BEST, Log, TrainingRun, checkpoint_problem, mark_complete, save_policy

_IMPORTANCE_MAX = 2.0  # threshold of the importance ratio


def train_online(settings: RLSettings, out: Path | None, *, log: Log = print) -> TrainingRun[RLSettings]:
    """Train a policy on its own rollouts (GRPO: arXiv:2402.03300, algorithm 1), or resume in `out`.

    TRL has the loop over optimizer steps. Whenever a batch is used up, it calls the trainer's
    `_rollout` (lines 5 to 8: questions, G trajectories of each, rewards),
    computes the advantages (line 9), and minimises the clipped loss (line 11).
    """
    expect(RLSettings, settings)
    from trl import GRPOConfig

    task = open_task(settings)
    run = TrainingRun("rl", settings, out, GRPOConfig, log=log, **trl_settings(settings))
    with closing(RolloutLoop(task.config.stall_s)) as loop, run:
        loop.parts.push_async_callback(task.aclose)
        loop.run(served_by({"retriever": task.retriever}))  # one that is away should end this before a model is loaded
        remark = "" if task.held_out else ": no best policy is kept (validation.data names questions)"
        if len(task.questions) < settings.rollout.questions_per_step:
            remark += f"; a batch asks {settings.rollout.questions_per_step}, some of them again"
        run.log(f"{len(task.questions)} questions, {len(task.held_out)} held out for validation{remark}")
        # Rows are numbers for TRL's sampler: the collector chooses the questions by the step.
        if (numbered_rows := run.open(lambda: task.data)) is None:  # the folder holds the finished run
            return run

        # The policy samples with the weights that are trained:
        # in this process, or on a server that is sent them.
        llm, weights = open_policy(run, loop)
        journal, decode = run.out / f"judge-{run.arguments.process_index}.sqlite", run.chat.decode
        reward = open_task_reward(settings, task, llm, journal, loop.parts, decode=decode)
        # The engine of build-tree and eval makes the trajectories.
        retriever, held_out_retriever = batched_retrievers(task)
        engine = open_engine(task.config, llm, retriever, task.format, tokens_flag="--set rollout.max_tokens=")
        rollout, process, processes = settings.rollout, run.arguments.process_index, run.arguments.world_size
        seed = derive_seed(settings.seed, "rl")
        plan = BatchPlan(
            task.questions, rollout.group_size, rollout.questions_per_step, seed, process=process, processes=processes
        )
        collector = Collector(engine, reward, run.chat, plan, settings)
        # On held-out questions the same policy, and so the
        # weights that are trained, samples as in evaluation.
        sampling = Sampling(temperature=settings.validation.temperature, max_tokens=engine.sampling.max_tokens)
        held_out_engine = replace(engine, retriever=held_out_retriever, sampling=sampling)
        validation = Validation(task.held_out, held_out_engine, reward, settings.validation.metric, settings.seed)

        from reasonrag.online_rl.trainer import AgenticGRPOTrainer, MonitorCallback, Rollouts

        trainer = run.build_trainer(
            AgenticGRPOTrainer,
            *numbered_rows,
            rollouts=Rollouts(collector, None if weights else llm, weights, loop, run.out / "rollouts"),
            validation=validation if task.held_out else None,
            settings=settings,
        )
        if settings.algorithm == "ppo":
            trainer.critic = open_critic(run, trainer)
        trainer.add_callback(MonitorCallback(trainer, partial(save_best_policy, trainer, run)))
        run.train(trainer, check=partial(check_collapse, trainer))
        run.evaluate(trainer)
        best = {"step": validation.best_step, "value": validation.best} if task.held_out else None
        if best:
            problem = checkpoint_problem(run.out / BEST)
            place = f"{run.out / BEST}, which is not what was saved ({problem})" if problem else run.out / BEST
            run.log(f"best {validation.metric} of held-out questions: step {validation.best_step}, {place}")
        run.save(trainer, reward=settings.reward.name, best=best)
    return run


def trl_settings(settings: RLSettings) -> dict[str, Any]:
    """Return the arguments of TRL's `GRPOConfig` that only online training has."""
    rollout = settings.rollout
    accumulation = settings.accumulation(int(os.environ.get("WORLD_SIZE", "1")))
    return {
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * rollout.minibatches,
        # TRL counts optimizer steps.
        "max_steps": settings.max_steps * rollout.minibatches,
        "save_steps": settings.save_steps * rollout.minibatches,
        # TRL takes no group of one; its own figures are then
        # about the batch, and its advantages are not used.
        "num_generations": rollout.group_size if rollout.group_size > 1 else rollout.questions_per_step,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        # The rollouts are not cut at this length; Dr. GRPO divides by it as a constant.
        "max_completion_length": rollout.max_trajectory_tokens or rollout.max_tokens * settings.format.max_steps,
        "num_iterations": 1,
        "use_vllm": False,
        "mask_truncated_completions": settings.mask_truncated,
        "vllm_importance_sampling_mode": settings.correction or "token_truncate",
        "vllm_importance_sampling_clip_max": _IMPORTANCE_MAX,
        "log_completions": False,
        # The reference of the KL penalty, which TRL loads itself.
        **({"model_init_kwargs": {"revision": settings.revision}} if settings.revision else {}),
    }


def open_policy(run: TrainingRun[RLSettings], loop: RolloutLoop) -> tuple[Any, VLLMServerSync | None]:
    """Return the engine's LLM: on the trainer's weights, or on a server, with what sends them there."""
    rollout, source, chat = run.settings.rollout, run.source, run.chat
    if rollout.url is None:
        _reject_sharded_weights(
            run.arguments,
            "they cannot make rollouts here; use a vLLM server with --rollout-url, or train adapters or a smaller "
            "model with whole copies (--multi_gpu)",
        )
        from reasonrag.llm.local import TransformersLLM  # imports torch

        local = TransformersLLM(chat, name=source.name, batch_size=rollout.batch_size)
        loop.parts.push_async_callback(local.aclose)
        return local, None
    server = ServerLLM(
        rollout.url,
        source.base,
        encode=chat.token_ids,
        vocabulary=len(chat.tokenizer),
        vllm=True,
        logprobs=True,
        processed_logprobs=True,
    )
    weights = VLLMServerSync(rollout.url, run.out / ".weights", sleeps=rollout.sleep)
    loop.parts.callback(weights.close)
    loop.parts.push_async_callback(server.aclose)
    loop.run(server.check())
    return server, weights


def open_critic(run: TrainingRun[RLSettings], trainer: Any) -> Any:
    """Return PPO's value model, which starts from the same weights as the policy."""
    import torch
    from peft import get_peft_model

    from reasonrag.online_rl.ppo import Critic

    settings = run.settings
    _reject_sharded_weights(run.arguments, "PPO cannot train its value model; use whole copies (--multi_gpu)")
    model = load_weights(run.source, settings)
    with torch.random.fork_rng():  # every process draws the same adapter, and the rollouts draw as they would
        torch.manual_seed(settings.seed)
        if settings.method == "lora" and not run.source.is_adapter:
            model = get_peft_model(model, lora_config(settings.lora))
        critic = Critic(model, settings, trainer.accelerator)
    if run.arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return critic


def check_collapse(trainer: Any) -> None:
    """Raise RunError if a guard has stopped the run."""
    if reason := collapse(trainer.state.log_history, trainer.settings.guards):
        raise RunError(
            f"stopped after step {trainer.state.global_step} of {trainer.state.max_steps}: {reason}. "
            "Its state and the best policy so far are kept; try a lower learning rate or a KL penalty, or relax "
            "the guard"
        )


def _reject_sharded_weights(arguments: Any, reason: str) -> None:
    """Raise ConfigError if the weights are sharded over processes.

    Every forward pass of sharded weights involves all processes,
    but in rollouts each needs a different number of them.
    """
    flags = [os.environ.get(f"ACCELERATE_USE_{name}", "").lower() for name in ("FSDP", "DEEPSPEED")]
    if any(flag in ("true", "1") for flag in flags) or arguments.fsdp or arguments.deepspeed:
        raise ConfigError(f"the weights are sharded over processes (FSDP, DeepSpeed), so {reason}")


def save_best_policy(trainer: Any, run: TrainingRun[RLSettings]) -> None:
    """Save the current policy in `best`, which is replaced only once the new one is complete."""
    best, new, old = run.out / BEST, run.out / f".{BEST}.tmp", run.out / f".{BEST}.old"
    # All processes take part in saving sharded weights; the first one writes and renames.
    if run.is_first:
        shutil.rmtree(new, ignore_errors=True)
    save_policy(trainer, new)
    if run.is_first:
        run.write_card(new)
        mark_complete(new)
        shutil.rmtree(old, ignore_errors=True)
        if best.exists():
            best.replace(old)
        new.replace(best)
        shutil.rmtree(old, ignore_errors=True)
