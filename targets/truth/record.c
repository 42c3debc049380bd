#include "record.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "basics.h"

#define BIN_NS 1000
#define N_BINS 20001 /* the last one: 20 ms or more */

struct record {
    const struct options *options;
    struct row *rows;
    size_t n_rows, row_capacity;
    uint64_t *tokens;
    size_t n_tokens, token_capacity;
    uint64_t late_bins[N_BINS], n_late, late_sum_ns, late_max_ns;
    uint64_t n_connections, n_reset, started_ns;
};

struct record *record_new(const struct options *options) {
    struct record *record = resized(NULL, sizeof *record);
    memset(record, 0, sizeof *record);
    record->options = options;
    record->started_ns = now_ns();
    return record;
}

uint32_t record_add(struct record *record) {
    record->rows =
        grown(record->rows, &record->row_capacity, record->n_rows + 1, sizeof *record->rows);
    return (uint32_t)record->n_rows++;
}

struct row *record_row(struct record *record, uint32_t number) { return &record->rows[number]; }

void record_reserve_tokens(struct record *record, struct row *row) {
    row->token_offset = record->n_tokens;
    if (record->options->token_log_path == NULL) return;
    record->n_tokens += (size_t)row->asked_tokens;
    record->tokens = grown(record->tokens, &record->token_capacity, record->n_tokens,
                           sizeof *record->tokens);
}

static void note_lateness(struct record *record, struct row *row, uint64_t at_ns,
                          uint64_t due_ns) {
    uint64_t late_ns = at_ns > due_ns ? at_ns - due_ns : 0, bin = late_ns / BIN_NS;
    record->late_bins[bin < N_BINS ? bin : N_BINS - 1]++;
    record->n_late++;
    record->late_sum_ns += late_ns;
    if (late_ns > record->late_max_ns) record->late_max_ns = late_ns;
    row->late_sum_ns += late_ns;
    if (late_ns > row->late_max_ns) row->late_max_ns = late_ns;
}

void record_tokens(struct record *record, struct row *row, int first, int n, uint64_t at_ns,
                   uint64_t due_ns) {
    if (due_ns) note_lateness(record, row, at_ns, due_ns);
    row->sent_tokens = first + n;
    if (record->options->token_log_path == NULL) return;
    for (int i = first; i < first + n; i++) record->tokens[row->token_offset + (size_t)i] = at_ns;
}

void record_connection(struct record *record, bool is_reset) {
    record->n_connections++;
    record->n_reset += is_reset;
}

/* Lateness in microseconds below which a share of all writes was. */
static double late_us(const struct record *record, double share) {
    uint64_t wanted = (uint64_t)(share * (double)record->n_late), seen = 0;
    for (int bin = 0; bin < N_BINS; bin++) {
        seen += record->late_bins[bin];
        if (seen > wanted) return bin * (BIN_NS / 1e3);
    }
    return (double)record->late_max_ns / 1e3;
}

static void tell(const struct record *record) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu_s = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                   (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
    fprintf(stderr,
            "{\"requests\": %zu, \"connections\": %" PRIu64 ", \"reset\": %" PRIu64
            ", \"paced_writes\": %" PRIu64 ", \"late_us_mean\": %.1f, \"late_us_p50\": %.0f, "
            "\"late_us_p99\": %.0f, \"late_us_max\": %.0f, \"cpu_s\": %.3f, \"wall_s\": %.3f}\n",
            record->n_rows, record->n_connections, record->n_reset, record->n_late,
            record->n_late ? (double)record->late_sum_ns / 1e3 / (double)record->n_late : 0.0,
            late_us(record, 0.5), late_us(record, 0.99), (double)record->late_max_ns / 1e3, cpu_s,
            (double)(now_ns() - record->started_ns) * 1e-9);
}

static bool write_rows(const struct record *record, FILE *file) {
    fputs("seq,number,connection,api,outcome,asked_tokens,sent_tokens,prompt_tokens,arrived_ns,"
          "read_ns,due_ns,first_ns,first_written_ns,last_ns,last_written_ns,done_ns,late_max_ns,"
          "late_sum_ns,token_offset,blocked\n", file);
    for (size_t i = 0; i < record->n_rows; i++) {
        const struct row *row = &record->rows[i];
        const uint64_t numbers[] = {
            row->arrived_ns, row->read_ns, row->due_ns, row->first_ns, row->first_written_ns,
            row->last_ns, row->last_written_ns, row->done_ns, row->late_max_ns, row->late_sum_ns,
            row->token_offset,
        };
        fprintf(file, "%" PRId64 ",%zu,%u,%s,%s,%d,%d,%d", row->seq, i, row->connection,
                row->is_chat ? "chat" : "completions", row->outcome, row->asked_tokens,
                row->sent_tokens, row->prompt_tokens);
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
            fprintf(file, ",%" PRIu64, numbers[k]);
        fprintf(file, ",%d\n", row->blocked);
    }
    return !ferror(file);
}

static bool write_tokens(const struct record *record, FILE *file) {
    return fwrite(record->tokens, sizeof *record->tokens, record->n_tokens, file) ==
           record->n_tokens;
}

static bool write_file(const struct record *record, const char *path,
                       bool (*write)(const struct record *, FILE *)) {
    if (path == NULL) return true;
    FILE *file = fopen(path, "w");
    bool is_written = file != NULL && write(record, file);
    if (file != NULL && fclose(file) != 0) is_written = false;
    if (!is_written) perror(path);
    return is_written;
}

bool record_write(const struct record *record) {
    bool rows = write_file(record, record->options->log_path, write_rows);
    bool tokens = write_file(record, record->options->token_log_path, write_tokens);
    tell(record);
    return rows && tokens;
}
