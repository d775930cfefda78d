import unittest

from slugs import plain, slugify


class SlugTest(unittest.TestCase):
    def test_lower_case(self) -> None:
        self.assertEqual(slugify("Hello World"), "hello-world")

    def test_accents(self) -> None:
        self.assertEqual(plain("Crème brûlée"), "Creme brulee")
        self.assertEqual(slugify("Crème brûlée"), "creme-brulee")

    def test_punctuation(self) -> None:
        self.assertEqual(slugify("Hello, World!"), "hello-world")

    def test_edges(self) -> None:
        self.assertEqual(slugify("  ...what?  "), "what")

    def test_nothing_left(self) -> None:
        self.assertEqual(slugify("!?"), "")
