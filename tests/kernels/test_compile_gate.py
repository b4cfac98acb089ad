"""A few kernels compiled for real chips. Not interpreted, so in a process without TRITON_INTERPRET."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kernels_compile_without_spills_and_the_gate_can_fail():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "benchmarks" / "compile_gate.py"), "--quick"]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("negative control") == 2 and "NOT CAUGHT" not in result.stdout
