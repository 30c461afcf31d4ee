"""Megatron-Core, imported once for all ranks of a file of tests: it takes each of them seconds.

Only for the process that ranks are copies of: `fake_cuda` changes torch for good.
"""

from __future__ import annotations

from importlib import import_module

from tests.engines import fake_cuda

fake_cuda.install()

for name in ("distributed", "models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel"):
    import_module(f"megatron.core.{name}")
