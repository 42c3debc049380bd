/* Engines in virtual time under open-loop traffic: the loop of reference_engine/simulator.py with
 * the client of loadgen/lab/virtual_client.py.
 *
 *     simulation = simulation_new(traffic, settings, n_replicas, router);
 *     while ((status = simulation_run(simulation, n_steps)) != DONE)
 *         …                       answer what is lacking, or give up
 *     simulation_free(simulation);
 */
#ifndef SIMULATION_H
#define SIMULATION_H

#include "engine.h"

/* DRAW: `simulation_lacking` distinct numbers of replicas are needed; PICK: one of so many; STEPS:
 * more times of steps for the replica `simulation_lacking`. CHECK: the client has acted at the
 * instant of `simulation_check_at`, or soon after it. UNMEASURED: the next step of the replica
 * `simulation_lacking` is outside the sizes for which its costs hold. STUCK, NO_MEMORY
 * and UNMEASURED end the simulation. The others are for a client outside (`simulation_acted`). */
enum {
    DONE,
    PAUSED,
    DRAW,
    PICK,
    STEPS,
    CHECK,
    STUCK,
    NO_MEMORY,
    UNMEASURED,
    CLIENT_ACTS,
    RECEIVE,
    REFUSED_AT_ONCE
};
enum { FIRST, FEWEST_REQUESTS, LEAST_KV, IN_TURN, AT_RANDOM };

typedef struct {
    int64_t kind, n_choices; /* `n_choices` 0: all replicas */
    double stale_s;
} Router;

typedef struct Simulation Simulation;

/* The totals of a replica, see `ReplicaTotals` of library.py. */
typedef struct {
    int64_t n_received, n_steps, n_preemptions, n_padding, n_sampled, n_cached;
    double request_s, busy_s;
} Totals;

Simulation *simulation_new(
    Traffic *traffic, const Settings *settings, int64_t n_replicas, const Router *router
);
void simulation_free(Simulation *simulation);
int64_t simulation_run(Simulation *simulation, int64_t n_steps);
int64_t simulation_lacking(const Simulation *simulation);
void simulation_answer(Simulation *simulation, const int64_t *numbers);
/* The ratios and pauses (s) of the next steps of a replica; they must stay where they are. */
void simulation_vary(
    Simulation *simulation, int64_t number, const double *ratios, const double *pauses_s,
    int64_t n
);
/* Return the next time the client acts at `check_s` or later. */
void simulation_check_at(Simulation *simulation, double check_s);
/* Release nothing more; requests in flight have `drain_s` to end. */
void simulation_stop(Simulation *simulation, double drain_s);
/* --- a client outside, in place of the open loop: it submits rows in any order, each once.
 *
 * Between two calls of `simulation_run` it acts, and states when it acts next and before which
 * instant acting has no effect. CLIENT_ACTS: that instant has come. RECEIVE: a step has ended with
 * which requests ended or were refused, or the client acts during it. */
void simulation_acted(
    Simulation *simulation, double next_s, double quiet_s, int64_t is_closed
);
/* Submit a row, whose arrays are filled in and whose prompt consists of these texts (from which
 * block on). DRAW, PICK: submit again when they are answered; REFUSED_AT_ONCE; NO_MEMORY. */
int64_t simulation_submit(
    Simulation *simulation, int64_t row, const KeyRun *texts, int64_t n_texts
);
int64_t simulation_cancel(Simulation *simulation, int64_t row);
/* The tokens of a row so far; their instants are in `times_s`. */
int64_t simulation_n_tokens(Simulation *simulation, int64_t row);
/* The rows that ended with the step, then those that were refused; `counts` are how many of each. */
void simulation_delivered(const Simulation *simulation, int64_t *rows, int64_t *counts);
double simulation_now_s(const Simulation *simulation);
int64_t simulation_n_released(const Simulation *simulation);
int64_t simulation_n_in_flight(const Simulation *simulation);
int64_t simulation_n_ended(const Simulation *simulation);
void simulation_totals(Simulation *simulation, int64_t number, Totals *totals);
/* The step that is not measured. */
void simulation_shape(const Simulation *simulation, Shape *shape);
/* Bytes of Traffic, Settings, Router, Totals and Shape, by which a caller checks its own declarations. */
void simulation_sizes(int64_t *sizes);

#endif
