"""Runs that save while they train, fail while they save, and are resumed: bit for bit, or close.

Layer: gloo, 2 processes that stand for 2 nodes; resumes run in new processes. Events, not clocks, decide what
happens beside what.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint import save as checkpoint_save
from sdp4bit_lab.pretrain.checkpoint.checkpointer import Checkpointer
from sdp4bit_lab.pretrain.checkpoint.config import CheckpointConfig
from sdp4bit_lab.pretrain.checkpoint.files import CheckpointError, digest_file, write_manifest
from sdp4bit_lab.pretrain.checkpoint.storage import METADATA, MetadataUnpickler
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.trainer import pretrain
from tests.lab.pretrain.tiny_runs import losses, small, this_rank, train_here, write_text
from tests.ranks import run_ranks

LIMIT = 200.0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    """Return settings of 8 steps on 2 nodes, with dropout."""
    return small(
        text, tmp_path_factory.mktemp("runs") / "straight", parallel=ParallelConfig(ranks_per_node=1)
    )


def but(
    run: PretrainConfig, name: str, *, save: str = "", load: str = "", **checkpoint: object
) -> PretrainConfig:
    """Return the run with a log and checkpoints of its own, all beside those of the straight run."""
    base = run.logging.out.parent
    return replace(
        run,
        logging=replace(run.logging, out=base / name),
        checkpoint=CheckpointConfig(
            save=base / save if save else None, load=base / load if load else None, **checkpoint
        ),
    )


@contextmanager
def held(*, until: threading.Event) -> Iterator[None]:
    """Hold saves back before they write anything, until the event."""
    write = checkpoint_save.save_state

    def write_later(*args: object, **kwargs: object) -> object:
        assert until.wait(60), "the event did not come"
        return write(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_save, "save_state", write_later)
        yield


@contextmanager
def after_step(step: int, call: Callable[[Checkpointer], object]) -> Iterator[list[int]]:
    """Call the function at the end of a step; yield the steps that were trained."""
    poll = Checkpointer.poll
    steps: list[int] = []

    def poll_later(self: Checkpointer) -> None:
        steps.append(len(steps) + 1)
        if steps[-1] == step:
            call(self)
        poll(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "poll", poll_later)
        yield steps


def straight_and_overlapped(run: PretrainConfig) -> None:
    """Write the checkpoint of step 4 after step 7 was trained, from what the state was after step 4."""
    train_here(run)
    trained = threading.Event()
    with held(until=trained), after_step(7, lambda _: trained.set()):
        train_here(but(run, "overlapped", save="overlapped-saved", save_interval=4))
    train_here(but(run, "at-once", save="at-once-saved", save_interval=4, async_save=False))


@pytest.fixture(scope="module")
def straight(run: PretrainConfig) -> dict[tuple[str, int], float]:
    run_ranks(straight_and_overlapped, 2, run, timeout=LIMIT)
    return losses(run.logging.out)


@pytest.mark.slow
def test_saving_beside_training_changes_nothing_and_resumes_bit_for_bit(run, straight):
    base = run.logging.out.parent
    assert losses(base / "overlapped") == losses(base / "at-once") == straight
    for name in ("overlapped", "at-once"):
        assert sorted(path.name for path in (base / f"{name}-saved").iterdir()) == [
            *("latest", "step-00000004", "step-00000008")
        ]
    # Of the same moment, byte for byte: nothing of the steps that were trained meanwhile.
    tensors = "step-00000004/__{rank}_0.distcp"
    for rank in range(2):
        file = tensors.format(rank=rank)
        assert (base / "overlapped-saved" / file).read_bytes() == (base / "at-once-saved" / file).read_bytes()
    resumed = but(run, "overlapped", load="overlapped-saved/step-00000004")
    run_ranks(train_here, 2, resumed, timeout=LIMIT)
    assert losses(base / "overlapped") == straight


def kill_one_in_the_background(run: PretrainConfig) -> None:
    """Kill rank 1 in step 7, with a part of the checkpoint of step 6 written."""
    write = checkpoint_save.CheckpointWriter.write_data
    begun = threading.Event()

    def write_and_signal(self: object, plan: object, planner: object) -> object:
        result = write(self, plan, planner)
        if "step-00000006" in str(self.path):
            begun.set()
            threading.Event().wait(30)
        return result

    def die(_: Checkpointer) -> None:
        assert begun.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoint_save.CheckpointWriter, "write_data", write_and_signal)
        with after_step(7, die if dist.get_rank() == 1 else lambda _: None):
            train_here(run)


def test_a_rank_killed_while_a_checkpoint_is_written_costs_the_steps_since_the_last_one(run, straight):
    base = run.logging.out.parent
    killed = but(run, "killed", save="killed-saved", save_interval=2)
    with pytest.raises(AssertionError, match="rank 1: ended without a result"):
        run_ranks(kill_one_in_the_background, 2, killed, timeout=LIMIT)
    assert (base / "killed-saved" / "latest").read_text() == "step-00000004\n"
    assert (base / "killed-saved" / ".step-00000006.partial" / "__1_0.distcp").exists()
    run_ranks(train_here, 2, but(run, "killed", load="killed-saved", save="killed-saved"), timeout=LIMIT)
    assert losses(base / "killed") == straight
    assert sorted(path.name for path in (base / "killed-saved").iterdir()) == [
        *("latest", "step-00000002", "step-00000004", "step-00000008")
    ]


def full_disk(run: PretrainConfig, disk: Path | None = None) -> tuple[str, int]:
    """Return the error of a full disk, and after how many steps it was raised.

    Args:
        disk: has room for half a checkpoint more, from step 3 on; without one, rank 1 writes no more.
    """

    def fill(checkpointer: Checkpointer) -> None:
        checkpointer.wait()
        if disk is not None:
            if dist.get_rank() == 0:
                resize(disk, size=sum(f.stat().st_size for f in disk.rglob("*") if f.is_file()) * 3 // 2)
            dist.barrier()
        elif dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    with after_step(3, fill) as steps, pytest.raises(CheckpointError) as error:
        train_here(run)
    return str(error.value), steps[-1]


def resume_and_refuse(run: PretrainConfig) -> list[str]:
    """Resume from the checkpoint before the disk was full; refuse what cannot be resumed from."""
    train_here(but(run, "full", load="full-saved"))
    messages = []
    for changed in (
        but(run, "x", load="nowhere"),
        but(run, "x", load="overlapped-saved"),
        replace(but(run, "x", load="full-saved"), model=ModelConfig(layers=1, hidden=64, heads=2)),
    ):
        with pytest.raises(SettingError) as error:
            pretrain(changed, ranks=this_rank())
        messages.append(str(error.value))
    return messages


def test_a_full_disk_on_one_rank_ends_the_run_on_all_with_path_and_bytes(run, straight):
    base = run.logging.out.parent
    full = but(run, "full", save="full-saved", save_interval=2)
    outcomes = run_ranks(full_disk, 2, full, timeout=LIMIT)
    # The same error at the end of the same step, of the step that saved or a later one.
    assert outcomes[0] == outcomes[1]
    message, steps = outcomes[0]
    assert 5 <= steps <= 6
    partial = base / "full-saved" / ".step-00000004.partial"
    beginning = (
        f"the checkpoint of step 4 was not saved: rank 1: cannot write {partial / '__1_0.distcp'}: File"
    )
    assert message.startswith(beginning), message
    assert " bytes, of about " in message and " bytes are free there" in message
    assert sorted(path.name for path in (base / "full-saved").iterdir()) == ["latest", "step-00000002"]

    messages = run_ranks(resume_and_refuse, 2, run, timeout=LIMIT)
    assert losses(base / "full") == straight
    assert messages[0] == messages[1]
    nowhere, finished, other_model = messages[0]
    assert "nowhere: no checkpoint there" in nowhere
    assert "has done 8 steps: set --train-iters to more than that" in finished
    assert "full-saved/step-00000002 is a checkpoint of another model: layers 2 (now 1)" in other_model


def resize(disk: Path, *, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system in memory, which only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "sdp4bit-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_really_is_full_costs_nothing_that_was_saved(run, straight, disk):
    saved = disk / "saved"
    saving = CheckpointConfig(save=saved, save_interval=2, keep_last=1, auto_resume=True)
    filling = replace(but(run, "filling"), checkpoint=saving)
    first, second = run_ranks(full_disk, 2, filling, disk, timeout=LIMIT)
    assert first == second
    assert first[0].startswith("the checkpoint of step 4 was not saved: rank ")
    assert "No space left on device after " in first[0] and " bytes are free there" in first[0]
    # What was half-written is gone, so that there is room for smaller things again.
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step-00000002"]
    resize(disk, size=64 << 20)
    run_ranks(train_here, 2, filling, timeout=LIMIT)
    assert losses(filling.logging.out) == straight
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step-00000008"]


def after_step_4(run: PretrainConfig, *strategies: str, load: str) -> dict[str, list[float]]:
    """Return the losses of the steps after the fourth, by the strategy with which the run continues."""
    return {
        strategy: [
            step.loss
            for step in train_here(
                replace(but(run, f"{load}-as-{strategy}", load=f"{load}/step-00000004"), strategy=strategy)
            )[0].steps
        ]
        for strategy in strategies
    }


@contextmanager
def warned() -> Iterator[list[str]]:
    """Yield what this program has warned of, but for sharding over one rank."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message).removeprefix("sdp4bit: ") for w in caught if "one rank" not in str(w.message)]


