# SPDX-License-Identifier: Apache-2.0
"""verl's own tests of DataProto, run as they are on whet's; the reason why one fails is a row of docs/migrating.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.peer import DEADLINE_SECONDS, ROOT, interpreter

# verl.protocol as its tests import it; functions without that name here are translated as docs/migrating.md says
PROTOCOL = """
from whet.plugins.migration.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from whet.plugins.migration.protocol import deserialize_single_tensor, deserialize_tensordict
from whet.plugins.migration.protocol import serialize_single_tensor, serialize_tensordict

def union_tensor_dict(one, other):
    return DataProto(batch=one).union(DataProto(batch=other)).batch

def union_numpy_dict(one, other):
    return DataProto(non_tensor_batch=one).union(DataProto(non_tensor_batch=other)).non_tensor_batch

def fold_batch_dim(data, new_batch_size):
    return data.fold_batch_dim(new_batch_size)

def unfold_batch_dim(data, batch_dims):
    return data.unfold_batch_dim()
"""
ERROR, METRICS = "raises DataError, not AssertionError", "meta_info['metrics'] is not joined"
KEPT, TWO = "an operation leaves its batch as it is", "pop returns two batches"
DIFFERENT = {
    "test_union_tensor_dict": "equal copies may be united",
    "test_union_numpy_dict": "columns of a batch are object arrays",
    "test_tensor_dict_constructor": "a batch has one dimension of rows",
    "test_reorder": KEPT,
    "test_chunk_concat": ERROR,
    "test_concat_metrics_from_multiple_workers": METRICS,
    "test_concat_with_empty_and_non_list_meta_info": METRICS,
    "test_concat_first_worker_missing_metrics": METRICS,
    "test_concat_non_list_metrics": METRICS,
    "test_concat_conflicting_non_metric_keys": ERROR,
    "test_pop": TWO,
    "test_dataproto_fold_unfold": KEPT,
    "test_dataproto_no_batch": TWO,
    "test_dataproto_unfold_column_chunks": "a list is one object of its row",
    "test_numpy_dataproto_serialization_skips_tensordict_consolidation": "it is pickled without __setstate__",
}


@pytest.mark.slow
def test_verls_tests_of_its_protocol(tmp_path: Path) -> None:
    packages = next(interpreter("WHET_PEERS_VENV", ".venv-peers").parents[1].glob("lib/python*/site-packages"))
    (tmp_path / "verl" / "utils").mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").write_text("from verl.protocol import DataProto\n")
    (tmp_path / "verl" / "protocol.py").write_text(PROTOCOL)
    shutil.copy(packages / "verl" / "utils" / "tensordict_utils.py", tmp_path / "verl" / "utils")
    shutil.copy(packages / "tests" / "test_protocol_on_cpu.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", "test_protocol_on_cpu.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    ends = re.findall(r"^(PASSED|FAILED|ERROR) test_protocol_on_cpu\.py::(\w+)", done.stdout, re.MULTILINE)
    assert len(ends) == 38, done.stdout[-3000:] + done.stderr[-3000:]
    assert {name for end, name in ends if end != "PASSED"} == set(DIFFERENT), done.stdout[-3000:]
