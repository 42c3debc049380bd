#include "simulation.h"

#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

enum { ACT, START, DELIVER };

struct Simulation {
    Traffic *traffic;
    Engine *engines;
    int64_t n_replicas;
    Router router;
    double now_s;
    int phase, delivering; /* the engine whose step has ended, while its tokens are delivered */
    /* Heap of the engines that compute a step, by its end and their number. */
    int32_t *ending;
    int64_t n_ending;
    /* Requests in an engine, or on their way; `unused` is the first free of them. */
    Live *lives;
    int64_t n_lives, most_lives;
    int32_t unused, *live_of_row;
    Keys *keys; /* of requests, and of nodes of the prefix caches */
    /* The client: rows released, the first that may be in flight, and those in flight. */
    int64_t n_released, oldest, n_in_flight, n_ended, n_refused_late, most_refused_late;
    double timer_s, alarm_s, check_s; /* `alarm_s`: when the client acts by itself */
    bool is_over, is_closed; /* no request is in flight; all are released */
    int32_t *refused_late; /* at the end of the step during which they arrived */
    /* The router: the drawn replicas, and their loads. */
    int64_t lacking, *drawn, *ties, n_ties, picked, n_routed;
    double *loads, read_s;
    bool has_drawn, has_picked, has_windows;
    /* A client outside: the next instant at which it acts, and that before which acting has no
     * effect; whether it has acted since the core last returned. */
    bool is_driven, is_client_closed, has_acted;
    double next_s, quiet_s;
    const KeyRun *given; /* the texts of the request that it submits */
    int64_t n_given;
    jmp_buf *out;
};

/* --- memory */

void *grown(Simulation *simulation, void *array, int64_t n, int64_t *most, size_t size) {
    if (n <= *most)
        return array;
    int64_t more = *most < 8 ? 8 : 2 * *most;
    if (more < n)
        more = n;
    void *larger = realloc(array, (size_t)more * size);
    if (larger == NULL)
        longjmp(*simulation->out, NO_MEMORY);
    *most = more;
    return larger;
}

void *allotted(Simulation *simulation, size_t size) {
    void *memory = malloc(size);
    if (memory == NULL)
        longjmp(*simulation->out, NO_MEMORY);
    return memory;
}

Live *live_of(Simulation *simulation, int32_t live) { return &simulation->lives[live]; }
Traffic *traffic_of(Simulation *simulation) { return simulation->traffic; }

/* --- the keys of a prompt: `PromptIds` of loadgen/lab/prompt_ids.py */

static const uint64_t OWN = (uint64_t)1 << 63; /* the bit of texts that only one request has */

static Keys *allot_keys(Simulation *simulation, int64_t n_runs) {
    Keys *keys = allotted(simulation, sizeof(Keys) + (size_t)n_runs * sizeof(KeyRun));
    keys->n_runs = n_runs;
    keys->n_refs = 1;
    keys->before = NULL;
    keys->after = simulation->keys;
    if (keys->after != NULL)
        keys->after->before = keys;
    simulation->keys = keys;
    return keys;
}

