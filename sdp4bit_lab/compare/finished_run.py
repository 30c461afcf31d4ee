"""Store measurements and settings of finished runs in result.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.stability import GradientSpike, gradient_spikes
from sdp4bit_lab.pretrain.trainer import TrainingResult

RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Content of result.json; identical on all ranks except for times."""

    strategy: str
    """Label of the variant."""
    seed: int
    losses: tuple[float, ...]
    """Training loss of every step, measured before the step's update."""
    validation: tuple[tuple[int, float], ...]
    """Steps and validation losses."""
    train_loss: float
    """Mean training loss of the last 20 steps."""
    intra_bytes_per_step: int
    """Median intra-node bytes of all ranks in a step."""
    inter_bytes_per_step: int
    """Median inter-node bytes of all ranks in a step."""
    seconds: float
    """Duration of all steps."""
    step_seconds: float | None = None
    """Median duration of a step after the first."""
    test_loss: float | None = None
    """Loss on the test split after the last step."""
    diverged_at: int | None = None
    """Step at which the loss became NaN or infinite; None for a complete run."""
    spikes: tuple[GradientSpike, ...] = ()
    """Steps whose gradient norm was far above the preceding ones."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings shared by all runs of a comparison."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """The library's settings, including the seed."""
    environment: dict[str, str] = field(default_factory=dict)
    """Torch version and device."""

    @classmethod
    def of(cls, result: TrainingResult, **settings: Any) -> FinishedRun:
        """Build the record of a training result, with the fields settings, quantization and environment."""
        diverged_at = result.diverged_at
        if diverged_at is None and not math.isfinite(result.validation_loss):
            diverged_at = result.steps[-1].step
        equal = ("strategy", "seed", "train_loss", "intra_bytes_per_step", "inter_bytes_per_step")
        return cls(
            **{name: getattr(result, name) for name in (*equal, "seconds", "step_seconds", "test_loss")},
            losses=tuple(step.loss for step in result.steps),
            validation=tuple(result.validation),
            diverged_at=diverged_at,
            spikes=tuple(gradient_spikes((step.step, step.grad_norm) for step in result.steps)),
            **settings,
        )

    @property
    def validation_loss(self) -> float:
        """Last validation loss; NaN for a diverged run."""
        return self.validation[-1][1] if self.diverged_at is None else math.nan

    @property
    def ends_in_warm_up(self) -> bool:
        """Whether the learning rate still rose at the last validation."""
        warm_up = self.settings.get("optimizer", {}).get("warmup_steps")
        return bool(warm_up and self.validation and self.validation[-1][0] <= warm_up)

    @property
    def name(self) -> str:
        return f"{self.strategy}, seed {self.seed}"

    def write(self, folder: Path) -> None:
        """Write result.json into the folder, with null for losses that are not finite."""
        content = asdict(self) | {
            "losses": [finite(loss) for loss in self.losses],
            "validation": [[step, finite(loss)] for step, loss in self.validation],
            "train_loss": finite(self.train_loss),
            "test_loss": finite(self.test_loss),
        }
        write_atomically(folder / RESULT, json.dumps(content, allow_nan=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> FinishedRun:
        """Read result.json from the folder; SettingError if it is invalid."""
        path = folder / RESULT
        try:
            content = json.loads(path.read_bytes())
            content["losses"] = tuple(map(_number, content["losses"]))
            content["validation"] = tuple((step, _number(loss)) for step, loss in content["validation"])
            content["train_loss"] = _number(content["train_loss"])
            content["spikes"] = tuple(GradientSpike(*spike) for spike in content["spikes"])
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise SettingError(
                f"{path} cannot be read ({type(error).__name__}: {error}): delete it to repeat the run"
            ) from error


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is NaN or infinite, which JSON lacks."""
    return value if value is None or math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def run_settings(config: PretrainConfig, *, dataset: str, world_size: int) -> dict[str, Any]:
    """Return the settings that comparable runs share, whatever their strategy, seed and data folder."""
    settings = {
        "model": asdict(config.model_shape),
        "data": {"dataset": dataset, "eod_mask_loss": config.data.eod_mask_loss},
        **config.resolved_sections(),
        "parallel": asdict(config.parallel) | {"world_size": world_size},
    }
    # Resolved into other settings.
    del settings["optimizer"]["warmup_fraction"], settings["parallel"]["nproc_per_node"]
    # Normalize as if read back from a file.
    normalized: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return normalized


def environment(device: torch.device) -> dict[str, str]:
    """Return the torch version and the device, which may change the last digits of a loss."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"torch": torch.__version__, "device": kind}


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first setting that differs, with both values, or None; a missing setting is None."""
    left, right = dict(flattened(one)), dict(flattened(other))
    differing = (name for name in {**left, **right} if left.get(name) != right.get(name))
    name = next(differing, None)
    return None if name is None else (name, left.get(name), right.get(name))


def flattened(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the members of nested settings by dotted path."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
