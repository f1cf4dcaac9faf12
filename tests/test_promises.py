"""What is promised to those who run and serve engines, and the tests that hold it: each test has to exist.

S: security, R: reliability.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SERVER = "runtime/server/test_"
PROMISES = {
    "S1 routes, fields and limits are documented from the code": [f"{SERVER}security_page.py"],
    "S2 nothing in a model or an engine is executed": [
        "test_house_rules.py::test_nothing_can_execute_what_a_file_holds",
    ],
    "S3 no key of a config chooses code": ["compiler/test_checkpoint.py::test_no_code_of_a_model_is_run"],
    "S4 no connection is opened": [
        f"{SERVER}security.py::test_s4_nothing_is_connected_to",
        "compiler/test_build_cli.py::test_a_build_opens_no_connection",
    ],
    "S5, S7 files are checked before they are used": ["runtime/test_engine.py", "runtime/test_plan.py"],
    "S6 names stay in their directory": [
        "compiler/test_checkpoint.py::test_sec_12_shard_names_that_lead_out_of_the_directory",
        "compiler/test_checkpoint.py::test_sec_12_links_may_not_lead_out_of_the_directory",
        "compiler/test_checkpoint.py::test_sec_12_the_layout_of_the_hub_cache",
    ],
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
    "S20 problems have a place to report them, and dates": [f"{SERVER}security_page.py::test_how_problems_are_handled"],
    "R1 kernels match a reference": [
        "plugins/test_linear.py::test_agrees_with_float64",
        "plugins/test_quantized_linear.py::test_integer_products_have_the_same_bits_everywhere",
        "plugins/test_quantized_linear.py::test_errors_are_those_of_rounding_x",
        "plugins/test_quantized_linear.py::test_mth_08_scales_and_zeros",
        "plugins/test_paged_attention.py::test_rounded_keys_and_values_are_what_is_read",
        "plugins/test_elementwise.py::test_unary_values",
        "plugins/test_norm.py::test_mth_01_order_and_dtype_of_the_weight",
    ],
    "R2 logits are those of transformers": [
        "compiler/test_trace.py::test_equals_transformers",
        "compiler/test_model_math.py",
        "test_coverage.py::test_runs_as_in_transformers",
        "real/test_real_models.py::test_greedy_tokens_equal_transformers",
    ],
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
        "runtime/speculative/test_eagle.py::test_what_is_aborted_holds_nothing",
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
    "R17 drafts keep the distribution": [
        "runtime/speculative/test_answers.py::test_spc_01_the_distribution_is_the_models",
        "runtime/speculative/test_draft.py::test_spc_08_a_draft_engine_that_is_the_target_is_always_right",
        "runtime/speculative/test_identity.py::test_spc_09_drafts_change_nothing",
        "runtime/speculative/test_medusa.py::test_random_heads_change_nothing",
        "runtime/speculative/test_eagle.py::test_drafts_change_nothing",
        "runtime/speculative/test_eagle.py::test_a_layer_that_knows_the_model_is_always_right",
    ],
    "R18 an engine is whole or not there": [
        "compiler/test_interrupted_builds.py::test_art_04_killed",
        "compiler/test_interrupted_builds.py::test_art_04_interrupted",
        "compiler/test_interrupted_builds.py::test_art_04_two_at_once",
        "compiler/test_interrupted_builds.py::test_art_04_a_full_disk",
    ],
    "R19 refusals have names and exit codes": [f"{SERVER}lifecycle.py::test_exit_codes"],
    "R20 the same input gives the same bytes": [
        "compiler/test_engine_writer.py::test_the_same_input_gives_the_same_bytes",
    ],
    "R21 older engines run": ["runtime/test_golden.py::test_a_golden_engine_generates_what_it_did"],
    "R22 a long load of all kinds leaves nothing behind": [
        f"{SERVER}soak.py::test_a_sound_server_passes",
        f"{SERVER}soak.py::test_what_it_finds",
        f"{SERVER}soak.py::test_growth_of_memory",
    ],
}
NUMBERS = {f"S{n}" for n in range(1, 21)} | {f"R{n}" for n in range(1, 23)}


def test_no_promise_is_missing() -> None:
    listed = [number for promise in PROMISES for number in re.findall(r"\b[SR]\d+\b", promise)]
    assert len(listed) == len(NUMBERS) and set(listed) == NUMBERS


@pytest.mark.parametrize("promise", PROMISES)
def test_each_promise_has_its_tests(promise: str) -> None:
    for place in PROMISES[promise]:
        file, _, function = place.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in names or (not function and any(name.startswith("test_") for name in names)), place
