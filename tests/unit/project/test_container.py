"""The Containerfile fits setup.py and the tree, and the citation is valid. No image is built here."""

import re
from typing import Any

import pytest
import yaml

import blinkmpi
from tests.harness import ROOT
from tests.unit.project.test_house import metadata

INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}
DEBIAN_12_PYTHON = (3, 11)


def instructions() -> list[tuple[str, str]]:
    """The Containerfile's instructions, continued lines joined."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, _, rest in found]


def all_of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def apt_packages(text: str) -> set[str]:
    """The packages that a command installs with apt-get."""
    found = re.findall(r"apt-get install ([^&|>]*)", text)
    return {word for words in found for word in words.split() if not word.startswith("-")}


def test_every_line_is_an_instruction_and_the_base_is_debian() -> None:
    words = [word for word, _ in instructions()]
    assert set(words) <= INSTRUCTIONS
    assert words[:2] == ["ARG", "FROM"]
    assert all_of("ARG") == ["BASE=docker.io/library/debian:12-slim", "MPI=mpi", "CUDA="]
    assert all_of("FROM") == ["${BASE} AS build", "${BASE}"]
    assert all_of("USER") == ["blinkmpi"]


def test_it_copies_what_the_package_is_made_of() -> None:
    copied = [line.split() for line in all_of("COPY") if not line.startswith("--from=")]
    files = {name for *names, _ in copied for name in names}
    roots = {folder.partition("/")[0] for folder in metadata()["package_dir"].values()}
    assert files == roots | {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in files)
    assert all(target == "./" or [target] == names for *names, target in copied), "a folder keeps its name"


def test_its_extras_are_those_of_setup() -> None:
    extras = metadata()["extras_require"]
    (install,) = (line for line in all_of("RUN") if "pip install" in line)
    assert '".[${MPI}${CUDA:+,cuda${CUDA}}]"' in install
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    assert {"mpi", *re.findall(r"MPI=(\w+)", text)} <= set(extras)
    named = re.search(r"CUDA=(\d+) or (\d+)", text)
    assert named is not None
    assert {f"cuda{version}" for version in named.groups()} == {name for name in extras if name.startswith("cuda")}


def test_its_packages_are_those_that_a_bare_debian_gets() -> None:
    """Their names are checked against those of the script that sets up continuous integration on a bare Debian."""
    setup = metadata()
    build, run = (line for line in all_of("RUN") if "apt-get" in line)
    assert apt_packages(build) == {"ca-certificates", "python3", "python3-venv"}
    assert apt_packages(run) == {"gcc", "libc6-dev", "openssh-client", "python3"}
    least = tuple(int(part) for part in setup["python_requires"].removeprefix(">=").split("."))
    assert least <= DEBIAN_12_PYTHON
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("not in a checkout: an archive has no .ci")
    known = set(re.findall(r"[\w-]+", script.read_text(encoding="utf-8"))) | {"openssh-client"}
    assert apt_packages(build) | apt_packages(run) <= known


def citation() -> Any:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_citation_is_valid_by_its_schema() -> None:
    cffconvert = pytest.importorskip("cffconvert", reason="it is of the extra test: pip install -e '.[test]'")
    cffconvert.Citation((ROOT / "CITATION.cff").read_text(encoding="utf-8")).validate()


def test_the_citation_names_this_version_and_the_paper() -> None:
    found, setup = citation(), metadata()
    assert (found["title"], found["version"]) == (setup["name"], setup["version"])
    assert setup["version"] == blinkmpi.__version__
    assert found["license"] == setup["license_expression"]
    assert [author["name"] for author in found["authors"]] == [setup["author"]]
    (paper,) = found["references"]
    names = [author["family-names"] for author in paper["authors"]]
    assert names == ["Wang", "Venkataraman", "Phanishayee", "Thelin", "Devanur", "Stoica"]
    assert (paper["title"], paper["year"]) == ("Blink: Fast and Generic Collectives for Distributed ML", 2020)
