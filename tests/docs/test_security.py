from __future__ import annotations

import ast
import re

from docs.reference import ROOT


def test_every_promise_names_tests_that_the_suite_runs() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        marks = [ast.unparse(mark) for test in tests for mark in test.decorator_list]
        assert tests and "pytest.mark.full" not in marks, f"{file}::{name}"
    promised, _, not_promised = text.partition("## What is not promised")
    promises = re.split(r"\n- \*\*", promised.partition("\n## ")[2])[1:]
    assert len(promises) > 12 and "test" not in not_promised
    assert all("`tests/" in promise for promise in promises), [
        promise[:60] for promise in promises if "`tests/" not in promise
    ]
