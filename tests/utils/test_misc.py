import pytest

from slime.errors import HookError
from slime.utils.misc import SingletonMeta, load_function


@pytest.mark.parametrize("path", ["json.dumps", "json:dumps"])
def test_dotted_and_colon_paths_load(path):
    import json

    assert load_function(path) is json.dumps


@pytest.mark.parametrize(
    "path, message",
    [
        ("dumps", "not a dotted path"),
        ("no_such_module.f", "cannot import 'no_such_module'"),
        ("json.no_such_name", "no attribute 'no_such_name'"),
    ],
)
def test_path_that_does_not_load_says_which_part(path, message):
    with pytest.raises(HookError, match=message):
        load_function(path)


def test_singleton_is_one_instance_a_class_until_cleared():
    class First(metaclass=SingletonMeta):
        pass

    class Second(metaclass=SingletonMeta):
        pass

    one = First()
    assert First() is one
    assert Second() is not one
    First.clear_instance()
    assert First() is not one
