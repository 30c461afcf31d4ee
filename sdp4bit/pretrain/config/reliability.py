"""What a run watches of its communication: copies of the weights, and what quantization costs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from sdp4bit.config import AlertConfig, AuditConfig, MismatchAction, SDP4BitConfig
from sdp4bit.pretrain.options import SettingError

_THRESHOLDS = {
    "alert_gradient_error": "gradient_error",
    "alert_weight_error": "weight_error",
    "alert_weight_drift": "weight_drift",
    "alert_calm_samples": "calm_samples",
}


@dataclass(frozen=True, kw_only=True)
class ReliabilityConfig:
    """Comparing the copies of the weights, and alerts on what quantization costs."""

    audit_interval: int = 100
    """Steps from one comparison of the weights' copies to the next; 0 compares nothing."""
    audit_on_mismatch: MismatchAction = "error"
    """What happens if copies differ: end with an error, or warn and refresh them in full precision."""
    alerts: Literal["off", "warn", "ladder"] = "off"
    """What happens if quantization costs too much: a warning, or also a step up from 4 to 8 to 16 bits."""
    alert_gradient_error: float | None = None
    """Highest relative error of quantized gradients; 0.3 when not given."""
    alert_weight_error: float | None = None
    """Highest relative error of quantized weight differences; 0.6 when not given."""
    alert_weight_drift: float | None = None
    """Highest relative distance from the main weights to what devices hold; 0.05 when not given."""
    alert_calm_samples: int | None = None
    """Measured steps that must be calm before a group steps back down; 5 when not given."""

    def __post_init__(self) -> None:
        self.applied_to(SDP4BitConfig())
        given = [
            field.name for field in fields(self) if field.name in _THRESHOLDS and self._given(field.name)
        ]
        if given and self.alerts == "off":
            raise SettingError(
                f"--{given[0].replace('_', '-')} has no effect without --alerts warn or ladder"
            )
        if self.audit_interval == 0 and self.audit_on_mismatch != "error":
            raise SettingError("--audit-on-mismatch has no effect with --audit-interval 0")
        if self.alert_calm_samples is not None and self.alerts != "ladder":
            raise SettingError("--alert-calm-samples has no effect without --alerts ladder")

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None

    def applied_to(self, config: SDP4BitConfig) -> SDP4BitConfig:
        """Return the library's settings with these.

        Raises:
            SettingError: a value that cannot work, or alerts without telemetry.
        """
        given = {theirs: getattr(self, ours) for ours, theirs in _THRESHOLDS.items() if self._given(ours)}
        try:
            audit = AuditConfig(interval=self.audit_interval or 1, on_mismatch=self.audit_on_mismatch)
            alerts = None if self.alerts == "off" else AlertConfig(action=self.alerts, **given)
            return replace(config, audit=audit if self.audit_interval else None, alerts=alerts)
        except ValueError as error:
            raise SettingError(str(error)) from error
