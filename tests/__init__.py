"""The tests. They have the same rooms as the package."""
