#!/usr/bin/env bash
# Starts `sdp4bit pretrain` with the given options on all GPUs of this node, as one of NNODES nodes.
# Called by the scripts beside it. For several nodes, run the same script on each with
#     NNODES=16 MASTER_ADDR=first-node examples/paper/accuracy_125M.sh
# or let Slurm do that: see slurm.sbatch.
set -euo pipefail

# Slices of the gradient exchange overlap on streams of their own, which needs several hardware queues.
unset CUDA_DEVICE_MAX_CONNECTIONS
exec torchrun \
    --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC_PER_NODE:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}" \
    --rdzv-id "${SLURM_JOB_ID:-sdp4bit}" \
    -m sdp4bit_lab pretrain "$@"
