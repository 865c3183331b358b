"""A script that uses DeepSpeed, on CPUs: `torchrun -m tests.support.deepspeed_script SCRIPT ARGUMENTS`."""

import runpy
import sys
from pathlib import Path

from tests.support.deepspeed import with_deepspeed

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    with_deepspeed(runpy.run_path, sys.argv[0], None, "__main__")
