"""What comes with the program and what it is handed: code, pickles, streams."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.retrieval.index import IndexFolder
from reasonrag.training.run import last_checkpoint, mark_complete
from tests.e2e import product
from tests.e2e.world import World
from tests.faults.matrix import Figure, Rounds
from tests.llm.tiny import loaded, save_tiny_model
from tests.training.toys import dpo_settings, train, write_pairs

PACKAGE = Path(__file__).parents[2] / "reasonrag"

# --- Code ---

# What ruff has no rule for. Its rules S (security) and TID251 (banned modules) are chosen in pyproject.toml.
_UNSAFE = re.compile(
    r"(trust_remote_code|allow_pickle)=True|(verify|ssl|weights_only)=False|torch\.load\((?!.*weights_only)"
    # An address without encryption, but names of XML vocabularies and stand-ins for a host in help texts.
    r"|http://(?!www\.w3\.org/|graphml\.graphdrawing\.org/|HOST|host\b|127\.0\.0\.1|10\.0\.0\.1|evil\)|\W|$)"
)
_IMPORTS_A_NAME = re.compile(r"import_module\((?!\")")
_PLANTED = {  # unsafe code, and the rule of ruff that finds it; "" for ours
    "import pickle": "TID251",
    "from shelve import open": "TID251",
    "import yaml": "TID251",
    "from jinja2 import Template": "TID251",
    "eval(text)": "S307",
    "exec(text)": "S102",
    "import os\nos.system(text)": "S605",
    "import subprocess\nsubprocess.run(text, shell=True)": "S602",
    "import tarfile\ntarfile.open(file).extractall(folder)": "S202",
    "from tempfile import mktemp\nmktemp()": "S306",
    "import requests\nrequests.get(url)": "S113",
    "host = '0.0.0.0'": "S104",
    "torch.load(file)": "",
    "torch.load(file, weights_only=False)": "",
    "AutoModel.from_pretrained('x', trust_remote_code=True)": "",
    "numpy.load(file, allow_pickle=True)": "",
    "url = 'http://example.org/model'": "",
}


@pytest.mark.fault("37", "unsafe calls: rules over the package", "0 hits, and each planted one is found")
def test_no_module_can_run_what_it_reads(figure: Figure) -> None:
    ruff = (sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "--stdin-filename")
    files = sorted(PACKAGE.rglob("*.py"))
    texts = {file.relative_to(PACKAGE).as_posix(): file.read_text("utf-8") for file in files}
    found = [name for name, text in texts.items() if _UNSAFE.search(text)]
    importers = {name for name, text in texts.items() if _IMPORTS_A_NAME.search(text)}
    caught = 0
    for source, rule in _PLANTED.items():
        command = (*ruff, str(PACKAGE / "planted.py"), "-")
        checked = subprocess.run(command, input=source, capture_output=True, text=True)
        caught += rule in checked.stdout if rule else bool(_UNSAFE.search(source))
    figure(f"{len(found)} hits in {len(files)} modules; {caught} of {len(_PLANTED)} planted ones found")
    assert not found
    assert importers <= {"cli.py", "__init__.py", "core/plugins.py"}  # all others import what is written there
    assert caught == len(_PLANTED)


# --- Pickles in the place of what we wrote ---


class Poison:
    """Unpickled, it makes a file."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._made),)


