import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tools.same_rows import main


def write_run(folder, *, nodes, pairs=()):
    for name, rows in (("trees/nodes", nodes), ("pairs/train", pairs)):
        path = folder / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        if rows:
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(folder)


def run(*folders):
    result = CliRunner().invoke(main, list(folders))
    return result.exit_code, result.output


def test_rows_that_differ_only_in_what_hashes_the_configuration_are_the_same(tmp_path):
    nodes = [{"node_id": 0, "value": float("nan")}, {"node_id": 1, "value": 0.5}]
    pair = {"chosen": "a", "margin": 0.25}
    first = write_run(tmp_path / "a", nodes=nodes, pairs=[pair | {"pair_id": "1", "config_hash": "x"}])
    second = write_run(tmp_path / "b", nodes=nodes, pairs=[pair | {"pair_id": "2", "config_hash": "y"}])
    code, output = run(first, second)
    assert code == 0
    assert "ignored columns: config_hash, pair_id" in output
    assert "trees/nodes: 2 equal rows" in output


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([{"node_id": 0, "value": 0.5}, {"node_id": 1, "value": 0.25}], "row 1 differs in value"),
        ([{"node_id": 0, "value": 0.5}], "has a row 1"),
        ([{"node_id": 0}, {"node_id": 1}], "row 0 differs in value"),
    ],
)
def test_a_difference_is_named_and_the_exit_code_is_one(tmp_path, other, said):
    first = write_run(tmp_path / "a", nodes=[{"node_id": 0, "value": 0.5}, {"node_id": 1, "value": 0.5}])
    code, output = run(first, write_run(tmp_path / "b", nodes=other))
    assert (code, said in output) == (1, True)


def test_a_folder_without_nodes_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    code, output = run(str(tmp_path / "a"), str(tmp_path / "a"))
    assert code == 1
    assert "not a finished run" in output


def test_a_column_can_be_ignored_by_name(tmp_path):
    first = write_run(tmp_path / "a", nodes=[{"node_id": 0, "logprobs": [0.1]}])
    second = write_run(tmp_path / "b", nodes=[{"node_id": 0, "logprobs": [0.2]}])
    assert run(first, second)[0] == 1
    code, output = run(first, second, "--ignore", "logprobs")
    assert code == 0
    assert "ignored columns: config_hash, pair_id, logprobs" in output
