from sys import argv

from slime.cli import main

raise SystemExit(main(["train", "--async-training", *argv[1:]]))
