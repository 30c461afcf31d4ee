"""A program that prints the ranks which a launcher has started, or its refusal."""

from __future__ import annotations

import sys

from sdp4bit_lab.cli import _run_on_ranks
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.ranks import Ranks, gather_over_ranks
from sdp4bit_lab.common.settings import SettingError


def program(_: None, *, ranks: Ranks) -> None:
    own = ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size
    found = gather_over_ranks(own, what="places of the ranks")
    if ranks.is_first:
        print("ranks", found)


if __name__ == "__main__":
    try:
        sys.exit(_run_on_ranks("tests.lab.common.launch.adopted_program:program", None, RanksConfig()))
    except SettingError as error:
        print(error)
        sys.exit(error.exit_code)
