"""The protocol suite of our engines, held to by real SGLang. One table has all that differs."""

import pytest

from tests.serving.test_protocol_suite import *  # noqa: F403
from tests.sglang.servers import NEWER, OLDER, VERSIONS

BOTH = (NEWER, OLDER)
NO_SPANS = (OLDER,), "its answers have no weight_versions"
DIFFERENCES = {
    "a_seed_gives_the_same_answer_again": (BOTH, "it needs --enable-deterministic-inference for that"),
    "answers_of_one_prompt_are_named_after_the_request": (BOTH, "each gets a name of its own"),
    "abort_by_the_name_of_a_batch_ends_all_of_it": (BOTH, "each request of a batch gets a name of its own"),
    "a_paused_engine_is_healthy": (BOTH, "its health is the generation of a token"),
    "an_answer_has_sglangs_keys_in_sglangs_order": NO_SPANS,
    "without_return_logprob_there_are_no_log_prob_keys": NO_SPANS,
    "a_stream_is_cumulative_and_ends_with_done": NO_SPANS,
    "a_prompt_is_scored_with_no_new_tokens": NO_SPANS,
    "a_request_goes_on_after_a_pause_with_two_version_spans[in_place]": NO_SPANS,
    "a_request_goes_on_after_a_pause_with_two_version_spans[retract]": NO_SPANS,
    "info_routes_have_sglangs_keys": ((OLDER,), "its /model_info does not tell the parsers"),
    "the_load_has_sglangs_keys": ((OLDER,), "its /v1/loads fails; /get_load has the counts"),
    "an_unknown_sampling_parameter_is_a_400_that_names_it": ((OLDER,), "its answer is 500"),
}
"""What ours does and real servers of these versions do not, by test; a difference that is gone fails."""


@pytest.fixture(scope="module", params=VERSIONS)
def server(request, sglang_server):
    return sglang_server(request.param)


@pytest.fixture(autouse=True)
def declared(request):
    """Expect the declared differences, strictly."""
    params = request.node.callspec.params
    name = request.node.originalname.removeprefix("test_")
    name = f"{name}[{params['mode']}]" if "mode" in params else name
    versions, reason = DIFFERENCES.get(name, ((), ""))
    if params["server"] in versions:
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
