"""The text of the language models that train in one block: source code and its documentation as Debian ships it.

python -m fastweights_studies.measure.code_text --output runs/leaderboard/code-text

downloads the packages with `apt-get download`, which needs a Debian with their release among its sources and `apt-get update`,
takes the text out of them (a few minutes) and writes it as compressed JSON lines: pieces of train text, validation.jsonl.gz and
test.jsonl.gz, and text.json with packages, versions, licences, sizes and hashes. The copyright file of every package is copied
beside it. A training compares the files with these hashes, since a piece may be lost where they are carried to another machine.
The text itself is no part of this repository. Its record is, studies/results/code-text.json: `--record` writes it there, and a
training compares its text with it. Models that learned from this text are models of code.

A document is a file. The hash of its folder decides whether it is train, validation or test text: files of one folder often
repeat each other. Train text is in the order of the hashes of names, so that every beginning of it holds all packages in their
proportions. In the other text the files of a folder follow each other: where a measurement joins documents to a long context,
they belong together. A file that repeats another one is left out, and so are files that machines have written: by their place,
or because they are longer than most that people write.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from fastweights.data.text import TextCorpus
from fastweights.files import write_bytes, write_json
from fastweights.untrusted import read_json_object

from ..places import RESULTS

__all__ = [
    "PACKAGES", "RECORD", "Package", "check_pieces", "known_hash", "split_of", "text_in", "text_paths", "write_text",
]  # fmt: skip

RECORD = RESULTS / "code-text.json"
FORMAT = 1  # of the record
ABOUT = "text.json"  # written last: a folder without it is not whole
SPLITS = ("train", "validation", "test")
PIECES = "*.jsonl.gz"
HELD_OUT = 100  # of so many folders one is validation and one test text
PIECE = 200_000_000  # characters of a file of train text: compressed less than what a machine is sent at a time
SHORTEST, LONGEST = 200, 300_000  # characters of a document
SUFFIXES = frozenset(
    (
        ".adoc", ".awk", ".c", ".cc", ".cpp", ".cxx", ".dts", ".dtsi", ".go", ".h", ".hh", ".hpp", ".hxx", ".java", ".js", ".lua",
        ".md", ".ml", ".pl", ".pm", ".pod", ".py", ".rs", ".rst", ".s", ".sh", ".texi", ".toml", ".txt", ".yaml",
    )
)  # fmt: skip
# Folders of files that machines have written, of tests that differ in a word, and of other people's libraries.
LEFT_OUT = re.compile(
    r"(^|/)(testsuite|vendor|test/ui|tests/ui|drivers/gpu/drm/amd/include|core_arch/src|stdarch-verify|llvm-project)/"
)


@dataclass(frozen=True)
class Package:
    """A Debian package with text.

    Attributes:
        inside: patterns of the paths that are read: text itself, or an archive of text.
        licence: of most of its files, by its SPDX name. The copyright file of the package has all of them.
        copyright_in: the package with that file where it is another one.
    """

    name: str
    inside: tuple[str, ...]
    licence: str
    copyright_in: str = ""


# Those of Debian 12.
PACKAGES = (
    Package("linux-source-6.1", ("usr/src/linux-source-*.tar.xz",), "GPL-2.0-only"),
    Package("gcc-12-source", ("usr/src/gcc-12/gcc-*.tar.xz",), "GPL-3.0-or-later WITH GCC-exception-3.1"),
    Package(
        "openjdk-17-source", ("usr/lib/jvm/*/lib/src.zip",), "GPL-2.0-only WITH Classpath-exception-2.0",
        "openjdk-17-jre-headless",
    ),
    Package("rust-src", ("usr/src/rustc-*",), "MIT OR Apache-2.0"),
    Package("python3.11-doc", ("usr/share/doc/python3.11/html/_sources/*",), "PSF-2.0"),
    Package("libpython3.11-stdlib", ("usr/lib/python3.11/*",), "PSF-2.0", "libpython3.11-minimal"),
)  # fmt: skip
Member = tuple[str, bytes]


def text_paths(folder: Path, train_pieces: int | None = None) -> dict[str, tuple[str, ...]]:
    """The files of a folder of text by their split.

    Args:
        train_pieces: how many files of train text, from the first on; None for all.

    Raises:
        ValueError: the folder has no text, or not all of it.
    """
    if not (folder / ABOUT).exists():
        raise ValueError(
            f"output must hold the folder {folder.name} with the text of these models, and {folder / ABOUT} is not there; "
            f"`python -m fastweights_studies.measure.code_text --output {folder}` writes it"
        )
    paths = {split: tuple(map(str, sorted(folder.glob(f"{split}*.jsonl.gz")))) for split in SPLITS}
    return {**paths, "train": paths["train"][:train_pieces]}


def text_in(folder: Path, split: str, train_pieces: int | None = None) -> TextCorpus:
    """The train text of a folder, with one of the other splits as held-out text. Arguments and errors as `text_paths`."""
    paths = text_paths(folder, train_pieces)
    return TextCorpus(paths=paths["train"], held_out=paths[split])


def check_pieces(folder: Path, train_pieces: int | None = None) -> None:
    """Compare the files of a folder of text with their hashes in text.json: those that are read, where these are fewer.

    Raises:
        ValueError: a file is missing, was cut or changed, or is there beside them; or the folder was written before there were
            hashes.
    """
    recorded = read_json_object(folder / ABOUT).get("pieces")
    if recorded is None:
        raise ValueError(
            f"the folder of the text, {folder}, must have the hashes of its files in {ABOUT}, and was written before there were "
            "any; delete it and write it again"
        )
    names = sorted({*recorded, *(path.name for path in folder.glob(PIECES))})
    train = [name for name in names if name.startswith("train")]
    unread = set() if train_pieces is None else set(train[train_pieces:])
    found = _hash_pieces(folder, unread)
    different = [name for name in names if name not in unread and recorded.get(name) != found.get(name)]
    if different:
        raise ValueError(
            f"the folder of the text, {folder}, must hold the files that its {ABOUT} records, and {', '.join(different)} "
            f"{'is' if len(different) == 1 else 'are'} missing, cut or of another text; copy the folder again"
        )


def _hash_pieces(folder: Path, left_out: Collection[str] = ()) -> dict[str, str]:
    pieces = [path for path in sorted(folder.glob(PIECES)) if path.name not in left_out]
    return {path.name: _hash(path.read_bytes()) for path in pieces}


def known_hash(folder: Path | None = None) -> str:
    """The hash of the text in a folder; of the text that this repository records without one."""
    return str(read_json_object(RECORD if folder is None else folder / ABOUT)["sha256"])


def split_of(name: str) -> str:
    """The split of a document, by the hash of its folder."""
    part = int(_hash(str(PurePosixPath(name).parent).encode())[:8], 16) % HELD_OUT
    return {0: "validation", 1: "test"}.get(part, "train")


def write_text(folder: Path, documents: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """Write documents, each with its split and name, into a folder of text, in their order. Returns the record of the text, which
    stands in text.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / ABOUT, *folder.glob(PIECES)):
        old.unlink(missing_ok=True)
    writers = {split: _Pieces(folder, split) for split in SPLITS}
    for split, name, text in documents:
        writers[split].add(name, text)
    splits = {split: writer.close() for split, writer in writers.items()}
    whole = _hash("".join(one["sha256"] for one in splits.values()).encode())
    record: dict[str, Any] = {"format": FORMAT, "sha256": whole, "splits": splits, "pieces": _hash_pieces(folder)}
    write_json(folder / ABOUT, record)
    return record


