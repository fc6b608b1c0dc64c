"""Train one network in one framework and track it, or sweep over many: see `python train.py --help` and README.md."""

import sys
from pathlib import Path

from crosstrain.app import main

if __name__ == "__main__":
    conf = Path(__file__).resolve().parent / "conf"  # in a bundle it is not here: then the one inside the package is taken
    sys.exit(main(sys.argv[1:], config_dir=conf if conf.is_dir() else None))
