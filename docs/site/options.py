"""Write docs/reference/cli.md, the options of all commands, from their settings.

python docs/site/options.py
"""

from __future__ import annotations

import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "cli.md"
sys.path.insert(0, str(ROOT))

from sdp4bit_lab.cli import COMMANDS, Command  # noqa: E402
from sdp4bit_lab.common.options import Option, options_of  # noqa: E402
from sdp4bit_lab.plan.model import PlanModelConfig, gpt_groups  # noqa: E402
from sdp4bit_lab.pretrain.config.reference_flags import described_flags  # noqa: E402
from sdp4bit_lab.pretrain.model.cards import (  # noqa: E402
    GPT2_VOCABULARY,
    MODEL_CARDS,
    VOCABULARY_MULTIPLE,
)

PRESETS_HEAD = """\
| preset | layers | hidden | heads | parameters | sequence | micro batch | learning rate |
|---|---:|---:|---:|---:|---:|---:|---:|"""
LONGEST_NAME = 30
"""Characters of an option with its choices; longer choices move into the text."""
HEAD = """# Command line

<!-- docs/site/options.py writes this page. -->

`sdp4bit COMMAND --help-all` prints these texts.
"""


def page() -> str:
    """Return the page."""
    seen: dict[str, str] = {}
    parts = [part for command in COMMANDS.values() for part in _parts(command, seen)]
    return HEAD + "".join(f"\n{part}\n" for part in [*parts, *_reference_flags(), *_presets()])


def _reference_flags() -> Iterator[str]:
    """Yield heading, text and table of the flags of the reference implementation."""
    yield "## Flags of Megatron-LM and of the reference implementation"
    yield (
        "`pretrain` and `compare` accept these flags, so that the reference's scripts run. One line names\n"
        "those without effect. `--use-distributed-optimizer`, which all its scripts pass, without\n"
        "`--quantized-weights` and `--quantized-gradients` selects `--strategy baseline`."
    )
    rows = ["| flags | outcome | reason |\n|---|---|---|"]
    for flags, outcome, reason in described_flags():
        cells = re.sub(r" (?=--)", "<br>", " ".join(flags.split())).split("<br>")
        names = "<br>".join(f"`{cell}`".replace("|", chr(92) + "|") for cell in cells)
        rows.append(f"| {names} | {outcome} | {_marked(reason)} |")
    yield "\n".join(rows)


def _presets() -> Iterator[str]:
    """Yield heading, text and table of the models of --preset."""
    yield "## Model presets"
    yield (
        f"The paper's models, and `tiny`. The vocabulary has {GPT2_VOCABULARY:,} tokens "
        f"(`tiny`: {MODEL_CARDS['tiny'].vocabulary:,}),\npadded to a multiple of {VOCABULARY_MULTIPLE}. "
        "The paper gives no learning rate for some of them."
    )
    rows = [PRESETS_HEAD]
    for name, card in MODEL_CARDS.items():
        shape = PlanModelConfig(model_card=name).padded_shape(tensor_parallel=1)
        size = sum(group.numel for group in gpt_groups(shape))
        sizes = f"{card.layers} | {card.hidden} | {card.heads} | {size / 1e6:,.1f} M"
        batch = f"{card.sequence_length} | {card.micro_batch_size} | {card.learning_rate or 'required'}"
        rows.append(f"| `{name}` | {sizes} | {batch} |")
    yield "\n".join(rows)


def _parts(command: Command, seen: dict[str, str]) -> Iterator[str]:
    """Yield heading, description and tables; a table that an earlier command has is named only."""
    yield f"## sdp4bit {command.name}"
    yield textwrap.fill(_marked(command.description), 100, break_on_hyphens=False)
    repeated = []
    for section, options in groupby(
        options_of(pkgutil.resolve_name(command.settings)), lambda each: each.section
    ):
        rows = "\n".join(map(_row, options))
        if rows in seen:
            repeated.append(f"{section.replace('_', ' ')} ({seen[rows]})")
            continue
        seen[rows] = command.name
        title = f"**{section.replace('_', ' ').capitalize()}**\n\n" if section else ""
        yield f"{title}| option | meaning |\n|---|---|\n{rows}"
    if repeated:
        yield f"Options described above: {', '.join(repeated)}."


def _row(option: Option) -> str:
    """Return the row of an option: its names, one per line, and its meaning, choices and default."""
    name, *others = option.flags
    value, text = option.value, option.text
    if len(f"{name} {value}") > LONGEST_NAME and value.startswith("{"):
        text += f" One of {', '.join(f'`{choice}`' for choice in value.strip('{}').split(','))}."
        value = "NAME"
    shown = f"{name} {value}" if value and name.startswith("-") else name
    default = f" Default: {option.default}." if option.default else ""
    cells = ["<br>".join(f"`{each}`" for each in (shown, *others))]
    cells.append(_marked(f"{text}{default}").replace("<", "&lt;"))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _marked(text: str) -> str:
    """Return a text whose options are marked as code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"--[a-z][\w-]*", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
