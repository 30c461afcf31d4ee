"""The plugin for Axolotl, loaded by Axolotl's own manager.

Layer: 2 gloo processes, each representing a node.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-ecosystem")
pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed: make test-ecosystem")

from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault
from pydantic import ValidationError

from sdp4bit.trainers.hf import SDP4BitCallback
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import WORLD
from tests.ecosystem.trainers.hf import PRELOAD, trainer_of
from tests.ranks import run_ranks

__all__ = ["PRELOAD"]
PLUGIN = "sdp4bit.trainers.axolotl.SDP4BitPlugin"


def manager() -> PluginManager:
    found = PluginManager.get_instance()
    found.register(PLUGIN)
    return found


def train_with_the_plugin(folder: Path) -> None:
    on_cpu.as_launched()
    trainer = trainer_of(folder, None, save_strategy="no")
    # Axolotl's configuration is a dictionary in which missing keys are None.
    settings = DictDefault({"sdp4bit_preset": "sdp4bit-w2g3", "sdp4bit_ranks_per_node": 1})
    assert manager().add_callbacks_post_trainer(settings, trainer) == []
    callback = trainer.callback_handler.callbacks[0]
    assert isinstance(callback, SDP4BitCallback)
    trainer.train()
    assert callback.comm is not None
    assert "int2/" in callback.comm.explain() and callback.comm.stats()["last_step"]["inter_bytes"] > 0


def test_the_plugin_quantizes_a_trainer_with_the_settings_of_the_file(tmp_path: Path) -> None:
    run_ranks(train_with_the_plugin, WORLD, tmp_path)


def test_wrong_types_in_the_file_are_errors() -> None:
    (path,) = manager().get_input_args()
    module, _, name = path.rpartition(".")
    arguments = getattr(importlib.import_module(module), name)
    assert arguments(sdp4bit_ranks_per_node=8).sdp4bit_preset is None
    with pytest.raises(ValidationError, match="sdp4bit_ranks_per_node"):
        arguments(sdp4bit_ranks_per_node="many")
