"""What may go wrong of a ledger and of who writes it, and the tests that hold what then happens."""

from __future__ import annotations

Row = tuple[str, str, tuple[str, ...]]
"""(what goes wrong, what then happens, tests as FILE::NAME under tests/)"""

_CRASHES = "apps/ledger/test_ledger_crashes.py::"
_DISKS = "apps/ledger/test_ledger_disks.py::"
_LAWS = "apps/ledger/test_ledger_laws.py::"
_PLACES = "apps/ledger/test_ledger_places.py::"
_PROCESSES = "apps/ledger/test_ledger_processes.py::"

OF_LEDGERS: tuple[str, tuple[Row, ...]] = (
    "The ledger, in SQLite and in PostgreSQL",
    (
        (
            "its process is killed (kill -9), before any one of its statements or at random moments, again and again",
            "what was acknowledged is there; the run resumes and ends as if nothing had been",
            (
                f"{_CRASHES}test_killed_before_any_statement_a_run_resumes_and_ends_alike",
                f"{_CRASHES}test_killed_at_random_moments_again_and_again_a_run_ends_alike",
            ),
        ),
        (
            "the PostgreSQL server crashes under a run",
            "what was acknowledged is there; the same handle connects anew",
            (f"{_CRASHES}test_a_server_that_crashes_under_a_run_loses_nothing_that_was_acknowledged",),
        ),
        (
            "a coordinator is frozen, its tasks go to another, and it wakes",
            "its leases end nothing any more",
            (
                f"{_CRASHES}test_a_coordinator_that_is_frozen_loses_its_tasks_and_ends_nothing_when_it_wakes",
                f"{_DISKS}test_a_client_that_stops_within_a_transaction_is_let_go_of",
            ),
        ),
        (
            "an ending comes twice, or late, of a lease that another has by now",
            "it moves nothing; an answer is kept where its key has none",
            (
                f"{_LAWS}test_any_calls_in_any_order_answer_as_the_naive_rule_does",
                f"{_LAWS}test_both_stores_pass_the_kit",
            ),
        ),
        (
            "several processes lease at once",
            "nothing twice, nothing lost",
            (
                f"{_PROCESSES}test_several_processes_lease_from_one_ledger_nothing_twice_and_nothing_lost",
                f"{_PROCESSES}test_one_handle_serves_several_threads",
            ),
        ),
        (
            "several coordinators start at once",
            "the tasks are laid out once",
            (f"{_PROCESSES}test_two_coordinators_that_start_at_once_lay_out_once",),
        ),
        (
            "two transactions wait for each other",
            "one is made again, both go through",
            (f"{_DISKS}test_two_who_hold_each_other_up_both_go_on",),
        ),
        (
            "a task is dead",
            "exactly what is behind it is blocked, the rest ends",
            (f"{_LAWS}test_any_calls_in_any_order_answer_as_the_naive_rule_does",),
        ),
        (
            "the disk is full, or a file may not grow",
            "says so; the batch is refused whole, the ledger goes on when there is room",
            (
                f"{_DISKS}test_on_a_full_disk_a_settle_is_refused_whole_and_works_when_there_is_room",
                f"{_DISKS}test_where_a_file_may_not_grow_it_says_so_and_the_ledger_is_whole",
            ),
        ),
        (
            "another process holds the file, or another client the rows",
            "waits; after 30 s (a setting) says so. Reading goes on",
            (
                f"{_DISKS}test_while_another_holds_the_file_it_waits",
                f"{_DISKS}test_held_by_another_for_too_long_it_says_so_and_reads_go_on",
                f"{_DISKS}test_held_by_another_client_of_the_server_for_too_long_it_says_so",
            ),
        ),
        (
            "the connection to the server breaks",
            "says so; the next call connects anew",
            (f"{_DISKS}test_a_connection_that_breaks_is_said_and_made_anew",),
        ),
        (
            "the application or its inputs changed between runs",
            "tasks are laid out anew, answers are kept and reused by their keys",
            (f"{_PLACES}test_a_changed_run_is_laid_out_anew_and_reuses_what_was_answered",),
        ),
        (
            "what stands at its place is no ledger, another program's, or a newer version's",
            "says so and leaves it alone",
            (
                f"{_PLACES}test_a_file_that_is_no_ledger_is_named_and_left_alone",
                f"{_PLACES}test_the_database_of_another_program_is_named_and_left_alone",
                f"{_PLACES}test_a_newer_file_is_not_touched",
                f"{_PLACES}test_the_schema_of_another_program_or_of_a_newer_version_is_not_touched",
            ),
        ),
        (
            "a model says what a database's text cannot hold (NUL, half a surrogate)",
            "it comes back the same",
            (f"{_LAWS}test_both_stores_pass_the_kit",),
        ),
    ),
)
