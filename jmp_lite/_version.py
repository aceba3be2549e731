"""The version of the package, the one in which `pyproject.toml` builds it."""

__version__ = "0.1.0"
