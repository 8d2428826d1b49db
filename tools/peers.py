"""Run other people's tools on what we write, as they are released: `python -m tools.peers [NAME ...]`, `make peers`.

A check is two files. `tests/peers/NAME.txt` pins what is installed into `build/peers/NAME`, without dependencies unless
a line says `# with dependencies`; what is missing there is found in the environment that runs this, unless a line says
`# alone`. `tests/peers/check_NAME.py` is run there, in an empty folder. The first line of its docstring says what is
run. It asserts what has to hold, and its last line is one JSON object of figures, in which `tool` and `version`
override those of the first pin.

Figures are kept in `docs/results/peers.json`, from which `docs/results/peers.md` is written. A check that fails leaves
the figures of before and says so; the exit code is then 1.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from datetime import date
from pathlib import Path
from typing import Any

from docs.reference.markdown import cell
from reasonrag.core.table import Table
from reasonrag.storage.files import read_json, write_json, write_text
from tools.pages import head, made

ROOT = Path(__file__).parents[1]
CHECKS = ROOT / "tests" / "peers"
FIGURES = ROOT / "docs" / "results" / "peers.json"
TIMEOUT_S = 1800
_INTRODUCTION = """\
<!-- Written by `python -m tools.peers` and `python -m docs.reference` from docs/results/peers.json; do not edit. -->
# Other tools

What other tools did with our files and servers, as they are released: `make peers` installs each into an environment
of its own and runs `tests/peers/check_NAME.py` there. What has to hold is asserted in the check; the figures say on how
much it held.
"""


def environment(name: str) -> Path:
    """Return the Python of a check's environment, made anew if its pins have changed."""
    folder, pins = ROOT / "build" / "peers" / name, (CHECKS / f"{name}.txt").read_text(encoding="utf-8")
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if installed.exists() and installed.read_text(encoding="utf-8") == pins:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    if "# alone" not in pins:
        # A path file, not --system-site-packages: that would be the system's Python, not this environment.
        own = sysconfig.get_path("purelib", vars={"base": str(folder)})
        write_text(Path(own, "ours.pth"), sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "-r", f"{CHECKS / name}.txt"]
    subprocess.run([*pip, *(["--no-deps"] if "# with dependencies" not in pins else [])], check=True)
    write_text(installed, pins)
    return python


def run(name: str) -> dict[str, Any]:
    """Return the figures that a check printed, with the tool, its version and the day.

    Raises:
        subprocess.SubprocessError: its environment could not be made, or it failed or took too long.
        ValueError: its last line is no JSON object.
    """
    python, script = environment(name), CHECKS / f"check_{name}.py"
    scratch = ROOT / "build" / "peers" / f"{name}-scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(script)]
    done = subprocess.run(
        command, cwd=scratch, env=variables, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
    )
    figures = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    tool, version = re.findall(r"(?m)^([\w.-]+).*(?:==|@)([\w.]+)", (CHECKS / f"{name}.txt").read_text())[0]
    about = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    named = {"tool": figures.pop("tool", tool), "version": figures.pop("version", version)}
    at = {"date": date.today().isoformat(), "commit": head("reasonrag", "contrib", "tests/peers")}
    return {**named, "ran": about, **at, "figures": figures}


def peers_page() -> str:
    """Return the page: one line for each check that has ever run."""
    rows = []
    for name, result in sorted((read_json(FIGURES) or {}).items()):
        figures = "; ".join(f"{what} {figure}" for what, figure in result.get("figures", {}).items())
        failed = "**the last run failed**; before: " * ("failed" in result)
        tool = f"{result.get('tool', name)} {result.get('version', '')}"
        by = made(result.get("commit", ""), "peers.md")
        rows.append([f"`{name}`", tool, *(cell(text) for text in (result.get("ran", ""), failed + figures, by))])
    return (
        "\n".join(
            [_INTRODUCTION, *Table("", ["check", "tool", "what was run", "figures", "made by"], rows).markdown(str)]
        )
        + "\n"
    )


def main() -> None:
    """Run the named checks, or all; keep their figures and write the page."""
    failures = []
    for name in sys.argv[1:] or sorted(path.stem.removeprefix("check_") for path in CHECKS.glob("check_*.py")):
        print(f"{name} ...", flush=True)
        kept = read_json(FIGURES) or {}
        try:
            kept[name] = run(name)
        except (subprocess.SubprocessError, ValueError, OSError) as error:
            failures.append(name)
            kept[name] = {**kept.get(name, {}), "failed": date.today().isoformat()}
            print(f"{name}: FAILED, {error}", flush=True)
        write_json(FIGURES, dict(sorted(kept.items())))
        write_text(FIGURES.with_suffix(".md"), peers_page())
        print(json.dumps(kept[name], indent=2), flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