static Keys *new_keys(Simulation *simulation, int64_t row, int64_t block_tokens) {
    if (simulation->is_driven) {
        Keys *keys = allot_keys(simulation, simulation->n_given);
        memcpy(keys->runs, simulation->given, (size_t)keys->n_runs * sizeof *keys->runs);
        return keys;
    }
    const Traffic *traffic = simulation->traffic;
    int64_t n_prefix = 0, n_runs = 1, id = 0, piece = -1;
    uint64_t tenant = 0;
    if (traffic->prefix_id != NULL) {
        tenant = (uint64_t)traffic->tenant[row] << 32;
        n_prefix = traffic->prefix_tokens[row];
        if (n_prefix > traffic->n_prompt[row] - 1)
            n_prefix = traffic->n_prompt[row] - 1;
        id = traffic->prefix_id[row];
        piece = id - traffic->first_piece;
    }
    bool is_piece = n_prefix && piece >= 0 && piece < traffic->n_pieces;
    if (n_prefix)
        n_runs++;
    if (is_piece)
        for (int64_t k = piece; traffic->piece_after[k]; n_runs++)
            k = traffic->piece_after[k] - traffic->first_piece;
    Keys *keys = allot_keys(simulation, n_runs);
    int64_t n = n_runs, start = n_prefix / block_tokens;
    /* The last text first. Of texts that begin in the same block, the last has it. */
    keys->runs[--n] = (KeyRun){start, OWN | (uint64_t)row};
    for (bool is_more = n_prefix; is_more;) {
        int64_t token = is_piece ? traffic->piece_start[piece] : 0;
        if (token < n_prefix && token / block_tokens < start) {
            start = token / block_tokens;
            keys->runs[--n] = (KeyRun){start, tenant | (uint64_t)id};
        }
        is_more = is_piece && traffic->piece_after[piece];
        if (is_more) {
            id = traffic->piece_after[piece];
            piece = id - traffic->first_piece;
        }
    }
    keys->n_runs = n_runs - n;
    memmove(keys->runs, keys->runs + n, (size_t)keys->n_runs * sizeof *keys->runs);
    return keys;
}

void keys_release(Simulation *simulation, Keys *keys) {
    if (--keys->n_refs)
        return;
    if (keys->before != NULL)
        keys->before->after = keys->after;
    else
        simulation->keys = keys->after;
    if (keys->after != NULL)
        keys->after->before = keys->before;
    free(keys);
}

static int32_t take_live(Simulation *simulation, int64_t row, const Settings *settings) {
    const Traffic *traffic = simulation->traffic;
    Keys *keys = NULL;
    if (settings->prefix_cache)
        keys = new_keys(simulation, row, settings->block_tokens);
    int32_t live = simulation->unused;
    if (live >= 0) {
        simulation->unused = simulation->lives[live].next;
    } else {
        simulation->lives = grown(
            simulation, simulation->lives, simulation->n_lives + 1, &simulation->most_lives,
            sizeof *simulation->lives
        );
        live = (int32_t)simulation->n_lives++;
        memset(&simulation->lives[live], 0, sizeof *simulation->lives);
    }
    Live *request = &simulation->lives[live];
    Runs runs = request->runs;
    memset(request, 0, sizeof *request);
    request->runs = runs;
    request->keys = keys;
    request->hits_at = -1;
    request->own_cause = -1;
    request->row = row;
    request->n_prompt = request->n_tokens = traffic->n_prompt[row];
    request->max_tokens = traffic->max_tokens[row];
    request->n_most = request->n_prompt + request->max_tokens - 1;
    request->n_last = request->n_prompt + traffic->n_output[row] - 1;
    return live;
}

void release(Simulation *simulation, int32_t live) {
    Live *request = &simulation->lives[live];
    if (simulation->live_of_row[request->row] == live)
        simulation->live_of_row[request->row] = -1;
    if (request->keys != NULL)
        keys_release(simulation, request->keys);
    request->where = FREE;
    request->next = simulation->unused;
    simulation->unused = live;
}

/* --- the heap of steps under way */

static bool is_before(const Simulation *simulation, int32_t a, int32_t b) {
    double a_s = simulation->engines[a].step_end_s, b_s = simulation->engines[b].step_end_s;
    return a_s < b_s || (a_s == b_s && a < b);
}

static void push_end(Simulation *simulation, int32_t number) {
    int32_t *heap = simulation->ending;
    int64_t k = simulation->n_ending++;
    while (k && is_before(simulation, number, heap[(k - 1) / 2])) {
        heap[k] = heap[(k - 1) / 2];
        k = (k - 1) / 2;
    }
    heap[k] = number;
}

static int32_t pop_end(Simulation *simulation) {
    int32_t *heap = simulation->ending, first = heap[0];
    int64_t n = --simulation->n_ending, k = 0;
    int32_t last = heap[n];
    for (;;) {
        int64_t child = 2 * k + 1;
        if (child >= n)
            break;
        if (child + 1 < n && is_before(simulation, heap[child + 1], heap[child]))
            child++;
        if (!is_before(simulation, heap[child], last))
            break;
        heap[k] = heap[child];
        k = child;
    }
    heap[k] = last;
    return first;
}

