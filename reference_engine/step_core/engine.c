#include "engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double TICKS_PER_S = 1099511627776.0; /* 2^40 */
static const int64_t NEVER = INT64_MAX;
enum { MOST_TAKEN = 8, PLENTY = 16, MOST_INSTANTS = 1 << 16 };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ticks(double instant_s) { return (int64_t)nearbyint(instant_s * TICKS_PER_S); }

static Live *at(const Engine *engine, int32_t live) {
    return live_of(engine->simulation, live);
}

static int64_t blocks_for(const Engine *engine, int64_t n_tokens) {
    int64_t size = engine->settings->block_tokens;
    return (n_tokens + size - 1) / size;
}

/* --- KV memory: `KvPool` of state/kv.py */

/* How many blocks of the beginning of a request that holds none are cached. */
static int64_t hits(Engine *engine, Live *request) {
    if (!engine->settings->prefix_cache)
        return 0;
    if (request->hits_at != engine->tree.n_changes) {
        int64_t n_usable = (request->n_tokens - 1) / engine->settings->block_tokens;
        request->n_hits = tree_find(&engine->tree, request->keys, n_usable, &request->hit);
        request->hits_at = engine->tree.n_changes;
    }
    return request->n_hits;
}

/* The tokens of a waiting request after its cached prefix. */
static int64_t to_compute(Engine *engine, Live *request) {
    return request->n_tokens - hits(engine, request) * engine->settings->block_tokens;
}

static void take_blocks(Engine *engine, int64_t n) {
    int64_t n_blank = engine->n_free - engine->tree.n_idle;
    if (n > n_blank)
        tree_evict(&engine->tree, n - n_blank);
    engine->n_free -= n;
}

/* Own the cached beginning of a request. */
static void take_hits(Engine *engine, Live *request) {
    int64_t n_hits = hits(engine, request);
    if (n_hits)
        engine->n_free -= tree_own(&engine->tree, request->hit, n_hits, &request->runs);
    request->n_published = n_hits;
    request->n_room = request->n_computed = n_hits * engine->settings->block_tokens;
}

/* Add the blocks that became full to the prefix cache. */
static void publish(Engine *engine, Live *request) {
    int64_t n_full = request->n_computed / engine->settings->block_tokens;
    if (!engine->settings->prefix_cache || n_full == request->n_published)
        return;
    tree_add(&engine->tree, request->keys, request->n_published, n_full, &request->runs);
    request->n_published = n_full;
}

static void free_blocks(Engine *engine, Live *request) {
    int64_t n_blocks = request->n_room / engine->settings->block_tokens;
    publish(engine, request);
    engine->n_free += tree_give_up(&engine->tree, request->keys, n_blocks, &request->runs);
    request->n_room = request->n_published = 0;
}

/* --- lists: of the queue and the prompts by `next`, of the batch by `run_next` */

static void list_init(List *list) { *list = (List){-1, -1, 0}; }

static void append(Engine *engine, List *list, int32_t live) {
    Live *request = at(engine, live);
    request->next = -1;
    request->previous = list->last;
    if (list->last >= 0)
        at(engine, list->last)->next = live;
    else
        list->first = live;
    list->last = live;
    list->n++;
}

static void prepend(Engine *engine, List *list, int32_t live) {
    Live *request = at(engine, live);
    request->previous = -1;
    request->next = list->first;
    if (list->first >= 0)
        at(engine, list->first)->previous = live;
    else
        list->last = live;
    list->first = live;
    list->n++;
}

static void unlink_from(Engine *engine, List *list, int32_t live) {
    Live *request = at(engine, live);
    if (request->previous >= 0)
        at(engine, request->previous)->next = request->next;
    else
        list->first = request->next;
    if (request->next >= 0)
        at(engine, request->next)->previous = request->previous;
    else
        list->last = request->previous;
    list->n--;
}

static void run(Engine *engine, int32_t live) {
    List *list = &engine->running;
    Live *request = at(engine, live);
    request->run_next = -1;
    request->run_previous = list->last;
    if (list->last >= 0)
        at(engine, list->last)->run_next = live;
    else
        list->first = live;
    list->last = live;
    list->n++;
}

static void stop_running(Engine *engine, int32_t live) {
    List *list = &engine->running;
    Live *request = at(engine, live);
    if (request->run_previous >= 0)
        at(engine, request->run_previous)->run_next = request->run_next;
    else
        list->first = request->run_next;
    if (request->run_next >= 0)
        at(engine, request->run_next)->run_previous = request->run_previous;
    else
        list->last = request->run_previous;
    list->n--;
}

/* --- the ledger of waiting */

static void accrue(Engine *engine, int64_t now) {
    engine->waited[engine->rest] += now - engine->turned;
    engine->turned = now;
}

static void follow(Engine *engine, Live *request) {
    request->own_cause = -1;
    memcpy(request->before, engine->waited, sizeof request->before);
}

