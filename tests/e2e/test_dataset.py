"""The data set is ready for use: `datasets` loads it, and TRL's own command trains on it without a conversion."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from reasonrag.storage.tables import pair_schema
from tests import warmed
from tests.e2e import product
from tests.e2e.world import World
from tests.faults.matrix import Figure
from tests.llm.tiny import save_tiny_model

LOAD = """
import json, os, sys
from datasets import List, load_dataset
files, cache = json.loads(sys.argv[1]), sys.argv[2]
def plain(feature):
    if isinstance(feature, List):
        return [plain(feature.feature)]
    return {k: plain(v) for k, v in feature.items()} if isinstance(feature, dict) else feature.dtype
where = {"path": files} if isinstance(files, str) and os.path.isdir(files) else {"path": "parquet", "data_files": files}
(rows,) = load_dataset(**where, cache_dir=cache).values()
print(json.dumps({"features": {k: plain(v) for k, v in rows.features.items()}, "rows": len(rows), "first": rows[0]}))
"""


def feature(type: pa.DataType) -> Any:
    """Return what `datasets` calls a type of our tables."""
    if pa.types.is_list(type):
        return [feature(type.value_type)]
    if pa.types.is_struct(type):
        return {field.name: feature(field.type) for field in type}
    return "float64" if pa.types.is_float64(type) else str(type)


def load(files: str | list[str], cache: Path) -> dict[str, Any]:
    """Features, number of rows and first row, as `datasets` reads them in offline mode."""
    done = warmed.run(warmed.source, LOAD, json.dumps(files), str(cache), environment=product.environment())
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return loaded


@pytest.mark.slow
def test_datasets_loads_the_pairs_with_the_documented_columns(finished_run: Path, tmp_path: Path) -> None:
    loaded = load(f"{finished_run}/pairs/train-*.parquet", tmp_path)
    assert list(loaded["features"])[:3] == ["prompt", "chosen", "rejected"]
    assert loaded["features"] == {field.name: feature(field.type) for field in pair_schema()}
    assert loaded["rows"] == product.summary(finished_run)["pairs"]["train"]
    first = loaded["first"]
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert [message["role"] for message in first["chosen"] + first["rejected"]] == ["assistant", "assistant"]
    assert first["chosen_reward"] > first["rejected_reward"]


@pytest.mark.slow
@pytest.mark.fault("30", "two runs, one with columns that are all null", "`datasets` loads both together")
@pytest.mark.parametrize("pattern", ["train-*.parquet", "*.parquet"])
def test_shards_of_two_runs_load_together(
    pattern: str, world: World, finished_run: Path, tmp_path: Path, figure: Figure
) -> None:
    # The second run is so small that nothing is held out, and some of its columns are all null.
    other = tmp_path / "other"
    product.build(*world.flags, "--policy", "extractive", "--limit", "3", "--iterations", "8", "--out", other)
    assert product.summary(other)["pairs"]["test"] == 0
    loaded = load([f"{finished_run}/pairs/{pattern}", f"{other}/pairs/{pattern}"], tmp_path / "cache")
    pairs = [product.summary(run)["pairs"] for run in (finished_run, other)]
    figure(f"{pattern}: {loaded['rows']} pairs of 2 runs")
    assert loaded["rows"] == sum(count["train"] if "train" in pattern else count["total"] for count in pairs)
    trees = load([f"{finished_run}/trees/*.parquet", f"{other}/trees/*.parquet"], tmp_path / "cache")
    assert trees["rows"] == len(product.tree_rows(finished_run)) + len(product.tree_rows(other))


@pytest.mark.slow
def test_trl_trains_on_the_folder_of_pairs_without_a_conversion(finished_run: Path, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    places = ("--model_name_or_path", model, "--dataset_name", finished_run / "pairs", "--output_dir", tmp_path / "out")
    steps = "--max_steps 2 --per_device_train_batch_size 2 --learning_rate 1e-3 --max_length 4096 --logging_steps 1"
    machine = "--use_cpu --bf16 false --report_to none --save_strategy no"
    done = warmed.run(
        *(warmed.script, str(Path(sys.executable).with_name("trl")), "dpo"),
        *map(str, (*places, *steps.split(), *machine.split())),
        environment=product.environment(HF_HOME=str(tmp_path / "home")),
        timeout_s=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"'loss': '?([0-9.e+-]+)", done.stdout)]
    print(f"losses of 2 steps: {losses}")
    assert len(losses) == 2
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # ln 2: policy and reference are still one
    assert losses[-1] != losses[0]
    assert (tmp_path / "out" / "model.safetensors").is_file()
