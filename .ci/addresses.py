"""Write the addresses of a release into the sources that it is built from.

python .ci/addresses.py https://HOST/OWNER/NAME https://SITE/VERSION/

Messages, the report and the metadata of the wheel then link there. A checkout has no addresses, because a
copy of it lies somewhere else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_addresses(root: Path, *, repository: str, documentation: str) -> None:
    """Fill in sdp4bit/addresses.py and [project.urls] of pyproject.toml.

    Args:
        repository: address without a slash at the end.
        documentation: address of this version's site, with a slash at the end.
    """
    if not re.fullmatch(r"https://[\w./~-]*[\w~-]", repository):
        sys.exit(f"{repository}: not an https address of a repository, without a slash at the end")
    if not re.fullmatch(r"https://[\w./~-]+/", documentation):
        sys.exit(f"{documentation}: not an https address of a site, with a slash at the end")
    constants, project = root / "sdp4bit/addresses.py", root / "pyproject.toml"
    text = constants.read_text(encoding="utf-8")
    for name, value in (("REPOSITORY", repository), ("DOCUMENTATION", documentation)):
        text, count = re.subn(rf'^{name} = ""$', f'{name} = "{value}"', text, flags=re.MULTILINE)
        if count != 1:
            sys.exit(f"{constants}: {name} is filled in already")
    constants.write_text(text, encoding="utf-8")
    urls = {
        "Homepage": documentation,
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{documentation}changelog.html",
    }
    lines = "".join(f'{name} = "{value}"\n' for name, value in urls.items())
    head = "[project.urls]\n"
    project.write_text(project.read_text(encoding="utf-8").replace(head, head + lines), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write_addresses(ROOT, repository=sys.argv[1], documentation=sys.argv[2])