/* Charge the wait since the last charge; the queue's is accrued until `now`. */
static void charge(const Engine *engine, Live *request, int64_t now) {
    if (request->own_cause >= 0) {
        request->ticks[request->own_cause] += now - request->since;
        return;
    }
    for (int why = 0; why < N_WHYS; why++)
        request->ticks[why] += engine->waited[why] - request->before[why];
}

/* Wait for a cause of its own from now on. */
static void name(Engine *engine, int32_t live, int32_t cause, int64_t now) {
    Live *request = at(engine, live);
    request->own_cause = cause;
    request->since = now;
    if (request->is_named)
        return;
    engine->named = grown(
        engine->simulation, engine->named, engine->n_named + 1, &engine->most_named,
        sizeof *engine->named
    );
    engine->named[engine->n_named++] = live;
    request->is_named = true;
}

/* Give a waiting request a cause of its own by the present plan. */
static void rename_cause(Engine *engine, int32_t live, int32_t cause, int64_t now) {
    Live *request = at(engine, live);
    if (request->where != WAITING)
        return;
    request->plan = engine->n_plans;
    if (request->own_cause == cause)
        return;
    charge(engine, request, now);
    name(engine, live, cause, now);
}

/* Let the named requests to which the present plan gave no cause wait with the queue. */
static void unname(Engine *engine, int64_t now) {
    int64_t n_kept = 0;
    for (int64_t k = 0; k < engine->n_named; k++) {
        int32_t live = engine->named[k];
        Live *request = at(engine, live);
        bool is_waiting = request->where == WAITING && request->own_cause >= 0;
        if (is_waiting && request->plan == engine->n_plans) {
            engine->named[n_kept++] = live;
            continue;
        }
        request->is_named = false;
        if (is_waiting) {
            charge(engine, request, now);
            follow(engine, request);
        }
    }
    engine->n_named = n_kept;
}

/* Forget the cause of a request that leaves the queue without a start. */
static void unlist(Engine *engine, int32_t live) {
    int64_t n_kept = 0;
    for (int64_t k = 0; k < engine->n_named; k++)
        if (engine->named[k] != live)
            engine->named[n_kept++] = engine->named[k];
    engine->n_named = n_kept;
    at(engine, live)->is_named = false;
}

/* --- decoding requests */

/* Write the instant of the latest token of a request. */
static void stamp(Engine *engine, const Live *request, double end_s) {
    Traffic *traffic = traffic_of(engine->simulation);
    if (traffic->times_s != NULL && !request->is_withdrawn) {
        int64_t n = request->n_tokens - request->n_prompt;
        traffic->times_s[traffic->first_time[request->row] + n - 1] = end_s;
    }
}

void engine_settle(Engine *engine, int32_t live) {
    Live *request = at(engine, live);
    int64_t n = engine->n_decode_steps - request->settled;
    if (request->where != DECODING || n <= 0)
        return;
    Traffic *traffic = traffic_of(engine->simulation);
    const double *instants_s = engine->instants_s + (request->settled - engine->n_forgotten);
    if (traffic->times_s != NULL && !request->is_withdrawn) {
        int64_t first = traffic->first_time[request->row] + request->n_tokens - request->n_prompt;
        memcpy(traffic->times_s + first, instants_s, (size_t)n * sizeof *instants_s);
    }
    request->last_token_s = instants_s[n - 1];
    request->n_tokens += n;
    request->n_computed += n;
    request->settled = engine->n_decode_steps;
}

static void take_instant(Engine *engine, double end_s) {
    int64_t n = engine->n_decode_steps - engine->n_forgotten;
    if (n >= MOST_INSTANTS) {
        for (int64_t k = 0; k < engine->n_decoding; k++)
            engine_settle(engine, engine->decoding[k]);
        engine->n_forgotten = engine->n_decode_steps;
        n = 0;
    }
    engine->instants_s = grown(
        engine->simulation, engine->instants_s, n + 1, &engine->most_instants, sizeof(double)
    );
    engine->instants_s[n] = end_s;
    engine->n_decode_steps++;
}

static int64_t place_of(const Engine *engine, int32_t live) {
    for (int64_t k = engine->n_decoding - 1; k >= 0; k--)
        if (engine->decoding[k] == live)
            return k;
    abort(); /* a decoding request is among the decoding requests */
}

static void expect(Engine *engine, int32_t live, int64_t due) {
    engine->due[place_of(engine, live)] = due;
    engine->next_due = least(engine->next_due, due);
}

/* Set the decode step at which a settled request needs more than a token. */
static void set_milestone(Engine *engine, int32_t live) {
    Live *request = at(engine, live);
    int64_t n = request->n_computed;
    if (n == request->n_room) {
        engine->out_of_room = grown(
            engine->simulation, engine->out_of_room, engine->n_out_of_room + 1,
            &engine->most_out_of_room, sizeof *engine->out_of_room
        );
        engine->out_of_room[engine->n_out_of_room++] = live;
        request->is_without_room = true;
        return;
    }
    int64_t milestone = n + 1;
    if (request->n_tokens > request->n_prompt)
        milestone = least(request->n_room, request->n_last);
    expect(engine, live, engine->n_decode_steps + milestone - n);
}

