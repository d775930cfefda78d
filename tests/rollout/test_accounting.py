import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.accounting import AccountingError, Fate, Ledger

FATES = st.sampled_from([(fate, reason) for fate in Fate for reason in ("a", "b")])


@given(st.lists(st.lists(FATES, max_size=6), max_size=5), st.integers(0, 4))
def test_the_identity_holds_whatever_the_fates_are(steps, extra):
    ledger, still_open = Ledger(), 0
    for number, fates in enumerate(steps):
        ledger.begin(f"step {number}")
        tickets = ledger.submit(len(fates) + extra)
        for ticket, (fate, reason) in zip(tickets, fates, strict=False):
            ledger.settle([ticket], fate, reason)
        still_open += extra
        ledger.check(still_open)
        account = ledger.close()
        assert account.carried + account.submitted == sum(map(account.total, Fate)) + still_open
    assert ledger.total.in_flight == still_open


def test_a_second_fate_raises():
    ledger = Ledger()
    tickets = ledger.submit(1)
    ledger.settle(tickets, Fate.TRAINED)
    with pytest.raises(AccountingError, match="settled twice"):
        ledger.settle(tickets, Fate.REQUEUED)


def test_a_lost_rollout_is_found():
    ledger = Ledger()
    ledger.begin("step 3")
    ledger.submit(2)
    with pytest.raises(AccountingError, match=r"step 3: 2 submitted .* but 0 are really in flight"):
        ledger.check(0)


def test_the_line_and_the_metrics_name_reasons():
    ledger = Ledger()
    ledger.begin("step 0")
    first, second, third = ledger.submit(3)
    ledger.settle([first], Fate.TRAINED)
    ledger.settle([second], Fate.FILTERED, "zero_std")
    ledger.settle([third], Fate.FAILED, "reward: RewardError")
    account = ledger.close()
    assert account.line() == (
        "step 0: 3 submitted = 1 trained + 1 filtered (zero_std 1) + 1 failed (reward: RewardError 1)"
        " + 0 requeued + 0 in flight"
    )
    metrics = account.metrics()
    assert metrics["rollout/accounting/filtered/zero_std"] == 1
    assert metrics["rollout/accounting/failed/reward: RewardError"] == 1
