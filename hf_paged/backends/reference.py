"""The naive backend: gathers each row, computes in float32, obviously right. Tests compare the others with it."""

import torch

from ..plan import GroupPlan
from ..store import Memory
from . import AttentionCall


def attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    memory: Memory,
    plan: GroupPlan,
    call: AttentionCall,
) -> torch.Tensor:
    """See `hf_paged.backends`."""
    batch, num_heads, q_len, _ = query.shape
    out = query.new_zeros(batch, q_len, num_heads, memory.value_slots.shape[2])
    for row in range(plan.batch):
        end = plan.past[row] + plan.new[row]
        begin = plan.tables.rows[row].start
        if not plan.live[row] or end == begin:
            continue
        if plan.offsets is None:
            mine, into = query[row], out[row]
        else:
            first, last = plan.offsets[row], plan.offsets[row] + plan.new[row]
            mine, into = query[0, :, first:last], out[0, first:last]
        slots = torch.tensor(plan.token_slots(row, begin, end), device=query.device)
        keys, values = (tensor.float() for tensor in memory.gather(slots))  # [num_kv_heads, n, dim]
        group = num_heads // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = mine.float() @ keys.transpose(1, 2) * call.scale  # [num_heads, q_len, n]
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.bias is not None:
            columns = call.bias.shape[3]
            scores = scores + call.bias[0, ..., columns - (end - begin) :].float()
        if call.slopes is not None:
            scores = scores + call.slopes.view(-1, 1, 1) * torch.arange(begin - end, 0, device=query.device)
        mask = plan.attention_mask(row, begin, call.band, query.device)  # [q_len, n]
        scores = scores.masked_fill(~mask, float("-inf"))
        if call.sinks is not None:
            sinks = call.sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=2)
        weights = torch.softmax(scores, dim=2).nan_to_num(0.0)[..., : end - begin]
        into.copy_((weights @ values).transpose(0, 1))
    return out