static void room_found(Engine *engine, int32_t live) {
    Live *request = at(engine, live);
    if (!request->is_without_room)
        return;
    request->is_without_room = false;
    int64_t n_kept = 0;
    for (int64_t k = 0; k < engine->n_out_of_room; k++)
        if (engine->out_of_room[k] != live)
            engine->out_of_room[n_kept++] = engine->out_of_room[k];
    engine->n_out_of_room = n_kept;
}

static void decode(Engine *engine, int32_t live) {
    Live *request = at(engine, live);
    unlink_from(engine, &engine->prefilling, live);
    int64_t n = engine->n_decoding + 1, most_due = engine->most_decoding;
    engine->due = grown(
        engine->simulation, engine->due, n, &most_due, sizeof *engine->due
    );
    engine->decoding = grown(
        engine->simulation, engine->decoding, n, &engine->most_decoding, sizeof *engine->decoding
    );
    engine->decoding[n - 1] = live;
    engine->due[n - 1] = NEVER;
    engine->n_decoding = n;
    engine->context_tokens += request->n_computed;
    request->where = DECODING;
    request->settled = engine->n_decode_steps;
    set_milestone(engine, live);
}

static void stop_decoding(Engine *engine, int32_t live) {
    engine_settle(engine, live);
    Live *request = at(engine, live);
    int64_t k = place_of(engine, live), n_after = engine->n_decoding - k - 1;
    memmove(
        engine->decoding + k, engine->decoding + k + 1, (size_t)n_after * sizeof *engine->decoding
    );
    memmove(engine->due + k, engine->due + k + 1, (size_t)n_after * sizeof *engine->due);
    engine->n_decoding--;
    engine->context_tokens -= request->n_computed;
    room_found(engine, live);
}

/* --- requests come and go */

void engine_init(Engine *engine, const Settings *settings, struct Simulation *simulation) {
    memset(engine, 0, sizeof *engine);
    engine->settings = settings;
    engine->simulation = simulation;
    engine->n_free = settings->n_blocks;
    tree_init(&engine->tree, simulation);
    list_init(&engine->waiting);
    list_init(&engine->prefilling);
    list_init(&engine->running);
    engine->next_due = NEVER;
    engine->rest = STEP_IN_FLIGHT;
}

void engine_free(Engine *engine) {
    free(engine->decoding);
    free(engine->due);
    free(engine->out_of_room);
    free(engine->instants_s);
    free(engine->named);
    free(engine->items);
    free(engine->rows);
    free(engine->ends);
    free(engine->held);
    free(engine->due_now);
    free(engine->inbox);
    tree_free(&engine->tree);
}

bool engine_has_work(const Engine *engine) {
    return engine->waiting.n || engine->running.n || engine->n_held;
}

bool engine_accepts(const Engine *engine, const Live *request) {
    const Settings *settings = engine->settings;
    int64_t n_tokens = request->n_prompt + request->max_tokens;
    return n_tokens <= settings->most_model_len &&
           blocks_for(engine, n_tokens - 1) <= settings->n_blocks;
}

static void enqueue(Engine *engine, int32_t live, bool is_at_head) {
    Live *request = at(engine, live);
    if (is_at_head)
        prepend(engine, &engine->waiting, live);
    else
        append(engine, &engine->waiting, live);
    engine->queued_tokens += request->n_tokens;
    request->where = WAITING;
}

void engine_admit(Engine *engine, int32_t live, double arrived_s) {
    name(engine, live, STEP_IN_FLIGHT, ticks(arrived_s));
    enqueue(engine, live, false);
}

static void leave_queue(Engine *engine, int32_t live) {
    unlink_from(engine, &engine->waiting, live);
    engine->queued_tokens -= at(engine, live)->n_tokens;
}

static void leave_batch(Engine *engine, int32_t live) {
    Live *request = at(engine, live);
    if (request->where == PREFILLING)
        unlink_from(engine, &engine->prefilling, live);
    else if (request->where == DECODING)
        stop_decoding(engine, live);
    stop_running(engine, live);
    free_blocks(engine, request);
}

/* Mask the row of a request that is over while other rows of its batch go on. */
static void mask(Engine *engine, const Live *request) {
    const Settings *settings = engine->settings;
    if (settings->mode != FIXED_BATCH || !settings->masks_ended || !engine->running.n)
        return;
    if (request->batch == engine->n_batches && request->is_started) {
        engine->masked_rows++;
        engine->masked_context += request->n_tokens - 1;
    }
}

void engine_end(Engine *engine, int32_t live) {
    Live *request = at(engine, live);
    if (request->is_held) {
        int64_t n_kept = 0;
        for (int64_t k = 0; k < engine->n_held; k++)
            if (engine->held[k].live != live)
                engine->held[n_kept++] = engine->held[k];
        engine->n_held = n_kept;
        request->is_held = false;
        return;
    }
    if (request->where == WAITING) {
        leave_queue(engine, live);
        unlist(engine, live);
    } else {
        leave_batch(engine, live);
    }
    request->where = OVER;
    mask(engine, request);
}

