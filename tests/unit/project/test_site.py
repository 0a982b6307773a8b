"""The documentation site is built without a warning, its links lead somewhere, and its examples are right."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.parse import unquote, urldefrag

import pytest

import blinkmpi
from blinkmpi import errors
from blinkmpi.util import settings
from tests.harness import ROOT, run_command

DOCS = ROOT / "docs"


class Page(HTMLParser):
    """The ids of a page, where its links lead, and what a browser loads for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found["id"] or ""} if "id" in found else set()
        if tag == "a" and (href := found.get("href")):
            self.links.append(href)
        elif tag != "a":
            self.loads += [url for name in ("src", "href", "data") if (url := found.get(name))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as ``make docs`` builds it."""
    if find_spec("sphinx") is None:
        pytest.fail("sphinx is not installed here: pip install -e '.[test]'", pytrace=False)
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "doctrees"), str(DOCS)]
    done = subprocess.run([*argv, str(folder / "html")], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


@pytest.mark.mpi_skip
@pytest.mark.slow
@pytest.mark.long
def test_every_page_is_there_and_reached_from_the_first(site: Path, pages: dict[Path, Page]) -> None:
    reached, todo = set(), [site / "index.html"]
    while todo:
        path = todo.pop()
        if path not in reached and path in pages:
            reached.add(path)
            todo += [(path.parent / urldefrag(link).url).resolve() for link in pages[path].links if "://" not in link]
    missing = {source.stem for source in DOCS.glob("*.md")} - {path.stem for path in reached}
    assert not missing, missing


@pytest.mark.mpi_skip
@pytest.mark.slow
@pytest.mark.long
def test_links_of_the_site_lead_to_something(pages: dict[Path, Page]) -> None:
    def broken() -> Iterator[str]:
        for path, page in pages.items():
            for link in page.links:
                url, fragment = urldefrag(link)
                target = (path.parent / unquote(url)).resolve() if url else path
                if "://" in link or link.startswith("mailto:"):
                    continue
                if not target.exists() or (fragment and target in pages and unquote(fragment) not in pages[target].ids):
                    yield f"{path.name}: {link}"

    assert not list(broken())


@pytest.mark.mpi_skip
@pytest.mark.slow
@pytest.mark.long
def test_a_page_loads_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert not [url for url in page.loads if "://" in url or url.startswith("//")], path.name


@pytest.mark.mpi_skip
@pytest.mark.slow
@pytest.mark.long
def test_no_docstring_of_a_property_is_taken_for_a_type(site: Path) -> None:
    """Napoleon reads ``16 digits: ...`` at the start of a property's docstring as type and text; spare the colon."""
    for path in site.glob("api*.html"):
        taken = re.findall(r"<dt[^>]*>Type<.*?<dd[^>]*>(.*?)</dd>", path.read_text(encoding="utf-8"), re.DOTALL)
        assert not taken, (path.name, taken)


@pytest.mark.mpi_skip
@pytest.mark.slow
@pytest.mark.long
def test_every_setting_error_and_picture_has_its_place(site: Path, pages: dict[Path, Page]) -> None:
    wanted = {f"blinkmpi-{name.lower().replace('_', '-')}" for name in settings.KNOWN}
    assert wanted <= pages[site / "settings.html"].ids
    api = [page.ids for path, page in pages.items() if path.name.startswith("api") or path.name == "errors.html"]
    assert {f"blinkmpi.{name}" for name in blinkmpi.__all__} <= set().union(*api)
    assert {name.lower() for name in error_names()} <= pages[site / "errors.html"].ids
    commands = re.findall(r"^blinkmpi .* (\S+\.svg)$", (DOCS / "gallery.md").read_text(encoding="utf-8"), re.MULTILINE)
    drawn = [url.rpartition("/")[2] for url in pages[site / "gallery.html"].loads if url.endswith(".svg")]
    assert len(commands) >= 12
    assert drawn == [*commands, "ring.svg"]


@pytest.mark.slow
def test_a_page_that_no_list_names_comes_last(tmp_path: Path) -> None:
    listed = "# Understand\n\n```{toctree}\n:hidden:\n\ndesign\n```\n"
    for name, text in (("index", ""), ("design", ""), ("new", ""), ("understand", listed), ("use", listed)):
        (tmp_path / f"{name}.md").write_text(text)
    app = SimpleNamespace(srcdir=tmp_path, config=SimpleNamespace(root_doc="index"))
    for name, expected in (("understand", listed.replace("design", "design\nnew\nunderstand\nuse")), ("use", listed)):
        source = [listed]
        extension().list_the_rest(app, name, source)
        assert source == [expected]


def extension() -> ModuleType:
    """The site's own extension of Sphinx, which is no module of a package."""
    spec = spec_from_file_location("site_extension", DOCS / "site_extension.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_names() -> set[str]:
    """The errors that users meet."""
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    return {name for name, kind in kinds.items() if issubclass(kind, errors.BlinkError) and name != "BlinkError"}


def test_every_error_has_its_remedy_and_is_public() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (?:`(\w+)`)? ?\| .+ \|$", text, re.MULTILINE)
    assert {name for name, _ in rows} == error_names() == set(blinkmpi.__all__) & set(vars(errors)) - {"BlinkError"}
    for name, also in rows:
        bases = [kind.__name__ for kind in getattr(errors, name).__bases__ if kind is not errors.BlinkError]
        assert bases == [also] * bool(also), name


@pytest.mark.slow
@pytest.mark.mpi_skip
def test_examples_of_pages_and_docstrings_give_what_they_say() -> None:
    outcome = run_command(1, [sys.executable, "-m", "tests.unit.project.run_examples"], timeout=60, cwd=ROOT)
    assert outcome.rc == 0, outcome.output
    for name in ("tutorial.md", "Topology", "machine", "pack", "algorithm"):
        assert name in outcome.output.splitlines()[-1]
