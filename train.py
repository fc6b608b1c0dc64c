"""Train one network in one framework and track it, or sweep over many: see `python train.py --help` and README.md."""

import sys
from pathlib import Path

from crosstrain.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], config_dir=Path(__file__).resolve().parent / "conf"))