/* --- the plan of a step */

typedef struct {
    int64_t tokens, slots, blocks;
    double spare_blocks;
    bool is_busy;
} Budget;

static Budget budget_of(
    const Engine *engine, int64_t tokens, int64_t max_num_seqs, bool is_after_decodes
) {
    const Settings *settings = engine->settings;
    if (is_after_decodes)
        max_num_seqs = least(max_num_seqs, tokens);
    Budget budget = {
        .tokens = least(tokens, settings->most_step_tokens),
        .slots = least(max_num_seqs, settings->most_seqs) - engine->running.n,
        .blocks = engine->n_free,
        .spare_blocks = settings->watermark * (double)settings->n_blocks,
    };
    if (is_after_decodes) {
        budget.tokens -= engine->n_decoding;
        budget.blocks -= engine->n_out_of_room;
        budget.is_busy = engine->n_decoding > 0;
    }
    return budget;
}

static void give(Engine *engine, Budget *budget, Item item) {
    engine->items = grown(
        engine->simulation, engine->items, engine->n_items + 1, &engine->most_items,
        sizeof *engine->items
    );
    engine->items[engine->n_items++] = item;
    budget->tokens -= item.n_tokens;
    budget->is_busy = true;
}

static int64_t missing(const Engine *engine, const Live *request, int64_t n_tokens) {
    int64_t n_over = request->n_computed + n_tokens - request->n_room;
    return n_over > 0 ? blocks_for(engine, n_over) : 0;
}

static void continue_prefills(Engine *engine, Budget *budget, int64_t most_tokens) {
    for (int32_t live = engine->prefilling.first; live >= 0; live = at(engine, live)->next) {
        const Live *request = at(engine, live);
        int64_t n_tokens = least(request->n_tokens - request->n_computed, budget->tokens);
        if (most_tokens)
            n_tokens = least(n_tokens, most_tokens);
        if (n_tokens > 0) {
            budget->blocks -= missing(engine, request, n_tokens);
            give(engine, budget, (Item){live, false, n_tokens, 0});
        }
    }
}

static int64_t missing_to_admit(
    Engine *engine, Live *request, int64_t n_tokens, int64_t reserve_tokens
) {
    int64_t n_hits = hits(engine, request);
    int64_t n_room = most(n_hits * engine->settings->block_tokens + n_tokens, reserve_tokens);
    if (request->n_preempted)
        n_room = most(n_room, request->n_tokens);
    int64_t n_missing = blocks_for(engine, n_room) - n_hits;
    if (n_hits)
        for (const Node *node = request->hit; node->parent != NULL; node = node->parent)
            if (!node->n_owners)
                n_missing += least(node->end, n_hits) - node->start;
    return n_missing;
}

/* Take a waiting request into the step. Returns the cause if it cannot be admitted, else -1. */
static int32_t admit(
    Engine *engine, Budget *budget, int32_t live, int64_t most_tokens, bool is_whole,
    int64_t reserve
) {
    Live *request = at(engine, live);
    if (budget->blocks < 0)
        return NO_KV_BLOCKS;
    if (budget->slots <= 0)
        return NO_SEQ_SLOT;
    if (budget->tokens <= 0)
        return NO_TOKEN_BUDGET;
    int64_t n_missing = to_compute(engine, request);
    int64_t n_tokens = least(n_missing, budget->tokens);
    if (most_tokens)
        n_tokens = least(n_tokens, most_tokens);
    if (!n_tokens || (is_whole && n_tokens < n_missing && engine->n_items))
        return NO_TOKEN_BUDGET;
    int64_t n_reserved = 0;
    if (reserve == RESERVE_PROMPT)
        n_reserved = request->n_tokens;
    else if (reserve == RESERVE_MAX)
        n_reserved = request->n_most;
    int64_t n_blocks = missing_to_admit(engine, request, n_tokens, n_reserved);
    double spare_blocks = budget->is_busy ? budget->spare_blocks : 0.0;
    if ((double)n_blocks + spare_blocks > (double)budget->blocks)
        return NO_KV_BLOCKS;
    budget->slots--;
    budget->blocks -= n_blocks;
    give(engine, budget, (Item){live, true, n_tokens, n_reserved});
    return -1;
}

static void admit_in_order(
    Engine *engine, Budget *budget, int64_t most_tokens, bool is_whole, int64_t reserve
) {
    engine->rest_cause = NO_TOKEN_BUDGET;
    for (int32_t live = engine->waiting.first; live >= 0; live = at(engine, live)->next) {
        int32_t cause = admit(engine, budget, live, most_tokens, is_whole, reserve);
        if (cause < 0)
            continue;
        engine->rest_cause = cause;
        if (cause == NO_KV_BLOCKS && budget->blocks >= 0) {
            engine->head = live;
            engine->head_cause = cause;
            engine->rest_cause = BEHIND;
        }
        return;
    }
}

