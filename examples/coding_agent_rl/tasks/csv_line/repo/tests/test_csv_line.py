import unittest

from csv_line import parse


class ParseTest(unittest.TestCase):
    def test_plain(self) -> None:
        self.assertEqual(parse("a,b,,c"), ["a", "b", "", "c"])

    def test_comma_in_quotes(self) -> None:
        self.assertEqual(parse('1,"2,3",4'), ["1", "2,3", "4"])

    def test_open_quote(self) -> None:
        self.assertRaises(ValueError, parse, '"a')

    def test_doubled_quotes(self) -> None:
        self.assertEqual(parse('a,"say ""hi"", please",b'), ["a", 'say "hi", please', "b"])

    def test_only_a_quote(self) -> None:
        self.assertEqual(parse('""""'), ['"'])

    def test_empty_quotes(self) -> None:
        self.assertEqual(parse('"",x'), ["", "x"])
