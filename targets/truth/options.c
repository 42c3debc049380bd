#include "options.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "basics.h"

static const char *HELP =
    "truthd: an OpenAI-compatible server of scripted streams that logs what really happened.\n"
    "\n"
    "  --port N                  port on 127.0.0.1; 0 (the default) takes a free one\n"
    "  --ttft-s S                time to first token (0.05)\n"
    "  --itl-s S                 time per token after it (0.01); 0: as fast as the client reads\n"
    "  --default-tokens N        output tokens where a request does not say (64)\n"
    "  --stall-every N           one step in N of all streams is --stall-s longer (0: none); first\n"
    "                            tokens, which are steps of their own, are not held back\n"
    "  --stall-s S               how much longer (0)\n"
    "  --burst N                 events per write (1); write j is due ttft + j * burst events later\n"
    "  --tokens-per-event N      tokens in one event (1)\n"
    "  --role first|early|off    the role-only chunk: before the first token, with the head, never\n"
    "  --finish own|merged       finish_reason in a chunk of its own, or with the last token\n"
    "  --usage on|off            off: never, whatever was asked for\n"
    "  --usage-delay-s S         the usage chunk and the end come so long after the last token\n"
    "  --done on|off             off: the stream ends without [DONE]\n"
    "  --split-bytes N           cut every write into pieces of 1 to N bytes, seeded (0: do not)\n"
    "  --split-gap-s S           wait so long between two pieces (0)\n"
    "  --refuse SHARE            refuse connections (port closed) in this share of the time\n"
    "  --reset SHARE             accept and reset this share of connections\n"
    "  --fail KIND:SHARE         for a share of requests: an HTTP status, cut, hang, inband, reset\n"
    "  --requests-per-connection N   close after so many (0: never)\n"
    "  --seed N                  which requests fail, where writes are cut (0)\n"
    "  --cpu N                   run on this core only\n"
    "  --spin-s S                poll instead of sleeping so long before a deadline (0.00006)\n"
    "  --log FILE                CSV, a row per request, written at the end\n"
    "  --token-log FILE          the instant of every token's write, nanoseconds, u64\n"
    "  --max-seconds S           end after so long (3600)\n"
    "  --parent-pid PID          end when this parent has gone\n";

