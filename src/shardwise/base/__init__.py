"""The pieces that need no torch: errors, number formats by name, intervals, documents, files, limits of a container."""
