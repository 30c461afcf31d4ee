"""The linter of prose finds planted faults, at their lines, and nothing in good texts. Layer: strings."""

from __future__ import annotations

import pytest

from tests import prose

PAGE = """# Topic

A sentence of ten words that is wrapped after some words
and continues. [A link](https://example.com/so/long/that/the/line/has/more/than/a/hundred/characters) is one.

* **What is it?** `what` in code, and a question.

| strategy | bytes |
|---|---:|
| one | 1.02 |

    | an indented block says what it wants and may be as long as it likes, because nobody reads it as prose |

```
a program says what it prints
```
"""
TABLE = "| a | b |\n|---|---|\n| 1.5 | 2.5 % |\n| +0.1 % (0.0 to 0.2 %) | 3.5 |"
IN_A_PAGE = {
    "it has 26 words": " ".join(["word"] * (prose.LONGEST_SENTENCE + 1)).replace("word word", "word\nword")
    + ".",
    "begins with 'what'": "The table shows what it costs.",
    "instead of 'stands for' write represents": "It stands for a node.",
    "instead of 'in full' write full": "Tuned in full.",
    "this line has 101": "a" * (prose.LONGEST_LINE + 1),
    "it has 4 numbers": TABLE,
}
CODE = """'''{}'''

def check(what):
    '''Return a value.

    Args:
        what: its description, by `what`.
    '''
    # A reason
    # that is long. {}
    raise ValueError(f"{{what}} {}")
"""


def test_a_good_page_has_no_faults() -> None:
    assert list(prose.page_faults(PAGE)) == []


@pytest.mark.parametrize("way_out", IN_A_PAGE)
def test_a_fault_of_a_page_is_found_at_its_line(way_out: str) -> None:
    (fault,) = prose.page_faults(f"{PAGE}\n{IN_A_PAGE[way_out]}\n")
    assert way_out in fault.way_out
    assert fault.line == PAGE.count("\n") + 2


def test_a_sentence_inside_a_paragraph_has_its_own_line() -> None:
    (fault,) = prose.page_faults("One sentence that is wrapped\nafter a word. It says\nno more. Another one.")
    assert str(fault) == "2: 'It says no more.': instead of 'says' write reports, prints or states"


def test_a_generated_table_may_have_numbers() -> None:
    assert list(prose.page_faults(f"<!-- result summary -->\n{TABLE}\n<!-- end -->\n")) == []


@pytest.mark.parametrize(("place", "line"), [(0, 1), (1, 10), (2, 11)])
def test_a_fault_in_code_is_found_at_its_line(place: int, line: int) -> None:
    texts = ["Check a value.", "A reason.", "must be 1"]
    assert prose.code_faults(CODE.format(*texts)) == []
    texts[place] += " stands for 1"
    (fault,) = prose.code_faults(CODE.format(*texts))
    assert (fault.line, "represents" in fault.way_out) == (line, True)


def test_generated_pages_and_old_texts_are_left_alone() -> None:
    assert prose.is_checked("docs/method.md") and prose.is_checked("sdp4bit/config.py")
    assert not prose.is_checked("docs/reference/cli.md")
    assert not prose.is_checked("tests/engines/test_streams.py")
    assert not [*prose.file_faults("docs/results/kernels.md")]


def test_a_fault_is_an_exit_code_and_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(prose.ROOT / "README.md")]
    monkeypatch.setattr(prose, "page_faults", lambda text, *, numbers: iter([]))
    assert prose.main(paths) == 0
    fault = prose.Fault(3, "It errs.", "instead of 'errs' write has an error of")
    monkeypatch.setattr(prose, "page_faults", lambda text, *, numbers: iter([fault]))
    assert prose.main(paths) == 1
    assert capsys.readouterr().out == "README.md:3: 'It errs.': instead of 'errs' write has an error of\n"