/* --- the requests that are present in an engine */

static void integrate(Engine *engine, double now_s) {
    engine->present_s += (double)engine->n_present * (now_s - engine->until_s);
    engine->until_s = now_s;
}

static void enter(Engine *engine, double arrived_s, double now_s) {
    integrate(engine, now_s);
    engine->present_s += now_s - arrived_s;
    engine->n_present++;
    engine->n_arrived++;
}

static void leave(Engine *engine, double now_s) {
    integrate(engine, now_s);
    engine->n_present--;
}

/* --- the router */

static double load_of(Simulation *simulation, int64_t number) {
    const Engine *engine = &simulation->engines[number];
    if (simulation->router.kind == FEWEST_REQUESTS)
        return (double)engine->n_present;
    int64_t n_waiting = engine->queued_tokens, n_blocks = engine->settings->n_blocks;
    for (int64_t k = 0; k < engine->n_inbox; k++)
        if (engine->inbox[k] >= 0)
            n_waiting += simulation->lives[engine->inbox[k]].n_tokens;
    double pressure = 1.0 - (double)engine->n_free / (double)n_blocks;
    return pressure + (double)n_waiting / (double)(n_blocks * engine->settings->block_tokens);
}

/* Draw replicas and compare their loads; returns the number of the replica, or -1 if `lacking`
 * numbers are needed first (`status`). */
static int64_t route(Simulation *simulation, int64_t *status) {
    int64_t n = simulation->n_replicas;
    if (simulation->router.kind == FIRST)
        return 0;
    if (simulation->router.kind == IN_TURN)
        return simulation->n_routed++ % n;
    if (simulation->router.kind == AT_RANDOM && !simulation->has_picked) {
        for (int64_t k = 0; k < n; k++)
            simulation->ties[k] = k;
        simulation->lacking = n;
        *status = PICK;
        return -1;
    }
    int64_t n_choices = simulation->router.n_choices;
    if (!n_choices || n_choices > n)
        n_choices = n;
    if (n_choices < n && !simulation->has_drawn) {
        simulation->lacking = n_choices;
        *status = DRAW;
        return -1;
    }
    if (!simulation->has_picked) {
        double stale_s = simulation->router.stale_s, now_s = simulation->now_s;
        if (stale_s != 0.0 && now_s - simulation->read_s >= stale_s) {
            for (int64_t k = 0; k < n; k++)
                simulation->loads[k] = load_of(simulation, k);
            simulation->read_s = now_s;
        }
        double smallest = INFINITY;
        simulation->n_ties = 0;
        for (int64_t k = 0; k < n_choices; k++) {
            int64_t number = n_choices < n ? simulation->drawn[k] : k;
            double load =
                stale_s != 0.0 ? simulation->loads[number] : load_of(simulation, number);
            if (load < smallest) {
                smallest = load;
                simulation->n_ties = 0;
            }
            if (load == smallest)
                simulation->ties[simulation->n_ties++] = number;
        }
        simulation->picked = 0;
        if (simulation->n_ties > 1) {
            simulation->lacking = simulation->n_ties;
            *status = PICK;
            return -1;
        }
    }
    simulation->has_drawn = simulation->has_picked = false;
    return simulation->ties[simulation->picked];
}

/* --- the client */

static void finish_row(Simulation *simulation, int64_t row, int outcome, double done_s) {
    Traffic *traffic = simulation->traffic;
    traffic->outcome[row] = (int8_t)outcome;
    traffic->done_s[row] = done_s;
    if (outcome == DROPPED)
        return;
    simulation->n_in_flight--;
    traffic->ended[simulation->n_ended++] = row;
}

static void answer(Simulation *simulation, int32_t live, int outcome, double now_s) {
    Traffic *traffic = simulation->traffic;
    const Live *request = &simulation->lives[live];
    int64_t row = request->row, account = traffic->account[row];
    traffic->n_received[row] = (int32_t)(request->n_tokens - request->n_prompt);
    traffic->n_preempted[row] = (int32_t)request->n_preempted;
    traffic->n_cached[row] = (int32_t)request->n_cached;
    if (account >= 0)
        for (int why = 0; why < N_WHYS; why++)
            traffic->waits[account * N_WHYS + why] += request->ticks[why];
    finish_row(simulation, row, outcome, now_s);
}

