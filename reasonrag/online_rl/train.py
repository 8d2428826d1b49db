"""A policy trained online: TRL's GRPO on the engine's rollouts (arXiv:2402.03300, arXiv:2503.14476), or PPO."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core import event_loop
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.llm.base import LLM
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.llm.local import TransformersLLM
from reasonrag.llm.server import ServerLLM
from reasonrag.llm.weight_sync import VLLMServerSync
from reasonrag.online_rl.collector import BatchPlan, Collector
from reasonrag.online_rl.reference_plans import load_plans, make_plans, save_plans
from reasonrag.online_rl.settings import RLSettings
from reasonrag.online_rl.task import batched_retrievers, close_parts, open_task, open_task_reward
from reasonrag.online_rl.validation import Guards, Validation, Watch, validation_engine
from reasonrag.pipeline.parts import open_engine
from reasonrag.rewards import Reward
from reasonrag.rewards.judge import JudgeService
from reasonrag.rollout import Engine, derive_seed
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import Row
from reasonrag.training.folder import BEST
from reasonrag.training.model import load_weights, lora_config
from reasonrag.training.run import TrainingData, TrainingRun, save_policy

if TYPE_CHECKING:
    from reasonrag.online_rl.trainer import BackgroundRunner

_IMPORTANCE_MAX = 2.0  # threshold of the importance ratio


class OnlineRLRun(TrainingRun[RLSettings]):
    """GRPO on the engine's rollouts. The last policy is in `out`, the best one by validation in `out/best`."""

    def __init__(self, settings: RLSettings, out: Path | None, *, log: Callable[[str], None] = print) -> None:
        super().__init__("rl", settings, out, log=log)
        self.task = open_task(settings)
        self.runner: asyncio.Runner | BackgroundRunner = event_loop.runner()
        self.closing: list[Any] = []
        self.syncs: list[VLLMServerSync] = []
        self.watch: Watch | None = None

    def run(self) -> dict[str, Any]:
        """Train, or resume; return the content of `training.json`."""
        self.prepare_trl()
        try:
            with self:
                rows = self.open(self.open_data)
                if rows is not None:
                    trainer = self.make_trainer(*rows)
                    self.train(trainer, check=lambda: self.check_trained(trainer))
                    self.evaluate(trainer)
                    self.save(trainer, **self.extra_summary(trainer))
            return self.summary
        finally:
            self.close()

    def open_data(self) -> TrainingData:
        self.log(self.task.describe())
        return TrainingData(self.task.content, self.task.card, self.task.facts(), self.task.rows)

    def prepare_trl(self) -> None:
        from trl import GRPOConfig

        settings, rollout = self.settings, self.settings.rollout
        try:
            accumulation = settings.accumulation(int(os.environ.get("WORLD_SIZE", "1")))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        own = {
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": accumulation * rollout.minibatches,
            # TRL takes no group of one; its own figures are then about the batch, and its advantages are not used.
            "num_generations": rollout.group_size if rollout.group_size > 1 else rollout.questions_per_step,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            # The rollouts are not cut at this length; Dr. GRPO divides by it as a constant.
            "max_completion_length": rollout.max_trajectory_tokens or rollout.max_tokens * settings.format.max_steps,
            "num_iterations": 1,
            "use_vllm": False,
            "mask_truncated_completions": settings.mask_truncated,
            "vllm_importance_sampling_mode": self._importance or "token_truncate",
            "vllm_importance_sampling_clip_max": _IMPORTANCE_MAX,
            "log_completions": False,
            # The reference of the KL penalty, which TRL loads itself.
            **({"model_init_kwargs": {"revision": settings.revision}} if settings.revision else {}),
        }
        self.prepare(GRPOConfig, **own)

    @property
    def _importance(self) -> str | None:
        """How the loss corrects for rollouts from other weights or numerics than the trainer's; None if it does not."""
        chosen = self.settings.importance
        if chosen == "auto":
            return "token_truncate" if self.settings.rollout.url else None
        return None if chosen == "off" else chosen

    def make_trainer(self, train: Any, test: Any) -> Any:
        from reasonrag.online_rl.trainer import AgenticGRPOTrainer, BackgroundRunner, Rollouts, WatchCallback

        settings = self.settings
        if settings.rollout.ahead:
            self.runner = BackgroundRunner()
        chat, process = self.chat, self.arguments.process_index
        local, weights, llm = self._policy(chat)

        async def opened() -> tuple[Reward, JudgeService | None, list[Any]]:  # a journal is of the thread that opens it
            journal = self.out / f"judge-{process}.sqlite"
            return open_task_reward(settings, self.task, llm, journal, decode=chat.decode)

        reward, judge, closing = self.runner.run(opened())
        self.closing += closing
        rollout = settings.rollout
        retriever, held_out_retriever = batched_retrievers(self.task)
        engine = open_engine(
            self.task.config, llm, retriever, self.task.format, tokens_flag="--set rollout.max_tokens="
        )
        validation = None
        if self.task.held_out:
            temperature = settings.validation.temperature
            held_out_engine = validation_engine(engine, temperature=temperature, retriever=held_out_retriever)
            validation = Validation(
                self.task.held_out, held_out_engine, reward, settings.validation.metric, settings.seed
            )
        self.watch = Watch(
            Guards(settings.guards), validation, reward, settings.validation.steps, by_group=not settings.by_token
        )
        plan = BatchPlan(
            self.task.questions,
            rollout.group_size,
            rollout.questions_per_step,
            derive_seed(settings.seed, "rl"),
            process,
            self.arguments.world_size,
        )
        collector = Collector(
            engine,
            reward,
            chat,
            plan,
            end_id=chat.end_of_turn,
            sampling=settings.sampling,
            outage=settings.outage,
            max_tokens=rollout.max_trajectory_tokens,
        )
        trainer = self.build_trainer(
            AgenticGRPOTrainer,
            train,
            test,
            rollouts=Rollouts(
                collector,
                local,
                weights,
                self.runner,
                self.out / "rollouts",
                self.task.config.stall_s,
                rollout.minibatches,
                settings.credit,
                "others" if settings.algorithm == "rloo" else "group",
                settings.ppo if settings.by_token else None,
            ),
            watch=self.watch,
            importance=self._importance is not None,
        )
        if settings.algorithm == "ppo":
            trainer.critic = self._critic(trainer)
        trainer.add_callback(
            WatchCallback(
                trainer,
                begin=partial(self._begin, trainer, judge),
                save_best=partial(_save_best, trainer, self.out, self.task.card),
            )
        )
        return trainer

    def _critic(self, trainer: Any) -> Any:
        """Return PPO's value model, which starts from the same weights as the policy."""
        import torch
        from peft import get_peft_model

        from reasonrag.online_rl.ppo import Critic

        _reject_sharded_weights(self.arguments, "PPO cannot train its value model; use whole copies (--multi_gpu)")
        settings = self.settings
        model = load_weights(self.source, settings)
        with torch.random.fork_rng():  # every process draws the same adapter, and the rollouts draw as they would
            torch.manual_seed(settings.seed)
            if settings.method == "lora" and not self.source.is_adapter:
                model = get_peft_model(model, lora_config(settings.lora))
            critic = Critic(model, settings, trainer.accelerator)
        if self.arguments.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return critic

    def _begin(self, trainer: Any, judge: JudgeService | None, step: int) -> None:
        self._open_plans(trainer, judge, step)
        rollout, held_out = self.settings.rollout, len(self.task.held_out)
        looks = f"{held_out} held-out questions are tried first, then " if held_out and not step else ""
        self.log(f"{looks}each step makes {rollout.questions_per_step} x {rollout.group_size} rollouts")

    def _open_plans(self, trainer: Any, judge: JudgeService | None, step: int) -> None:
        """Load the reference plans that are not given as a file; before the first step, make them with the policy.

        Raises:
            RunError: too many questions failed, or the plans of a run that is resumed are gone.
        """
        if "plans" not in self.task.needs or self.settings.plans is not None:
            return
        assert judge is not None  # a reward that uses plans asks one
        path = self.out / "plans.parquet"
        if not path.exists():
            if step:
                raise RunError(
                    f"{path} is gone, with the plans of the {step} steps so far; bring it back, or start anew"
                )
            from accelerate.utils import gather_object

            self.log("reference plans: none are given, so the policy attempts every question first")
            engine = trainer.rollouts.collector.engine
            rows = gather_object(trainer.run_everywhere(lambda: self._make_plans(engine, judge), step=step))
            if self.is_first:
                save_plans(path, rows)
            self.log(f"reference plans: {len(rows)} of {len(self.task.questions)} questions have one, in {path}")
            trainer.accelerator.wait_for_everyone()
        self.task.plans.update(load_plans(path))

    async def _make_plans(self, engine: Engine, judge: JudgeService) -> list[Row]:
        """Return the plans of this process's share of the questions; what was made so far is kept in a journal."""
        process, settings = self.arguments.process_index, self.settings
        questions = self.task.questions[process :: self.arguments.world_size]
        planning = copy.copy(engine)
        with contextlib.closing(Journal(self.out / f"plans-{process}.sqlite")) as journal:
            planning.llm = JournaledLLM(engine.llm, journal, kind="policy")
            made = await make_plans(
                questions,
                planning,
                judge,
                settings=settings.planning,
                seed=settings.seed,
                concurrency=settings.rollout.batch_size,
                max_failed=settings.outage.max_unscored,
            )
        if made.failed + made.untried > settings.outage.max_unscored * len(questions):
            raise RunError(
                f"{made.failed} of {len(questions)} questions failed while plans were made ({dict(made.without)}), and "
                f"{made.untried} were not tried; what was made is kept, and the same command goes on"
            )
        return made.rows

    def check_trained(self, trainer: Any) -> None:
        if self.watch is not None and self.watch.collapse:
            raise RunError(
                f"stopped after step {trainer.state.global_step} of {trainer.state.max_steps}: {self.watch.collapse}. "
                "Its state and the best policy so far are kept; try a lower learning rate or a KL penalty, or relax "
                "the guard"
            )

    def _policy(self, chat: Any) -> tuple[TransformersLLM | None, Any, LLM]:
        """Return the engine's LLM: on the trainer's weights, or on a server that is sent them."""
        rollout, source = self.settings.rollout, self.source
        if rollout.url is None:
            _reject_sharded_weights(
                self.arguments,
                "they cannot make rollouts here; use a vLLM server with --rollout-url, or train adapters or a smaller "
                "model with whole copies (--multi_gpu)",
            )
            local = TransformersLLM.borrowing(chat, name=source.name, batch_size=rollout.batch_size)
            self.closing.append(local)
            return local, None, local
        server = ServerLLM(
            rollout.url,
            source.base,
            api="completions",
            encode=chat.token_ids,
            vocabulary=len(chat.tokenizer),
            vllm=True,
            logprobs=True,
            processed_logprobs=True,
        )
        sync = VLLMServerSync(rollout.url)
        self.closing += [server]
        self.syncs.append(sync)
        return None, sync, server

    def extra_summary(self, trainer: Any) -> dict[str, Any]:
        validation = self.watch.validation if self.watch else None
        unscored: Counter[str] = Counter()
        for entry in trainer.state.log_history:
            for name, count in entry.items():
                if name.startswith("unscored/"):
                    unscored[name.removeprefix("unscored/")] += int(count)
        return {
            "reward": self.settings.reward.name,
            "unscored": dict(unscored),
            "best": None if validation is None else {"step": validation.best_step, "value": validation.best},
        }

    def close(self) -> None:
        for sync in self.syncs:
            sync.close()
        with contextlib.suppress(RuntimeError):
            self.runner.run(close_parts(self.closing, self.task))
        self.runner.close()


