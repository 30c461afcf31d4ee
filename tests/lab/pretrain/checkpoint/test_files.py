"""Checkpoints on disk: what they consist of, which are kept and found, and what is refused.

Layer: one rank in this process.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint.config import CheckpointConfig
from sdp4bit_lab.pretrain.checkpoint.files import digest_file, read_manifest, write_manifest
from sdp4bit_lab.pretrain.checkpoint.load import open_checkpoint
from sdp4bit_lab.pretrain.checkpoint.storage import METADATA, MetadataUnpickler
from tests.lab.pretrain.checkpoint.saved_runs import load_step, names, one_rank, save_step, tensors_of


def test_what_a_checkpoint_consists_of(tmp_path):
    with one_rank():
        path = save_step(tmp_path, 7)
        assert load_step(tmp_path) == load_step(path) == 7
    assert path == tmp_path / "step-00000007"
    assert names(tmp_path) == ["latest", "step-00000007"]
    assert (tmp_path / "latest").read_text() == "step-00000007\n"
    assert names(path) == [".metadata", "__0_0.distcp", "manifest.json", "run.json", "tokenizer.json"]
    manifest = read_manifest(path)
    assert manifest == {name: digest_file(path / name) for name in names(path) if name != "manifest.json"}
    # Where it was written is nowhere in it.
    assert not any(str(tmp_path).encode() in (path / name).read_bytes() for name in names(path))


def test_the_format_is_that_of_torch(tmp_path):
    import torch.distributed.checkpoint as dcp

    with one_rank():
        path = save_step(tmp_path, 7)
        expected = tensors_of(7)
        state = {"model": {"a": torch.zeros(40, 50), "b": torch.zeros(())}}
        dcp.load(state, checkpoint_id=path)
    assert torch.equal(state["model"]["a"], expected["model.a"])
    assert torch.equal(state["model"]["b"], expected["model.b"])


def test_the_newest_are_kept_and_nothing_of_other_continuations_is_deleted(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "run"
    with one_rank():
        save_step(elsewhere, 1)
        for step in (1, 2, 3):
            save_step(folder, step)
        (folder / "step-00000000").symlink_to(elsewhere / "step-00000001")
        # A run resumed from step 1 comes to step 2 again, and keeps two.
        save_step(folder, 2, keep_last=2)
        assert names(folder) == [
            *("latest", "step-00000000", "step-00000001", "step-00000002", "step-00000003")
        ]
        assert load_step(folder) == 2
        save_step(folder, 4, keep_last=2)
        assert names(folder) == ["latest", "step-00000000", "step-00000003", "step-00000004"]
        save_step(folder, 5, keep_last=1)
        assert names(folder) == ["latest", "step-00000000", "step-00000005"]
        assert load_step(elsewhere) == 1


def test_settings_that_do_nothing_are_refused():
    with pytest.raises(SettingError, match="--auto-resume has no effect without --save"):
        CheckpointConfig(auto_resume=True)
    with pytest.raises(SettingError, match="--keep-last 2 has no effect without --save"):
        CheckpointConfig(keep_last=2)
    with pytest.raises(SettingError, match="--keep-last 0 must be at least 1"):
        CheckpointConfig(save=Path("x"), keep_last=0)
    with pytest.raises(SettingError, match="--save-interval 0 must be at least 1"):
        CheckpointConfig(save=Path("x"), save_interval=0)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda p: flip_bit(p / "__0_0.distcp"), "__0_0.distcp does not have the checksum"),
    "cut tensors": (lambda p: cut(p / "__0_0.distcp"), r"__0_0.distcp has [\d,]+ bytes instead of"),
    "lost tensors": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp cannot be read"),
    "metadata": (lambda p: flip_bit(p / METADATA), ".metadata does not have the checksum"),
    "record": (lambda p: flip_bit(p / "run.json"), "run.json does not have the checksum"),
    "manifest": (lambda p: (p / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    "manifest of others": (lambda p: flip_bit(p / "manifest.json"), "does not have the checksum"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "it has no manifest.json"),
    "nothing": (shutil.rmtree, "it is not there"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_both(damage, tmp_path):
    break_it, reason = DAMAGES[damage]
    with one_rank():
        for step in (1, 2, 3):
            save_step(tmp_path, step)
        break_it(tmp_path / "step-00000003")
        with pytest.warns(
            UserWarning, match=f"step-00000003 is damaged: .*{reason}.*Resuming from .*step-00000002"
        ):
            assert load_step(tmp_path) == 2
        # Asked for by name, it is refused.
        if (tmp_path / "step-00000003").is_dir():
            with pytest.raises(SettingError, match=f"step-00000003 is damaged: .*{reason}"):
                open_checkpoint(tmp_path / "step-00000003")
        shutil.rmtree(tmp_path / "step-00000001")
        flip_bit(tmp_path / "step-00000002" / "__0_0.distcp")
        with pytest.raises(SettingError, match=r"no complete checkpoint there\. .*00000003.*; .*00000002"):
            open_checkpoint(tmp_path)


def test_latest_leads_and_may_be_missing(tmp_path):
    with one_rank():
        with pytest.raises(SettingError, match="no checkpoint there"):
            open_checkpoint(tmp_path)
        for step in (1, 2, 3):
            save_step(tmp_path, step)
        # Steps after the one that `latest` names are of a continuation that was given up.
        (tmp_path / "latest").write_text("step-00000002\n")
        assert load_step(tmp_path) == 2
        for content in ("../../etc", "step-x", ""):
            (tmp_path / "latest").write_text(content)
            assert load_step(tmp_path) == 3
        (tmp_path / "latest").unlink()
        assert load_step(tmp_path) == 3


class Attack:
    """A pickle of this creates a file when it is loaded without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def reseal(path: Path) -> None:
    """Let the manifest say of the tampered files what they are now, as an attacker would have it."""
    write_manifest(path, {name: digest_file(path / name) for name in names(path) if name != "manifest.json"})