class _Pieces:
    """Writes the documents of a split as compressed JSON lines, in pieces. The hash is of the lines, not of their compression."""

    def __init__(self, folder: Path, split: str) -> None:
        self._folder, self._split = folder, split
        self._hash = hashlib.sha256()
        self._lines: list[bytes] = []
        self._written = self._documents = self._characters = self._pieces = 0

    def add(self, name: str, text: str) -> None:
        line = json.dumps({"name": name, "text": text}).encode() + b"\n"
        self._hash.update(line)
        self._lines.append(line)
        self._documents += 1
        self._characters += len(text)
        if self._characters - self._written >= PIECE:
            self._save()

    def _save(self) -> None:
        name = f"{self._split}-{self._pieces:02d}" if self._split == "train" else self._split
        write_bytes(self._folder / f"{name}.jsonl.gz", gzip.compress(b"".join(self._lines), mtime=0))
        self._lines, self._written, self._pieces = [], self._characters, self._pieces + 1

    def close(self) -> dict[str, Any]:
        if self._lines:
            self._save()
        return {
            "documents": self._documents,
            "characters": self._characters,
            "sha256": self._hash.hexdigest(),
        }


def copy_licence(package: Package, file: Path, licences: Path) -> None:
    """Copy the copyright file of a package, out of the downloaded file that has it, into the folder `licences`.

    Raises:
        ValueError: it is not there.
    """
    for path, content in _members(file):
        if path.match("usr/share/doc/*/copyright"):
            write_bytes(licences / package.name, content)
            return
    raise ValueError(
        f"{file.name} must have the copyright file of {package.name}, usr/share/doc/*/copyright, and has none; name the package "
        "that has it in PACKAGES (copyright_in)"
    )


def read_package(package: Package, file: Path) -> Iterator[tuple[str, str]]:
    """Name and text of the documents of a downloaded package, without those that are left out."""
    for path, content in _members(file):
        if any(path.match(pattern) or _is_below(path, pattern) for pattern in package.inside):
            for inner, data in _open(path, content):
                name = f"{package.name}/{inner}"
                text = _as_text(name, data)
                if text is not None:
                    yield name, text


