"""The prefix index: which blocks hold the keys and values of which tokens.

A tree of blocks. A node stands for one block's worth of tokens behind those of its parent; a root stands for an
*identity*, everything beside the tokens that the keys and values depend on (model, weights, adapter, salt, …). So a
node is reached only by the very tokens and the very identity it was stored under: the tokens themselves are compared,
a hash only narrows the search. The scheme is vLLM's automatic prefix caching and SGLang's radix tree, cut at blocks.

Hits count tokens, not blocks: the last block may match in part, and is then shared and copied by whoever writes to it.

The index holds no references. A block it knows is *promised* in the pool: it stays findable after its last holder let
go of it, until the pool reuses it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from .pool import BlockPool
from .tables import BlockTable, RowTables


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


class _Node:
    """One block's worth of tokens.

    Attributes:
        parent: the node whose tokens come before; None for a root.
        tokens: at most a block's worth; fewer in a leaf.
        blocks: the block per layer group, None where the group does not have it (any more).
        children: nodes by the hash of their tokens.
        by_first: the same nodes by their first token.
    """

    __slots__ = ("blocks", "by_first", "children", "parent", "tokens")

    def __init__(self, parent: "_Node | None", tokens: tuple[int, ...], groups: int):
        self.parent = parent
        self.tokens = tokens
        self.blocks: list[int | None] = [None] * groups
        self.children: dict[int, list[_Node]] = {}
        self.by_first: dict[int, list[_Node]] = {}


@dataclass
class Match:
    """What the index has of a row.

    Attributes:
        length: tokens found.
        blocks: per layer group the blocks that hold positions `starts[group] .. length`.
        starts: per layer group the position of the first slot of the first block.
    """

    length: int
    blocks: list[list[int]]
    starts: list[int]

    def adopt(self, tables: Sequence[RowTables], row: int) -> None:
        """Let row `row`, still empty, begin with what was found."""
        for entry, blocks, start in zip(tables, self.blocks, self.starts, strict=True):
            entry.adopt(row, blocks, start, self.length)


class PrefixIndex:
    """Blocks by the tokens they hold, over all layer groups of a pool.

    Args:
        pools: the layer groups' block pools; the index takes their `on_evict`.
        windows: per layer group the tokens a query sees, itself included; None: all.
        block_size: tokens per block.
        hash_tokens: narrows the search among siblings; any function of a tuple of ints gives right answers.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        windows: Sequence[int | None],
        block_size: int,
        hash_tokens: Callable[[tuple[int, ...]], int] = hash,
    ):
        self.pools = list(pools)
        self.windows = list(windows)
        self.block_size = block_size
        self.hash_tokens = hash_tokens
        self._roots: dict[Hashable, _Node] = {}
        self._owners: list[dict[int, _Node]] = [{} for _ in self.pools]
        for group, pool in enumerate(self.pools):
            pool.on_evict = partial(self._evicted, group)

    # -- looking up -------------------------------------------------------------------------------------------------

    def find(self, identity: Hashable, tokens: Sequence[int]) -> Match:
        """The longest prefix of `tokens` that every layer group still holds as far as it needs it.

        A group without window needs all of it, a sliding one the last `window - 1` tokens. The caller takes references
        before anything else is allocated.
        """
        path = self._path(identity, tokens)  # (node, position behind its matching tokens)
        length = path[-1][1] if path else 0
        size = self.block_size
        shrunk = True
        while shrunk and length:
            shrunk = False
            for group, window in enumerate(self.windows):
                first = 0 if window is None else max(length - window + 1, 0) // size
                for place in range(-(-length // size) - 1, first - 1, -1):
                    if path[place][0].blocks[group] is None:
                        # Needed by every length behind its beginning, unless a shorter one no longer reaches it.
                        length = place * size
                        shrunk = True
                        break
        count = -(-length // size)
        blocks, starts = [], []
        for group, window in enumerate(self.windows):
            first = min(0 if window is None else max(length - window + 1, 0) // size, count)
            found = [path[place][0].blocks[group] for place in range(first, count)]
            blocks.append([block for block in found if block is not None])
            starts.append(first * size)
        return Match(length, blocks, starts)

    def _path(self, identity: Hashable, tokens: Sequence[int]) -> list[tuple[_Node, int]]:
        node = self._roots.get(identity)
        if node is None:
            return []
        size = self.block_size
        whole = [group for group, window in enumerate(self.windows) if window is None]
        path: list[tuple[_Node, int]] = []
        position = 0
        while position < len(tokens):
            chunk = tuple(tokens[position : position + size])
            child = self._child(node, chunk) if len(chunk) == size else None
            common = size
            if child is None:
                child, common = self._nearest(node, chunk)
            if child is None or any(child.blocks[group] is None for group in whole):
                break
            position += common
            path.append((child, position))
            if common < size:
                break
            node = child
        return path

    def _child(self, node: _Node, tokens: tuple[int, ...]) -> _Node | None:
        for child in node.children.get(self.hash_tokens(tokens), ()):
            if child.tokens == tokens:
                return child
        return None

    def _nearest(self, node: _Node, tokens: tuple[int, ...]) -> tuple[_Node | None, int]:
        """The child that shares the most leading tokens, and how many."""
        best, most = None, 0
        for child in node.by_first.get(tokens[0], ()) if tokens else ():
            common = common_prefix(tokens, child.tokens)
            if common > most:
                best, most = child, common
        return best, most

    # -- storing ----------------------------------------------------------------------------------------------------

    def insert(self, identity: Hashable, tokens: Sequence[int], tables: Sequence[BlockTable]) -> None:
        """Remember the blocks of a row. What the index has already keeps the blocks it has.

        Args:
            identity: see above.
            tokens: the row's tokens from position 0.
            tables: the row's block table in each layer group, with every one of these tokens written in all layers.
        """
        node = self._roots.get(identity)
        if node is None:
            if not tokens:
                return
            node = self._roots[identity] = _Node(None, (), len(self.pools))
        size = self.block_size
        for position in range(0, len(tokens), size):
            chunk = tuple(tokens[position : position + size])
            held: list[int | None] = []
            for table in tables:
                place = (position - table.start) // size
                held.append(table.blocks[place] if 0 <= place < len(table.blocks) else None)
            child = self._child(node, chunk)
            if child is None:
                child, common = self._nearest(node, chunk)
                if child is not None and common == len(chunk):
                    return  # the last, partly filled block; the index has it with more tokens behind
                if child is None or common < len(child.tokens):
                    child = self._add(node, chunk)
                else:
                    self._lengthen(child, chunk)
            for group, block in enumerate(held):
                if block is not None and child.blocks[group] is None and block not in self._owners[group]:
                    child.blocks[group] = block
                    self._owners[group][block] = child
                    self.pools[group].promise(block, len(chunk))
            node = child  # may hold nothing itself: a sliding group needs the blocks behind it only
        self._prune(node)

    def _add(self, parent: _Node, tokens: tuple[int, ...]) -> _Node:
        node = _Node(parent, tokens, len(self.pools))
        self._link(node, parent)
        return node

    def _link(self, node: _Node, parent: _Node) -> None:
        node.parent = parent
        parent.children.setdefault(self.hash_tokens(node.tokens), []).append(node)
        parent.by_first.setdefault(node.tokens[0], []).append(node)

    def _lengthen(self, node: _Node, tokens: tuple[int, ...]) -> None:
        """A partly filled block was written on, here or in a copy: the longer one takes its place."""
        assert node.parent is not None
        self._unlink(node)
        for group, block in enumerate(node.blocks):
            if block is not None:
                self._drop(group, block)
        node.tokens = tokens
        self._link(node, node.parent)

    def move(self, source: Hashable, target: Hashable) -> None:
        """Let what was stored under one identity be found under another. What is there already keeps its blocks."""
        root = self._roots.pop(source, None)
        if root is None:
            return
        goal = self._roots.get(target)
        if goal is None:
            goal = self._roots[target] = _Node(None, (), len(self.pools))
        waiting = [(root, goal)]
        while waiting:
            node, into = waiting.pop()
            for child in [child for siblings in node.children.values() for child in siblings]:
                twin = self._child(into, child.tokens)
                if twin is None:
                    near, common = self._nearest(into, child.tokens)
                    if near is None or common < min(len(near.tokens), len(child.tokens)):
                        self._unlink(child)
                        self._link(child, into)
                        continue
                    if common < len(child.tokens):
                        self._lengthen(near, child.tokens)
                    twin = near
                for group, block in enumerate(child.blocks):
                    if block is None:
                        continue
                    if twin.blocks[group] is None and twin.tokens == child.tokens:
                        child.blocks[group], twin.blocks[group] = None, block
                        self._owners[group][block] = twin
                    else:
                        self._drop(group, block)
                waiting.append((child, twin))
        self._prune(goal)

    # -- forgetting -------------------------------------------------------------------------------------------------

    def _drop(self, group: int, block: int) -> None:
        node = self._owners[group].pop(block)
        node.blocks[group] = None
        self.pools[group].withdraw(block)

    def _evicted(self, group: int, block: int) -> None:
        """The pool is about to reuse a cached block."""
        node = self._owners[group].pop(block, None)
        if node is not None:
            node.blocks[group] = None
            self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Remove nodes that hold nothing and lead nowhere."""
        while node.parent is not None and not node.children and all(block is None for block in node.blocks):
            self._unlink(node)
            node = node.parent
        if node.parent is None and not node.children:
            for identity in [identity for identity, root in self._roots.items() if root is node]:
                del self._roots[identity]

    def _unlink(self, node: _Node) -> None:
        assert node.parent is not None
        for siblings, key in (
            (node.parent.children, self.hash_tokens(node.tokens)),
            (node.parent.by_first, node.tokens[0]),
        ):
            siblings[key].remove(node)
            if not siblings[key]:
                del siblings[key]

    def forget(self, identity: Hashable) -> None:
        """Forget what was stored under one identity."""
        root = self._roots.pop(identity, None)
        waiting = [] if root is None else [root]
        while waiting:
            node = waiting.pop()
            for group, block in enumerate(node.blocks):
                if block is not None:
                    self._drop(group, block)
            waiting.extend(child for siblings in node.children.values() for child in siblings)

    def reset(self) -> None:
        """Forget everything; cached blocks are free at once."""
        for group, owners in enumerate(self._owners):
            for block in owners:
                self.pools[group].withdraw(block)
            owners.clear()
        self._roots.clear()

    # -- numbers ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Blocks known, over all groups."""
        return sum(map(len, self._owners))

    def check(self) -> None:
        """Raise AssertionError if the tree, the owners and the pools' promises disagree."""
        seen: list[dict[int, _Node]] = [{} for _ in self.pools]
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            listed = [child for siblings in node.children.values() for child in siblings]
            assert sorted(map(id, listed)) == sorted(id(c) for siblings in node.by_first.values() for c in siblings)
            assert len({child.tokens for child in listed}) == len(listed), "two children hold the same tokens"
            assert node.parent is None or len(node.tokens) == self.block_size or not listed, "a leaf has children"
            for child in listed:
                assert child.parent is node and 0 < len(child.tokens) <= self.block_size
            for group, block in enumerate(node.blocks):
                if block is not None:
                    assert block not in seen[group], f"block {block} stands for two nodes"
                    seen[group][block] = node
                    assert self.pools[group].promised(block) == len(node.tokens)
            waiting.extend(listed)
        for group, owners in enumerate(self._owners):
            assert seen[group].keys() == owners.keys()
            assert all(seen[group][block] is node for block, node in owners.items())
