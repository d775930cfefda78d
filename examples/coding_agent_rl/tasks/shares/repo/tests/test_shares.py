import unittest

from bill.report import euros, report
from bill.split import split


class SplitTest(unittest.TestCase):
    def test_even(self) -> None:
        self.assertEqual(split(900, 3), [300, 300, 300])

    def test_nobody(self) -> None:
        self.assertRaises(ValueError, split, 100, 0)

    def test_uneven(self) -> None:
        self.assertEqual(split(1000, 3), [334, 333, 333])

    def test_no_cent_is_lost(self) -> None:
        for cents in range(60):
            for people in range(1, 8):
                self.assertEqual(sum(split(cents, people)), cents)


class ReportTest(unittest.TestCase):
    def test_euros(self) -> None:
        self.assertEqual(euros(1234), "12.34")

    def test_report(self) -> None:
        self.assertEqual(report(1000, ["Ann", "Bo", "Cy"]), "Ann: 3.34\nBo: 3.33\nCy: 3.33")