def metadata_of(path: Path) -> Metadata:
    with (path / METADATA).open("rb") as file:
        return MetadataUnpickler(file).load()


def with_attack_in_metadata(path: Path, attack: Attack) -> None:
    (path / METADATA).write_bytes(pickle.dumps(attack))


def with_attack_in_planner_data(path: Path, attack: Attack) -> None:
    metadata = metadata_of(path)
    metadata.planner_data = attack
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def with_attack_in_a_tensor(path: Path, attack: Attack) -> None:
    metadata = metadata_of(path)
    with (path / "__0_0.distcp").open("ab") as file:
        start = file.tell()
        torch.save(attack, file)
        end = file.tell()
    for info in metadata.storage_data.values():
        info.offset, info.length = start, end - start
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def with_attack_in_a_value(path: Path, attack: Attack) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    with_attack_in_a_tensor(path, attack)
    metadata = metadata_of(path)
    metadata.state_dict_metadata["model.b"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("model.b")] = next(iter(metadata.storage_data.values()))
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def with_another_file(path: Path, attack: Attack) -> None:
    torch.save(torch.zeros(3), path.parent / "secret")
    metadata = metadata_of(path)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def with_a_hole(path: Path, attack: Attack) -> None:
    metadata = metadata_of(path)
    metadata.state_dict_metadata["model.a"].chunks.clear()
    (path / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (with_attack_in_metadata, "mkdir has no place in the metadata of a checkpoint; it was not executed"),
        (with_attack_in_planner_data, "mkdir has no place in the metadata"),
        (with_attack_in_a_tensor, "cannot be loaded: rank 0: UnpicklingError"),
        (with_attack_in_a_value, "BytesStorageMetadata has no place in the metadata"),
        (with_another_file, "does not describe the files"),
        (with_a_hole, "does not describe the files"),
    ],
)
def test_a_tampered_checkpoint_executes_nothing(tamper, message, tmp_path):
    with one_rank():
        path = save_step(tmp_path, 1)
        tamper(path, Attack(tmp_path / "executed"))
        with pytest.raises(SettingError, match=r"does not have the checksum|bytes instead of"):
            load_step(path)
        reseal(path)
        with pytest.raises(SettingError, match=message):
            load_step(path)
        assert not (tmp_path / "executed").exists()


def test_the_attacks_would_work_on_what_does_not_guard_against_them(tmp_path):
    import torch.distributed.checkpoint as dcp

    with one_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = save_step(tmp_path, 1)
        with_attack_in_planner_data(path, Attack(tmp_path / "executed"))
        dcp.load({"model.b": torch.zeros(())}, checkpoint_id=path)
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("progress", {"step": "1", "samples": 0}),
        ("progress", {}),
        ("shape", [1]),
        ("world_size", -1),
        ("x", 1),
    ],
)
def test_a_record_of_something_else_is_damage(key, value, tmp_path):
    with one_rank():
        path = save_step(tmp_path, 1)
        record = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps({**record, key: value}))
        reseal(path)
        if (key, value) == ("progress", {}):
            # Counters that are not there are zero.
            assert open_checkpoint(path).record.progress.step == 0
            return
        with pytest.raises(SettingError, match=r"run\.json"):
            open_checkpoint(path)