def train_online(settings: RLSettings, out: Path | None, *, log: Callable[[str], None] = print) -> OnlineRLRun:
    """Train a policy online, or resume in `out`."""
    run = OnlineRLRun(settings, out, log=log)
    run.run()
    return run


def _reject_sharded_weights(arguments: Any, reason: str) -> None:
    """Raise if the weights are sharded over processes.

    Every forward pass of sharded weights involves all processes, but in rollouts each needs a different number of them.

    Raises:
        ConfigError: they are; `reason` says why they cannot be, and what to do.
    """
    flags = [os.environ.get(f"ACCELERATE_USE_{name}", "").lower() for name in ("FSDP", "DEEPSPEED")]
    if any(flag in ("true", "1") for flag in flags) or arguments.fsdp or arguments.deepspeed:
        raise ConfigError(f"the weights are sharded over processes (FSDP, DeepSpeed), so {reason}")


def _save_best(trainer: Any, out: Path, card: Any) -> None:
    """Save the current policy in `best`, which is replaced only once the new one is complete."""
    new, old = out / f".{BEST}.tmp", out / f".{BEST}.old"
    first = trainer.accelerator.is_main_process
    if first:
        shutil.rmtree(new, ignore_errors=True)
    save_policy(trainer, new)
    if first:
        card.write(new)
        shutil.rmtree(old, ignore_errors=True)
        if (out / BEST).exists():
            (out / BEST).replace(old)
        new.replace(out / BEST)
        shutil.rmtree(old, ignore_errors=True)