def _is_below(path: PurePosixPath, pattern: str) -> bool:
    return any(parent.match(pattern) for parent in path.parents)


def _members(file: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The regular files of a package."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                if member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    yield PurePosixPath(member.name), content.read()
    if process.returncode:
        raise OSError(f"dpkg-deb could not read {file}; download it again")


def _open(path: PurePosixPath, content: bytes) -> Iterator[Member]:
    """The files of an archive, or the file itself."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                yield name, archive.read(name)
    elif path.name.endswith(".tar.xz"):
        with tarfile.open(fileobj=io.BytesIO(content), mode="r|xz") as tar:
            for member in tar:
                if member.isfile():
                    inner = tar.extractfile(member)
                    assert inner is not None
                    yield str(PurePosixPath(*PurePosixPath(member.name).parts[1:])), inner.read()
    else:
        yield str(path), content


def _as_text(name: str, data: bytes) -> str | None:
    """The text of a file; None where it is no document."""
    if PurePosixPath(name).suffix.lower() not in SUFFIXES or LEFT_OUT.search(name) or len(data) > 4 * LONGEST:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if "\0" not in text and SHORTEST <= len(text) <= LONGEST else None


def ordered(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Split, name and text of documents in the order of the text, without those that repeat one before."""
    # Compressed while they wait: together they are larger than the memory of a small machine.
    kept = sorted((_place_of(name), name, zlib.compress(text.encode(), 1)) for name, text in documents)
    seen = set()
    for _, name, packed in kept:
        text = zlib.decompress(packed)
        if (content := _hash(text)) not in seen:
            seen.add(content)
            yield split_of(name), name, text.decode()


def _place_of(name: str) -> str:
    """What documents are ordered by: the hash of the name, or for held-out text that of the folder."""
    return _hash((name if split_of(name) == "train" else str(PurePosixPath(name).parent)).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def download(name: str, folder: Path, version: str | None) -> Path:
    """The file of a package, downloaded by apt unless it is there. version: None for the newest of apt's lists."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.glob(f"{name}_*.deb"))
    if not found:
        wanted = name if version is None else f"{name}={version}"
        subprocess.run(["apt-get", "download", wanted], cwd=folder, check=True)
        found = sorted(folder.glob(f"{name}_*.deb"))
    return found[-1]


def write_packages(folder: Path, downloads: Path, versions: Mapping[str, str]) -> dict[str, Any]:
    """Download the packages and write their text into a folder. Returns its record.

    Args:
        versions: of packages by name; the newest of apt's lists for the others.
    """
    files = {package: download(package.name, downloads, versions.get(package.name)) for package in PACKAGES}
    licences = folder / "licences"
    licences.mkdir(parents=True, exist_ok=True)
    for package, file in files.items():
        # The package with the copyright file is built from the same source, and so has the same version.
        other = package.copyright_in
        copy_licence(package, download(other, downloads, versions.get(package.name)) if other else file, licences)
    characters: Counter[str] = Counter()

    def counted() -> Iterator[tuple[str, str, str]]:
        read = (read_package(package, file) for package, file in files.items())
        for split, name, text in ordered(chain.from_iterable(read)):
            characters[name.partition("/")[0]] += len(text)
            yield split, name, text

    record = write_text(folder, counted())
    record["packages"] = {
        package.name: {
            "version": _version(file),
            "sha256": _hash(file.read_bytes()),
            "licence": package.licence,
            "copyright_in": package.copyright_in or package.name,
            "characters": characters[package.name],
        }
        for package, file in files.items()
    }
    write_json(folder / ABOUT, record)
    return record


def _version(file: Path) -> str:
    command = ["dpkg-deb", "--field", str(file), "Version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the text")
    parser.add_argument("--downloads", type=Path, help="folder of the packages; deleted at the end if not given")
    parser.add_argument("--newest", action="store_true", help="take the newest versions in place of the recorded ones")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} in studies/results")
    given = parser.parse_args(arguments)
    recorded = {} if given.newest or not RECORD.exists() else read_json_object(RECORD)["packages"]
    versions = {name: fact["version"] for name, fact in recorded.items()}
    downloads = given.downloads or Path(tempfile.mkdtemp())
    try:
        record = write_packages(given.output, downloads, versions)
    finally:
        if given.downloads is None:
            shutil.rmtree(downloads)
    if given.record:
        write_json(RECORD, record)
    print(json.dumps(record, indent=2))
    if RECORD.exists() and record["sha256"] != known_hash():
        print(f"This is not the text that {RECORD} records: its packages or their versions differ.")


if __name__ == "__main__":
    main()
