"""Files of checkpoints: which are kept and found, what is refused, and what a crash leaves.

Layer: one rank in this process.
"""

from __future__ import annotations

import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from sdp4bit import ReplicaMismatchError
from sdp4bit_lab.common import files
from sdp4bit_lab.common.files import SUMS, write_sums
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain import checkpoint_files
from sdp4bit_lab.pretrain.checkpoint_files import find_checkpoints, open_checkpoint
from tests.lab.pretrain.saved_runs import TENSORS, SavedRun, flip_bit, load_step, names, save_step
from tests.ranks import one_rank

ROOT = Path(__file__).parents[3]
OF_RANK_0 = TENSORS.format(1)


@pytest.mark.gloo
def test_a_checkpoint_has_checksums_and_is_read_by_safetensors(tmp_path):
    with one_rank():
        path = save_step(tmp_path, 7)
        assert load_step(tmp_path) == load_step(path) == 7
        weight = load_file(path / OF_RANK_0)["model.weight"]
        assert torch.equal(weight, SavedRun(None, step=7).model.weight)
    assert names(tmp_path) == ["step-00000007"]
    assert names(path) == ["SHA256SUMS", "run.json", OF_RANK_0]
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=path, check=True, capture_output=True)
    # The folder may be moved: its place is nowhere in it.
    assert not any(str(tmp_path).encode() in (path / name).read_bytes() for name in names(path))


def test_the_last_saved_are_kept_and_loaded(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    with one_rank():
        save_step(elsewhere, 1)
        for step in (1, 2, 3):
            save_step(folder, step)
        # A run resumed from step 1 saves step 2 again: it continues from there, not from step 3.
        save_step(folder, 2)
        assert load_step(folder) == 2 and names(folder)[1:] == ["step-00000002", "step-00000003"]
        save_step(folder, 4, keep_last=2)
        assert names(folder) == ["step-00000002", "step-00000004"]
        (folder / "step-00000000").symlink_to(elsewhere / "step-00000001")
        save_step(folder, 5, keep_last=1)
        assert names(folder) == ["step-00000000", "step-00000005"]
        assert load_step(elsewhere) == 1


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: flip_bit(p / OF_RANK_0), f"the checksum of {OF_RANK_0} differs"),
    (lambda p: (p / OF_RANK_0).unlink(), f"{OF_RANK_0} cannot be read"),
    (lambda p: flip_bit(p / "run.json"), "the checksum of run.json differs"),
    (lambda p: (p / SUMS).write_text("{"), "SHA256SUMS is not a list of this folder's files"),
    (lambda p: (p / SUMS).unlink(), "SHA256SUMS cannot be read"),
]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_both(tmp_path):
    with one_rank():
        for step in (2, 3):
            save_step(tmp_path, step)
        damaged, intact = tmp_path / "step-00000003", tmp_path / "intact"
        damaged.rename(intact)
        for break_it, reason in DAMAGES:
            shutil.copytree(intact, damaged)
            break_it(damaged)
            with pytest.warns(UserWarning, match=f"00003 is damaged: .*({reason}).*from .*step-00000002"):
                assert load_step(tmp_path) == 2
            with pytest.raises(SettingError, match=f"step-00000003 is damaged: .*({reason})"):
                open_checkpoint(damaged)
            shutil.rmtree(damaged)
        intact.rename(damaged)
        flip_bit(damaged / "run.json")
        flip_bit(tmp_path / "step-00000002" / OF_RANK_0)
        with pytest.raises(SettingError, match=r"no intact checkpoint found\. .*00000.*; .*00000"):
            open_checkpoint(tmp_path)
        with pytest.raises(SettingError, match="no checkpoint found"):
            open_checkpoint(tmp_path / "empty")


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(call: int) -> Iterator[list[str]]:
    """End with `Killed` instead of the given call that changes the disk; yield the calls before."""
    calls: list[str] = []

    def counted(owner: object, name: str) -> AbstractContextManager[object]:
        function = getattr(owner, name)

        def count(*args: object, **kwargs: object) -> object:
            if len(calls) == call:
                raise Killed
            calls.append(name)
            return function(*args, **kwargs)

        return mock.patch.object(owner, name, count)

    with ExitStack() as stack:
        for name in ("write_text", "rename", "unlink", "mkdir"):
            stack.enter_context(counted(Path, name))
        stack.enter_context(counted(os, "fsync"))
        stack.enter_context(counted(shutil, "rmtree"))
        yield calls


