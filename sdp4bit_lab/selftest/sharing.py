"""Ranks that share one GPU: checks of the GPU and variables of the ranks before they start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sdp4bit_lab.common.launch.shared_gpu import multi_process_service, nccl_variables, program_path
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.selftest.config import SelftestConfig

_MIB_PER_RANK = 1024
"""A CUDA context (0.5 GB), NCCL's buffers and the self-test's tensors."""


@contextmanager
def shared_gpu(config: SelftestConfig) -> Iterator[Callable[[int], dict[str, str]] | None]:
    """Prepare the first visible GPU for the ranks that the block starts.

    Yields:
        The function of a rank that returns its variables; None with `--device cpu`.

    Raises:
        SettingError: there is no GPU, or too little of its memory is free.
    """
    if config.device == "cpu":
        yield None
        return
    import torch

    ranks = config.share_gpu or 1
    if not torch.cuda.is_available():
        raise SettingError(
            f"--share-gpu {ranks} needs a GPU, and torch {torch.__version__} sees none: check nvidia-smi and "
            "torch's build, or try the checks over gloo with --device cpu"
        )
    free = free_mib(nccl_variables(0, interface="lo")["CUDA_VISIBLE_DEVICES"])
    if free is not None and free < ranks * _MIB_PER_RANK:
        fits = free // _MIB_PER_RANK
        raise SettingError(
            f"--share-gpu {ranks} needs {ranks * _MIB_PER_RANK} MiB of GPU memory, and {free} MiB are free: "
            "end other programs" + (f", or use --share-gpu {fits}" if fits > 1 else "")
        )
    with multi_process_service(config.mps) as (_, about):
        sys.stdout.write(f"sdp4bit: {ranks} ranks on one GPU; {about}\n")
        sys.stdout.flush()
        yield lambda rank: nccl_variables(rank, interface="lo")


def free_mib(gpu: str) -> int | None:
    """Return the free memory of a GPU by nvidia-smi, which needs no CUDA context; None without it."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        done = subprocess.run(
            query, env={**os.environ, "PATH": program_path()}, capture_output=True, text=True, check=True
        )
        return int(done.stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None
