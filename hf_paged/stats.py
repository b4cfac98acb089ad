"""What a cache or a pool holds, in numbers."""

from dataclasses import dataclass, field


@dataclass
class PagedStats:
    """A snapshot. Blocks are counted over all layer groups; tokens in the group that holds the most.

    Attributes:
        block_size: tokens per block.
        num_blocks: blocks there are, the reserved null blocks not counted: `free + used + cached`.
        free_blocks: blocks without content anyone can find.
        used_blocks: blocks with a reference count above 0.
        cached_blocks: blocks with a reference count of 0 whose content can still be found.
        shared_blocks: blocks with a reference count above 1.
        stored_tokens: distinct tokens held; a shared one counts once.
        logical_tokens: tokens held, summed over rows: what a cache without sharing would hold.
        utilization: `stored slots filled / slots of used blocks`; 1.0 when nothing is used.
        bytes_allocated: bytes of all key and value tensors, spare blocks and null blocks included.
        bytes_used: bytes of the used blocks.
        cross_attention_bytes: bytes of the keys and values that living caches of an encoder-decoder model hold of their
            sources, beside the blocks; counted for a pool, not for a single cache.
        scratch_bytes: the most bytes that one step took beside the stores (gathered tails, merge buffers).
        cow_copies: blocks copied because a row wrote to a block it shared.
        prefix_query_tokens: prompt tokens looked up in the prefix index.
        prefix_hit_tokens: prompt tokens found there.
        evictions: cached blocks that were reused for new content.
        preemptions: rows that had to give their blocks back before they were finished.
        peak_used_blocks: the most blocks in use at one time.
        graph_captures: decode steps that were captured as CUDA graphs (`PagedConfig.cuda_graphs`); like the next one
            counted for a pool, not for a single cache.
        graph_steps: decode steps that were replayed.
        fallbacks: reason → calls that took a dense path or went without a saving.
        stepped_aside: code of the reason → calls that went without a shortcut because something that it assumes is not
            known to hold (`docs/soundness.md`); each is in `fallbacks`, too, in words. Counted for a pool, not for a
            single cache.
    """

    block_size: int
    num_blocks: int = 0
    free_blocks: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    shared_blocks: int = 0
    stored_tokens: int = 0
    logical_tokens: int = 0
    utilization: float = 1.0
    bytes_allocated: int = 0
    bytes_used: int = 0
    cross_attention_bytes: int = 0
    scratch_bytes: int = 0
    cow_copies: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    peak_used_blocks: int = 0
    graph_captures: int = 0
    graph_steps: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    stepped_aside: dict[str, int] = field(default_factory=dict)
