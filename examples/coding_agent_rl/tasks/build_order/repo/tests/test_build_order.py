import unittest

from build_order import CycleError, order


class OrderTest(unittest.TestCase):
    def test_needs_come_first(self) -> None:
        self.assertEqual(order({"app": ["lib"], "lib": ["base"]}), ["base", "lib", "app"])

    def test_by_name(self) -> None:
        self.assertEqual(order({"b": [], "a": [], "c": ["a"]}), ["a", "b", "c"])

    def test_nothing(self) -> None:
        self.assertEqual(order({}), [])

    def test_two_in_a_circle(self) -> None:
        self.assertRaises(CycleError, order, {"a": ["b"], "b": ["a"]})

    def test_it_needs_itself(self) -> None:
        self.assertRaises(CycleError, order, {"a": ["a"], "b": []})

    def test_the_message_names_them(self) -> None:
        with self.assertRaises(CycleError) as caught:
            order({"red": ["green"], "green": ["red"], "blue": []})
        self.assertIn("red", str(caught.exception))
        self.assertIn("green", str(caught.exception))
        self.assertNotIn("blue", str(caught.exception))
