"""The text of source code: what is taken out of packages, in which order and on which side, and its record."""

import gzip
import io
import json
import shutil
import subprocess
import tarfile
import zipfile

import pytest
from fastweights_studies.measure import code_text
from fastweights_studies.measure.code_text import (
    HELD_OUT,
    Package,
    check_pieces,
    known_hash,
    main,
    ordered,
    split_of,
    text_in,
    text_paths,
    write_text,
)

from fastweights.data.text.splitting import Document

CODE = "int main(void) { return 0; }\n" * 10


def test_a_folder_is_on_one_side_and_both_others_are_small():
    sides = [split_of(f"package/folder{number}/file.c") for number in range(20 * HELD_OUT)]
    assert 5 < sides.count("validation") < 40 and 5 < sides.count("test") < 40
    assert {split_of(f"package/folder7/{name}") for name in "abcdef"} == {sides[7]}


def test_the_order_is_that_of_hashes_and_repeats_are_left_out():
    named = [(f"package/folder{n % 400}/file{n}.c", f"{CODE}{n}") for n in range(2000)]
    found = list(ordered([*named, ("other/x.c", named[0][1])]))
    assert found == list(ordered([("other/x.c", named[0][1]), *reversed(named)]))
    assert sorted(text for _, _, text in found) == sorted(text for _, text in named)
    train = [name for split, name, _ in found if split == "train"]
    assert train != sorted(train)
    folders = [name.rpartition("/")[0] for split, name, _ in found if split != "train"]
    assert len([n for n in range(1, len(folders)) if folders[n] != folders[n - 1]]) == len(set(folders)) - 1


def test_what_is_written_is_read_as_a_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(code_text, "PIECE", 1000)
    documents = [("train", f"a/{n}.c", f"{CODE}{n}") for n in range(9)]
    others = [("validation", "b/v.c", "valid"), ("test", "c/t.c", "tested")]
    record = write_text(tmp_path, [*documents, *others])
    assert [len(paths) for paths in text_paths(tmp_path).values()] == [3, 1, 1]
    assert record["splits"]["train"]["characters"] == sum(len(text) for _, _, text in documents)
    assert known_hash(tmp_path) == record["sha256"] != write_text(tmp_path / "other", others)["sha256"]
    assert list(text_in(tmp_path, "test").documents()) == [
        Document("tested", True),
        *(Document(text, False) for _, _, text in documents),
    ]
    before = [path.read_bytes() for path in sorted(tmp_path.glob("*.gz"))]
    assert write_text(tmp_path, [*documents, *others]) == record
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.gz"))] == before
    assert text_in(tmp_path, "test", 2).paths == text_in(tmp_path, "test").paths[:2]
    (tmp_path / "text.json").unlink()
    with pytest.raises(ValueError, match="code_text --output"):
        text_in(tmp_path, "test")


def test_a_piece_that_is_lost_cut_or_strange_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(code_text, "PIECE", 1000)
    write_text(tmp_path, [("train", f"a/{n}.c", f"{CODE}{n}") for n in range(9)])
    check_pieces(tmp_path)
    piece = tmp_path / "train-01.jsonl.gz"
    whole = piece.read_bytes()
    for damage in (piece.unlink, lambda: piece.write_bytes(whole[:-9])):
        damage()
        with pytest.raises(
            ValueError, match=r"train-01.jsonl.gz is missing, cut or of another text; copy the folder again"
        ):
            check_pieces(tmp_path)
    piece.write_bytes(whole)
    (tmp_path / "train-03.jsonl.gz").write_bytes(whole)
    with pytest.raises(ValueError, match=r"train-03.jsonl.gz is missing"):
        check_pieces(tmp_path)
    check_pieces(tmp_path, train_pieces=3)
    (tmp_path / "train-00.jsonl.gz").rename(tmp_path / "train.gz")
    with pytest.raises(ValueError, match=r"train-00.jsonl.gz is missing"):
        check_pieces(tmp_path, train_pieces=1)
    (tmp_path / "text.json").write_text('{"sha256": "0"}')
    with pytest.raises(ValueError, match="delete it and write it again"):
        check_pieces(tmp_path)


