// Grows draft trees in one parallel region: per level the draft layer on every tree's beam, its likeliest children, the
// next beam; at the end the best nodes. Made of the parts of the single ops; graftline.kernels.draft_growth specifies it.

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "barrier.h"
#include "parts.h"

typedef struct {
    const Weight *embedding;       // [vocab] rows of embed_size
    const Weight *fusion;          // EAGLE: [embedding, feature] -> residual; NULL for EAGLE-3
    const Weight *qkv, *output, *gate_up, *down, *head;
    const float *input_norm;       // EAGLE-3: of the embedding; EAGLE: of the residual, or NULL
    const float *feature_norm;     // EAGLE-3: of the feature
    const float *post_norm;
    const float *final_norm;       // before the head, or NULL
    const int64_t *target_ids;     // [draft vocabulary] -> vocabulary, or NULL when they are one
    const float *cos, *sin;
    idx hidden, embed_size, heads, kv_heads, head_dim, inter, half, position_offset;
    float eps, scale;
} Draft;

typedef struct {
    const float *outputs;          // [trees, hidden] of every root's last final row
    const int64_t *starts;         // [trees] committed rows
    const int32_t *page_tables;    // [trees, max_pages], scratch pages behind the committed ones
    idx trees, max_pages, page_size, depth, width, num_drafts;
    int64_t *tokens, *parents;     // [trees, num_drafts] out: nodes 1 .. num_drafts
} Trees;

// Candidates of one tree, numbered as they come up.
typedef struct {
    float *scores;
    int64_t *tokens, *parents;
    idx count;
} Candidates;

typedef struct {
    float *feature, *residual, *inputs, *qkv, *attended, *added, *normed, *gate_up, *gated, *logits, *hidden;
    float *child_scores;           // [rows, width]
    int64_t *child_ids;            // [rows, width]
    int64_t *row_tokens;           // [rows] tokens of the beam
    int64_t *beam;                 // [rows] their candidate numbers
    int64_t *chosen;               // [rows] children that make the next beam
    float *beam_scores;            // [rows]
    int32_t *positions, *parents;  // [trees, depth * width] of all rows grown so far
    Candidates *candidates;        // [trees]
    void **top_k_scratch;          // [threads]
    Barrier *barrier;
} Work;

typedef struct {
    int thread, num_threads;
    Barrier *barrier;
} Team;

static void meet(const Team *team) { barrier_wait(team->barrier, team->num_threads); }

static void team_linear(const Team *team, const Weight *w, const float *x, float *out, idx rows) {
    linear_part(w, x, w->in_features, out, w->out_features, rows, team->thread, team->num_threads);
    meet(team);
}

// Likeliest children of `rows` hidden states.
static void expand(const Draft *d, const Trees *t, const Work *w, const Team *team, const float *hidden, idx rows) {
    const float *inputs = hidden;
    if (d->final_norm) {
        for (idx r = team->thread; r < rows; r += team->num_threads) {
            rms_norm_row(hidden + r * d->hidden, d->final_norm, d->eps, d->hidden, w->normed + r * d->hidden);
        }
        meet(team);
        inputs = w->normed;
    }
    team_linear(team, d->head, inputs, w->logits, rows);
    const idx vocab = d->head->out_features;
    for (idx r = team->thread; r < rows; r += team->num_threads) {
        top_k_row(w->logits + r * vocab, vocab, t->width, w->child_scores + r * t->width, w->child_ids + r * t->width,
                  w->top_k_scratch[team->thread]);
        for (idx i = r * t->width; i < (r + 1) * t->width; i++) {
            if (!(w->child_scores[i] >= -FLT_MAX)) w->child_scores[i] = -INFINITY;  // keeps the order below total
            if (d->target_ids) w->child_ids[i] = d->target_ids[w->child_ids[i]];
        }
    }
    meet(team);
}

