"""`python -m shardwise`: the command line."""

from .cli import main
from .processes import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    main()
