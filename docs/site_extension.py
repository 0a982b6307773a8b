"""A Sphinx extension: what the pages have as a site and not as Markdown.

- A page that no toctree names comes at the end of the one of ``understand.md``.
- Links to pages outside of ``docs/`` lead to their copies on the site (``OUTSIDE``).
- Links whose text is the name of a page's file, as is usual on GitHub, have the page's title instead.
- Tables of many columns are set smaller (``wide`` in ``site.css``).
- The rows of a table that begin with a name in backticks have an anchor: ``settings.md#blinkmpi-timeout``.
- A class that duplicates what it gets in ``__new__`` shows the signature of its ``__init__``.
- Tables of result files are put in the place of their marks (``benchmarks/pages/made.py``).
- A command that draws a picture, in a block of ``shell``, is followed by that picture, drawn as the site is made. On
  the pages of ``PICTURES_ALONE`` the picture takes its place.
"""

import contextlib
import inspect
import io
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.inspect import stringify_signature

from blinkmpi.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for benchmarks

from benchmarks.pages.made import filled  # noqa: E402

OUTSIDE = {
    "../README.md": "index.md",
    "../CHANGES.md": "changes.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../SECURITY.md": "security.md",
    "../benchmarks/README.md": "benchmarks.md",
}
PICTURES_ALONE = ("performance",)
LAST = "understand"  # has the pages that no list names
MANY_COLUMNS = 9
FILE_LINK = re.compile(r"\[\w+\.md\](?=\((\w+\.md)[#)])")
TOCTREE = re.compile(r"^```{toctree}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DRAWS = re.compile(r"blinkmpi .*(?:--plot|-o) (\S+\.svg)")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx; before its collectors (priority 500) look at a page."""
    app.connect("source-read", put_tables)
    app.connect("source-read", lead_to_copies)
    app.connect("source-read", name_pages)
    app.connect("source-read", list_the_rest)
    app.connect("autodoc-process-signature", of_init)
    app.connect("doctree-read", anchor_rows, priority=400)
    app.connect("doctree-read", mark_wide_tables)
    app.connect("doctree-read", draw_pictures, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def put_tables(app: Sphinx, name: str, source: list[str]) -> None:
    """What result files say, where a page has a mark."""
    try:
        source[0] = filled(source[0])
    except KeyError as error:
        raise ExtensionError(f"docs/{name}.md: {error.args[0]}") from error


def lead_to_copies(app: Sphinx, name: str, source: list[str]) -> None:
    """Links out of this folder to the pages that include what they lead to."""
    for path, page in OUTSIDE.items():
        source[0] = source[0].replace(f"]({path}", f"]({page}")


def name_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """``[gpu.md](gpu.md#errors)`` becomes ``[GPUs and streams](gpu.md#errors)``."""

    def titled(match: re.Match[str]) -> str:
        page = (Path(app.srcdir) / match[1]).read_text(encoding="utf-8")
        title = re.search(r"^# ([^:\n]+)", page, re.MULTILINE)
        return f"[{title[1]}]" if title else match[0]

    source[0] = FILE_LINK.sub(titled, source[0])


def list_the_rest(app: Sphinx, name: str, source: list[str]) -> None:
    """Pages that no toctree names, for that of ``LAST``."""
    if name == LAST:
        pages = {path.stem: path.read_text(encoding="utf-8") for path in Path(app.srcdir).glob("*.md")}
        listed = {word for text in pages.values() for block in TOCTREE.findall(text) for word in block.split()}
        rest = sorted(set(pages) - listed - {app.config.root_doc})
        source[0] = TOCTREE.sub(lambda block: "\n".join([block[0][:-4], *rest, "```"]), source[0], count=1)


def anchor_rows(app: Sphinx, page: nodes.document) -> None:
    """Give rows that begin with a name in backticks an anchor, and environment variables an entry for the search."""
    name = app.env.current_document.docname
    slugs = app.env.metadata[name].setdefault("myst_slugs", {})
    for row in page.findall(nodes.row):
        first = next(iter(row[0].findall(nodes.literal)), None)
        if first is None or not row[0].astext().startswith(first.astext()):
            continue
        text = first.astext().split()[0]
        anchor = nodes.make_id(text)
        if not anchor or anchor in page.ids or anchor in slugs:
            continue
        row["ids"].append(anchor)
        page.ids[anchor] = row
        slugs[anchor] = (row.line or 0, anchor, text)
        first.parent.append(nodes.reference("", "#", refid=anchor, classes=["headerlink"]))
        if name == "settings" and text.startswith("BLINKMPI_"):
            app.env.domains.standard_domain.note_object("envvar", text, anchor, location=row)


def mark_wide_tables(app: Sphinx, page: nodes.document) -> None:
    """Give tables of many columns a class of their own."""
    for table in page.findall(nodes.table):
        if any(len(list(row)) >= MANY_COLUMNS for row in table.findall(nodes.row)):
            table["classes"].append("wide")


def of_init(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, None] | None:
    """The signature of a class that has both ``__new__`` and ``__init__``: autodoc would take the first."""
    if what != "class" or not {"__new__", "__init__"} <= vars(thing).keys():
        return None
    _, *rest = inspect.signature(thing.__init__).parameters.values()
    return stringify_signature(inspect.Signature(rest), unqualified_typehints=True), None


def draw_pictures(app: Sphinx, page: nodes.document) -> None:
    """Run the commands that draw, and put each picture behind its block, or in its place."""
    name = app.env.current_document.docname
    folder = Path(app.doctreedir) / "drawn"
    folder.mkdir(parents=True, exist_ok=True)
    for block in list(page.findall(nodes.literal_block)):
        if block.get("language") != "shell":
            continue
        pictures = [picture_of(line, folder) for line in block.astext().splitlines() if DRAWS.fullmatch(line)]
        at = block.parent.index(block)
        kept = [] if name in PICTURES_ALONE else [block]
        block.parent[at : at + 1] = [*kept, *pictures]


def picture_of(command: str, folder: Path) -> nodes.image:
    """Run ``blinkmpi ... --plot NAME.svg`` with its file in ``folder``."""
    match = DRAWS.fullmatch(command)
    assert match is not None
    path = folder / match[1]
    words = [str(path) if word == match[1] else word for word in shlex.split(command)[1:]]
    said = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    if code != 0:
        raise ExtensionError(f"{command} ended with {code}: {said.getvalue()}; correct the command")
    return nodes.image(
        uri=os.path.relpath(path, ROOT / "docs"), alt=f"the picture that `{command}` draws", classes=["drawn"]
    )