def test_a_crash_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    with one_rank():
        for call in range(100):
            folder = tmp_path / str(call)
            save_step(folder, 1)
            save_step(folder, 2)
            run = SavedRun(folder, step=2, keep_last=1)  # which replaces one, and deletes the other
            try:
                with killed_at(call):
                    run.save()
            except BaseException:  # torch wraps it
                run.checkpointer.close()
                assert load_step(folder) == 2
                save_step(folder, 2)  # the same step once more
                save_step(folder, 3, keep_last=1)
                assert load_step(folder) == 3 and names(folder) == ["step-00000003"]
                continue
            break
    assert 15 < call < 100


def test_tensors_that_share_memory_or_are_transposed_are_saved(tmp_path):
    with one_rank():
        for folder, state in ((tmp_path, torch.arange(12.0).view(3, 4).t()), (None, torch.zeros(4, 3))):
            run = SavedRun(folder)
            run.communication.state = {"replica": {"a": state, "b": state, "c": {"none": torch.empty(0, 2)}}}
            if folder is not None:
                run.save()
        run.checkpointer.load(tmp_path)
        replica = run.communication.state["replica"]
        for name in ("a", "b"):
            assert torch.equal(replica[name], torch.arange(12.0).view(3, 4).t())
        assert replica["c"]["none"].shape == (0, 2)


def test_the_tensors_of_a_rank_are_in_files_that_fit_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_FILE_BYTES", 5_000)
    with one_rank():
        path = save_step(tmp_path, 2)
        assert load_step(tmp_path) == 2
    tensors = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    assert len(tensors) == 4
    for of_file in tensors.values():
        sizes = [tensor.nbytes for tensor in of_file.values()]
        assert sum(sizes) - max(sizes) < 5_000


class Attack:
    """A pickle of this creates a file when it is loaded without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def reseal(path: Path) -> None:
    """Let the checksums be those of the tampered files, as an attacker would."""
    (path / SUMS).unlink()
    write_sums(path, known={})


def with_pickles_of_torch(path: Path, attack: Attack) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(attack))
    torch.save(attack, path / "__0_0.safetensors.pt")


def with_a_pickle_for_tensors(path: Path, attack: Attack) -> None:
    torch.save(attack, path / OF_RANK_0)


def with_an_older_pickle(path: Path, attack: Attack) -> None:
    torch.save(attack, path / "__0_0.distcp")


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Change the tensors of rank 0, and the places of these parts in the whole tensors."""
    with safe_open(path / OF_RANK_0, framework="pt") as file:
        places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    tensors = load_file(path / OF_RANK_0)
    change(tensors, places)
    save_file(tensors, path / OF_RANK_0, metadata={"DCP_SHARDING_INFO": json.dumps(places)})


def with_a_hole(path: Path, attack: Attack) -> None:
    rewrite(path, lambda _, places: places["model.weight"]["saved_offsets"].__setitem__(0, 3))


def with_a_part_twice(path: Path, attack: Attack) -> None:
    shutil.copy(path / OF_RANK_0, path / TENSORS.format(2))


def without_a_tensor(path: Path, attack: Attack) -> None:
    rewrite(path, lambda tensors, _: tensors.pop("model.weight"))


def with_another_size(path: Path, attack: Attack) -> None:
    rewrite(path, lambda tensors, _: tensors.update({"model.weight": torch.zeros(50, 41)}))


