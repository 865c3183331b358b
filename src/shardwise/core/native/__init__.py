"""C sources, how they are compiled, and their signatures. Without a compiler torch computes the same."""
