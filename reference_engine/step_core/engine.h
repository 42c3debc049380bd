/* One engine: its queue and batch, the plan of a step by the mode, the placement of the plan and its
 * commit. The rules, and the order of every sum, are those of reference_engine/policies, core,
 * state/queues.py and accounting/ledger.py, which document them. */
#ifndef ENGINE_H
#define ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cost.h"
#include "prefix_tree.h"

/* Causes of waiting, in the order of `WHYS` in library.py. */
enum {
    STEP_IN_FLIGHT,
    NO_TOKEN_BUDGET,
    NO_SEQ_SLOT,
    NO_KV_BLOCKS,
    BEHIND,
    PREEMPTED_BY,
    WINDOW_OPEN,
    STATIC_GROUP_RUNNING,
    N_WHYS
};
enum { CHUNKED, WHOLE_PROMPTS, PREFILL_FIRST, FIXED_BATCH };
enum { RESERVE_STEP, RESERVE_PROMPT, RESERVE_MAX };
enum { FREE, INBOX, WAITING, PREFILLING, DECODING, OVER };

/* `struct _Settings` of library.py. */
typedef struct {
    Cost cost;
    double delay_share, delay_s, watermark;
    int64_t varies; /* whether the times of steps vary around their costs */
    int64_t mode, token_budget, max_num_seqs, long_prefill_tokens, reserve, pads_to_budget;
    int64_t most_seqs, most_step_tokens, most_model_len, n_blocks, block_tokens, prefix_cache;
    /* of FIXED_BATCH, whose largest batch is `max_num_seqs` */
    double window_s;
    int64_t masks_ended, pads_to_longest, answers_at_end;
    const int64_t *preferred_sizes, *padded_sizes; /* rising */
    int64_t n_preferred_sizes, n_padded_sizes;
} Settings;

/* A request in an engine, or on its way into it. While it decodes, `n_tokens` and `n_computed` are
 * those after the first `settled` decode steps of its engine. */
typedef struct {
    int64_t row, n_prompt, max_tokens, n_last, n_most;
    int64_t n_tokens, n_computed, n_room, settled, n_preempted, n_cached;
    int32_t next, previous;         /* in the queue, or among the prompts */
    int32_t run_next, run_previous; /* in order of admission */
    int32_t where;
    bool has_answer, is_started, is_without_room;
    bool is_held;      /* over, with an answer that is not delivered yet */
    int64_t batch;     /* the number of its fixed batch */
    bool is_withdrawn; /* its client expects nothing more */
    double last_token_s;
    int32_t own_cause; /* of waiting; -1: that of the queue */
    bool is_named;     /* is in `Engine.named` */
    int64_t since, ticks[N_WHYS], before[N_WHYS];
    int64_t plan; /* the number of the plan that gave it a cause */
    /* With a prefix cache: its keys, its runs in the tree, its leading blocks that were offered to
     * the tree, and the cached blocks when last looked up, at change `hits_at` of the tree. */
    Keys *keys;
    Runs runs;
    int64_t n_published, hits_at, n_hits;
    Node *hit;
} Live;

/* Arrays by request, in order of arrival; those after `end_s` are results. `times_s` may be NULL. */
typedef struct {
    int64_t n;
    const double *arrived_s;
    const int32_t *n_prompt, *n_output, *max_tokens, *account;
    const int64_t *first_time; /* index of its first token in `times_s` */
    /* Its prompt begins with `prefix_tokens` tokens of the text `prefix_id`, or of the pieces up to
     * it: the texts from `first_piece` on stand behind `piece_after` (0: none), and begin at the
     * token `piece_start` of a prompt. NULL: no prompts share text. */
    const uint32_t *tenant, *prefix_id, *prefix_tokens, *piece_after;
    const int64_t *piece_start;
    int64_t first_piece, n_pieces;
    int64_t max_in_flight, n_accounts;
    double timeout_s, end_s;
    double *scheduled_s, *first_token_s, *done_s, *times_s;
    int32_t *n_received, *n_preempted, *n_cached, *served_by;
    int8_t *outcome;
    int64_t *ended; /* requests in the order in which they ended */
    int64_t *waits; /* ticks [n_accounts, N_WHYS] */
} Traffic;