def without_own_state(path: Path, *, part: str, in_record: bool) -> Path:
    """Return a copy of a checkpoint that lacks a part of each rank, and says so in its record or not."""
    copy = Path(shutil.copytree(path, path.with_name("step-00000005" if in_record else "step-00000006")))
    with (copy / METADATA).open("rb") as file:
        metadata = MetadataUnpickler(file).load()
    for table in (metadata.state_dict_metadata, metadata.storage_data):
        for key in [key for key in table if f".{part}." in getattr(key, "fqn", key)]:
            del table[key]
    (copy / METADATA).write_bytes(pickle.dumps(metadata))
    record = json.loads((copy / "run.json").read_text())
    if in_record:
        record["parts"].remove(part)
    (copy / "run.json").write_text(json.dumps(record))
    write_manifest(copy, {f.name: digest_file(f) for f in copy.iterdir() if f.name != "manifest.json"})
    return copy


def resume_otherwise(run: PretrainConfig) -> dict[str, object]:
    saved: dict[str, object] = {}
    for strategy in ("sdp4bit", "baseline"):
        name = f"from-{strategy}"
        config = replace(but(run, f"whole-{strategy}", save=name, save_interval=4), strategy=strategy)
        saved[name] = [step.loss for step in train_here(config)[0].steps[4:]]
    with warned() as texts:
        saved["switched"] = after_step_4(run, "sdp4bit", "baseline", "tlq", load="from-sdp4bit")
        saved["switched on"] = after_step_4(run, "sdp4bit", load="from-baseline")
    saved["texts"] = texts
    path = run.logging.out.parent / "from-sdp4bit" / "step-00000004"
    for in_record in (False, True):
        if dist.get_rank() == 0:
            without_own_state(path, part="communication", in_record=in_record)
    dist.barrier()
    with pytest.raises(SettingError) as error:
        train_here(but(run, "x", load="from-sdp4bit/step-00000006"))
    saved["error"] = str(error.value)
    with warned() as texts:
        without = train_here(but(run, "x", load="from-sdp4bit/step-00000005"))
    saved["without"], saved["without texts"] = [step.loss for step in without[0].steps], texts
    return saved


