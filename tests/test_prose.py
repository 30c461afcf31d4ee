"""The writing rules that a program can check, in every page and in the text of the code. Layer: files."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import PACKAGES, ROOT

LONGEST_SENTENCE = 25
LONGEST_IN_CODE = 35
"""Of comments, docstrings and messages, which have values and formulas in their sentences."""
LONGEST_LINE = 100
MOST_NUMBERS = 3
"""Cells of a table that are nothing but a decimal number; tables with more are results."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
    *(
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if path.parent.name != "results" and path.name != "cli.md"
    ),
]
CHECKED_NUMBERS = {
    "docs/muon.md",  # results/muon_traffic.json
    "docs/lora.md",  # experiments/finetuning/result.json, and the command above the table
    "docs/low-precision.md",  # tests/engines/fsdp2/test_subclasses.py
    "docs/planning.md",  # tests/lab/plan
    "docs/theory.md",  # tests/collectives/test_error_theory.py
}
"""Pages whose tables of numbers come from a file or are compared with the code by a test."""
CHECKED_FOLDERS = (*PACKAGES, "benchmarks", "tests")
UNCHECKED = ("tests/lab/", "tests/engines/", "tests/test_prose.py")
"""Tests whose texts were written before the rules."""
_MESSAGES = {"ValueError", "TypeError", "RuntimeError", "warn", "warn_once", "warning", "info", "error"}
"""Calls whose strings a user reads; every call in a `raise` statement is one, too."""
WORDS = {
    r"held by (the )?tests": "tested",
    r"(says|tells)": "reports, prints, states",
    r"stands? for": "represents",
    r"(goes|go|went) on": "continues",
    r"anew": "again",
    r"alike": "identically",
    r"reckoned": "estimated",
    r"(err|errs|erred)": "has an error of",
    r"comes? to": "totals",
    r"(mends?|heals?)": "fixes",
    r"taken away": "removed",
    r"differences? to": "difference from",
    r"loss to": "loss relative to",
    r"in full(?! precision)": "full",
    r"house": "architecture",
    r"bell-shaped": "normal",
}
_FENCE = re.compile(r"^( *)```.*?^\1```\s*?$", re.DOTALL | re.MULTILINE)
_MARKED = re.compile(r"<!-- result [\w-]+ -->.*?<!-- end -->", re.DOTALL)
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
_NUMBER = re.compile(
    r"[*~+-]*\d[\d,]*\.\d+(?:\s?(?:%|s|ms|MB|GB|kB|x))?(?:\s\(.*\)|\sto\s[+-]?[\d.]+\s?%?)?\**"
)


def faults(text: str, *, numbers: bool = True) -> Iterator[str]:
    """Yield the rules that a page breaks, each with the words that break it.

    Args:
        numbers: look for result tables, too.
    """
    text = _MARKED.sub("", _FENCE.sub("", text))
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    for line in lines:
        seen = re.sub(r"\]\([^)]*\)|https?://\S+", "", line)
        if not line.startswith("|") and len(seen) > LONGEST_LINE:
            yield f"{len(seen)} characters in a line: {line[:60]}"
    if numbers:
        yield from _result_tables(lines)
    yield from _prose_faults(lines)


def _prose_faults(lines: list[str], longest: int = LONGEST_SENTENCE) -> Iterator[str]:
    for sentence in sentences(lines):
        count = len(sentence.split())
        if count > longest and "|" not in sentence:
            yield f"{count} words: {sentence[:80]}"
        if re.search(r"\bwhat\b", sentence, re.IGNORECASE) and "?" not in sentence:
            yield f"a clause begins with what: {sentence[:80]}"
        for word, better in WORDS.items():
            found = re.search(rf"\b{word}\b", sentence, re.IGNORECASE)
            if found:
                yield f"{found[0]!r} instead of {better}: {sentence[:80]}"


def sentences(lines: list[str]) -> Iterator[str]:
    """Yield sentences, headings and rows of tables; code is one word, and of a link only the text remains."""
    joined = ""
    for line in lines:
        starts = re.match(r"\s*([*-]|\d+\.)\s|#|\||>|$", line)
        joined += ("\n" if starts else " ") + line.strip()
    plain = _LINK.sub(r"\1", re.sub(r"`[^`\n]*`", "code", joined))
    for block in plain.splitlines():
        if block.startswith("|"):
            yield block
            continue
        # A bold lead is a sentence of its own.
        yield from re.split(r"(?<=[.!?])[*_)\"]*\s+|(?<=[.:!?]\*\*)\s+", block.lstrip("#*- "))


