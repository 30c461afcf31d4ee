"""The library's logger, named "sdp4bit"."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:  # Python 3.10 does not know its type
    _Adapter = logging.LoggerAdapter


class _Guarded(_Adapter):
    """Logs; the exceptions of other people's handlers are printed, each kind once.

    Most records are logged on one rank in the middle of a step, which all other ranks would wait for.
    """

    def __init__(self, own: logging.Logger) -> None:
        super().__init__(own, {})
        self._printed: set[type[Exception]] = set()

    def log(self, level: int, msg: object, *args: Any, **options: Any) -> None:
        try:
            super().log(level, msg, *args, **{"stacklevel": 2, **options})
        except Exception as error:
            if type(error) not in self._printed:
                self._printed.add(type(error))
                with suppress(Exception):  # standard error is closed
                    traceback.print_exc()


class DefaultHandler(logging.Handler):
    """Prints warnings with the library's name, unless the program has a handler and a format of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and logger.logger.handlers == [self]:
            sys.stderr.write(f"sdp4bit: {self.format(record)}\n")


logger = _Guarded(logging.getLogger("sdp4bit"))
logger.logger.addHandler(DefaultHandler(logging.WARNING))