def resume_alone(run: PretrainConfig) -> tuple[dict[str, list[float]], list[str]]:
    with warned() as texts:
        curves = after_step_4(run, "sdp4bit", load="from-sdp4bit")
    return curves, texts


@pytest.mark.slow
def test_resuming_elsewhere_or_with_other_quantization_continues_the_loss(run):
    """To other strategies and from 2 ranks to 1: the loss of the next steps is that of the run itself.

    The model has no dropout and the global batch is the same, so only rounding differs. The bound is that of
    the FSDP2 tests for a refresh in full precision.
    """
    run = replace(run, model=replace(run.model, dropout=0.0))
    first, other = run_ranks(resume_otherwise, 2, run, timeout=LIMIT)
    assert (first["switched"], first["error"]) == (other["switched"], other["error"])
    expected = first["from-sdp4bit"]
    assert first["switched"]["sdp4bit"] == expected
    for curve in (first["switched"]["baseline"], first["switched"]["tlq"], first["without"]):
        assert curve == pytest.approx(expected, abs=0.05)
        assert curve != expected
    switched_on = first["switched on"]["sdp4bit"]
    assert switched_on == pytest.approx(first["from-baseline"], abs=0.05)
    assert switched_on != first["from-baseline"]
    said = "was saved with strategy {} and continues with {}: replicas are refreshed in full precision"
    for text, strategies in zip(
        first["texts"], [("sdp4bit", "baseline"), ("sdp4bit", "tlq"), ("baseline", "sdp4bit")], strict=True
    ):
        assert said.format(*strategies) in text
    assert "cannot be loaded: it has no communication state, which it was saved with" in first["error"]
    assert len(first["without texts"]) == 1
    assert "has no communication state: this run starts with a new one" in first["without texts"][0]
    assert not other["texts"] and not other["without texts"]

    alone = replace(run, training=replace(run.training, micro_batch_size=4))
    ((curves, texts),) = run_ranks(resume_alone, 1, alone, timeout=LIMIT)
    assert curves["sdp4bit"] == pytest.approx(expected, abs=0.05)
    assert len(texts) == 1
    assert "was saved by 2 ranks and is loaded by 1: replicas are refreshed in full precision" in texts[0]
