"""Runs sglang-router with the settings of a JSON object: ``python stock_router.py SETTINGS_JSON``.

Runs under the interpreter that has sglang-router, and imports nothing of slime. Its command line refuses
policies that its program has (consistent_hashing), so it is started through its Python arguments.
"""

from __future__ import annotations

import argparse
import json
import sys

_WORKERS = ("prefill_urls", "decode_urls")
"""Settings that its command line spells otherwise."""


def main(words: list[str]) -> int:
    """Serve until a signal comes. Settings have the names of its command line."""
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    settings = json.loads(words[0])
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    values = vars(parser.parse_args([]))
    unknown = set(settings).difference(values, _WORKERS)
    if unknown:
        print(f"this sglang-router has no settings {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    args = RouterArgs.from_cli_args(argparse.Namespace(**(values | settings)))
    # JSON has lists only, and the program wants pairs.
    args.prefill_urls = [tuple(pair) for pair in settings.get("prefill_urls", [])]
    args.decode_urls = settings.get("decode_urls", [])
    launch_router(args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
