/* What really happened: a row per request, the instant of every token, how late we were. */
#ifndef RECORD_H
#define RECORD_H

#include <stdbool.h>
#include <stdint.h>

#include "options.h"

/* Instants are CLOCK_MONOTONIC nanoseconds; 0: it never came to that. */
struct row {
    int64_t seq;               /* the request's x-seq header, -1 without one */
    uint32_t connection;
    bool is_chat;
    char outcome[8];           /* ok, aborted (by the client), or a failure's name */
    int asked_tokens, sent_tokens, prompt_tokens;
    uint64_t arrived_ns;       /* first byte read */
    uint64_t read_ns;          /* last byte read */
    uint64_t due_ns;           /* when the first token was due */
    uint64_t first_ns;         /* just before the first token was written */
    uint64_t first_written_ns; /* its last byte was handed to the kernel */
    uint64_t last_ns, last_written_ns;
    uint64_t done_ns;
    uint64_t late_max_ns, late_sum_ns;
    uint64_t token_offset;     /* of its first token in the token log */
    int blocked;               /* writes the socket would not take at once */
};

struct record;

struct record *record_new(const struct options *options);
/* The number of a new, empty row. Pointers to rows move when one is added. */
uint32_t record_add(struct record *record);
struct row *record_row(struct record *record, uint32_t number);
/* Room in the token log for the tokens of a row. */
void record_reserve_tokens(struct record *record, struct row *row);
/* Tokens [first, first + n) of a row are written at `at_ns`; they were due at `due_ns`, 0: as soon as
 * the client takes them. */
void record_tokens(struct record *record, struct row *row, int first, int n, uint64_t at_ns,
                   uint64_t due_ns);
void record_connection(struct record *record, bool is_reset);
/* Writes the logs, and one line of totals to stderr. Returns whether every file could be written. */
bool record_write(const struct record *record);

#endif
