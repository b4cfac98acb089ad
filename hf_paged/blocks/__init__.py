"""Block bookkeeping: ids, reference counts and block tables. Nothing in this folder knows tensors."""

from .pool import NULL_BLOCK, BlockPool, OutOfBlocks
from .prefix import Match, PrefixIndex, common_prefix
from .tables import BlockTable, RowTables

__all__ = ["NULL_BLOCK", "BlockPool", "BlockTable", "Match", "OutOfBlocks", "PrefixIndex", "RowTables", "common_prefix"]
