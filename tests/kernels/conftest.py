"""These tests run Triton's kernels on the CPU, in its interpreter, and so in a process of their own.

Triton decides when it is imported whether kernels are interpreted, and PyTorch imports it. `pytest tests/kernels`
starts itself again with TRITON_INTERPRET=1; a run of all tests leaves this folder alone, and `tests/test_kernels.py`
starts that process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_cmdline_main(config):
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if INTERPRETED or not all(path == FOLDER or FOLDER in path.parents for path in asked):
        return None
    config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
    command = [sys.executable, "-m", "pytest", *config.invocation_params.args]
    return subprocess.call(command, env={**os.environ, "TRITON_INTERPRET": "1"})


def pytest_ignore_collect(collection_path):
    return None if INTERPRETED else True


@pytest.fixture(autouse=True)
def _short_parts(request, monkeypatch):
    """Let contexts of a few tokens be worth splitting."""
    if INTERPRETED:
        from hf_paged.triton_kernels import config

        monkeypatch.setattr(config, "LEAST_PART", 1)
