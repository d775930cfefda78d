"""The drift corpus: what clients do to histories, each course of events with its known truth."""

from tests.agent.drift.traces_chains import CHAINS
from tests.agent.drift.traces_images import IMAGES
from tests.agent.drift.traces_runs import RUNS
from tests.agent.drift.traces_turns import TURNS

TRACES = TURNS | CHAINS | RUNS | IMAGES
