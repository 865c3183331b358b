"""C sources, how they are compiled, and their signatures; torch does the same where there is no compiler."""
