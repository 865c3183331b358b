"""Every scenario: importing this registers them."""

from tests.loops import copying, freezing, gradients, hooks, parameters, reading, writing

THEMES = (parameters, reading, writing, copying, freezing, hooks, gradients)
