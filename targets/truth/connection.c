#include "connection.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_BYTES 65536
#define NEVER UINT64_MAX

static struct row *row_of(struct server *server, struct connection *connection) {
    return record_row(server->record, connection->reply.row);
}

struct connection *connection_open(struct server *server, int fd, uint32_t number) {
    struct connection *connection = resized(NULL, sizeof *connection);
    *connection = (struct connection){.fd = fd, .number = number};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    epoll_ctl(server->epoll, EPOLL_CTL_ADD, fd, &event);
    return connection;
}

static void want_output(struct server *server, struct connection *connection, bool wanted) {
    if (connection->wants_output == wanted) return;
    connection->wants_output = wanted;
    struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0),
                                .data.ptr = connection};
    epoll_ctl(server->epoll, EPOLL_CTL_MOD, connection->fd, &event);
}

/* The length of the next write: everything, or a seeded 1 … split_bytes. */
static size_t piece_length(const struct options *options, struct connection *connection) {
    size_t whole = buffer_length(&connection->out);
    if (options->split_bytes == 0) return whole;
    uint64_t seed = options->seed + ((uint64_t)connection->number << 32);
    size_t piece = 1 + (size_t)(chance(seed, connection->n_pieces++) * options->split_bytes);
    return piece < whole ? piece : whole;
}

/* Note when the last byte of the first and of the last token was handed over. */
static void stamp(struct server *server, struct connection *connection) {
    struct reply *reply = &connection->reply;
    bool is_first = reply->first_mark && connection->n_sent_bytes >= reply->first_mark;
    bool is_last = reply->last_mark && connection->n_sent_bytes >= reply->last_mark;
    if (!is_first && !is_last) return;
    uint64_t at_ns = now_ns();
    if (is_first) {
        row_of(server, connection)->first_written_ns = at_ns;
        reply->first_mark = 0;
    }
    if (is_last) {
        row_of(server, connection)->last_written_ns = at_ns;
        reply->last_mark = 0;
    }
}

void connection_flush(struct server *server, struct connection *connection) {
    const struct options *options = server->options;
    struct buffer *out = &connection->out;
    while (buffer_length(out) > 0 && !connection->is_over && connection->piece_due_ns == 0) {
        ssize_t n = write(connection->fd, out->data + out->start, piece_length(options, connection));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (connection->reply.stage != STAGE_IDLE) row_of(server, connection)->blocked++;
            want_output(server, connection, true);
            return;
        }
        if (n < 0) {
            connection->is_over = true;
            return;
        }
        connection->n_sent_bytes += (uint64_t)n;
        buffer_consume(out, (size_t)n);
        stamp(server, connection);
        if (options->split_gap_ns && options->split_bytes && buffer_length(out) > 0)
            connection->piece_due_ns = now_ns() + options->split_gap_ns;
    }
    want_output(server, connection, false);
}

bool connection_read(struct connection *connection) {
    char *room = buffer_reserve(&connection->in, READ_BYTES);
    ssize_t n = read(connection->fd, room, READ_BYTES);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return false;
    if (buffer_length(&connection->in) == 0) connection->arrived_ns = now_ns();
    connection->in.end += (size_t)n;
    return true;
}

static void close_and_free(struct server *server, struct connection *connection) {
    if (connection->reply.stage != STAGE_IDLE) {
        struct row *row = row_of(server, connection);
        row->done_ns = now_ns();
        if (connection->reply.failure == NULL) strcpy(row->outcome, "aborted");
    }
    if (connection->is_reset) {
        struct linger now = {.l_onoff = 1, .l_linger = 0};
        setsockopt(connection->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    }
    queue_remove(&server->queue, connection);
    close(connection->fd); /* which takes it out of epoll, too */
    buffer_free(&connection->in);
    buffer_free(&connection->out);
    free(connection);
}

static uint64_t next_deadline(const struct server *server, const struct connection *connection) {
    const struct reply *reply = &connection->reply;
    bool has_deadline = reply->stage == STAGE_TOKENS || reply->stage == STAGE_TAIL ||
                        reply->stage == STAGE_WHOLE;
    /* As fast as the client reads: nothing new before it has taken what there is. */
    bool is_held = server->options->itl_ns == 0 && buffer_length(&connection->out) > 0;
    uint64_t due_ns = has_deadline && !is_held ? reply->due_ns : NEVER;
    if (connection->piece_due_ns && connection->piece_due_ns < due_ns)
        due_ns = connection->piece_due_ns;
    return due_ns;
}

void connection_settle(struct server *server, struct connection *connection) {
    if (connection->is_over) {
        close_and_free(server, connection);
        return;
    }
    connection->due_ns = next_deadline(server, connection);
    if (connection->due_ns == NEVER) queue_remove(&server->queue, connection);
    else queue_update(&server->queue, connection);
}