/* Take a request out of its engine, now or at the end of the step. */
static void withdraw(Simulation *simulation, int32_t live) {
    Live *request = &simulation->lives[live];
    Engine *engine = &simulation->engines[simulation->traffic->served_by[request->row]];
    request->is_withdrawn = true;
    simulation->live_of_row[request->row] = -1;
    if (request->where == OVER && !request->is_held) /* it ends with the step that is being delivered */
        return;
    if (engine->is_busy) {
        engine->inbox = grown(
            simulation, engine->inbox, engine->n_inbox + 1, &engine->most_inbox,
            sizeof *engine->inbox
        );
        engine->inbox[engine->n_inbox++] = ~live;
    } else {
        engine_end(engine, live);
        leave(engine, simulation->now_s);
        release(simulation, live);
    }
}

/* Cancel a request in flight. Tokens of `step_end_s` and later are not received. */
static void abort_row(Simulation *simulation, int64_t row, int outcome, double step_end_s) {
    Traffic *traffic = simulation->traffic;
    int32_t live = simulation->live_of_row[row];
    Live *request = &simulation->lives[live];
    Engine *engine = &simulation->engines[traffic->served_by[row]];
    if (request->where == DECODING)
        engine_settle(engine, live);
    int64_t n = request->n_tokens - request->n_prompt;
    if (engine->settings->answers_at_end)
        n = 0;
    if (n && request->last_token_s >= step_end_s)
        n--;
    if (!n)
        traffic->first_token_s[row] = NAN;
    traffic->n_received[row] = (int32_t)n;
    traffic->n_preempted[row] = (int32_t)request->n_preempted;
    traffic->n_cached[row] = (int32_t)request->n_cached;
    finish_row(simulation, row, outcome, simulation->timer_s);
    withdraw(simulation, live);
}

/* Pass a row to a replica; false: it is refused at once. */
static bool enter_row(Simulation *simulation, int64_t row, int64_t number) {
    Traffic *traffic = simulation->traffic;
    Engine *engine = &simulation->engines[number];
    int32_t live = take_live(simulation, row, engine->settings);
    double arrived_s = traffic->arrived_s[row], now_s = simulation->now_s;
    traffic->served_by[row] = (int32_t)number;
    traffic->outcome[row] = IN_FLIGHT;
    if (engine->is_busy) {
        engine->inbox = grown(
            simulation, engine->inbox, engine->n_inbox + 1, &engine->most_inbox,
            sizeof *engine->inbox
        );
        engine->inbox[engine->n_inbox++] = live;
        simulation->lives[live].where = INBOX;
    } else if (engine_accepts(engine, &simulation->lives[live])) {
        engine_admit(engine, live, arrived_s);
    } else {
        release(simulation, live);
        return false;
    }
    simulation->live_of_row[row] = live;
    enter(engine, arrived_s, now_s);
    return true;
}

/* Release the next row; false if the router lacks numbers. */
static bool release_row(Simulation *simulation, int64_t *status) {
    Traffic *traffic = simulation->traffic;
    int64_t row = simulation->n_released;
    if (simulation->n_in_flight >= traffic->max_in_flight) {
        simulation->n_released++;
        finish_row(simulation, row, DROPPED, simulation->timer_s);
        return true;
    }
    int64_t number = route(simulation, status);
    if (number < 0)
        return false;
    simulation->n_released++;
    simulation->n_in_flight++;
    if (!enter_row(simulation, row, number))
        finish_row(simulation, row, REFUSED, simulation->timer_s);
    return true;
}

/* The next instant at which something is due for the client. */
static double next_due_s(Simulation *simulation) {
    const Traffic *traffic = simulation->traffic;
    int64_t n_released = simulation->n_released;
    while (simulation->oldest < n_released &&
           traffic->outcome[simulation->oldest] != IN_FLIGHT)
        simulation->oldest++;
    double next_s = traffic->end_s;
    if (n_released < traffic->n && traffic->arrived_s[n_released] < next_s)
        next_s = traffic->arrived_s[n_released];
    if (simulation->oldest < n_released) {
        double late_s = traffic->arrived_s[simulation->oldest] + traffic->timeout_s;
        next_s = late_s < next_s ? late_s : next_s;
    }
    return next_s;
}

