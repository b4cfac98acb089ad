"""What each process of a group runs; started by `test_devices.py` under torchrun. Writes what it saw to a file.

torchrun --nproc-per-node 2 tests/parallel_worker.py {tensor,data} MODEL_FOLDER OUTPUT_FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from models import Watch, prompts
from transformers import AutoModelForCausalLM

import hf_paged

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "again": {},  # finds its prompts in the prefix index
}


class Tables(Watch):
    """Notes the block ids of every row after every step."""

    def __call__(self, input_ids, scores, **kwargs):
        done = super().__call__(input_ids, scores, **kwargs)
        self.seen[-1] = [[row.blocks[:] for row in tables.rows] for tables in self.model.paged_pool._live]
        return done


def tensor_parallel(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto")
    hf_paged.patch(model, block_size=4, vouch=Tables)
    answers = {}
    for name, options in MODES.items():
        torch.manual_seed(5)
        tables = Tables(model)
        ids = model.generate(**prompts(5, 12, 9), max_new_tokens=8, stopping_criteria=[tables], **options)
        answers[name] = {"ids": ids.tolist(), "tables": tables.seen}
    stats = model.paged_stats()
    answers["heads"] = model.paged_pool.stores[0].memory.kv_heads
    answers["stats"] = [stats.prefix_hit_tokens, stats.used_blocks, stats.stepped_aside]
    (folder / f"tensor{dist.get_rank()}.json").write_text(json.dumps(answers))


def data_parallel(folder):
    from accelerate import PartialState

    state = PartialState(cpu=True)
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(folder / "model"), block_size=4)
    batch = prompts(5, 12, 9, 7, 11)
    rows = list(range(5))
    answers = {}
    with state.split_between_processes(rows) as mine:
        inputs = {name: tensor[mine] for name, tensor in batch.items()}
        ids = model.generate(**inputs, max_new_tokens=8, num_beams=2)
        answers = dict(zip(mine, ids.tolist(), strict=True))
    (folder / f"data{state.process_index}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    tensor_parallel(Path(sys.argv[1]))
    data_parallel(Path(sys.argv[1]))
    dist.destroy_process_group()
