"""What may go wrong before and behind a gateway, and the tests that hold what then happens."""

from __future__ import annotations

from _gateway_faults_clients import OF_CLIENTS
from _gateway_faults_own import OF_ITSELF, OF_ORDER, Row
from _gateway_faults_streams import ODD_STREAMS

_CORE, _FLEET = "gateway/core/", "gateway/fleet/"
_FAULTS, _RELAY = "gateway/faults/", "gateway/relay/"

FAULTS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "Engines",
        (
            (
                "dies, errs or hangs before the first byte",
                "another engine is asked",
                (f"{_RELAY}test_relay_failover.py::test_before_the_first_byte_it_is_tried_elsewhere",),
            ),
            (
                "dies, errs or hangs mid-stream",
                "the stream goes on elsewhere without a gap or a repeat",
                (
                    f"{_RELAY}test_relay_failover.py::test_the_stream_goes_on_from_another_engine_without_a_gap_or_a_repeat",
                ),
            ),
            (
                "the same, and the answer cannot be resumed",
                "an error that the client can read",
                (f"{_RELAY}test_relay_failover.py::test_what_cannot_go_on_ends_in_an_error_the_client_can_read",),
            ),
            (
                "dies after the last token, before [DONE]",
                "the answer is whole",
                (
                    f"{_RELAY}test_relay_failover.py::test_killed_after_the_last_token_and_before_done_the_answer_is_whole",
                ),
            ),
            *ODD_STREAMS,
            (
                "says that its queue is full",
                "no failure; the request keeps its place",
                (
                    f"{_RELAY}test_relay_failover.py::test_full_is_no_failure_and_the_request_keeps_its_place",
                    f"{_RELAY}test_full_engines_rest.py::test_while_one_waits_for_the_full_engine_no_other_is_sent_there",
                ),
            ),
            (
                "dies with all its streams",
                "all of them go on elsewhere; only what has failed before needs the budget of retries",
                (
                    f"{_RELAY}test_failing_over_together.py::test_all_that_a_dead_engine_had_ends_whole_elsewhere",
                    f"{_RELAY}test_failing_over_together.py::test_what_broke_one_engine_has_to_be_paid_for_and_breaks_three_at_most",
                ),
            ),
            (
                "a request that kills engines",
                "is not handed to all of them",
                (f"{_RELAY}test_relay_failover.py::test_a_request_that_kills_engines_is_not_handed_to_all_of_them",),
            ),
            (
                "starts anew under load",
                "nobody is lost",
                (f"{_FLEET}test_fleet_requests.py::test_an_engine_that_starts_anew_under_load_loses_nobody",),
            ),
            (
                "is slow, but never still",
                "the stream goes on; nobody is sent elsewhere",
                (
                    "gateway/faults/test_faults_of_speed.py::test_an_engine_that_is_slow_but_never_still_keeps_its_requests",
                ),
            ),
            (
                "fails, again and again",
                "its circuit opens, and one trial closes it",
                (f"{_FLEET}test_fleet_lives.py::test_failures_open_the_circuit_and_one_trial_closes_it",),
            ),
            (
                "fails far more than its peers",
                "is left out for a while, never more than half of them",
                (
                    f"{_FLEET}test_fleet_lives.py::test_who_fails_far_more_than_its_peers_is_left_out_and_comes_back",
                    f"{_FLEET}test_fleet_outliers.py::test_never_more_than_half_are_left_out",
                ),
            ),
            (
                "calls requests wrong that its peers serve (4xx)",
                "is left out likewise; what all call wrong puts nobody out",
                (
                    f"{_RELAY}test_engine_key.py::test_who_calls_requests_wrong_that_another_one_serves_is_left_out",
                    f"{_FLEET}test_fleet_outliers.py::test_wrong_requests_that_come_to_all_alike_put_nobody_out",
                    f"{_FLEET}test_fleet_outliers.py::test_one_session_of_wrong_requests_does_not_put_its_engine_out",
                    "gateway/faults/test_faults_of_requests.py::test_one_clients_wrong_requests_put_no_engine_out",
                ),
            ),
            (
                "answers a client's request with an error (5xx, or within its stream)",
                "a peer is asked: where it serves the request, the first is to blame; else the request, and no circuit opens",
                (
                    "gateway/faults/test_faults_of_requests.py::test_an_engine_that_answers_errors_where_its_peer_serves_is_left_alone",
                    "gateway/faults/test_faults_of_requests.py::test_one_clients_poison_opens_no_circuit",
                    "gateway/faults/test_faults_of_requests.py::test_one_clients_poison_within_streams_opens_no_circuit",
                    "gateway/faults/test_faults_of_requests.py::test_an_engine_whose_streams_end_in_errors_where_its_peer_ends_them_is_left_alone",
                    "gateway/faults/test_faults_of_requests.py::test_the_last_engine_of_a_model_stays_whatever_it_answers",
                ),
            ),
            (
                "refuses the gateway's key, or does not know a model that it lists",
                "another engine is asked, and its circuit opens",
                (f"{_RELAY}test_engine_key.py::test_clients_are_served_elsewhere_and_its_circuit_opens",),
            ),
            (
                "changes to another protocol, or adds trailers",
                "has failed; serves on",
                (
                    f"{_RELAY}test_line.py::test_an_engine_that_changes_the_protocol_has_failed",
                    f"{_RELAY}test_line.py::test_trailers_change_nothing_and_the_connection_serves_again",
                ),
            ),
            (
                "is too slow to say what it can do",
                "serves meanwhile, and is asked again soon",
                (
                    f"{_FLEET}test_fleet_facts.py::test_an_engine_that_did_not_answer_the_tiny_prompt_is_asked_again_soon",
                ),
            ),
            (
                "refuses priorities, in mode engine-priority",
                "is sent none, and that is said before the start",
                (
                    f"{_FLEET}test_fleet_facts.py::test_who_takes_priorities_and_which_go_first",
                    f"{_FLEET}test_fleet_facts.py::test_what_is_minded_about_engines_is_known_before_the_start",
                ),
            ),
            (
                "another engine, or another key, takes its name by a reload",
                "its streams go on to their end there; new requests go to the new one, whatever the old one did",
                (
                    f"{_FLEET}test_fleet_requests.py::test_a_stream_ends_where_it_began_while_another_engine_takes_the_name",
                    f"{_FLEET}test_fleet_requests.py::test_a_stream_outlives_another_key_of_its_engine",
                    f"{_FLEET}test_fleet_requests.py::test_a_stream_goes_on_elsewhere_where_its_engine_dies_after_its_name_was_taken",
                    f"{_FLEET}test_names_that_pass_on.py::test_who_takes_the_name_of_one_that_was_left_out_serves_at_once",
                ),
            ),
            (
                "all gone, and back",
                "requests wait `no_engine_s`, then 503; a stream that has begun ends in an error",
                (
                    f"{_FLEET}test_fleet_requests.py::test_requests_wait_while_no_engine_is_there_and_go_on_when_one_comes",
                    f"{_CORE}test_admission.py::test_who_waits_for_an_engine_in_vain_is_told_so",
                    f"{_RELAY}test_no_half_answer.py::test_the_last_engine_dies_and_none_comes",
                ),
            ),
            (
                "a Service scales to zero and back",
                "engines go and come",
                (f"{_FLEET}test_fleet_lives.py::test_engines_of_a_service_scale_to_zero_and_back",),
            ),
            (
                "one of several hosts leaves, or dies, and comes back (DNS, EndpointSlices)",
                "its streams end there, or go on elsewhere; it serves again",
                (
                    f"{_FAULTS}test_faults_of_addresses.py::test_an_address_that_is_told_no_more_finishes_its_streams_and_serves_when_it_is_back",
                    f"{_FAULTS}test_faults_of_addresses.py::test_a_host_that_dies_with_its_streams_loses_none_and_serves_when_it_is_back",
                ),
            ),
            (
                "the Kubernetes API answers 410, breaks off, is silent",
                "a new list, or the watch goes on; the engines stay",
                (
                    f"{_FLEET}test_endpoint_slices.py::test_a_version_that_is_too_old_means_a_new_list",
                    f"{_FLEET}test_endpoint_slices.py::test_while_the_api_is_away_the_engines_stay",
                ),
            ),
            (
                "an answer without end, where it has to be held as a whole",
                "502 `answer_too_long`, a failure of the engine's; nobody else is asked",
                (
                    f"{_RELAY}test_answers_bounded.py::test_an_answer_beyond_the_bound_is_the_fault_of_the_engine_and_the_next_one_is_served",
                    f"{_RELAY}test_answers_bounded.py::test_what_is_put_together_of_a_stream_that_never_ends_is_bounded",
                ),
            ),
            (
                "an engine, or the Kubernetes API, redirects or never stops telling",
                "no redirect is followed; what is read has an end",
                (
                    f"{_FLEET}test_fetches_bounded.py::test_no_engine_sends_the_gateway_elsewhere",
                    f"{_FLEET}test_fetches_bounded.py::test_no_kubernetes_api_sends_the_gateway_elsewhere",
                    f"{_FLEET}test_fetches_bounded.py::test_a_list_is_read_in_pages_and_all_of_them_have_an_end",
                ),
            ),
            (
                "an engine that mixes up requests of one id",
                "each leg of a request has an id of its own",
                (
                    f"{_RELAY}test_answers_bounded.py::test_no_engine_meets_one_request_id_twice_and_the_client_keeps_its_own",
                ),
            ),
            (
                "events of any bytes, cut anywhere",
                "come out unchanged and whole, and are bounded",
                (
                    f"{_RELAY}test_split.py::test_all_bytes_come_out_unchanged_and_events_whole",
                    f"{_RELAY}test_split.py::test_an_event_without_end_is_bounded",
                    f"{_RELAY}test_big_events.py::test_through_the_whole_gateway_and_the_next_request_is_served",
                ),
            ),
        ),
    ),
    OF_CLIENTS,
    OF_ORDER,
    OF_ITSELF,
)
"""Each test is named once or more; ``tests/docs/test_gateway_page.py`` holds that it is there."""


def table() -> str:
    """The tables of the page."""
    parts = []
    for title, rows in FAULTS:
        lines = [f"### {title}\n", "| what goes wrong | what then happens | held by |", "|---|---|---|"]
        lines += [
            f"| {what} | {then} | {', '.join(map(_linked, tests)) or '**missing**'} |" for what, then, tests in rows
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _linked(test: str) -> str:
    file, _, name = test.partition("::")
    words = name.removeprefix("test_").replace("_", " ")
    return f"[{words}](../tests/{file})"
