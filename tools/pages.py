"""List the commit that made each page of `docs/results/`, and what has changed since: `python -m tools.pages`.

A page names the commit of the code that made it. If one of `CHANGES` is younger and concerns the page, the same
sentence says so, so that a reader is not misled. Both stand in the page and in this file: `--check` and `--write` need
no history and work in a shallow clone. The list asks git for every later commit that touched the code of a page
(`CODE`); whoever changes numbers adds a line to `CHANGES` in the same commit, and `--write` renews the sentences.
"""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"

_ATTEMPTS = tuple(f"reasonrag/{room}" for room in ("rollout.py", "formats", "retrieval", "llm", "demo", "evaluation"))
_TRAINED = (*_ATTEMPTS, "reasonrag/training", "papers/comparison.py", "papers/comparisons.yaml")
_TREES = (*_TRAINED, "reasonrag/mcts", "reasonrag/spre", "reasonrag/dpo")
_ONLINE = (*_TRAINED, "reasonrag/online_rl", "reasonrag/rewards")
# The code that a page's numbers depend on. The first pattern that fits a page counts.
CODE = {
    "reasonrag.md": (*_TREES, *_ONLINE),
    "rounds.md": _TREES,
    "real-model.md": (*_TREES, *_ONLINE, "papers/real.py"),
    "preferences.md": (*_ATTEMPTS, "reasonrag/mcts", "reasonrag/spre", "reasonrag/dpo", "benchmarks/preferences.py"),
    "*/index.md": (*_ATTEMPTS, "papers/baselines.py", "papers/reader.py"),
    "performance.md": ("benchmarks", "reasonrag"),
    "peers.md": ("tests/peers", "reasonrag/publish", "reasonrag/agents", "contrib"),
    "faults.md": ("tests/faults", "reasonrag"),
    "*": _ONLINE,  # GRPO's pages
}
# What changed numbers of pages under unchanged commands: when, on which pages, and the change.
Changes = tuple[tuple[str, tuple[str, ...], str], ...]
CHANGES: Changes = (
    (
        "2026-11-28 22:53",
        ("reasonrag.md", "rounds.md", "real-model.md"),
        "pairs of yes and no keep the order of their trees, and DPO sees them in another one",
    ),
    (
        "2026-11-29 15:52",
        ("real-model.md", "preferences.md"),
        "BM25 takes each Chinese or Japanese character as a word, which reorders a few rankings of real passages",
    ),
)

_MADE = re.compile(
    r"commit `(?P<commit>[0-9a-f]{7,40})` of (?P<rest>\d{4}-\d\d-\d\d \d\d:\d\d(?: with changes)?)"
    r"(?:; since then [^\n]+?: numbers differ under today's code)?"
)


def head(*folders: str) -> str:
    """Return the commit that is checked out, such as `0a78ebd of 2026-11-24 02:19`; empty outside of a repository.

    `with changes` follows if the working tree differs in one of the folders.
    """
    found = _git("log", "-1", "--abbrev=8", "--format=%h of %ad", "--date=format:%Y-%m-%d %H:%M")
    return f"{found} with changes" if found and _git("status", "--porcelain", "--", *folders) else found


def made(recorded: str, page: str, changes: Changes = CHANGES) -> str:
    """Return `commit X of DATE` as a page shows what `head` recorded, and what changed its numbers since.

    >>> made("51f2e755 of 2026-11-24 09:09", "faults.md")
    'commit `51f2e755` of 2026-11-24 09:09'
    """
    if not recorded:
        return "an unknown commit"
    commit, _, rest = recorded.partition(" ")
    date = rest.removeprefix("of ").removesuffix(" with changes")
    later = [words for when, pages, words in changes if when > date and any(fnmatch(page, one) for one in pages)]
    since = f"; since then {' and '.join(later)}: numbers differ under today's code" if later else ""
    return f"commit `{commit}` {rest}{since}"


def renewed(text: str, page: str, changes: Changes = CHANGES) -> str:
    """Return the text of a page with its sentences as they are today."""
    return _MADE.sub(lambda found: made(f"{found['commit']} of {found['rest']}", page, changes), text)


def problem(text: str, page: str, changes: Changes = CHANGES) -> str:
    """Return what is wrong with a page; empty if it names its commit and what changed since."""
    if not _MADE.search(text):
        return "names no commit"
    return "" if renewed(text, page, changes) == text else "does not name what changed its numbers since; run --write"


def _later(commit: str, page: str) -> str:
    """Return how many later commits touched the code of a page, and its paths."""
    paths = dict.fromkeys(next(paths for pattern, paths in CODE.items() if fnmatch(page, pattern)))
    log = _git("log", "--format=%h %s", f"{commit}..HEAD", "--", *paths).splitlines()
    is_known = _git("cat-file", "-t", commit) == "commit"  # in a shallow clone it is not
    count = f"{len(log)} later commits, the last one `{log[0]}`," if log else "no later commit" if is_known else "?"
    return f"{count} touched {' '.join(paths)}"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="List only what is wrong; exit with 1 if there is anything.")
@click.option("--write", is_flag=True, help="Renew the sentences of all pages.")
def main(check: bool, write: bool) -> None:
    """List the pages, check them, or renew their sentences."""
    failed = False
    for path in sorted(RESULTS.rglob("*.md")):
        page, text = path.relative_to(RESULTS).as_posix(), path.read_text(encoding="utf-8")
        if write and (text := renewed(text, page)) != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
        wrong = problem(text, page)
        failed |= bool(wrong)
        if wrong:
            print(f"{page}: {wrong}")
        named = {} if check or write else {found[0]: found["commit"] for found in _MADE.finditer(text)}
        for sentence, commit in named.items():
            print(f"{page}: {sentence}\n    {_later(commit, page)}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
