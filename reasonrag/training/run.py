"""The harness around every trainer: folder, model, checkpoints, and the files that are written at the end.

OUT/
├── config.yaml            the resolved settings
├── checkpoints/           from which a killed run resumes; one counts once its marker file is written
├── model.safetensors ...  the trained model, or its adapter
├── merged/                the adapter merged into its model, if asked for
├── best/                  of online training: the policy that was best on held-out questions
├── reasonrag.yaml         how the policy was prompted in training
├── curves.svg, curves.png
└── training.json          settings, data, metrics, versions: written once the run is finished

Several processes (`accelerate launch`, `torchrun`) run this in parallel.
The first one reads the data, writes it as token ids into the folder of
the checkpoints and broadcasts the plan; it alone prints and writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
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
from typing import Any, Generic, TypeVar

from reasonrag.core.config import PolicyCard, copy_card
from reasonrag.core.errors import ConfigError, DataError, InputError, Interrupted, RunError, check_limits
from reasonrag.core.plots import Line, Panel
from reasonrag.core.plugins import code_of
from reasonrag.core.settings import COMMIT, Section, identity, nearest
from reasonrag.core.text import map_texts
from reasonrag.core.types import as_finite
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.model_folder import choose_threads, model_commit, model_files
from reasonrag.storage.files import RUNS, damage, digests, read_json, require_json, save_charts, short_hash, write_json
from reasonrag.storage.folder import Folder, describe, first_usable, versions, write_config
from reasonrag.training.model import (
    MODEL_INIT,
    ModelSource,
    load_weights,
    lora_config,
    merge_adapter,
    open_source,
    stop_at_end_of_turn,
    uses_gpu,
)
from reasonrag.training.settings import TrainSettings

S = TypeVar("S", bound=TrainSettings)
Log = Callable[[str], None]
TokenRows = list[dict[str, Any]]

SUMMARY = "training.json"
CHECKPOINTS = "checkpoints"
MERGED = "merged"
BEST = "best"
_IDENTITY = f"{CHECKPOINTS}/identity.json"
MARKER = "complete.json"
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://\S*", re.IGNORECASE)
_HOST = re.compile(r"(?<![\w.])(?:localhost|\d{1,3}(?:\.\d{1,3}){3})(?::\d+)?(?![\w.])")
# Messages of safetensors and torch about a full disk: neither raises an OSError.
_DISK_FULL = (
    *(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    *("file write failed", "unexpected pos", "iostream error"),
)
_ROWS_SUFFIX = re.compile(r"\.(jsonl|json|parquet)(\.gz|\.zst)?$", re.IGNORECASE)
# TRL arguments that are fixed here. Nothing is cut or
# packed, and checkpoints are complete or do not count.
_FIXED_ARGUMENTS = frozenset(
    (
        *("output_dir", "max_length", "save_total_limit", "warmup_steps", "warmup_ratio", "use_cpu"),
        *("resume_from_checkpoint", "push_to_hub", "hub_token", "padding_free", "packing"),
        *("load_best_model_at_end", "eval_on_start"),
    )
)
# Counted from the start of a process, so wrong after a resume;
# `num_input_tokens_seen` and `seconds` are of the run.
_OF_A_PROCESS = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second", "num_tokens")
# Curves by their key in the log, with titles. Held-out
# metrics have the key after `eval_`, without `rollout/`.
_CURVES = {
    "loss": "loss",
    "rewards/margins": "reward margin",
    "rewards/accuracies": "reward accuracy",
    "rewards/chosen": "reward of the chosen side",
    "mean_token_accuracy": "token accuracy",
    "rollout/reward": "reward",
    "rollout/em": "exact match",
    "rollout/retrievals": "retrievals a question",
    "rollout/format_rate": "share of well-formed trajectories",
    "rollout/osr": "over-search rate",
    "rollout/usr": "under-search rate",
    "entropy": "entropy, nats a token",
    "rollout/tokens": "length, policy's tokens",
}


# The folder


class TrainingFolder(Folder):
    """The folder of a training run."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, "training run", ignore=(CHECKPOINTS,), record=_IDENTITY)

    def is_usable(self) -> bool:
        return super().is_usable() or finished(self.path) is not None

    def facts(self) -> dict[str, Any]:
        """Return the record, as `Folder.facts`; of a finished training run without checkpoints, from its summary."""
        return super().facts() or {"identity": (finished(self.path) or {}).get("identity")}

    def changes(self, identity: Mapping[str, Any], defaults: Section) -> str:
        """Return how the training run in the folder differs; "" if it is the same one, or not worth keeping."""
        if last_checkpoint(self.path) is None and not (self.path / SUMMARY).exists():
            return ""
        return super().changes(identity, defaults)

    def bind(self, settings: TrainSettings, identity: Mapping[str, Any]) -> None:
        """Write down which training run the folder belongs to from now on."""
        self.note(identity=dict(sorted(identity.items())))
        write_config(self.path, settings)