static double client_next_s(Simulation *simulation) {
    if (simulation->is_driven)
        return simulation->next_s;
    if (simulation->n_released == simulation->traffic->n && !simulation->n_in_flight)
        simulation->is_over = true;
    return simulation->is_over ? INFINITY : simulation->alarm_s;
}

/* Everything that is due by `now_s`, each at its own instant; false if the router lacks numbers. */
static bool act(Simulation *simulation, double step_end_s, int64_t *status) {
    Traffic *traffic = simulation->traffic;
    while (client_next_s(simulation) <= simulation->now_s) {
        if (simulation->alarm_s > simulation->timer_s)
            simulation->timer_s = simulation->alarm_s;
        double timer_s = simulation->timer_s;
        while (simulation->n_released < traffic->n &&
               traffic->arrived_s[simulation->n_released] <= timer_s)
            if (!release_row(simulation, status))
                return false;
        for (int64_t row = simulation->oldest; row < simulation->n_released; row++) {
            if (traffic->outcome[row] != IN_FLIGHT)
                continue;
            if (traffic->arrived_s[row] + traffic->timeout_s > timer_s)
                break;
            abort_row(simulation, row, TIMED_OUT, step_end_s);
        }
        if (timer_s >= traffic->end_s) {
            for (int64_t row = simulation->oldest; row < simulation->n_released; row++)
                if (traffic->outcome[row] == IN_FLIGHT)
                    abort_row(simulation, row, CANCELLED, step_end_s);
            simulation->is_over = true;
        }
        simulation->alarm_s = next_due_s(simulation);
    }
    if (simulation->now_s > simulation->timer_s)
        simulation->timer_s = simulation->now_s;
    return true;
}

/* --- steps */

/* Start a step of each engine that is ready; false if it lacks something. */
static bool start_steps(Simulation *simulation, int64_t *status) {
    for (int64_t number = 0; number < simulation->n_replicas; number++) {
        Engine *engine = &simulation->engines[number];
        if (engine->is_busy || !engine_has_work(engine))
            continue;
        if (engine->settings->varies && engine->n_taken == engine->n_drawn) {
            simulation->lacking = number;
            *status = STEPS;
            return false;
        }
        engine->is_source_closed = simulation->is_closed;
        if (!engine_plan(engine, simulation->now_s)) {
            if (engine->n_held) { /* the last of their batch was cancelled */
                engine_deliver(engine, simulation->now_s);
                for (int64_t k = 0; k < engine->n_ends; k++)
                    leave(engine, simulation->now_s);
                simulation->delivering = (int)number;
                simulation->phase = DELIVER;
                return true;
            }
            if (engine->wait_until_s != INFINITY)
                continue;
            *status = STUCK;
            return false;
        }
        double duration_s = engine_step_s(engine);
        if (isnan(duration_s)) {
            simulation->lacking = number;
            *status = UNMEASURED;
            return false;
        }
        engine->busy_s += duration_s;
        engine->step_end_s = simulation->now_s + duration_s;
        engine->is_busy = true;
        push_end(simulation, (int32_t)number);
    }
    return true;
}

/* The first instant until which a mode waits on purpose. */
static double next_wait_s(const Simulation *simulation) {
    double next_s = INFINITY;
    for (int64_t number = 0; simulation->has_windows && number < simulation->n_replicas; number++) {
        const Engine *engine = &simulation->engines[number];
        bool is_waiting = !engine->is_busy && engine_has_work(engine);
        if (is_waiting && engine->wait_until_s < next_s)
            next_s = engine->wait_until_s;
    }
    return next_s;
}