/* Begin a batch of the first requests, at most `size`, that fit the memory together. */
static void form_batch(Engine *engine, int64_t size) {
    const Settings *settings = engine->settings;
    int64_t n_free = engine->n_free, n = 0, n_tokens = 0, longest = 0;
    engine->n_batches++;
    engine->masked_rows = engine->masked_context = engine->prompt_padding = 0;
    for (int32_t live = engine->waiting.first; live >= 0 && n < size; n++) {
        Live *request = at(engine, live);
        n_free -= missing_to_admit(engine, request, 1, request->n_most);
        if (n_free < 0)
            break;
        request->batch = engine->n_batches;
        int64_t n_missing = to_compute(engine, request);
        n_tokens += n_missing;
        longest = most(longest, n_missing);
        live = request->next;
    }
    if (!n)
        return;
    if (settings->pads_to_longest)
        engine->prompt_padding = longest * n - n_tokens;
    for (int64_t k = 0; k < settings->n_padded_sizes; k++)
        if (settings->padded_sizes[k] >= n) {
            engine->masked_rows = settings->padded_sizes[k] - n;
            break;
        }
    engine->masked_context = engine->masked_rows * longest;
    engine->prompt_padding += engine->masked_context;
}

/* Whether the head of the queue belongs to the batch that is not started as a whole. */
static bool has_member(const Engine *engine) {
    int32_t live = engine->waiting.first;
    return live >= 0 && engine->n_batches && at(engine, live)->batch == engine->n_batches;
}

/* The next step of the batch, or the first of a new batch, or the end of the window before it. */
static void plan_batch(Engine *engine, double now_s) {
    const Settings *settings = engine->settings;
    engine->rest_cause = STATIC_GROUP_RUNNING;
    if (!engine->running.n && !has_member(engine)) {
        int64_t n_waiting = engine->waiting.n, preferred = 0;
        int64_t size = least(settings->max_num_seqs, settings->most_seqs);
        size = least(size, settings->most_step_tokens);
        if (n_waiting < size) {
            for (int64_t k = 0; k < settings->n_preferred_sizes; k++)
                if (settings->preferred_sizes[k] <= n_waiting)
                    preferred = settings->preferred_sizes[k];
            if (!preferred && !engine->is_source_closed) {
                double oldest_s = INFINITY;
                for (int32_t live = engine->waiting.first; live >= 0;
                     live = at(engine, live)->next) {
                    const Live *request = at(engine, live);
                    double arrived_s = traffic_of(engine->simulation)->arrived_s[request->row];
                    oldest_s = arrived_s < oldest_s ? arrived_s : oldest_s;
                }
                double until_s = oldest_s + settings->window_s;
                if (until_s > now_s) {
                    engine->wait_until_s = until_s;
                    engine->rest_cause = WINDOW_OPEN;
                    engine->decodes = false;
                    return;
                }
            }
            size = preferred ? preferred : size;
        }
        form_batch(engine, size);
    }
    Budget budget = {.tokens = settings->most_step_tokens};
    continue_prefills(engine, &budget, 0);
    int64_t n_slots = settings->most_seqs - engine->running.n;
    for (int32_t live = engine->waiting.first; live >= 0 && n_slots > 0; n_slots--) {
        Live *request = at(engine, live);
        if (request->batch != engine->n_batches || !budget.tokens)
            break;
        int64_t n_tokens = least(to_compute(engine, request), budget.tokens);
        give(engine, &budget, (Item){live, true, n_tokens, request->n_most});
        live = request->next;
    }
    engine->decodes = !engine->n_items;
    if (engine->n_items) {
        engine->padding_tokens = engine->prompt_padding;
        engine->prompt_padding = 0;
    } else {
        engine->padding_rows = engine->masked_rows;
        engine->padding_context_tokens = engine->masked_context;
    }
}

static void make_plan(Engine *engine, double now_s) {
    const Settings *settings = engine->settings;
    int64_t max_num_seqs = settings->max_num_seqs;
    engine->n_items = engine->padding_tokens = 0;
    engine->padding_rows = engine->padding_context_tokens = 0;
    engine->head = -1;
    engine->decodes = true;
    if (settings->mode == CHUNKED) {
        int64_t tokens = least(settings->token_budget, settings->most_step_tokens);
        int64_t most_tokens = settings->long_prefill_tokens;
        Budget budget = budget_of(engine, tokens, max_num_seqs, true);
        continue_prefills(engine, &budget, most_tokens);
        admit_in_order(engine, &budget, most_tokens, false, settings->reserve);
        if (settings->pads_to_budget)
            engine->padding_tokens = most(0, budget.tokens);
    } else if (settings->mode == WHOLE_PROMPTS) {
        Budget budget = budget_of(engine, settings->most_step_tokens, max_num_seqs, true);
        continue_prefills(engine, &budget, 0);
        admit_in_order(engine, &budget, 0, true, settings->reserve);
    } else if (settings->mode == FIXED_BATCH) {
        plan_batch(engine, now_s);
    } else {
        max_num_seqs = least(max_num_seqs, settings->most_step_tokens);
        Budget budget = budget_of(engine, settings->token_budget, max_num_seqs, false);
        continue_prefills(engine, &budget, 0);
        admit_in_order(engine, &budget, 0, true, RESERVE_STEP);
        engine->decodes = !engine->n_items;
    }
}