def identity_of(stage: str, settings: TrainSettings, *, content: str, model: str) -> dict[str, Any]:
    """Return everything that can change the result of a training run.

    `stage` is dpo, sft, prm or rl; `content` and `model` are
    checksums of the data and of the model to start from.
    """
    flat = {"stage": stage, **without_places(identity(settings))}
    return describe(flat, {"data": content, "model": model})


def finished(out: Path) -> dict[str, Any] | None:
    """Return `training.json` of a finished training run, or None."""
    summary = read_json(out / SUMMARY)
    return summary if summary and isinstance(summary.get("identity"), dict) else None


def written_files(out: Path) -> dict[str, list[int | str]]:
    """Return size and SHA-256 of each file of the trained model, merged and not, by its path in the folder."""
    return digests(out, [*model_files(out), *model_files(out / MERGED)], sync=True)


def check_trained(out: Path) -> int:
    """Return how many files of a trained model `training.json` names, if it names any; all are as written.

    Raises:
        RunError: a file differs, or `training.json` cannot be read.
    """
    files = require_json(out / SUMMARY, "copy it again").get("files") or {}
    if problem := damage(out, files):
        raise RunError(
            f"{out} was finished, and since then {problem}; bring that back, or delete {SUMMARY}: the same "
            "command then writes the model again from its last checkpoint. If you changed it yourself, remove "
            f"`files` from {SUMMARY}"
        )
    return len(files)


def check_summary(out: Path) -> None:
    """Raise RunError if `training.json` has a loss that was not finite, or is of another training run."""
    summary, place = require_json(out / SUMMARY, "copy it again"), out / SUMMARY
    described = summary.get("identity")
    same_run = described == TrainingFolder(out).facts()["identity"]
    if not same_run or short_hash(described) != summary.get("name", short_hash(described)):
        raise RunError(f"{place} is of another training run, or was changed since it was written; copy it again")
    history = summary.get("history")
    for entry in history if isinstance(history, list) else ():  # NaN and infinities are null there
        for name in ("loss", "eval_loss", "grad_norm"):
            if as_finite(entry.get(name, 0)) is None:
                raise RunError(f"{place}: {name} of step {entry.get('step')} was not a finite number")


def last_checkpoint(out: Path, log: Log | None = None) -> Path | None:
    """Return the latest complete checkpoint, or None.

    A checkpoint without a marker was interrupted, and one that lost data since (a full disk, a power cut)
    has files of other sizes than in the marker: both are ignored. With a `log`, checksums are compared
    too, and it receives a line about each checkpoint that is damaged.
    """
    for checkpoint in reversed(_checkpoints(out)):
        if not (problem := checkpoint_problem(checkpoint, fully=log is not None)):
            return checkpoint
        if log is not None:
            log(f"{checkpoint.name} is left out: {problem}")
    return None


