"""Settings for saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sdp4bit_lab.common.settings import require, require_at_least, require_folder


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: Path | None = None
    """Folder for checkpoints. The last step is always saved."""
    save_interval: int = 1000
    """Steps between checkpoints."""
    keep_last: int | None = None
    """Number of checkpoints to keep; older ones are deleted after a new one is complete. Default: all."""
    load: Path | None = None
    """Folder to resume from: its latest complete checkpoint, or one of its step folders. If it equals --save
    and is empty, the run starts from step 1."""
    auto_resume: bool = False
    """Resume from --save if it has a checkpoint, else from --load, so that one command starts and resumes."""
    override_opt_param_scheduler: bool = False
    """Resume with the learning-rate schedule of these options, without a warning if another one was saved."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "save_interval", "keep_last")
        require(
            self.keep_last is None or self.save is not None,
            f"--keep-last {self.keep_last} has no effect without --save",
        )
        require(
            self.save is not None or not self.auto_resume,
            "--auto-resume has no effect without --save, the folder that it resumes from",
        )

    @property
    def resumes_own(self) -> bool:
        """Whether a run with these settings continues its own checkpoints."""
        is_same = (
            self.load is not None and self.save is not None and self.load.resolve() == self.save.resolve()
        )
        return self.auto_resume or is_same

    def check_load(self) -> None:
        """Raise SettingError if there is nothing at --load, before anything else takes time."""
        if self.load is not None and self.load != self.save:
            require_folder(self.load, flag="--load")

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        return self.save is not None and (is_last or step % self.save_interval == 0)
