"""The harness around every trainer: folder, model, checkpoints, and the files that are written at the end.

Several processes (`accelerate launch`, `torchrun`) run this in parallel. The first one reads the data, writes it as
token ids into the folder of the checkpoints and broadcasts the plan; it alone prints and writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from reasonrag.core.config import PolicyCard, copy_card
from reasonrag.core.errors import ConfigError, InputError, Interrupted
from reasonrag.core.plots import Line, Panel
from reasonrag.core.settings import COMMIT, nearest
from reasonrag.core.text import quoted
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.model_folder import choose_threads, free_memory, gigabytes, is_small, model_commit, size_if_large
from reasonrag.storage.files import RUNS, save_charts, short_hash, write_json
from reasonrag.storage.folder import first_usable, versions
from reasonrag.training import folder as folders
from reasonrag.training.folder import CHECKPOINTS, MERGED, SUMMARY, TrainingFolder, last_checkpoint
from reasonrag.training.model import (
    LENGTH,
    MODEL_INIT,
    ModelSource,
    load_weights,
    lora_config,
    merge_adapter,
    open_source,
    step_memory,
    stop_at_end_of_turn,
    uses_gpu,
)
from reasonrag.training.settings import TrainSettings

S = TypeVar("S", bound=TrainSettings)
Log = Callable[[str], None]
TokenRows = list[dict[str, Any]]

_CHECKPOINTS_KEPT = 2
_ROWS_SUFFIX = re.compile(r"\.(jsonl|json|parquet)(\.gz|\.zst)?$", re.IGNORECASE)
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
# Counted from the start of a process, so wrong after a resume; `num_input_tokens_seen` and `seconds` are of the run.
_OF_A_PROCESS = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "num_tokens")
# Each curve: key in the log, key in the log of held-out metrics (after `eval_`), title, label of the y axis.
_PAIR_CURVES = (
    ("loss", "loss", "loss", "loss"),
    ("rewards/margins", "rewards/margins", "reward margin", "margin"),
    ("rewards/accuracies", "rewards/accuracies", "reward accuracy", "accuracy"),
    ("mean_token_accuracy", "mean_token_accuracy", "token accuracy", "accuracy"),
)
_ROLLOUT_CURVES = (
    ("rollout/reward", "reward", "reward", "reward"),
    ("rollout/em", "em", "exact match", "EM"),
    ("rollout/retrievals", "retrievals", "retrievals a question", "retrievals"),
    ("rollout/format_rate", "format_rate", "well-formed trajectories", "share"),
    ("rollout/osr", "osr", "over-search rate", "OSR"),
    ("rollout/usr", "usr", "under-search rate", "USR"),
    ("entropy", "entropy", "entropy", "nats a token"),
    ("rollout/tokens", "tokens", "length", "policy's tokens"),
)


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The data of a training run, as the first process reads it."""

    checksum: str  # changes with any row of the data
    card: PolicyCard | None  # how the policy is prompted, if the data comes with that
    facts: Mapping[str, Any]  # the data's entry in `training.json`, without paths of this machine
    make_rows: Callable[[], Mapping[str, TokenRows]]  # by split (`train`, `test`); called if they are not on disk yet


@dataclass(slots=True)
class _ResumePlan:
    """The broadcast of the first process: paths of rows and checkpoint, or the summary of a finished run."""

    out: Path
    rows: str
    checkpoint: str | None
    finished: dict[str, Any] | None


