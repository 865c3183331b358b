"""The embedded text: half a million characters of English that are wherever Python is.

CPython carries its own manual in `pydoc_data.topics`, so a run without any data downloads nothing.
"""

from pydoc_data.topics import topics


def documents() -> list[str]:
    """The manual's topics, in the order of their names."""
    return [topics[name].strip() for name in sorted(topics)]