/* Admit and cancel what arrived during a step. */
static void read_inbox(Simulation *simulation, Engine *engine) {
    simulation->n_refused_late = 0;
    for (int64_t k = 0; k < engine->n_inbox; k++) {
        bool is_cancel = engine->inbox[k] < 0;
        int32_t live = is_cancel ? ~engine->inbox[k] : engine->inbox[k];
        Live *request = &simulation->lives[live];
        if (is_cancel) {
            if (request->where == OVER && !request->is_held) /* released when the step is delivered */
                continue;
            engine_end(engine, live);
            leave(engine, simulation->now_s);
            release(simulation, live);
        } else if (engine_accepts(engine, request)) {
            engine_admit(engine, live, simulation->traffic->arrived_s[request->row]);
        } else {
            leave(engine, simulation->now_s);
            request->where = OVER;
            simulation->refused_late = grown(
                simulation, simulation->refused_late, simulation->n_refused_late + 1,
                &simulation->most_refused_late, sizeof *simulation->refused_late
            );
            simulation->refused_late[simulation->n_refused_late++] = live;
        }
    }
    engine->n_inbox = 0;
}

static void end_step(Simulation *simulation) {
    int32_t number = pop_end(simulation);
    Engine *engine = &simulation->engines[number];
    if (engine->step_end_s > simulation->now_s)
        simulation->now_s = engine->step_end_s;
    engine->is_busy = false;
    engine_commit(engine, simulation->now_s);
    for (int64_t k = 0; k < engine->n_ends; k++)
        leave(engine, simulation->now_s);
    read_inbox(simulation, engine);
    simulation->delivering = number;
}

/* The answers that end with the step, and the refusals of requests that arrived during it. */
static void answer_all(Simulation *simulation) {
    const Engine *engine = &simulation->engines[simulation->delivering];
    for (int64_t k = 0; k < engine->n_ends; k++) {
        End end = engine->ends[k];
        if (!simulation->lives[end.live].is_withdrawn)
            answer(simulation, end.live, end.outcome, simulation->now_s);
    }
    for (int64_t k = 0; k < simulation->n_refused_late; k++) {
        const Live *request = &simulation->lives[simulation->refused_late[k]];
        if (!request->is_withdrawn)
            finish_row(simulation, request->row, REFUSED, simulation->timer_s);
    }
}

static void release_all(Simulation *simulation) {
    Engine *engine = &simulation->engines[simulation->delivering];
    for (int64_t k = 0; k < engine->n_ends; k++)
        release(simulation, engine->ends[k].live);
    for (int64_t k = 0; k < simulation->n_refused_late; k++)
        release(simulation, simulation->refused_late[k]);
    engine->n_ends = simulation->n_refused_late = 0;
}

/* Deliver a step to the client outside; false: it must receive the step first. */
static bool deliver_outside(Simulation *simulation) {
    const Engine *engine = &simulation->engines[simulation->delivering];
    bool is_of_interest = engine->n_ends || simulation->n_refused_late ||
                          simulation->next_s <= simulation->now_s;
    if (is_of_interest && !simulation->has_acted) {
        answer_all(simulation);
        return false;
    }
    simulation->has_acted = false;
    release_all(simulation);
    return true;
}

static int64_t run(Simulation *simulation, int64_t n_steps) {
    int64_t status = DONE;
    bool is_single = simulation->n_replicas == 1;
    for (;;) {
        if (simulation->phase == DELIVER && simulation->is_driven) {
            if (!deliver_outside(simulation))
                return RECEIVE;
            simulation->phase = ACT;
        } else if (simulation->phase == DELIVER) {
            if (!act(simulation, simulation->now_s, &status))
                return status;
            answer_all(simulation);
            release_all(simulation);
            simulation->phase = ACT;
        }
        if (simulation->phase == ACT) {
            if (n_steps <= 0)
                return PAUSED;
            if (simulation->is_driven) {
                if (!simulation->has_acted && simulation->now_s >= simulation->quiet_s)
                    return CLIENT_ACTS;
                simulation->has_acted = false;
                simulation->is_closed = simulation->is_client_closed;
                simulation->phase = START;
                continue;
            }
            if (!act(simulation, INFINITY, &status))
                return status;
            if (simulation->now_s >= simulation->check_s)
                return CHECK;
            bool is_all = simulation->n_released == simulation->traffic->n;
            simulation->is_closed = is_all || simulation->is_over;
            simulation->phase = START;
        }
        if (!start_steps(simulation, &status))
            return status;
        if (simulation->phase == DELIVER)
            continue;
        double next_s = client_next_s(simulation), wait_s = next_wait_s(simulation);
        next_s = wait_s < next_s ? wait_s : next_s;
        if (!simulation->n_ending && next_s == INFINITY)
            return DONE;
        double end_s = INFINITY;
        if (simulation->n_ending)
            end_s = simulation->engines[simulation->ending[0]].step_end_s;
        if (simulation->n_ending && (is_single || end_s <= next_s)) {
            end_step(simulation);
            simulation->phase = DELIVER;
        } else {
            if (next_s > simulation->now_s)
                simulation->now_s = next_s;
            simulation->phase = ACT;
        }
        n_steps--;
    }
}

