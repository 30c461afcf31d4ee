"""Scaling of the loss for fp16, whose gradients are too small or too large without (Megatron's rules)."""

from __future__ import annotations

from sdp4bit.pretrain.config.training import TrainingConfig

GROWTH = 2.0
BACKOFF = 0.5


class LossScale:
    """The factor of the loss, doubled after a window of good steps and halved after overflows; a Stateful.

    Every rank has the same: it depends only on the norm of the gradient, which all ranks know alike.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self.value = config.loss_scale or config.initial_loss_scale
        """What the loss is multiplied by."""
        self.skipped = 0
        """Steps that changed no weights, because the gradient was not finite."""
        self._good_steps = 0
        self._overflows_left = config.hysteresis

    def update(self, *, overflow: bool) -> None:
        """The scale is that of the next step.

        As in Megatron, overflows count towards the hysteresis until the scale grows: once it is used up, each
        further one halves the scale.
        """
        self.skipped += int(overflow)
        if self._config.loss_scale is not None:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.value = max(self.value * BACKOFF, self._config.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_window:
            self._good_steps = 0
            self._overflows_left = self._config.hysteresis
            self.value *= GROWTH

    def state_dict(self) -> dict[str, float]:
        """Return what a bit-exact resume needs: plain numbers."""
        return {
            "value": self.value,
            "skipped": self.skipped,
            "good_steps": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """The scale continues; a scale that is given as an option stays what it is."""
        if self._config.loss_scale is None:
            self.value = float(state_dict["value"])
        self.skipped = int(state_dict["skipped"])
        self._good_steps = int(state_dict["good_steps"])
        self._overflows_left = int(state_dict["overflows_left"])
