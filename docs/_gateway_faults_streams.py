"""What may be odd in the stream of an engine, and the tests that hold what then happens."""

from __future__ import annotations

from _gateway_faults_own import Row

_FAULTS, _RELAY = "gateway/faults/", "gateway/relay/"

ODD_STREAMS: tuple[Row, ...] = (
    (
        "ends its stream without [DONE]",
        "no failure",
        (f"{_RELAY}test_relay_failover.py::test_a_missing_done_is_no_failure",),
    ),
    (
        "malformed SSE: an event that is no JSON, or half of one",
        "it is not passed on, and the stream goes on elsewhere; where nobody can go on it passes untouched",
        (
            f"{_FAULTS}test_faults_of_streams.py::test_behind_an_event_that_is_no_json_the_answer_goes_on_elsewhere",
            f"{_RELAY}test_broken_events.py::test_a_broken_event_is_trouble_and_nothing_of_it_or_behind_it_comes_out",
            f"{_RELAY}test_broken_events.py::test_in_a_further_leg_it_is_trouble_too",
            f"{_RELAY}test_relay_failover.py::test_garbage_in_a_stream_is_passed_on_untouched",
        ),
    ),
    (
        "tells text without its token ids, where it told them before",
        "the stream passes; it does not go on elsewhere any more",
        (f"{_RELAY}test_broken_events.py::test_what_adds_to_the_output_and_tells_no_token_ends_what_can_go_on",),
    ),
    (
        "split UTF-8: bytes come one by one, characters and events cut anywhere",
        "the same answer",
        (f"{_FAULTS}test_faults_of_streams.py::test_bytes_that_come_one_by_one_make_the_same_answer",),
    ),
    (
        "tells its usage twice",
        "it is counted once",
        (f"{_FAULTS}test_faults_of_streams.py::test_numbers_that_an_engine_tells_twice_are_not_counted_twice",),
    ),
    (
        "dies, stalls or errs while it tells several tokens at once, half a character among them",
        "the half is made again elsewhere; token ids that a client was told of it end its stream in an error",
        (
            f"{_RELAY}test_any_trouble.py::test_half_a_character_among_the_first_tokens_is_made_again",
            f"{_RELAY}test_ids_told_once.py::test_an_engine_that_dies_in_half_a_character_whose_ids_were_told_ends_the_stream_in_words",
        ),
    ),
    (
        "any of these, with cuts and moves at any moment",
        "each answer is right, or says that it is not; nothing is left of it",
        (f"{_RELAY}test_any_trouble.py::test_each_answer_is_right_or_says_that_it_is_not_and_nothing_is_left",),
    ),
)
