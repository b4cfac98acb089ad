"""hf_paged: a paged key-value cache for Hugging Face Transformers.

`hf_paged.patch(model)` makes `model.generate()` keep its keys and values in a shared pool of fixed-size blocks and
puts out the tokens it put out before.
"""

try:
    from . import compat as _compat  # noqa: F401  the names of the library that are imported
except ImportError as error:
    import transformers as _transformers

    raise ImportError(
        f"hf_paged knows Transformers 5.17 to 5.24, and not the installed {_transformers.__version__}: {error}. "
        "Install a newer hf_paged, or a Transformers that it knows."
    ) from error

from . import attention as _attention
from . import compiling as _compiling  # noqa: F401  registers the ops
from .blocks import OutOfBlocks
from .cache import PagedCache
from .chat import Chat
from .config import PagedConfig
from .generation.salts import prefix_salt
from .patching import patch, patched, unpatch
from .pool import KVPool
from .stats import PagedStats

_attention.register()

__version__ = "0.1.0"
__all__ = [
    "Chat",
    "KVPool",
    "OutOfBlocks",
    "PagedCache",
    "PagedConfig",
    "PagedStats",
    "patch",
    "patched",
    "prefix_salt",
    "unpatch",
]
