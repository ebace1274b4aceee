"""dpx: declare a private-training experiment in YAML; get a model and a true privacy statement."""

__version__ = "0.1.0"