static _Noreturn void refuse(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("error: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(2);
}

static double number_of(const char *name, const char *text, double least, double most) {
    char *end;
    errno = 0;
    double number = strtod(text, &end);
    if (errno || end == text || *end || !isfinite(number) || number < least || number > most)
        refuse("%s %s: expected a number from %g to %g", name, text, least, most);
    return number;
}

static int integer_of(const char *name, const char *text, int least) {
    double number = number_of(name, text, least, 2147483647.0);
    if (number != floor(number)) refuse("%s %s: expected an integer", name, text);
    return (int)number;
}

static uint64_t ns_of(const char *name, const char *text) {
    return (uint64_t)llround(number_of(name, text, 0, 1e6) * 1e9);
}

/* Which of `words` (ended by NULL) `text` is. */
static int choice_of(const char *name, const char *text, const char *const *words) {
    for (int i = 0; words[i] != NULL; i++)
        if (strcmp(text, words[i]) == 0) return i;
    char known[64] = "";
    for (int i = 0; words[i] != NULL; i++) {
        if (i > 0) strcat(known, ", ");
        strcat(known, words[i]);
    }
    refuse("%s %s: expected one of %s", name, text, known);
}

static struct failure failure_from(const char *name, const char *text) {
    static const char *const kinds[] = {"cut", "hang", "inband", "reset", NULL};
    static const enum failure_kind meant[] = {FAIL_CUT, FAIL_HANG, FAIL_INBAND, FAIL_RESET};
    struct failure failure = {.share = 1};
    const char *colon = strchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : strlen(text);
    if (length == 0 || length >= sizeof failure.name) refuse("%s %s: KIND:SHARE", name, text);
    memcpy(failure.name, text, length);
    if (colon) failure.share = number_of(name, colon + 1, 0, 1);
    for (int i = 0; kinds[i] != NULL; i++)
        if (strcmp(failure.name, kinds[i]) == 0) failure.kind = meant[i];
    if (failure.kind == FAIL_NOT) {
        failure.kind = FAIL_STATUS;
        failure.status = (int)number_of(name, failure.name, 400, 599);
    }
    return failure;
}

static void set(struct options *o, const char *name, const char *value) {
    static const char *const roles[] = {"first", "early", "off", NULL};
    static const char *const finishes[] = {"own", "merged", NULL};
    static const char *const on_off[] = {"on", "off", NULL};
    if (!strcmp(name, "--port")) o->port = (int)number_of(name, value, 0, 65535);
    else if (!strcmp(name, "--ttft-s")) o->ttft_ns = ns_of(name, value);
    else if (!strcmp(name, "--itl-s")) o->itl_ns = ns_of(name, value);
    else if (!strcmp(name, "--stall-every")) o->stall_every = integer_of(name, value, 0);
    else if (!strcmp(name, "--stall-s")) o->stall_ns = ns_of(name, value);
    else if (!strcmp(name, "--default-tokens")) o->default_tokens = integer_of(name, value, 1);
    else if (!strcmp(name, "--burst")) o->burst = integer_of(name, value, 1);
    else if (!strcmp(name, "--tokens-per-event")) o->tokens_per_event = integer_of(name, value, 1);
    else if (!strcmp(name, "--role")) o->role = (enum role)choice_of(name, value, roles);
    else if (!strcmp(name, "--finish")) o->finish_rides = choice_of(name, value, finishes) == 1;
    else if (!strcmp(name, "--usage")) o->sends_usage = choice_of(name, value, on_off) == 0;
    else if (!strcmp(name, "--usage-delay-s")) o->usage_delay_ns = ns_of(name, value);
    else if (!strcmp(name, "--done")) o->sends_done = choice_of(name, value, on_off) == 0;
    else if (!strcmp(name, "--split-bytes")) o->split_bytes = integer_of(name, value, 0);
    else if (!strcmp(name, "--split-gap-s")) o->split_gap_ns = ns_of(name, value);
    else if (!strcmp(name, "--refuse")) o->refuse_share = number_of(name, value, 0, 1);
    else if (!strcmp(name, "--reset")) o->reset_share = number_of(name, value, 0, 1);
    else if (!strcmp(name, "--requests-per-connection"))
        o->requests_per_connection = integer_of(name, value, 0);
    else if (!strcmp(name, "--seed")) o->seed = (uint64_t)integer_of(name, value, 0);
    else if (!strcmp(name, "--cpu")) o->cpu = integer_of(name, value, 0);
    else if (!strcmp(name, "--spin-s")) o->spin_ns = ns_of(name, value);
    else if (!strcmp(name, "--log")) o->log_path = value;
    else if (!strcmp(name, "--token-log")) o->token_log_path = value;
    else if (!strcmp(name, "--max-seconds")) o->limit_ns = ns_of(name, value);
    else if (!strcmp(name, "--parent-pid")) o->parent_pid = integer_of(name, value, 1);
    else if (!strcmp(name, "--fail")) {
        if (o->n_failures == MOST_FAILURES) refuse("--fail: at most %d of them", MOST_FAILURES);
        o->failures[o->n_failures++] = failure_from(name, value);
    } else refuse("unknown option %s; --help lists them", name);
}

struct options parse_options(int n_words, char **words) {
    struct options options = {
        .cpu = -1, .default_tokens = 64, .burst = 1, .tokens_per_event = 1,
        .ttft_ns = 50000000, .itl_ns = 10000000, .spin_ns = 60000, .limit_ns = 3600 * SECOND_NS,
        .sends_usage = true, .sends_done = true,
    };
    for (int i = 1; i < n_words; i += 2) {
        if (!strcmp(words[i], "--help")) {
            fputs(HELP, stdout);
            exit(0);
        }
        if (i + 1 == n_words) refuse("%s: a value is missing", words[i]);
        set(&options, words[i], words[i + 1]);
    }
    if (options.stall_every && !options.itl_ns)
        refuse("--stall-every %d: needs steps, and --itl-s is 0", options.stall_every);
    double total = 0;
    for (int i = 0; i < options.n_failures; i++) total += options.failures[i].share;
    if (total > 1 + 1e-9) refuse("--fail: the shares add up to %g; at most 1", total);
    return options;
}

const struct failure *failure_of(const struct options *options, uint64_t number) {
    double left = chance(options->seed, number);
    for (int i = 0; i < options->n_failures; i++) {
        left -= options->failures[i].share;
        if (left < 0) return &options->failures[i];
    }
    return NULL;
}
