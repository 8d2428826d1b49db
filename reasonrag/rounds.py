"""Rounds: trees of the current policy on new questions, pairs, training, dev evaluation, until dev stops rising.

OUT/
├── config.yaml, identity.json   the settings, and what each finished stage came to
├── round-0/eval/                the first policy on the dev questions
├── round-1/trees/, policy/, eval/, round-2/...   what build-tree, a training run and eval write
└── improve.json, improve.md, improve.svg, improve.png   written at the end; the JSON names the best policy

A stage resumes as its own command does. Once it has finished, it is noted in `identity.json` and never run again,
so a run that was killed ends with the same weights.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from reasonrag.core import event_loop
from reasonrag.core.config import PRESETS, Config
from reasonrag.core.errors import ConfigError, Interrupted, RunError
from reasonrag.core.plots import Line, Panel
from reasonrag.core.settings import Section, Tree, execution, identity, setting
from reasonrag.core.table import Table
from reasonrag.core.text import common_text, redact
from reasonrag.core.types import Question
from reasonrag.evaluation.run import Evaluation, release_memory
from reasonrag.evaluation.tables import interval_text
from reasonrag.formats import open_format
from reasonrag.llm.model_folder import model_identity
from reasonrag.pipeline.build import build_trees, most_calls
from reasonrag.pipeline.parts import as_served, open_parts, open_questions, open_retriever
from reasonrag.rewards.judge import TRIES
from reasonrag.storage.files import save_charts, write_json, write_text
from reasonrag.storage.folder import Folder, describe, write_config
from reasonrag.storage.questions import questions_fingerprint, sample_questions
from reasonrag.training.model import acting_policy
from reasonrag.training.run import MERGED, Log, check_trained
from reasonrag.training.settings import DPO_PRESETS, SFT_PRESETS, DPOSettings, SFTSettings

Stage = dict[str, Any]  # what a finished stage came to, in JSON

_METRICS = {"em": "EM", "f1": "F1", "outcome": "outcome", "retrievals": "searches"}
_START_S, _STOP_S, _POLL_S = 1800.0, 30.0, 0.1  # of a server: until it answers, until it ends, between two looks


class RoundsSettings(Section):
    """How many rounds there are, when they stop, and what they are measured on."""

    rounds: int = execution(3, "maximum rounds of trees, training and evaluation", "--rounds", ge=1)
    metric: Literal["f1", "em", "outcome"] = setting("f1", "dev metric that has to rise", "--metric")
    patience: int = execution(1, "rounds without a better dev metric after which to stop", "--patience", ge=1)
    hold_to: Literal["last", "first"] = setting(
        "last", "reference model of DPO: the policy of the round before, or the one before all rounds", "--hold-to"
    )
    dev: str | None = execution(None, "dev questions, as for --dataset (default: some of those, set aside)", "--dev")
    dev_limit: int = setting(200, "maximum dev questions", "--dev-limit", ge=1)
    budget: int | None = setting(None, "maximum model calls of all trees and dev evaluations", "--budget")
    serve: str | None = execution(
        None, "command that serves a policy at the address of --policy: `vllm serve {model} --port 8000`", "--serve"
    )


class ImproveSettings(Config):
    """All settings of `improve`: of trees and evaluations, of the training runs, and of the rounds."""

    train: DPOSettings | SFTSettings = setting(DPOSettings(), "settings of dpo train, or with --train sft of sft train")
    rounds: RoundsSettings = RoundsSettings()


def improve_presets(train: str) -> dict[str, Tree]:
    """Return the presets of `build-tree`, each with that of the same name of `dpo train` or `sft train`."""
    of_training = {"dpo": DPO_PRESETS, "sft": SFT_PRESETS}[train]
    presets = {name: {**preset, "train": of_training.get(name, {})} for name, preset in PRESETS.items()}
    return presets | {"demo": presets["demo"] | {"rounds": {"dev": "demo:dev"}}}


class Improvement:
    """A policy that is improved in rounds; their stages are those of `build-tree`, `dpo train` and `eval`.

    Attributes:
        settings: all settings.
        questions: the questions of the rounds; none has the text of a dev question.
        dev: the dev questions, the same ones for every seed.
    """

    def __init__(
        self, config: Config, train: DPOSettings | SFTSettings, rounds: RoundsSettings, out: Path, *, log: Log = print
    ) -> None:
        """Open the questions, and check what needs no model.

        Args:
            config: of trees and evaluations, from `load_config`; `questions.limit` is that of a round.
            train: of DPO, or of SFT on the chosen steps; data and model are those of each round.
            rounds: when to stop, and the dev questions.
            out: the folder of the run.
            log: receives lines for people.

        Raises:
            ConfigError, DataError: questions that cannot be read, a policy that cannot be trained or served, or a
                budget that does not pay for one evaluation.
        """
        if (graded := config.outcome.name != "f1") and "metric" not in rounds.model_fields_set:
            rounds = rounds.model_copy(update={"metric": "outcome"})
        self.metrics = {name: label for name, label in _METRICS.items() if name != "outcome" or graded}
        self.config, self.train, self.rounds, self.out, self.log = config, train, rounds, out, log
        self.settings = ImproveSettings(**dict(config), train=train, rounds=rounds)
        if rounds.serve and "{model}" not in rounds.serve:
            raise ConfigError(f"--serve {rounds.serve!r} names no {{model}}, so each round would serve the same")
        is_server = config.policy.address.is_server
        self.first = (train.model if is_server else None) or acting_policy(config.policy)[0] or ""
        if not self.first or is_server != bool(rounds.serve):
            raise ConfigError(
                f"--policy {config.policy.spec} cannot act with new weights in each round; take demo or hf:MODEL, or a "
                "server with --serve, the command that starts it, and --model, the model to begin with"
            )
        if config.questions.limit is None:
            raise ConfigError("--limit is missing: how many questions a round takes, each of them once")
        everything = config.questions.model_copy(update={"limit": None})
        self._held_out = everything.model_copy(update={"dataset": rounds.dev, "split": None} if rounds.dev else {})
        opened = {q: open_questions(config.model_copy(update={"questions": q})) for q in {everything, self._held_out}}
        self.dev = sample_questions(opened[self._held_out], rounds.dev_limit)
        self.questions = without(opened[everything], self.dev)
        # The most calls of a tree and of an evaluation.
        an_attempt = config.format.max_steps + config.outcome.verdicts * TRIES
        self._tree_calls, self._dev_calls = sum(most_calls(config).values()), len(self.dev) * an_attempt
        if rounds.budget is not None and rounds.budget < self._dev_calls:
            message = f"--budget {rounds.budget} does not pay for one evaluation, {self._dev_calls} calls at most"
            raise ConfigError(message)

    def bound(self) -> str:
        """Return in words how many calls all rounds need at most."""
        rounds, wanted = self.rounds.rounds, self.config.questions.limit or 1
        asked = min(len(self.questions), rounds * wanted * len({question.dataset for question in self.questions}))
        calls = asked * self._tree_calls + (rounds + 1) * self._dev_calls
        return (
            f"{rounds} rounds with {asked} of {len(self.questions)} questions, at most {self._tree_calls} calls each\n"
            f"{rounds + 1} evaluations on {len(self.dev)} dev questions, at most {self._dev_calls} calls each\n"
            f"at most {min(calls, self.rounds.budget or calls)} model calls; early ends save most of them"
        )

    def run(self, show: Any = None, stopped_by: Callable[[], int] = lambda: 0) -> Stage:
        """Run the stages that have not finished; return the content of `improve.json`.

        Args:
            show: as of `build_trees`; it is entered around evaluations too.
            stopped_by: returns the signal after which no stage begins, or 0.

        Raises:
            Interrupted: Ctrl-C or SIGTERM; everything that has finished is kept.
            InputError, RunError: bad input, a folder that cannot be used, or too many questions that failed.
        """
        out, policy, left, rounds = self.out, self.first, self.questions, self.rounds
        content = {"questions": questions_fingerprint(left), "dev": questions_fingerprint(self.dev)}
        content |= {"policy": model_identity(policy), "prompts": open_format(self.config).fingerprint}
        retriever = open_retriever(self.config, [*left, *self.dev])
        content["corpus"] = retriever.fingerprint
        event_loop.run(retriever.aclose())
        # More than a run depends on: here its pairs are trained on, and its questions are those of one round.
        more = {"pairs": self.config.pairs.model_dump(mode="json"), "questions.limit": self.config.questions.limit}
        described = describe({"stage": type(self.train).__name__, **identity(self.settings), **more}, content)
        folder = Folder(out, "run of improve", record="identity.json")
        with folder.locked():
            folder.check_same(described, ImproveSettings())
            folder.note(identity=described)
            write_config(out, self.settings)

            def finish(stage: str, work: Callable[..., Stage], *arguments: Any) -> Stage:
                if stage not in folder.facts():
                    if number := stopped_by():
                        raise Interrupted(number=number)
                    self.log(f"{stage} ...")
                    release_memory()  # of the stage before
                    folder.note(**{stage: work(out / stage, *arguments)})
                elif stage.endswith("/policy"):
                    check_trained(out / stage)  # the next round goes on from its weights
                return dict(folder.facts()[stage])

            rows: list[Stage] = []
            calls, trees = 0, Stage(questions=0, pairs=0, calls=0)
            while True:
                this, following = f"round-{len(rows)}", f"round-{len(rows) + 1}"
                acting = self._acting(policy)
                command = None if f"{following}/trees" in folder.facts() else rounds.serve
                with serving(command, acting.policy.spec or "", policy, out / this) if command else nullcontext():
                    dev = finish(f"{this}/eval", self._evaluate, acting, show)
                    calls += trees["calls"] + dev["calls"]
                    name = f"{this}/policy" if rows else policy
                    rows.append({"round": len(rows), "policy": name, **trees, **dev, "calls": calls})
                    self.log(f"{this}: " + ", ".join(f"{_METRICS[key]} {dev[key]['mean']:.3f}" for key in self.metrics))
                    chosen, lacking = self.next_questions(left, calls)
                    if stopped := why_stop(rows, rounds) or lacking:
                        break
                    # Trees of the policy, and pairs from them; then the next policy, trained from this one.
                    trees = finish(f"{following}/trees", self._build, acting, chosen, show)
                finish(f"{following}/policy", self._train, policy)
                policy, left = str(out / following / "policy"), without(left, chosen)
        return self._write(rows, stopped)

    def next_questions(self, left: list[Question], calls: int = 0) -> tuple[list[Question], str]:
        """Return the questions of the next round, or none and why: too few are left, or the budget pays for too few.

        Args:
            left: the questions that no round has had.
            calls: the calls so far.
        """
        wanted = size = self.config.questions.limit or 1
        sets = max(1, len({question.dataset for question in left}))
        if self.rounds.budget is not None:
            size = min(size, max(0, self.rounds.budget - calls - self._dev_calls) // self._tree_calls // sets)
        chosen = sample_questions(left, size, seed=self.config.seed)
        if 2 * len(chosen) >= wanted:  # a few questions would teach no more than their answers
            return chosen, ""
        found = f"{len(left)} questions are left" if size == wanted else f"--budget pays for {size * sets} trees"
        return [], f"{found}, and a round takes {wanted}"

    # --- The stages ---

    def _acting(self, policy: str) -> Config:
        """Return the configuration with a policy that was trained here; a server has it at the same address."""
        address = self.config.policy.address
        if address.is_server or policy == self.first:
            return self.config
        spec = f"{'hf' if address.scheme == 'demo' else address.scheme}:{merged(policy)}"
        return self.config.model_copy(update={"policy": self.config.policy.model_copy(update={"spec": spec})})

    def _evaluate(self, out: Path, config: Config, show: Any) -> Stage:
        config = config.model_copy(update={"questions": self._held_out})
        metrics = Evaluation({"policy": config}, out, temperatures=(0.0,), questions=self.dev).run(show)
        self._check(out, metrics["questions"]["scored"], len(self.dev))
        return {name: metrics[name] for name in self.metrics} | {"calls": _count(metrics["calls"]["policy"])}

    def _build(self, out: Path, config: Config, chosen: list[Question], show: Any) -> Stage:
        config = as_served(config, out)
        summary = build_trees(config, out, parts=open_parts(config, questions=chosen), show=show)
        self._check(out, summary["questions"]["finished"], len(chosen))
        return {"questions": len(chosen), "pairs": summary["pairs"]["total"], "calls": _count(summary["calls"])}

    def _check(self, out: Path, finished: int, total: int) -> None:
        if total - finished > self.config.run.max_failed * total:
            raise RunError(f"{out}: {total - finished} of {total} questions failed; the same command tries them again")

    def _train(self, out: Path, policy: str) -> Stage:
        from reasonrag.dpo.train import train_dpo, train_sft  # imports TRL

        own: Stage = {"data": str(out.parent / "trees"), "model": policy}
        own["chat_template"] = self.train.chat_template or self.config.policy.chat_template
        # transformers puts an adapter on its model; a server and vLLM load whole models.
        own["merge"] = self.train.merge or self.config.policy.address.scheme not in ("hf", "demo")
        if isinstance(self.train, SFTSettings):
            train_sft(self.train.model_copy(update=own), out, log=self.log)
        else:
            if self.rounds.hold_to == "first" and policy != self.first:
                own["reference_model"] = self.first
            train_dpo(self.train.model_copy(update=own), out, log=self.log)
        return {}

    def _write(self, rows: Sequence[Stage], stopped: str) -> Stage:
        """Write the page and its picture, then `improve.json`; return its content."""
        best = rows[best_round(rows, self.rounds)]
        panels = []
        for axis in ("round", "calls"):
            for name, label in self.metrics.items():
                curve = ([row[name][bound] for row in rows] for bound in ("mean", "low", "high"))
                line = Line("", [row[axis] for row in rows], *curve)
                panels.append(Panel(f"{label} by {axis}", axis, label, (line,)))
        save_charts(self.out / "improve", panels)
        columns = ("round", "questions", "pairs", "calls")
        cells = [
            [*(row[name] for name in columns), *(interval_text(row[name]) for name in self.metrics)] for row in rows
        ]
        table = Table("", [*columns, *self.metrics.values()], cells).markdown()
        verdict = f"Greedy, on {len(self.dev)} dev questions. The best policy is {best['policy']}. Stopped: {stopped}."
        page = ["# Rounds", "", verdict, "", *table, "", "![rounds](improve.svg)", ""]
        write_text(self.out / "improve.md", "\n".join(page))
        summary = {"best": best["round"], "policy": best["policy"], "stopped": stopped, "rounds": rows}
        write_json(self.out / "improve.json", summary)
        return summary


def why_stop(rows: Sequence[Stage], rounds: RoundsSettings) -> str:
    """Return why the last of some rounds is the last one of all; "" if it is not.

    >>> why_stop([{"f1": {"mean": 0.2}}, {"f1": {"mean": 0.1}}], RoundsSettings())
    'f1 on the dev questions has not risen since round 0'
    """
    best = best_round(rows, rounds)
    if len(rows) - 1 - best >= rounds.patience:
        return f"{rounds.metric} on the dev questions has not risen since round {best}"
    return f"all {rounds.rounds} rounds are done" if len(rows) > rounds.rounds else ""


def best_round(rows: Sequence[Stage], rounds: RoundsSettings) -> int:
    """Return the number of the round with the highest dev metric, the first one of equals."""
    return max(range(len(rows)), key=lambda number: float(rows[number][rounds.metric]["mean"]))


def without(questions: Sequence[Question], others: Sequence[Question]) -> list[Question]:
    """Return the questions whose text is not that of another one."""
    texts = {common_text(question.question) for question in others}
    return [question for question in questions if common_text(question.question) not in texts]


def merged(policy: str) -> str:
    """Return the folder of an adapter's whole model if there is one, else the policy itself."""
    folder = Path(policy) / MERGED
    return str(folder) if folder.is_dir() else policy


