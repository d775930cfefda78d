import unittest

from pages import Pages


class PagesTest(unittest.TestCase):
    def test_a_page_that_is_not_full(self) -> None:
        pages = Pages(list(range(25)), 10)
        self.assertEqual(pages.count, 3)
        self.assertEqual(pages.page(3), [20, 21, 22, 23, 24])

    def test_outside(self) -> None:
        self.assertRaises(IndexError, Pages([1], 10).page, 2)
        self.assertRaises(IndexError, Pages([1], 10).page, 0)

    def test_nothing(self) -> None:
        pages = Pages([], 10)
        self.assertEqual((pages.count, pages.page(1)), (1, []))

    def test_all_full(self) -> None:
        self.assertEqual(Pages(list(range(20)), 10).count, 2)

    def test_no_page_is_empty(self) -> None:
        for total in range(1, 40):
            pages = Pages(list(range(total)), 7)
            self.assertTrue(all(pages.page(number) for number in range(1, pages.count + 1)))