typedef struct {
    int32_t first, last;
    int64_t n;
} List;

typedef struct {
    int32_t live;
    bool samples;
    int64_t start, n_tokens;
} Row;

typedef struct {
    int32_t live;
    bool is_admission;
    int64_t n_tokens, reserve_tokens;
} Item;

typedef struct {
    int32_t live;
    int32_t outcome;
} End;

typedef struct Engine {
    const Settings *settings;
    struct Simulation *simulation;
    int64_t n_free; /* blocks, the idle blocks of the tree included */
    PrefixTree tree;
    Shape shape; /* of the step */
    List waiting, prefilling, running;
    int64_t queued_tokens;
    /* Decoding requests in the order in which they joined, and the decode step at which each needs
     * more than a token. */
    int32_t *decoding;
    int64_t *due, n_decoding, most_decoding, next_due;
    int64_t context_tokens;
    int32_t *out_of_room;
    int64_t n_out_of_room, most_out_of_room;
    /* Ends (s) of the decode steps after the first `n_forgotten`. */
    double *instants_s;
    int64_t n_decode_steps, n_forgotten, most_instants;
    /* The ledger: ticks for which the queue waited, by cause. */
    int64_t waited[N_WHYS], turned, n_plans;
    int32_t rest, *named;
    int64_t n_named, most_named;
    Item *items;
    int64_t n_items, most_items;
    bool decodes;
    int64_t padding_tokens, padding_rows, padding_context_tokens;
    /* The fixed batch: its number, its rows without a request, and the padding of its prompts that
     * is not computed yet. */
    int64_t n_batches, masked_rows, masked_context, prompt_padding;
    bool is_source_closed;
    double wait_until_s; /* if the plan is to wait; else infinity */
    int32_t head, head_cause; /* the request with a cause of its own by the plan; -1: none */
    int32_t rest_cause;
    Row *rows;
    int64_t n_rows, most_rows, n_step_decodes, n_step_preempted;
    bool is_busy;
    double step_end_s;
    End *ends; /* of the step that ended last */
    int64_t n_ends, most_ends;
    End *held; /* ends that are delivered with the last of their batch */
    int64_t n_held, most_held;
    int32_t *due_now;
    int64_t most_due_now;
    int32_t *inbox; /* requests, and ~request for its cancel */
    int64_t n_inbox, most_inbox;
    const double *ratios, *pauses_s; /* of the next steps; the next is `n_taken` */
    int64_t n_taken, n_drawn;
    /* results */
    int64_t n_steps, n_preemptions, n_padding, n_sampled, n_arrived, n_present, n_cached;
    double busy_s, present_s, until_s;
} Engine;

enum { NOT_RELEASED, IN_FLIGHT, LENGTH, STOP, REFUSED, TIMED_OUT, CANCELLED, DROPPED };

struct Simulation;

/* Make room for `n` entries of `size` bytes; leaves the simulation if there is no memory. */
void *grown(struct Simulation *simulation, void *array, int64_t n, int64_t *most, size_t size);
void *allotted(struct Simulation *simulation, size_t size);
Live *live_of(struct Simulation *simulation, int32_t live);
Traffic *traffic_of(struct Simulation *simulation);
void release(struct Simulation *simulation, int32_t live);

void engine_init(Engine *engine, const Settings *settings, struct Simulation *simulation);
void engine_free(Engine *engine);
bool engine_accepts(const Engine *engine, const Live *request);
void engine_admit(Engine *engine, int32_t live, double arrived_s);
/* Withdraw a request in whatever state it is. */
void engine_end(Engine *engine, int32_t live);
/* Plan and place a step; false: there is nothing to compute. */
bool engine_plan(Engine *engine, double now_s);
/* The seconds of the step; NaN: it is outside the sizes for which its costs hold. */
double engine_step_s(Engine *engine);
/* Append the tokens of the step; `ends` are the requests that got their last. */
void engine_commit(Engine *engine, double end_s);
/* Deliver the held answers now, as `ends`. */
void engine_deliver(Engine *engine, double now_s);
void engine_settle(Engine *engine, int32_t live);
bool engine_has_work(const Engine *engine);

#endif
