"""The harness of every training run: data, folder, model, trainer, checkpoints, and what is written at the end.

Several processes (`accelerate launch`, `torchrun`) run this side by side. The first one reads the data, writes it as
token ids next to the checkpoints and broadcasts the plan; it alone prints and writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shutil
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from reasonrag.core.errors import ConfigError, InputError, Interrupted
from reasonrag.core.policy_card import PolicyCard, copy_card
from reasonrag.core.settings import COMMIT, nearest
from reasonrag.core.text import quoted
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.memory import free_memory, gigabytes, size_if_large
from reasonrag.llm.model_folder import model_commit
from reasonrag.llm.threads import choose_threads, is_small
from reasonrag.storage.files import RUNS, save_charts, short_hash, write_json
from reasonrag.storage.folder import first_usable
from reasonrag.training import folder as folders
from reasonrag.training.folder import CHECKPOINTS, MERGED, SUMMARY, TrainingFolder, last_checkpoint
from reasonrag.training.model import (
    MODEL_INIT,
    load_weights,
    lora_config,
    merge_adapter,
    open_source,
    step_memory,
    stop_at_end_of_turn,
    uses_gpu,
)
from reasonrag.training.outcome import panels, summarise
from reasonrag.training.settings import TrainSettings

S = TypeVar("S", bound=TrainSettings)
TokenRows = list[dict[str, Any]]

_ROWS_SUFFIX = re.compile(r"\.(jsonl|json|parquet)(\.gz|\.zst)?$", re.IGNORECASE)
_CHECKPOINTS_KEPT = 2
# TRL arguments that are fixed here, with the reason.
_FIXED_ARGUMENTS = {
    "output_dir": "--out sets it",
    "max_length": "set max_length outside of trainer; longer examples are left out, never cut",
    "save_total_limit": f"the newest {_CHECKPOINTS_KEPT} checkpoints are kept",
    "warmup_steps": "set warmup_ratio outside of trainer",
    "warmup_ratio": "set it outside of trainer",
    "use_cpu": "set device to cpu",
    "resume_from_checkpoint": "the same command resumes from the last checkpoint by itself",
    "push_to_hub": "upload the finished folder instead",
    "hub_token": "settings are written to disk; log in to the Hub instead",
    "padding_free": "TRL's DPO does not support it, and steps are kept apart",
    "packing": "steps are kept apart",
}


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What is trained on, as the first process reads it."""

    checksum: str  # changes with any row of the data
    card: PolicyCard | None  # how the policy is prompted, if the data says so
    facts: Mapping[str, Any]  # the data's entry in `training.json`; it names no path of this machine
    make_rows: Callable[[], Mapping[str, TokenRows]]  # by split (`train`, `test`); called if they are not on disk yet


@dataclass(slots=True)
class _ResumePlan:
    """What the first process tells the others: where the rows and the checkpoint are, or that nothing is left to do."""

    out: Path
    rows: str
    checkpoint: str | None
    finished: dict[str, Any] | None


