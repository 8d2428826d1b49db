"""What every kind of training goes through: data, folder, model, trainer, checkpoints, and how it ends.

Several processes (`accelerate launch`, `torchrun`) run this side by side: the first one reads the data, writes it as
token ids next to the checkpoints, and tells the others what to do; it alone prints and writes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from reasonrag.core.errors import ConfigError, InputError, Interrupted, RunError
from reasonrag.core.policy_card import PolicyCard
from reasonrag.core.secrets import redact
from reasonrag.core.text import one_line
from reasonrag.training import folder as folders
from reasonrag.training.arguments import model_init, on_gpu, trainer_arguments
from reasonrag.training.callbacks import Clock, callbacks, guarded, stopping
from reasonrag.training.checkpoints import (
    checkpoint_facts,
    checkpoints_folder,
    last_checkpoint,
    remove_old,
    room_on_disk,
)
from reasonrag.training.model import ModelSource, load_weights, open_source, weight_dtype
from reasonrag.training.outcome import MERGED, Outcome, finish, merge_adapter
from reasonrag.training.settings import TrainSettings

Log = Callable[[str], None]
Row = dict[str, Any]


class Data(Protocol):
    """What is trained on, as the first process reads it."""

    @property
    def content(self) -> str:
        """A checksum that changes with anything in it."""
        ...

    @property
    def card(self) -> PolicyCard | None:
        """How the policy is to be asked, where the data tells."""
        ...

    def facts(self) -> dict[str, Any]:
        """What `training.json` is to say of it: no place on this machine."""
        ...

    def rows(self) -> dict[str, list[Row]]:
        """Rows by split (`train`, `test`), as the trainer takes them."""
        ...


# Models below this gain nothing from a second thread on a CPU, and beside other work lose most of their speed to it.
_SMALL = 20_000_000


@dataclass(frozen=True, slots=True)
class Ready:
    """All that a trainer is made of.

    Attributes:
        trainer: TRL's class, or ours of it, to be made through this name: it has been laid over with `watch.Guard`.
        arguments: its configuration.
        model: loaded; not yet wrapped with a new adapter.
        load: loads the weights that the training begins with once more, for a reference.
        train, test: `datasets.Dataset`s; no test where nothing is held out.
    """

    trainer: Any
    settings: Any
    source: ModelSource
    arguments: Any
    model: Any
    load: Callable[[], Any]
    tokenizer: Any
    train: Any
    test: Any


@dataclass(frozen=True, slots=True)
class Stage:
    """A kind of training.

    Attributes:
        name: dpo, sft or rl.
        config: gives TRL's configuration class.
        own: arguments for it that only this kind has.
        data: opens what is trained on; asked on the first process only.
        trainer_class: gives the trainer's class.
        make: the trainer.
        more: what the end of this kind of training adds to `training.json`.
    """

    name: str
    config: Callable[[], Any]
    own: Mapping[str, Any]
    data: Callable[[ModelSource, Log], Data]
    trainer_class: Callable[[], Any]
    make: Callable[[Ready], Any]
    more: Callable[[Any], dict[str, Any]] = lambda trainer: {}


@dataclass(slots=True)
class _Plan:
    """What the first process tells the others."""

    data: str
    checkpoint: str | None
    finished: dict[str, Any] | None


def run(stage: Stage, settings: TrainSettings, out: Path, *, log: Log) -> dict[str, Any]:
    """Train, or go on with it; returns what `training.json` holds (on the first process; `{}` on the others).

    Raises:
        InputError: settings, data, model or folder that cannot work.
        RunError: the folder holds another training, or the loss is no number any more.
        Interrupted: Ctrl-C or SIGTERM ended it, with a checkpoint; the same call goes on.
    """
    quiet()
    source = open_source(settings)
    arguments = trainer_arguments(stage.config(), settings, out, own=stage.own)
    training = _Training(stage, settings, out, source, arguments, log if arguments.process_index == 0 else None)
    with contextlib.ExitStack() as held, warnings.catch_warnings():
        # Names that transformers is about to drop; TRL 1.16 uses them for the sake of older versions.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
        plan = training.agree(held)
        if plan.finished is not None:
            return plan.finished
        with room_on_disk(out):
            return training.train(plan)


class _Training:
    def __init__(
        self, stage: Stage, settings: TrainSettings, out: Path, source: ModelSource, arguments: Any, log: Log | None
    ) -> None:
        self.stage = stage
        self.settings = settings
        self.out = out
        self.source = source
        self.arguments = arguments
        self.first = log is not None
        self.log: Log = log or (lambda line: None)
        self.described: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self.card: PolicyCard | None = None

    def agree(self, held: contextlib.ExitStack) -> _Plan:
        """What is to be done, or why nothing can be, the same on every process. The first one holds the folder."""
        from accelerate.utils import broadcast_object_list

        found: list[Any] = [None]
        if self.first:
            try:
                data = self.stage.data(self.source, self.log)
                held.enter_context(folders.training_folder(self.out))
                found = [self._plan(data)]
            except InputError as error:  # told to all, or the others would wait for it
                found = [error]
        broadcast_object_list(found, from_process=0)
        if isinstance(found[0], InputError):
            raise found[0]
        plan: _Plan = found[0]
        return plan

    def _plan(self, data: Data) -> _Plan:
        settings, source = self.settings, self.source
        self.described = folders.describe(self.stage.name, settings, content=data.content, model=source.checksum)
        folders.check_same(self.out, self.described)
        self.card, self.data = data.card, data.facts()
        if (summary := folders.finished(self.out)) is not None:
            self._say_finished()
            return _Plan("", None, summary)
        remove_old(self.out, keep=settings.save_total_limit)
        checkpoint = last_checkpoint(self.out)
        if checkpoint is not None:
            self.log(f"going on from {checkpoint.name}")
        return _Plan(str(self._write_rows(data)), str(checkpoint) if checkpoint else None, None)

    def _say_finished(self) -> None:
        self.log("this training is finished already")
        if self.settings.merge and self.settings.method == "lora" and not (self.out / MERGED).exists():
            merge_adapter(self.out, self.out / MERGED, trust_remote_code=self.settings.trust_remote_code)

    def _write_rows(self, data: Data) -> Path:
        """Token rows as files: processes share them, and TRL keeps what it computes of them beside them."""
        from datasets import Dataset

        path = checkpoints_folder(self.out) / f"rows-{folders.digest(self.described)}"
        for old in checkpoints_folder(self.out).glob("rows-*"):
            if old != path:
                shutil.rmtree(old)
        if not path.exists():
            unfinished = path.with_name(f"{path.name}.tmp")
            for split, rows in data.rows().items():
                if rows:
                    Dataset.from_list(rows).save_to_disk(str(unfinished / split))
            unfinished.replace(path)
        return path

    def train(self, plan: _Plan) -> dict[str, Any]:
        """From the agreed plan to the finished folder."""
        before = checkpoint_facts(Path(plan.checkpoint))["seconds"] if plan.checkpoint else 0.0
        trainer = self._trainer(Path(plan.data))
        trainer.keep = self.settings.save_total_limit
        trainer.clock = Clock(before)
        if self.first:
            folders.bind(self.out, self.settings, self.described)
        with _threads(trainer.model, self.arguments), stopping(self.log) as stop:
            for callback in callbacks(stop, trainer.clock, self.log if self.first else None):
                trainer.add_callback(callback)
            trainer.train(resume_from_checkpoint=plan.checkpoint)
            steps, planned = trainer.state.global_step, trainer.state.max_steps
            if trainer.collapse:
                raise RunError(
                    f"stopped after step {steps} of {planned}: {trainer.collapse}. Its state and the best policy so "
                    "far are kept; try a lower learning rate or a KL penalty, or relax the guard"
                )
            if steps < planned:
                raise Interrupted(f"stopped after step {steps} of {planned}; a checkpoint is kept", number=stop.number)
            self._look_once_more(trainer)
        return self._end(trainer)

    def _trainer(self, rows: Path) -> Any:
        from datasets import load_from_disk
        from transformers import PrinterCallback

        settings, arguments, source = self.settings, self.arguments, self.source
        train = load_from_disk(str(rows / "train"))
        test = load_from_disk(str(rows / "test")) if (rows / "test").exists() else None
        self.data["rows"] = {"train": len(train), "held_out": 0 if test is None else len(test)}
        if test is None:
            if arguments.load_best_model_at_end:
                raise ConfigError("load_best_model_at_end needs held-out questions, and the data has none")
            arguments.eval_strategy = type(arguments.eval_strategy)("no")
        dtype = weight_dtype(settings, gpu=on_gpu(settings))

        def load() -> Any:
            return load_weights(source, dtype=dtype, init=model_init(settings))

        ready = Ready(
            trainer=guarded(self.stage.trainer_class()),
            settings=settings,
            source=source,
            arguments=arguments,
            model=load(),
            load=load,
            tokenizer=source.chat().tokenizer,
            train=train,
            test=test,
        )
        try:
            trainer = self.stage.make(ready)
        except (ValueError, NotImplementedError) as error:  # such as modules for the adapter that are not there
            raise ConfigError(f"TRL or peft refuses these settings: {one_line(redact(str(error)))[:300]}") from error
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _look_once_more(self, trainer: Any) -> None:
        """The held-out figures of what is kept, unless the last step was looked at anyway."""
        history = trainer.state.log_history
        seen = any("eval_loss" in entry and entry["step"] == trainer.state.global_step for entry in history)
        if trainer.eval_dataset is not None and (not seen or self.arguments.load_best_model_at_end):
            trainer.evaluate()

    def _end(self, trainer: Any) -> dict[str, Any]:
        """Save the model from all processes; the rest is the first one's."""
        save_policy(trainer, self.out)
        summary: dict[str, Any] = {}
        if self.first:
            outcome = Outcome(
                stage=self.stage.name,
                settings=self.settings,
                source=self.source,
                data=self.data,
                card=self.card,
                described=self.described,
                state=trainer.state,
                seconds=trainer.clock.seconds,
                device=_device(self.arguments),
                processes=self.arguments.world_size,
                more=self.stage.more(trainer),
            )
            summary = finish(self.out, outcome)
            for rows in checkpoints_folder(self.out).glob("rows-*"):
                shutil.rmtree(rows, ignore_errors=True)
        if self.arguments.world_size > 1:
            trainer.accelerator.wait_for_everyone()
        return summary


def save_policy(trainer: Any, out: Path) -> None:
    """The trained model, or its adapter, into the folder itself. The trainer can go on."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")  # a sharded one is for going on, not for loading
    trainer.save_model(str(out))
    if trainer.accelerator.is_main_process:  # TRL's copy of the adapter that the training began with
        shutil.rmtree(out / "ref", ignore_errors=True)


def quiet() -> None:
    """No telemetry, no hints of libraries, and bars on a terminal only."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets
    from huggingface_hub import constants
    from transformers.utils import logging

    constants.HF_HUB_DISABLE_TELEMETRY = True  # it was read from the environment when the library was imported
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
        logging.disable_progress_bar()
        datasets.disable_progress_bars()


@contextlib.contextmanager
def _threads(model: Any, arguments: Any) -> Iterator[None]:
    """One thread for a small model on a CPU."""
    import torch

    before = torch.get_num_threads()
    small = arguments.use_cpu and sum(p.numel() for p in model.parameters()) < _SMALL
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(arguments: Any) -> str:
    import torch

    return "cpu" if arguments.use_cpu else str(torch.cuda.get_device_name(arguments.device))
