"""A run and a trained policy that are quick to make, of real files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reasonrag.dpo.pairs import derive_pairs
from reasonrag.spre.estimate import means_below
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import pair_schema
from tests.report import hostile

Row = dict[str, Any]
PLAIN = "a quiet word"


def write_run(
    folder: Path, *, datasets: Sequence[str] = ("demo",), text: str = PLAIN, level: str = "step", nodes: int = 7
) -> Path:
    """A finished run of a tree for each data set; of steps, the last one's pairs are held out."""
    trees = [hostile.rows(nodes, question_id=f"q{n}", dataset=name, text=text) for n, name in enumerate(datasets)]
    trees[0][-1]["f1"] = 0.0
    for tree in trees:
        parents = [None if row["parent_id"] < 0 else row["parent_id"] for row in tree]
        ends = [None if row["f1"] is None else row["f1"] * 0.9 ** row["depth"] for row in tree]
        for row, spre in zip(tree, means_below(parents, ends), strict=True):
            row["spre"] = spre
    hostile.write_run(folder, trees, text=text, level=level)  # type: ignore[arg-type]
    config = folder / "config.yaml"
    asked = ",".join(datasets)  # as if each was read by its name, unless it is a path
    config.write_text(config.read_text(encoding="utf-8").replace(text, asked), encoding="utf-8")
    if level == "step":
        pairs = [list(derive_pairs(tree, policy="p", config_hash="0")) for tree in trees]
        train = [pair for found in pairs[:-1] for pair in found]
        held_out = pairs[-1][-1:] if train else [pairs[-1][-1] | {"question_id": "held out"}]
        for split, rows in (("train", train or pairs[-1][:-1]), ("test", held_out)):
            write_parquet(folder / "pairs" / f"{split}-00000-of-00001.parquet", rows, pair_schema())
    return recount(folder)


def recount(run: Path) -> Path:
    """Make `run.json` say how many rows there are, and nothing that attacks."""
    import pyarrow.parquet as pq

    def count(files: str) -> int:
        return sum(pq.read_metadata(path).num_rows for path in (run / "pairs").glob(files))

    counts = {"total": count("*.parquet"), "train": count("train-*"), "test": count("test-*")}
    edit_json(run / "run.json", lambda summary: summary.update(config_hash="0", pairs=summary["pairs"] | counts))
    return run


def edit_json(file: Path, edit: Callable[[Any], object]) -> None:
    held = json.loads(file.read_text(encoding="utf-8"))
    edit(held)
    file.write_text(json.dumps(held), encoding="utf-8")


def write_policy(folder: Path, *, adapter: bool = False, base: str = "Qwen/Qwen2.5-7B") -> Path:
    """A finished training, with everything beside it that must stay at home."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    (folder / "checkpoints/checkpoint-2").mkdir(parents=True)
    name = "adapter_model" if adapter else "model"
    save_file({"weight": np.zeros((2, 2), np.float32)}, folder / f"{name}.safetensors")
    held: dict[str, Row] = {
        "config.json": {"model_type": "llama", "_name_or_path": base},
        "tokenizer.json": json.loads(Tokenizer(models.BPE()).to_str()),
        "training.json": training(base),
        "checkpoints/checkpoint-2/trainer_state.json": {},
    }
    if adapter:
        held["adapter_config.json"] = {"base_model_name_or_path": base, "peft_type": "LORA"}
    for file, value in held.items():
        (folder / file).write_text(json.dumps(value), encoding="utf-8")
    for file in ("curves.svg", "reasonrag.yaml", "chat_template.jinja", "config.yaml"):
        (folder / file).write_text("format: {}\n" if file.endswith("yaml") else "<svg/>", encoding="utf-8")
    for file in ("optimizer.bin", "training_args.bin", "journal.sqlite", "checkpoints/checkpoint-2/optimizer.pt"):
        (folder / file).write_bytes(b"\x80\x04 a pickle")
    return folder


def training(base: str) -> Row:
    """`training.json`, as far as cards read it."""
    return {
        "stage": "dpo",
        "model": {"name": base.rpartition("/")[2] if base.startswith("/") else base, "checksum": checksum(base)},
        "data": {"source": "trees", "checksum": "6e32", "rows": {"train": 44, "held_out": 1}},
        "settings": {"beta": 0.3, "data": "runs/trees"},
        "identity": {"beta": 0.3},
        "steps": 60,
        "versions": {"reasonrag": "0.1.0"},
        "history": [
            {"step": step, "loss": 1 / (1 + step), **({"eval_loss": 0.5} if step == 60 else {})}
            for step in range(0, 61, 2)
        ],
    }


def checksum(base: str) -> str:
    return f"{base.rpartition('/')[2]}@0123456789ab" if base.startswith("/") else base


def report(folder: Path, policies: dict[str, str], *, em: float = 0.75) -> Path:
    """`metrics.json` of an evaluation; `policies` by name, as run identities name them."""

    def measured(mean: float) -> Row:
        return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": 20}

    settings = ("setting", "baseline_setting")
    figures = {
        "policies": {name: {"t0_s8_k1": {"em": measured(em), "questions": {"scored": 20}}} for name in policies},
        "content": {"policies": {name: {"policy": identity} for name, identity in policies.items()}},
        "differences": [
            {
                "policy": name,
                "baseline": "base",
                "metric": "em",
                **dict.fromkeys(settings, "t0_s8_k1"),
                **measured(0.05),
            }
            for name in list(policies)[1:]
        ],
        "dataset": ["demo"],
        "split": "test",
    }
    folder.mkdir()
    (folder / "metrics.json").write_text(json.dumps(figures), encoding="utf-8")
    return folder


def says(role: str, content: str) -> Row:
    return {"role": role, "content": content}


def proguide_row(number: int = 0, **changes: Any) -> Row:
    """A row in the documented fields of RAG-ProGuide, invented."""
    instruction, user = "Reason.", f"Question: Who made film {number}?"
    return {
        "instruction": instruction,
        "input": user,
        "prompt": f"System: {instruction}\nUser: {user}",
        "chosen": f"So the next query is <query>film {number}</query>",
        "rejected": "So the answer is <answer>\nLucas </answer>",
        "chosen_action_type": "Query Generation",
        "chosen_content": f"film {number}",
        "rejected_action_type": "Answer Generation",
        "rejected_content": "Lucas",
        "layer": number % 4,
    } | changes
