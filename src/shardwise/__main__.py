"""`python -m shardwise`: the command line."""

from .base.processes import end_with_parent
from .cli import main

if __name__ == "__main__":
    end_with_parent()
    main()