/* --- the interface */

Simulation *simulation_new(
    Traffic *traffic, const Settings *settings, int64_t n_replicas, const Router *router
) {
    size_t n = (size_t)n_replicas;
    Simulation *simulation = calloc(1, sizeof *simulation);
    if (simulation == NULL)
        return NULL;
    simulation->traffic = traffic;
    simulation->router = *router;
    simulation->n_replicas = n_replicas;
    simulation->unused = -1;
    simulation->read_s = -INFINITY;
    simulation->check_s = INFINITY;
    simulation->engines = calloc(n, sizeof *simulation->engines);
    simulation->ending = calloc(n, sizeof *simulation->ending);
    simulation->drawn = calloc(n, sizeof *simulation->drawn);
    simulation->ties = calloc(n, sizeof *simulation->ties);
    simulation->loads = calloc(n, sizeof *simulation->loads);
    simulation->live_of_row = malloc(
        ((size_t)traffic->n + 1) * sizeof *simulation->live_of_row
    );
    if (!simulation->engines || !simulation->ending || !simulation->drawn || !simulation->ties ||
        !simulation->loads || !simulation->live_of_row) {
        simulation_free(simulation);
        return NULL;
    }
    for (int64_t k = 0; k < traffic->n; k++)
        simulation->live_of_row[k] = -1;
    for (int64_t k = 0; k < n_replicas; k++) {
        engine_init(&simulation->engines[k], &settings[k], simulation);
        simulation->has_windows = simulation->has_windows || settings[k].mode == FIXED_BATCH;
    }
    return simulation;
}

void simulation_free(Simulation *simulation) {
    for (int64_t k = 0; simulation->engines && k < simulation->n_replicas; k++)
        engine_free(&simulation->engines[k]);
    for (int64_t k = 0; k < simulation->n_lives; k++)
        free(simulation->lives[k].runs.runs);
    for (Keys *keys = simulation->keys, *next; keys != NULL; keys = next) {
        next = keys->after;
        free(keys);
    }
    free(simulation->engines);
    free(simulation->ending);
    free(simulation->drawn);
    free(simulation->ties);
    free(simulation->loads);
    free(simulation->live_of_row);
    free(simulation->lives);
    free(simulation->refused_late);
    free(simulation);
}

int64_t simulation_run(Simulation *simulation, int64_t n_steps) {
    jmp_buf out;
    simulation->out = &out;
    int status = setjmp(out);
    return status ? status : run(simulation, n_steps);
}

int64_t simulation_lacking(const Simulation *simulation) { return simulation->lacking; }

void simulation_answer(Simulation *simulation, const int64_t *numbers) {
    if (simulation->router.n_choices && !simulation->has_drawn &&
        simulation->router.n_choices < simulation->n_replicas) {
        memcpy(
            simulation->drawn, numbers, (size_t)simulation->lacking * sizeof *simulation->drawn
        );
        simulation->has_drawn = true;
    } else {
        simulation->picked = numbers[0];
        simulation->has_picked = true;
    }
}

void simulation_vary(
    Simulation *simulation, int64_t number, const double *ratios, const double *pauses_s,
    int64_t n
) {
    Engine *engine = &simulation->engines[number];
    engine->ratios = ratios;
    engine->pauses_s = pauses_s;
    engine->n_taken = 0;
    engine->n_drawn = n;
}

