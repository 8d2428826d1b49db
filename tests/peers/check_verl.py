"""RLHFDataset and `default_compute_score` on 200 exported questions: each answer scored as in our trees."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path

import world


def main() -> dict[str, object]:
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.reward_score import default_compute_score

    run = world.run("demo:search_r1")
    world.reasonrag("export", run, "--to", "verl", "--out", Path.cwd() / "verl")
    files = sorted(str(path) for path in Path("verl").glob("*.parquet"))
    tokenizer = AutoTokenizer.from_pretrained(world.ROOT / "reasonrag" / "demo" / "stream_policy")
    rows = RLHFDataset(files, tokenizer, OmegaConf.create({"max_prompt_length": 1024, "return_raw_chat": True}))
    assert len(rows) == 200
    # verl's own loader of a reward function, with the path of the file that the export wrote.
    given = {"path": "verl/reward.py", "name": "compute_score"}
    own_score = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": given}}))
    by_question = {}
    for row in (rows[number] for number in range(len(rows))):
        by_question[row["extra_info"]["dataset"], row["extra_info"]["question_id"]] = row
    counts = Counter({"questions": len(rows)})
    for turn, em, key in world.answered(run):
        row = by_question[key]
        asked = row["data_source"], turn, row["reward_model"]["ground_truth"]
        assert own_score(*asked, extra_info=row["extra_info"]) == em, (turn, em)
        counts["answers that reward.py scores as we do"] += 1
        counts["of them right"] += int(em)
        if key[0] != "hotpotqa":
            try:
                default_compute_score(*asked)
            except NotImplementedError:
                counts["answers of names that verl refuses"] += 1
        elif default_compute_score(*asked) == em:
            counts["answers that verl scores as we do"] += 1
        else:
            assert world.opened_twice(turn), (turn, em)
            counts["scored otherwise, all with an answer's tag opened twice"] += 1
    assert counts["answers of names that verl refuses"]
    return dict(counts)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        figures = main()
    print(json.dumps(figures))
