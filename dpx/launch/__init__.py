"""From a composed config to a job in its folder, once or in a sweep."""
