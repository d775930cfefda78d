import unittest

from retries import call, delays


class Flaky:
    """Fails some times, then gives its number of calls."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise OSError(f"failure {self.calls}")
        return self.calls


class RetryTest(unittest.TestCase):
    def test_no_failure(self) -> None:
        self.assertEqual(call(Flaky(0)), 1)

    def test_a_failure(self) -> None:
        self.assertEqual(call(Flaky(1)), 2)

    def test_delays(self) -> None:
        self.assertEqual(delays(7), [0.5, 1.0, 2.0, 4.0, 8.0, 8.0])

    def test_the_last_try_counts(self) -> None:
        self.assertEqual(call(Flaky(2), tries=3), 3)

    def test_one_try(self) -> None:
        self.assertEqual(call(Flaky(0), tries=1), 1)

    def test_the_last_error_comes_out(self) -> None:
        flaky = Flaky(9)
        with self.assertRaisesRegex(OSError, "failure 3"):
            call(flaky, tries=3)
        self.assertEqual(flaky.calls, 3)

    def test_it_waits_between_tries_only(self) -> None:
        waited: list[float] = []
        with self.assertRaises(OSError):
            call(Flaky(9), tries=3, sleep=waited.append)
        self.assertEqual(waited, [0.5, 1.0])