/* The plan of a step in which none of the plan's items found memory: the running requests alone. */
static void fall_back(Engine *engine) {
    Budget budget = {.tokens = engine->settings->most_step_tokens - engine->n_decoding};
    engine->n_items = engine->padding_tokens = 0;
    engine->padding_rows = engine->padding_context_tokens = 0;
    engine->head = -1;
    engine->rest_cause = NO_TOKEN_BUDGET;
    engine->decodes = true;
    continue_prefills(engine, &budget, 0);
}

/* --- placement */

static bool grow(Engine *engine, Live *request, int64_t n_tokens) {
    int64_t n_missing = missing(engine, request, n_tokens);
    if (n_missing > engine->n_free)
        return false;
    request->n_room += n_missing * engine->settings->block_tokens;
    take_blocks(engine, n_missing);
    return true;
}

static void preempt(Engine *engine, int32_t live, int64_t now) {
    leave_batch(engine, live);
    Live *request = at(engine, live);
    enqueue(engine, live, true);
    request->n_computed = 0;
    request->n_preempted++;
    engine->n_preemptions++;
    engine->n_step_preempted++;
    name(engine, live, PREEMPTED_BY, now);
    request->plan = engine->n_plans;
    for (int64_t k = 0; k < engine->n_rows; k++)
        if (engine->rows[k].live == live) {
            memmove(
                engine->rows + k, engine->rows + k + 1,
                (size_t)(engine->n_rows - k - 1) * sizeof *engine->rows
            );
            engine->n_rows--;
            break;
        }
}

/* Give a running request room, by preempting the last admitted if need be; false if it had to be
 * preempted itself. */
static bool make_room(Engine *engine, int32_t live, int64_t n_tokens, int64_t now) {
    while (!grow(engine, at(engine, live), n_tokens)) {
        int32_t victim = engine->running.last;
        preempt(engine, victim, now);
        if (victim == live)
            return false;
    }
    if (at(engine, live)->is_without_room) {
        room_found(engine, live);
        set_milestone(engine, live);
    }
    return true;
}

static void add_row(Engine *engine, int32_t live, int64_t n_tokens) {
    const Live *request = at(engine, live);
    int64_t start = request->n_computed;
    engine->rows = grown(
        engine->simulation, engine->rows, engine->n_rows + 1, &engine->most_rows,
        sizeof *engine->rows
    );
    engine->rows[engine->n_rows++] =
        (Row){live, n_tokens == request->n_tokens - start, start, n_tokens};
}

/* Give each decoding request that is out of room another block, or several where there are
 * plenty; false, and nothing changed, when there are too few. */
static bool extend(Engine *engine) {
    int64_t n = engine->n_out_of_room, size = engine->settings->block_tokens;
    if (n > engine->n_free)
        return false;
    int64_t n_most = least(MOST_TAKEN, engine->n_free / (PLENTY * most(1, n)));
    for (int64_t k = 0; k < n; k++) {
        Live *request = at(engine, engine->out_of_room[k]);
        int64_t n_left = request->n_most - request->n_room;
        int64_t n_blocks = n_left > 0 ? blocks_for(engine, n_left) : 0;
        n_blocks = most(1, least(n_blocks, n_most));
        request->n_room += n_blocks * size;
        take_blocks(engine, n_blocks);
    }
    engine->n_out_of_room = 0;
    for (int64_t k = 0; k < n; k++) {
        at(engine, engine->out_of_room[k])->is_without_room = false;
        set_milestone(engine, engine->out_of_room[k]);
    }
    return true;
}

static void make_room_for_decodes(Engine *engine, int64_t now) {
    if (extend(engine))
        return;
    int64_t n = engine->n_out_of_room;
    int32_t *requests = engine->due_now = grown(
        engine->simulation, engine->due_now, n, &engine->most_due_now, sizeof *engine->due_now
    );
    memcpy(requests, engine->out_of_room, (size_t)n * sizeof *requests);
    for (int64_t k = 0; k < n; k++)
        if (at(engine, requests[k])->where == DECODING)
            make_room(engine, requests[k], 1, now);
}

