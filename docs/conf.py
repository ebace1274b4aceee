"""Sphinx: the pages of `dpx/docs/` as a site. From the root of the checkout: sphinx-build -W -c docs dpx/docs outputs/site."""

from pathlib import Path

from docutils import nodes
from sphinx.writers.html5 import HTML5Translator

import dpx
from dpx.pages import page_document

project, author, copyright = "dpx", "The dpx developers", "The dpx developers, Apache-2.0"
version = release = dpx.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
# Docstrings write names between single backticks.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# The site looks as the pages of job=report do.
html_theme = "basic"
html_static_path = ["static", str(Path(page_document.__file__).with_name("page.css"))]
html_css_files = ["page.css", "site.css"]
html_sidebars = {"**": ["searchfield.html", "localtoc.html", "globaltoc.html"], "index": ["searchfield.html", "globaltoc.html"]}
html_short_title, html_show_sourcelink, toc_object_entries_show_parents = "dpx", False, "hide"
exclude_patterns = ["schemas"]
# Links of the pages to files of the repository, which are not pages of the site.
suppress_warnings = ["myst.xref_missing"]


class Translator(HTML5Translator):
    """Gives captions, which are headings, their level, and each cell the name of its column, which page.css shows on a narrow screen."""

    def starttag(self, node, tagname, *more, **attributes):
        if attributes.get("ROLE") == "heading":
            attributes["ARIA-LEVEL"] = "2"
        if isinstance(node, nodes.entry) and tagname == "td":
            (head,) = node.parent.parent.parent.findall(nodes.thead)
            attributes["DATA-COLUMN"] = head[0][node.parent.index(node)].astext()
        return super().starttag(node, tagname, *more, **attributes)


def _coloured(app, page, template, context, doctree) -> None:
    context["metatags"] = context.get("metatags", "") + f"<style>{page_document.COLOURS}</style>"


def setup(app) -> None:
    app.set_translator("html", Translator)
    app.connect("html-page-context", _coloured)
