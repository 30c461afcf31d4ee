#!/usr/bin/env bash
# The 1.3B row of the paper's accuracy table (table 1; appendix D).
#     DATA=pile/pile_text_document VOCAB=pile/vocab.json MERGES=pile/merges.txt \
#         examples/paper/accuracy_1.3B.sh --strategy sdp4bit-paper
# 80,000 steps of 256 sequences of The Pile. --strategy selects a column of the table: baseline, qw, qwd,
# tlq, tlq-hs or sdp4bit-paper (the paper's method and the default), or ulq of figure 5.
# The same command again continues from the last checkpoint.
# The micro batch is 4, as in the reference implementation's script; its README has 2.
# Fits up to 64 GPUs. examples/paper/the_pile.sh prepares the data.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
run=${RUN:-runs/accuracy_1.3B}

exec "$here/torchrun.sh" --preset 1.3B \
    --data-path "${DATA:-data/the_pile_text_document}" \
    --vocab-file "${VOCAB:-data/vocab.json}" --merge-file "${MERGES:-data/merges.txt}" \
    --split 969,30,1 --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 4 --global-batch-size 256 --train-iters 80000 \
    --lr-decay-style cosine --lr-decay-iters 70000 --lr-warmup-fraction 0.01 \
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 \
    --bf16 --recompute-granularity selective --no-reshard-after-forward \
    --strategy sdp4bit-paper \
    --eval-interval 100 --eval-iters 10 --log-interval 100 --log-throughput \
    --save "$run/checkpoints" --save-interval 1000 --auto-resume --out "$run" "$@"
