"""Pages and pictures: what every page is made of, and the page of a run. The package of the papers makes those of papers."""
