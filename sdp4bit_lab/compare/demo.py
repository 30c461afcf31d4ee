"""`sdp4bit demo`: time steps on slow links, train with and without sdp4bit, and show both."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing

from sdp4bit_lab.common.files import lock_folder
from sdp4bit_lab.common.launch.link import linked_nodes, reason_against_link
from sdp4bit_lab.common.launch.local import run_on_ranks
from sdp4bit_lab.common.progress import console, end_progress, phase
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.common.settings import RunError
from sdp4bit_lab.compare.config import CompareConfig, DemoConfig, LinkTimesConfig
from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.compare.links import RATES, LinkTimes
from sdp4bit_lab.compare.run import compare

_LOCK = ".demo.lock"


def demo(config: DemoConfig) -> int:
    """Run the demo and return the exit code.

    Raises:
        SettingError: another demo uses the folder.
    """
    with closing(lock_folder(config.out, option="--out", name=_LOCK)):
        return _demo(config)


def _demo(config: DemoConfig) -> int:
    fast, slow = config.minutes
    console().print(
        f"sdp4bit demo: times steps, then trains two runs of {config.steps} steps into {config.out}. "
        f"This usually takes {fast} to {slow} minutes."
    )
    stored = None if config.retime else _stored(config)
    if stored is not None:
        console().print(
            f"step times: those of an earlier demo in {config.links}; --retime measures them again"
        )
    else:
        config.links.unlink(missing_ok=True)
        if code := _time_links(config):
            _print_times(LinkTimes.read(config.links))
            console().print("The same command begins with the links again, and then trains.")
            return code
    comparison = config.comparison()
    code = run_on_ranks(f"{__name__}:train", config=comparison, parallel=comparison.parallel)
    times = stored or LinkTimes.read(config.links)
    # A signal has ended the training, perhaps without an error, and that was printed.
    if code or not _is_complete(config):
        _print_times(times)
        return code
    phase("drawing the step times")
    if times is None:
        raise RunError(f"{config.links} was removed or damaged during the demo: start it again")
    written = "summary.json, table.md and curves.png"
    if len(times.unreliable) < len(times.seconds):
        times.draw(config.links.with_suffix(".png"))
        written = "summary.json, table.md, curves.png and links.png"
    _print_times(times)
    console().print(f"\nWrote {written} to {config.out}\nnext: sdp4bit report {config.out}")
    return 0


def _print_times(times: LinkTimes | None) -> None:
    """Print the table of the rates that were timed, of a demo that was stopped, too."""
    end_progress()
    if times is not None:
        table, conditions = times.text()
        console().print(f"\n{table}", style="bold")
        console().print(conditions)


def _stored(config: DemoConfig) -> LinkTimes | None:
    """Return the times of an earlier demo with the same dtype, if all of them are reliable."""
    times = LinkTimes.read(config.links)
    if times is None or times.unreliable or times.dtype != config.compute_dtype:
        return None
    return times if times.seconds.keys() == set(RATES) else None


def _is_complete(config: DemoConfig) -> bool:
    try:
        return bool(json.loads((config.out / "summary.json").read_text(encoding="utf-8"))["complete"])
    except FileNotFoundError:
        return False


def _time_links(config: DemoConfig) -> int:
    reason = reason_against_link()
    with ExitStack() as stack:
        link = None
        if not reason:
            try:
                link = stack.enter_context(linked_nodes())
            except RunError as error:
                reason = str(error)
        timed = LinkTimesConfig.of(config, why_calculated=reason)
        program = "sdp4bit_lab.compare.links:time_links"
        return run_on_ranks(program, config=timed, parallel=timed.run.parallel, leaves_early=False, link=link)


def train(config: CompareConfig, *, ranks: Ranks) -> list[FinishedRun]:
    """Train both runs and print their losses; call on every rank."""
    return compare(config, ranks=ranks, command="demo")
