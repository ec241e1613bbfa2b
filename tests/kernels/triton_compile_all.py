"""Compiles every Triton kernel of the project for an H200 (sm_90a): a script that needs neither GPU nor interpreter."""

import importlib
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import graftline.kernels.linear

_TARGET = GPUTarget("cuda", 90, 32)
_SHARED_BYTES = 232448  # of a Hopper block
# Types of arguments by name; what is not here and not a constexpr is an int32.
_POINTERS = {
    "positions_ptr": "*i32", "parents_ptr": "*i32", "segment_rows_ptr": "*i32", "segment_start_ptr": "*i32",
    "page_tables_ptr": "*i32", "row_segment_ptr": "*i32", "starts_ptr": "*i32", "accepted_ptr": "*i32",
    "cos_ptr": "*fp32", "sin_ptr": "*fp32", "logits_ptr": "*fp32", "inverse_ptr": "*fp32", "temperature_ptr": "*fp32",
    "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "seed_ptr": "*i64", "position_ptr": "*i64",
    "ids_ptr": "*i64", "values_ptr": "*fp32", "norms_ptr": "*fp32", "page_ids_ptr": "*i64", "staging_ptr": "*i64",
    "pool_ptr": "*i64", "cum_ptr": "*fp32", "child_ptr": "*fp32", "child_ids_ptr": "*i64", "scores_ptr": "*fp32",
    "best_ptr": "*i64", "best_scores_ptr": "*fp32", "selected_ptr": "*i64", "tree_parents_ptr": "*i64",
    "partial_ptr": "*fp32", "state_ptr": "*fp32", "eps": "fp32", "scale": "fp32",
    "rate_ptr": "*fp32", "time_bias_ptr": "*fp32", "q_out_ptr": "*fp32", "k_out_ptr": "*fp32", "decay_ptr": "*fp32",
    "beta_ptr": "*fp32", "states_ptr": "*fp32", "node_states_ptr": "*fp32", "slots_ptr": "*i32", "is_tree_ptr": "*i32",
    "taken_ptr": "*i32", "nodes_ptr": "*i64", "state_pool_ptr": "*fp32", "input_pool_ptr": "*fp32",
    "path_bounds_ptr": "*i32", "path_nodes_ptr": "*i32", "draft_rows_ptr": "*i64", "draft_slots_ptr": "*i64",
    "draft_nodes_ptr": "*i64", "shrink": "fp32", "row_slots_ptr": "*i64", "visible_ptr": "*i64",
    "num_nodes_ptr": "*i32", "depths_ptr": "*i32", "tokens_ptr": "*i64", "sampled_ptr": "*i64", "path_ptr": "*i32",
    "num_accepted_ptr": "*i32", "stats_ptr": "*fp32", "firsts_ptr": "*i64", "counts_ptr": "*i32",
    "table_ptr": "*i64", "pages_ptr": "*i32", "round_slots_ptr": "*i64", "accepted_start_ptr": "*i32",
    "emitted_ptr": "*i64", "bonus_ptr": "*i64", "new_starts_ptr": "*i32", "path_rows_ptr": "*i64",
    "next_tokens_ptr": "*i64", "last_ptr": "*i64", "result_ptr": "*i64", "to_target_ptr": "*i64", "beam_ptr": "*i64",
    "seen_ptr": "*i64", "next_scores_ptr": "*fp32", "next_beam_ptr": "*i64", "next_seen_ptr": "*i64",
    "parent_rows_ptr": "*i64", "roots_ptr": "*i64", "tree_tokens_ptr": "*i64", "words_ptr": "*i32",
    "tables_ptr": "*i32", "rows_ptr": "*i64",
    "weights_ptr": "*fp32", "kept_ptr": "*fp32", "kept_ids_ptr": "*i32", "margin": "fp32",
}  # fmt: skip
_WIDE_KEYS = ("_gated_delta_kernel", "_store_inputs_kernel")
_TREES = ("_open_rounds_kernel", "_walk_rounds_kernel", "_close_rounds_kernel")
_GROWN = ("_grow_level_kernel", "_finish_trees_kernel")
_OVERRIDES = (
    {(kernel, "parents_ptr"): "*i64" for kernel in (*_TREES, *_GROWN)}
    | {(kernel, "num_nodes_ptr"): "*i64" for kernel in (*_TREES, *_GROWN)}
    | {(kernel, name): "*fp32" for kernel in _WIDE_KEYS for name in ("q_ptr", "k_ptr")}
)
_HEAD = {"BLOCK_K": 128, "BLOCK_V": 32}
_VARIANTS: dict[str, list[dict[str, object]]] = {
    "_causal_conv_kernel": [{"WIDTH": 4, "KEEP": keep, "BLOCK": 512, "BLOCK_S": 32} for keep in (False, True)],
    "_move_windows_kernel": [{"WIDTH": 4, "BLOCK": 512}],
    "_delta_inputs_kernel": [{"BLOCK_K": 128, "BLOCK_H": 32}],
    "_gated_delta_kernel": [
        {"HAS_Q": has_q, "KEEP": keep, **_HEAD} for has_q, keep in ((True, True), (True, False), (False, False))
    ],
    "_sigmoid_mul_kernel": [{"ONE_GATE": one, "BLOCK": 1024} for one in (False, True)],
    "_replay_states_kernel": [_HEAD],
    "_replay_windows_kernel": [{"WIDTH": 4, "BLOCK": 512}],
    "_place_qkv_kernel": [
        {
            "HEAD_DIM": dim,
            "HALF": half,
            "PAGE_SIZE": 16,
            "HAS_SLOTS": has_slots,
            "NORM": norm,
            "BLOCK_H": 4,
            "BLOCK_HALF": 64,
            "BLOCK_REST": rest,
        }
        for dim, half, rest, has_slots, norm in ((128, 64, 1, True, False), (256, 32, 256, False, True))
    ],
    "_skinny_linear_kernel": [
        {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": 128,
            "EVEN_K": even,
            "GATED": gated,
            "HAS_BIAS": bias,
            "SPLIT": split,
            "WIDEN": False,
            "STAGES": 4,
        }
        for block_m, block_n, even, gated, bias, split in (
            (16, 32, True, False, True, False),
            (16, 16, True, True, False, False),
            (64, 64, False, False, False, True),
        )
    ],
    "_add_parts_kernel": [{"HAS_BIAS": True, "BLOCK": 1024}],
    "_survey_kernel": [{"NORM": norm, "BLOCK": 4096} for norm in (False, True)],
    "_spread_kernel": [{"BLOCK": 4096, "STEP": 256, "LEVELS": 32, "BLOCK_PARTS": 64}],
    "_combine_tree_kernel": [
        {"HEAD_DIM": 128, "BLOCK_N": 64, "BLOCK_P": block_p, "BLOCK_SPLITS": 64 // block_p, "BLOCK_D": 128}
        for block_p in (1, 32)
    ],
}
_DEFAULT_BLOCKS = {
    "LEVELS": 32,
    "BLOCK_PARTS": 64,
    "BLOCK": 1024,
    "BLOCK_HEADS": 16,
    "BLOCK_HALF": 32,
    "BLOCK_SPLITS": 8,
    "BLOCK_D": 128,
    "CHUNK": 32,
    "PAGE_SIZE": 16,
    "BLOCK_PATH": 8,
    "BLOCK_PAGES": 1024,
    "BLOCK_NODES": 16,
    "FIRST": False,
    "MAPPED": True,
    "GATHERS": True,
}


def attention_variants() -> list[dict[str, object]]:
    """Decode, tree verify and prefill, split or not, per block of head size (80 and 96 pad to 128)."""
    tiles = ((16, True, True), (16, False, False), (64, True, False))
    return [
        {
            "GROUP": 4, "TILE_ROWS": block_m // 4, "BLOCK_M": block_m, "BLOCK_N": 64 if block_d <= 128 else 32,
            "BLOCK_D": block_d, "BLOCK_S": 16, "IS_CHAIN": is_chain, "SPLIT": split, "WIDEN": False,
        }
        for block_d in (64, 128, 256)
        for block_m, is_chain, split in tiles
    ]  # fmt: skip


def tree_attention_variants() -> list[dict[str, object]]:
    """The tilings of few and many pairs, split or not, of full and of padded heads."""
    tiles = (
        (16, 64, 64, True, 3),
        (32, 80, 128, False, 3),
        (128, 128, 128, True, 3),
        (32, 128, 128, True, 4),
        (16, 256, 256, True, 3),
        (32, 256, 256, True, 4),
    )
    return [
        {
            "GROUP": 4, "KV_HEADS": 8, "HEAD_DIM": dim, "PAGE_SIZE": 16, "BLOCK_M": block_m,
            "BLOCK_N": 64 if block_d <= 128 else 32, "BLOCK_D": block_d, "SPLIT": split, "WIDEN": False,
            "STAGES": stages,
        }
        for block_m, dim, block_d, split, stages in tiles
    ]  # fmt: skip


def variants_of(kernel: JITFunction) -> list[dict[str, object]]:
    """Values of the constexprs to compile with."""
    if kernel.__name__ == "_attention_kernel":
        return attention_variants()
    if kernel.__name__ == "_tree_attention_kernel":
        return tree_attention_variants()
    if kernel.__name__ in _VARIANTS:
        return _VARIANTS[kernel.__name__]
    return [{name: _DEFAULT_BLOCKS[name] for name in kernel.arg_names if name in _DEFAULT_BLOCKS}]


def with_ones(kernel: JITFunction) -> dict[str, object]:
    """Constexprs as Triton makes them on a GPU where every number is 1, which the interpreter never does: a kernel that
    gives such a name a new value does not compile then.
    """
    constants = variants_of(kernel)[0]
    fixed = {*constants, *(kernel.do_not_specialize or ())}
    numbers = [name for name in kernel.arg_names if name not in fixed and type_of(kernel, name, "?")[0] == "i"]
    return constants | dict.fromkeys(numbers, 1)


def type_of(kernel: JITFunction, name: str, activations: str) -> str:
    """Triton's name of an argument's type."""
    known = _OVERRIDES.get((kernel.__name__, name)) or _POINTERS.get(name)
    return known or (activations if name.endswith("_ptr") else "i32")


def compile_kernel(kernel: JITFunction, constants: dict[str, object], activations: str) -> int:
    """Bytes of the cubin. Raises RuntimeError for one that no block of the device has the shared memory for."""
    signature = {
        name: "constexpr" if name in constants else type_of(kernel, name, activations) for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=_TARGET)
    if compiled.metadata.shared > _SHARED_BYTES:
        raise RuntimeError(
            f"{kernel.__name__} with {constants} wants {compiled.metadata.shared} bytes of shared memory"
        )
    return len(compiled.asm["cubin"])


def main() -> None:
    folder = Path(graftline.kernels.linear.__file__).parent
    for path in sorted(folder.glob("*_triton.py")):
        module = importlib.import_module(f"graftline.kernels.{path.stem}")
        for name, kernel in sorted(vars(module).items()):
            if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                takes_activations = any(
                    type_of(kernel, argument, "?") == "?" for argument in kernel.arg_names if argument.endswith("_ptr")
                )
                for constants in (*variants_of(kernel), with_ones(kernel)):
                    for activations in ("*bf16", "*fp32") if takes_activations and len(constants) < 5 else ("*bf16",):
                        print(path.stem, name, activations, compile_kernel(kernel, constants, activations))


if __name__ == "__main__":
    sys.exit(main())
