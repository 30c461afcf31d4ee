"""A linter of prose: `python -m tests.prose`, which `make check` runs, or with files to check only these.

It reads pages, and the docstrings, comments and messages of the code. Each fault is a line with its place,
the sentence and the way out. A page is exempt where it is code, an indented block or generated.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import NOTICE
from tests import PACKAGES, ROOT

LONGEST_SENTENCE = 25
LONGEST_IN_CODE = 35
"""Of comments, docstrings and messages, which have values and formulas in their sentences."""
LONGEST_LINE = 100
MOST_NUMBERS = 3
"""Cells of a table that are nothing but a decimal number; tables with more are results."""
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "docs/")
CODE = (*(f"{package}/" for package in PACKAGES), "benchmarks/", "tests/")
UNCHECKED = (
    *("docs/results/accuracy.md", "docs/results/planning.md", "docs/results/studies.md"),
    *("docs/reference/cli.md", "tests/test_prose.py"),
    *("tests/lab/", "tests/engines/", "tests/megatron/"),
)
"""Pages of finished studies, a page that another program writes, and tests that are older than the rules."""
CHECKED_NUMBERS = {
    "README.md",  # tests/lab/plan/test_pages.py
    "docs/auto.md",  # experiments/auto/result.json
    "docs/first-hour.md",  # tests/lab/plan/test_llama.py
    "docs/large-models.md",  # experiments/size_law/result.json
    "docs/muon.md",  # experiments/muon_traffic
    "docs/lora.md",  # experiments/finetuning/result.json, and the command above the table
    "docs/low-precision.md",  # tests/engines/fsdp2/test_subclasses.py
    "docs/memory.md",  # tests/lab/plan/test_pages.py
    "docs/paper.md",  # experiments/accuracy
    "docs/planning.md",  # tests/lab/plan
    "docs/telemetry.md",  # tests/lab/plan/test_pages.py
    "docs/theory.md",  # tests/collectives/test_error_theory.py
}
"""Pages whose tables of numbers come from a file or are compared with the code by a test."""
MESSAGES = {"ValueError", "TypeError", "RuntimeError", "warn", "warn_once", "warning", "info", "error"}
"""Calls whose strings a user reads; every call in a `raise` statement is one, too."""
WORDS = {
    r"(?:says|tells)": "reports, prints or states",
    r"stands? for": "represents",
    r"(?:goes|go|went) on": "continues",
    r"anew": "again",
    r"alike": "identically",
    r"reckoned": "estimated",
    r"(?:err|errs|erred)": "has an error of",
    r"comes? to": "totals",
    r"(?:mends?|heals?)": "fixes",
    r"taken away": "removed",
    r"differences? to": "difference from",
    r"loss to": "loss relative to",
    r"in full(?! precision)": "full",
}
"""Patterns of words that a reader would not search for, and the words of the field."""

_WORDS = re.compile("|".join(rf"\b({word})\b" for word in WORDS), re.IGNORECASE)
_WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
_HIDDEN = re.compile(
    r"<!-- result [\w-]+ -->.*?<!-- end -->|<!--.*?-->|^( *)```.*?^\1```\s*?$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
_NUMBER = re.compile(
    r"[*~+-]*\d[\d,]*\.\d+(?:\s?(?:%|s|ms|MB|GB|kB|x))?(?:\s\(.*\)|\sto\s[+-]?[\d.]+\s?%?)?\**"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])[*_)\"]*\s+|(?<=[.:!?]\*\*)\s+")  # a bold lead is a sentence, too


@dataclass(frozen=True, order=True)
class Fault:
    """A rule that a text breaks, at a line of it."""

    line: int
    text: str
    way_out: str

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 90 else f"{self.text[:87]}..."
        return f"{self.line}: {text!r}: {self.way_out}"


def page_faults(text: str, *, numbers: bool = True) -> Iterator[Fault]:
    """Yield the faults of a page of Markdown.

    Args:
        numbers: look for result tables, too.
    """
    text = _HIDDEN.sub(lambda found: "\n" * found[0].count("\n"), text)
    lines = ["" if line.startswith("    ") else line for line in text.split("\n")]
    for number, line in enumerate(lines, 1):
        seen = re.sub(r"\]\([^)]*\)|https?://\S+", "", line)
        if not line.startswith("|") and len(seen) > LONGEST_LINE:
            yield Fault(number, line, f"wrap at {LONGEST_LINE} characters, this line has {len(seen)}")
    if numbers:
        yield from _result_tables(lines)
    yield from prose_faults(lines)


def prose_faults(lines: Iterable[str], *, first: int = 1, longest: int = LONGEST_SENTENCE) -> Iterator[Fault]:
    """Yield the faults of sentences.

    Args:
        first: the number of the first line.
        longest: words of a sentence.
    """
    for number, sentence in sentences(lines, first=first):
        count = len(sentence.split())
        if count > longest and "|" not in sentence:
            yield Fault(number, sentence, f"split it, it has {count} words and may have {longest}")
        if _WHAT.search(sentence) and "?" not in sentence:
            yield Fault(number, sentence, "replace the clause that begins with 'what' by a noun")
        for found in _WORDS.finditer(sentence):
            better = [*WORDS.values()][(found.lastindex or 0) - 1]
            yield Fault(number, sentence, f"instead of {found[0]!r} write {better}")


def sentences(lines: Iterable[str], *, first: int = 1) -> Iterator[tuple[int, str]]:
    """Yield sentences, headings and rows of tables, each with the number of its first line.

    Code is one word, and of a link only the text remains.
    """
    blocks: list[tuple[int, str]] = []
    for number, line in enumerate(lines, first):
        if not blocks or not blocks[-1][1] or re.match(r"\s*([*-]|\d+\.)\s|#|\||>|\s*$", line):
            blocks.append((number, line.strip()))
        else:
            start, text = blocks[-1]
            blocks[-1] = (start, f"{text}\n{line.strip()}")
    for number, text in blocks:
        # A break of a line stays, so that sentences after it have their own number.
        text = _LINK.sub(lambda found: found[1] + "\n" * (found[0].count("\n") - found[1].count("\n")), text)
        text = re.sub(r"`[^`]*`", lambda found: "code" + "\n" * found[0].count("\n"), text)
        if text.startswith("|"):
            yield number, text
            continue
        marks = len(text) - len(text.lstrip("#*- "))
        ends = [*_SENTENCE_END.finditer(text, marks)]
        starts = [marks, *(end.end() for end in ends)]
        for start, stop in zip(starts, [*(end.start() for end in ends), len(text)], strict=True):
            yield number + text.count("\n", 0, start), text[start:stop].replace("\n", " ")


def _result_tables(lines: list[str]) -> Iterator[Fault]:
    table: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        if line.startswith("|"):
            table.append(line)
            continue
        cells = [cell.strip() for row in table for cell in row.strip("|").split("|")]
        found = [cell for cell in cells if _NUMBER.fullmatch(cell)]
        if len(found) > MOST_NUMBERS:
            yield Fault(
                number - len(table), table[0], f"generate it from results/, it has {len(found)} numbers"
            )
        table = []


def code_faults(source: str) -> list[Fault]:
    """Return the faults of the docstrings, comments and messages of a module."""
    texts = code_texts(source)
    found = (prose_faults(text.split("\n"), first=line, longest=LONGEST_IN_CODE) for line, text in texts)
    return sorted({fault for faults in found for fault in faults})


def code_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, comments and messages of a module, each with its first line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, _docstring(str(node.value.value))
        elif isinstance(node, ast.Raise):
            yield node.lineno, _literal(node)
        elif isinstance(node, ast.Call) and _name(node.func) in MESSAGES:
            for string in node.args:
                yield node.lineno, _literal(string)
    yield from _comments(source)


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _docstring(text: str) -> str:
    """Return the prose of a docstring, in as many lines."""
    blank = text[: len(text) - len(text.lstrip())].count("\n")
    text = "\n" * blank + inspect.cleandoc(text)
    # Indented blocks are tables or code. An entry of Args or Raises is a paragraph, without its name.
    text = re.sub(r"(?<=\n\n)( {4}.*(\n|$))+", lambda found: "\n" * found[0].count("\n"), text)
    return re.sub(r"\n *(\w+, )*\w+:(?=\s)", "\n* ", text)


def _literal(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        return "value"
    return "".join(_literal(child) for child in ast.iter_child_nodes(node))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments; those of neighbouring lines and one column are one text."""
    block: list[str] = []
    first = last = column = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa")):
            if token.start[0] != last + 1 or token.start[1] != column:
                yield first, "\n".join(block)
                block, first, column = [], *token.start
            last = token.start[0]
            block.append(token.string.lstrip("# "))
    yield first, "\n".join(block)


def is_checked(name: str) -> bool:
    """Return whether the rules hold for a file, given by its path from the root."""
    folders = PAGES if name.endswith(".md") else CODE if name.endswith(".py") else ()
    return name.startswith(folders) and not name.startswith(UNCHECKED)


def file_faults(name: str) -> Iterable[Fault]:
    """Return the faults of a file, given by its path from the root."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if text.startswith(NOTICE):
        return ()
    return (
        page_faults(text, numbers=name not in CHECKED_NUMBERS) if name.endswith(".md") else code_faults(text)
    )


def main(paths: list[str]) -> int:
    """Print the faults of these files, or of all, and return 1 if there are any."""
    chosen = map(Path, paths) if paths else (path for top in (*PAGES, *CODE) for path in _files(ROOT / top))
    names = sorted({path.resolve().relative_to(ROOT).as_posix() for path in chosen})
    faults = [f"{name}:{fault}" for name in names if is_checked(name) for fault in file_faults(name)]
    for each in faults:
        print(each)
    return int(bool(faults))


def _files(path: Path) -> Iterator[Path]:
    return path.rglob("*") if path.is_dir() else iter([path])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
