"""What is promised to those who run and serve engines, and the tests that hold it: each test has to exist.

S: security, R: reliability. The promises of the compiler alone are held by the tests beside it.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SERVER = "runtime/server/test_"
PROMISES = {
    "S1 routes, fields and limits are documented from the code": [f"{SERVER}security_page.py"],
    "S2 nothing in a model or an engine is executed": [
        "test_house_rules.py::test_nothing_can_execute_what_a_file_holds",
    ],
    "S4 no connection is opened": [
        f"{SERVER}security.py::test_s4_nothing_is_connected_to",
        "compiler/test_build_cli.py::test_a_build_opens_no_connection",
    ],
    "S5, S7 files are checked before they are used": ["runtime/test_engine.py", "runtime/test_plan.py"],
    "S8 templates are limited": [
        "runtime/test_tokenizer.py::test_bombs",
        "runtime/test_tokenizer.py::test_templates_can_not_get_out",
    ],
    "S9 constraints are limited, and their cache": [
        "runtime/constraints/test_constraints.py::test_bombs_are_refused_and_the_next_one_works",
        "runtime/constraints/test_constraints.py::test_sec_08_5000_schemas_of_2_kb",
        f"{SERVER}hostile.py::test_requests_that_ask_for_too_much",
    ],
    "S10 each field has a type and bounds": [
        f"{SERVER}request_fields.py::test_each_field_with_each_value",
        f"{SERVER}parity.py::test_requests_made_from_the_description",
    ],
    "S11 heads, bodies and connections have limits": [
        f"{SERVER}security.py::test_large_bodies",
        f"{SERVER}security.py::test_slow_heads_and_bodies_are_cut_off",
        f"{SERVER}security.py::test_lif_13_a_client_that_never_reads",
        f"{SERVER}hostile.py::test_bytes_that_are_hardly_http",
    ],
    "S12, S14 every route needs its key": [f"{SERVER}security.py::test_sec_10_every_route_needs_the_key"],
    "S13 web pages do not reach it": [f"{SERVER}security.py::test_sec_20_hosts_and_origins"],
    "S15 the prefix cache is salted": [
        f"{SERVER}openai_client.py::test_sec_19_prefixes_are_shared_within_a_salt",
    ],
    "S16 errors and logs hold no prompt": [f"{SERVER}security.py::test_logs_and_errors_hold_no_prompt"],
    "S17 token ids are checked": ["runtime/test_llm.py::test_tok_09_token_ids_are_checked"],
    "S18 readers are fuzzed": ["fuzz/test_fuzz.py::test_the_corpus_and_what_is_near_it"],
    "S19 what is released is pinned and listed": ["test_release.py::test_everything_in_the_lock_has_hashes"],
    "R3 scheduling changes no token": [
        f"{SERVER}parity.py::test_streamed_whole_and_offline_are_equal_to_the_last_bit",
        "test_batch_invariance.py",
    ],
    "R4 blocks add up": ["runtime/test_scheduler.py::test_random_steps"],
    "R5 what nobody wrote shows": ["runtime/test_poison.py"],
    "R6 what never fits is refused, what runs out ends": [
        f"{SERVER}request_fields.py::test_api_22_longer_than_the_context",
        f"{SERVER}request_fields.py::test_api_29_a_pool_that_is_smaller_than_the_model",
    ],
    "R7 aborts free everything": [
        f"{SERVER}engine_loop.py::test_aborts_at_any_moment_free_everything",
        f"{SERVER}lifecycle.py::test_a_client_that_goes_away_frees_everything",
    ],
    "R8 a full queue answers": [f"{SERVER}lifecycle.py::test_lif_04_a_full_queue_answers"],
    "R9 probes tell the truth": [f"{SERVER}broken_engine.py::test_an_engine_that_hangs_is_not_ready"],
    "R10 signals": [
        f"{SERVER}lifecycle.py::test_sigterm_lets_requests_end",
        f"{SERVER}lifecycle.py::test_a_second_sigterm_ends_requests",
        f"{SERVER}lifecycle.py::test_no_child_outlives_a_server_that_is_killed",
    ],
    "R11 a failed step fails its own requests": [
        f"{SERVER}engine_loop.py::test_api_03_a_step_that_fails_ends_only_its_own_requests",
        f"{SERVER}broken_engine.py::test_an_engine_that_fails_ends_the_server_with_5",
    ],
    "R12 memory stays": ["runtime/test_memory.py::test_lif_08_two_thousand_mixed_requests"],
    "R13 every wait has a deadline": [f"{SERVER}lifecycle.py::test_deadlines"],
    "R14 what streams is what a whole answer has": [
        "fuzz/fuzz_targets.py::detokenizer",
        "runtime/test_detokenizer.py",
    ],
    "R15 limits and constraints are exact": ["runtime/constraints/test_constraints.py::test_schemas"],
    "R16 a seed is a seed": ["runtime/test_llm.py::test_bat_13_seeds_next_to_any_neighbour"],
    "R19 refusals have names and exit codes": [f"{SERVER}lifecycle.py::test_exit_codes"],
    "R21 older engines run": ["runtime/test_golden.py::test_a_golden_engine_generates_what_it_did"],
}


@pytest.mark.parametrize("promise", PROMISES)
def test_each_promise_has_its_tests(promise: str) -> None:
    for place in PROMISES[promise]:
        file, _, function = place.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in names or (not function and any(name.startswith("test_") for name in names)), place
