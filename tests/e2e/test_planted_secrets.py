"""Sixteen secrets where they turn up in real life; none of their bytes may be on disk or on a stream afterwards."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import math
import os
import signal
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, quote_plus

import pyarrow.parquet as pq
import pytest
import zstandard
from aiohttp import web
from click import Group
from websockets.sync.client import connect

import reasonrag
from docs.reference.commands import commands as every_command
from reasonrag.cli import cli
from tests import warmed
from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World, pages, write_jsonl
from tests.fakes.model_server import FakeOpenAI
from tests.faults.matrix import Figure, Rounds
from tests.faults.servers import ask, post
from tests.llm.tiny import save_tiny_model
from tests.papers.test_run_real import TINY, write_data

MIXED = "c4nAryB7kQ2mZ9xW5tR8vJ3pL6sD1fG0hN"  # 34 characters, as generators mix them


def mixed(number: int) -> str:
    """Another one for each canary."""
    return MIXED[number:] + MIXED[:number]


# Without a shape of their own: only the environment tells that they are secrets.
ENVIRONMENT = {
    "OPENAI_API_KEY": f"our.gateway.{mixed(1)}",
    "HF_TOKEN": f"mirror:{mixed(2)}",
    "WANDB_API_KEY": f"local/{mixed(3)}",
}
CANARIES = {
    **ENVIRONMENT,
    "password of --policy": mixed(4),
    "token in the configuration": f"hf_{mixed(5)}",
    "echoed header": f"Bearer {ENVIRONMENT['OPENAI_API_KEY']}",
    "foreign token in an error": f"ghp_{mixed(7)}AB",
    "key in a query": f"sk-proj-{mixed(8)}{mixed(9)}",
    "echoed key": ENVIRONMENT["OPENAI_API_KEY"][4:],
    "private key in a passage": f"MIIE{mixed(10)}",
    "token of a judge": f"eyJ{mixed(11)}.eyJ{mixed(12)}.{mixed(13)}",
    "password of an index": mixed(14),
    "AWS key in a passage": f"AKIA{mixed(16)[:8].upper()}QWERTZUI",
    "Anthropic key in a question": f"sk-ant-api03-{mixed(17)}-{mixed(18)}AA",
    "key in the query of a URL": mixed(19),
    "HF token of a kind": f"hf_{mixed(22)}",
    "GitHub token in a golden answer": f"github_pat_{mixed(20)[:22]}_{mixed(21)}",
}
PEM = f"-----BEGIN PRIVATE KEY-----\n{CANARIES['private key in a passage']}\n{mixed(15)}\n-----END PRIVATE KEY-----"
NAMES = ("AWS key in a passage", "foreign token in an error", "Anthropic key in a question", "HF_TOKEN")
KEYS = " ".join(CANARIES[name] for name in NAMES)
SAID = f"{PEM} https://host/v1?api_key={CANARIES['key in the query of a URL']} {KEYS}"
QUESTIONS = (
    ("Who was the captain of Orlandis?", "Benna Ruvik"),
    ("In which town was the captain of Orlandis born?", "Harnmouth"),
    ("When was Quillfane launched?", "1888"),  # refused, with the header
    ("When was Maravand launched?", "1902"),  # breaks the server
)


class LeakyPolicy(ExtractiveServer):
    """Writes keys into its queries and evidence, and shows others in its errors.

    Attributes:
        patience: requests that it answers; it leaves further ones waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patience = math.inf
        honest = self._reply

        def leaky(request: product.Row) -> str:
            written = honest(request)
            written = written.replace("<query>", f"<query>{CANARIES['key in a query']} ")
            told = " and ".join(ENVIRONMENT.values())
            return written.replace("<evidence>", f"<evidence>My keys are {told}. ")

        self._reply = leaky

    async def good(self, request: web.Request, body: product.Row) -> web.StreamResponse:
        if len(self.requests) > self.patience:
            await asyncio.Event().wait()
        asked = json.dumps(body["messages"])
        if "When was Quillfane" in asked:
            message = f"not for {request.headers['Authorization']}: {dict(request.headers)}"
            return web.json_response({"error": {"message": message}}, status=401)
        if "When was Maravand" in asked:
            message = (
                f"cannot pull with {CANARIES['foreign token in an error']}&k={quote(ENVIRONMENT['WANDB_API_KEY'])}"
            )
            return web.json_response({"detail": message}, status=500)
        return await super().good(request, body)


