"""The kernels' own tests, in processes in which Triton interprets: one a file, so that several workers take part."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "kernels"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not made for this platform")
@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("test_*.py")))
def test_the_kernels_pass_their_tests_in_the_interpreter(name):
    command = [sys.executable, "-m", "pytest", "-q", "--durations=5", str(FOLDER / name)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=env, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