class TrainingRun(ABC, Generic[S]):
    """A training run from its settings to a finished folder; DPO, SFT and online RL define what differs.

    Args:
        settings: `model` and `data` have to be set.
        out: a new folder, or one that holds this training run, which is then resumed; None chooses one in runs/.
        log: receives lines for people, on the first process only.

    `prepare` sets `source`, the model to start from, and `arguments`, TRL's configuration.
    """

    stage: ClassVar[str]  # dpo, sft or rl; part of the run's identity

    def __init__(self, settings: S, out: Path | None, *, log: Callable[[str], None] = print) -> None:
        self.settings = settings
        self.out = out or RUNS  # without a name it is chosen once the data is known
        self._is_unnamed = out is None
        self.log = log
        self._data: TrainingData | None = None  # only the first process reads the data
        self._identity: dict[str, Any] = {}

    # What a kind of training run overrides.

    @abstractmethod
    def trl_config(self) -> tuple[Any, dict[str, Any]]:
        """Return TRL's configuration class, and the arguments for it that only this kind of run has."""

    @abstractmethod
    def open_data(self) -> TrainingData:
        """Read and check what is trained on; called on the first process only."""

    @abstractmethod
    def build_trainer(self, **common: Any) -> Any:
        """Return a `GuardedTrainer`; `common` are the arguments that all trainers take."""

    def check_trained(self, trainer: Any) -> None:
        """Raise if the run has to count as failed although TRL has returned."""

    def extra_summary(self, trainer: Any) -> dict[str, Any]:
        """Return what this kind of run adds to `training.json`."""
        return {}

    # What all kinds of training runs do.

    def run(self) -> dict[str, Any]:
        """Train, or resume from the last checkpoint in `out`.

        Returns:
            What `training.json` holds; `{}` on other processes than the first.

        Raises:
            InputError: settings, data, model or folder that cannot work.
            RunError: `out` holds a different training run, the loss became NaN or infinite, or the run collapsed.
            Interrupted: Ctrl-C or SIGTERM ended it, with a checkpoint; the same call resumes.
        """
        self.prepare()
        with contextlib.ExitStack() as held, warnings.catch_warnings():
            # Names that transformers is about to drop; TRL 1.16 uses them to support older versions.
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
            with folders.explain_full_disk(self.out):
                plan = self._agree(held)
                return self._train(plan) if plan.finished is None else plan.finished

    def prepare(self) -> None:
        """Find the model and make TRL's configuration, which joins the process group of a multi-process launch."""
        self.source = open_source(self.settings)
        silence_libraries()
        config, own = self.trl_config()
        self.arguments = trl_arguments(config, self.settings, self.out, own=own)
        self.is_first = self.arguments.process_index == 0
        if not self.is_first:
            self.log = lambda line: None

    @functools.cached_property
    def chat(self) -> ChatTemplate:
        """The model's tokenizer and chat template, loaded once: a vocabulary of 262,144 tokens takes seconds."""
        return self.source.chat()

    def make_trainer(self, train: Any, test: Any, *, seconds_before: float = 0.0) -> Any:
        """Return the trainer with its model, for two `datasets.Dataset` of token rows; `test` may be None."""
        from transformers import PrinterCallback

        settings, arguments = self.settings, self.arguments
        if test is None:
            if arguments.load_best_model_at_end:
                raise ConfigError("load_best_model_at_end needs held-out questions, and the data has none")
            arguments.eval_strategy = type(arguments.eval_strategy)("no")
        new_adapter = settings.method == "lora" and not self.source.is_adapter
        model = load_weights(self.source, settings)
        stop_at_end_of_turn(model, self.chat)
        common = {
            "model": model,
            "args": arguments,
            "train_dataset": train,
            "eval_dataset": test,
            "processing_class": self.chat.tokenizer,
            "peft_config": lora_config(settings.lora, revision=settings.revision) if new_adapter else None,
            "seconds_before": seconds_before,
            "checkpoints_kept": _CHECKPOINTS_KEPT,
            "write_card": self._write_card,
        }
        try:
            trainer = self.build_trainer(**common)
        except (ValueError, NotImplementedError) as error:  # such as adapter modules that the model does not have
            raise ConfigError("TRL or peft refuses these settings", quoting=error) from error
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _agree(self, held: contextlib.ExitStack) -> _ResumePlan:
        """Return the same plan, or raise the same error, on every process. The first one locks the folder."""
        from accelerate.utils import broadcast_object_list

        message: list[Any] = [None]
        if self.is_first:
            try:
                data = self.open_data()
                self._identity = folders.identity_of(
                    self.stage, self.settings, content=data.checksum, model=self.source.checksum
                )
                if self._is_unnamed:
                    name = _ROWS_SUFFIX.sub("", Path(str(data.facts["source"])).name)
                    defaults = type(self.settings)()
                    self.out = first_usable(f"{name}-{self.stage}", TrainingFolder, self._identity, defaults)
                    self.log(f"writing to {self.out} (--out chooses another folder)")
                held.enter_context(TrainingFolder(self.out).locked())
                (self.out / CHECKPOINTS).mkdir(exist_ok=True)
                message = [self._plan(data)]
            except InputError as error:  # broadcast too, or the other processes would wait for ever
                message = [error]
        broadcast_object_list(message, from_process=0)
        if isinstance(message[0], InputError):
            raise message[0]
        plan: _ResumePlan = message[0]
        self.out = plan.out
        self.arguments.output_dir = str(plan.out / CHECKPOINTS)
        return plan

    def _plan(self, data: TrainingData) -> _ResumePlan:
        settings = self.settings
        TrainingFolder(self.out).check_same(self._identity, type(settings)())
        self._data = data
        if (summary := folders.finished(self.out)) is not None:
            folders.check_trained(self.out, merged=False)
            TrainingFolder(self.out).bind(settings, summary["identity"])  # files that were cut since then are mended
            self.log("this training run is already finished")
            self._merge_adapter()
            return _ResumePlan(self.out, "", None, summary)
        checkpoint = last_checkpoint(self.out, self.log)  # before broken ones are removed, so that it names them
        folders.remove_old(self.out, keep=_CHECKPOINTS_KEPT)
        if checkpoint is not None:
            self.log(f"resuming from {checkpoint.name}")
        return _ResumePlan(self.out, str(self._write_rows(data)), str(checkpoint) if checkpoint else None, None)

    def _write_rows(self, data: TrainingData) -> Path:
        """Write the token rows as files: processes share them, and TRL caches what it computes next to them."""
        from datasets import Dataset

        path = self.out / CHECKPOINTS / f"rows-{short_hash(self._identity)}"
        for old in (self.out / CHECKPOINTS).glob("rows-*"):
            if old != path:
                shutil.rmtree(old)
        if not path.exists():
            unfinished = path.with_name(f"{path.name}.tmp")
            for split, rows in data.make_rows().items():
                if rows:
                    Dataset.from_list(rows).save_to_disk(str(unfinished / split))
            unfinished.replace(path)
        return path

    def _train(self, plan: _ResumePlan) -> dict[str, Any]:
        from datasets import load_from_disk

        from reasonrag.training.callbacks import PrintProgress, StopOnSignal, handle_signals

        rows = Path(plan.rows)
        train = load_from_disk(str(rows / "train"))
        test = load_from_disk(str(rows / "test")) if (rows / "test").exists() else None
        seconds_before = folders.seconds_before(Path(plan.checkpoint)) if plan.checkpoint else 0.0
        if size := size_if_large(self.source.base, self.source.revision):
            self.log(f"loading {self.source.name} ({size})")
        trainer = self.make_trainer(train, test, seconds_before=seconds_before)
        self._warn_of_memory(trainer, train)
        if self.is_first:
            folder = TrainingFolder(self.out)
            if commit := model_commit(self.source.base, self.source.revision):  # known once it is loaded
                self._identity[f"content.model{COMMIT}"] = commit
                folder.check_same(self._identity, type(self.settings)())
            folder.bind(self.settings, self._identity)
        with self._cpu_threads(trainer.model), handle_signals(self.log) as request:
            trainer.add_callback(StopOnSignal(request))
            if self.is_first:
                trainer.add_callback(PrintProgress(self.log))
            trainer.train(resume_from_checkpoint=plan.checkpoint)
            self.check_trained(trainer)
            steps, planned = trainer.state.global_step, trainer.state.max_steps
            if steps < planned:
                message = f"stopped after step {steps} of {planned}; a checkpoint is kept"
                raise Interrupted(message, number=request.number)
            trainer.check_weights()
            self._final_evaluation(trainer)
        return self._finish(trainer, {"train": len(train), "held_out": 0 if test is None else len(test)})

    def _warn_of_memory(self, trainer: Any, train: Any) -> None:
        """Say if a step is likely to take more memory than is free: without a GPU the process would be killed."""
        from reasonrag.training.throughput import LENGTH

        free, settings = free_memory(), self.settings
        if free is None or not self.arguments.use_cpu or LENGTH not in train.column_names:
            return
        batch, longest = settings.per_device_train_batch_size, max(train[LENGTH])
        need = step_memory(trainer.model, batch * longest, checkpointing=self.arguments.gradient_checkpointing)
        if need > free:
            self.log(
                f"warning: a step of {batch} examples of up to {longest} tokens takes about {gigabytes(need)} of "
                f"memory beside the weights, and {gigabytes(free)} are free, so this process may be killed; take a "
                "smaller --batch-size (with more --accumulation), or --set trainer.gradient_checkpointing=true"
            )

    @contextlib.contextmanager
    def _cpu_threads(self, model: Any) -> Iterator[None]:
        """Use the threads of the settings, or those that suit the model."""
        import torch

        before = torch.get_num_threads()
        threads = choose_threads(model)
        torch.set_num_threads(threads)
        if self.arguments.use_cpu and not is_small(model):
            self.log(f"CPU threads: {threads} (OMP_NUM_THREADS chooses another number)")
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _final_evaluation(self, trainer: Any) -> None:
        """Compute the held-out metrics of the weights that are kept, unless the last step was evaluated anyway."""
        history = trainer.state.log_history
        evaluated = any("eval_loss" in entry and entry["step"] == trainer.state.global_step for entry in history)
        if trainer.eval_dataset is not None and (not evaluated or self.arguments.load_best_model_at_end):
            trainer.evaluate()

    def _finish(self, trainer: Any, row_counts: Mapping[str, int]) -> dict[str, Any]:
        """Write the policy, and on the first process all other files, `training.json` last; return what that holds."""
        save_policy(trainer, self.out)  # all processes hold parts of the weights
        summary: dict[str, Any] = {}
        if self._data is not None:
            save_charts(self.out / "curves", panels(trainer.state.log_history))
            self._write_card(self.out)
            # An attempt that was killed just before it wrote training.json may have left one.
            shutil.rmtree(self.out / MERGED, ignore_errors=True)
            self._merge_adapter()
            summary = summarise(
                trainer.state,
                stage=self.stage,
                settings=self.settings,
                source=self.source,
                data={**self._data.facts, "rows": row_counts},
                described=self._identity,
                seconds=trainer.seconds,
                device=_device_name(self.arguments),
                processes=self.arguments.world_size,
                more=self.extra_summary(trainer),
            )
            summary["files"] = folders.written_files(self.out)
            write_json(self.out / SUMMARY, summary)
            for rows in (self.out / CHECKPOINTS).glob("rows-*"):
                shutil.rmtree(rows, ignore_errors=True)
        if self.arguments.world_size > 1:
            trainer.accelerator.wait_for_everyone()
        return summary

    def _write_card(self, folder: Path) -> None:
        """Write how the policy is prompted: as its data says, else as the model that it was trained from."""
        if self._data is not None and self._data.card is not None:
            self._data.card.write(folder)
        elif not copy_card(Path(self.source.path), folder):
            copy_card(Path(self.source.base), folder)

    def _merge_adapter(self) -> None:
        settings, merged = self.settings, self.out / MERGED
        if settings.merge and settings.method == "lora" and not merged.exists():
            merge_adapter(self.out, merged, chat=self.chat, trust_remote_code=settings.trust_remote_code)


