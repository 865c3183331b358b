"""Models as sizes: by name, from words, from a config.json; and the units they fall into."""
