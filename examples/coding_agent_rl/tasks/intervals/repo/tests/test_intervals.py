import unittest

from intervals import covers, merge


class MergeTest(unittest.TestCase):
    def test_apart(self) -> None:
        self.assertEqual(merge([(5, 6), (1, 2)]), [(1, 2), (5, 6)])

    def test_touching(self) -> None:
        self.assertEqual(merge([(1, 2), (2, 3)]), [(1, 3)])

    def test_empty(self) -> None:
        self.assertEqual(merge([]), [])

    def test_contained(self) -> None:
        self.assertEqual(merge([(1, 10), (2, 3)]), [(1, 10)])

    def test_covers_the_same_points(self) -> None:
        intervals = [(0, 9), (2, 4), (3, 5), (20, 21)]
        for point in range(25):
            self.assertEqual(covers(merge(intervals), point), covers(intervals, point))
