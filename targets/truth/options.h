/* What the server was told to do, from its command line. Times are nanoseconds, shares 0 to 1. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#define MOST_FAILURES 16

enum role { ROLE_FIRST, ROLE_EARLY, ROLE_OFF };
enum failure_kind { FAIL_NOT, FAIL_STATUS, FAIL_CUT, FAIL_HANG, FAIL_INBAND, FAIL_RESET };

/* What goes wrong with a share of the requests; `name` is the outcome in the log. */
struct failure {
    enum failure_kind kind;
    int status;
    double share;
    char name[8];
};

struct options {
    int port, cpu, default_tokens, burst, tokens_per_event, split_bytes, requests_per_connection;
    int parent_pid, stall_every;
    uint64_t ttft_ns, itl_ns, usage_delay_ns, split_gap_ns, spin_ns, limit_ns, seed, stall_ns;
    enum role role;
    bool sends_usage, sends_done, finish_rides;
    double refuse_share, reset_share;
    struct failure failures[MOST_FAILURES];
    int n_failures;
    const char *log_path, *token_log_path;
};

/* Exits with 2 and one line on stderr for what cannot be meant, with 0 after --help. */
struct options parse_options(int n_words, char **words);

/* The failure that the request with this number meets, or NULL. */
const struct failure *failure_of(const struct options *options, uint64_t number);

#endif
