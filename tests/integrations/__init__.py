"""The integrations with other libraries, beside those libraries alone."""

import os

# Before TRL is imported, which would tell its makers.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
