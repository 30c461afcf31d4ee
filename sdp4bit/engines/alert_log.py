"""Alerts of an attached model: told to the log, to callbacks and to whoever asks."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from sdp4bit.engines.fallback import Alert

logger = logging.getLogger("sdp4bit")
_KEPT = 1000

AlertCallback = Callable[[Alert], None]


class AlertLog:
    """The last thousand alerts, and who wants to hear of the next one."""

    def __init__(self, *, where: str = "") -> None:
        """There are none.

        Args:
            where: what part of the model they are of, for the log; empty for all of it.
        """
        self._where = f"{where}, " if where else ""
        self._alerts: deque[Alert] = deque(maxlen=_KEPT)
        self._callbacks: OrderedDict[int, AlertCallback] = OrderedDict()

    def listen(self, callback: AlertCallback) -> RemovableHandle:
        """The callback is called with every alert, alike on all ranks that share it, until removed."""
        handle = RemovableHandle(self._callbacks)
        self._callbacks[handle.id] = callback
        return handle

    def tell(self, alert: Alert, *, log: bool) -> None:
        """The alert is known.

        Args:
            log: also write a warning to the log, which one rank of those that share the alert does.
        """
        self._alerts.append(alert)
        if log:
            logger.warning("step %d, %s%s: %s", alert.step, self._where, alert.group, alert.message)
        for callback in tuple(self._callbacks.values()):
            callback(alert)

    def all(self) -> list[Alert]:
        """Return the alerts, oldest first."""
        return list(self._alerts)
