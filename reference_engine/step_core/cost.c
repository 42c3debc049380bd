#include "cost.h"

#include <math.h>

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The rows of the captured graph for a step that only decodes. */
static int64_t captured(const Cost *cost, int64_t n_rows) {
    int64_t low = 0, high = cost->n_graph_rows;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (cost->graph_rows[middle] < n_rows)
            low = middle + 1;
        else
            high = middle;
    }
    return n_rows && low < cost->n_graph_rows ? cost->graph_rows[low] : n_rows;
}

bool is_measured(const Cost *cost, const Shape *shape) {
    static const double BEYOND = 1.1, SMALL[N_QUANTITIES] = {2, 64, INFINITY, 2, INFINITY};
    if (!cost->is_fitted || (!shape->prefill_tokens && !shape->n_decode))
        return true;
    int kind = shape->n_decode ? MIXED_STEP : PROMPT_STEP;
    if (!shape->prefill_tokens)
        kind = DECODE_STEP;
    double values[N_QUANTITIES] = {
        (double)(shape->n_seqs - shape->n_decode), (double)shape->prefill_tokens,
        shape->prefill_attention, (double)shape->n_decode, (double)shape->context_tokens,
    };
    const MeasuredSteps *steps = &cost->measured[kind];
    for (int k = 0; k < N_QUANTITIES; k++) {
        double fewest = steps->bounds[k][0];
        bool is_less = values[k] * BEYOND < fewest && fewest > SMALL[k];
        if (is_less || values[k] > steps->bounds[k][1] * BEYOND)
            return false;
    }
    return steps->is_measured;
}

/* The operations come in the order of the Python code, because the last bit depends on it. */
double step_cost_s(const Cost *cost, const Shape *shape) {
    int64_t n_seqs = shape->n_seqs + shape->padding_rows;
    int64_t n_prefill = shape->prefill_tokens + shape->padding_tokens;
    int64_t n_rows = shape->n_decode + shape->padding_rows;
    int64_t n_context = shape->context_tokens + shape->padding_context_tokens;
    double fixed_s = 0.0;
    if (!n_prefill)
        n_rows = captured(cost, n_rows);
    int64_t n_tokens = n_prefill + n_rows;
    if (n_tokens) {
        double multiplying_s =
            cost->token_s * (double)n_tokens + cost->head_s * (double)n_seqs;
        if (cost->weights_s != 0.0) {
            double p = cost->sharpness;
            multiplying_s = pow(pow(cost->weights_s, p) + pow(multiplying_s, p), 1 / p);
        }
        if (cost->reduce_saved_s != 0.0) {
            double saved_s =
                cost->reduce_saved_s - cost->reduce_saved_token_s * (double)n_tokens;
            multiplying_s -= saved_s > 0.0 ? saved_s : 0.0;
        }
        if (cost->prefill_seq_s != 0.0) {
            int64_t n_prompts = n_seqs - n_rows;
            multiplying_s += cost->prefill_seq_s * (double)(n_prompts > 0 ? n_prompts : 0);
        }
        if (cost->row_s != 0.0)
            multiplying_s += cost->row_s * (double)n_rows;
        for (int64_t k = 0; k < cost->n_pieces; k++)
            multiplying_s += cost->piece_s[k] * (double)least(n_seqs, cost->piece_seqs[k]);
        fixed_s = cost->step_s + cost->seq_s * (double)n_seqs +
                  cost->added_token_s * (double)n_tokens + multiplying_s;
    } else {
        n_context = 0;
    }
    double decode_s = cost->context_token_s * (double)n_context;
    double prefill_s = cost->prefill_attention_s * shape->prefill_attention;
    if (cost->fused_attention != 0.0) {
        double together_s = decode_s + prefill_s;
        double fused_s =
            (prefill_s > decode_s ? prefill_s : decode_s) / cost->fused_attention;
        return fixed_s + (fused_s < together_s ? fused_s : together_s);
    }
    return fixed_s + decode_s + prefill_s;
}