// Inputs of the layer for row r of a level, from its token and its parent's output.
static void prepare_row(const Draft *d, const Work *w, idx r) {
    const idx wide = d->embed_size + d->hidden;
    float *inputs = w->inputs + r * wide;
    unpack_row(d->embedding, w->row_tokens[r], inputs);
    if (d->fusion) {
        memcpy(inputs + d->embed_size, w->feature + r * d->hidden, (size_t)d->hidden * sizeof(float));
    } else {
        rms_norm_row(inputs, d->input_norm, d->eps, d->embed_size, inputs);
        rms_norm_row(w->feature + r * d->hidden, d->feature_norm, d->eps, d->hidden, inputs + d->embed_size);
    }
}

// The rows of one tree up to a level, for attention; nobody asks them for their segment.
static Batch tree_batch(const Trees *t, const Work *w, idx tree, idx level, int32_t storage[3]) {
    const idx rows = (level + 1) * t->width, at = tree * t->depth * t->width;
    storage[0] = 0;
    storage[1] = (int32_t)rows;
    storage[2] = (int32_t)t->starts[tree];
    return (Batch){.positions = w->positions + at, .parents = w->parents + at,
                   .segment_rows = storage, .segment_start = storage + 2, .page_tables = t->page_tables + tree * t->max_pages,
                   .num_rows = rows, .num_segments = 1, .max_pages = t->max_pages, .page_size = t->page_size,
                   .is_chain = t->width == 1, .skipped = level * t->width};
}

// Rope and KV of row r of a level; the row's place among all rows of its tree is level * width + i.
static void place_row(const Draft *d, const Trees *t, const Pages *p, const Work *w, idx level, idx r) {
    const idx tree = r / t->width, local = level * t->width + r % t->width, dim = d->head_dim;
    float *q = w->qkv + r * d->qkv->out_features, *k = q + d->heads * dim;
    const idx at = (t->starts[tree] + level + d->position_offset) * d->half;
    rope_row(q, d->heads + d->kv_heads, dim, d->cos + at, d->sin + at, d->half);
    const idx slot = t->starts[tree] + local;
    const idx page = t->page_tables[tree * t->max_pages + slot / t->page_size];
    store_kv(p, page * p->page_stride + slot % t->page_size * p->kv_heads * dim, k, k + d->kv_heads * dim);
}

// One pass of the draft layer over the beams of all trees: w->hidden[r] from w->row_tokens[r] and w->feature[r].
static void run_level(const Draft *d, const Trees *t, const Pages *p, const Work *w, const Team *team, idx level) {
    const idx rows = t->trees * t->width, q_size = d->heads * d->head_dim, qkv_size = d->qkv->out_features;
    for (idx r = team->thread; r < rows; r += team->num_threads) prepare_row(d, w, r);
    meet(team);
    const float *residual = w->feature, *inputs = w->inputs;
    if (d->fusion) {
        team_linear(team, d->fusion, w->inputs, w->residual, rows);
        residual = inputs = w->residual;
        if (d->input_norm) {
            for (idx r = team->thread; r < rows; r += team->num_threads) {
                rms_norm_row(residual + r * d->hidden, d->input_norm, d->eps, d->hidden, w->normed + r * d->hidden);
            }
            meet(team);
            inputs = w->normed;
        }
    }
    team_linear(team, d->qkv, inputs, w->qkv, rows);
    for (idx r = team->thread; r < rows; r += team->num_threads) place_row(d, t, p, w, level, r);
    meet(team);
    for (idx tree = 0; tree < t->trees; tree++) {
        int32_t storage[3];
        const Batch batch = tree_batch(t, w, tree, level, storage);
        const idx before = tree * t->width - batch.skipped;  // the batch counts a tree's earlier rows, the buffers do not
        const Rows q = {w->qkv + before * qkv_size, qkv_size}, out = {w->attended + before * q_size, q_size};
        attention_part(&batch, p, q, out, d->heads, d->scale, team->thread, team->num_threads);
    }
    meet(team);
    team_linear(team, d->output, w->attended, w->added, rows);
    for (idx r = team->thread; r < rows; r += team->num_threads) {
        add_row(w->added + r * d->hidden, residual + r * d->hidden, d->hidden, w->hidden + r * d->hidden);
        rms_norm_row(w->hidden + r * d->hidden, d->post_norm, d->eps, d->hidden, w->normed + r * d->hidden);
    }
    meet(team);
    team_linear(team, d->gate_up, w->normed, w->gate_up, rows);
    for (idx r = team->thread; r < rows; r += team->num_threads) {
        const float *gate = w->gate_up + r * 2 * d->inter;
        silu_mul_row(gate, gate + d->inter, d->inter, w->gated + r * d->inter);
    }
    meet(team);
    team_linear(team, d->down, w->gated, w->added, rows);
    for (idx r = team->thread; r < rows; r += team->num_threads) {
        add_row(w->added + r * d->hidden, w->hidden + r * d->hidden, d->hidden, w->hidden + r * d->hidden);
    }
    meet(team);
}

