"""The integrations with other libraries, beside those libraries alone."""
