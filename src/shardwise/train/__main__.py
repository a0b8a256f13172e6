"""`python -m shardwise.train --recipe NAME [KEY=VALUE ...]`: the same as `shardwise train`, for torchrun."""

import sys
from importlib import import_module

if __name__ == "__main__":
    # recipes and the command line lie above this package
    import_module("shardwise.cli").main(["train", *sys.argv[1:]])
