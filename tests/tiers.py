"""Tiers of the tests, and those that a change may break: `python -m tests.tiers [COMMIT]`.

The Makefile divides the files of tests/ into tiers, and the slow ones into parts. A change needs those that
import a changed module, directly or not. Prints the tiers besides the library's, the parts of slow tests, and
the files for the newest torch that need a file that has changed since COMMIT. Without a COMMIT that is known
here, that is all of them but the tiers that need another environment.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import grimp

from tests import PACKAGES, ROOT

ROOTS = (*PACKAGES, "benchmarks", "examples", "tests")
NAME = re.compile(rf"\b(?:{'|'.join(ROOTS)})(?:[./]\w+)*\.?")
"""The name of a module or its path in a string, which a process may import or run. With a dot at the end it
may be the beginning of names in an f-string."""
ALL, NONE, PACKAGE = "every tier", "only the library's tier", "the tiers that import its package"
DATA = (
    # The library's tier, which every change needs, reads all pages and the lists of the project.
    (r".*\.md|docs/.*|mkdocs\.yml|\.github/.*|CITATION\.cff|LICENSE|\.gitignore|MANIFEST\.in", NONE),
    (r"\.pre-commit-config\.yaml|examples/.*", NONE),
    (r"experiments/.*|results/.*|benchmarks/.*", "benchmarks"),
    (r"sdp4bit\w*/.*|tests/.+/.*", PACKAGE),
)
"""Files that are no module: which tiers need them, besides those that name them in a string. Others are in
every tier: Makefile, pyproject.toml, constraints and the like."""
WITHOUT = {
    ("tests.ranks", "tests.lab.pretrain.tiny_runs"),  # preloaded, so that ranks that need it start sooner
    ("tests.conftest", "tests.mutations"),  # called with --mutations, which parts of the slow tests give
}
"""Imports that the results of tests do not depend on."""
NEEDS_ENVIRONMENT = {
    "deepspeed": r"sdp4bit_deepspeed/|tests/deepspeed/|constraints-ecosystem",
    "ecosystem": r"sdp4bit/trainers/|tests/ecosystem/|constraints-ecosystem",
}
"""Tiers whose packages take minutes to install, and the files that they alone test. They meet other changes
at night, or on their day in `.ci/run`."""


def of_makefile(prefix: str) -> dict[str, list[str]]:
    """Return the folders, files and tests of tests/ that the Makefile's variables of this prefix have."""
    found: dict[str, list[str]] = {}
    for name, words in re.findall(
        rf"^{prefix}_(\w+) [:+]= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    ):
        found.setdefault(name, []).extend(words.split())
    return found


def files_of(words: Sequence[str]) -> set[Path]:
    """Return the files of tests that a list of the Makefile has."""
    found = set[Path]()
    for word in words:
        paths = [*(ROOT / "tests").glob(word.partition("::")[0])]
        assert paths, f"Makefile: there is no tests/{word}"
        for path in paths:
            found |= {*path.rglob("test_*.py")} if path.is_dir() else {path}
    return found


def module_of(path: Path | PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module but its docstrings."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if (
                isinstance(child, ast.Constant)
                and isinstance(child.value, str)
                and not isinstance(node, ast.Expr)
            ):
                yield child.value


class Imports:
    """The modules that each module imports, with their packages, and those that its strings name."""

    def __init__(self) -> None:
        self.graph = grimp.build_graph(*ROOTS, cache_dir=None)
        # Without `if TYPE_CHECKING`, where packages import the modules that they load when they are used.
        self.executed = grimp.build_graph(*ROOTS, cache_dir=None, exclude_type_checking_imports=True)
        self.modules = self.graph.modules
        files = {
            module_of(each.relative_to(ROOT)): each for root in ROOTS for each in (ROOT / root).rglob("*.py")
        }
        self.strings = {
            name: [*strings(ast.parse(files[name].read_text()))] for name in self.modules if name in files
        }

    def _named(self, name: str) -> set[str]:
        """Return the modules that a name in a string may mean: all of a package if the name continues."""
        parts = name.replace("/", ".").removesuffix(".").removesuffix(".py").split(".")
        while ".".join(parts) not in self.modules:
            parts.pop()
        found = ".".join(parts)
        if len(parts) == 1:
            return {f"{found}.__main__"} & self.modules  # else a word, such as the name of a package
        return {found, *(self.graph.find_descendants(found) if name.endswith(".") else ())}

    def _imported_by(self, module: str) -> set[str]:
        """Return the modules that a module imports.

        `NAME.__init__` is a package of which a module was imported, but not the package itself. It does not
        load the modules that it loads when it is used.
        """
        package = module.removesuffix(".__init__")
        if package != module:
            found = set(self.executed.find_modules_directly_imported_by(package))
        else:
            found = set(self.graph.find_modules_directly_imported_by(module))
            for text in self.strings.get(module, []):
                for name in NAME.findall(text):
                    found |= self._named(name)
        above = {parent for each in found | {package} if (parent := each.rpartition(".")[0])}
        return {each for each in found if (module, each) not in WITHOUT} | {
            f"{each}.__init__" for each in above
        }

    def of(self, paths: set[Path]) -> set[str]:
        """Return all modules that files of tests need, with their conftest.py."""
        names = {module_of(path.relative_to(ROOT)) for path in paths}
        folders = {
            parent for path in paths for parent in path.parents if parent.is_relative_to(ROOT / "tests")
        }
        names |= {module_of((each / "conftest.py").relative_to(ROOT)) for each in folders} & self.modules
        found, new = set[str](), names
        while new:
            found |= new
            new = set().union(*(self._imported_by(each) for each in new)) - found
        return found


def changes_since(commit: str) -> list[str] | None:
    """Return the files that differ from a commit, by their old and new names; None if it is unknown here."""
    git = ("git", "-C", str(ROOT))
    if (
        not commit
        or subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], check=False).returncode
    ):
        return None
    command = [*git, "diff", "--name-only", "--no-renames", "-z", commit, "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]


def reads(name: str, modules: set[str], file: str, imports: Imports) -> bool:
    """Return whether the tests of a list, which import these modules, need a file."""
    path = PurePosixPath(file)
    if name in NEEDS_ENVIRONMENT:
        return re.match(NEEDS_ENVIRONMENT[name], file) is not None
    if (
        path.suffix == ".py" and path.parts[0] in ROOTS
    ):  # a deleted one, which is not in the graph, may be named
        module = module_of(path)
        return module not in imports.modules or not modules.isdisjoint({module, f"{module}.__init__"})
    if any(text.endswith(path.name) for module in modules for text in imports.strings.get(module, [])):
        return True
    rule = next((rule for pattern, rule in DATA if re.fullmatch(pattern, file)), ALL)
    if rule == PACKAGE:
        package = next((each for each in map(module_of, path.parents) if each in imports.modules), "")
        return not modules.isdisjoint({package, f"{package}.__init__"})
    return rule in (ALL, name)


def needed(lists: dict[str, list[str]], changes: Sequence[str] | None, imports: Imports) -> dict[str, str]:
    """Return the lists of tests that need changed files, with the first of these files."""
    if changes is None:
        return {name: ALL for name in lists if name not in NEEDS_ENVIRONMENT}
    found: dict[str, str] = {}
    for name, words in lists.items():
        modules = imports.of(files_of(words))
        for file in changes:
            if name not in found and reads(name, modules, file, imports):
                found[name] = file
    return found


def main(arguments: Sequence[str]) -> int:
    changes, imports = changes_since(arguments[0] if arguments else ""), Imports()
    for kind, prefix in (("tier", "TIER"), ("part", "SLOW"), ("torch", "TORCH")):
        lists = of_makefile(prefix)
        found = needed(lists, changes, imports)
        for name, file in found.items():
            print(f"{kind} {name}: {file}", file=sys.stderr)
        if kind == "torch":
            print(
                kind, *sorted(str(path.relative_to(ROOT)) for each in found for path in files_of(lists[each]))
            )
        else:
            print(kind, *(name for name in found if name != "library"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