def trl_arguments(config: Any, settings: TrainSettings, out: Path, *, own: Mapping[str, Any]) -> Any:
    """Return TRL's configuration: settings of the same name, `own` arguments of this kind of run, `settings.trainer`.

    Raises:
        ConfigError: an unknown argument (with the nearest name), one that has a setting here, or a value that TRL
            refuses.
    """
    known = {field.name for field in dataclasses.fields(config) if field.init}
    # By name, except for transformers 4, in which warmup_steps and warmup_ratio exclude each other.
    same_name = known & type(settings).model_fields.keys() - {"warmup_ratio"}
    arguments = {name: getattr(settings, name) for name in same_name} | _shared_arguments(settings, out) | dict(own)
    arguments = {name: value for name, value in arguments.items() if name in known}
    for name, value in settings.trainer.items():
        if name in _FIXED_ARGUMENTS:
            raise ConfigError(f"trainer.{name} cannot be set: {_FIXED_ARGUMENTS[name]}")
        if name in own or name in type(settings).model_fields:
            raise ConfigError(f"trainer.{name} has its own setting; set {name} outside of trainer")
        if name not in known:
            hint = nearest(name, sorted(known))
            hint = hint if "did you mean" in hint else "; see TRL's documentation for its arguments"
            raise ConfigError(f"trainer.{name} is unknown to {config.__name__}{hint}")
        if name != MODEL_INIT:
            arguments[name] = value
    _check_trackers(settings.report_to)
    try:
        with warnings.catch_warnings():  # deprecated names that the older supported versions still need
            warnings.simplefilter("ignore", FutureWarning)
            return config(**arguments)
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise ConfigError("TRL refuses these settings", quoting=error) from error


