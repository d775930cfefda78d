"""A folder that Python takes for an installed SGLang: its metadata, and a parser of a few flags."""

import sys

SERVER_ARGS = """
import argparse, json, sys
from pathlib import Path

print("noise on stdout")
Path(__file__).with_name("imports").open("a").write("x")


class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        add = parser.add_argument
        add("--model-path", "--model", type=str, required=True)
        add("--tensor-parallel-size", "--tp-size", dest="tp_size", type=int, default=1)
        add("--pipeline-parallel-size", "--pp-size", dest="pp_size", type=int, default=1)
        add("--config", type=str)
        add("--mem-fraction-static", type=float, help="a share, 100%% at most (%(default)s)")
        add("--attention-backend", choices=["triton", "torch_native"])
        add("--enable-metrics", action="store_true")
        add("--enable-memory-saver", action="store_true")
        add("--enable-return-routed-experts", action="store_true")
        add("--disable-overlap", dest="overlap", action="store_false")
        add("--strict", action=argparse.BooleanOptionalAction, default=True)
        add("--cuda-graph-bs", type=int, nargs="+")
        add("--chat-kwargs", type=json.loads)
        add("--log-level", default="info")
        add("--page-size", type=int, choices=[1, 64])
"""
ROUTER_ARGS = """
class RouterArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--host", default="0.0.0.0")
        parser.add_argument("--policy", default="cache_aware", choices=["random", "cache_aware"])
        parser.add_argument("--cb-failure-threshold", type=int, default=10)
"""
MODULES = {
    "sglang/srt/server_args.py": SERVER_ARGS,
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang_router/__init__.py": "",
    "sglang_router/router_args.py": ROUTER_ARGS,
}


def fake_python(folder, version="0.5.23", router="0.3.2"):
    """An interpreter that has the packages of those versions; None for no such package."""
    packages = folder / "packages"
    for name, content in MODULES.items():
        file = packages / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    for name, number in (("sglang", version), ("sglang_router", router)):
        if number is not None:
            metadata = packages / f"{name}-{number}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {number}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def imports(folder):
    """How often the engine's flags were asked for."""
    log = folder / "packages" / "sglang" / "srt" / "imports"
    return len(log.read_text()) if log.exists() else 0
