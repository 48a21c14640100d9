"""What clients may do to a gateway, and the tests that hold what then happens."""

from __future__ import annotations

from _gateway_faults_own import Row

_CORE, _EDGE = "gateway/core/", "gateway/edge/"
_FAULTS, _RELAY, _LIVE = "gateway/faults/", "gateway/relay/", "live/"

OF_CLIENTS: tuple[str, tuple[Row, ...]] = (
    "Clients",
    (
        (
            "leaves, in any state",
            "the engine sees an abort, no seat is lost",
            (
                f"{_RELAY}test_relay_clients.py::test_gone_in_the_middle_the_engine_sees_the_abort",
                f"{_EDGE}test_edge_abuse.py::test_who_leaves_while_waiting_is_seen_to_leave_however_long_the_body_was",
                f"{_RELAY}test_relay_clients.py::test_after_two_thousand_requests_of_all_kinds_nothing_is_left",
                f"{_CORE}test_footprint.py::test_nothing_is_left_of_a_hundred_thousand_requests",
            ),
        ),
        (
            "reads too slowly",
            "little is buffered; who stops reading is dropped",
            (
                f"{_EDGE}test_pieces_over_sockets.py::test_who_reads_slowly_gets_every_byte_in_order_and_little_is_held_meanwhile",
                f"{_RELAY}test_relay_clients.py::test_a_slow_reader_holds_up_nobody",
                f"{_RELAY}test_no_half_answer.py::test_who_read_too_slowly_and_reads_on_is_told",
                f"{_EDGE}test_edge_wire.py::test_a_reader_who_stops_holds_up_the_answer_and_is_dropped",
                f"{_EDGE}test_edge_endings.py::test_whole_answers_that_nobody_takes_are_dropped_with_their_connections",
                f"{_EDGE}test_edge_endings.py::test_who_asks_again_and_again_and_reads_nothing_gives_its_seat_back",
            ),
        ),
        (
            "gives up on silence (the OpenAI SDK's timeout), and its stream is older than that",
            "the stream is cut and fails over like any other",
            (
                f"{_CORE}test_deadlines_of_streams.py::test_a_stream_that_was_cut_or_failed_over_goes_on_however_old_it_is",
                f"{_FAULTS}test_faults_of_patience.py::test_a_stream_older_than_its_clients_read_timeout_outlives_its_engine",
            ),
        ),
        (
            "sends a second request, or no HTTP, in the midst of a stream",
            "it is answered behind the first; the stream breaks off",
            (
                f"{_EDGE}test_pieces_over_sockets.py::test_a_second_request_sent_in_the_midst_of_a_stream_is_answered_behind_it",
                f"{_EDGE}test_pieces_over_sockets.py::test_garbage_sent_in_the_midst_of_a_stream_breaks_it_off_and_nothing_is_left",
            ),
        ),
        (
            "asks again and again for what every engine fails at",
            "spends half of the retries at most",
            (
                f"{_RELAY}test_failing_over_together.py::test_one_tenant_whose_requests_always_fail_does_not_spend_the_retries_of_others",
            ),
        ),
        (
            "sends its request drop by drop",
            "408",
            (
                f"{_EDGE}test_edge_wire.py::test_dripping_bytes_do_not_help",
                f"{_EDGE}test_edge_abuse.py::test_a_head_that_comes_drop_by_drop_is_cut_off_on_a_connection_that_was_used_too",
            ),
        ),
        ("opens too many connections", "503", (f"{_EDGE}test_edge_wire.py::test_connections_are_counted",)),
        (
            "smuggles: two lengths, an upgrade with a body, a header within a header",
            "one error and nothing more",
            (
                f"{_EDGE}test_edge_wire.py::test_requests_of_two_lengths_are_one_error_and_nothing_more",
                f"{_EDGE}test_edge_wire.py::test_an_upgrade_that_is_offered_is_not_taken",
            ),
        ),
        (
            "sends headers behind its body (trailers): a key, an address, a session",
            "they are none",
            (
                f"{_EDGE}test_edge_trailers.py::test_a_key_behind_a_body_is_none",
                f"{_EDGE}test_edge_trailers.py::test_nothing_behind_a_body_names_a_session_or_a_request",
                f"{_EDGE}test_edge_trailers.py::test_an_address_behind_a_body_is_not_believed",
            ),
        ),
        (
            "sends thousands of requests behind one another, or garbage behind them",
            "16 may wait; the connection ends, and nothing is written into an answer under way",
            (
                f"{_EDGE}test_edge_pipelines.py::test_a_connection_has_so_many_requests_waiting_and_no_more",
                f"{_EDGE}test_edge_pipelines.py::test_garbage_behind_a_second_request_breaks_the_first_off_and_nothing_runs_into_it",
            ),
        ),
        (
            "sends JSON too deep, too long, or any bytes",
            "is refused in words",
            (
                f"{_EDGE}test_edge_bodies.py::test_a_body_of_any_bytes_is_refused_in_words",
                f"{_EDGE}test_edge_bodies.py::test_depth_is_that_of_what_is_decoded",
            ),
        ),
        (
            "sends JSON that takes long to read: a million small things, thousands of fields",
            "400 before it is made into objects; long bodies are read beside the event loop",
            (
                f"{_EDGE}test_edge_abuse.py::test_a_body_of_a_million_small_things_is_refused_before_they_are_made",
                f"{_EDGE}test_edge_abuse.py::test_a_body_has_at_most_so_many_fields_and_no_more_are_read",
                f"{_EDGE}test_edge_abuse.py::test_a_long_body_is_looked_into_beside_the_loop_and_its_client_may_leave_meanwhile",
            ),
        ),
        (
            "many large bodies at once, or many requests of one key",
            "503 beyond a common budget of memory, 429 beyond a quarter of it or `concurrency`; every end gives back its part",
            (
                f"{_EDGE}test_edge_abuse.py::test_a_key_has_so_many_requests_in_and_no_more",
                f"{_EDGE}test_edge_abuse.py::test_requests_share_a_budget_and_give_back_what_they_had",
                f"{_EDGE}test_edge_abuse.py::test_what_a_request_holds_is_never_more_than_is_counted_and_not_much_less",
                f"{_EDGE}test_edge_abuse.py::test_nothing_is_held_of_clients_that_vanish_are_refused_or_too_late",
            ),
        ),
        (
            "writes a long body before it reads",
            "its refusal reaches it: the rest is read and dropped for up to 2 s",
            (
                f"{_EDGE}test_edge_endings.py::test_who_writes_all_before_it_reads_gets_the_answer_to_a_body_that_is_too_long",
            ),
        ),
        (
            "asks for other paths",
            "404: only the listed ones are served",
            (f"{_EDGE}test_edge_routes.py::test_only_listed_addresses_are_served",),
        ),
        (
            "guesses keys",
            "its address is not heard for a minute",
            (f"{_EDGE}test_edge_keys.py::test_guessing_is_stopped_and_forgiven_after_a_minute",),
        ),
        (
            "gives itself a priority or a length",
            "is refused",
            (
                f"{_EDGE}test_edge_bodies.py::test_a_field_that_is_wrong_is_named",
                f"{_EDGE}test_edge_bodies.py::test_what_the_gateway_tells_an_engine_is_not_for_clients",
            ),
        ),
        (
            "generated requests (schemathesis)",
            "the answers are those of the document",
            (f"{_EDGE}test_edge_openapi.py::test_generated_requests",),
        ),
        (
            "is the official OpenAI SDK, as it comes",
            "it gets what it gets from the engine itself (a real vLLM); errors are of its own classes; told to, it tries again",
            (
                f"{_EDGE}test_edge_sdk.py::test_chats",
                f"{_EDGE}test_edge_sdk.py::test_chats_in_a_stream",
                f"{_EDGE}test_edge_sdk.py::test_completions_with_and_without_a_stream",
                f"{_EDGE}test_edge_sdk.py::test_models",
                f"{_EDGE}test_edge_sdk.py::test_errors_are_the_classes_of_the_client",
                f"{_EDGE}test_edge_sdk.py::test_the_client_tries_again_when_it_is_told_to",
                f"{_LIVE}test_live_gateway.py::test_the_official_client_gets_from_the_gateway_what_it_gets_from_the_engine",
                f"{_LIVE}test_live_gateway.py::test_errors_are_those_that_the_official_client_knows",
            ),
        ),
    ),
)
