// Rows of a forward over recurrent state: which slot's state each segment continues, and what its rows do to it.
#pragma once

#include "parts.h"

// Mirrors graftline.kernels.state_rows.StateRows.
typedef struct {
    const int32_t *segment_rows;  // [segments + 1]
    const int32_t *parents;       // [rows] local index of the parent, -1: the slot's state itself
    const int32_t *slots;         // [segments]
    const int32_t *is_tree;       // [segments] 1: only the root's state is final; other nodes keep theirs apart
    idx num_segments;
} StateRows;

// Places of a float array per (slot, node): element strides.
typedef struct {
    float *data;
    idx slot_stride, node_stride;
} NodeArrays;
