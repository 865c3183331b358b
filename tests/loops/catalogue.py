"""Every scenario: importing this registers them."""

from tests.loops import copying, parameters, reading, writing

THEMES = (parameters, reading, writing, copying)
