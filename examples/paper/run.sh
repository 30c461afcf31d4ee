#!/usr/bin/env bash
# Trains one row of the paper's tables on all GPUs of this node, as one of NNODES nodes:
#     DATA=pile/pile_text_document VOCAB=pile/vocab.json MERGES=pile/merges.txt \
#         examples/paper/run.sh accuracy 125M --strategy tlq-hs
#     NNODES=16 MASTER_ADDR=first-node examples/paper/run.sh speed-a100 13B
# The first argument is a table, the second a model of `sdp4bit pretrain --preset`. Further options go to
# `sdp4bit pretrain`. The default strategy is the paper's method; --strategy selects another column:
# baseline, qw, qwd, tlq or tlq-hs, or ulq of figure 5. --strategy sdp4bit adds dither.
#
# accuracy (table 1, for 6.7B figures 1 and 9; appendix D): 125M, 350M, 1.3B or 6.7B. 80,000 steps of 256
# sequences of The Pile, which the_pile.sh prepares, on at most 32, 32, 64 or 128 GPUs. The micro batch of 1.3B
# is 4, as in the reference's script; its README has 2. The same command again
# continues from the last checkpoint.
#
# speed-a100 and speed-h800 (table 2, layouts in table 8): 1.3B, 2.7B, 6.7B, 13B or 18B. 16 nodes of 4 or 8 GPUs,
# synthetic data. Each start has a new folder. The table has the mean of steps 21 to 30.
#
# On Slurm, slurm.sbatch runs this script on every node.
set -euo pipefail

table=${1:?name a table: accuracy, speed-a100 or speed-h800}
model=${2:?name a model, such as 125M}
shift 2

case "$table $model" in
    "accuracy 125M" | "accuracy 350M" | "accuracy 1.3B" | "accuracy 6.7B")
        run=${RUN:-runs/accuracy_$model}
        settings=(
            --data-path "${DATA:-data/pile_text_document}"
            --vocab-file "${VOCAB:-data/vocab.json}" --merge-file "${MERGES:-data/merges.txt}"
            --split 969,30,1 --global-batch-size 256 --train-iters 80000
            --lr-decay-style cosine --lr-decay-iters 70000 --lr-warmup-fraction 0.01
            --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
            --eval-interval 100 --eval-iters 10 --log-interval 100
            --save "$run/checkpoints" --save-interval 1000 --auto-resume
        )
        ;;
    "speed-a100 "* | "speed-h800 "*)
        run=runs/${table}_$model-$(date +%Y%m%d-%H%M%S)
        case "$table $model" in # tensor and pipeline parallel size, slices of the gradient exchange
            *" 1.3B" | *" 2.7B") layout=(1 1 8) ;;
            *" 6.7B") layout=(4 1 8) ;;
            "speed-a100 13B" | "speed-a100 18B") layout=(4 2 1) ;;
            "speed-h800 13B" | "speed-h800 18B") layout=(8 1 1) ;;
            *) echo "$table has no model $model: use 1.3B, 2.7B, 6.7B, 13B or 18B" >&2 && exit 2 ;;
        esac
        settings=(
            --lr 1e-4 --mock-data --micro-batch-size 1 --accumulation 1 --train-iters 30 --eval-interval 1000
            --tensor-model-parallel-size "${layout[0]}" --pipeline-model-parallel-size "${layout[1]}"
            --log-interval 10
        )
        case " $* " in # without quantized gradients there is no exchange to cut into slices
            *[\ =]baseline\ * | *[\ =]qw\ * | *[\ =]qwd\ *) ;;
            *) settings+=(--gradient-alltoall-pipeline "${layout[2]}") ;;
        esac
        if [ "$table" = speed-a100 ]; then gpus=4; else gpus=8; fi
        ;;
    *) echo "there is no $table $model: use accuracy, speed-a100 or speed-h800 and a model" >&2 && exit 2 ;;
esac

# Slices of the gradient exchange overlap on streams of their own, which needs several hardware queues.
unset CUDA_DEVICE_MAX_CONNECTIONS
exec torchrun \
    --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC_PER_NODE:-${gpus:-gpu}}" \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}" \
    --rdzv-id "${SLURM_JOB_ID:-sdp4bit}" \
    -m sdp4bit_lab pretrain --preset "$model" "${settings[@]}" \
    --seq-length 2048 --max-position-embeddings 2048 --recompute-granularity selective --no-reshard-after-forward \
    --strategy sdp4bit-paper --log-throughput --out "$run" "$@"
