"""Settings of saving, resuming and exporting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sdp4bit_lab.common.settings import require, require_at_least


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: Path | None = None
    """Folder for checkpoints; one is written at the end as well."""
    save_interval: int = 1000
    """Steps between checkpoints."""
    async_save: bool = True
    """Write in the background while training goes on, from a copy of the state in the memory of the host."""
    keep_last: int | None = None
    """Checkpoints to keep: older ones are deleted after a new one is complete. All when not given."""
    load: Path | None = None
    """Folder of checkpoints to resume from: its latest complete one, or one of its step folders. With the
    folder of --save, a run begins if there is none yet."""
    auto_resume: bool = False
    """Resume from --save if it holds a checkpoint, else from --load if that is given: the same command line
    begins a run, and resumes it after an end of any kind."""

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

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Return whether a checkpoint is to be saved after this step."""
        return self.save is not None and (is_last or step % self.save_interval == 0)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """A checkpoint of the pretraining program, to be written as a Hugging Face GPT-2 model."""

    load: Path
    """Folder of checkpoints, of which the latest complete one is taken, or one of its step folders."""
    out: Path
    """Folder to write config.json, model.safetensors and the tokenizer to; it must not be there yet."""
