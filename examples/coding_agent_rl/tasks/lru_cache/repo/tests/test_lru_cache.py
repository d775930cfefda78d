import unittest

from lru_cache import Cache


class CacheTest(unittest.TestCase):
    def test_holds_what_fits(self) -> None:
        cache = Cache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        self.assertEqual((cache.get("a"), cache.get("b")), (1, 2))

    def test_never_grows_beyond_its_size(self) -> None:
        cache = Cache(3)
        for number in range(10):
            cache.put(str(number), number)
        self.assertEqual(len(cache), 3)

    def test_a_missing_key_is_none(self) -> None:
        self.assertIsNone(Cache(1).get("a"))

    def test_size_is_checked(self) -> None:
        self.assertRaises(ValueError, Cache, 0)

    def test_reading_is_use(self) -> None:
        cache = Cache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.get("a")
        cache.put("c", 3)
        self.assertEqual((cache.get("a"), cache.get("b")), (1, None))

    def test_storing_again_is_use(self) -> None:
        cache = Cache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.put("a", 3)
        cache.put("c", 4)
        self.assertEqual((cache.get("a"), cache.get("b")), (3, None))
