"""Train in replica groups that may fail and return: FSDP2 and sdp4bit inside a group, torchft between them.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    for group in 0 1; do
        torchrun --standalone --nproc-per-node 2 --max-restarts 9 \\
            examples/launch_torchft.py --group $group --topology 1 &
    done

Each torchrun is a replica group. Its two ranks represent two nodes: `--topology 1` says so. Gradients travel
between the nodes of a group in 4 bits, and between groups in fp32. Needs `pip install torchft`.
"""

import argparse

import torch
import torch.distributed as dist
import torchft
from launched import Run, start
from torch import nn
from torch.distributed.fsdp import FSDPModule


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, required=True, help="number of this replica group")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--topology", type=lambda text: text if text == "auto" else int(text), default="auto")
    options = parser.parse_args()

    # A seed per group: groups with equal seeds would round with the same random bits.
    run = Run(start(), topology=options.topology, seed=options.group)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupNCCL() if run.device.type == "cuda" else torchft.ProcessGroupGloo(),
        min_replica_size=1,
        # Without the state of sdp4bit, which changes in the forward, while another group may fetch this one's
        # state: a group that returns takes the weights and refreshes its replicas in full precision.
        state_dict=run.weights,
        load_state_dict=run.load_state_dict,
        replica_id=f"group-{options.group}-",
        use_async_quorum=False,  # load before the forward
    )

    def average(gradient: torch.Tensor) -> None:
        manager.allreduce(gradient).wait()

    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(average)  # of the shards that sdp4bit has reduced inside the group

    while run.step < options.steps:
        manager.start_quorum()
        loss = run.backward()
        if manager.should_commit():  # not if a group was lost in this step
            run.optimizer.step()
            run.step += 1
        run.optimizer.zero_grad()
        norm = nn.utils.get_total_norm(run.model.parameters()).full_tensor().item()  # equal in all groups
        if dist.get_rank() == 0:
            groups = manager.num_participants()
            print(f"step {run.step} of {groups} groups: norm of the weights {norm}, loss {loss}", flush=True)
    if dist.get_rank() == 0:
        print(run.comm.explain())
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