static bool start(Engine *engine, const Item *item, double now_s) {
    Live *request = at(engine, item->live);
    int64_t n_reserved = least(item->reserve_tokens, request->n_most);
    if (missing_to_admit(engine, request, item->n_tokens, n_reserved) > engine->n_free)
        return false;
    int64_t n_room = most(n_reserved, request->n_preempted ? request->n_tokens : 0);
    take_hits(engine, request);
    grow(engine, request, most(item->n_tokens, n_room - request->n_computed));
    leave_queue(engine, item->live);
    charge(engine, request, engine->turned);
    request->own_cause = -1;
    request->where = PREFILLING;
    append(engine, &engine->prefilling, item->live);
    run(engine, item->live);
    int64_t n_left = request->n_tokens - request->n_computed;
    add_row(engine, item->live, least(item->n_tokens, n_left));
    if (!request->is_started) {
        request->is_started = true;
        request->n_cached = request->n_computed;
        engine->n_cached += request->n_cached;
        if (!request->is_withdrawn)
            traffic_of(engine->simulation)->scheduled_s[request->row] = now_s;
    }
    return true;
}

static void place(Engine *engine, double now_s) {
    int64_t now = ticks(now_s), n_before = engine->n_preemptions;
    accrue(engine, now);
    engine->n_plans++;
    engine->n_rows = 0;
    for (int64_t k = 0; k < engine->n_items; k++) {
        Item *item = &engine->items[k];
        if (item->is_admission)
            continue;
        if (at(engine, item->live)->where == WAITING)
            item->is_admission = true; /* preempted for an earlier item: left out below */
        else if (make_room(engine, item->live, item->n_tokens, now))
            add_row(engine, item->live, item->n_tokens);
    }
    if (engine->decodes)
        make_room_for_decodes(engine, now);
    if (engine->head >= 0)
        rename_cause(engine, engine->head, engine->head_cause, now);
    bool is_admitting = engine->n_preemptions == n_before;
    for (int64_t k = 0; k < engine->n_items; k++) {
        const Item *item = &engine->items[k];
        if (!item->is_admission)
            continue;
        bool is_started = is_admitting && start(engine, item, now_s);
        bool is_preempted = at(engine, item->live)->plan == engine->n_plans;
        if (!is_started && !is_preempted)
            rename_cause(engine, item->live, NO_KV_BLOCKS, now);
    }
    unname(engine, now);
    engine->rest = engine->rest_cause;
    engine->n_step_decodes = engine->decodes ? engine->n_decoding : 0;
}

bool engine_plan(Engine *engine, double now_s) {
    engine->n_step_preempted = 0;
    engine->wait_until_s = INFINITY;
    if (!engine->waiting.n && !engine->running.n)
        return false;
    make_plan(engine, now_s);
    bool is_empty = !engine->n_items && !(engine->decodes && engine->n_decoding);
    if (is_empty && engine->wait_until_s == INFINITY)
        return false;
    place(engine, now_s);
    bool has_padding = engine->padding_tokens || engine->padding_rows;
    if (engine->n_items && !engine->n_rows && !engine->n_step_decodes && !has_padding &&
        engine->running.n) {
        fall_back(engine);
        place(engine, now_s);
    }
    return engine->n_rows || engine->n_step_decodes || has_padding;
}

double engine_step_s(Engine *engine) {
    const Settings *settings = engine->settings;
    Shape *shape = &engine->shape;
    *shape = (Shape){
        .n_seqs = engine->n_rows + engine->n_step_decodes,
        .n_decode = engine->n_step_decodes,
        .context_tokens = engine->n_step_decodes ? engine->context_tokens : 0,
        .padding_tokens = engine->padding_tokens,
        .padding_rows = engine->padding_rows,
        .padding_context_tokens = engine->padding_context_tokens,
    };
    for (int64_t k = 0; k < engine->n_rows; k++) {
        const Row *row = &engine->rows[k];
        shape->prefill_tokens += row->n_tokens;
        shape->prefill_attention +=
            (double)row->n_tokens * ((double)row->start + (double)row->n_tokens / 2);
    }
    if (!is_measured(&settings->cost, shape))
        return NAN;
    double duration_s = step_cost_s(&settings->cost, shape);
    if (settings->varies) {
        int64_t k = engine->n_taken++;
        duration_s = duration_s * engine->ratios[k] + engine->pauses_s[k];
    }
    return duration_s + (settings->delay_share * duration_s + settings->delay_s);
}

/* --- commit */

/* Move a running request on after tokens of it were computed. */
static void advance(Engine *engine, int32_t live) {
    Live *request = at(engine, live);
    if (request->n_computed >= request->n_most) /* its last token was sampled */
        return;
    if (request->where == DECODING)
        set_milestone(engine, live);
    else if (request->n_tokens - request->n_computed == 1)
        decode(engine, live);
}

/* Set the time of a first token, and end a request that got its last. */
static void conclude(Engine *engine, int32_t live, double end_s) {
    Live *request = at(engine, live);
    if (!request->has_answer) {
        request->has_answer = true;
        if (!request->is_withdrawn)
            traffic_of(engine->simulation)->first_token_s[request->row] = end_s;
    }
    int64_t n_output = request->n_tokens - request->n_prompt;
    int32_t outcome = LENGTH;
    if (n_output < request->max_tokens) {
        if (request->n_tokens <= request->n_last)
            return;
        outcome = STOP;
    }
    leave_batch(engine, live);
    request->where = OVER;
    engine->ends = grown(
        engine->simulation, engine->ends, engine->n_ends + 1, &engine->most_ends,
        sizeof *engine->ends
    );
    engine->ends[engine->n_ends++] = (End){live, outcome};
}

