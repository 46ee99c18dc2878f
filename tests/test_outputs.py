"""What may be written where, and what of a folder a command may delete: the pieces that all commands share."""

import json
import os
from pathlib import Path

import pytest

from fastweights import files, outputs
from fastweights.files import (
    WriteError,
    any_file,
    check_own,
    drop_partials,
    is_owned,
    publish_folder,
    remove_own,
    write_bytes,
)
from fastweights.outputs import check_file, check_place, claim_files, described_files, hold_lock, lock_path

OWN = {"result.json": any_file, "runs": {"*.json": any_file}, "card.md": lambda path: path.read_text() == "ours"}


@pytest.fixture
def folder(tmp_path):
    """The command's own files, some of a person's, and a link to a folder of theirs."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.json").write_text("mine")
    (tmp_path / "out" / "runs").mkdir(parents=True)
    for name in ("result.json", "runs/a.json", "card.md", "notes.txt", "runs/notes.txt"):
        (tmp_path / "out" / name).write_text("ours" if "notes" not in name else "mine")
    (tmp_path / "out" / "link").symlink_to(tmp_path / "mine")
    return tmp_path / "out"


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_what_a_command_wrote_is_deleted_and_nothing_else(folder):
    check_own("output", folder, OWN)
    assert not is_owned(folder, OWN)
    remove_own(folder, OWN)
    assert names(folder) == ["link", "notes.txt", "runs", "runs/notes.txt"]
    (folder / "runs" / "notes.txt").unlink()
    (folder / "card.md").write_text("edited")
    (folder / "result.json").symlink_to("/nowhere")
    remove_own(folder, OWN)
    assert names(folder) == ["card.md", "link", "notes.txt", "result.json"]


@pytest.mark.parametrize("name", ["result.json", "runs", "runs/b.json"])
@pytest.mark.parametrize("thing", ["link", "pipe", "other"])
def test_other_things_at_the_names_of_a_command_are_refused(folder, name, thing):
    path = folder / name
    if name == "runs":
        path.rename(folder / "elsewhere")
    path.unlink(missing_ok=True)
    if thing == "link":
        path.symlink_to(folder / "elsewhere")
    elif thing == "pipe":
        os.mkfifo(path)
    elif name == "runs":
        path.write_text("mine")
    else:
        path.mkdir()
    with pytest.raises(ValueError, match=f"output .* must have .* at {name}, but a .* is there"):
        check_own("output", folder, OWN)


def test_partial_files_are_those_of_names_that_the_command_writes(folder):
    kept = (
        *(".movie.partial", ".result.json.partial", ".result.json.12345.partial", ".notes.txt.12345678.partial"),
        *("runs/.notes.txt.12345678.partial", "mine/.a.json.12345678.partial"),
    )
    gone = (".result.json.12345678.partial", "runs/.b.json.deadbeef.partial")
    (folder / "mine").mkdir()
    for name in (*kept, *gone):
        (folder / name).write_text("")
    (folder / ".runs.12345678.partial").mkdir()
    (folder / "runs" / ".c.json.12345678.partial").symlink_to(folder)
    before = names(folder)
    drop_partials(folder, OWN)
    assert set(before) - set(names(folder)) == {*gone, ".runs.12345678.partial"}


@pytest.mark.parametrize("thing", ["link", "dangling", "folder", "pipe"])
def test_a_file_replaces_files_alone(tmp_path, thing):
    path, mine = tmp_path / "a.json", tmp_path / "mine"
    mine.write_text("mine")
    {
        "link": lambda: path.symlink_to(mine),
        "dangling": lambda: path.symlink_to("nowhere"),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
    }[thing]()
    before = names(tmp_path)
    with pytest.raises(WriteError, match="a.json could not be written to .*: there is a"):
        write_bytes(path, b"{}")
    assert names(tmp_path) == before and mine.read_text() == "mine"
    if thing in ("link", "dangling"):
        with pytest.raises(OSError):
            files.open_to_append(path)


def staged(tmp_path):
    (tmp_path / "staged").mkdir()
    for name in ("result.json", "card.md"):
        (tmp_path / "staged" / name).write_text("ours")
    return tmp_path / "staged"


def test_a_folder_is_filled_where_nothing_or_an_empty_one_stands(tmp_path):
    for path in (tmp_path / "new", tmp_path / "empty"):
        if path.name == "empty":
            path.mkdir()
        publish_folder(staged(tmp_path), path)
        assert names(path) == ["card.md", "result.json"] and sorted(os.listdir(tmp_path))[-1] == "new"
    with pytest.raises(FileExistsError, match="other files are there"):
        publish_folder(staged(tmp_path), path)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(FileExistsError, match="there is a link"):
        publish_folder(tmp_path / "staged", tmp_path / "link", OWN)


def test_a_folder_joins_what_a_person_put_there(folder, tmp_path):
    (folder / "card.md").write_text("edited")
    publish_folder(staged(tmp_path), folder, OWN)
    assert names(folder) == ["card.md", "link", "notes.txt", "result.json", "runs", "runs/notes.txt"]
    assert (folder / "card.md").read_text() == "edited" and not (tmp_path / "staged").exists()


def test_links_of_the_system_are_followed_and_others_are_not(tmp_path, monkeypatch):
    for name in ("home", "temporary", "other"):
        (tmp_path / "real" / name).mkdir(parents=True)
        (tmp_path / name).symlink_to(tmp_path / "real" / name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(outputs.tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("home", "temporary"):
        check_place("output", tmp_path / name / "new")
    with pytest.raises(
        ValueError, match=f"must not lead through a link.* pass the place itself, {tmp_path}/real/other/new"
    ):
        check_place("output", tmp_path / "other" / "new")
    monkeypatch.setenv("PWD", str(tmp_path / "other"))
    check_place("output", tmp_path / "other" / "new")


def test_a_lock_is_no_file_of_a_persons(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("mine", "link"):
        with (
            pytest.raises(ValueError, match="cannot be locked, as .* and no lock"),
            hold_lock("output", tmp_path, tmp_path / name),
        ):
            pass
    assert (tmp_path / "mine").read_text() == "precious"
    path = tmp_path / "a" / "b"
    with (
        lock_path("output", path),
        pytest.raises(ValueError, match="in use by another process"),
        lock_path("output", tmp_path / "a" / ".." / "a" / "b"),
    ):
        pass
    assert names(tmp_path) == ["link", "mine"]  # no lock lies beside


def test_a_claim_is_whole_or_none(tmp_path):
    """No file is deleted, and no lock kept, where another file of the claim is a person's."""
    ours, mine = tmp_path / "ours.json", tmp_path / "mine.json"
    ours.write_text("{}")
    mine.write_text("{}")
    what = {ours: any_file, mine: lambda path: False}
    with (
        pytest.raises(ValueError, match="mine.json is a file that no result wrote"),
        claim_files("output", what, "result", overwrite=True),
    ):
        pass
    assert names(tmp_path) == ["mine.json", "ours.json"]
    with claim_files("output", {ours: any_file}, "result", overwrite=True):
        assert not ours.exists()