def with_places_of_nothing(path: Path, attack: Attack) -> None:
    rewrite(path, lambda _, places: places.clear())


def with_places_that_are_words(path: Path, attack: Attack) -> None:
    rewrite(path, lambda _, places: places["model.weight"].update({"saved_offsets": ["a", "b"]}))


INCOMPLETE = r"the \.safetensors files do not have all tensors"


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (with_pickles_of_torch, None),
        (with_a_pickle_for_tensors, INCOMPLETE),
        (with_an_older_pickle, r"has \.distcp files of an older version: convert it"),
        (with_a_hole, f"{INCOMPLETE} .model.weight: 2000 of 2120 values"),
        (with_a_part_twice, INCOMPLETE),
        (without_a_tensor, "model.weight is missing"),
        (with_another_size, "model.weight has shape .50, 41., but this model needs .50, 40."),
        (with_places_of_nothing, INCOMPLETE),
        (with_places_that_are_words, INCOMPLETE),
    ],
)
def test_a_tampered_checkpoint_executes_nothing(tamper, message, tmp_path):
    with one_rank():
        path = save_step(tmp_path, 1)
        tamper(path, Attack(tmp_path / "executed"))
        if message is None:
            assert load_step(path) == 1
        reseal(path)
        if message is None:
            assert load_step(path) == 1
        else:
            with pytest.raises(SettingError, match=message):
                load_step(path)
        assert not (tmp_path / "executed").exists()


