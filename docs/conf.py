"""How Sphinx makes the documentation site of the pages in this folder: ``make docs``, or
``python -m sphinx -W --keep-going docs build/docs``.

The pages are Markdown that can be read as it is. ``site_extension.py`` adds what Markdown has not. Nothing is fetched
from a network.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # for site_extension
sys.path.insert(0, str(HERE.parent))  # for blinkmpi, if it is not installed
os.environ["BLINKMPI_GPU_DISABLE"] = "1"  # the same pages wherever they are made

import mpi4py  # noqa: E402

mpi4py.rc.initialize = False  # the reference reads mpi4py's classes, and starts no MPI

import blinkmpi  # noqa: E402

project = "blinkmpi"
author = "the authors of blinkmpi"
copyright = "the authors of blinkmpi"
release = version = blinkmpi.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_extension"]
myst_heading_anchors = 4  # links to headings as on GitHub
highlight_language = "none"  # of blocks that name no language
maximum_signature_line_length = 240
toc_object_entries_show_parents = "hide"

autodoc_mock_imports = ["torch"]  # installed or not, the same page; ours only, nothing of torch is shown
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # MPI.SUM has no readable form
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # the attributes of a value as one list

html_theme = "pydata_sphinx_theme"
html_title = f"blinkmpi {release}"
html_show_copyright = html_show_sphinx = html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_theme_options = {
    "logo": {"text": "blinkmpi"},
    "show_toc_level": 2,
    "header_links_before_dropdown": 8,
    "footer_start": ["last-updated"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
