"""A config registry for torchtitan, which needs GPUs: its Llama 3 models with 4-bit communication.

    torchrun --nproc-per-node 8 -m torchtitan.train --module examples.trainer_torchtitan \\
        --config llama3_debugmodel_sdp4bit --sdp4bit.ranks-per-node 4

Eight ranks stand for two nodes: `--sdp4bit.ranks-per-node 4` says so. On a cluster leave it out.
"""

from dataclasses import replace

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel

from sdp4bit.trainers.torchtitan import SDP4BitTrainer, quantize


def llama3_debugmodel_sdp4bit() -> SDP4BitTrainer.Config:
    """Return torchtitan's own config with quantized communication."""
    return quantize(llama3_debugmodel())


def llama3_8b_sdp4bit() -> SDP4BitTrainer.Config:
    """Return torchtitan's own config with quantized communication."""
    return quantize(llama3_8b())


def llama3_1b_sdp4bit() -> SDP4BitTrainer.Config:
    """Return torchtitan's 1B model, which has no config of its own, with the config of 8B."""
    config = replace(llama3_8b(), model_spec=model_registry("1B"), hf_assets_path="./assets/hf/Llama-3.2-1B")
    return quantize(config)
