"""A config registry for torchtitan, which needs GPUs: its small Llama 3 with 4-bit communication.

    torchrun --nproc-per-node 8 -m torchtitan.train --module examples.trainer_torchtitan \\
        --config llama3_debugmodel_sdp4bit --sdp4bit.ranks-per-node 4

Eight ranks stand for two nodes: `--sdp4bit.ranks-per-node 4` says so. On a cluster leave it out.
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from sdp4bit.trainers.torchtitan import SDP4BitTrainer, quantize


def llama3_debugmodel_sdp4bit() -> SDP4BitTrainer.Config:
    """Return torchtitan's own config with quantized communication."""
    return quantize(llama3_debugmodel())
