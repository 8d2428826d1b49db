"""Its RLHFDataset, `qa_em` and `make_prefix` on 200 questions, with the sentences of its checkpoints too."""

from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import world

COMMIT = "a14dc3a"
REPOSITORY = "https://github.com/PeterGriffinJin/Search-R1"


def function(file: str, name: str):
    """Return one function of its scripts, which import more than is needed here."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names = {}
    exec(compile(ast.Module([found], []), file, "exec"), names)
    return names[name]


def main() -> dict[str, object]:
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, "Search-R1"], check=True)
    subprocess.run(["git", "-C", "Search-R1", "checkout", "--quiet", COMMIT], check=True)
    sys.path.insert(0, "Search-R1")
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.reward_score import qa_em

    scores_name = function("Search-R1/verl/trainer/main_ppo.py", "_select_rm_score_fn")
    scores_name.__globals__["qa_em"] = qa_em
    make_prefix = function("Search-R1/scripts/data_process/nq_search.py", "make_prefix")
    # The sentences of the published checkpoints: all that its script writes before the question.
    sentences = make_prefix({"question": "\0"}, "base").partition(" Question: \0")[0]
    Path("prompts/search_r1").mkdir(parents=True)
    Path("prompts/search_r1/instruction.txt").write_text(sentences, encoding="utf-8")
    run = world.run("demo:search_r1")
    for name, more in (("own", ()), ("published", ("--prompts", Path.cwd() / "prompts"))):
        world.reasonrag("export", run, "--to", "search-r1", "--out", Path.cwd() / name, *more)
    tokenizer = AutoTokenizer.from_pretrained(world.ROOT / "reasonrag" / "demo" / "stream_policy")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    opened = {}
    for name in ("own", "published"):
        files = sorted(str(path) for path in Path(name).glob("*.parquet"))
        opened[name] = RLHFDataset(files, tokenizer, prompt_key="prompt", max_prompt_length=1024, return_raw_chat=True)
    counts = Counter({"questions": len(opened["own"])})
    by_question = {}
    for number in range(len(opened["own"])):
        row = opened["own"][number]
        key = row["extra_info"]["dataset"], row["extra_info"]["question_id"]
        (message,) = row["raw_prompt"]
        by_question[key] = message["content"], row
        (published,) = opened["published"][number]["raw_prompt"]
        question = message["content"].rpartition(" Question: ")[2].removesuffix("\n")
        assert published == {"role": "user", "content": make_prefix({"question": question}, "base")}
        counts["prompts as its script writes them"] += 1
    for turn, em, key in world.answered(run):
        prompt, row = by_question[key]
        score = scores_name(row["data_source"])(prompt + turn, row["reward_model"]["ground_truth"])
        assert score == em or world.opened_twice(turn), (turn, em)
        counts["answers scored as we do" if score == em else "otherwise, an answer's tag opened twice"] += 1
        counts["of them right"] += int(em)
    return {"tool": "Search-R1", "version": COMMIT, **counts}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        figures = main()
    print(json.dumps(figures))
