"""The group that this process is in is found in either version of control groups, and only its children are
made.
"""

import os
from pathlib import Path

import pytest

from slime.agent.sandbox import Limits
from slime.agent.sandbox.cgroups import Group, make_group, own_groups

V1 = """31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
37 31 0:34 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"""
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def test_version_1_and_hybrid():
    found = own_groups(V1, "9:pids:/a/b\n4:memory:/own\n0::/")
    assert found == {
        "memory": (1, Path("/sys/fs/cgroup/memory/own")),
        "pids": (1, Path("/sys/fs/cgroup/pids/a/b")),
    }


def test_version_2():
    own = Path("/sys/fs/cgroup/user.slice/x")
    assert own_groups(V2, "0::/user.slice/x") == {"memory": (2, own), "pids": (2, own)}


def test_no_groups_at_all():
    assert own_groups("", "") == {}


def test_a_group_keeps_what_it_was_given():
    group = make_group(f"slime-test-{os.getpid()}", Limits(processes=17), memory=64 << 20)
    try:
        if not group.keeps:
            pytest.skip("no control group can be made here")
        for directory in group.directories:
            for name, value in (("pids.max", "17"), ("memory.limit_in_bytes", str(64 << 20))):
                if (directory / name).exists():
                    assert (directory / name).read_text().strip() == value
        assert group.oom_kills() == 0
    finally:
        for directory in group.directories:
            directory.rmdir()
    assert group.oom_kills() == 0
    assert Group().oom_kills() == 0