def test_an_output_is_checked_as_it_is_when_the_lock_is_held(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    lock = outputs.lock_path

    def held_later(name, place):
        place.write_text("years of work")
        return lock(name, place)

    monkeypatch.setattr(outputs, "lock_path", held_later)
    with (
        pytest.raises(ValueError, match="no result wrote"),
        claim_files("output", {path: lambda there: False}, "result", overwrite=True),
    ):
        pass
    assert path.read_text() == "years of work"


def test_names_in_a_description_are_no_wildcards(tmp_path):
    (tmp_path / "a.png").write_text("mine")
    (tmp_path / "d.json").write_text(
        json.dumps({"layers": 1, "files": {"*": "0" * 64, "a.pn?": "0" * 64, "a.png": None, "../x": None}})
    )
    own = described_files(tmp_path / "d.json", "layers")
    remove_own(tmp_path, own)
    assert names(tmp_path) == ["a.png"]


def test_plots_of_other_kinds_stay(tmp_path):
    from matplotlib.figure import Figure

    from fastweights.analysis.plot_style import is_plot, save_figure

    for content in (b"mine", b"\x89PNG\r\n\x1a\n", b""):
        (tmp_path / "plot.png").write_bytes(content)
        with pytest.raises(ValueError, match="plot must be a new file"):
            save_figure(Figure(), tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes() == content
    Figure().savefig(tmp_path / "plot.png")
    assert is_plot(tmp_path / "plot.png", earlier=True) and not is_plot(tmp_path / "plot.png", earlier=False)
    for _ in range(2):
        save_figure(Figure(), tmp_path / "plot.png", source="a checksum")
        assert is_plot(tmp_path / "plot.png", earlier=False)


def test_check_file_says_what_is_there(tmp_path):
    for name, what in ((".", "is a folder"), ("mine", "is a file that no evaluation wrote")):
        (tmp_path / "mine").write_text("")
        with pytest.raises(ValueError, match=what):
            check_file("output", Path(tmp_path, name), lambda path: False, "evaluation")
