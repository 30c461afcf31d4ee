#!/usr/bin/env bash
# The five steps of docs/first-hour.md, on each of several machines. Two machines without Slurm and Kubernetes start it
# themselves, at about the same time and with the same arguments, in their checkouts of this repository:
#
#   HEAD=10.0.0.1 examples/cluster/first_hour.sh examples/launched.py --checkpoints /shared/launched
#
# HEAD is the address of the first machine, as the second one sees it. The rest is the training program. slurm.sbatch
# and kubeflow.yaml start this file on their nodes. It stops at the first step that fails. Without GPUs:
#
#   RANKS_PER_NODE=1 SELFTEST="--device cpu --quick" HEAD=... examples/cluster/first_hour.sh ...
set -euo pipefail

# ---- Values of your site: change them here, or set them in the environment --------------------------------------------
HEAD=${HEAD:-${PET_MASTER_ADDR:-}} # Kubeflow sets PET_*
NNODES=${NNODES:-${PET_NNODES:-2}}
RANKS_PER_NODE=${RANKS_PER_NODE:-${PET_NPROC_PER_NODE:-gpu}} # a process for each GPU; without GPUs, a number
STEPS=${STEPS:-selftest probe plan train} # STEPS=train starts the training alone
OUT=${OUT:-runs/first-hour}
PORT=${PORT:-29500} # and the two ports above it, open between the machines
# The model that you want to train, and the TFLOP/s that one of your GPUs reaches on it: about 40 % of the data sheet's
# dense bf16 rate, which is 125 for an A100, 145 for an L40S and 400 for an H100.
PLAN=${PLAN:---preset 1.3B --device-tflops 400}
SELFTEST=${SELFTEST:-} # options: `--device cpu --quick` without GPUs
PROBE=${PROBE:-}       # options: `--megabytes 256` on links of 100 Gbit/s and more
RESTARTS=${RESTARTS:-3} # of the training, after each of which it continues from its last checkpoint
# source .venv/bin/activate

stop() {
    echo "first_hour.sh: $*" >&2
    exit 2
}

test -n "$HEAD" || stop "set HEAD to the address of the first machine, as the second one sees it"

# ---- 1. Network variables -----------------------------------------------------------------------------------------------
# The interface that leads to HEAD. Another one is faster? Set INTERFACE to its name in `ip -brief address`.
address=$(getent ahosts "$HEAD" | awk 'NR == 1 { print $1 }') || stop "the name $HEAD is not known here: set HEAD to an address"
case $address in
127.* | ::1) stop "$HEAD is $address on this machine, which the others cannot reach: set HEAD to its address in their network" ;;
esac
# The address that this machine uses towards HEAD, which is HEAD's on the first machine.
own_address=$(python -c 'import socket, sys
kind, *_, place = socket.getaddrinfo(sys.argv[1], 1, type=socket.SOCK_DGRAM)[0]
probe = socket.socket(kind, socket.SOCK_DGRAM)
probe.connect(place)
print(probe.getsockname()[0])' "$address" 2>/dev/null) || stop "this machine has no route to HEAD=$HEAD: compare \`ip -brief address\` of the machines"
if [ -z "${INTERFACE:-}" ]; then
    command -v ip >/dev/null || stop "no command ip: set INTERFACE to the network interface between the machines"
    INTERFACE=$(ip -oneline address | awk -v own="$own_address/" 'index($4, own) == 1 { print $2; exit }')
fi
interfaces=$(awk -F: 'NR > 2 { gsub(/ /, "", $1); printf " %s", $1 }' /proc/net/dev)
[[ "$interfaces " = *" $INTERFACE "* ]] || stop "there is no interface $INTERFACE on this machine, but$interfaces"
export NCCL_SOCKET_IFNAME="=$INTERFACE" GLOO_SOCKET_IFNAME=$INTERFACE
# InfiniBand and RoCE: with several adapters, name those between the machines, as `ibdev2netdev` or `rdma link` list them.
# export NCCL_IB_HCA=mlx5_0,mlx5_1
# export NCCL_NET=IB # fails instead of falling back to TCP
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # for restarts, see docs/faults.md, "torchrun's store"
echo "== 1. network: $(hostname) uses $INTERFACE to $HEAD"
#
#   == 1. network: node0 uses eth0 to 10.0.0.1
#   == 1. network: node1 uses eth0 to 10.0.0.1
#
# docker0, a wireless interface or that of the management network: set INTERFACE.

mkdir -p "$OUT"
# What would end a later step ends before the first one.
for step in $STEPS; do
    case $step in
    selftest | probe) ;;
    plan)
        # shellcheck disable=SC2086 # options are words
        sdp4bit plan $PLAN >/dev/null || stop "PLAN=\"$PLAN\" is not what sdp4bit plan takes, see above"
        ;;
    train) test $# -gt 0 || stop "step 5 needs the training program: first_hour.sh PROGRAM OPTIONS" ;;
    *) stop "$step is no step: there are selftest, probe, plan and train" ;;
    esac
