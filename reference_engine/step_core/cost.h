/* The cost of a step in seconds: `StepCost.estimate` of state/cost_model.py. */
#ifndef COST_H
#define COST_H

#include <stdbool.h>
#include <stdint.h>

/* Least and most of the steps of a kind to which costs were fitted: sequences with a prompt, their
 * tokens and attention, decodes, tokens of context. */
enum { PROMPT_STEP, DECODE_STEP, MIXED_STEP, N_KINDS };
enum { N_QUANTITIES = 5 };
typedef struct {
    int64_t is_measured;
    double bounds[N_QUANTITIES][2];
} MeasuredSteps;

typedef struct {
    double step_s, seq_s, added_token_s, weights_s, token_s, head_s, context_token_s;
    double prefill_attention_s, reduce_saved_s, reduce_saved_token_s, prefill_seq_s, row_s;
    double sharpness, fused_attention;
    const int64_t *graph_rows;
    int64_t n_graph_rows;
    const int64_t *piece_seqs; /* of `seq_pieces`: the sequences of each piece, … */
    const double *piece_s;     /* … and the seconds of each */
    int64_t n_pieces;
    int64_t is_fitted; /* the costs hold only for `measured` steps */
    MeasuredSteps measured[N_KINDS];
} Cost;

/* The counts of a step, see `StepShape`. */
typedef struct {
    int64_t n_seqs, prefill_tokens, n_decode, context_tokens;
    double prefill_attention;
    int64_t padding_tokens, padding_rows, padding_context_tokens;
} Shape;

/* Whether the costs hold for a step: `StepCost.check_measured`. */
bool is_measured(const Cost *cost, const Shape *shape);
double step_cost_s(const Cost *cost, const Shape *shape);

#endif