/* The decoding requests that are due, in the order in which they joined, into `due_now`. */
static int64_t pop_due(Engine *engine) {
    int64_t n = 0, now = engine->n_decode_steps, next = NEVER;
    if (engine->next_due > now)
        return 0;
    engine->due_now = grown(
        engine->simulation, engine->due_now, engine->n_decoding, &engine->most_due_now,
        sizeof *engine->due_now
    );
    for (int64_t k = 0; k < engine->n_decoding; k++) {
        if (engine->due[k] > now) {
            next = least(next, engine->due[k]);
            continue;
        }
        engine->due[k] = NEVER;
        engine->due_now[n++] = engine->decoding[k];
    }
    engine->next_due = next;
    return n;
}

void engine_deliver(Engine *engine, double now_s) {
    Traffic *traffic = traffic_of(engine->simulation);
    engine->n_ends = 0;
    for (int64_t k = 0; k < engine->n_held; k++) {
        End end = engine->held[k];
        Live *request = at(engine, end.live);
        request->is_held = false;
        engine->ends = grown(
            engine->simulation, engine->ends, engine->n_ends + 1, &engine->most_ends,
            sizeof *engine->ends
        );
        engine->ends[engine->n_ends++] = end;
        if (request->is_withdrawn)
            continue;
        traffic->first_token_s[request->row] = now_s;
        int64_t first = traffic->first_time[request->row];
        for (int64_t n = 0; traffic->times_s && n < request->n_tokens - request->n_prompt; n++)
            traffic->times_s[first + n] = now_s;
    }
    engine->n_held = 0;
}

/* Lengthen the masked rows by a decode step, mask the rows that ended with it, and hold their
 * answers if they are delivered at the end. */
static void end_batch_step(Engine *engine, int64_t n_padding, double end_s) {
    if (engine->masked_rows && engine->n_step_decodes)
        engine->masked_context += n_padding;
    for (int64_t k = 0; k < engine->n_ends; k++)
        mask(engine, at(engine, engine->ends[k].live));
    if (!engine->settings->answers_at_end)
        return;
    for (int64_t k = 0; k < engine->n_ends; k++) {
        engine->held = grown(
            engine->simulation, engine->held, engine->n_held + 1, &engine->most_held,
            sizeof *engine->held
        );
        engine->held[engine->n_held++] = engine->ends[k];
        at(engine, engine->ends[k].live)->is_held = true;
    }
    engine->n_ends = 0;
    if (!engine->running.n)
        engine_deliver(engine, end_s);
}

void engine_commit(Engine *engine, double end_s) {
    int64_t n_due = 0, n_milestones = 0, n_decode = engine->n_step_decodes;
    if (n_decode) {
        take_instant(engine, end_s);
        engine->context_tokens += n_decode;
        n_due = pop_due(engine);
    }
    /* Before rows join the decoding requests. */
    for (int64_t k = 0; k < n_due; k++)
        engine_settle(engine, engine->due_now[k]);
    engine->n_ends = 0;
    int64_t n_sampled = 0;
    for (int64_t k = 0; k < engine->n_rows; k++) {
        Row *row = &engine->rows[k];
        Live *request = at(engine, row->live);
        request->n_computed += row->n_tokens;
        publish(engine, request);
        if (row->samples) {
            request->n_tokens++;
            request->last_token_s = end_s;
            stamp(engine, request, end_s);
            n_sampled++;
        } else {
            advance(engine, row->live);
        }
    }
    for (int64_t k = 0; k < n_due; k++) {
        int32_t live = engine->due_now[k];
        const Live *request = at(engine, live);
        if (request->n_computed == request->n_last || !request->has_answer)
            engine->due_now[n_milestones++] = live;
        else
            set_milestone(engine, live);
    }
    for (int64_t k = 0; k < engine->n_rows; k++)
        if (engine->rows[k].samples)
            advance(engine, engine->rows[k].live);
    for (int64_t k = 0; k < n_milestones; k++)
        advance(engine, engine->due_now[k]);
    for (int64_t k = 0; k < engine->n_rows; k++)
        if (engine->rows[k].samples)
            conclude(engine, engine->rows[k].live, end_s);
    for (int64_t k = 0; k < n_milestones; k++)
        conclude(engine, engine->due_now[k], end_s);
    engine->n_steps++;
    engine->n_sampled += n_sampled + n_decode;
    int64_t n_padding = engine->padding_tokens + engine->padding_rows;
    engine->n_padding += n_padding;
    if (engine->settings->mode == FIXED_BATCH)
        end_batch_step(engine, n_padding, end_s);
}
