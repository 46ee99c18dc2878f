"""What every test here needs: tokens and tokenizer made once, one thread (of tests/training), no progress bars."""

import shutil

import pytest

from fastweights.data.text import prepare_text

from .launching import RUN
from .small import small_run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A folder with texts, a tokenizer and tokens."""
    folder = tmp_path_factory.mktemp("prepared")
    run = small_run(folder)
    prepare_text(run.corpus, run.tokenizer, run.cache)
    return folder


@pytest.fixture
def make_run(prepared, tmp_path):
    """small_run on the prepared text, with an output folder of its own."""

    def make(name="out", **changes):
        return small_run(prepared, output=str(tmp_path / name), **changes)

    yield make
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def run_file(prepared, tmp_path):
    places = {"output": tmp_path / "out", "cache": prepared / "cache", "texts": prepared / "texts"}
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(**{name: f'"{path}"' for name, path in places.items()}))
    return file
