"""Where this package keeps files of its own."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$HF_PAGED_CACHE`, else `hf_paged` in the user's cache folder. It may not be there yet."""
    if chosen := os.environ.get("HF_PAGED_CACHE"):
        return Path(chosen).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "hf_paged"