def _check_trackers(names: Sequence[str]) -> None:
    """Raise before anything is read if a tracker cannot be used: transformers says so after the model is loaded."""
    from transformers.integrations import get_available_reporting_integrations

    installed = get_available_reporting_integrations()
    for name in names:
        if name not in (*installed, "none", "all", "flyte"):
            raise ConfigError(
                f"--report-to {quoted(name)}: its package is not installed, or there is no such tracker; install it, "
                f"or choose one of those that are here: {', '.join(installed) or 'none'}"
            )


def _shared_arguments(settings: TrainSettings, out: Path) -> dict[str, Any]:
    gpu = uses_gpu(settings)
    return {
        "output_dir": str(out / CHECKPOINTS),
        # transformers 5 has no warmup_ratio: a number of steps below 1 is the share.
        "warmup_steps": settings.warmup_ratio,
        "per_device_eval_batch_size": settings.per_device_train_batch_size,
        "eval_strategy": "steps" if "eval_steps" in type(settings).model_fields else "no",
        "save_strategy": "steps",
        "save_total_limit": None,  # `GuardedTrainer` removes older checkpoints, and only after the new one is complete
        "max_length": None,
        "bf16": gpu,
        "use_cpu": not gpu,
        "gradient_checkpointing": gpu,  # recomputes activations to save memory
        "dataloader_pin_memory": gpu,
        "report_to": list(settings.report_to) or "none",
        "logging_steps": settings.log_every,
        "disable_tqdm": True,
        "log_level_replica": "error",
        "logging_nan_inf_filter": False,  # it would replace a NaN loss by an average
        "include_num_input_tokens_seen": "non_padding",
    }


def save_policy(trainer: Any, out: Path) -> None:
    """Save the trained model, or its adapter, into a folder, without files that name paths of this machine."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")  # a sharded one can be resumed, but not loaded as a model
    trainer.save_model(str(out))
    if trainer.accelerator.is_main_process:
        shutil.rmtree(out / "ref", ignore_errors=True)  # TRL's copy of the adapter that the run started from
        if not (out / "generation_config.json").exists():  # peft saves none, and its model's knows no new end of a turn
            trainer.accelerator.unwrap_model(trainer.model).generation_config.save_pretrained(out)
        for name in ("training_args.bin", "README.md"):  # a pickle, and peft's empty card
            (out / name).unlink(missing_ok=True)


def silence_libraries() -> None:
    """Turn off telemetry and library hints, and progress bars if there is no terminal."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets
    from huggingface_hub import constants
    from transformers.utils import logging

    constants.HF_HUB_DISABLE_TELEMETRY = True  # the library read the environment when it was imported
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
        logging.disable_progress_bar()
        datasets.disable_progress_bars()


def _device_name(arguments: Any) -> str:
    import torch

    return "cpu" if arguments.use_cpu else str(torch.cuda.get_device_name(arguments.device))
