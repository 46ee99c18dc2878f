"""The newest release of everything that the library depends on, in an environment of its own: what breaks there.

    python tests/latest.py FOLDER [arguments of pytest]

Upper bounds of pyproject.toml are left out. Prints which versions lie outside the bounds, and which tests failed. Ends with
the code of pytest, and with 2 where the package index cannot be reached or the packages do not go together.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path
from xml.etree import ElementTree

import tomllib

ROOT = Path(__file__).parents[1]
EXTRAS = ("viz", "train", "eval", "test")


def read_requirements() -> dict[str, str]:
    """What the library and the extras of its tests ask for, as pyproject.toml says it, by name with the extras of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    return {re.match(r"[\w.-]+(\[[^]]*\])?", one)[0]: one for one in asked if "python_version <" not in one}


def install(folder: Path, names: list[str]) -> Path:
    """The Python of an environment with the newest packages of these names, and the library as it is here."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--upgrade"]
    for command in ([*pip, "--upgrade-strategy", "eager", *names], [*pip, "--no-deps", "-e", str(ROOT)]):
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"the newest packages cannot be installed here: {done.stderr.strip()[-2000:]}", file=sys.stderr)
            raise SystemExit(2)
    return python


def normalized(name: str) -> str:
    """As package indices compare names."""
    return re.sub("[-_.]+", "-", name).lower()


def report_versions(python: Path, asked: dict[str, str]) -> None:
    """One line per package, with what pyproject.toml asks for where the installed one is another."""
    listed = subprocess.run([python, "-m", "pip", "list", "--format", "json"], stdout=subprocess.PIPE, check=True)
    versions = {normalized(one["name"]): one["version"] for one in json.loads(listed.stdout)}
    code = "import sys; from packaging.requirements import Requirement as R\n"
    code += "print(R(sys.argv[1]).specifier.contains(sys.argv[2], prereleases=True))"
    for name, line in asked.items():
        version = versions[normalized(name.partition("[")[0])]
        fits = subprocess.run([python, "-c", code, line, version], stdout=subprocess.PIPE, check=True).stdout
        print(f"{name} {version}" + ("" if fits.strip() == b"True" else f", outside of: {line}"))


def failed_tests(report: Path) -> list[str]:
    return [
        f"{case.get('classname')}::{case.get('name')}: {found.get('message', '').partition(chr(10))[0][:200]}"
        for case in ElementTree.parse(report).iter("testcase")
        for found in (*case.findall("failure"), *case.findall("error"))
    ]


def main() -> None:
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    asked = read_requirements()
    python = install(folder, list(asked))
    report = folder / "report.xml"
    tests = [str(python), "-m", "pytest", "-q", "-n", "auto", "-m", "not slow", f"--junitxml={report}", *arguments]
    code = subprocess.run(tests, cwd=ROOT).returncode
    report_versions(python, asked)
    failed = failed_tests(report)
    print("\n".join(failed) or "no test failed")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
