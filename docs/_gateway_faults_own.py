"""What may go wrong of a gateway itself and of its order, and the tests that hold what then happens."""

from __future__ import annotations

Row = tuple[str, str, tuple[str, ...]]
"""(what goes wrong, what then happens, tests as FILE::NAME under tests/)"""

ORDER, _PROCESSES = "gateway/faults/test_faults_of_order.py::", "gateway/faults/test_faults_of_processes.py::"
_NUMBER = "gateway/faults/test_faults_of_number.py::"
_CORE, _FLEET = "gateway/core/", "gateway/fleet/"
_RELAY, _FORECAST = "gateway/relay/", "gateway/forecast/"

OF_ITSELF: tuple[str, tuple[Row, ...]] = (
    "The gateway itself",
    (
        (
            "is told to end",
            "who is in finishes, who comes is sent away",
            (
                "gateway/test_serve.py::test_drained_who_is_in_finishes_and_who_comes_is_sent_away",
                f"{_PROCESSES}test_told_to_end_under_load_nobody_who_was_admitted_fails",
            ),
        ),
        (
            "the same, while a request is still coming",
            "it is served, or gets a clean 503",
            (
                "gateway/test_serve.py::test_a_request_whose_body_is_still_coming_when_the_end_is_told_is_served",
                "gateway/test_serve.py::test_a_request_that_is_not_there_in_time_gets_a_clean_503",
            ),
        ),
        (
            "is told to read a bad file",
            "the old settings stay",
            (
                "gateway/test_serve.py::test_keys_and_limits_change_while_it_runs_and_ports_do_not",
                f"{_FLEET}test_fleet_lives.py::test_another_configuration_leaves_alone_what_stays_and_a_bad_one_changes_nothing",
            ),
        ),
        (
            "is killed",
            "the journal is whole up to its last flush",
            ("gateway/telemetry/test_journal.py::test_what_was_flushed_survives_a_kill",),
        ),
        (
            "the same, with clients waiting",
            "the engine stops for them, the next gateway serves",
            (f"{_PROCESSES}test_killed_with_clients_waiting_the_engine_stops_and_the_next_gateway_serves",),
        ),
        (
            "it and its engines start anew one after the other",
            "every request is answered",
            (f"{_PROCESSES}test_engines_and_gateway_restart_one_after_the_other_and_every_request_is_answered",),
        ),
        (
            "has no descriptors left",
            "lives, and serves again when there are some",
            (f"{_PROCESSES}test_without_descriptors_it_lives_and_serves_again_when_there_are_some",),
        ),
        ("the clocks jump", "nobody is harmed", (f"{ORDER}test_a_jump_of_the_clocks_harms_nobody",)),
        (
            "serves 20,000 requests, clients leaving at any moment",
            "no seat, no connection is leaked",
            (f"{ORDER}test_after_twenty_thousand_requests_no_slot_is_leaked",),
        ),
        (
            "serves 100,000 over the network, clients vanishing in every state",
            "no seat, timer, task or connection is left; memory grows by less than 4 MiB over the last 80,000",
            (f"{_NUMBER}test_after_a_hundred_thousand_requests_nothing_is_left_of_them",),
        ),
        (
            "is told another order while requests wait",
            "they take their new places; mode and rank stay",
            (
                "gateway/test_serve.py::test_who_goes_first_and_what_may_wait_change_while_it_runs_and_the_mode_does_not",
                f"{_CORE}test_changing.py::test_told_anything_at_any_time_everybody_ends",
            ),
        ),
        (
            "is given its own address as an engine",
            "says so and does not start",
            ("cli/test_serve_config.py::test_a_gateway_is_not_its_own_engine",),
        ),
        (
            "its disk is full, or lets no file be moved",
            "holds nothing up; rows are written once, and nowhere else, when it can be",
            (
                "gateway/telemetry/test_journal.py::test_a_disk_that_takes_nothing_holds_nothing_up",
                "gateway/telemetry/test_journal.py::test_rows_that_a_full_disk_took_by_half_are_there_once_when_it_takes_them_again",
                "gateway/telemetry/test_journal.py::test_rows_go_nowhere_else_while_old_files_cannot_be_moved",
            ),
        ),
    ),
)

OF_ORDER: tuple[str, tuple[Row, ...]] = (
    "Order and predictions",
    (
        (
            "a flood of short requests against a long one",
            "the bound on waiting holds",
            (
                f"{_CORE}test_waiting_bound.py::test_without_the_bound_a_long_one_would_starve",
                f"{_CORE}test_waiting_bound.py::test_who_has_waited_too_long_is_passed_by_nobody_who_has_not",
                f"{ORDER}test_a_long_one_is_served_in_time_however_many_short_ones_come",
            ),
        ),
        (
            "any predictor at all, an adversary's too",
            "nobody ends later than by FCFS and a bound from `max_wait_s`, nobody fails",
            (
                f"{_CORE}test_loss_bound.py::test_no_predictor_costs_anybody_more_than_the_bound",
                f"{_CORE}test_loss_bound.py::test_without_max_wait_an_adversary_costs_more_than_that",
                f"{ORDER}test_a_bad_predictor_fails_no_request",
            ),
        ),
        (
            "a storm of cuts",
            "is capped",
            (f"{_CORE}test_cuts.py::test_storms_are_capped", f"{ORDER}test_a_storm_of_cuts_is_capped"),
        ),
        (
            "a cut that an engine cannot answer",
            "is dropped, and another one made; the bound on waiting holds",
            (
                f"{_CORE}test_legs_that_refuse.py::test_pending_cuts_are_those_that_can_be_answered_and_the_bound_on_waiting_holds",
                f"{_RELAY}test_relay_cut.py::test_a_leg_that_turns_out_to_be_uncuttable_holds_up_no_other_cut",
            ),
        ),
        (
            "penalties or limits that an engine adds by itself",
            "who leaves them open is not cut, unless they are known not to be",
            (
                f"{_RELAY}test_own_defaults.py::test_where_defaults_are_unknown_only_who_leaves_none_open_is_cut",
                f"{_RELAY}test_own_defaults.py::test_through_the_relay_it_is_cut_or_left_alone",
            ),
        ),
        (
            "a cut of a greedy answer",
            "does not change it",
            (
                f"{_RELAY}test_relay_cut.py::test_greedy_output_is_identical_cut_and_uncut",
                "live/test_live_resume.py::test_greedy_output_is_identical_cut_and_uncut",
            ),
        ),
        (
            "the predictor dies, hangs, talks rubbish",
            "it is started again; nobody fails for it",
            (
                f"{_FORECAST}test_forecast_process.py::test_a_predictor_that_dies_hangs_or_talks_rubbish_is_started_again",
                f"{_FORECAST}test_forecaster.py::test_a_predictor_that_fails_leaves_its_rows_to_the_prior",
            ),
        ),
        (
            "the predictor is slow",
            "the prior stands in",
            (
                f"{_FORECAST}test_forecast_process.py::test_after_the_deadline_the_prior_stands_in_and_the_late_answer_is_handed_on",
                f"{ORDER}test_a_slow_predictor_is_not_waited_for",
            ),
        ),
    ),
)
