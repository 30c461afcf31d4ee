"""A text of at least 30 million tokens from packages of Debian: manuals, documentation, sources of Linux.

    python -m benchmarks.gpu_text build/text

downloads the packages with apt-get, which needs Debian 12 and its network, and no rights. It writes the
tokens, in Megatron's format, and their tokenizer. They are for `make gpu-report` on a machine without a
network. results/gpu/text.json has the counts and the hash of the tokens.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from sdp4bit_lab.pretrain.data.indexed import token_dtype
from sdp4bit_lab.pretrain.data.preprocess import PreprocessConfig, preprocess
from sdp4bit_lab.pretrain.model.cards import GPT2_VOCABULARY

PACKAGES = ("python3.11-doc", "debian-policy", "developers-reference", "manpages", "manpages-dev")
"""Packages with texts only."""
LINUX = "linux-source-6.1"
_TEXTS = ("*.txt", "*.txt.gz", "*/man/man*/*.gz")
_PROSE = ("*/Documentation/*.rst", "*/Documentation/*.txt", "*/Documentation/*.yaml")
_CODE = tuple(
    f"linux-source-*/{folder}/*.[ch]"
    for folder in ("kernel", "mm", "lib", "fs", "net", "block", "crypto", "security", "ipc", "io_uring")
)
_LEAST_CHARACTERS = 500
"""Shorter files are mostly lists of others."""
PREFIX = "text"
TOKENS = f"{PREFIX}_text_document"
TOKENIZER = f"{PREFIX}_tokenizer.json"


def unpack(packages: Sequence[str], folder: Path) -> Path:
    """Download packages that are not in the folder, and unpack all of them there."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        (archive,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, folder / "files"], check=True)
    return folder / "files"


def documents(files: Path) -> Iterator[str]:
    """Yield the documents of unpacked packages, prose before code, each once and sorted by path."""
    seen: set[bytes] = set()
    for content in _contents(files):
        text = content.decode("utf-8", errors="replace").strip()
        digest = hashlib.sha256(content).digest()
        if len(text) >= _LEAST_CHARACTERS and digest not in seen:
            seen.add(digest)
            yield text


def _contents(files: Path) -> Iterator[bytes]:
    for path in sorted(path for path in files.rglob("*") if path.is_file() and not path.is_symlink()):
        if any(fnmatch(str(path), pattern) for pattern in _TEXTS):
            content = path.read_bytes()
            yield gzip.decompress(content) if path.suffix == ".gz" else content
    for archive in sorted(files.glob("usr/src/linux-source-*.tar.xz")):
        for patterns in (_PROSE, _CODE):
            with tarfile.open(archive) as tar:
                for member in tar:
                    if member.isfile() and any(fnmatch(member.name, each) for each in patterns):
                        stream = tar.extractfile(member)
                        assert stream is not None
                        yield stream.read()


def write_text(path: Path, texts: Iterator[str], *, megabytes: float) -> tuple[int, int]:
    """Write documents of so many bytes in the order of their hashes; return their number and bytes."""
    chosen: list[tuple[bytes, str]] = []
    size = 0
    for text in texts:
        size += len(text.encode())
        if size > 1e6 * megabytes:
            size -= len(text.encode())
            break
        chosen.append((hashlib.sha256(text.encode()).digest(), text))
    # A split takes consecutive documents, so that their order must not follow their kind.
    with path.open("w", encoding="utf-8") as file:
        for _, text in sorted(chosen):
            file.write(json.dumps({"text": text}) + "\n")
    return len(chosen), size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_text", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder of packages, tokens and tokenizer")
    parser.add_argument("--megabytes", type=float, default=97.0, help="of text; prose goes first")
    parser.add_argument("--vocabulary", type=int, default=GPT2_VOCABULARY)
    parser.add_argument("--packages", default=",".join((*PACKAGES, LINUX)), help="separated by commas")
    parser.add_argument("--json", type=Path, help="file for the counts")
    chosen = parser.parse_args(arguments)
    packages = chosen.packages.split(",")
    files = unpack(packages, chosen.out / "packages")
    text = chosen.out / f"{PREFIX}.jsonl"
    count, size = write_text(text, documents(files), megabytes=chosen.megabytes)
    preprocess(
        PreprocessConfig(
            input=(str(text),),
            output_prefix=chosen.out / PREFIX,
            train_tokenizer=chosen.vocabulary,
            append_eod=True,
            overwrite=True,
        )
    )
    tokens = chosen.out / f"{TOKENS}.bin"
    found = {
        "packages": sorted(path.stem for path in (chosen.out / "packages").glob("*.deb")),
        "documents": count,
        "bytes": size,
        "tokens": tokens.stat().st_size // token_dtype(chosen.vocabulary).itemsize,
        "vocabulary": chosen.vocabulary,
        "file_bytes": tokens.stat().st_size,
        "sha256": hashlib.sha256(tokens.read_bytes()).hexdigest(),
    }
    print(json.dumps(found, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