def verdict(request: product.Row) -> str:
    return f"Signed {CANARIES['token of a judge']}. So the score is 0.5"


class LostIndex(ExtractiveServer):
    """A retrieval server whose index is behind a password, which it tells everybody but the first to ask."""

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/retrieve", self._retrieve)

    async def _retrieve(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        if len(self.requests) == 1:
            return web.json_response({"result": [[]]})
        return web.Response(status=400, text=f"no es://me:{CANARIES['password of an index']}@index:9200/")


@dataclass
class Traces:
    """All that runs have left: the folder below which they wrote, and what they said."""

    folder: Path
    said: list[str] = field(default_factory=list)

    def run(self, *args: str | Path, code: int = 0, **env: str) -> str:
        """Run a command to its end; returns what it said on stderr."""
        done = product.run(*args, **ENVIRONMENT, **env)
        self.heard(done.stdout, done.stderr)
        assert done.returncode == code, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stderr

    def serve(self, *args: str | Path) -> None:
        """Start a server, ask it with keys in path, headers and body, and end it."""
        child = product.start(*args, **ENVIRONMENT)
        assert isinstance(child, warmed.Child)
        product.wait_until(lambda: "listening" in child.printed() or child.poll() is not None)
        port = int(child.printed().split()[2].rpartition(":")[2])
        asked: product.Row = {"queries": [SAID], "model": "planner", "messages": [{"role": "user", "content": SAID}]}
        for path in (b"/retrieve", b"/v1/chat/completions?key=" + KEYS.split()[0].encode()):
            self.heard(str(ask(port, post(path, json.dumps(asked).encode(), f"Authorization: Bearer {KEYS}".encode()))))
        if args[0] == "env":
            with connect(f"ws://127.0.0.1:{port}/ws") as client:
                client.send(json.dumps({"type": "reset", "data": {"question": SAID, "golden_answers": [SAID]}}))
                client.recv(timeout=60)
                client.send(json.dumps({"type": "step", "data": {"text": f"<search>{SAID}</search>"}}))
                client.recv(timeout=60)
        child.send_signal(signal.SIGTERM)
        self.heard(*child.communicate(timeout=60))
        assert child.returncode == 143

    def heard(self, *streams: str) -> None:
        self.said += streams

    def check(self) -> None:
        """No canary, in any form."""
        assert not self.found()

    def found(self) -> set[tuple[str, str]]:
        """Names of canaries, with the places that hold them."""
        texts = [*(("a stream", said.encode()) for said in self.said), *self.files()]
        return {(name, place) for place, text in texts for name, form in forms() if form in text}

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Every file as it lies there, and databases and tables as they read."""
        for file in self.folder.rglob("*"):
            if file.is_file():
                yield str(file), file.read_bytes()
                if file.suffix == ".sqlite":
                    yield f"{file}, read", "\n".join(rows_of(file)).encode()
                if file.suffix == ".gz":
                    yield f"{file}, unpacked", gzip.decompress(file.read_bytes())
                if file.suffix == ".parquet":
                    yield f"{file}, read", str(pq.read_table(file).to_pylist()).encode()


def rows_of(journal: Path) -> Iterator[str]:
    """Every value of every table."""
    database = sqlite3.connect(f"file:{journal}?mode=ro", uri=True)
    for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        for row in database.execute(f"SELECT * FROM {table}"):
            for value in row:
                is_tree = isinstance(value, bytes) and value.startswith(zstandard.FRAME_HEADER)
                yield zstandard.decompress(value).decode("utf-8", "replace") if is_tree else str(value)
    database.close()


def forms() -> Iterator[tuple[str, bytes]]:
    """Every canary as it is, for a URL, and in base64 at each of the three places that it can begin at."""
    for name, canary in CANARIES.items():
        yield name, canary.encode()
        yield name, quote(canary, safe="").encode()
        yield name, quote_plus(canary).encode()
        for shift in range(3):
            encoded = base64.b64encode(b"\0" * shift + canary.encode())
            yield name, encoded[4:-4]


@pytest.fixture(scope="module")
def sea(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The world with a private key on the first page, and four questions."""
    folder = tmp_path_factory.mktemp("sea")
    rows = pages()
    rows[0]["contents"] += f" Its log says {PEM} and {CANARIES['AWS key in a passage']}."
    asked = [{"id": f"q{n}", "question": q, "golden_answers": [a]} for n, (q, a) in enumerate(QUESTIONS)]
    asked[1]["question"] += f" My key is {CANARIES['Anthropic key in a question']}."
    asked[0]["golden_answers"].append(CANARIES["GitHub token in a golden answer"])
    url = f"https://host/v1?api_key={CANARIES['key in the query of a URL']}"
    asked[0]["metadata"] = {"see": url, "gold_ids": ["p0"], "kind": f"of {CANARIES['HF token of a kind']}"}
    return World(write_jsonl(folder / "sea.jsonl", asked), write_jsonl(folder / "corpus.jsonl", rows), folder / "cache")


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    (tmp_path / "out").mkdir()
    return Traces(tmp_path / "out")


def killed(traces: Traces, server: LeakyPolicy, *args: str | Path) -> None:
    """Start a command and kill it in the middle."""
    server.patience = 6
    child = product.start(*args, **ENVIRONMENT)
    product.wait_until(lambda: len(server.requests) > server.patience or child.poll() is not None)
    child.kill()
    traces.heard(*child.communicate(timeout=60))
    assert child.returncode == -9, "it ended before it was killed"
    server.patience = math.inf


@pytest.mark.fault(
    "35",
    "a model, a judge and errors that write and show keys; killed, resumed, evaluated, reported",
    "none of their bytes in any file or stream",
)
def test_no_secret_is_left_in_a_run_or_said(sea: World, traces: Traces, figure: Figure) -> None:
    out = traces.folder
    with LeakyPolicy() as policy, FakeOpenAI(verdict, models=("judge",)) as judge:
        judged = ("--judge", judge.base_url, "--judge-model", "judge")
        small = ("--max-failed", "0.9", "--set", "policy.timeout_s=2", "--set", "judge.timeout_s=2")
        searched = ("build-tree", *sea.flags, *policy.flags, "--value", "judge", *judged, "--iterations", "4", *small)
        killed(traces, policy, *searched, "--out", out / "run")
        traces.check()
        told = traces.run(*searched, "--out", out / "run")
        traces.run(*searched, "--out", out / "whole")
        evaluated = ("--policy", f"leaky={policy.base_url}#extractor", *judged, "--judged", "lasj")
        traces.run("eval", *sea.flags, *evaluated, *small, "--out", out / "eval")
        traces.run("report", out / "run")
    figure(f"{len(traces.found())} of {len(CANARIES)} planted secrets in {sum(1 for _ in traces.files())} files")
    traces.check()
    assert product.tree_rows(out / "run") == product.tree_rows(out / "whole")
    _went_through(out, told)


def _went_through(out: Path, told: str) -> None:
    """The planted texts were met on every way, or the test would show nothing."""
    assert told.count("***") >= 2, "the warnings about the two questions that failed"
    rows = product.tree_rows(out / "run")
    assert any("<query>*** " in row["text"] for row in rows)
    assert any("<evidence>My keys are *** and *** and ***. " in row["text"] for row in rows)
    assert any("Its log says *** and ***." in passage["contents"] for row in rows for passage in row["passages"])
    kept = "\n".join(rows_of(out / "run" / "journal.sqlite"))
    assert "Signed ***. So the score is" in kept
    assert "not for Bearer ***" in kept and "cannot pull with ***&k=***" in kept
    (journal,) = (out / "eval").rglob("journal.sqlite")
    assert all(mark in "\n".join(rows_of(journal)) for mark in ("<query>*** ", "My keys are ***", "Signed ***"))
    shown = "".join(page.read_text(encoding="utf-8") for page in out.rglob("*.html"))
    assert "My keys are ***" in shown and "Its log says ***" in shown


def test_what_a_retrieval_server_says_is_kept_without_the_password(sea: World, traces: Traces) -> None:
    with LostIndex() as index:
        told = traces.run(
            *("build-tree", "--dataset", sea.questions, "--retriever-url", index.base_url.removesuffix("/v1")),
            *("--policy", "extractive", "--iterations", "2", "--out", traces.folder / "run"),
            code=1,
        )
    traces.check()
    assert "es://me:***@index" in told
    assert "es://me:***@index" in "\n".join(rows_of(traces.folder / "run" / "journal.sqlite"))


def test_an_exception_of_a_plug_in_at_the_end_is_shown_without_secrets(sea: World, traces: Traces) -> None:
    plugin = traces.folder.parent / "plugged"
    plugin.mkdir()
    canary = CANARIES["token in the configuration"]
    (plugin / "leaky_policy.py").write_text(
        "class Policy:\n"
        "    name, complete = 'leaky', None\n"
        "    def __init__(self, config): pass\n"
        f"    async def aclose(self): raise KeyError('no entry for ' + {canary!r})\n"
    )
    path = os.pathsep.join([str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = traces.run(
        *("build-tree", *sea.flags, "--policy", "python:leaky_policy:Policy", "--out", traces.folder / "run"),
        code=1,
        PYTHONPATH=path,
    )
    traces.check()
    assert "Traceback" not in told and "a part could not be closed" in told and "no entry for ***" in told


@pytest.mark.fault("35", "a key as --policy, in --config, as --set", "refused, and not repeated")
@pytest.mark.parametrize("where", ["--policy", "configuration", "--set"])
def test_a_secret_among_settings_is_refused_and_not_repeated(
    where: str, sea: World, traces: Traces, figure: Figure
) -> None:
    settings = traces.folder.parent / "settings.yaml"
    settings.write_text(f"policy: {{spec: extractive, model: {CANARIES['token in the configuration']}}}\n")
    given = {
        "--policy": ("--policy", f"https://me:{CANARIES['password of --policy']}@host/v1"),
        "configuration": ("--config", settings),
        "--set": ("--set", f"policy.api_key={CANARIES['HF_TOKEN']}"),
    }[where]
    told = traces.run("build-tree", *sea.flags, *given, "--out", traces.folder / "run", code=2)
    figure(f"{where}: refused, {len(traces.found())} planted secrets shown")
    traces.check()
    assert told.startswith("error: configuration: policy.") and told.count("\n") == 1
    assert "variable" in told and "Traceback" not in told
    assert not (traces.folder / "run").exists()


def preferences(folder: Path) -> dict[str, Path]:
    """Files of other tools with a canary in each of their texts."""
    texts = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    pairs = [
        {side: [{"role": role, "content": f"{side} {n} {CANARIES['HF_TOKEN']}"}] for side, role in texts.items()}
        for n in range(8)
    ]
    files = {"pairs": write_jsonl(folder / "pairs.jsonl", pairs), "real": write_data(folder / "real")}
    for file in (folder / "real" / "questions").iterdir():
        file.write_text(file.read_text(encoding="utf-8").replace('?"', f'? {KEYS}"'), encoding="utf-8")
    return files


# One variant of each paper's comparison.
PAPERS = {"hiprag": "lp-0", "reasonrag": "sft-1", "search-p1": "outcome", "when-to-search": "full"}
SMALL = ("--seeds", "1", "--limit", "1", "--max-steps", "1", "--test-limit", "1")
SHORT = [
    "--set=rollout.minibatches=1",
    "--set=rollout.group_size=2",
    "--set=rollout.questions_per_step=2",
    "--batch-size=2",
]
VALUES = ("--test-share", "0.4", "--set", "tokens=[a,b]")
PLAN = "<correct_reasoning_path>1. look</correct_reasoning_path><optimized_planner>Look.</optimized_planner>"


@pytest.mark.fault(
    "35",
    "secrets in questions, passages, URLs, requests, files of other tools and the environment, and every command",
    "none of their bytes in any file or stream",
)
def test_no_command_writes_a_secret(sea: World, traces: Traces, tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    asked, demo = FakeOpenAI(lambda request: PLAN, models=("planner",)), Path(reasonrag.__file__).parent / "demo/policy"
    out, run, given = traces.folder, traces.folder / "run", preferences(tmp_path)
    model = save_tiny_model(tmp_path / "tiny", context=4096)
    tiny = ("--model", model, "--set", "max_steps=1", "--min-questions", "1")
    few = (*tiny, "--min-examples", "1")
    index = tmp_path / "index"  # it holds its corpus as it is (SECURITY.md)
    planned = ("--policy", "extractive", "--judge", asked.base_url, "--judge-model", "planner")
    commands: list[tuple[str | Path, ...]] = [
        ("build-tree", *sea.flags, "--policy", "extractive", "--iterations", "4", "--out", run),
        ("export", run, "--to", "search-r1", "--out", out / "search-r1"),
        ("publish", run, "--repo-id", "me/x", "--dry-run", "--allow", "path"),
        ("pairs", run, "--min-margin", "0.05", "--out", out / "pairs"),
        ("report", run, "--out", out / "page"),
        ("export", run, "--to", "trl", "--tokenizer", model, "--out", out / "to-trl"),
        *(("export", run, "--to", to, "--out", out / to) for to in ("llamafactory", "verl", "jsonl")),
        ("dpo", "train", "--data", given["pairs"], *few, "--out", out / "dpo"),
        ("sft", "train", "--data", given["pairs"], *few, "--out", out / "sft"),
        ("report", out / "dpo"),
        ("show", run, "q0"),
        ("show", run),
        ("verify", run),
        ("eval", *sea.flags, "--policy", "extractive", "--out", out / "eval"),
        ("prm", "train", "--data", run, *few, *VALUES, "--out", out / "prm-policy"),
        ("improve", "--preset", "demo", "--rounds", "1", "--limit", "4", "--dev-limit", "2", "--out", out / "rounds"),
        ("rl", "plan", *sea.flags, *planned, "--out", out / "plans.parquet"),
        ("rl", "train", *sea.flags, "--preset", "search-r1", *tiny, *SHORT, "--out", out / "rl"),
        ("index", "build", "--corpus", sea.corpus, "--kind", "bm25", "--out", index),
        ("verify", index),
        ("index", "recall", index, "--dataset", sea.questions),
        ("export", "demo", "--to", "flashrag", "--out", out / "world"),
        ("verify",),
        *(("papers", paper, *SMALL, "--only", only, "--out", out / paper) for paper, only in PAPERS.items()),
        (
            "papers",
            "real",
            *TINY,
            "--only",
            "sft-reader",
            "--data",
            given["real"],
            "--model",
            demo,
            "--out",
            out / "real",
        ),
        ("index", "serve", index, "--port", "0"),
        ("env", "serve", *sea.flags, "--preset", "search-r1", "--model", model, "--port", "0"),
    ]
    begun = [tuple(map(str, args)) for args in commands]
    known = {path[1:] for path, command in every_command(cli, ("reasonrag",)) if not isinstance(command, Group)}
    assert {path for path in known if all(path != args[: len(path)] for args in begun)} == set()
    with asked:
        for args in commands[: rounds(4, len(commands))]:
            (traces.serve if "serve" in args[:2] else traces.run)(*args)
    found = traces.found()
    size = sum(len(text) for _, text in traces.files())
    figure(
        f"{len({name for name, _ in found})} of {len(CANARIES)} planted secrets found after {len(commands)} commands, "
        f"in {sum(1 for _ in traces.files())} files of {size / 1e6:.1f} MB"
    )
    assert not found


def test_forms_of_a_canary_are_found_where_they_are(tmp_path: Path) -> None:
    """The search of these tests itself: it finds a canary in each place that it looks at."""
    canary = CANARIES["HF_TOKEN"]
    (tmp_path / "a").write_bytes(base64.b64encode(f"xy{canary}z".encode()))
    with pytest.raises(AssertionError, match="HF_TOKEN"):
        Traces(tmp_path).check()
    with pytest.raises(AssertionError, match="HF_TOKEN"):
        Traces(tmp_path / "nowhere", [f"?t={quote(canary)}"]).check()
