"""What may go wrong of a run of an application, and the tests that hold what then happens."""

from __future__ import annotations

Row = tuple[str, str, tuple[str, ...]]
"""(what goes wrong, what then happens, tests as FILE::NAME under tests/)"""

_FAULTS = "apps/run/test_runner_faults.py::"
_LOCAL = "apps/run/test_local_engines.py::"
_RAY = "apps/run/test_ray_engines.py::"
_FOLDER = "apps/run/test_run_folder.py::"
_REPLANNED = "apps/run/test_replanning_interrupted.py::"

OF_RUNNERS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "The coordinator",
        (
            (
                "is killed (kill -9) while engines start, while tasks are leased, when some or most are done",
                "its engines end with it; the next one takes its tasks at once and ends as if nothing had been",
                (
                    f"{_FAULTS}test_a_killed_coordinator_leaves_no_engine_and_its_tasks_are_taken_at_once",
                    f"{_FOLDER}test_leases_of_a_dead_coordinator_are_taken_at_once_those_of_a_live_one_when_they_run_out",
                ),
            ),
            (
                "Ctrl-C, or SIGTERM",
                "what is under way is cut, its tokens are kept, leases are given back, engines end; exit code 130",
                (
                    f"{_FAULTS}test_stopped_once_it_gives_all_back_keeps_tokens_and_leaves_no_engine",
                    f"{_FAULTS}test_a_termination_stops_it_as_an_interrupt_does",
                    f"{_FAULTS}test_stopped_while_engines_start_it_waits_for_none_of_them",
                ),
            ),
            (
                "Ctrl-C while what is left is planned anew",
                "it stops as at any other time; no plan is waited for that nobody will follow",
                (f"{_REPLANNED}test_interrupted_while_it_is_planned_anew_it_loses_nothing_and_goes_on",),
            ),
            (
                "Ctrl-C twice",
                "engines are killed; the ledger is whole, the run goes on later",
                (
                    f"{_FAULTS}test_interrupted_twice_it_ends_at_once_and_leaves_the_ledger_whole",
                    f"{_FAULTS}test_stopped_again_while_engines_are_being_ended_it_kills_them",
                    f"{_FAULTS}test_stopped_again_while_engines_start_it_kills_them",
                    "apps/run/test_ray_engines.py::test_stopped_again_on_ray_it_waits_for_no_engine",
                ),
            ),
            (
                "is cancelled by another process",
                "it stops as by Ctrl-C, and can be gone on with",
                (f"{_LOCAL}test_cancelled_from_another_process_it_stops_and_goes_on_later",),
            ),
            (
                "a second one starts in the same folder, or beside it on the same ledger",
                "refused there; here they share the work",
                (
                    f"{_FOLDER}test_two_coordinators_in_one_folder_are_refused",
                    f"{_FAULTS}test_two_coordinators_share_a_run_and_nothing_is_asked_for_twice_in_the_ledger",
                    "apps/run/test_postgres_runs.py::test_one_of_two_coordinators_is_killed_and_the_other_ends_the_run_alike",
                ),
            ),
            (
                "sleeps through its leases while another takes them",
                "a task may be asked twice; one answer is recorded",
                (f"{_FAULTS}test_a_lease_that_another_took_over_is_answered_twice_and_recorded_once",),
            ),
        ),
    ),
    (
        "Engines",
        (
            (
                "is killed, or out of memory (its process ends), before, early or late in its answers",
                "started anew; its tasks are asked again from the tokens that were kept; who was not alone does not pay",
                (
                    f"{_FAULTS}test_a_killed_engine_is_started_anew_and_nothing_is_lost",
                    f"{_FAULTS}test_an_engine_out_of_memory_ends_its_process_and_is_started_anew",
                ),
            ),
            (
                "on Ray: the actor or its engine is killed: before it is ready, while it answers, after its last answer",
                "the same; GPUs are held anew, and no engine stays, not even one that does not go when it is asked to",
                (
                    f"{_RAY}test_killed_before_it_is_ready_on_ray_it_is_started_anew",
                    f"{_RAY}test_killed_while_it_answers_on_ray_its_tokens_are_gone_on_from",
                    f"{_RAY}test_killed_after_its_last_answer_on_ray_it_is_ended_all_the_same",
                    f"{_RAY}test_a_killed_ray_worker_or_its_engine_is_started_anew_and_nothing_is_lost",
                    "scenario/test_app_runs_ray.py::test_a_run_on_ray_survives_a_killed_worker_and_goes_on_after_it_was_cancelled",
                ),
            ),
            (
                "on Ray: the coordinator is killed",
                "its engines and their actors end; a resume goes on there and says the same",
                (f"{_RAY}test_a_killed_coordinator_leaves_no_engine_on_ray_and_the_run_goes_on_there",),
            ),
            (
                "hangs",
                "given up after the longest silence allowed, asked again",
                (f"{_FAULTS}test_an_engine_that_hangs_is_given_up_and_asked_again",),
            ),
            (
                "returns errors (500, 503, an error in the stream), garbage, truncated or odd streams",
                "asked again later, elsewhere where there is an elsewhere; the run says the same",
                (f"{_FAULTS}test_a_bad_answer_is_asked_again_and_the_run_says_the_same",),
            ),
            (
                "is full (429, 503) and says when to come again",
                "asked then, at most the longest time between attempts later; no attempt is counted",
                (
                    "apps/run/test_retry_after.py::test_a_full_engine_is_left_alone_for_as_long_as_it_says_but_never_longer_than_allowed",
                    "apps/run/test_retry_after.py::test_an_engines_wish_comes_with_its_refusal",
                ),
            ),
            (
                "fails again and again",
                "started anew",
                (f"{_FAULTS}test_an_engine_that_fails_again_and_again_is_started_anew",),
            ),
            (
                "does not start, or dies whatever it is asked",
                "the run ends with what the engine said last, exit code 2; tasks stay ready",
                (
                    f"{_LOCAL}test_an_engine_that_does_not_start_ends_the_run_with_what_it_said",
                    f"{_RAY}test_an_engine_that_does_not_start_on_a_node_says_why",
                    f"{_FAULTS}test_engines_that_die_without_a_request_to_blame_end_the_run_with_what_to_do",
                ),
            ),
        ),
    ),
    (
        "Requests",
        (
            (
                "kills every engine that reads it (poison)",
                "soon asked alone, dead after as many tries as allowed with the error kept; the rest finish",
                (
                    f"{_FAULTS}test_a_poison_request_that_kills_engines_is_found_and_the_rest_finish",
                    "apps/run/test_suspects.py::test_poison_is_alone_after_a_few_deaths",
                ),
            ),
            (
                "is refused (too long a prompt)",
                "dead at once, with what the engine said; the rest finish",
                (f"{_FAULTS}test_a_request_that_is_refused_is_dead_at_once_and_the_rest_finish",),
            ),
            (
                "cannot be rendered (a field is missing in its row)",
                "dead with call and row; what hangs on it is blocked, the rest finish",
                (f"{_FAULTS}test_a_task_that_cannot_be_rendered_is_dead_and_blocks_what_hangs_on_it",),
            ),
            ("is the same as another", "asked once", (f"{_LOCAL}test_the_same_request_is_asked_once",)),
        ),
    ),
    (
        "The plan",
        (
            (
                "answers are much longer or shorter than planned, or stages end too soon or too late",
                "what is left is planned anew beside the run, a few times at most; the answers are the same",
                (
                    "apps/run/test_replanning.py::test_much_longer_answers_have_the_rest_planned_anew_which_ends_earlier",
                    "apps/run/test_replanning.py::test_as_long_as_planned_nothing_is_planned_anew",
                    "scenario/test_app_runs_moved.py::test_answers_ten_times_as_long_have_the_rest_planned_anew_and_say_the_same",
                ),
            ),
            (
                "planning anew fails",
                "the run goes on by the plan that it has, and says so",
                ("apps/run/test_replanning.py::test_where_no_plan_can_be_made_the_run_goes_on_by_the_one_it_has",),
            ),
        ),
    ),
    (
        "The run's surroundings",
        (
            (
                "the disk is full",
                "a clear error, exit code 2, engines ended, the ledger whole; the run goes on when there is room",
                (
                    f"{_FAULTS}test_a_full_disk_ends_the_run_with_a_clear_error_and_it_goes_on_later",
                    "cli/test_app_run.py::test_where_the_disk_is_full_it_ends_with_2_and_what_to_do_and_goes_on_when_there_is_room",
                    "apps/run/test_exporting.py::test_a_file_that_may_not_grow_is_named_and_the_one_before_stays",
                ),
            ),
            (
                "another process holds the ledger",
                "waited for; for too long: a clear error, exit code 2, and the run goes on later",
                (
                    f"{_FAULTS}test_a_ledger_that_another_process_holds_is_waited_for",
                    f"{_FAULTS}test_a_ledger_that_is_held_for_too_long_ends_the_run_and_it_goes_on_later",
                ),
            ),
            (
                "the application changed between two runs",
                "told call by call what is kept; what it changed is asked, and what hangs on it",
                (f"{_LOCAL}test_a_changed_prompt_asks_what_it_changed_and_what_hangs_on_it",),
            ),
        ),
    ),
)