done

# Start a program on the ranks of all machines. Each step has its own port, because a machine may be one step ahead.
launch() {
    local number=$1 restarts=$2 port=$((PORT + $1)) is_head=false began=$SECONDS told=-30 seconds
    shift 2
    if [ "$own_address" = "$address" ]; then
        is_head=true
        echo "waiting at port $port until all of the $NNODES machines are in this step"
    else
        until timeout 5 bash -c "exec 3<>/dev/tcp/$address/$port" 2>/dev/null; do
            seconds=$((SECONDS - began))
            if [ $((seconds - told)) -ge 30 ]; then
                echo "waiting for $HEAD, port $port: start this script there, too ($seconds s)"
                told=$seconds
            fi
            test $seconds -lt 600 || stop "nothing answers at $HEAD, port $port: is HEAD the address of the first machine, is this script running there, and does a firewall let the port through?"
            sleep 2
        done
    fi
    echo "rank 0 prints the results, which is on one of the machines"
    # torchrun would look up this machine's name, which leads to 127.0.1.1 on Debian and Ubuntu, or nowhere.
    torchrun --nnodes "$NNODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$restarts" \
        --rdzv-backend c10d --rdzv-id "${JOB:-first-hour}-$number" --rdzv-endpoint "$HEAD:$port" \
        --rdzv-conf "is_host=$is_head" --local-addr "$own_address" "$@"
}

for step in $STEPS; do
    case $step in
    # ---- 2. Does the library work on these machines? ---------------------------------------------------------------------
    selftest)
        echo "== 2. selftest"
        # shellcheck disable=SC2086
        launch 0 0 -m sdp4bit_lab selftest --json "$OUT/selftest.json" $SELFTEST
        #
        #   Result: all checks passed; measured 23.1 GB/s between nodes (per node) and ...
        #
        # "waiting ..." and nothing else: the machines do not meet. HEAD must be an address of the first one that the others
        # reach, and a firewall must let the ports through. A check that fails prints a command that repeats it.
        ;;
    # ---- 3. How fast are the link, the kernels and the hosts? ------------------------------------------------------------
    probe)
        echo "== 3. probe"
        rm -f "$OUT/probe.json" "$OUT/nccl.$(hostname)".*
        # shellcheck disable=SC2086
        NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET NCCL_DEBUG_FILE="$OUT/nccl.%h.%p" \
            launch 1 0 -m sdp4bit_lab probe --out "$OUT/probe.json" $PROBE
        cat "$OUT/nccl.$(hostname)".* 2>/dev/null | grep -ohE 'Using network .*|NET/[^ ]* : Using .*' | sort -u || true
        #
        #   inter-node, per node: 11.4 GB/s per direction ...
        #   NET/IB : Using [0]mlx5_0:1/RoCE ...
        #
        # Compare the rate with docs/slow-nodes.md. A tenth of it, or NET/Socket on InfiniBand: NCCL uses the wrong
        # interface. Half of it: one of two adapters. A slowest round with a tenth of the fastest: somebody else uses
        # the link. Hosts that differ: start one of them alone, docs/slow-nodes.md.
        ;;
    # ---- 4. Does quantization pay for this model? ------------------------------------------------------------------------
    plan)
        echo "== 4. plan"
        # Every machine has the measurements, and so the same plan, by which all of them end or go on.
        # shellcheck disable=SC2086
        plan=$(sdp4bit plan --probe "$OUT/probe.json" $PLAN)
        # In a job with one output the first machine prints.
        if [ "${SLURM_NODEID:-${PET_NODE_RANK:-0}}" = 0 ]; then echo "$plan"; fi
        #
        #   recommendation: enable: 3.61 times as fast as with fp32 gradients, 2.45 with bf16 gradients
        #
        if [[ $plan == *"recommendation: do not enable"* && " $STEPS " == *" train "* ]]; then
            stop "leave sdp4bit off, so nothing is trained; STEPS=train trains with it nevertheless"
        fi
        ;;
    # ---- 5. Train --------------------------------------------------------------------------------------------------------
    train)
        echo "== 5. train"
        launch 2 "$RESTARTS" "$@"
        #
        #   group     values/rank  ranks  intra B/step  inter B/step
        #   layers.0      524,928  2 x 8  ...
        #
        # The third column is nodes x ranks per node. 1 x 16 quantizes nothing and 16 x 1 too much: docs/launching.md.
        ;;
    esac
done
echo "== done: $STEPS"