def _keep(lines: Iterable[str], log: Path) -> None:
    """Write what a server prints to a file, without secrets."""
    with log.open("a", encoding="utf-8") as file:
        for line in lines:
            print(redact(line), end="", file=file, flush=True)


@contextmanager
def serving(command: str, spec: str, policy: str, folder: Path) -> Iterator[None]:
    """Run the command that serves a policy at the address `spec` while the block runs, in its own process group.

    Raises:
        RunError: another server answers at its address, or it ends or does not answer.
    """
    url = urlsplit(spec)
    address = (url.hostname or "", url.port or 80)
    if _answers(address):
        raise RunError(f"another server answers at {spec}; stop it, as --serve starts one there")
    try:
        words = [word.replace("{model}", merged(policy)) for word in shlex.split(command)]
    except ValueError as error:
        raise ConfigError(f"--serve {command!r} is no command of a shell: {error}") from None
    if shutil.which("setpriv"):  # on Linux: the server ends with this process, also if that is killed
        words = ["setpriv", "--pdeathsig", "TERM", *words]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, **pipes)
    threading.Thread(target=_keep, args=(server.stdout, log), daemon=True).start()
    ends_at = time.monotonic() + _START_S
    try:
        while not _answers(address):
            if server.poll() is not None or time.monotonic() > ends_at:
                raise RunError(f"`{shlex.join(words)}` does not answer at {spec}; {log} says why")
            time.sleep(_POLL_S)
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, number)
                server.wait(_STOP_S)


def _count(calls: Mapping[str, Mapping[str, int]]) -> int:
    return sum(used["calls"] for kind, used in calls.items() if kind != "search")


def _answers(address: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(address, timeout=1):
        return True
    return False