@pytest.mark.fault(
    "37", "a poisoned pickle as cache, index, document store, weights, optimizer state", "nothing of it is executed"
)
@pytest.mark.usefixtures("undrawn")
def test_a_poisoned_pickle_is_never_executed(world: World, tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    made = tmp_path / "executed"
    poison = pickle.dumps(Poison(made))
    array = tmp_path / "poison.npy"
    np.save(array, np.array([Poison(made)], dtype=object), allow_pickle=True)
    policy = save_tiny_model(tmp_path / "policy")
    settings = dpo_settings(write_pairs(tmp_path / "pairs", 8, 2), policy, max_steps=2, save_steps=1)
    trained, planted, refused = tmp_path / "dpo", 0, 0

    def attempt(file: Path, use: Callable[[], object]) -> None:
        nonlocal planted, refused
        whole = file.read_bytes() if file.exists() else None
        file.write_bytes(array.read_bytes() if file.suffix == ".npy" else poison)
        planted += 1
        try:
            use()
        except Exception:
            refused += 1
        assert not made.exists(), f"{file.name} was executed"
        file.write_bytes(whole) if whole is not None else file.unlink()

    def resume() -> None:
        mark_complete(checkpoint, seconds=1.0)
        train(settings, trained, log=lambda line: None)

    train(settings, trained, log=lambda line: None)
    (trained / "training.json").unlink()
    checkpoint = last_checkpoint(trained)
    assert checkpoint is not None
    states = sorted(file for file in checkpoint.iterdir() if file.suffix in (".pt", ".pth", ".bin"))
    assert {"optimizer.pt", "rng_state.pth", "scheduler.pt"} <= {file.name for file in states}
    for file in states[: rounds(1, len(states))]:
        attempt(file, resume)
        (trained / "training.json").unlink(missing_ok=True)
    weights = policy / "model.safetensors"
    attempt(weights, lambda: loaded(policy))
    weights.rename(tmp_path / "kept")
    attempt(policy / "pytorch_model.bin", lambda: loaded(policy))

    index = tmp_path / "index"
    product.run("index", "build", "--corpus", world.corpus, "--kind", "bm25", "--out", index)
    for file in sorted(file for file in index.rglob("*") if file.is_file()):
        attempt(file, lambda: BM25Retriever(IndexFolder(index)))
    figure(f"0 of {planted} executed; {refused} refused with an error, the others were not read")
    assert planted > 8


@pytest.mark.fault("37", "a model with code of its own", "run only with --trust-remote-code, and that is said")
def test_code_of_a_model_runs_only_on_request(
    tmp_path: Path, figure: Figure, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, made = save_tiny_model(tmp_path / "policy"), tmp_path / "executed"
    (policy / "own.py").write_text(f"import os\nos.mkdir({str(made)!r})\n", encoding="utf-8")
    described = json.loads((policy / "tokenizer_config.json").read_bytes())
    described |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (policy / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    ran = []
    for trust in (False, True):
        with pytest.raises((ConfigError, AttributeError)):  # it holds no tokenizer, but its first line has run
            ChatTemplate.load(str(policy), trust_remote_code=trust)
        ran.append((made.exists(), "Python code that comes with a model is run" in capsys.readouterr().out))
    run_without, run_with = ("run" if executed else "not run" for executed, _ in ran)
    figure(f"{run_without} without the flag; {run_with} with it, which is {'' if ran[1][1] else 'not '}said")
    assert ran == [(False, False), (True, True)]


# --- Streams ---

_STREAMS = {
    "stdout closed": ">&-",
    "all streams closed": "<&- >&- 2>&-",
    "a reader that went away": "| true",
    "both read by one that went away": "2>&1 | true",
    "a full disk under the log": "2>/dev/full",
}


def _shell(command: str, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `reasonrag` with a redirection of the shell; the exit code is that of `reasonrag`."""
    script = f'set -o pipefail; "$@" {command}'
    program = ["bash", "-c", script, "bash", sys.executable, "-m", "reasonrag", *map(str, args)]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, env=product.environment(**env))


@pytest.mark.fault(
    "A13",
    "stdout closed, or its reader gone",
    "the work is done, exit code 0, no traceback",
    before="traceback, code 120",
)
def test_streams_that_nobody_reads(finished_run: Path, tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    commands: list[tuple[str | Path, ...]] = [("--help",), ("show", finished_run), ("show", finished_run, "--json")]
    commands += [("verify",), ("export", "demo", "--to", "flashrag", "--out", tmp_path / "world")]
    seen = {}
    for args in commands[: rounds(1, len(commands))]:
        for name, command in _STREAMS.items():
            done = _shell(command, *args)
            seen[args, name] = (done.returncode, "Traceback" in done.stderr or "Exception ignored" in done.stderr)
    full = _shell(">/dev/full", "--help")
    figure(
        f"{sum(end == (0, False) for end in seen.values())} of {len(seen)} ended with 0; a full disk under stdout: 2"
    )
    assert set(seen.values()) == {(0, False)}, seen
    assert (full.returncode, full.stderr.count("\n")) == (2, 1) and full.stderr.startswith("error: ")


@pytest.mark.fault(
    "A13", "a locale of ASCII alone", "every text is shown, what has no letter there escaped", before="traceback"
)
@pytest.mark.fault(
    "40", "LC_ALL=C without Python's way round it, no TTY, NO_COLOR, TERM=dumb", "the same output but for escapes"
)
def test_a_terminal_of_ascii(finished_run: Path, figure: Figure) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1", "TERM": "dumb"}
    question = next(iter(product.tree_rows(finished_run)))["question_id"]
    args = ("show", finished_run, question)
    done = _shell("", *args, **ascii_only)
    escapes = len(re.findall(r"\\u[0-9a-f]{4}", done.stdout))
    figure(f"{len(done.stdout):,} characters of output, equal but for {escapes} that are escaped")
    assert (done.returncode, done.stderr) == (0, "")
    assert escapes and done.stdout.isascii()


@pytest.mark.fault("39", "a tag of an action that CI uses is moved", "CI runs the commit that was named")
def test_actions_are_pinned_by_commit(figure: Figure) -> None:
    workflows = [*(PACKAGE.parent / ".github" / "workflows").glob("*.yml")]
    used = re.findall(r"uses: *(.*)", "\n".join(path.read_text() for path in workflows))
    pinned = [action for action in used if re.fullmatch(r"[\w/-]+@[0-9a-f]{40} +# v[\d.]+", action)]
    figure(f"{len(pinned)} of {len(used)} pinned in {len(workflows)} workflows")
    assert pinned == used and len(workflows) == 2
