"""The integrations with other libraries, beside those libraries alone."""

import os

# Before those libraries are imported: nothing is looked up, or told to anybody.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