@pytest.mark.gloo
def test_a_checkpoint_of_an_older_version_is_refused_until_it_is_converted_as_documented(tmp_path):
    """Saved as before: one pickle of torch per rank, and another one for the places of the tensors."""
    with one_rank():
        path, run = save_step(tmp_path, 3), SavedRun(None, step=3)
        writer = FileSystemWriter(path)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        save_state(run.checkpointer._state(), storage_writer=writer, planner=planner)
        (path / OF_RANK_0).unlink()
        (path / "tensors.json").write_text("{}")
        reseal(path)
        with pytest.raises(SettingError, match=r"00003 has \.distcp files of an older version: convert it"):
            load_step(tmp_path)
    _, _, section = (ROOT / "docs" / "checkpoints.md").read_text().partition("## Checkpoints of older")
    commands = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    script = "\n".join(["set -e", f'python() {{ {shlex.quote(sys.executable)} "$@"; }}', *commands])
    done = subprocess.run(["bash", "-c", script], cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with one_rank():
        assert load_step(tmp_path) == 3
    assert names(path) == ["SHA256SUMS", "run.json", "tensors.safetensors"]


NESTED = 100_000 * "[" + 100_000 * "]"
BAD_VALUES = {
    "progress": ['{"step": "1", "samples": 0}', "[]", "7"],
    "shape": ["[1]", NESTED],
    "world_size": ["-1"],
    "serial": ["null", '"2"', "[2]", "1e999"],
    "x": ["1", NESTED],
}


def test_a_record_with_other_values_is_damage_and_the_older_checkpoint_is_found(tmp_path):
    with one_rank():
        older, path = save_step(tmp_path, 1), save_step(tmp_path, 2)
        record = json.loads((path / "run.json").read_text())
        for name, values in BAD_VALUES.items():
            for value in values:
                text = json.dumps({**record, name: "VALUE"}).replace('"VALUE"', value)
                (path / "run.json").write_text(text)
                reseal(path)
                assert find_checkpoints(tmp_path) == [older, path]
                with pytest.warns(UserWarning, match=r"00002 is damaged: run\.json"):
                    assert open_checkpoint(tmp_path)[0] == older
        # The time of the save is information, which nothing depends on.
        for value in (None, "now", [1]):
            (path / "run.json").write_text(json.dumps({**record, "saved_at": value}))
            reseal(path)
            assert open_checkpoint(tmp_path)[0] == path


def test_a_clock_that_goes_back_decides_nothing(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    with one_rank():
        for step in (3, 6):
            save_step(tmp_path, step, keep_last=2)
        now -= 3600
        for step in (9, 12):
            path = save_step(tmp_path, step, keep_last=2)
            assert find_checkpoints(tmp_path)[0] == path and load_step(tmp_path) == step
        assert names(tmp_path) == ["step-00000009", "step-00000012"]


def test_copies_that_differ_are_not_saved(tmp_path):
    with one_rank():
        run = SavedRun(tmp_path, step=1)
        run.communication.state["differs"] = True
        with pytest.raises(ReplicaMismatchError):
            run.save()
    assert names(tmp_path) == []


def test_a_folder_has_one_run_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.1)
    with one_rank():
        first = SavedRun(tmp_path, step=1)
        with pytest.raises(SettingError, match=f"another run writes here .process {os.getpid()} on "):
            SavedRun(tmp_path, step=2)
        first.save()
        first.checkpointer.close()
        save_step(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


DIFFERENCES = {
    "seed": (2, "was trained with seed 1, this run has 2"),
    "dataset": ("other", "was trained on different text"),
    "strategy": ("tlq", "was saved with strategy sdp4bit and continues with tlq: replicas are refreshed"),
    "layout": ("two", "was saved with world size 1 .one. and is loaded with 1 .two.: .* not bit-exact"),
}


SETTINGS = {
    **{"lr": 0.01, "min_lr": 0.001, "lr_warmup_iters": 2, "lr_decay_iters": 3, "lr_decay_style": "linear"},
    **{"adam_beta2": 0.95, "global_batch_size": 8, "clip_grad": 1.0},
}
LONGER = SETTINGS | {"lr_decay_iters": 7}


def warnings_of_load(folder: Path, settings: dict[str, Any], **options: bool) -> list[str]:
    """Load a checkpoint with these settings; return the warnings."""
    run = SavedRun(None, settings=settings)
    run.checkpointer._config = replace(run.checkpointer._config, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.checkpointer.load(folder)
    return [str(each.message) for each in caught if "continues differently" in str(each.message)]


def test_one_warning_has_all_settings_that_change_the_numbers_and_the_next_rates(tmp_path):
    with one_rank():
        save_step(tmp_path, 3, settings=SETTINGS)
        assert warnings_of_load(tmp_path, SETTINGS) == []
        (text,) = warnings_of_load(tmp_path, LONGER | {"adam_beta2": 0.99, "global_batch_size": 16})
        changed = "--lr-decay-iters 3 (now 7), --adam-beta2 0.95 (now 0.99), --global-batch-size 8 (now 16)"
        assert f"it was trained with {changed}; step 4 has the learning rate 0.0064, by the saved" in text
        assert "by the saved schedule 0.001 (--override-opt_param-scheduler" in text


def test_the_schedule_is_replaced_without_a_warning_if_asked(tmp_path):
    with one_rank():
        save_step(tmp_path, 3, settings=SETTINGS)
        assert warnings_of_load(tmp_path, LONGER, override_opt_param_scheduler=True) == []
        # Settings that are not of the schedule are still warned of.
        changed = LONGER | {"clip_grad": 0.0}
        (text,) = warnings_of_load(tmp_path, changed, override_opt_param_scheduler=True)
        assert text.endswith("it was trained with --clip-grad 1.0 (now 0.0)")


def test_what_differs_from_the_saved_run_is_warned_of(tmp_path):
    with one_rank():
        save_step(tmp_path, 3)
        for name, (value, message) in DIFFERENCES.items():
            run = SavedRun(None, **{name: value})
            with pytest.warns(UserWarning, match=message):
                assert run.checkpointer.load(tmp_path).step == 3
            exact = name != "strategy"
            assert torch.equal(run.communication.state["replica"]["a.b"], torch.full((3,), 3.0 * exact))
            assert run.communication.state["steps"] == 3
