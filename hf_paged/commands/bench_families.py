"""`python -m hf_paged bench families`: is any of the most used model families slower with the paged cache than without?

Each family is a random model of middle size (hidden size 512, 5 layers, 8 heads of 64), large enough for its arithmetic
to count and made in a second. The library's `DynamicCache` and ours alternate in one process, and each goes first as
often. A ratio is baseline time / our time: above 1 is faster.
"""

import gc
from typing import Any

import torch
import transformers

from .harness import Entry, make_entry
from .measure import TimedRun, UsageError, opening, rotated, same_ids, say, timed_generate, writable, write_results
from .tiny_models import text_inputs

VOCAB = 2048
PROMPT_TOKENS = 512
NEW_TOKENS = 32

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352}
_LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 352,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Model type -> fields beside `_SIZES`; None: a field that it does not take.
_OWN_HEADS = {"num_key_value_heads": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "mistral": {},
    "mixtral": {**_EXPERTS, "intermediate_size": 352},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    "phi": _OWN_HEADS,
    "phi3": {},
    "gpt2": {"n_positions": 2048},
    "gpt_neox": {},
    "opt": {"ffn_dim": 2048, "word_embed_proj_dim": 512},
    "falcon": {"head_dim": None},
    "bloom": {},
    "olmo2": _OWN_HEADS,
    "smollm3": {},
    "granite": {},
    "gpt_oss": {**_EXPERTS, "intermediate_size": 352},
    "deepseek_v3": {**_LATENT, "head_dim": 32},
    "cohere2": {},
}


def build(family: str) -> Any:
    """The random model of a family, float32, in eval mode, with logits that are not nearly equal."""
    own = FAMILIES[family]
    fields = {name: value for name, value in {**_SIZES, **own}.items() if own.get(name, 0) is not None}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **fields))
    model = model.eval().float()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.05, generator=generator)
    return model


def cases(tokens: int) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Case -> inputs and options of generate(); `tokens` in the longest prompt."""
    ragged = tuple(max(1, tokens * share // 16) for share in (16, 2, 9, 5))
    return {
        "ragged4": (text_inputs(ragged, below=VOCAB), {}),
        "beams4": (text_inputs((tokens,), below=VOCAB), {"num_beams": 4}),
        "greedy": (text_inputs((tokens,), below=VOCAB), {}),
    }


def time_family(family: str, prompt_tokens: int, new_tokens: int, repeat: int) -> list[Entry]:
    """Time the cases of one family with both caches."""
    model = build(family)
    entries = []
    for case, (inputs, options) in cases(prompt_tokens).items():
        options = {"do_sample": False, **options}
        runs: dict[str, list[TimedRun]] = {"DynamicCache": [], "hf_paged": []}
        for kind in runs:  # the first call of a shape pays for more than itself
            timed_generate(model, inputs, 2, kind == "hf_paged", **options)
        for round_ in range(repeat):
            for kind in rotated(list(runs), round_):
                runs[kind].append(timed_generate(model, inputs, new_tokens, kind == "hf_paged", **options))
        theirs, ours = runs.values()
        stats = ours[-1].stats
        assert stats is not None
        entry = make_entry(
            case, "DynamicCache", [run.seconds for run in theirs], [run.seconds for run in ours],
            same_ids([run.ids for run in ours], [run.ids for run in theirs]), theirs[-1].kv_bytes, ours[-1].kv_bytes,
        )  # fmt: skip
        entry["class"] = "dense" if any("dense" in reason for reason in stats.fallbacks) else "paged"
        entries.append({"family": family, **entry, "fallbacks": dict(stats.fallbacks)})
        say(_line(entries[-1]))
    return entries


def _line(entry: Entry) -> str:
    low, high = entry["pairwise_ratio_quartiles"]
    reasons = "; ".join(entry["fallbacks"])
    return (
        f"{entry['family']:<12} {entry['case']:<8} {entry['baseline_seconds']:7.2f} s {entry['ours_seconds']:7.2f} s "
        f"{entry['ratio']:6.2f}x  [{low:.2f}, {high:.2f}]  {'yes' if entry['identical'] else 'NO':<4} {entry['class']}"
        f"{': ' + reasons if reasons else ''}"
    )


def run(
    only: list[str] | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
    repeat: int = 3,
    json_file: str | None = None,
) -> int:
    """Time the families, print a line a case, write the JSON. Returns 0 if all outputs were identical, else 1.

    Raises:
        UsageError: for a family that is not among them, a number below 1, or a file that cannot be written.
    """
    if unknown := sorted(set(only or []) - set(FAMILIES)):
        raise UsageError(f"no family named {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    for name, number in (("--prompt-tokens", prompt_tokens), ("--new-tokens", new_tokens), ("--repeat", repeat)):
        if number < 1:
            raise UsageError(f"{name} must be at least 1, got {number}")
    target = writable(json_file)
    facts = opening()
    facts |= {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    print("  family       case     baseline      ours   ratio   quartiles    same class")
    results: list[Entry] = []
    for family in only or FAMILIES:
        if family not in transformers.CONFIG_MAPPING:
            say(f"{family:<12} not in this version of Transformers")
            continue
        results.extend(time_family(family, prompt_tokens, new_tokens, repeat))
        gc.collect()
        if target is not None:  # after every family, so that an interruption loses one and not all
            write_results(target, facts, results)
    worst = min(results, key=lambda entry: entry["ratio"], default=None)
    if worst is not None:
        print(f"slowest against the library's cache: {worst['family']} {worst['case']}, {worst['ratio']:.2f}x")
    return 0 if all(entry["identical"] for entry in results) else 1
