"""Its search environment on the rows of 200 questions, which asks our retrieval server, and its score of answers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import world


def main() -> dict[str, object]:
    import pyarrow.parquet
    from skyrl_gym.envs.search.env import SearchEnv, SearchEnvConfig
    from skyrl_gym.envs.search.utils import compute_score

    run = world.run("demo:search_r1")
    world.reasonrag("export", run, "--to", "verl", "--out", Path.cwd() / "rows")
    rows = [
        row for path in sorted(Path("rows").glob("*.parquet")) for row in pyarrow.parquet.read_table(path).to_pylist()
    ]
    world.reasonrag(
        "index", "build", "--corpus", world.FOLDER / "files" / "corpus.jsonl", "--out", Path.cwd() / "index"
    )
    counts = Counter({"questions": len(rows)})
    by_question = {(row["extra_info"]["dataset"], row["extra_info"]["question_id"]): row for row in rows}
    with world.serving("index", "serve", str(Path.cwd() / "index"), "--port", "0") as address:
        config = SearchEnvConfig(search_url=f"{address}/retrieve")
        for row in rows:
            assert row["env_class"] == "search"
            environment = SearchEnv(config, row)
            (found,) = environment.step(f"<search>{row['extra_info']['question']}</search>")["observations"]
            assert found["content"].startswith("\n<information>") and "Doc 3: " in found["content"], found
            answer = row["reward_spec"]["ground_truth"]["target"][0]
            counts["searched, and a golden answer rewarded"] += (
                environment.step(f"<answer>{answer}</answer>")["reward"] == 1
            )
    for turn, em, key in world.answered(run):
        score = compute_score(turn, by_question[key]["reward_spec"]["ground_truth"])
        assert score == em or world.opened_twice(turn), (turn, em)
        counts["answers scored as we do" if score == em else "otherwise, an answer's tag opened twice"] += 1
        counts["of them right"] += int(em)
    return {"tool": "SkyRL-gym", "version": version("skyrl-gym"), **counts}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        figures = main()
    print(json.dumps(figures))