void simulation_check_at(Simulation *simulation, double check_s) {
    simulation->check_s = check_s;
}

void simulation_stop(Simulation *simulation, double drain_s) {
    Traffic *traffic = simulation->traffic;
    double end_s = simulation->timer_s + drain_s;
    if (end_s < traffic->end_s)
        traffic->end_s = end_s;
    traffic->n = simulation->n_released;
    simulation->alarm_s = simulation->timer_s;
    simulation->check_s = INFINITY;
}

double simulation_now_s(const Simulation *simulation) { return simulation->now_s; }
int64_t simulation_n_released(const Simulation *simulation) { return simulation->n_released; }
int64_t simulation_n_in_flight(const Simulation *simulation) { return simulation->n_in_flight; }
int64_t simulation_n_ended(const Simulation *simulation) { return simulation->n_ended; }

void simulation_totals(Simulation *simulation, int64_t number, Totals *totals) {
    Engine *engine = &simulation->engines[number];
    integrate(engine, simulation->now_s);
    *totals = (Totals){
        engine->n_arrived, engine->n_steps,   engine->n_preemptions, engine->n_padding,
        engine->n_sampled, engine->n_cached,  engine->present_s, engine->busy_s,
    };
}

void simulation_acted(
    Simulation *simulation, double next_s, double quiet_s, int64_t is_closed
) {
    simulation->is_driven = simulation->has_acted = true;
    simulation->next_s = next_s;
    simulation->quiet_s = quiet_s;
    simulation->is_client_closed = is_closed;
}

int64_t simulation_submit(
    Simulation *simulation, int64_t row, const KeyRun *texts, int64_t n_texts
) {
    jmp_buf out;
    simulation->out = &out;
    simulation->given = texts;
    simulation->n_given = n_texts;
    int status = setjmp(out);
    if (status)
        return status;
    int64_t lacks = DONE, number = route(simulation, &lacks);
    if (number < 0)
        return lacks;
    return enter_row(simulation, row, number) ? DONE : REFUSED_AT_ONCE;
}

int64_t simulation_cancel(Simulation *simulation, int64_t row) {
    jmp_buf out;
    simulation->out = &out;
    int status = setjmp(out);
    if (status)
        return status;
    if (simulation->live_of_row[row] >= 0)
        withdraw(simulation, simulation->live_of_row[row]);
    return DONE;
}

int64_t simulation_n_tokens(Simulation *simulation, int64_t row) {
    const Traffic *traffic = simulation->traffic;
    int32_t live = simulation->live_of_row[row];
    if (live < 0)
        return traffic->n_received[row];
    Engine *engine = &simulation->engines[traffic->served_by[row]];
    const Live *request = &simulation->lives[live];
    if (request->where == DECODING)
        engine_settle(engine, live);
    if (engine->settings->answers_at_end && (request->where != OVER || request->is_held))
        return 0;
    return request->n_tokens - request->n_prompt;
}

void simulation_delivered(const Simulation *simulation, int64_t *rows, int64_t *counts) {
    const Engine *engine = &simulation->engines[simulation->delivering];
    int64_t n = 0;
    for (int64_t k = 0; k < engine->n_ends; k++) {
        const Live *request = &simulation->lives[engine->ends[k].live];
        if (!request->is_withdrawn)
            rows[n++] = request->row;
    }
    counts[0] = n;
    for (int64_t k = 0; k < simulation->n_refused_late; k++) {
        const Live *request = &simulation->lives[simulation->refused_late[k]];
        if (!request->is_withdrawn)
            rows[n++] = request->row;
    }
    counts[1] = n - counts[0];
}

void simulation_shape(const Simulation *simulation, Shape *shape) {
    *shape = simulation->engines[simulation->lacking].shape;
}

void simulation_sizes(int64_t *sizes) {
    sizes[0] = sizeof(Traffic);
    sizes[1] = sizeof(Settings);
    sizes[2] = sizeof(Router);
    sizes[3] = sizeof(Totals);
    sizes[4] = sizeof(Shape);
}