def checkpoint_problem(checkpoint: Path, *, fully: bool = True) -> str:
    """Return the problem of a checkpoint: no marker, or a file that changed; "" if it is complete.

    Files are compared by size and, if `fully`, by checksum.
    """
    marker = read_json(checkpoint / MARKER) or {}
    if marker.pop("checksum", None) != short_hash(marker) or not isinstance(files := marker.get("files"), dict):
        return f"{MARKER} is missing or damaged: it was not written to its end"
    return damage(checkpoint, files, fully=fully)


def mark_complete(checkpoint: Path, *, seconds: float = 0.0) -> None:
    """Write the marker that makes a checkpoint, or token rows, count: size and checksum of each file, now on disk.

    `seconds` is the duration of the run so far.
    """
    # Hidden files are the unfinished ones of an attempt that was killed.
    paths = (path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith("."))
    files = digests(checkpoint, (path for path in paths if path.name != MARKER), sync=True)
    marker = {"seconds": seconds, "files": files}
    write_json(checkpoint / MARKER, {**marker, "checksum": short_hash(marker)}, indent=1)


def _checkpoints(out: Path) -> list[Path]:
    """Return all checkpoints, complete or not, by step."""
    found = [(path.name.removeprefix("checkpoint-"), path) for path in (out / CHECKPOINTS).glob("checkpoint-*")]
    return [path for _, path in sorted((int(step), path) for step, path in found if step.isdecimal())]


def require_enough(settings: TrainSettings, facts: Mapping[str, Any]) -> None:
    """Raise DataError if there are fewer questions or examples to train on than `settings` ask for."""
    counts, allowing = facts["train"], []
    for noun, count in counts.items():
        name = "questions" if noun == "questions" else "examples"
        if count < getattr(settings, f"min_{name}"):
            allowing.append(f"--min-{name} {count}")
    if allowing:
        found = " of ".join(f"{count} {noun}" for noun, count in counts.items())
        raise DataError(
            f"{facts['source']}: {found} to train on; so few teach those questions and noise, and can cost more than "
            "they bring: 101 pairs of 27 questions lost 8.4 F1 (docs/log.md). Take more questions, or "
            f"train on these with {' '.join(allowing)}"
        )


def without_places(value: Any) -> Any:
    """Return the same tree with every text stripped of where on a machine or in a network something is.

    An absolute, home or relative path is shortened to its
    last name, also after a scheme; a URL to its scheme.

    >>> without_places({"judge": {"spec": "http://10.0.0.1:8000/v1"}, "url": ["https://corpus.example"]})
    {'judge': {'spec': 'http://…'}, 'url': ['https://…']}
    >>> without_places(["~/.cache/reasonrag", "hf:/models/mine/", "Qwen/Qwen2.5-7B", "demo:hiprag", 0.5])
    ['reasonrag', 'hf:mine', 'Qwen/Qwen2.5-7B', 'demo:hiprag', 0.5]
    """
    return map_texts(value, _without_place)


def _without_place(text: str) -> str:
    text = _HOST.sub("…", _URL.sub(r"\1://…", text))
    if text.startswith(("/", "~", "./", "../")):
        return Path(text).name or text
    scheme, colon, rest = text.partition(":")
    return f"{scheme}:{_without_place(rest)}" if colon and "://" not in text else text