// NaN counts as least: what has no order would never be chosen, nor anything instead of it.
INLINE float ordered(float score) { return score == score ? score : -INFINITY; }
INLINE int is_ahead(const float *scores, idx a, idx b) { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); }

// Marks the `wanted` best of `count` scores, ties to the earlier one, best first in `chosen`.
static void choose(const float *scores, idx count, idx wanted, int64_t *chosen) {
    for (idx n = 0; n < wanted; n++) {
        idx best = -1;
        for (idx i = 0; i < count; i++) {
            // Behind everything chosen before, ahead of the rest.
            if ((n == 0 || is_ahead(scores, chosen[n - 1], i)) && (best < 0 || is_ahead(scores, i, best))) best = i;
        }
        chosen[n] = best;
    }
}

static void first_candidates(const Trees *t, const Work *w, idx tree) {
    Candidates *c = &w->candidates[tree];
    const idx row = tree * t->width;
    for (idx i = 0; i < t->width; i++) {
        c->scores[i] = w->beam_scores[row + i] = ordered(w->child_scores[tree * t->width + i]);
        c->tokens[i] = w->row_tokens[row + i] = w->child_ids[tree * t->width + i];
        c->parents[i] = -1;
        w->beam[row + i] = i;
        w->positions[tree * t->depth * t->width + i] = (int32_t)t->starts[tree];
        w->parents[tree * t->depth * t->width + i] = -1;
    }
    c->count = t->width;
}

// All children of a beam become candidates; the best of them the next beam, whose rows are those of `level`.
static void next_beam(const Draft *d, const Trees *t, const Work *w, idx tree, idx level) {
    Candidates *c = &w->candidates[tree];
    const idx width = t->width, row = tree * width, first = c->count, at = tree * t->depth * width;
    for (idx i = 0; i < width * width; i++) {
        c->scores[first + i] = ordered(w->beam_scores[row + i / width] + w->child_scores[row * width + i]);
        c->tokens[first + i] = w->child_ids[row * width + i];
        c->parents[first + i] = w->beam[row + i / width];
    }
    c->count = first + width * width;
    int64_t *chosen = w->chosen + row;
    choose(c->scores + first, width * width, width, chosen);
    for (idx i = 0; i < width; i++) {
        w->row_tokens[row + i] = c->tokens[first + chosen[i]];
        w->beam_scores[row + i] = c->scores[first + chosen[i]];
        w->beam[row + i] = first + chosen[i];
        memcpy(w->feature + (row + i) * d->hidden, w->hidden + (row + chosen[i] / width) * d->hidden,
               (size_t)d->hidden * sizeof(float));
        w->positions[at + level * width + i] = (int32_t)(t->starts[tree] + level);
        w->parents[at + level * width + i] = (int32_t)((level - 1) * width + chosen[i] / width);
    }
}

// Best first: a child is at most as good as its parent, which came up earlier, and so has the lower number.
static void best_nodes(const Trees *t, const Work *w, idx tree) {
    const Candidates *c = &w->candidates[tree];
    int64_t *picks = malloc((size_t)(t->num_drafts + c->count) * sizeof(int64_t)), *node = picks + t->num_drafts;
    choose(c->scores, c->count, t->num_drafts, picks);
    for (idx n = 0; n < t->num_drafts; n++) {
        node[picks[n]] = n + 1;
        t->tokens[tree * t->num_drafts + n] = c->tokens[picks[n]];
        t->parents[tree * t->num_drafts + n] = c->parents[picks[n]] < 0 ? 0 : node[c->parents[picks[n]]];
    }
    free(picks);
}

