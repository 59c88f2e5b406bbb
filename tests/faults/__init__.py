"""Faults that users of Prefect, MLflow and Ray have met, each injected for real. Which test stands for which:

     1 results lost in a new container    test_store_faults.py::test_01_results_are_not_lost_in_a_new_container
     2 cache collision                    ../stages/test_identity.py::test_code_that_is_reached_changes_the_version
                                          ../stages/test_identity.py::test_a_library_that_is_reached_counts_with_its_version
                                          ../stages/test_runner.py::test_a_changed_config_is_other_work_and_knobs_are_not
     3 silent write failure               test_store_faults.py::test_03_a_store_that_fills_up_while_publishing_commits_nothing
                                          test_store_faults.py::test_03_a_read_only_artifact_store_fails_the_stage
                                          ../stages/test_runner.py::test_a_full_disk_fails_the_stage_names_the_folder_and_commits_nothing
     4 dangling reference                 ../stages/test_runner.py::test_a_damaged_payload_is_noticed_and_made_again
     5 inputs held in memory              test_memory_faults.py::test_05_a_large_table_passes_five_stages_by_reference
     6 zombies                            test_soak.py::test_06_13_killed_runs_are_resumed_to_the_same_result
                                          test_prefect_runs.py::test_a_run_whose_machine_dies_is_crashed_by_the_automation_or_sooner_by_reconciling
     7 false zombies                      test_kill_faults.py::test_07_a_run_elsewhere_that_works_for_long_is_no_zombie
                                          test_prefect_runs.py::test_a_slow_exit_after_success_stays_completed
     8 MLflow status                      test_kill_faults.py::test_08_12_15_a_signal_at_any_word_with_the_store
                                          ../stages/test_runner.py::test_a_failing_stage_commits_nothing_and_its_run_ends_failed
     9 hidden Ray retries                 test_ray_faults.py::test_09_17_one_of_two_workers_killed_and_a_killed_driver
    10 crashed task absent from the UI    test_prefect_runs.py::test_a_run_whose_machine_dies_is_crashed_by_the_automation_or_sooner_by_reconciling
    11 loops when memory runs out         test_memory_faults.py::test_11_memory_that_runs_out_is_told_and_not_tried_again
                                          ../stages/plan/test_plan.py::test_less_memory_gives_savings_and_smaller_micro_batches_then_the_next_technique
    12 partial checkpoint                 test_kill_faults.py::test_08_12_15_a_signal_at_any_word_with_the_store
                                          ../stages/train/test_resume.py::test_a_cut_snapshot_is_passed_over_and_one_of_other_work_too
                                          ../stages/train/test_resume.py::test_under_ray_a_killed_rank_fails_the_stage_as_transient_and_two_ranks_go_on
    13 driver loss                        ../stages/train/test_resume.py::test_a_segment_killed_several_times_inside_an_epoch_is_bit_identical
                                          test_soak.py::test_06_13_killed_runs_are_resumed_to_the_same_result
                                          test_loop_faults.py::test_a_loop_killed_at_every_boundary_and_inside_every_long_stage_ends_as_if_it_had_not_been
                                          test_loop_faults.py::test_under_a_budget_of_seconds_committed_decisions_are_replayed_and_no_lost_second_is_charged
    14 stale Ray run name                 test_store_faults.py::test_14_a_new_selection_never_gets_an_old_result
    15 append duplicates                  test_kill_faults.py::test_08_12_15_a_signal_at_any_word_with_the_store
    16 leaked concurrency slot            test_prefect_runs.py::test_a_run_killed_while_pending_gives_its_slot_back_and_runs_when_retried
                                          test_prefect_runs.py::test_a_run_that_is_claimed_and_never_started_is_crashed_by_the_server_itself
    17 orphan clusters                    test_ray_faults.py::test_09_17_one_of_two_workers_killed_and_a_killed_driver
                                          test_prefect_orphans.py::test_the_server_of_a_killed_command_is_ended_by_the_next_one_and_a_living_one_is_left_alone
    18 artifact paths in containers       test_store_faults.py::test_18_a_store_that_was_moved_is_read_and_written_where_it_is_now
    19 SQLite "database is locked"        ../data_contracts/store/test_lease.py::test_eight_processes_on_a_cold_database_lose_nothing_and_commit_once
    21 NaN passes a gate                  ../stages/judge/test_gates.py::test_one_loss_that_is_not_finite_fails
                                          ../stages/judge/test_gates.py::test_missing_empty_unpaired_and_null_evidence_fails
                                          ../stages/judge/test_gates.py::test_no_evidence_that_is_broken_anywhere_promotes
    22 killed lock holder                 test_kill_faults.py::test_22_of_two_runners_one_is_killed_and_the_other_commits_once
                                          ../data_contracts/store/test_lease.py::test_a_killed_holder_of_this_host_is_taken_over_without_waiting

20, approvals, is not built yet. What needs a container of its own (1, 18) is also in `tests/containers/`.
"""
