"""Show that workers restarted by torchrun read keys of workers that have exited; see docs/upstream.md.

In the first start, both ranks form a process group, and rank 1 fails. torchrun restarts both ranks, with the
store of the first start. Rank 1 of the second start is slow: rank 0 reads the address of the exited rank 1.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 experiments/upstream/stale_store.py
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start == 1 and rank == 1:
        time.sleep(10)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        outcome = "has joined"
    except Exception as error:
        outcome = f"failed: {' '.join(str(error).split())[:200]}"
    print(f"torch {torch.__version__}, start {start}, rank {rank} {outcome}", flush=True)
    if start == 0:
        dist.barrier()
        sys.exit(rank)


if __name__ == "__main__":
    main()