# The run


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The data of a training run, as the first process reads it."""

    checksum: str  # changes with any row of the data
    card: PolicyCard | None  # how the policy is prompted, if the data comes with that
    facts: Mapping[str, Any]  # the data's entry in `training.json`, without paths of this machine
    make_rows: Callable[[], Mapping[str, TokenRows]]  # by split (`train`, `test`); called if they are not on disk yet


class TrainingRun(contextlib.AbstractContextManager[Any], Generic[S]):
    """A training run from its settings to a finished folder; `dpo.train` shows how its methods follow each other.

    Args:
        stage: dpo, sft, prm or rl; part of the run's identity.
        settings: `model` and `data` have to be set.
        out: a new folder, or one that holds this training run,
            which is then resumed; None chooses one in runs/.
        config: the class of TRL's configuration, which joins
            the process group of a multi-process launch.
        log: receives lines for people, on the first process only.
        own: arguments of `config` that only this kind of training run has.

    Attributes:
        source: the model to start from.
        arguments: TRL's configuration.
        model_files: JSON files, by name, that are written wherever the model is saved.
        summary: content of `training.json` once the run is
            finished; empty on other processes than the first.

    In the `with` block, InputError, RunError (another training run is in the folder, or the loss became
    NaN) and Interrupted (Ctrl-C or SIGTERM; a checkpoint is kept) can be raised.
    """

    def __init__(self, stage: str, settings: S, out: Path | None, config: Any, *, log: Log = print, **own: Any) -> None:
        self.stage = stage
        self.settings = settings
        self.out = RUNS if out is None else Path(out)  # without a name it is chosen once the data is known
        self.source: ModelSource = open_source(settings)
        silence_libraries()
        self.arguments = trl_arguments(config, settings, self.out, own=own)
        self.is_first = self.arguments.process_index == 0
        self.log = log if self.is_first else lambda line: None
        self.model_files: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self._is_unnamed = out is None
        self._data: TrainingData | None = None  # only the first process reads the data
        self._identity: dict[str, Any] = {}
        self._checkpoint: Path | None = None  # from which the run resumes
        self._stack = contextlib.ExitStack()
        self._place = 0  # the inode of `out`, which another process may move

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)
        error = raised[1]
        if isinstance(error, Exception) and any(message in str(error) for message in _DISK_FULL):
            raise RunError(
                f"{self.out}: the disk is full, or a quota or a limit on the size of files is reached; free some space "
                "and run the same command again, it resumes from the last complete checkpoint"
            ) from error

    @functools.cached_property
    def chat(self) -> ChatTemplate:
        """The model's tokenizer and chat template, loaded once: a vocabulary of 262,144 tokens takes seconds."""
        return self.source.chat()

    def open(self, read: Callable[[], TrainingData]) -> tuple[Any, Any | None] | None:
        """Lock the folder and return token rows, as `datasets.Dataset`: to train on, and held-out ones or None.

        Return None if the run is finished already. `read` is called on the first process; the others get
        the same plan, or the same error.
        """
        from accelerate.utils import broadcast_object_list
        from datasets import load_from_disk

        # One process reads; all of them have to learn the same
        # plan, or they would deadlock in the first collective.
        message: list[Any] = [None]
        if self.is_first:
            try:
                message = [self._make_plan(read())]
            except InputError as error:  # broadcast too, or the other processes would wait forever
                message = [error]
        broadcast_object_list(message, from_process=0)
        if isinstance(message[0], InputError):
            raise message[0]
        self.out, rows, self._checkpoint = message[0]
        self.arguments.output_dir = str(self.out / CHECKPOINTS)
        if rows is None:
            self.summary = finished(self.out) or {}
            return None
        splits = [rows / "train", rows / "test"]
        train, test = (load_from_disk(str(split)) if split.exists() else None for split in splits)
        return train, test

    def _make_plan(self, data: TrainingData) -> tuple[Path, Path | None, Path | None]:
        """Return the folder, that of the token rows, and the checkpoint to resume from.

        A finished run has no rows.
        """
        settings, defaults = self.settings, type(self.settings)()
        require_enough(settings, data.facts)
        self._data = data
        self._identity = identity_of(self.stage, settings, content=data.checksum, model=self.source.checksum)
        if self._is_unnamed:
            name = _ROWS_SUFFIX.sub("", Path(str(data.facts["source"])).name)
            self.out = first_usable(f"{name}-{self.stage}", TrainingFolder, self._identity, defaults)
            self.log(f"writing to {self.out} (--out chooses another folder)")
        # From here on no other process writes into the folder, until the `with` block ends.
        folder = TrainingFolder(self.out)
        self._stack.enter_context(folder.locked())
        (self.out / CHECKPOINTS).mkdir(exist_ok=True)
        self._place = self.out.stat().st_ino
        folder.check_same(self._identity, defaults)
        if (summary := finished(self.out)) is not None:
            check_trained(self.out)
            folder.bind(settings, summary["identity"])  # files that were cut since then are mended
            self.log("this training run is already finished")
            self._merge_adapter()
            return self.out, None, None
        checkpoint = last_checkpoint(self.out, self.log)
        for other in _checkpoints(self.out):
            if checkpoint_problem(other, fully=False):  # it could be taken for the newest one of two to keep
                shutil.rmtree(other)
        if checkpoint is not None:
            self.log(f"resuming from {checkpoint.name}")
        return self.out, self._write_rows(data), checkpoint

    def _write_rows(self, data: TrainingData) -> Path:
        """Write the token rows as files: processes share them, and TRL caches its own columns in their folder."""
        from datasets import Dataset

        path = self.out / CHECKPOINTS / f"rows-{short_hash(self._identity)}"
        for old in (self.out / CHECKPOINTS).glob("rows-*"):
            if old != path:
                shutil.rmtree(old)
        if path.exists() and (problem := checkpoint_problem(path)):
            self.log(f"the token rows are made again: {problem}")
            shutil.rmtree(path)
        if not path.exists():
            for split, rows in data.make_rows().items():
                if rows:
                    Dataset.from_list(rows).save_to_disk(str(path / split))
            mark_complete(path)
        for cached in path.glob("*/cache-*"):  # TRL's columns, which have no checksum and are quickly computed again
            cached.unlink()
        return path

    def build_trainer(self, kind: Callable[..., Any], train: Any, test: Any | None, **own: Any) -> Any:
        """Load the model and return its trainer: a `GuardedTrainer` of the class `kind`, with `own` arguments."""
        from transformers import PrinterCallback

        settings, arguments = self.settings, self.arguments
        if test is None:
            arguments.eval_strategy = type(arguments.eval_strategy)("no")
        arguments.eval_on_start = test is not None and self._checkpoint is None
        model = load_weights(self.source, settings)
        self.chat.check_fits(model)
        stop_at_end_of_turn(model, self.chat)
        # An adapter that is trained further stays the one that it is.
        new_adapter = settings.method == "lora" and not self.source.is_adapter
        try:
            trainer = kind(
                model=model,
                args=arguments,
                train_dataset=train,
                eval_dataset=test,
                processing_class=self.chat.tokenizer,
                peft_config=lora_config(settings.lora, revision=settings.revision) if new_adapter else None,
                seconds_before=require_json(self._checkpoint / MARKER, "")["seconds"] if self._checkpoint else 0.0,
                complete_checkpoint=self._complete_checkpoint,
                **own,
            )
        # Adapter modules that the model does not have; a tracker that is not installed.
        except (ValueError, NotImplementedError, RuntimeError, ImportError) as error:
            check_limits(error)
            raise ConfigError("TRL or peft refuses these settings", quoting=error) from error
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _check_place(self) -> None:
        if self._place and not (self.out.exists() and self._place == self.out.stat().st_ino):
            raise RunError(
                f"{self.out} was deleted or replaced while this training wrote to it; the same command goes on from "
                "its checkpoints, if --out names the folder that has them"
            )

    def _complete_checkpoint(self, checkpoint: Path, seconds: float) -> None:
        self._check_place()
        self.write_card(checkpoint)  # so that the checkpoint can be evaluated as it is
        mark_complete(checkpoint, seconds=seconds)

    def train(self, trainer: Any, *, check: Callable[[], None] = lambda: None) -> None:
        """Train from the last checkpoint to the last step; raise Interrupted if a signal stopped it before that.

        `check` may raise if the run failed although TRL has returned.
        """
        import torch

        from reasonrag.training.trainer import PrintProgress, StopOnSignal

        if self.is_first:
            folder = TrainingFolder(self.out)
            if commit := model_commit(self.source.base, self.source.revision):  # known once it is loaded
                self._identity[f"content.model{COMMIT}"] = commit
                folder.check_same(self._identity, type(self.settings)())
            # Only now, as settings that TRL or peft refuse must not take the folder.
            folder.bind(self.settings, self._identity)
            folder.keep_served(code_of(self.settings.model_dump(mode="json")))
            if (precision := trainer.accelerator.mixed_precision) != "no":
                self.log(f"mixed precision: {precision}, as trainer.{precision} or ACCELERATE_MIXED_PRECISION says")
            trainer.add_callback(PrintProgress(self.log))
        self._stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(choose_threads(trainer.model))
        stop = self._stack.enter_context(StopOnSignal(self.log, getattr(trainer, "batch_steps", 1)))
        trainer.add_callback(stop)
        try:
            trainer.train(resume_from_checkpoint=self._checkpoint and str(self._checkpoint))
        except ImportError as error:  # of an optional package, such as liger-kernel
            raise ConfigError("transformers cannot train with these settings", quoting=error) from error
        check()
        state = trainer.state
        steps, planned, best = state.global_step, state.max_steps, state.best_global_step
        if steps < planned:
            raise Interrupted(f"stopped after step {steps} of {planned}; a checkpoint is kept", number=stop.number)
        trainer.check_weights()
        if best is not None and (line := trainer.why_best()):
            self.log(line)
        if best not in (None, steps):
            checkpoint = self.out / CHECKPOINTS / f"checkpoint-{best}"
            if problem := checkpoint_problem(checkpoint):
                raise RunError(f"{checkpoint} was the best on held-out rows, and {problem}; start in a new folder")
            state.best_model_checkpoint = str(checkpoint)  # the folder may have moved
            trainer._load_best_model()

    def evaluate(self, trainer: Any) -> None:
        """Compute the metrics of the weights that are kept on all held-out rows, unless the last evaluation did."""
        from reasonrag.training.trainer import WATCHED_ROWS

        test, state = trainer.eval_dataset, trainer.state
        if test is not None and (len(test) > WATCHED_ROWS or state.best_global_step != state.global_step):
            trainer.evaluate()

    def save(self, trainer: Any, **more: Any) -> None:
        """Write the policy, and on the first process all other files, `training.json` last, with `more` in it."""
        self._check_place()
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
                kept_step=trainer.state.best_global_step or trainer.state.global_step,
                stage=self.stage,
                model={"name": self.source.name, "checksum": self.source.checksum},
                data={**self._data.facts, "rows": rows},
                device=torch.cuda.get_device_name() if arguments.device.type == "cuda" else str(arguments.device),
                processes=arguments.world_size,
                mixed_precision=trainer.accelerator.mixed_precision,
                **more,
            )
            self.summary["files"] = written_files(self.out)
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
        for name, content in self.model_files.items():
            write_json(folder / name, content)

    def _merge_adapter(self) -> None:
        settings, merged = self.settings, self.out / MERGED
        if settings.merge and settings.method == "lora" and not merged.exists():
            merge_adapter(self.out, merged, chat=self.chat)
            for name, content in self.model_files.items():
                write_json(merged / name, content)


