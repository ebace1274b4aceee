"""Sphinx: the pages of `dpx/docs/` as a site. From the root of the checkout: sphinx-build -W -c docs dpx/docs outputs/site."""

import dpx

project, author, copyright = "dpx", "The dpx developers", "The dpx developers, Apache-2.0"
version = release = dpx.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
# A test runs the notebooks; the site shows them as they are written.
nb_execution_mode = "off"
# Docstrings write names between single backticks.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "dpx"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": False}
pygments_style, pygments_dark_style = "a11y-light", "github-dark"
html_show_sourcelink, toc_object_entries_show_parents = False, "hide"
exclude_patterns = ["schemas"]
# Links of the pages to files of the repository, which are not pages of the site.
suppress_warnings = ["myst.xref_missing"]
