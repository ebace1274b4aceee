"""Sphinx: the pages of `dpx/docs/` as a site. From the root of the checkout: sphinx-build -W -c docs dpx/docs outputs/site."""

import dpx

project, author, copyright = "dpx", "The dpx developers", "The dpx developers, Apache-2.0"
version = release = dpx.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
# Docstrings write names between single backticks.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
html_theme = "alabaster"
html_theme_options = {"description": "Language models with differential privacy", "fixed_sidebar": True, "page_width": "1100px"}
exclude_patterns = ["schemas"]
# Links of the pages to files of the repository, which are not pages of the site.
suppress_warnings = ["myst.xref_missing"]