def trl_arguments(config: Any, settings: TrainSettings, out: Path, *, own: Mapping[str, Any]) -> Any:
    """Return TRL's configuration: settings of the same name, `own` arguments of this kind of run, `settings.trainer`.

    Raises:
        ConfigError: an unknown argument (with the nearest name), one
            that has a setting here, or a value that TRL refuses.
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
        "max_length": None,
        "bf16": gpu,
        "use_cpu": not gpu,
        "gradient_checkpointing": gpu,  # recomputes activations to save memory
        "dataloader_pin_memory": gpu,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": settings.log_every,
        "log_level_replica": "error",
        "logging_nan_inf_filter": False,  # it would replace a NaN loss by an average
        "include_num_input_tokens_seen": "non_padding",
        **own,
    }
    arguments = {name: value for name, value in arguments.items() if name in known}
    for name, value in settings.trainer.items():
        if name in _FIXED_ARGUMENTS or name in own or name in type(settings).model_fields:
            raise ConfigError(f"trainer.{name} cannot be set: it is fixed, or has a setting of its own; see --help-all")
        if name not in known:
            raise ConfigError(f"trainer.{name} is unknown to {config.__name__}{nearest(name, sorted(known))}")
        if name != MODEL_INIT:
            arguments[name] = value
    try:
        return config(**arguments)
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise ConfigError("TRL refuses these settings", quoting=error) from error


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
    """Turn off telemetry and hints of libraries, and progress bars without a terminal."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Names that transformers is about to drop; TRL 1.16 uses them to support older versions.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
    import datasets
    from huggingface_hub import constants
    from transformers.utils import logging

    constants.HF_HUB_DISABLE_TELEMETRY = True  # the library read the environment when it was imported
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
        logging.disable_progress_bar()
        datasets.disable_progress_bars()


