import sys
from slime.cli import main; sys.exit(main(["train", *sys.argv[1:]]))
