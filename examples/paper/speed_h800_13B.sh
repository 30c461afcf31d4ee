#!/usr/bin/env bash
# The 13B row, H800, of the paper's speed table (table 2; layouts in table 8): 16 nodes of 8 GPUs, made-up data.
#     NNODES=16 MASTER_ADDR=first-node examples/paper/speed_h800_13B.sh --strategy sdp4bit-paper
# and the same with --strategy baseline; each start has a new folder. The table has the mean of steps 21 to 30.
# sdp4bit-paper is the paper's method; --strategy sdp4bit adds dither.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
chunks=(--gradient-alltoall-pipeline 1)
for argument in "$@"; do
    # Without quantized gradients there is no exchange to cut into chunks.
    case $argument in baseline | qw | qwd) chunks=() ;; esac
done

NPROC_PER_NODE=${NPROC_PER_NODE:-8} exec "$here/torchrun.sh" --preset 13B --lr 1e-4 --mock-data \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 \
    --seq-length 2048 --micro-batch-size 1 --accumulation 1 --train-iters 30 --eval-interval 1000 \
    --bf16 --recompute-granularity selective --no-reshard-after-forward \
    --strategy sdp4bit-paper \
    --log-interval 10 --log-throughput --out "runs/speed_h800_13B-$(date +%Y%m%d-%H%M%S)" "${chunks[@]}" "$@"