def _result_tables(lines: list[str]) -> Iterator[str]:
    table: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        cells = [cell.strip() for row in table for cell in row.strip("|").split("|")]
        found = [cell for cell in cells if _NUMBER.fullmatch(cell)]
        if len(found) > MOST_NUMBERS:
            yield f"{len(found)} numbers in a table, put them into results/: {table[0][:60]}"
        table = []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_follow_the_writing_rules(page: Path) -> None:
    numbers = str(page.relative_to(ROOT)) not in CHECKED_NUMBERS
    found = list(faults(page.read_text(encoding="utf-8"), numbers=numbers))
    assert not found, "\n".join(found)


def code_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, comments and messages of a module, each with its line."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            # Indented blocks are tables or code. An entry of Args or Raises is a paragraph, without its name.
            text = inspect.cleandoc(str(node.value.value))
            text = re.sub(r"(?<=\n\n)( {4}.*\n?)+", "\n", text)
            yield node.lineno, re.sub(r"\n *(\w+, )*\w+:(?=\s)", "\n\n", text)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in _MESSAGES
        ):
            for string in node.args:
                yield node.lineno, _literal(string)
        elif isinstance(node, ast.Raise):
            yield node.lineno, _literal(node)
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


def _literal(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        return "value"
    return "".join(_literal(child) for child in ast.iter_child_nodes(node))


@pytest.mark.parametrize("package", CHECKED_FOLDERS)
def test_code_follows_the_writing_rules(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(UNCHECKED)
        for line, text in code_texts(path.read_text(encoding="utf-8"))
        for fault in _prose_faults(text.splitlines(), LONGEST_IN_CODE)
    }
    assert not found, "\n".join(sorted(found))


CODE = """'''{}'''

def check(what):
    '''Return a value.

    Args:
        what: its description, by `what`.
    '''
    # {}
    raise ValueError(f"{{what}} {}")
"""


def test_a_planted_fault_in_code_is_found() -> None:
    good = ["Check a value.", "A reason.", "must be 1"]
    for place in range(len(good)):
        bad = [text if at != place else f"{text} stands for 1" for at, text in enumerate(good)]
        for texts, faults_found in ((good, 0), (bad, 1)):
            blocks = [text.splitlines() for _, text in code_texts(CODE.format(*texts))]
            found = {fault for lines in blocks for fault in _prose_faults(lines)}
            assert len(found) == faults_found, (place, found)


GOOD = """# Topic

A sentence of ten words that is wrapped after some words
and continues. [A link](https://example.com/so/long/that/the/line/has/more/than/a/hundred/characters) is one.

* **What is it?** `what` in code, and a question.

| strategy | bytes |
|---|---:|
| one | 1.02 |

    | an indented block says what it wants and may be as long as it likes, because nobody reads it as prose |
"""
BROKEN = {
    "words": " ".join(["word"] * (LONGEST_SENTENCE + 1)).replace("word word", "word\nword") + ".",
    "begins with what": "The table shows what it costs.",
    "'stands for' instead of represents": "It stands for a node.",
    "'in full' instead of full": "Tuned in full.",
    "characters in a line": "a" * (LONGEST_LINE + 1),
    "numbers in a table": "| a | b |\n|---|---|\n| 1.5 | 2.5 % |\n| +0.1 % (0.0 to 0.2 %) | 3.5 |",
}


def test_a_good_page_breaks_no_rule() -> None:
    assert list(faults(GOOD)) == []


@pytest.mark.parametrize("rule", BROKEN)
def test_a_planted_fault_is_found(rule: str) -> None:
    found = list(faults(f"{GOOD}\n{BROKEN[rule]}\n"))
    assert len(found) == 1 and rule in found[0]


def test_a_generated_table_may_have_numbers() -> None:
    table = BROKEN["numbers in a table"]
    assert list(faults(f"<!-- result summary -->\n{table}\n<!-- end -->\n")) == []