class TrainingRun(Generic[S]):
    """A training run from its settings to a finished folder; `dpo.train` shows how its methods follow each other.

    Args:
        stage: dpo, sft, prm or rl; part of the run's identity.
        settings: `model` and `data` have to be set.
        out: a new folder, or one that holds this training run, which is then resumed; None chooses one in runs/.
        log: receives lines for people, on the first process only.

    Attributes:
        source: the model to start from.
        arguments: TRL's configuration.
        model_files: JSON files, by name, that are written wherever the model is saved.
        summary: content of `training.json` once the run is finished; empty on other processes than the first.

    In the `with` block, InputError, RunError (another training run is in the folder, or the loss became NaN) and
    Interrupted (Ctrl-C or SIGTERM; a checkpoint is kept) can be raised.
    """

    def __init__(self, stage: str, settings: S, out: Path | None, *, log: Log = print) -> None:
        self.stage = stage
        self.settings = settings
        self.out = out or RUNS  # without a name it is chosen once the data is known
        self.log = log
        self.model_files: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self._is_unnamed = out is None
        self._data: TrainingData | None = None  # only the first process reads the data
        self._identity: dict[str, Any] = {}
        self._plan = _ResumePlan(self.out, "", None, None)
        self._stack = contextlib.ExitStack()

    def prepare(self, config: Any, **own: Any) -> None:
        """Find the model and make TRL's configuration, which joins the process group of a multi-process launch.

        `config` is TRL's class, `own` are arguments that only this kind of training run has.
        """
        self.source: ModelSource = open_source(self.settings)
        silence_libraries()
        self.arguments = trl_arguments(config, self.settings, self.out, own=own)
        self.is_first = self.arguments.process_index == 0
        if not self.is_first:
            self.log = lambda line: None

    def __enter__(self) -> Self:
        self._stack.enter_context(warnings.catch_warnings())
        # Names that transformers is about to drop; TRL 1.16 uses them to support older versions.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
        self._stack.enter_context(folders.explain_full_disk(self.out))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    @functools.cached_property
    def chat(self) -> ChatTemplate:
        """The model's tokenizer and chat template, loaded once: a vocabulary of 262,144 tokens takes seconds."""
        return self.source.chat()

    def open(self, read: Callable[[], TrainingData]) -> tuple[Any, Any | None] | None:
        """Lock the folder and return token rows, as `datasets.Dataset`: to train on, and held-out ones or None.

        Return None if the run is finished already. `read` is called on the first process; the others get the same
        plan, or the same error.
        """
        from accelerate.utils import broadcast_object_list
        from datasets import load_from_disk

        message: list[Any] = [None]
        if self.is_first:
            try:
                message = [self._make_plan(read())]
            except InputError as error:  # broadcast too, or the other processes would wait forever
                message = [error]
        broadcast_object_list(message, from_process=0)
        if isinstance(message[0], InputError):
            raise message[0]
        self._plan = message[0]
        self.out = self._plan.out
        self.arguments.output_dir = str(self.out / CHECKPOINTS)
        if self._plan.finished is not None:
            self.summary = self._plan.finished
            return None
        rows = Path(self._plan.rows)
        test = load_from_disk(str(rows / "test")) if (rows / "test").exists() else None
        return load_from_disk(str(rows / "train")), test

    def _make_plan(self, data: TrainingData) -> _ResumePlan:
        settings, defaults = self.settings, type(self.settings)()
        self._data = data
        self._identity = folders.identity_of(self.stage, settings, content=data.checksum, model=self.source.checksum)
        if self._is_unnamed:
            name = _ROWS_SUFFIX.sub("", Path(str(data.facts["source"])).name)
            self.out = first_usable(f"{name}-{self.stage}", TrainingFolder, self._identity, defaults)
            self.log(f"writing to {self.out} (--out chooses another folder)")
        folder = TrainingFolder(self.out)
        self._stack.enter_context(folder.locked())
        (self.out / CHECKPOINTS).mkdir(exist_ok=True)
        folder.check_same(self._identity, defaults)
        if (summary := folders.finished(self.out)) is not None:
            folders.check_trained(self.out, merged=False)
            folder.bind(settings, summary["identity"])  # files that were cut since then are mended
            self.log("this training run is already finished")
            self._merge_adapter()
            return _ResumePlan(self.out, "", None, summary)
        checkpoint = last_checkpoint(self.out, self.log)  # before broken ones are removed, so that it names them
        folders.remove_old(self.out, keep=_CHECKPOINTS_KEPT)
        if checkpoint is not None:
            self.log(f"resuming from {checkpoint.name}")
        return _ResumePlan(self.out, str(self._write_rows(data)), str(checkpoint) if checkpoint else None, None)

    def _write_rows(self, data: TrainingData) -> Path:
        """Write the token rows as files: processes share them, and TRL caches its own columns in their folder."""
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

    def build_trainer(self, kind: Callable[..., Any], train: Any, test: Any | None, **own: Any) -> Any:
        """Load the model and return its trainer: a `GuardedTrainer` of the class `kind`, with `own` arguments."""
        from transformers import PrinterCallback

        settings, arguments = self.settings, self.arguments
        if test is None:
            if arguments.load_best_model_at_end:
                raise ConfigError("load_best_model_at_end needs held-out questions, and the data has none")
            arguments.eval_strategy = type(arguments.eval_strategy)("no")
        if size := size_if_large(self.source.base, self.source.revision):
            self.log(f"loading {self.source.name} ({size})")
        checkpoint = self._plan.checkpoint
        model = load_weights(self.source, settings)
        stop_at_end_of_turn(model, self.chat)
        new_adapter = settings.method == "lora" and not self.source.is_adapter
        try:
            trainer = kind(
                model=model,
                args=arguments,
                train_dataset=train,
                eval_dataset=test,
                processing_class=self.chat.tokenizer,
                peft_config=lora_config(settings.lora, revision=settings.revision) if new_adapter else None,
                seconds_before=folders.seconds_before(Path(checkpoint)) if checkpoint else 0.0,
                checkpoints_kept=_CHECKPOINTS_KEPT,
                write_card=self.write_card,
                **own,
            )
        except (ValueError, NotImplementedError) as error:  # such as adapter modules that the model does not have
            raise ConfigError("TRL or peft refuses these settings", quoting=error) from error
        trainer.remove_callback(PrinterCallback)
        return trainer

    def train(self, trainer: Any, *, check: Callable[[], None] = lambda: None) -> None:
        """Train from the last checkpoint to the last step; raise Interrupted if a signal stopped it before that.

        `check` may raise if the run failed although TRL has returned.
        """
        from reasonrag.training.trainer import PrintProgress, StopOnSignal, handle_signals

        self._warn_of_memory(trainer)
        if self.is_first:
            folder = TrainingFolder(self.out)
            if commit := model_commit(self.source.base, self.source.revision):  # known once it is loaded
                self._identity[f"content.model{COMMIT}"] = commit
                folder.check_same(self._identity, type(self.settings)())
            folder.bind(self.settings, self._identity)
            trainer.add_callback(PrintProgress(self.log))
        self._choose_threads(trainer.model)
        request = self._stack.enter_context(handle_signals(self.log))
        trainer.add_callback(StopOnSignal(request))
        trainer.train(resume_from_checkpoint=self._plan.checkpoint)
        check()
        steps, planned = trainer.state.global_step, trainer.state.max_steps
        if steps < planned:
            message = f"stopped after step {steps} of {planned}; a checkpoint is kept"
            raise Interrupted(message, number=request.number)
        trainer.check_weights()

    def _warn_of_memory(self, trainer: Any) -> None:
        """Warn if a step is likely to take more memory than is free: without a GPU the process would be killed."""
        free, settings, rows = free_memory(), self.settings, trainer.train_dataset
        if free is None or not self.arguments.use_cpu or LENGTH not in rows.column_names:
            return
        batch, longest = settings.per_device_train_batch_size, max(rows[LENGTH])
        need = step_memory(trainer.model, batch * longest, checkpointing=self.arguments.gradient_checkpointing)
        if need > free:
            self.log(
                f"warning: a step of {batch} examples of up to {longest} tokens takes about {gigabytes(need)} of "
                f"memory besides the weights, and {gigabytes(free)} are free, so this process may be killed; take a "
                "smaller --batch-size (with more --accumulation), or --set trainer.gradient_checkpointing=true"
            )

    def _choose_threads(self, model: Any) -> None:
        """Use the CPU threads that suit the model, to the end of the run."""
        import torch

        self._stack.callback(torch.set_num_threads, torch.get_num_threads())
        threads = choose_threads(model)
        torch.set_num_threads(threads)
        if self.arguments.use_cpu and not is_small(model):
            self.log(f"CPU threads: {threads} (OMP_NUM_THREADS chooses another number)")

    def evaluate(self, trainer: Any) -> None:
        """Compute the held-out metrics of the weights that are kept, unless the last step was evaluated anyway."""
        history = trainer.state.log_history
        evaluated = any("eval_loss" in entry and entry["step"] == trainer.state.global_step for entry in history)
        if trainer.eval_dataset is not None and (not evaluated or self.arguments.load_best_model_at_end):
            trainer.evaluate()

    def save(self, trainer: Any, **more: Any) -> None:
        """Write the policy, and on the first process all other files, `training.json` last, with `more` in it."""
        save_policy(trainer, self.out)  # all processes hold parts of the weights
        if self._data is not None:
            import torch

            arguments, test = self.arguments, trainer.eval_dataset
            save_charts(self.out / "curves", panels(trainer.state.log_history))
            self.write_card(self.out)
            # An attempt that was killed just before it wrote training.json may have left one.
            shutil.rmtree(self.out / MERGED, ignore_errors=True)
            self._merge_adapter()
            rows = {"train": len(trainer.train_dataset), "held_out": 0 if test is None else len(test)}
            self.summary = summarise(
                trainer.state,
                self.settings,
                self._identity,
                seconds=trainer.seconds,
                stage=self.stage,
                model={"name": self.source.name, "checksum": self.source.checksum},
                data={**self._data.facts, "rows": rows},
                device="cpu" if arguments.use_cpu else str(torch.cuda.get_device_name(arguments.device)),
                processes=arguments.world_size,
                **more,
            )
            self.summary["files"] = folders.written_files(self.out)
            write_json(self.out / SUMMARY, self.summary)
            for old in (self.out / CHECKPOINTS).glob("rows-*"):
                shutil.rmtree(old, ignore_errors=True)
        if self.arguments.world_size > 1:
            trainer.accelerator.wait_for_everyone()

    def write_card(self, folder: Path) -> None:
        """Write how the policy is prompted: as its data, else as the model that it was trained from."""
        if self._data is not None and self._data.card is not None:
            self._data.card.write(folder)
        elif not copy_card(Path(self.source.path), folder):
            copy_card(Path(self.source.base), folder)
        self._write_model_files(folder)

    def _write_model_files(self, folder: Path) -> None:
        for name, content in self.model_files.items():
            write_json(folder / name, content)

    def _merge_adapter(self) -> None:
        settings, merged = self.settings, self.out / MERGED
        if settings.merge and settings.method == "lora" and not merged.exists():
            merge_adapter(self.out, merged, chat=self.chat)
            self._write_model_files(merged)