# What is written at the end


def summarise(
    state: Any, settings: TrainSettings, identity: Mapping[str, Any], *, seconds: float, **facts: Any
) -> dict[str, Any]:
    """Return the content of `training.json`: without paths of this machine, secrets, and NaN.

    `state` is transformers' `TrainerState` after the last step, `identity` comes from `identity_of`,
    `seconds` includes earlier processes, and `facts` are further entries.
    """
    history: list[dict[str, Any]] = []
    for entry in state.log_history:
        # JSON has no NaN, so numbers that are not finite
        # become null; `check_summary` refuses a loss of null.
        kept = {}
        for name, value in entry.items():
            if name.removeprefix("eval_") not in _OF_A_PROCESS:
                kept[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        history.append(kept)
    trained = [entry for entry in history if "loss" in entry]
    held_out = [entry for entry in history if "eval_loss" in entry or "eval_em" in entry]
    return {
        **facts,
        "name": short_hash(identity),
        "steps": state.global_step,
        "epochs": state.epoch,
        "seconds": round(seconds, 2),
        "tokens_seen": int(state.num_input_tokens_seen),
        "final": {"train": trained[-1] if trained else None, "held_out": held_out[-1] if held_out else None},
        "settings": without_places(settings.model_dump(mode="json")),
        "identity": dict(identity),
        "versions": versions() | {name: metadata.version(name) for name in ("peft", "accelerate")},
        "history": history,
    }


def panels(history: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return a panel for each metric of the log, by step, in training and on held-out questions.

    Online training also gets one with the components of the reward.
    """
    drawn = []
    for key, title in _CURVES.items():
        lines = _lines(history, {"train": key, "held-out": f"eval_{key.removeprefix('rollout/')}"})
        drawn.append(Panel(title, "step", title, lines))
    components = sorted({key for entry in history for key in entry if key.startswith("reward/")})
    lines = _lines(history, {key.removeprefix("reward/"): key for key in components})
    drawn.append(Panel("components of the reward", "step", "mean", lines))
    return [panel for panel in drawn if panel.lines] or drawn[:1]


def _lines(history: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> tuple[Line, ...]:
    """Return a line by step for each key of the log that has any value; `keys` are by label."""
    lines = []
    for label, key in keys.items():
        if entries := [entry for entry in history if entry.get(key) is not None and "step" in entry]:
            steps = [float(entry["step"]) for entry in entries]
            lines.append(Line(label, steps, [float(entry[key]) for entry in entries]))
    return tuple(lines)
