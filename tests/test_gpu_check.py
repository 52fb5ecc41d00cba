"""The check for a card walks the same way on a CPU, so that nothing silly stops its first real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks/gpu_check.py"


def test_every_item_of_the_gpu_check_runs_on_a_cpu(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--out", str(out)]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["item"] for row in rows][:6] == [
        *("versions", "kernels", "cold and warm", "optimizer", "attention", "repeats")
    ]
    assert rows[-1]["failures"] == []
    assert not any("error" in row or "left out" in row for row in rows)
    assert rows[4]["torch.float32"]["fake"]
    assert ran.returncode == 0, ran.stderr


def test_items_for_which_no_time_is_left_are_named(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--seconds", "0", "--out", str(out)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sum("left out" in row for row in rows) == len(rows) - 1