def trl_arguments(config: Any, settings: TrainSettings, out: Path, *, own: Mapping[str, Any]) -> Any:
    """Return TRL's configuration: settings of the same name, `own` arguments of this kind of run, `settings.trainer`.

    Raises:
        ConfigError: an unknown argument (with the nearest name), one that has a setting here, or a value that TRL
            refuses.
    """
    known = {field.name for field in dataclasses.fields(config) if field.init}
    gpu = uses_gpu(settings)
    # By name, except for transformers 4, in which warmup_steps and warmup_ratio exclude each other.
    same_name = known & type(settings).model_fields.keys() - {"warmup_ratio"}
    arguments = {name: getattr(settings, name) for name in same_name}
    arguments |= {
        "output_dir": str(out / CHECKPOINTS),
        # transformers 5 has no warmup_ratio: a number of steps below 1 is the share.
        "warmup_steps": settings.warmup_ratio,
        "per_device_eval_batch_size": settings.per_device_train_batch_size,
        "eval_strategy": "steps" if settings.eval_every else "no",
        "eval_steps": settings.eval_every,
        "save_strategy": "steps",
        "save_total_limit": None,  # `GuardedTrainer` removes older checkpoints, and only after the new one is complete
        "max_length": None,
        "bf16": gpu,
        "use_cpu": not gpu,
        "gradient_checkpointing": gpu,  # recomputes activations to save memory
        "dataloader_pin_memory": gpu,
        "report_to": list(settings.report_to) or "none",
        "disable_tqdm": True,
        "logging_steps": settings.log_every,
        "log_level_replica": "error",
        "logging_nan_inf_filter": False,  # it would replace a NaN loss by an average
        "include_num_input_tokens_seen": "non_padding",
        **own,
    }
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
    """Raise before anything is read if a tracker cannot be used: transformers does so after the model is loaded."""
    from transformers.integrations import get_available_reporting_integrations

    installed = get_available_reporting_integrations()
    for name in names:
        if name not in (*installed, "none", "all", "flyte"):
            raise ConfigError(
                f"--report-to {quoted(name)}: its package is not installed, or there is no such tracker; install it, "
                f"or choose one of: {', '.join(installed) or 'none'}"
            )


