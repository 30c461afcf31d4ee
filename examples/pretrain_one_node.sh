#!/usr/bin/env bash
# Pretrains the 125M model of the paper on all GPUs of one machine. Further options go to `sdp4bit pretrain`:
#
#   examples/pretrain_one_node.sh --data-path corpus.jsonl
#
# On one machine nothing is quantized by default. --ranks-per-node lets groups of ranks represent nodes; 1 takes
# each GPU as a node, for slow links between them. Started again, it continues from its last checkpoint.
set -euo pipefail

exec torchrun --standalone --nproc-per-node gpu -m sdp4bit_lab pretrain \
    --preset 125M \
    --train-iters 1000 \
    --no-reshard-after-forward \
    --out runs/125M \
    --save runs/125M/checkpoints \
    --save-interval 500 \
    --auto-resume \
    "$@"
