from sys import argv

from slime.cli import main

raise SystemExit(main(["train", *argv[1:]]))