static void grow_part(const Draft *d, const Trees *t, const Pages *p, const Work *w, int thread, int num_threads) {
    const Team team = {thread, num_threads, w->barrier};
    expand(d, t, w, &team, t->outputs, t->trees);
    for (idx tree = thread; tree < t->trees; tree += num_threads) {
        first_candidates(t, w, tree);
        for (idx i = 0; i < t->width; i++) {
            memcpy(w->feature + (tree * t->width + i) * d->hidden, t->outputs + tree * d->hidden,
                   (size_t)d->hidden * sizeof(float));
        }
    }
    meet(&team);
    for (idx level = 0; level < t->depth - 1; level++) {
        run_level(d, t, p, w, &team, level);
        expand(d, t, w, &team, w->hidden, t->trees * t->width);
        for (idx tree = thread; tree < t->trees; tree += num_threads) next_beam(d, t, w, tree, level + 1);
        meet(&team);
    }
    for (idx tree = thread; tree < t->trees; tree += num_threads) best_nodes(t, w, tree);
}

// Hands out pieces of one allocation, each aligned for any of the types used here.
INLINE void *take(char **at, idx num_bytes) {
    void *piece = *at;
    *at += (num_bytes + 63) / 64 * 64;
    return piece;
}

// Lays the work space out from `base` on; returns its size, also for base == NULL.
static idx lay_out(const Draft *d, const Trees *t, int threads, char *base, Work *w) {
    char *at = base;
    const idx rows = t->trees * t->width, f = sizeof(float), grown = t->depth * t->width;
    const idx most = t->width + (t->depth - 1) * t->width * t->width;
    w->feature = take(&at, rows * d->hidden * f);
    w->residual = take(&at, rows * d->hidden * f);
    w->inputs = take(&at, rows * (d->embed_size + d->hidden) * f);
    w->qkv = take(&at, rows * d->qkv->out_features * f);
    w->attended = take(&at, rows * d->heads * d->head_dim * f);
    w->added = take(&at, rows * d->hidden * f);
    w->normed = take(&at, rows * d->hidden * f);
    w->gate_up = take(&at, rows * 2 * d->inter * f);
    w->gated = take(&at, rows * d->inter * f);
    w->logits = take(&at, rows * d->head->out_features * f);
    w->hidden = take(&at, rows * d->hidden * f);
    w->child_scores = take(&at, rows * t->width * f);
    w->child_ids = take(&at, rows * t->width * 8);
    w->row_tokens = take(&at, rows * 8);
    w->beam = take(&at, rows * 8);
    w->chosen = take(&at, rows * 8);
    w->beam_scores = take(&at, rows * f);
    w->positions = take(&at, t->trees * grown * 4);
    w->parents = take(&at, t->trees * grown * 4);
    w->candidates = take(&at, t->trees * (idx)sizeof(Candidates));
    w->top_k_scratch = take(&at, threads * (idx)sizeof(void *));
    for (idx tree = 0; tree < t->trees; tree++) {
        const Candidates c = {take(&at, most * f), take(&at, most * 8), take(&at, most * 8), 0};
        if (base) w->candidates[tree] = c;
    }
    for (int thread = 0; thread < threads; thread++) {
        void *scratch = take(&at, top_k_scratch_bytes(d->head->out_features));
        if (base) w->top_k_scratch[thread] = scratch;
    }
    return at - base;
}

// 0, or -1 when there is no memory.
int gl_grow_trees(const Draft *d, const Trees *t, const Pages *p, int wanted) {
    Barrier barrier = {0};
    Work work = {0};
    char *memory = aligned_alloc(64, (size_t)lay_out(d, t, wanted, NULL, &work));
    if (!memory) return -1;
    lay_out(d, t, wanted, memory, &work);
    work.barrier = &barrier;
    IN_PARALLEL(wanted, grow_part(d, t, p, &work, thread, num_threads));
    free(memory);
    return 0;
}