def save_policy(trainer: Any, out: Path) -> None:
    """Save the trained model, or its adapter, into a folder, without files that name paths of this machine."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")  # a sharded one can be resumed, but not loaded as a model
    trainer.save_model(str(out))
    if trainer.accelerator.is_main_process:
        shutil.rmtree(out / "ref", ignore_errors=True)  # TRL's copy of the adapter that the run started from
        if not (out / "generation_config.json").exists():  # peft saves none, and its model's lacks a new end of a turn
            trainer.accelerator.unwrap_model(trainer.model).generation_config.save_pretrained(out)
        for name in ("training_args.bin", "README.md"):  # a pickle, and peft's empty card
            (out / name).unlink(missing_ok=True)


def silence_libraries() -> None:
    """Turn off telemetry and library hints, and progress bars without a terminal."""
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


def summarise(
    state: Any, settings: TrainSettings, identity: Mapping[str, Any], *, seconds: float, **facts: Any
) -> dict[str, Any]:
    """Return the content of `training.json`: without paths of this machine, secrets, and NaN.

    `state` is transformers' `TrainerState` after the last step, `identity` comes from `folder.identity_of`, `seconds`
    includes earlier processes, and `facts` are further entries.
    """
    history = []
    for entry in state.log_history:
        kept = {name: value for name, value in entry.items() if name.removeprefix("eval_") not in _OF_A_PROCESS}
        for name, value in kept.items():
            if isinstance(value, float) and not math.isfinite(value):
                kept[name] = None
        history.append(kept)
    train = [entry for entry in history if "loss" in entry]
    held_out = [entry for entry in history if "eval_loss" in entry or "eval_em" in entry]
    with_loss = [entry for entry in held_out if entry.get("eval_loss") is not None]
    best = min(with_loss, key=lambda entry: float(entry["eval_loss"]), default=None)
    return {
        **facts,
        "name": short_hash(identity),
        "steps": state.global_step,
        "epochs": state.epoch,
        "seconds": round(seconds, 2),
        "tokens_seen": int(state.num_input_tokens_seen),
        "final": {"train": train[-1] if train else None, "held_out": held_out[-1] if held_out else None},
        "best_held_out": best,
        "settings": folders.without_places(settings.model_dump(mode="json")),
        "identity": dict(identity),
        "versions": versions() | {name: metadata.version(name) for name in ("peft", "accelerate")},
        "history": history,
    }


def panels(history: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return a panel for each metric of the log, by step, in training and on held-out questions.

    Online training also gets one with the components of the reward, and one of held-out EM by seconds.
    """
    is_online = any("rollout/em" in entry for entry in history)
    is_dpo = any("rewards/margins" in entry for entry in history)
    curves, trained_label = (_ROLLOUT_CURVES, "rollouts") if is_online else (_PAIR_CURVES, "train")
    drawn = []
    for key, held_out_key, title, y_label in curves:
        if is_dpo and key == "mean_token_accuracy":
            continue
        if lines := _lines(history, {trained_label: key, "held-out": f"eval_{held_out_key}"}):
            drawn.append(Panel(title, "step", y_label, lines))
    if is_online:
        components = sorted({key for entry in history for key in entry if key.startswith("reward/")})
        if lines := _lines(history, {key.removeprefix("reward/"): key for key in components}):
            drawn.append(Panel("components of the reward", "step", "mean", lines))
        if lines := _lines(history, {"held-out": "eval_em"}, x="seconds"):
            drawn.append(Panel("exact match by time", "seconds", "EM", lines))
    return drawn or [Panel("loss", "step", "loss", ())]


def _lines(history: Sequence[Mapping[str, Any]], keys: Mapping[str, str], *, x: str = "step") -> tuple[Line, ...]:
    """Return a line for each key of the log that has any value; `keys` are by label, `x` is another key."""
    lines = []
    for label, key in keys.items():
        entries = [entry for entry in history if entry.get(key) is not None and x in entry]
        if entries:
            lines.append(Line(label, [float(e[x]) for e in entries], [float(e[key]) for e in entries]))
    return tuple(lines)
