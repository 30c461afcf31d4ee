"""The library's logger, named "sdp4bit"."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("sdp4bit")


class DefaultHandler(logging.Handler):
    """Prints warnings with the library's name, unless the program has a handler and a format of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and logger.handlers == [self]:
            sys.stderr.write(f"sdp4bit: {self.format(record)}\n")


logger.addHandler(DefaultHandler(logging.WARNING))
