"""`llamafactory-cli train`, stage dpo, on `export --to llamafactory`: 3 steps on a CPU, held-out pairs scored."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import world

CONFIG = """
model_name_or_path: {model}
template: default
stage: dpo
do_train: true
finetuning_type: full
dataset_dir: data
dataset: reasonrag_train
eval_dataset: reasonrag_test
output_dir: out
max_steps: 3
per_device_train_batch_size: 2
eval_strategy: "no"
do_eval: true
cutoff_len: 1024
learning_rate: 1.0e-4
report_to: none
use_cpu: true
save_strategy: "no"
overwrite_cache: true
"""


def main() -> dict[str, object]:
    run = world.run("demo", limit=50)
    world.reasonrag("export", run, "--to", "llamafactory", "--out", Path.cwd() / "data")
    with Path("data/train.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert {"question_id", "margin"} <= rows[0].keys()
    model = world.ROOT / "reasonrag" / "demo" / "policy"
    Path("train.yaml").write_text(CONFIG.format(model=model), encoding="utf-8")
    Path("torchaudio.py").touch()  # imported for audio, which nobody trains on here; its wheels are for CUDA
    cli = [sys.executable, "-c", "from llamafactory.cli import main; main()", "train", "train.yaml"]
    variables = {**os.environ, "USE_MODELSCOPE_HUB": "0", "DISABLE_VERSION_CHECK": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(cli, env=variables, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    print(said[-6000:])
    assert done.returncode == 0
    assert rows[0]["system"] in said  # of the example that it prints
    trained = json.loads(Path("out/train_results.json").read_text())
    state = json.loads(Path("out/trainer_state.json").read_text())
    scored = json.loads(Path("out/eval_results.json").read_text())
    return {
        "training pairs": len(rows),
        "steps": state["global_step"],
        "loss": round(trained["train_loss"], 3),
        "held-out loss": round(scored["eval_loss"], 3),
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        figures = main()
    print(json.dumps(figures))
