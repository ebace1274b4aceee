"""Pages and pictures: what every page is made of, and the page of a run. `dpx.report` makes those of papers."""