def pack(files):
    """A tar.xz of files in a folder of its own."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"top-1.0/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_packages_become_text_with_versions_and_licences(tmp_path, monkeypatch, capsys):
    tree = tmp_path / "tree"
    tarred = {
        "lib/a.c": CODE.encode(), "lib/testsuite/b.c": f"{CODE}b".encode(), "lib/c.bin": b"x" * 400, "lib/d.c": b"\xff" * 400,
        "lib/e.c": b"int e;", "lib/f.h": b"#define F 1\n" * 10**5,
    }  # fmt: skip
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("java/G.java", f"{CODE}g")
    files = {
        "DEBIAN/control": b"Package: mine\nVersion: 1.5-2\nArchitecture: all\nMaintainer: A <a@b>\nDescription: x\n",
        "usr/src/mine.tar.xz": pack(tarred),
        "usr/src/src.zip": zipped.getvalue(),
        "usr/share/doc/mine/copyright": b"mine, all of it",
        "usr/share/doc/mine/h.md": f"{CODE}h".encode(),
        "usr/share/other/i.md": f"{CODE}i".encode(),
    }
    for name, data in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    (tmp_path / "downloads").mkdir()
    subprocess.run(
        ["dpkg-deb", "--build", str(tree), str(tmp_path / "downloads/mine_1.5-2_all.deb")],
        check=True,
        capture_output=True,
    )
    inside = ("usr/src/*.tar.xz", "usr/src/src.zip", "usr/share/doc/*")
    monkeypatch.setattr(code_text, "PACKAGES", (Package("mine", inside, "MIT"),))
    monkeypatch.setattr(code_text, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(code_text, "split_of", lambda name: "test" if name.endswith(".md") else "train")
    into = tmp_path / "text"
    main(["--output", str(into), "--downloads", str(tmp_path / "downloads"), "--record"])
    lines = [
        json.loads(line)
        for path in sorted(into.glob("*.gz"))
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    assert {line["name"]: line["text"] for line in lines} == {
        "mine/lib/a.c": CODE, "mine/java/G.java": f"{CODE}g", "mine/usr/share/doc/mine/h.md": f"{CODE}h",
    }  # fmt: skip
    (fact,) = json.loads((tmp_path / "record.json").read_bytes())["packages"].values()
    assert (fact["version"], fact["licence"], fact["copyright_in"]) == ("1.5-2", "MIT", "mine")
    assert fact["characters"] == 3 * len(CODE) + 2
    assert (into / "licences/mine").read_bytes() == b"mine, all of it"
    assert "This is not the text" not in capsys.readouterr().out
    (tmp_path / "record.json").write_text(json.dumps({"sha256": "0", "packages": {}}))
    main(["--output", str(into), "--downloads", str(tmp_path / "downloads")])
    assert "This is not the text" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_a_licence_is_copied_from_the_package_that_has_it(tmp_path):
    for name, files in (
        ("mine", {"usr/share/doc/mine/h.md": b"text"}),
        ("other", {"usr/share/doc/other/copyright": b"all"}),
    ):
        control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: A <a@b>\nDescription: x\n"
        for path, data in {"DEBIAN/control": control.encode(), **files}.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_bytes(data)
        subprocess.run(["dpkg-deb", "--build", str(tmp_path / name)], check=True, capture_output=True)
    package, licences = Package("mine", (), "MIT", "other"), tmp_path / "licences"
    licences.mkdir()
    code_text.copy_licence(package, tmp_path / "other.deb", licences)
    assert (licences / "mine").read_bytes() == b"all"
    with pytest.raises(ValueError, match=r"mine.deb must have the copyright file of mine.*copyright_in"):
        code_text.copy_licence(package, tmp_path / "mine.deb", licences)


def test_a_package_is_downloaded_in_the_recorded_version(tmp_path, monkeypatch):
    asked = []

    def run(command, cwd, check):
        asked.append(command)
        (cwd / f"{command[-1].replace('=', '_')}_all.deb").touch()

    monkeypatch.setattr(code_text.subprocess, "run", run)
    assert code_text.download("mine", tmp_path, "1.5-2").name == "mine_1.5-2_all.deb"
    assert code_text.download("mine", tmp_path, "1.5-2").exists() and asked == [["apt-get", "download", "mine=1.5-2"]]


def test_the_recorded_text_is_of_the_declared_packages():
    record = json.loads(code_text.RECORD.read_bytes())
    assert list(record["packages"]) == [package.name for package in code_text.PACKAGES]
    characters = sum(fact["characters"] for fact in record["packages"].values())
    assert characters == sum(split["characters"] for split in record["splits"].values())
    for package in code_text.PACKAGES:
        assert record["packages"][package.name]["licence"] == package.licence
